"""Longer tests beside those of tests/engine/models/test_config_defaults.py."""

import pytest

from rooflax.models.registry import read_config
from tests import goldens
from tests.engine.models.test_config_defaults import (
    changes,
    check_logits,
    read_as_here,
    read_as_transformers,
)

pytestmark = pytest.mark.skipif(
    not goldens.HAVE_TORCH, reason="asks transformers, which is not installed"
)


@pytest.mark.parametrize("variant", goldens.VARIANTS)
def test_a_null_that_transformers_keeps_means_what_its_model_computes(
    variant, tmp_path, monkeypatch
):
    raw = goldens.VARIANTS[variant]
    for key, how, other in changes(raw):
        ours, theirs = read_as_here(other), read_as_transformers(other)
        if not ours or not theirs or theirs.get(key, 0) is not None or ours == read_config(raw):
            continue
        monkeypatch.setitem(goldens.VARIANTS, variant, other)
        try:
            check_logits(variant, other, tmp_path / f"{key}-{how}", f"{key} {how}")
        except (TypeError, UnboundLocalError):  # transformers computes with the null
            continue
