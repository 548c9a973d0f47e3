"""MLX's quantization: whole numbers q * s + b with a scale and a bias per group of inputs, or
floats with a scale per group, as the mode says.

    affine        X.weight uint32 [out, in * bits / 32], inputs from the lowest bits on; X.scales
                  and X.biases [out, groups]
    mxfp4, mxfp8  X.weight likewise, e2m1 or e4m3; X.scales uint8 [out, in / 32], powers of two
    nvfp4         X.weight likewise, e2m1; X.scales uint8 [out, in / 16], e4m3

Experts lie in one stack, X.switch_mlp.gate_proj, [experts, out, ...]; those of Mixtral, whose names
are others in its own checkpoints, in X.block_sparse_moe.switch_mlp.gate_proj; those of GPT-OSS in
X.experts.gate_proj and up_proj, whose outputs alternate in its own checkpoints.

Source: mlx, python/src/ops.cpp (quantize) and python/mlx/nn/layers/quantized.py; mlx-lm,
mlx_lm/utils.py, models/switch_layers.py, models/mixtral.py and models/gpt_oss.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np

from rooflax.errors import CheckpointError
from rooflax.loading.schemes.coded import FLOAT16S, FLOATS, Coded, CodedTensors, Tensors, unpacked
from rooflax.loading.schemes.floats import e2m1_numbers, scales_of_numbers
from rooflax.models.config_reader import ConfigReader
from rooflax.ops import accelerator
from rooflax.ops.format_names import GROUP
from rooflax.ops.weights.blocks import Nvfp4
from rooflax.ops.weights.formats import E8M0_VALUES

AFFINE, BITS = "affine", (2, 3, 4, 5, 6, 8)
FORMATS = {2: "q4_1-a16", 3: "q4_1-a16", 4: "q4_1-a16", 5: "q5_1-a16"}
"""On CPU, by bits."""
MODES = {
    "mxfp4": (4, GROUP, "mxfp4-a16"), "mxfp8": (8, GROUP, "fp8-a16-g32"),
    "nvfp4": (4, 16, "nvfp4-a16"),
}  # fmt: skip
"""Bits, inputs of a group and format of the modes whose numbers are floats."""
STACK, FUSED_STACK = ".switch_mlp.", ".experts."
MIXTRALS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
"""Its own names of an expert's matmuls."""
ALTERNATING = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""GPT-OSS's own names, and those of the matmuls whose outputs alternate in them."""


@dataclass(frozen=True)
class Settings:
    """Quantization of a module."""

    bits: int
    group: int
    mode: str = AFFINE


@dataclass(frozen=True)
class Mlx:
    """Quantization of all modules and of some."""

    settings: Settings
    by_module: Mapping[str, Settings]

    def find(self, tensors: Tensors) -> CodedTensors:
        coded: dict[str, Coded] = {}
        fused: set[str] = set()
        for name in tensors.names:
            module, _, end = name.rpartition(".")
            if end != "scales":
                continue
            shape = tensors.expect(f"{module}.weight", None, "U32", beside=name).shape
            layer, _, matmul = module.rpartition(STACK if STACK in name else FUSED_STACK)
            if len(shape) == 2:
                coded[f"{module}.weight"] = self._coded(tensors, module, None)
            elif len(shape) != 3 or not layer:
                raise tensors.error(f"{module}.weight", f"has the shape {list(shape)}")
            elif STACK in name:
                is_mixtral = layer.endswith("block_sparse_moe")
                matmul = MIXTRALS.get(matmul, matmul) if is_mixtral else matmul
                for expert in range(shape[0]):
                    expert_module = f"{layer}.experts.{expert}.{matmul}"
                    coded[f"{expert_module}.weight"] = self._coded(tensors, module, expert)
            else:
                fused.add(f"{layer}{FUSED_STACK}")
        for stack in fused:
            for name, matmuls in ALTERNATING.items():
                modules = [f"{stack}{matmul}" for matmul in matmuls]
                coded[f"{stack}{name}"] = self._stack(tensors, modules)
                biases = [f"{module}.bias" for module in modules]
                if biases[0] in tensors:
                    coded[f"{stack}{name}_bias"] = _alternating_biases(tensors, biases)
        return CodedTensors(coded, set())

    def _stack(self, tensors: Tensors, modules: Sequence[str]) -> Coded:
        """One weight of all experts, whose outputs are those of the modules in turn."""
        shapes = [
            tensors.expect(f"{module}.weight", None, "U32", beside=f"{modules[0]}.scales").shape
            for module in modules
        ]
        if len(set(shapes)) > 1 or len(shapes[0]) != 3:
            raise tensors.error(f"{modules[0]}.weight", f"and its like have the shapes {shapes}")
        experts = range(shapes[0][0])
        each = [[self._coded(tensors, module, expert) for module in modules] for expert in experts]
        formats = {coded.format for coded in each[0]}
        outer, inner = each[0][0].shape

        def numbers() -> np.ndarray:
            array = np.empty((len(experts), inner, outer, len(modules)), np.float32)
            for expert, index in np.ndindex(len(experts), len(modules)):
                array[expert, ..., index] = each[expert][index].numbers().T
            return array.reshape(len(experts), inner, -1)

        def codes() -> tuple[np.ndarray, np.ndarray]:
            by_expert = [[coded.codes() for coded in of_expert] for of_expert in each]
            parts = [list(map(np.concatenate, zip(*pairs, strict=True))) for pairs in by_expert]
            all_codes, all_scales = zip(*parts, strict=True)
            return np.stack(all_codes), np.stack(all_scales)

        stored = tuple(dict.fromkeys(name for coded in each[0] for name in coded.stored))
        shape = (len(experts), inner, outer * len(modules))
        format = formats.pop() if len(formats) == 1 else None
        return Coded(shape, stored, format, numbers, codes, is_stack=True)

    def _coded(self, tensors: Tensors, module: str, expert: int | None) -> Coded:
        settings = self.by_module.get(module, self.settings)
        bits, group, mode = settings.bits, settings.group, settings.mode
        ends = ("weight", "scales", "biases") if mode == AFFINE else ("weight", "scales")
        stored = tuple(f"{module}.{end}" for end in ends)
        *stack, outer, words = tensors.info(stored[0]).shape
        inner = words * 32 // bits
        if inner % group or inner * bits % 32:
            reason = f"has {inner} inputs, which groups of {group} do not divide"
            raise tensors.error(stored[0], reason)
        shape, types = (*stack, outer, inner // group), FLOATS if mode == AFFINE else ("U8",)
        kinds = [tensors.expect(n, shape, *types, beside=stored[0]).dtype for n in stored[1:]]

        def read(name: str) -> np.ndarray:
            return tensors.read(name) if expert is None else tensors.read(name)[expert]

        def codes_alone() -> np.ndarray:
            return unpacked(read(stored[0]), bits, inner)

        if mode != AFFINE:
            fits = mode != "nvfp4" or inner % GROUP == 0
            format = accelerator.readable(MODES[mode][2], fits)
            floats = Floats(mode, codes_alone, partial(read, stored[1]))
            return Coded((outer, inner), stored, format, floats.numbers, floats.codes)

        def numbers() -> np.ndarray:
            scales, biases = (read(name).astype(np.float32)[..., None] for name in stored[1:])
            by_group = codes_alone().astype(np.float32).reshape(outer, -1, group)
            by_group *= scales
            by_group += biases
            return by_group.reshape(outer, inner)

        def codes() -> tuple[np.ndarray, np.ndarray]:
            both = [self._halves(tensors, name, read(name)) for name in stored[1:]]
            joined = both[0] | both[1] << np.uint32(16)
            return codes_alone(), np.repeat(joined, group // GROUP, axis=1)

        fits = not group % GROUP and set(kinds) <= set(FLOAT16S)
        format = accelerator.readable(FORMATS.get(bits), fits)
        return Coded((outer, inner), stored, format, numbers, codes)

    @staticmethod
    def _halves(tensors: Tensors, name: str, array: np.ndarray) -> np.ndarray:
        """Bits of float16."""
        halves = array.astype(np.float16)
        if np.any(np.isinf(halves) & np.isfinite(array)):
            raise tensors.error(name, "holds a number beyond 65504")
        return halves.view(np.uint16).astype(np.uint32)


@dataclass(frozen=True)
class Floats:
    """A weight of a mode whose numbers are floats.

    Attributes:
        read_codes, read_scales: of the file, [out, in] and [out, groups].
    """

    mode: str
    read_codes: Callable[[], np.ndarray]
    read_scales: Callable[[], np.ndarray]

    def _factors(self) -> np.ndarray:
        scales = self.read_scales()
        if self.mode == "nvfp4":
            return scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return E8M0_VALUES[scales]

    def numbers(self) -> np.ndarray:
        codes, factors = self.read_codes(), self._factors()
        if self.mode != "mxfp8":
            return e2m1_numbers(codes, factors)
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return (values.reshape(*factors.shape, -1) * factors[..., None]).reshape(codes.shape)

    def codes(self) -> tuple[np.ndarray, np.ndarray]:
        codes = self.read_codes()
        if self.mode == "mxfp4":
            return codes, self.read_scales()
        if self.mode == "nvfp4":
            return codes, Nvfp4.joined_scales(self._factors())
        return codes, scales_of_numbers(codes, self._factors())


def _alternating_biases(tensors: Tensors, names: Sequence[str]) -> Coded:
    """[experts, outputs] of the tensors in turn, which are no codes."""
    shapes = [tensors.expect(name, None, *FLOATS, beside=names[0]).shape for name in names]
    if len(set(shapes)) > 1 or len(shapes[0]) != 2:
        raise tensors.error(names[0], f"and its like have the shapes {shapes}")
    experts, outer = shapes[0]

    def numbers() -> np.ndarray:
        arrays = [tensors.read(name).astype(np.float32) for name in names]
        return np.stack(arrays, axis=-1).reshape(experts, -1)

    def codes() -> tuple[np.ndarray, np.ndarray]:
        raise AssertionError("a bias is no weight of a matmul")

    return Coded((experts, outer * len(names)), tuple(names), None, numbers, codes)


def read_mlx(reader: ConfigReader) -> Mlx:
    """The scheme of `quantization`; errors as of `gptq.read_gptq`."""
    settings, by_module = _settings(reader), {}
    for key in reader.objects():
        by_module[key] = _settings(reader.part(key))
    reader.waive("*.*")  # modules that are plain have false
    return Mlx(settings, by_module)


def _settings(reader: ConfigReader) -> Settings:
    """Settings of a module, with those that MLX takes where none are stated."""
    mode = reader.choice("mode", (AFFINE, *MODES), AFFINE)
    default = (4, 64) if mode == AFFINE else MODES[mode][:2]
    bits, group = reader.size("bits", default[0]), reader.size("group_size", default[1])
    if mode == AFFINE and bits not in BITS:
        raise CheckpointError(f"config.json has bits = {bits}; it must be one of {[*BITS]}.")
    if mode != AFFINE and (bits, group) != default:
        raise CheckpointError(
            f"config.json has bits = {bits} and group_size = {group} in the mode {mode}; they must "
            f"be {default[0]} and {default[1]}."
        )
    return Settings(bits, group, mode)
