"""Number of leading real rows of an array, which native kernels get so that none pads."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

NumRows = Int[Array, ""] | None
"""None is all of them."""


def real_rows(num_rows: NumRows) -> Int[Array, " _"]:
    """The kernels' argument: one number, or an empty array for all rows."""
    return jnp.zeros(0, jnp.int32) if num_rows is None else num_rows.astype(jnp.int32).reshape(1)
