"""Encoders and cross-encoders: equal to transformers, alone or beside others; what they refuse."""

import importlib.util
import itertools
import json
import shutil
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy

import rooflax
from rooflax import LLM, ExecutionOptions, RequestError, UnsupportedModelError, model_info
from rooflax.errors import CheckpointError
from rooflax.nn.batch import Batch
from tests import encoder_cases as encoders
from tests import goldens
from tests.encoder_cases import PAIRS, SCORING, TEXTS, VARIANTS
from tests.marks import cases
from tests.pooling_cases import NORMALIZE, pooling, write_modules

TOLERANCE = 1e-5
HAVE_ORACLE = importlib.util.find_spec("sentence_transformers") is not None and goldens.HAVE_TORCH
MODES = {"mean_tokens": "mean", "cls_token": "first"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("encoders")


@pytest.fixture(scope="module")
def reference(root):
    """What transformers says of a variant, now where it is installed."""

    def get(variant):
        if not goldens.HAVE_TORCH:
            return encoders.committed(variant)
        folder = root / f"{variant}-reference"
        if not folder.exists():
            encoders.write(folder, variant, scores=variant in SCORING)
        return encoders.live(variant, folder)

    return get


@pytest.fixture(scope="module")
def embedder(root):
    """A folder that embeds, by its variant and pooling."""

    def make(variant, mode="mean_tokens", *modules, **how):
        folder = root / f"{variant}-{mode}-{len(modules)}-{len(how)}"
        if not folder.exists():
            encoders.write(folder, variant, **how)
            write_modules(folder, pooling(mode, 60), *modules)
        return folder

    return make


@pytest.fixture(scope="module")
def scorer(root):
    def make(variant, **how):
        folder = root / f"{variant}-scores-{len(how)}"
        return folder if folder.exists() else encoders.write(folder, variant, scores=True, **how)

    return make


def scored(llm, pairs=PAIRS, **how):
    return np.array([llm.rerank(query, [text], **how)[0] for query, text in pairs])


@pytest.mark.parametrize(
    ("variant", "mode"),
    cases(
        itertools.product(VARIANTS, MODES),
        nightly=[(v, "cls_token") for v in VARIANTS if v not in ("bert", "modernbert")],
    ),
)
def test_vectors_equal_those_of_transformers(embedder, reference, variant, mode):
    """The mean is of all hidden states, the first among them."""
    found = LLM(embedder(variant, mode)).embed(TEXTS)
    np.testing.assert_allclose(found, reference(variant)[MODES[mode]], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "variant", cases(SCORING, default=["bert", "xlm_roberta", "mpnet", "modernbert"])
)
def test_scores_equal_those_of_transformers(scorer, reference, variant):
    """Of a head whose score the checkpoint takes as it is, and of one that has no word of it."""
    wanted = reference(variant)["scores"]
    as_it_is = {"activation_fn": "torch.nn.modules.linear.Identity"}
    llm = LLM(scorer(variant, sentence_transformers=as_it_is))
    np.testing.assert_allclose(scored(llm), wanted, rtol=0, atol=TOLERANCE)
    llm = LLM(scorer(variant))
    np.testing.assert_allclose(scored(llm), 1 / (1 + np.exp(-wanted)), rtol=0, atol=TOLERANCE)
    texts = [text for _, text in PAIRS[:3]]
    assert llm.rerank(PAIRS[0][0], texts) == pytest.approx(scored(llm)[:3], abs=1e-6)


TANH = {"activation_fn": "torch.nn.modules.activation.Tanh"}
RELU = {"activation_fn": "torch.nn.modules.activation.ReLU"}


def as_saved(folder, **settings):
    """A folder as sentence-transformers saves a cross-encoder since its version 5.4."""
    write_modules(folder)
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"model_type": "CrossEncoder"} | settings)
    )
    task = {"transformer_task": "sequence-classification"}
    (folder / "sentence_bert_config.json").write_text(json.dumps(task))
    return folder


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (TANH, TANH),
        ({}, RELU),
        (TANH | {"model_type": "SentenceTransformer"}, RELU),  # not of these scores
    ],
)
def test_the_activation_is_that_of_the_newest_file(tmp_path, settings, wanted):
    folder = encoders.write(tmp_path, "bert", scores=True, sentence_transformers=RELU)
    assert model_info(folder).pooling.activation == RELU["activation_fn"]
    as_saved(folder, **settings)
    assert model_info(folder).pooling.activation == wanted["activation_fn"]
    (folder / "modules.json").unlink()
    assert model_info(folder).pooling.activation == RELU["activation_fn"]


FIND = {"prompts": {"find": "find: "}, "default_prompt_name": "find"}


def test_the_default_prompt_stands_before_the_query(tmp_path, scorer):
    folder = as_saved(encoders.write(tmp_path, "bert", scores=True), **FIND)
    asked = [(f"find: {query}", text) for query, text in PAIRS]
    np.testing.assert_array_equal(scored(LLM(folder)), scored(LLM(scorer("bert")), asked))


@pytest.mark.skipif(not HAVE_ORACLE, reason="needs sentence-transformers")
@pytest.mark.filterwarnings("ignore")
def test_a_saved_cross_encoder_scores_as_in_sentence_transformers(tmp_path):
    """As it is read, and as it is saved again."""
    from sentence_transformers import CrossEncoder

    folder = as_saved(encoders.write(tmp_path / "m", "bert", scores=True), **TANH, **FIND)
    llm = LLM(folder)
    rooflax.save(llm.model, tmp_path / "again", dtype="float32", files_from=folder)
    model = CrossEncoder(str(folder), device="cpu", local_files_only=True)
    assert llm.info.pooling.max_tokens == model.max_seq_length == 120
    wanted = model.predict(PAIRS)
    again = CrossEncoder(str(tmp_path / "again"), device="cpu", local_files_only=True)
    for found in (scored(llm), scored(LLM(tmp_path / "again")), again.predict(PAIRS)):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.skipif(not goldens.HAVE_TORCH, reason="asks transformers, which is not installed")
@pytest.mark.parametrize("variant", VARIANTS)
def test_committed_references_are_what_transformers_says(reference, variant):
    now, then = reference(variant), encoders.committed(variant)
    for name, array in then.items():
        np.testing.assert_allclose(now[name], array, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("variant", ["bert", "mpnet", "modernbert"])
def test_a_text_has_the_same_vector_alone_and_beside_others(embedder, variant):
    llm = LLM(embedder(variant), max_num_seqs=4)
    together = llm.embed(TEXTS * 5)
    alone = np.concatenate([llm.embed(text) for text in TEXTS])
    np.testing.assert_allclose(together, np.tile(alone, (5, 1)), rtol=0, atol=1e-6)


WAYS = (
    {"options": ExecutionOptions(kernels="xla")},
    {"options": ExecutionOptions(kernels="reference")},
    {"mesh": "tensor=2"},
    {"mesh": "data=2"},
)
ONCE = (
    {"options": ExecutionOptions(use_cache=False)},
    {"options": ExecutionOptions(layers="unrolled")},
    {"weights_budget": 450_000},
)
"""Options that have nothing to do with the kind of attention."""
EAGER = {"options": ExecutionOptions(jit=False)}


@pytest.mark.parametrize(
    ("variant", "how"),
    cases(
        itertools.product(["mpnet", "modernbert"], [*WAYS, *ONCE, EAGER]),
        nightly=[*(("mpnet", how) for how in (*WAYS[1:], *ONCE, EAGER)), ("modernbert", EAGER)],
    ),
    ids=str,
)
def test_options_change_no_vector(embedder, reference, variant, how):
    found = LLM(embedder(variant), **how).embed(TEXTS)
    np.testing.assert_allclose(found, reference(variant)["mean"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("mode", ["max_tokens", "weightedmean_tokens", "lasttoken"])
def test_poolings_are_of_a_texts_tokens(embedder, mode):
    llm = LLM(embedder("bert", mode))
    ids = [np.array([llm.encode(text)], np.int32) for text in TEXTS]
    states = [np.asarray(states_of(llm.model, each)) for each in ids]
    wanted = {
        "max_tokens": lambda h: h.max(0),
        "weightedmean_tokens": lambda h: np.average(h, axis=0, weights=np.arange(1, len(h) + 1)),
        "lasttoken": lambda h: h[-1],
    }[mode]
    for found in (llm.embed(TEXTS), np.concatenate([llm.embed(text) for text in TEXTS])):
        np.testing.assert_allclose(found, [wanted(h) for h in states], rtol=0, atol=TOLERANCE)


@jax.jit
def states_of(model, ids):
    hidden, _ = model.forward(Batch.dense(ids), None)
    return model.final_hidden(hidden)[0]


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantized_encoders_stay_near(embedder, quantize):
    folder = embedder("bert", "mean_tokens", NORMALIZE)
    exact, coarse = LLM(folder).embed(TEXTS), LLM(folder, quantize=quantize).embed(TEXTS)
    assert (exact * coarse).sum(1).min() > {"int8": 0.999, "int4": 0.9}[quantize]


def test_no_cache_is_planned_or_kept(embedder):
    llm = LLM(embedder("bert"))
    llm.embed(TEXTS)
    assert llm.kv_cache_bytes == llm.plan.memory.kv_cache == 0
    assert llm.plan.num_blocks == () and llm.plan.serving().num_blocks == ()


@pytest.mark.parametrize("scores", [False, True])
def test_what_is_saved_is_the_same_model(embedder, scorer, tmp_path, scores):
    for variant in ("bert", "distilbert", "mpnet", "nomic_bert", "modernbert_bias", "xlm_roberta"):
        if scores and variant not in SCORING:
            continue
        modules = [NORMALIZE] if variant == "bert" else []
        llm = LLM(scorer(variant) if scores else embedder(variant, "mean_tokens", *modules))
        folder = tmp_path / variant
        rooflax.save(llm.model, folder, dtype="float32", files_from=llm.info.folder)
        again = LLM(folder)
        ask = scored if scores else lambda llm: llm.embed(TEXTS)
        np.testing.assert_array_equal(ask(again), ask(llm))


def test_longer_texts_are_rejected_or_cut(embedder, tmp_path):
    folder = shutil.copytree(embedder("bert"), tmp_path / "short")
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 16}))
    llm, long = LLM(folder), TEXTS[2]
    with pytest.raises(RequestError, match="model takes 16"):
        llm.embed(long)
    ids = llm.encode(long)
    for asked, kept in ((-1, 16), (10, 10)):
        found = llm.embed([long, "x"], truncate_prompt_tokens=asked)
        same = llm.embed([[*ids[: kept - 1], ids[-1]], "x"])
        np.testing.assert_allclose(found, same, rtol=0, atol=1e-6)
    wrongs: list[Any] = [0, -2, 17, 1.5, True]
    for wrong in wrongs:
        with pytest.raises(RequestError, match="truncate_prompt_tokens"):
            llm.embed("x", truncate_prompt_tokens=wrong)


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, 120),  # of encoder_cases
        ({"sentence_bert_config.json": {"max_seq_length": 7}}, 120),
        ({"modules.json": None, "sentence_bert_config.json": {"max_seq_length": 7}}, 7),
        ({"modules.json": None, "sentence_bert_config.json": {"max_seq_length": None}}, 120),
        ({"modules.json": None, "sentence_roberta_config.json": {"max_seq_length": 9}}, 9),
        ({"tokenizer_config.json": {"model_max_length": 10**30}}, None),
        ({"tokenizer_config.json": {"model_max_length": 1e30}}, None),
        ({"tokenizer_config.json": {"model_max_length": 1e9}}, 10**9),
        ({"tokenizer_config.json": {"max_len": 33}}, 33),
        ({"tokenizer_config.json": {}}, None),
    ],
)
def test_the_longest_text_is_the_first_modules_or_the_tokenizers(tmp_path, scores, files, wanted):
    """A modules.json makes the first module's file count."""
    encoders.write(tmp_path, "bert", scores=scores)
    if "modules.json" in files:
        write_modules(tmp_path, *([] if scores else [pooling("mean_tokens", 60)]))
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert model_info(tmp_path).pooling.max_tokens == wanted


@pytest.mark.parametrize("length", [0, -1, 512.5, "512", True])
def test_a_tokenizers_length_is_a_number(tmp_path, length):
    encoders.write(tmp_path, "bert")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": length}))
    with pytest.raises(CheckpointError, match="tokenizer_config.json of .* has model_max_length"):
        model_info(tmp_path)


@pytest.mark.skipif(not goldens.HAVE_TORCH, reason="asks transformers, which is not installed")
def test_pairs_are_cut_as_transformers_cuts_them(scorer):
    from transformers import AutoTokenizer

    folder = scorer("bert")
    llm, theirs = LLM(folder), AutoTokenizer.from_pretrained(folder)
    texts = [TEXTS[2], TEXTS[2] * 2, "a b c", "x"]
    for most in (4, 5, 6, 11, 24, 25, 60, 120):
        for pair in ((a, b) for a in texts for b in texts):
            wanted = theirs(*pair, truncation=True, max_length=most)
            found = llm.tokenizer.encode_cut(*pair, most)
            assert found == (wanted["input_ids"], wanted["token_type_ids"]), (most, pair)
    with pytest.raises(RequestError, match="model takes"):
        llm.rerank(TEXTS[2] * 3, ["x"])
    assert llm.rerank(TEXTS[2] * 3, ["x"], truncate_prompt_tokens=-1) != llm.rerank("x", ["x"])


def test_an_encoder_does_not_generate_and_a_cross_encoder_does_not_embed(embedder, scorer):
    llm = LLM(embedder("bert"))
    for call in (llm.generate, llm.score):
        with pytest.raises(RequestError, match="attends both ways, to embed texts; it gen"):
            call("x")
    with pytest.raises(RequestError, match="does not rerank: it embeds texts"):
        llm.rerank("x", ["y"])
    llm = LLM(scorer("bert"))
    with pytest.raises(RequestError, match="attends both ways, to score pairs of texts"):
        llm.generate("x")
    with pytest.raises(RequestError, match="scores pairs of texts"):
        llm.embed("x")
    with pytest.raises(RequestError, match="without an instruction"):
        llm.rerank("x", ["y"], instruction="be strict")


def test_norms_named_as_in_tensorflow_are_read(tmp_path, embedder):
    old = encoders.write(tmp_path / "old", "bert")
    tensors = safetensors.numpy.load_file(old / "model.safetensors")
    spelled = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for name in list(tensors):
        for end, other in spelled.items():
            if name.endswith(end):
                tensors[name.removesuffix(end) + other] = tensors.pop(name)
    safetensors.numpy.save_file(tensors, old / "model.safetensors")
    np.testing.assert_array_equal(LLM(old).embed(TEXTS), LLM(embedder("bert")).embed(TEXTS))


def test_an_encoder_without_modules_gives_the_mean(tmp_path, embedder):
    plain = encoders.write(tmp_path / "plain", "bert")
    np.testing.assert_array_equal(LLM(plain).embed(TEXTS), LLM(embedder("bert")).embed(TEXTS))


@pytest.mark.parametrize(
    ("variant", "change", "said"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "relative_key"),
        ("bert", {"hidden_act": "mish"}, "mish"),
        ("bert", {"new_key": 1}, "new_key"),
        ("roberta", {"max_position_embeddings": 5}, "the first 5 are no token's"),
        ("mpnet", {"relative_attention_num_buckets": 64}, "64"),
        ("nomic_bert", {"num_experts": 8}, "num_experts"),
        ("nomic_bert", {"rotary_scaling_factor": 2.0}, "rotary_scaling_factor"),
        ("nomic_bert", {"prenorm": True}, "prenorm"),
        ("modernbert", {"layer_types": ["chunked"] * 5}, "chunked"),
    ],
)
def test_configs_that_are_not_computed_are_named(tmp_path, variant, change, said):
    encoders.write(tmp_path, variant)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises((UnsupportedModelError, CheckpointError), match=said):
        model_info(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.update({"classifier.weight": np.ones((3, 60), np.float32)}), "does not fit"),
        (lambda t: t.pop("classifier.weight"), "has no classifier.weight"),
        (lambda t: t.update({"bert.pooler.dense.weight": np.ones((60, 6), np.float32)}), "inputs"),
    ],
)
def test_damaged_score_heads_are_one_sentence(tmp_path, change, said):
    from safetensors.numpy import load_file, save_file

    encoders.write(tmp_path, "bert", scores=True)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        model_info(tmp_path)


def test_nomics_published_keys_are_those_of_gpt2(tmp_path):
    """As nomic-embed-text-v1.5 has them."""
    published = {
        "model_type": "nomic_bert", "activation_function": "swiglu", "causal": False,
        "fused_bias_fc": True, "layer_norm_epsilon": 1e-12, "mlp_fc1_bias": False,
        "mlp_fc2_bias": False, "n_embd": 768, "n_head": 12, "n_inner": 3072, "n_layer": 12,
        "n_positions": 8192, "pad_vocab_size_multiple": 64, "parallel_block": False,
        "prenorm": False, "qkv_proj_bias": False, "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None, "rotary_scaling_factor": None, "type_vocab_size": 2,
        "use_flash_attn": True, "use_rms_norm": False, "vocab_size": 30_528,
    }  # fmt: skip
    from rooflax.models.registry import read_config

    _, config = read_config(published)
    assert config.num_parameters == 136_731_648 and config.max_position == 8192
    assert config.ropes[0].theta == 1000
