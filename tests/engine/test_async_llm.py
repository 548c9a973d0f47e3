"""Many callers at once: streams, limits, aborts, shutdown, failures, numbers for operators."""

import asyncio
import time
from itertools import pairwise

import pytest

from rooflax import (
    LLM,
    AsyncLLM,
    EngineError,
    ExecutionOptions,
    QueueFull,
    RequestError,
    async_llm,
)
from rooflax.engine.compilation import count_compilations
from rooflax.engine.sampling_params import SamplingParams
from rooflax.loading.settings import DEFAULT_MAX_WAITING

pytestmark = pytest.mark.oldest_jax

PROMPTS = [[3, 1, 4, 1, 5], list(range(40, 57)), [250], list(range(100, 130))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)


@pytest.fixture(scope="module")
def alone(folder):
    return LLM(folder, prefix_caching=False)


def serve(folder, **given):
    options = ExecutionOptions(decode_steps=given.pop("decode_steps", 4))
    return AsyncLLM(folder, **{"max_num_seqs": 4, "options": options} | given)


@pytest.fixture(scope="module")
def server(folder):
    llm = serve(folder)
    yield llm
    asyncio.run(llm.shutdown())


def settle(server):
    """Waits until nothing runs; every block must be free then."""

    async def idle():
        for _ in range(500):
            await asyncio.sleep(0.01)
            if server._thread._num_open == 0 and not server._thread.engine.has_unfinished:
                return

    asyncio.run(idle())
    assert server._thread._num_open == 0
    assert not any(server._thread.engine.scheduler.blocks.num_used)
    assert not server._inboxes


def test_a_stream_comes_in_pieces_that_add_up(server, alone):
    async def read():
        return [delta async for delta in server.stream(PROMPTS[1], LONG)]

    deltas = asyncio.run(read())
    assert len(deltas) > 3
    final = deltas[-1].completion
    assert "".join(d.text for d in deltas) == final.text
    assert tuple(t for d in deltas for t in d.tokens) == final.tokens
    assert final.tokens == alone.generate([PROMPTS[1]], LONG)[0].tokens


def test_a_slow_reader_gets_fewer_pieces_and_every_token(server, alone):
    async def read(pause_s):
        deltas = []
        async for delta in server.stream(PROMPTS[1], LONG):
            deltas.append(delta)
            await asyncio.sleep(pause_s)
        return deltas

    slow = asyncio.run(read(0.3))
    assert len(slow) < 10
    wanted = alone.generate([PROMPTS[1]], LONG)[0]
    assert tuple(t for d in slow for t in d.tokens) == wanted.tokens
    assert "".join(d.text for d in slow) == wanted.text
    settle(server)


def test_a_decoder_of_ones_own_makes_the_text_that_stop_strings_are_looked_for_in(server):
    class Counting:
        def __init__(self, index):
            self.index, self.count = index, 0

        def push(self, token_id):
            self.count += 1
            return f"{self.index}.{self.count};"

        def flush(self, *, is_cut):
            return ""

        def take(self, num_characters, *, is_last):
            return self.count

    params = SamplingParams(
        temperature=1.0, seed=1, n=2, max_tokens=30, ignore_eos=True, stop=("1.4;",)
    )

    async def read():
        deltas = [d async for d in server.stream(PROMPTS[0], params, decoders=Counting)]
        assert {d.index: d.reading for d in deltas} == {0: 30, 1: 4}
        return {d.index: d.completion for d in deltas if d.completion is not None}

    done = asyncio.run(read())
    assert (done[1].text, done[1].stop_reason, len(done[1].tokens)) == ("1.1;1.2;1.3;", "1.4;", 4)
    assert done[0].finish_reason == "length" and done[0].text.endswith("0.30;")
    settle(server)


def test_health_says_whether_work_goes_on(folder, monkeypatch):
    server = serve(folder)
    assert server.health() == (False, None, 0, 0.0)
    step = server._thread.engine.step
    monkeypatch.setattr(server._thread.engine, "step", lambda: time.sleep(0.4) or step())

    async def look():
        task = asyncio.create_task(server.generate(PROMPTS[0], GREEDY))
        await asyncio.sleep(0.3)
        during = server.health()
        await task
        await server.shutdown()
        return during

    during = asyncio.run(look())
    assert during.num_open == 1 and 0.1 < during.stalled_s < 0.4
    assert server.health().is_stopping


def test_samples_of_one_prompt_differ_and_share_its_blocks(server, alone):
    params = SamplingParams(temperature=1.2, seed=3, n=3, max_tokens=8, ignore_eos=True)
    prompt = list(range(60, 100))
    found = asyncio.run(server.generate(prompt, params))
    assert [c.index for c in found] == [0, 1, 2]
    assert [c.tokens for c in found] == [c.tokens for c in alone.generate([prompt], params)]
    assert [c.num_cached_tokens for c in found] == [0, 32, 32]
    again = asyncio.run(server.generate(prompt, params, cache_salt="another tenant"))
    assert again[0].num_cached_tokens == 0 and again[0].tokens == found[0].tokens


def test_beams_run_among_others_and_may_be_cancelled(server, alone, monkeypatch):
    params = SamplingParams(num_beams=3, n=2, max_tokens=10, ignore_eos=True)
    asked = [(PROMPTS[1], params), (PROMPTS[0], GREEDY), (PROMPTS[3], params)]

    async def at_once():
        return await asyncio.gather(*(server.generate(*each) for each in asked))

    with count_compilations() as counts:
        found = asyncio.run(at_once())
    assert counts.requests == 0
    for (prompt, given), got in zip(asked, found, strict=True):
        wanted = alone.generate([prompt], given)
        assert [(c.index, c.tokens) for c in got] == [(c.index, c.tokens) for c in wanted]
    settle(server)
    with pytest.raises(RequestError, match="num_beams is 5 and max_num_seqs 4"):
        asyncio.run(server.generate(PROMPTS[0], SamplingParams(num_beams=5)))
    slowly(server, monkeypatch)

    async def cancel():
        task = asyncio.create_task(server.generate(PROMPTS[0], params))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    settle(server)


def test_a_stop_string_ends_the_request_and_frees_it(server, alone):
    whole = alone.generate([PROMPTS[1]], LONG)[0]
    stop = next(c for c in whole.text[3:] if c != "�" and whole.text.index(c) > 1)
    given = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True, stop=stop)
    (found,) = asyncio.run(server.generate(PROMPTS[1], given))
    wanted = alone.generate([PROMPTS[1]], given)[0]
    assert (found.text, found.tokens, found.finish_reason) == (wanted.text, wanted.tokens, "stop")
    settle(server)


def slowly(server, monkeypatch):
    """Each step takes long enough that a caller is sure to come in between."""
    engine = server._thread.engine
    step = engine.step

    def slow():
        time.sleep(0.05)
        return step()

    monkeypatch.setattr(engine, "step", slow)


def test_cancelled_and_closed_streams_leave_nothing_behind(server, monkeypatch):
    slowly(server, monkeypatch)

    async def cancel():
        task = asyncio.create_task(server.generate(PROMPTS[0], LONG))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stream = server.stream(PROMPTS[0], LONG)
        await anext(stream)
        await stream.aclose()

    before = server.metrics()["num_finished"].get("abort", 0)
    asyncio.run(cancel())
    settle(server)
    assert server.metrics()["num_finished"]["abort"] == before + 2


def test_a_full_queue_rejects_and_recovers(folder, monkeypatch):
    server = serve(folder, max_num_seqs=1, max_waiting=2, decode_steps=8)
    slowly(server, monkeypatch)

    async def crowd():
        tasks = [asyncio.create_task(server.generate(PROMPTS[0], LONG)) for _ in range(3)]
        await asyncio.sleep(0)
        for _ in range(5):  # a rejected one leaves no room behind
            with pytest.raises(QueueFull, match="3 sequences"):
                await server.generate(PROMPTS[0], GREEDY)
        return await asyncio.gather(*tasks)

    found = asyncio.run(crowd())
    assert len({c.tokens for (c,) in found}) == 1
    assert len(asyncio.run(server.generate(PROMPTS[0], GREEDY))[0].tokens) == 12
    asyncio.run(server.shutdown())
    assert server._thread._num_open == 0


@pytest.mark.parametrize("drain", [True, False])
def test_shutdown_drains_or_aborts_and_rejects_what_comes_after(folder, drain, monkeypatch):
    server = serve(folder, max_num_seqs=1, decode_steps=8)
    slowly(server, monkeypatch)

    async def run():
        tasks = [asyncio.create_task(server.generate(PROMPTS[0], LONG)) for _ in range(2)]
        await asyncio.sleep(0.01)
        await server.shutdown(drain=drain)
        found = await asyncio.gather(*tasks)
        with pytest.raises(EngineError, match="shutting down"):
            await server.generate(PROMPTS[0], GREEDY)
        return [c.finish_reason for (c,) in found]

    assert asyncio.run(run()) == (["length"] * 2 if drain else ["abort"] * 2)


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(server, alone):
    engine = server._thread.engine
    run = engine.runner.run

    def fail(*_):
        engine.runner.cache, engine.runner.lost_state = None, True  # it was donated to the call
        raise RuntimeError("INTERNAL: a cable is loose\nmore")

    engine.runner.run = fail
    with pytest.raises(EngineError, match="INTERNAL: a cable is loose$"):
        asyncio.run(server.generate(PROMPTS[0], GREEDY))
    engine.runner.run = run
    (found,) = asyncio.run(server.generate(PROMPTS[0], GREEDY))
    assert found.tokens == alone.generate([PROMPTS[0]], GREEDY)[0].tokens
    settle(server)


def test_a_shape_that_was_not_warmed_up_is_an_error_that_names_it(server):
    shapes = server._thread.engine.runner._warm
    taken = {shape for shape in shapes if shape.kind == "step"}
    shapes -= taken
    try:
        with pytest.raises(EngineError, match="step of .* tokens, context 131.*warmed up"):
            asyncio.run(server.generate(PROMPTS[0], GREEDY))
    finally:
        shapes |= taken


def test_the_manifest_is_short_and_says_what_was_compiled(server):
    assert 4 < len(server.warm_up_report) <= 12
    assert all(
        line.seconds >= 0 and line.cache in ("hit", "miss") for line in server.warm_up_report
    )
    names = [line.name for line in server.warm_up_report]
    assert len(set(names)) == len(names)
    assert "decode of 1 sequences, context 131" in names


def test_numbers_for_operators(folder):
    server = serve(folder)
    prompt = list(range(50))
    for _ in range(2):
        asyncio.run(server.generate(prompt, GREEDY))
    found = server.metrics()
    asyncio.run(server.shutdown())
    assert (found["num_prompt_tokens"], found["num_cached_tokens"]) == (100, 48)
    assert found["num_generated_tokens"] == 24
    assert found["num_finished"] == {"length": 2}
    assert (found["num_waiting"], found["num_running"], found["num_compilations"]) == (0, 0, 0)
    assert sum(found["ttft_s"]["counts"]) == sum(found["e2e_s"]["counts"]) == 2
    assert sum(found["itl_s"]["counts"]) == 22
    parts = [found[name]["total"] for name in ("queue_s", "prefill_s", "decode_s")]
    assert sum(parts) == pytest.approx(found["e2e_s"]["total"], abs=0.05)
    assert min(parts) >= 0 and parts[2] > 0
    assert found["step_tokens"]["total"] >= 100 - 48 + 22
    assert len(found["ttft_s"]["counts"]) == len(found["ttft_s"]["bounds"]) + 1
    assert found["blocks_used"] == [0, 0] and all(found["blocks_total"])


@pytest.mark.every_jax
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"max_waiting": 0}, "max_waiting"),
        ({"max_pieces_per_s": 0}, "max_pieces_per_s"),
        ({"max_tokens_per_step": True}, "max_tokens_per_step"),
        ({"options": ExecutionOptions(jit=False)}, "jit"),
        ({"options": ExecutionOptions(use_cache=False)}, "cache"),
    ],
)
def test_arguments_out_of_range_are_rejected(folder, given, reason):
    with pytest.raises(RequestError, match=reason):
        AsyncLLM(folder, **given)


def test_none_is_the_default(folder, monkeypatch):
    asked = {}

    class Thread:
        def __init__(self, engine, deliver, **given):
            asked.update(given)

        def wait_until_warm(self):
            pass

    monkeypatch.setattr(async_llm, "EngineThread", Thread)
    server = AsyncLLM(folder, max_waiting=None, max_pieces_per_s=None, prefix_caching=None)
    assert asked["max_waiting"] == DEFAULT_MAX_WAITING
    assert server.llm.prefix_caching is True


@pytest.mark.every_jax
def test_requests_that_cannot_be_done_are_rejected_before_they_wait(server):
    for prompt, params, reason in (
        ([], None, "no tokens"),
        ([1] * 200, None, "200 tokens"),
        ([1], SamplingParams(banned_token_ids=[400]), "banned_token_ids.*400"),
    ):
        with pytest.raises(RequestError, match=reason):
            asyncio.run(server.generate(prompt, params))
    settle(server)


def test_pieces_are_merged_to_so_many_a_second_and_none_is_lost(folder, server):
    async def pieces(of):
        started, found = time.perf_counter(), []
        async for delta in of.stream(PROMPTS[0], LONG):
            found.append((time.perf_counter() - started, delta))
        return found

    slow = serve(folder, max_pieces_per_s=5)
    try:
        wanted, found = asyncio.run(pieces(server)), asyncio.run(pieces(slow))
    finally:
        asyncio.run(slow.shutdown())
    assert sum((d.tokens for _, d in found), ()) == sum((d.tokens for _, d in wanted), ())
    assert "".join(d.text for _, d in found) == found[-1][1].completion.text
    assert len(found) <= len(wanted)
    gaps = [b[0] - a[0] for a, b in pairwise(found[:-1])]
    assert all(gap > 0.15 for gap in gaps)  # all but the last, which waits for nothing
    assert found[-1][1].completion is not None
