"""docs/api.md is what signatures and docstrings say, and names everything that is public."""

import importlib.util

import pytest

import rooflax
from tests.product.snippets import ROOT

pytestmark = pytest.mark.unit

SPEC = importlib.util.spec_from_file_location("api_docs", ROOT / "tools" / "api_docs.py")
api_docs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(api_docs)


def test_the_page_equals_the_docstrings():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert text == api_docs.page(), "run: python tools/api_docs.py > docs/api.md"


def test_every_public_name_is_on_it():
    assert sorted(n for names in api_docs.GROUPS.values() for n in names) == sorted(rooflax.__all__)
