"""config.json files as they are published: each opens, or is rejected for the reason beside it.

tests/data/published_configs/configs.json holds the facts: of each its name as the source has it,
where it was read, its keys and values, and the outcome ("opens", or how the rejection's sentence
begins).
"""

import json
from pathlib import Path

import pytest

from rooflax.errors import RooflaxError, UnsupportedModelError
from rooflax.loading.model_info import model_info
from rooflax.loading.schemes import not_applied
from rooflax.models.config_reader import ACCEPTED, SAME_LENGTH
from rooflax.models.presets import PRESETS, PUBLISHED
from rooflax.models.registry import families, read_config
from rooflax.models.repositories import instead, repositories
from tests import encoder_cases, goldens
from tools.repositories import document

TABLE = Path(__file__).parents[2] / "data" / "published_configs" / "configs.json"
ROWS = json.loads(TABLE.read_text())
OTHERS = json.loads((TABLE.parent / "others.json").read_text())
CONFIGS = {row["repository"]: row["config"] for row in ROWS}
QUANTIZED = json.loads((TABLE.parent / "quantization.json").read_text())
OTHER = {
    "add_cross_attention": True,
    "cross_attention_hidden_size": 0,
    "is_llama_config": False,
    "max_sequence_length": 4096,
    "n_special": 3,
    "partial_rotary_factor": 0.5,
    "pruned_heads": {"1": [0]},
    "qk_layer_norms": True,
    "reorder_and_upcast_attn": "sometimes",
    "rope_interleaved": True,
    "scale_attn_by_inverse_layer_idx": True,
    "scale_attn_weights": False,
    "use_mrope": True,
}
"""Of each key of `ACCEPTED` a value that would be something else than what is computed."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["repository"])
def test_a_published_config_opens_or_is_rejected_for_the_reason_beside_it(row, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(row["config"]))
    if row["outcome"] == "opens":
        scores = (
            row["config"]["model_type"] in encoder_cases.FAMILIES and "id2label" in row["config"]
        )
        family = read_config(row["config"])[0] if scores else model_info(tmp_path).family
        assert family == row["config"]["model_type"]  # a head's tensors are not here
        return
    with pytest.raises(RooflaxError) as caught:
        model_info(tmp_path)
    assert str(caught.value).startswith(row["outcome"])


@pytest.mark.parametrize("row", QUANTIZED, ids=lambda row: row["repository"])
def test_a_published_quantization_opens_or_is_rejected_for_the_reason_beside_it(row, tmp_path):
    """Beside a model of LLaMA's: quantization.json has what is known of these repositories."""
    said = {key: value for key, value in row.items() if key.startswith("quantization")}
    (tmp_path / "config.json").write_text(json.dumps(goldens.VARIANTS["llama_gqa"] | said))
    if row["outcome"] == "opens":
        assert model_info(tmp_path).scheme is not None
        return
    with pytest.raises(UnsupportedModelError) as caught:
        model_info(tmp_path)
    assert str(caught.value).startswith(row["outcome"])


STATIC, ROUNDED = "static activation scales", "activation quantization"
KV_CACHE = "KV-cache quantization"


@pytest.mark.parametrize(
    ("declared", "wanted"),
    [
        ({"quant_method": "fp8", "activation_scheme": "static"}, (STATIC,)),
        ({"quant_method": "fp8", "kv_cache_quant_method": "fp8"}, (ROUNDED, KV_CACHE)),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
         (STATIC, KV_CACHE)),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {
            "input_activations": {"num_bits": 8, "dynamic": False}}}}, (STATIC,)),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {
            "input_activations": {"num_bits": 8, "dynamic": True}}}}, (ROUNDED,)),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None, "config_groups": {
            "group_0": {"input_activations": None}}}, ()),
        ({"quant_method": "awq"}, ()),
        *(({"quant_method": "modelopt", "quant_algo": name}, wanted) for name, wanted in {
            "FP8": (STATIC,), "NVFP4": (STATIC,), "MIXED_PRECISION": (STATIC,), "FP8_PB_WO": (),
            "W4A16_NVFP4": (), "FP8_PER_CHANNEL_PER_TOKEN": (ROUNDED,)}.items()),
    ],
)  # fmt: skip
def test_settings_that_are_not_applied_are_named(declared, wanted):
    assert not_applied(declared) == wanted


@pytest.mark.parametrize(
    ("declared", "wanted"),
    [
        ({"quant_method": "fp8", "activation_scheme": "static"},
         (f"{STATIC} (input_scale, input_global_scale)",)),
        ({"quant_method": "fp8"}, (ROUNDED,)),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
         (f"{ROUNDED} (activation_scale_ub)",)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
         (f"{STATIC} (input_scale, input_global_scale)", f"{KV_CACHE} (k_scale)")),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {
            "input_activations": {"num_bits": 4, "dynamic": "local"}}}},
         (f"{STATIC} (input_scale, input_global_scale)",)),
    ],
)  # fmt: skip
def test_scales_that_are_not_applied_are_named(declared, wanted):
    ends = ("weight_scale", "input_global_scale", "k_scale", "input_scale")
    assert not_applied(declared, [f"model.layers.0.x_proj.{end}" for end in ends]) == wanted


def test_the_table_is_of_families_and_names_its_sources():
    opened = {row["config"]["model_type"] for row in ROWS if row["outcome"] == "opens"}
    assert opened <= set(families()) and len(opened & encoder_cases.FAMILIES) >= 6
    assert all(row["source"] for row in ROWS)
    assert len({row["repository"] for row in ROWS}) == len(ROWS) >= 130
    assert any(row["repository"] == "Qwen/Qwen2.5-0.5B" for row in ROWS)


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: row["repository"])
def test_a_repository_of_a_family_that_is_not_computed_is_rejected(row):
    with pytest.raises(UnsupportedModelError, match=f"^model_type '{row['model_type']}' is not"):
        read_config({"model_type": row["model_type"]})


def test_what_is_rejected_names_repositories_of_its_sizes_that_open(tmp_path):
    """By the quantization, by a value of it, and by the family."""
    llama, qwen = CONFIGS["Llama-3.1-8B-Instruct"], CONFIGS["Qwen3-8B"]
    unread = {"quantization_config": {"quant_method": "hqq"}}
    with pytest.raises(UnsupportedModelError, match=r"Of its sizes open .*-AWQ-INT4, "):
        read_config(llama | unread)
    marlin = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}
    (tmp_path / "config.json").write_text(json.dumps(qwen | {"quantization_config": marlin}))
    with pytest.raises(UnsupportedModelError, match=r"Of its sizes open Intel/Qwen3-8B-int4-Auto"):
        model_info(tmp_path)
    falcon = {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32}
    falcon |= {"vocab_size": 65024, "architectures": ["FalconForCausalLM"]}
    with pytest.raises(UnsupportedModelError, match=r"Of about its size are [\w./-]+, .*, .*\."):
        read_config(falcon)
    deberta = falcon | {"model_type": "deberta-v2", "architectures": ["DebertaV2Model"]}
    with pytest.raises(UnsupportedModelError, match=r"Of about its size are BAAI/bge-"):
        read_config(deberta)
    assert instead({"model_type": "falcon", "hidden_size": True}, ()) == ""


def test_the_repositories_are_those_of_the_table():
    """By name, each with its memory or the reason why it does not open."""
    rows = {row["repository"]: row for row in repositories()}
    assert json.loads(document()) == list(repositories()), "run: make docs"
    assert len(rows) >= 180
    assert rows["Qwen/Qwen3-8B-AWQ"]["bytes"][""] < rows["Qwen/Qwen3-8B"]["bytes"]["int8"]
    opens = [row for row in rows.values() if "rejected" not in row]
    assert all(row["family"] in families() for row in opens)
    assert sum(bool(row["bytes"]) for row in opens) > 150


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_of_a_published_file_is_its_model(name):
    """Also where the file has a null that the preset might leave out."""

    def model(raw):
        return read_config({k: v for k, v in raw.items() if k != "quantization_config"})[1]

    texts = [row["config"].get("text_config", row["config"]) for row in ROWS]
    kind, wanted = PRESETS[name]["model_type"], model(PRESETS[name])
    opens = [row["outcome"] == "opens" for row in ROWS]
    same = [raw for raw, fine in zip(texts, opens, strict=True) if fine]
    assert any(model(raw) == wanted for raw in same if raw.get("model_type") == kind)


def test_every_accepted_key_has_another_value_in_this_test():
    assert OTHER.keys() == ACCEPTED.keys()


@pytest.mark.parametrize("key", OTHER)
def test_a_key_that_says_what_is_done_anyway_is_no_error_and_another_value_is(key):
    raw = goldens.VARIANTS["llama_gqa"]
    length = raw["max_position_embeddings"]
    for value in ACCEPTED[key]:
        stated = length if value is SAME_LENGTH else value
        assert read_config(raw | {key: stated}) == read_config(raw)
    with pytest.raises(UnsupportedModelError, match=f"has {key} = .* \\(only "):
        read_config(raw | {key: OTHER[key]})
    assert read_config(raw | {key: OTHER[key]}, ignore=[key]) == read_config(raw)
