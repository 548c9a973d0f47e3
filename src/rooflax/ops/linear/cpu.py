"""Linear by the native kernels: weights stay at their width, outputs are summed in order of k."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops.quantization import QuantizedArray

NATIVE_DTYPES = (jnp.float32, jnp.bfloat16)


def matmul(
    x: Float[Array, "rows in"],
    w: Float[Array, "in out"] | QuantizedArray,
    bias: Float[Array, " out"] | None,
) -> Float[Array, "rows out"]:
    wide = x.astype(jnp.float32)
    bias = jnp.zeros(0, jnp.float32) if bias is None else bias.astype(jnp.float32)
    if isinstance(w, QuantizedArray):
        return _quantized(wide, w, bias).astype(x.dtype)
    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), jnp.float32)
    return jax.ffi.ffi_call("rooflax_matmul", out)(wide, _native(w), bias).astype(x.dtype)


def unembed(
    x: Float[Array, "rows hidden"], table: Float[Array, "vocab hidden"] | QuantizedArray
) -> Float[Array, "rows vocab"]:
    wide = x.astype(jnp.float32)
    if isinstance(table, QuantizedArray):
        return _quantized(wide, table, jnp.zeros(0, jnp.float32))
    out = jax.ShapeDtypeStruct((x.shape[0], table.shape[0]), jnp.float32)
    return jax.ffi.ffi_call("rooflax_unembed", out)(wide, _native(table))


def rows(table: Float[Array, "vocab hidden"], index: Int[Array, " n"]) -> Float[Array, "n hidden"]:
    """Rows of a table in float32; XLA on CPU would widen all of a bfloat16 table first."""
    out = jax.ShapeDtypeStruct((index.shape[0], table.shape[1]), jnp.float32)
    return jax.ffi.ffi_call("rooflax_rows", out)(_native(table), index)


def _quantized(x: jax.Array, w: QuantizedArray, bias: jax.Array) -> jax.Array:
    out = jax.ShapeDtypeStruct((x.shape[0], math.prod(w.out_shape)), jnp.float32)
    if w.format == "w8a8":
        return jax.ffi.ffi_call("rooflax_int8", out)(x, w.values, w.scales, w.sums, bias)
    return jax.ffi.ffi_call("rooflax_int4", out)(x, w.values, w.scales, bias)


def _native(w: jax.Array) -> jax.Array:
    """Weights as a kernel can read them; other widths are widened."""
    return w if w.dtype in NATIVE_DTYPES else w.astype(jnp.float32)
