"""Linear, for reading: everything in float32, a sum of products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rooflax.ops.dispatch import Backend
from rooflax.ops.linear.args import LinearArgs

HIGHEST = jax.lax.Precision.HIGHEST


def matmul(args: LinearArgs) -> Float[Array, "rows out"]:
    def multiply(x: jax.Array) -> jax.Array:
        rows, numbers = args.w.activations(x.astype(jnp.float32)), args.matrix.numbers()
        return jnp.einsum("mk,kn->mn", rows, numbers, precision=HIGHEST)

    return args.unfused(multiply)


BACKEND = Backend(matmul)
