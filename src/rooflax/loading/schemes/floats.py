"""Weights of 8-bit and 4-bit floats with scales, as several schemes store them.

A value is code * scale in float32. Of e4m3 a tensor, each output, each block of it or each group of
inputs has a scale; NVFP4 has e2m1 codes, two in a byte, an e4m3 scale per 16 inputs and a float32
of the whole tensor, MXFP4 a power of two per 32 inputs.

Sources: transformers, integrations/finegrained_fp8.py and fbgemm_fp8.py; vLLM,
model_executor/layers/quantization/fp8.py and modelopt.py; compressed-tensors, compressors/nvfp4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rooflax.loading.schemes.coded import FLOATS, Coded, CodedTensors, Tensors, unpacked
from rooflax.models.config_reader import ConfigReader
from rooflax.ops import accelerator
from rooflax.ops.format_names import GROUP
from rooflax.ops.weights.blocks import Nvfp4
from rooflax.ops.weights.formats import E2M1_VALUES, E8M0_VALUES

E4M3, NVFP4_GROUP = "F8_E4M3", 16
NOT_A_NUMBER = 0x7F
"""NaN's e4m3 code without its sign."""
ACTIVATION_SCALES = (
    "input_scale", "activation_scale", "act_scale", "input_zero_point", "input_global_scale",
    "output_scale", "output_zero_point",
)  # fmt: skip
"""Ends of names: static scales of activations, which are not rounded here."""
CACHE_SCALES = (
    "k_scale", "v_scale", "q_scale", "prob_scale", "kv_scale", "k_zero_point", "v_zero_point"
)  # fmt: skip
"""Ends of names: scales of a KV cache, whose type the checkpoint does not choose here."""
UNUSED = (*ACTIVATION_SCALES, *CACHE_SCALES, "input_scale_ub")


def is_unused(name: str) -> bool:
    return name.rpartition(".")[2] in UNUSED


def fp8_weight(
    tensors: Tensors, name: str, scale: str, block: tuple[int, int] | None = None
) -> Coded:
    """e4m3 codes with a scale for the tensor, each output, each group of inputs or each block.

    Args:
        scale: of blocks [out, in], or as modelopt has them [out, 1, in, 1].
        block: outputs and inputs of one; None where inputs may be in groups.
    """
    info = tensors.info(name)
    if not info.dtype.startswith("F8_"):
        raise tensors.error(name, f"is {info.dtype} and has scales, which belong to F8 codes alone")
    shape, stored = info.shape, tensors.expect(scale, None, *FLOATS, "F8_E8M0", beside=name).shape
    if len(shape) != 2:
        raise tensors.error(name, f"has the shape {list(shape)}, wanted [out, in]")
    scales = stored[::2] if len(stored) == 4 and stored[1::2] == (1, 1) else stored
    one, each = scales in ((), (1,), (1, 1)), scales in (shape[:1], (shape[0], 1))
    if block is None:
        fits = scales[:1] == shape[:1] and len(scales) == 2 and scales[1] > 0
        fits, wanted = fits and not shape[1] % scales[1], "one of each output"
    else:
        fits = scales == tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
        wanted = f"one of each output, or one for each block of {[*block]}"
    if not (one or each or fits):
        raise tensors.error(
            name, f"{list(shape)} has scales {list(stored)}; wanted one, or {wanted}"
        )
    size = shape[1] if one or each else block[1] if block else shape[1] // scales[1]
    rows = block[0] if block and not (one or each) else 1

    def own_scales() -> np.ndarray:
        """[out, groups], or [1, 1] of all."""
        by_block = np.asarray(tensors.read(scale), np.float32)
        if one or each:
            return by_block.reshape(-1, 1)
        return np.repeat(by_block.reshape(scales), rows, axis=0)[: shape[0]]

    def numbers() -> np.ndarray:
        values = tensors.read(name).astype(np.float32)
        scales = own_scales()
        values *= scales if scales.shape[1] == 1 else np.repeat(scales, size, axis=1)[:, : shape[1]]
        return values

    def codes() -> tuple[np.ndarray, np.ndarray]:
        """NaN as a scale where a code is no number."""
        raw = tensors.read(name).view(np.uint8)
        scales = np.broadcast_to(own_scales(), (shape[0], own_scales().shape[1]))
        if format == "fp8-a16":
            broken = (raw & NOT_A_NUMBER) == NOT_A_NUMBER
            return raw, np.where(broken.any(axis=1), np.float32(np.nan), scales[:, 0])
        scales = np.repeat(scales, size // GROUP, axis=1)[:, : shape[1] // GROUP]
        return raw, scales_of_numbers(raw, scales)

    format = None
    if info.dtype == E4M3:
        in_groups = not size % GROUP and not shape[1] % GROUP
        by_output = size == shape[1] and rows == 1
        format = "fp8-a16" if by_output else accelerator.readable("fp8-a16-g32", in_groups)
    return Coded(shape, (name, scale), format, numbers, codes)


def scales_of_numbers(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Scales [out, in / 32] of e4m3 codes [out, in], NaN where one of the codes is no number."""
    broken = (codes & NOT_A_NUMBER) == NOT_A_NUMBER
    return np.where(broken.reshape(*scales.shape, GROUP).any(axis=2), np.float32(np.nan), scales)


def nvfp4_weight(
    tensors: Tensors, name: str, scale: str, whole: str, *, divides: bool, group: int = NVFP4_GROUP
) -> Coded:
    """e2m1 codes, low half first, with an e4m3 scale per 16 inputs.

    Args:
        whole: the tensor's scale, which the others are multiplied by, or divided by.
    """
    shape = _nibbles(tensors, name)
    groups = tensors.num_groups(name, shape[1], group)
    tensors.expect(scale, (shape[0], groups), E4M3, beside=name)
    if tensors.expect(whole, None, "F32", beside=name).shape not in ((), (1,)):
        raise tensors.error(whole, "is no single number")

    def factors() -> np.ndarray:
        by_group = tensors.read(scale).astype(np.float32)
        one = np.float32(tensors.read(whole).reshape(-1)[0])
        with np.errstate(all="ignore"):
            return by_group / one if divides else by_group * one

    def codes() -> tuple[np.ndarray, np.ndarray]:
        return _codes(tensors, name, shape[1]), Nvfp4.joined_scales(factors())

    format = accelerator.readable("nvfp4-a16", shape[1] % GROUP == 0 and group == NVFP4_GROUP)

    def numbers() -> np.ndarray:
        return e2m1_numbers(_codes(tensors, name, shape[1]), factors())

    return Coded(shape, (name, scale, whole), format, numbers, codes)


def mxfp4_weight(tensors: Tensors, name: str, scale: str) -> Coded:
    """e2m1 codes, low half first, with a power of two per 32 inputs."""
    shape = _nibbles(tensors, name)
    groups = tensors.num_groups(name, shape[1], GROUP)
    tensors.expect(scale, (shape[0], groups), "U8", "F8_E8M0", beside=name)

    def exponents() -> np.ndarray:
        return tensors.read(scale).view(np.uint8)

    def codes() -> tuple[np.ndarray, np.ndarray]:
        return _codes(tensors, name, shape[1]), exponents()

    def numbers() -> np.ndarray:
        return e2m1_numbers(_codes(tensors, name, shape[1]), E8M0_VALUES[exponents()])

    return Coded(shape, (name, scale), "mxfp4-a16", numbers, codes)


def _nibbles(tensors: Tensors, name: str) -> tuple[int, int]:
    info = tensors.info(name)
    if info.dtype != "U8" or len(info.shape) != 2:
        raise tensors.error(name, f"is {info.dtype} {list(info.shape)}, wanted U8 [out, in / 2]")
    return info.shape[0], info.shape[1] * 2


def _codes(tensors: Tensors, name: str, inner: int) -> np.ndarray:
    return unpacked(tensors.read(name), 4, inner)


def e2m1_numbers(codes: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """[out, in] in float32 of e2m1 codes and of factors [out, groups]."""
    values = E2M1_VALUES[codes]
    by_group = values.reshape(*factors.shape, -1)
    by_group *= factors[..., None]
    return by_group.reshape(codes.shape)


@dataclass(frozen=True)
class Fp8Scheme:
    """e4m3 tensors X with scales X_scale_inv or X_scale: of DeepSeek, Qwen, FBGEMM."""

    block: tuple[int, int] | None

    def find(self, tensors: Tensors) -> CodedTensors:
        ends = ("_scale_inv", "_scale")
        scales = {n: n + end for n in tensors.names for end in ends if n + end in tensors}
        known = {*scales, *scales.values()}
        for name in tensors.names:
            kind = tensors.info(name).dtype
            if name not in known and kind.startswith("F8_"):
                raise tensors.error(
                    name, f"is {kind} and has no scales, without which its codes are no numbers"
                )
        coded = {n: fp8_weight(tensors, n, scale, self.block) for n, scale in scales.items()}
        return CodedTensors(coded, {name for name in tensors.names if is_unused(name)})


def read_fp8(reader: ConfigReader) -> Fp8Scheme:
    """The scheme of DeepSeek, Qwen and Mistral; errors as of `gptq.read_gptq`."""
    reader.expect("fmt", "e4m3", "float8_e4m3fn")
    reader.choice("activation_scheme", ("dynamic", "static"), "dynamic")
    reader.waive("modules_to_not_convert", "ignored_layers", "scale_fmt", "dequantize")
    reader.waive("kv_cache_scheme")
    reader.expect("kv_cache_quant_method", None, "fp8")
    if reader.is_null("weight_block_size"):
        return Fp8Scheme(None)
    return Fp8Scheme(reader.sizes("weight_block_size", [128, 128]))


def read_fbgemm(reader: ConfigReader) -> Fp8Scheme:
    """The scheme of FBGEMM, with a scale for each output."""
    reader.waive("modules_to_not_convert", "activation_scale_ub", "quantization_type")
    return Fp8Scheme(None)
