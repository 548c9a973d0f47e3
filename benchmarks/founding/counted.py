"""What a run must do, counted: token passes through layers, operations, bytes. No arrays.

A ratio of two counts is what a speed-up would be if one of the three were all that took time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rooflax.bench.counting import StepCost, decode_cost, expected_experts, prefill_cost
from rooflax.bench.workload import Workload
from rooflax.engine.runner import SMALLEST_CONTEXT, bucket
from rooflax.loading.model_info import ModelInfo, model_info
from rooflax.nn.storage import ITEM_BYTES, Storage

FLOAT32: dict[str, Any] = {"batch": 1, "storage": Storage("float32"), "kv_dtype": "float32"}
NAMES = ("layer_passes", "operations", "bytes")


@dataclass(frozen=True)
class Count:
    """Of a run or a part of one.

    Attributes:
        layer_passes: tokens x layers that they pass.
        operations: multiply-adds counted twice.
        bytes: of weights, keys and values read; copies of keys and values too.
    """

    layer_passes: int = 0
    operations: int = 0
    bytes: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(*(getattr(self, n) + getattr(other, n) for n in NAMES))

    def over(self, other: Count) -> dict[str, float]:
        """How many times `other` this is, per quantity."""
        return {n: getattr(self, n) / getattr(other, n) for n in NAMES}


@dataclass(frozen=True)
class RunCount:
    """Of one request: until its first token, and from there to its last."""

    first: Count
    later: Count

    @property
    def all(self) -> Count:
        return self.first + self.later


def count(work: Workload, padded_to: int | None = None) -> RunCount:
    """What a row does.

    Args:
        padded_to: without a cache, the tokens that every step runs; None is as many as there are.
    """
    info = model_info(work.model)
    if not work.options.use_cache:
        lengths = [padded_to or work.prompt_tokens + new for new in range(work.output_tokens)]
        first, *later = [_whole(info, length, work) for length in lengths]
        return RunCount(first, _sum(later))
    contexts = range(work.prompt_tokens + 1, work.prompt_tokens + work.output_tokens)
    later = [
        _one(info, decode_cost(info.family, info.config, context=c, **FLOAT32), 1, work)
        for c in contexts
    ]
    return RunCount(_whole(info, work.prompt_tokens, work), _sum(later))


def _whole(info: ModelInfo, length: int, work: Workload) -> Count:
    cost = prefill_cost(info.family, info.config, prompt=length, **FLOAT32)
    return _one(info, cost, length, work)


def _one(info: ModelInfo, cost: StepCost, tokens: int, work: Workload) -> Count:
    """A step of `tokens` tokens, with what its slow settings add to the bytes."""
    config = info.config
    num_bytes = cost.total_bytes
    if work.options.gqa == "repeat":
        # Keys and values are written once per query head, and read as often.
        num_bytes += 2 * (config.num_heads // config.num_kv_heads) * cost.kv_bytes
    if work.options.moe == "per_token" and config.moe is not None:
        pairs = tokens * config.moe.experts_per_token
        once = expected_experts(config.moe.num_experts, config.moe.experts_per_token, tokens)
        num_bytes += round((pairs - once) * _expert_bytes(info))
    return Count(tokens * config.num_layers, cost.operations, num_bytes)


def _expert_bytes(info: ModelInfo) -> float:
    """Of one expert's weights in all layers."""
    config = info.config
    found = 0
    for slot in config.slots():
        names = slot.weight.axis_names
        if names[0] == "experts" and len(names) > 1:
            found += math.prod(slot.weight.shape(config.axis_sizes)) * ITEM_BYTES["float32"]
    return found / config.moe.num_experts


def _sum(counts: Iterable[Count]) -> Count:
    return sum(counts, Count())


def cache_bytes(config: Any, tokens: int, dtype: str, *, parts: int = 2) -> int:
    """Of keys and values (parts=2), or of one of them, for one sequence that sees all tokens."""
    per_token = parts * config.num_kv_heads * config.head_dim * ITEM_BYTES[dtype]
    return config.num_layers * tokens * per_token


def padded_length(tokens: int) -> int:
    """What the product pads a jitted run without a cache to."""
    return bucket(tokens, SMALLEST_CONTEXT)
