"""Reads how a checkpoint embeds or scores texts, from sentence-transformers' files.

`modules.json` names the modules in order: the transformer, a pooling, dense layers, a
normalization, or a score from two tokens' logits. A module or a setting that is not computed here
is rejected by name. A GGUF file says the same in its metadata.

Source: sentence-transformers, base/modules and sentence_transformer/modules/pooling.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.loading.checkpoint import Checkpoint
from rooflax.loading.gguf import GGUFFile
from rooflax.loading.gguf_blocks import dequantize, is_plain
from rooflax.loading.json_files import parse_json, read_file, read_json_object
from rooflax.loading.safetensors import TensorToWrite, float32_tensors
from rooflax.loading.transformer_settings import (
    CLASSIFY,
    EMBED,
    GENERATE,
    NO_SETTINGS,
    TRANSFORMER,
    Task,
    TransformerSettings,
    transformer_file,
)
from rooflax.models.gguf import GGUF_DENSE, GGUF_HEAD, GGUF_POOLING
from rooflax.nn.pooler import Pooler

KINDS = {
    "lasttoken": "last", "mean": "mean", "cls": "first", "max": "max", "weightedmean": "weighted",
}  # fmt: skip
LEGACY_MODES = {
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean", "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean", "pooling_mode_lasttoken": "lasttoken",
}  # fmt: skip
ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": np.tanh,
    "torch.nn.modules.activation.ReLU": lambda x: np.maximum(x, 0),
    "torch.nn.modules.activation.Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "torch.nn.modules.activation.GELU": lambda x: x * (0.5 + 0.5 * ERF(x * 0.5**0.5)),
}
ERF = np.vectorize(math.erf, otypes=[np.float32])
VECTOR = "sentence_embedding"
"""Name of what a dense layer reads and writes: a text's vector."""
PLACES = ("module_input_name", "module_output_name")
"""Keys that name such."""
IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"
PACKAGE = "sentence_transformers."
MODULES = "sentence_transformers.models"
MODULE_KEYS = ("idx", "name", "path", "type")
KEYS = {
    "Pooling": (
        "word_embedding_dimension", "embedding_dimension", "pooling_mode", "include_prompt",
        *LEGACY_MODES,
    ),
    "LogitScore": ("true_token_id", "false_token_id", "module_input_name"),
    "Normalize": ("module_input_name", "module_output_name"),
}  # fmt: skip
"""Keys of modules' settings; sentence-transformers ignores unknown ones of a dense layer."""
SCORES = "sentence_transformers.cross_encoder.modules.logit_score"
SETTINGS = "config_sentence_transformers.json"
"""Settings of the whole."""
GGUF_WITH_DENSE = ("gemma-embedding",)
"""Architectures of which llama.cpp has such."""


@dataclass(frozen=True)
class DenseLayer:
    """A linear layer behind the pooling, its activation, and what a LayerNorm behind that has:
    weight, bias and epsilon."""

    weight: np.ndarray
    bias: np.ndarray | None
    activation: str
    norm: tuple[np.ndarray, np.ndarray, float] | None = None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """[texts, in] to [texts, out], in float32."""
        y = x @ self.weight.T
        y = ACTIVATIONS[self.activation](y if self.bias is None else y + self.bias)
        if self.norm is None:
            return y
        weight, bias, eps = self.norm
        y = y - y.mean(axis=1, keepdims=True)
        return y / np.sqrt(np.square(y).mean(axis=1, keepdims=True) + eps) * weight + bias


@dataclass(frozen=True)
class Pooling:
    """Pooling: how hidden states become a vector or a score.

    Attributes:
        pooler: the engine's part of it.
        dense: layers behind it.
        normalizes: vectors have length one.
        dimensions: the first so many of a vector are kept, after that; None is all.
        prompts: texts to put before a text, or a pair's query, by name; `default_prompt` is the
            name of one.
        scores: the vector is a score: the logit of the first of two tokens less the other's, or
            the one number that `dense` gives.
        activation: of such a number.
        transformer: settings of the first module; sentence-transformers cuts a text that is longer
            than its `max_tokens`.
    """

    pooler: Pooler
    dense: tuple[DenseLayer, ...] = ()
    normalizes: bool = False
    dimensions: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    scores: bool = False
    activation: str = IDENTITY
    transformer: TransformerSettings = NO_SETTINGS

    @property
    def has_head(self) -> bool:
        """Whether `dense` is a checkpoint's own head, which scores."""
        return self.scores and bool(self.dense)

    @property
    def max_tokens(self) -> int | None:
        """Tokens of the longest text, or pair; None is the context."""
        return self.transformer.max_tokens

    @property
    def task(self) -> Task:
        """Task of the transformer in sentence-transformers."""
        return CLASSIFY if self.has_head else GENERATE if self.scores else EMBED

    def finish(self, vectors: np.ndarray) -> np.ndarray:
        """[texts, hidden] of the engine as the checkpoint's vectors, before they are cut."""
        for layer in self.dense:
            vectors = layer(vectors)
        return vectors


def read_pooling(folder: Path, hidden_size: int, vocab_size: int) -> Pooling | None:
    """Reads `modules.json`; None if there is none.

    Args:
        hidden_size, vocab_size: of the transformer.

    Raises:
        UnsupportedModelError: it names what is not computed here.
        CheckpointError: a file is missing or damaged, or does not fit the transformer.
    """
    modules = _read_modules(folder)
    if not modules:
        return None
    pooling = None
    for number, (kind, path) in enumerate(modules):
        if (kind == "Transformer") != (number == 0):
            raise UnsupportedModelError(
                f"modules.json has {kind} as module {number}; the first one, and no other, must be "
                f"a Transformer."
            )
        place = _place(folder, path)
        if kind != "Transformer":
            pooling = _with_module(pooling, kind, place)
        elif place != folder.resolve():
            raise UnsupportedModelError(
                f"modules.json of {folder} has the Transformer in {path!r:.80}; rooflax reads the "
                f"one beside it."
            )
    if pooling is None:
        raise UnsupportedModelError(f"modules.json of {folder} has no pooling.")
    _check_sizes(pooling, folder, hidden_size, vocab_size)
    settings = read_json_object(folder / SETTINGS)
    kept = settings.get("truncate_dim")
    if kept is not None and not (type(kept) is int and kept > 0):
        raise CheckpointError(
            f"{SETTINGS} of {folder} has truncate_dim = {kept!r:.80}; it must be a whole number "
            f"above 0."
        )
    return with_prompts(replace(pooling, dimensions=kept), settings, folder)


def with_prompts(pooling: Pooling, settings: Mapping[str, Any], folder: Path) -> Pooling:
    """Adds the prompts of a folder's settings.

    Raises:
        CheckpointError: they are no texts, or the default is none of them.
    """
    prompts = settings.get("prompts") or {}
    default = settings.get("default_prompt_name")
    are_texts = isinstance(prompts, dict) and all(isinstance(p, str) for p in prompts.values())
    is_name = default is None or (isinstance(default, str) and default in prompts)
    if not are_texts or not is_name:
        raise CheckpointError(
            f"{SETTINGS} of {folder} has prompts {prompts!r:.60} and the "
            f"default {default!r:.40}; these must be texts by name, and one of the names."
        )
    return replace(pooling, prompts=prompts, default_prompt=default)


def _check_sizes(pooling: Pooling, folder: Path, size: int, vocab_size: int) -> None:
    for layer in pooling.dense:
        outer, inner = layer.weight.shape
        if inner != size:
            raise CheckpointError(
                f"{folder} has a dense layer of in_features = {inner} behind {size} numbers."
            )
        size = outer
    if max(pooling.pooler.tokens, default=0) >= vocab_size:
        raise CheckpointError(
            f"{folder} scores by the tokens {pooling.pooler.tokens}; its vocabulary has "
            f"{vocab_size}."
        )


def gguf_pooling(file: GGUFFile) -> Pooling | None:
    """Reads a GGUF file's `pooling_type`; None if there is none. llama.cpp normalizes. An encoder
    without one pools by the mean, or scores if it has a head.

    Raises:
        CheckpointError: layers behind the pooling do not fit each other.
        UnsupportedModelError: a head that is not computed.
    """
    architecture = file.metadata.get("general.architecture")
    kind = file.metadata.get(f"{architecture}.pooling_type")
    pooling = GGUF_POOLING.get(kind) if isinstance(kind, int) else None
    is_encoder = file.metadata.get(f"{architecture}.attention.causal") is False
    if f"{GGUF_HEAD[-1]}.weight" in file.names() and is_encoder:
        return _gguf_head(file, str(architecture))
    if pooling is None:
        return Pooling(Pooler("mean"), normalizes=True) if is_encoder and not kind else None
    size, dense = file.metadata.get(f"{architecture}.embedding_length"), []
    for name in (f"{name}.weight" for name in GGUF_DENSE):
        if name in file.names():
            array, stored = file.read(name), file.info(name)
            array = array if is_plain(stored.dtype) else dequantize(stored.dtype, array)
            if stored.shape[1:] != (size,):
                raise CheckpointError(
                    f"{file.path}: {name} {list(stored.shape)} does not read the {size} numbers "
                    f"that stand before it."
                )
            dense.append(DenseLayer(np.array(array, np.float32), None, IDENTITY))
            size = stored.shape[0]
    return Pooling(Pooler(pooling), tuple(dense), normalizes=True)


def _gguf_head(file: GGUFFile, architecture: str) -> Pooling:
    """The layers that score pairs: dense, an activation, a norm, and the one number."""
    arrays = {
        name: file.read(name) if is_plain(file.info(name).dtype)
        else dequantize(file.info(name).dtype, file.read(name))
        for name in file.names() if name.rpartition(".")[0] in GGUF_HEAD
    }  # fmt: skip
    arrays = {name: np.array(array, np.float32) for name, array in arrays.items()}
    dense, norm, output = GGUF_HEAD
    if f"{dense}.weight" not in arrays:
        raise UnsupportedModelError(
            f"{file.path} has a head without {dense}.weight: llama.cpp's converter left out the "
            f"layer before it, and its scores are not the checkpoint's."
        )
    size = int(file.metadata[f"{architecture}.embedding_length"])
    wanted: dict[str, tuple[int, ...]] = {
        f"{dense}.weight": (size, size),
        f"{output}.weight": (1, size),
    }
    wanted |= {f"{dense}.bias": (size,), f"{output}.bias": (1,), f"{norm}.weight": (size,)}
    for name, array in arrays.items():
        if array.size != math.prod(wanted.get(name, (0,))):
            raise UnsupportedModelError(
                f"{file.path}: {name} {list(array.shape)} is not of a head with one label."
            )
    eps = file.metadata.get(f"{architecture}.attention.layer_norm_epsilon")
    scale = arrays.get(f"{norm}.weight")
    normed = None if scale is None else (scale, np.zeros_like(scale), float(eps or 0))
    activation = "GELU" if architecture == "modern-bert" else "Tanh"
    layers = (
        DenseLayer(
            arrays[f"{dense}.weight"].reshape(size, size), arrays.get(f"{dense}.bias"),
            _known(activation), normed,
        ),
        DenseLayer(
            arrays[f"{output}.weight"].reshape(1, size), arrays.get(f"{output}.bias"), IDENTITY
        ),
    )  # fmt: skip
    default = 1 if architecture == "modern-bert" else 2
    stated = file.metadata.get(f"{architecture}.classifier.pooling_type", default)
    kind = GGUF_POOLING.get(stated if type(stated) is int else 0)
    if kind is None:
        raise UnsupportedModelError(f"{file.path} has a head behind the pooling {stated!r:.80}.")
    return Pooling(Pooler(kind), layers, scores=True, activation=SIGMOID)


def _known(name: str) -> str:
    """The key of `ACTIVATIONS` that ends so."""
    return next(key for key in ACTIVATIONS if key.rpartition(".")[2] == name)


def pooling_files(pooling: Pooling, size: int) -> dict[str, bytes | list[TensorToWrite]]:
    """Files that say how a folder embeds or scores: bytes or tensors, by their paths below it.

    Args:
        size: of hidden states.
    """
    settings: dict[str, Any] = {
        "prompts": dict(pooling.prompts), "default_prompt_name": pooling.default_prompt,
    }  # fmt: skip
    if pooling.dimensions is not None:
        settings["truncate_dim"] = pooling.dimensions
    if pooling.scores:
        settings |= {"model_type": "CrossEncoder", "activation_fn": pooling.activation}
    if pooling.has_head:
        modules: list[tuple[str, dict[str, Any]]] = []
    elif pooling.scores:
        tokens = zip(("true_token_id", "false_token_id"), pooling.pooler.tokens, strict=True)
        modules = [("LogitScore", dict(tokens))]
    else:
        key = next(k for k, mode in LEGACY_MODES.items() if KINDS.get(mode) == pooling.pooler.kind)
        modules = [("Pooling", {"word_embedding_dimension": size, key: True})]
        modules += [("Dense", _dense_settings(layer)) for layer in pooling.dense]
        modules += [("Normalize", {})] * pooling.normalizes
    texts: dict[str, Any] = {
        TRANSFORMER: transformer_file(pooling.task, pooling.transformer), SETTINGS: settings,
        "modules.json": [{"idx": 0, "name": "0", "path": "", "type": f"{MODULES}.Transformer"}],
    }  # fmt: skip
    folder_files: dict[str, bytes | list[TensorToWrite]] = {}
    dense = iter(pooling.dense)
    for number, (kind, settings) in enumerate(modules, start=1):
        path = f"{number}_{kind}"
        package = SCORES if kind == "LogitScore" else MODULES
        entry = {"idx": number, "name": str(number), "path": path, "type": f"{package}.{kind}"}
        texts["modules.json"].append(entry)
        texts[f"{path}/config.json"] = settings
        if kind == "Dense":
            layer = next(dense)
            arrays = {"linear.weight": layer.weight, "linear.bias": layer.bias}
            folder_files[f"{path}/model.safetensors"] = float32_tensors(arrays)
    written = {name: json.dumps(text, indent=2) + "\n" for name, text in texts.items()}
    return folder_files | {name: text.encode() for name, text in written.items()}


def _dense_settings(layer: DenseLayer) -> dict[str, Any]:
    outer, inner = layer.weight.shape
    return {
        "in_features": inner, "out_features": outer, "bias": layer.bias is not None,
        "activation_function": layer.activation,
    }  # fmt: skip


def gguf_pooling_metadata(pooling: Pooling, architecture: str) -> dict[str, Any]:
    """The keys that `gguf_pooling` reads; weights of `dense` are tensors beside them.

    Raises:
        UnsupportedModelError: llama.cpp has no such pooling.
    """
    has_dense = architecture in GGUF_WITH_DENSE
    if pooling.scores:
        reason = "score from two tokens' logits"
    elif not pooling.normalizes:
        reason = "vectors that are not normalized"
    elif len(pooling.dense) not in (0, len(GGUF_DENSE) * has_dense):
        reason = f"pooling of {architecture} with dense layers behind it: {len(pooling.dense)}"
    elif any(d.bias is not None or d.activation != IDENTITY for d in pooling.dense):
        reason = "dense layer with a bias or an activation"
    else:
        kinds = {ours: number for number, ours in GGUF_POOLING.items()}
        values: dict[str, Any] = {"pooling_type": kinds[pooling.pooler.kind]}
        for name, layer in zip(GGUF_DENSE, pooling.dense, strict=False):
            values[f"{name}_feat_out"], values[f"{name}_feat_in"] = layer.weight.shape
        return {f"{architecture}.{key}": value for key, value in values.items()}
    raise UnsupportedModelError(f"llama.cpp computes no {reason}.")


def _place(folder: Path, path: str) -> Path:
    """Folder of a module, which must be inside the checkpoint's.

    Raises:
        CheckpointError: the path leaves it.
    """
    try:
        place: Path | None = (folder / path).resolve()
    except (OSError, ValueError, RuntimeError):  # a loop of links, a NUL
        place = None
    if place is None or not place.is_relative_to(folder.resolve()):
        raise CheckpointError(
            f"modules.json of {folder} has the path {path!r:.80}; a module must be in that folder."
        )
    return place


def _read_modules(folder: Path) -> list[tuple[str, str]]:
    path = folder / "modules.json"
    data = read_file(path)
    if data is None:
        return []
    try:
        raw = parse_json(path, data)
        lines = [(line["type"], line["path"]) for line in raw]
        if not lines or not all(type(text) is str for line in lines for text in line):
            raise ValueError
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise CheckpointError(
            f"{path} is damaged; it must be a list of objects with type and path."
        ) from None
    for line in raw:
        if not line["type"].startswith(PACKAGE):
            raise UnsupportedModelError(
                f"modules.json of {folder} has {line['type']:.80}, code that is not "
                f"sentence-transformers' own; rooflax runs none."
            )
        for key, value in line.items():
            if value and key not in MODULE_KEYS:
                raise UnsupportedModelError(
                    f"modules.json of {folder} has {key} = {value!r:.80}, which rooflax does not "
                    f"do."
                )
    return [(kind.rpartition(".")[2], place) for kind, place in lines]


def _with_module(pooling: Pooling | None, kind: str, folder: Path) -> Pooling:
    """Adds one module."""
    raw = read_json_object(folder / "config.json")
    wanted = GENERATE.gives if kind == "LogitScore" else VECTOR
    for key, value in raw.items():
        is_read = key in KEYS.get(kind, raw)
        if value is not None and (not is_read or (key in PLACES and value != wanted)):
            raise UnsupportedModelError(
                f"A {kind} of modules.json has {key} = {value!r:.80}, which rooflax does not do."
            )
    if kind == "Pooling" and pooling is None:
        return Pooling(_pooler(raw))
    if kind == "LogitScore" and pooling is None:
        ids = raw.get("true_token_id"), raw.get("false_token_id")
        if not all(type(token) is int and token >= 0 for token in ids):
            raise UnsupportedModelError(
                f"LogitScore has the tokens {ids}; a score needs one that is true and one that is "
                f"false."
            )
        pooler = Pooler("tokens", ids)  # type: ignore[arg-type]
        return Pooling(pooler, scores=True, activation=SIGMOID)
    if kind == "Dense" and pooling is not None and not pooling.normalizes and not pooling.scores:
        return replace(pooling, dense=(*pooling.dense, _read_dense(raw, folder)))
    if kind == "Normalize" and pooling is not None and not pooling.scores:
        return replace(pooling, normalizes=True)
    raise UnsupportedModelError(f"modules.json has a {kind} where rooflax does not compute one.")


def _pooler(raw: Mapping[str, Any]) -> Pooler:
    mode = raw.get("pooling_mode") or [m for key, m in LEGACY_MODES.items() if raw.get(key)]
    modes = mode if isinstance(mode, list) else [mode]
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in KINDS:
        raise UnsupportedModelError(
            f"The pooling is {' and '.join(map(str, modes)) or 'nothing':.80}; rooflax computes "
            f"{' or '.join(KINDS)}."
        )
    if raw.get("include_prompt", True) is not True:
        raise UnsupportedModelError("The pooling leaves out prompts, which rooflax does not do.")
    return Pooler(KINDS[modes[0]])


def _read_dense(raw: Mapping[str, Any], folder: Path) -> DenseLayer:
    activation = raw.get("activation_function", "torch.nn.modules.activation.Tanh")
    is_known = isinstance(activation, str) and activation in ACTIVATIONS
    if not is_known or raw.get("use_residual"):
        raise UnsupportedModelError(
            f"A dense layer of {folder.name} has the activation {activation!s:.80} or a residual; "
            f"rooflax computes {', '.join(ACTIVATIONS)} without one."
        )
    source = Checkpoint(folder)
    names = set(source.names())
    wanted = {"linear.weight", "linear.bias"} if raw.get("bias", True) else {"linear.weight"}
    if names != wanted:
        raise CheckpointError(f"{folder} has the tensors {sorted(names)}; wanted {sorted(wanted)}.")
    weight = np.array(source.read("linear.weight"), np.float32)
    bias = np.array(source.read("linear.bias"), np.float32) if len(wanted) == 2 else None
    sizes = (raw.get("out_features"), raw.get("in_features"))
    if weight.shape != sizes or (bias is not None and bias.shape != sizes[:1]):
        raise CheckpointError(f"linear.weight of {folder} is {list(weight.shape)}, wanted {sizes}.")
    return DenseLayer(weight, bias, activation)
