"""`rooflax batch`: OpenAI's batch files, through a server."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from types import SimpleNamespace

import pytest

from rooflax.cli import batch, bench_serve
from rooflax.cli.main import main
from rooflax.errors import EngineError
from rooflax.server.errors import ENGINE_FAILED
from tests.engine.cli.test_cli_flags import flags_of
from tests.support.disk import FULL, Disk, Killed
from tests.support.server.hostile import answering, whole


def line(name, body, **more):
    route = {"method": "POST", "url": "/v1/completions"} | more
    return json.dumps({"custom_id": name, **route, "body": body})


@pytest.fixture
def asked(live, tmp_path, capfd):
    """Runs a batch of lines; its exit code, what was said, and the output's lines by custom_id."""

    def run(lines, *flags, url=live.url):
        (tmp_path / "in").write_text("\n".join(lines) + "\n")
        out = tmp_path / "out"
        words = ["-i", str(tmp_path / "in"), "-o", str(out), "--url", url, *flags]
        code = main(["batch", *words])
        rows = out.read_text().splitlines() if out.exists() else []
        return (
            code,
            capfd.readouterr().err,
            {row["custom_id"]: row for row in map(json.loads, rows)},
        )

    return run


GOOD = [line(f"r{i}", {"prompt": f"x{i}", "max_tokens": 2}) for i in range(5)]


def test_every_request_has_its_answer(asked):
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    lines = [*GOOD, "", line("chat", chat, url="/v1/chat/completions")]
    code, said, found = asked([*lines, line("bad", {"prompt": "x", "max_tokens": -1})])
    assert code == 1
    assert said == "6 answered, 1 failed\n1 x max_tokens is wrong: expected int >= 0.\n"
    assert set(found) == {*(f"r{i}" for i in range(5)), "chat", "bad"}
    assert all(row["error"] is None for row in found.values())
    assert found["bad"]["response"]["status_code"] == 400
    body = found["chat"]["response"]["body"]
    assert body["choices"][0]["message"]["content"] == "Hello, world."
    assert found["chat"]["response"]["request_id"].startswith("req_")


def test_it_goes_on_behind_what_is_there(asked, scripted, tmp_path):
    asked(GOOD[:2])
    with open(tmp_path / "out", "a") as file:
        file.write('{"id": "batch_req_1", "custom_id": "r2", "resp')  # it was killed here
    scripted.asked.clear()
    code, said, found = asked(GOOD)
    assert (code, said) == (0, "3 answered, 0 failed; 2 were answered already\n")
    assert len(scripted.asked) == 3 and len(found) == 5
    scripted.asked.clear()
    assert len(asked(GOOD, "--force")[2]) == len(scripted.asked) == 5


@pytest.mark.parametrize("error", [FULL, Killed()], ids=["full", "killed"])
def test_it_goes_on_from_every_write(asked, tmp_path, error):
    """Whichever write of the answers is the last: each request has one good answer in the end."""
    cut = '{"id": "batch_req_1", "custom_id": "r2", "resp'
    for fail_at in range(1, 40):
        (tmp_path / "out").unlink(missing_ok=True)
        asked(GOOD[:2])
        with (tmp_path / "out").open("a") as file:
            file.write(cut)  # so that the next run begins by replacing the file
        with Disk(tmp_path, fail_at, error, spared="in").watched() as disk:
            try:
                code, _, found = asked(GOOD)
            except ValueError:  # a line that was cut
                code = 1
        if not disk.has_failed:
            assert code == 0
            break
        assert code in (1, 2), disk.calls
        code, _, found = asked(GOOD)
        assert code == 0 and set(found) == {f"r{i}" for i in range(5)}, disk.calls
        assert len((tmp_path / "out").read_text().splitlines()) == 5
    assert fail_at > 8


def test_a_busy_server_is_asked_again(asked, scripted, live, monkeypatch):
    scripted.pause_s = 0.05
    monkeypatch.setattr(type(live.service), "slots", 1)
    monkeypatch.setattr(batch, "LONGEST_WAIT_S", 0.1)
    live.service.settings.__dict__["max_waiting"] = 1
    try:
        code, _, found = asked(GOOD, "--concurrency", "5")
    finally:
        live.service.settings.__dict__["max_waiting"] = 64
    assert code == 0 and all(r["response"]["status_code"] == 200 for r in found.values())
    assert live.service.rejected["queue_full"] > 0


def test_failures_are_answers_too_and_asked_again(asked, scripted):
    scripted.error = (0, EngineError("broken"))
    code, said, found = asked(GOOD[:1])
    assert (code, said) == (1, f"0 answered, 1 failed\n1 x {ENGINE_FAILED}\n")
    assert found["r0"]["response"]["body"]["error"]["code"] == "engine_error"
    code, _, found = asked(GOOD[:2], url="http://127.0.0.1:9")
    assert code == 1 and {row["error"]["code"] for row in found.values()} == {"connection_error"}
    scripted.error = None
    code, said, found = asked(GOOD[:3])
    assert (code, said) == (0, "3 answered, 0 failed\n")
    assert [row["response"]["status_code"] for row in found.values()] == [200] * 3


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["{"], "Line 1 of"),
        (["[]"], "must be an object with custom_id"),
        ([GOOD[0], GOOD[0]], "Line 2 of"),
        ([line("a", {}, method="GET")], "a POST to one of"),
        ([line("a", {}, url="/health")], "a POST to one of"),
        ([line("a", [])], "body must be an object"),
        ([line(1, {})], "custom_id must be text"),
        ([line("a", {"stream": True})], "no streams"),
    ],
)
def test_a_file_that_is_no_batch(asked, lines, said):
    code, err, found = asked(lines)
    assert code == 2 and said in err and not found


def test_an_output_of_something_else_is_kept(asked, tmp_path):
    (tmp_path / "out").write_text('{"a": 1}\n')
    code, err = main(["batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]), ""
    assert code == 2
    (tmp_path / "in").write_text(GOOD[0])
    assert main(["batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]) == 2, err
    assert (tmp_path / "out").read_text() == '{"a": 1}\n'


def test_flags(asked, monkeypatch, capfd):
    known = {"--input", "--output", "--force", "--url", "--api-key", "--serve-flags"}
    known |= {"--concurrency", "--quiet", "--verbose", "--help", "MODEL"}
    assert set(flags_of("batch")) == known
    assert asked(GOOD, "x")[0] == asked(GOOD, "--serve-flags", "x")[0] == 2
    capfd.readouterr()
    keys = []
    at = bench_serve.server_at
    monkeypatch.setattr(batch, "server_at", lambda url, key: keys.append(key) or at(url, key))
    assert asked(GOOD[:1], "--api-key", "k", "--quiet")[:2] == (0, "")
    assert keys == ["k"]


def test_text_that_is_no_unicode_aborts_nothing(asked):
    odd = '{"custom_id": "\\ud800", ' + GOOD[0].partition(", ")[2]
    with answering(whole(b'{"a": "\\ud800", "\xc3\xa9": 1}')) as url:
        code, _, found = asked([odd, GOOD[1]], url=url)
        assert code == 0 and set(found) == {"\ud800", "r1"}
        assert found["r1"]["response"]["body"] == {"a": "\ud800", "\xe9": 1}
        assert "2 were answered already" in asked([odd, GOOD[1]], url=url)[1]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (whole(b"[1]"), "not a JSON object"),
        (whole(b"[" * 100_000), "not a JSON object"),
        (whole(b"x").replace(b": 1", b": abc"), "Content-Length that is not a number"),
        (whole(b"", b"abc"), "is not HTTP"),
        (whole(b"x" * 70_000, b"400 No"), "is over 64 KiB"),
    ],
)
def test_what_is_no_answer_is_a_failure(asked, said, why):
    with answering(said) as url:
        code, err, found = asked(GOOD[:1], url=url)
    assert code == 1 and why in err and why in found["r0"]["error"]["message"]


def test_a_body_that_is_nested_too_deeply_is_a_failure(asked):
    depth = sys.getrecursionlimit() - 20
    deep = line("deep", {"prompt": 0}).replace("0", "[" * depth + "]" * depth)
    code, err, found = asked([deep, *GOOD])
    assert code in (1, 2) and "fault" not in err and (code == 2 or len(found) == 6)


@pytest.mark.parametrize("wait", [b"nan", b"inf", b"-inf", b"-1", b"soon"])
def test_a_wait_that_is_none_is_not_kept(asked, monkeypatch, wait):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr(batch, "MOST_TRIES", 3)
    own = SimpleNamespace(run=asyncio.run, gather=asyncio.gather, sleep=sleep)
    monkeypatch.setattr(batch, "asyncio", own)
    with answering(whole(b"{}", b"429 No", b"Retry-After: %s\r\n" % wait)) as url:
        assert asked(GOOD[:1], url=url)[0] == 1
    assert waits == [1.0, 1.0]


def test_an_output_that_cannot_be_one(tmp_path, capfd):
    (tmp_path / "in").write_text(GOOD[0])
    (tmp_path / "link").symlink_to(tmp_path / "in")
    words = ["batch", "--url", "http://127.0.0.1:9", "-i", str(tmp_path / "in"), "-o"]
    for path, why in (("/dev/full", "regular"), (tmp_path, "regular"), (tmp_path / "in", "input"),
                      (tmp_path / "link", "input")):  # fmt: skip
        for more in ([], ["--force"]):
            assert main([*words, str(path), *more]) == 2
            assert why in capfd.readouterr().err
    assert (tmp_path / "in").read_text() == GOOD[0]


def test_a_byte_order_mark_is_no_part_of_a_line(asked):
    assert asked(["\ufeff" + GOOD[0]])[0] == 0


def test_a_server_that_says_nothing_is_not_waited_for_without_end(asked, monkeypatch):
    monkeypatch.setattr("rooflax.http_client.ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        code, said, found = asked(GOOD[:1], url=f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert code == 1 and found["r0"]["error"]["code"] == "connection_error"
    assert said == "0 answered, 1 failed\n1 x TimeoutError\n"
