"""Weights as objects: `Weight`, plain arrays, and the formats of few bits."""

from rooflax.ops.weights import formats
from rooflax.ops.weights.quantized import (
    Quantized,
    class_of,
    int8_codes,
    pack,
    packed_bytes,
    packed_format,
    placed,
    quantize,
)
from rooflax.ops.weights.weight import (
    Composite,
    Dense,
    Stacked,
    Stored,
    Weight,
    as_table,
    as_weight,
    at,
    in_place,
    packing_of,
    split_leaf,
    taken,
)

__all__ = [
    "Composite",
    "Dense",
    "Quantized",
    "Stacked",
    "Stored",
    "Weight",
    "as_table",
    "as_weight",
    "at",
    "class_of",
    "formats",
    "in_place",
    "int8_codes",
    "pack",
    "packed_bytes",
    "packed_format",
    "packing_of",
    "placed",
    "quantize",
    "split_leaf",
    "taken",
]
