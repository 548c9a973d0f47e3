"""Longer tests beside those of tests/engine/product/test_compile_cache.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.product import test_compile_cache as beside
from tests.engine.product.test_compile_cache import run, tokens_of
from tests.support.product.snippets import ROOT

cache = beside.cache


@pytest.mark.parametrize(
    "env", [{"JAXLIB": "0.0.1"}, {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}]
)
def test_c13_another_jaxlib_or_flag_compiles_again(cache: Path, env: dict[str, str]) -> None:
    assert run(ROOT / "src", cache, **env)["compilations"] >= 1


def test_c13_killed_at_every_write_it_compiles_again(cache: Path, tmp_path: Path) -> None:
    for number in range(1, 100):
        folder = tmp_path / str(number)
        if run(ROOT / "src", folder, number):
            break
        found = run(ROOT / "src", folder)
        assert found["tokens"] == tokens_of(cache)
        assert run(ROOT / "src", folder)["compilations"] == 0
    assert number > 3


def test_c13_a_full_disk_keeps_nothing(cache: Path, tmp_path: Path) -> None:
    found = run(ROOT / "src", tmp_path, MOST_BYTES="1000")
    assert found["tokens"] == tokens_of(cache) and found["compilations"] >= 1
    assert "compilation cache" in found["said"]


def test_c13_a_folder_that_cannot_be_is_done_without(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    found = run(ROOT / "src", tmp_path / "file")
    assert found["tokens"] == tokens_of(cache) and found["compilations"] >= 1
