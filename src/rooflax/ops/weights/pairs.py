"""`Pairs`: bfloat16 as the tiles of AMX read it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from rooflax.ops import native
from rooflax.ops.dot import dot_general
from rooflax.ops.format_names import PANEL
from rooflax.ops.host_arrays import Put, aligned_empty
from rooflax.ops.weights.operand import Axes, StoredOperand

BLOCK = 32
"""Inputs of a tile."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pairs(StoredOperand):
    """A matmul's weight in bfloat16, in panels of 16 outputs with pairs of inputs side by side.

    Attributes:
        array: [*stack, out / 16, in / 32, 16, 16, 2], filled up with zeros: element [p, b, i, j, h]
            is w[32 b + 2 i + h, 16 p + j].
    """

    array: Array
    in_shape: tuple[int, ...] = field(metadata={"static": True})
    out_shape: tuple[int, ...] = field(metadata={"static": True})

    code = "pairs"
    packing = "panels"

    @staticmethod
    def packed_shape(inner: int, outer: int) -> tuple[int, ...]:
        """Shape of a packed matrix."""
        return -(-outer // PANEL), -(-inner // BLOCK), BLOCK // 2, PANEL, 2

    @property
    def stack(self) -> tuple[int, ...]:
        return self.array.shape[:-5]

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        return self.array, jnp.zeros(0, jnp.float32), jnp.zeros(0, jnp.int32)

    def split(self, axes: Axes, stack: int = 0, lead: Axes = ()) -> Pairs:
        """Parts are packed each by itself and lie side by side, as those of `Quantized`."""
        first = next((axis for axis in axes[stack:] if axis is not None), None)
        spec: Any = PartitionSpec(*lead, *axes[:stack], first)
        return replace(self, array=spec)

    def member(self, index: Any) -> Pairs:
        return replace(self, array=self.array[index])

    def joined(self) -> Pairs:
        return replace(self, array=self.array.reshape(-1, *self.array.shape[2:]))

    def matrix(self) -> Float[Array, "*stack in out"]:
        """The weight in the order of its axes; of a host array on the host."""
        lead, (panels, blocks, *_) = self.stack, self.array.shape[-5:]
        order = (*range(len(lead)), *(len(lead) + axis for axis in (1, 2, 4, 0, 3)))
        whole = self.array.transpose(order).reshape(*lead, blocks * BLOCK, panels * PANEL)
        return whole[..., : self.inner, : self.outer]

    def numbers(self) -> Float[Array, "*stack in out"]:
        return self.matrix().astype(jnp.float32)

    def take(self, ids: Int[Array, " n"]) -> Float[Array, "n in"]:
        ids = jnp.clip(ids, 0, self.outer - 1)
        rows = self.array.at[ids // PANEL, :, :, ids % PANEL].get(mode="promise_in_bounds")
        return rows.reshape(*ids.shape, -1)[:, : self.inner].astype(jnp.float32)

    def dot(self, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        return dot_general(x, self.matrix(), (((1,), (0,)), ((), ())))


def pack_pairs(
    w: np.ndarray,
    in_shape: tuple[int, ...],
    out_shape: tuple[int, ...],
    put: Put = jax.device_put,
) -> Pairs:
    """A weight on the host as `Pairs`, by the native library where it was built.

    Args:
        w: bfloat16 [*stack, *in, *out].
        put: the packed array to where it stays.
    """
    inner, outer = math.prod(in_shape), math.prod(out_shape)
    stack = w.shape[: w.ndim - (len(in_shape) + len(out_shape))]
    array = aligned_empty((*stack, *Pairs.packed_shape(inner, outer)), w.dtype)
    packed = array.reshape(-1, *array.shape[-5:])
    for matrix, to in zip(w.reshape(-1, inner, outer), packed, strict=True):
        if not native.pack_pairs(matrix, to):
            to[...] = _packed(matrix)
    return Pairs(put(array), in_shape, out_shape)  # type: ignore[arg-type]


def _packed(matrix: np.ndarray) -> np.ndarray:
    """[in, out] as panels of pairs: the readable definition."""
    inner, outer = matrix.shape
    padded = np.pad(matrix, ((0, -inner % BLOCK), (0, -outer % PANEL)))
    blocks = padded.reshape(-1, BLOCK // 2, 2, padded.shape[1] // PANEL, PANEL)
    return blocks.transpose(3, 0, 1, 4, 2)
