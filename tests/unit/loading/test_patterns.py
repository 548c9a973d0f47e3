"""Patterns for names of modules: published ones match as by `re`, hostile ones end."""

import re
import time

import pytest

from rooflax.errors import CheckpointError
from rooflax.loading.patterns import LONGEST, module_pattern

NAMES = (
    "lm_head", "model.layers.3.self_attn.q_proj", "model.layers.31.mlp.gate_up_proj",
    "model.layers.0.mlp.experts.127.down_proj", "vision.blocks.2.x", "layers.0.self_attn.q_proj",
    "model.layers.12.", "language.h.attention.v_proj", "ab",
)  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        r".*lm_head",
        r".*self_attn\.(q|k|v|o)_proj$",
        r"model\.layers\.[0-9]+\.mlp\.(gate|up|gate_up|down)_proj.*",
        r".*\.(experts\.[0-9]+)\.(gate|up|down)_proj$",
        r"(?P<part>model|vision)\.(?:layers|blocks)\.\d{1,3}\..*",
        r"(.*\.)?(layers\.0\.self_attn\.q_proj)$",
        r"(?:.*?(?:text|language).*?(?:mlp|attention).*?(?:k|v)_proj.*?)|(?:\bmodel\.layers\.[\d]{1,}\.)$",
        r"(?i)MODEL\.layers.*",
        r"a{1}(?:b){1,2}",
    ],
)
def test_published_kinds_match_as_by_re(text):
    pattern, python = module_pattern(text, "config.json"), re.compile(text)
    for name in NAMES:
        assert bool(pattern.match(name)) == bool(python.match(name))
        assert bool(pattern.fullmatch(name)) == bool(python.fullmatch(name))


@pytest.mark.parametrize(
    "text",
    [
        "re:[",
        "(" * 200 + ")" * 199,
        r"(a)\1",
        "^(?!.*router).*$",
        "(?x)(a+) +Q",
        "((a{100}){100}){9}",
        "\ud800",
        "a" * (LONGEST + 1),
    ],
)
def test_what_re2_does_not_know_is_rejected(text):
    with pytest.raises(CheckpointError, match="^config.json has .*pattern"):
        module_pattern(text, "config.json")


@pytest.mark.parametrize(
    "text",
    [
        "(a+)+b",
        "(?:a|a)*b",
        "(?:.|.)" * 40 + "Q",
        "a?" * 60 + "a" * 60,
        "(.+)(?:#)+Q",
        ".*" * 40 + "Q",
    ],
)
def test_patterns_that_backtrack_end(text):
    started = time.perf_counter()
    for _ in range(100):
        assert not module_pattern(text, "config.json").fullmatch("a" * 300)
    assert time.perf_counter() - started < 5
