"""Routing on a GPU: a warpgroup has a token's logits in registers and selects the highest, one
after the other. XLA would launch five kernels.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

TILE = 32
"""Logits that a warpgroup has at a time, one a group of four threads."""
MOST_CHOSEN, MOST_EXPERTS = 16, 512


def routes(
    logits: Float[Array, "tokens experts"], chosen: int, *, renormalise: bool, scale: float
) -> tuple[Int[Array, "tokens chosen"], Float[Array, "tokens chosen"]]:
    """As `ops.moe.route` without a bias. Of logits that are NaN, some experts."""
    from rooflax.ops.mosaic import launch, load, plgpu, words_layout

    tokens, count = logits.shape

    def expert_routes(logits_ref: Any, ids_ref: Any, weights_ref: Any) -> None:
        row, layout = jax.lax.axis_index("row"), words_layout().reduce(1)
        whole = load(logits_ref.at[row], layout).astype(jnp.float32)
        number = plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=layout)
        place, left, tops = number.astype(jnp.float32), whole, []
        for index in range(chosen):
            top = left.max(axis=0)
            first = -jnp.where(left == top, -place, np.float32(-count)).max(axis=0)
            at = jnp.minimum(first.astype(jnp.int32), count - 1)
            left = jnp.where(number == at, -jnp.inf, left)
            ids_ref[row, index] = at
            tops.append(top)
        shares = [jnp.exp(top - tops[0]) for top in tops]
        total = sum(shares[1:], shares[0])
        if not renormalise:
            total = jnp.exp(whole - tops[0]).sum(axis=0)
        for index, share in enumerate(shares):
            weights_ref[row, index] = share / total * np.float32(scale)

    size = tokens, chosen
    out = jax.ShapeDtypeStruct(size, jnp.int32), jax.ShapeDtypeStruct(size, jnp.float32)
    return launch(expert_routes, out, {"row": tokens}, by_lane=True)(logits)


def unsupported(logits: Float[Array, "tokens experts"], chosen: int) -> str | None:
    """Reason why `routes` does not support these arguments."""
    count = logits.shape[1]
    if count % TILE or count > MOST_EXPERTS or chosen > MOST_CHOSEN:
        return f"the routes' GPU kernel takes experts by {TILE}, not {chosen} of {count}"
    return None
