"""Bytes and operations of a step, counted from the weight table and the cache's shape.

A decode step reads every weight that its tokens touch once, and every visible key and value once.
Of an embedding that is not the head it reads one row per token; of a mixture of experts only the
experts that were chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rooflax.nn.decoder import Decoder
from rooflax.nn.kv_cache import bytes_per_token
from rooflax.nn.storage import Storage, is_head, is_matmul
from rooflax.nn.weights import Param

LOOKUPS = ("embed", "position", "per_layer.embed")
"""Tables of which a step reads one row per token, unless the head is tied to them."""


@dataclass(frozen=True)
class StepCost:
    """Bytes read and operations multiplied by one step.

    Attributes:
        weight_bytes: of the weights it reads.
        kv_bytes: of the keys and values it reads.
        operations: multiply-adds counted twice.
    """

    weight_bytes: int
    kv_bytes: int
    operations: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes


def expected_experts(num_experts: int, chosen: int, tokens: int) -> float:
    """Expected number of experts that `tokens` tokens select, if all are equally likely."""
    return num_experts * (1 - (1 - chosen / num_experts) ** tokens)


def decode_cost(
    config: Decoder, *, batch: int, context: int, storage: Storage, kv_dtype: str
) -> StepCost:
    """One decode step of `batch` rows that each see `context` tokens, the new one included."""

    def seen(window: int | None) -> tuple[int, int]:
        visible = batch * min(context, window or context)
        return visible, visible

    return _cost(config, batch, batch, seen, storage, kv_dtype)


def prefill_cost(
    config: Decoder, *, batch: int, prompt: int, storage: Storage, kv_dtype: str
) -> StepCost:
    """Prompts of `prompt` tokens in `batch` rows; logits of each row's last token only."""

    def seen(window: int | None) -> tuple[int, int]:
        return batch * visible_pairs(prompt, window), batch * prompt

    return _cost(config, batch * prompt, batch, seen, storage, kv_dtype)


def visible_pairs(prompt: int, window: int | None) -> int:
    """Query-key pairs of a causal prompt: sum over t of min(t + 1, window)."""
    span = min(prompt, window or prompt)
    return span * (span + 1) // 2 + (prompt - span) * span


def _cost(
    config: Decoder,
    tokens: int,
    logit_rows: int,
    seen: Callable[[int | None], tuple[int, int]],
    storage: Storage,
    kv_dtype: str,
) -> StepCost:
    """
    Args:
        seen: of a layer by its window, query-key pairs, and tokens whose key and value are read.
    """
    num_bytes = kv_bytes = operations = 0
    for param in config.params():
        size = math.prod(param.line.shape(config.axis_sizes))
        rows, share = _use(param, config, tokens, logit_rows)
        num_bytes += int(storage.of(param, config).num_bytes() * share)
        if len(param.line.axis_names) > 1:
            operations += int(2 * size * rows)
    groups = config.groups
    for layer in groups.attending():
        pairs, read = seen(groups.windows[groups.of_layer[layer]])
        attention = config.layers[layer].attention
        kv_bytes += read * bytes_per_token(groups.heads[layer], kv_dtype)
        operations += pairs * 4 * attention.num_heads * attention.head_dim  # q.k and p.v
    return StepCost(num_bytes, kv_bytes, operations)


def _use(param: Param, config: Decoder, tokens: int, logit_rows: int) -> tuple[float, float]:
    """(rows that a weight multiplies, share of it that is read)."""
    names = param.line.axis_names
    is_bias = param.line.init == "zeros"
    if config.moe is not None and names[0] == "experts" and len(names) > 1:
        chosen, total = config.moe.experts_per_token, config.moe.num_experts
        share = expected_experts(total, chosen, tokens) / total
        return (0.0 if is_bias else tokens * chosen / total), share
    if is_head(param, config):
        return logit_rows, 1.0
    if param.key in LOOKUPS:
        rows = param.line.shape(config.axis_sizes)[0]
        return 0.0, min(1.0, tokens / rows)
    if not is_matmul(param, config):
        return 0.0, 1.0
    return tokens, 1.0
