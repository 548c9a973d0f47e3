"""Pools of blocks of keys (or values), as a layer of the KV cache has them: plain, or as codes.

A leaf of a cache is a plain array [blocks, kv_heads, block_size, head_dim] or a `QuantizedPool`;
`as_pool` gives either the same verbs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer, Num

from rooflax.ops import native

FP8_MAX = 448.0
"""The largest number of e4m3."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedPool:
    """Keys (or values) of a layer's blocks as int8 or e4m3, x ~ values * scales[..., None].

    Each token of each K/V head has its own scale: its largest element over the type's largest
    number, 127 or 448.
    """

    values: Num[Array, "_ kv_heads block_size head_dim"]
    scales: Float[Array, "_ kv_heads block_size"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def blocks(self, tables: Int[Array, "B nb"]) -> Float[Array, "B nb K block_size H"]:
        """Blocks of the tables, in float32."""
        values, scales = (
            a.at[tables].get(mode="promise_in_bounds") for a in (self.values, self.scales)
        )
        return values.astype(jnp.float32) * scales[..., None]

    def written(
        self,
        block: Integer[Array, " tokens"],
        offset: Integer[Array, " tokens"],
        new: Float[Array, "tokens K H"],
    ) -> QuantizedPool:
        """Writes new tokens into these slots; slots outside are dropped."""
        as_codes = tokens_as_int8 if self.values.dtype == jnp.int8 else tokens_as_fp8
        values, scales = as_codes(new)
        return QuantizedPool(
            self.values.at[block, :, offset].set(values, mode="drop"),
            self.scales.at[block, :, offset].set(scales, mode="drop"),
        )


LAZY_BYTES = 1 << 20
"""Bytes of arrays for which a program of their own is worth it."""


def zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Zeros on the device; large ones take a CPU's memory as they are written, where the native
    library is."""
    like = jax.ShapeDtypeStruct(shape, dtype)
    if like.size * like.dtype.itemsize < LAZY_BYTES or not native.is_ready():
        return jax.device_put(np.zeros(shape, like.dtype))
    return _untouched(shape, like.dtype)()


@cache
def _untouched(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    return jax.jit(jax.ffi.ffi_call("rooflax_zeros", jax.ShapeDtypeStruct(shape, dtype)))


PoolLeaf = Float[Array, "_ kv_heads block_size head_dim"] | QuantizedPool


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlainPool:
    """A plain array, with the verbs of `QuantizedPool` and no scales."""

    values: Float[Array, "_ kv_heads block_size head_dim"]
    scales: None = None

    def blocks(self, tables: Int[Array, "B nb"]) -> Float[Array, "B nb K block_size H"]:
        return self.values.at[tables].get(mode="promise_in_bounds")

    def written(
        self,
        block: Integer[Array, " tokens"],
        offset: Integer[Array, " tokens"],
        new: Float[Array, "tokens K H"],
    ) -> Array:
        return self.values.at[block, :, offset].set(new.astype(self.values.dtype), mode="drop")


Pool = PlainPool | QuantizedPool


def as_pool(leaf: PoolLeaf | Pool) -> Pool:
    """A leaf of a cache with a pool's verbs."""
    return PlainPool(leaf) if isinstance(leaf, jax.Array | np.ndarray) else leaf


def tokens_as_int8(x: Float[Array, "*batch head_dim"]) -> tuple[jax.Array, jax.Array]:
    """Values and scales of a `QuantizedPool`: round(x / scale), scale = max |x| / 127."""
    values, scales = _scaled(x, 127.0)
    return jnp.round(values).astype(jnp.int8), scales


def tokens_as_fp8(x: Float[Array, "*batch head_dim"]) -> tuple[jax.Array, jax.Array]:
    """The same as e4m3, each x / scale the nearest number there is; scale = max |x| / 448.

    Its three bits of mantissa hold a number within 1/16 of itself down to 2**-15 of the largest.
    """
    values, scales = _scaled(x, FP8_MAX)
    return jnp.clip(values, -FP8_MAX, FP8_MAX).astype(jnp.float8_e4m3fn), scales


def _scaled(x: jax.Array, most: float) -> tuple[jax.Array, jax.Array]:
    """x over a scale per vector, so that its largest element is `most`, and the scales."""
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=-1) / most
    inverse = jnp.where(scales > 0, 1.0 / jnp.where(scales > 0, scales, 1.0), 0.0)
    return x * inverse[..., None], scales
