"""The public list is exact, and importing the package is cheap."""

from __future__ import annotations

import subprocess
import sys

import rooflax


def test_all_is_exact_and_resolves() -> None:
    assert sorted(rooflax.__all__) == sorted(rooflax._HOME)
    for name in rooflax.__all__:
        assert getattr(rooflax, name).__name__ == name


def test_import_brings_no_jax() -> None:
    code = "import sys, rooflax; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(rooflax, "nonsense")


def test_version_is_in_the_changelog_or_unreleased() -> None:
    from tests.support.product.snippets import ROOT

    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## Unreleased" in text or f"## {rooflax.__version__}" in text
