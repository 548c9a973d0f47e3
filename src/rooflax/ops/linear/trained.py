"""Linear with gradients whose forward pass is the native kernel: asked for by name, on a CPU.

Its sums are those of the engine, with the norm or activation before and what is added behind, so
that a step of GRPO gives the tokens that it has sampled the log-probabilities that the engine gave.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rooflax.ops import native
from rooflax.ops.dispatch import Backend
from rooflax.ops.linear import cpu
from rooflax.ops.linear.args import LinearArgs
from rooflax.ops.weights import Dense


def matmul(args: LinearArgs) -> Float[Array, "rows out"]:
    w = args.matrix
    if isinstance(w, Dense) and w.dtype == jnp.float32 and native.is_ready():
        return product(args)
    return args.unfused(w.dot)


@jax.custom_vjp
def product(args: LinearArgs) -> Float[Array, "rows out"]:
    return cpu.matmul(args)


def _forward(args: LinearArgs) -> tuple[Array, LinearArgs]:
    return product(args), args


def _backward(args: LinearArgs, dy: Array) -> tuple[LinearArgs]:
    """Gradients by XLA, which computes again what they need of the forward pass."""
    _, pull = jax.vjp(lambda args: args.unfused(args.matrix.dot), args)
    return pull(dy)


product.defvjp(_forward, _backward)
BACKEND = Backend(matmul)
