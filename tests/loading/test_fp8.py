"""Checkpoints of e4m3 codes with scales are their numbers, exactly."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest

from rooflax import load
from rooflax.errors import CheckpointError
from rooflax.loading.model_info import model_info
from tests import goldens

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
    raw["quantization_config"]["weight_block_size"] = "all"
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="weight_block_size = 'all'"):
        model_info(folder).weights()
