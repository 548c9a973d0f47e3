"""`rooflax batch`: OpenAI's batch files, through a server."""

from __future__ import annotations

import json

import pytest

from rooflax.cli import batch, bench_serve
from rooflax.cli.main import main
from rooflax.errors import EngineError
from tests.cli.test_cli_flags import flags_of

pytestmark = pytest.mark.oldest_jax


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
    assert code == 1 and said.startswith("0 answered, 1 failed\n1 x The engine failed")
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
