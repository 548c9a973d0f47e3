"""Writing a model as a Hugging Face folder that transformers opens.

The family's table says how each of our arrays becomes the checkpoint's tensors. A folder appears
whole or not at all; a tied head is not written.
"""

from __future__ import annotations

import glob
import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rooflax.errors import RequestError
from rooflax.loading import packed
from rooflax.loading.gguf import open_gguf
from rooflax.loading.gguf_config import read_gguf_config
from rooflax.loading.json_files import read_config_json
from rooflax.loading.pooling import gguf_pooling, pooling_files
from rooflax.loading.safetensors import TensorToWrite, dtype_name, write_safetensors
from rooflax.loading.score_head import HEAD_KEYS, folder_pooling, head_tensors
from rooflax.loading.tokenizer import Tokenizer
from rooflax.models.offloading import AnyModel, whole
from rooflax.models.registry import family
from rooflax.nn.decoder import Decoder
from rooflax.nn.layers import unstack_layers
from rooflax.nn.weights import Param
from rooflax.ops.weights import Pairs, packed_format

DTYPES: Mapping[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
"""Files of a checkpoint that belong to its tokenizer and its generation defaults."""

File = Path | bytes | list[TensorToWrite]
"""One to copy, its bytes, or its tensors."""

WRITTEN = frozenset({"config.json", "model.safetensors", *COMPANIONS})


def save(
    model: AnyModel,
    folder: str | os.PathLike[str],
    *,
    dtype: str = "bfloat16",
    files_from: str | os.PathLike[str] | None = None,
) -> None:
    """Writes a Model as a Hugging Face folder; `save_model` says more.

    Args:
        model: with its layers unrolled or stacked, all in memory.
        dtype: of the file, "bfloat16", "float32" or "float16"; quantised weights stay as they are.
        files_from: the checkpoint folder (or GGUF file) that the model came from; its tokenizer,
            generation defaults, end-of-sequence ids, and how it embeds or scores go along.
    """
    model = whole(model)
    source = Path(files_from) if files_from is not None else None
    raw: Mapping[str, Any] = {}
    files: dict[str, File] = {}
    head: list[TensorToWrite] = []
    settings: dict[str, Any] = {}
    if source is not None:
        gguf = open_gguf(source) if source.is_file() else None
        raw = read_gguf_config(gguf)[2] if gguf else read_config_json(source)
        of = model.family, model.config, raw
        pooling = gguf_pooling(gguf) if gguf else folder_pooling(source, *of)
        files = companions(source)
        if pooling is not None:
            files |= pooling_files(pooling, model.config.hidden_size)
        if pooling is not None and pooling.has_head:
            head = head_tensors(pooling, model.family)
            settings = {key: raw[key] for key in HEAD_KEYS if key in raw}
            settings["sentence_transformers"] = {"activation_fn": pooling.activation}
    eos = raw.get("eos_token_id")

    weights = model.weights
    if "stacked_layers" in weights:
        weights = unstack_layers(weights)
    save_model(
        folder,
        model.family,
        model.config,
        weights,
        dtype=dtype,
        eos_token_ids=eos if isinstance(eos, list) else [] if eos is None else [eos],
        bos_token_id=raw.get("bos_token_id"),
        files=files,
        more_tensors=head,
        settings=settings,
        may_replace=WRITTEN | {name.partition("/")[0] for name in files},
    )


def companions(source: Path, names: Sequence[str] = COMPANIONS) -> dict[str, File]:
    """Tokenizer files of a checkpoint: those of its folder, or made from its GGUF file."""
    if source.is_file():
        return {**Tokenizer(source).files()}
    return {name: source / name for name in names if (source / name).is_file()}


def save_model(
    folder: str | os.PathLike[str],
    name: str,
    config: Decoder,
    weights: dict[str, Any],
    *,
    dtype: str = "bfloat16",
    eos_token_ids: Sequence[int] = (),
    bos_token_id: int | None = None,
    generation: Mapping[str, Any] | None = None,
    files: Mapping[str, File] | None = None,
    more_tensors: Sequence[TensorToWrite] = (),
    settings: Mapping[str, Any] | None = None,
    may_replace: frozenset[str] = WRITTEN,
) -> None:
    """Writes config.json, generation_config.json and model.safetensors.

    Args:
        folder: what it shall be. An existing one is replaced once the new one is complete, if it
            holds nothing but files of a checkpoint.
        name: the family.
        weights: with "layers", as the family's table describes (not stacked).
        dtype: of the file, "bfloat16", "float32" or "float16".
        generation: further keys of generation_config.json, such as a temperature.
        files: further files to put into the folder (name there -> file here, or its content), such
            as the tokenizer's.
        more_tensors: beside the model's own.
        settings: keys that replace those of config.json.
        may_replace: names of files that may be lost with an existing folder.

    Raises:
        RequestError: an unknown dtype, the folder is a file, or it holds other files.
        OSError: the disk is full or not writable; what was there before stays.
    """
    folder = Path(folder).resolve()
    if dtype not in DTYPES:
        raise RequestError(f"dtype is {dtype!r}; a model is saved as {', '.join(DTYPES)}.")
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{folder} is a file; give the name of a folder to save into.")
    others = sorted(p.name for p in folder.iterdir()) if folder.exists() else []
    others = [other for other in others if other not in may_replace]
    if others:
        raise RequestError(
            f"{folder} holds {others[0]}, which is no file of a checkpoint; save into a folder of "
            f"its own, which may not exist yet."
        )
    eos = eos_token_ids[0] if len(eos_token_ids) == 1 else list(eos_token_ids) or None
    ends = {"bos_token_id": bos_token_id, "eos_token_id": eos}
    written = family(name).config_to_hf(config) | ends | {"dtype": dtype, "torch_dtype": dtype}
    formats = ((param, packed_format(_leaf(param, weights))) for param in config.params())
    written |= packed.to_config(formats) | dict(settings or {})

    def fill(new: Path) -> None:
        _write_json(new / "config.json", written)
        _write_json(new / "generation_config.json", ends | dict(generation or {}))
        model_tensors = tensors(name, config, weights, dtype)
        write_safetensors(new / "model.safetensors", [*model_tensors, *more_tensors])
        for target, source in (files or {}).items():
            (new / target).parent.mkdir(exist_ok=True)
            if isinstance(source, bytes):
                (new / target).write_bytes(source)
            elif isinstance(source, list):
                write_safetensors(new / target, source)
            else:
                shutil.copyfile(source, new / target)

    replace_folder(folder, fill)


def tensors(name: str, config: Decoder, weights: dict[str, Any], dtype: str) -> list[TensorToWrite]:
    """The checkpoint's tensors, each made when it is asked for; one that two weights share is the
    sum of what they give of it (`nn.tensor_layouts.HeadPart`)."""
    by_name: dict[str, TensorToWrite] = {}
    for param in config.params():
        for tensor in _param_tensors(param, config, weights, dtype):
            other = by_name.get(tensor.name)
            by_name[tensor.name] = _sum(other, tensor) if other else tensor
    return list(by_name.values())


def _sum(one: TensorToWrite, other: TensorToWrite) -> TensorToWrite:
    return one._replace(produce=lambda: one.produce() + other.produce())


def _param_tensors(
    param: Param, config: Decoder, weights: dict[str, Any], dtype: str
) -> list[TensorToWrite]:
    sizes, target = config.axis_sizes, DTYPES[dtype]
    array = _leaf(param, weights)
    if packed_format(array):
        return packed.tensors_of(param, array)

    @lru_cache(maxsize=1)
    def parts() -> list[np.ndarray]:
        if array.shape != param.line.shape(sizes):
            raise RequestError(
                f"{param.name} is {list(array.shape)}, wanted {list(param.line.shape(sizes))}: a "
                f"model placed on a mesh is not saved; load it on one device."
            )
        plain = array.matrix().reshape(array.shape) if isinstance(array, Pairs) else array
        return param.line.split(np.asarray(plain), sizes)

    def cast(index: int) -> np.ndarray:
        try:
            with np.errstate(over="raise"):
                return parts()[index].astype(target)
        except FloatingPointError:
            raise RequestError(
                f"{param.hf_names[index]} has numbers that {dtype} cannot hold; save it as "
                f"bfloat16 or float32."
            ) from None

    shapes = param.line.hf_shapes(sizes)
    return [
        TensorToWrite(hf, dtype_name(target), tuple(shape), partial(cast, index))
        for index, (hf, shape) in enumerate(zip(param.hf_names, shapes, strict=True))
    ]


def _leaf(param: Param, weights: dict[str, Any]) -> Any:
    return (weights if param.layer is None else weights["layers"][param.layer])[param.key]


def replace_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fills a new folder beside `folder` and puts it in its place when it is complete.

    What a killed run left is cleared away; killed between the two renames, it left the old folder
    under another name, which is put back first.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = f".{glob.escape(folder.name)}.{'[0-9a-f]' * 12}"
    for left in sorted(folder.parent.glob(f"{beside}.old"), key=lambda path: path.stat().st_mtime):
        if not folder.exists():
            os.rename(left, folder)
    for left in (*folder.parent.glob(f"{beside}.old"), *folder.parent.glob(f"{beside}.tmp")):
        shutil.rmtree(left, ignore_errors=True)
    new = folder.with_name(f".{folder.name}.{secrets.token_hex(6)}.tmp")
    old = new.with_suffix(".old")
    try:
        new.mkdir()
        fill(new)
        if folder.exists():
            os.rename(folder, old)
        os.rename(new, folder)
    except BaseException:
        if old.exists() and not folder.exists():
            os.rename(old, folder)
        shutil.rmtree(new, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
