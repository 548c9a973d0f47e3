"""Files of more families: by llama.cpp's converter, and written with gguf-py's own names."""

import json
import re
from dataclasses import replace

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from rooflax import load
from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.loading.gguf import GGUFFile
from rooflax.loading.gguf_config import read_gguf_config
from rooflax.loading.gguf_metadata import HeaderOnly, architecture_metadata
from rooflax.loading.gguf_save import save_gguf
from rooflax.loading.gguf_weights import tensor_entries
from rooflax.loading.model_info import model_info
from rooflax.models.registry import read_config
from tests import gguf_cases, goldens

pytestmark = pytest.mark.oldest_jax

FLOAT = gguf.GGUFValueType.FLOAT32
CASES = {
    "seed_oss": "seed_oss_bias", "qwen3moe": "qwen3_moe", "llama": "mixtral",
    "gemma3": "gemma3_text", "granite": "granite_bias", "olmo2": "olmo2_bias",
    "qwen2moe": "qwen2_moe", "glm4moe": "glm4_moe",
    "hunyuan-dense": "hunyuan_bias", "mistral3": "ministral3", "exaone4": "exaone4",
    "cohere2": "cohere2", "phi3": "phi3_long",
    "glm4": "glm4", "ernie4_5": "ernie4_5_bias",
}  # fmt: skip
"""gguf's architecture to the checkpoint that is written as one."""
LONGROPE = goldens.VARIANTS["phi3_long"]["rope_scaling"] | {"attention_factor": 1.75}
CHANGES = {
    "phi3": {"rope_scaling": LONGROPE},
    "gemma3": {"sliding_window_pattern": 6, "query_pre_attn_scalar": 20},
}  # fmt: skip
"""What such a file cannot say."""
PERMUTED = ("mixtral", "granite", "ministral3")


def permuted(rows, heads):
    """Rows of q or k as llama.cpp's converter has them in files of LLaMA's architecture."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def converted(raw, tensors):
    """The checkpoint's tensors as llama.cpp's converter changes them: experts stacked, by name."""
    experts, found = {}, {}
    for name, array in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+\.weight)", name):
            experts.setdefault(f"{match[1]}.{match[3]}", []).append(array)
        elif raw["model_type"] in PERMUTED and re.search(r"\.[qk]_proj", name):
            kind = "attention" if ".q_proj" in name else "key_value"
            found[name] = permuted(array, raw[f"num_{kind}_heads"])
        else:
            is_less = raw["model_type"] == "gemma3_text" and name.endswith("norm.weight")
            found[name] = array + 1 if is_less else array
    return found | {name: np.stack(arrays) for name, arrays in experts.items()}


def write_gguf(path, arch, variant, reference):
    """The checkpoint as gguf-py names its parts."""
    raw = goldens.VARIANTS[variant]
    tensors = converted(raw, goldens.tensors(variant, reference))
    writer = gguf.GGUFWriter(path, arch)
    heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    writer.add_vocab_size(raw["vocab_size"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(raw["num_key_value_heads"])
    if arch == "cohere2":
        writer.add_layer_norm_eps(raw["layer_norm_eps"])
        writer.add_logit_scale(raw["logit_scale"])
    else:
        writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    if arch in ("cohere2", "exaone4"):
        writer.add_sliding_window(raw["sliding_window"])
    if arch == "exaone4":
        writer.add_sliding_window_pattern([True, False] * 2)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(
        int(head_dim * raw.get("partial_rotary_factor", 0.5 if arch in ("glm4", "glm4moe") else 1))
    )
    rope = raw.get("rope_parameters", raw)
    writer.add_rope_freq_base(rope["rope_theta"])
    if arch == "mistral3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if arch == "granite":
        writer.add_attention_scale(raw["attention_multiplier"])
        writer.add_embedding_scale(raw["embedding_multiplier"])
        writer.add_residual_scale(raw["residual_multiplier"])
        writer.add_logit_scale(raw["logits_scaling"])
    if arch == "gemma3":
        writer.add_sliding_window(raw["sliding_window"])
        writer.add_key_value("gemma3.rope.freq_base_swa", raw["rope_local_base_freq"], FLOAT)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(raw["rope_scaling"]["factor"])
    if arch == "phi3":
        writer.add_sliding_window(0)
        writer.add_rope_scaling_orig_ctx_len(raw["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(LONGROPE["attention_factor"])
        for kind in ("short", "long"):
            factors = np.float32(LONGROPE[f"{kind}_factor"])
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    if "num_experts_per_tok" in raw:
        keys = ("num_experts", "num_local_experts", "n_routed_experts")
        writer.add_expert_count(next(raw[key] for key in keys if key in raw))
        writer.add_expert_used_count(raw["num_experts_per_tok"])
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(raw["shared_expert_intermediate_size"])
    if arch == "glm4moe":
        writer.add_expert_shared_count(raw["n_shared_experts"])
        writer.add_expert_weights_scale(raw["routed_scaling_factor"])
        writer.add_expert_weights_norm(True)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_leading_dense_block_count(raw["first_k_dense_replace"])
    if "moe_intermediate_size" in raw:
        writer.add_expert_feed_forward_length(raw["moe_intermediate_size"])
    code = next(code for code, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(code, raw["num_hidden_layers"])
    for name, array in tensors.items():
        hf = name.replace("correction_bias", "correction.bias")  # as the converter does first
        stored = names.get_name(hf, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("arch", CASES)
def test_a_file_with_ggufs_names_is_the_checkpoint(arch, tmp_path):
    reference = goldens.committed(CASES[arch])
    folder = goldens.write_checkpoint(
        tmp_path / "m", CASES[arch], reference, config=CHANGES.get(arch)
    )
    ours = load(write_gguf(tmp_path / "m.gguf", arch, CASES[arch], reference))
    theirs = load(folder)
    assert (ours.family, ours.config) == (theirs.family, theirs.config)
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), ours.weights, theirs.weights)
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("name", [*gguf_cases.KEPT, gguf_cases.EMBEDS])
def test_a_file_of_llama_cpps_converter_is_the_checkpoint(name, tmp_path):
    """Its matrices are the checkpoint's to the nearest bfloat16, all else as it was."""
    path = gguf_cases.kept(name)
    ours, theirs = load(path), load(gguf_cases.write_kept(tmp_path / "m", name))
    assert ours.family == gguf_cases.READ_AS.get(name, theirs.family)
    is_other = ours.family != theirs.family  # whose tensors may have other names
    names = ours.config.names if is_other else theirs.config.names
    config = replace(theirs.config, names=names)
    if name.startswith("gemma4") and config.logit_cap is None:  # the converter leaves it out
        config = replace(config, logit_cap=30.0)  # and llama.cpp has this one then
    assert ours.config == config
    file = GGUFFile(path)
    bfloat16 = {n for n in file.names() if file.info(n).dtype == "BF16"}
    entries, seen = tensor_entries(ours.family, ours.config), 0
    for slot in ours.config.params():
        a, b = (
            np.asarray(
                (m.weights if slot.layer is None else m.weights["layers"][slot.layer])[slot.key]
            )
            for m in (ours, theirs)
        )
        stored = {stored for hf in slot.hf_names for stored in entries[hf].stored}
        b = b.astype(ml_dtypes.bfloat16).astype(np.float32) if stored <= bfloat16 else b
        exact = slot.key != "delta.a_log"  # of which the file has the exponential
        np.testing.assert_allclose(a, b, rtol=0, atol=0 if exact else 1e-6, err_msg=slot.name)
        seen += stored <= bfloat16
    assert seen > 3


def test_layers_behind_the_pooling_come_along(tmp_path):
    found = model_info(gguf_cases.kept(gguf_cases.EMBEDS)).pooling
    wanted = model_info(gguf_cases.write_embedding_gemma(tmp_path / "m")).pooling
    assert (found.pooler, found.normalizes, len(found.dense)) == (wanted.pooler, True, 2)
    for ours, theirs in zip(found.dense, wanted.dense, strict=True):
        weight = theirs.weight.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(ours.weight, weight)
        assert (ours.bias, ours.activation) == (None, theirs.activation)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dense_3_feat_in": 21}, "dense_3_feat_in = 21"),
        ({"without": ("dense_2",)}, "does not read the 16 numbers"),
        ({"attention.causal": True}, "attention.causal = True"),
    ],
)
def test_layers_behind_the_pooling_that_do_not_fit_are_rejected(changes, said, tmp_path):
    writer = extended(tmp_path / "m.gguf", gguf_cases.kept(gguf_cases.EMBEDS), {}, **changes)
    if "attention.causal" in changes:
        writer.add_causal_attention(True)
    finished(writer)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=said):
        model_info(tmp_path / "m.gguf")


def extended(path, source, tensors, without=(), **values):
    """A copy of a file with further tensors, other values of some keys, and not all it had."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for field in reader.fields.values():
        skipped = ("GGUF.", "general.architecture", *(f"{architecture}.{key}" for key in without))
        if not field.name.startswith(skipped):
            kind, sub = field.types[0], field.types[-1] if len(field.types) > 1 else None
            key = field.name.removeprefix(f"{architecture}.")
            writer.add_key_value(field.name, values.get(key, field.contents()), kind, sub_type=sub)
    for tensor in reader.tensors:
        if any(part in tensor.name for part in without):
            continue
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    return writer


def finished(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_an_old_file_of_latent_attention_has_keys_and_values_of_its_heads(tmp_path):
    """As llama.cpp's converter wrote them until April 2025."""
    name = "deepseek_v2"
    folder = gguf_cases.write_family(tmp_path / "m", name, **gguf_cases.kept_sizes(name))
    save_gguf(model_info(folder), tmp_path / "new.gguf", "F32")
    raw, part = json.loads((folder / "config.json").read_text()), "kv_b_proj"
    values = {
        "attention.head_count_kv": raw["num_attention_heads"],
        "attention.key_length": raw["qk_nope_head_dim"] + raw["qk_rope_head_dim"],
        "attention.value_length": raw["v_head_dim"],
    }
    stored = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors = {
        f"blk.{i}.attn_kv_b.weight": stored[f"model.layers.{i}.self_attn.{part}.weight"]
        for i in range(raw["num_hidden_layers"])
    }
    without = ("attention.key_length_mla", "attention.value_length_mla", "attn_k_b", "attn_v_b")
    args = tmp_path / "m.gguf", tmp_path / "new.gguf", tensors
    finished(extended(*args, without=without, **values))
    same_models(tmp_path / "m.gguf", tmp_path / "new.gguf")


def same_models(path, source):
    ours, plain = load(path), load(source)
    assert ours.config == plain.config
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), ours.weights, plain.weights)
    assert all(jax.tree.leaves(same))


def test_a_layer_that_predicts_further_tokens_is_passed_over(tmp_path):
    source, last = gguf_cases.kept("qwen3_5"), 3  # the number of layers
    flags = gguf.GGUFReader(source).fields["qwen35.attention.recurrent_layers"].contents()
    values = {"block_count": last + 1, "attention.recurrent_layers": [*flags, False]}
    names = ("attn_norm", "nextn.eh_proj", "nextn.enorm")
    tensors = {f"blk.{last}.{name}.weight": np.ones((2, 16), np.float32) for name in names}
    writer = extended(tmp_path / "m.gguf", source, tensors, **values)
    writer.add_nextn_predict_layers(1)
    finished(writer)
    same_models(tmp_path / "m.gguf", source)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gemma4", "attention.head_count_kv", [2, 1, 1, 1]),
        ("gemma4_shared", "feed_forward_length", [24, 48, 24, 48, 48, 48, 48]),
    ],
)
def test_layers_of_a_kind_that_differ_are_rejected(name, key, value, tmp_path):
    finished(extended(tmp_path / "m.gguf", gguf_cases.kept(name), {}, **{key: value}))
    with pytest.raises(UnsupportedModelError, match=f"gemma4.{key}"):
        load(tmp_path / "m.gguf")


def test_keys_and_values_that_no_layer_reads_are_passed_over(tmp_path):
    """Gemma 4's checkpoints have them in layers that attend to those of others."""
    source = gguf_cases.kept("gemma4_shared")
    file = GGUFFile(source)
    tensors = {
        name.replace("blk.2.", "blk.6."): np.ones(file.info(name).shape, np.float32)
        for name in file.names()
        if name in ("blk.2.attn_k.weight", "blk.2.attn_v.weight", "blk.2.attn_k_norm.weight")
    }
    assert len(tensors) == 3
    finished(extended(tmp_path / "m.gguf", source, tensors))
    same_models(tmp_path / "m.gguf", source)


@pytest.mark.parametrize(("count", "wanted"), [(60, [None] * 60), (64, ([4096] * 3 + [None]) * 16)])
def test_an_exaone4_of_64_layers_has_windows_that_its_file_need_not_state(count, wanted, tmp_path):
    """As llama.cpp has it, which knows the model with windows by the number of its layers."""
    raw = goldens.VARIANTS["exaone4_full"]
    metadata = architecture_metadata(read_config(raw)[1], raw) | {"exaone4.block_count": count}
    assert not [key for key in metadata if "window" in key]
    layers = read_gguf_config(HeaderOnly(tmp_path, metadata, {}, {}))[1].layers
    assert [layer.attention.window for layer in layers] == wanted
    turned = [layer.attention.rope is not None for layer in layers]
    assert turned == [count == 60 or bool(window) for window in wanted]
