"""A GGUF file's tensors under the names and in the layouts of a Hugging Face checkpoint.

llama.cpp's converter renames tensors and changes some (`gguf_changes`). Each entry here names the
stored tensors of a checkpoint's and their change; reading and writing take the same entries.

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
from rooflax.loading.gguf_changes import (
    KEEP,
    Change,
    Decay,
    Halves,
    HeadKinds,
    HeadStacks,
    Interleaved,
    InterleavedBias,
    Kernel,
    LessOne,
    Permuted,
    Row,
    Tiled,
    Transposed,
    moves_groups,
)
from rooflax.loading.gguf_config import LONGROPE_FACTORS, ROPE_FACTORS, WITHOUT_ROPE
from rooflax.loading.pooling import GGUF_DENSE
from rooflax.loading.prequantized import beside, output_order
from rooflax.loading.safetensors import TensorInfo
from rooflax.nn.decoder import Decoder
from rooflax.nn.latent import LatentAttention
from rooflax.nn.recurrent import GatedDelta
from rooflax.nn.storage import Part, is_matmul, matmul_shape, parts_of
from rooflax.nn.weights import HeadPart, Slot
from rooflax.ops import accelerator
from rooflax.ops.formats import BESIDE, GROUP
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


Table = dict[str, tuple[tuple[str, ...], Change]]
"""By a checkpoint's name the stored tensors and their change; {i} is a layer, {e} an expert."""


class GGUFWeights:
    """The interface of a checkpoint folder over a GGUF file.

    Args:
        file: the container.
        name, config: the family and the model that its metadata describes.
    """

    def __init__(self, file: GGUFFile, name: str, config: Decoder):
        self.file, self.family, self.config = file, name, config
        present = set(file.names())
        self.entries = tensor_entries(name, config, present)
        self.entries = {n: e for n, e in self.entries.items() if set(e.stored) <= present}
        used = {stored for entry in self.entries.values() for stored in entry.stored}
        if name not in WITHOUT_ROPE:
            used |= {ROPE_FACTORS, *LONGROPE_FACTORS.values()}
        if not config.is_causal:
            used |= {f"{dense}.weight" for dense in GGUF_DENSE}  # `gguf_pooling` reads them
        further = self._further_blocks()
        self._unknown = [n for n in file.names() if n not in used and not n.startswith(further)]

    def _further_blocks(self) -> tuple[str, ...]:
        """Prefixes of the layers that predict further tokens, for which we have no use."""
        architecture = self.file.metadata.get("general.architecture")
        count = self.file.metadata.get(f"{architecture}.nextn_predict_layers", 0)
        first = self.config.num_layers
        count = min(count, MOST_FURTHER) if type(count) is int else 0
        return tuple(f"blk.{layer}." for layer in range(first, first + count))

    def names(self) -> list[str]:
        """Checkpoint names; a tensor that has none keeps its own."""
        return [*self.entries, *self._unknown]

    def _stored(self, name: str) -> tuple[str, ...]:
        entry = self.entries.get(name)
        return entry.stored if entry else (name,)

    def info(self, name: str) -> TensorInfo:
        """The shape that `read` gives; the type is "F32" where numbers are made from blocks.

        Raises:
            CheckpointError: the stored tensors do not fit together.
        """
        infos = [self._info(stored, self._expert(name)) for stored in self._stored(name)]
        shapes, change = [info.shape for info in infos], self._change(name)
        shape = change.shape(shapes)
        if len(shapes) > 1 and list(change.stored_shapes(shape)) != shapes:
            raise CheckpointError(
                f"{self.file.path}: {' and '.join(self._stored(name))} have the shapes "
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
        return self.entries[name].change if name in self.entries else KEEP

    def _expert(self, name: str) -> int | None:
        return self.entries[name].expert if name in self.entries else None

    def read(self, name: str) -> np.ndarray:
        """A tensor in the checkpoint's layout: the file's own pages where they will do."""
        expert = self._expert(name)
        return self._change(name).apply([self._numbers(s, expert) for s in self._stored(name)])

    def _numbers(self, stored: str, expert: int | None) -> np.ndarray:
        array, kind = self.file.read(stored), self.file.info(stored).dtype
        array = array if expert is None else array[expert]
        return array if is_plain(kind) else dequantize(kind, array)

    def release(self, name: str) -> None:
        """Lets a tensor's pages go."""
        for stored in self._stored(name):
            self.file.release(stored)

    def prefetch(self, name: str) -> None:
        """Has the system read a tensor's pages."""
        for stored in self._stored(name):
            self.file.prefetch(stored)

    @cached_property
    def formats(self) -> dict[str, str]:
        """The format of each matmul's weight, by slot, whose tensors are all blocks.

        A type that is one of our formats stays what it is, others are rounded. On CPU layers may
        differ, and so may the tensors of a fused weight; elsewhere they are alike, because they may
        be stacked.
        """
        differ = accelerator.platform() == "cpu"
        kinds: dict[str, set[str]] = {}
        matmuls = [slot for slot in self.config.slots() if is_matmul(slot, self.config)]
        for slot in matmuls:
            kinds.setdefault(slot.key, set()).update(self._kinds(slot))
        formats = {}
        for slot in matmuls:
            alike = not differ or any(map(is_plain, kinds[slot.key]))
            moved = self._moves_parts(slot)
            if format := (
                format_for(kinds[slot.key], moved=moved) if alike else self._own(slot, moved)
            ):
                formats[slot.name] = format
        return formats

    def _own(self, slot: Slot, moved: bool) -> str | None:
        """The format of a weight, or of each of its tensors."""
        kinds = self._kinds(slot)
        each = [format_for({kind}, moved=moved) or "" for kind in kinds]
        _, sizes = slot.line.layout.beside(matmul_shape(slot, self.config)[1]) or (0, ())
        if len(set(each)) > 1 and all(each) and len(each) == len(sizes):
            return BESIDE.join(each)
        return format_for(set(kinds), moved=moved)

    def _kinds(self, slot: Slot) -> list[str]:
        """The types of a weight's tensors; plain where blocks do not stay whole in our order."""
        for name in slot.hf_names:
            order = self._change(name).inputs()
            if name not in self.entries or not (order is None or moves_groups(order, GROUP)):
                return ["F32"]
            if isinstance(slot.line.layout, HeadPart) and len(self._stored(name)) == 1:
                return ["F32"]  # both kinds of rows are one tensor, and one of them is transposed
        return [self.file.info(name).dtype for name in self._parts(slot)]

    def _moves_parts(self, slot: Slot) -> bool:
        """Whether parts of blocks are moved to other inputs."""
        orders = [self._change(name).inputs() for name in slot.hf_names]
        most = max(VALUES[self.file.info(name).dtype] for name in self._parts(slot))
        return not all(order is None or moves_groups(order, most) for order in orders)

    def packed(self, slot: Slot, put: Put = jax.device_put) -> Quantized | Fused:
        """A matmul's weight from the file's own codes, its outputs in our order."""
        in_shape, out_shape = matmul_shape(slot, self.config)

        def packed(part: Part) -> Quantized:
            shapes = in_shape, part.out_shape(out_shape)
            kinds, rows = set(self._kinds(slot)[part.tensors]), self._rows(slot, part)
            if (
                rows is not None
                and len(kinds) == 1
                and kinds <= class_of(part.format).blocks.keys()
            ):
                found = pack_blocks(part.format, min(kinds), rows, *shapes, put)
                if found is not None:
                    return found
            return pack(part.format, *self._codes(slot, part), *shapes, put)

        parts = self._parts_of(slot)
        return beside(self.formats[slot.name], parts, map(packed, parts))

    def _parts_of(self, slot: Slot) -> list[Part]:
        _, out_shape = matmul_shape(slot, self.config)
        return parts_of(slot.line.layout, self.formats[slot.name], out_shape)

    def _rows(self, slot: Slot, part: Part) -> np.ndarray | None:
        """Where each output's blocks lie in the mapped file, [*experts, out].

        None where the inputs are in another order here.
        """
        if self._change(slot.hf_names[0]).inputs() is not None:
            return None
        blocks = [self.file.read(name) for name in self._parts(slot)[part.tensors]]
        rows = np.concatenate([_addresses(one) for one in blocks], axis=-1)
        return rows if slot.line.num_stacked else rows[self._order(slot, part)]

    def codes(
        self, slot: Slot, experts: slice = slice(None)
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Codes and scales [*experts, out, ...] of each part, in our order of outputs."""
        return [self._codes(slot, part, experts) for part in self._parts_of(slot)]

    def _codes(
        self, slot: Slot, part: Part, experts: slice = slice(None)
    ) -> tuple[np.ndarray, np.ndarray]:
        format, names = part.format, self._parts(slot)[part.tensors]
        parts = [(self.file.info(name).dtype, self.file.read(name)) for name in names]
        if slot.line.num_stacked:  # experts: gate's outputs, then up's, as they lie here
            found = [codes_and_scales(kind, blocks[experts], format) for kind, blocks in parts]
            codes, scales = zip(*found, strict=True)
            return np.concatenate(codes, 1), np.concatenate(scales, 1)
        codes, scales = zip(*(codes_and_scales(*part, format) for part in parts), strict=True)
        if (inputs := self._change(slot.hf_names[0]).inputs()) is not None:
            codes = tuple(code[:, inputs] for code in codes)
            scales = tuple(scale[:, inputs[::GROUP] // GROUP] for scale in scales)
        order = self._order(slot, part)
        if len(parts) == 1 and np.array_equal(order, np.arange(len(order))):
            return codes[0], scales[0]
        return np.concatenate(codes)[order], np.concatenate(scales)[order]

    def _parts(self, slot: Slot) -> list[str]:
        entries = (self.entries[name] for name in slot.hf_names)
        names = (stored for entry in entries for stored in stored_names(slot, entry))
        return list(dict.fromkeys(names))  # those of experts are one stack

    def _order(self, slot: Slot, part: Part) -> np.ndarray:
        """Which stored row of its tensors each of a part's outputs is."""
        numbers, begin = [], 0
        for name in slot.hf_names:
            ids = []
            for stored in self.entries[name].stored:
                rows = self.file.info(stored).shape[0]
                ids.append(np.arange(begin, begin + rows, dtype=np.int32)[:, None])
                begin += rows
            change = self.entries[name].change
            numbers.append(ids[0] if change.inputs() is not None else change.apply(ids))
        order = output_order(slot, self.config, numbers)
        before = self._parts(slot)[: part.tensors.start or 0]
        begin = sum(self.file.info(name).shape[0] for name in before)
        whole = order.reshape(matmul_shape(slot, self.config)[1])
        return whole[part.index].reshape(-1) - begin


def _addresses(blocks: np.ndarray) -> np.ndarray:
    """Of rows [*experts, rows, blocks, bytes], each of which lies together."""
    assert blocks.strides[-2:] == (blocks.shape[-1], 1)
    found = np.uint64(blocks.ctypes.data)
    for count, stride in zip(blocks.shape[:-2], blocks.strides[:-2], strict=True):
        found = np.asarray(found)[..., None] + np.arange(count, dtype=np.uint64) * np.uint64(stride)
    return np.asarray(found)


def stored_names(slot: Slot, entry: Entry) -> tuple[str, ...]:
    """The stored tensors of a checkpoint's that a weight is made of."""
    layout = slot.line.layout
    if isinstance(layout, HeadPart) and len(entry.stored) > 1:
        return (entry.stored[layout.kind],)
    return entry.stored


PERMUTED = (
    "llama", "smollm3", "mixtral", "granite", "granitemoehybrid", "mistral", "ministral3",
)  # fmt: skip
"""Families whose q and k rows the converter permutes, in layers without RoPE too."""
MOST_FURTHER = 64
"""Layers that predict further tokens."""


def tensor_entries(family: str, config: Decoder, present: Collection[str] = ()) -> dict[str, Entry]:
    """By a checkpoint's name the stored tensors and their change.

    Args:
        present: the file's tensors, where there is one.
    """
    table = _OTHERS.get(family, _LAYERS | _DENSE)
    delta = next((x.attention for x in config.layers if isinstance(x.attention, GatedDelta)), None)
    if delta is not None:
        table = _less_one(table) | _delta(delta)
    if isinstance(config.attention, LatentAttention) and f"{_KV_B}.weight" not in present:
        part = config.attention
        stacks = HeadStacks(part.num_heads, (part.nope_dim, part.value_dim))
        table = table | {f"{_ATTN}.kv_b_proj.weight": (_K_B_AND_V_B, stacks)}
    found = {}
    for hf, (stored, change) in table.items():
        for layer in range(config.num_layers) if "{i}" in hf else [0]:
            names = tuple(s.replace("{i}", str(layer)) for s in stored)
            name = hf.replace("{i}", str(layer))
            if config.moe is None or "{e}" not in name:
                found[name] = Entry(names, change)
                continue
            for expert in range(config.moe.num_experts):
                found[name.replace("{e}", str(expert))] = Entry(names, change, expert)
    if family in PERMUTED:
        for layer in range(config.num_layers):
            for part, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
                for end in ("weight", "bias"):
                    hf = f"model.layers.{layer}.self_attn.{part}_proj.{end}"
                    found[hf] = Entry(found[hf].stored, Permuted(heads))
    return found


def _renamed(*pairs: tuple[str, str]) -> Table:
    """Weights and biases that only change their name."""
    return {
        f"{name}.{end}": ((f"{stored}.{end}",), KEEP)
        for name, stored in pairs
        for end in ("weight", "bias")
    }


_ATTN, _MLP = "model.layers.{i}.self_attn", "model.layers.{i}.mlp"
_LAYERS = _renamed(
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("model.layers.{i}.input_layernorm", "blk.{i}.attn_norm"),
    (f"{_ATTN}.q_proj", "blk.{i}.attn_q"),
    (f"{_ATTN}.k_proj", "blk.{i}.attn_k"),
    (f"{_ATTN}.v_proj", "blk.{i}.attn_v"),
    (f"{_ATTN}.o_proj", "blk.{i}.attn_output"),
    (f"{_ATTN}.q_norm", "blk.{i}.attn_q_norm"),
    (f"{_ATTN}.k_norm", "blk.{i}.attn_k_norm"),
)
_FUSED = _renamed(
    ("model.layers.{i}.post_attention_layernorm", "blk.{i}.ffn_norm"),
    ("model.layers.{i}.post_self_attn_layernorm", "blk.{i}.post_attention_norm"),
    ("model.layers.{i}.post_mlp_layernorm", "blk.{i}.post_ffw_norm"),
    (f"{_MLP}.gate_up_proj", "blk.{i}.ffn_up"),
    (f"{_MLP}.down_proj", "blk.{i}.ffn_down"),
)
_DENSE = _renamed(
    ("model.layers.{i}.post_attention_layernorm", "blk.{i}.ffn_norm"),
    (f"{_MLP}.gate_proj", "blk.{i}.ffn_gate"),
    (f"{_MLP}.up_proj", "blk.{i}.ffn_up"),
    (f"{_MLP}.down_proj", "blk.{i}.ffn_down"),
)
_POST_NORM = _renamed(
    ("model.layers.{i}.post_attention_layernorm", "blk.{i}.post_attention_norm"),
)
_SANDWICH = _POST_NORM | _renamed(
    ("model.layers.{i}.pre_feedforward_layernorm", "blk.{i}.ffn_norm"),
    ("model.layers.{i}.post_feedforward_layernorm", "blk.{i}.post_ffw_norm"),
)


def _less_one(table: Table) -> Table:
    """A table whose norms the converter adds one to."""
    return {
        name: (stored, LessOne() if "norm.weight" in name else change)
        for name, (stored, change) in table.items()
    }


_SPARSE = "model.layers.{i}.block_sparse_moe"


def _experts(router: str, expert: str, gate: str, up: str, down: str) -> Table:
    """A router, and experts whose tensors are parts of stacks."""
    parts = ((gate, "gate"), (up, "up"), (down, "down"))
    return _renamed((f"{router}.gate", "blk.{i}.ffn_gate_inp")) | {
        f"{expert}.{part}.weight": ((f"blk.{{i}}.ffn_{stored}_exps.weight",), KEEP)
        for part, stored in parts
    }


def _shared(name: str) -> Table:
    """The shared expert."""
    parts = ("gate", "up", "down")
    return _renamed(*((f"{_MLP}.{name}.{p}_proj", f"blk.{{i}}.ffn_{p}_shexp") for p in parts))


_GATE, _UP, _DOWN = (f"blk.{{i}}.ffn_{part}_exps" for part in ("gate", "up", "down"))
_GPT_OSS = _renamed((f"{_MLP}.router", "blk.{i}.ffn_gate_inp")) | {
    f"{_ATTN}.sinks": (("blk.{i}.attn_sinks.weight",), KEEP),
    f"{_MLP}.experts.gate_up_proj": ((f"{_GATE}.weight", f"{_UP}.weight"), Interleaved()),
    f"{_MLP}.experts.gate_up_proj_bias": ((f"{_GATE}.bias", f"{_UP}.bias"), InterleavedBias()),
    f"{_MLP}.experts.down_proj": ((f"{_DOWN}.weight",), Transposed()),
    f"{_MLP}.experts.down_proj_bias": ((f"{_DOWN}.bias",), KEEP),
}
_H = "transformer.h.{i}"
_PRODUCTS = {
    f"{_H}.attn.c_attn": "blk.{i}.attn_qkv",
    f"{_H}.attn.c_proj": "blk.{i}.attn_output",
    f"{_H}.mlp.c_fc": "blk.{i}.ffn_up",
    f"{_H}.mlp.c_proj": "blk.{i}.ffn_down",
}
_GPT2 = _renamed(
    ("transformer.wte", "token_embd"),
    ("transformer.wpe", "position_embd"),
    ("transformer.ln_f", "output_norm"),
    ("lm_head", "output"),
    (f"{_H}.ln_1", "blk.{i}.attn_norm"),
    (f"{_H}.ln_2", "blk.{i}.ffn_norm"),
    *_PRODUCTS.items(),
) | {f"{name}.weight": ((f"{stored}.weight",), Transposed()) for name, stored in _PRODUCTS.items()}

_DELTA = "model.layers.{i}.linear_attn"


def _delta(part: GatedDelta) -> Table:
    """The gated delta rule; Qwen 3.5's files have value heads in an order of their own."""
    values = part.group * part.value_dim
    if part.fused:
        kinds = (part.key_dim, part.key_dim, values, values)
        order = {"qkvz": HeadKinds(part.num_heads, kinds)}
        stored = {"qkvz": ("attn_qkv.weight", "attn_gate.weight"), "ba": ("ssm_ba.weight",)}
        heads, kernel, out = KEEP, Kernel(), KEEP
    else:
        size, keys = (part.num_heads, part.group), 2 * part.num_heads * part.key_dim
        heads, out = Tiled(*size), Tiled(*size, part.value_dim, is_columns=True)
        rows = Tiled(*size, part.value_dim, keys)
        order = {"qkv": rows, "z": Tiled(*size, part.value_dim), "b": heads, "a": heads}
        names = {"qkv": "attn_qkv", "z": "attn_gate", "b": "ssm_beta", "a": "ssm_alpha"}
        stored = {name: (f"{gguf}.weight",) for name, gguf in names.items()}
        kernel = Kernel(rows)
    found = {
        f"in_proj_{name}.weight": (names, order.get(name, KEEP)) for name, names in stored.items()
    } | {
        "conv1d.weight": (("ssm_conv1d.weight",), kernel),
        "A_log": (("ssm_a",), Decay(heads)),
        "dt_bias": (("ssm_dt.bias",), heads),
        "norm.weight": (("ssm_norm.weight",), KEEP),
        "out_proj.weight": (("ssm_out.weight",), out),
    }
    return {
        f"{_DELTA}.{name}": (tuple(f"blk.{{i}}.{one}" for one in names), change)
        for name, (names, change) in found.items()
    }


_FEED, _CONV = "model.layers.{i}.feed_forward", "model.layers.{i}.conv"
_LFM2 = _renamed(
    ("model.embed_tokens", "token_embd"),
    ("model.embedding_norm", "token_embd_norm"),
    ("lm_head", "output"),
    ("model.layers.{i}.operator_norm", "blk.{i}.attn_norm"),
    ("model.layers.{i}.ffn_norm", "blk.{i}.ffn_norm"),
    *((f"{_ATTN}.{part}_proj", f"blk.{{i}}.attn_{part}") for part in "qkv"),
    *((f"{_ATTN}.{part}_layernorm", f"blk.{{i}}.attn_{part}_norm") for part in "qk"),
    (f"{_ATTN}.out_proj", "blk.{i}.attn_output"),
    (f"{_FEED}.w1", "blk.{i}.ffn_gate"),
    (f"{_FEED}.w3", "blk.{i}.ffn_up"),
    (f"{_FEED}.w2", "blk.{i}.ffn_down"),
    (f"{_CONV}.in_proj", "blk.{i}.shortconv.in_proj"),
    (f"{_CONV}.out_proj", "blk.{i}.shortconv.out_proj"),
) | {f"{_CONV}.conv.weight": (("blk.{i}.shortconv.conv.weight",), Kernel())}
_QWEN3_EXPERTS = _experts(_MLP, f"{_MLP}.experts.{{e}}", "gate_proj", "up_proj", "down_proj")
_GATED_SHARED = _shared("shared_expert") | {
    f"{_MLP}.shared_expert_gate.weight": (("blk.{i}.ffn_gate_inp_shexp.weight",), Row())
}
_STACKED = _renamed((f"{_MLP}.gate", "blk.{i}.ffn_gate_inp")) | {
    f"{_MLP}.experts.gate_up_proj": ((f"{_GATE}.weight", f"{_UP}.weight"), Halves()),
    f"{_MLP}.experts.down_proj": ((f"{_DOWN}.weight",), KEEP),
}
_SHARED_MLP = "model.layers.{i}.shared_mlp"
_GRANITE4 = _renamed(("model.layers.{i}.post_attention_layernorm", "blk.{i}.ffn_norm")) | {
    f"{_SHARED_MLP}.input_linear.weight": (
        ("blk.{i}.ffn_gate.weight", "blk.{i}.ffn_up.weight"), Halves(),
    ),
    f"{_SHARED_MLP}.output_linear.weight": (("blk.{i}.ffn_down.weight",), KEEP),
}  # fmt: skip
_SIGMOID_EXPERTS = _QWEN3_EXPERTS | _shared("shared_experts") | {
    f"{_MLP}.gate.e_score_correction_bias": (("blk.{i}.exp_probs_b.bias",), KEEP)
}  # fmt: skip
_KV_B, _K_B_AND_V_B = "blk.0.attn_kv_b", ("blk.{i}.attn_k_b.weight", "blk.{i}.attn_v_b.weight")
_DEEPSEEK = _SIGMOID_EXPERTS | _renamed(
    (f"{_ATTN}.q_a_proj", "blk.{i}.attn_q_a"),
    (f"{_ATTN}.q_a_layernorm", "blk.{i}.attn_q_a_norm"),
    (f"{_ATTN}.q_b_proj", "blk.{i}.attn_q_b"),
    (f"{_ATTN}.kv_a_proj_with_mqa", "blk.{i}.attn_kv_a_mqa"),
    (f"{_ATTN}.kv_a_layernorm", "blk.{i}.attn_kv_a_norm"),
    (f"{_ATTN}.kv_b_proj", "blk.{i}.attn_kv_b"),
)
_HUNYUAN = {"q": "query", "k": "key"}
_LAYER = "model.layers.{i}"
_GEMMA4 = _renamed(
    ("model.embed_tokens_per_layer", "per_layer_token_embd"),
    ("model.per_layer_model_projection", "per_layer_model_proj"),
    ("model.per_layer_projection_norm", "per_layer_proj_norm"),
    (f"{_LAYER}.per_layer_input_gate", "blk.{i}.inp_gate"),
    (f"{_LAYER}.per_layer_projection", "blk.{i}.proj"),
    (f"{_LAYER}.post_per_layer_input_norm", "blk.{i}.post_norm"),
    (f"{_LAYER}.pre_feedforward_layernorm_2", "blk.{i}.pre_ffw_norm_2"),
    (f"{_LAYER}.post_feedforward_layernorm_1", "blk.{i}.post_ffw_norm_1"),
    (f"{_LAYER}.post_feedforward_layernorm_2", "blk.{i}.post_ffw_norm_2"),
    (f"{_LAYER}.router.proj", "blk.{i}.ffn_gate_inp"),
) | {
    f"{_LAYER}.{name}": ((f"blk.{{i}}.{stored}",), KEEP)
    for name, stored in {
        "layer_scalar": "layer_output_scale.weight",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "experts.down_proj": "ffn_down_exps.weight",
    }.items()
}
_OTHERS = {
    "gpt2": _GPT2,
    "hunyuan_v1_dense": {
        re.sub(r"\.(q|k)_norm\.", lambda m: f".{_HUNYUAN[m[1]]}_layernorm.", name): entry
        for name, entry in (_LAYERS | _DENSE).items()
    },
    "exaone4": _LAYERS | _DENSE | _SANDWICH,
    "glm4": _LAYERS | _FUSED,
    "phi3": _LAYERS | _FUSED | _renamed((f"{_ATTN}.qkv_proj", "blk.{i}.attn_qkv")),
    "gpt_oss": _LAYERS | _POST_NORM | _GPT_OSS,
    "seed_oss": _LAYERS | _DENSE | _POST_NORM,
    "gemma3_text": _less_one(_LAYERS | _DENSE | _SANDWICH),
    "gemma4_text": _LAYERS | _DENSE | _SANDWICH | _GEMMA4,
    "olmo2": _LAYERS | _DENSE | _SANDWICH,
    "olmo3": _LAYERS | _DENSE | _SANDWICH,
    "granitemoehybrid": _LAYERS | _GRANITE4,
    "lfm2": _LFM2,
    "qwen3_moe": _LAYERS | _DENSE | _QWEN3_EXPERTS,
    "qwen2_moe": _LAYERS | _DENSE | _QWEN3_EXPERTS | _GATED_SHARED,
    "qwen3_next": _LAYERS | _DENSE | _POST_NORM | _QWEN3_EXPERTS | _GATED_SHARED,
    "qwen3_5_text": _LAYERS | _DENSE | _POST_NORM,
    "qwen3_5_moe_text": _LAYERS | _POST_NORM | _STACKED | _GATED_SHARED,
    "glm4_moe": _LAYERS | _DENSE | _POST_NORM | _SIGMOID_EXPERTS,
    "deepseek_v2": _LAYERS | _DENSE | _DEEPSEEK,
    "deepseek_v3": _LAYERS | _DENSE | _DEEPSEEK,
    "mixtral": _LAYERS | _DENSE | _experts(_SPARSE, f"{_SPARSE}.experts.{{e}}", "w1", "w3", "w2"),
}
"""Tables of the families whose tensors are not those of LLaMA."""
