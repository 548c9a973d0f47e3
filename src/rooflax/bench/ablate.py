"""Ablations: the slowest setting with one option added at a time, and the best with one left out.

Options never change a token, so every row must give the same ones; weight formats may.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rooflax.bench.workload import Workload
from rooflax.nn.decoder import Decoder
from rooflax.nn.execution import ExecutionOptions, Precision

Applies = Callable[[ExecutionOptions, Any, dict[str, str]], bool]


@dataclass(frozen=True)
class Switch:
    """One option: what turns it off, and when turning it on changes anything.

    Attributes:
        applies: to (the fastest options, the model's config, the kernels that run per operation).
    """

    name: str
    field: str
    slow: Any
    applies: Applies


def _groups_heads(best: ExecutionOptions, config: Decoder, kernels: dict[str, str]) -> bool:
    return best.gqa == "grouped" and config.num_kv_heads < config.num_heads


def _groups_experts(best: ExecutionOptions, config: Decoder, kernels: dict[str, str]) -> bool:
    return best.moe == "grouped" and config.moe is not None


SWITCHES = (
    Switch("KV cache", "use_cache", False, lambda best, *_: best.use_cache),
    Switch("jit", "jit", False, lambda best, *_: best.jit),
    Switch("grouped GQA", "gqa", "repeat", _groups_heads),
    Switch("MoE grouping", "moe", "per_token", _groups_experts),
    Switch(
        "native kernels",
        "kernels",
        "xla",
        lambda best, config, kernels: "native" in kernels.values(),
    ),
    Switch(
        "decode steps",
        "decode_steps",
        1,
        lambda best, *_: best.use_cache and best.decode_steps != 1,
    ),
)
FORMATS = ("int8", "int4")


@dataclass(frozen=True)
class Row:
    """A setting of the ablation.

    Attributes:
        label: "baseline", "+ jit", "all but jit", "all, int8".
        work: what to measure.
        base: index of the row that it is compared with; None for the first.
        exact: it must give the tokens of the first row.
    """

    label: str
    work: Workload
    base: int | None
    exact: bool = True


def comparable(work: Workload, resolved: Precision) -> Workload:
    """Sets the KV cache's dtype to that of the activations: without a cache nothing is rounded to
    it.

    Args:
        resolved: the precision that the work's model is planned with.
    """
    precision = work.precision
    if precision.kv_dtype is not None or resolved.kv_dtype == resolved.dtype:
        return work
    return replace(work, precision=replace(precision, kv_dtype=resolved.dtype))


def ablation(work: Workload, config: Decoder, kernels: dict[str, str]) -> list[Row]:
    """The rows, in order: the baseline, one switch more each, all but one each, weight formats.

    A switch that changes nothing here has no row: the model lacks what it is about, or the fastest
    setting is the slow one already.

    Args:
        work: the shape of work; its options are the fastest setting.
        config: of the model.
        kernels: per operation the implementation that runs with these options.
    """
    best = work.options
    if best.kernels == "native":  # the platform's best where it was found; by name it rejects
        best = replace(best, kernels=None)  # what it does not do, such as copied heads
    switches = [s for s in SWITCHES if s.applies(best, config, kernels)]
    slow = _off(best, switches)
    rows = [Row("baseline", replace(work, options=slow), None)]
    for count, switch in enumerate(switches, start=1):
        options = _off(best, switches[count:])
        rows.append(Row(f"+ {switch.name}", replace(work, options=options), count - 1))
    full = len(rows) - 1
    for switch in switches[:-1]:  # all but the last is the row before the full one
        options = _off(best, [switch])
        rows.append(Row(f"all but {switch.name}", replace(work, options=options), full))
    if work.precision.quantize is None:
        for name in FORMATS:
            precision = replace(work.precision, quantize=name)
            best_work = replace(work, options=best, precision=precision)
            rows.append(Row(f"all, {name}", best_work, full, exact=False))
    return rows


def _off(options: ExecutionOptions, switches: list[Switch]) -> ExecutionOptions:
    """The options with these switches turned off; steps per dispatch need a cache."""
    changes = {s.field: s.slow for s in switches}
    if changes.get("use_cache", options.use_cache) is False:
        changes["decode_steps"] = None
    return replace(options, **changes)


def summarise(rows: list[Row], results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per row: speeds, the ratio to its base and to the baseline, memory, and the same tokens?"""
    first = results[0]
    return [
        {
            "label": row.label,
            "options": row.work.options.describe(),
            "decode_tok_per_s": result["decode_tok_per_s"]["median"],
            "prefill_tok_per_s": result["prefill_tok_per_s"]["median"],
            "ratio": 1.0 if row.base is None else _ratio(result, results[row.base]),
            "total_ratio": _ratio(result, first),
            "temporary_bytes": result["memory"]["temporary_bytes"],
            "peak_rss_bytes": result["peak_rss_bytes"],
            "same_tokens": result["tokens"] == first["tokens"],
            "exact": row.exact,
        }
        for row, result in zip(rows, results, strict=True)
    ]


def _ratio(result: dict[str, Any], base: dict[str, Any]) -> float:
    return result["decode_tok_per_s"]["median"] / base["decode_tok_per_s"]["median"]
