"""adapter_config.json: a key is honoured, says nothing about numbers, or is rejected by name."""

import json

import pytest

from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.loading.adapter_config import read_adapter_config

Q, UP = "model.layers.1.self_attn.q_proj", "model.layers.12.mlp.up_proj"


def config(folder, family="llama", **keys):
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"} | keys))
    return read_adapter_config(folder, family)


@pytest.mark.parametrize(
    ("keys", "changes_q", "changes_up"),
    [
        ({}, True, False),
        ({"target_modules": ["up_proj"]}, False, True),
        ({"target_modules": [UP]}, False, True),
        ({"target_modules": ["proj"]}, False, False),
        ({"target_modules": "All-Linear"}, True, True),
        ({"target_modules": r".*\.(q|up)_proj"}, True, True),
        ({"target_modules": r"q_proj"}, False, False),
        ({"target_modules": "all-linear", "exclude_modules": ["mlp.up_proj"]}, True, False),
        ({"target_modules": "all-linear", "exclude_modules": r".*attn.*"}, False, True),
        ({"target_modules": "all-linear", "layers_to_transform": 1}, True, False),
        ({"target_modules": "all-linear", "layers_to_transform": [12, 13]}, False, True),
        (
            {
                "target_modules": "all-linear",
                "layers_to_transform": [1],
                "layers_pattern": "layers",
            },
            True,
            False,
        ),
        (
            {"target_modules": "all-linear", "layers_to_transform": [1], "layers_pattern": ["h"]},
            False,
            False,
        ),
    ],
)
def test_which_modules_are_changed(tmp_path, keys, changes_q, changes_up):
    found = config(tmp_path, **keys)
    assert (found.changes(Q), found.changes(UP)) == (changes_q, changes_up)


def test_all_linear_leaves_the_head_out(tmp_path):
    assert not config(tmp_path, target_modules="all-linear").changes("lm_head")
    assert config(tmp_path, target_modules=["lm_head"]).changes("lm_head")


def test_a_whole_path_is_changed_in_any_layer(tmp_path):
    """As in PEFT, which asks for the layer of other names alone."""
    keys = {"layers_to_transform": [3], "target_modules": ["q_proj", UP, "lm_head"]}
    found = config(tmp_path, **keys)
    assert found.changes(UP) and found.changes("lm_head") and not found.changes(Q)
    assert not config(tmp_path, exclude_modules=[UP], **keys).changes(UP)


def test_what_an_adapter_without_targets_changes(tmp_path):
    assert config(tmp_path, "gpt2").changes("transformer.h.0.attn.c_attn")
    assert config(tmp_path, "phi3").changes("model.layers.0.self_attn.qkv_proj")


def test_ranks_and_scales_by_pattern(tmp_path):
    keys = {"r": 16, "lora_alpha": 8, "rank_pattern": {"q_proj": 4}}
    keys |= {"alpha_pattern": {r"layers\.12\..*": 32}}
    found = config(tmp_path, **keys)
    assert (found.rank_of(Q), found.scale_of(Q)) == (4, 2.0)
    assert (found.rank_of(UP), found.scale_of(UP)) == (16, 2.0)
    assert config(tmp_path, use_rslora=True, **keys).scale_of(Q) == 4.0


def test_a_base_that_was_changed_is_warned_of(tmp_path):
    assert config(tmp_path, init_lora_weights="gaussian").warning is None
    assert "begun with pissa" in config(tmp_path, init_lora_weights="pissa_niter_4").warning
    keys = {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4, "loftq_iter": 1}}
    assert "begun with loftq" in config(tmp_path, **keys).warning
    keys = {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}}
    assert config(tmp_path, **keys).warning is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bias", "lora_only"),
        ("trainable_token_indices", [3]),
        ("lora_bias", True),
        ("alora_invocation_tokens", [1]),
        ("layer_replication", [[0, 2]]),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("arrow_config", {"top_k": 3}),
        ("kasa_config", {"beta": 1}),
        ("velora_config", {"rank": 1}),
        ("a_key_of_tomorrow", 1),
        ("peft_type", "IA3"),
    ],
)
def test_keys_that_are_not_applied_are_named(tmp_path, key, value):
    with pytest.raises(UnsupportedModelError, match=rf"{key} = "):
        config(tmp_path, **{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("r", 0),
        ("r", True),
        ("r", 10**9),
        ("lora_alpha", "8"),
        ("lora_alpha", 1e999),
        ("target_modules", 7),
        ("target_modules", [1]),
        ("target_modules", "("),
        ("target_modules", "(?<=a)b"),
        ("exclude_modules", r"(a)\1"),
        ("layers_to_transform", ["1"]),
        ("layers_to_transform", -1),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"q_proj": 2.5}),
        ("lora_alpha", 1e308),
        ("alpha_pattern", {"(?!x)": 2}),
        ("rank_pattern", {"(": 2}),
        ("rank_pattern", {f"x{i}": 8 for i in range(1001)}),
        ("layers_pattern", "h" * 2000),
        ("use_rslora", "yes"),
        ("fan_in_fan_out", 1),
    ],
)
def test_values_that_cannot_be(tmp_path, key, value):
    with pytest.raises(CheckpointError, match=rf"has {key} = .*; it must be|: {key} has .*pattern"):
        config(tmp_path, **{key: value})
