"""From a checkpoint's tensors to one of our arrays, and back: a `TensorLayout` of each line of
the table (see `nn.weights`). NumPy arrays and shapes only: it knows no files and no jax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ROWS_AT_ONCE = 16
Shape = tuple[int, ...]
Where = tuple[slice, ...]
"""Slice of each axis of an array that a part of it has."""


@dataclass(frozen=True)
class TensorLayout:
    """Layout of a checkpoint's tensors in one of our arrays, and back.

    The base class keeps a tensor as the checkpoint has it.
    """

    def hf_shapes(self, in_shape: Shape, out_shape: Shape) -> list[Shape]:
        """Shapes of the checkpoint's tensors, in order of `WeightLine.hf`."""
        return [(*in_shape, *out_shape)]

    def join(self, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
        """Writes the checkpoint's tensors into our array, converting its dtype on the way."""
        out[...] = parts[0].reshape(out.shape)

    def split(self, array: np.ndarray, in_shape: Shape) -> list[np.ndarray]:
        """The checkpoint's tensors from our array; the caller gives them their HF shapes."""
        return [array]

    def beside(self, out_shape: Shape) -> tuple[int, tuple[int, ...]] | None:
        """Along which axis of the outputs the tensors lie side by side, and how much of it each is;
        None where they lie otherwise."""
        return None

    def slice_parts(
        self, parts: Sequence[np.ndarray], shape: Shape, where: Where
    ) -> list[np.ndarray]:
        """Views of the checkpoint's tensors from which `join` makes a part of our array.

        Args:
            shape: of our whole array.
            where: of each of its axes what the part has, from the first axis that a split may be on
                left and right of the arrow.
        """
        return [parts[0].reshape(shape)[where]]


@dataclass(frozen=True)
class PlusOne(TensorLayout):
    """A norm's weight, which the checkpoint has less one; ours is float32 at any precision."""

    def join(self, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
        out[...] = parts[0].astype(np.float32) + 1

    def split(self, array: np.ndarray, in_shape: Shape) -> list[np.ndarray]:
        return [array - 1]


@dataclass(frozen=True)
class Flat(TensorLayout):
    """A bias or other vector whose axes the checkpoint flattens into one."""

    def hf_shapes(self, in_shape: Shape, out_shape: Shape) -> list[Shape]:
        return [(math.prod(in_shape) * math.prod(out_shape),)]


@dataclass(frozen=True)
class Conv1D(TensorLayout):
    """GPT-2's linear layer, [in, out] in the checkpoint."""

    def hf_shapes(self, in_shape: Shape, out_shape: Shape) -> list[Shape]:
        return [(math.prod(in_shape), math.prod(out_shape))]


@dataclass(frozen=True)
class Linear(TensorLayout):
    """torch.nn.Linear, [out, in] in the checkpoint, [in, out] here."""

    def hf_shapes(self, in_shape: Shape, out_shape: Shape) -> list[Shape]:
        return [(math.prod(out_shape), math.prod(in_shape))]

    def join(self, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
        (part,) = parts
        _turn(part, out.reshape(part.shape[1], part.shape[0]))

    def split(self, array: np.ndarray, in_shape: Shape) -> list[np.ndarray]:
        return [array.reshape(math.prod(in_shape), -1).T]

    def slice_parts(
        self, parts: Sequence[np.ndarray], shape: Shape, where: Where
    ) -> list[np.ndarray]:
        (part,) = parts
        first, *rest = zip(where, shape, strict=True)
        rows = slice(None)
        if rest and part.shape[0] == rest[-1][1]:  # outputs of one axis
            rows = rest.pop()[0]
        assert all(w.indices(n) == (0, n, 1) for w, n in rest)
        return [part[rows, _times(first[0], part.shape[1] // first[1])]]


def _times(where: slice, step: int) -> slice:
    """Slice of items of size `step` that a slice of them covers."""
    begin, end = (None if n is None else n * step for n in (where.start, where.stop))
    return slice(begin, end)


def _turn(rows: np.ndarray, out: np.ndarray) -> None:
    """out[...] = rows.T, a few rows at a time, so that the lines they go to stay in the cache.

    Of equal types the bits are copied: NumPy copies whole numbers faster than its newer types.
    """
    if rows.dtype == out.dtype:
        rows, out = (array.view(f"u{array.itemsize}") for array in (rows, out))
    for begin in range(0, len(rows), ROWS_AT_ONCE):
        part = rows[begin : begin + ROWS_AT_ONCE].astype(out.dtype, copy=False)
        out[..., begin : begin + ROWS_AT_ONCE] = part.T


GROUP_ENDS = {"qkv_group": 2, "qk_group": 1, "q_group": 0}
"""Number of an axis's rows that are k and v, behind those of the queries."""


@dataclass(frozen=True)
class QKV(TensorLayout):
    """Separate q, k, v projections, fused by key/value head.

    Ours is [hidden, kv_heads, group + 2, head_dim]: for each K/V head its query heads, then k,
    then v, so that a split over K/V heads keeps a head's queries beside it. With `bias` the
    hidden axis is absent.

    Attributes:
        num_kv: 2 for k and v; 1 where there is k alone, 0 where queries are.
        order: which of the checkpoint's dimensions each dimension of a query or key head is; None
            if they are the same.
        gated: a gate, whose dimensions keep their order, follows each query head.
    """

    bias: bool = False
    order: tuple[int, ...] | None = None
    gated: bool = False
    num_kv: int = 2

    def hf_shapes(self, in_shape: Shape, out_shape: Shape) -> list[Shape]:
        kv_heads, group, head_dim = out_shape
        heads = [group - self.num_kv, *[1] * self.num_kv]
        return [(kv_heads * count * head_dim, *in_shape) for count in heads]

    def beside(self, out_shape: Shape) -> tuple[int, tuple[int, ...]]:
        return 1, (out_shape[1] - self.num_kv, *[1] * self.num_kv)

    def _slices(self, group: int) -> list[slice]:
        """Slices of q, k and v on the axis of a group."""
        queries = group - self.num_kv
        return [slice(0, queries), *(slice(i, i + 1) for i in range(queries, group))]

    def join(self, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
        kv_heads, group, head_dim = out.shape[-3:]
        for part, where in zip(parts, self._slices(group), strict=True):
            heads = part.reshape(kv_heads, -1, head_dim, *part.shape[1:])
            for at, head in np.ndindex(heads.shape[:2]):
                ordered = heads[at, head][self._order(where.start + head, group)]
                if self.bias:
                    out[at, where.start + head] = ordered
                else:
                    _turn(ordered, out[:, at, where.start + head])

    def split(self, array: np.ndarray, in_shape: Shape) -> list[np.ndarray]:
        group, heads = array.shape[-2], []
        for head in range(group):
            order = self._order(head, group)
            back = order if isinstance(order, slice) else np.argsort(order)
            heads.append(array[..., head, :][..., back])
        ours = np.stack(heads, axis=-2)
        parts = [ours[..., where, :] for where in self._slices(group)]
        if self.bias:
            return [part.reshape(-1) for part in parts]
        return [np.moveaxis(part, 0, -1).reshape(-1, array.shape[0]) for part in parts]

    def slice_parts(
        self, parts: Sequence[np.ndarray], shape: Shape, where: Where
    ) -> list[np.ndarray]:
        return [part[_times(where[-3], part.shape[0] // shape[-3])] for part in parts]

    def _order(self, head: int, group: int) -> Any:
        """Order of the dimensions of a group's heads: queries, then k, then v."""
        queries = group - self.num_kv
        is_gate = self.gated and head < queries and head % 2 == 1
        if self.order is None or head > queries or is_gate:
            return slice(None)
        return list(self.order)


@dataclass(frozen=True)
class Reordered(TensorLayout):
    """A vector of a head's dimensions, in the order that `QKV` gives them.

    Attributes:
        each: the layout of the vector in the checkpoint's order.
    """

    order: tuple[int, ...]
    each: TensorLayout = TensorLayout()

    def join(self, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
        self.each.join([parts[0][list(self.order)]], out)

    def split(self, array: np.ndarray, in_shape: Shape) -> list[np.ndarray]:
        return self.each.split(array[np.argsort(self.order)], in_shape)


@dataclass(frozen=True)
class Rows(TensorLayout):
    """One tensor that has the rows of several, one after the other.

    Attributes:
        each: the layout of the several.
    """

    each: TensorLayout

    def hf_shapes(self, in_shape: Shape, out_shape: Shape) -> list[Shape]:
        several = self.each.hf_shapes(in_shape, out_shape)
        return [(sum(shape[0] for shape in several), *several[0][1:])]

    def beside(self, out_shape: Shape) -> tuple[int, tuple[int, ...]] | None:
        """The several layouts that other files store apart."""
        return self.each.beside(out_shape)

    def join(self, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
        self.each.join(self._apart(parts, out.shape), out)

    def split(self, array: np.ndarray, in_shape: Shape) -> list[np.ndarray]:
        return [np.concatenate(self.each.split(array, in_shape))]

    def slice_parts(
        self, parts: Sequence[np.ndarray], shape: Shape, where: Where
    ) -> list[np.ndarray]:
        return self.each.slice_parts(self._apart(parts, shape), shape, where)

    def _apart(self, parts: Sequence[np.ndarray], shape: Shape) -> Sequence[np.ndarray]:
        """The several, of one tensor; parts of them come apart already."""
        if len(parts) > 1:
            return parts
        (whole,) = parts
        out_shape = shape[whole.ndim - 1 :]
        sizes = [rows for rows, *_ in self.each.hf_shapes((), out_shape)]
        return np.split(whole, np.cumsum(sizes)[:-1])


@dataclass(frozen=True)
class Swapped(TensorLayout):
    """One tensor whose last axis is several of ours, the first two of these the other way round:
    GPT-2's c_attn has all heads' q, then k, then v, and GPT-OSS's experts alternate gate and up.

    Attributes:
        axes: how many of ours are its last one.
    """

    axes: int

    def hf_shapes(self, in_shape: Shape, out_shape: Shape) -> list[Shape]:
        shape = (*in_shape, *out_shape)
        return [(*shape[: -self.axes], math.prod(shape[-self.axes :]))]

    def join(self, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
        stored = parts[0].reshape(self._swapped(out.shape))
        out[...] = np.swapaxes(stored, -self.axes, 1 - self.axes)

    def split(self, array: np.ndarray, in_shape: Shape) -> list[np.ndarray]:
        return [np.swapaxes(array, -self.axes, 1 - self.axes)]

    def slice_parts(
        self, parts: Sequence[np.ndarray], shape: Shape, where: Where
    ) -> list[np.ndarray]:
        return [parts[0].reshape(self._swapped(shape))[self._swapped(where)]]

    def _swapped(self, each: tuple[Any, ...]) -> tuple[Any, ...]:
        """Axes in the checkpoint's order."""
        at = len(each) - self.axes
        return (*each[:at], each[at + 1], each[at], *each[at + 2 :])


@dataclass(frozen=True)
class Parallel(TensorLayout):
    """Linear layers of the same input, as gate and up, fused as [hidden, layers, width]; their
    biases as [layers, width]."""

    def hf_shapes(self, in_shape: Shape, out_shape: Shape) -> list[Shape]:
        count, width = out_shape
        return [(width, *in_shape)] * count

    def beside(self, out_shape: Shape) -> tuple[int, tuple[int, ...]]:
        return 0, (1,) * out_shape[0]

    def join(self, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
        for index, part in enumerate(parts):
            _turn(part, out[..., index, :])

    def split(self, array: np.ndarray, in_shape: Shape) -> list[np.ndarray]:
        return [array[..., index, :].T for index in range(array.shape[-2])]

    def slice_parts(
        self, parts: Sequence[np.ndarray], shape: Shape, where: Where
    ) -> list[np.ndarray]:
        return [part[where[-1]] for part in parts]


@dataclass(frozen=True)
class Channels(TensorLayout):
    """The kernel of a convolution of each channel, [channels, 1, taps] in the checkpoint."""

    def hf_shapes(self, in_shape: Shape, out_shape: Shape) -> list[Shape]:
        return [(math.prod(out_shape[:-1]), 1, out_shape[-1])]


@dataclass(frozen=True)
class PerExpert(TensorLayout):
    """A stack of which each expert has tensors of its own: the first's, then the second's, ...

    Attributes:
        each: of one expert's tensors.
    """

    each: TensorLayout

    def hf_shapes(self, in_shape: Shape, out_shape: Shape) -> list[Shape]:
        return self.each.hf_shapes(in_shape[1:], out_shape) * in_shape[0]

    def join(self, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
        for expert_parts, expert in zip(_by_expert(parts, len(out)), out, strict=True):
            self.each.join(expert_parts, expert)

    def split(self, array: np.ndarray, in_shape: Shape) -> list[np.ndarray]:
        return [part for expert in array for part in self.each.split(expert, in_shape[1:])]

    def slice_parts(
        self, parts: Sequence[np.ndarray], shape: Shape, where: Where
    ) -> list[np.ndarray]:
        chosen = _by_expert(parts, shape[0])[where[0]]
        return [p for rows in chosen for p in self.each.slice_parts(rows, shape[1:], where[1:])]


def _by_expert(parts: Sequence[np.ndarray], count: int) -> list[Sequence[np.ndarray]]:
    size = len(parts) // count
    return [parts[begin : begin + size] for begin in range(0, len(parts), size)]


@dataclass(frozen=True)
class StackedExperts(PerExpert):
    """A stack of which one tensor holds all experts."""

    def hf_shapes(self, in_shape: Shape, out_shape: Shape) -> list[Shape]:
        (one,) = self.each.hf_shapes(in_shape[1:], out_shape)
        return [(in_shape[0], *one)]

    def join(self, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
        super().join(self._apart(parts), out)

    def split(self, array: np.ndarray, in_shape: Shape) -> list[np.ndarray]:
        return [np.stack(super().split(array, in_shape))]

    def slice_parts(
        self, parts: Sequence[np.ndarray], shape: Shape, where: Where
    ) -> list[np.ndarray]:
        return super().slice_parts(self._apart(parts), shape, where)

    def _apart(self, parts: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """One matrix per expert, of one tensor; parts of them come apart already."""
        return list(parts[0]) if parts[0].ndim == 3 else parts


@dataclass(frozen=True)
class HeadRows(TensorLayout):
    """Rows of several kinds, of each kind those of all heads; ours has a head's rows of all kinds
    side by side, [hidden, heads, width], so that a split over heads keeps them together.

    Attributes:
        widths: of each tensor, how many rows of a kind a head has, kind by kind.
        is_kernel: they are channels of a convolution, [rows, 1, taps]; ours is [heads, width,
            taps].
    """

    widths: tuple[tuple[int, ...], ...]
    is_kernel: bool = False

    def hf_shapes(self, in_shape: Shape, out_shape: Shape) -> list[Shape]:
        rest = (1, out_shape[-1]) if self.is_kernel else in_shape
        return [(out_shape[0] * sum(widths), *rest) for widths in self.widths]

    def beside(self, out_shape: Shape) -> tuple[int, tuple[int, ...]]:
        return 1, tuple(map(sum, self.widths))

    def join(self, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
        begin = 0
        for rows in self._apart(parts, out.shape[0 if self.is_kernel else 1]):
            end = begin + rows.shape[1]
            if self.is_kernel:
                out[:, begin:end] = rows.reshape(*rows.shape[:2], -1)
            else:
                for head, head_rows in enumerate(rows):
                    _turn(head_rows, out[:, head, begin:end])
            begin = end

    def split(self, array: np.ndarray, in_shape: Shape) -> list[np.ndarray]:
        ours = array if self.is_kernel else np.moveaxis(array, 0, -1)  # [heads, width, ...]
        ends = np.cumsum([width for widths in self.widths for width in widths])[:-1]
        kinds = iter(np.split(ours, ends, axis=1))
        flat = [[next(kinds) for _ in widths] for widths in self.widths]
        return [
            np.concatenate([kind.reshape(-1, ours.shape[-1]) for kind in tensor]) for tensor in flat
        ]

    def slice_parts(
        self, parts: Sequence[np.ndarray], shape: Shape, where: Where
    ) -> list[np.ndarray]:
        axis = -3 if self.is_kernel else -2
        return [rows[where[axis]] for rows in self._apart(parts, shape[axis])]

    def _apart(self, parts: Sequence[np.ndarray], heads: int) -> list[np.ndarray]:
        """Splits the rows by kind, [heads, width, ...] each; parts of the tensors come so."""
        if parts[0].ndim == (4 if self.is_kernel else 3):
            return list(parts)
        by_part = []
        for part, widths in zip(parts, self.widths, strict=True):
            for rows in np.split(part, np.cumsum([heads * width for width in widths])[:-1]):
                by_part.append(rows.reshape(heads, -1, *part.shape[1:]))
        return by_part


@dataclass(frozen=True)
class HeadPart(TensorLayout):
    """Rows of one kind in a linear layer whose rows are by head, with two kinds in each head.

    The first kind's are as in the checkpoint, [heads, rows, in], the second's transposed, [heads,
    in, rows]. A tensor that two weights share is the sum of what they give of it.

    Attributes:
        widths: how many rows of each kind a head has.
        kind: 0 or 1.
    """

    widths: tuple[int, int]
    kind: int

    def hf_shapes(self, in_shape: Shape, out_shape: Shape) -> list[Shape]:
        inner = out_shape[0] if self.kind == 0 else in_shape[1]
        return [(in_shape[0] * sum(self.widths), inner)]

    def join(self, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
        for rows, place in zip(self._rows(parts[0], len(out)), out, strict=True):
            if self.kind == 0:
                place[...] = rows
            else:
                _turn(rows, place)

    def split(self, array: np.ndarray, in_shape: Shape) -> list[np.ndarray]:
        rows = array if self.kind == 0 else array.swapaxes(1, 2)
        before, after = (self.widths[0], 0) if self.kind else (0, self.widths[1])
        return [np.pad(rows, ((0, 0), (before, after), (0, 0)))]

    def slice_parts(
        self, parts: Sequence[np.ndarray], shape: Shape, where: Where
    ) -> list[np.ndarray]:
        return [parts[0].reshape(shape[0], sum(self.widths), -1)[where[0]]]

    def _rows(self, part: np.ndarray, heads: int) -> np.ndarray:
        begin = self.widths[0] * self.kind
        each = part.reshape(heads, sum(self.widths), -1)
        return each[:, begin : begin + self.widths[self.kind]]


@dataclass(frozen=True)
class Float32(Flat):
    """A vector that is float32 at any precision."""
