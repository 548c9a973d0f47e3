"""`Sequences`: which tokens of a list are whose, and what they see."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sequences:
    """Sequences of the tokens in a list, and what each sees.

    Attributes:
        query_starts, query_lens: of each sequence, where its queries begin in the list and how many
            they are; a sequence without queries is padding, as are tokens of no sequence.
        positions: of its first query.
        context_lens: of all its tokens, the new ones included.
        block_tables: its blocks in order.
        first_positions: the position of the first slot of its table.
        longest: the most queries of a sequence.
    """

    query_starts: Int[Array, " R"]
    query_lens: Int[Array, " R"]
    positions: Int[Array, " R"]
    context_lens: Int[Array, " R"]
    block_tables: Int[Array, "R nb"]
    first_positions: Int[Array, " R"]
    longest: int = field(metadata={"static": True})


def owners(
    query_starts: Int[Array, " R"], query_lens: Int[Array, " R"], num_tokens: int
) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """Sequence of each token of a list, and the token's number among its queries.

    Tokens of no sequence get some sequence, and a number that is negative or not below its
    `query_lens`.
    """
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    begun = (tokens >= query_starts[None, :]) & (query_lens[None, :] > 0)
    start = jnp.max(jnp.where(begun, query_starts[None, :], -1), axis=1)
    mine = begun & (query_starts[None, :] == start[:, None])
    owner = jnp.argmax(mine, axis=1).astype(jnp.int32)
    return owner, tokens[:, 0] - query_starts[owner]
