"""GPTQ: what a model computes on a text says how its weights are rounded."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import rooflax
from rooflax import RequestError
from rooflax.cli.main import main
from rooflax.loading.calibration import calibrate, gptq
from rooflax.loading.model_info import embedded_folder
from rooflax.loading.plan import make_plan
from rooflax.ops.weights import iq4, pack, quantize

pytestmark = pytest.mark.oldest_jax

TEXT = "def read(path):\n    with open(path) as file:\n        return file.read()\n\n\n" * 60


LAYERS = 2


@pytest.fixture(scope="module")
def first_layers(tmp_path_factory):
    """The embedded model's folder with its first layers alone."""
    folder = shutil.copytree(embedded_folder(), tmp_path_factory.mktemp("cut") / "m")
    config = json.loads((folder / "config.json").read_text())
    changed = config | {"num_hidden_layers": LAYERS}
    (folder / "config.json").write_text(json.dumps(changed))
    tensors = load_file(folder / "model.safetensors")
    cut = tuple(f".layers.{i}." for i in range(LAYERS, config["num_hidden_layers"]))
    kept = {name: array for name, array in tensors.items() if not any(c in name for c in cut)}
    save_file(kept, folder / "model.safetensors")
    return folder


def test_results_on_the_rows_change_less_than_by_rounding():
    draw = np.random.default_rng(0)
    mixed = draw.standard_normal((96, 96)) * np.exp(draw.standard_normal(96))
    x = (draw.standard_normal((2048, 96)) @ mixed).astype(np.float32)
    w = draw.standard_normal((40, 96)).astype(np.float32)
    codes, scales = gptq(jnp.asarray(w), jnp.asarray(x.T @ x / len(x)))
    calibrated = pack("iq4_nl", np.asarray(codes), np.asarray(scales), (96,), (40,))
    rounded = quantize(np.ascontiguousarray(w.T), "iq4_nl", (96,), (40,))
    errors = [np.square(x @ (np.asarray(q.numbers()) - w.T)).mean() for q in (calibrated, rounded)]
    assert errors[0] < 0.5 * errors[1]


def test_inputs_of_no_moment_are_rounded():
    w = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
    codes, scales = gptq(jnp.asarray(w), jnp.eye(64))
    groups = w.reshape(-1, 32)
    found = iq4.VALUES[np.asarray(codes)].reshape(-1, 32) * np.asarray(scales).reshape(-1, 1)
    scale = iq4.searched_scales(groups, np)
    np.testing.assert_allclose(found, iq4.nearest(groups / scale, np) * scale, rtol=2e-3, atol=1e-3)


def plan(quantize="int4", model=None):
    options = rooflax.ExecutionOptions(layers="unrolled")
    return make_plan(model, quantize=quantize, max_model_len=256, options=options)


def test_a_model_is_calibrated_layer_by_layer(first_layers):
    own = plan(model=first_layers)
    reports = []
    ids = own.info.tokenizer().encode(TEXT)
    model = calibrate(own, ids, lambda *report: reports.append(report))
    assert [layer for layer, _ in reports] == list(range(LAYERS))
    assert all(0 < error < 0.9 for _, error in reports)
    rounded = rooflax.load(first_layers, quantize="int4")
    assert model.weights_bytes == rounded.weights_bytes


@pytest.mark.parametrize("count", [0, 255])
def test_a_short_text_is_one_sentence(count):
    with pytest.raises(RequestError, match=f"has {count} tokens; give at least 256"):
        calibrate(plan(), [1] * count)


def test_another_format_is_one_sentence():
    with pytest.raises(RequestError, match="say --quantize int4"):
        calibrate(plan("int8"), [1] * 300)


def quantized(folder, text, out, *flags):
    how = "-q", "int4", "--calibrate", str(text), "-o", str(out)
    assert main(["quantize", str(folder), *how, *flags]) == 0


def test_the_command_writes_an_ordinary_folder(first_layers, tmp_path, capsys):
    text, out = tmp_path / "text", tmp_path / "m"
    text.write_text(TEXT)
    quantized(first_layers, text, out)
    assert "iq4_nl" in capsys.readouterr().out
    (answer,) = rooflax.LLM(out).generate("def read(path):\n", max_tokens=8, temperature=0)
    assert len(answer.tokens) == 8


def test_a_model_writes_the_text_itself(first_layers, tmp_path, monkeypatch):
    monkeypatch.setattr("rooflax.cli.quantize.OWN_TEXTS", 2)
    quantized(first_layers, "auto", tmp_path / "m", "--quiet")
    assert (tmp_path / "m" / "model.safetensors").is_file()
