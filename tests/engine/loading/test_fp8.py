"""Checkpoints of e4m3 codes with scales are their numbers, exactly."""

import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rooflax import load
from rooflax.errors import CheckpointError
from rooflax.loading.model_info import model_info
from tests import goldens
from tests.support.models.programs import full_logits
from tests.support.models.programs import numbers as dequantized

pytestmark = pytest.mark.oldest_jax

VARIANT = "ministral3"
BLOCK = [32, 16]


def coded(tensors, block):
    """The checkpoint's matmuls as codes and scales, in place; the numbers that they stand for."""
    numbers = {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        w = tensors.pop(name)
        rows, columns = w.shape
        scales = np.empty((-(-rows // block[0]), -(-columns // block[1])), np.float32)
        codes, numbers[name] = np.empty(w.shape, ml_dtypes.float8_e4m3fn), np.empty_like(w)
        for at in np.ndindex(scales.shape):
            where = tuple(slice(i * n, (i + 1) * n) for i, n in zip(at, block, strict=True))
            scales[at] = np.abs(w[where]).max() / 448
            codes[where] = (w[where] / scales[at]).astype(codes.dtype)
            numbers[name][where] = codes[where].astype(np.float32) * scales[at]
        one = scales.size == 1
        tensors |= {name: codes, f"{name}_scale_inv": scales.reshape(()) if one else scales}
        if one:
            tensors[name.replace("weight", "activation_scale")] = np.float32(0.5).reshape(())
    return numbers


@pytest.mark.parametrize("block", [BLOCK, [1000, 1000]], ids=["blocks", "whole"])
def test_codes_are_read_as_their_numbers(block, tmp_path):
    reference, numbers = goldens.committed(VARIANT), {}
    declared = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": block}
    config = {"quantization_config": declared}

    def change(tensors):
        numbers.update(coded(tensors, block))

    folder = goldens.write_checkpoint(
        tmp_path / "c", VARIANT, reference, config=config, change=change
    )
    plain = goldens.write_checkpoint(
        tmp_path / "p", VARIANT, reference, change=lambda tensors: tensors.update(numbers)
    )
    ours, theirs = load(folder), load(plain)
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), ours.weights, theirs.weights)
    assert numbers and all(jax.tree.leaves(same))


@pytest.mark.parametrize("end", ["_scale_inv", "_scale"])
@pytest.mark.parametrize("prefix", ["model.", "language_model.model."])
def test_codes_with_one_scale_each_stay_ours(prefix, end, tmp_path):
    """q, k and v are one weight here, of three scales."""
    reference, numbers = goldens.committed(VARIANT), {}
    raw = goldens.VARIANTS[VARIANT]
    if prefix != "model.":
        raw = {"model_type": "mistral3", "text_config": raw, "vision_config": {}}
    raw = raw | {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}}

    def change(tensors):
        numbers.update(coded(tensors, [1000, 1000]))
        for name in list(tensors):
            renamed = name.replace("_scale_inv", end).replace("activation_scale", "input_scale")
            outer = prefix.removesuffix("model.")
            tensors[outer + renamed] = tensors.pop(name)

    folder = goldens.write_checkpoint(tmp_path / "c", VARIANT, reference, change=change)
    (folder / "config.json").write_text(json.dumps(raw))
    plain = goldens.write_checkpoint(
        tmp_path / "p", VARIANT, reference, change=lambda tensors: tensors.update(numbers)
    )
    kept, theirs = load(folder, dtype=None), load(plain)
    seen = 0
    for slot in kept.config.params():
        leaf, wanted = (
            (m.weights if slot.layer is None else m.weights["layers"][slot.layer])[slot.key]
            for m in (kept, theirs)
        )
        if "->" not in slot.line.axes:
            continue
        assert leaf.format == "fp8-a16", slot.name
        np.testing.assert_array_equal(dequantized(leaf).reshape(wanted.shape), wanted)
        seen += 1
    assert seen == 4 * kept.config.num_layers
    outputs = [full_logits(model, jnp.arange(9)[None]) for model in (kept, theirs)]
    np.testing.assert_allclose(*outputs, rtol=0, atol=1e-4)


def test_codes_that_are_no_numbers_are_found(tmp_path):
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}}

    def change(tensors):
        coded(tensors, [1000, 1000])
        name = next(name for name in tensors if name.endswith("o_proj.weight"))
        tensors[name].view(np.uint8)[2, 3] = 0xFF

    reference = goldens.committed(VARIANT)
    folder = goldens.write_checkpoint(
        tmp_path / "c", VARIANT, reference, config=config, change=change
    )
    for dtype in (None, "float32"):
        with pytest.raises(CheckpointError, match="o_proj.weight holds"):
            load(folder, dtype=dtype, check=True)


def test_scales_that_do_not_fit_are_rejected(tmp_path):
    declared = {"quant_method": "fp8", "weight_block_size": [7, 7]}

    def change(tensors):
        coded(tensors, BLOCK)

    reference = goldens.committed(VARIANT)
    how = {"config": {"quantization_config": declared}, "change": change}
    folder = goldens.write_checkpoint(tmp_path / "c", VARIANT, reference, **how)
    with pytest.raises(CheckpointError, match=r"has scales .* each block of \[7, 7\]"):
        load(folder)
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"]["weight_block_size"] = None
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(
        CheckpointError, match=r"has scales .* wanted one, or one of each output\.$"
    ):
        load(folder)
    for wrong in ("all", [0, 16], [-1, -1], [], 0):
        raw["quantization_config"]["weight_block_size"] = wrong
        (folder / "config.json").write_text(json.dumps(raw))
        with pytest.raises(CheckpointError, match=re.escape(f"weight_block_size = {wrong!r}")):
            model_info(folder).weights()


@pytest.mark.parametrize("block", [BLOCK, [1000, 1000]], ids=["blocks", "whole"])
@pytest.mark.parametrize("has_scales", [False, True], ids=["codes", "scales"])
def test_codes_have_scales_and_nothing_else_has(block, has_scales, tmp_path):
    """Codes alone are other numbers than those that they stand for."""
    declared = {"quant_method": "fp8", "weight_block_size": block}

    def change(tensors):
        coded(tensors, block)
        name = next(name for name in tensors if name.endswith("q_proj.weight"))
        if has_scales:
            tensors[name] = tensors[name].astype(np.float32)
        else:
            del tensors[f"{name}_scale_inv"]

    how = {"config": {"quantization_config": declared}, "change": change}
    folder = goldens.write_checkpoint(tmp_path / "c", VARIANT, goldens.committed(VARIANT), **how)
    said = "is F32 and has scales" if has_scales else "is F8_E4M3 and has no scales"
    with pytest.raises(CheckpointError, match=f"q_proj.weight in .*safetensors {said}"):
        load(folder)
