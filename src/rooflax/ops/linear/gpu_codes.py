"""How the GPU's kernel for few rows multiplies with each code: what becomes of the activations
before it, and of the packed words in it.

Codes that are whole numbers, or half ones, meet activations that are whole numbers too: of each row
of words, whose inputs share a power of two, they have 16 bits for bfloat16 and 24 for float32, cut
into bytes. Four products are then one instruction on a word of weights and one of activations, the
sums are exact, and nothing is unpacked but nibbles to bytes. int8 activations are what they are.

e4m3 has no such form: its numbers are put together as float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rooflax.ops.weights import Quantized, int8_codes

Value = Callable[[int], jax.Array]
"""One of the values of a row of words, of one row of activations: each spread over the outputs."""

LOWEST_TABLE = np.array([192, 193, 194, 195, 196, 198, 200, 204], np.uint8)
"""2 e2m1 + 192, of the codes without a sign, and its like below: all have their highest bit set."""
MXFP4_OFFSET = 192


def _table(values: np.ndarray) -> tuple[int, int]:
    low, high = np.frombuffer(values.astype(np.uint8).tobytes(), "<i4")
    return int(low), int(high)


POSITIVE = _table(LOWEST_TABLE)
NEGATIVE = _table(2 * MXFP4_OFFSET - LOWEST_TABLE.astype(np.int32))


@dataclass(frozen=True)
class Bytes:
    """Codes that become bytes.

    Attributes:
        words: of one row of a panel's output.
        slots: inputs of one row.
        order: axes of a row's inputs, and how they lie in its bytes.
        unpack: words of bytes, for the words of codes.
        offset: what a byte is more than its code.
        scale: what a code is more than its number.
        signed: whether bytes are.
    """

    words: int
    slots: int
    order: tuple[tuple[int, ...], tuple[int, ...]]
    unpack: Callable[[list[jax.Array]], list[jax.Array]]
    offset: int = 0
    scale: float = 1.0
    signed: bool = False

    def values(
        self, x: Float[Array, "rows in"], w: Quantized, dtype: Any
    ) -> Int[Array, "rows count groups"]:
        """Of each row of words: per part its bytes and where its sum begins, and the size of 1."""
        groups = x.reshape(len(x), -1, self.slots)
        if w.quantizes_activations:
            parts = 1
            codes, step = int8_codes(groups if w.grouped else x)
            whole = codes.reshape(groups.shape).astype(jnp.int32)
            step = jnp.broadcast_to(step.reshape(len(x), -1), groups.shape[:2])
            finite = jnp.isfinite(step)[..., None]
            whole = jnp.where(finite, whole, 0)
        else:
            parts = 3 if dtype == jnp.float32 else 2
            whole, step = whole_numbers(groups, 8 * parts)
        shape, axes = self.order
        laid = whole.reshape(*groups.shape[:2], *shape)
        laid = laid.transpose(0, 1, *(2 + axis for axis in axes)).reshape(*groups.shape[:2], -1, 4)
        found = []
        for part in reversed(range(parts)):
            byte = laid >> 8 * part
            byte = byte if part == parts - 1 else byte & 0xFF
            packed = jax.lax.bitcast_convert_type(byte.astype(jnp.int8), jnp.int32)
            begin = -self.offset * byte.sum(axis=(-2, -1), dtype=jnp.int32)
            found += [packed, begin[..., None]]
        found.append(jax.lax.bitcast_convert_type(step, jnp.int32)[..., None])
        return jnp.concatenate(found, axis=-1).swapaxes(1, 2)

    def numbers(self, loaded: list[jax.Array]) -> list[jax.Array]:
        """What rows of activations share."""
        return self.unpack(loaded)

    def dot(self, numbers: list[jax.Array], value: Value, count: int) -> jax.Array:
        """Sums of products of a row of words, in units of codes.

        Args:
            count: of the values.
        """
        from rooflax.ops.mosaic_bytes import dot4

        each, totals = len(numbers) + 1, []
        for part in range(0, count - 1, each):
            sums = value(part + len(numbers))
            if part == each:  # two parts are a whole number still
                sums = sums + (totals.pop() << 8)
            for at, number in enumerate(numbers):
                sums = dot4(number, value(part + at), sums, signed=(self.signed, part == 0))
            totals.append(sums)
        exact = [total.astype(jnp.float32) for total in totals]
        total = exact[0] if len(exact) == 1 else exact[0] * np.float32(256) + exact[1]
        return total * jax.lax.bitcast_convert_type(value(count - 1), jnp.float32)


def whole_numbers(
    x: Float[Array, "rows groups inputs"], bits: int
) -> tuple[Int[Array, "rows groups inputs"], Float[Array, "rows groups"]]:
    """x as whole numbers of so many bits, and the power of two that is one of them: a group shares
    it. Where a group is not finite it is NaN."""
    largest = jnp.max(jnp.abs(x), axis=2)
    exponent = jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23 & 0xFF
    place = jnp.maximum(exponent, bits) - (bits - 2)
    step, inverse = (_power(place) for place in (place, 254 - place))
    finite = jnp.isfinite(largest)
    inverse, x = jnp.where(finite, inverse, 0.0), jnp.where(finite[..., None], x, 0.0)
    most = np.float32(2 ** (bits - 1) - 1)
    whole = jnp.clip(jnp.round(x * inverse[..., None]), -most, most).astype(jnp.int32)
    return whole, jnp.where(finite, step, jnp.nan)


def _power(exponent: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)


@dataclass(frozen=True)
class Floats:
    """Codes that become float32 in registers."""

    words: int
    slots: int
    scale: float

    def values(
        self, x: Float[Array, "rows in"], w: Quantized, dtype: Any
    ) -> Int[Array, "rows count groups"]:
        """Activations by their place in a row of words, and what is not 0 in front of none."""
        del w, dtype
        groups = x.reshape(len(x), -1, self.slots).swapaxes(1, 2)
        return jax.lax.bitcast_convert_type(groups, jnp.int32)

    def numbers(self, loaded: list[jax.Array]) -> list[jax.Array]:
        return [e4m3(word, place) for word in loaded for place in range(self.slots // self.words)]

    def dot(self, numbers: list[jax.Array], value: Value, count: int) -> jax.Array:
        del count
        total = None
        for at, number in enumerate(numbers):
            product = number * jax.lax.bitcast_convert_type(value(at), jnp.float32)
            total = product if total is None else total + product
        assert total is not None
        return total


def e4m3(packed: jax.Array, place: int) -> jax.Array:
    """e4m3 / 256: its exponent and mantissa where float32 has them, over an exponent of 112; and
    2 x - smallest below its smallest normal number, where the one in front of them is gone.
    """
    at_top = packed << (24 - 8 * place)
    x = jax.lax.bitcast_convert_type((at_top >> 4) & 0x07F00000 | 112 << 23, jnp.float32)
    x = jnp.minimum(2 * x - 2.0**-14, x)
    signed = jax.lax.bitcast_convert_type(x, jnp.int32) ^ (at_top & -0x80000000)
    return jax.lax.bitcast_convert_type(signed, jnp.float32)


def _nibbles(words: list[jax.Array]) -> list[jax.Array]:
    """Low halves of the bytes, and high ones."""
    return [half & 0x0F0F0F0F for packed in words for half in (packed, packed >> 4)]


def _mxfp4(words: list[jax.Array]) -> list[jax.Array]:
    """2 e2m1 + 192, of lower half words and of higher ones: each code is found in one of two
    tables, and 255 in the other."""
    from rooflax.ops.mosaic_bytes import looked_up

    found = []
    for packed in words:
        turned = packed ^ -0x77777778
        for codes, others in ((packed, turned), (packed >> 16, turned >> 16)):
            found.append(looked_up(POSITIVE, codes) & looked_up(NEGATIVE, others))
    return found


def _as_they_are(words: list[jax.Array]) -> list[jax.Array]:
    return words


CODES: dict[str, Bytes | Floats] = {
    "int8": Bytes(4, 16, ((16,), (0,)), _as_they_are, signed=True),
    "int8-g32": Bytes(8, 32, ((32,), (0,)), _as_they_are, signed=True),
    "int4": Bytes(4, 32, ((2, 4, 4), (1, 0, 2)), _nibbles, offset=8),
    # half, word, pair of bytes, byte -> word, pair, byte, half
    "mxfp4": Bytes(4, 32, ((2, 4, 2, 2), (1, 2, 3, 0)), _mxfp4, offset=MXFP4_OFFSET, scale=0.5),
    "fp8": Floats(4, 16, 256.0),
}
