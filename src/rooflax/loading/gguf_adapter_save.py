"""Writes an adapter as llama.cpp's LoRA file; `gguf_adapter` reads it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from rooflax.errors import RequestError, UnsupportedModelError
from rooflax.loading.adapters import Adapter
from rooflax.loading.gguf_adapter import ALPHA, ENDS, TYPE, adaptable, model_type
from rooflax.loading.gguf_metadata import written_spec
from rooflax.loading.gguf_save import stored_as, write_gguf
from rooflax.loading.model_info import ModelInfo

FILE_TYPES = ("F32", "BF16")
"""Types of A and B."""


def save_gguf_adapter(
    info: ModelInfo, adapter: Adapter, path: str | os.PathLike[str], kind: str
) -> None:
    """Writes an adapter as a file that llama.cpp opens beside the model's.

    Where layers differ in alpha, or in scale beyond 1 / rank, B is multiplied by the scale.

    Args:
        path: of the file; an existing one is replaced once the new one is complete.
        kind: one of `FILE_TYPES`.

    Raises:
        RequestError: another type.
        UnsupportedModelError: such a file cannot say what the adapter is.
        CheckpointError: a number is NaN or infinite.
        OSError: the disk is full or not writable; what was there before stays.
    """
    if kind not in FILE_TYPES:
        raise RequestError(f"gguf is {kind!r}; an adapter is written as {' or '.join(FILE_TYPES)}.")
    if adapter.config.use_dora:
        raise UnsupportedModelError(
            f"{adapter.folder} is a DoRA, which llama.cpp does not compute; merge it instead."
        )
    architecture = written_spec(model_type(info)).architecture
    if info.gguf is not None:
        architecture = info.gguf.metadata["general.architecture"]
    entries = adaptable(info, adapter.targets)
    if lacking := adapter.targets.keys() - entries.keys():
        raise UnsupportedModelError(
            f"{adapter.folder} changes {min(lacking)}, of which a GGUF file of {info.family} has "
            f"no matrix by itself; merge it instead."
        )
    alphas = {np.float32(adapter.scale_of(m) * adapter.rank_of(m)) for m in adapter.targets}
    alpha = float(alphas.pop()) if len(alphas) == 1 else 0.0
    tensors: dict[str, np.ndarray] = {}
    for module, part in adapter.read(info).items():
        target, entry = adapter.targets[module], entries[module]
        b = part.b if alpha else part.b * np.float32(part.scale)
        if entry.change.inputs() is not None:
            pairs = [(entry.change.undo(part.a)[0], b)]
        else:
            rows = entry.change.undo(b.T if target.is_transposed else b)
            pairs = [(part.a, each) for each in rows]
        for stored, pair in zip(entry.stored, pairs, strict=True):
            tensors |= {stored + end: each for end, each in zip(ENDS, pair, strict=True)}
    metadata: dict[str, Any] = {
        "general.architecture": architecture,
        "general.type": "adapter",
        "general.name": adapter.folder.resolve().name,
        TYPE: "lora",
        ALPHA: alpha,
    }
    infos = {name: stored_as(array.shape, kind) for name, array in tensors.items()}
    write_gguf(path, metadata, infos, tensors.items(), info.name)
