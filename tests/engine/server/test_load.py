"""`rooflax bench serve` and its client: what is asked, how answers are read, what is counted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socketserver
import threading

import numpy as np
import pytest

from rooflax import http_client
from rooflax.bench.load import MIXES, LoadTarget, ServerLoad, answered, run_load
from rooflax.cli.main import main
from rooflax.errors import EngineError, RequestError
from rooflax.http_client import BadAnswer, Chunks, Client, Reply, Server
from tests.engine.cli.test_cli_flags import flags_of
from tests.support.server.hostile import CHUNKED, answering, chunked, events, whole

pytestmark = pytest.mark.oldest_jax

SMALL = {
    "--requests": ["10"], "--output-tokens": ["5"], "--prompt-tokens": ["8"],
    "--concurrency": ["3"],
}  # fmt: skip


def test_lengths_follow_their_rules():
    for mix in MIXES:
        load = ServerLoad(num_requests=400, prompt_tokens=100, output_tokens=50, mix=mix)
        lengths = load.lengths()
        assert lengths == load.lengths()
        sizes = [len(prompt) for prompt in load.prompts(1000)]
        assert sizes == [prompt for prompt, _ in lengths]
        words = load.prompts(None)
        assert [len(text.split()) for text in words] == sizes
    chat = np.array(ServerLoad(num_requests=400, prompt_tokens=100, mix="chat").lengths())
    assert 85 < np.median(chat[:, 0]) < 115 and chat[:, 0].max() == 400
    assert np.std(np.log(chat[:, 0])) > 0.7
    long = [prompt for prompt, _ in ServerLoad(num_requests=20, mix="long").lengths()]
    assert sorted(set(long)) == [64, 512] and long.count(512) == 2


def test_prefixes_are_shared_and_arrivals_are_as_many_a_second():
    prompts = ServerLoad(num_requests=8, prompt_tokens=64, mix="prefix").prompts(1000)
    assert prompts[0][:48] == prompts[4][:48] != prompts[1][:48]
    assert prompts[0][48:] != prompts[4][48:]
    at = ServerLoad(num_requests=4000, per_s=20.0).arrivals_s()
    assert at == sorted(at) and 190 < at[-1] < 210


def test_another_seed_asks_something_else():
    loads = [ServerLoad(num_requests=8, mix="chat", per_s=1.0, seed=seed) for seed in (0, 0, 1)]
    for what in (ServerLoad.lengths, ServerLoad.arrivals_s, lambda load: load.prompts(1000)):
        first, again, other = map(what, loads)
        assert first == again != other


@pytest.mark.parametrize(
    "given",
    [
        {"mix": "x"},
        {"seed": -1},
        {"per_s": 0},
        {"target_ttft_s": -1},
        {"target_tpot_s": float("inf")},
    ],
)
def test_a_load_that_cannot_be_is_rejected(given):
    with pytest.raises(RequestError, match=next(iter(given))):
        ServerLoad(**given)


def test_chunks_are_read_wherever_they_are_cut():
    body = [b"data: a\n\n", b"x" * 300, b"\r\n0\r\n\r\n", b"data: [DONE]\n\n"]
    sent = b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in body) + b"0\r\n\r\n"
    for size in (1, 2, 3, 7, 50, len(sent)):
        chunks = Chunks()
        found = [chunks.take(sent[at : at + size]) for at in range(0, len(sent), size)]
        assert b"".join(found) == b"".join(body) and chunks.is_whole


def test_events_have_the_time_of_their_last_byte():
    pieces = [(1.0, b'data: {"a"'), (2.0, b": 1}\n\n: ping\n\ndata: x\r"), (3.0, b"\n\r\n")]
    assert list(Reply(200, {}, 0.0, pieces).events()) == [(2.0, '{"a": 1}'), (3.0, "x")]


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("http://h:1/v1/", ("h", 1, False, "")),
        ("https://h/a", ("h", 443, True, "/a")),
        ("http://[::1]:8", ("::1", 8, False, "")),
    ],
)
def test_urls(url, wanted):
    assert Server.of(url)[:4] == wanted
    assert Server.of(url, "k").headers()["Authorization"] == "Bearer k"


@pytest.mark.parametrize(
    "url", ["", "h:1", "ftp://h", "http://", "http://h:x", "http://h:99999999"]
)
def test_what_is_no_url(url):
    with pytest.raises(RequestError, match="url"):
        Server.of(url)


def test_figures_are_those_of_the_answers(live, scripted):
    async def measure(**given):
        async with LoadTarget(Server.of(live.url)) as target:
            return await run_load(target, ServerLoad(**given))

    scripted.pause_s = 0.01
    sizes = {"num_requests": 8, "prompt_tokens": 9, "output_tokens": 7}
    found = asyncio.run(measure(concurrency=4, target_tpot_s=1.0, **sizes))
    assert (found["requests"], found["failed"], found["good_requests"]) == (8, 0, 8)
    assert (found["prompt_tokens"], found["output_tokens"]) == (8 * 9, 8 * 7)
    assert found["itl_s"]["p50"] >= 0.01 and found["ttft_s"]["p50"] >= 0.01
    assert found["seconds"] >= 2 * 7 * 0.01 and found["generator_cpu_s"] > 0
    assert all(params.ignore_eos for _, params, _ in scripted.asked[1:])
    found = asyncio.run(measure(per_s=50.0, target_tpot_s=1e-6, **sizes))
    assert (found["loop"], found["good_requests"], found["goodput_per_s"]) == ("open", 0, 0)
    assert found["seconds"] > 8 / 50 / 4


def test_failures_are_counted_by_reason(live, scripted):
    async def ask(error):
        async with LoadTarget(Server.of(live.url)) as target:
            scripted.error = error
            return await run_load(
                target, ServerLoad(num_requests=3, concurrency=1, output_tokens=4)
            )

    with pytest.raises(EngineError, match="status 500"):
        asyncio.run(ask((0, EngineError("broken"))))
    scripted.error = None
    with pytest.raises(EngineError, match="The engine failed while answering"):
        asyncio.run(ask((2, EngineError("broken"))))


def test_a_stream_that_was_cut_is_an_error():
    whole = b'data: {"choices": [{"text": "a"}]}\n\n'
    reply = Reply(200, {}, 0.0, [(1.0, whole)])
    assert answered(0.0, reply).error == "the stream was cut"
    done = Reply(200, {}, 0.0, [(1.0, whole + b"data: [DONE]\n\n")])
    assert answered(0.5, done).error is None and answered(0.5, done).ttft_s == 0.5


def test_a_server_that_knows_no_ignore_eos_and_closes_connections():
    bodies = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            head = self.rfile.readline()
            size = 0
            while (line := self.rfile.readline().strip()) != b"":
                if line.lower().startswith(b"content-length:"):
                    size = int(line.split(b":")[1])
            bodies.append(self.rfile.read(size))
            status, said = b"200 OK", b'{"data": [{"id": "m"}]}'
            if head.startswith(b"POST"):
                said = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'
                status = b"400 No" if b"ignore_eos" in bodies[-1] else status
            self.wfile.write(b"HTTP/1.1 %s\r\nConnection: close\r\n\r\n%s" % (status, said))

    async def measure(port):
        async with LoadTarget(Server.of(f"http://127.0.0.1:{port}/v1")) as target:
            assert target.vocab_size is None
            return await run_load(target, ServerLoad(num_requests=2, prompt_tokens=3))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = asyncio.run(measure(server.server_address[1]))
        server.shutdown()
    assert (found["failed"], found["prompts"]) == (0, "random words")
    assert b"ignore_eos" not in bodies[-1] and len(json.loads(bodies[-1])["prompt"].split()) == 3


def test_nobody_answers(capfd):
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9"]) == 2
    assert "does not answer" in capfd.readouterr().err


def test_a_client_uses_its_connections_again(live):
    async def ask():
        client = Client(Server.of(live.url))
        first = await client.get("/health")
        connection = client._idle[0]
        second = await client.get("/nothing")
        assert client._idle == [connection]
        client.close()
        return first.status, second.status, second.json()["error"]["code"]

    assert asyncio.run(ask()) == (200, 404, "route_not_found")


FLAGS = {
    "--model-name": (["nobody"], "names no model 'nobody'"),
    "--serve-flags": (["-q int8"], "exclude each other"),
    "MODEL": (["x"], "exclude each other"),
    "--request-rate": (["50"], "exclude each other"),
    "--api-key": ["k"],
    "--requests": ["5"],
    "--mix": ["long"],
    "--seed": ["1"],
    "--prompt-tokens": ["6"],
    "--output-tokens": ["4"],
    "--target-ttft": ["1e-9"],
    "--target-tpot": ["1e-9"],
    "--concurrency": ["2"],
    "--json": [],
    "--quiet": None,
    "--verbose": None,
    "--url": None,
    "--help": None,
}


def test_every_flag_has_its_effect_or_is_rejected(live, scripted, capfd, monkeypatch):
    assert set(flags_of("bench serve")) == set(FLAGS)
    keys = []
    of = Server.of
    monkeypatch.setattr(Server, "of", lambda url, key=None: keys.append(key) or of(url, key))

    def run(given):
        scripted.asked.clear()
        keys.clear()
        words = [word for flag, values in given.items() for word in (flag, *values)]
        code = main(["bench", "serve", "--url", live.url, *(w for w in words if w != "MODEL")])
        told = capfd.readouterr()
        sizes = sorted((len(ids), params.max_tokens) for ids, params, _ in scripted.asked)
        prompts = sorted(list(ids) for ids, _, _ in scripted.asked)
        good = [line.split(": ")[1] for line in told.out.splitlines() if "goodput" in line]
        head = told.out.partition(" tokens in all): ")[0]
        return code, told.err, (sizes, prompts, good, head, list(keys))

    base = run(SMALL)
    assert base == run(SMALL) and base[0] == 0, base
    for flag, wanted in FLAGS.items():
        if wanted is None:
            continue
        values, rejection = wanted if isinstance(wanted, tuple) else (wanted, None)
        code, err, seen = run(SMALL | {flag: values})
        if rejection is not None:
            assert code == 2 and rejection in err, (flag, err)
        else:
            assert seen != base[2], flag


def test_a_connection_that_the_server_has_closed_meanwhile_is_opened_again():
    asked = []

    async def answer_once(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        asked.append(1)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await reader.read(1)  # the next request, which gets no answer
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def twice():
        server = await asyncio.start_server(answer_once, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            client = Client(Server.of(f"http://127.0.0.1:{port}"))
            for _ in range(3):
                assert (await client.get("/")).status == 200
            client.close()
            await asyncio.sleep(0.1)  # so that the last answer ends, too

    asyncio.run(twice())
    assert len(asked) == 3


def ask(said, **how):
    """Asks a server that says this."""

    async def once(url):
        client = Client(Server.of(url))
        try:
            async with asyncio.timeout(20):
                return await client.post("/", {})
        finally:
            client.close()

    with answering(said, **how) as url:
        return asyncio.run(once(url))


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n" * 2 + chunked(b"abc"),
        chunked(b"abc").replace(b"chunked", b"Chunked"),
        chunked(b"a", b"bc")[:-2] + b"X-Trailer: 1\r\n\r\n",
        CHUNKED + b"3;a=b\r\nabc\r\n0;c\r\n\r\n",
        whole(b"abc") + b"and more",
    ],
)
def test_every_framing_is_read(said):
    assert ask(said).body == b"abc"


def test_a_chunk_that_looks_like_the_end_is_none():
    body = b"a\r\n0\r\n\r\n"
    assert ask(chunked(body, b"b")).body == body + b"b"
    with pytest.raises(ConnectionResetError):
        ask(chunked(body)[:-5], closes=True)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (whole(b"").replace(b": 0", b": abc"), "Content-Length"),
        (whole(b"").replace(b": 0", b": -5"), "Content-Length"),
        (whole(b"").replace(b": 0", b": " + b"9" * 5000), "Content-Length"),
        (whole(b"").replace(b": 0", b": 1" + b"0" * 12), "is over 256 MiB"),
        (whole(b"", b"abc"), "not HTTP"),
        (b"HTTP/1.1\r\n\r\n", "not HTTP"),
        (b"SSH-2.0-x\r\n", "not HTTP"),
        (CHUNKED + b"x\r\n", "without its size"),
        (CHUNKED + b"-5\r\n", "without its size"),
        (CHUNKED + b"\r\n", "without its size"),
    ],
)
def test_what_is_no_http_is_said(said, why):
    with pytest.raises(BadAnswer, match=why):
        ask(said)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"HTTP/1.1 200 OK\r\nA: x", "64 KiB of headers"),
        (b"HTTP/1.1 200 OK\r\n\r\nx", "is over 4 MiB"),
        (b"HTTP/1.1 400 No\r\n\r\nx", "is over 64 KiB"),
        (CHUNKED + b"0\r\nx", "without its size"),
        (CHUNKED + b"0;x", "without its size"),
    ],
)
def test_an_answer_without_end_ends(monkeypatch, said, why):
    monkeypatch.setattr(http_client, "MOST_BODY", 1 << 22)
    with pytest.raises(BadAnswer, match=why):
        ask(said, is_endless=True)


def test_an_event_without_end_is_said():
    reply = Reply(200, {}, 0.0, [(0.0, b"data: "), *[(1.0, b"x" * (1 << 18))] * 5])
    assert "1 MiB" in (answered(0.0, reply).error or "")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("x", "is not a JSON object"),
        ("[1]", "is not a JSON object"),
        ("[" * 100_000, "is not a JSON object"),
        ('{"usage": {"prompt_tokens": %s}}' % ("9" * 5000), "is not a JSON object"),
        ('{"choices": 5}', "is not a list of choices"),
        ('{"choices": [{"text": 5}]}', "text that is text"),
        ('{"usage": "x"}', "usage that is an object"),
        ('{"usage": {"completion_tokens": "x"}}', "usage that is numbers"),
        ('{"usage": {"completion_tokens": %s}}' % ("9" * 400), "usage that is numbers"),
        ('{"error": "broken"}', "broken"),
        ('{"error": {"message": 5}}', "gives no reason"),
        ('{"error": null, "choices": null, "usage": null}', None),
        ('{"usage": {"prompt_tokens": null, "completion_tokens": null}}', None),
    ],
)
def test_what_a_server_should_not_say_fails_a_request(data, why):
    events = ('{"choices": [{"text": "a"}]}', data, "[DONE]")
    sent = "".join(f"data: {each}\n\n" for each in events)
    error = answered(0.0, Reply(200, {}, 0.0, [(1.0, sent.encode())])).error
    assert error is None if why is None else why in (error or "")


def test_names_and_vocabularies_that_are_none(capfd):
    said = events(b'{"choices": [{"text": "a"}]}', b"[DONE]")
    words = ["bench", "serve", "--requests", "1", "--json", "--url"]
    for size in (b'"x"', b"-5", b"1e400", b"true", b"null"):
        models = whole(b'{"data": [{"id": "\\ud800", "meta": {"n_vocab": %s}}]}' % size)
        with answering(said, models) as url:
            assert main([*words, url]) == 0
        found = json.loads(capfd.readouterr().out)
        assert (found["model"], found["prompts"]) == ("\ud800", "random words")
    for name in (b"null", b"5", b"[]"):
        with answering(said, whole(b'{"data": [{"id": %s}]}' % name)) as url:
            assert main([*words, url]) == 2
        assert "names no model" in capfd.readouterr().err
