"""Choosing the next token: penalties, temperature, top-k, top-p, min-p, and a draw by noise.

A draw is the argmax of (filtered logits / temperature + Gumbel noise), and the noise is a function
of (seed, sample index, position, token id) alone: the same request draws the same tokens in any
slot of any batch. All rows go through one function of fixed shape; greedy rows pay for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from rooflax.fields.sampling import MAX_LOGPROBS
from rooflax.ops import parts
from rooflax.ops import sampling_columns as columns
from rooflax.ops.control import cond
from rooflax.ops.dispatch import Backend, Operation
from rooflax.ops.real_rows import real_rows
from rooflax.ops.sampling_columns import NO_ID

NUM_CANDIDATES = 256
"""Rows whose filters keep no more than this many tokens are sampled without a full sort."""

LOWEST = float(jnp.finfo(jnp.float32).min)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """Per row, how to choose. A value that means "off" costs nothing when every row has it.

    Attributes:
        temperature: 0 takes the most likely token.
        top_k: keep the k most likely tokens; 0 is off.
        top_p: keep the fewest tokens whose probability reaches p; 1 is off.
        min_p: keep tokens at least this fraction as likely as the most likely one; 0 is off.
        seed, sample_index: of the noise.
        repetition_penalty: divides (or multiplies, below 0) the logits of tokens seen; 1 is off.
        presence_penalty, frequency_penalty: subtracted once, and per occurrence, for tokens that
            were generated; 0 is off.
        bias_ids, bias_values: added to the logits of these ids; the padding adds 0 to id 0, and
            -inf bans an id.
        allowed_ids: if there are any, all others are banned; the padding is NO_ID.
        stop_ids: banned below min_position; the padding is NO_ID.
        min_position: the first position at which the row may stop.
        is_masked: 1 where the row may only choose what its mask allows, else 0.
        num_logprobs: number of log-probabilities of the row; -1 is none, and what comes back for
            it then means nothing.
        scores_adjusted: 1 where the log-probabilities that come back are those after adjustments,
            else 0.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    seed: UInt32[Array, " B"]
    sample_index: UInt32[Array, " B"]
    repetition_penalty: Float[Array, " B"]
    presence_penalty: Float[Array, " B"]
    frequency_penalty: Float[Array, " B"]
    bias_ids: Int[Array, "B num_bias"]
    bias_values: Float[Array, "B num_bias"]
    allowed_ids: Int[Array, "B num_allowed"]
    stop_ids: Int[Array, "B num_stop"]
    min_position: Int[Array, " B"]
    is_masked: Int[Array, " B"]
    num_logprobs: Int[Array, " B"]
    scores_adjusted: Int[Array, " B"]

    @classmethod
    def of(cls, rows: Int[Array, "B width"]) -> Sampling:
        """Reads columns as `sampling_columns` writes them."""
        floats, unsigned, ints, ids, values, allowed, stop = columns.split(rows)
        fields = {name: _as(floats[:, i], jnp.float32) for i, name in enumerate(columns.FLOATS)}
        fields |= {name: _as(unsigned[:, i], jnp.uint32) for i, name in enumerate(columns.UNSIGNED)}
        fields |= {name: ints[:, i] for i, name in enumerate(columns.INTS)}
        return cls(
            **fields,
            bias_ids=ids,
            bias_values=_as(values, jnp.float32),
            allowed_ids=allowed,
            stop_ids=stop,
        )


def _as(x: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenCounts:
    """Token counts of each sequence, for penalties; a row is a slot, the last one is scratch.

    Attributes:
        latest: what the last decode steps counted, NO_ID behind it; None where nothing is taken
            back.
    """

    in_prompt: Bool[Array, "slots V"]
    generated: Int[Array, "slots V"]
    latest: Int[Array, "slots steps"] | None = None

    def replace(
        self, slot: Int[Array, ""], in_prompt: Bool[Array, " V"], generated: Int[Array, " V"]
    ) -> TokenCounts:
        """Gives a slot to a sequence with this past."""
        in_prompt = self.in_prompt.at[slot].set(in_prompt)
        return TokenCounts(in_prompt, self.generated.at[slot].set(generated), self.latest)

    def add_generated(
        self, slots: Int[Array, " B"], tokens: Int[Array, " B"], valid: Bool[Array, " B"]
    ) -> TokenCounts:
        """Counts one generated token per valid row."""
        generated = self.generated.at[slots, tokens].add(valid.astype(jnp.int32))
        return replace(self, generated=generated)

    def keep_latest(self, slots: Int[Array, " B"], tokens: Int[Array, "B steps"]) -> TokenCounts:
        """Remembers what decode steps counted, NO_ID behind it."""
        assert self.latest is not None
        return replace(self, latest=self.latest.at[slots].set(tokens))

    def take_back(self, slots: Int[Array, " B"], number: Int[Array, " B"]) -> TokenCounts:
        """Counts the last `number` of each row's latest tokens no more."""
        if self.latest is None:
            return self
        latest = self.latest[slots]
        index = jnp.arange(latest.shape[1], dtype=jnp.int32)[None]
        count = jnp.sum(latest != NO_ID, axis=1, dtype=jnp.int32)
        is_counted = (index >= (count - number)[:, None]) & (index < count[:, None])
        less = self.generated.at[slots[:, None], jnp.maximum(latest, 0)]
        return replace(self, generated=less.add(-is_counted.astype(jnp.int32)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """The chosen tokens and, where a row asked, log-probabilities before any adjustment; with
    `scores_adjusted` those after it.

    Attributes:
        is_finite: false where a logit is NaN or +infinity, or none is finite; the token then means
            nothing.
        is_allowed: false where every token is banned; the same holds.
    """

    tokens: Int[Array, " B"]
    is_finite: Bool[Array, " B"]
    is_allowed: Bool[Array, " B"]
    logprobs: Float[Array, " B"]
    top_tokens: Int[Array, "B top"]
    top_logprobs: Float[Array, "B top"]


@parts.sampling
def sample(
    logits: Float[Array, "B V"],
    params: Int[Array, "slots width"],
    positions: Int[Array, " B"],
    counts: TokenCounts,
    slots: Int[Array, " B"],
    masks: Int[Array, "slots words"] | None = None,
    *,
    greedy: bool = False,
    pending: Int[Array, "B P"] | None = None,
    num_rows: Int[Array, ""] | None = None,
    exchange: Int[Array, " two"] | None = None,
    implementation: str | None = None,
) -> Sampled:
    """The next token of every row.

    Penalties and bias, then temperature, top-k, top-p over what top-k kept, min-p, as in
    transformers; the draw is argmax(filtered / temperature + gumbel).

    Args:
        logits: float32.
        params: each slot's sampling parameters, a `Sampling` in columns.
        positions: position that the new token will have.
        counts: what each slot's sequence has seen.
        slots: each row's slot.
        masks: of each slot, bit i % 32 of word i // 32 is whether a masked row may choose token i.
        greedy: the caller's word that every row takes the most likely token and nothing else is
            asked for.
        pending: tokens of the row that `counts` does not have yet; the padding is NO_ID.
        num_rows: how many leading rows are real; None is all. What the others get means nothing.
        exchange: the number of a mask exchange and the step in its dispatch: from step 1 on its
            masks replace `masks`, and it is told the tokens. Number 0 is none.
        implementation: as in `linear`; None for the platform's best.

    Raises:
        NotImplementedError: an exchange is given and `awaits_masks` is false.
    """
    if greedy:
        best = ARGMAX(implementation, logits, num_rows)
        largest = jnp.take_along_axis(logits, best[:, None], axis=1)
        return _without_logprobs(best, jnp.isfinite(largest[:, 0]), logits.shape[1])
    options = {}
    if exchange is not None:
        if not awaits_masks(implementation):
            raise NotImplementedError("Only the native sampler awaits masks.")
        options["exchange"] = exchange
    operands = (logits, params, positions, counts, slots, masks, pending, num_rows)
    return SAMPLE(implementation, *operands, **options)


def awaits_masks(implementation: str | None) -> bool:
    """Whether the sampler can wait for the masks of a step while the host makes them."""
    return SAMPLE.preferred(implementation).run is _native_sample


def _native_sample(
    logits: Float[Array, "B V"],
    params: Int[Array, "slots width"],
    positions: Int[Array, " B"],
    counts: TokenCounts,
    slots: Int[Array, " B"],
    masks: Int[Array, "slots words"] | None,
    pending: Int[Array, "B P"] | None,
    num_rows: Int[Array, ""] | None,
    exchange: Int[Array, " two"] | None = None,
) -> Sampled:
    """All of it in one call; XLA takes four times as long to compile a step with the operations of
    `_sample`, and three times as long to trace it."""
    rows, vocab = logits.shape
    top, nothing = min(MAX_LOGPROBS, vocab), jnp.zeros((0, 0), jnp.int32)
    each = [jax.ShapeDtypeStruct((rows,), t) for t in (jnp.int32, bool, bool, jnp.float32)]
    best = [jax.ShapeDtypeStruct((rows, top), t) for t in (jnp.int32, jnp.float32)]
    outputs = jax.ffi.ffi_call("rooflax_sample", each + best)(
        logits,
        params,
        positions,
        counts.in_prompt,
        counts.generated,
        slots,
        nothing if masks is None else masks,
        nothing if pending is None else pending,
        real_rows(num_rows),
        jnp.zeros(0, jnp.int32) if exchange is None else exchange,
    )
    return Sampled(*outputs)


def _sample(
    logits: Float[Array, "B V"],
    params: Int[Array, "slots width"],
    positions: Int[Array, " B"],
    counts: TokenCounts,
    slots: Int[Array, " B"],
    masks: Int[Array, "slots words"] | None,
    pending: Int[Array, "B P"] | None,
    num_rows: Int[Array, ""] | None,
) -> Sampled:
    del num_rows  # padding is sampled like the rest
    sampling = Sampling.of(params[slots])
    best = _argmax(logits)  # the first NaN, if there is one
    largest = jnp.take_along_axis(logits, best[:, None], axis=1)
    is_finite = jnp.isfinite(largest[:, 0])
    too_early = positions < sampling.min_position
    is_adjusted = sampling.scores_adjusted > 0
    asks = (
        too_early, is_adjusted, sampling.is_masked > 0, sampling.repetition_penalty != 1,
        sampling.presence_penalty != 0, sampling.frequency_penalty != 0,
    )  # fmt: skip
    lists = (sampling.bias_values != 0, sampling.allowed_ids != NO_ID)
    adjusts = jnp.any(jnp.concatenate((*(row[:, None] for row in asks), *lists), axis=1))
    draws = jnp.any(sampling.temperature > 0)
    wants_logprobs = jnp.any(sampling.num_logprobs >= 0)

    def as_logprobs() -> jax.Array:
        return jnp.where(is_adjusted[:, None], _logprobs(logits, largest), logits)

    def adjust() -> jax.Array:
        scores = cond(jnp.any(is_adjusted), as_logprobs, lambda: logits)
        generated = _with_pending(counts.generated[slots], pending)
        penalised = _adjust(scores, sampling, counts.in_prompt[slots], generated)
        return _ban(penalised, sampling, too_early, None if masks is None else masks[slots])

    def chosen_as_asked() -> Sampled:
        adjusted = cond(adjusts, adjust, lambda: logits)
        tokens = cond(
            draws,
            lambda: _draw(adjusted, sampling, positions),
            lambda: cond(adjusts, lambda: _argmax(adjusted), lambda: best),
        )
        chosen = jnp.take_along_axis(adjusted, tokens[:, None], axis=1)[:, 0]
        is_allowed = ~jnp.isneginf(chosen)
        sampled = _without_logprobs(
            tokens, is_finite & (jnp.isfinite(chosen) | ~is_allowed), logits.shape[1], is_allowed
        )

        def with_logprobs() -> Sampled:
            logprobs = _logprobs(logits, largest)
            best = _best(jnp.where(is_adjusted[:, None], adjusted, logprobs), tokens)
            return replace(sampled, logprobs=best[0], top_tokens=best[1], top_logprobs=best[2])

        return cond(wants_logprobs, with_logprobs, lambda: sampled)

    def most_likely() -> Sampled:
        is_allowed = ~jnp.isneginf(largest[:, 0])
        return _without_logprobs(best, is_finite, logits.shape[1], is_allowed)

    # One condition a step where nothing is asked for: a GPU's queue is empty at each.
    return cond(adjusts | draws | wants_logprobs, chosen_as_asked, most_likely)


SAMPLE = Operation(
    "sample",
    {"reference": Backend(_sample), "xla": Backend(_sample), "native": Backend(_native_sample)},
)


def _argmax(x: Float[Array, "B V"], num_rows: Int[Array, ""] | None = None) -> Int[Array, " B"]:
    del num_rows
    return jnp.argmax(x, axis=-1).astype(jnp.int32)


def _native_argmax(
    x: Float[Array, "B V"], num_rows: Int[Array, ""] | None = None
) -> Int[Array, " B"]:
    """XLA's on CPU is a scalar loop, 0.2 ms over GPT-2's vocabulary."""
    out = jax.ShapeDtypeStruct((x.shape[0],), jnp.int32)
    return jax.ffi.ffi_call("rooflax_argmax", out)(x, real_rows(num_rows))


ARGMAX = Operation(
    "argmax",
    {"reference": Backend(_argmax), "xla": Backend(_argmax), "native": Backend(_native_argmax)},
)


def _with_pending(
    generated: Int[Array, "B V"], pending: Int[Array, "B P"] | None
) -> Int[Array, "B V"]:
    if pending is None:
        return generated
    rows = jnp.arange(generated.shape[0], dtype=jnp.int32)[:, None]
    ids = jnp.where(pending < 0, generated.shape[1], pending)
    return generated.at[rows, ids].add(1, mode="drop")


def _adjust(
    logits: Float[Array, "B V"],
    sampling: Sampling,
    in_prompt: Bool[Array, "B V"],
    counts: Int[Array, "B V"],
) -> Float[Array, "B V"]:
    """Penalties (Keskar et al., CTRL, 2019, and the OpenAI API) and the logit bias."""
    generated = counts > 0
    penalty = sampling.repetition_penalty[:, None]
    penalised = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits = jnp.where(in_prompt | generated, penalised, logits)
    logits = logits - sampling.presence_penalty[:, None] * generated.astype(jnp.float32)
    logits = logits - sampling.frequency_penalty[:, None] * counts.astype(jnp.float32)
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return logits.at[rows, sampling.bias_ids].add(sampling.bias_values)


def _ban(
    logits: Float[Array, "B V"],
    sampling: Sampling,
    too_early: Bool[Array, " B"],
    masks: Int[Array, "B words"] | None,
) -> Float[Array, "B V"]:
    """-inf for what a row may not choose."""
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]

    def among(ids: jax.Array) -> jax.Array:
        marked = jnp.zeros(logits.shape, bool)
        return marked.at[rows, jnp.where(ids < 0, logits.shape[1], ids)].set(True, mode="drop")

    limited = jnp.any(sampling.allowed_ids != NO_ID, axis=1)[:, None]
    banned = limited & ~among(sampling.allowed_ids)
    banned |= too_early[:, None] & among(sampling.stop_ids)
    if masks is not None:
        masked = sampling.is_masked > 0
        banned = cond(
            jnp.any(masked),
            lambda: banned | masked[:, None] & ~unpack_bits(masks, logits.shape[1]),
            lambda: banned,
        )
    return jnp.where(banned, -jnp.inf, logits)


def unpack_bits(words: Int[Array, "B words"], count: int) -> Bool[Array, "B count"]:
    """Bit i % 32 of word i // 32, for the first `count` i."""
    index = jnp.arange(count, dtype=jnp.int32)
    return (words[:, index // 32] >> (index % 32)[None] & 1) == 1


def _draw(
    logits: Float[Array, "B V"],
    sampling: Sampling,
    positions: Int[Array, " B"],
) -> Int[Array, " B"]:
    """argmax of filtered logits / T + noise; greedy rows take the argmax."""
    vocab = logits.shape[1]
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    scaled = logits / temperature[:, None]
    values, ids = jax.lax.top_k(scaled, min(NUM_CANDIDATES, vocab))
    total = _total(scaled, values[:, :1])
    keep = _keep(values, total, sampling)

    filtered = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    within = ~keep[:, -1] | ((sampling.top_k > 0) & (sampling.top_k <= values.shape[1]))
    beyond = (sampling.top_k > values.shape[1]) & (sampling.top_p < 1)  # normalised over more
    within = within & ~beyond
    within = within | (sampling.temperature <= 0) | (values.shape[1] == vocab)

    def sort_all() -> tuple[jax.Array, jax.Array, jax.Array]:
        order = jnp.argsort(-scaled, axis=-1, stable=True).astype(jnp.int32)
        ordered = jnp.take_along_axis(scaled, order, axis=-1)
        return ordered, order, _keep(ordered, total, sampling)

    def keep_all() -> tuple[jax.Array, jax.Array, jax.Array]:
        every = jnp.broadcast_to(jnp.arange(vocab, dtype=jnp.int32)[None], scaled.shape)
        return scaled, every, jnp.ones(scaled.shape, bool)

    def from_all() -> jax.Array:
        values, ids, keep = cond(jnp.any(filtered), sort_all, keep_all)
        among_all = _pick(values, ids, keep, sampling, positions)
        return jnp.where(within, drawn, among_all)

    # A row takes the same path whatever its neighbours take.
    drawn = _pick(values, ids, keep, sampling, positions)
    drawn = cond(jnp.all(within), lambda: drawn, from_all)
    return jnp.where(sampling.temperature > 0, drawn, ids[:, 0])


def _total(logits: Float[Array, "B V"], largest: Float[Array, "B 1"]) -> Float[Array, " B"]:
    """sum(exp(logits - largest)): what probabilities are divided by."""
    return jnp.sum(jnp.exp(logits - largest), axis=-1)


def _logprobs(logits: Float[Array, "B V"], largest: Float[Array, "B 1"]) -> Float[Array, "B V"]:
    """log softmax(logits); jax's own looks for the largest again, which takes longer to compile."""
    return logits - largest - jnp.log(_total(logits, largest))[:, None]


def _keep(
    ordered: Float[Array, "B C"], total: Float[Array, " B"], sampling: Sampling
) -> Bool[Array, "B C"]:
    """Mask of the tokens, most likely first, that pass top-k, top-p and min-p.

    Args:
        ordered: scaled logits, descending; the most likely C of the vocabulary.
        total: of all scaled logits, as `_total` gives it.
    """
    rank = jnp.arange(ordered.shape[1], dtype=jnp.int32)[None]
    top_k = jnp.where(sampling.top_k > 0, sampling.top_k, jnp.iinfo(jnp.int32).max)[:, None]
    in_top_k = rank < top_k
    cut = (sampling.top_k > 0) & (sampling.top_k <= ordered.shape[1])
    weights = jnp.where(in_top_k, jnp.exp(ordered - ordered[:, :1]), 0.0)
    upto = jnp.cumsum(weights, axis=-1)
    whole = jnp.where(cut, upto[:, -1], total)[:, None]
    in_top_p = (upto - weights < sampling.top_p[:, None] * whole) | (sampling.top_p >= 1)[:, None]
    in_min_p = weights >= sampling.min_p[:, None]
    return in_top_k & (in_top_p & in_min_p | (rank == 0))


def _pick(
    values: Float[Array, "B C"],
    ids: Int[Array, "B C"],
    keep: Bool[Array, "B C"],
    sampling: Sampling,
    positions: Int[Array, " B"],
) -> Int[Array, " B"]:
    noise = gumbel(sampling.seed, sampling.sample_index, positions, ids)
    best = _argmax(jnp.where(keep, values + noise, LOWEST))
    return jnp.take_along_axis(ids, best[:, None], axis=-1)[:, 0]


def gumbel(
    seed: UInt32[Array, " B"],
    sample_index: UInt32[Array, " B"],
    positions: Int[Array, " B"],
    ids: Int[Array, "B C"],
) -> Float[Array, "B C"]:
    """Standard Gumbel noise of each (seed, sample index, position, token id).

    -log(-log(u)), where u is 23 bits of threefry2x32 with key (seed, sample index) and counter
    (position, token id).
    """
    bits = _threefry2x32(seed, sample_index, positions, ids)
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))


def _threefry2x32(
    seed: UInt32[Array, " B"],
    sample_index: UInt32[Array, " B"],
    positions: Int[Array, " B"],
    ids: Int[Array, "B C"],
) -> UInt32[Array, "B C"]:
    """First word of threefry2x32-20 (Salmon et al., Parallel Random Numbers, 2011)."""
    k0, k1 = seed[:, None], sample_index[:, None]
    x0 = jnp.broadcast_to(positions.astype(jnp.uint32)[:, None], ids.shape)
    x1 = ids.astype(jnp.uint32)
    keys = (k0, k1, k0 ^ k1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + k0, x1 + k1
    for block in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            x0 = x0 + x1
            x1 = (x1 << rotation) | (x1 >> (32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + keys[(block + 1) % 3]
        x1 = x1 + keys[(block + 2) % 3] + jnp.uint32(block + 1)
    return x0


def _without_logprobs(
    tokens: Int[Array, " B"],
    is_finite: Bool[Array, " B"],
    vocab: int,
    is_allowed: Bool[Array, " B"] | None = None,
) -> Sampled:
    rows, top = tokens.shape[0], min(MAX_LOGPROBS, vocab)
    zeros = jnp.zeros((rows, top), jnp.float32)
    nothing = jnp.zeros(rows, jnp.float32)
    allowed = jnp.ones(rows, bool) if is_allowed is None else is_allowed
    return Sampled(tokens, is_finite, allowed, nothing, zeros.astype(jnp.int32), zeros)


def logprobs_of(
    logits: Float[Array, "B V"], tokens: Int[Array, " B"]
) -> tuple[Float[Array, " B"], Int[Array, "B top"], Float[Array, "B top"]]:
    """Log-probabilities of the tokens, the most likely ids, and theirs."""
    return _best(jax.nn.log_softmax(logits, axis=-1), tokens)


def _best(
    logprobs: Float[Array, "B V"], tokens: Int[Array, " B"]
) -> tuple[Float[Array, " B"], Int[Array, "B top"], Float[Array, "B top"]]:
    values, ids = jax.lax.top_k(logprobs, min(MAX_LOGPROBS, logprobs.shape[1]))
    return jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0], ids, values
