"""Vectors and scores of texts: equal to sentence-transformers', alone or beside others."""

import importlib.util
import itertools
import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import rooflax
from rooflax import LLM, AsyncLLM, ExecutionOptions, RequestError, UnsupportedModelError, model_info
from rooflax.engine.engine import Engine
from rooflax.errors import CheckpointError, EngineError
from rooflax.loading.safetensors import TensorToWrite, dtype_name, write_safetensors
from rooflax.nn.engine_config import EngineConfig
from tests import gguf_cases, goldens
from tests.marks import cases
from tests.pooling_cases import (
    DENSE,
    IDENTITY,
    MODULES,
    NORMALIZE,
    POOLING,
    SCORE,
    TRANSFORMER,
    pooling,
    write_dense,
    write_modules,
)
from tests.pooling_cases import dense as dense_layer

HAVE_ORACLE = importlib.util.find_spec("sentence_transformers") is not None and goldens.HAVE_TORCH
TEXTS = ["def f(x):", "return x + 1", "x", "while True: go on with some more words of text" * 2]
IDENTITY_SCORE = {"activation_fn": "torch.nn.modules.linear.Identity"}
PROMPTS = {"query": "Instruct: find.\nQuery: ", "document": ""}


def write(folder, arrays):
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(
        folder / "model.safetensors",
        [
            TensorToWrite(name, dtype_name(a.dtype), a.shape, lambda a=a: a)
            for name, a in arrays.items()
        ],
    )


def add_modules(folder, *modules, prompts=PROMPTS, default=None):
    """modules.json of a transformer and these: (type, config)."""
    write_modules(folder, *modules)
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": prompts, "default_prompt_name": default})
    )
    (folder / "sentence_bert_config.json").write_text("{}")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def checkpoint(references, tmp_path_factory):
    """Folders of a tiny Qwen 3, by its modules."""
    root = tmp_path_factory.mktemp("embedding")

    def make(name, *modules, **how):
        folder = goldens.write_checkpoint(root / name, "qwen3", references("qwen3"))
        return add_modules(folder, *modules, **how) if modules else folder

    return make


@pytest.fixture(scope="module")
def last(checkpoint):
    return checkpoint("last", pooling("lasttoken"), NORMALIZE)


@pytest.fixture(scope="module")
def llm(last):
    return LLM(last)


def oracle(folder, texts, **how):
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    return model.encode(texts, **how)


@pytest.mark.skipif(not HAVE_ORACLE, reason="needs sentence-transformers")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("mode", "normalizes"),
    cases(
        itertools.product(["lasttoken", "mean_tokens"], [True, False]),
        default=[("lasttoken", True), ("mean_tokens", False)],
    ),
)
def test_vectors_equal_those_of_sentence_transformers(checkpoint, mode, normalizes):
    extra = [NORMALIZE] if normalizes else []
    folder = checkpoint(f"{mode}-{normalizes}", pooling(mode), *extra)
    llm = LLM(folder)
    for how in ({}, {"prompt_name": "query"}, {"prompt": "a b: "}):
        np.testing.assert_allclose(llm.embed(TEXTS, **how), oracle(folder, TEXTS, **how), atol=1e-5)
    cut = oracle(folder, TEXTS, truncate_dim=7, normalize_embeddings=normalizes)
    np.testing.assert_allclose(llm.embed(TEXTS, dimensions=7), cut, atol=1e-5)


@pytest.fixture(scope="module")
def dense(checkpoint):
    """Two layers behind the mean, one with a bias and tanh, and a default prompt."""
    rng = np.random.default_rng(0)
    second = DENSE, {
        "in_features": 20, "out_features": 9, "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }  # fmt: skip
    modules = pooling("mean_tokens"), dense_layer(54, 20), second, NORMALIZE
    folder = checkpoint("dense", *modules, default="query")
    write_dense(folder / "2_Dense", rng.normal(size=(20, 54)))
    arrays = {"linear.weight": rng.normal(size=(9, 20)), "linear.bias": rng.normal(size=9)}
    write(folder / "3_Dense", {name: array.astype(np.float32) for name, array in arrays.items()})
    return folder


@pytest.mark.skipif(not HAVE_ORACLE, reason="needs sentence-transformers")
@pytest.mark.filterwarnings("ignore")
def test_dense_layers_stand_behind_the_pooling(dense):
    np.testing.assert_allclose(LLM(dense).embed(TEXTS), oracle(dense, TEXTS), atol=1e-5)


@pytest.mark.parametrize("normalizes", [True, False])
def test_vectors_are_cut_as_the_checkpoint_says(checkpoint, tmp_path, normalizes):
    """Behind its normalization, as in sentence-transformers; a cut that is asked for is before."""
    extra = [NORMALIZE] if normalizes else []
    whole = checkpoint(f"whole-{normalizes}", pooling("lasttoken"), *extra)
    folder = shutil.copytree(whole, tmp_path / "m")
    settings = {"prompts": PROMPTS, "truncate_dim": 7}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    plain, (llm, again) = LLM(whole), saved(folder, tmp_path / "again")
    wanted = plain.embed(TEXTS)[:, :7]
    np.testing.assert_array_equal(llm.embed(TEXTS), wanted)
    np.testing.assert_array_equal(LLM(again).embed(TEXTS), wanted)
    for how in ({"normalize": True}, {"normalize": False}):
        np.testing.assert_array_equal(
            llm.embed(TEXTS, **how), plain.embed(TEXTS, dimensions=7, **how)
        )
    for asked in (5, 54):  # also more than the checkpoint keeps
        found = llm.embed(TEXTS, dimensions=asked)
        np.testing.assert_array_equal(found, plain.embed(TEXTS, dimensions=asked))
    assert llm.embed([]).shape == (0, 7)
    if HAVE_ORACLE:
        np.testing.assert_allclose(wanted, oracle(folder, TEXTS), atol=1e-5)
    for wrong in (0, -1, 2.5, "7", True):
        settings["truncate_dim"] = wrong
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
        with pytest.raises(CheckpointError, match="truncate_dim = "):
            model_info(folder)


def saved(folder, place, **how):
    llm = LLM(folder, **how)
    rooflax.save(llm.model, place, dtype="float32", files_from=llm.info.folder)
    return llm, place


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("name", ["last", "dense"])
def test_what_is_saved_embeds_as_before(name, quantize, request, tmp_path):
    llm, folder = saved(request.getfixturevalue(name), tmp_path / "m", quantize=quantize)
    again = LLM(saved(folder, folder)[1])  # in its own place
    for how in ({}, {"prompt_name": "query"}):
        np.testing.assert_array_equal(again.embed(TEXTS, **how), llm.embed(TEXTS, **how))


@pytest.mark.skipif(not HAVE_ORACLE, reason="needs sentence-transformers")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["last", "dense"])
def test_sentence_transformers_opens_what_is_saved(name, request, tmp_path):
    llm, folder = saved(request.getfixturevalue(name), tmp_path / "m")
    np.testing.assert_allclose(llm.embed(TEXTS), oracle(folder, TEXTS), atol=1e-5)


def test_a_text_that_sentence_transformers_would_cut_is_rejected(checkpoint, tmp_path):
    folder = checkpoint("short", pooling("lasttoken"), NORMALIZE)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 3}')
    for llm in (LLM(folder), LLM(saved(folder, tmp_path / "m")[1])):
        assert llm.embed([[5, 9, 40]]).shape == (1, 54)
        with pytest.raises(RequestError, match=r"4 .*3"):
            llm.embed([[5, 9, 40, 7]])
    for value in (0, -1, True, "3", 2.5):
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": value}))
        with pytest.raises(CheckpointError, match=f"max_seq_length = {value!r}"):
            model_info(folder)


def test_what_is_saved_from_a_gguf_file_embeds(tmp_path):
    llm, folder = saved(gguf_cases.kept(gguf_cases.EMBEDS), tmp_path / "m")
    ids = [[5, 9, 40], [7]]
    # The file's bfloat16 numbers are float32 in the folder: with AMX their sums have another order.
    np.testing.assert_allclose(LLM(folder).embed(ids), llm.embed(ids), atol=1e-6)


@pytest.mark.skipif(not HAVE_ORACLE, reason="needs sentence-transformers")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("window", cases([0, 1, 6, 7], nightly=[1]))
def test_attention_both_ways_as_embedding_gemma_has_it(tmp_path, references, window):
    config = {"use_bidirectional_attention": True, "sliding_window": window}
    reference = references("gemma3_text")
    folder = goldens.write_checkpoint(tmp_path / "x", "gemma3_text", reference, config=config)
    size = reference.config["hidden_size"]
    add_modules(folder, pooling("mean_tokens", size), NORMALIZE)
    llm, wanted = LLM(folder), oracle(folder, TEXTS)
    np.testing.assert_allclose(llm.embed(TEXTS), wanted, atol=1e-5)
    scanned = LLM(folder, options=ExecutionOptions(kernels="xla", layers="unrolled"))
    np.testing.assert_allclose(scanned.embed(TEXTS), wanted, atol=1e-5)
    np.testing.assert_allclose(llm.embed(TEXTS * 9), np.tile(wanted, (9, 1)), atol=1e-5)
    with pytest.raises(RequestError, match="attends both ways"):
        llm.generate("x")
    with pytest.raises(RequestError, match="attends both ways"):
        llm.score("x y")


@pytest.mark.skipif(not HAVE_ORACLE, reason="needs sentence-transformers")
@pytest.mark.filterwarnings("ignore")
def test_a_base_models_names_and_no_head(last, tmp_path):
    folder = shutil.copytree(last, tmp_path / "base")
    source = model_info(last).weights()
    names = [name for name in source.names() if name != "lm_head.weight"]
    write(folder, {name.removeprefix("model."): np.array(source.read(name)) for name in names})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3Model"]}))
    llm = LLM(folder)
    assert llm.info.config.num_parameters < model_info(last).config.num_parameters
    np.testing.assert_array_equal(llm.embed(TEXTS), LLM(last).embed(TEXTS))
    np.testing.assert_allclose(llm.embed(TEXTS), oracle(folder, TEXTS), atol=1e-5)
    with pytest.raises(RequestError, match="embeds texts and has no head to generate with"):
        llm.generate("x")


@pytest.mark.parametrize(
    ("mode", "quantize"),
    cases(
        itertools.product(["lasttoken", "mean_tokens"], [None, "int8"]),
        nightly=[("mean_tokens", "int8")],
    ),
)
def test_a_text_has_the_same_vector_alone_beside_others_and_in_chunks(checkpoint, mode, quantize):
    folder = checkpoint(f"alone-{mode}", pooling(mode), NORMALIZE)
    llm = LLM(folder, quantize=quantize)
    same = np.testing.assert_array_equal  # native kernels from the first to the last
    if mode == "mean_tokens":  # but for the mean
        same = partial(np.testing.assert_allclose, atol=1e-6)
    together = llm.embed(TEXTS * 5)
    assert together.shape == (20, 54) and together.dtype == np.float32
    alone = np.concatenate([LLM(folder, quantize=quantize).embed(text) for text in TEXTS])
    same(together, np.tile(alone, (5, 1)))
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-6)
    small = Engine(
        llm.model,
        EngineConfig(
            options=llm.options,
            max_num_seqs=2,
            max_model_len=128,
            prefill_chunk=7,
            kv_dtype=llm.plan.kv_dtype,
            pooler=llm.embedder.pooler(),
        ),
    )
    sequences = llm.embedder.sequences([llm.encode(text) for text in TEXTS * 3])
    small.add(sequences)
    while small.has_unfinished:
        small.step()
    chunked = llm.embedder.vectors(sequences, None, None)
    same(chunked, np.tile(alone, (3, 1)))


def test_generating_and_embedding_take_turns(llm):
    before = llm.generate("def f(x):", max_tokens=5, temperature=0)[0].tokens
    vectors = llm.embed(TEXTS)
    assert llm.generate("def f(x):", max_tokens=5, temperature=0)[0].tokens == before
    np.testing.assert_allclose(llm.embed(TEXTS), vectors, atol=1e-6)
    assert llm.embed([]).shape == (0, 54)


@pytest.mark.parametrize(
    "how",
    [
        {"options": ExecutionOptions(use_cache=False)},
        {"options": ExecutionOptions(layers="scan")},
        {"weights_budget": 450_000},
        {"mesh": "tensor=2"},
        pytest.param({"options": ExecutionOptions(jit=False)}, marks=pytest.mark.nightly),
        pytest.param({"mesh": "data=2"}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_options_change_no_vector(llm, last, how):
    np.testing.assert_allclose(LLM(last, **how).embed(TEXTS), llm.embed(TEXTS), atol=1e-5)


@pytest.mark.parametrize(
    ("how", "param"),
    [
        ({"prompt_name": "passage"}, "prompt_name"),
        ({"prompt_name": ["query"]}, "prompt_name"),
        ({"prompt": 5}, "prompt"),
        ({"dimensions": 55}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 1.5}, "dimensions"),
    ],
)
def test_what_the_checkpoint_lacks_is_rejected(llm, how, param):
    with pytest.raises(RequestError) as caught:
        llm.embed("x", **how)
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["prompt_name", "prompt"])
def test_token_ids_have_no_prompt(llm, name):
    for texts in ([5, 9], ["x", [5, 9]]):
        with pytest.raises(RequestError, match=f"^{name} stands before a text") as caught:
            llm.embed(texts, **{name: "query"})
        assert caught.value.param == name


@pytest.mark.parametrize("text", [5, {"a": 1}, [[1.5]], [[70_000]], [[-1]], "", [[]], "x " * 200])
def test_texts_that_cannot_be_embedded_are_rejected(llm, text):
    with pytest.raises(RequestError):
        llm.embed(text)


def test_a_model_without_modules_does_not_embed():
    with pytest.raises(RequestError, match="has no modules.json.*Qwen3-Embedding"):
        LLM("preset:qwen2.5-tiny").embed("x")
    with pytest.raises(RequestError, match="does not rerank.*Reranker"):
        LLM("preset:qwen2.5-tiny").rerank("x", ["y"])


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ([pooling("mean_sqrt_len_tokens")], "The pooling is mean_sqrt_len_tokens"),
        ([(POOLING, {"pooling_mode": ["mean", "max"]})], "mean and max"),
        ([(POOLING, {"pooling_mode": 5})], "The pooling is 5"),
        ([(POOLING, {"pooling_mode": [["mean"]]})], "The pooling is .'mean'"),
        ([(POOLING, {"pooling_mode": {"mean": 1}})], "The pooling is .'mean'"),
        ([(POOLING, {"pooling_mode": "mean", "include_prompt": False})], "leaves out prompts"),
        ([pooling("mean_tokens"), (DENSE, {"activation_function": []})], "the activation ."),
        (
            [pooling("mean_tokens"), (DENSE, IDENTITY | {"module_input_name": "tokens"})],
            "module_input_name = 'tokens'",
        ),
        ([NORMALIZE], "has a Normalize where"),
        ([pooling("lasttoken"), (f"{MODULES}.CNN", {})], "has a CNN where"),
        ([pooling("lasttoken"), (TRANSFORMER["type"], {})], "as module 2"),
        ([(SCORE, {"true_token_id": 5})], "one that is false"),
        (
            [(SCORE, {"true_token_id": 5, "false_token_id": 6, "module_input_name": "x"})],
            "LogitScore of modules.json has module_input_name = 'x'",
        ),
        (
            [pooling("lasttoken"), (NORMALIZE[0], {"module_input_name": "tokens"})],
            "Normalize of modules.json has module_input_name = 'tokens'",
        ),
        ([(POOLING, {"pooling_mode": "mean", "weights": 3})], "Pooling of .* has weights = 3"),
        ([("custom_st.Pooling", {"pooling_mode": "mean"})], "has custom_st.Pooling, code that is"),
    ],
)
def test_modules_that_are_not_computed_are_named(checkpoint, modules, said):
    folder = checkpoint("bad", *modules)
    with pytest.raises(UnsupportedModelError, match=said):
        model_info(folder)


def test_keys_of_modules_that_are_not_read_are_named(checkpoint):
    folder = checkpoint("keys", pooling("lasttoken"))
    lines = json.loads((folder / "modules.json").read_text())
    for change, said in (({"kwargs": ["task"]}, r"kwargs = \['task'\]"), ({"kwargs": []}, None)):
        changed = [lines[0] | change, *lines[1:]]
        (folder / "modules.json").write_text(json.dumps(changed))
        if said is None:
            model_info(folder)
            continue
        with pytest.raises(UnsupportedModelError, match=f"modules.json of .* has {said}, which"):
            model_info(folder)


BERT_NORMALIZER = {
    "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
    "strip_accents": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("normalizer", "lowers"),
    [
        (BERT_NORMALIZER | {"lowercase": True}, True),
        ({"type": "Lowercase"}, True),
        ({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}, True),
        (BERT_NORMALIZER | {"lowercase": False}, False),
        ({"type": "NFC"}, False),
        (None, False),
    ],
)
def test_lower_case_is_the_tokenizers(checkpoint, normalizer, lowers):
    """As in the English BGE models, whose tokenizer does what do_lower_case says."""
    folder = checkpoint("lower", pooling("lasttoken"))
    raw = json.loads((folder / "tokenizer.json").read_text()) | {"normalizer": normalizer}
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    settings = {"max_seq_length": 7, "do_lower_case": True}
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    if lowers:
        assert model_info(folder).pooling.max_tokens == 7
        return
    with pytest.raises(UnsupportedModelError, match="do_lower_case, which its tokenizer does not"):
        model_info(folder)


@pytest.mark.parametrize("default", [[], {}, ["query"], 5])
def test_the_default_prompt_is_a_name(checkpoint, default):
    folder = checkpoint("default", pooling("lasttoken"), default=default)
    with pytest.raises(CheckpointError, match="one of the names"):
        model_info(folder)


def test_dense_layers_fit_what_stands_before_them(checkpoint):
    sizes = {"in_features": 53, "out_features": 7, "bias": False}
    folder = checkpoint("narrow", pooling("lasttoken"), (DENSE, IDENTITY | sizes))
    write(folder / "2_Dense", {"linear.weight": np.ones((7, 53), np.float32)})
    with pytest.raises(CheckpointError, match="in_features = 53 behind 54"):
        model_info(folder)


@pytest.mark.parametrize("token", [goldens.VOCAB, 2**40])
def test_tokens_of_a_score_are_in_the_vocabulary(checkpoint, token):
    folder = checkpoint("tokens", (SCORE, {"true_token_id": 5, "false_token_id": token}))
    with pytest.raises(CheckpointError, match=f"{token}.*has {goldens.VOCAB}"):
        model_info(folder)


def test_damaged_files_are_one_sentence(checkpoint):
    folder = checkpoint("damaged", pooling("lasttoken"))
    for content in ("{", "{}", "[5]", '[{"type": 5}]', '"x"'):
        (folder / "modules.json").write_text(content)
        with pytest.raises(Exception, match=r"modules.json"):
            model_info(folder)


@pytest.mark.parametrize("path", ["../outside", "/", "link", "a\0b", "x/../../outside"])
def test_a_module_outside_the_folder_is_rejected(checkpoint, monkeypatch, path):
    folder = checkpoint(f"inside{abs(hash(path))}", pooling("lasttoken"))
    outside = folder.parent / "outside"
    outside.mkdir(exist_ok=True)
    (outside / "config.json").write_text(json.dumps(pooling("mean")[1]))
    (folder / "link").symlink_to(outside)
    lines = json.loads((folder / "modules.json").read_text())
    lines[1]["path"] = path
    (folder / "modules.json").write_text(json.dumps(lines))
    monkeypatch.chdir(folder)
    for name in (folder, Path()):
        with pytest.raises(CheckpointError, match="a module must be in that folder"):
            model_info(name)


def test_a_transformer_elsewhere_is_rejected(checkpoint):
    folder = checkpoint("elsewhere", pooling("lasttoken"))
    lines = json.loads((folder / "modules.json").read_text())
    lines[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(lines))
    with pytest.raises(UnsupportedModelError, match="Transformer in '0_Transformer'"):
        model_info(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_a_vector_that_is_not_finite_is_an_error(checkpoint, value):
    modules = pooling("lasttoken"), dense_layer(54, 7)
    folder = checkpoint(f"not finite {value}", *modules)
    write_dense(folder / "2_Dense", np.full((7, 54), value))
    with pytest.raises(EngineError, match="NaN or infinite"):
        LLM(folder).embed("x")


@pytest.fixture(scope="module")
def reranker(checkpoint):
    folder = checkpoint("reranker", (SCORE, {"true_token_id": 17, "false_token_id": 40}))
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    return folder


def test_scores_are_the_share_of_one_token_against_another(reranker):
    llm = LLM(reranker)
    documents = ["x + y", "a longer document than the other", ""]
    scores = llm.rerank("what is x", documents)
    for document, score in zip(documents, scores, strict=True):
        ids = llm.encode(f"<query>what is x<document>{document}>")
        logits = llm.logits(ids)[-1].astype(np.float64)
        assert score == pytest.approx(1 / (1 + np.exp(logits[40] - logits[17])), abs=1e-5)
    assert llm.rerank("what is x", []) == []
    told = llm.rerank("what is x", documents, instruction="be strict")
    assert told != scores
    assert llm.rerank("what is x", documents[:1]) == pytest.approx(scores[:1], abs=1e-6)
    with pytest.raises(RequestError, match="use rerank"):
        llm.embed("x")
    for query, document in ((5, "x"), ("x", None)):
        with pytest.raises(RequestError, match="it must be text"):
            llm.rerank(query, [document])


def test_a_score_has_the_checkpoints_activation(reranker, tmp_path):
    """The settings' before that of config.json, also in what is saved; a sigmoid by default."""
    documents, folder = ["x + y", "z"], shutil.copytree(reranker, tmp_path / "m")
    wanted = np.array(LLM(folder).rerank("what is x", documents))
    settings = json.loads((folder / "config_sentence_transformers.json").read_text())
    settings |= IDENTITY_SCORE
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    llm, again = saved(folder, tmp_path / "saved")
    found = llm.rerank("what is x", documents)
    np.testing.assert_allclose(found, np.log(wanted / (1 - wanted)), atol=1e-5)
    assert LLM(again).rerank("what is x", documents) == found
    settings["activation_fn"] = "torch.nn.modules.activation.Mish"
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModelError, match="activation_fn = 'Mish'"):
        model_info(folder)


def test_a_rerankers_default_prompt_is_its_instruction(reranker, tmp_path):
    folder = shutil.copytree(reranker, tmp_path / "m")
    settings = {"prompts": PROMPTS, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    plain, llm = LLM(reranker), LLM(folder)
    ask, told = ("what is x", ["x + y"]), {"instruction": PROMPTS["query"]}
    assert llm.rerank(*ask) == plain.rerank(*ask, **told) != plain.rerank(*ask)
    assert llm.rerank(*ask, instruction="") == plain.rerank(*ask)


@pytest.mark.skipif(not HAVE_ORACLE, reason="needs sentence-transformers")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("begins", [True, False])
def test_sentence_transformers_scores_what_is_saved(reranker, tmp_path, begins):
    """By the chat template, which writes what begins an answer or not."""
    from sentence_transformers import CrossEncoder

    how = {"method": "forward", "method_output_name": "logits"}
    settings = {
        "transformer_task": "text-generation", "module_output_name": "causal_logits",
        "modality_config": {"text": how, "message": how | {"format": "flat"}},
    }  # fmt: skip
    if begins:
        settings["processing_kwargs"] = {"chat_template": {"add_generation_prompt": True}}
    folder = shutil.copytree(reranker, tmp_path / "m")
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    (folder / "config_sentence_transformers.json").write_text('{"model_type": "CrossEncoder"}')
    llm, again = saved(folder, tmp_path / "saved")
    documents = ["x + y", "a longer document than the other"]
    found = np.array(llm.rerank("what is x", documents))
    if begins:
        assert LLM(reranker).rerank("what is x", documents) == list(found)
    for place in (folder, again):
        model = CrossEncoder(str(place), device="cpu", local_files_only=True)
        wanted = model.predict([("what is x", document) for document in documents])
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    assert LLM(again).rerank("what is x", documents) == list(found)


def test_what_is_saved_scores(reranker, tmp_path):
    llm, folder = saved(reranker, tmp_path / "m")
    assert LLM(folder).rerank("a", ["b", "c d"]) == llm.rerank("a", ["b", "c d"])


QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: be strict\n<Query>: what is x\n<Document>: x + y<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""As the model card of Qwen3-Reranker composes it."""


def test_a_qwen3_without_modules_reranks_by_the_model_cards_prompt(references, tmp_path):
    """Where its tokenizer has "yes" and "no"."""
    longer = {"config": {"max_position_embeddings": 1100}}
    folder = goldens.write_checkpoint(tmp_path / "m", "qwen3", references("qwen3"), **longer)
    ask = {"query": "what is x", "documents": ["x + y"], "instruction": "be strict"}
    with pytest.raises(RequestError, match="has no token 'yes' to score with"):
        LLM(folder).rerank(**ask)
    raw = json.loads((folder / "tokenizer.json").read_text())
    vocab, merges = raw["model"]["vocab"], (["y", "e"], ["ye", "s"], ["n", "o"])
    for old, new in zip(("in", "er", "on"), merges, strict=True):
        vocab["".join(new)] = vocab.pop(old)
    raw["model"]["merges"] = [["t", "h"], ["th", "e"], *merges]
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    llm = LLM(folder)
    (score,) = llm.rerank(**ask)
    logits = llm.logits(llm.encode(QWEN3_RERANKER))[-1].astype(np.float64)
    yes, no = (logits[vocab[token]] for token in ("yes", "no"))
    assert score == pytest.approx(1 / (1 + np.exp(no - yes)), abs=1e-5)


def test_many_callers_embed_at_once(last, llm):
    import asyncio

    async def run():
        async with AsyncLLM(last, max_num_seqs=4) as engine:
            found = await asyncio.gather(
                *(engine.embed(TEXTS[i % 4 :], dimensions=10) for i in range(12))
            )
            with pytest.raises(RequestError, match="dimensions"):
                await engine.embed("x", dimensions=99)
            with pytest.raises(RequestError, match="embeds texts"):
                await engine.generate("x")
            with pytest.raises(RequestError, match="does not rerank"):
                await engine.rerank("x", ["y"])
            return found

    wanted = llm.embed(TEXTS, dimensions=10)
    for i, found in enumerate(asyncio.run(run())):
        np.testing.assert_allclose(found, wanted[i % 4 :], atol=1e-6)


def test_many_callers_rerank_at_once(reranker):
    import asyncio

    async def run():
        async with AsyncLLM(reranker, max_num_seqs=2) as engine:
            return await asyncio.gather(*(engine.rerank("q", ["a", "b", "c"]) for _ in range(3)))

    wanted = LLM(reranker).rerank("q", ["a", "b", "c"])
    assert asyncio.run(run()) == [pytest.approx(wanted, abs=1e-6)] * 3
