"""bitsandbytes: four bits that number sixteen values, and int8 with a scale per output.

    4 bits   X.weight uint8 [out * in / 2, 1], high halves of bytes first; X.weight.quant_map, its
             sixteen values; X.weight.absmax, a scale for each 64 numbers, one after the other, or
             with double quantization codes of these with X.weight.nested_quant_map,
             X.weight.nested_absmax and an offset; X.weight.quant_state.bitsandbytes__nf4, a JSON
    int8     X.weight int8; X.SCB [out]: q * SCB / 127, in that order; X.weight_format, a uint8: 0
             where rows are the outputs

Source: bitsandbytes 0.50, functional.py and autograd/_functions.py.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rooflax.loading.schemes.coded import Coded, CodedTensors, Tensors, unpacked
from rooflax.models.config_reader import ConfigReader
from rooflax.ops import accelerator
from rooflax.ops.format_names import GROUP
from rooflax.ops.weights.formats import NF4_VALUES

STATE = ".quant_state.bitsandbytes__"
STEP = np.float32(7.874015718698502e-3)
"""1 / 127."""
PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


@dataclass(frozen=True)
class BitsAndBytes:
    """Its tensors, which say of which kind each is."""

    def find(self, tensors: Tensors) -> CodedTensors:
        coded, unused = {}, set[str]()
        for name in tensors.names:
            weight, state, kind = name.partition(STATE)
            if state:
                coded[weight] = _four_bits(tensors, weight, name, kind)
            elif name.endswith(".SCB"):
                module = name.removesuffix(".SCB")
                coded[f"{module}.weight"] = _int8(tensors, f"{module}.weight", name)
                unused.add(_row_major(tensors, f"{module}.weight_format"))
        for name in tensors.names:
            if name.endswith(".weight") and name not in coded and tensors.info(name).dtype == "U8":
                raise tensors.error(name, "has no quant_state beside it")
        return CodedTensors(coded, unused)


def _row_major(tensors: Tensors, name: str) -> str:
    """The name of a weight's format, which need not be there.

    Raises:
        CheckpointError: it is one of those that older versions turned weights to for a GPU.
    """
    if name in tensors and (number := tensors.read(name)).any():
        raise tensors.error(
            name, f"is {number.tolist()!r:.80}; rooflax reads 0 alone, whose rows are the outputs"
        )
    return name


def _int8(tensors: Tensors, name: str, scale: str) -> Coded:
    shape = tensors.expect(name, None, "I8", beside=scale).shape
    tensors.expect(scale, shape[:1], "F32", beside=name)
    if len(shape) != 2:
        raise tensors.error(name, f"has the shape {list(shape)}, wanted [out, in]")

    def numbers() -> np.ndarray:
        values = tensors.read(name).astype(np.float32)
        values *= tensors.read(scale)[:, None]
        values *= STEP
        return values

    def codes() -> tuple[np.ndarray, np.ndarray]:
        return tensors.read(name), tensors.read(scale) * STEP

    return Coded(shape, (name, scale), "w8a16", numbers, codes)


def _four_bits(tensors: Tensors, name: str, state: str, kind: str) -> Coded:
    state_values = _state(tensors, state)
    shape, size = tuple(state_values["shape"]), state_values["blocksize"]
    double = f"{name}.nested_absmax" in tensors
    parts = PARTS if double else PARTS[:2]
    stored = (name, state, *(f"{name}.{part}" for part in parts))
    count, sizes = math.prod(shape), {"quant_map": 16, "nested_quant_map": 256}
    if shape:  # known, of more than headers
        blocks = -(-count // size)
        sizes |= {"absmax": blocks, "nested_absmax": -(-blocks // state_values["nested_blocksize"])}
    for part in parts:
        wanted = None if part not in sizes else (sizes[part],)
        dtype = "U8" if double and part == "absmax" else "F32"
        tensors.expect(f"{name}.{part}", wanted, dtype, beside=name)
    packed = tensors.expect(name, None, "U8", beside=state)
    if shape and packed.nbytes != -(-count // 2):
        raise tensors.error(name, f"has {packed.nbytes} bytes for {list(shape)} codes of 4 bits")
    fits = not shape or (len(shape) == 2 and size % GROUP == 0 and shape[-1] % size == 0)
    format = accelerator.readable("nf4-a16", kind == "nf4" and fits)
    read = {part: partial(tensors.read, f"{name}.{part}") for part in parts}

    def flat_codes() -> np.ndarray:
        halves = unpacked(tensors.read(name).reshape(-1), 4, 2 * packed.nbytes)
        return halves.reshape(-1, 2)[:, ::-1].reshape(-1)[:count]

    def scales() -> np.ndarray:
        """One of each block."""
        if not double:
            return read["absmax"]()
        nested = read["nested_quant_map"]()[read["absmax"]()]
        each = min(state_values["nested_blocksize"], len(nested))
        return nested * np.repeat(read["nested_absmax"](), each)[: len(nested)] + np.float32(
            state_values["nested_offset"]
        )

    def numbers() -> np.ndarray:
        values = read["quant_map"]()[flat_codes()]
        values *= np.repeat(scales(), min(size, count))[:count]
        return values.reshape(shape)

    def codes() -> tuple[np.ndarray, np.ndarray]:
        if not np.array_equal(read["quant_map"](), NF4_VALUES):
            raise tensors.error(f"{name}.quant_map", "holds other numbers than those of nf4")
        by_output = scales().reshape(shape[0], -1)
        return flat_codes().reshape(shape), np.repeat(by_output, size // GROUP, axis=1)

    return Coded(shape, stored, format, numbers, codes)


def _state(tensors: Tensors, name: str) -> dict[str, Any]:
    """Reads the JSON; without a shape where only headers are there, whose data is zeros."""
    empty = {"shape": (), "blocksize": 64, "nested_blocksize": 256, "nested_offset": 0.0}
    data = tensors.read(name).tobytes()
    if not any(data):
        return empty
    try:
        values = empty | json.loads(data)
        whole = [*values["shape"], values["blocksize"], values["nested_blocksize"]]
        valid = all(type(n) is int and 0 < n < 1 << 31 for n in whole) and values["shape"]
        valid = valid and type(values["nested_offset"]) is float
    except (ValueError, TypeError, RecursionError):
        values, valid = empty, False
    if not valid:
        raise tensors.error(name, "is no state of a quantized weight")
    return values


def read_bitsandbytes(reader: ConfigReader) -> BitsAndBytes:
    """The scheme of a quantization_config; errors as of `gptq.read_gptq`."""
    reader.expect("bnb_4bit_quant_type", "nf4", "fp4")
    reader.expect("bnb_4bit_quant_storage", "uint8")
    reader.expect("llm_int8_has_fp16_weight", False)
    reader.waive(
        "load_in_4bit", "load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant",
        "llm_int8_threshold", "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload",
    )  # fmt: skip
    return BitsAndBytes()
