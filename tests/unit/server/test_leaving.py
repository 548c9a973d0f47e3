"""Those of tests/engine/server/test_leaving.py that compile nothing."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time

import pytest

from tests.engine.server.test_leaving import AHEAD, WAYS, asked
from tests.support.server.fixtures import FRESH
from tests.support.server.live import wait_for

NEVER_S = 1e6


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("is_together", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_leaves_ends_its_request(
    live, scripted, caplog, stream, ahead, is_together, way
):
    scripted.script, scripted.pause_s = (lambda prompt, params, index: [65]), 0.01
    body = {"prompt": "x", "max_tokens": 400, "stream": stream}
    cut, left = scripted.num_cut, live.service.cancelled["disconnect"]

    def said() -> list[dict]:
        lines = [r.getMessage() for r in caplog.records if r.name == "rooflax.server"]
        return [line for line in map(json.loads, lines) if line["id"] != FRESH]

    with (
        caplog.at_level(logging.INFO, logger="rooflax.server"),
        socket.create_connection(("127.0.0.1", live.port), timeout=20) as connection,
    ):
        connection.sendall(asked(body) + (AHEAD[ahead][:4096] if is_together else b""))
        wait_for(lambda: scripted.num_open == 1)
        if stream:
            connection.recv(100)
        with contextlib.suppress(OSError):  # it may be cut off: too much is ahead
            connection.settimeout(0.2)
            connection.sendall(AHEAD[ahead][4096 if is_together else 0 :])
            time.sleep(0.05)
            WAYS[way](connection)
        # However long that takes here: an answer that came to its end is not cut. The line in the
        # log comes last, and is none once the level is back.
        wait_for(lambda: scripted.num_open == 0 and live.service.open == 0 and bool(said()))
    assert live.service.cancelled["disconnect"] == left + 1
    assert scripted.num_cut == cut + 1
    assert not [r for r in caplog.records if r.exc_info or r.levelno >= logging.ERROR]
    assert [line["status"] for line in said()] == [499]
    assert len(scripted.asked) == 1  # what was sent ahead is not begun


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ahead", ["nothing", "one"])
def test_a_client_that_leaves_and_reads_nothing_ends_its_request(
    live, scripted, monkeypatch, way, ahead
):
    """Because it leaves: nothing else ends an answer that nobody reads."""
    monkeypatch.setattr("rooflax.server.wire.READ_S", NEVER_S)
    monkeypatch.setattr("rooflax.server.answers.WRITE_S", NEVER_S)
    scripted.script = lambda prompt, params, index: [65]
    body = {"prompt": ["x"] * 4, "max_tokens": 400, "stream": True, "n": 16, "logprobs": 20}
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", live.port))
        connection.sendall(asked(body) + AHEAD[ahead])
        mine = connection.getsockname()
        wait_for(lambda: any(
            each.client == mine and each.flow.write_paused
            for each in live.runner._server.server_state.connections
        ))  # fmt: skip
        assert scripted.num_open > 0
        WAYS[way](connection)
        wait_for(lambda: scripted.num_open == 0 and live.service.open == 0)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_what_is_sent_ahead_is_answered_in_turn(live, scripted, monkeypatch, size):
    """Whatever packets it comes in, also where a head begins long before its turn."""
    monkeypatch.setattr("rooflax.server.wire.HEADER_S", 0.5)
    scripted.pause_s = 0.06
    wanted = ["a", "b", "c"]
    sent = asked({"prompt": "a", "max_tokens": 12})
    rest = b"".join(asked({"prompt": name, "max_tokens": 2, "echo": True}) for name in "bc")
    with socket.create_connection(("127.0.0.1", live.port), timeout=20) as connection:
        connection.sendall(sent + rest[:20])
        wait_for(lambda: scripted.num_open == 1)
        for begin in range(20, len(rest), size):
            connection.sendall(rest[begin : begin + size])
        found = b""
        while found.count(b'"finish_reason"') < len(wanted):
            found += connection.recv(65536)
    assert found.count(b"HTTP/1.1 200") == len(wanted)
    texts = [json.loads(part.partition(b"\r\n\r\n")[2])["choices"][0]["text"][0]
             for part in found.split(b"HTTP/1.1 200")[1:]]  # fmt: skip
    assert texts == ["H", "b", "c"]  # the first is not echoed
