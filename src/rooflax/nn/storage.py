"""`Storage`: at which width each weight lies in memory.

Weights of matmuls can be narrower than the activations, because kernels widen them as they read:
bfloat16 as a checkpoint has it, or quantised. Everything else (norms, biases, tables that are only
looked up) has the activations' dtype. This module knows no files.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from rooflax.errors import RequestError
from rooflax.nn.weights import Float32, PlusOne, Reordered, Slot, TensorLayout
from rooflax.ops.formats import FORMATS, GROUP, format_of
from rooflax.ops.weights import Quantized, class_of, packed_bytes, quantize

if TYPE_CHECKING:
    from rooflax.nn.decoder import Decoder

TABLES = ("embed", "per_layer.embed")
"""Of which a step looks rows up, at their own width."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Storage:
    """Widths of a model's weights.

    Attributes:
        dtype: of the activations, and of every weight that is not a matmul's.
        quantize: format of the matmuls' weights, the head's apart if it names one; None keeps them
            unquantised.
        keeps_bfloat16: matmuls' weights that the checkpoint has in bfloat16 stay so.
        prequantized: formats by slot of matmuls' weights that a checkpoint holds quantised and that
            stay so, unless `quantize` asks for another.
    """

    dtype: str = "float32"
    quantize: str | None = None
    keeps_bfloat16: bool = False
    prequantized: Mapping[str, str] = field(default_factory=dict)

    @property
    def format(self) -> str:
        """Width of most matmuls' weights: a quantised format, "bfloat16" or "float32"."""
        if self.prequantized and self.quantize is None:
            return Counter(self.prequantized.values()).most_common(1)[0][0]
        return self.quantize or ("bfloat16" if self.keeps_bfloat16 else self.dtype)

    @property
    def quantizes_activations(self) -> bool:
        """Whether matmuls round what the checkpoint does not: weights, or activations to int8."""
        prequantized = any(
            FORMATS[format].quantizes_activations for format in self.prequantized.values()
        )
        return self.quantize is not None or prequantized

    def format_of(self, slot: Slot, config: Decoder) -> str | None:
        """The format that a weight is quantised to; None where it is not.

        int8 stands in where groups of 32 do not divide the inputs.
        """
        if self.is_prequantized(slot):
            return self.prequantized[slot.name]
        if self.quantize is None or not is_matmul(slot, config):
            return None
        in_shape, _ = matmul_shape(slot, config)
        wanted = format_of(self.quantize, head=is_head(slot, config))
        if class_of(wanted).fits(math.prod(in_shape)):
            return wanted
        return "w8a8" if FORMATS[wanted].quantizes_activations else "w8a16"

    def is_prequantized(self, slot: Slot) -> bool:
        """Whether a weight's codes are the checkpoint's own."""
        return self.quantize is None and slot.name in self.prequantized

    def dtype_of(self, slot: Slot, config: Decoder, stored_bfloat16: bool) -> str:
        """Of an unquantised weight, whose tensors in the checkpoint are bfloat16 or are not."""
        if is_float32(slot.line.layout):
            return "float32"
        reads_bfloat16 = is_matmul(slot, config) or slot.key in TABLES
        keep = self.keeps_bfloat16 and stored_bfloat16 and reads_bfloat16
        return "bfloat16" if keep else self.dtype

    def takes_views(self, slot: Slot, config: Decoder) -> bool:
        """Whether `keep` may get the checkpoint's own tensor: quantising copies by chunks."""
        return self.format_of(slot, config) is not None and type(slot.line.layout) is TensorLayout

    def keep(
        self,
        slot: Slot,
        array: np.ndarray,
        config: Decoder,
        put: Callable[[np.ndarray], Any] = jax.device_put,
    ) -> jax.Array | Quantized:
        """A host array in our layout, as it will lie on the device where `put` puts it."""
        found = self.format_of(slot, config)
        if found is None:
            return put(array)
        shapes = matmul_shape(slot, config)
        return quantize(array, found, *shapes, transposed=is_head(slot, config), put=put)

    def keep_part(self, slot: Slot, array: np.ndarray, config: Decoder) -> np.ndarray | Quantized:
        """A part of a host array in our layout as its devices will hold it, still on the host.

        Raises:
            RequestError: the part cuts a group of inputs that share a scale.
        """
        found = self.format_of(slot, config)
        if found is None:
            return np.ascontiguousarray(array)
        shapes = part_shape(slot, config, array.shape)
        check_groups(slot, found, math.prod(shapes[0]))
        return quantize(array, found, *shapes, transposed=is_head(slot, config), put=np.asarray)

    def num_bytes(
        self,
        slot: Slot,
        config: Decoder,
        *,
        stored_bfloat16: bool,
        sizes: Mapping[str, int] | None = None,
    ) -> int:
        """What a weight will take.

        Args:
            sizes: of the axes of a part of it; None is all of it.

        Raises:
            RequestError: the part cuts a group of inputs that share a scale.
        """
        found = self.format_of(slot, config)
        shape = slot.line.shape(sizes or config.axis_sizes)
        if found is None:
            size = math.prod(shape)
            return size * ITEM_BYTES[self.dtype_of(slot, config, stored_bfloat16)]
        in_shape, out_shape = part_shape(slot, config, shape)
        check_groups(slot, found, math.prod(in_shape))
        stack = math.prod(shape[: slot.line.num_stacked])
        return stack * packed_bytes(found, math.prod(in_shape), math.prod(out_shape))


def is_float32(layout: TensorLayout) -> bool:
    """Whether a weight is float32 at any precision."""
    layout = layout.each if isinstance(layout, Reordered) else layout
    return isinstance(layout, PlusOne | Float32)


def is_head(slot: Slot, config: Decoder) -> bool:
    """The matrix that makes logits: [vocab, hidden], multiplied along hidden."""
    return slot.key == "lm_head" or (slot.key == "embed" and config.tied_embeddings)


def is_matmul(slot: Slot, config: Decoder) -> bool:
    """Whether a weight multiplies activations."""
    return "->" in slot.line.axes or is_head(slot, config)


def check_groups(slot: Slot, format: str, inner: int) -> None:
    """Rejects a part of a weight that cuts a group of inputs with one scale.

    Raises:
        RequestError: with the arithmetic.
    """
    if not class_of(format).fits(inner):
        raise RequestError(
            f"{slot.name} has {inner} inputs on each device, which {format} cannot keep in groups "
            f"of {GROUP} ({inner} = {inner // GROUP} x {GROUP} + {inner % GROUP}); choose a "
            f"smaller tensor axis, another format, or a `dtype` in place of the file's blocks."
        )


def part_shape(
    slot: Slot, config: Decoder, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`product_shape` of a part of this shape."""
    if is_head(slot, config):
        return shape[1:], shape[:1]
    inner = len(slot.line.in_out_shape(config.axis_sizes)[0])
    return shape[slot.line.num_stacked : inner], shape[inner:]


def matmul_shape(slot: Slot, config: Decoder) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(in, out) of a matmul's weight, or of each of a stack."""
    in_shape, out_shape = slot.line.in_out_shape(config.axis_sizes)
    if is_head(slot, config):
        vocab, hidden = out_shape
        return (hidden,), (vocab,)
    return in_shape[slot.line.num_stacked :], out_shape
