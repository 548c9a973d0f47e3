"""Longer tests beside those of tests/engine/product/test_embedded.py."""

from __future__ import annotations

import re

from rooflax.loading.model_info import embedded_folder
from tests.engine.product.test_embedded import cli
from tests.support.product.snippets import ROOT


# 24 s of processor time
def test_perplexity_is_what_the_card_says() -> None:
    card = (embedded_folder() / "README.md").read_text(encoding="utf-8")
    said = re.search(r"\| perplexity \| ([\d.]+) on .*\(([\d.]+) bits per byte\)", card)
    assert said is not None
    found = cli("perplexity", "-f", str(ROOT / "tests/data/python_held_out.txt"))
    assert f"{found['perplexity']:.3f}" == said.group(1)
    assert f"{found['bits_per_byte']:.4f}" == said.group(2)
