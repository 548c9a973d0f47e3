"""Writing a model as a GGUF file that llama.cpp opens.

Matrices get the type that was asked for, as llama.cpp's own quantizer would make it; norms, biases
and small ones that it requires in float32 stay so. The file appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rooflax.errors import CheckpointError, RequestError, UnsupportedModelError
from rooflax.loading.gguf_metadata import (
    HeaderOnly,
    architecture_metadata,
    check_metadata,
    otherwise,
    rope_tensors,
    sampling_metadata,
    written_spec,
)
from rooflax.loading.gguf_quantize import NARROWER, RECIPES, quantize_blocks, recipe_type
from rooflax.loading.gguf_vocabulary import vocabulary_metadata
from rooflax.loading.gguf_weights import Entry, stored_names, tensor_entries
from rooflax.loading.model_info import ModelInfo
from rooflax.loading.packed import is_packed
from rooflax.loading.pooling import gguf_pooling_metadata
from rooflax.loading.safetensors import TensorInfo
from rooflax.models.gguf import GGUF_DENSE, Metadata
from rooflax.models.gguf_changes import Shape
from rooflax.models.registry import family
from rooflax.nn.decoder import Decoder
from rooflax.nn.storage import TABLES, Storage, is_head, is_matmul
from rooflax.nn.weights import Param

FILE_TYPES = {"F32": 0, "BF16": 32, "Q8_0": 7, "Q4_0": 2, "Q4_K_M": 15, "Q6_K": 18}
"""Types of matrices to llama.cpp's numbers of such files."""
FLOAT32 = ("ffn_gate_inp.", "ffn_gate_inp_shexp.", "ssm_conv1d.", "shortconv.conv.")
"""Matrices that llama.cpp requires in float32."""
LARGEST = {
    "Q8_0": 8_319_008, "Q4_0": 524_032, "Q5_0": 1_048_064, "Q5_1": 65_504, "Q4_K": 4_126_752,
    "Q5_K": 4_126_752, "Q6_K": 259_921_872,
}  # fmt: skip
"""Weights of which a block's scale is a finite float16."""
STORAGE = Storage(keeps_bfloat16=True)


def check_file_type(kind: str) -> str:
    """One of FILE_TYPES, in capitals.

    Raises:
        RequestError: it is none.
    """
    if kind.upper() not in FILE_TYPES:
        raise RequestError(f"gguf is {kind!r}; a file is written as {', '.join(FILE_TYPES)}.")
    return kind.upper()


def save_gguf(
    info: ModelInfo, path: str | os.PathLike[str], kind: str, *, check: bool = False
) -> list[str]:
    """Writes a model's file, one weight in memory at a time.

    Args:
        path: of the file; an existing one is replaced once the new one is complete.
        kind: one of `FILE_TYPES`, of matrices; where inputs do not divide into blocks of 256, a
            type with blocks of 32 stands in, and float32 where these do not fit either.
        check: reject weights with NaN or infinity.

    Returns:
        A sentence for each thing that llama.cpp computes otherwise.

    Raises:
        RequestError: an unknown type, a preset, or the checkpoint is quantized by rooflax.
        UnsupportedModelError: llama.cpp computes no such model, or has no such tokenizer.
        CheckpointError: a weight is too large for the type.
        OSError: the disk is full or not writable; what was there before stays.
    """
    kind = check_file_type(kind)
    if info.folder is None:
        raise RequestError(
            f"{info.name} has random weights and no tokenizer of its own; give a checkpoint."
        )
    if is_packed(info.raw_config):
        raise RequestError(
            f"{info.name} is quantized already; give the checkpoint that it was made from."
        )
    path = Path(path).resolve()
    metadata, tensors, notes = _header(info, path, kind)
    write_gguf(path, metadata, tensors, _written(info, check), info.name)
    return notes


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Metadata,
    tensors: Mapping[str, TensorInfo],
    arrays: Iterable[tuple[str, np.ndarray]],
    model: str,
) -> None:
    """Writes a file whole or not at all, one tensor in memory at a time.

    Args:
        tensors: their types and shapes, in the file's order.
        arrays: the same by name, float32 or bfloat16.
        model: its name, for errors.

    Raises:
        CheckpointError: a number is too large for its type.
        OSError: the disk is full or not writable; what was there before stays.
    """
    from gguf import GGUFWriter

    path = Path(path).resolve()
    new = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    writer = GGUFWriter(new, metadata["general.architecture"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for key, value in metadata.items():
            if key != "general.architecture":  # the writer has added it
                _add(writer, key, value)
        for name, tensor in tensors.items():
            kinds = np.dtype(np.float32), tensor.nbytes, _ggml_type(tensor.dtype)
            writer.add_tensor_info(name, tensor.shape, *kinds)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for (name, tensor), (written_name, array) in zip(tensors.items(), arrays, strict=True):
            assert (written_name, array.shape) == (name, tensor.shape)
            _check_range(model, name, array, tensor.dtype)
            writer.write_tensor_data(_encoded(array, tensor.dtype))
        writer.close()
        with open(new, "rb") as file:
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # what it still holds may not fit the disk either
            writer.close()
        new.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is None:  # numpy's, of a short write
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from None
        raise


def _name(info: ModelInfo) -> str:
    """The last part of a hub id or a path; of "." and ".." the folder's own name."""
    assert info.folder is not None
    name = Path(info.name).name
    return info.folder.resolve().name if name in ("", "..") else name


def _header(
    info: ModelInfo, path: Path, kind: str
) -> tuple[Metadata, dict[str, TensorInfo], list[str]]:
    """Metadata and tensors, checked to be the model's, without layers for further tokens."""
    config = replace(info.config, names=replace(info.config.names, further=0))
    if info.pooling and not config.has_head:  # as a file without one says
        config = replace(config, has_head=True, tied_embeddings=True)
    raw = family(info.family).config_to_hf(config)
    tokenizer = info.tokenizer()
    defaults = info.generation_defaults(tokenizer)
    vocabulary, notes = vocabulary_metadata(
        tokenizer,
        config.vocab_size,
        defaults.eos_token_ids,
        lists_merges=written_spec(raw["model_type"]).lists_merges,
    )
    metadata = architecture_metadata(config, raw) | {
        "general.type": "model",
        "general.name": _name(info),
        "general.file_type": FILE_TYPES[kind],
        "general.quantization_version": 2,
    }
    metadata |= sampling_metadata(defaults) | vocabulary
    lost = {
        "stop_strings": defaults.stop,
        "suppressed or biased tokens": defaults.banned_token_ids or defaults.logit_bias,
        "limits of length": defaults.min_new_tokens or defaults.min_length,
    }
    notes += [f"the file has no {name} of generation_config.json" for name in lost if lost[name]]
    tensors, factors = _tensors(raw["model_type"], config, kind), rope_tensors(config)
    if info.pooling:
        metadata |= gguf_pooling_metadata(info.pooling, metadata["general.architecture"])
        dense = _dense(info).items()
        tensors |= {name: stored_as(array.shape, kind) for name, array in dense}
        notes += ["the file has no prompts"] if any(info.pooling.prompts.values()) else []
    check_metadata(HeaderOnly(path, metadata, tensors, factors), raw["model_type"], config)
    return metadata, tensors, otherwise(raw["model_type"], config) + notes


def _dense(info: ModelInfo) -> dict[str, np.ndarray]:
    """Weights of layers behind the pooling."""
    layers = info.pooling.dense if info.pooling else ()
    return {f"{n}.weight": layer.weight for n, layer in zip(GGUF_DENSE, layers, strict=False)}


def _tensors(name: str, config: Decoder, kind: str) -> dict[str, TensorInfo]:
    """Every tensor of the file, in its order."""
    infos = {
        name: TensorInfo("F32", array.shape, array.nbytes)
        for name, array in rope_tensors(config).items()
    }
    entries = tensor_entries(name, config)
    for param in config.params():
        shapes = param.line.hf_shapes(config.axis_sizes)
        for stored, shape in _stored_shapes(param, shapes, entries).items():
            infos[stored] = _tensor_info(param, config, stored, shape, kind)
    return infos


def _entry(entries: Mapping[str, Entry], name: str) -> Entry:
    if name not in entries:
        raise UnsupportedModelError(f"llama.cpp has no place for the model's tensor {name}.")
    return entries[name]


def _stored_shapes(
    param: Param, shapes: list[Shape], entries: Mapping[str, Entry]
) -> dict[str, Shape]:
    by_name: dict[str, Shape] = {}
    count: dict[str, int] = {}
    for hf, shape in zip(param.hf_names, shapes, strict=True):
        entry = _entry(entries, hf)
        parts = entry.change.stored_shapes(shape)
        stored_of_param = stored_names(param, entry)
        for stored, part in zip(entry.stored, parts, strict=True):
            if stored not in stored_of_param:
                continue
            count[stored] = count.get(stored, 0) + 1
            by_name[stored] = part if entry.expert is None else (count[stored], *part)
    return by_name


def _tensor_info(param: Param, config: Decoder, name: str, shape: Shape, kind: str) -> TensorInfo:
    is_matrix = len(shape) > 1 and (is_matmul(param, config) or param.key in TABLES)
    if not is_matrix or any(part in name for part in FLOAT32):
        return stored_as(shape, "F32")
    experts = config.moe.num_experts if config.moe else 0
    head = is_head(param, config)
    return stored_as(
        shape, recipe_type(kind, name, config.num_layers, is_head=head, experts=experts)
    )


def stored_as(shape: Shape, kind: str) -> TensorInfo:
    """A tensor of a type, or of another where its inputs do not divide into blocks."""
    from gguf import GGML_QUANT_SIZES

    kind = RECIPES.get(kind, kind)
    for other in (NARROWER.get(kind, "F32"), "F32"):
        if max(shape[-1:]) % GGML_QUANT_SIZES[_ggml_type(kind)][0]:
            kind = other
    values, nbytes = GGML_QUANT_SIZES[_ggml_type(kind)]
    return TensorInfo(kind, shape, int(np.prod(shape)) // values * nbytes)


def _ggml_type(kind: str) -> Any:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType[kind]


def _written(info: ModelInfo, check: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Each tensor of the file, in its order, float32 or bfloat16."""
    config = info.config
    yield from rope_tensors(config).items()
    name = family(info.family).config_to_hf(config)["model_type"]
    entries = tensor_entries(name, config)
    reader = info.reader(STORAGE, check=check)
    by_name = {
        param.name: param for param in config.params()
    }  # the checkpoint may have it elsewhere
    for placed, array in reader.leaves(reader.params):
        param = by_name[placed.name]
        tensors = param.line.split(np.asarray(array), config.axis_sizes)
        yield from _stored(param, tensors, entries).items()
    yield from _dense(info).items()


def _stored(
    param: Param, tensors: list[np.ndarray], entries: Mapping[str, Entry]
) -> dict[str, np.ndarray]:
    arrays: dict[str, Any] = {}
    for hf, tensor in zip(param.hf_names, tensors, strict=True):
        entry = _entry(entries, hf)
        stored_of_param = stored_names(param, entry)
        for stored, part in zip(entry.stored, entry.change.undo(tensor), strict=True):
            if stored not in stored_of_param:
                continue
            if entry.expert is None:
                arrays[stored] = part
            else:
                arrays.setdefault(stored, []).append(part)
    return {k: np.stack(v) if isinstance(v, list) else v for k, v in arrays.items()}


def _check_range(model: str, name: str, array: np.ndarray, kind: str) -> None:
    """
    Raises:
        CheckpointError: a block's scale would be infinite.
    """
    if kind not in LARGEST:
        return
    largest = max(float(array.max(initial=0)), -float(array.min(initial=0)))
    if largest > LARGEST[kind]:  # NaN is not: it is written as it is
        raise CheckpointError(
            f"{model} has a weight of {largest:g} in {name}, and {kind} holds at most "
            f"{LARGEST[kind]:,}; write BF16."
        )


def _encoded(array: np.ndarray, kind: str) -> np.ndarray:
    """An array's bytes as a type has them."""
    from gguf import quants

    if kind == "BF16" and array.dtype.itemsize == 2:
        return np.ascontiguousarray(array).view(np.uint16)
    array = np.ascontiguousarray(array, np.float32)
    with np.errstate(all="ignore"):  # NaN stays NaN
        if kind in NARROWER:
            return quantize_blocks(array, kind)
        return array if kind == "F32" else quants.quantize(array, _ggml_type(kind))


def _add(writer: Any, key: str, value: Any) -> None:
    """A key of metadata, with its type."""
    from gguf import GGUFValueType

    kinds = {
        bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32,
        str: GGUFValueType.STRING,
    }  # fmt: skip
    if not isinstance(value, list):
        writer.add_key_value(key, value, kinds[type(value)])
        return
    kinds[int] = GGUFValueType.INT32
    writer.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=kinds[type(value[0])])
