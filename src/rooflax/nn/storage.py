"""`WeightPlan`: what each weight becomes in memory, decided once, by `Storage.of`.

Weights of matmuls can be narrower than the activations, because kernels widen them as they read:
bfloat16 as a checkpoint has it, or quantised. Everything else (norms, biases, tables that are only
looked up) has the activations' dtype. This module knows no files.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from rooflax.errors import RequestError
from rooflax.nn.shards import Shards, split_axes
from rooflax.nn.tensor_layouts import Float32, PlusOne, Reordered, Shape, TensorLayout
from rooflax.nn.weights import Param
from rooflax.ops.format_names import (
    BESIDE,
    GROUP,
    HEAD,
    KNOWN,
    PARTS,
    format_of,
    formats_of,
    is_at_an_end,
)
from rooflax.ops.weights import (
    Fused,
    Pairs,
    Quantized,
    class_of,
    pack_pairs,
    packed_bytes,
    quantize,
)
from rooflax.ops.weights.rotation import BLOCK

if TYPE_CHECKING:
    from rooflax.nn.decoder import Decoder

TABLES = ("embed", "per_layer.embed")
"""Tables of which a step looks rows up, at their own width."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Part:
    """The outputs of a weight whose tensors have one format.

    Attributes:
        axis: of the outputs, along which the parts lie side by side.
        where: of it what is theirs.
        tensors: which of the weight's they are.
    """

    format: str
    axis: int
    where: slice
    tensors: slice

    @property
    def index(self) -> tuple[slice, ...]:
        """Index of the part in an array of the weight's outputs."""
        return (slice(None),) * self.axis + (self.where,)

    def out_shape(self, whole: Shape) -> Shape:
        size = self.where.stop - self.where.start
        return (*whole[: self.axis], size, *whole[self.axis + 1 :])


def parts_of(layout: TensorLayout, format: str, out_shape: Shape) -> list[Part]:
    """A weight's outputs by their formats.

    Args:
        format: of all its tensors, or of each (`formats_of`).
        out_shape: of the weight, or of a part of it on a mesh.

    Raises:
        ValueError: it has not so many tensors.
    """
    formats = formats_of(format)
    if len(formats) == 1:
        return [Part(format, 0, slice(0, out_shape[0]), slice(None))]
    axis, sizes = layout.beside(out_shape) or (0, ())
    if len(sizes) != len(formats):
        raise ValueError(f"{format} for {len(sizes)} tensors")
    parts: list[Part] = []
    for number, one in enumerate(formats):
        if parts and parts[-1].format == one:
            continue
        last = next((i for i in range(number, len(formats)) if formats[i] != one), len(formats))
        where = slice(sum(sizes[:number]), sum(sizes[:last]))
        parts.append(Part(one, axis, where, slice(number, last)))
    return parts


@dataclass(frozen=True)
class WeightPlan:
    """Format, dtype and shape of a weight in memory; loading, counting, splitting and offloading
    read it.

    Attributes:
        shape: of the whole array in our layout.
        format: of a matmul's weight in few bits, or of each of its tensors (`formats_of`); None is
            a plain array.
        dtype: of a plain array, and of the numbers that are quantised.
        is_prequantized: its codes are the checkpoint's own.
        is_head: it makes logits: [vocab, hidden], multiplied along hidden.
        is_resident: it stays in memory; else it is read at every step.
        is_paired: it is bfloat16, kept as `Pairs`.
        axes: per axis of the array the mesh's axis that it is split over.
    """

    param: Param
    shape: Shape
    format: str | None
    dtype: str
    is_prequantized: bool
    is_head: bool
    is_resident: bool
    is_paired: bool
    axes: tuple[str | None, ...]

    @property
    def takes_views(self) -> bool:
        """Whether `keep` may get the checkpoint's own tensor: quantising copies by chunks."""
        return self.format is not None and type(self.param.line.layout) is TensorLayout

    def matmul_shape(self, shape: Shape | None = None) -> tuple[Shape, Shape]:
        """(in, out) of the matmul, or of each of a stack.

        Args:
            shape: of a part of the array; None is all of it.
        """
        return _matmul_shape(self.param, shape or self.shape, self.is_head)

    def parts(self, out_shape: Shape | None = None) -> list[Part]:
        """The outputs by their formats, of a weight in few bits.

        Args:
            out_shape: of a part of it; None is all of it.
        """
        assert self.format is not None
        out_shape = out_shape or self.matmul_shape()[1]
        return parts_of(self.param.line.layout, self.format, out_shape)

    def keep(
        self, array: np.ndarray, put: Callable[[np.ndarray], Any] = jax.device_put
    ) -> jax.Array | np.ndarray | Quantized | Fused | Pairs:
        """A host array in our layout, or a part of it, as it will lie where `put` puts it.

        Raises:
            RequestError: the part cuts a group of inputs that share a scale.
        """
        if self.format is None and not self.is_paired:
            return put(array)
        in_shape, out_shape = self.matmul_shape(array.shape)
        if self.format is None:
            return pack_pairs(array, in_shape, out_shape, put=put)
        self.check_groups(math.prod(in_shape))
        if len(parts := self.parts(out_shape)) == 1:
            transposed = self.is_head
            return quantize(array, self.format, in_shape, out_shape, transposed=transposed, put=put)
        inputs = (slice(None),) * len(in_shape)
        each = ((p.format, array[inputs + p.index], p.out_shape(out_shape)) for p in parts)
        made = tuple(quantize(part, format, in_shape, out, put=put) for format, part, out in each)
        return Fused(made, parts[0].axis, self.format)

    def num_bytes(self, shape: Shape | None = None) -> int:
        """Bytes in memory.

        Args:
            shape: of a part of it; None is all of it.

        Raises:
            RequestError: the part cuts a group of inputs that share a scale.
        """
        shape = shape or self.shape
        if self.format is None and not self.is_paired:
            return math.prod(shape) * ITEM_BYTES[self.dtype]
        in_shape, out_shape = self.matmul_shape(shape)
        inner, stack = math.prod(in_shape), math.prod(shape[: self.param.line.num_stacked])
        if self.format is None:
            packed = math.prod(Pairs.packed_shape(inner, math.prod(out_shape)))
            return stack * packed * ITEM_BYTES[self.dtype]
        self.check_groups(inner)
        return stack * sum(
            packed_bytes(part.format, inner, math.prod(part.out_shape(out_shape)))
            for part in self.parts(out_shape)
        )

    def check_groups(self, inner: int) -> None:
        """Rejects a part with so many inputs if it cuts a group of them with one scale.

        Raises:
            RequestError: with the arithmetic.
        """
        formats = () if self.format is None else formats_of(self.format)
        if not all(class_of(format).fits(inner) for format in formats):
            rotates = any(class_of(format).rotates_inputs for format in formats)
            size = BLOCK if rotates else GROUP
            raise RequestError(
                f"{self.param.name} has {inner} inputs on each device, which {self.format} cannot "
                f"keep in groups of {size} ({inner} = {inner // size} x {size} + "
                f"{inner % size}); choose a smaller tensor axis, another format, or a `dtype` in "
                f"place of the file's blocks."
            )


@dataclass(frozen=True)
class Storage:
    """Widths of a model's weights.

    Attributes:
        dtype: of the activations, and of every weight that is not a matmul's.
        quantize: format of the matmuls' weights, the head's apart if it names one; None keeps them
            unquantised.
        keeps_bfloat16: matmuls' weights that the checkpoint has in bfloat16 stay so.
        prequantized: formats by parameter of matmuls' weights that a checkpoint holds quantised
            and that stay so, unless `quantize` asks for another; as `WeightPlan.format`.
        dequantized: parameters whose tensors a checkpoint holds in codes that become float32,
            though the others may be bfloat16.
        offloaded: layers that are read at every step.
        pairs_bfloat16: matmuls' weights in bfloat16 are kept as `Pairs`, but for the head's table.
    """

    dtype: str = "float32"
    quantize: str | None = None
    keeps_bfloat16: bool = False
    prequantized: Mapping[str, str] = field(default_factory=dict)
    dequantized: Set[str] = frozenset()
    offloaded: Set[int] = frozenset()
    pairs_bfloat16: bool = False

    @property
    def format(self) -> str:
        """Width of most matmuls' weights: a quantised format, "bfloat16" or "float32"."""
        if self.prequantized and self.quantize is None:
            return Counter(self._prequantized).most_common(1)[0][0]
        return self.quantize or ("bfloat16" if self.keeps_bfloat16 else self.dtype)

    @property
    def quantizes_activations(self) -> bool:
        """Whether matmuls round what the checkpoint does not: weights, or activations to int8."""
        formats = set(self._prequantized)
        return self.quantize is not None or any(KNOWN[f].quantizes_activations for f in formats)

    @property
    def adapter_dtype(self) -> str:
        """Dtype of LoRA adapters in slots: bfloat16 beside matmuls that are rounded more."""
        return "bfloat16" if self.quantizes_activations else "float32"

    @property
    def _prequantized(self) -> Iterator[str]:
        """The formats of all tensors that the checkpoint holds so."""
        return (f for name in self.prequantized.values() for f in formats_of(name))

    def of(
        self,
        param: Param,
        config: Decoder,
        *,
        is_bfloat16: bool = True,
        shards: Shards | None = None,
    ) -> WeightPlan:
        """The decision about a weight.

        int8 stands in where groups of 32 do not divide the inputs, and int8 without rotation where
        blocks of 64 do not divide those of a device. Experts have one format.

        Args:
            is_bfloat16: the checkpoint has its tensors in bfloat16.
            shards: of the mesh that it is put on.
        """
        line, head = param.line, is_head(param, config)
        shape, unquantized = line.shape(config.axis_sizes), self.quantize is None
        axes = split_axes(line, shards) if shards else (None,) * len(shape)
        is_prequantized = unquantized and param.name in self.prequantized
        format = self.prequantized.get(param.name) if unquantized else None
        multiplies = is_matmul(param, config)
        if self.quantize is not None and multiplies:
            inner = whole = math.prod(_matmul_shape(param, shape, head)[0])
            inputs = axes[1:] if head else axes[line.num_stacked : line.num_inputs]
            inner //= math.prod(getattr(shards, axis) for axis in inputs if axis)
            wanted = [HEAD] if head else matrices_of(param, config)
            end = param.layer is not None and is_at_an_end(param.layer, config.num_layers)
            named = [format_of(self.quantize, part, at_an_end=end) for part in wanted]
            each = [_fitting(format, whole, inner) for format in named]
            format = each[0] if len(set(each)) == 1 else BESIDE.join(each)
        stays = self.keeps_bfloat16 and is_bfloat16 and (multiplies or param.key in TABLES)
        stays &= param.name not in self.dequantized
        dtype = "float32" if is_float32(line.layout) else "bfloat16" if stays else self.dtype
        is_resident = param.layer not in self.offloaded
        is_plain = format is None and dtype == "bfloat16"
        is_paired = self.pairs_bfloat16 and is_plain and multiplies and not head
        return WeightPlan(
            param, shape, format, dtype, is_prequantized, head, is_resident, is_paired, axes
        )


def _fitting(format: str, inner: int, local_inner: int) -> str:
    """The format, or what stands in for it.

    Args:
        inner: inputs of the whole weight.
        local_inner: those on each device.
    """
    if class_of(format).fits(local_inner if class_of(format).rotates_inputs else inner):
        return format
    return "w8a8" if KNOWN[format].quantizes_activations else "w8a16"


def matrices_of(param: Param, config: Decoder) -> list[str | None]:
    """Entries of PARTS that a matmul's weight fuses; None is another, or one format only."""
    name = param.key.rpartition(".")[2]
    names = list(name) if set(name) <= set("qkv") else name.split("_")
    known: list[str | None] = [part if part in PARTS else None for part in names]
    beside = param.line.layout.beside(matmul_shape(param, config)[1])
    apart = beside is not None and len(beside[1]) == len(known) and not param.line.num_stacked
    return known if apart or len(known) == 1 else [None]


def is_float32(layout: TensorLayout) -> bool:
    """Whether a weight is float32 at any precision."""
    layout = layout.each if isinstance(layout, Reordered) else layout
    return isinstance(layout, PlusOne | Float32)


def is_head(param: Param, config: Decoder) -> bool:
    """The matrix that makes logits: [vocab, hidden], multiplied along hidden."""
    return param.key == "lm_head" or (param.key == "embed" and config.tied_embeddings)


def is_matmul(param: Param, config: Decoder) -> bool:
    """Whether a weight multiplies activations."""
    return "->" in param.line.axes or is_head(param, config)


def matmul_shape(param: Param, config: Decoder) -> tuple[Shape, Shape]:
    """(in, out) of a matmul's weight, or of each of a stack."""
    return _matmul_shape(param, param.line.shape(config.axis_sizes), is_head(param, config))


def _matmul_shape(param: Param, shape: Shape, is_head: bool) -> tuple[Shape, Shape]:
    if is_head:
        return shape[1:], shape[:1]
    inner = param.line.num_inputs
    return shape[param.line.num_stacked : inner], shape[inner:]
