"""Weights as objects: `Operand`, plain arrays, and the formats of few bits."""

from rooflax.ops.weights import blocks, formats
from rooflax.ops.weights.fused import Fused, packed_format, quantized_parts
from rooflax.ops.weights.mixed_stack import MixedStack, stack_by_kind, stack_leaves
from rooflax.ops.weights.operand import (
    Branch,
    Composite,
    Dense,
    Operand,
    StackMember,
    StoredOperand,
    Wrapper,
    as_operand,
    as_table,
    at,
    in_place,
    packing_of,
    split_leaf,
    taken,
)
from rooflax.ops.weights.packing import pack, pack_blocks, packed_bytes, placed, quantize
from rooflax.ops.weights.pairs import Pairs, pack_pairs
from rooflax.ops.weights.quantized import CODES, Quantized, class_of, int8_codes

__all__ = [
    "Branch",
    "CODES",
    "Composite",
    "Dense",
    "Fused",
    "MixedStack",
    "Pairs",
    "Quantized",
    "StackMember",
    "StoredOperand",
    "Wrapper",
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
    "pack_pairs",
    "packed_bytes",
    "packed_format",
    "packing_of",
    "placed",
    "quantize",
    "quantized_parts",
    "split_leaf",
    "stack_by_kind",
    "stack_leaves",
    "taken",
]
