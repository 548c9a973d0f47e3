"""Scheduler, block manager and the arrays of steps under random requests: no device."""

import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooflax.engine.block_manager import BlockManager
from rooflax.engine.buckets import Buckets
from rooflax.engine.packing import DecodeWriter, StepLayout, Writer
from rooflax.engine.sampling_params import SamplingParams
from rooflax.engine.scheduler import Scheduler
from rooflax.engine.sequence import KVState, Sequence, with_siblings
from rooflax.nn.engine_config import EngineConfig
from rooflax.nn.execution import ExecutionOptions
from rooflax.nn.layout import blocks_needed

BLOCK_SIZE = 4
SLOTS = 3


def sequence(prompt=3, max_tokens=5, request=0, stop_ids=(), salt="", tokens=None):
    ids = list(range(prompt)) if tokens is None else tokens
    params, ends = SamplingParams(), frozenset(stop_ids)
    return Sequence(request, ids, params, max_tokens, ends, kv=KVState(salt))


def candidates(seq):
    """A model of ten tokens: log-probabilities that depend on every token before."""
    past = bytes(seq.tokens)
    scored = [(token, -3 * zlib.crc32(past + bytes([token])) / 2**32) for token in range(10)]
    return tuple(sorted(scored, key=lambda c: -c[1])[: seq.sampler.num_candidates])


def make(windows=(None, 5), *, slots=SLOTS, chunk=6, steps=2, longest=30, share=1.0, **given):
    """A scheduler with blocks for `share` of what `slots` longest sequences need."""
    new_tokens = max(chunk, steps)
    needed = [blocks_needed(window, longest, new_tokens, BLOCK_SIZE) for window in windows]
    num_blocks = tuple(1 + max(n, int(share * slots * n)) for n in needed)
    blocks = BlockManager(windows, num_blocks, BLOCK_SIZE, prefix_caching=given.pop("cache", True))
    sizes = {"max_tokens_per_step": slots * chunk, "prefill_chunk": chunk, "decode_steps": steps}
    config = EngineConfig(
        options=ExecutionOptions(), max_num_seqs=slots, max_model_len=longest, **(sizes | given)
    )

    def limit_steps(decodes, most):  # as the engine's
        return 1 if any(s.sampler.num_candidates is not None for s in decodes) else most

    return Scheduler(blocks, config, limit_steps=limit_steps)


class StubModel:
    """What the engine does with a step; remembers what each block of each group holds."""

    def __init__(self, scheduler, next_token=lambda seq: 0):
        self.scheduler, self.next_token = scheduler, next_token
        self.content = [{} for _ in scheduler.blocks.pools]

    def run(self, step, stop_early=None):
        num_steps = step.num_steps if stop_early is None else min(step.num_steps, stop_early)
        before = [dict(held) for held in self.content]
        for group, source, destination in step.copies:
            for offset in range(BLOCK_SIZE):
                held = before[group].get((source, offset))
                self.content[group][destination, offset] = held
        for seq in step.decodes:
            self.compute(seq, 1)
            if seq.sampler.num_candidates is not None:
                assert step.num_steps == 1
                seq.sampler.candidates = candidates(seq)
                continue
            for index in range(num_steps):
                if index:
                    self.compute(seq, 1)
                seq.append(self.next_token(seq), 0.0)
                if seq.is_finished:
                    break
        for seq, count in step.prefills:
            self.compute(seq, count)
            if seq.num_uncomputed_tokens == 0 and seq.sampler.num_candidates is not None:
                seq.sampler.candidates = candidates(seq)
            elif seq.num_uncomputed_tokens == 0:
                seq.append(self.next_token(seq), 0.0)
        self.scheduler.finish_step(step)
        self.after_step()

    def after_step(self):
        """What features do."""

    def compute(self, seq, count):
        """Writes tokens into their slots, after checking that each query sees its own past."""
        for position in range(seq.num_computed_tokens, seq.num_computed_tokens + count):
            for group, window in enumerate(self.scheduler.blocks.windows):
                block, offset = self.slot(seq, group, position)
                self.content[group][block, offset] = (seq.tokens[: position + 1], seq.kv.cache_salt)
                oldest = 0 if window is None else max(0, position - window + 1)
                for seen in range(oldest, position + 1):
                    held = self.content[group].get(self.slot(seq, group, seen))
                    assert held == (seq.tokens[: seen + 1], seq.kv.cache_salt)
        seq.num_computed_tokens += count

    def slot(self, seq, group, position):
        relative = position - seq.kv.first_positions[group]
        assert relative >= 0, "a query sees a block that is gone"
        return seq.kv.block_tables[group][relative // BLOCK_SIZE], relative % BLOCK_SIZE


def check_blocks(scheduler):
    """free + used == total, every owner counted once, and nobody owns block 0."""
    blocks = scheduler.blocks
    for group, window in enumerate(blocks.windows):
        pool = blocks.pools[group]
        owners = [0] * pool.num_blocks
        for seq in scheduler.running:
            table = seq.kv.block_tables[group]
            assert len(set(table)) == len(table) and 0 not in table
            for block in table:
                owners[block] += 1
            first = seq.kv.first_positions[group]
            assert first % BLOCK_SIZE == 0 and (window is not None or first == 0)
            most = blocks_needed(window, seq.longest, scheduler.new_tokens, BLOCK_SIZE)
            assert len(table) <= most
        assert owners == pool.ref_count
        assert {b for b in range(1, pool.num_blocks) if owners[b] == 0} == set(pool.free)
        assert set(pool._hash_of) == set(pool._block_of.values())
        assert len(pool._hash_of) == len(pool._block_of)
    assert all(not seq.kv.block_tables and seq.schedule.slot is None for seq in scheduler.waiting)
    slots = [seq.schedule.slot for seq in scheduler.running] + scheduler._free_slots
    assert sorted(slots) == list(range(scheduler.config.max_num_seqs))


def check_step(scheduler, step):
    """Rows are running sequences, once each, within the budget; queues are in order of arrival."""
    rows = step.sequences
    assert len({id(seq) for seq in rows}) == len(rows)
    waits = any(len(seq.schedule.siblings) > 1 for seq in scheduler.running)
    assert rows or waits, "a step must get somebody on"
    assert all(seq.schedule.slot is not None and not seq.is_finished for seq in rows)
    assert all(seq.num_uncomputed_tokens == 1 for seq in step.decodes)
    assert 1 <= step.num_steps <= scheduler.config.decode_steps
    assert all(step.num_steps <= seq.num_remaining_tokens for seq in step.decodes)
    counts = [count for _, count in step.prefills]
    assert all(1 <= count <= scheduler.config.prefill_chunk for count in counts)
    assert sum(counts) <= scheduler.token_budget
    order = [s.request_id for s in (*scheduler.running, *scheduler.waiting)]
    assert order == sorted(order), "first come, first served"


def check_decode_rows(writer, step):
    """What is kept from step to step is what a new array would say."""
    if step.prefills or not step.decodes:
        return
    new = Writer(writer.layout, SLOTS)
    new.header[:] = step.num_steps, len(step.decodes), 0
    for seq in step.decodes:
        sampler, count = seq.sampler, seq.num_tokens
        sampler.num_uncounted, sampler.num_discarded = count % 2, count % 3
        new.add(seq, seq.num_computed_tokens, 1)
    np.testing.assert_array_equal(writer.write(step.decodes, step.num_steps), new.finish())


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 20), st.integers(1, 10)),
        st.tuples(st.just("step"), st.integers(1, 4), st.integers(1, 3)),
        st.tuples(st.just("abort"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("preempt"), st.just(0), st.just(0)),
        st.tuples(st.just("siblings"), st.integers(1, 20), st.integers(1, 10)),
    ),
    max_size=60,
)
LOADS = given(
    actions=ACTIONS,
    windows=st.sampled_from([(None,), (5,), (None, 5), (None, 3, 9)]),
    chunk=st.integers(1, 9),
    steps=st.integers(1, 5),
    budget=st.integers(1, 30),
    share=st.sampled_from([0.0, 0.4, 0.7, 1.0]),
    cache=st.booleans(),
    alphabet=st.integers(1, 2),
)


@LOADS
@settings(max_examples=200, deadline=None)
def test_random_requests_leak_nothing_and_mix_nothing(**load):
    run_random(**load)


def run_random(
    actions,
    windows,
    chunk,
    steps,
    budget,
    share,
    cache,
    alphabet,
    *,
    model=StubModel,
    siblings=None,
):
    """Few tokens, so that prompts share beginnings; few blocks, so that some must give way.

    Args:
        model: runs the steps.
        siblings: makes sequences that run together, if any shall; the first of them.

    Returns:
        Every sequence, of siblings the first.
    """
    scheduler = make(
        windows, chunk=chunk, steps=steps, max_tokens_per_step=budget, share=share, cache=cache
    )
    stub = model(scheduler, lambda seq: 7 if seq.num_tokens % 11 == 0 else seq.num_tokens % 2)
    tables = tuple(blocks_needed(w, 30, scheduler.new_tokens, BLOCK_SIZE) for w in windows)
    writer = DecodeWriter(StepLayout(SLOTS, SLOTS, tables), SLOTS)
    everyone = []

    def step(early=None):
        planned = scheduler.plan()
        check_blocks(scheduler)
        if planned is None:
            assert not scheduler.has_unfinished
            return False
        check_step(scheduler, planned)
        check_decode_rows(writer, planned)
        stub.run(planned, early)
        check_blocks(scheduler)
        return True

    for action, first, second in actions:
        if action == "add":
            tokens = [(first * i) % alphabet for i in range(first)]
            salt = "a" if second % 5 == 0 else ""
            seq = sequence(max_tokens=second, request=len(everyone), tokens=tokens, salt=salt)
            seq.stop_ids = frozenset({7})
            assert scheduler.can_ever_run(seq)
            everyone.append(seq)
            scheduler.add(seq)
        elif action == "siblings" and siblings:
            tokens = [(first * i) % alphabet for i in range(first)]
            seq = siblings(2 + first % 2, max_tokens=second, request=len(everyone), tokens=tokens)
            if scheduler.can_ever_run(seq):
                everyone.append(seq)
                for member in with_siblings([seq]):
                    scheduler.add(member)
        elif action == "abort" and everyone:
            chosen = everyone[first % len(everyone)]
            before = chosen.finish_reason
            scheduler.abort(chosen)
            assert chosen.is_finished and chosen.finish_reason == (before or "abort")
        elif action == "preempt" and scheduler.running:
            scheduler.preempt(scheduler.running[-1])
        for _ in range(first if action == "step" else 0):
            step(second)
    for _ in range(5_000):
        if not step():
            break
    assert not scheduler.has_unfinished
    assert all(s.is_finished and s.kv.block_tables == [] for s in with_siblings(everyone))
    assert scheduler.blocks.num_used == [0] * len(windows)
    return everyone


def run_all(scheduler, stub):
    steps = 0
    while (step := scheduler.plan()) is not None:
        stub.run(step)
        steps += 1
    return steps


def test_who_comes_last_gives_way_first_and_finishes_all_the_same():
    scheduler = make((None,), slots=2, chunk=30, steps=1, longest=30, share=0.6, cache=False)
    stub = StubModel(scheduler)
    first, second = sequence(10, 20, 0), sequence(10, 20, 1)
    scheduler.add(first)
    scheduler.add(second)
    run_all(scheduler, stub)
    assert (first.schedule.num_preemptions, second.schedule.num_preemptions) == (
        0,
        scheduler.num_preemptions,
    )
    assert second.schedule.num_preemptions >= 1
    assert first.num_output_tokens == second.num_output_tokens == 20


def test_decoding_goes_on_beside_prompts_within_the_budget():
    scheduler = make((None,), slots=3, chunk=4, steps=3, max_tokens_per_step=5, longest=40)
    stub = StubModel(scheduler)
    first, second = sequence(4, 9, 0), sequence(10, 5, 1, tokens=[9] * 10)
    scheduler.add(first)
    stub.run(scheduler.plan())
    assert first.num_output_tokens == 1
    scheduler.add(second)
    step = scheduler.plan()
    assert (step.decodes, step.num_steps, step.prefills) == ([first], 1, [(second, 4)])
    stub.run(step)
    assert scheduler.plan().prefills == [(second, 4)]
    run_all(scheduler, stub)
    step = make((None,), slots=1, steps=3, longest=40)
    alone = sequence(1, 9)
    step.add(alone)
    assert step.plan().num_steps == 3  # nothing else to do


def test_a_shared_beginning_is_computed_once():
    scheduler = make((None, 5), chunk=30, longest=40)
    stub = StubModel(scheduler)
    prefix = list(range(50, 66))
    sequences = [sequence(tokens=[*prefix, n], max_tokens=3, request=n) for n in range(3)]
    for seq in sequences:
        scheduler.add(seq)
    step = scheduler.plan()
    assert step.prefills == [(sequences[0], 17)]  # the others wait for it
    stub.run(step)
    step = scheduler.plan()
    assert step.decodes == sequences  # of each the last token is left


def test_no_salt_is_what_the_blocks_of_another_hash_to():
    """A digest that is text, as a salt, would publish blocks behind that block's."""
    blocks = BlockManager((None,), (99,), 16)
    for first in range(200_000):
        mine = sequence(tokens=[first, *range(40)])
        digest, following = blocks.hashes(mine, 2)
        try:
            salt = digest.decode()
        except UnicodeDecodeError:
            continue
        forged = sequence(tokens=mine.tokens[16:], salt=salt)
        assert blocks.hashes(forged, 1) != [following]
        return
    raise AssertionError("no digest was text")


def test_shared_blocks_are_reported_and_salted():
    scheduler = make((None,), chunk=30, longest=40)
    stub = StubModel(scheduler)
    prefix = list(range(50, 66))
    given = [("", 0), ("", 1), ("other", 2), ("", 3)]
    sequences = [
        sequence(tokens=[*prefix, n], max_tokens=3, request=n, salt=salt) for salt, n in given
    ]
    for seq in sequences:
        scheduler.add(seq)
    run_all(scheduler, stub)
    assert [seq.kv.num_cached_tokens for seq in sequences] == [0, 16, 0, 16]
    longer = sequence(tokens=prefix, max_tokens=1, request=4)
    scheduler.add(longer)
    run_all(scheduler, stub)
    assert longer.kv.num_cached_tokens == 12  # the last token is always computed


def test_the_blocks_used_longest_ago_are_forgotten_first():
    scheduler = make((None,), slots=1, chunk=40, longest=40, share=1.0)
    stub = StubModel(scheduler)
    assert [len(pool.free) for pool in scheduler.blocks.pools] == [10]

    def run(first_token, count):
        seq = sequence(tokens=[first_token] * count, max_tokens=1)
        scheduler.add(seq)
        run_all(scheduler, stub)
        return seq.kv.num_cached_tokens

    assert [run(1, 13), run(2, 13), run(1, 13)] == [0, 0, 12]
    assert run(3, 25) == 0  # 7 blocks: those of 2 go, and one of 1
    assert run(2, 13) == 0
    assert run(3, 25) == 24


@pytest.mark.parametrize("window", [3, 5, 9])
def test_a_prefix_hit_of_a_window_needs_only_what_the_next_query_sees(window):
    scheduler = make((None, window), slots=1, chunk=40, longest=40, share=1.0)
    stub = StubModel(scheduler)
    first = sequence(tokens=list(range(20)), max_tokens=1)
    scheduler.add(first)
    run_all(scheduler, stub)
    second = sequence(tokens=[*range(20), 99], max_tokens=1)
    scheduler.add(second)
    step = scheduler.plan()
    assert second.kv.num_cached_tokens == 20
    assert second.kv.first_positions == [0, max(0, 20 - window + 1) // BLOCK_SIZE * BLOCK_SIZE]
    stub.run(step)


def test_a_hit_shrinks_to_the_longest_beginning_whose_window_is_there():
    scheduler = make((None, 4), slots=1, chunk=40, longest=40, share=1.0)
    stub = StubModel(scheduler)
    scheduler.add(sequence(tokens=list(range(16)), max_tokens=1))
    run_all(scheduler, stub)
    pool = scheduler.blocks.pools[1]
    hashes = scheduler.blocks.hashes(sequence(tokens=list(range(16))), 4)
    gone = pool.find(hashes[3])
    del pool._block_of[pool._hash_of.pop(gone)]
    again = sequence(tokens=[*range(16), 5], max_tokens=1)
    assert scheduler.blocks.num_cached(again) == 12


def test_a_sequence_ends_by_id_or_by_length():
    seq = sequence(2, 2, stop_ids={9})
    seq.append(1, 0.0)
    assert not seq.is_finished and seq.num_remaining_tokens == 1
    seq.append(9, 0.1)
    assert seq.finish_reason == "stop"
    seq = sequence(2, 2)
    seq.append(9, 0.0)
    seq.append(9, 0.1)
    assert seq.finish_reason == "length" and seq.output_tokens == [9, 9]
    assert seq.output_since(1).tokens == (9,) and seq.output_since(1).times_s == (0.1,)


def test_what_cannot_run_even_alone_is_known_before():
    scheduler = make((None,), slots=1, longest=20)
    assert scheduler.can_ever_run(sequence(10, 10))
    assert not scheduler.can_ever_run(sequence(10, 11))


@pytest.mark.parametrize("pads", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("max_tokens", [100, 1024, 5000, 131072])
@pytest.mark.parametrize("slots", [1, 3, 16, 64])
def test_buckets_of_a_server_are_few_and_hold_everything(pads, in_place, max_tokens, slots):
    budget = max(slots, min(2048 if pads and in_place else 512, max_tokens))
    buckets = Buckets.of_server(slots, max_tokens, budget, reads_in_place=in_place, pads=pads)
    assert len(set(buckets.shapes())) == len(buckets.shapes()) <= 9
    for rows in range(1, slots + 1):
        shape = buckets.decode(rows, max_tokens)
        assert shape.tokens == shape.sequences >= rows and shape in buckets.shapes()
    for tokens in (1, 2, 33, 65, budget - 1, budget):
        shape = buckets.step(min(tokens, budget), max_tokens)
        assert shape in buckets.shapes()
        assert shape.sequences == slots and shape.tokens >= min(tokens, budget)
    assert buckets.step(budget + 1, max_tokens) is None


def test_prompts_are_cut_so_that_padded_buckets_are_full():
    how = {"contexts": (256,), "tokens": (32, 64, 128)}
    pads = Buckets((16,), pads=True, **how)
    assert pads.worth_running(10, 64) == 64
    assert pads.worth_running(10, 70) == 64  # the other six run next
    assert pads.worth_running(10, 110) == 110  # six in seven are real
    assert pads.worth_running(16, 20) == 20  # else no prompt would ever go on
    assert Buckets((16,), **how).worth_running(10, 70) == 70  # padding costs little here


@pytest.mark.parametrize("budget", [512, 2048])
def test_computed_over_requested_tokens_where_buckets_pad(budget):
    """A serving run as on a GPU: decode rows, and prompts of 1 to 200 tokens that keep coming."""
    buckets = Buckets.of_server(16, 1024, budget, reads_in_place=True, pads=True)
    blocks = BlockManager((None,), (1 + 16 * 64,), 16, prefix_caching=False)
    config = EngineConfig(
        options=ExecutionOptions(), max_num_seqs=16, max_model_len=1024, prefill_chunk=budget,
        max_tokens_per_step=budget, decode_steps=1,
    )  # fmt: skip
    scheduler = Scheduler(blocks, config, worth_running=buckets.worth_running)
    state = np.random.RandomState(0)
    params = SamplingParams(temperature=0.0)
    waiting = [
        Sequence(i, state.randint(0, 99, state.randint(1, 200)).tolist(), params, 64, frozenset())
        for i in range(200)
    ]
    computed = requested = 0
    while waiting or scheduler.has_unfinished:
        while waiting and len(scheduler.waiting) < 2:
            scheduler.add(waiting.pop())
        step = scheduler.plan()
        counts = [1] * len(step.decodes) + [count for _, count in step.prefills]
        requested += sum(counts)
        if step.prefills:
            computed += buckets.step(sum(counts), 1024).tokens
        else:
            computed += buckets.decode(len(counts), 1024).tokens
        for sequence, count in zip(step.sequences, counts, strict=True):
            sequence.num_computed_tokens += count
            if sequence.num_uncomputed_tokens == 0:
                sequence.append(7, 0.0)
        scheduler.finish_step(step)
    assert requested <= computed <= 1.25 * requested


@pytest.mark.parametrize(
    "module",
    [
        *("scheduler", "block_manager", "step_budget", "sequence", "sampling_params", "buckets"),
        *("metrics", "features.grammar", "features.speculation"),
    ],
)
def test_planning_needs_no_jax(module):
    code = f"import rooflax.engine.{module}, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
