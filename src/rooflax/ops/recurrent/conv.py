"""A causal convolution of each channel along its sequence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rooflax.ops.dispatch import Backend, Operation
from rooflax.ops.recurrent.runs import Runs


def causal_conv(
    x: Float[Array, "T ..."],
    weight: Float[Array, "... taps"],
    pool: Float[Array, "rows ..."],
    runs: Runs,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "T ..."], Float[Array, "rows ..."]]:
    """y[t] = sum over j of weight[j] * x[t - taps + 1 + j], from a sequence's first token on.

    The state of a sequence is its last taps - 1 inputs, the latest last. The taps are added from
    the oldest input to the newest; by the native kernel a token's sum has the same bits in any
    list.

    Numerics: float32.

    Returns:
        y, and the pool with the states that `runs` names.
    """
    flat = x.reshape(len(x), -1).astype(jnp.float32)
    kernel = weight.reshape(-1, weight.shape[-1]).astype(jnp.float32)
    y, pool = CAUSAL_CONV(implementation, flat, kernel, pool, runs)
    return y.reshape(x.shape), pool


def _shifted(
    flat: Float[Array, "T channels"],
    kernel: Float[Array, "channels taps"],
    pool: Float[Array, "rows ..."],
    runs: Runs,
) -> tuple[Array, Array]:
    taps = kernel.shape[1]
    tails = runs.states(pool).reshape(len(runs.starts), -1, taps - 1)

    def past(lag: int) -> Float[Array, "T channels"]:
        """The input `lag` tokens before each."""
        if lag == 0:
            return flat
        at = jnp.clip(runs.offsets + (taps - 1 - lag), 0, taps - 2)
        before = tails.at[runs.owners, :, at].get(mode="promise_in_bounds")
        return jnp.where((runs.offsets >= lag)[:, None], jnp.roll(flat, lag, axis=0), before)

    y = kernel[None, :, 0] * past(taps - 1)
    for tap in range(1, taps):
        y = y + kernel[None, :, tap] * past(taps - 1 - tap)
    return y, _with_tails(flat, tails, pool, runs)


def _with_tails(
    x: Float[Array, "T channels"],
    tails: Float[Array, "R channels tail"],
    pool: Float[Array, "rows ..."],
    runs: Runs,
) -> Float[Array, "rows ..."]:
    """The pool with the last inputs before each of the targets."""
    length = tails.shape[2]
    last = jnp.arange(-length, 0, dtype=jnp.int32)[None, None]
    number = runs.reached[:, :, None] + last  # of the inputs
    new = x.at[runs.starts[:, None, None] + number].get(mode="clip")
    sequence = jnp.arange(len(tails), dtype=jnp.int32)[:, None, None]
    old = tails.at[sequence, :, jnp.clip(number + length, 0, length - 1)].get(
        mode="promise_in_bounds"
    )
    new_tails = jnp.where((number >= 0)[..., None], new, old)  # [R, targets, tail, channels]
    new_tails = jnp.swapaxes(new_tails, 2, 3).reshape(-1, *pool.shape[1:])
    return pool.at[runs.targets.reshape(-1)].set(new_tails, mode="drop")


def _native(flat: Array, kernel: Array, pool: Array, runs: Runs) -> tuple[Array, Array]:
    """Runs the native kernel, in place."""
    out = [jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in (flat, pool)]
    call = jax.ffi.ffi_call("rooflax_causal_conv", out, input_output_aliases={2: 1})
    y, pool = call(flat, kernel, pool, *runs.numbers())
    return y, pool


CAUSAL_CONV = Operation(
    "causal_conv",
    {"reference": Backend(_shifted), "xla": Backend(_shifted), "native": Backend(_native)},
)
