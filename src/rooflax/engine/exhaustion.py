"""Out-of-memory errors: one sentence with the bytes needed, the bytes free and the setting to
lower."""

from __future__ import annotations

import re

from rooflax.models.memory import workspace_bytes
from rooflax.models.offloading import AnyModel
from rooflax.nn.device_memory import free_bytes
from rooflax.nn.engine_config import EngineConfig
from rooflax.nn.execution import gib

_BYTES = re.compile(r"allocat\w* (?:a buffer of )?(?P<size>[\d.]+)\s?(?P<unit>[KMGT]i?B|bytes)?")
_UNITS = {None: 1, "bytes": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def is_exhausted(error: Exception) -> bool:
    """Whether memory, of the host or of a device, ran out."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def needed_bytes(error: Exception) -> int | None:
    """Bytes that could not be allocated, if the error names them."""
    match = _BYTES.search(str(error))
    if match is None:
        return None
    unit = match["unit"]
    return int(float(match["size"]) * _UNITS[unit if unit in _UNITS else unit[0]])


def sentence(
    error: Exception, model: AnyModel, config: EngineConfig, *, kv_cache: int, drafter: int = 0
) -> str:
    """Sentence for the operator.

    Args:
        kv_cache: bytes of all blocks.
        drafter: bytes of a model that drafts.
    """
    longest, chunk = config.max_model_len, config.prefill_chunk
    workspace = workspace_bytes(
        model.config, config.max_num_seqs, longest, chunk, config.max_tokens_per_step
    )
    parts = {
        "`quantize` (weights": model.weights_bytes,
        "max_model_len or max_num_seqs (KV cache": kv_cache,
        "max_tokens_per_step (workspace, at most": workspace,
    }
    if drafter:
        parts["no `speculate` (the smaller model"] = drafter
    largest = sorted(parts.items(), key=lambda part: -part[1])
    lower = ", ".join(f"{name} {gib(size)})" for name, size in largest)
    needed, free = needed_bytes(error), free_bytes()
    return (
        f"Memory ran out: {'more' if needed is None else gib(needed)} was needed for a step and "
        f"{'an unknown amount' if free is None else gib(free)} is free; what to lower, in order of "
        f"effect: {lower}."
    )
