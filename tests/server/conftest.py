"""Servers that tests of this folder share: one of a scripted engine per module."""

from __future__ import annotations

import pytest

from rooflax import LLM
from rooflax.models.presets import CHAT_NAME
from tests.server.live import ScriptedLLM, serving


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
    found = live.post("/v1/completions", {"prompt": "x"})
    assert found.json()["choices"][0]["text"] == "Hello, world."
