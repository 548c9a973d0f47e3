"""Changes between a checkpoint's tensors and llama.cpp's, each with its inverse.

llama.cpp's converter renames tensors and changes some: rows of q and k in LLaMA files are permuted
(its RoPE pairs neighbours, ours halves), GPT-2's matmuls are transposed, GPT-OSS's interleaved gate
and up are two tensors, and Qwen 3.5's value heads lie in another order. Reading takes `apply`,
writing `undo`.

Source: https://github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py and conversion/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Change:
    """A checkpoint's tensor and the stored ones that it is made of; this one is stored as it is."""

    def apply(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The checkpoint's tensor, of the stored ones."""
        return parts[0]

    def undo(self, tensor: np.ndarray) -> Sequence[np.ndarray]:
        """The stored tensors, of the checkpoint's."""
        return [tensor]

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        """Shape of the checkpoint's tensor from those of the stored ones; 0 axes if they do not
        fit."""
        return shapes[0]

    def stored_shapes(self, shape: Shape) -> Sequence[Shape]:
        """Shapes of the stored tensors from that of the checkpoint's."""
        return [shape]

    def inputs(self) -> np.ndarray | None:
        """Stored column of each of the checkpoint's; None if the order is the same."""
        return None


@dataclass(frozen=True)
class Permuted(Change):
    """Rows of q or k in LLaMA files: pairs (i, i + half) of a head lie side by side there."""

    heads: int

    def apply(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return self._swapped(parts[0], (-1, 2))

    def undo(self, tensor: np.ndarray) -> Sequence[np.ndarray]:
        return [self._swapped(tensor, (2, -1))]

    def _swapped(self, rows: np.ndarray, pair: tuple[int, int]) -> np.ndarray:
        return rows.reshape(self.heads, *pair, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


@dataclass(frozen=True)
class LessOne(Change):
    """Norms that the file has with one added, as they are multiplied."""

    def apply(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return parts[0].astype(np.float32) - 1

    def undo(self, tensor: np.ndarray) -> Sequence[np.ndarray]:
        return [tensor.astype(np.float32) + 1]


@dataclass(frozen=True)
class Row(Change):
    """A matrix of one row, a vector in the file."""

    def apply(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return parts[0].reshape(1, -1)

    def undo(self, tensor: np.ndarray) -> Sequence[np.ndarray]:
        return [tensor.reshape(-1)]

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return (1, *shapes[0][-1:])

    def stored_shapes(self, shape: Shape) -> Sequence[Shape]:
        return [shape[-1:]]


@dataclass(frozen=True)
class Transposed(Change):
    """A matrix, or a stack of them, whose last two axes are swapped."""

    def apply(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return parts[0].swapaxes(-1, -2)

    def undo(self, tensor: np.ndarray) -> Sequence[np.ndarray]:
        return [tensor.swapaxes(-1, -2)]

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return (*shapes[0][:-2], *shapes[0][:-3:-1])

    def stored_shapes(self, shape: Shape) -> Sequence[Shape]:
        return [self.shape([shape])]


@dataclass(frozen=True)
class Interleaved(Change):
    """Experts' gate and up [experts, mlp, hidden] as [experts, hidden, 2 mlp], alternating."""

    def apply(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        both = np.stack(parts, axis=2)
        return both.reshape(both.shape[0], -1, both.shape[3]).swapaxes(1, 2)

    def undo(self, tensor: np.ndarray) -> Sequence[np.ndarray]:
        return [tensor[..., begin::2].swapaxes(1, 2) for begin in range(2)]

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return (*shapes[0][:-2], shapes[0][-1], *(2 * n for n in shapes[0][-2:-1]))

    def stored_shapes(self, shape: Shape) -> Sequence[Shape]:
        return [(shape[0], shape[2] // 2, shape[1])] * 2


@dataclass(frozen=True)
class InterleavedBias(Change):
    """Biases [experts, mlp] of gate and up as [experts, 2 mlp], alternating."""

    def apply(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.stack(parts, axis=-1).reshape(len(parts[0]), -1)

    def undo(self, tensor: np.ndarray) -> Sequence[np.ndarray]:
        return [tensor[..., begin::2] for begin in range(2)]

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return (*shapes[0][:-1], 2 * shapes[0][-1])

    def stored_shapes(self, shape: Shape) -> Sequence[Shape]:
        return [(shape[0], shape[1] // 2)] * 2


@dataclass(frozen=True)
class Halves(Change):
    """Rows of two tensors one after the other, of each expert if there are some."""

    def apply(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts, axis=-2)

    def undo(self, tensor: np.ndarray) -> Sequence[np.ndarray]:
        return np.split(tensor, 2, axis=-2)

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return (*shapes[0][:-2], *(2 * n for n in shapes[0][-2:-1]), shapes[0][-1])

    def stored_shapes(self, shape: Shape) -> Sequence[Shape]:
        return [(*shape[:-2], shape[-2] // 2, shape[-1])] * 2


@dataclass(frozen=True)
class Kernel(Change):
    """The kernel of a convolution of each channel, [channels, taps] in the file.

    Attributes:
        rows: how channels are ordered there.
    """

    rows: Change = Change()

    def apply(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return self.rows.apply(parts)[:, None]

    def undo(self, tensor: np.ndarray) -> Sequence[np.ndarray]:
        return self.rows.undo(tensor[:, 0])

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return (*shapes[0][:1], 1, *shapes[0][1:])

    def stored_shapes(self, shape: Shape) -> Sequence[Shape]:
        return [(shape[0], shape[2])]


@dataclass(frozen=True)
class HeadKinds(Change):
    """Rows that a checkpoint has head by head, and the file kind by kind in two tensors.

    Attributes:
        heads: how many there are.
        widths: of each kind in a head; the last kind is the second tensor.
    """

    heads: int
    widths: tuple[int, ...]

    def apply(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        rows = np.concatenate(parts)
        ends = np.cumsum([self.heads * width for width in self.widths])[:-1]
        kinds = [kind.reshape(self.heads, -1, *rows.shape[1:]) for kind in np.split(rows, ends)]
        return np.concatenate(kinds, axis=1).reshape(rows.shape)

    def undo(self, tensor: np.ndarray) -> Sequence[np.ndarray]:
        rows = tensor.reshape(self.heads, -1, *tensor.shape[1:])
        kinds = np.split(rows, np.cumsum(self.widths)[:-1], axis=1)
        *first, last = [kind.reshape(-1, *tensor.shape[1:]) for kind in kinds]
        return [np.concatenate(first), last]

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def stored_shapes(self, shape: Shape) -> Sequence[Shape]:
        last = self.heads * self.widths[-1]
        return [(shape[0] - last, *shape[1:]), (last, *shape[1:])]


@dataclass(frozen=True)
class HeadStacks(Change):
    """Rows of two kinds in each head, of which the file has stacks [heads, ...]: the first kind's
    transposed, the second's as they are.

    Attributes:
        heads: how many there are.
        widths: rows of each kind in a head.
    """

    heads: int
    widths: tuple[int, int]

    def apply(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        both = np.concatenate((parts[0].swapaxes(1, 2), parts[1]), axis=1)
        return both.reshape(-1, both.shape[-1])

    def undo(self, tensor: np.ndarray) -> Sequence[np.ndarray]:
        rows = tensor.reshape(self.heads, sum(self.widths), -1)
        first, second = np.split(rows, self.widths[:1], axis=1)
        return [first.swapaxes(1, 2), second]

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        return (self.heads * sum(self.widths), *shapes[1][-1:])

    def stored_shapes(self, shape: Shape) -> Sequence[Shape]:
        first, second = self.widths
        return [(self.heads, shape[-1], first), (self.heads, second, shape[-1])]


@dataclass(frozen=True)
class Tiled(Change):
    """Value heads, of which a key head has several: those of one key head side by side in the
    checkpoint; in the file the first ones of all key heads, then the second ones, and so on.

    Attributes:
        heads, group: key heads, and value heads of each.
        width: rows of a value head.
        before: rows before them, which stay.
        is_columns: columns are meant.
    """

    heads: int
    group: int
    width: int = 1
    before: int = 0
    is_columns: bool = False

    def apply(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return self._ordered(parts[0], self._order())

    def undo(self, tensor: np.ndarray) -> Sequence[np.ndarray]:
        return [self._ordered(tensor, np.argsort(self._order()))]

    def inputs(self) -> np.ndarray | None:
        return self._order() if self.is_columns else None

    def _ordered(self, array: np.ndarray, order: np.ndarray) -> np.ndarray:
        return array[..., order] if self.is_columns else array[order]

    def _order(self) -> np.ndarray:
        """Stored row of each of the checkpoint's."""
        count = self.heads * self.group * self.width
        stored = np.arange(count).reshape(self.group, self.heads, self.width)
        return np.append(np.arange(self.before), self.before + stored.swapaxes(0, 1).reshape(-1))


@dataclass(frozen=True)
class Decay(Change):
    """A_log of the gated delta rule; the file has -exp(A_log).

    Attributes:
        rows: how heads are ordered there.
    """

    rows: Change = Change()

    def apply(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        with np.errstate(all="ignore"):  # a damaged one is for --check to find
            return np.log(-self.rows.apply(parts).astype(np.float64)).astype(np.float32)

    def undo(self, tensor: np.ndarray) -> Sequence[np.ndarray]:
        return [-np.exp(part.astype(np.float32)) for part in self.rows.undo(tensor)]


KEEP = Change()


def moves_groups(order: np.ndarray, size: int) -> bool:
    """Whether an order of columns moves none but whole groups of `size`."""
    if len(order) % size:
        return False
    groups = order.reshape(-1, size)
    return not (groups[:, 0] % size).any() and bool((np.diff(groups) == 1).all())
