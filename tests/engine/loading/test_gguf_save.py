"""GGUF files that we write: read back by our own reader, and against gguf-py's quantization.

That llama.cpp opens them and computes the same is shown by benchmarks/peers/gguf_families.py.
"""

import dataclasses
import json
import resource
import shutil
import signal
import subprocess
import sys
import time

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from rooflax import LLM, load
from rooflax.cli.main import main
from rooflax.errors import CheckpointError, RequestError, UnsupportedModelError
from rooflax.loading.gguf import GGUFFile
from rooflax.loading.gguf_blocks import dequantize
from rooflax.loading.gguf_quantize import quantize_blocks, recipe_type
from rooflax.loading.gguf_save import FILE_TYPES, save_gguf
from rooflax.loading.gguf_weights import GGUFWeights
from rooflax.loading.model_info import model_info
from rooflax.loading.tokenizer import Tokenizer
from rooflax.models.registry import family, gguf_families
from rooflax.nn.decoder import TensorNames
from rooflax.nn.storage import is_head
from tests import gguf_cases, goldens, tokenizer_cases
from tests.marks import cases
from tests.pooling_cases import NORMALIZE, SCORE, dense, pooling, write_dense, write_modules
from tests.support.models.programs import numbers

pytestmark = pytest.mark.oldest_jax

RENAMED = {"mistral": "llama", "granite4": "granite"}
"""Cases that come back as another family of the same architecture."""
EXPONENTS = "a_log"
"""Weights of which the file has an exponential."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """The checkpoint folder of a family, written once."""
    root, made = tmp_path_factory.mktemp("families"), {}

    def get(name):
        if name not in made:
            made[name] = gguf_cases.write_family(root / name, name)
        return made[name]

    return get


def written(folder, path, kind):
    save_gguf(model_info(folder), path, kind)
    return path


def tensors_by_our_names(model):
    """Weights by name; those of another family's are the same ones."""
    found = {key: array for key, array in model.weights.items() if key != "layers"}
    layers = model.weights["layers"]
    found |= {f"{i}.{key}": array for i, layer in enumerate(layers) for key, array in layer.items()}
    return {key: np.asarray(array, np.float32) for key, array in found.items()}


def as_float32(model):
    """config.json with numbers as a file's metadata has them."""

    def rounded(value):
        if isinstance(value, dict):
            return {key: rounded(one) for key, one in value.items()}
        if isinstance(value, list):
            return [rounded(one) for one in value]
        return np.float32(value) if isinstance(value, float) else value

    config = dataclasses.replace(model.config, names=TensorNames())  # a file's own
    return rounded(family(model.family).config_to_hf(config))


def same_weights(ours, theirs, change=lambda array: array):
    assert ours.keys() == theirs.keys()
    for key, array in theirs.items():
        if EXPONENTS in key:
            np.testing.assert_allclose(ours[key], array, rtol=0, atol=1e-6)
        else:
            np.testing.assert_array_equal(ours[key], change(array), err_msg=key)


@pytest.mark.parametrize("name", gguf_cases.FAMILIES)
def test_a_float32_file_is_the_checkpoint(name, checkpoint, tmp_path):
    ours = load(written(checkpoint(name), tmp_path / "m.gguf", "F32"))
    theirs = load(checkpoint(name))
    if name in RENAMED:
        assert ours.family == RENAMED[name]
    else:
        assert ours.family == theirs.family
        assert as_float32(ours) == as_float32(theirs)
    same_weights(tensors_by_our_names(ours), tensors_by_our_names(theirs))


def test_experts_in_one_tensor_each_make_the_same_file(checkpoint, tmp_path):
    """Qwen 3.5's, which are in one for all."""
    fused = checkpoint("qwen3_5_moe")
    apart = shutil.copytree(fused, tmp_path / "apart")
    tensors = safetensors.numpy.load_file(fused / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        parts = "mlp.experts", "gate_proj", "up_proj", "down_proj"
        tensors |= goldens.experts_apart(name, tensors.pop(name), parts)
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    safetensors.numpy.save_file(tensors, apart / "model.safetensors")
    files = [GGUFFile(written(f, tmp_path / f"{f.name}.gguf", "F32")) for f in (fused, apart)]
    assert [file.names() for file in files] == [files[0].names()] * 2
    for name in files[0].names():
        np.testing.assert_array_equal(*(file.read(name) for file in files), err_msg=name)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss", "gemma3", "qwen3_5"])
def test_a_bfloat16_file_has_matrices_to_the_nearest(name, checkpoint, tmp_path):
    path = written(checkpoint(name), tmp_path / "m.gguf", "BF16")
    file, exact = GGUFFile(path), GGUFFile(written(checkpoint(name), tmp_path / "x.gguf", "F32"))
    kinds = {file.info(tensor).dtype for tensor in file.names()}
    assert kinds == {"BF16", "F32"}
    for tensor in file.names():
        wanted = exact.read(tensor)
        if file.info(tensor).dtype == "BF16":
            wanted = wanted.astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(file.read(tensor), wanted, err_msg=tensor)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", cases(gguf_cases.FAMILIES, default=["llama", "qwen3_5", "lfm2"]))
def test_a_quantized_file_is_what_gguf_py_makes(name, kind, checkpoint, tmp_path):
    file = GGUFFile(written(checkpoint(name), tmp_path / "m.gguf", kind))
    exact = GGUFFile(written(checkpoint(name), tmp_path / "x.gguf", "F32"))
    quantized, theirs = gguf.GGMLQuantizationType[kind], {}
    for tensor in file.names():
        wanted = exact.read(tensor)
        if file.info(tensor).dtype == kind:
            blocks = gguf.quants.quantize(np.asarray(wanted), quantized)
            np.testing.assert_array_equal(file.read(tensor).reshape(blocks.shape), blocks)
            wanted = gguf.quants.dequantize(blocks, quantized)
        theirs[tensor] = wanted
    info = model_info(file.path)
    ours, plain = info.weights(), GGUFWeights(exact, info.family, info.config)
    plain._numbers = lambda stored, expert: (  # the file's numbers, by gguf-py
        theirs[stored] if expert is None else theirs[stored][expert]
    )
    for tensor in ours.names():
        np.testing.assert_array_equal(ours.read(tensor), plain.read(tensor), err_msg=tensor)
    assert any(file.info(tensor).dtype == kind for tensor in file.names())


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "lfm2", "deepseek_v3"])
def test_blocks_keep_their_codes_in_our_order(name, checkpoint, tmp_path):
    """Value heads of 32 dimensions move whole groups of columns."""
    path = written(checkpoint(name), tmp_path / "m.gguf", "Q8_0")
    kept, plain, formats = load(path, dtype=None), load(path), model_info(path).weights().formats
    found = 0
    for slot in kept.config.params():
        if slot.name not in formats:
            continue
        leaf, wanted = (
            (m.weights if slot.layer is None else m.weights["layers"][slot.layer])[slot.key]
            for m in (kept, plain)
        )
        matrix, wanted = np.asarray(numbers(leaf)), np.asarray(wanted)
        matrix = matrix.T if is_head(slot, kept.config) else matrix
        np.testing.assert_array_equal(matrix.reshape(wanted.shape), wanted, err_msg=slot.name)
        found += 1
    assert found > 8
    turned = {"layers.0.delta.out", "layers.0.conv.out", "layers.0.attn.k_b"}
    assert turned & formats.keys()


def test_blocks_that_an_order_would_cut_become_numbers(tmp_path):
    """Value heads of 16 dimensions share a group of columns."""
    sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    folder = gguf_cases.write_family(tmp_path / "m", "qwen3_5", **sizes)
    path = written(folder, tmp_path / "m.gguf", "Q8_0")
    assert GGUFFile(path).info("blk.0.ssm_out.weight").dtype == "Q8_0"
    assert "layers.0.delta.out" not in model_info(path).weights().formats
    kept, plain = load(path, dtype=None), load(path)
    found, wanted = (m.weights["layers"][0]["delta.out"] for m in (kept, plain))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", [*tokenizer_cases.BYTE_LEVEL, *tokenizer_cases.SENTENCEPIECE])
def test_a_tokenizer_comes_back(name, tmp_path):
    kind = tokenizer_cases.FAMILIES.get(name, "llama")
    folder = gguf_cases.write_family(tmp_path / "m", kind, name)
    path = written(folder, tmp_path / "m.gguf", "Q8_0")
    ours, theirs = Tokenizer(path), Tokenizer(folder)
    metadata = GGUFFile(path).metadata
    is_named = name in (*tokenizer_cases.BYTE_LEVEL, *tokenizer_cases.FAMILIES)
    assert metadata["tokenizer.ggml.pre"] == (name if is_named else "default")
    assert ours.special_tokens == theirs.special_tokens
    assert ours.special_token_ids == theirs.special_token_ids
    assert ours.chat_templates == theirs.chat_templates
    for text in tokenizer_cases.TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.encode_plain(text) == theirs.encode_plain(text)
        assert ours.decode(ids) == theirs.decode(ids)
    defaults, wanted = (model_info(m).generation_defaults() for m in (path, folder))
    texts = ("<|endoftext|>", "<|im_end|>", "<|tool_response>")
    known = {theirs.token_to_id(text) for text in texts} - {None}  # as llama.cpp
    assert set(defaults.eos_token_ids) == set(wanted.eos_token_ids) | known
    assert defaults.sampling == wanted.sampling


def test_a_tokenizer_has_no_ids_beyond_the_embedding(tmp_path):
    folder = gguf_cases.write_family(tmp_path / "m", "llama", "gpt-2")
    rows = model_info(folder).config.vocab_size
    more = [f"<extra_{i}>" for i in range(rows)]  # past the end, wherever the tokenizer ends
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(more)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": more[-1]}))
    ends = {"eos_token_id": [1, tokenizer.token_to_id(more[-2])], "suppress_tokens": [5]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    notes = save_gguf(model_info(folder), tmp_path / "m.gguf", "Q8_0")
    assert any(f"no tokens from {rows} on" in note for note in notes)
    assert any("no suppressed or biased tokens" in note for note in notes)
    assert Tokenizer(tmp_path / "m.gguf").vocab_size == rows
    metadata = GGUFFile(tmp_path / "m.gguf").metadata
    ids = [value for key, value in metadata.items() if key.endswith("_token_id")]
    assert ids and max(ids) < rows


def test_gemma4s_tokenizer_without_bos_comes_back_and_llama_cpp_is_said_to_put_one(tmp_path):
    folder = gguf_cases.write_family(tmp_path / "m", "gemma4", "gemma4")
    tokenizer_changed(folder, lambda parts: parts.update(post_processor=None))
    path = tmp_path / "m.gguf"
    notes = save_gguf(model_info(folder), path, "Q8_0")
    assert notes == ["llama.cpp puts BOS before every text, and the tokenizer does not"]
    ours, theirs = Tokenizer(path), Tokenizer(folder)
    for text in tokenizer_cases.TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    types = GGUFFile(path).metadata["tokenizer.ggml.token_type"]
    for text in tokenizer_cases.CALLS:  # which llama.cpp has to show
        token_id = ours.token_to_id(text)
        assert types[token_id] == 4 and token_id in ours.special_token_ids


def test_a_tokenizers_ids_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    for name in (*tokenizer_cases.BYTE_LEVEL, *tokenizer_cases.SENTENCEPIECE):
        folder = tmp_path / name
        folder.mkdir()
        tokenizer_cases.write(folder, name)
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        path = folder / "m.gguf"
        kind = tokenizer_cases.FAMILIES.get(name, "llama")
        written(gguf_cases.write_family(folder, kind, name), path, "Q8_0")
        for text in tokenizer_cases.TEXTS:
            assert Tokenizer(path).encode(text) == theirs(text)["input_ids"], (name, text)


def tokenizer_changed(folder, change):
    path = folder / "tokenizer.json"
    parts = json.loads(path.read_text())
    change(parts)
    path.write_text(json.dumps(parts))


def cut_by(pattern):
    def change(parts):
        parts["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern

    return change


def lacks_a_way(parts):
    """SentencePiece makes a piece in every way that there is."""
    parts["model"]["merges"].pop()


def around(*texts):
    def change(parts):
        ids = {token["content"]: token["id"] for token in parts["added_tokens"]}
        parts["post_processor"] = {
            "type": "TemplateProcessing", "pair": [],
            "single": [
                *({"SpecialToken": {"id": text, "type_id": 0}} for text in texts),
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "special_tokens": {
                text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in texts
            },
        }  # fmt: skip

    return change


def without_merges(parts):
    parts["model"]["merges"] = []


def merges_a_newline(parts):
    vocabulary = parts["model"]["vocab"]
    vocabulary["e\n"] = len(vocabulary) + 8
    parts["model"]["merges"].append(["e", "\n"])


TOKENIZERS = {
    "characters": ("qwen2", without_merges, "no merges"),
    "cut": ("qwen2", cut_by(r"\p{L}+|[^\p{L}]"), "no name for how it cuts text"),
    "scores": ("llama2", lacks_a_way, "not in the order of scores"),
    "around": ("llama-bpe", around("<|begin|>", "<|im_end|>"), "around a text"),
    "another BOS": ("llama-bpe", around("<|im_end|>"), "around a text"),
    "newlines": ("gemma4", merges_a_newline, "cuts text at newlines"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_tokenizer_that_llama_cpp_has_not_is_rejected(case, tmp_path):
    name, change, reason = TOKENIZERS[case]
    kind = tokenizer_cases.FAMILIES.get(name, "llama")
    folder = gguf_cases.write_family(tmp_path / "m", kind, name)
    tokenizer_changed(folder, change)
    with pytest.raises(UnsupportedModelError, match=reason):
        save_gguf(model_info(folder), tmp_path / "m.gguf", "F32")
    assert list(tmp_path.iterdir()) == [folder]


def test_a_family_of_which_no_files_are_written_is_rejected_by_name(
    checkpoint, tmp_path, monkeypatch
):
    monkeypatch.delitem(gguf_families(), "qwen3")
    with pytest.raises(UnsupportedModelError, match="writes no GGUF files of qwen3, only"):
        save_gguf(model_info(checkpoint("qwen3")), tmp_path / "m.gguf", "F32")


KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
DEFAULT, PROPORTIONAL = (
    {"rope_type": "default"}, {"rope_type": "proportional", "partial_rotary_factor": 0.25},
)  # fmt: skip


def ropes(full=DEFAULT, local=DEFAULT):
    theta = {"rope_theta": 1000.0}
    return {"full_attention": full | theta, "sliding_attention": local | theta}


YARN = gguf_cases.family_config("deepseek_v2")["rope_scaling"]
MODELS = {
    "window": ("qwen3", {"use_sliding_window": True, "max_window_layers": 1}, "sliding_window"),
    "RoPE's layers": ("smollm3", {"no_rope_layers": [0, 1, 1, 0]}, "no_rope_layers"),
    "activation": ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    "query scale": ("gemma3", {"query_pre_attn_scalar": 20}, "query_pre_attn_scalar"),
    "routing": ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
    "head sizes": ("qwen3_next", {"linear_value_head_dim": 64}, "linear_value_head_dim = 64"),
    "tied": ("olmo2", {"tie_word_embeddings": True}, "whose head is the embedding"),
    "wide": ("qwen2", {"hidden_size": 64, "head_dim": 32}, "6 heads"),
    "bias": ("qwen3", {"attention_bias": True}, "bias on attention's result"),
    "convolution": ("lfm2", {"conv_bias": True}, "conv"),
    "sharing": ("gemma4_shared", {"layer_types": [*KINDS * 2, KINDS[1]]}, "and then one without"),
    "no windows": ("gemma4", {"layer_types": ["full_attention"] * 4}, "without a window"),
    "gelu": ("gemma4", {"hidden_activation": "gelu"}, "hidden_activation"),
    "biases": ("gemma4", {"attention_bias": True}, "bias on attention's result"),
    "no proportion": ("gemma4", {"rope_parameters": ropes()}, "no tensor 'rope_freqs.weight'"),
    "scaled": (
        "gemma4",
        {"rope_parameters": ropes(PROPORTIONAL, {"rope_type": "linear", "factor": 2.0})},
        "cannot say rope_parameters",
    ),
    "YaRN": ("deepseek_v2", {"rope_scaling": YARN | {"mscale": 0.7}}, "are not the same number"),
    "pairs": ("deepseek_v3", {"rope_interleave": False}, "cannot say rope_interleave"),
    "latents": ("deepseek_v2", {"attention_bias": True}, "bias on attention's result"),
    "layers": ("deepseek_v3", {"num_hidden_layers": 26}, "q_lora_rank in 26 layers"),
    "no RoPE": (
        "exaone4",
        {"layer_types": ["full_attention"] * 4, "sliding_window": 7},
        "cannot say layer_types",
    ),
    "exaone": ("exaone4", {"sliding_window": 7, "layer_types": None}, "windows in 4 layers"),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_llama_cpp_computes_otherwise_is_rejected(case, tmp_path):
    name, changes, reason = MODELS[case]
    folder = gguf_cases.write_family(tmp_path / "m", name, **changes)
    with pytest.raises(UnsupportedModelError, match=reason):
        save_gguf(model_info(folder), tmp_path / "m.gguf", "F32")


def test_the_command_writes_a_file_that_is_not_replaced_unasked(checkpoint, tmp_path, capsys):
    path = tmp_path / "new" / "m.gguf"
    command = ["quantize", str(checkpoint("qwen2")), "--gguf", "Q8_0", "-o", str(path), "--json"]
    assert main(command) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["format"] == "Q8_0" and said["file_bytes"] == path.stat().st_size
    assert main(command) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0
    assert [p.name for p in path.parent.iterdir()] == ["m.gguf"]


def test_factors_of_rope_and_no_soft_cap_are_written(tmp_path):
    scaled = ropes(PROPORTIONAL | {"factor": 4.0})
    changes = {"rope_parameters": scaled, "final_logit_softcapping": None}
    folder = gguf_cases.write_family(tmp_path / "m", "gemma4", **changes)
    path = written(folder, tmp_path / "m.gguf", "F32")
    file, ours, theirs = GGUFFile(path), load(path), load(folder)
    wanted = np.float32([4] * 8 + [1e30] * 24)
    np.testing.assert_array_equal(file.read("rope_freqs.weight"), wanted)
    assert file.metadata["gemma4.final_logit_softcapping"] == 0  # llama.cpp takes 30 for none
    assert ours.config == theirs.config


def test_what_the_command_cannot_do(checkpoint, tmp_path, capsys):
    folder, path = str(checkpoint("llama")), str(tmp_path / "m.gguf")
    for flags, reason in (
        (["--gguf", "Q5_K", "-o", path], "Q8_0"),
        (["--gguf", "F32", "-o", str(tmp_path / "m")], "ends in .gguf"),
        (["--gguf", "F32", "-q", "int8", "-o", path], "--quantize"),
        (["-q", "int8", "-o", path], "say its type with --gguf"),
        (["--gguf", "F32", "--dtype", "float32", "-o", path], "--dtype"),
    ):
        assert main(["quantize", folder, *flags]) == 2
        assert reason in capsys.readouterr().err
    with pytest.raises(RequestError, match="random weights"):
        save_gguf(model_info("preset:qwen2.5-tiny"), path, "F32")


def test_sigterm_leaves_no_unfinished_file(tmp_path):
    folder = gguf_cases.write_family(tmp_path / "m", "llama", intermediate_size=1 << 16)
    output = tmp_path / "out"
    output.mkdir()
    argv = ["quantize", str(folder), "--gguf", "Q4_0", "-o", str(output / "m.gguf")]
    with subprocess.Popen([sys.executable, "-m", "rooflax", *argv]) as process:
        while process.poll() is None and not list(output.iterdir()):
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 143
    assert list(output.iterdir()) == []


def test_a_file_of_this_folder_has_the_folders_name(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(checkpoint("llama"))
    written(".", tmp_path / "m.gguf", "F32")
    name = gguf.GGUFReader(tmp_path / "m.gguf").fields["general.name"].contents()
    assert name == checkpoint("llama").name


def test_a_failure_leaves_what_was_there(checkpoint, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"before")
    folder = gguf_cases.write_family(tmp_path / "m", "llama")
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-4:] = np.float32(np.nan).tobytes()
    (folder / "model.safetensors").write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="NaN"):
        save_gguf(model_info(folder), path, "F32", check=True)
    assert path.read_bytes() == b"before"
    assert {p.name for p in tmp_path.iterdir()} == {"m", "m.gguf"}


@pytest.mark.parametrize(("kind", "weight"), [("Q8_0", 8.4e6), ("Q4_0", -5.3e5)])
def test_weights_beyond_a_types_scales_are_rejected(kind, weight, tmp_path):
    folder = gguf_cases.write_family(tmp_path / "m", "seed_oss")
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    down = tensors["model.layers.0.mlp.down_proj.weight"]
    down[0, 0] = weight
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(CheckpointError, match=f"in blk.0.ffn_down.weight, and {kind} holds"):
        save_gguf(model_info(folder), tmp_path / "m.gguf", kind)
    assert list(tmp_path.iterdir()) == [folder]
    save_gguf(model_info(folder), tmp_path / "m.gguf", "BF16")


def embeds(folder, *further, **changes):
    """A checkpoint of Qwen 3 that embeds by the last token."""
    gguf_cases.write_family(folder, "qwen3", **changes)
    write_modules(folder, pooling("lasttoken", 96), *further)
    return folder


def test_a_model_that_embeds_comes_back_with_its_pooling(tmp_path):
    folder = embeds(tmp_path / "m", NORMALIZE)
    prompts = {"prompts": {"query": "Find: ", "document": ""}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    assert "the file has no prompts" in save_gguf(model_info(folder), tmp_path / "m.gguf", "F32")
    ours, theirs = model_info(tmp_path / "m.gguf").pooling, model_info(folder).pooling
    assert ours == dataclasses.replace(theirs, prompts={})
    a, b = (LLM(str(each)).embed([[5, 9, 40], [7]]) for each in (tmp_path / "m.gguf", folder))
    np.testing.assert_array_equal(a, b)


def test_a_model_that_embeds_needs_no_head(tmp_path):
    folder = embeds(tmp_path / "m", NORMALIZE, tie_word_embeddings=False)
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    del tensors["lm_head.weight"]
    safetensors.numpy.save_file(tensors, path)
    file = GGUFFile(written(folder, tmp_path / "m.gguf", "F32"))
    assert "output.weight" not in file.names()
    assert model_info(tmp_path / "m.gguf").pooling == model_info(folder).pooling


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
def test_layers_behind_the_pooling_are_written(kind, tmp_path):
    """EmbeddingGemma's; the second has 20 inputs, which are no blocks of 32."""
    folder = gguf_cases.write_embedding_gemma(tmp_path / "m")
    file = GGUFFile(written(folder, tmp_path / "m.gguf", kind))
    theirs = GGUFFile(gguf_cases.kept(gguf_cases.EMBEDS))
    assert set(file.names()) == set(theirs.names())
    kinds = [file.info(f"{name}.weight").dtype for name in ("dense_2", "dense_3")]
    assert kinds == (["BF16"] * 2 if kind == "BF16" else ["F32"] * 2)
    ours, wanted = model_info(tmp_path / "m.gguf"), model_info(folder)
    assert not ours.config.is_causal
    exact = np.float32 if kind != "BF16" else ml_dtypes.bfloat16
    for a, b in zip(ours.pooling.dense, wanted.pooling.dense, strict=True):
        np.testing.assert_array_equal(a.weight, b.weight.astype(exact).astype(np.float32))


def with_tanh(folder):
    """The first dense layer's activation."""
    path = gguf_cases.write_embedding_gemma(folder) / "2_Dense" / "config.json"
    raw = json.loads(path.read_text())
    del raw["activation_function"]
    path.write_text(json.dumps(raw))


def with_dense(folder):
    embeds(folder, dense(96, 8), NORMALIZE)
    write_dense(folder / "2_Dense", np.ones((8, 96)))


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (embeds, "vectors that are not normalized"),
        (with_dense, "qwen3 with dense layers behind it: 1"),
        (with_tanh, "dense layer with a bias or an activation"),
    ],
)
def test_a_pooling_that_llama_cpp_does_not_compute_is_rejected(write, said, tmp_path):
    write(tmp_path / "m")
    with pytest.raises(UnsupportedModelError, match=said):
        save_gguf(model_info(tmp_path / "m"), tmp_path / "m.gguf", "F32")
    assert list(tmp_path.iterdir()) == [tmp_path / "m"]


def test_a_model_that_scores_is_rejected(tmp_path):
    folder = gguf_cases.write_family(tmp_path / "m", "qwen3")
    write_modules(folder, (SCORE, {"true_token_id": 7, "false_token_id": 8}))
    with pytest.raises(UnsupportedModelError, match="no score from"):
        save_gguf(model_info(folder), tmp_path / "m.gguf", "F32")


def test_a_full_disk_is_said_and_nothing_stays(checkpoint, tmp_path):
    path, (soft, hard) = tmp_path / "m.gguf", resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, hard))
    try:
        with pytest.raises(OSError, match=r"m\.gguf|File too large"):
            written(checkpoint("llama"), path, "F32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert list(tmp_path.iterdir()) == []


def test_types_have_llama_cpps_numbers():
    for kind, number in FILE_TYPES.items():
        name = "ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"
        assert getattr(gguf.LlamaFileType, name) == number


def test_k_quants_are_llama_cpps(tmp_path):
    """Types and bytes of its own file; sums in another order may choose another scale."""
    folder = gguf_cases.write_original(tmp_path, "llama_k")
    path = written(folder, tmp_path / "m.gguf", "Q4_K_M")
    ours, theirs = GGUFFile(path), GGUFFile(gguf_cases.gguf("llama_k", "q4_k_m"))
    found = set()
    for name in theirs.names():
        kind = theirs.info(name).dtype
        found.add(kind)
        assert ours.info(name).dtype == kind
        other = (ours.read(name) != theirs.read(name)).reshape(-1, ours.read(name).shape[-1])
        assert other.any(axis=-1).mean() <= (0.02 if kind == "Q4_K" else 0)
    assert found == {"F32", "Q4_K", "Q6_K", "Q5_0", "Q8_0"}
    wanted = load(gguf_cases.gguf("llama_k", "q4_k_m"), dtype=None)
    assert jax.tree.structure(load(path, dtype=None).weights) == jax.tree.structure(wanted.weights)


def test_half_of_the_layers_have_more_bits():
    def types(part, experts=0):
        names = (f"blk.{layer}.{part}.weight" for layer in range(16))
        how = {"is_head": False, "experts": experts}
        return [recipe_type("Q4_K_M", name, 16, **how) for name in names]

    more = (0, 1, 4, 7, 10, 13, 14, 15)
    wanted = ["Q6_K" if layer in more else "Q4_K" for layer in range(16)]
    assert types("attn_v") == types("ffn_down") == types("ffn_down_exps") == wanted
    assert set(types("attn_k") + types("ffn_up")) == {"Q4_K"}
    assert set(types("attn_qkv")) == {"Q5_K"} and set(types("attn_v", 8)) == {"Q8_0"}
    assert recipe_type("Q4_K_M", "output.weight", 16, is_head=True, experts=0) == "Q6_K"


@pytest.mark.parametrize(("kind", "cost"), [("Q4_K", 0.075), ("Q5_K", 0.038), ("Q6_K", 0.019)])
def test_k_quants_are_near_and_what_is_broken_is_nan(kind, cost):
    state = np.random.RandomState(1)
    x = state.standard_normal((8, 512)).astype(np.float32)
    x[5:] += [[0.0], [1e-30], [-3.0]]
    x[5] = 0
    found = dequantize(kind, quantize_blocks(x, kind).reshape(8, 2, -1))
    assert np.square(found[:5] - x[:5]).mean() < cost**2
    assert not found[5].any() and np.abs(found[6:] - x[6:]).max() < 6 * cost
    x[1, 3], x[2, 300] = np.nan, -np.inf
    found = dequantize(kind, quantize_blocks(x, kind).reshape(8, 2, -1))
    broken = np.isnan(found).reshape(8, 2, 256)
    assert broken[1, 0].all() and broken[2, 1].all() and broken.sum() == 512
