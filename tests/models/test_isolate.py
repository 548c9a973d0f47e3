"""The helper that finds a faulty option, layer and token: on sound models and planted faults."""

from dataclasses import replace

import jax
import pytest

from rooflax.models.initialize import random_weights
from rooflax.models.model import build
from rooflax.models.presets import PRESETS
from rooflax.models.registry import read_config
from rooflax.nn.execution import ExecutionOptions
from rooflax.ops.attention import api as attention_api
from rooflax.ops.dispatch import Backend
from tests import isolate


@pytest.fixture
def jitted_reference(monkeypatch):
    """The reference compiled: op by op it takes long, and one test does that."""
    options = replace(isolate.REFERENCE, jit=True)
    monkeypatch.setattr(isolate, "REFERENCE", options)
    return options


def test_no_option_makes_a_difference(jitted_reference):
    name, config = read_config(PRESETS["gpt2-tiny"])
    model = build(name, config, random_weights(name, config), None)
    task = isolate.reference_task(model, [[5, 9, 2, 7], [3, 8]], 3)
    found = isolate.isolate(model, ExecutionOptions(layers="scan"), task)
    assert found["equal"], found
    names = [row["setting"].split("=")[0] for row in found["settings"]]
    assert names == ["reference", "kernels", "layers", "use_cache", "decode_steps"]


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
    ("operation", "option", "position"),
    [
        (attention_api.DENSE, "kernels=default", 3),
        pytest.param(attention_api.PAGED, "use_cache=True", 6, marks=pytest.mark.slow),
    ],
)
def test_isolate_names_option_layer_and_token_of_a_fault(
    monkeypatch, jitted_reference, operation, option, position
):
    model = small_model()
    task = isolate.reference_task(model, [[5, 9, 2, 7, 1], [3, 8]], 3)
    wrong = faulty(operation.backend("xla").run, position)
    monkeypatch.setitem(operation.backends, "xla", Backend(wrong))
    monkeypatch.setattr(isolate, "greedy_tokens", lambda *_: task.greedy)
    target = replace(jitted_reference, kernels=None, use_cache=True)
    found = isolate.isolate(model, target, task)
    fault = found["first_difference"]
    assert not found["equal"]
    assert fault["option"] == option
    assert fault["layer"] == 1
    assert fault["position"] == position
    assert fault["error"] > isolate.TOLERANCE


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
