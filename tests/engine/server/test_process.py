"""`rooflax serve` as a process: it listens at once, serves, drains, and ends with its exit code."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from rooflax.cli.main import main, parser_of
from rooflax.cli.serve import _warn_of_cache, settings_of, take_variables
from rooflax.loading.plan import make_plan
from rooflax.nn.host_memory import _field
from tests.support.product.manifests import documents
from tests.support.server.live import wait_for

CHAT = {"messages": [{"role": "user", "content": "Who are you?"}]}
COMMAND = [sys.executable, "-m", "rooflax", "serve", "--max-num-seqs", "2"]


class Process:
    """A server of its own."""

    def __init__(self, *flags: str, port: int = 0, limit: str = ":"):
        command = [*COMMAND, "--port", str(port), *flags]
        limited = ["sh", "-c", f'{limit}; exec "$@"', "sh", *command]
        self.process = subprocess.Popen(limited, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        wait_for(lambda: bool(self.lines), 60)
        found = re.search(r"listening on (http://127\.0\.0\.1:\d+)", self.lines[0])
        assert found, self.lines
        self.url = found[1]

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    def status(self, path: str = "/ready") -> int:
        return httpx.get(f"{self.url}{path}", timeout=60, trust_env=False).status_code

    def roofline(self) -> float | None:
        return httpx.get(f"{self.url}/props", trust_env=False).json()["decode_roofline"]

    def end(self, *signals: int) -> int:
        for number in signals:
            self.process.send_signal(number)
        code = self.process.wait(60)
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


def test_c8_it_serves_and_drains_without_cutting_an_answer(monkeypatch, tmp_path):
    """As the probes of deploy/kubernetes see it, from the start to the end of the process. A first
    start, which has to compile everything, gives its first token in under a minute."""
    monkeypatch.setenv("ROOFLAX_CACHE_DIR", str(tmp_path))
    begun = time.monotonic()
    (pod,) = documents("rooflax.yaml")["Deployment"]["spec"]["template"]["spec"]["containers"]
    started, ready, alive = (
        pod[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")
    )
    server = Process()
    try:
        assert server.status(started) == 503
        wait_for(lambda: server.status(started) == 200, 180)
        assert (server.status(ready), server.status(alive)) == (200, 200)
        body = CHAT | {"stream": True, "max_tokens": 4}
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as s:
            assert any(
                '"content":"' in line and '"content":""' not in line for line in s.iter_lines()
            )
        assert time.monotonic() - begun < 60
        text = ""

        def read() -> None:
            nonlocal text
            body = CHAT | {"stream": True, "max_tokens": 450, "n": 16, "ignore_eos": True}
            with httpx.stream(  # seconds, on any machine
                "POST", f"{server.url}/v1/chat/completions", json=body, timeout=60
            ) as s:
                for piece in s.iter_text():
                    text += piece

        reader = threading.Thread(target=read)
        reader.start()
        wait_for(lambda: "content" in text)
        wait_for(lambda: server.roofline() is not None)
        assert 0 < server.roofline() < 2
        assert "rooflax:decode_roofline_ratio{" in httpx.get(f"{server.url}/metrics").text
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.status(ready) == 503)
        assert server.status(alive) == 200
        assert httpx.post(f"{server.url}/v1/chat/completions", json=CHAT).status_code == 503
        assert "[DONE]" not in text
        code = server.end()
        reader.join(30)
        assert code == 0, server.lines
        assert text.endswith("data: [DONE]\n\n") and text.count('"finish_reason":"length"') == 16
        with pytest.raises(httpx.ConnectError):
            server.status()
        assert not any("Traceback" in line for line in server.lines)
    finally:
        server.process.kill()


def test_c8_what_outlasts_the_drain_is_told_and_ended():
    server = Process("--drain-timeout", "0.05")
    try:
        wait_for(lambda: server.status() == 200, 180)
        texts: list[str] = []

        def read() -> None:
            body = CHAT | {"stream": True, "max_tokens": 450, "ignore_eos": True}
            url, said = f"{server.url}/v1/chat/completions", ""
            with httpx.stream("POST", url, json=body, timeout=60) as stream:
                for piece in stream.iter_text():
                    said += piece
                    if len(texts) < 4:
                        texts.append(said)
            texts.append(said)

        readers = [threading.Thread(target=read) for _ in range(6)]
        for reader in readers:
            reader.start()
        wait_for(lambda: len(texts) > 3)
        assert server.end(signal.SIGTERM) == 0, server.lines
        for reader in readers:
            reader.join(30)
        for text in texts[-6:]:  # those that waited have no stream yet, but a status
            assert text.endswith("data: [DONE]\n\n") or text.startswith('{"error":'), text
        assert any('"code":"draining"' in text for text in texts[-6:])
    finally:
        server.process.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_c8_it_ends_while_it_loads(number, code):
    server = Process()
    assert server.end(number) == code


def test_c9_c14_a_killed_one_starts_again_and_goes_on_without_descriptors():
    killed = Process()
    killed.end(signal.SIGKILL)  # while it compiles
    port = int(killed.url.rpartition(":")[2])
    server = Process(port=port, limit="ulimit -n 64")
    try:
        wait_for(lambda: server.status() == 200, 180)
        body = CHAT | {"max_tokens": 12}
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
            wanted = client.post("/v1/chat/completions", json=body).json()["choices"]
            crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
            for _ in range(3):  # who is connected is served
                found = client.post("/v1/chat/completions", json=body)
                assert found.json()["choices"] == wanted
            for connection in crowd:
                connection.close()
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.json()["choices"] == wanted
        assert server.status("/health") == 200
        assert server.end(signal.SIGTERM) == 0
    finally:
        server.process.kill()


def test_c10_a_port_that_is_taken(capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert "cannot be listened on" in capfd.readouterr().err


@pytest.mark.parametrize("host", ["no.such.host.invalid", "1.2.3.4.5", "192.0.2.1", "a b"])
def test_c10_a_host_that_is_none(host, capfd):
    assert main(["serve", "--host", host, "--port", "0", "--api-key", "k"]) == 2
    told = capfd.readouterr().err
    assert "cannot be listened on" in told and told.count("\n") == 1


def test_c13_a_cache_that_cannot_be_written_is_said(monkeypatch, capfd):
    """The programs are compiled again then; see tests/engine/product/test_compile_cache.py."""
    _warn_of_cache()
    assert capfd.readouterr().err == ""
    monkeypatch.setattr("rooflax.engine.compilation.enable_persistent_cache", lambda: None)
    _warn_of_cache()
    told = capfd.readouterr().err
    assert "compiled programs cannot be kept" in told and told.count("\n") == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("spare", "what"), [(-1, "--weights-budget"), (2**20, "is left for it")])
def test_c12_what_does_not_fit_is_not_started(monkeypatch, capfd, spare, what):
    """The limit of the address space leaves too little for the weights, or for the KV cache."""
    spare += make_plan("preset:gpt2-tiny").memory.weights

    def limits(_: int) -> tuple[int, int]:
        size = _field(Path("/proc/self/status"), "VmSize")
        assert size is not None
        return size + spare, size + spare

    monkeypatch.setattr("resource.getrlimit", limits)
    assert main(["serve", "preset:gpt2-tiny", "--port", "0"]) == 2
    *_, told = capfd.readouterr().err.splitlines()
    assert what in told and "MiB" in told


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--host", "0.0.0.0"], "--host"),
        (["--port", "70000"], "--port is 70000"),
        (["--unknown-fields", "shrug"], "'reject', 'report'"),
        (["--chat-template", "/no/such/file"], "cannot be read"),
        (["--api-key-file", "/no/such/file"], "cannot be read"),
        (["--api-key", ""], "--api-key"),
        (["--drain-timeout", "0"], "--drain-timeout"),
    ],
)
def test_a4_a5_wrong_flags_are_one_sentence(flags, said, capfd):
    assert main(["serve", *flags]) == 2
    told = capfd.readouterr().err
    assert said in told and told.count("\n") == 1


def test_a5_key_files(tmp_path):
    path = tmp_path / "keys"
    path.write_bytes(b"# who\r\none # first\r\n\r\ntwo\r\n")
    os.chmod(path, 0o600)
    args = parser_of("serve").parse_args(["--api-key-file", str(path)])
    assert settings_of(args).api_keys == ("one", "two")


def test_variables_stand_in_for_flags(monkeypatch):
    for name, value in (
        ("ROOFLAX_API_KEY", "a,b"), ("ROOFLAX_PORT", "9000"), ("ROOFLAX_HOST", "::1"),
        ("ROOFLAX_STAY", "1"), ("ROOFLAX_DRAIN_TIMEOUT", "5"),
        ("ROOFLAX_IGNORE_CONFIG_KEY", "one, two"), ("ROOFLAX_INSECURE_NO_AUTH", "off"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    args = parser_of("serve").parse_args(["--host", "localhost"])
    take_variables(args)
    found = settings_of(args)
    assert (found.api_keys, found.port, found.host) == (("a", "b"), 9000, "localhost")
    assert (found.stays, found.drain_s, found.allows_anyone) == (True, 5.0, False)
    assert args.ignore_config_keys == ["one", "two"]


@pytest.mark.parametrize(("name", "value"), [("PORT", "many"), ("STAY", "banana")])
def test_a_variable_that_cannot_be_is_one_sentence(monkeypatch, capfd, name, value):
    monkeypatch.setenv(f"ROOFLAX_{name}", value)
    assert main(["serve"]) == 2
    assert f"ROOFLAX_{name}" in capfd.readouterr().err


def test_without_the_extra_it_says_how_to_get_it(monkeypatch, capfd):
    monkeypatch.setattr("rooflax.cli.serve.NEEDED", ("no_such_package",))
    assert main(["serve"]) == 2
    assert "pip install '.[serve]'" in capfd.readouterr().err
