"""Stands for jaxtyping where it is not installed: annotations that nobody checks.

rooflax writes shapes as annotations and reads none of them, so that its programs are the same.
`benchmarks/gpu.py` puts this folder last on the path: an installed jaxtyping comes first.
"""

from typing import Any

from jax import Array


class _Shaped:
    """`Float[Array, "rows width"]` is Array."""

    def __class_getitem__(cls, given: tuple[Any, str]) -> Any:
        return given[0]


BFloat16 = Bool = Float = Int = Integer = Num = Shaped = UInt32 = _Shaped
__all__ = ["Array", "BFloat16", "Bool", "Float", "Int", "Integer", "Num", "Shaped", "UInt32"]
