"""Formats by matrix: the head, v and others may be wider than the rest."""

import jax
import numpy as np
import pytest

import rooflax
from rooflax import LLM, ExecutionOptions, RequestError
from rooflax.loading.model_info import model_info
from rooflax.nn.storage import Storage
from rooflax.ops.format_names import format_of, format_on, is_at_an_end, resolve_format
from rooflax.ops.weights import quantized_parts

PRESET, EXPERTS = "preset:qwen2.5-tiny", "preset:gpt-oss-tiny"
PROMPT = [5, 9, 12, 40, 3, 7]
WIDE = "int4+v=w8a8+down=w8a8-g32+gate=w4a8"


def formats(name, quantize):
    config = model_info(name).config
    storage = Storage("float32", resolve_format(quantize))
    return {slot.key: str(storage.of(slot, config).format) for slot in config.params()}


def test_four_bits_leave_what_costs_most_wider_unless_it_is_named():
    found = formats(PRESET, "int4")
    assert found["attn.qkv"] == "iq4_nl|iq4_nl|w6a8" and found["embed"] in ("w8a8-h64", "w8a8")
    assert found["mlp.down"] == "w6a8"  # the last layer's
    every = formats(PRESET, "int4+head=int4+v=int4+down=int4")
    assert set(every.values()) <= {"iq4_nl", "None"}
    assert set(formats(PRESET, "w4a8").values()) <= {"w4a8", "None"}


def test_the_first_and_last_eighth_of_the_layers_keep_down_wider():
    chosen = [layer for layer in range(30) if is_at_an_end(layer, 30)]
    assert chosen == [0, 1, 2, 27, 28, 29]
    assert [layer for layer in range(5) if is_at_an_end(layer, 5)] == [0, 4]
    assert format_of("iq4_nl", "down", at_an_end=True) == "w6a8"
    assert format_of("iq4_nl", "down") == format_of("iq4_nl", "up", at_an_end=True) == "iq4_nl"
    assert format_of("iq4_nl+down=w8a8", "down") == "w8a8"


def test_matrices_are_named():
    found = formats(PRESET, WIDE)
    assert found["attn.qkv"] == "iq4_nl|iq4_nl|w8a8" and found["mlp.down"] == "w8a8-g32"
    assert found["mlp.gate_up"] == "w4a8|iq4_nl"
    assert formats(EXPERTS, WIDE)["mlp.gate_up"] == "iq4_nl"  # experts have one format


def test_elsewhere_four_bits_are_evenly_spaced_and_alike():
    elsewhere = format_on("gpu", resolve_format("int4"))
    assert elsewhere == "w4a8" == format_of(elsewhere, "v") == format_of(elsewhere, "head")


@pytest.mark.parametrize("name", ["int4+x=int8", "int4+v", "int4+v=int9", "int4+"])
def test_a_matrix_that_is_not_is_one_sentence(name):
    with pytest.raises(RequestError, match="quantize is"):
        resolve_format(name)


@pytest.mark.parametrize("layers", ["unrolled", "scan"])
def test_a_fused_weights_tensors_are_rounded_each_by_itself(tmp_path, layers):
    stacked = layers == "scan"
    model = rooflax.load(PRESET, quantize=WIDE, stacked=stacked)
    plain = rooflax.load(PRESET, quantize="int4")
    if not stacked:
        qkv, whole = (m.weights["layers"][0]["attn.qkv"] for m in (model, plain))
        assert [part.format for part in quantized_parts(qkv)] == ["iq4_nl", "w8a8"]
        first = (quantized_parts(fused)[0].arrays for fused in (qkv, whole))
        for one, other in zip(*first, strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    rooflax.save(model, tmp_path / "m", dtype="float32")
    again = rooflax.load(tmp_path / "m", stacked=stacked)
    for one, other in zip(jax.tree.leaves(model), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_every_way_to_run_gives_the_same_logits():
    ways = (
        ExecutionOptions(layers="unrolled"),
        ExecutionOptions(layers="scan"),
        ExecutionOptions(kernels="reference"),
    )
    logits = [np.asarray(LLM(PRESET, quantize="int4", options=way).logits(PROMPT)) for way in ways]
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-5)
    np.testing.assert_allclose(logits[2], logits[0], atol=0.05)
