"""A setting goes from `LLM` to its use without coming back: tools/trace_setting.py."""

import pytest

from tools import trace_setting

pytestmark = pytest.mark.oldest_jax


@pytest.mark.parametrize("setting", ["quantize", "max_model_len"])
def test_a_setting_returns_to_at_most_two_modules(setting):
    found = trace_setting.calls(setting)
    assert [module for module, _ in found[:2]] == ["rooflax.llm", "rooflax.loading.plan"]
    assert len(trace_setting.stays(found)) > 2
    assert trace_setting.returns(found) <= 2
