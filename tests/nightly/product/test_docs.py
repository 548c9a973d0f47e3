"""Longer tests beside those of tests/engine/product/test_docs.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import goldens
from tests.engine.product import test_docs as beside
from tests.engine.product.test_docs import WITH_LONG, run_commands
from tests.support.product.snippets import commands

workplace = beside.workplace


@pytest.mark.parametrize("page", WITH_LONG)
def test_long_shell_commands_run(page: str, rooflax: Any, workplace: Path) -> None:
    if not goldens.HAVE_TORCH and any(c.words[1] == "verify" for c in commands(page)):
        pytest.skip("verify compares with transformers, which is not installed")
    assert run_commands(page, rooflax, workplace) > 0
