"""Conversations as clients store them, before a template sees them."""

import pytest

from rooflax.errors import RequestError
from rooflax.loading.messages import repaired

CALLED = {"name": "f", "arguments": "{}"}


def test_results_belong_to_the_last_call_of_their_function():
    """Whatever ids the client gave to its own calls."""
    older = [
        {"role": "assistant", "tool_calls": [{"id": "call_1", "function": CALLED}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "1"},
        {"role": "assistant", "function_call": CALLED},
        {"role": "function", "name": "f", "content": "2"},
    ]
    first, _, second, result = repaired(older, None)
    assert first["tool_calls"][0]["id"] != second["tool_calls"][0]["id"]
    assert result["role"] == "tool"
    assert result["tool_call_id"] == second["tool_calls"][0]["id"]


@pytest.mark.parametrize("name", [["f"], {"f": 1}, None, 3])
def test_names_of_any_kind_end_in_a_sentence_or_are_the_templates_matter(name):
    messages = [
        {"role": "assistant", "function_call": {"name": name}},
        {"role": "function", "name": name, "content": "x"},
    ]
    (call,) = repaired(messages, None)[0]["tool_calls"]
    assert call["function"]["arguments"] == {}


def test_both_kinds_of_calls_are_rejected():
    both = {"role": "assistant", "function_call": CALLED, "tool_calls": [{"function": CALLED}]}
    with pytest.raises(RequestError, match=r"messages\[0\] has function_call and tool_calls"):
        repaired([both], None)


def test_an_id_that_is_no_text_is_rejected():
    with pytest.raises(RequestError, match=r"tool_calls\[0\].id is \['x'\]"):
        repaired([{"role": "assistant", "tool_calls": [{"id": ["x"]}]}], None)


def test_roles_that_nobody_knows_and_parts_that_are_no_text_are_named():
    messages = [{"role": "user", "content": "x"}, {"role": "bot", "content": "y"}]
    with pytest.raises(RequestError, match=r"messages\[1\]\.role is 'bot'; it must be one of sys"):
        repaired(messages, "{{ messages }}")
    template = "{% for m in messages %}{% if m.role == 'bot' %}{{ m }}{% endif %}{% endfor %}"
    assert repaired(messages, template)[1]["role"] == "bot"
    for role in ("", "b", "o", "message", "for"):  # texts within others
        with pytest.raises(RequestError, match="it must be one of sys"):
            repaired([{"role": role, "content": "y"}], template)
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert repaired([{"role": "user", "content": parts}], None)[0]["content"] == "a b"
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, "x"):
        with pytest.raises(RequestError, match=r"messages\[0\]\.content\[0\] is .* text only"):
            repaired([{"role": "user", "content": [part]}], None)
