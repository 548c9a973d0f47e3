"""AWQ and GPTQ: whole numbers of a few bits with a scale and a zero point per group of inputs.

    GPTQ   X.qweight int32 [in * bits / 32, out], inputs from the lowest bits on; X.qzeros
           [groups, out * bits / 32]; X.scales [groups, out]; X.g_idx [in], the group of each input
    AWQ    X.qweight int32 [in, out / 8]; X.qzeros [groups, out / 8]; the eight outputs of a word in
           the order 0, 2, 4, 6, 1, 3, 5, 7; X.scales [groups, out]

A weight is (q - z) * s, exact in float32. Zero points of GPTQ's first version are stored less one,
modulo 2^bits, as AutoGPTQ reads them.

Source: AutoGPTQ, nn_modules/qlinear; GPTQModel, utils/model.py; AutoAWQ, utils/packing_utils.py;
auto-round, inference/convert_model.py and export/export_to_autoround/export.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import numpy as np

from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.loading.patterns import module_pattern
from rooflax.loading.schemes.coded import (
    FLOATS,
    Coded,
    CodedTensors,
    Groups,
    Tensors,
    affine,
    modules,
    unpacked,
)
from rooflax.models.config_reader import ConfigReader

WHOLE = -1
"""The group size of a weight whose inputs share one scale."""
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Place in a word of each of eight outputs."""


@dataclass(frozen=True)
class GptqSettings:
    """Settings in config.json, of all modules or of one.

    Attributes:
        group: inputs that share a scale.
        symmetric: all zero points are half of the codes.
        ordered: the inputs of a group lie together.
    """

    bits: int
    group: int
    symmetric: bool
    ordered: bool

    def changed(self, reader: ConfigReader) -> GptqSettings:
        """Copies the settings with a module's own values."""
        settings = GptqSettings(
            _bits(reader, "bits", self.bits),
            _group(reader, "group_size", self.group),
            reader.flag("sym", self.symmetric),
            not reader.flag("desc_act", not self.ordered),
        )
        reader.finish()
        return settings


@dataclass(frozen=True)
class Gptq:
    """GPTQ's tensors.

    Attributes:
        less_one: zero points are stored less one.
        by_pattern: patterns of modules with settings of their own, the first match counting.
    """

    settings: GptqSettings
    less_one: bool
    by_pattern: list[tuple[Any, GptqSettings]] = field(default_factory=list)

    def find(self, tensors: Tensors) -> CodedTensors:
        coded = {n: self._coded(tensors, m) for n, m in modules(tensors, "qweight").items()}
        return CodedTensors(coded, set())

    def _coded(self, tensors: Tensors, module: str) -> Coded:
        s = next(
            (rule for pattern, rule in self.by_pattern if pattern.match(module)), self.settings
        )
        name, order = f"{module}.qweight", f"{module}.g_idx"
        words = _matrix(tensors, name)
        inner, outer = words[0] * 32 // s.bits, words[1]
        groups = tensors.num_groups(name, inner, inner if s.group == WHOLE else s.group)
        expect = partial(tensors.expect, beside=name)
        expect(f"{module}.qzeros", (groups, -(-outer * s.bits // 32)), "I32")
        scales = expect(f"{module}.scales", (groups, outer), *FLOATS)
        stored = [name, f"{module}.qzeros", f"{module}.scales"]
        if order in tensors:
            expect(order, (inner,), "I32", "I64")
            stored.append(order)
        in_order = s.ordered or groups == 1 or order not in tensors

        def read() -> Groups:
            first, last = np.uint8(self.less_one), np.uint8(2**s.bits - 1)
            codes = unpacked(tensors.read(name).T, s.bits, inner)
            zeros = (unpacked(tensors.read(stored[1]), s.bits, outer) + first) & last
            order_of_inputs = _order(tensors, order, groups, in_order)
            return Groups(codes, tensors.read(stored[2]).T, zeros.T, order_of_inputs)

        return affine(
            (outer, inner), tuple(stored), bits=s.bits, group=inner // groups if in_order else 0,
            scales=scales.dtype, zero=1 << s.bits - 1 if s.symmetric else None, read=read,
            error=partial(tensors.error, stored[1]),
        )  # fmt: skip


@dataclass(frozen=True)
class Awq:
    """AWQ's tensors, of four bits.

    Attributes:
        symmetric: all zero points are half of the codes.
    """

    group: int
    symmetric: bool = False

    def find(self, tensors: Tensors) -> CodedTensors:
        coded = {n: self._coded(tensors, m) for n, m in modules(tensors, "qweight").items()}
        return CodedTensors(coded, set())

    def _coded(self, tensors: Tensors, module: str) -> Coded:
        name, zeros, scales = (f"{module}.{end}" for end in ("qweight", "qzeros", "scales"))
        inner, words = _matrix(tensors, name)
        group = inner if self.group == WHOLE else self.group
        outer, groups = words * 8, tensors.num_groups(name, inner, group)
        expect = partial(tensors.expect, beside=name)
        expect(zeros, (groups, words), "I32")
        kind = expect(scales, (groups, outer), *FLOATS).dtype

        def read() -> Groups:
            codes, zero_codes = (_awq_codes(tensors.read(n)) for n in (name, zeros))
            return Groups(codes, tensors.read(scales).T, zero_codes)

        return affine(
            (outer, inner), (name, zeros, scales), bits=4, group=inner // groups, scales=kind,
            zero=8 if self.symmetric else None, read=read, error=partial(tensors.error, zeros),
        )  # fmt: skip


def _order(tensors: Tensors, name: str, groups: int, in_order: bool) -> np.ndarray | None:
    """The group of each input, if they do not lie together."""
    if name not in tensors or groups == 1:
        return None
    order = tensors.read(name)
    if order.min() < 0 or order.max() >= groups:
        raise tensors.error(name, f"names groups from {order.min()} to {order.max()} of {groups}")
    if np.array_equal(order, np.arange(len(order)) // (len(order) // groups)):
        return None
    if in_order:
        raise tensors.error(name, "has another order of inputs, and config.json no desc_act")
    return order


def _awq_codes(words: np.ndarray) -> np.ndarray:
    """[outputs, rows]."""
    transposed = np.ascontiguousarray(words.view(np.uint32).T)
    codes = np.empty((len(transposed), 8, transposed.shape[1]), np.uint8)
    for output, place in enumerate(AWQ_PLACES):
        codes[:, output] = transposed >> np.uint32(4 * place) & np.uint32(15)
    return codes.reshape(-1, transposed.shape[1])


def _matrix(tensors: Tensors, name: str) -> tuple[int, ...]:
    info = tensors.info(name)
    if info.dtype != "I32" or len(info.shape) != 2 or 0 in info.shape:
        raise tensors.error(name, f"is {info.dtype} {list(info.shape)}, wanted I32 [rows, columns]")
    return info.shape


def read_gptq(reader: ConfigReader) -> Gptq:
    """The scheme of a quantization_config.

    Raises:
        UnsupportedModelError: a key that is not known, or a value that is not read.
        CheckpointError: an impossible value.
    """
    settings = GptqSettings(
        _bits(reader, "bits"),
        _group(reader, "group_size", 128),
        reader.flag("sym", True),
        not reader.flag("desc_act", False),
    )
    key = "checkpoint_format" if reader.has("checkpoint_format") else "format"
    version = reader.choice(key, ("gptq", "gptq_v2"), "gptq")
    reader.choice("format", (version,), version)
    reader.expect("method", "gptq")
    reader.expect("lm_head", False, True)
    reader.expect("pack_dtype", "int32", None)
    reader.waive(*UNUSED)
    rules, dynamic = [], reader.get("dynamic", {})
    if not isinstance(dynamic, dict):
        raise CheckpointError(f"config.json has dynamic = {dynamic!r:.80}; it must be an object.")
    for pattern, values in dynamic.items():
        if not isinstance(values, dict):
            raise CheckpointError(f"config.json has dynamic {pattern!r:.80} without an object.")
        if not pattern.startswith("-:"):  # those are not quantized
            rule = module_pattern(pattern.removeprefix("+:"), "config.json: dynamic")
            named = values | {"model_type": reader.model_type}  # in sentences
            rules.append((rule, settings.changed(reader.inner("dynamic", named))))
    return Gptq(settings, version == "gptq", rules)


def read_awq(reader: ConfigReader) -> Awq:
    """The scheme of a quantization_config; errors as of `read_gptq`."""
    reader.choice("version", ("gemm", "GEMM"), "gemm")
    bits = "w_bit" if reader.has("w_bit") else "bits"
    reader.expect(bits, 4)
    reader.expect("method", "awq")
    has_zeros = reader.flag("zero_point", True)
    for key in ("format", "checkpoint_format"):
        reader.expect(key, "gemm", "GEMM")
    reader.expect("dynamic", {}, None)
    reader.waive("sym", "desc_act", "lm_head", "pack_dtype", *UNUSED)
    size = "q_group_size" if reader.has("q_group_size") else "group_size"
    return Awq(_group(reader, size, 128), not has_zeros)


def read_auto_round(reader: ConfigReader) -> Gptq | Awq:
    """The scheme of auto-round, which packs as GPTQ or AWQ under names of its own; errors as of
    `read_gptq`."""
    is_older = not reader.has("packing_format") and reader.has("backend")
    key = "backend" if is_older else "packing_format"
    layout = PACKINGS[reader.choice(key, tuple(PACKINGS), "auto_round:auto_gptq")]
    _expect_whole_numbers(reader)
    settings = GptqSettings(
        _bits(reader, "bits"), _group(reader, "group_size", 128), reader.flag("sym", True), True
    )
    reader.waive("backend", *UNUSED, *OF_AUTO_ROUND)
    by_name, by_pattern = [], []
    reader.assume(extra_config={})
    others = reader.part("extra_config")
    for name in others.objects():
        part = others.part(name)
        if part.get("bits", settings.bits) in UNQUANTIZED:
            part.waive("*")  # its tensors are plain
            continue
        _expect_whole_numbers(part)
        changed = settings.changed(part)
        where = "config.json: extra_config"
        by_name.append((module_pattern(f"{re.escape(name)}$", where), changed))
        by_pattern.append((module_pattern(f".*(?:{name})", where), changed))
    rules = [*by_name, *by_pattern]
    if layout is not Layout.AWQ:
        return Gptq(settings, layout is Layout.GPTQ, rules)
    if settings.bits != 4 or any(changed != settings for _, changed in rules):
        raise UnsupportedModelError("config.json has AWQ's layout with others than 4 bits alike.")
    return Awq(settings.group, settings.symmetric)


def _expect_whole_numbers(reader: ConfigReader) -> None:
    """Rejects floats and rounded activations, of which auto-round has layouts too."""
    reader.expect("data_type", "int")
    reader.expect("act_bits", *UNQUANTIZED, None)
    reader.expect("super_bits", None)
    reader.waive("act_*", "super_group_size")


class Layout(Enum):
    """Layout of auto-round's tensors: AWQ's, GPTQ's, or that of GPTQ's second version."""

    AWQ, GPTQ, GPTQ_V2 = range(3)


PACKINGS = {
    "auto_round:auto_awq": Layout.AWQ, "auto_round:awq": Layout.AWQ,
    "auto_round:auto_gptq": Layout.GPTQ, "auto_round:gptq": Layout.GPTQ,
    "auto_round:gptq:exllamav2": Layout.GPTQ, "auto_round:gptq:tritonv2": Layout.GPTQ,
    "auto_round": Layout.GPTQ_V2, "auto_round:gptqmodel": Layout.GPTQ_V2,
    "auto_round:exllamav2": Layout.GPTQ_V2, "auto_round:tritonv2": Layout.GPTQ_V2,
}  # fmt: skip
UNQUANTIZED = (16, 32)
"""Bits of what is not quantized."""
OF_AUTO_ROUND = (
    "autoround_version", "iters", "lr", "minmax_lr", "nsamples", "seqlen", "batch_size", "amp",
    "low_gpu_mem_usage", "low_cpu_mem_usage", "enable_*", "disable_*", "gradient_accumulate_steps",
    "to_quant_block_names", "quant_block_list", "scale_dtype", "model_dtype", "momentum",
    "not_use_best_mse", "dynamic_max_gap", "quant_lm_head", "use_quant_input", "static_kv_dtype",
    "train_bs", "supported_types", "n_blocks", "nblocks", "device",
)  # fmt: skip
"""Keys of quantization."""
UNUSED = (
    "modules_to_not_convert", "ignore", "modules_in_block_to_quantize", "block_name_to_quantize",
    "module_name_preceding_first_block", "dataset", "damp_percent", "damp_auto_increment",
    "static_groups", "true_sequential", "batch_size", "pad_token_id", "use_cuda_fp16",
    "model_seqlen", "cache_block_outputs", "tokenizer", "backend", "use_exllama",
    "disable_exllama", "exllama_config", "max_input_length", "model_name_or_path",
    "model_file_base_name", "is_marlin_format", "do_fuse", "modules_to_fuse",
    "fuse_max_seq_len", "meta", "quantizer", "act_group_aware", "hessian", "mse",
)  # fmt: skip
"""Keys of quantization, of kernels, and of modules that are found by their tensors anyway."""


def _bits(reader: ConfigReader, key: str, *default: int) -> int:
    value = reader.size(key, *default, most=8)
    if value not in (2, 3, 4, 8):
        raise CheckpointError(f"config.json has {key} = {value}; it must be 2, 3, 4 or 8.")
    return value


def _group(reader: ConfigReader, key: str, default: int) -> int:
    if reader.get(key, default) == WHOLE:
        return WHOLE
    return reader.size(key, default)
