"""Patterns for names of modules: published ones compile, hostile ones are rejected unrun."""

import time

import pytest

from rooflax.errors import CheckpointError
from rooflax.loading.patterns import LONGEST, module_pattern

NAME = "model.layers.31.mlp.experts.127.gate_up_proj" * 2


@pytest.mark.parametrize(
    "text",
    [
        r".*lm_head",
        r".*self_attn\.(q|k|v|o)_proj$",
        r"model\.layers\.[0-9]+\.mlp\.(gate|up|gate_up|down)_proj.*",
        r".*\.(experts\.[0-9]+)\.(gate|up|down)_proj$",
        r"^(?!.*(?:lm_head|router)).*$",
        r"(?P<part>model|vision)\.(?:layers|blocks)\.\d{1,3}\..*",
        r"(.*\.)?(layers\.0\.self_attn\.q_proj)$",
        r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:k_proj|v_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.)$",
        r"(?i)MODEL\.[]a-z*+()|^\]]+?\+\(\*",
        r"a{3}(?:bc){2}",
    ],
)
def test_published_kinds_of_patterns_are_compiled(text):
    assert module_pattern(text, "config.json").pattern == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("(a+)+$", "repeats a group"),
        ("(?:a*)*$", "repeats a group"),
        ("(?:a|a)+$", "repeats a group"),
        ("(?:a|ab){20}$", "repeats a group"),
        ("((?:a+)b?)*$", "repeats a group"),
        ("(?:[a-z]{2,})+$", "repeats a group"),
        (".*.*.*.*.*.*x", "repeats more than"),
        ("a?" * 30 + "a" * 30, "optional"),
        ("(?:a?){30}$", "repeats a group"),
        (r"(a)(.*)\1", "refers back"),
        ("a" * (LONGEST + 1), "characters"),
        ("re:[", "regular expression"),
        ("(" * 200 + ")" * 199, "regular expression"),
        ("a{99999999999}", "regular expression"),
    ],
)
def test_patterns_that_may_never_end_are_rejected(text, why):
    with pytest.raises(CheckpointError, match=f"config.json has .*{why}"):
        module_pattern(text, "config.json")


@pytest.mark.parametrize(
    "text", ["[a-z._0-9]*" * 4 + "!", r"(?!.*\d+!).*.*!", "(?:m?o?d?e?l?.?).*?.*?[a-z.]*!"]
)
def test_what_is_accepted_ends(text):
    started = time.perf_counter()
    assert module_pattern(text, "config.json").match(NAME) is None
    assert time.perf_counter() - started < 5
