"""Codes in the GPU's kernel for few rows: how each prepares the activations, and unpacks its words.

Codes that are whole numbers, or half ones, meet activations that are whole numbers too: of each row
of words, whose inputs share a power of two, they have 16 bits for bfloat16 and 24 for float32, cut
into bytes (gpu_values.py). Four products are then one instruction on a word of weights and one of
activations, the sums are exact, and nothing is unpacked but nibbles to bytes. int8 activations are
what they are.

e4m3 has no such form: its numbers become float16 by an instruction of the GPU's, then float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rooflax.ops.linear.gpu_values import HALF, Packing, fuses, packed_values, padded
from rooflax.ops.linear.prologue import Prologue, applied
from rooflax.ops.weights import Quantized, int8_codes

Value = Callable[[int], jax.Array]
"""One of the values of a row of words, of one row of activations: each spread over the outputs."""

OFFSET = 64
MAGNITUDES = np.array([0, 1, 2, 3, 4, 6, 8, 12])
"""2 e2m1, of the codes without a sign. Less the offset all are negative bytes, with either sign."""


def _table(values: np.ndarray) -> tuple[int, int]:
    low, high = np.frombuffer(values.astype(np.int8).tobytes(), "<i4")
    return int(low), int(high)


POSITIVE, NEGATIVE = _table(MAGNITUDES - OFFSET), _table(-MAGNITUDES - OFFSET)


@dataclass(frozen=True)
class Bytes:
    """Codes that become bytes.

    Attributes:
        words: of one row of a panel's output.
        num_inputs: inputs of one row.
        unpack: words of bytes, for the words of codes and the zero of `numbers`.
        scale: what numbers are more than bytes.
        offset: what bytes are less than their codes; of paired ones.
        halves: a word of codes gives one of each half of the inputs, one after the other.
        paired: a word of bytes has two inputs of the first half, and the same two of the second.
    """

    words: int
    num_inputs: int
    unpack: Callable[[list[jax.Array], jax.Array], list[jax.Array]]
    scale: float = 1.0
    offset: int = 0
    halves: bool = False
    paired: bool = False

    @property
    def places(self) -> list[tuple[int, int]]:
        """Half of the inputs, and the position there, of each word of activations."""
        if self.paired:
            return [(0, 2 * thread + word) for word in range(2) for thread in range(4)]
        return [divmod(word, 4) for word in range(self.num_inputs // 4)]

    @property
    def placed(self) -> list[int]:
        """Entry of `places` for each word of bytes that `unpack` gives."""
        if self.paired:
            return [4 * (word % 2) + word // 2 for word in range(self.num_inputs // 4)]
        if not self.halves:
            return list(range(self.num_inputs // 4))
        return [4 * half + word for word in range(self.words) for half in range(2)]

    @property
    def order(self) -> list[list[int]]:
        """Inputs of each word of bytes."""
        if self.paired:
            return [
                [2 * w + i + half for i in (0, 1) for half in (0, HALF)] for _, w in self.places
            ]
        return [[HALF * half + 4 * w + i for i in range(4)] for half, w in self.places]

    def values(
        self, x: Float[Array, "rows width"], w: Quantized, dtype: Any, prologue: Prologue | None
    ) -> Int[Array, "rows count padded"]:
        """Value of each row of words: per part its bytes, the highest first, and the size of 1.

        Args:
            dtype: of the model's activations, which says how exact they have to be.
        """
        if packing := self.packing(w, dtype):
            if not fuses(prologue):
                x, prologue = applied(prologue, x), None
            return packed_values(x, packing, prologue)
        x = applied(prologue, x).astype(jnp.float32)
        groups = x.reshape(len(x), -1, self.num_inputs)
        codes, step = int8_codes(groups if w.grouped else x)
        codes = jnp.where(jnp.isfinite(step), codes, 0.0).reshape(groups.shape).astype(jnp.int8)
        step = jnp.broadcast_to(step.reshape(len(x), -1, 1), (*groups.shape[:2], 1))
        laid = jnp.stack([codes[..., inputs] for inputs in np.array(self.order)], axis=2)
        both = [jax.lax.bitcast_convert_type(a, jnp.int32) for a in (laid, step)]
        if self.offset:
            total = codes.astype(jnp.int32).sum(axis=2, keepdims=True, dtype=jnp.int32)
            both.insert(1, self.offset * total)
        return padded(jnp.concatenate(both, axis=-1).swapaxes(1, 2))

    def packing(self, w: Quantized, dtype: Any) -> Packing | None:
        """Packing of activations into bytes, unless the format rounds them itself.

        Args:
            dtype: as of `values`.
        """
        if w.quantizes_activations:
            return None
        parts = 3 if dtype == jnp.float32 else 2
        return Packing(self.num_inputs, self.num_inputs // 4, parts, self.paired, self.offset)

    def numbers(self, loaded: list[jax.Array], zero: jax.Array) -> list[jax.Array]:
        """Numbers that rows of activations share.

        Args:
            zero: a number that the assembler does not know. With it, constants stay in registers,
                of which an instruction takes two; of others it takes one, and is two.
        """
        return self.unpack(loaded, zero)

    def dot(self, numbers: list[jax.Array], value: Value, count: int) -> jax.Array:
        """Sums of products of a row of words, in units of codes.

        Args:
            count: of the values.
        """
        from rooflax.ops.mosaic_bytes import dot4

        each, totals = len(numbers) + bool(self.offset), []
        for part in range(0, count - 1, each):
            sums = totals.pop() << 8 if part == each else None  # two parts are a whole number still
            if self.offset:
                begin = value(part + each - 1)
                sums = begin if sums is None else sums + begin
            for at, number in zip(self.placed, numbers, strict=True):
                bytes_ = value(part + at)
                begin = jnp.zeros_like(bytes_) if sums is None else sums
                sums = dot4(number, bytes_, begin, signed=(True, part == 0))
            assert sums is not None
            totals.append(sums)
        exact = [total.astype(jnp.float32) for total in totals]
        total = exact[0] if len(exact) == 1 else exact[0] * np.float32(256) + exact[1]
        return total * jax.lax.bitcast_convert_type(value(count - 1), jnp.float32)


@dataclass(frozen=True)
class Floats:
    """Codes that become float32 in registers."""

    words: int
    num_inputs: int
    scale: float = 1.0

    def values(
        self, x: Float[Array, "rows width"], w: Quantized, dtype: Any, prologue: Prologue | None
    ) -> Int[Array, "rows count padded"]:
        """Activations by their place in a row of words."""
        del w, dtype
        x = applied(prologue, x).astype(jnp.float32)
        groups = x.reshape(len(x), -1, self.num_inputs).swapaxes(1, 2)
        return padded(jax.lax.bitcast_convert_type(groups, jnp.int32))

    def packing(self, w: Quantized, dtype: Any) -> Packing | None:
        """None: they stay numbers."""
        del w, dtype

    def numbers(self, loaded: list[jax.Array], zero: jax.Array) -> list[jax.Array]:
        from rooflax.ops.mosaic_bytes import e4m3

        del zero
        return [e4m3(word, place) for word in loaded for place in range(4)]

    def dot(self, numbers: list[jax.Array], value: Value, count: int) -> jax.Array:
        del count
        total = None
        for at, number in enumerate(numbers):
            product = number * jax.lax.bitcast_convert_type(value(at), jnp.float32)
            total = product if total is None else total + product
        assert total is not None
        return total


def _nibbles(words: list[jax.Array], zero: jax.Array) -> list[jax.Array]:
    """16 (q - 8), of low halves and of high ones: four bits with a sign, at the top of a byte."""
    mask, turned = zero + -0x0F0F0F10, zero + -0x7F7F7F80
    halves = [half for packed in words for half in (packed << 4, packed)]
    return [half & mask ^ turned for half in halves]


def _mxfp4(words: list[jax.Array], zero: jax.Array) -> list[jax.Array]:
    """2 e2m1 - 64, of lower half words and of higher ones: each code is found in one of two
    tables, and 255 in the other. Tables in registers would be 55 instructions of 351 less, but too
    many registers for six programs a multiprocessor."""
    from rooflax.ops.mosaic_bytes import looked_up

    del zero
    numbers = []
    for packed in words:
        turned = packed ^ -0x77777778
        for codes, others in ((packed, turned), (packed >> 16, turned >> 16)):
            numbers.append(looked_up(POSITIVE, codes) & looked_up(NEGATIVE, others))
    return numbers


def _as_they_are(words: list[jax.Array], zero: jax.Array) -> list[jax.Array]:
    del zero
    return words


CODES: dict[str, Bytes | Floats] = {
    "int8": Bytes(4, 16, _as_they_are),
    "int8-g32": Bytes(8, 32, _as_they_are),
    "int4": Bytes(4, 32, _nibbles, scale=1 / 16, halves=True),
    "mxfp4": Bytes(4, 32, _mxfp4, scale=0.5, offset=OFFSET, paired=True),
    "fp8": Floats(4, 16),
}
