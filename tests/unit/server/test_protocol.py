"""HTTP itself: what is no request, limits, hosts, keys, origins, overload, and clients that leave.

Rows of the catalogue of faults are named: H of HTTP, A of access, C of concurrency.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import logging
import random
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from rooflax import LLM, EngineError, RequestError
from rooflax.engine.thread import Health
from rooflax.nn.host_memory import anonymous_bytes
from rooflax.server import answers, wire
from rooflax.server.errors import ApiError
from rooflax.server.service import MAX_WAITING_CONTEXTS
from rooflax.server.settings import Settings, host_is_allowed, host_name
from tests.support.server.live import ScriptedLLM, serving, wait_for

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
JSON = {"content-type": "application/json"}
LONG = {"messages": [{"role": "user", "content": "x " * 5000}]}
ANSWERED = {"type": "function_call_output", "call_id": "a", "output": "b"}
EMPTY = {
    "type": "json_schema", "name": "x", "schema": {"type": "number", "minimum": 3, "maximum": 1},
}  # fmt: skip


def raw(live, data: bytes, *, pause_s: float = 0.0) -> bytes:
    """What comes back for bytes as they are."""
    with socket.create_connection(("127.0.0.1", live.port), timeout=20) as connection:
        connection.sendall(data)
        time.sleep(pause_s)
        found = b""
        while True:
            try:
                piece = connection.recv(65536)
            except ConnectionResetError:
                return found
            if not piece:
                return found
            found += piece


def request(method: str, path: str, *headers: str, body: bytes = b"") -> bytes:
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body


def error_of(answer: httpx.Response) -> dict:
    found = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert found["message"].endswith((".", "?"))
    return found


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "//v1/models", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", 404),
        ("POST", "/v1/images/generations", 501),
        ("OPTIONS", "/v1/models", 405),
    ],
)
def test_h1_h13_routes(live, method, path, status):
    url = f"{live.url}{path}"
    answer = live.http.build_request(method, url)
    answer.url = httpx.URL(url).copy_with(raw_path=path.encode())
    found = live.http.send(answer)
    assert found.status_code == status
    assert error_of(found)
    assert found.headers["x-request-id"].startswith("req_")
    if status == 405:
        assert found.headers["allow"]


def test_h13_a_path_is_what_it_says(live):
    for path in ("/v1/../health", "/%2e%2e/health", "/v1/models;x", "@google.com"):
        said = raw(live, request("GET", path))
        assert said.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400")), path


def slow_machine_s():
    """Five times what json.loads takes for as large a body: 0.5 s, and above 1 s on a slow or busy
    machine."""
    body = json.dumps(dict.fromkeys(map(str, range(250_000)), 1))
    started = time.process_time()
    json.loads(body)
    return 5 * (time.process_time() - started)


def rejected(live, body, *codes):
    """The parameter that a body is rejected for, within a second of this process's work; others of
    its threads may work, too, so it has three tries."""
    for _ in range(3):
        started = time.process_time()
        found = live.http.post("/v1/chat/completions", content=body, headers=JSON)
        spent_s = time.process_time() - started
        if spent_s < 1:
            break
    assert spent_s < 1 or spent_s < slow_machine_s()
    assert found.status_code == 400, found.text
    error = error_of(found)
    assert not codes or error["code"] in codes, error
    return error["param"]


@pytest.mark.parametrize("body", [b"{", b"", b'"str"', b"[1]", b"42", b"null", b"{]", b'{"a": "'])
def test_h2_bodies_that_are_no_object(live, body):
    assert rejected(live, body) is None


@pytest.mark.parametrize(
    "body",
    [
        b"\xff\xfe{}", '{"a": "é"}'.encode("utf-16"), '{"a": "é"}'.encode("utf-32"),
        b"\xef\xbb\xbf{}", b'{"a": "\xff"}', b'{"a": "\xc3"}', b'{"a": "\xed\xa0\x80"}',
        rb'{"messages": "\ud800"}', rb'{"\udc00": 1}', rb'{"a": ["\ude00\ud83d"]}',
    ],
)  # fmt: skip
def test_h3_bodies_that_are_no_text(live, body):
    assert rejected(live, body, "invalid_json") is None


def test_h3_a_pair_of_surrogates_is_a_character(live):
    body = rb'{"prompt": "\ud83d\ude00", "echo": true, "stream": true}'
    found = live.http.post("/v1/completions", content=body, headers=JSON).content
    events = [json.loads(line[6:]) for line in found.decode().split("\n\n")[:-2]]
    assert events[0]["choices"][0]["text"] == "😀"


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": 1, "a": 2}', b'{"a": {"b": [{"c": 1, "d": 2, "c": 3}]}}', b'{"a": 1, "\\u0061": 2}',
        b'{"a": NaN}', b'{"a": Infinity}', b'{"a": [-Infinity]}', b'{"a": 1e999}', b'{"a": -1e999}',
        b'{"a": ' + b"1" * 400 + b"}", b'{"a": -' + b"9" * 1_000_000 + b"}",
        b"{" + b"".join(b'"%d":1,' % i for i in range(250_000)) + b'"249999":1}',
    ],
    ids=lambda body: body[:30].decode(),
)  # fmt: skip
def test_h4_keys_twice_and_numbers_that_are_none(live, body):
    assert rejected(live, body, "invalid_json") is None


DEEP = b"[" * 60 + b"]" * 60
LARGE = {
    "brackets": b"[" * 100_000,
    "objects": b'{"a":' * 100 + b"1" + b"}" * 100,
    "many deep lists": b'{"messages": [' + b",".join([DEEP] * 30_000) + b"]}",
    "deep lists": b'{"messages": [' + b",".join([DEEP] * 1_600) + b"]}",
    "lists": b'{"messages": [' + b"[]," * 1_000_000 + b"[]]}",
    "quotes in a text without end": b'{"a": "' + b'\\"' * 1_500_000,
    "texts": b"{" + b'"",' * 1_000_000 + b"}",
    "keys": b"{" + b",".join(b'"%d":1' % i for i in range(100_000)) + b"}",
    "one long key": b'{"' + b"x" * 4_000_000 + b'": 1}',
}


@pytest.mark.parametrize("body", LARGE.values(), ids=LARGE)
def test_h5_large_bodies_cost_little(live, body):
    """Memory that a body leaves behind would grow every time; other threads of this process may
    take some once, so the smallest of three growths counts."""
    rejected(live, body)
    growths = []
    for _ in range(3):
        before = anonymous_bytes()
        for _ in range(2):
            rejected(live, body)
        after = anonymous_bytes()
        growths.append(0 if before is None or after is None else after - before)
    assert min(growths) < 64 * 2**20


def test_h5_a_million_keys_are_over_the_size(live):
    body = b"{" + b",".join(b'"%d":1' % i for i in range(1_000_000)) + b"}"
    started = time.process_time()
    found = live.http.post("/v1/chat/completions", content=body, headers=JSON)
    assert found.status_code == 413 and time.process_time() - started < 1


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_h5_names_of_unknown_fields_make_a_short_header(live, path):
    body = {"/v1/responses": {"input": "x"}}.get(path) or CHAT | {"max_tokens": 1}
    found = live.post(path, body | {f"field {i}": 1 for i in range(100_000)})
    assert found.status_code == 200
    ignored = found.headers["x-rooflax-ignored"]
    assert len(ignored) < 4000 and ignored.startswith("field 0, ") and ignored.endswith(", ...")


def test_h6_the_size_of_a_body(live):
    large = b'{"a": "' + b"x" * (4 * 2**20) + b'"}'
    found = live.http.post("/v1/chat/completions", content=large, headers=JSON)
    assert (found.status_code, error_of(found)["code"]) == (413, "request_too_large")

    def pieces():
        for _ in range(80):
            yield b"x" * 65536

    try:
        found = live.http.post("/v1/chat/completions", content=pieces(), headers=JSON)
        assert found.status_code == 413
    except (httpx.WriteError, httpx.ReadError):
        pass  # the connection was closed while the rest was being sent
    for length in ("-5", "abc"):
        said = raw(live, request("POST", "/v1/completions", f"Content-Length: {length}"))
        assert said.startswith(b"HTTP/1.1 400")


def test_h6_a_body_that_does_not_come(live, monkeypatch):
    monkeypatch.setattr("rooflax.server.app.BODY_S", 0.3)
    head = request(
        "POST", "/v1/completions", "Content-Length: 50", "Content-Type: application/json"
    )
    said = raw(live, head + b"{")
    assert said.startswith(b"HTTP/1.1 408")


def test_h7_urls_and_headers(live):
    assert raw(live, request("GET", "/" + "x" * 70_000)).startswith(b"HTTP/1.1 4")
    assert raw(live, request("GET", "/" + "x" * 9_000)).startswith(b"HTTP/1.1 414")
    many = [f"X-{i}: 1" for i in range(300)]
    assert raw(live, request("GET", "/health", *many)).startswith(b"HTTP/1.1 431")
    long = raw(live, request("GET", "/health", "X-Long: " + "x" * 200_000))
    assert long.startswith(b"HTTP/1.1 431") or long == b""
    body = json.loads(raw(live, request("GET", "/health", *many)).partition(b"\r\n\r\n")[2])
    assert body["error"]["type"] == "invalid_request_error"


def test_h8_h9_kinds_of_bodies(live):
    for kind in ("text/plain", "multipart/form-data; boundary=x", None):
        headers = {} if kind is None else {"content-type": kind}
        found = live.http.post("/v1/completions", content=b"{}", headers=headers)
        assert found.status_code == 415
    bomb = gzip.compress(b"0" * 2**20)
    headers = JSON | {"content-encoding": "gzip"}
    assert live.http.post("/v1/completions", content=bomb, headers=headers).status_code == 415


def test_h10_a_slow_head_is_closed(live, monkeypatch):
    monkeypatch.setattr(wire, "HEADER_S", 0.3)
    started = time.perf_counter()
    assert raw(live, b"GET /health HTTP/1.1\r\nHost: loc") == b""
    address = ("127.0.0.1", live.port)
    with socket.create_connection(address) as slow, contextlib.suppress(OSError):
        slow.sendall(b"GET /health HTTP/1.1\r\n")
        while time.perf_counter() - started < 5:  # byte by byte is not faster
            slow.sendall(b"X")
            assert live.post("/v1/completions", {"prompt": "x"}).status_code == 200
    assert time.perf_counter() - started < 5


def test_h10_a_reader_that_stops_is_cut_off_and_hurts_nobody(live, scripted, monkeypatch):
    monkeypatch.setattr(answers, "WRITE_S", 0.5)
    scripted.script = lambda prompt, params, index: [65]
    body = json.dumps({"prompt": "x", "max_tokens": 300, "stream": True, "n": 8, "logprobs": 20})
    head = request(
        "POST", "/v1/completions", *(f"{k}: {v}" for k, v in JSON.items()),
        f"Content-Length: {len(body)}",
    )  # fmt: skip
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect(("127.0.0.1", live.port))
    connection.sendall(head + body.encode())
    wait_for(lambda: len(scripted.asked) == 1)
    assert live.post("/v1/completions", {"prompt": "x"}).status_code == 200
    wait_for(lambda: scripted.num_open == 0)
    connection.close()


def test_h10_a_whole_answer_that_nobody_reads_is_cut_off(live, llm, monkeypatch):
    monkeypatch.setattr(wire, "READ_S", 0.3)
    texts = [llm.tokenizer.decode([token]) for token in range(1000)]
    longest = max(range(1000), key=lambda token: len(texts[token]))
    body = json.dumps({"tokens": [longest] * 700_000}).encode()
    size = 2 * 700_000 * len(texts[longest])
    asked = [*(f"{k}: {v}" for k, v in JSON.items()), f"Content-Length: {len(body)}"]
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", live.port))
        connection.sendall(request("POST", "/detokenize", *asked, body=body))
        assert connection.recv(12) == b"HTTP/1.1 200"
        time.sleep(1.5)
        with contextlib.suppress(ConnectionResetError):
            left = sum(len(piece) for piece in iter(lambda: connection.recv(65536), b""))
            assert left < size
    assert len(live.post("/detokenize", {"tokens": [65] * 9}).json()["prompt"]) == 9


def test_h10_a_slow_reader_gets_all_of_it(live, monkeypatch):
    monkeypatch.setattr(wire, "READ_S", 0.2)
    body = json.dumps({"tokens": [65] * 700_000}).encode()
    asked = [*(f"{k}: {v}" for k, v in JSON.items()), f"Content-Length: {len(body)}"]
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", live.port))
        connection.sendall(request("POST", "/detokenize", *asked, body=body))
        size, started = 0, time.monotonic()
        while piece := connection.recv(2**17):
            size += len(piece)
            if time.monotonic() - started < 1.5:  # several times as long as nothing may be read
                time.sleep(0.05)
    assert size > 1_400_000


def test_h11_continue_pipelines_and_old_clients(live):
    body = b'{"prompt": "x", "max_tokens": 1}'
    head = request(
        "POST", "/v1/completions", "Content-Type: application/json", "Expect: 100-continue",
        f"Content-Length: {len(body)}",
    )  # fmt: skip
    said = raw(live, head + body, pause_s=0.1)
    assert b"HTTP/1.1 100" in said or b"HTTP/1.1 200" in said
    two = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + request("GET", "/version")
    assert raw(live, two).count(b"HTTP/1.1 200") == 2
    assert b" 200 " in raw(live, b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")


def test_h11_garbage_behind_requests_is_rejected_behind_their_answers(live):
    body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
    length = f"Content-Length: {len(body)}"
    head = request("POST", "/v1/completions", "Content-Type: application/json", length)
    head = head.replace(b"Connection: close\r\n", b"")
    for behind in (b"garbage\r\n\r\n", b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n"):
        said = raw(live, (head + body) * 2 + behind)
        statuses = [each[:3] for each in said.split(b"HTTP/1.1 ")[1:]]
        assert statuses[:2] == [b"200", b"200"] and statuses[2][:1] == b"4" and len(statuses) == 3


@pytest.mark.parametrize("coding", ["gzip, chunked", "gzip", "identity"])
def test_h11_another_transfer_coding_is_not_read_as_chunked(live, coding):
    head = request("POST", "/v1/completions", "Content-Type: application/json",
                   f"Transfer-Encoding: {coding}")  # fmt: skip
    said = raw(live, head + b"0\r\n\r\n")
    assert said.startswith((b"HTTP/1.1 501", b"HTTP/1.1 400")) and said.count(b"HTTP/1.1") == 1


def test_h11_head_and_ranges(live):
    two = b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n" + request("GET", "/version")
    first, _, rest = raw(live, two).partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200") and rest.startswith(b"HTTP/1.1 200")
    head, _, body = raw(live, request("GET", "/", "Range: bytes=0-3")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and body.rstrip().endswith(b"</html>")


@pytest.mark.parametrize(
    "headers",
    [
        ("Content-Length: 5", "Transfer-Encoding: chunked"), ("Transfer-Encoding: chunked, x",),
        ("Content-Length: 5", "Content-Length: 6"), ("Transfer-Encoding : chunked",),
        ("Content-Length: 0x5",), ("Content-Length: +5",), ("X: a\r\n b",), ("X: a\rGET / y",),
    ],
)  # fmt: skip
def test_h11_nothing_is_smuggled_in_behind_a_request(live, headers):
    inner = request("GET", "/version")
    outer = request("POST", "/v1/completions", "Content-Type: application/json", *headers)
    said = raw(live, outer.replace(b"Connection: close\r\n", b"") + b"0\r\n\r\n" + inner)
    assert said.count(b"HTTP/1.1 ") == 1 and said.startswith(b"HTTP/1.1 4"), said


def test_h11_an_upgrade_that_is_not_known_is_ignored(live):
    """As Java's client asks with every request."""
    body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
    one = b"\r\n".join([
        b"POST /v1/completions HTTP/1.1", b"Host: localhost", b"Upgrade: h2c",
        b"Connection: Upgrade, HTTP2-Settings", b"HTTP2-Settings: AAMAAABk",
        b"Content-Type: application/json", b"Content-Length: %d" % len(body), b"", body,
    ])  # fmt: skip
    assert raw(live, one + request("GET", "/version")).count(b"HTTP/1.1 200") == 2
    said = raw(live, one + one)  # of the second one the parser drops the body
    assert said.startswith(b"HTTP/1.1 200") and said.count(b"HTTP/1.1 4") == 1


@pytest.mark.parametrize("begin", [b"0\r\nX: ", b"1;x="])
def test_h9_trailers_and_chunk_extensions_have_an_end(live, begin):
    head = request("POST", "/v1/completions", "Content-Type: application/json",
                   "Transfer-Encoding: chunked")  # fmt: skip
    said = raw(live, head + begin + b"a" * 400_000)
    assert said.startswith(b"HTTP/1.1 431") or not said
    head = request("GET", "/health", "Transfer-Encoding: chunked").replace(
        b"Connection: close\r\n", b""
    )
    with socket.create_connection(("127.0.0.1", live.port), timeout=20) as connection:
        connection.sendall(head + begin)
        sent = 0
        with contextlib.suppress(OSError):  # it is closed before it takes much
            for sent in range(1000):  # noqa: B007
                connection.sendall(b"a" * 65536)
        assert sent < 999


def test_h9_a_trailer_is_no_header(live):
    body = b'{"prompt": "x", "max_tokens": 2}'
    head = request("POST", "/v1/completions", "Content-Type: application/json",
                   "Transfer-Encoding: chunked")  # fmt: skip
    trailer = b"%x\r\n%s\r\n0\r\nHost: evil.com\r\nx-request-id: mine\r\n\r\n" % (len(body), body)
    said = raw(live, head + trailer)
    assert said.startswith(b"HTTP/1.1 200") and b"x-request-id: mine" not in said


@pytest.mark.parametrize("more", [b"\r\n", b"POST /nope HTTP/1.1\r\nContent-Length: 90000\r\n\r\n"])
def test_h10_bytes_between_requests_keep_no_connection(live, monkeypatch, more):
    monkeypatch.setattr(wire, "HEADER_S", 0.5)
    with socket.create_connection(("127.0.0.1", live.port), timeout=20) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connection.recv(65536)
        connection.sendall(more)
        started, alive = time.monotonic(), True
        connection.settimeout(0.1)
        while alive and time.monotonic() - started < 10:
            with contextlib.suppress(TimeoutError):
                alive = bool(connection.recv(65536))
            with contextlib.suppress(OSError):
                connection.sendall(b"\r\n")
        assert not alive and time.monotonic() - started < 5


@pytest.mark.parametrize(
    "host", ["evil.com", "a/?x=", "localhost.evil.com", "", "[::1", "127.0.0.1@x"]
)
def test_h12_hosts_that_are_not_ours(live, host):
    found = live.http.get("/v1/models", headers={"host": host})
    assert (found.status_code, error_of(found)["code"]) == (403, "host_not_allowed")


def test_h12_hosts_that_are_ours(live):
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:1", "[::1]:8000", "192.168.1.5"):
        assert live.http.get("/v1/models", headers={"host": host}).status_code == 200
    assert host_name("a:b") == host_name("a b") == host_name("[::1]x") == ""


def test_h12_two_hosts_are_none(live):
    said = raw(live, request("GET", "/v1/models", "Host: localhost"))
    assert said.startswith(b"HTTP/1.1 400") and b"more than one Host" in said


@pytest.mark.parametrize(
    ("host", "keys", "is_allowed"),
    [
        ("evil.com", (), False),
        ("server:8000", (), True),
        ("203.0.113.9", (), True),
        ("gpu.example:80", (), False),
        ("evil.com", ("k",), True),
    ],
)
def test_h12_without_a_key_no_site_can_name_an_open_server(host, keys, is_allowed):
    """A page of a site whose name leads to this machine asks under that name."""
    settings = Settings(host="0.0.0.0", api_keys=keys, allows_anyone=True)
    assert host_is_allowed(settings, host) == is_allowed


def num_files() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


@pytest.mark.parametrize(
    ("num_idle", "num_closed"), [(200, 100), pytest.param(2000, 500, marks=pytest.mark.nightly)]
)
def test_h14_idle_and_closed_connections(live, num_idle, num_closed):
    resource = pytest.importorskip("resource")
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 3 * num_idle:
        pytest.skip("few descriptors")
    assert live.post("/v1/chat/completions", CHAT).status_code == 200
    before = num_files()
    idle = [socket.create_connection(("127.0.0.1", live.port)) for _ in range(num_idle)]
    for _ in range(num_closed):
        socket.create_connection(("127.0.0.1", live.port)).close()
    started = time.perf_counter()
    found = httpx.post(f"{live.url}/v1/chat/completions", json=CHAT, trust_env=False)
    assert found.status_code == (200 if num_idle < wire.MAX_CONNECTIONS else 503)
    assert time.perf_counter() - started < 1
    for connection in idle:
        connection.close()
    wait_for(lambda: num_files() <= before)


def test_h14_connections_beyond_the_limit_are_told(live, monkeypatch):
    monkeypatch.setattr(wire, "MAX_CONNECTIONS", 0)
    assert raw(live, request("GET", "/health")).startswith(b"HTTP/1.1 503")


def test_a1_a2_keys(llm, tmp_path):
    scripted = ScriptedLLM(llm)
    with serving(lambda _: scripted, api_keys=("secret-1", "secret-2")) as server:

        def status(path: str, **headers: str) -> int:
            return server.http.get(
                path, headers={k.replace("_", "-"): v for k, v in headers.items()}
            ).status_code

        for path in ("/health", "/ready"):
            assert status(path) == 200
        closed = (
            "/v1/models",
            "/metrics",
            "/props",
            "/version",
            "/openapi.json",
            "/nope",
            "/v1/models/x",
        )
        for path in closed:
            assert status(path) == 401
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
            found = server.post(path, CHAT)
            assert found.status_code == 401
            assert found.headers["www-authenticate"] == "Bearer"
            assert error_of(found)["code"] == "invalid_api_key"
        for good in ({"authorization": "Bearer secret-1"}, {"authorization": "bearer secret-2"},
                     {"x_api_key": "secret-1"}):  # fmt: skip
            assert status("/v1/models", **good) == 200
        for bad in ("Bearer wrong", "Bearer", "Bearer secret-", "Basic secret-1", "secret-1",
                    "Bearer " + "x" * 10_000):  # fmt: skip
            assert status("/v1/models", authorization=bad) == 401
        assert status("/v1/models", x_api_key="nope") == 401


def test_a8_keys_share_no_cached_prompts(llm):
    scripted = ScriptedLLM(llm)
    with serving(lambda _: scripted, api_keys=("secret-1", "secret-2")) as server:
        for key in ("secret-1", "secret-2", "secret-1"):
            for salt in ({}, {"cache_salt": "mine"}):
                body = {"prompt": "x"} | salt
                server.post("/v1/completions", body, headers={"x-api-key": key})
        salts = [salt for _, _, salt in scripted.asked]
        assert salts[:2] == salts[4:] and len(set(salts)) == 4
        assert "secret" not in "".join(salts)


def test_a3_origins(llm):
    preflight = {"access-control-request-method": "POST"}
    with serving(
        lambda _: ScriptedLLM(llm), cors_origins=("https://app.example",), api_keys=("k",)
    ) as server:
        ours, other = {"origin": "https://app.example"}, {"origin": "https://evil.example"}
        found = server.http.options("/v1/models", headers=ours | preflight)
        assert (found.status_code, found.headers["access-control-allow-origin"]) == (
            204,
            ours["origin"],
        )
        assert found.headers["access-control-allow-headers"] == ""
        for names in ("x-stainless-lang, content-type", "anthropic-version", "a\tb", "a;b"):
            asked = ours | preflight | {"access-control-request-headers": names}
            found = server.http.options("/v1/messages", headers=asked)
            given = found.headers["access-control-allow-headers"]
            assert given == (names if "\t" not in names and ";" not in names else "")
        for origin in (other, {"origin": "null"}, {}):
            found = server.http.options("/v1/models", headers=origin | preflight)
            assert found.status_code == 401
            assert "access-control-allow-origin" not in found.headers
        found = server.http.get("/v1/models", headers=ours | {"x-api-key": "k"})
        assert found.headers["access-control-allow-origin"] == ours["origin"]


@pytest.mark.parametrize("origin", ["https://app.example", "null", "http://localhost:5173"])
def test_a3_every_page_may_ask_where_the_operator_says_so(llm, origin):
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
    with serving(lambda _: ScriptedLLM(llm), cors_origins=("*",), api_keys=("k",)) as server:
        found = server.http.options("/v1/chat/completions", headers=asked | {"origin": origin})
        assert (found.status_code, found.headers["access-control-allow-origin"]) == (204, "*")
        assert found.headers["access-control-allow-headers"] == "x-api-key"
        keyed = {"origin": origin, "x-api-key": "k"}
        said = server.post("/v1/chat/completions", CHAT, headers=keyed)
        assert (said.status_code, said.headers["access-control-allow-origin"]) == (200, "*")
        assert server.http.options("/v1/models", headers=asked).status_code == 401
        for each in (found, said):
            assert "access-control-allow-credentials" not in each.headers


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_a4_nobody_listens_beyond_this_machine_without_a_key(host):
    with pytest.raises(RequestError, match="api_key"):
        Settings(host=host)
    Settings(host=host, api_keys=("k",))
    Settings(host=host, allows_anyone=True)


def test_a6_errors_say_nothing_of_the_machine(live, scripted):
    scripted.error = (1, ValueError("/etc/secret at 0x7f00"))
    found = live.post("/v1/chat/completions", CHAT)
    assert (found.status_code, error_of(found)["code"]) == (500, "engine_error")
    assert "secret" not in found.text and "Traceback" not in found.text


def test_a6_the_log_has_a_failure_under_the_id_of_its_answer(live, scripted, caplog):
    scripted.error = (1, ValueError("broken\nin two"))
    for more in ({}, {"stream": True}):
        caplog.clear()
        found = live.post("/v1/chat/completions", CHAT | more)
        (line,) = [each for each in caplog.messages if each.startswith("a request failed: ")]
        said = json.loads(line.partition(": ")[2])
        assert said["id"] == found.headers["x-request-id"]
        assert said["error"].startswith("broken") and "ValueError" in said["traceback"]
        assert "\n" not in line


def test_a6_a_model_is_not_named_by_its_folder(llm, tmp_path):
    scripted = ScriptedLLM(llm)
    scripted.llm = object.__new__(LLM)
    vars(scripted.llm).update(vars(llm))
    scripted.llm.info = replace(llm.info, name=str(tmp_path))
    with serving(lambda _: scripted) as server:
        for path in ("/v1/models", "/props", "/metrics"):
            assert str(tmp_path) not in server.http.get(path).text
        assert server.http.get("/v1/models").json()["data"][0]["id"] == tmp_path.name
        assert server.post("/v1/chat/completions", CHAT).json()["model"] == tmp_path.name


def test_several_served_names(llm):
    with serving(lambda _: ScriptedLLM(llm), served_names=("a/b", "c")) as server:
        assert [each["id"] for each in server.http.get("/v1/models").json()["data"]] == ["a/b", "c"]
        assert server.http.get("/v1/models/a/b").json()["root"] == "a/b"
        for name, told in (("c", "c"), (None, "a/b")):
            found = server.post("/v1/chat/completions", CHAT | {"model": name})
            assert found.json()["model"] == told
        assert server.http.get("/v1/models/rooflax-chat-5m").status_code == 404


SECRET_KEY, SECRET_TEXT = "key-7f3a", "my diary says"


def test_a9_neither_prompts_nor_keys_are_logged(llm, caplog):
    """Also where the log says most, and where the engine fails."""
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, "rooflax.server")
    scripted = ScriptedLLM(llm)
    scripted.script = scripted.says(f"Well, {SECRET_TEXT}")
    with serving(lambda _: scripted, api_keys=(SECRET_KEY,)) as server:
        prompt = {"prompt": SECRET_TEXT}
        chat = {"messages": [{"role": "user", "content": SECRET_TEXT}]}
        headers = {"authorization": f"Bearer {SECRET_KEY}"}
        for error in (None, (1, ValueError("broken"))):
            scripted.error = error
            wanted = 200 if error is None else 500
            for path, body in (("completions", prompt), ("chat/completions", chat)):
                for how, status in (
                    ({}, wanted), ({"stream": True}, 200), ({SECRET_TEXT: 1}, 400),
                    ({"temperature": SECRET_TEXT}, 400), ({"model": SECRET_TEXT}, 404),
                ):  # fmt: skip
                    found = server.post(f"/v1/{path}", body | how, headers=headers)
                    assert found.status_code == status, found.text
        wrong = {"x-api-key": f"{SECRET_KEY}x"}
        assert server.post("/v1/completions", prompt, headers=wrong).status_code == 401
        url = f"/{SECRET_TEXT}?key={SECRET_KEY}"
        assert server.http.get(url, headers=headers).status_code == 404
    told = [each for each in caplog.records if not each.name.startswith(("httpx", "httpcore"))]
    shown = "\n".join(map(logging.Formatter().format, told))
    assert "a request failed" in shown and '"status": 401' in shown
    assert SECRET_KEY not in shown and SECRET_TEXT not in shown


CONTROLS = "a\x00b\x1b[31mred\x9b2J\r\nx-evil: 1\r\n\r\n{}"


def test_u8_control_characters_reach_neither_headers_nor_the_log(live, scripted, caplog):
    caplog.set_level(logging.DEBUG, "rooflax.server")
    scripted.script = scripted.says(CONTROLS)
    chat = {"messages": [{"role": "user", "content": CONTROLS}]}
    choice = live.post("/v1/chat/completions", chat).json()["choices"][0]
    assert choice["message"]["content"] == CONTROLS
    assert CONTROLS in scripted.llm.tokenizer.decode(scripted.asked[-1][0])
    found = live.post("/v1/responses", {"input": CONTROLS, CONTROLS: 1})
    assert found.status_code == 200 and "x-evil" not in found.headers
    assert found.headers["x-rooflax-ignored"].startswith("a?b?[31mred")
    found = live.post("/v1/chat/completions", chat | {"model": CONTROLS})
    assert CONTROLS[0:3] not in error_of(found)["message"]
    path = "/" + "".join(f"%{byte:02x}" for byte in CONTROLS.encode())
    assert live.http.get(path).status_code == 404
    wait_for(lambda: len(caplog.messages) == 4)
    for line in caplog.messages:
        assert line.isprintable() and json.loads(line)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/api/chat", "; this server has OpenAI's and Anthropic's APIs under /v1, not Ollama's."),
        ("/chat/completions", "; there is '/v1/chat/completions'."),
        ("/models", "; there is '/v1/models'."),
        ("/v1/v1/messages", "; there is '/v1/messages'."),
        ("/v1/chat/completions/", "; there is '/v1/chat/completions'."),
        ("/completion", " (did you mean /v1/completions?)."),
        ("/v1/chat/completion", " (did you mean /v1/chat/completions?)."),
        ("/frob", "; GET /openapi.json lists what there is."),
    ],
)
def test_a_route_that_is_not_there_names_what_is(live, path, said):
    answer = live.http.post(path, json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "route_not_found")
    assert answer.json()["error"]["message"] == f"There is no route {path!r}{said}"


def test_a7_request_ids(live):
    found = live.http.get("/version", headers={"x-request-id": "mine-1.2"})
    assert found.headers["x-request-id"] == "mine-1.2"
    for bad in ("a b", "x" * 10_000, "a;b"):
        found = live.http.get("/version", headers={"x-request-id": bad})
        assert found.headers["x-request-id"].startswith("req_")


def test_c1_overload_is_429_at_once_and_others_finish(llm):
    scripted = ScriptedLLM(llm)
    scripted.script = lambda prompt, params, index: [65]
    scripted.pause_s = 0.02
    slots = llm.max_num_seqs
    with serving(lambda _: scripted, max_waiting=1) as server:
        statuses: list[int] = []

        def ask() -> None:
            body = {"prompt": "x", "max_tokens": 60}
            statuses.append(
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code
            )

        threads = [threading.Thread(target=ask) for _ in range(slots + 1)]
        for thread in threads:
            thread.start()
        wait_for(lambda: server.service.open == slots + 1)
        started = time.perf_counter()
        found = server.post("/v1/chat/completions", CHAT)
        assert time.perf_counter() - started < 1
        assert (found.status_code, error_of(found)["code"]) == (429, "queue_full")
        assert 1 <= int(found.headers["retry-after"]) <= 30
        found = server.post("/v1/embeddings", {"never": "read"})
        assert (found.status_code, error_of(found)["code"]) == (429, "queue_full")
        assert server.post("/tokenize", {"prompt": "x"}).status_code == 200
        counts = server.http.get("/metrics").text
        assert 'http_requests_total{route="/v1/embeddings",status="429"} 1.0' in counts
        for thread in threads:
            thread.join()
        assert statuses == [200] * (slots + 1)
        found = server.post("/v1/completions", {"prompt": ["x"] * 100})
        assert (found.status_code, error_of(found)["param"]) == (400, "n")


@pytest.mark.parametrize("stream", [False, True])
def test_c2_a_client_that_leaves_ends_its_request(live, scripted, stream, caplog):
    scripted.script = lambda prompt, params, index: [65]
    scripted.pause_s = 0.01
    cut = scripted.num_cut
    body = json.dumps({"prompt": "x", "max_tokens": 400, "stream": stream}).encode()
    head = request(
        "POST", "/v1/completions", "Content-Type: application/json", f"Content-Length: {len(body)}"
    )
    connection = socket.create_connection(("127.0.0.1", live.port))
    connection.sendall(head + body)
    wait_for(lambda: scripted.num_open == 1)
    if stream:
        connection.recv(100)
    connection.close()
    wait_for(lambda: scripted.num_open == 0, 5)
    assert scripted.num_cut == cut + 1
    live.settle()
    assert "a request failed" not in caplog.text


def test_c3_clients_of_all_kinds_leave_nothing_behind(live, scripted):
    """Good ones, wrong ones, and ones that leave at any moment."""
    scripted.pause_s = 0.002
    rng = random.Random(0)
    kinds = [
        b"{", b'{"prompt": ""}', b'{"prompt": "x", "max_tokens": 20}',
        b'{"prompt": "x", "max_tokens": 200, "ignore_eos": true, "stream": true}',
        b'{"prompt": "x", "max_tokens": 200, "ignore_eos": true}',
    ]  # fmt: skip
    plans = [(rng.choice(kinds), rng.random() * 0.05, rng.random() < 0.6) for _ in range(200)]
    statuses: list[int] = []

    def run(mine) -> None:
        for body, pause_s, leaves in mine:
            head = request(
                "POST", "/v1/completions", "Content-Type: application/json",
                f"Content-Length: {len(body)}",
            )  # fmt: skip
            with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connection:
                connection.sendall(head + body)
                if leaves:
                    time.sleep(pause_s)
                    continue
                found = b""
                while piece := connection.recv(65536):
                    found += piece
                statuses.append(int(found.split()[1]))

    assert live.post("/v1/completions", {"prompt": "x"}).status_code == 200
    live.settle()
    files = num_files()
    threads = [threading.Thread(target=run, args=(plans[i::8],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    live.settle()
    wait_for(lambda: scripted.num_open == 0)
    assert set(statuses) <= {200, 400, 429} and statuses.count(200) > 20
    assert not +live.service._tokens_by_owner and not +live.service._open_by_owner
    wait_for(lambda: num_files() <= files + 2)


def test_a10_a_key_leaves_room_for_others(llm):
    """Of answers and of prompt tokens; what is over a key's share for ever is no 429."""
    with serving(lambda _: ScriptedLLM(llm), api_keys=("one", "two")) as server:
        service = server.service
        most = service._most_open // 2
        body = {"prompt": ["x"] * (most + 1), "max_tokens": 2}
        found = server.post("/v1/completions", body, headers={"authorization": "Bearer one"})
        assert (found.status_code, error_of(found)["param"]) == (400, "n")
        tokens = llm.max_model_len * (service.slots + MAX_WAITING_CONTEXTS) // 2
        with service.prompt_tokens(tokens, "a"):
            with pytest.raises(ApiError) as caught, service.prompt_tokens(1, "a"):
                pass
            assert caught.value.status == 429
            with service.prompt_tokens(tokens, "b"):
                pass


def test_texts_that_wait_are_bounded(live, monkeypatch):
    monkeypatch.setattr("rooflax.server.service.MAX_TEXTS", 0)
    found = live.post("/tokenize", {"prompt": "x"})
    assert (found.status_code, error_of(found)["code"]) == (429, "queue_full")


def test_bodies_that_are_being_read_are_bounded_together(live, monkeypatch):
    monkeypatch.setattr("rooflax.server.app.MAX_BODIES_BYTES", 100)
    found = live.post("/tokenize", {"prompt": "x" * 200})
    assert (found.status_code, error_of(found)["code"]) == (429, "queue_full")
    assert live.service.num_body_bytes == 0
    assert live.post("/tokenize", {"prompt": "x"}).status_code == 200


def test_u2_texts_that_cannot_fit_are_rejected_at_once(live):
    text = "x" * 3_000_000
    bodies = {
        "/v1/completions": {"prompt": text, "add_special_tokens": False},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/tokenize": {"prompt": text},
    }
    for path, body in bodies.items():
        started = time.process_time()
        found = live.post(path, body)
        assert error_of(found)["code"] == "context_length_exceeded"
        assert time.process_time() - started < 1
    found = live.post("/v1/completions", {"prompt": "x" * 10_000_000})
    assert found.status_code == 413


def test_u2_others_do_not_wait_for_long_texts(live, llm):
    """Such as just pass for texts that may fit."""
    longest = llm.tokenizer.longest_token * llm.max_model_len
    is_over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=live.url, timeout=60, trust_env=False) as client:
            while not is_over.is_set():
                for text in ("x" * longest, "x" * 3_000_000):
                    found = client.post("/v1/completions", json={"prompt": text})
                    assert found.status_code == 400

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    waits = []
    for _ in range(21):
        started = time.perf_counter()
        assert live.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
        waits.append(time.perf_counter() - started)
    is_over.set()
    for thread in threads:
        thread.join()
    assert sorted(waits)[10] < 0.1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", CHAT | {"max_tokens": 10**6}, "max_tokens"),
        ("/v1/chat/completions", LONG, "messages"),
        ("/v1/responses", {"input": "x " * 5000}, "input"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 10**6}, "max_output_tokens"),
        ("/v1/responses", {"input": [ANSWERED]}, "input[0].call_id"),
        ("/v1/responses", {"input": "Hi", "prompt": {"id": "p"}}, "prompt"),
        ("/v1/responses", {"input": "Hi", "text": {"format": EMPTY}}, "text.format"),
    ],
)  # fmt: skip
def test_u1_errors_name_the_field_that_was_sent(live, path, body, param):
    found = live.post(path, body)
    assert (found.status_code, error_of(found)["param"]) == (400, param)


def test_c6_a_request_that_takes_too_long_is_counted(llm):
    scripted = ScriptedLLM(llm)
    scripted.pause_s, scripted.script = 0.05, lambda prompt, params, index: [65]
    with serving(lambda _: scripted, request_s=0.3) as server:
        for more in ({}, {"stream": True}):
            server.post("/v1/completions", {"prompt": "x", "max_tokens": 500} | more)
        counted = 'rooflax:cancelled_requests_total{cause="timeout"} 2.0'
        wait_for(lambda: counted in server.http.get("/metrics").text)


def test_c1_rejections_are_counted_by_code(live):
    live.post("/v1/completions", {"prompt": "x"}, headers={"host": "evil.com"})
    live.http.post("/v1/completions", content=b"{}" * 3 * 2**20, headers=JSON)
    text = live.http.get("/metrics").text
    for code in ("host_not_allowed", "request_too_large"):
        assert f'rooflax:rejected_requests_total{{code="{code}"}}' in text
    for name in ("cache_config_info", "num_requests_waiting_by_reason"):
        assert f"vllm:{name}{{" in text
    assert "rooflax:step_seconds_bucket{" in text


def test_c4_a_fault_within_a_stream_is_an_event(live, scripted):
    scripted.error = (3, ValueError("broken"))
    lines = live.post("/v1/chat/completions", CHAT | {"stream": True}).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    assert json.loads(lines[-3].removeprefix("data: "))["error"]["code"] == "engine_error"
    scripted.error = None
    assert live.post("/v1/chat/completions", CHAT).status_code == 200


def test_c5_c6_health_follows_the_engine(llm, caplog):
    scripted = ScriptedLLM(llm)
    with serving(lambda _: scripted, stall_s=5.0, stays=True) as server:
        scripted.state = Health(False, None, 1, 6.0)
        assert server.http.get("/health").status_code == 503
        assert server.http.get("/ready").status_code == 503
        found = server.post("/v1/chat/completions", CHAT)
        assert (found.status_code, error_of(found)["code"]) == (503, "engine_stuck")
        wait_for(lambda: "made no step for 5 s" in caplog.text)
        scripted.state = Health(False, None, 1, 1.0)
        assert server.http.get("/health").status_code == 200
        scripted.state = Health(True, "The engine's thread ended: it broke", 0, 0.0)
        assert server.http.get("/health").status_code == 503


def test_c5_a_dead_engine_ends_the_process(llm):
    scripted = ScriptedLLM(llm)
    with serving(lambda _: scripted) as server:
        scripted.state = Health(True, "The engine's thread ended: it broke", 0, 0.0)
        server.thread.join(10)
        assert not server.thread.is_alive()
        assert isinstance(server.runner._failure, EngineError)


def test_c8_a_draining_server_takes_no_more_and_lets_the_open_ones_finish(llm):
    scripted = ScriptedLLM(llm)
    scripted.pause_s = 0.1
    with serving(lambda _: scripted) as server:
        found: list[httpx.Response] = []
        url = f"{server.url}/v1/chat/completions"
        asking = threading.Thread(
            target=lambda: found.append(httpx.post(url, json=CHAT, timeout=60))
        )
        asking.start()
        wait_for(lambda: scripted.num_open == 1)
        server.service.drains()
        rejected = server.post("/v1/chat/completions", CHAT)
        assert (rejected.status_code, error_of(rejected)["code"]) == (503, "draining")
        assert rejected.headers["connection"] == "close"
        assert server.http.get("/ready").status_code == 503
        assert server.http.get("/health").status_code == 200
        asking.join(30)
        assert found[0].json()["choices"][0]["message"]["content"] == "Hello, world. How are you?"


def test_c6_a_request_has_a_deadline(llm):
    scripted = ScriptedLLM(llm)
    scripted.script, scripted.pause_s = (lambda prompt, params, index: [65]), 0.05
    with serving(lambda _: scripted, request_s=0.3) as server:
        found = server.post("/v1/completions", {"prompt": "x", "max_tokens": 400})
        assert (found.status_code, error_of(found)["code"]) == (504, "timeout")
        said = server.post("/v1/completions", {"prompt": "x", "max_tokens": 400, "stream": True})
        assert said.status_code == 200 and '"code":"timeout"' in said.text
        wait_for(lambda: scripted.num_open == 0)


def test_c14_without_name_service(live, monkeypatch):
    def fails(*_, **__):
        raise socket.gaierror("no name service")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    monkeypatch.setattr(socket, "gethostbyname", fails)
    with socket.socket() as connection:
        connection.connect(("127.0.0.1", live.port))
        connection.sendall(request("GET", "/v1/models"))
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("jump_s", [365 * 86400, -365 * 86400])
def test_c14_a_clock_that_jumps_ends_nothing(live, scripted, monkeypatch, jump_s):
    scripted.pause_s, clock = 0.05, time.time
    found: list[str] = []

    def ask() -> None:
        body = CHAT | {"stream": True}
        found.append(httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=60).text)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(lambda: scripted.num_open == 1)
    monkeypatch.setattr(time, "time", lambda: clock() + jump_s)
    assert live.http.get("/health").status_code == 200
    asking.join(30)
    assert found[0].endswith("data: [DONE]\n\n") and '"error"' not in found[0]


def test_c11_while_loading_everything_says_so(llm):
    go = threading.Event()

    def load(progress):
        progress("reading the third file")
        go.wait(30)
        return ScriptedLLM(llm)

    with serving(load, is_ready=False) as server:
        found = server.http.get("/health")
        assert found.status_code == 503 and found.json()["progress"] == "reading the third file"
        assert server.http.get("/ready").status_code == 503
        found = server.post("/v1/chat/completions", CHAT)
        assert (found.status_code, error_of(found)["code"]) == (503, "loading")
        assert found.headers["retry-after"]
        assert server.http.get("/metrics").status_code == 200
        for path in ("/v1/models", "/v1/models/x", "/props"):
            assert server.http.get(path).status_code == 503
        go.set()
        wait_for(lambda: server.http.get("/ready").status_code == 200)
        assert server.post("/v1/chat/completions", CHAT).status_code == 200


def test_a_load_that_fails_ends_the_server():
    def load(progress):
        raise RequestError("There is no such model.")

    with serving(load, is_ready=False) as server:
        server.thread.join(10)
        assert not server.thread.is_alive()


def test_pings_keep_a_waiting_stream_open(live, scripted, monkeypatch):
    monkeypatch.setattr(answers, "PING_S", 0.05)
    scripted.script, scripted.pause_s = scripted.says("Hi", ends=True), 0.3
    text = live.post("/v1/chat/completions", CHAT | {"stream": True}).text
    assert text.startswith(": ping\n\n") and text.endswith("data: [DONE]\n\n")


def test_an_adapter_that_is_unloaded_while_a_request_comes(live, scripted, monkeypatch):
    class Gone(dict):
        """There when the request names it, and not afterwards."""

        def __iter__(self):
            names, _ = list(super().__iter__()), self.clear()
            return iter(names)

    monkeypatch.setattr(scripted, "loras", Gone(one=None))
    scripted.error = (0, RequestError("lora is 'one'; there is none.", param="lora"))
    answer = live.http.post("/v1/completions", json={"model": "one", "prompt": "x"})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


def test_an_error_before_the_first_piece_is_a_status(live, scripted):
    scripted.error = (0, RequestError("The schema cannot be used.", param="response_format"))
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=60)
    connection.connect()
    connection.auto_open = 0  # the connection stays
    for _ in range(3):
        body = json.dumps(CHAT | {"stream": True})
        connection.request("POST", "/v1/chat/completions", body, JSON)
        found = connection.getresponse()
        assert found.status == 400
        assert json.loads(found.read())["error"]["param"] == "response_format"
    connection.close()
