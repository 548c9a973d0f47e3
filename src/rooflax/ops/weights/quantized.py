"""`Quantized`: weights in few bits, packed as kernels read them. The formats are in `formats`.

Packing puts 16 outputs side by side, so that one load feeds one instruction for all of them: bytes
are [out / 16, in / 4, 16, 4] (with groups [out / 16, in / 32, 8, 16, 4]); nibbles [out / 16, in /
32, 4, 16, 4], each byte holding k = 4 s + j in its low half and 16 + 4 s + j in its high half. That
is the packing "panels"; on TPU, whose tiles are 128 wide, `matrix_packing` turns it into "matrix":
bytes are [in, out], nibbles [in / 2, out] with k = 32 g + i and 32 g + 16 + i in row 16 g + i;
scales are [1, out] or [in / 32 padded to 32, out], in float32, of mxfp4 as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from rooflax.ops.dot import dot_general
from rooflax.ops.format_names import GROUP, KNOWN, PANEL, Format, of_two_terms
from rooflax.ops.weights.operand import Axes, StoredOperand

ARRAYS = ("values", "scales", "sums")
Encoded = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Codes, scales, and of what shares a scale the largest magnitude."""


@dataclass(frozen=True)
class Quantized(StoredOperand):
    """A weight [*stack, *in, *out] in few bits; a stack is one axis of experts or layers, or none.

    A subclass is one way to code numbers: how rows are encoded and decoded, and which blocks of a
    GGUF file have its codes. Its names stand in `ops.format_names`; a backend has a kernel or none.

    Attributes:
        values: packed codes, as the module says.
        scales: [out padded to 16], or with groups [out / 16, in / 32, 16].
        sums: with `has_sums`, in panels: the sum of codes over the inputs per output, int32.
        format: a name in ops.format_names.
        packing: "panels" or "matrix".
        grouped: each 32 inputs of an output share a scale, else all of them.
        nibbles: a byte holds two codes.
        has_matrix: `as_matrix` can pack its codes for TPU kernels.
        zero: the code of zero.
        broken_scale: what makes of every code NaN.
        most: the largest magnitude that is held.
        names: those that are not in `ops.format_names`, with whether activations are rounded.
        blocks: GGUF's types that hold its codes, with the name of the format that they become.
    """

    values: Array
    scales: Array
    sums: Int[Array, "*sums"]
    format: str = field(metadata={"static": True})
    in_shape: tuple[int, ...] = field(metadata={"static": True})
    out_shape: tuple[int, ...] = field(metadata={"static": True})
    packing: str = field(default="panels", metadata={"static": True})  # type: ignore[assignment]

    code: ClassVar[str]  # type: ignore[misc]
    grouped: ClassVar[bool] = True
    nibbles: ClassVar[bool] = False
    has_sums: ClassVar[bool] = False
    has_matrix: ClassVar[bool] = True
    zero: ClassVar[int] = 0
    value_type: ClassVar[Any] = np.uint8
    scale_type: ClassVar[Any] = np.float16
    broken_scale: ClassVar[float] = np.nan
    most: ClassVar[float] = np.inf
    names: ClassVar[Mapping[str, bool]] = MappingProxyType({})
    blocks: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __init_subclass__(cls) -> None:
        if not hasattr(cls, "code"):  # what several formats have in common
            return
        static = ["format", "in_shape", "out_shape", "packing"]
        jax.tree_util.register_dataclass(cls, list(ARRAYS), static)
        CODES[cls.code] = cls
        KNOWN.update({name: Format(cls.code, rounds) for name, rounds in cls.names.items()})
        rounded = [name for name in cls.blocks.values() if KNOWN[name].quantizes_activations]
        KNOWN.update({of_two_terms(name): Format(cls.code, True, 2) for name in rounded})

    # Of a format

    @staticmethod
    def encoded(rows: np.ndarray) -> Encoded:
        """Outputs [n, in] in float32 as codes [n, in], scales [n] or [n, in / 32], largest."""
        raise NotImplementedError

    @classmethod
    def decoded(cls, codes: Any) -> Any:
        """Values of codes before scaling, in float32."""
        return codes.astype(jnp.float32)

    @staticmethod
    def factors(scales: Any) -> Any:
        """Scales in float32."""
        return scales.astype(jnp.float32)

    @classmethod
    def scaled(cls, codes: Any, scales: Any, axis: int = -1) -> Any:
        """The numbers of codes in float32, on the host or not.

        Args:
            scales: as `codes` without `axis`, along which they are shared.
        """
        numbers, factors = cls.decoded(codes), cls.factors(scales)
        return numbers * (factors[..., None] if axis == -1 else factors[..., None, :])

    @classmethod
    def are_finite(cls, scales: np.ndarray) -> np.ndarray:
        """Mask of the finite scales."""
        return np.isfinite(scales)

    @classmethod
    def from_blocks(cls, kind: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Codes [..., blocks, 32] and scales [..., blocks] of one of `blocks`.

        Args:
            blocks: uint8 [..., blocks, bytes of a block].
        """
        raise NotImplementedError

    @classmethod
    def encode(cls, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Outputs [n, in] in float32 to (codes, scales): the readable definition of the format.

        Numbers that share a scale with NaN or infinity become NaN; one beyond `most` becomes that.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            codes, scales, largest = cls.encoded(rows)
        if (broken := ~np.isfinite(largest)).any():
            codes.reshape(*broken.shape, -1)[broken] = cls.zero
            scales[broken] = cls.broken_scale
        return codes, scales

    @classmethod
    def fits(cls, inner: int) -> bool:
        """Whether a weight with `inner` inputs can have the format: groups have 32 of them."""
        return not cls.grouped or inner % GROUP == 0

    @classmethod
    def like(
        cls, inner: int, outer: int, stack: tuple[int, ...] = ()
    ) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Shapes and types of values, scales and sums in panels."""
        panels = -(-outer // PANEL)
        if cls.grouped:
            quads = 4 if cls.nibbles else 8
            values = (panels, inner // GROUP, quads, PANEL, 4)
            scales = (panels, inner // GROUP, PANEL)
        else:
            values = (panels, -(-inner // 4), PANEL, 4)
            scales = (panels * PANEL,)
        sums = (*stack, panels * PANEL) if cls.has_sums else (0,)
        return (
            jax.ShapeDtypeStruct((*stack, *values), cls.value_type),
            jax.ShapeDtypeStruct((*stack, *scales), cls.scale_type),
            jax.ShapeDtypeStruct(sums, np.int32),
        )

    @classmethod
    def pack_codes(cls, codes: np.ndarray) -> np.ndarray:
        """Codes [n, in] of whole panels as [n / 16, ..., 16, 4]."""
        if not cls.grouped:
            codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 4)))
            return by_panel(codes[:, None])[:, 0]
        groups = codes.reshape(len(codes), -1, GROUP)
        return by_panel(in_halves(groups) if cls.nibbles else groups)

    @classmethod
    def pack_scales(cls, scales: np.ndarray) -> np.ndarray:
        """Scales [panels, 16] or [panels, groups, 16] as they are stored."""
        return scales

    # As a weight

    @property
    def quantizes_activations(self) -> bool:  # type: ignore[override]
        return KNOWN[self.format].quantizes_activations

    @property
    def num_terms(self) -> int:  # type: ignore[override]
        return KNOWN[self.format].num_terms

    @property
    def is_matrix(self) -> bool:
        return self.packing == "matrix"

    @property
    def stack(self) -> tuple[int, ...]:
        num_axes = 2 if self.is_matrix else 5 if self.grouped else 4
        return self.values.shape[: self.values.ndim - num_axes]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        return self.values, self.scales, self.sums

    def split(self, axes: Axes, stack: int = 0, lead: Axes = ()) -> Quantized:
        """A weight's parts are packed each by itself and lie side by side on the first axis behind
        the experts'."""
        first = next((axis for axis in axes[stack:] if axis is not None), None)
        packed: Any = PartitionSpec(*lead, *axes[:stack], first)
        sums: Any = packed if self.sums.shape[-1] else PartitionSpec(*lead)
        return replace(self, values=packed, scales=packed, sums=sums)

    def member(self, index: Any) -> Quantized:
        sums = self.sums[index] if self.sums.ndim > 1 else self.sums
        return replace(self, values=self.values[index], scales=self.scales[index], sums=sums)

    def joined(self) -> Quantized:
        values, scales, sums = (a.reshape(-1, *a.shape[2:]) if a.size else a for a in self.arrays)
        return replace(self, values=values, scales=scales, sums=sums)

    def activations(self, x: Float[Array, "rows in"]) -> Float[Array, "rows in"]:
        if not self.quantizes_activations:
            return x
        if not self.grouped:
            return _rounded(x)
        groups = x.reshape(x.shape[0], -1, GROUP)
        return _rounded(groups, 127 * 256 ** (self.num_terms - 1)).reshape(x.shape)

    def dot(self, x: Float[Array, "rows in"]) -> Float[Array, "rows out"]:
        """Matmuls of rounded activations are summed exactly."""
        rows = self.activations(x.astype(jnp.float32))
        return dot_general(rows, self.numbers(), (((1,), (0,)), ((), ())))

    def numbers(self) -> Float[Array, "*stack in out"]:
        lead = self.stack
        if self.is_matrix:
            return self._matrix_numbers().reshape(*lead, self.inner, self.outer)
        q, scales = self._by_output()
        numbers = self.scaled(q, scales).reshape(*lead, q.shape[len(lead)], -1)
        return numbers[..., : self.outer, : self.inner].swapaxes(-1, -2)

    def _by_output(self) -> tuple[Any, Any]:
        """Codes [*stack, out, in] and scales [*stack, out] of panels, padded; with groups codes
        [*stack, out, groups, 32] and scales [*stack, out, groups]. Of host arrays on the host."""
        values, lead = self.values, self.stack
        if not self.grouped:
            q = values.swapaxes(-3, -2)
            return q.reshape(*lead, values.shape[-4] * PANEL, -1), self.scales
        groups = namespace(values).moveaxis(values, -2, -4)  # [panels, 16, groups, quads, 4]
        q = groups.reshape(*lead, groups.shape[-5] * PANEL, groups.shape[-3], -1)
        scales = self.scales.swapaxes(-1, -2).reshape(*q.shape[:-1])
        return self._halves(q), scales

    def _matrix_numbers(self) -> jax.Array:
        """[*stack, groups, 32, out], or without groups [*stack, in, out]."""
        if not self.grouped:
            return self.decoded(self.values) * self.scales
        scales = self.scales[..., : self.inner // GROUP, :]
        q = self.values.reshape(*scales.shape[:-1], -1, self.values.shape[-1])
        return self.scaled(self._halves(q, axis=-2), scales, axis=-2)

    def _halves(self, q: Any, axis: int = -1) -> Any:
        """Both halves of each byte, where codes have four bits."""
        return namespace(q).concatenate([q & 15, q >> 4], axis=axis) if self.nibbles else q

    def take(self, ids: Int[Array, " n"]) -> Float[Array, "n in"]:
        ids = jnp.clip(ids, 0, self.outer - 1)
        if self.is_matrix:
            values, scales = (a.at[:, ids].get(mode="clip") for a in (self.values, self.scales))
            return replace(self, values=values, scales=scales, out_shape=ids.shape).numbers().T
        panel, lane = ids // PANEL, ids % PANEL
        if not self.grouped:
            q = self.values.at[panel, :, lane].get(mode="promise_in_bounds")
            numbers = self.decoded(q.reshape(*ids.shape, -1)[..., : self.inner])
            return numbers * self.scales.at[ids].get(mode="promise_in_bounds")[..., None]
        q = self.values.at[panel, :, :, lane].get(mode="promise_in_bounds")
        q = self._halves(q.reshape(*ids.shape, self.values.shape[1], -1))
        scales = self.scales.at[panel, :, lane].get(mode="promise_in_bounds")
        return self.scaled(q, scales).reshape(*ids.shape, self.inner)

    def restored(self) -> Quantized:
        """A weight of host arrays whose inputs are not rotated: itself, or what comes nearest."""
        return self

    def unpacked(self) -> tuple[np.ndarray, np.ndarray]:
        """Codes and scales of host arrays in panels, as `pack` takes them."""
        arrays = {"values": np.asarray(self.values), "scales": np.asarray(self.scales)}
        codes, scales = replace(self, **arrays)._by_output()
        codes = codes.reshape(*self.stack, codes.shape[len(self.stack)], -1)
        outputs = (..., slice(self.outer), *(slice(None),) * self.grouped)
        return codes[..., : self.outer, : self.inner], scales[outputs]


def in_halves(groups: np.ndarray) -> np.ndarray:
    """Codes [n, groups, 32] of four bits as bytes [n, groups, 16], the first half in low halves."""
    words = np.ascontiguousarray(groups).view(np.uint64).reshape(-1, 4)  # eight codes at once
    both = np.empty((len(words), 2), np.uint64)
    for half in range(2):
        np.left_shift(words[:, 2 + half], np.uint64(4), out=both[:, half])
        both[:, half] |= words[:, half]
    return both.view(groups.dtype).reshape(*groups.shape[:2], GROUP // 2)


def by_panel(groups: np.ndarray) -> np.ndarray:
    """Bytes [n, groups, m] of whole panels as [n / 16, groups, m / 4, 16, 4]."""
    words = np.ascontiguousarray(groups).view(np.uint32)  # four bytes are moved at once
    moved = words.reshape(-1, PANEL, *words.shape[1:]).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(moved)[..., None].view(groups.dtype)


def namespace(array: Any) -> Any:
    """The module whose functions take an array: NumPy's on the host."""
    return np if isinstance(array, np.ndarray) else jnp


CODES: dict[str, type[Quantized]] = {}
"""The classes by their codes; importing `formats` fills it."""


def class_of(format: str) -> type[Quantized]:
    """Class of a format in ops.format_names."""
    return CODES[KNOWN[format].code]


def split_blocks(blocks: np.ndarray, scale: str) -> tuple[np.ndarray, np.ndarray]:
    """Blocks that begin with a scale as their scales, and what is behind these."""
    size = np.dtype(scale).itemsize
    scales = np.ascontiguousarray(blocks[..., :size]).view(scale)[..., 0]
    return scales, blocks[..., size:]


def both_halves(body: np.ndarray) -> np.ndarray:
    """16 bytes, the first half of the codes in their low halves."""
    return np.concatenate([body & 15, body >> 4], axis=-1)


def _rounded(x: jax.Array, most: int = 127) -> jax.Array:
    """x rounded to `most` steps of the largest of its last axis."""
    codes, scales = int8_codes(x, most)
    return codes * scales


def int8_codes(x: Float[Array, "*batch in"], most: int = 127) -> tuple[jax.Array, jax.Array]:
    """Whole numbers from -most to most, still as floats, and the size of a step per last axis."""
    largest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    some = largest > most / float(jnp.finfo(jnp.float32).max)  # else the quotient is infinite
    inverse = jnp.where(some, most / jnp.where(some, largest, 1.0), 0.0)
    return jnp.round(x * inverse), largest / most
