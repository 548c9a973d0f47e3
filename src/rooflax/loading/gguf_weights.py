"""A GGUF file's tensors under the names and in the layouts of a Hugging Face checkpoint.

llama.cpp's converter renames tensors and changes some (models/gguf_changes.py); families declare
both (`GGUFSpec.tensors`). Reading and writing take the same entries.

It knows nothing of devices; how blocks become numbers is `gguf_blocks`' matter.

Source: https://github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py and conversion/.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np

from rooflax.errors import CheckpointError
from rooflax.loading.gguf import GGUFFile
from rooflax.loading.gguf_blocks import (
    VALUES,
    codes_and_scales,
    dequantize,
    format_for,
    is_plain,
)
from rooflax.loading.prequantized import beside, output_order
from rooflax.loading.safetensors import TensorInfo
from rooflax.loading.source import DerivedSource
from rooflax.models.gguf import GGUF_DENSE, GGUF_HEAD, LONGROPE_FACTORS, ROPE_FACTORS, GGUFSpec
from rooflax.models.gguf_changes import KEEP, Change, LessOne, Permuted, moves_groups
from rooflax.models.gguf_names import TENSORS
from rooflax.models.registry import gguf_families
from rooflax.nn.decoder import Decoder
from rooflax.nn.storage import Part, is_head, is_matmul, matmul_shape, matrices_of, parts_of
from rooflax.nn.tensor_layouts import HeadPart
from rooflax.nn.weights import Param
from rooflax.ops import accelerator
from rooflax.ops.format_names import BESIDE, GROUP, KNOWN, of_two_terms
from rooflax.ops.host_arrays import Put
from rooflax.ops.weights import Fused, Quantized, class_of, pack, pack_blocks


@dataclass(frozen=True)
class Entry:
    """A checkpoint's tensor: the stored tensors it is made of, and how.

    Attributes:
        expert: whose part of the stored tensors it is; None is all of them.
    """

    stored: tuple[str, ...]
    change: Change
    expert: int | None = None


class GGUFWeights(DerivedSource):
    """The interface of a checkpoint folder over a GGUF file.

    Args:
        file: the container.
        name, config: the family and the model that its metadata describes.
    """

    def __init__(self, file: GGUFFile, name: str, config: Decoder):
        super().__init__(file)
        self.file, self.family, self.config = file, name, config
        present = set(file.names())
        self.entries = tensor_entries(name, config, present)
        self.entries = {n: e for n, e in self.entries.items() if set(e.stored) <= present}
        used = {stored for entry in self.entries.values() for stored in entry.stored}
        if not config.learned_positions:
            used |= {ROPE_FACTORS, *LONGROPE_FACTORS.values()}
        if not config.is_causal:
            behind = (*GGUF_DENSE, *GGUF_HEAD)  # `gguf_pooling` reads them
            used |= {f"{name}.{end}" for name in behind for end in ("weight", "bias")}
        further = self._further_blocks()
        others = [n for n in file.names() if n not in used and not n.startswith(further)]
        self.entries |= {_checkpoint_name(name): Entry((name,), KEEP) for name in others}

    def _further_blocks(self) -> tuple[str, ...]:
        """Prefixes of the layers that predict further tokens, for which we have no use."""
        architecture = self.file.metadata.get("general.architecture")
        count = self.file.metadata.get(f"{architecture}.nextn_predict_layers", 0)
        first = self.config.num_layers
        count = min(count, MOST_FURTHER) if type(count) is int else 0
        return tuple(f"blk.{layer}." for layer in range(first, first + count))

    def names(self) -> list[str]:
        """Checkpoint names; a tensor that has none keeps its own."""
        return list(self.entries)

    def _entry(self, name: str) -> Entry:
        return self.entries.get(name, Entry((name,), KEEP))

    def stored(self, name: str) -> tuple[str, ...]:
        return self._entry(name).stored

    def info(self, name: str) -> TensorInfo:
        """The shape that `read` gives; the type is "F32" where numbers are made from blocks.

        Raises:
            CheckpointError: the stored tensors do not fit together.
        """
        infos = [self._info(stored, self._expert(name)) for stored in self.stored(name)]
        shapes, change = [info.shape for info in infos], self._change(name)
        shape = change.shape(shapes)
        if len(shapes) > 1 and list(change.stored_shapes(shape)) != shapes:
            raise CheckpointError(
                f"{self.file.path}: {' and '.join(self.stored(name))} have the shapes "
                f"{' and '.join(map(str, shapes))}, which do not belong together."
            )
        kinds = {info.dtype if is_plain(info.dtype) else "F32" for info in infos}
        kind = kinds.pop() if len(kinds) == 1 else "F32"
        return TensorInfo(kind, shape, sum(info.nbytes for info in infos))

    def _info(self, stored: str, expert: int | None) -> TensorInfo:
        info = self.file.info(stored)
        if expert is None:
            return info
        return TensorInfo(info.dtype, info.shape[1:], info.nbytes // max(1, *info.shape[:1]))

    def _change(self, name: str) -> Change:
        return self._entry(name).change

    def _expert(self, name: str) -> int | None:
        return self._entry(name).expert

    def read(self, name: str) -> np.ndarray:
        """A tensor in the checkpoint's layout: the file's own pages where they will do."""
        expert = self._expert(name)
        return self._change(name).apply([self._numbers(s, expert) for s in self.stored(name)])

    def _numbers(self, stored: str, expert: int | None) -> np.ndarray:
        array, kind = self.file.read(stored), self.file.info(stored).dtype
        array = array if expert is None else array[expert]
        return array if is_plain(kind) else dequantize(kind, array)

    @cached_property
    def formats(self) -> dict[str, str]:
        """The format of each matmul's weight, by parameter, whose tensors are all blocks.

        A type that is one of our formats stays what it is, others are rounded. On CPU layers may
        differ, and so may the tensors of a fused weight; elsewhere they are alike, because they may
        be stacked.
        """
        differ = accelerator.mixes_formats()
        kinds: dict[str, set[str]] = {}
        matmuls = [param for param in self.config.params() if is_matmul(param, self.config)]
        for param in matmuls:
            kinds.setdefault(param.key, set()).update(self._kinds(param))
        formats = {}
        for param in matmuls:
            alike = not differ or any(map(is_plain, kinds[param.key]))
            moved = self._moves_parts(param)
            if format := (
                format_for(kinds[param.key], moved=moved) if alike else self._own(param, moved)
            ):
                formats[param.name] = format
        return formats

    def _own(self, param: Param, moved: bool) -> str | None:
        """The format of a weight, or of each of its tensors."""
        kinds = self._kinds(param)
        each = [format_for({kind}, moved=moved) or "" for kind in kinds]
        _, sizes = param.line.layout.beside(matmul_shape(param, self.config)[1]) or (0, ())
        if len(set(each)) > 1 and all(each) and len(each) == len(sizes):
            return BESIDE.join(each)
        format = format_for(set(kinds), moved=moved)
        if format and of_two_terms(format) in KNOWN and self._needs_precision(param):
            return of_two_terms(format)
        return format

    def _needs_precision(self, param: Param) -> bool:
        """Whether the loss grows when a weight's activations are rounded to one int8 number.

        The head, and of the first and the last layer the matrix behind the gate, whose inputs
        have outliers: docs/quantization.md has the figures.
        """
        is_down = matrices_of(param, self.config) == ["down"] and not param.line.num_stacked
        at_an_end = param.layer in (0, self.config.num_layers - 1)
        return is_head(param, self.config) or (is_down and at_an_end)

    def _kinds(self, param: Param) -> list[str]:
        """The types of a weight's tensors; plain where blocks do not stay whole in our order."""
        for name in param.hf_names:
            order = self._change(name).inputs()
            if name not in self.entries or not (order is None or moves_groups(order, GROUP)):
                return ["F32"]
            if isinstance(param.line.layout, HeadPart) and len(self.stored(name)) == 1:
                return ["F32"]  # both kinds of rows are one tensor, and one of them is transposed
        return [self.file.info(name).dtype for name in self._parts(param)]

    def _moves_parts(self, param: Param) -> bool:
        """Whether parts of blocks are moved to other inputs."""
        orders = [self._change(name).inputs() for name in param.hf_names]
        most = max(VALUES[self.file.info(name).dtype] for name in self._parts(param))
        return not all(order is None or moves_groups(order, most) for order in orders)

    def packed(self, param: Param, put: Put = jax.device_put) -> Quantized | Fused:
        """A matmul's weight from the file's own codes, its outputs in our order."""
        in_shape, out_shape = matmul_shape(param, self.config)

        def packed(part: Part) -> Quantized:
            shapes = in_shape, part.out_shape(out_shape)
            kinds, rows = set(self._kinds(param)[part.tensors]), self._rows(param, part)
            if (
                rows is not None
                and len(kinds) == 1
                and kinds <= class_of(part.format).blocks.keys()
            ):
                fused = pack_blocks(part.format, min(kinds), rows, *shapes, put)
                if fused is not None:
                    return fused
            return pack(part.format, *self._codes(param, part), *shapes, put)

        parts = self._parts_of(param)
        return beside(self.formats[param.name], parts, map(packed, parts))

    def _parts_of(self, param: Param) -> list[Part]:
        _, out_shape = matmul_shape(param, self.config)
        return parts_of(param.line.layout, self.formats[param.name], out_shape)

    def _rows(self, param: Param, part: Part) -> np.ndarray | None:
        """Addresses of each output's blocks in the mapped file, [*experts, out].

        None where the inputs are in another order here.
        """
        if self._change(param.hf_names[0]).inputs() is not None:
            return None
        blocks = [self.file.read(name) for name in self._parts(param)[part.tensors]]
        rows = np.concatenate([_addresses(one) for one in blocks], axis=-1)
        return rows if param.line.num_stacked else rows[self._order(param, part)]

    def codes(
        self, param: Param, experts: slice = slice(None)
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Codes and scales [*experts, out, ...] of each part, in our order of outputs."""
        return [self._codes(param, part, experts) for part in self._parts_of(param)]

    def _codes(
        self, param: Param, part: Part, experts: slice = slice(None)
    ) -> tuple[np.ndarray, np.ndarray]:
        format, names = part.format, self._parts(param)[part.tensors]
        parts = [(self.file.info(name).dtype, self.file.read(name)) for name in names]
        if param.line.num_stacked:  # experts: gate's outputs, then up's, as they lie here
            pairs = [codes_and_scales(kind, blocks[experts], format) for kind, blocks in parts]
            codes, scales = zip(*pairs, strict=True)
            return np.concatenate(codes, 1), np.concatenate(scales, 1)
        codes, scales = zip(*(codes_and_scales(*part, format) for part in parts), strict=True)
        if (inputs := self._change(param.hf_names[0]).inputs()) is not None:
            codes = tuple(code[:, inputs] for code in codes)
            scales = tuple(scale[:, inputs[::GROUP] // GROUP] for scale in scales)
        order = self._order(param, part)
        if len(parts) == 1 and np.array_equal(order, np.arange(len(order))):
            return codes[0], scales[0]
        return np.concatenate(codes)[order], np.concatenate(scales)[order]

    def _parts(self, param: Param) -> list[str]:
        entries = (self.entries[name] for name in param.hf_names)
        names = (stored for entry in entries for stored in stored_names(param, entry))
        return list(dict.fromkeys(names))  # those of experts are one stack

    def _order(self, param: Param, part: Part) -> np.ndarray:
        """Stored row of each of a part's outputs."""
        numbers, begin = [], 0
        for name in param.hf_names:
            ids = []
            for stored in self.entries[name].stored:
                rows = self.file.info(stored).shape[0]
                ids.append(np.arange(begin, begin + rows, dtype=np.int32)[:, None])
                begin += rows
            change = self.entries[name].change
            numbers.append(ids[0] if change.inputs() is not None else change.apply(ids))
        order = output_order(param, self.config, numbers)
        before = self._parts(param)[: part.tensors.start or 0]
        begin = sum(self.file.info(name).shape[0] for name in before)
        whole = order.reshape(matmul_shape(param, self.config)[1])
        return whole[part.index].reshape(-1) - begin


def _addresses(blocks: np.ndarray) -> np.ndarray:
    """Addresses of rows [*experts, rows, blocks, bytes], each contiguous."""
    assert blocks.strides[-2:] == (blocks.shape[-1], 1)
    start = np.uint64(blocks.ctypes.data)
    for count, stride in zip(blocks.shape[:-2], blocks.strides[:-2], strict=True):
        start = np.asarray(start)[..., None] + np.arange(count, dtype=np.uint64) * np.uint64(stride)
    return np.asarray(start)


def stored_names(param: Param, entry: Entry) -> tuple[str, ...]:
    """The stored tensors of a checkpoint's that a weight is made of."""
    layout = param.line.layout
    if isinstance(layout, HeadPart) and len(entry.stored) > 1:
        return (entry.stored[layout.kind],)
    return entry.stored


MOST_FURTHER = 64
"""Layers that predict further tokens."""


def tensor_entries(family: str, config: Decoder, present: Collection[str] = ()) -> dict[str, Entry]:
    """Stored tensors and their change, by the checkpoint's name.

    Args:
        present: the file's tensors, where there is one.
    """
    spec = gguf_families()[family]
    of_family = spec.tensors(config, present) if callable(spec.tensors) else spec.tensors
    table, entries = TENSORS | of_family, dict[str, Entry]()
    for param in config.params():
        for hf, name in zip(param.line.names, param.hf_names, strict=True):
            expert = re.search(r"\.experts\.(\d+)\.", hf)
            key = hf.replace(f".experts.{expert[1]}.", ".experts.{e}.") if expert else hf
            if key in table:
                stored, change = table[key]
                change = _of_family(key, spec, config) if change is KEEP else change
                names = tuple(one.replace("{i}", str(param.layer)) for one in stored)
                entries[name] = Entry(names, change, int(expert[1]) if expert else None)
    return entries


def _checkpoint_name(stored: str) -> str:
    """LLaMA's name of a tensor that the model does not have: a family may skip it by that."""
    layer, key = re.match(r"blk\.(\d+)\.", stored), re.sub(r"^blk\.\d+", "blk.{i}", stored)
    hf = next(
        (hf for hf, (names, _) in TENSORS.items() if names == (key,) and "{e}" not in hf), stored
    )
    return hf.replace("{i}", layer[1]) if layer else hf


def _of_family(name: str, spec: GGUFSpec, config: Decoder) -> Change:
    """Change of a tensor by a rule of the whole family."""
    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    if spec.permuted and (part := re.search(r"self_attn\.([qk])_proj\.", name)):
        return Permuted(heads[part[1]])
    is_norm = name.endswith("norm.weight") and ".linear_attn." not in name
    return LessOne() if spec.adds_one and is_norm else KEEP
