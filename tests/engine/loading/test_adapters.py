"""LoRA adapters beside a model: PEFT's numbers, every family's layers, files that do not fit."""

import json

import numpy as np
import pytest

from rooflax import LLM, ExecutionOptions
from rooflax.cli.main import main
from rooflax.errors import CheckpointError, RequestError, UnsupportedModelError
from rooflax.loading.adapter_bank import open_bank
from rooflax.loading.adapters import base_weight, fused, merged, open_adapter, save_adapter
from rooflax.loading.load import load
from rooflax.loading.model_info import model_info
from rooflax.loading.safetensors import SafetensorsFile
from rooflax.loading.source import ArraySource
from rooflax.loading.tensor_plan import NameMap
from rooflax.loading.weights import WeightReader
from rooflax.models.adapters import adapted, targets
from rooflax.models.model import build
from rooflax.models.registry import family
from rooflax.ops.linear.adapted import Adapted
from tests import adapter_cases, gguf_cases, goldens
from tests.marks import cases
from tests.support.loading.adapters import RANK, write_adapter
from tests.support.models.programs import full_logits

Q = "model.layers.0.self_attn.q_proj"
PATH = f"base_model.model.{Q}"
TOLERANCE = 1e-4


def logits(model):
    return np.asarray(full_logits(model, goldens.tokens()))


def merged_model(info, adapter, parts):
    """The model of the checkpoint's tensors with the adapter added to them."""
    source = info.weights()
    names = NameMap(set(source.names()), family(info.family))
    tensors = {name: np.asarray(source.read(name)) for name in source.names()}
    for module, target in adapter.targets.items():
        part = parts[module]
        w = merged(base_weight(source, info.family, target), part.a, part.b, part.scale)
        tensors[names.find(target.weight)] = w.T if target.is_transposed else w
    reader = WeightReader(ArraySource(tensors), info.family, info.config)
    return build(info.family, info.config, reader.weights(), None, "float32")


KINDS = (
    "gpt2", "llama_gqa", "phi3", "gemma3_text", "cohere2", "gpt_oss", "deepseek_v2", "glm4_moe",
    "qwen3_moe", "lfm2", "granitemoehybrid", "qwen3_5_moe_text",
)  # fmt: skip
"""Families whose layers have other parts, joined or named in another way."""


@pytest.mark.parametrize(
    "variant", cases([v for v in goldens.VARIANTS if "bert" not in v], default=KINDS)
)
def test_adapters_of_all_layers_equal_the_merged_model(case, tmp_path, variant):
    info = model_info(case(variant).folder)
    if not info.config.is_causal:
        pytest.skip("adapters are of models that generate")
    own = write_adapter(tmp_path / "all", info)
    adapter = open_adapter(own, info)
    parts = adapter.read(info)
    if info.config.tied_embeddings:  # merging would change the embedding too
        kept = [module for module in parts if module != "lm_head"]
        adapter = open_adapter(write_adapter(tmp_path / "kept", info, kept), info)
        parts = adapter.read(info)
    base = load(info)
    wanted = logits(merged_model(info, adapter, parts))
    found = logits(adapted(base, parts))
    assert np.abs(logits(base) - wanted).max() > 1
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2 * TOLERANCE)


@pytest.mark.parametrize("layers", ["unrolled", "scan"])
@pytest.mark.parametrize("name", adapter_cases.CASES)
def test_logits_equal_peft(case, tmp_path, name, layers):
    variant = adapter_cases.CASES[name][0]
    base = case(variant)
    folder = adapter_cases.write_adapter(tmp_path / "adapter", name, base.folder)
    options = ExecutionOptions(layers=layers)
    length = goldens.MAX_MODEL_LEN.get(variant)
    llm = LLM(base.folder, lora=folder, options=options, max_model_len=length)
    found = np.stack([llm.logits(row.tolist()) for row in goldens.tokens()])
    _, wanted = adapter_cases.read(name)
    kept = list(goldens.KEPT_POSITIONS)
    np.testing.assert_allclose(found[:, kept], wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", ["q4_k", "int8", "bfloat16"])
def test_the_base_keeps_its_own_width(case, tmp_path, kind):
    """Of the difference that an adapter makes, a quantized base changes nothing but itself."""
    path = gguf_cases.gguf("llama_k", "q4_k_m") if kind == "q4_k" else case("llama_gqa").folder
    how = {"q4_k": {}, "int8": {"quantize": "w8a16"}, "bfloat16": {"dtype": "bfloat16"}}[kind]
    info = model_info(path)
    own = write_adapter(tmp_path / "adapter", info)
    plain = LLM(info, options=ExecutionOptions(layers="scan"), **how)
    llm = LLM(info, lora=own, options=ExecutionOptions(layers="scan"), **how)
    assert llm.plan.storage == plain.plan.storage
    gained = llm.model.weights_bytes - plain.model.weights_bytes
    assert gained >= open_adapter(own, info).nbytes
    prompt = goldens.prompts()[1]
    assert np.abs(llm.logits(prompt) - plain.logits(prompt)).max() > 0.1
    zeros = {n: np.zeros(s, np.float32) for n, s in _shapes(own) if n.endswith("lora_B.weight")}
    nothing = write_adapter(tmp_path / "zeros", info, tensors=zeros)
    same = LLM(info, lora=nothing, options=ExecutionOptions(layers="scan"), **how)
    np.testing.assert_array_equal(same.logits(prompt), plain.logits(prompt))


def test_what_is_merged_does_not_keep_its_codes(tmp_path):
    """Nor the same matrices of other layers; the rest of a quantized base does."""
    info = model_info(gguf_cases.gguf("llama_k", "q4_k_m"))
    own = write_adapter(tmp_path / "adapter", info, [Q])
    both = fused(info, open_adapter(own, info, merges=True))
    llm, exact, base = LLM(both), LLM(both, dtype="float32"), LLM(info)
    kept = base.plan.storage.prequantized
    assert (
        llm.plan.storage.prequantized
        == {name: format for name, format in kept.items() if not name.endswith("attn.qkv")}
        != kept
    )
    assert llm.plan.load_bytes == llm.model.weights_bytes
    prompt = goldens.prompts()[1]
    change = np.abs(exact.logits(prompt) - base.logits(prompt)).max()
    assert change > 0.1 and np.abs(llm.logits(prompt) - exact.logits(prompt)).max() < change / 5


def _shapes(folder):
    file = SafetensorsFile(folder / "adapter_model.safetensors")
    return [(name, file.info(name).shape) for name in file.names()]


def test_a_batch_gives_each_prompt_its_own_tokens(case, tmp_path):
    base = case("llama_gqa")
    own = write_adapter(tmp_path / "adapter", model_info(base.folder))
    llm = LLM(base.folder, lora=own)
    how = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    together = llm.generate(goldens.prompts(), **how)
    alone = [llm.generate(prompt, **how)[0] for prompt in goldens.prompts()]
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    assert together[0].tokens != LLM(base.folder).generate(goldens.prompts()[0], **how)[0].tokens


def test_a_saved_adapter_is_read_again(case, tmp_path):
    info = model_info(case("gpt2").folder)
    adapter = open_adapter(write_adapter(tmp_path / "first", info), info)
    parts = adapter.read(info)
    names = {"name": info.family, "base": "gpt2"}
    save_adapter(tmp_path / "second", parts, adapter.config, model=info.config, **names)
    again = open_adapter(tmp_path / "second", info)
    assert json.loads((tmp_path / "second/adapter_config.json").read_text())["fan_in_fan_out"]
    for module, part in again.read(info).items():
        np.testing.assert_array_equal(part.a, parts[module].a)
        np.testing.assert_array_equal(part.b, parts[module].b)
        assert part.scale == parts[module].scale


def test_patterns_are_of_the_files_own_paths(case, tmp_path):
    """A model that also sees has its text model's layers elsewhere."""
    info = model_info(case("qwen3_5_text").folder)
    module = "model.layers.0.mlp.up_proj"
    path = "model.language_model.layers.0.mlp.up_proj"
    target = targets(info.family, info.config)[module]
    ones = {f"base_model.model.{module}.lora_{kind}.weight": None for kind in "AB"} | {
        f"base_model.model.{path}.lora_A.weight": np.ones((3, target.inputs), np.float32),
        f"base_model.model.{path}.lora_B.weight": np.ones((target.outputs, 3), np.float32),
    }
    patterns = {"rank_pattern": {path: 3}, "alpha_pattern": {path: 12}}
    named = {"target_modules": [path], "tensors": ones}
    own = write_adapter(tmp_path / "adapter", info, [module], **named, **patterns)
    adapter = open_adapter(own, info)
    assert (adapter.rank, adapter.read(info)[module].scale) == (3, 4.0)


def test_a_layer_without_an_adapter_stays_as_it_is(case, tmp_path):
    info = model_info(case("llama_gqa").folder)
    own = write_adapter(tmp_path / "adapter", info, [Q])
    weights = LLM(info, lora=own, options=ExecutionOptions(layers="unrolled")).model.weights
    changed = [
        (index, key)
        for index, layer in enumerate(weights["layers"])
        for key, leaf in layer.items()
        if isinstance(leaf, Adapted)
    ]
    assert changed == [(0, "attn.qkv")]


NAN = {f"{PATH}.lora_A.weight": np.full((RANK, 54), np.nan, np.float32)}
HUGE = np.float32(1e38)
BAD_FILES = {
    "another shape": (
        {"tensors": {f"{PATH}.lora_B.weight": np.zeros((7, RANK))}},
        r"lora_B.weight in .* is \[7, 4\], wanted \[120, 4\]: rank 4, 54 inputs and 120 outputs",
    ),
    "another rank": ({"rank_pattern": {"q_proj": 3}}, r"is \[4, 54\], wanted \[3, 54\]"),
    "NaN": ({"tensors": NAN}, r"q_proj.lora_A.weight in .* holds NaN or infinity"),
    "a scale beyond float32": (
        {"tensors": {f"{PATH}.lora_B.weight": np.full((120, RANK), HUGE)}, "lora_alpha": 400.0},
        rf"B of {Q} in .* times its scale 100 is beyond float32; train it again",
    ),
    "no pair": ({"tensors": {f"{PATH}.lora_B.weight": None}}, rf"lacks lora_B of {Q}"),
    "whole numbers": (
        {"tensors": {f"{PATH}.lora_A.weight": np.zeros((RANK, 54), np.int32)}},
        r"is I32, no floating point type",
    ),
    "a module that is not there": (
        {
            "tensors": {
                "base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": np.zeros((4, 54))
            }
        },
        r"has base_model.model.model.layers.9.mlp.up_proj.lora_A.weight, which is not A or B of",
    ),
    "an embedding": (
        {"tensors": {"base_model.model.model.embed_tokens.lora_embedding_A": np.zeros((4, 263))}},
        "embed_tokens.lora_embedding_A, which is not A or B of",
    ),
    "a module that the config leaves out": (
        {"exclude_modules": ["q_proj"]},
        rf"has {Q}, which its adapter_config.json does not name",
    ),
    "a module that the file leaves out": (
        {"target_modules": [Q, "model.layers.1.mlp.up_proj"]},
        "lacks model.layers.1.mlp.up_proj, which its adapter_config.json names",
    ),
    "DoRA without magnitudes": ({"use_dora": True}, "lacks lora_magnitude_vector of"),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_a_file_that_does_not_fit_is_one_sentence(case, tmp_path, what):
    changes, message = BAD_FILES[what]
    info = model_info(case("llama_gqa").folder)
    own = write_adapter(tmp_path / "adapter", info, [Q], **changes)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message) as caught:
        open_adapter(own, info).read(info)
    assert "\n" not in str(caught.value)


def test_folders_that_hold_no_adapter(case, tmp_path):
    info = model_info(case("llama_gqa").folder)
    with pytest.raises(CheckpointError, match="is no folder; an adapter is one with"):
        open_adapter(tmp_path / "absent", info)
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json; an adapter is"):
        open_adapter(tmp_path, info)
    own = write_adapter(tmp_path / "adapter", info, [Q])
    (own / "adapter_model.safetensors").rename(own / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"only adapter_model\.bin, a pickle, .* never read"):
        open_adapter(own, info)
    (own / "adapter_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"has no adapter_model\.safetensors"):
        open_adapter(own, info)


def test_an_adapter_of_another_model_is_rejected(case, tmp_path):
    other = write_adapter(tmp_path / "adapter", model_info(case("qwen2").folder))
    with pytest.raises(UnsupportedModelError, match="not A or B of a linear layer"):
        LLM(case("llama_gqa").folder, lora=other)


def test_what_an_adapter_does_not_go_with(case, tmp_path):
    folder = case("llama_gqa").folder
    own = write_adapter(tmp_path / "adapter", model_info(folder))
    with pytest.raises(RequestError, match="lora is for one device") as caught:
        LLM(folder, lora=own, mesh="tensor=2")
    assert caught.value.param == "lora"
    with pytest.raises(RequestError, match="lora is for weights in memory"):
        LLM(folder, lora=own, weights_budget="450KB")


@pytest.mark.parametrize("name", ["rslora", "dora", "conv1d", "fused"])
def test_a_fused_folder_equals_the_adapter_beside_its_model(case, tmp_path, name):
    variant = adapter_cases.CASES[name][0]
    base = case(variant)
    folder = adapter_cases.write_adapter(tmp_path / "adapter", name, base.folder)
    out = tmp_path / "fused"
    assert main(["fuse", str(base.folder), "--lora", str(folder), "-o", str(out), "--quiet"]) == 0
    length = goldens.MAX_MODEL_LEN.get(variant)
    beside = LLM(base.folder, lora=folder, max_model_len=length)
    prompt = goldens.prompts()[2]
    found = LLM(out, max_model_len=length).logits(prompt)
    np.testing.assert_allclose(found, beside.logits(prompt), rtol=0, atol=TOLERANCE)


def test_a_fused_gguf_file_of_a_gguf_file(tmp_path):
    path = gguf_cases.gguf("llama_k", "q4_k_m")
    info = model_info(path)
    modules = [m for m in targets(info.family, info.config) if m != "lm_head"]
    own = write_adapter(tmp_path / "adapter", info, modules)
    out = tmp_path / "fused.gguf"
    command = ["fuse", str(path), "--lora", str(own), "-o", str(out), "--quiet"]
    assert main([*command, "--gguf", "F32"]) == 0
    wanted = LLM(path, lora=own, dtype="float32").logits([1, 2, 3, 4])
    found = LLM(out, dtype="float32").logits([1, 2, 3, 4])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"r": 3}, r"experts.lora_A.weight in .* is F32 \[10, 32\], wanted \[15, 32\]"),
        ({"target_parameters": ["experts.up"]}, "'experts.up', and .* no experts in one parameter"),
        (
            {"target_parameters": ["mlp.experts.gate_up_proj"]},
            r"is F32 \[10, 32\], wanted \[10, 64\]",
        ),
        ({"modules_to_save": ["lm_head"]}, r"lacks base_model\.model\.lm_head\.weight, which its"),
        ({"modules_to_save": ["score"]}, "'score', and of .* rooflax replaces lm_head and"),
    ],
)
def test_a_file_that_only_a_merged_model_would_have(case, tmp_path, change, said):
    base = case("gpt_oss")
    folder = adapter_cases.write_adapter(tmp_path / "adapter", "down", base.folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises((CheckpointError, UnsupportedModelError), match=said):
        open_adapter(folder, model_info(base.folder), merges=True)


@pytest.mark.parametrize(
    ("version", "said"),
    [("0.18.1", "PEFT 0.18.1;"), (None, "PEFT that states no"), ("0.19.1.dev0@ab", "lacks")],
)
def test_experts_that_an_older_peft_wrote_are_named(case, tmp_path, version, said):
    """It had [experts, out, in] for [experts, in, out]; square ones would be merged transposed."""
    info = model_info(case("qwen3_moe").folder)
    keys = {"target_parameters": ["experts.down_proj"], "peft_version": version}
    own = write_adapter(tmp_path / "adapter", info, [Q], **keys)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=said):
        open_adapter(own, info, merges=True)


@pytest.mark.parametrize("name", adapter_cases.MERGED)
def test_what_only_a_merged_model_has_equals_peft(case, tmp_path, name):
    base = case(adapter_cases.MERGED[name][0])
    folder = adapter_cases.write_adapter(tmp_path / "adapter", name, base.folder)
    out = tmp_path / "fused"
    assert main(["fuse", str(base.folder), "--lora", str(folder), "-o", str(out), "--quiet"]) == 0
    llm = LLM(out)
    found = np.stack([llm.logits(row.tolist()) for row in goldens.tokens()])
    wanted = adapter_cases.read(name)[1]
    kept = list(goldens.KEPT_POSITIONS)
    np.testing.assert_allclose(found[:, kept], wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_an_adapter_of_a_changed_base_is_warned_of(case, tmp_path, capsys, caplog):
    """Wherever it is used: its numbers fit another base than the one that it stands beside."""
    folder = case("llama_gqa").folder
    info = model_info(folder)
    own = write_adapter(tmp_path / "adapter", info, [Q], init_lora_weights="pissa")
    said = f"{own} was begun with pissa, which changed its base model; it fits that changed model"
    command = ["fuse", str(folder), "--lora", str(own), "-o", str(tmp_path / "out.gguf")]
    assert main([*command, "--gguf", "F32", "--adapter-only"]) == 0
    assert said in capsys.readouterr().err
    bank = open_bank([f"a={own}"], info, 2, None)
    bank.with_adapter("b", str(own), info)
    assert [record.getMessage()[: len(said)] for record in caplog.records] == [said] * 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "--lora names the adapter to merge"),
        (["--lora", "x", "--gguf", "Q4_0"], "must be the name of a file that ends in .gguf"),
        (["--lora", "x", "--gguf", "Q4_0", "-q", "int8"], "--quantize is given beside --gguf"),
    ],
)
def test_flags_of_fuse(case, tmp_path, capsys, more, message):
    folder = case("llama_gqa").folder
    assert main(["fuse", str(folder), "-o", str(tmp_path / "out"), *more]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_tied_head_is_not_merged(case, tmp_path, capsys):
    folder = case("smollm3").folder
    info = model_info(folder)
    assert info.config.tied_embeddings
    own = write_adapter(tmp_path / "adapter", info, ["lm_head"])
    command = ["fuse", str(folder), "--lora", str(own), "-o", str(tmp_path / "out")]
    assert main(command) == 2
    assert "tied to its embedding" in capsys.readouterr().err


def test_an_adapter_in_place_of_a_model_is_told_where_it_goes(case, tmp_path, capsys):
    own = write_adapter(tmp_path / "adapter", model_info(case("llama_gqa").folder), [Q])
    assert main(["generate", str(own), "-p", "x"]) == 2
    assert "give the adapter as --lora" in capsys.readouterr().err
