"""Weights that a checkpoint holds quantised, whole or in the parts that devices of a mesh have."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from rooflax.loading.finite import check_scales
from rooflax.nn.decoder import Decoder
from rooflax.nn.storage import WeightPlan, is_head, matmul_shape
from rooflax.nn.weights import Slot, Where
from rooflax.ops.formats import GROUP
from rooflax.ops.weights import Quantized, class_of, pack


class Prequantized(Protocol):
    """A checkpoint's own quantised weights."""

    def packed(self, slot: Slot, put: Callable[[np.ndarray], Any] = ...) -> Quantized: ...
    def codes(self, slot: Slot, experts: slice = ...) -> tuple[np.ndarray, np.ndarray]: ...


def output_order(slot: Slot, config: Decoder, numbers: list[np.ndarray]) -> np.ndarray:
    """Which stored row each of our outputs is: the layout's own join, of the rows' numbers.

    Args:
        numbers: [rows, 1] int32 of each of the slot's tensors.
    """
    in_shape, out_shape = matmul_shape(slot, config)
    one_input = (1,) * len(in_shape)
    head = is_head(slot, config)
    out = np.empty((*out_shape, *one_input) if head else (*one_input, *out_shape), np.int32)
    slot.line.layout.join(numbers, out)
    return out.reshape(-1)


class PrequantizedParts:
    """Parts of a weight that a checkpoint holds quantised, for a `Placer`.

    What is split there are not the codes but the numbers of the weight's outputs.
    """

    def __init__(self, prequantized: Prequantized, plan: WeightPlan, check: bool):
        self._prequantized, self._plan = prequantized, plan
        self._check, self._experts = check, slice(0)
        self._codes, self._scales = np.zeros(0), np.zeros(0, np.float32)

    def rows(self, where: Where) -> np.ndarray:
        """Numbers of a part's outputs; every other axis has one entry."""
        _, out_shape = self._plan.matmul_shape()
        numbers = np.arange(math.prod(out_shape)).reshape(out_shape)
        if self._plan.is_head:
            return numbers[where[0]][:, None]
        inner = self._plan.slot.line.num_inputs
        return numbers[where[inner:]][(None,) * inner]

    def keep(self, rows: np.ndarray, where: Where) -> Quantized:
        """The codes of these outputs and of the inputs that the part has."""
        plan, slot, stacked = self._plan, self._plan.slot, self._plan.slot.line.num_stacked
        in_shape, out_shape = plan.matmul_shape()
        assert plan.format is not None
        experts = where[0] if stacked else slice(None)
        if self._experts != experts:
            self._codes, self._scales = self._prequantized.codes(slot, experts)
            self._experts = experts
            if self._check:
                check_scales(slot, plan.format, self._scales)
        own_in, own_out = in_shape, rows.shape[-len(out_shape) :]
        begin, end = 0, math.prod(in_shape)
        if plan.is_head:
            own_out = rows.shape[:1]
        else:
            first, each = where[stacked], end // in_shape[0]
            begin, end = first.start * each, first.stop * each
            own_in = (first.stop - first.start, *in_shape[1:])
        plan.check_groups(end - begin)
        flat = rows.reshape(-1)
        codes = self._codes[..., flat, begin:end]
        if class_of(plan.format).grouped:
            scales = self._scales[..., flat, begin // GROUP : end // GROUP]
        else:
            scales = self._scales[..., flat]
        return pack(plan.format, codes, scales, own_in, own_out, put=np.asarray)
