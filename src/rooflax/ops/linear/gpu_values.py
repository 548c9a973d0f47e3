"""Activations of few rows on a GPU as the bytes that `gpu_codes` multiplies, and what happens to
them before: a norm, or a gated activation.

A warpgroup has 32 groups of one row, four inputs a thread. One row is packed by the kernel that
multiplies it (gpu_rows.py); more have a kernel of their own, which XLA would make four.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rooflax.ops.linear.prologue import Activation, ClampedSwiglu, Norm, Prologue, applied
from rooflax.ops.weights import taken

GROUPS, HALF = 32, 16
"""Groups of a tile, and inputs of one that are loaded at a time."""
SILU = ("silu", "swish")


def fuses(prologue: Prologue | None) -> bool:
    """Whether kernels do it; the rest is done before."""
    if isinstance(prologue, Norm):
        return prologue.bias is None
    if isinstance(prologue, Activation):
        return prologue.gated and prologue.name in SILU
    return isinstance(prologue, ClampedSwiglu)


@dataclass(frozen=True)
class Packing:
    """Packing of a group of inputs into words.

    Attributes:
        num_inputs: inputs of a group.
        words: of a part.
        parts: bytes of an input.
        paired: a word has two inputs of the first half and the same two of the second.
        offset: of paired codes: behind the words of a part stand the products with it; 0 is none.
    """

    num_inputs: int
    words: int
    parts: int
    paired: bool
    offset: int

    @property
    def each(self) -> int:
        """Values of a part."""
        return self.words + bool(self.offset)

    @property
    def count(self) -> int:
        """Values of a group: per part its words, the highest part first; and the size of 1."""
        return self.parts * self.each + 1

    def packed(
        self, values: list[jax.Array], real: jax.Array | None = None
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """The values of a tile of groups: words by fours [GROUPS, 4], part by part; and what a
        group has once.

        Args:
            values: of each half of the groups, [GROUPS, HALF] float32.
            real: which groups are any; the others give zeros. None is all.
        """
        from rooflax.ops.mosaic import plgpu, spread, words_layout
        from rooflax.ops.mosaic_bytes import joined

        layout, shape, bits = words_layout(), (GROUPS, HALF), 8 * self.parts
        largest = abs(values[0]).max(axis=1)
        for value in values[1:]:
            largest = jnp.maximum(largest, abs(value).max(axis=1))
        step, inverse = step_of(largest, bits)
        if real is not None:
            inverse = jnp.where(real, inverse, 0.0)
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        factor = spread(inverse, shape, 0, layout)
        whole, words, totals = [rounded(value * factor, bits) for value in values], [], []
        for part in range(self.parts):
            cut = [number >> 8 * (self.parts - 1 - part) for number in whole]
            cut = [number & 0xFF for number in cut] if part else cut
            if self.offset:
                totals.append((cut[0] + cut[1]).sum(axis=1) * self.offset)
            cut = [number & 0xFF for number in cut]
            if self.paired:
                moved = cut[0] << 16 * (column & 1) | cut[1] << 16 * (column & 1) + 8
                words += [joined(moved, first, 2) for first in (0, 2)]
            else:
                words += [joined(number << 8 * (column & 3)) for number in cut]
        bits_of_step = jax.lax.bitcast_convert_type(step, jnp.int32)
        totals.append(bits_of_step if real is None else jnp.where(real, bits_of_step, 0))
        return words, totals

    def store(
        self, packed: Any, start: Any, words_totals: tuple[list[jax.Array], list[jax.Array]]
    ) -> None:
        """Puts the values of a tile of groups where `packed`, [count, groups], has them."""
        from rooflax.ops.mosaic import pl, store

        words, totals = words_totals
        place, each = pl.ds(start, GROUPS), len(words) // self.parts
        for at, value in enumerate(words):
            part, number = divmod(at, each)
            rows = packed.at[pl.ds(part * self.each + 4 * number, 4), place]
            store(rows.transpose((1, 0)), value)
        for part, total in enumerate(totals[:-1]):
            store(packed.at[(part + 1) * self.each - 1, place], total)
        store(packed.at[self.count - 1, place], totals[-1])


@dataclass(frozen=True)
class Share:
    """Tiles of a row's groups that a warpgroup has; the last tile begins earlier if it is not full.

    Attributes:
        groups: of the row.
        helpers: warpgroups that share them.
        number: of this one.
    """

    groups: int
    helpers: int
    number: Any

    @property
    def count(self) -> Any:
        return (-(-self.groups // GROUPS) - 1 - self.number) // self.helpers + 1

    def start(self, index: Any) -> tuple[Any, Any]:
        """Start of a tile, and where it should be."""
        at = (index * self.helpers + self.number) * GROUPS
        return jnp.minimum(at, self.groups - GROUPS), at


@dataclass(frozen=True)
class ValueSource:
    """Rows in memory and what happens to them: references, as a kernel has them.

    Attributes:
        x: [rows, copies, groups, inputs]; two copies where the prologue gates.
        weight: of a norm, [groups, inputs].
        dtype: to which the prologue rounds.
        inner: inputs of a row.
    """

    x: Any
    weight: Any
    prologue: Prologue | None
    dtype: Any
    inner: int

    def tile(self, row: Any, start: Any, half: int, copy: int = 0) -> jax.Array:
        from rooflax.ops.mosaic import load, pl, words_layout

        place = (row, copy, pl.ds(start, GROUPS), pl.ds(half * HALF, HALF))
        return load(self.x.at[place], words_layout()).astype(jnp.float32)

    def squares(self, row: Any, start: Any) -> jax.Array:
        """Squares of a tile of groups, both halves added."""
        values = [self.tile(row, start, half) for half in range(self.x.shape[3] // HALF)]
        total = values[0] * values[0]
        for value in values[1:]:
            total = total + value * value
        return total

    def squares_of(self, row: Any, share: Share) -> jax.Array:
        """Sums of squares of a share of a row, by the groups' places in their tiles."""
        from rooflax.ops.mosaic import filled, plgpu, spread, words_layout

        layout = words_layout()
        number = plgpu.broadcasted_iota(jnp.int32, (GROUPS,), 0, layout=layout.reduce(1))

        def added(index: Any, total: Any) -> Any:
            start, wanted = share.start(index)
            squares = self.squares(row, start)
            if share.groups % GROUPS:
                is_new = (number >= wanted - start).astype(jnp.int32)
                squares = jnp.where(spread(is_new, (GROUPS, HALF), 0, layout) > 0, squares, 0.0)
            return total + squares

        zeros = filled((GROUPS, HALF), 0.0, layout)
        return jax.lax.fori_loop(0, share.count, added, zeros).sum(axis=1)

    def scale_of(self, squares: Any, helpers: int) -> jax.Array:
        """Scale of a norm, from the memory of all shares' sums."""
        from rooflax.ops.mosaic import load, pl, words_layout

        parts = [
            load(squares.at[pl.ds(at, HALF)], words_layout().reduce(0))
            for at in range(0, helpers * GROUPS, HALF)
        ]
        return self.scale(sum(parts[1:], parts[0]).sum(axis=0))

    def scale(self, squares: jax.Array) -> jax.Array:
        """Scale of a norm."""
        assert isinstance(self.prologue, Norm)
        return jax.lax.rsqrt(squares * np.float32(1 / self.inner) + np.float32(self.prologue.eps))

    def prepared(self, row: Any, start: Any, scale: Any) -> list[jax.Array]:
        """The halves of a tile, behind the prologue."""
        from rooflax.ops.mosaic import load, pl, words_layout

        values = []
        for half in range(self.x.shape[3] // HALF):
            value = self.tile(row, start, half)
            if isinstance(self.prologue, Activation | ClampedSwiglu):
                value = gated(self.prologue, value, self.tile(row, start, half, 1))
            elif isinstance(self.prologue, Norm):
                place = (pl.ds(start, GROUPS), pl.ds(half * HALF, HALF))
                weight = load(self.weight.at[place], words_layout()).astype(jnp.float32)
                value = value * scale * weight
            values.append(value.astype(self.dtype).astype(jnp.float32))
        return values


def gated(prologue: Activation | ClampedSwiglu, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Output of a gate that `fuses` both inputs."""
    if isinstance(prologue, Activation):
        return gate * jax.lax.logistic(gate) * up
    alpha, limit = (np.float32(a) for a in (prologue.alpha, prologue.limit))
    gate, up = jnp.minimum(gate, limit), jnp.minimum(jnp.maximum(up, -limit), limit)
    return (up + np.float32(1)) * gate * jax.lax.logistic(alpha * gate)


def operands(
    x: Float[Array, "rows width"], num_inputs: int, prologue: Prologue | None
) -> tuple[Float[Array, "rows copies groups inputs"], list[Float[Array, "groups inputs"]]]:
    """Rows and the weight of a norm, as `ValueSource` has them."""
    copies = 2 if getattr(prologue, "gated", False) else 1
    x = x.reshape(len(x), copies, -1, num_inputs)
    weights = []
    if isinstance(prologue, Norm):
        weights.append(jnp.reshape(taken(prologue.weight), (-1, num_inputs)))
    return x, weights


def packed_values(
    x: Float[Array, "rows width"], packing: Packing, prologue: Prologue | None
) -> Int[Array, "rows count padded"]:
    """Packs rows by a kernel, as `padded` lays them out.

    Args:
        prologue: one that `fuses`, or None.
    """
    from rooflax.ops.mosaic import launch, pl, plgpu, store, words_layout

    rows, num_inputs, dtype = len(x), packing.num_inputs, x.dtype
    inner = x.shape[1] // (2 if getattr(prologue, "gated", False) else 1)
    groups = inner // num_inputs
    if groups < GROUPS:
        x, prologue = applied(prologue, x), None
        behind = GROUPS - groups
        x = jnp.pad(x, ((0, 0), (0, behind * num_inputs)))
        packed = packed_values(x, packing, None)[..., :groups]
        return padded(packed)
    tiles, missing, layout = -(-groups // GROUPS), -groups % GROUPS, words_layout()
    x_rows, weights = operands(x, num_inputs, prologue)
    whole, first = Share(groups, 1, np.int32(0)), begin_of(groups)

    def body(x_ref: Any, *refs: Any) -> None:
        *weight, out_ref = refs
        source = ValueSource(x_ref, weight[0] if weight else None, prologue, dtype, inner)
        row, at = (jax.lax.axis_index(axis) for axis in ("row", "tile"))
        scale = None
        if weight:
            scale = source.scale(source.squares_of(row, whole).sum(axis=0))
        start = jnp.minimum(at * GROUPS, groups - GROUPS)
        values, out = source.prepared(row, start, scale), out_ref.at[row]
        number = plgpu.broadcasted_iota(jnp.int32, (GROUPS,), 0, layout=layout.reduce(1))
        # of the program behind the last tile: those that are its own
        real = number >= jnp.where(at == tiles, missing, 0)
        place = jnp.where(at == tiles, GROUPS - missing, first + start)
        packing.store(out, place, packing.packed(values, real))
        if not missing:
            return
        zeros = plgpu.layout_cast(jnp.zeros((GROUPS,), jnp.int32), layout.reduce(1))

        def nothing(place: int) -> None:
            for index in range(packing.count):
                store(out.at[index, pl.ds(place, GROUPS)], zeros)

        pl.when(at == tiles - 1)(lambda: nothing(first + groups))

        @pl.when(at == tiles)
        def _() -> None:
            nothing(0)
            nothing(2 * GROUPS - missing)

    width = first + tiles * GROUPS + (GROUPS if missing else 0)
    out = jax.ShapeDtypeStruct((rows, packing.count, width), jnp.int32)
    grid = {"tile": tiles + bool(missing), "row": rows}
    return launch(body, out, grid, by_lane=True)(x_rows, *weights)


def padded(values: Int[Array, "rows count groups"]) -> Int[Array, "rows count padded"]:
    """Whole tiles of groups. Where the last is not full, a tile of zeros, the last one again and
    another of zeros come before all of them, for who has to begin earlier: zeros are the values of
    no inputs."""
    missing = -values.shape[-1] % GROUPS
    if not missing:
        return values
    none = ((0, 0),) * 2
    whole = jnp.pad(values, (*none, (0, missing)))
    last = jnp.pad(whole[..., -GROUPS:], (*none, (GROUPS, GROUPS)))
    return jnp.concatenate([last, whole], axis=-1)


def begin_of(groups: int) -> int:
    """Position of the first group in the output of `padded`."""
    return 3 * GROUPS if groups % GROUPS else 0


def step_of(largest: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """The power of two that is 1 where numbers of so many bits reach to `largest`, and its inverse;
    NaN and 0 where that is not finite.
    """
    exponent = jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23 & 0xFF
    place = jnp.maximum(exponent, bits) - (bits - 2)
    step = jax.lax.bitcast_convert_type(place << 23, jnp.float32)
    inverse = jax.lax.bitcast_convert_type((254 - place) << 23, jnp.float32)
    return jnp.where(exponent == 255, jnp.nan, step), jnp.where(exponent == 255, 0.0, inverse)


def rounded(x: jax.Array, bits: int) -> jax.Array:
    """Rounds to whole numbers of so many bits; NaN, which is what an infinity times 0 is, to 0."""
    from rooflax.ops.mosaic_bytes import nearest

    if bits == 16:
        return nearest(x)
    most = np.float32(2 ** (bits - 1) - 1)
    moved = x + jnp.where(x < 0, np.float32(-0.5), np.float32(0.5))
    bounded = jnp.minimum(jnp.maximum(moved, -most), most)
    return jnp.where(x == x, bounded, 0.0).astype(jnp.int32)
