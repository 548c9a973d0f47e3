"""Weights gathered into stacks as they come equal those stacked afterwards."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rooflax
from rooflax.loading.load import load
from rooflax.loading.source import ArraySource
from rooflax.loading.weights import WeightReader
from rooflax.nn import stacking
from rooflax.nn.storage import Storage
from tests.marks import cases

pytestmark = pytest.mark.oldest_jax

MODELS = ("preset:gpt2-tiny", "preset:gpt-oss-tiny")


@pytest.mark.parametrize("quantize", cases([None, "int8", "int4"], every_jax=["int4"]))
@pytest.mark.parametrize(
    ("model", "on_host"),
    cases(
        itertools.product(MODELS, [True, False]),
        default=[("preset:gpt2-tiny", True), ("preset:gpt-oss-tiny", False)],
    ),
)
def test_stacks_are_those_of_stack_layers(model, quantize, on_host, monkeypatch):
    if not on_host:
        monkeypatch.setattr(stacking, "_HostStack", stacking._DeviceStack)
    stacked = load(model, quantize=quantize, stacked=True).weights
    wanted = load(model, quantize=quantize).stacked().weights
    assert jax.tree.structure(stacked) == jax.tree.structure(wanted)
    for ours, theirs in zip(jax.tree.leaves(stacked), jax.tree.leaves(wanted), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.every_jax
def test_one_layer_in_another_width_widens_all_of_its_stack():
    model = load("preset:qwen2.5-tiny")
    tensors = _checkpoint(model)
    name = next(key for key in tensors if "layers.1" in key and key.endswith("down_proj.weight"))
    mixed = {key: array.astype(jnp.bfloat16) for key, array in tensors.items()}
    mixed[name] = mixed[name].astype(np.float32)
    storage = Storage(keeps_bfloat16=True)
    reader = WeightReader(ArraySource(mixed), model.family, model.config, storage=storage)
    weights = reader.weights(stacked=True)
    (stacks,) = weights["stacked_layers"]
    assert stacks["mlp.down"].dtype == jnp.float32
    assert stacks["attn.o"].dtype == jnp.bfloat16
    wanted = mixed[name.replace("layers.1", "layers.0")].astype(np.float32).T
    np.testing.assert_array_equal(np.asarray(stacks["mlp.down"][0]), wanted)


def _checkpoint(model):
    found = {}
    for slot in model.config.params():
        where = model.weights if slot.layer is None else model.weights["layers"][slot.layer]
        parts = slot.line.split(np.asarray(where[slot.key]), model.config.axis_sizes)
        found |= dict(zip(slot.hf_names, parts, strict=True))
    return found


@pytest.mark.every_jax
def test_what_is_only_copied_is_written_where_it_stays(tmp_path, monkeypatch):
    rooflax.save(load("preset:qwen2.5-tiny"), tmp_path / "m", dtype="float32")
    copied = []
    add = stacking._HostStack.add

    def watched(self, row, leaf):
        rows = [array[row].ctypes.data for arrays, _ in self._kinds.values() for array in arrays]
        copied.append(leaf.ctypes.data not in rows)
        add(self, row, leaf)

    monkeypatch.setattr(stacking._HostStack, "add", watched)
    seen = []
    model = load(tmp_path / "m", stacked=True, progress=seen.append)
    assert copied and not any(copied)
    assert sum(seen) == model.weights_bytes
    wanted = load(tmp_path / "m").stacked().weights
    for ours, theirs in zip(jax.tree.leaves(model.weights), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
