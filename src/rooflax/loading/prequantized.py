"""Weights that a checkpoint holds quantised, whole or in the parts that devices of a mesh have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from rooflax.loading.finite import check_scales
from rooflax.nn.decoder import Decoder
from rooflax.nn.storage import Part, WeightPlan, is_head, matmul_shape
from rooflax.nn.tensor_layouts import Shape, Where
from rooflax.nn.weights import Param
from rooflax.ops.format_names import GROUP
from rooflax.ops.weights import Fused, Quantized, class_of, pack


class Prequantized(Protocol):
    """A checkpoint's own quantised weights."""

    def packed(self, param: Param, put: Callable[[np.ndarray], Any] = ...) -> Quantized | Fused: ...
    def codes(self, param: Param, experts: slice = ...) -> list[tuple[np.ndarray, np.ndarray]]: ...


def beside(format: str, parts: Sequence[Part], made: Iterable[Quantized]) -> Quantized | Fused:
    """A weight of what was made of each of its parts."""
    packed = tuple(made)
    return packed[0] if len(packed) == 1 else Fused(packed, parts[0].axis, format)


def output_order(param: Param, config: Decoder, numbers: list[np.ndarray]) -> np.ndarray:
    """Stored row of each of our outputs: the layout's own join, of the rows' numbers.

    Args:
        numbers: [rows, 1] int32 of each of the parameter's tensors.
    """
    in_shape, out_shape = matmul_shape(param, config)
    one_input = (1,) * len(in_shape)
    head = is_head(param, config)
    out = np.empty((*out_shape, *one_input) if head else (*one_input, *out_shape), np.int32)
    param.line.layout.join(numbers, out)
    return out.reshape(-1)


class PrequantizedParts:
    """Parts of a weight that a checkpoint holds quantised, for a `Placer`.

    What is split there are not the codes but the numbers of the weight's outputs.
    """

    def __init__(self, prequantized: Prequantized, plan: WeightPlan, check: bool):
        self._prequantized, self._plan = prequantized, plan
        self._check, self._experts = check, slice(0)
        self._codes: list[tuple[np.ndarray, np.ndarray]] = []

    def rows(self, where: Where) -> np.ndarray:
        """Numbers of a part's outputs; every other axis has one entry."""
        _, out_shape = self._plan.matmul_shape()
        numbers = np.arange(math.prod(out_shape)).reshape(out_shape)
        if self._plan.is_head:
            return numbers[where[0]][:, None]
        inner = self._plan.param.line.num_inputs
        return numbers[where[inner:]][(None,) * inner]

    def keep(self, rows: np.ndarray, where: Where) -> Quantized | Fused:
        """The codes of these outputs and of the inputs that the part has."""
        plan, param, stacked = self._plan, self._plan.param, self._plan.param.line.num_stacked
        in_shape, out_shape = plan.matmul_shape()
        assert plan.format is not None
        experts = where[0] if stacked else slice(None)
        if self._experts != experts:
            self._codes = self._prequantized.codes(param, experts)
            self._experts = experts
            if self._check:
                for part, (_, scales) in zip(plan.parts(), self._codes, strict=True):
                    check_scales(param, part.format, scales)
        own_in, own_out = in_shape, rows.shape[-len(out_shape) :]
        begin, end = 0, math.prod(in_shape)
        if plan.is_head:
            own_out = rows.shape[:1]
        else:
            first, each = where[stacked], end // in_shape[0]
            begin, end = first.start * each, first.stop * each
            own_in = (first.stop - first.start, *in_shape[1:])
        plan.check_groups(end - begin)

        def packed(part: Part, whole: Part, codes: np.ndarray, scales: np.ndarray) -> Quantized:
            flat = _within(whole, rows.reshape(own_out)[part.index], out_shape)
            groups = slice(begin // GROUP, end // GROUP)
            of_groups = (groups,) if class_of(part.format).grouped else ()
            scales = scales[(..., flat, *of_groups)]
            shape = part.out_shape(own_out)
            return pack(part.format, codes[..., flat, begin:end], scales, own_in, shape, np.asarray)

        parts = plan.parts(own_out)
        each = zip(parts, plan.parts(), self._codes, strict=True)
        return beside(plan.format, parts, (packed(here, whole, *c) for here, whole, c in each))


def _within(part: Part, rows: np.ndarray, out_shape: Shape) -> np.ndarray:
    """Numbers of a weight's outputs, all of one part, as numbers of that part's."""
    at = list(np.unravel_index(rows.reshape(-1), out_shape))
    at[part.axis] = at[part.axis] - part.where.start
    return np.ravel_multi_index(tuple(at), part.out_shape(out_shape))
