"""Scheduler and block manager under random requests: pure Python, no device, no jax."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooflax.engine.block_manager import BlockManager
from rooflax.engine.sampling_params import SamplingParams
from rooflax.engine.scheduler import Scheduler
from rooflax.engine.sequence import Sequence, SequenceStatus
from rooflax.nn.layout import blocks_needed

BLOCK_SIZE = 4


def sequence(prompt=3, max_tokens=5, request=0, stop_ids=()):
    return Sequence(request, list(range(prompt)), SamplingParams(), max_tokens, frozenset(stop_ids))


def make(windows=(None, 5), *, slots=3, chunk=6, steps=2, longest=30, short_of=0):
    """A scheduler as the engine builds it; `short_of` takes blocks away from every pool."""
    new_tokens = max(chunk, steps)
    num_blocks = tuple(
        1 + slots * blocks_needed(window, longest, new_tokens, BLOCK_SIZE) - short_of
        for window in windows
    )
    blocks = BlockManager(windows, num_blocks, BLOCK_SIZE)
    return Scheduler(blocks, num_slots=slots, prefill_chunk=chunk, decode_steps=steps)


def run_on_paper(step, stop_after=None):
    """What the engine does after a step, with token 0 for every choice."""
    for row, seq in enumerate(step.sequences):
        seq.num_computed_tokens += step.num_tokens[row]
        if seq.is_prefill:
            continue
        for index in range(step.num_steps):
            seq.append(7 if stop_after == seq.num_output_tokens else 0, 0.0)
            if seq.is_finished:
                break
            if index:
                seq.num_computed_tokens += 1


def check_blocks(scheduler):
    """No block is lost, given twice or block 0; every token to come has a place."""
    blocks = scheduler.blocks
    for group, window in enumerate(blocks.windows):
        held = [b for seq in scheduler.running for b in seq.block_tables[group]]
        everything = held + list(blocks.free[group])
        assert sorted(everything) == list(range(1, blocks.num_blocks[group]))
        new_tokens = max(scheduler.prefill_chunk, scheduler.decode_steps)
        for seq in scheduler.running:
            first = seq.first_positions[group]
            assert first % BLOCK_SIZE == 0
            assert window is not None or first == 0
            table = seq.block_tables[group]
            assert len(table) <= blocks_needed(window, seq.longest, new_tokens, BLOCK_SIZE)
            if window is not None and table:
                assert first <= max(seq.num_computed_tokens - window + 1, 0)


def check_step(scheduler, step):
    """Every row has blocks for what it writes and for what its queries see."""
    assert 0 < len(step.sequences) <= 3
    assert len({seq.slot for seq in step.sequences}) == len(step.sequences)
    for seq, count in zip(step.sequences, step.num_tokens, strict=True):
        assert seq.status is SequenceStatus.RUNNING
        if step.is_prefill:
            assert 1 <= count <= scheduler.prefill_chunk and step.num_steps == 1
            assert seq.num_computed_tokens + count <= seq.num_prompt_tokens
        else:
            assert count == 1 == seq.num_uncomputed_tokens
            assert 1 <= step.num_steps <= scheduler.decode_steps
            assert step.num_steps <= seq.num_remaining_tokens
        written = seq.num_computed_tokens + count * step.num_steps
        for group, window in enumerate(scheduler.blocks.windows):
            first = seq.first_positions[group]
            end = first + BLOCK_SIZE * len(seq.block_tables[group])
            assert end >= written
            if window is not None:
                oldest = max(seq.num_computed_tokens - window + 1, 0)
                assert first <= oldest, "a query sees a block that is gone"
                assert first + BLOCK_SIZE > oldest, "a block nobody sees is still held"


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 20), st.integers(1, 10)),
        st.tuples(st.just("step"), st.integers(1, 4), st.integers(0, 6)),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0)),
    ),
    max_size=40,
)


@given(
    actions=ACTIONS,
    windows=st.sampled_from([(None,), (5,), (None, 5), (None, 3, 9)]),
    chunk=st.integers(1, 9),
    steps=st.integers(1, 5),
    short_of=st.integers(0, 6),
)
@settings(max_examples=150, deadline=None)
def test_random_requests_leak_no_block(actions, windows, chunk, steps, short_of):
    scheduler = make(windows, chunk=chunk, steps=steps, short_of=short_of)
    everyone = []
    for action, first, second in actions:
        if action == "add":
            seq = sequence(first, second, len(everyone), stop_ids={7})
            needed = scheduler.blocks.reservation(seq, max(chunk, steps))
            if scheduler.blocks.fits_at_all(needed):
                everyone.append(seq)
                scheduler.add(seq)
        elif action == "cancel" and everyone:
            chosen = everyone[first % len(everyone)]
            before = chosen.finish_reason
            scheduler.cancel(chosen)
            assert chosen.is_finished and chosen.finish_reason == (before or "abort")
        for _ in range(first if action == "step" else 0):
            step = scheduler.schedule()
            check_blocks(scheduler)
            if step is None:
                assert not scheduler.has_unfinished
                break
            check_step(scheduler, step)
            run_on_paper(step, stop_after=second)
            scheduler.finish_step(step)
            check_blocks(scheduler)
    for _ in range(2_000):
        step = scheduler.schedule()
        if step is None:
            break
        check_step(scheduler, step)
        run_on_paper(step)
        scheduler.finish_step(step)
    assert not scheduler.has_unfinished
    assert all(seq.is_finished and seq.block_tables == [] for seq in everyone)
    assert scheduler.blocks.num_free == [n - 1 for n in scheduler.blocks.num_blocks]
    assert scheduler.blocks._reserved == [0] * len(windows)
    assert len(scheduler._free_slots) == 3


def test_what_is_admitted_can_run_to_its_end():
    """Two sequences of 30 tokens do not fit into the blocks of one and a half."""
    scheduler = make((None,), slots=2, longest=30)
    scheduler.blocks.num_blocks = (13,)
    scheduler.blocks.free[0] = type(scheduler.blocks.free[0])(range(1, 13))
    first, second = sequence(20, 10), sequence(20, 10)
    scheduler.add(first)
    scheduler.add(second)
    step = scheduler.schedule()
    assert step.sequences == [first] and list(scheduler.waiting) == [second]
    while not first.is_finished:
        run_on_paper(step)
        scheduler.finish_step(step)
        step = scheduler.schedule()
    assert step.sequences == [second]


def test_first_come_first_served_and_prompts_before_decoding():
    scheduler = make((None,), slots=2, chunk=4, steps=3)
    sequences = [sequence(6, 5, i) for i in range(3)]
    for seq in sequences:
        scheduler.add(seq)
    step = scheduler.schedule()
    assert step.is_prefill and step.sequences == sequences[:2] and step.num_tokens == [4, 4]
    run_on_paper(step)
    step = scheduler.schedule()
    assert step.is_prefill and step.num_tokens == [2, 2]
    run_on_paper(step)
    step = scheduler.schedule()
    assert not step.is_prefill and step.num_steps == 3
    scheduler.cancel(sequences[0])
    assert scheduler.schedule().sequences == [sequences[2]]  # its prompt comes first


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
    seq.truncate(1)
    assert seq.output_tokens == [9] and seq.token_times_s == [0.0]


@pytest.mark.parametrize("module", ["scheduler", "block_manager", "sequence", "sampling_params"])
def test_planning_needs_no_jax(module):
    code = f"import rooflax.engine.{module}, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
