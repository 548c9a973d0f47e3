"""Rotary position embedding: applying a table of cosines and sines, never computing one."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops import parts


@parts.rope
def rope_rows(
    cos: Float[Array, "max_len half"],
    sin: Float[Array, "max_len half"],
    positions: Int[Array, "rows seq"],
) -> tuple[Float[Array, "rows seq half"], Float[Array, "rows seq half"]]:
    """The table's rows of these positions, for all layers; beyond the table, its last row.

    Args:
        cos, sin: the table, row p for position p.
        positions: absolute positions, not negative.
    """
    return rows_at(cos, positions), rows_at(sin, positions)


def rows_at(
    table: Float[Array, "max_len width"], positions: Int[Array, "rows seq"]
) -> Float[Array, "rows seq width"]:
    """A table's rows of these positions; beyond it, its last row."""
    index = positions.astype(jnp.uint32)  # a signed one would be looked at for its sign
    return table.at[index].get(mode="clip")


@parts.rope
def apply_rope(
    x: Float[Array, "rows seq *heads head_dim"],
    cos: Float[Array, "rows seq half"],
    sin: Float[Array, "rows seq half"],
) -> Float[Array, "rows seq *heads head_dim"]:
    """Rotates the pairs (x[i], x[i + head_dim/2]) by the angle of their position.

        out[:half] = x[:half] * cos - x[half:] * sin
        out[half:] = x[half:] * cos + x[:half] * sin

    Computed in float32, returned in x's dtype. Any axes may stand between seq and head_dim.

    Args:
        cos, sin: of each token's position, as `rope_rows` gives them.

    Source: Su et al., RoFormer, 2021; the half-split layout of Hugging Face's LLaMA.
    """
    extra = tuple(range(2, x.ndim - 1))
    c, s = jnp.expand_dims(cos, extra), jnp.expand_dims(sin, extra)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate((first * c - second * s, second * c + first * s), axis=-1)
    return rotated.astype(x.dtype)
