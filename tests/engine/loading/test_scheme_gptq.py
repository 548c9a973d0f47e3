"""Checkpoints of GPTQ and AWQ are their numbers, exactly, and their codes stay as they are.

The reference packs codes one by one, as the layouts are published.
"""

import jax
import numpy as np
import pytest

from rooflax import load
from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.loading.model_info import model_info
from rooflax.loading.plan import make_plan
from rooflax.loading.save import save
from tests.support.loading import vendor

pytestmark = pytest.mark.oldest_jax

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def words(codes, bits, order=None):
    """Codes [rows, n] as [rows, n * bits / 32], bit by bit."""
    rows, count = codes.shape
    at = [i if order is None else i // 8 * 8 + order.index(i % 8) for i in range(count)]
    found = np.zeros((rows, count, bits), np.uint8)
    found[:, at] = codes[:, :, None] >> np.arange(bits) & 1
    return np.packbits(found.reshape(rows, -1), axis=1, bitorder="little").view(np.int32)


def quantized(module, tensors, numbers, method, *, bits=4, group=128, symmetric=False, order=None,
              less_one=True, dtype=np.float16):  # fmt: skip
    """Replaces a weight by codes, and writes down the numbers that they are."""
    w = tensors.pop(f"{module}.weight")
    outer, inner = w.shape
    group = inner if group == -1 else group
    state = np.random.RandomState(len(module))
    codes = state.randint(0, 2**bits, w.shape)
    zeros = state.randint(0, 2**bits, (outer, inner // group))
    if symmetric:
        zeros[:] = 2 ** (bits - 1)
    scales = (state.uniform(0.5, 2, zeros.shape) / inner**0.5 / 2**bits).astype(dtype)
    index = np.arange(inner) // group if order is None else order(inner, group)
    numbers[f"{module}.weight"] = (codes - zeros[:, index]).astype(np.float32) * scales.astype(
        np.float32
    )[:, index]
    tensors[f"{module}.scales"] = np.ascontiguousarray(scales.T)
    if method == "awq":
        tensors[f"{module}.qweight"] = words(codes.T, 4, AWQ_ORDER)
        tensors[f"{module}.qzeros"] = words(zeros.T, 4, AWQ_ORDER)
        return
    tensors[f"{module}.qweight"] = np.ascontiguousarray(words(codes, bits).T)
    tensors[f"{module}.qzeros"] = words((zeros.T - less_one) % 2**bits, bits)
    tensors[f"{module}.g_idx"] = index.astype(np.int32)


def both(tmp_path, declared, method, raw=vendor.LLAMA, **how):
    """A folder in codes and one of its numbers."""
    tensors = vendor.tensors(raw)
    plain = dict(tensors)
    for module in vendor.linears(tensors):
        quantized(module, tensors, plain, method, **how)
    coded = vendor.write(tmp_path / "coded", raw, tensors, quant_method=method, **declared)
    return coded, vendor.write(tmp_path / "plain", raw | {"torch_dtype": "float32"}, plain)


def alike(format):
    return dict.fromkeys(("qkv", "o", "gate_up", "down"), format)


@pytest.mark.parametrize(
    ("group", "format"), [(128, "w4a16-z128"), (64, "w4a16-z64"), (32, "w8a16-g32")]
)
def test_awq_is_its_numbers(group, format, tmp_path):
    declared = {"bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    vendor.check(*both(tmp_path, declared, "awq", group=group), alike(format), runs=True)


def test_what_gptqmodel_writes_today_opens(tmp_path):
    """The method beside `quant_method`, the version as `format`; AWQ without zero points, whose
    tensors are as ever."""
    said = {
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "pack_dtype": "int32",
        "lm_head": False,
    }
    said |= {"method": "gptq", "format": "gptq_v2", "sym": True, "meta": {"quantizer": ["x:7"]}}
    how = {"symmetric": True, "less_one": False}
    vendor.check(*both(tmp_path / "gptq", said, "gptq", **how), alike("w4a16"))
    said |= {"method": "awq", "format": "gemm", "version": "gemm", "zero_point": False}
    folders = both(tmp_path / "awq", said | {"checkpoint_format": "gemm"}, "awq", symmetric=True)
    vendor.check(*folders, alike("w4a16"))


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "format"),
    [
        (4, 128, True, "w4a16"), (4, 32, True, "w4a16"), (4, -1, True, "w4a16"),
        (4, 64, False, "w4a16-z64"), (8, 32, True, "w8a16-g32"), (8, -1, True, "w8a16"),
        (8, 64, False, None), (3, 32, False, "w8a16-g32"), (2, 64, True, "w8a16-g32"),
    ],
)  # fmt: skip
def test_gptq_is_its_numbers(bits, group, symmetric, format, tmp_path):
    version = "gptq" if group == 64 else "gptq_v2"
    declared = {"bits": bits, "group_size": group, "sym": symmetric, "checkpoint_format": version}
    how = {"bits": bits, "group": group, "symmetric": symmetric, "less_one": version == "gptq"}
    folders = both(tmp_path, declared | {"desc_act": False}, "gptq", **how)
    vendor.check(*folders, alike(format))


def permuted(inner, group):
    return np.random.RandomState(3).permutation(np.arange(inner) // group)


@pytest.mark.parametrize(("group", "format"), [(32, None), (-1, "w4a16")])
def test_inputs_in_the_order_of_their_activations(group, format, tmp_path):
    declared = {"bits": 4, "group_size": group, "sym": True, "desc_act": True}
    how = {"group": group, "symmetric": True, "order": permuted}
    vendor.check(*both(tmp_path, declared, "gptq", **how), alike(format))


def test_experts_stay_in_their_codes(tmp_path):
    declared = {"bits": 4, "group_size": 128, "sym": True}
    folders = both(tmp_path, declared, "gptq", raw=vendor.EXPERTS, symmetric=True)
    vendor.check(*folders, alike("w4a16") | {"router": None}, runs=True)


def test_bfloat16_scales_are_float16s(tmp_path):
    import ml_dtypes

    declared = {"bits": 4, "group_size": 64, "sym": False}
    folders = both(tmp_path, declared, "gptq", group=64, dtype=ml_dtypes.bfloat16)
    vendor.check(*folders, alike("w4a16-z64"))


@pytest.mark.parametrize("group", [64, 128])
def test_kept_codes_are_saved_as_they_are(group, tmp_path):
    declared = {"bits": 4, "group_size": group}
    coded, _ = both(tmp_path, declared, "awq", group=group)
    kept = load(coded, dtype=None)
    save(kept, tmp_path / "saved", files_from=coded)
    again = load(tmp_path / "saved", dtype=None)
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), kept.weights, again.weights)
    assert all(jax.tree.leaves(same))


def test_the_plan_says_what_numbers_take(tmp_path):
    """A dequantized weight is float32, though config.json says bfloat16."""
    declared = {"bits": 8, "group_size": 64, "sym": False}
    coded, _ = both(tmp_path, declared, "gptq", bits=8, group=64)
    plan = make_plan(model_info(coded), dtype=None)
    model = load(coded, dtype=None)
    assert len(plan.storage.dequantized) == 4 and not plan.storage.prequantized
    assert abs(plan.memory.weights - model.weights_bytes) < 0.1 * model.weights_bytes


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("g_idx", lambda a: a + 2, r"names groups from 2 to 3 of 2"),
        ("g_idx", lambda a: a[::-1].copy(), "has another order of inputs, and config.json no desc"),
        ("g_idx", lambda a: a[:-1].copy(), r"is I32 \[127\], wanted I32 or I64 \[128\]"),
        ("scales", lambda a: a[:-1].copy(), r"is F16 \[1, 128\], wanted .* \[2, 128\]"),
        ("scales", None, "in .*model.safetensors has no scales beside it"),
        ("scales", lambda a: a.view(np.int16), "is I16"),
        ("qzeros", None, "has no qzeros beside it"),
        ("qzeros", lambda a: a + 1, "holds other zero points than 8, which"),
        ("qweight", lambda a: a[:-1].copy(), "has 120 inputs, which groups of 64 do not divide"),
        ("qweight", lambda a: a.reshape(-1), r"is I32 \[2048\], wanted I32 \[rows, columns\]"),
    ],
)
def test_what_does_not_fit_is_named(name, change, said, tmp_path):
    declared = {"bits": 4, "group_size": 64, "sym": True}
    tensors = vendor.tensors(vendor.LLAMA)
    for module in vendor.linears(tensors):
        quantized(module, tensors, {}, "gptq", group=64, symmetric=True)
    at = f"model.layers.0.self_attn.q_proj.{name}"
    changed = tensors.pop(at)
    if change is not None:
        tensors[at] = change(changed)
    folder = vendor.write(tmp_path / "c", vendor.LLAMA, tensors, quant_method="gptq", **declared)
    with pytest.raises(CheckpointError, match=rf"q_proj.*{said}"):
        load(folder, dtype=None)


@pytest.mark.parametrize(
    ("method", "change", "said"),
    [
        ("awq", {"version": "gemv"}, "version = 'gemv'"),
        ("awq", {"bits": 8}, "bits = 8"),
        ("awq", {"method": "gptq"}, "method = 'gptq'"),
        ("gptq", {"method": "qqq"}, "method = 'qqq'"),
        ("gptq", {"checkpoint_format": "gptq", "format": "gptq_v2"}, "format = 'gptq_v2'"),
        ("awq", {"rotation": 1}, "'rotation'.*ignore_config_keys rotation"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        ("gptq", {"rotation": "hadamard"}, "'rotation'"),
        ("gptq", {"dynamic": {".*": {"rotation": 1}}}, "'rotation', .* does not read for gptq;"),
    ],
)
def test_keys_that_change_values_are_rejected_by_name(method, change, said, tmp_path):
    declared = {"quant_method": method, "bits": 4, "group_size": 64} | change
    folder = vendor.write(tmp_path / "c", vendor.LLAMA, {"x": np.zeros(1)}, **declared)
    with pytest.raises(UnsupportedModelError, match=said):
        model_info(folder)
    if "rotation" in str(change):
        model_info(folder, ignore_config_keys=["rotation"])


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 5}, {"bits": "4"}, {"group_size": 0}, {"sym": 1}, {"dynamic": {"[": {}}},
        {"dynamic": ["x"]}, {"dynamic": {"x": 5}},
    ],
)  # fmt: skip
def test_impossible_values_are_rejected(change, tmp_path):
    declared = {"quant_method": "gptq", "bits": 4, "group_size": 64} | change
    folder = vendor.write(tmp_path / "c", vendor.LLAMA, {"x": np.zeros(1)}, **declared)
    with pytest.raises(CheckpointError, match="config.json(: dynamic)? has"):
        model_info(folder)


def test_biases_of_zeros_add_nothing(tmp_path):
    """As AutoGPTQ wrote them beside every matmul of a family that has none."""
    tensors = vendor.tensors(vendor.LLAMA)
    plain = dict(tensors)
    for module in vendor.linears(tensors):
        quantized(module, tensors, plain, "gptq", symmetric=True)
        tensors[f"{module}.bias"] = np.zeros(tensors[f"{module}.scales"].shape[1], np.float16)
    declared = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    coded = vendor.write(tmp_path / "coded", vendor.LLAMA, tensors, **declared)
    raw = vendor.LLAMA | {"torch_dtype": "float32"}
    vendor.check(coded, vendor.write(tmp_path / "plain", raw, plain), alike("w4a16"))
    tensors["model.layers.0.mlp.up_proj.bias"][3] = 1
    coded = vendor.write(tmp_path / "biased", vendor.LLAMA, tensors, **declared)
    with pytest.raises(CheckpointError, match=r"does not use: .*up_proj\.bias \[256\]\.$"):
        load(coded, dtype=None)


def test_modules_of_their_own_settings(tmp_path):
    """GPTQModel's `dynamic`: down projections of eight bits, o projections plain."""
    tensors = vendor.tensors(vendor.LLAMA)
    plain = dict(tensors)
    for module in vendor.linears(tensors):
        bits = 8 if "down_proj" in module else 4
        if "o_proj" not in module:
            quantized(module, tensors, plain, "gptq", bits=bits, group=64, symmetric=True)
    own = {"bits": 8, "damp_percent": 0.1, "mse": 2.4}
    dynamic = {r"+:.*\.down_proj": own, r"-:.*\.o_proj": {}}
    declared = {"quant_method": "gptq", "bits": 4, "group_size": 64, "dynamic": dynamic}
    coded = vendor.write(tmp_path / "coded", vendor.LLAMA, tensors, **declared)
    raw = vendor.LLAMA | {"torch_dtype": "float32"}
    formats = {"qkv": "w4a16", "o": None, "gate_up": "w4a16", "down": "w8a16-g32"}
    vendor.check(coded, vendor.write(tmp_path / "plain", raw, plain), formats)


OLDER = {"quant_method": "intel/auto-round"}


@pytest.mark.parametrize(
    ("stated", "layout", "less_one"),
    [
        ({"packing_format": "auto_round:auto_gptq"}, "gptq", True),
        ({"packing_format": "auto_round:gptqmodel"}, "gptq", False),
        ({"packing_format": "auto_round", "sym": False}, "gptq", False),
        ({"packing_format": "auto_round:auto_awq", "backend": "auto"}, "awq", None),
        (OLDER | {"backend": "auto_round:gptq:exllamav2"}, "gptq", True),
    ],
)
def test_auto_round_packs_as_gptq_or_awq(stated, layout, less_one, tmp_path):
    symmetric = stated.get("sym", True)
    tensors = vendor.tensors(vendor.LLAMA)
    plain = dict(tensors)
    how = {"group": 64, "symmetric": symmetric, "less_one": less_one}
    for module in vendor.linears(tensors):
        quantized(module, tensors, plain, layout, **how)
        tensors.pop(f"{module}.g_idx", None)  # which it leaves out
    said = {"bits": 4, "group_size": 64, "sym": True, "data_type": "int", "iters": 200}
    said |= {"autoround_version": "0.8", "enable_quanted_input": True}
    said |= {"quant_method": "auto-round"} | stated
    coded = vendor.write(tmp_path / "coded", vendor.LLAMA, tensors, **said)
    raw = vendor.LLAMA | {"torch_dtype": "float32"}
    formats = alike("w4a16" if symmetric else "w4a16-z64")
    vendor.check(coded, vendor.write(tmp_path / "plain", raw, plain), formats)


def test_auto_rounds_settings_of_modules(tmp_path):
    """By names, before patterns that are found anywhere in them."""
    tensors = vendor.tensors(vendor.LLAMA)
    plain = dict(tensors)
    for module in vendor.linears(tensors):
        bits = 8 if module.endswith(("down_proj", "q_proj")) else 4
        if "o_proj" not in module:
            quantized(module, tensors, plain, "gptq", bits=bits, group=64, symmetric=True)
    eight = {"bits": 8, "data_type": "int", "act_bits": 16, "act_sym": True}
    own = {
        "model.layers.0.self_attn.q_proj": eight,
        r"layers\.0.*(down|q)_proj": eight | {"sym": True},
        "model.layers.0.self_attn.o_proj": {"bits": 16, "act_bits": 16, "data_type": "float"},
    }  # fmt: skip
    declared = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "extra_config": own}
    coded = vendor.write(tmp_path / "coded", vendor.LLAMA, tensors, **declared)
    raw = vendor.LLAMA | {"torch_dtype": "float32"}
    formats = {"qkv": "w8a16-g32|w4a16|w4a16", "o": None, "gate_up": "w4a16", "down": "w8a16-g32"}
    vendor.check(coded, vendor.write(tmp_path / "plain", raw, plain), formats)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"packing_format": "auto_round:llm_compressor"}, "packing_format = 'auto_round:llm_comp"),
        ({"data_type": "mx_fp"}, "data_type = 'mx_fp'"),
        ({"act_bits": 8}, "act_bits = 8"),
        ({"super_bits": 6}, "super_bits = 6"),
        ({"extra_config": {"x": {"bits": 4, "data_type": "fp"}}}, "data_type = 'fp'"),
        ({"packing_format": "auto_round:auto_awq", "bits": 8}, "AWQ's layout with others than 4"),
        (
            {"packing_format": "auto_round:auto_awq", "extra_config": {"x": {"group_size": 32}}},
            "AWQ's layout with others than 4",
        ),
        ({"rotation": "hadamard"}, "'rotation'"),
        ({"extra_config": {"x": {"rotation": 1}}}, "'rotation'"),
    ],
)
def test_what_else_auto_round_writes_is_rejected_by_name(change, said, tmp_path):
    declared = {"quant_method": "auto-round", "bits": 4, "group_size": 64} | change
    folder = vendor.write(tmp_path / "c", vendor.LLAMA, {"x": np.zeros(1)}, **declared)
    with pytest.raises(UnsupportedModelError, match=said):
        model_info(folder)
