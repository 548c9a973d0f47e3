"""`rooflax verify`: against transformers, and against itself with a fault put in."""

import json
import shutil
import sys
from dataclasses import replace

import jax
import pytest

from rooflax.cli import isolate, verify
from rooflax.loading.load import embedded_folder
from rooflax.loading.save import save_model
from rooflax.models.initialize import random_weights
from rooflax.models.model import build
from rooflax.models.presets import PRESETS
from rooflax.models.registry import read_config
from rooflax.nn.execution import ExecutionOptions
from rooflax.ops.attention import api as attention_api


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
    assert "--isolate" in ran.err


def test_a_preset_has_nothing_for_transformers(rooflax, monkeypatch):
    monkeypatch.setattr(verify, "_import_transformers", lambda: None)
    ran = rooflax("verify", "preset:gpt2-tiny")
    assert ran.code == 2
    assert "use --isolate" in ran.err


@pytest.fixture
def jitted_reference(monkeypatch):
    """The reference compiled: op by op it takes long, and one test does that."""
    options = replace(isolate.REFERENCE, jit=True)
    monkeypatch.setattr(isolate, "REFERENCE", options)
    return options


def test_isolate_finds_no_difference_and_needs_no_transformers(
    rooflax, monkeypatch, jitted_reference
):
    monkeypatch.setitem(sys.modules, "transformers", None)
    flags = ("-n", 3, "-p", "x = 1", "-p", "def f(")
    ran = rooflax("verify", "preset:gpt2-tiny", "--isolate", *flags)
    assert ran.code == 0, ran.out + ran.err
    assert "Equal: no option changes a token." in ran.out
    lines = [line.split("=")[0] for line in ran.out.splitlines() if "=" in line]
    assert lines == ["kernels", "layers", "use_cache", "decode_steps"]


def test_every_option_that_matters_is_turned_on_once():
    def names(preset, **target):
        _, config = read_config(PRESETS[preset])
        found = isolate.settings(ExecutionOptions(**target), config)
        assert found[-1].options == ExecutionOptions(**target) or preset == "gpt2-tiny"
        return [setting.name.split("=")[0] for setting in found]

    assert names("gpt-oss-tiny", layers="scan") == ["reference", *isolate.ORDER]
    few = ["reference", "jit", "kernels", "use_cache", "decode_steps"]
    assert names("gpt2-tiny", layers="unrolled") == few


def small_model():
    """Three layers, of which the middle one has no window."""
    raw = {
        "model_type": "qwen2", "vocab_size": 37, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "use_sliding_window": True, "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }  # fmt: skip
    name, config = read_config(raw)
    return build(name, config, random_weights(name, config), None)


def test_the_reference_operation_by_operation_equals_the_jitted_one():
    model = small_model()
    task = isolate.reference_task(model, [[5, 9, 2], [7]], 2)
    eager = isolate.measure(model, isolate.REFERENCE, task)
    jitted = isolate.measure(model, replace(isolate.REFERENCE, jit=True), task)
    error, allowed, first = isolate.difference(jitted, eager)
    assert error < allowed
    assert first is None


def faulty(compute, first_position):
    """Attention that is wrong in layers without a window, from a position on."""

    def attention(q, k, v, where, args):
        out = compute(q, k, v, where, args)
        wrong = (where.positions >= first_position)[..., None, None] & (args.window is None)
        return jax.numpy.where(wrong, out * 3.0, out)

    return attention


@pytest.mark.parametrize(
    ("implementations", "option", "position"),
    [
        (attention_api.IMPLEMENTATIONS, "kernels=default", 3),
        (attention_api.PAGED_IMPLEMENTATIONS, "use_cache=True", 6),
    ],
)
def test_isolate_names_option_layer_and_token_of_a_fault(
    monkeypatch, jitted_reference, implementations, option, position
):
    model = small_model()
    task = isolate.reference_task(model, [[5, 9, 2, 7, 1], [3, 8]], 3)
    monkeypatch.setitem(implementations, "xla", faulty(implementations["xla"], position))
    monkeypatch.setattr(isolate, "greedy_tokens", lambda *_: task.greedy)
    target = replace(jitted_reference, kernels=None, use_cache=True)
    found = isolate.isolate(model, target, task)
    fault = found["first_difference"]
    assert not found["equal"]
    assert fault["option"] == option
    assert fault["layer"] == 1
    assert fault["position"] == position
    assert fault["error"] > isolate.TOLERANCE
    text = isolate.lines({"model": "m", **found})
    assert text[-1].startswith(f"NOT equal: {option} differs in layer 1, first at position")


def test_a_fault_of_the_engine_alone_is_no_layers(monkeypatch, jitted_reference):
    model = small_model()
    task = isolate.reference_task(model, [[5, 9, 2]], 3)
    monkeypatch.setattr(isolate, "greedy_tokens", lambda *_: [[*task.greedy[0][:2], -1]])
    target = replace(jitted_reference, kernels=None)
    fault = isolate.isolate(model, target, task)["first_difference"]
    assert (fault["option"], fault["layer"]) == ("kernels=default", None)
    assert fault["position"] == 5
    assert "scheduling" in fault["where"]


def test_a_truncated_model_is_its_first_layers():
    short = isolate.truncated(small_model(), 2)
    assert len(short.weights["layers"]) == short.config.num_layers == 2
    assert [layer.attention.window for layer in short.config.layers] == [4, None]
