"""`rooflax verify`: against transformers."""

import json
import shutil
import sys

import pytest

from rooflax.cli import verify
from rooflax.loading.model_info import embedded_folder
from rooflax.loading.save import save_model
from rooflax.models.initialize import random_weights
from rooflax.models.presets import PRESETS
from rooflax.models.registry import read_config

pytestmark = pytest.mark.oldest_jax


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Qwen 2.5 with a tokenizer, as a checkpoint folder."""
    path = tmp_path_factory.mktemp("verify") / "model"
    name, config = read_config(PRESETS["qwen2.5-tiny"])
    save_model(path, name, config, random_weights(name, config, seed=3), dtype="float32")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_folder() / file, path / file)
    return path


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_equals_transformers(rooflax, folder):
    pytest.importorskip("torch")
    ran = rooflax("verify", folder, "-n", 5, "--json")
    found = json.loads(ran.out)
    assert ran.code == 0, ran.err
    assert found["equal"]
    assert found["max_relative_error"] < 1e-4
    assert len({row["prompt_tokens"] for row in found["prompts"]}) > 2
    assert all(row["new_tokens"] == 5 for row in found["prompts"])


@pytest.mark.filterwarnings("ignore")
def test_a_config_chooses_no_kernels_of_the_hub(rooflax, folder, tmp_path):
    """transformers takes an implementation of attention that is a repository's name from there."""
    pytest.importorskip("torch")
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model/config.json"
    config = json.loads(path.read_text()) | {"attn_implementation": "nobody/kernels"}
    path.write_text(json.dumps(config))
    ran = rooflax("verify", tmp_path / "model", "-n", 2, "-p", "x = 1")
    assert ran.code == 0, ran.err


@pytest.mark.every_jax
@pytest.mark.filterwarnings("ignore")
def test_what_differs_is_code_1(rooflax, folder, monkeypatch):
    pytest.importorskip("torch")
    exact = verify._Reference._run

    def wrong(self, torch, prompt, count):
        exact(self, torch, prompt, count)
        self.logits[-1] = self.logits[-1] + 0.01
        self.tokens[-1][1] += 1

    monkeypatch.setattr(verify._Reference, "_run", wrong)
    ran = rooflax("verify", folder, "-n", 2, "-p", "x = 1")
    assert ran.code == 1
    assert "differ at 1" in ran.out
    assert "NOT equal" in ran.out


def test_without_transformers_it_says_what_to_install(rooflax, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    ran = rooflax("verify", "preset:gpt2-tiny")
    assert (ran.code, ran.out) == (2, "")
    assert "pip install transformers torch" in ran.err


def test_a_preset_has_nothing_for_transformers(rooflax, monkeypatch):
    monkeypatch.setattr(verify, "_import_transformers", lambda: None)
    ran = rooflax("verify", "preset:gpt2-tiny")
    assert ran.code == 2
    assert "has no files that transformers could open" in ran.err
