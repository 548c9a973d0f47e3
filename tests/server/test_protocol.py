"""HTTP itself: what is no request, limits, hosts, keys, origins, overload, and clients that leave.

Rows of the catalogue of faults are named: H of HTTP, A of access, C of concurrency.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from rooflax import EngineError, RequestError
from rooflax.engine.thread import Health
from rooflax.server import answers, wire
from rooflax.server.settings import Settings, host_name
from tests.server.live import ScriptedLLM, serving, wait_for

pytestmark = pytest.mark.oldest_jax

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
JSON = {"content-type": "application/json"}


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


@pytest.mark.parametrize(
    "body",
    [
        b"{", b"", b'"str"', b"[1]", b"42", b"null", b"\xff\xfe{}", '{"a": "é"}'.encode("utf-16"),
        b"\xef\xbb\xbf{}", rb'{"messages": "\ud800"}', b'{"a": 1, "a": 2}', b'{"a": NaN}',
        b'{"a": Infinity}', b'{"a": 1e999}', b'{"a": ' + b"1" * 400 + b"}", b"[" * 100_000,
        b'{"a":' * 100 + b"1" + b"}" * 100, b"{]",
    ],
)  # fmt: skip
def test_h2_h5_bodies_that_are_no_request(live, body):
    started = time.perf_counter()
    found = live.http.post("/v1/chat/completions", content=body, headers=JSON)
    assert found.status_code == 400
    assert error_of(found)["param"] is None
    assert time.perf_counter() - started < 5


def test_h5_an_object_of_very_many_keys_is_over_the_size(live):
    body = b"{" + b",".join(b'"%d":1' % i for i in range(500_000)) + b"}"
    found = live.http.post("/v1/chat/completions", content=body, headers=JSON)
    assert found.status_code == 413


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


def test_h14_idle_and_closed_connections(live):
    idle = [socket.create_connection(("127.0.0.1", live.port)) for _ in range(200)]
    for _ in range(100):
        socket.create_connection(("127.0.0.1", live.port)).close()
    started = time.perf_counter()
    assert live.post("/v1/chat/completions", CHAT).status_code == 200
    assert time.perf_counter() - started < 2
    for connection in idle:
        connection.close()


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
        # A8: keys share no cached prompts.
        for key in ("secret-1", "secret-2"):
            server.post("/v1/completions", {"prompt": "x"}, headers={"x-api-key": key})
        salts = [salt for _, _, salt in scripted.asked]
        assert salts[0] != salts[1] and "secret" not in "".join(salts)


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
        for origin in (other, {"origin": "null"}, {}):
            found = server.http.options("/v1/models", headers=origin | preflight)
            assert found.status_code == 401
            assert "access-control-allow-origin" not in found.headers
        found = server.http.get("/v1/models", headers=ours | {"x-api-key": "k"})
        assert found.headers["access-control-allow-origin"] == ours["origin"]


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


def test_a6_a_model_is_not_named_by_its_folder(llm, tmp_path):
    scripted = ScriptedLLM(llm)
    scripted.llm = copy.copy(llm)
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
    plans = [(rng.choice(kinds), rng.random() * 0.05, rng.random() < 0.6) for _ in range(400)]
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
    files = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    threads = [threading.Thread(target=run, args=(plans[i::8],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    live.settle()
    wait_for(lambda: scripted.num_open == 0)
    assert set(statuses) <= {200, 400, 429} and statuses.count(200) > 20
    assert live.service._open_tokens == 0 and not +live.service._open_by_owner
    if files:
        wait_for(lambda: len(list(Path("/proc/self/fd").iterdir())) <= files + 2)


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
        found = live.post(path, body)
        assert error_of(found)["code"] == "context_length_exceeded"


def test_c4_a_fault_within_a_stream_is_an_event(live, scripted):
    scripted.error = (3, ValueError("broken"))
    lines = live.post("/v1/chat/completions", CHAT | {"stream": True}).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    assert json.loads(lines[-3].removeprefix("data: "))["error"]["code"] == "engine_error"
    scripted.error = None
    assert live.post("/v1/chat/completions", CHAT).status_code == 200


def test_c5_c6_health_follows_the_engine(llm):
    scripted = ScriptedLLM(llm)
    with serving(lambda _: scripted, stall_s=5.0, stays=True) as server:
        scripted.state = Health(False, None, 1, 6.0)
        assert server.http.get("/health").status_code == 503
        assert server.http.get("/ready").status_code == 503
        found = server.post("/v1/chat/completions", CHAT)
        assert (found.status_code, error_of(found)["code"]) == (503, "engine_dead")
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


def test_an_error_before_the_first_piece_is_a_status(live, scripted):
    scripted.error = (0, RequestError("The schema cannot be used.", param="response_format"))
    found = live.post("/v1/chat/completions", CHAT | {"stream": True})
    assert (found.status_code, error_of(found)["param"]) == (400, "response_format")
