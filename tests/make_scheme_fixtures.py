"""Writes tests/data/schemes: weights as other libraries quantize them, and what they dequantize to.

Needs compressed-tensors, bitsandbytes, mlx[cpu] and torchao beside the test environment:
`python -m tests.make_scheme_fixtures`. Each case has tensors "stored/NAME" in the types of a
checkpoint, "numbers/NAME" in float32, and its quantization_config.
"""

import json
from importlib import import_module
from pathlib import Path

import ml_dtypes
import numpy as np
import torch

from rooflax.loading.safetensors import TensorToWrite, dtype_name, write_safetensors

FOLDER = Path(__file__).parent / "data" / "schemes"
MODULE = "model.layers.0.self_attn.q_proj"
OUT, IN = 24, 128


def array(tensor):
    """NumPy's of a tensor, bit for bit."""
    views = {
        torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
        torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    }
    tensor = tensor.detach().contiguous()
    if tensor.dtype not in views:
        return tensor.numpy()
    through, kind = views[tensor.dtype]
    return tensor.view(through).numpy().view(kind)


def write(name, declared, stored, numbers, metadata=None):
    FOLDER.mkdir(exist_ok=True)
    found = {f"stored/{n}": array(t) for n, t in stored.items()}
    found |= {f"numbers/{n}": array(t.to(torch.float32)) for n, t in numbers.items()}
    write_safetensors(
        FOLDER / f"{name}.safetensors",
        [TensorToWrite(n, dtype_name(a.dtype), a.shape, lambda a=a: a) for n, a in found.items()],
        {"config": json.dumps(declared), "metadata": json.dumps(metadata or {})},
    )


def compressed(name, format, scale_dtype=torch.float32, **weights):
    """A module as compressed-tensors compresses it, and decompresses it from float32 scales."""
    compressors = import_module("compressed_tensors.compressors")
    quantization = import_module("compressed_tensors.quantization")
    torch.manual_seed(len(name))
    args = quantization.QuantizationArgs(**weights)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    w = torch.randn(OUT, IN) / 8
    groups = IN // args.group_size if args.group_size and args.group_size > 0 else 1
    strategy, extra = str(args.strategy), {}
    shape = {"tensor": (1,), "block": (2, 2)}.get(strategy, (OUT, groups))
    most = 448.0 if args.type == "float" and args.num_bits == 8 else 2 ** (args.num_bits - 1)
    scale = (torch.rand(shape) + 0.5) / most / 2
    if strategy == "tensor_group":
        extra["weight_global_scale"] = torch.tensor([1234.5])
        scale = (torch.rand(shape) * 400).to(torch.float8_e4m3fn).to(torch.float32)
    state = {"weight": w, "weight_scale": scale.to(scale_dtype), **extra}
    if not args.symmetric:
        low = 2 ** (args.num_bits - 1)
        state["weight_zero_point"] = torch.randint(-low, low, shape, dtype=torch.int8)
    compressor = compressors.BaseCompressor.get_value_from_registry(format)
    stored = compressor.compress(state, scheme)
    exact = {
        n: t.to(torch.float32) if n == "weight_scale" and strategy != "tensor_group" else t
        for n, t in stored.items()
    }
    numbers = (
        nvfp4_numbers(stored, args)
        if strategy == "tensor_group"
        else compressor.decompress(exact, scheme)["weight"]
    )
    group = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}
    declared = {
        "quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, "quantization_status": "compressed",
    }  # fmt: skip
    write(
        f"compressed_{name}",
        declared,
        {f"{MODULE}.{n}": t for n, t in stored.items()},
        {f"{MODULE}.weight": numbers},
    )


def nvfp4_numbers(stored, args):
    """As its `decompress`, which rounds to bfloat16."""
    helpers = import_module("compressed_tensors.compressors.nvfp4.helpers")
    forward = import_module("compressed_tensors.quantization.lifecycle.forward")
    packed, scale = stored["weight_packed"], stored["weight_scale"].to(torch.float32)
    codes = helpers.unpack_fp4_from_uint8(packed, OUT, IN, dtype=torch.float32)
    whole = stored["weight_global_scale"]
    return forward.dequantize(codes, scale, args=args, dtype=torch.float32, global_scale=whole)


def bits_and_bytes(name, double, kind="nf4"):
    functional = import_module("bitsandbytes.functional")
    torch.manual_seed(len(name))
    w = torch.randn(OUT, IN)
    packed, state = functional.quantize_4bit(w, quant_type=kind, compress_statistics=double)
    stored = {f"{MODULE}.weight": packed}
    stored |= {f"{MODULE}.weight.{n}": t for n, t in state.as_dict(packed=True).items()}
    declared = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
        "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": double,
        "bnb_4bit_compute_dtype": "bfloat16",
    }  # fmt: skip
    numbers = functional.dequantize_4bit(packed, state)
    write(f"bitsandbytes_{name}", declared, stored, {f"{MODULE}.weight": numbers})


def mlx(name, bits, group):
    """bfloat16 scales and biases, whose numbers are made in float32."""
    mx = import_module("mlx.core")
    mx.random.seed(bits)
    w = mx.random.normal((OUT, IN)).astype(mx.bfloat16)
    parts = mx.quantize(w, group_size=group, bits=bits)
    numbers = mx.dequantize(
        parts[0], *(part.astype(mx.float32) for part in parts[1:]), group_size=group, bits=bits
    )
    stored = {f"{MODULE}.weight": torch.from_numpy(np.array(parts[0]))}
    for end, part in zip(("scales", "biases"), parts[1:], strict=True):
        halves = np.array(part.view(mx.uint16)).view(np.int16)
        stored[f"{MODULE}.{end}"] = torch.from_numpy(halves).view(torch.bfloat16)
    numbers = torch.from_numpy(np.array(numbers))
    declared = {"bits": bits, "group_size": group, "mode": "affine"}
    write(f"mlx_{name}", declared, stored, {f"{MODULE}.weight": numbers})


def mlx_floats(mode, group):
    """Numbers of a scale for each group, made in float32; scales of all sizes."""
    mx = import_module("mlx.core")
    mx.random.seed(group)
    w = mx.random.normal((OUT, IN)) * 2.0 ** mx.random.randint(-9, 9, (OUT, 1)).astype(mx.float32)
    packed, scales = mx.quantize(w.astype(mx.bfloat16), mode=mode)
    numbers = mx.dequantize(packed, scales, mode=mode, dtype=mx.float32)
    stored = {f"{MODULE}.weight": packed, f"{MODULE}.scales": scales}
    stored = {name: torch.from_numpy(np.array(array)) for name, array in stored.items()}
    declared = {"bits": 8 if mode == "mxfp8" else 4, "group_size": group, "mode": mode}
    numbers = {f"{MODULE}.weight": torch.from_numpy(np.array(numbers))}
    write(f"mlx_{mode}", declared, stored, numbers)


def torchao(name, config, **how):
    """As transformers saves it; dequantized in float32.

    Args:
        config: its class.
        how: its arguments.
    """
    quantization = import_module("torchao.quantization")
    flatten = import_module("torchao.prototype.safetensors.safetensors_support")
    to_dict = import_module("torchao.core.config").config_to_dict
    torch.manual_seed(len(name))
    layer = torch.nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16)
    chosen = getattr(quantization, config)(**how)
    quantization.quantize_(layer, chosen)
    stored, metadata = flatten.flatten_tensor_state_dict({f"{MODULE}.weight": layer.weight.data})
    if type(layer.weight).__name__ == "IntxUnpackedToInt8Tensor":
        numbers = layer.weight.to(torch.float32).dequantize()
    else:
        numbers = layer.weight.dequantize(torch.float32)
    declared = {"quant_method": "torchao", "quant_type": {"default": to_dict(chosen)}}
    write(f"torchao_{name}", declared, stored, {f"{MODULE}.weight": numbers}, metadata)


def main():
    pack = "pack-quantized"
    compressed("int4", pack, num_bits=4, strategy="group", group_size=32)
    zeros = {"strategy": "group", "group_size": 64, "symmetric": False}
    compressed("int4_zeros", pack, torch.bfloat16, num_bits=4, **zeros)
    compressed("int4_channel", pack, torch.float16, num_bits=4, strategy="channel")
    compressed("int8", pack, torch.bfloat16, num_bits=8, strategy="group", group_size=128)
    compressed("int3", pack, torch.float16, num_bits=3, strategy="group", group_size=32)
    compressed("w8a8", "int-quantized", torch.bfloat16, num_bits=8, strategy="channel")
    compressed("w8a8_zeros", "int-quantized", num_bits=8, strategy="tensor", symmetric=False)
    for strategy in ("tensor", "channel"):
        how = {"num_bits": 8, "type": "float", "strategy": strategy}
        compressed(f"fp8_{strategy}", "float-quantized", torch.bfloat16, **how)
    block = {"strategy": "block", "block_structure": [12, 64]}
    compressed("fp8_block", "float-quantized", num_bits=8, type="float", **block)
    group = {"strategy": "tensor_group", "group_size": 16}
    compressed("nvfp4", "nvfp4-pack-quantized", num_bits=4, type="float", **group)
    bits_and_bytes("nf4", False)
    bits_and_bytes("nf4_double", True)
    bits_and_bytes("fp4", True, "fp4")
    for bits, group in ((2, 32), (3, 64), (4, 64), (5, 128), (6, 64), (8, 64)):
        mlx(f"{bits}_bits", bits, group)
    for mode, group in (("mxfp4", 32), ("mxfp8", 32), ("nvfp4", 16)):
        mlx_floats(mode, group)
    granularity = import_module("torchao.quantization.granularity")
    mappings = import_module("torchao.quantization").MappingType
    groups = {size: granularity.PerGroup(size) for size in (32, 64)}
    torchao("int8", "Int8WeightOnlyConfig")
    torchao("int8_dynamic", "Int8DynamicActivationInt8WeightConfig")
    torchao("int8_groups", "Int8WeightOnlyConfig", granularity=groups[32])
    torchao("fp8", "Float8WeightOnlyConfig")
    torchao("fp8_tensor", "Float8WeightOnlyConfig", granularity=granularity.PerTensor())
    torchao("int4", "IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=groups[32])
    torchao(
        "int4_zeros", "Int8DynamicActivationIntxWeightConfig", weight_dtype=torch.int4,
        weight_granularity=groups[64], weight_mapping_type=mappings.ASYMMETRIC,
    )  # fmt: skip


if __name__ == "__main__":
    main()
