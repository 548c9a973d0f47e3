"""Servers that tests of this folder share: one of a scripted engine per module."""

from __future__ import annotations

import pytest

from rooflax import LLM, AsyncLLM
from rooflax.models.presets import CHAT_NAME
from tests.support.server.live import ScriptedLLM, serving


@pytest.fixture(scope="session")
def llm():
    """For its tokenizer and template; its engine is never run."""
    return LLM(CHAT_NAME)


@pytest.fixture(scope="module")
def scripted(llm):
    return ScriptedLLM(llm)


@pytest.fixture(scope="module")
def live(scripted):
    with serving(lambda _: scripted) as server:
        yield server


@pytest.fixture(scope="module")
def served():
    """A server of a real engine with the embedded chat model."""
    with serving(lambda _: AsyncLLM(CHAT_NAME, max_num_seqs=4)) as server:
        yield server


@pytest.fixture(scope="module")
def strict(served):
    """Rejects any answer that is not what OpenAI's own types say."""
    import openai  # slow, and few modules need it

    given = {"base_url": f"{served.url}/v1", "api_key": "any", "max_retries": 0}
    with openai.OpenAI(**given, _strict_response_validation=True) as found:
        yield found


@pytest.fixture(scope="module")
def alone():
    """The same model without a server."""
    return LLM(CHAT_NAME)


FRESH = "fresh"
"""Id of the request behind each test, whose line in the log comes while the next one runs."""


@pytest.fixture(autouse=True)
def _fresh(request):
    """Each test begins with the plain script, and leaves the server as it was."""
    if "live" not in request.fixturenames:
        yield
        return
    scripted, live = request.getfixturevalue("scripted"), request.getfixturevalue("live")
    scripted.script, scripted.pause_s, scripted.error = scripted.says("Hello, world."), 0.0, None
    scripted.asked.clear()
    scripted.is_merged = False
    yield
    live.settle()
    assert scripted.num_open == 0
    assert live.http.get("/health").status_code == 200
    scripted.script, scripted.pause_s, scripted.error = scripted.says("Hello, world."), 0.0, None
    found = live.post("/v1/completions", {"prompt": "x"}, headers={"x-request-id": FRESH})
    assert found.json()["choices"][0]["text"] == "Hello, world."
