"""Weights as objects: `Operand`, plain arrays, and the formats of few bits."""

from rooflax.ops.weights import blocks, formats
from rooflax.ops.weights.mixed_stack import MixedStack
from rooflax.ops.weights.operand import (
    Composite,
    Dense,
    Operand,
    StackMember,
    StoredOperand,
    as_operand,
    as_table,
    at,
    in_place,
    packing_of,
    split_leaf,
    taken,
)
from rooflax.ops.weights.quantized import (
    CODES,
    Quantized,
    class_of,
    int8_codes,
    pack,
    pack_blocks,
    packed_bytes,
    packed_format,
    placed,
    quantize,
)

__all__ = [
    "CODES",
    "Composite",
    "Dense",
    "MixedStack",
    "Quantized",
    "StackMember",
    "StoredOperand",
    "Operand",
    "as_table",
    "as_operand",
    "at",
    "class_of",
    "blocks",
    "formats",
    "in_place",
    "int8_codes",
    "pack",
    "pack_blocks",
    "packed_bytes",
    "packed_format",
    "packing_of",
    "placed",
    "quantize",
    "split_leaf",
    "taken",
]
