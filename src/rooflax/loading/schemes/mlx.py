"""MLX's affine quantization: q * s + b with a scale and a bias per group of inputs.

X.weight is uint32 [out, in * bits / 32], inputs from the lowest bits on; X.scales and X.biases are
[out, groups]. Experts lie in one stack, X.switch_mlp.gate_proj, [experts, out, ...]; those of
Mixtral, whose names are others in its own checkpoints, in X.block_sparse_moe.switch_mlp.gate_proj.

Source: mlx, python/src/ops.cpp (quantize); mlx-lm, mlx_lm/utils.py, models/switch_layers.py and
models/mixtral.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rooflax.errors import CheckpointError
from rooflax.loading.schemes.coded import FLOAT16S, FLOATS, Coded, CodedTensors, Tensors, unpacked
from rooflax.models.config_reader import ConfigReader
from rooflax.ops import accelerator
from rooflax.ops.format_names import GROUP

BITS = (2, 3, 4, 5, 6, 8)
FORMATS = {2: "q4_1-a16", 3: "q4_1-a16", 4: "q4_1-a16", 5: "q5_1-a16"}
"""On CPU, by bits."""
STACK = ".switch_mlp."
MIXTRALS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
"""Its own names of an expert's matmuls."""


@dataclass(frozen=True)
class Mlx:
    """Bits and inputs of a group, of all modules and of some."""

    bits: int
    group: int
    by_module: Mapping[str, tuple[int, int]]

    def find(self, tensors: Tensors) -> CodedTensors:
        coded: dict[str, Coded] = {}
        for name in tensors.names:
            module, _, end = name.rpartition(".")
            if end != "scales":
                continue
            shape = tensors.expect(f"{module}.weight", None, "U32", beside=name).shape
            if len(shape) == 2:
                coded[f"{module}.weight"] = self._coded(tensors, module, None)
                continue
            if len(shape) != 3 or STACK not in name:
                raise tensors.error(f"{module}.weight", f"has the shape {list(shape)}")
            layer, _, matmul = module.rpartition(STACK)
            matmul = MIXTRALS.get(matmul, matmul) if layer.endswith("block_sparse_moe") else matmul
            for expert in range(shape[0]):
                expert_module = f"{layer}.experts.{expert}.{matmul}"
                coded[f"{expert_module}.weight"] = self._coded(tensors, module, expert)
        return CodedTensors(coded, set())

    def _coded(self, tensors: Tensors, module: str, expert: int | None) -> Coded:
        bits, group = self.by_module.get(module, (self.bits, self.group))
        stored = tuple(f"{module}.{end}" for end in ("weight", "scales", "biases"))
        *stack, outer, words = tensors.info(stored[0]).shape
        inner = words * 32 // bits
        if inner % group or inner * bits % 32:
            reason = f"has {inner} inputs, which groups of {group} do not divide"
            raise tensors.error(stored[0], reason)
        shape = (*stack, outer, inner // group)
        kinds = [tensors.expect(n, shape, *FLOATS, beside=stored[0]).dtype for n in stored[1:]]

        def read(name: str) -> np.ndarray:
            return tensors.read(name) if expert is None else tensors.read(name)[expert]

        def numbers() -> np.ndarray:
            scales, biases = (read(name).astype(np.float32)[..., None] for name in stored[1:])
            codes = unpacked(read(stored[0]), bits, inner).astype(np.float32)
            by_group = codes.reshape(outer, -1, group)
            by_group *= scales
            by_group += biases
            return by_group.reshape(outer, inner)

        def codes() -> tuple[np.ndarray, np.ndarray]:
            both = [self._halves(tensors, name, read(name)) for name in stored[1:]]
            joined = both[0] | both[1] << np.uint32(16)
            return unpacked(read(stored[0]), bits, inner), np.repeat(joined, group // GROUP, axis=1)

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


def read_mlx(reader: ConfigReader) -> Mlx:
    """The scheme of `quantization`; errors as of `gptq.read_gptq`."""
    reader.expect("mode", "affine")
    sizes, by_module = _sizes(reader, (4, 64)), {}
    for key in reader.objects():
        part = reader.part(key)
        by_module[key] = _sizes(part, sizes)
        part.expect("mode", "affine")
    reader.waive("*.*")  # modules that are plain have false
    return Mlx(*sizes, by_module)


def _sizes(reader: ConfigReader, default: tuple[int, int]) -> tuple[int, int]:
    bits, group = reader.size("bits", default[0]), reader.size("group_size", default[1])
    if bits not in BITS:
        raise CheckpointError(f"config.json has bits = {bits}; it must be one of {[*BITS]}.")
    return bits, group
