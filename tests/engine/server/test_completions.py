"""/v1/completions, streamed and whole: an echo alone, ids of tokens without text, bans that leave
nothing."""

from __future__ import annotations

import pytest

from tests.engine.server.test_apis import events_of

pytestmark = pytest.mark.oldest_jax

PATH = "/v1/completions"


def both(served, **body):
    """The choice of the whole answer, and those of the streamed one."""
    whole = served.post(PATH, body)
    assert whole.status_code == 200, whole.text
    streamed = events_of(served.post(PATH, body | {"stream": True}))
    assert not [chunk for chunk in streamed if "error" in chunk]
    choices = [choice for chunk in streamed for choice in chunk["choices"]]
    return whole.json()["choices"][0], choices


@pytest.mark.parametrize("logprobs", [0, 2])
def test_an_echo_alone_is_streamed_with_its_log_probabilities(served, logprobs):
    whole, choices = both(served, prompt="def f(x)", max_tokens=0, echo=True, logprobs=logprobs)
    assert "".join(choice["text"] for choice in choices) == whole["text"] == "def f(x)"
    pieces = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    for name, wanted in whole["logprobs"].items():
        assert [one for piece in pieces for one in piece[name]] == wanted
    assert choices[-1]["finish_reason"] == whole["finish_reason"] == "length"


def test_ids_of_tokens_without_text_are_streamed_too(served):
    whole, choices = both(
        served, prompt="x", max_tokens=40, temperature=0, ignore_eos=True, return_token_ids=True
    )
    assert len(whole["token_ids"]) == 40
    assert [token for choice in choices for token in choice["token_ids"]] == whole["token_ids"]


def test_bans_that_leave_no_token_are_the_requests_fault(served):
    body = {"allowed_token_ids": [100], "response_format": {"type": "json_object"}}
    found = served.post(PATH, {"prompt": "x", "max_tokens": 5, **body})
    assert found.status_code == 400, found.text
    assert found.json()["error"]["message"].startswith("No token was left to choose")
