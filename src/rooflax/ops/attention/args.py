"""Arguments of attention beside queries, keys and values.

`AttentionArgs` is what a layer decides. Where queries and keys are is `Dense` for rows of
contiguous keys, `Paging` for rows over blocks, and `Sequences` for a list of tokens over blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rooflax.ops.attention.pattern import Pattern

STATIC = {"static": True}
FARTHEST = 2**31 - 1
ALL = slice(None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionArgs:
    """Settings of attention: the scale of scores, and which keys a query sees.

    Attributes:
        scale: a score is q . k times this.
        window: how many tokens a query sees, its own included; None is all.
        sinks: one logit per query head that takes part in the softmax and has no value.
        repeat_kv: copy each K/V head for its query heads first (the slow way).
        pattern: leaves more keys out, for long contexts; None leaves out none.
        causal: a query sees no key behind itself; otherwise the window reaches both ways.
        bias: what a head's scores gain by the key's position less the query's: of an odd number of
            distances, the middle one is 0; farther keys get the last. None is nothing.
        cap: scores are cap * tanh(score / cap), before bias and sinks; None is no cap.
        values_in_keys: values are so many first elements of the keys, and their pool is the keys';
            what comes back behind them means nothing. None is values of their own.
    """

    scale: float = field(metadata=STATIC)
    window: int | None = field(default=None, metadata=STATIC)
    sinks: Float[Array, " N"] | None = None
    repeat_kv: bool = field(default=False, metadata=STATIC)
    pattern: Pattern | None = field(default=None, metadata=STATIC)
    causal: bool = field(default=True, metadata=STATIC)
    bias: Float[Array, "N distances"] | None = None
    cap: float | None = field(default=None, metadata=STATIC)
    values_in_keys: int | None = field(default=None, metadata=STATIC)

    @property
    def ahead(self) -> int:
        """Number of tokens after itself that a query sees."""
        return 0 if self.causal else FARTHEST if self.window is None else self.window - 1

    def scores(self, products: Float[Array, ...]) -> Float[Array, ...]:
        """Scores without bias, of q . k."""
        scores = products * self.scale
        return scores if self.cap is None else self.cap * jnp.tanh(scores / self.cap)

    def biases(self, query: Any, key: Any) -> Float[Array, "N ..."]:
        """Biases of scores by positions, of any shapes that broadcast together."""
        assert self.bias is not None
        last = self.bias.shape[1] - 1
        return self.bias[:, jnp.clip(key - query + last // 2, 0, last)]

    def sees(self, query: Any, key: Any, context: Any) -> Any:
        """Whether a query sees a key, by positions; of any shapes that broadcast together.

        Args:
            context: keys at this position and above are padding.
        """
        seen = key < context
        if self.causal or self.window is not None:
            seen &= key <= query + self.ahead
        if self.window is not None:
            seen &= key > query - self.window
        if self.pattern is not None:
            seen &= self.pattern.sees(query, key)
        return seen


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dense:
    """Positions of queries and contiguous keys: rows of T queries and S keys.

    Attributes:
        positions, key_positions: absolute positions of queries and keys, in tokens.
        context_lens: keys at this position and above are padding.
        segment_ids: needs S == T; a token sees only its own segment. None is one segment.
        causal_order: the caller's word that S == T and no query sees a key of a higher index, so
            that an implementation may leave those out.
    """

    positions: Int[Array, "B T"]
    key_positions: Int[Array, "B S"]
    context_lens: Int[Array, " B"]
    segment_ids: Int[Array, "B S"] | None = None
    causal_order: bool = field(default=False, metadata=STATIC)

    def visible(
        self, args: AttentionArgs, queries: slice = ALL, keys: slice = ALL
    ) -> Bool[Array, "B _ _"]:
        """Mask of the keys that each query sees."""
        query, key = self.positions[:, queries, None], self.key_positions[:, None, keys]
        mask = args.sees(query, key, self.context_lens[:, None, None])
        mask = jnp.broadcast_to(mask, (key.shape[0], query.shape[1], key.shape[2]))
        if self.segment_ids is not None:
            mask &= self.segment_ids[:, queries, None] == self.segment_ids[:, None, keys]
        return mask


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Paging:
    """Positions of queries, and the blocks of their keys: rows of T queries and nb blocks.

    Attributes:
        block_tables: a row's keys are these blocks of the pool, one after the other.
        first_positions: absolute position of the first slot of a row's table.
        positions: absolute positions of the queries; `plan.NOWHERE` is padding.
        context_lens: keys at this position and above are padding.
    """

    block_tables: Int[Array, "B nb"]
    first_positions: Int[Array, " B"]
    positions: Int[Array, "B T"]
    context_lens: Int[Array, " B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Projected:
    """New tokens as their projection gave them, and what happens to them before attention: an
    RMSNorm of every query and key head, then RoPE. Each gives qkv's dtype.

    Attributes:
        qkv: of each K/V head its query heads, its key and its value.
        cos, sin: of each token's position; None leaves RoPE out.
        norms: the weights of the queries' and of the keys' norm; None leaves them out.
        eps: of the norms.
    """

    qkv: Float[Array, "B T K group_and_2 H"]
    cos: Float[Array, "B T half"] | None = None
    sin: Float[Array, "B T half"] | None = None
    norms: tuple[Float[Array, " H"], Float[Array, " H"]] | None = None
    eps: float = field(default=0.0, metadata=STATIC)
