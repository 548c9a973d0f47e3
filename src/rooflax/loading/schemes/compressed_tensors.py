"""compressed-tensors, as llm-compressor and vLLM write it: groups of modules, each with arguments.

    pack-quantized   X.weight_packed int32 [out, in * bits / 32], offset codes from the lowest bits
                     on; X.weight_scale; X.weight_zero_point int32 [out * bits / 32, groups];
                     X.weight_g_idx [in], the group of each input, -1 where they are in order
    int-quantized, float-quantized, naive-quantized
                     X.weight int8 or e4m3; X.weight_scale; X.weight_zero_point int8
    nvfp4-pack-quantized, mxfp4-pack-quantized
                     X.weight_packed uint8; X.weight_scale; X.weight_global_scale, a divisor

Which of these a module is, its tensors say; their arguments are those of the group with its name,
a pattern that matches it, or its class as a target: Linear, or Embedding.

Source: compressed-tensors 0.20, compressors/ and quantization/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    unpacked,
)
from rooflax.loading.schemes.floats import fp8_weight, is_unused, mxfp4_weight, nvfp4_weight
from rooflax.models.config_reader import ConfigReader

FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision",
)  # fmt: skip
PATTERN = "re:"
STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")


@dataclass(frozen=True)
class Arguments:
    """Quantization arguments of a group of weights.

    Attributes:
        group: inputs that share a scale, of the strategies of groups.
        block: outputs and inputs that do.
        ordered: the inputs of a group lie together.
    """

    bits: int
    symmetric: bool
    strategy: str
    group: int
    block: tuple[int, int] | None
    ordered: bool


@dataclass(frozen=True)
class CompressedTensors:
    """Arguments by target: names of modules and of classes, and patterns in their order."""

    names: Mapping[str, Arguments]
    patterns: list[tuple[Any, Arguments]]

    def find(self, tensors: Tensors) -> CodedTensors:
        coded, unused = {}, {name for name in tensors.names if is_unused(name)}
        for name in tensors.names:
            module, _, end = name.rpartition(".")
            if end == "weight_packed" or (end == "weight" and f"{name}_scale" in tensors):
                coded[f"{module}.weight"] = self._coded(tensors, module, name)
            elif name.endswith(".weight") and tensors.info(name).dtype in ("I8", "F8_E4M3"):
                raise tensors.error(name, "has no weight_scale beside it")
        return CodedTensors(coded, unused)

    def _arguments(self, module: str) -> Arguments | None:
        matches = (a for pattern, a in self.patterns if pattern.match(module))
        is_table = module.rpartition(".")[2].startswith("embed")
        by_class = self.names.get("Linear")  # GPT-NeoX's embed_out too
        by_class = (self.names.get("Embedding") or by_class) if is_table else by_class
        return self.names.get(module) or next(matches, None) or by_class

    def _coded(self, tensors: Tensors, module: str, name: str) -> Coded:
        a, kind, scale = self._arguments(module), tensors.info(name).dtype, f"{module}.weight_scale"
        if a is None:
            raise tensors.error(name, "is of no group of config.json's config_groups")
        if name.endswith("_packed") and kind == "U8":
            if a.bits == 4 and a.strategy == "tensor_group":
                whole = f"{module}.weight_global_scale"
                return nvfp4_weight(tensors, name, scale, whole, divides=True, group=a.group)
            return mxfp4_weight(tensors, name, scale)
        if kind.startswith("F8_"):
            return fp8_weight(tensors, name, scale, a.block)
        if name.endswith("_packed"):
            return _whole_numbers(tensors, module, name, a, packed=True)
        if kind != "I8":
            raise tensors.error(name, f"is {kind} and has scales, wanted I8 or F8_E4M3")
        return _whole_numbers(tensors, module, name, a, packed=False)


def _whole_numbers(
    tensors: Tensors, module: str, name: str, a: Arguments, *, packed: bool
) -> Coded:
    scale, zero, order, size = (
        f"{module}.weight_{end}" for end in ("scale", "zero_point", "g_idx", "shape")
    )
    info = tensors.expect(name, None, "I32" if packed else "I8", beside=name)
    if len(info.shape) != 2:
        raise tensors.error(name, f"has the shape {list(info.shape)}, wanted [out, in]")
    outer, inner = info.shape
    inner = inner * 32 // a.bits if packed else inner
    if a.strategy == "block":
        raise tensors.error(name, "has blocks of whole numbers, which rooflax does not read")
    groups = tensors.num_groups(name, inner, a.group or inner)
    expect = partial(tensors.expect, beside=name)
    stated = expect(scale, None, *FLOATS)
    wanted = {(1,), ()} if a.strategy == "tensor" else {(outer, groups)}
    if stated.shape not in wanted | ({(outer,)} if a.strategy == "channel" else set()):
        raise tensors.error(
            scale, f"is {list(stated.shape)}, wanted one for each {a.strategy} of {[outer, inner]}"
        )
    stored, is_one, bits = [name, scale], a.strategy == "tensor", a.bits if packed else 8
    if not a.symmetric:
        packs = packed and not is_one
        shape = (-(-outer * bits // 32), groups) if packs else stated.shape
        expect(zero, shape, "I32" if packs else "I8")
        stored.append(zero)
    if order in tensors:
        expect(order, (inner,), "I32", "I64")
        stored.append(order)
    if size in tensors:
        expect(size, (2,), "I64", "I32")
        stored.append(size)
    half = 1 << bits - 1

    def read_zeros() -> np.ndarray | int:
        if a.symmetric:
            return half
        if packed and not is_one:
            return unpacked(tensors.read(zero).T, bits, outer).T
        return by_output(tensors.read(zero).view(np.uint8) ^ np.uint8(half))

    def by_output(array: np.ndarray) -> np.ndarray:
        return np.broadcast_to(array.reshape(-1, groups), (outer, groups))

    def read() -> Groups:
        if size in tensors and (is_shape := tensors.read(size)).tolist() != [outer, inner]:
            raise tensors.error(size, f"says {is_shape.tolist()}, and the codes {[outer, inner]}")
        codes = tensors.read(name)
        if packed:
            codes = unpacked(codes, bits, inner)
        else:
            codes = codes.view(np.uint8) ^ np.uint8(half)
        return Groups(codes, by_output(tensors.read(scale)), read_zeros(), read_order())

    def read_order() -> np.ndarray | None:
        of_input = tensors.read(order) if order in tensors else None
        if of_input is None or (of_input == -1).all():
            return None
        if a.ordered:
            if np.array_equal(of_input, np.arange(inner) // (inner // groups)):
                return None
            raise tensors.error(order, "has another order of inputs, and config.json no actorder")
        if of_input.min() < 0 or of_input.max() >= groups:
            first, last = of_input.min(), of_input.max()
            raise tensors.error(order, f"names groups {first} to {last} of {groups}")
        return of_input

    in_order = a.ordered or groups == 1 or order not in tensors
    return affine(
        (outer, inner), tuple(stored), bits=bits, group=inner // groups if in_order else 0,
        scales=stated.dtype, zero=half if a.symmetric else None, read=read,
        error=partial(tensors.error, zero),
    )  # fmt: skip


def read_compressed(reader: ConfigReader) -> CompressedTensors:
    """The scheme of a quantization_config; errors as of `gptq.read_gptq`."""
    reader.choice("format", FORMATS, "mixed-precision")
    reader.choice("quantization_status", ("compressed", "frozen"), "compressed")
    sparsity = reader.get("sparsity_config", {})
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise UnsupportedModelError(
            f"config.json has sparsity_config = {sparsity!r:.80}, which rooflax does not read."
        )
    reader.expect("transform_config", {}, None)
    reader.waive("ignore", "kv_cache_scheme", "global_compression_ratio", "version")
    groups = reader.part("config_groups")
    names: dict[str, Arguments] = {}
    patterns = []
    for key in list(reader.get("config_groups")):
        group = groups.part(key)
        arguments, targets = _arguments(group), group.get("targets")
        if not isinstance(targets, list) or not all(isinstance(one, str) for one in targets):
            raise CheckpointError(
                f"config.json has targets = {targets!r:.80}; it must be a list of names."
            )
        if arguments is None:
            continue
        for target in targets:
            if target.startswith(PATTERN):
                rule = module_pattern(target.removeprefix(PATTERN), "config.json: targets")
                patterns.append((rule, arguments))
            else:
                names[target] = arguments
    return CompressedTensors(names, patterns)


def _arguments(group: ConfigReader) -> Arguments | None:
    """Reads a group's arguments; None if its weights are plain."""
    group.waive("input_activations", "output_activations")
    group.choice("format", FORMATS, "mixed-precision")
    if group.get("weights", None) is None:
        return None
    reader = group.part("weights")
    kind = reader.choice("type", ("int", "float"), "int")
    bits, size = reader.size("num_bits", 8, most=8), reader.get("group_size", None)
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = reader.choice("strategy", STRATEGIES, inferred)
    in_groups = strategy in ("group", "tensor_group")
    group_size = reader.size("group_size") if in_groups else 0
    block = reader.get("block_structure", None)
    if strategy == "block":
        block = reader.sizes("block_structure", None)
    order = reader.get("actorder", False)
    if order not in (False, True, "static", "weight", "group", "dynamic"):
        raise UnsupportedModelError(f"config.json has actorder = {order!r:.80}.")
    if kind == "float" and bits not in (4, 8):
        raise UnsupportedModelError(f"config.json has floats of num_bits = {bits}.")
    reader.expect("dynamic", False)
    reader.waive("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "is_mse")
    symmetric = reader.flag("symmetric", True)
    ordered = order not in (True, "group", "dynamic")
    return Arguments(bits, symmetric, strategy, group_size, block, ordered)
