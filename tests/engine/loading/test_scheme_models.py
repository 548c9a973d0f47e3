"""Models as compressed-tensors, modelopt, FBGEMM, MLX and bitsandbytes write them.

References are made here from the published layouts, number by number.
"""

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rooflax import load
from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.loading.model_info import model_info
from rooflax.loading.plan import make_plan
from rooflax.loading.schemes.compressed_tensors import CompressedTensors
from rooflax.ops.weights.formats import NF4_VALUES
from tests import goldens
from tests.support.loading import vendor

pytestmark = pytest.mark.oldest_jax

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
E4M3 = ml_dtypes.float8_e4m3fn
PLAIN = {"torch_dtype": "float32"}


def halves(codes):
    """Two codes of four bits a byte, low half first."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)


INT8 = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}


def int4(module, tensors, state, group):
    """pack-quantized, symmetric; the numbers."""
    outer, inner = tensors.pop(f"{module}.weight").shape
    codes = state.randint(-8, 8, (outer, inner))
    scales = (state.uniform(0.5, 2, (outer, inner // group)) / 100).astype(ml_dtypes.bfloat16)
    packed = halves((codes + 8).astype(np.uint8))
    tensors[f"{module}.weight_packed"] = packed.view(np.int32)
    tensors[f"{module}.weight_scale"] = scales
    tensors[f"{module}.weight_shape"] = np.array([outer, inner])
    return codes * np.repeat(scales.astype(np.float32), group, axis=1)


def fp8(module, tensors, state, shape, dtype: Any = np.float32):
    """e4m3 with scales; the numbers."""
    codes = tensors[f"{module}.weight"].astype(np.float32) * 50
    codes = tensors[f"{module}.weight"] = codes.astype(E4M3)
    scales = (state.uniform(0.5, 2, shape(*codes.shape)) / 50).astype(dtype)
    tensors[f"{module}.weight_scale"] = scales
    return codes.astype(np.float32) * scales.astype(np.float32)


def nvfp4(module, tensors, state, names):
    """e2m1, a scale per 16 inputs, and one of all; codes, and both."""
    outer, inner = tensors.pop(f"{module}.weight").shape
    codes = state.randint(0, 16, (outer, inner)).astype(np.uint8)
    scales = state.uniform(50, 400, (outer, inner // 16)).astype(E4M3)
    weight, scale = names
    tensors[f"{module}.{weight}"], tensors[f"{module}.{scale}"] = halves(codes), scales
    return np.array(E2M1, np.float32)[codes], scales.astype(np.float32)


def changed(raw, change):
    """Tensors in codes, and those of their numbers; `change` replaces a module's weight."""
    tensors, state = vendor.tensors(raw), np.random.RandomState(1)
    plain = dict(tensors)
    for module in vendor.linears(tensors):
        numbers = change(module, tensors, state)
        if numbers is not None:
            plain[f"{module}.weight"] = numbers.astype(np.float32)
    return tensors, plain


GROUPS = {
    "group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64},
        "input_activations": None,
    },
    "group_1": {
        "targets": ["re:.*mlp[.](gate|up)_proj$", "model.layers.0.mlp.down_proj"],
        "format": "float-quantized",
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "actorder": None},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token"},
    },
}
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": GROUPS,
    "ignore": ["lm_head", "re:.*o_proj"], "quantization_status": "compressed",
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
    "sparsity_config": {}, "transform_config": {}, "version": "0.13", "global_compression_ratio": 2,
}  # fmt: skip


def of_groups(module, tensors, state):
    if "o_proj" in module:
        tensors["model.layers.0.self_attn.k_scale"] = np.ones(1, np.float32)
        return None
    if "mlp" in module:
        return fp8(module, tensors, state, lambda outer, _: (outer, 1), ml_dtypes.bfloat16)
    return int4(module, tensors, state, 64)


def test_compressed_tensors_of_several_groups(tmp_path):
    tensors, plain = changed(vendor.LLAMA, of_groups)
    coded = vendor.write(tmp_path / "coded", vendor.LLAMA, tensors, **COMPRESSED)
    formats = {"qkv": "w4a16", "o": None, "gate_up": "fp8-a16", "down": "fp8-a16"}
    plain = vendor.write(tmp_path / "plain", vendor.LLAMA | PLAIN, plain)
    vendor.check(coded, plain, formats, runs=True)


def test_nvfp4_of_modelopt_whose_config_json_says_nothing(tmp_path):
    def change(module, tensors, state):
        values, scales = nvfp4(module, tensors, state, ("weight", "weight_scale"))
        whole = np.float32(state.uniform(1, 2) / 3000)
        tensors[f"{module}.weight_scale_2"] = whole.reshape(())
        tensors[f"{module}.input_scale"] = np.float32(1).reshape(())
        return values * np.repeat(scales * whole, 16, axis=1)

    tensors, plain = changed(vendor.LLAMA, change)
    coded = vendor.write(tmp_path / "coded", vendor.LLAMA, tensors)
    said = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    said = {
        "producer": {"name": "modelopt"},
        "quantization": said | {"exclude_modules": ["lm_head"]},
    }
    (coded / "hf_quant_config.json").write_text(json.dumps(said))
    formats = dict.fromkeys(("qkv", "o", "gate_up", "down"), "nvfp4-a16")
    plain = vendor.write(tmp_path / "plain", vendor.LLAMA | PLAIN, plain)
    vendor.check(coded, plain, formats, runs=True)


@pytest.mark.parametrize(
    ("declared", "shape"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, lambda *_: ()),
        (
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
            lambda outer, _: (outer, 1),
        ),
        ({"quant_method": "fp8"}, lambda outer, _: (outer, 1)),
        ({"quant_method": "fp8", "weight_block_size": None}, lambda outer, _: (outer, 1)),
    ],
    ids=["modelopt", "fbgemm", "fp8", "fp8 without blocks"],
)
def test_fp8_of_tensors_and_of_outputs(declared, shape, tmp_path):
    def change(module, tensors, state):
        for end in ("input_scale", "act_scale", "kv_scale"):
            tensors[f"{module}.{end}"] = np.float32(1).reshape(())
        return fp8(module, tensors, state, shape)

    tensors, plain = changed(vendor.LLAMA, change)
    coded = vendor.write(tmp_path / "coded", vendor.LLAMA, tensors, **declared)
    formats = dict.fromkeys(("qkv", "o", "gate_up", "down"), "fp8-a16")
    vendor.check(coded, vendor.write(tmp_path / "plain", vendor.LLAMA | PLAIN, plain), formats)


def test_scales_that_are_not_applied_are_named(rooflax, tmp_path):
    """By `inspect` and where the model is loaded: its activations are not rounded."""

    def change(module, tensors, state):
        tensors[f"{module}.input_scale"] = np.float32(0.5).reshape(())
        return fp8(module, tensors, state, lambda *_: ())

    tensors, _ = changed(vendor.LLAMA, change)
    declared = {"quant_method": "fp8", "activation_scheme": "static"}
    folder = vendor.write(tmp_path / "coded", vendor.LLAMA, tensors, **declared)
    named = "static activation scales (input_scale)"
    assert model_info(folder).not_applied == (named,)
    exact = "so activations are more exact than in the scheme's own runtime"
    shown = rooflax("inspect", folder).out
    assert f"not applied\n  {named}\n  {exact}\n" in shown
    assert json.loads(rooflax("inspect", folder, "--json").out)["weights"]["not_applied"] == [named]
    wanted = f"{folder}: not applied: {named}"
    ran = rooflax("generate", folder, "-p", "x", "-n", 1, "-q", "int8")
    assert f"{wanted}.\n" in ran.err
    assert f"{wanted}, {exact}.\n" in rooflax("generate", folder, "-p", "x", "-n", 1).err


def fp8_blocks(module, tensors, state, size):
    """e4m3 with a scale for each block, of which the last may not be whole; scales, numbers."""
    codes = tensors[f"{module}.weight"].astype(np.float32) * 50
    codes = tensors[f"{module}.weight"] = codes.astype(E4M3)
    outer, inner = codes.shape
    blocks = -(-outer // size), -(-inner // size)
    scales = state.uniform(0.5, 2, blocks).astype(np.float32) / 50
    rows, columns = np.arange(outer) // size, np.arange(inner) // size
    return scales, codes.astype(np.float32) * scales[np.ix_(rows, columns)]


@pytest.mark.parametrize(("end", "apart"), [("weight_scale", True), ("weight_scale_inv", False)])
def test_fp8_of_modelopts_blocks(end, apart, tmp_path):
    """128 x 128, in both ways in which its versions store their scales."""
    raw = vendor.LLAMA | {"intermediate_size": 320}

    def change(module, tensors, state):
        scales, numbers = fp8_blocks(module, tensors, state, 128)
        tensors[f"{module}.{end}"] = scales[:, None, :, None] if apart else scales
        return numbers

    tensors, plain = changed(raw, change)
    declared = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "group_size": 128}
    coded = vendor.write(tmp_path / "coded", raw, tensors, **declared)
    formats = {"qkv": "fp8-a16", "o": "fp8-a16"}  # a block each
    formats |= dict.fromkeys(("gate_up", "down"), "fp8-a16-g32")
    vendor.check(coded, vendor.write(tmp_path / "plain", raw | PLAIN, plain), formats)
    tensors[f"{Q}.{end}"] = np.ones((2, 1), np.float32)
    coded = vendor.write(tmp_path / "other", raw, tensors, **declared)
    with pytest.raises(CheckpointError, match=r"q_proj.weight .*has scales \[2, 1\]; wanted one"):
        load(coded)


def test_fp8_of_blocks_keeps_its_codes(tmp_path):
    """Also where the last blocks are not whole."""

    def change(module, tensors, state):
        tensors[f"{module}.weight_scale_inv"], numbers = fp8_blocks(module, tensors, state, 96)
        return numbers

    tensors, plain = changed(vendor.LLAMA, change)
    declared = {"quant_method": "fp8", "weight_block_size": [96, 96], "fmt": "e4m3"}
    coded = vendor.write(tmp_path / "coded", vendor.LLAMA, tensors, **declared)
    formats = dict.fromkeys(("qkv", "o", "gate_up", "down"), "fp8-a16-g32")
    plain = vendor.write(tmp_path / "plain", vendor.LLAMA | PLAIN, plain)
    vendor.check(coded, plain, formats, runs=True)


def test_nf4_keeps_its_codes(tmp_path):
    def change(module, tensors, state):
        shape = tensors[f"{module}.weight"].shape
        codes = state.randint(0, 16, shape).astype(np.uint8).reshape(-1)
        scales = state.uniform(0.01, 0.2, codes.size // 64).astype(np.float32)
        said = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
        name = f"{module}.weight"
        tensors[name] = (codes[::2] << 4 | codes[1::2])[:, None]
        tensors[f"{name}.absmax"], tensors[f"{name}.quant_map"] = scales, NF4_VALUES
        state = np.frombuffer(json.dumps(said).encode(), np.uint8)
        tensors[f"{name}.quant_state.bitsandbytes__nf4"] = state
        return (NF4_VALUES[codes] * np.repeat(scales, 64)).reshape(shape)

    tensors, plain = changed(vendor.LLAMA, change)
    declared = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    coded = vendor.write(tmp_path / "coded", vendor.LLAMA, tensors, **declared)
    formats = dict.fromkeys(("qkv", "o", "gate_up", "down"), "nf4-a16")
    plain = vendor.write(tmp_path / "plain", vendor.LLAMA | PLAIN, plain)
    vendor.check(coded, plain, formats, runs=True)


def affine(module, tensors, state, bits, group, shape=None):
    """MLX's q * s + b; the numbers."""
    shape = shape or tensors.pop(f"{module}.weight").shape
    codes = state.randint(0, 2**bits, shape).astype(np.uint8)
    groups = (*shape[:-1], shape[-1] // group)
    both = state.standard_normal((2, *groups))
    both += np.copysign(0.05, both)  # smaller ones are no float16s
    scales, biases = (both / 10).astype(ml_dtypes.bfloat16)
    scales = scales / ml_dtypes.bfloat16(2**bits)
    flat = codes.reshape(-1, shape[-1])
    octets = halves(flat) if bits == 4 else flat
    words = np.ascontiguousarray(octets).view(np.uint32)
    tensors[f"{module}.weight"] = words.reshape(*shape[:-1], -1)
    tensors[f"{module}.scales"], tensors[f"{module}.biases"] = scales, biases
    wide = [np.repeat(a.astype(np.float32), group, axis=-1) for a in (scales, biases)]
    return codes * wide[0] + wide[1]


def mlx_sizes(module):
    return {"bits": 8, "group_size": 32} if "down" in module else {"bits": 4, "group_size": 64}


def test_mlx_with_a_quantized_embedding(tmp_path):
    tensors, plain = changed(
        vendor.LLAMA,
        lambda module, *rest: affine(module, *rest, *mlx_sizes(module).values()),
    )
    state = np.random.RandomState(5)
    for module in ("model.embed_tokens", "lm_head"):
        plain[f"{module}.weight"] = affine(module, tensors, state, 4, 64).astype(np.float32)
    own = {"model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 32}}
    said = {"bits": 4, "group_size": 64, "mode": "affine", "model.layers.0.x": False} | own
    raw = vendor.LLAMA | {"quantization": said, "quantization_config": said}
    coded = vendor.write(tmp_path / "coded", raw, tensors)
    formats = {"qkv": "q4_1-a16", "o": "q4_1-a16", "gate_up": "q4_1-a16", "down": None}
    plain = vendor.write(tmp_path / "plain", vendor.LLAMA | PLAIN, plain)
    vendor.check(coded, plain, formats, runs=True)


MIXTRAL = vendor.LLAMA | {
    "model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2,
    "intermediate_size": 128,
}  # fmt: skip
MLX_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@pytest.mark.parametrize("raw", [vendor.EXPERTS, MIXTRAL], ids=["qwen3_moe", "mixtral"])
def test_mlx_with_experts_in_one_stack(raw, tmp_path):
    """Mixtral's under names that are not its own."""
    tensors, state = vendor.tensors(raw), np.random.RandomState(2)
    plain = dict(tensors)
    for module in [name.removesuffix(".weight") for name in tensors]:
        if ".experts.0." in module:
            layer, _, own = module.partition(".experts.0.")
            stack = f"{layer}.switch_mlp.{MLX_NAMES.get(own, own)}"
            shape = (3, *tensors[f"{module}.weight"].shape)
            numbers = affine(stack, tensors, state, 4, 64, shape).astype(np.float32)
            for expert, own in enumerate(numbers):
                name = module.replace(".experts.0.", f".experts.{expert}.") + ".weight"
                plain[name] = own
                del tensors[name]
    said = {"quantization": {"bits": 4, "group_size": 64}}
    coded = vendor.write(tmp_path / "coded", raw | said, tensors)
    formats = {"qkv": None, "o": None, "gate_up": "q4_1-a16", "down": "q4_1-a16", "router": None}
    plain = vendor.write(tmp_path / "plain", raw | PLAIN, plain)
    vendor.check(coded, plain, formats, runs=True)


GPT_OSS = goldens.VARIANTS["gpt_oss_short"]
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def mxfp4(module, tensors, state, shape):
    """MLX's e2m1 with a power of two per 32 inputs; the numbers."""
    codes = state.randint(0, 16, shape).astype(np.uint8)
    scales = state.randint(120, 128, (*shape[:-1], shape[-1] // 32)).astype(np.uint8)
    words = np.ascontiguousarray(halves(codes.reshape(-1, shape[-1]))).view(np.uint32)
    tensors[f"{module}.weight"] = words.reshape(*shape[:-1], -1)
    tensors[f"{module}.scales"] = scales
    factors = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    return np.array(E2M1, np.float32)[codes] * np.repeat(factors, 32, axis=-1)


def gpt_oss(write_experts):
    """MLX's names of GPT-OSS: gate and up apart, and attention in eight bits; both states."""
    tensors, state = vendor.tensors(GPT_OSS), np.random.RandomState(3)
    plain = dict(tensors)
    for name in list(plain):
        stack, _, own = name.rpartition(".")
        if own in FUSED:
            each = FUSED[own]
            experts, inner, outer = tensors.pop(name).shape
            biases = tensors.pop(f"{name}_bias")
            numbers = np.empty((experts, inner, outer), np.float32)
            for index, matmul in enumerate(each):
                module, shape = f"{stack}.{matmul}", (experts, outer // len(each), inner)
                made = write_experts(module, tensors, state, shape)
                numbers[..., index :: len(each)] = made.swapaxes(1, 2)
                tensors[f"{module}.bias"] = np.ascontiguousarray(biases[:, index :: len(each)])
            plain[name] = numbers
        elif own == "weight" and "_proj" in stack and "o_proj" not in stack:
            plain[name] = affine(stack, tensors, state, 8, 64).astype(np.float32)
    return tensors, plain


def written_by_mlx(folder, tensors, said):
    """A folder of `gpt_oss`, whose attention has eight bits."""
    modules = [n.removesuffix(".biases") for n in tensors if "_attn" in n and n.endswith("biases")]
    said = said | {module: {"group_size": 64, "bits": 8} for module in modules}
    return vendor.write(
        folder, GPT_OSS | {"quantization": said, "quantization_config": said}, tensors
    )


@pytest.mark.parametrize("mode", ["mxfp4", "affine"])
def test_mlx_of_gpt_oss(mode, tmp_path):
    """Whose experts it splits into gate and up."""
    if mode == "mxfp4":
        said, format = {"group_size": 32, "bits": 4, "mode": mode}, "mxfp4-a16"
        tensors, plain = gpt_oss(mxfp4)
    else:
        said, format = {"group_size": 32, "bits": 4}, "q4_1-a16"
        tensors, plain = gpt_oss(lambda *module: affine(*module[:3], 4, 32, module[3]))
    coded = written_by_mlx(tmp_path / "coded", tensors, said)
    plain = vendor.write(tmp_path / "plain", GPT_OSS | PLAIN, plain)
    formats = {"qkv": None, "o": None, "router": None, "gate_up": format, "down": format}
    vendor.check(coded, plain, formats, runs=True)
    plan = make_plan(coded)
    assert {name.rpartition(".")[2] for name in plan.storage.dequantized} == {"qkv"}
    assert plan.load_bytes == load(coded, dtype=None).weights_bytes


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("up_proj.weight", lambda a: a[:, :-1], r"gate_proj.weight in .* and its like have the sh"),
        ("up_proj.weight", None, "has no weight beside it"),
        ("gate_proj.scales", lambda a: a[..., :-1], r"gate_proj.scales in .* wanted U8"),
        ("gate_proj.scales", lambda a: a.astype(np.float32), "gate_proj.scales in .* is F32"),
        ("up_proj.bias", lambda a: a[:, :-1], "gate_proj.bias in .* and its like have the shapes"),
        ("up_proj.bias", None, "has no bias beside it"),
        ("gate_proj.weight", lambda a: a[0, 0], r"gate_proj.weight in .* has the shape \[8\]"),
    ],
)
def test_what_does_not_fit_a_stack_of_mlx_is_named(name, change, said, tmp_path):
    tensors, _ = gpt_oss(mxfp4)
    stack = "model.layers.0.mlp.experts"
    changed = tensors.pop(f"{stack}.{name}")
    if change is not None:
        tensors[f"{stack}.{name}"] = np.ascontiguousarray(change(changed))
    said_by_all = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    folder = written_by_mlx(tmp_path / "c", tensors, said_by_all)
    with pytest.raises(CheckpointError, match=said):
        model_info(folder).weights()


def test_int8_of_bitsandbytes(tmp_path):
    """q * SCB / 127 is rounded twice, once where it is kept with SCB / 127 as its scale."""

    def change(module, tensors, state):
        shape = tensors[f"{module}.weight"].shape
        codes = tensors[f"{module}.weight"] = state.randint(-127, 128, shape).astype(np.int8)
        scales = tensors[f"{module}.SCB"] = state.uniform(1, 2, shape[0]).astype(np.float32)
        tensors[f"{module}.weight_format"] = np.zeros((), np.uint8)
        return codes.astype(np.float32) * scales[:, None] * np.float32(7.874015718698502e-3)

    tensors, plain = changed(vendor.LLAMA, change)
    declared = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
    coded = vendor.write(tmp_path / "coded", vendor.LLAMA, tensors, **declared)
    ours = load(coded)
    theirs = load(vendor.write(tmp_path / "plain", vendor.LLAMA | PLAIN, plain))
    wanted = vendor.leaves(theirs)
    for slot, leaf in vendor.leaves(ours).items():
        np.testing.assert_array_equal(leaf, wanted[slot])
    for slot, leaf in vendor.leaves(load(coded, dtype=None)).items():
        numbers = vendor.numbers_of(leaf).reshape(wanted[slot].shape)
        np.testing.assert_allclose(numbers, wanted[slot], rtol=2e-7, atol=0)
    tensors[f"{Q}.weight_format"] = np.array(2, np.uint8)  # col_turing
    coded = vendor.write(tmp_path / "turned", vendor.LLAMA, tensors, **declared)
    with pytest.raises(CheckpointError, match=r"q_proj.weight_format in .* is 2; rooflax reads 0"):
        load(coded)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("weight_scale", None, r"q_proj.weight_packed in .* has no weight_scale beside it"),
        ("weight_scale", lambda a: a[:, :1], r"q_proj.weight_scale in .*wanted one for each group"),
        ("weight_shape", lambda a: a + 1, r"weight_shape in .* says \[129, 129\], and the codes"),
        ("weight_packed", lambda a: a[:, :-1], "has 120 inputs, which groups of 64 do not divide"),
        ("weight_packed", lambda a: a.view(np.float32), "weight_packed in .* is F32"),
    ],
)
def test_what_does_not_fit_is_named(name, change, said, tmp_path):
    tensors, _ = changed(vendor.LLAMA, of_groups)
    at = tensors.pop(f"{Q}.{name}")
    if change is not None:
        tensors[f"{Q}.{name}"] = np.ascontiguousarray(change(at))
    folder = vendor.write(tmp_path / "c", vendor.LLAMA, tensors, **COMPRESSED)
    with pytest.raises(CheckpointError, match=said):
        load(folder, dtype=None)


def torchao(**changed):
    """Both states of int8 weights, and what the file's metadata says of all tensors."""
    tensors, state = vendor.tensors(vendor.LLAMA), np.random.RandomState(4)
    plain, metadata = dict(tensors), {name: json.dumps({"_type": "Tensor"}) for name in tensors}
    for module in vendor.linears(tensors):
        outer, inner = tensors.pop(f"{module}.weight").shape
        codes = state.randint(-127, 128, (outer, inner)).astype(np.int8)
        scales = (state.uniform(0.5, 2, (outer, 1)) / 2000).astype(np.float32)
        tensors[f"{module}._weight_qdata"], tensors[f"{module}._weight_scale"] = codes, scales
        tensors[f"{module}._weight_zero_point"] = np.zeros((outer, 1), np.int8)
        described = {"_type": "Int8Tensor", "_data": {"block_size": [1, inner]}} | changed
        metadata[f"{module}.weight"] = json.dumps(described)
        plain[f"{module}.weight"] = codes * scales
    return tensors, plain, metadata | {"tensor_names": json.dumps(list(metadata))}


def test_int8_of_torchao(tmp_path):
    tensors, plain, metadata = torchao()
    coded = vendor.write(tmp_path / "coded", vendor.LLAMA, tensors, metadata, **INT8)
    formats = dict.fromkeys(("qkv", "o", "gate_up", "down"), "w8a16")
    plain = vendor.write(tmp_path / "plain", vendor.LLAMA | PLAIN, plain)
    vendor.check(coded, plain, formats, runs=True)
    assert model_info(coded).not_applied == ()
    dynamic = {"default": {"_type": "Int8DynamicActivationInt8WeightConfig"}}
    (coded / "config.json").write_text(
        json.dumps(vendor.LLAMA | {"quantization_config": INT8 | {"quant_type": dynamic}})
    )
    assert model_info(coded).not_applied == ("activation quantization",)


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ({"_type": "Int4TilePackedTo4dTensor"}, "is a 'Int4TilePackedTo4dTensor' of torchao, whi"),
        ({"_type": 5}, "has metadata that describe no tensor of torchao"),
        ({"_data": [3]}, "has metadata that describe no tensor of torchao"),
        ({"_data": {}}, "has block_size = None; it must be two sizes"),
        ({"_data": {"block_size": [1, 0]}}, r"has block_size = \[1, 0\]; it must be two sizes"),
        ({"_data": {"block_size": [3, 128]}}, r"has blocks of \[3, 128\]"),
        ({"_data": {"block_size": [1, 48]}}, "inputs, which groups of 48 do not divide"),
        ({"_data": {"block_size": [1, 64]}}, r"_weight_scale in .* wanted F16 or .* \[128, 2\]"),
        (
            {"_data": {"block_size": [1, 128], "target_dtype": {"_data": "int5"}}},
            "has blocks of .* 'int5'",
        ),
        ({"_type": "Float8Tensor"}, "_weight_qdata in .* is I8 and has scales, which belong to F8"),
    ],
)
def test_what_torchao_describes_otherwise_is_named(described, said, tmp_path):
    tensors, _, metadata = torchao(**described)
    folder = vendor.write(tmp_path / "c", vendor.LLAMA, tensors, metadata, **INT8)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=rf"_proj.*{said}"):
        model_info(folder).weights()


@pytest.mark.parametrize(
    ("end", "change", "said"),
    [
        ("qdata", None, "has no _weight_qdata beside it"),
        ("qdata", lambda a: a.astype(np.int16), "_weight_qdata in .* is I16"),
        ("qdata", lambda a: a[0], r"_weight_qdata in .* has the shape \[128\]"),
        ("scale", None, "has no _weight_scale beside it"),
        ("zero_point", lambda a: a + np.int8(1), "_weight_zero_point in .* other zero points than"),
        ("zero_point", lambda a: a.astype(np.float32), "_weight_zero_point in .* is F32"),
    ],
)
def test_tensors_of_torchao_that_do_not_fit_are_named(end, change, said, tmp_path):
    tensors, _, metadata = torchao()
    array = tensors.pop(f"{Q}._weight_{end}")
    if change is not None:
        tensors[f"{Q}._weight_{end}"] = np.ascontiguousarray(change(array))
    folder = vendor.write(tmp_path / "c", vendor.LLAMA, tensors, metadata, **INT8)
    with pytest.raises(CheckpointError, match=rf"q_proj.*{said}"):
        load(folder, dtype=None)


def test_codes_of_torchao_have_no_more_bits_than_it_says(tmp_path):
    four = {"block_size": [1, 128], "target_dtype": {"_type": "torch.dtype", "_data": "int4"}}
    tensors, _, metadata = torchao()
    described = {"_type": "IntxUnpackedToInt8Tensor", "_data": four}
    metadata[f"{Q}.weight"] = json.dumps(described)
    folder = vendor.write(tmp_path / "c", vendor.LLAMA, tensors, metadata, **INT8)
    with pytest.raises(CheckpointError, match="_weight_qdata in .* holds a number of more than 4"):
        load(folder)


def test_targets_are_names_or_classes(tmp_path):
    """Also a name without a dot."""
    tensors, plain = changed(vendor.LLAMA, lambda *module: int4(*module, 64))
    state = np.random.RandomState(5)
    plain["lm_head.weight"] = int4("lm_head", tensors, state, 32).astype(np.float32)
    weights = {"num_bits": 4, "type": "int", "strategy": "group"}
    groups = {
        "group_0": {"targets": ["lm_head"], "weights": weights | {"group_size": 32}},
        "group_1": {"targets": ["Linear"], "weights": weights | {"group_size": 64}},
    }
    declared = COMPRESSED | {"config_groups": groups}
    coded = vendor.write(tmp_path / "coded", vendor.LLAMA, tensors, **declared)
    formats = dict.fromkeys(("qkv", "o", "gate_up", "down"), "w4a16")
    vendor.check(coded, vendor.write(tmp_path / "plain", vendor.LLAMA | PLAIN, plain), formats)
    groups["group_1"]["targets"] = ["Embedding"]
    coded = vendor.write(tmp_path / "none", vendor.LLAMA, tensors, **declared)
    with pytest.raises(CheckpointError, match="_proj.weight_packed in .* is of no group"):
        load(coded)


def test_a_linear_layer_may_be_named_embed():
    """As GPT-NeoX's head is."""
    linear, table = object(), object()
    assert CompressedTensors({"Linear": linear}, [])._arguments("embed_out") is linear
    both = CompressedTensors({"Linear": linear, "Embedding": table}, [])
    assert both._arguments("model.embed_tokens") is table
    assert both._arguments("lm_head") is linear


def test_an_order_of_inputs_is_announced(tmp_path):
    """One that changes nothing may be there anyway."""
    tensors, _ = changed(vendor.LLAMA, of_groups)
    for name, order in {"none": np.full(128, -1), "theirs": np.arange(128) // 64}.items():
        tensors[f"{Q}.weight_g_idx"] = order.astype(np.int32)
        load(vendor.write(tmp_path / name, vendor.LLAMA, tensors, **COMPRESSED), dtype=None)
    tensors[f"{Q}.weight_g_idx"] = (np.arange(128) // 64)[::-1].astype(np.int32)
    folder = vendor.write(tmp_path / "another", vendor.LLAMA, tensors, **COMPRESSED)
    for dtype in (None, "float32"):
        with pytest.raises(CheckpointError, match=r"weight_g_idx in .* and config.json no actord"):
            load(folder, dtype=dtype)


def one_group(**group):
    return {"config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "marlin-24"}, "format = 'marlin-24'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ({"quantization_status": "initialized"}, "quantization_status"),
        ({"rotation": True}, "'rotation'"),
        (one_group(targets=[], weights={"scale": 1}), "'scale'"),
        (one_group(targets=["re:["], weights={}), "pattern"),
        (one_group(targets="Linear"), "targets = 'Linear'"),
        (one_group(targets=[], weights={"strategy": "block"}), "block_structure"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo = 'W4A8_AWQ'"),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_storage": "bfloat16"}, "quant_storage"),
        ({"quant_method": "mlx", "group_size": 64, "bits": 7}, "bits = 7"),
        ({"quant_method": "mlx", "group_size": 32, "bits": 4, "mode": "mxfp2"}, "mode = 'mxfp2'"),
        ({"quant_method": "mlx", "group_size": 64, "bits": 4, "mode": "mxfp4"}, "be 4 and 32"),
        ({"quant_method": "mlx", "group_size": 64, "x": {"mode": "nvfp4", "bits": 8}}, "4 and 16"),
        ({"quant_method": "quark"}, "quantised by 'quark'"),
        (
            INT8 | {"quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}},
            "torchao's 'Int4WeightOnlyConfig', which packs them for one kind",
        ),
        ({"quant_method": "torchao", "quant_type": {"default": {}, "x": 1}}, "no '_type'"),
        ({"quant_method": "torchao"}, "no 'quant_type'"),
    ],
)  # fmt: skip
def test_keys_that_change_values_are_rejected_by_name(change, said, tmp_path):
    declared = (COMPRESSED if "quant_method" not in change else {}) | change
    folder = vendor.write(tmp_path / "c", vendor.LLAMA, {"x": np.zeros(1)}, **declared)
    with pytest.raises((UnsupportedModelError, CheckpointError), match=said):
        model_info(folder)


CHANNEL = one_group(targets=["Linear"], weights={"num_bits": 4, "strategy": "channel"})


@pytest.mark.parametrize(
    ("method", "stored", "said"),
    [
        ("gptq", {"qweight": np.zeros((0, 8), np.int32)}, r"is I32 \[0, 8\], wanted"),
        ("awq", {"qweight": np.zeros((8, 0), np.int32)}, r"is I32 \[8, 0\], wanted"),
        (
            "compressed-tensors",
            {"weight_packed": np.zeros((8, 0), np.int32), "weight_scale": np.ones((8, 1), "<f2")},
            "has 0 inputs",
        ),
        ("modelopt", {"weight": np.zeros(8, E4M3)}, r"has the shape \[8\], wanted \[out, in\]"),
        ("modelopt", {"weight": np.zeros((2, 3, 4), E4M3)}, r"has the shape \[2, 3, 4\]"),
        ("fp8", {"weight": np.zeros((), E4M3)}, r"has the shape \[\]"),
        (
            "modelopt",
            {"weight": np.zeros((8, 8), E4M3), "weight_scale": np.ones((0, 3), np.float32)},
            r"has scales \[0, 3\]",
        ),
        (
            "fbgemm_fp8",
            {"weight": np.zeros((8, 8), E4M3), "weight_scale": np.ones((8, 0), np.float32)},
            r"has scales \[8, 0\]",
        ),
    ],
)
def test_shapes_of_no_weight_are_named(method, stored, said, tmp_path):
    settings = {
        "gptq": {"bits": 4, "group_size": -1}, "awq": {"bits": 4, "group_size": -1},
        "compressed-tensors": CHANNEL, "modelopt": {"quant_algo": "FP8"},
    }  # fmt: skip
    tensors = {f"{Q}.{end}": array for end, array in stored.items()}
    if "weight" in stored:
        tensors.setdefault(f"{Q}.weight_scale", np.ones((), np.float32))
    declared = {"quant_method": method} | settings.get(method, {})
    folder = vendor.write(tmp_path / "c", vendor.LLAMA, tensors, **declared)
    with pytest.raises(CheckpointError, match=rf"q_proj.*{said}"):
        model_info(folder).weights()


def test_a_state_of_bitsandbytes_that_is_none(tmp_path):
    name = f"{Q}.weight.quant_state.bitsandbytes__nf4"
    tensors = {f"{Q}.weight": np.zeros((8, 1), np.uint8)}
    for data, said in ((b"{}", "is no state"), (b'{"shape": [0, 4]}', "is no state"),
                       (b'{"shape": [4, 4]}', "has no absmax beside it")):  # fmt: skip
        tensors[name] = np.frombuffer(data, np.uint8)
        folder = vendor.write(
            tmp_path / data.hex(), vendor.LLAMA, tensors, quant_method="bitsandbytes"
        )
        with pytest.raises(CheckpointError, match=rf"q_proj.* in .*model.safetensors {said}"):
            load(folder)
