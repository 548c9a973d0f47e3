"""llama.cpp's LoRA files: A and B beside the tensors of a GGUF file.

A pair is named after the stored tensor that it changes: NAME.lora_a [rank, in] and NAME.lora_b
[out, rank]. B's rows have that tensor's order (models/gguf_changes.py). The file has one alpha,
and a pair's product is multiplied by alpha / rank, by nothing where alpha is 0.

Source: https://github.com/ggml-org/llama.cpp, src/llama-adapter.cpp and convert_lora_to_gguf.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.fields.kinds import is_number
from rooflax.loading.adapter_config import MAX_ALPHA, MAX_RANK, AdapterConfig, named
from rooflax.loading.gguf import GGUFFile
from rooflax.loading.gguf_blocks import dequantize, is_plain
from rooflax.loading.gguf_metadata import written_spec
from rooflax.loading.gguf_weights import Entry, tensor_entries
from rooflax.loading.model_info import ModelInfo
from rooflax.models.adapters import Target
from rooflax.models.registry import family

ENDS = ".lora_a", ".lora_b"
TYPE, ALPHA, INVOCATION = "adapter.type", "adapter.lora.alpha", "adapter.alora.invocation_tokens"


def model_type(info: ModelInfo) -> str:
    return family(info.family).config_to_hf(info.config)["model_type"]


def adaptable(info: ModelInfo, targets: Mapping[str, Target]) -> dict[str, Entry]:
    """By module the stored tensors of each linear layer that a file has by itself, as a matrix."""
    entries = tensor_entries(model_type(info), info.config)
    kept = {}
    for module, target in targets.items():
        entry = entries.get(target.weight)
        is_tied = target.is_head and info.config.tied_embeddings
        if entry is not None and not is_tied and all(len(s) == 2 for s in _shapes(target, entry)):
            kept[module] = entry
    return kept


def _shapes(target: Target, entry: Entry) -> list[tuple[int, ...]]:
    """Shapes of the stored tensors."""
    shape = target.outputs, target.inputs
    return list(entry.change.stored_shapes(shape[::-1] if target.is_transposed else shape))


def read_gguf_adapter(
    path: Path, info: ModelInfo, targets: Mapping[str, Target]
) -> tuple[AdapterConfig, dict[str, dict[str, np.ndarray]]]:
    """A file's config, and by module its "lora_A" and "lora_B" in float32.

    Args:
        targets: the linear layers that adapters of the model may change.

    Raises:
        CheckpointError: it is malformed, or a pair does not fit its tensor.
        UnsupportedModelError: it is no LoRA of this architecture, or changes what rooflax does not
            adapt.
    """
    file = GGUFFile(path)
    alpha = _checked_alpha(file, info)
    left = set(file.names())
    pairs: dict[str, dict[str, np.ndarray]] = {}
    for module, entry in adaptable(info, targets).items():
        names = [name + end for name in entry.stored for end in ENDS]
        if left.isdisjoint(names):
            continue
        if missing := set(names) - left:
            raise CheckpointError(f"{path} lacks {min(missing)}.")
        left -= set(names)
        a, b = _pair(file, targets[module], entry)
        pairs[module] = {"lora_A": a, "lora_B": b}
    if left:
        raise UnsupportedModelError(
            f"{path} has {named(left)}, which is not A or B of a linear layer of {info.name} that "
            f"rooflax adapts."
        )
    if not pairs:
        raise CheckpointError(f"{path} holds no adapter.")
    ranks = {module: pair["lora_A"].shape[0] for module, pair in pairs.items()}
    usual = Counter(ranks.values()).most_common(1)[0][0]
    others = {re.escape(module): rank for module, rank in ranks.items() if rank != usual}
    config = AdapterConfig(
        rank=usual,
        alpha=alpha or usual,
        target_modules=tuple(pairs),
        rank_pattern=others,
        alpha_pattern={} if alpha else others,
    )
    return config, pairs


def _checked_alpha(file: GGUFFile, info: ModelInfo) -> float:
    path, spec = file.path, written_spec(model_type(info))
    for key, wanted in (
        ("general.type", ["adapter"]),
        (TYPE, ["lora"]),
        ("general.architecture", dict.fromkeys((spec.architecture, *spec.architectures))),
    ):
        value = file.metadata.get(key)
        if not isinstance(value, str) or value not in wanted:
            raise UnsupportedModelError(
                f"{path} has {key} = {value!r:.40}; an adapter of {info.name} has "
                f"{' or '.join(wanted)}."
            )
    if INVOCATION in file.metadata:
        raise UnsupportedModelError(
            f"{path} has {INVOCATION}, tokens after which it begins, which rooflax does not apply."
        )
    alpha = file.metadata.get(ALPHA, 0.0)
    if not is_number(alpha) or abs(alpha) > MAX_ALPHA:
        raise CheckpointError(
            f"{path} has {ALPHA} = {alpha!r:.40}; it must be a number of at most {MAX_ALPHA:,}."
        )
    return float(alpha)


def _pair(file: GGUFFile, target: Target, entry: Entry) -> tuple[np.ndarray, np.ndarray]:
    """A [rank, in] and B [out, rank] of a layer."""
    each = []
    for name, (rows, columns) in zip(entry.stored, _shapes(target, entry), strict=True):
        a, b = (_numbers(file, name + end) for end in ENDS)
        rank = b.shape[-1]
        if (a.shape, b.shape) != ((rank, columns), (rows, rank)) or rank > MAX_RANK:
            raise CheckpointError(
                f"{name}{ENDS[0]} and {ENDS[1]} in {file.path} are {list(a.shape)} and "
                f"{list(b.shape)}, wanted [rank, {columns}] and [{rows}, rank] with a rank of at "
                f"most {MAX_RANK}."
            )
        each.append((a, b))
    (a, b), change = each[0], entry.change
    if not all(np.array_equal(other, a) for other, _ in each[1:]):
        raise UnsupportedModelError(
            f"{file.path} has different A for {' and '.join(entry.stored)}, which are one layer."
        )
    if change.inputs() is not None:
        return change.apply([a]), b
    b = change.apply([part for _, part in each])
    return a, b.T if target.is_transposed else b


def _numbers(file: GGUFFile, name: str) -> np.ndarray:
    array, kind = file.read(name), file.info(name).dtype
    return np.asarray(array if is_plain(kind) else dequantize(kind, array), np.float32)
