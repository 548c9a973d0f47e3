"""Checkpoints with a vision tower: their text part is the text model, and the tower is skipped."""

import json

import jax
import numpy as np
import pytest

from rooflax import LLM, SamplingParams, load, model_info
from rooflax.cli.main import main
from rooflax.errors import CheckpointError, RequestError, UnsupportedModelError
from rooflax.models.registry import read_config
from tests import goldens

pytestmark = pytest.mark.oldest_jax

TEXT = goldens.VARIANTS["gemma3_text"]
WHOLE = {
    "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": TEXT, "vision_config": {"model_type": "siglip_vision_model"},
    "mm_tokens_per_image": 256, "image_token_index": 262144, "boi_token_index": 255999,
}  # fmt: skip


MISTRAL3 = {
    "model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"],
    "text_config": goldens.VARIANTS["mistral_full"], "vision_config": {"model_type": "pixtral"},
    "image_token_index": 10, "multimodal_projector_bias": False, "projector_hidden_act": "gelu",
    "spatial_merge_size": 2, "vision_feature_layer": -1,
}  # fmt: skip
MINISTRAL3 = MISTRAL3 | {"text_config": goldens.VARIANTS["ministral3"]}
QWEN3_5 = {
    "model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": goldens.VARIANTS["qwen3_5_text"], "vision_config": {"depth": 12},
    "image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053,
    "vision_end_token_id": 248054, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_5_MOE = QWEN3_5 | {
    "model_type": "qwen3_5_moe", "text_config": goldens.VARIANTS["qwen3_5_moe_text"],
}  # fmt: skip
GEMMA4 = {
    "model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"],
    "text_config": goldens.VARIANTS["gemma4_text_shared"], "tie_word_embeddings": True,
    "vision_config": {"model_type": "gemma4_vision"}, "image_token_id": 258880,
    "audio_config": {"model_type": "gemma4_audio"}, "audio_token_id": 258881,
    "boi_token_id": 255999, "eoi_token_id": 258882, "boa_token_id": 256000,
    "eoa_token_index": 258883, "video_token_id": 258884, "vision_soft_tokens_per_image": 280,
    "initializer_range": 0.02,
}  # fmt: skip
OLD = ("language_model.model.", "language_model.", "vision_tower.")
NEW = ("model.language_model.", "", "model.vision_tower.")


@pytest.mark.parametrize(("prefix", "head", "tower"), [OLD, NEW])
@pytest.mark.parametrize(
    ("variant", "raw"),
    [
        ("gemma3_text", WHOLE),
        ("mistral_full", MISTRAL3),
        ("ministral3", MINISTRAL3),
        ("qwen3_5_text", QWEN3_5),
        ("qwen3_5_moe_text", QWEN3_5_MOE),
        ("gemma4_text_shared", GEMMA4),
    ],
    ids=["gemma3", "mistral3", "ministral3", "qwen3_5", "qwen3_5_moe", "gemma4"],
)
def test_the_text_part_is_the_text_model(variant, raw, prefix, head, tower, tmp_path):
    reference = goldens.committed(variant)
    text = load(goldens.write_checkpoint(tmp_path / "text", variant, reference))

    def change(tensors):
        for name in list(tensors):
            bare = name.removeprefix("model.")
            tensors[(head if bare == name else prefix) + bare] = tensors.pop(name)
        own = tower.replace("vision_tower", "visual") if "qwen" in variant else tower
        tensors[f"{own}encoder.weight"] = np.zeros((3, 5), np.float32)
        if "qwen" in variant:
            tensors["mtp.fc.weight"] = np.zeros((3, 5), np.float32)
            return
        if "gemma4" in variant:
            for part in ("audio_tower", "embed_vision", "embed_audio"):
                tensors[f"{tower.replace('vision_tower', part)}x"] = np.zeros(3, np.float32)
            for part in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):  # of no use
                tensors[f"{prefix}layers.6.self_attn.{part}"] = np.zeros((24, 56), np.float32)
            return
        projector = tower.replace("vision_tower", "multi_modal_projector")
        tensors[f"{projector}mm_input_projection_weight"] = np.zeros((3, 5), np.float32)

    folder = goldens.write_checkpoint(tmp_path / "m", variant, reference, change=change)
    (folder / "config.json").write_text(json.dumps(raw))
    whole = load(folder)
    assert whole.config == text.config
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), whole.weights, text.weights)
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize(("variant", "raw"), [("mistral_full", MISTRAL3), ("gemma3_text", WHOLE)])
@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("text", [True, False, None])
@pytest.mark.parametrize("tied", [True, False])
def test_the_wholes_tie_counts_unless_there_is_a_head(tied, text, has_head, variant, raw, tmp_path):
    """As transformers computes, whatever the text part says: it fills the whole's with a default.

    Of Mistral3ForConditionalGeneration.from_pretrained, with a head of its own and without.
    """
    reference = goldens.committed(variant)

    def change(tensors):
        tensors.pop("lm_head.weight", None)
        if has_head:
            tensors["lm_head.weight"] = 1 + tensors["model.embed_tokens.weight"]

    folder = goldens.write_checkpoint(tmp_path / "m", variant, reference, change=change)
    key = "tie_word_embeddings"
    part = {k: v for k, v in raw["text_config"].items() if k != key}
    part |= {} if text is None else {key: text}
    (folder / "config.json").write_text(json.dumps(raw | {key: tied, "text_config": part}))
    if tied and text and has_head:
        with pytest.raises(CheckpointError, match="set that to false to use both"):
            load(folder)
    elif not tied and not has_head:
        with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight"):
            load(folder)
    else:
        assert load(folder).config.tied_embeddings is not has_head


def test_qwen3_next_does_without_its_drafting_head(tmp_path):
    reference = goldens.committed("qwen3_next")

    def change(tensors):
        tensors["mtp.fc.weight"] = np.zeros((3, 5), np.float32)

    load(goldens.write_checkpoint(tmp_path / "m", "qwen3_next", reference, change=change))


@pytest.mark.parametrize("variant", ["glm4_moe", "deepseek_v3"])
def test_layers_that_predict_further_tokens_are_skipped_where_config_counts_them(variant, tmp_path):
    reference, count = goldens.committed(variant), goldens.VARIANTS[variant]["num_hidden_layers"]

    def change(tensors):
        for layer in (count, count + 1):
            tensors[f"model.layers.{layer}.eh_proj.weight"] = np.zeros((3, 5), np.float32)

    for further in (2, 1, 0, None):  # null is 1, as transformers has it
        how = {"config": {"num_nextn_predict_layers": further}, "change": change}
        folder = goldens.write_checkpoint(tmp_path / str(further), variant, reference, **how)
        if further == 2:
            load(folder)
            continue
        first = count + (1 if further is None else further)
        with pytest.raises(CheckpointError, match=rf"not use: model\.layers\.{first}"):
            load(folder)


def test_what_is_left_out_is_said_once(tmp_path, capsys):
    reference = goldens.committed("gemma3_text")
    folder = goldens.write_checkpoint(tmp_path / "m", "gemma3_text", reference)
    assert model_info(folder).left_out == ()
    run = ["generate", str(folder), "--prompt", "a", "--max-tokens", "1"]
    assert main([*run, "--offline"]) == 0
    assert "left out" not in capsys.readouterr().err
    (folder / "config.json").write_text(json.dumps(WHOLE))
    assert model_info(folder).left_out == ("vision",)
    assert main(run) == 0
    sentence = f"{folder}: its text model is used, its vision tower is left out."
    assert capsys.readouterr().err.count(sentence) == 1
    assert main([*run, "--quiet"]) == 0
    assert "left out" not in capsys.readouterr().err


def test_files_that_leave_out_defaults_have_those_of_transformers():
    """As Gemma 3 4B's text_config does."""
    few = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    rope = {"factor": 8.0, "rope_type": "linear"}
    few |= {"intermediate_size": 10240, "sliding_window": 1024, "rope_scaling": rope}
    _, config = read_config(WHOLE | {"text_config": few})
    assert (config.vocab_size, config.num_heads, config.num_kv_heads) == (262_208, 8, 4)
    assert (config.head_dim, config.max_position, config.tied_embeddings) == (256, 131_072, True)
    full, local = config.layers[5].attention, config.layers[6].attention
    assert (full.window, local.window, full.scale) == (None, 1024, 1 / 16)
    assert full.rope and full.rope.theta == 1e6 and full.rope.scaling
    assert local.rope and local.rope.theta == 1e4 and local.rope.scaling is None


def test_gemma4_files_that_leave_out_defaults_have_those_of_transformers():
    few = {"model_type": "gemma4_text", "vocab_size_per_layer_input": None}
    for text in (few, dict.fromkeys(goldens.VARIANTS["gemma4_text"]) | few):
        _, config = read_config(GEMMA4 | {"text_config": text})
        assert (config.num_layers, config.vocab_size, config.hidden_size) == (30, 262_144, 2304)
        local, full = (config.layers[i].attention for i in (0, 5))
        assert (local.num_kv_heads, local.head_dim, local.window) == (4, 256, 512)
        assert (full.num_kv_heads, full.head_dim, full.window) == (4, 512, None)
        assert full.rope and full.rope.theta == 1e6 and full.rope.scaling
        assert full.rope.scaling.share == 0.25 and local.rope and local.rope.theta == 1e4
        assert config.per_layer and config.per_layer.width == 256 and config.logit_cap is None
        assert config.max_position == 131_072 and config.tied_embeddings and config.moe is None


def test_gemma4_with_heads_layer_by_layer_is_the_same_model():
    """As transformers 5.23 writes what it read of `global_head_dim`."""
    text = goldens.VARIANTS["gemma4_text"]
    _, config = read_config(text)
    written = {k: v for k, v in text.items() if "global" not in k}
    each = {"1": {"head_dim": 24, "num_key_value_heads": 2}}
    each["3"] = each["1"]
    assert read_config(written | {"per_layer_config": each})[1] == config
    for other in ({"1": each["1"]}, each | {"2": each["1"]}, each | {"3": {"head_dim": 22}}, [1]):
        with pytest.raises(CheckpointError, match="per_layer_config = .*full_attention"):
            read_config(written | {"per_layer_config": other})
    _, equal = read_config(written | {"per_layer_config": {}, "attention_k_eq_v": False})
    assert len({(x.attention.head_dim, x.attention.num_kv_heads) for x in equal.layers}) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ({"vocab_size_per_layer_input": 262_144}, "vocab_size_per_layer_input = 262144"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers = 6 of 7 .* none of type full"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers = 7"),
        ({"global_head_dim": 25}, "K/V heads of 25"),
        ({"num_global_key_value_heads": 4, "attention_k_eq_v": True}, "4 K/V heads"),
        ({"enable_moe_block": True, "num_experts": 3, "moe_intermediate_size": 8,
          "top_k_experts": 4}, "top_k_experts = 4"),
        ({"enable_moe_block": True}, "'num_experts'"),
        ({"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping'"),
        ({"layer_types": ["chunked_attention"] * 7}, "chunked_attention"),
        ({"rope_parameters": {"full_attention": {"rope_type": "proportional", "rope_theta": 1e6,
          "partial_rotary_factor": 1.5}}}, "partial_rotary_factor = 1.5"),
    ],
)  # fmt: skip
def test_of_gemma4_what_is_not_computed_is_rejected_by_name(change, reason):
    with pytest.raises((CheckpointError, UnsupportedModelError), match=reason):
        read_config(goldens.VARIANTS["gemma4_text_shared"] | change)


def test_layers_with_heads_of_two_sizes_run_one_by_one(tmp_path):
    reference = goldens.committed("gemma4_text")
    folder = goldens.write_checkpoint(tmp_path / "m", "gemma4_text", reference)
    llm = LLM(folder, weights_budget=400_000)
    assert len(llm.plan.offloading.offloaded) == 4
    greedy = SamplingParams(temperature=0.0, max_tokens=goldens.NEW_TOKENS, ignore_eos=True)
    found = llm.generate(goldens.prompts(), greedy)
    assert [list(c.tokens) for c in found] == reference.greedy.tolist()


def test_layers_that_read_others_do_not_run_one_by_one(tmp_path):
    for variant in ("gemma4_text_shared", "gemma4_text_moe"):
        reference = goldens.committed(variant)
        folder = goldens.write_checkpoint(tmp_path / variant, variant, reference)
        with pytest.raises(RequestError, match="run one by one; leave the weights budget out"):
            LLM(folder, weights_budget=10**9)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"text_config": None}, "no 'text_config'"),
        ({"text_config": [1]}, "text_config = .*object"),
        ({"text_config": TEXT | {"model_type": "llama"}}, "model_type = 'llama'"),
        ({"text_config": TEXT | {"new_trick": 1}}, "'new_trick'"),
        ({"text_config": TEXT | {"final_logit_softcapping": 30.0}}, "final_logit_softcapping"),
        ({"audio_config": {}}, "'audio_config'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = True"),
    ],
)
def test_a_text_part_that_is_not_computed_is_rejected(change, reason):
    with pytest.raises((CheckpointError, UnsupportedModelError), match=reason):
        read_config(WHOLE | change)


def test_another_text_model_is_rejected_by_name():
    text = goldens.VARIANTS["mistral_full"] | {"model_type": "mistral4"}
    with pytest.raises(UnsupportedModelError, match="model_type = 'mistral4'.*'mistral'"):
        read_config(MISTRAL3 | {"text_config": text})
