"""Quantizing by what a model computes: GPTQ, one matmul after the other, in one pass over a text.

Rounding to the nearest code takes all inputs for alike. Here the model runs over a text, and each
matmul, when its rows arrive, quantizes its weight so that its results on those rows change least:
inputs are rounded one after the other, and what each costs is taken back by the inputs that
are still to come, weighted by the inverse of X'X. What follows sees the quantized weights.

In memory are one layer's weights in float32, the quantized ones so far, the text's hidden states,
and four matrices [inputs, inputs] of the matmul at hand.

Source: Frantar et al., GPTQ, 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float16, UInt8

from rooflax.errors import RequestError
from rooflax.loading.plan import Plan
from rooflax.models.model import Model, build
from rooflax.nn.batch import Batch
from rooflax.nn.execution import ExecutionOptions
from rooflax.nn.storage import Part, Storage, WeightPlan
from rooflax.ops.format_names import GROUP, KNOWN, format_of
from rooflax.ops.linear.api import matmul
from rooflax.ops.linear.prologue import applied
from rooflax.ops.weights import Fused, Quantized, iq4, pack, quantize
from rooflax.ops.weights.operand import Composite

CODE = "iq4_nl"
"""The code of weights that are calibrated; others are rounded."""
WINDOW, MOST_WINDOWS = 512, 16
LEAST_TOKENS = 256
DAMPING = 0.01
"""Share of the mean of X'X's diagonal, added to it: inputs that the text lacks have a weight."""
Report = Callable[[int, float], None]
"""A layer's number, and the squared error of its results as a share of rounding's."""


def calibrate(plan: Plan, ids: Sequence[int], report: Report | None = None) -> Model:
    """The model of a plan, its weights calibrated where their format can be.

    Args:
        ids: of a text, of which the first 8,192 are used.
        report: called after each layer.

    Raises:
        RequestError: the text is too short, or the plan has nothing to calibrate.
    """
    check_format(plan)
    info, storage = plan.info, plan.storage
    if len(ids) < LEAST_TOKENS:
        raise RequestError(
            f"the text to calibrate with has {len(ids)} tokens; give at least {LEAST_TOKENS}, and "
            f"better some thousands."
        )
    length = min(WINDOW, plan.max_model_len, len(ids))
    rows = min(MOST_WINDOWS, len(ids) // length)
    tokens = jnp.asarray(np.asarray(ids[: rows * length], np.int32).reshape(rows, length))
    reader = info.reader(Storage("float32"))
    plans = {param.name: storage.of(param, info.config) for param in reader.params}
    ends = [param for param in reader.params if param.layer is None]
    weights: dict[str, Any] = {
        param.key: plans[param.name].keep(np.asarray(leaf)) for param, leaf in reader.leaves(ends)
    }
    done: list[dict[str, Any]] = []

    def layers() -> Iterator[dict[str, Any]]:
        for index in range(info.config.num_layers):
            params = [param for param in reader.params if param.layer == index]
            layer = {
                param.key: _operand(np.asarray(leaf), plans[param.name])
                for param, leaf in reader.leaves(params)
            }
            yield layer
            measured = [leaf for leaf in layer.values() if isinstance(leaf, _Calibrated)]
            done.append({
                key: leaf.result() if isinstance(leaf, _Calibrated) else leaf
                for key, leaf in layer.items()
            })  # fmt: skip
            if report and (errors := [leaf.error for leaf in measured if leaf.error is not None]):
                report(index, float(np.mean(errors)))

    lazy = _Layers(layers, info.config.num_layers)
    model = build(info.family, info.config, weights | {"layers": lazy}, length, storage.dtype)
    model.forward(Batch.dense(tokens), options=ExecutionOptions(layers="unrolled"))
    lazy.finish()
    weights["layers"] = tuple(done)
    return build(info.family, info.config, weights, plan.max_model_len, storage.dtype)


def check_format(plan: Plan) -> None:
    """Rejects a plan that has nothing to calibrate.

    Raises:
        RequestError: its format is another one.
    """
    format = plan.storage.quantize
    if format is None or KNOWN[format_of(format)].code != CODE or plan.mesh is not None:
        raise RequestError(
            "calibrating is for four bits on one CPU; say --quantize int4.", param="calibrate"
        )


class _Layers(Sequence):
    """Layers that are read when it is their turn."""

    def __init__(self, each: Callable[[], Iterator[dict[str, Any]]], count: int):
        self._each, self._count = each(), count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return next(self._each)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._each

    def finish(self) -> None:
        """Runs the generator's code after the last layer."""
        for _ in self._each:
            pass


def _operand(array: np.ndarray, plan: WeightPlan) -> Any:
    is_calibrated = plan.format is not None and not plan.param.line.num_stacked
    return _Calibrated(array, plan) if is_calibrated else plan.keep(array)


class _Calibrated(Composite):
    """A weight that is quantized at its first matmul, by the rows that it meets there.

    Attributes:
        error: the squared error of its results as a share of rounding's; None before.
    """

    def __init__(self, array: np.ndarray, plan: WeightPlan):
        self.in_shape, self.out_shape = plan.matmul_shape(array.shape)
        self._array, self._plan = array, plan
        self._made: Quantized | Fused | None = None
        self.error: float | None = None

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    def result(self) -> Any:
        """The quantized weight; one that no row has met is rounded."""
        return self._plan.keep(self._array) if self._made is None else self._made

    def matmul(self, x: Float[Array, "rows width"], *rest: Any, **keywords: Any) -> Array:
        made = self._made
        if made is None:
            rows = applied(keywords.get("prologue"), x.astype(jnp.float32))
            made = self._made = self._by(_second_moments(rows))
        return matmul(made, x, *rest, **keywords)

    def _by(self, moments: Float[Array, "in in"]) -> Any:
        parts, errors = self._plan.parts(self.out_shape), np.zeros(2)
        made = tuple(self._part(part, moments, errors) for part in parts)
        if errors[1] > 0:
            self.error = float(errors[0] / errors[1])
        return made[0] if len(made) == 1 else Fused(made, parts[0].axis, self._plan.format or "")

    def _part(self, part: Part, moments: Float[Array, "in in"], errors: np.ndarray) -> Quantized:
        block = self._array[(slice(None),) * len(self.in_shape) + part.index]
        shapes = self.in_shape, part.out_shape(self.out_shape)
        rounded = quantize(block, part.format, *shapes)
        if KNOWN[part.format].code != CODE:
            return rounded
        w = jnp.asarray(block.reshape(math.prod(self.in_shape), -1).T, jnp.float32)
        codes, scales = gptq(w, moments)
        made = pack(part.format, np.asarray(codes), np.asarray(scales), *shapes)
        errors += [_error(one.numbers().T - w, moments) for one in (made, rounded)]
        return made if np.isfinite(errors).all() else rounded


@jax.jit
def _second_moments(rows: Float[Array, "rows in"]) -> Float[Array, "in in"]:
    return rows.T @ rows / rows.shape[0]


@jax.jit
def _error(difference: Float[Array, "out in"], moments: Float[Array, "in in"]) -> Array:
    return jnp.vdot(difference @ moments, difference)


@jax.jit
def gptq(
    w: Float[Array, "out in"], moments: Float[Array, "in in"]
) -> tuple[UInt8[Array, "out in"], Float16[Array, "out groups"]]:
    """Codes and scales of IQ4_NL, given the mean of the rows' outer products."""
    inner = w.shape[1]
    damped = moments + DAMPING * jnp.mean(jnp.diag(moments)) * jnp.eye(inner)
    inverse = jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(damped), True), jnp.eye(inner))
    upper = jnp.linalg.cholesky(inverse).T  # row j: what rounding input j asks of those behind it
    places = jnp.arange(inner)[None]

    def group(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        w, codes, scales = carry
        begin = number * GROUP
        x = jax.lax.dynamic_slice_in_dim(w, begin, GROUP, 1)
        behind = jax.lax.dynamic_slice_in_dim(upper, begin, GROUP, 0)
        within = jax.lax.dynamic_slice_in_dim(behind, begin, GROUP, 1)
        scale = iq4.searched_scales(x, jnp, 1 / jnp.square(jnp.diag(within))[None])
        scale = scale.astype(jnp.float16).astype(jnp.float32)
        by_scale = iq4.inverse(scale, jnp)

        def column(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            x, codes_here, errors = carry
            values = jax.lax.dynamic_slice_in_dim(x, j, 1, 1)
            code = iq4.codes_of(values * by_scale, jnp)
            rounded = jnp.asarray(iq4.VALUES)[code.astype(jnp.int32)] * scale
            error = (values - rounded) / within[j, j]
            x = x - error * jnp.where(jnp.arange(GROUP) > j, within[j], 0)[None]
            put = jax.lax.dynamic_update_slice_in_dim
            return x, put(codes_here, code, j, 1), put(errors, error, j, 1)

        start = x, jnp.zeros(x.shape, jnp.uint8), jnp.zeros_like(x)
        _, codes_here, errors = jax.lax.fori_loop(0, GROUP, column, start)
        w = w - errors @ jnp.where(places >= begin + GROUP, behind, 0)
        codes = jax.lax.dynamic_update_slice_in_dim(codes, codes_here, begin, 1)
        scales = jax.lax.dynamic_update_slice_in_dim(scales, scale.astype(jnp.float16), number, 1)
        return w, codes, scales

    start = jnp.zeros(w.shape, jnp.uint8), jnp.zeros((len(w), inner // GROUP), jnp.float16)
    _, codes, scales = jax.lax.fori_loop(0, inner // GROUP, group, (w, *start))
    return codes, scales
