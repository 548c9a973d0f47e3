"""Tokens per second to expect of a model on this machine, before it is loaded.

A step takes its ideal time, from ceilings read now, over an efficiency, and a fixed time per layer.
Both are fitted to steps of other models in the same format on the same kind of processor
(efficiencies.json, which benchmarks/efficiencies.py measures).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rooflax.bench.ceilings import ceiling_reader
from rooflax.bench.counting import decode_cost, prefill_cost
from rooflax.bench.measure import least_seconds, multiplied_as
from rooflax.loading.plan import Plan
from rooflax.models.memory import ONE_DEVICE
from rooflax.nn.decoder import Decoder
from rooflax.ops import native
from rooflax.ops.format_names import format_of

ROWS, PROMPT, CONTEXT = 8, 64, 72
"""Sizes of the steps in the table: rows of several sequences, tokens of a prompt, and a decode
step's mean context."""
READINGS = 5
LEAST_MODELS = 3
"""Number of other models that fit two numbers and tell an error."""
MEASURED_AS = {"w8a8": "w8a8-h64", "w4a8": "iq4_nl"}
"""Formats whose bytes and kernels are nearly those of another one."""
TABLE = Path(__file__).with_name("efficiencies.json")


class Fit(NamedTuple):
    """Fit of the steps of one kind in one format.

    Attributes:
        efficiency: ideal seconds over seconds, without the fixed part.
        layer_s: fixed seconds per layer.
        error: the largest relative error where each model is predicted from the others.
        models: how many there are.
    """

    efficiency: float
    layer_s: float
    error: float
    models: int

    def seconds(self, ideal_s: float, layers: int) -> float:
        return ideal_s / self.efficiency + self.layer_s * layers


def ideal_seconds(least: Mapping[str, float]) -> float:
    """Ideal seconds of reading and of multiplying, as `least_seconds` gives them."""
    return max(least.values())


def fit(points: Sequence[Mapping[str, Any]]) -> Fit | None:
    """The efficiency and the fixed time that make relative errors least; None for too few models.

    Args:
        points: of the table, of one kind and format.
    """
    if len({point["model"] for point in points}) < LEAST_MODELS:
        return None
    errors = []
    for point in points:
        others = [other for other in points if other["model"] != point["model"]]
        inverse, layer_s = _solve(others)
        predicted = inverse * ideal_of(point) + layer_s * point["layers"]
        errors.append(abs(point["s"] / predicted - 1))
    inverse, layer_s = _solve(points)
    return Fit(1 / inverse, layer_s, max(errors), len({point["model"] for point in points}))


def ideal_of(point: Mapping[str, Any]) -> float:
    """Ideal seconds of a step in the table."""
    return ideal_seconds({"memory": point["read_s"], "multiply": point["multiply_s"]})


def _solve(points: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """(1 / efficiency, seconds per layer), the latter not negative, by least squares of relative
    errors."""
    rows = np.array([(ideal_of(p) / p["s"], p["layers"] / p["s"]) for p in points])
    ones = np.ones(len(rows))
    inverse, layer_s = np.linalg.lstsq(rows, ones)[0]
    if layer_s < 0 or inverse <= 0:
        inverse, layer_s = np.linalg.lstsq(rows[:, :1], ones)[0][0], 0.0
    return float(inverse), float(layer_s)


@cache
def table() -> dict[str, list[dict[str, Any]]]:
    """Measured steps by instruction set."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def fitted(kind: str, format: str, config: Decoder) -> Fit | None:
    """Fits the steps of other models; None if there are too few.

    Args:
        kind: "decode 1", "decode 8" or "prompts 8".
    """
    size = parameters(config), config.num_layers
    return fit([
        point for point in table().get(native.instruction_set(), ())
        if (point["kind"], point["format"]) == (kind, format)
        and (point["parameters"], point["layers"]) != size
    ])  # fmt: skip


def parameters(config: Decoder) -> int:
    """Number of parameters of a model."""
    return sum(math.prod(param.line.shape(config.axis_sizes)) for param in config.params())


def predict(plan: Plan) -> dict[str, Any] | None:
    """Tokens per second of decoding at one row and at eight, and of prompts.

    Returns:
        Per kind of step "tok_per_s"; "error", the largest relative error among the models that the
        efficiency comes from, each predicted from the others; and "models", how many these are.
        Without enough of them, error is None and tok_per_s what the ceilings allow at most. None
        where nothing is predicted: other devices than one CPU, and weights that are streamed.
    """
    if jax.default_backend() != "cpu" or plan.is_offloaded or plan.shards != ONE_DEVICE:
        return None
    config, widths = plan.info.config, {"storage": plan.storage, "kv_dtype": plan.kv_dtype}
    steps = {
        "decode 1": (1, decode_cost(config, batch=1, context=CONTEXT, **widths)),
        f"decode {ROWS}": (ROWS, decode_cost(config, batch=ROWS, context=CONTEXT, **widths)),
        f"prompts {ROWS}": (
            ROWS * PROMPT,
            prefill_cost(config, batch=ROWS, prompt=PROMPT, **widths),
        ),
    }
    read = ceiling_reader(steps["decode 1"][1].total_bytes, multiplied_as(plan.storage))
    readings = [read() for _ in range(READINGS)]
    format = format_of(plan.storage.format)
    format = MEASURED_AS.get(format, format)
    by_kind: dict[str, Any] = {}
    least = 0.0  # a step of several rows takes no less than that of one
    for kind, (tokens, cost) in steps.items():
        ideal = float(np.median([ideal_seconds(least_seconds(cost, x, x)) for x in readings]))
        known = fitted(kind, format, config)
        seconds = ideal if known is None else known.seconds(ideal, config.num_layers)
        seconds = least = max(seconds, least)
        by_kind[kind] = {
            "tok_per_s": tokens / seconds,
            "error": known and known.error,
            "models": known.models if known else 0,
        }
    return by_kind


def summary(plan: Plan) -> str | None:
    """The prediction in a few words; None where nothing is predicted or too little was measured."""
    prediction = predict(plan)
    if prediction is None or any(one["error"] is None for one in prediction.values()):
        return None
    one, several, prompts = (each["tok_per_s"] for each in prediction.values())
    return (
        f"about {one:,.0f} tok/s at 1 row, {several:,.0f} at {ROWS} rows, {prompts:,.0f} of prompts"
    )
