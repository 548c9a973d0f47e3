"""The device's side of a step: forward, sampling, and several decode steps in one loop.

Pure functions of fixed shape; see `engine.step_functions` for how they are compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rooflax.engine import packing
from rooflax.engine.packing import StepLayout
from rooflax.models.model import Model
from rooflax.nn.batch import Batch
from rooflax.nn.execution import ExecutionOptions
from rooflax.nn.kv_cache import KVCache, copy_blocks
from rooflax.nn.layout import SCORED_AT_ONCE
from rooflax.nn.shards import Shards
from rooflax.ops import sampling_columns
from rooflax.ops.control import cond, while_loop
from rooflax.ops.sampling import TokenCounts, awaits_masks, logprobs_of, sample
from rooflax.ops.sampling_columns import NO_ID


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInput:
    """Inputs of one step, sent by the host.

    Attributes:
        packed: the sequences and their tokens, as `layout` says.
        params: a row per slot: its sampling parameters. Stays on the device.
        masks: a row per slot: bits of the tokens that a constrained row may choose; None if greedy.
        greedy: every row takes the most likely token and asks for nothing else: a program of its
            own, without what would only have to be compiled.
        hidden: what came out of the layers, where these ran one by one before.
    """

    packed: Int[Array, " size"]
    params: Int[Array, "slots width"]
    masks: Int[Array, "slots words"] | None
    layout: StepLayout = field(metadata={"static": True})
    greedy: bool = field(default=False, metadata={"static": True})
    hidden: Float[Array, "B T D"] | None = None

    @property
    def batch(self) -> Batch:
        batch = self.layout.batch(self.packed, self.hidden)
        return replace(batch, adapters=self.rows[:, packing.ADAPTER])

    @property
    def header(self) -> Int[Array, " numbers"]:
        return self.layout.split(self.packed)[0]

    @property
    def rows(self) -> Int[Array, "B width"]:
        """A row per sequence; those that sample come first."""
        return self.layout.split(self.packed)[1]

    @property
    def slots(self) -> Int[Array, " B"]:
        return self.rows[:, packing.SLOT]

    @property
    def samples(self) -> Bool[Array, " B"]:
        """Sequences whose last token is followed by a new one."""
        return self.rows[:, packing.SAMPLES] > 0

    @property
    def stop_ids(self) -> Int[Array, "B num_stop"]:
        return sampling_columns.split(self.params)[-1][self.slots]


Carry = tuple[KVCache | None, TokenCounts]
Packed = Int[Array, "steps B columns"]
Scores = Int[Array, "T columns"]


def embed(
    model: Model, carry: None, *host: Any, options: ExecutionOptions, shards: Shards | None
) -> tuple[Float[Array, "B T D"], Batch]:
    """Embeds the tokens: the input of the first layer, and the batch for all of them.

    Args:
        model: without layers.
        host: what the step that follows is given.
    """
    step = host[0]
    batch = step.batch if isinstance(step, StepInput) else Batch.dense(step, lengths=host[1])
    hidden, _ = model.forward(batch, None, options=options, shards=shards)
    return hidden, batch


def layer(
    model: Model,
    carry: tuple[Float[Array, "B T D"], KVCache | None],
    batch: Batch,
    *,
    options: ExecutionOptions,
    shards: Shards | None,
) -> tuple[Float[Array, "B T D"], KVCache | None]:
    """One layer by itself.

    Args:
        model: of this layer alone, as are the cache and the batch's block tables.
    """
    hidden, cache = carry
    return model.forward(replace(batch, hidden=hidden), cache, options=options, shards=shards)


def run_step(
    model: Model,
    carry: Carry,
    step: StepInput,
    *,
    options: ExecutionOptions,
    shards: Shards | None,
    is_scored: bool = False,
) -> tuple[tuple[Packed, Scores | None], Carry]:
    """Runs a list of tokens, decode rows and prompt chunks together, and chooses the token after
    each sequence's where they end."""
    cache, counts = carry
    batch = step.batch
    counts = _counted(counts, step, batch)
    hidden, cache = model.forward(batch, cache, options=options, shards=shards)
    packed, counts = _choose(model, counts, step, batch, hidden, options=options, shards=shards)
    scores = None
    if is_scored:
        scores = _scores(model, step, batch, hidden, options=options, shards=shards)
    return (packed[None], scores), (cache, counts)


def scored(
    model: Model, carry: Carry, step: StepInput, *, options: ExecutionOptions, shards: Shards | None
) -> tuple[tuple[Packed, Scores | None], Carry]:
    """A chunk of one sequence, with the log-probability of the token after each."""
    return run_step(model, carry, step, options=options, shards=shards, is_scored=True)


def decode(
    model: Model,
    carry: Carry,
    step: StepInput,
    *,
    max_steps: int,
    options: ExecutionOptions,
    shards: Shards | None,
) -> tuple[tuple[Packed, None], Carry]:
    """Runs as many tokens per sequence as the header says, each the one chosen before it.

    The number is data, at most `max_steps`, so one program serves every count. The loop ends early
    when a row has chosen one of its stop ids.
    """

    exchanges = not step.greedy and shards is None and awaits_masks(options.kernels)
    num_steps = step.header[packing.NUM_STEPS]

    def run(index: jax.Array, batch: Batch, carry: Carry) -> tuple[jax.Array, Carry]:
        hidden, cache = model.forward(batch, carry[0], options=options, shards=shards)
        exchange = jnp.stack([step.header[packing.EXCHANGE], index]) if exchanges else None
        packed, counts = _choose(
            model, carry[1], step, batch, hidden, options=options, shards=shards, exchange=exchange
        )
        return packed, (cache, counts)

    def goes_on(state: Any) -> jax.Array:
        return state[1]  # a condition that computes something is one more launch a token on a GPU

    def one(state: Any) -> Any:
        index, _, tokens, positions, carry, out = state
        of_step = _of_tokens(batch, tokens, positions)
        packed, carry = run(index, of_step, carry)
        tokens = packed[:, packing.TOKEN]
        stops = jnp.any((tokens[:, None] == step.stop_ids) & step.samples[:, None])
        more = (index + 1 < num_steps) & ~stops
        out = out.at[index].set(packed)
        return index + 1, more, tokens, of_step.context_lens, carry, out

    batch = step.batch
    width = packing.sampled_width(model.config.vocab_size, greedy=step.greedy)
    out = jnp.zeros((max_steps, batch.tokens.shape[1], width), jnp.int32)
    carry = (carry[0], _counted(carry[1], step, batch))
    start = (jnp.int32(0), num_steps > 0, batch.tokens[0], batch.query_positions, carry, out)
    *_, (cache, counts), out = while_loop(goes_on, one, start)
    if not step.greedy:
        tokens = jnp.where(out[:, :, packing.STATE] > 0, out[:, :, packing.TOKEN], NO_ID)
        counts = counts.keep_latest(step.slots, tokens.T)
    return (out, None), (cache, counts)


def verify(
    model: Model, carry: Carry, step: StepInput, *, options: ExecutionOptions, shards: Shards | None
) -> tuple[tuple[Packed, None], Carry]:
    """Runs every row's last token with drafts behind it, and chooses after each of them.

    A row's choices count up to the first that differs from the draft at its place: what comes
    after that was computed from tokens that are not there. Logits exist for all tokens at once.
    """
    cache, counts = carry
    batch = step.batch
    hidden, cache = model.forward(batch, cache, options=options, shards=shards)
    flat, num_tokens = hidden[0], batch.num_tokens
    owner, number = batch.owners
    drafts = _by_sequence(batch, batch.tokens[0])
    every_slot = jnp.where(batch.valid[0], step.slots[owner], step.params.shape[0] - 1)
    sampled = sample(
        model.logits(flat, options=options, shards=shards, num_rows=num_tokens),
        step.params,
        batch.positions[0] + 1,
        counts,
        every_slot,
        step.masks,
        greedy=step.greedy,
        pending=_drafts_before(drafts[owner], number),
        num_rows=num_tokens,
        implementation=options.kernels,
    )
    accepted = _accepted(batch, drafts, _by_sequence(batch, sampled.tokens))
    if not step.greedy:
        in_row = jnp.clip(number, 0, batch.longest - 1)
        is_accepted = accepted[owner, in_row] & batch.valid[0]
        counts = counts.add_generated(every_slot, sampled.tokens, is_accepted)
    is_finite = jnp.all(jnp.isfinite(flat), axis=1) & sampled.is_finite
    packed = packing.pack_sampled(sampled, is_finite, greedy=step.greedy)
    packed = jnp.where(accepted[:, :, None], _by_sequence(batch, packed), 0)
    return (packed.swapaxes(0, 1), None), (cache, counts)


def _by_sequence(batch: Batch, x: Array) -> Array:
    """[tokens, ...] as [sequences, longest, ...]; padding holds anything."""
    assert batch.query_starts is not None
    index = batch.query_starts[:, None] + jnp.arange(batch.longest, dtype=jnp.int32)[None]
    return x[jnp.minimum(index, x.shape[0] - 1)]


def _drafts_before(tokens: Int[Array, "T W"], number: Int[Array, " T"]) -> Int[Array, "T W"]:
    """Drafts of each token's sequence up to that token, padded with NO_ID.

    Args:
        tokens: of its sequence, of which all but the first are drafts.
        number: which of them it is.
    """
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return jnp.where((index <= number[:, None]) & (index > 0), tokens, NO_ID)


def _accepted(
    batch: Batch, tokens: Int[Array, "B W"], chosen: Int[Array, "B W"]
) -> Bool[Array, "B W"]:
    """Accepted tokens: the first, and those after drafts that all equal the sampled tokens."""
    same = tokens[:, 1:] == chosen[:, :-1]
    same = jnp.concatenate([jnp.ones_like(same[:, :1]), same], axis=1)
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    same &= index < batch.query_lens[:, None]
    return jnp.cumprod(same.astype(jnp.int32), axis=1) > 0


def assign_slot(
    model: None,
    carry: TokenCounts,
    slot: Int[Array, ""],
    seen: Int[Array, " V"],
    *,
    options: ExecutionOptions,
    shards: Shards | None,
) -> tuple[tuple[()], TokenCounts]:
    """Gives a slot to another sequence: what its penalties have to know.

    Args:
        seen: per token id, twice how often it was generated, plus one if the prompt has it.
    """
    return (), carry.replace(slot, (seen & 1) == 1, seen >> 1)


def copy(
    model: None,
    carry: KVCache,
    sources: tuple[Int[Array, " _"], ...],
    destinations: tuple[Int[Array, " _"], ...],
    *,
    options: ExecutionOptions,
    shards: Shards | None,
) -> tuple[tuple[()], KVCache]:
    """Copies blocks, of each layer group from the ones in one list to those in another."""
    return (), copy_blocks(carry, sources, destinations)


def score(
    model: Model,
    carry: tuple[None, tuple[()]],
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    places: Int[Array, "B S"],
    hidden: Float[Array, "B T D"] | None = None,
    *,
    options: ExecutionOptions,
    shards: Shards | None,
) -> tuple[Float[Array, "B S"], tuple[None, tuple[()]]]:
    """Log-probability of the token after each of these places; after the last it means nothing.

    Logits exist for SCORED_AT_ONCE places at a time, and for no others.
    """
    batch = Batch.dense(tokens, lengths=lengths, hidden=hidden)
    hidden, _ = model.forward(batch, None, options=options, shards=shards)
    hidden = jnp.take_along_axis(hidden, places[:, :, None], axis=1)
    targets = jnp.take_along_axis(jnp.roll(tokens, -1, axis=1), places, axis=1)

    def score_chunk(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits = model.logits(part[0], options=options, shards=shards)
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        return jnp.take_along_axis(logprobs, part[1][:, None], axis=-1)[:, 0]

    flat = hidden.reshape(-1, hidden.shape[2])
    return _in_chunks(score_chunk, flat, targets.reshape(-1)).reshape(targets.shape), carry


def _in_chunks(
    score: Callable[[tuple[Array, Array]], Array],
    hidden: Float[Array, "T D"],
    targets: Int[Array, " T"],
) -> Array:
    """Scores of tokens after hidden states, SCORED_AT_ONCE at a time."""
    count, width = hidden.shape
    chunk = min(SCORED_AT_ONCE, count)
    padding = -count % chunk
    hidden, targets = jnp.pad(hidden, ((0, padding), (0, 0))), jnp.pad(targets, (0, padding))
    scores = jax.lax.map(score, (hidden.reshape(-1, chunk, width), targets.reshape(-1, chunk)))
    return scores.reshape(-1, *scores.shape[2:])[:count]


def logits(
    model: Model,
    carry: tuple[None, tuple[()]],
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    hidden: Float[Array, "B T D"] | None = None,
    *,
    options: ExecutionOptions,
    shards: Shards | None,
) -> tuple[Float[Array, "B T V"], tuple[None, tuple[()]]]:
    """Logits of every token of whole sequences."""
    batch = Batch.dense(tokens, lengths=lengths, hidden=hidden)
    hidden, _ = model.forward(batch, None, options=options, shards=shards)
    return model.logits(hidden, options=options, shards=shards), carry


def _choose(
    model: Model,
    counts: TokenCounts,
    step: StepInput,
    batch: Batch,
    hidden: Float[Array, "B T D"],
    *,
    options: ExecutionOptions,
    shards: Shards | None,
    exchange: Int[Array, " two"] | None = None,
) -> tuple[Int[Array, "B columns"], TokenCounts]:
    """Logits of each sequence's last token, and a choice for those that sample."""
    last, num_rows = last_hidden(batch, hidden), step.header[packing.NUM_SAMPLED]
    logits = model.logits(last, options=options, shards=shards, num_rows=num_rows)
    sampled = sample(
        logits,
        step.params,
        batch.context_lens,
        counts,
        step.slots,
        step.masks,
        greedy=step.greedy,
        num_rows=num_rows,
        exchange=exchange,
        implementation=options.kernels,
    )
    if not step.greedy:
        counts = counts.add_generated(step.slots, sampled.tokens, step.samples)
    is_finite = are_finite(batch, hidden) & (sampled.is_finite | ~step.samples)
    return packing.pack_sampled(sampled, is_finite, greedy=step.greedy), counts


def last_hidden(batch: Batch, hidden: Float[Array, "rows seq D"]) -> Float[Array, "B D"]:
    """Hidden states of each sequence's last token."""
    last = jnp.maximum(batch.query_lens - 1, 0)
    if batch.query_starts is None:
        return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    return hidden[0, jnp.minimum(batch.query_starts + last, hidden.shape[1] - 1)]


def _counted(counts: TokenCounts, step: StepInput, batch: Batch) -> TokenCounts:
    """Without the tokens of the last decode steps that the host did not take, and with those that
    were appended without being sampled."""
    if step.greedy:
        return counts
    discarded, uncounted = (step.rows[:, at] for at in (packing.DISCARDED, packing.UNCOUNTED))

    def counted() -> TokenCounts:
        return _count_forced(counts.take_back(step.slots, discarded), step, batch)

    return cond(jnp.any(discarded + uncounted > 0), counted, lambda: counts)


def _count_forced(counts: TokenCounts, step: StepInput, batch: Batch) -> TokenCounts:
    if batch.query_starts is None:
        slots = jnp.broadcast_to(step.slots[:, None], batch.tokens.shape)
        number = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1])[None], batch.tokens.shape)
        first = (batch.query_lens - step.rows[:, packing.UNCOUNTED])[:, None]
    else:
        owner, number = batch.owners
        slots = step.slots[owner]
        first = (batch.query_lens - step.rows[:, packing.UNCOUNTED])[owner]
    is_forced = (number >= first).reshape(batch.tokens.shape) & batch.valid
    return counts.add_generated(slots.reshape(-1), batch.tokens.reshape(-1), is_forced.reshape(-1))


def are_finite(batch: Batch, hidden: Float[Array, "rows seq D"]) -> Bool[Array, " B"]:
    """Whether all hidden states of a sequence are."""
    is_finite = jnp.all(jnp.isfinite(hidden), axis=2) | ~batch.valid
    if batch.query_starts is None:
        return jnp.all(is_finite, axis=1)
    owner, _ = batch.owners
    of_others = owner[None, :] != jnp.arange(len(batch.query_lens), dtype=jnp.int32)[:, None]
    return jnp.all(is_finite | of_others, axis=1)


def _scores(
    model: Model,
    step: StepInput,
    batch: Batch,
    hidden: Float[Array, "1 T D"],
    *,
    options: ExecutionOptions,
    shards: Shards | None,
) -> Int[Array, "T columns"]:
    """Packed log-probabilities of the token after each; of the last one, the host says which."""
    last = jnp.maximum(batch.query_lens - 1, 0)
    following = jnp.roll(batch.tokens, -1, axis=1).at[0, last].set(step.rows[:, packing.NEXT])

    def score_chunk(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits = model.logits(part[0], options=options, shards=shards)
        return packing.pack_logprobs(*logprobs_of(logits, part[1]))

    return _in_chunks(score_chunk, hidden[0], following[0])


def _of_tokens(batch: Batch, tokens: Int[Array, " B"], positions: Int[Array, " B"]) -> Batch:
    """The decode batch with these tokens, of which number r is sequence r's, at these positions;
    their contexts are the next positions, so that a loop carries one array and not three."""
    return replace(
        batch,
        tokens=jnp.where(batch.query_lens > 0, tokens, 0)[None],
        positions=positions[None],
        context_lens=positions + batch.query_lens,
        query_positions=positions,
    )
