"""From training to a checkpoint folder and back, with the recipe's own calls."""

import json
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rooflax
from rooflax.errors import RequestError
from rooflax.loading.safetensors import SafetensorsFile
from rooflax.loading.save import save, save_model
from rooflax.models.model import Model
from rooflax.nn.batch import Batch
from rooflax.ops.weights import Pairs
from rooflax.train.loop import run_training
from rooflax.train.tokenizer_training import END_OF_TEXT, save_tokenizer
from tests.marks import cases
from tests.support.train import tiny

pytestmark = pytest.mark.oldest_jax


@pytest.fixture(scope="module")
def trained(corpora, tmp_path_factory):
    """By family: the model after a few steps, and the one before."""
    made = {}

    def get(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            before = tiny.make_model(family, **SHALLOW.get(family, {}))
            result = run_training(before, tiny.settings(steps=2), corpora[0], None, folder)
            made[family] = result.model, before
        return made[family]

    return get


SHALLOW = {"gpt_oss": {"num_hidden_layers": 2}}


def leaves(weights):
    """Arrays by name, those of `Pairs` in the order of their axes."""

    def plain(leaf):
        return leaf.matrix().reshape(leaf.shape) if isinstance(leaf, Pairs) else leaf

    weights = jax.tree.map(plain, weights, is_leaf=lambda leaf: isinstance(leaf, Pairs))
    found = jax.tree_util.tree_leaves_with_path(weights)
    return {jax.tree_util.keystr(p, simple=True, separator="."): np.asarray(x) for p, x in found}


@pytest.mark.parametrize("family", cases(tiny.FAMILIES, default=["llama"], every_jax=["llama"]))
def test_float32_comes_back_exactly(trained, family, tmp_path):
    model, before = trained(family)
    start, wanted = leaves(before.weights), leaves(model.weights)
    assert start.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (array != start[name]).any(), f"{name} was not trained"
    save_model(tmp_path / "out", family, model.config, model.weights, dtype="float32")
    found = rooflax.load(tmp_path / "out", dtype="float32")
    assert (found.family, found.config) == (model.family, model.config)
    got = leaves(found.weights)
    assert got.keys() == wanted.keys()
    for name, array in got.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, wanted[name], err_msg=name)


@pytest.mark.parametrize("family", cases(tiny.FAMILIES, nightly=["gpt2", "qwen2"]))
def test_bfloat16_is_rounded_once(trained, family, tmp_path):
    model, _ = trained(family)
    save(model, tmp_path / "out", dtype="bfloat16")
    for dtype in ("float32", "bfloat16"):
        found = leaves(rooflax.load(tmp_path / "out", dtype=dtype).weights)
        for name, array in leaves(model.weights).items():
            rounded = array.astype(jnp.bfloat16).astype(np.float32)
            assert found[name].dtype == jnp.dtype(dtype)
            np.testing.assert_array_equal(found[name].astype(np.float32), rounded, err_msg=name)
    file = SafetensorsFile(tmp_path / "out" / "model.safetensors")
    assert {file.info(name).dtype for name in file.names()} == {"BF16"}
    assert sum(file.info(name).nbytes for name in file.names()) == 2 * model.num_parameters


@pytest.mark.every_jax
def test_the_loaded_model_computes_the_same(trained, tmp_path):
    model, _ = trained("llama")
    save(model, tmp_path / "out", dtype="float32")
    tokens = jnp.asarray(tiny.random_batch(2, 16).tokens)

    @jax.jit
    def logits(model: Model):
        return model.logits(model.forward(Batch.dense(tokens))[0])

    np.testing.assert_array_equal(logits(model), logits(rooflax.load(tmp_path / "out")))


def test_the_recipe_s_folder(trained, tokenizer, tmp_path):
    """Tokenizer, end of text and all: what `rooflax.LLM` and transformers open."""
    model, _ = trained("llama")
    save_tokenizer(tokenizer, tmp_path / "tokenizer", model_max_length=67)
    files = {
        name: tmp_path / "tokenizer" / name for name in ("tokenizer.json", "tokenizer_config.json")
    }
    end = tokenizer.token_to_id(END_OF_TEXT)
    save_model(
        tmp_path / "out", "llama", model.config, model.weights, eos_token_ids=[end], files=files
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (settings["model_type"], settings["eos_token_id"]) == ("llama", 0)
    assert settings["tie_word_embeddings"] is True
    names = SafetensorsFile(tmp_path / "out" / "model.safetensors").names()
    assert "lm_head.weight" not in names  # tied
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tokenizer"]


def test_a_full_disk_leaves_the_old_folder(trained, tmp_path):
    model, before = trained("llama")
    save(before, tmp_path / "out", dtype="float32")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save(model, tmp_path / "out", dtype="float32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    found = leaves(rooflax.load(tmp_path / "out").weights)
    for name, array in leaves(before.weights).items():
        np.testing.assert_array_equal(found[name], array)


def test_numbers_that_a_type_cannot_hold_are_not_saved(trained, tmp_path):
    model, _ = trained("llama")
    weights = jax.tree.map(lambda w: w * 1e5, model.weights)
    said = r"^model\.\S+ has numbers that float16 cannot hold; save it as bfloat16 or float32\.$"
    with pytest.raises(RequestError, match=said):
        save_model(tmp_path / "m", model.family, model.config, weights, dtype="float16")
    assert not list(tmp_path.iterdir())
    save_model(tmp_path / "m", model.family, model.config, weights, dtype="bfloat16")
