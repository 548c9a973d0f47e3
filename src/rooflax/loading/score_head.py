"""Reads how a folder embeds or scores: `modules.json`, or a cross-encoder's score head.

A checkpoint for sequence classification with one label scores pairs of texts. Its head is a few
layers on one vector; they run behind the pooling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.loading.checkpoint import Checkpoint
from rooflax.loading.json_files import read_json_object
from rooflax.loading.pooling import (
    ACTIVATIONS,
    SETTINGS,
    SIGMOID,
    DenseLayer,
    Pooling,
    read_pooling,
    with_prompts,
)
from rooflax.loading.safetensors import TensorToWrite, float32_tensors
from rooflax.loading.transformer_settings import read_transformer
from rooflax.models.encoders import ScoreHead
from rooflax.models.registry import family
from rooflax.nn.decoder import Decoder
from rooflax.nn.pooler import Pooler

CLASSIFIER = "ForSequenceClassification"
HEAD_KEYS = (
    "architectures", "id2label", "label2id", "sentence_transformers",
    "sbert_ce_default_activation_function", "classifier_pooling", "classifier_activation",
    "classifier_bias",
)  # fmt: skip
"""Keys of config.json that say what a head is."""
KINDS = {"cls": "first", "mean": "mean"}
"""Values of the key of config.json that names the pooling."""


def folder_pooling(
    folder: Path, name: str, config: Decoder, raw: Mapping[str, Any]
) -> Pooling | None:
    """Pooling of a folder; an encoder without files pools by the mean, as in sentence-transformers.

    Args:
        name: the family.
        raw: config.json.

    Raises:
        UnsupportedModelError: it names what is not computed here.
        CheckpointError: a file is missing or damaged, or does not fit the transformer.
    """
    head = _head_of(name)
    architectures = raw.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else ""
    if head is not None and str(named).endswith(CLASSIFIER):
        pooling: Pooling | None = _read_head(folder, head, config, raw)
    else:
        pooling = read_pooling(folder, config.hidden_size, config.vocab_size)
    if pooling is None and config.is_causal:
        return None
    pooling = pooling or Pooling(Pooler("mean"))
    pooling = replace(pooling, transformer=read_transformer(folder, pooling.task))
    return _of_reranker(pooling, folder, raw) if pooling.scores else pooling


def _head_of(name: str) -> ScoreHead | None:
    """A family's."""
    return getattr(family(name), "SCORE_HEAD", None)


def _read_head(folder: Path, head: ScoreHead, config: Decoder, raw: Mapping[str, Any]) -> Pooling:
    source = Checkpoint(folder)
    size, layers = config.hidden_size, []
    for index, (name, activation) in enumerate(head.layers):
        arrays = {end: _read(source, f"{name}.{end}") for end in ("weight", "bias")}
        weight, bias = arrays["weight"], arrays["bias"]
        if weight is None or weight.ndim != 2 or weight.shape[1] != size:
            raise CheckpointError(
                f"{folder} is for classification and has no {name}.weight of {size} inputs."
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise CheckpointError(f"{name}.bias of {folder} does not fit {name}.weight.")
        norm, size = None, weight.shape[0]
        if head.norm is not None and index == 0:
            scale = _read(source, f"{head.norm}.weight")
            if scale is None or scale.shape != (size,):
                raise CheckpointError(f"{folder} has no {head.norm}.weight of {size} numbers.")
            shift = _read(source, f"{head.norm}.bias")
            shift = np.zeros_like(scale) if shift is None else shift
            if shift.shape != scale.shape:
                raise CheckpointError(f"{head.norm}.bias of {folder} does not fit its weight.")
            norm = scale, shift, config.norm.eps
        if index == 0 and head.activation_key is not None:
            activation = str(raw.get(head.activation_key) or activation)
        activation = _activation(head.activation_key or "activation", activation)
        layers.append(DenseLayer(weight, bias, activation, norm))
    if size != 1:
        raise UnsupportedModelError(
            f"{folder} sorts texts into {size} classes; rooflax reads classifiers with one label, "
            f"which score pairs of texts."
        )
    kind = raw.get(head.pooling_key or "", None)
    pooling = KINDS.get(str(kind), "") if kind is not None else head.pooling
    if not pooling:
        raise UnsupportedModelError(
            f"config.json has {head.pooling_key} = {kind!r:.80}, which rooflax does not compute "
            f"(only {' or '.join(KINDS)})."
        )
    return Pooling(Pooler(pooling), tuple(layers), scores=True)


def _read(source: Checkpoint, name: str) -> np.ndarray | None:
    return np.array(source.read(name), np.float32) if name in source.names() else None


def _activation(key: str, name: str) -> str:
    known = {key.rpartition(".")[2].lower(): key for key in ACTIVATIONS}
    if name.lower() not in known:
        raise UnsupportedModelError(
            f"The score has {key} = {name!r:.80}, which rooflax does not compute (only "
            f"{', '.join(known)})."
        )
    return known[name.lower()]


def _of_reranker(pooling: Pooling, folder: Path, raw: Mapping[str, Any]) -> Pooling:
    """Adds a reranker's prompts, and its score's activation: newer versions of
    sentence-transformers write it into the settings, older ones into config.json; a sigmoid by
    default. Of a head the settings count where it was saved as a cross-encoder."""
    settings = read_json_object(folder / SETTINGS)
    is_saved = (folder / "modules.json").is_file() and settings.get("model_type") == "CrossEncoder"
    if pooling.has_head and not is_saved:
        settings = {}
    older = raw.get("sentence_transformers")
    stated = settings.get("activation_fn")
    if stated is None and isinstance(older, dict):
        stated = older.get("activation_fn")
    if stated is None:
        stated = raw.get("sbert_ce_default_activation_function")
    name = str(stated or SIGMOID)
    if name.startswith("torch."):  # a class of another's code would not be computed as it is
        name = name.rpartition(".")[2]
    activation = _activation("activation_fn", name)
    return replace(with_prompts(pooling, settings, folder), activation=activation)


def head_tensors(pooling: Pooling, name: str) -> list[TensorToWrite]:
    """The tensors that `folder_pooling` reads.

    Args:
        name: the family.
    """
    head = _head_of(name)
    assert head is not None
    arrays: dict[str, np.ndarray | None] = {}
    for (name, _), layer in zip(head.layers, pooling.dense, strict=True):
        arrays |= {f"{name}.weight": layer.weight, f"{name}.bias": layer.bias}
        if layer.norm is not None:
            arrays |= {f"{head.norm}.weight": layer.norm[0], f"{head.norm}.bias": layer.norm[1]}
    return float32_tensors(arrays)
