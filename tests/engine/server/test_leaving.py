"""Clients that leave: in every way, at every moment, whatever they sent ahead."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import statistics
import struct
import time

import httpx
import pytest

from rooflax import AsyncLLM
from rooflax.models.presets import CHAT_NAME
from tests.support.server.live import Live, serving, wait_for

pytestmark = pytest.mark.oldest_jax


def asked(body: dict, path: str = "/v1/completions") -> bytes:
    """A request as it is sent, on a connection that stays open."""
    found = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(found)}\r\n\r\n".encode() + found


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


WAYS = {
    "closed": socket.socket.close,
    "half-closed": lambda connection: connection.shutdown(socket.SHUT_WR),
    "reset": reset,
}
SECOND = asked({"prompt": "y", "max_tokens": 1})
AHEAD = {
    "nothing": b"",
    "one": SECOND,
    "many": SECOND * 50,
    "part": SECOND[:20],
    "large": asked({"prompt": "y" * 3_000_000}),
}


SLOTS = 8
ROUTES = {
    "/v1/completions": {"prompt": "def f("},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Who are you?"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "Who are you?"}]},
    "/v1/responses": {"input": "Who are you?"},
}


def numbers(live: Live) -> dict[str, float]:
    """What runs, waits and is held, as /metrics says."""
    found = {}
    for line in live.http.get("/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting{")) or (
            name.startswith("rooflax:kv_blocks") and 'state="used"' in name
        ):
            found[name] = float(value)
    assert len(found) >= 3
    return found


def test_a_hundred_clients_leave_nothing_behind_and_a_stranger_does_not_notice(caplog):
    """Each at a moment of its own: before its answer, within it, in the queue, while its grammar
    compiles, while its body is sent."""
    ways, aheads, routes = list(WAYS), list(AHEAD), list(ROUTES)

    def load(_):
        return AsyncLLM(CHAT_NAME, max_num_seqs=SLOTS)

    def ask() -> float:
        started = time.perf_counter()
        body = ROUTES["/v1/chat/completions"] | {"max_tokens": 20, "temperature": 0}
        answer = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return time.perf_counter() - started

    def come(number: int) -> socket.socket:
        route = routes[number % 4]
        most = "max_output_tokens" if route == "/v1/responses" else "max_tokens"
        body = ROUTES[route] | {"stream": number % 3 == 0, most: longest}
        if "completions" in route:
            body |= {"ignore_eos": True}
        if number % 20 == 1:
            schema = {"type": "string", "pattern": f"[a-z]{{900}}{number}"}
            body |= {"response_format": {"type": "json_schema", "json_schema":
                     {"name": "a", "schema": schema}}}  # fmt: skip
        sent = asked(body, route)
        connection = socket.create_connection(("127.0.0.1", live.port))
        is_cut = number % 25 == 3
        connection.sendall(sent[:-5] if is_cut else sent)
        with contextlib.suppress(OSError):
            connection.sendall(b"" if is_cut else AHEAD[aheads[number // 3 % len(aheads)]])
        return connection

    def generated() -> int:
        return live.service.ready().metrics()["num_generated_tokens"]

    with serving(load) as live, caplog.at_level(logging.INFO, logger="rooflax.server"):
        longest = live.service.ready().llm.max_model_len - 200
        usual = statistics.median(ask() for _ in range(5))
        before, times = numbers(live), []
        assert set(before.values()) == {0.0}
        for wave in range(10):
            connections = [come(10 * wave + number) for number in range(10)]
            time.sleep(0.02 * wave)
            for number, connection in enumerate(connections):
                with contextlib.suppress(OSError):
                    WAYS[ways[(wave + number) % 3]](connection)
            times.append(ask())
            for connection in connections:
                connection.close()
        computed = generated()
        wait_for(lambda: live.service.open == 0 and numbers(live) == before)
        assert generated() - computed < longest  # however slow this machine is
        assert statistics.median(times) < 3 * usual + 0.1, (usual, times)
    assert not [r for r in caplog.records if r.exc_info or r.levelno >= logging.ERROR]
    said = [json.loads(r.getMessage()) for r in caplog.records if r.name == "rooflax.server"]
    statuses = [line["status"] for line in said if line["method"] == "POST"]
    assert statuses.count(499) > 80 and set(statuses) <= {200, 499}
