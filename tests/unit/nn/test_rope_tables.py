"""Inverse frequencies and tables equal transformers' for every kind of scaling we read."""

import numpy as np
import pytest

from rooflax.models.config_reader import ConfigReader
from rooflax.models.rope_reader import read_rope
from rooflax.nn.rope import inverse_frequencies, rope_arrays
from tests import goldens

HEAD_DIM, THETA = goldens.ROPE_HEAD_DIM, goldens.ROPE_THETA


def scaling_of(setting):
    raw = {
        "model_type": "llama",
        "max_position_embeddings": 131_072,
        "rope_parameters": goldens.ROPE_SETTINGS[setting] | {"rope_theta": THETA},
    }
    rope = read_rope(ConfigReader(raw), HEAD_DIM, default_theta=1.0)
    assert rope.theta == THETA
    return rope.scaling


def check(setting, frequencies, factor):
    scaling = scaling_of(setting)
    got = inverse_frequencies(HEAD_DIM, THETA, scaling)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, frequencies, rtol=2e-6)
    cos, sin = rope_arrays(HEAD_DIM, 50, THETA, scaling)
    angles = np.arange(50)[:, None] * frequencies.astype(np.float64)[None]
    np.testing.assert_allclose(cos, np.cos(angles) * factor, rtol=0, atol=2e-5)
    np.testing.assert_allclose(sin, np.sin(angles) * factor, rtol=0, atol=2e-5)
    assert cos.dtype == sin.dtype == np.float32 and cos.shape == (50, HEAD_DIM // 2)


@pytest.mark.parametrize("setting", list(goldens.ROPE_SETTINGS))
def test_tables_equal_the_committed_ones(setting):
    with np.load(goldens.FOLDER / "rope.npz") as file:
        check(setting, file[f"{setting}.frequencies"], float(file[f"{setting}.factor"]))


@pytest.mark.skipif(not goldens.HAVE_TORCH, reason="asks transformers, which is not installed")
@pytest.mark.parametrize("setting", list(goldens.ROPE_SETTINGS))
def test_tables_equal_transformers(setting):
    check(setting, *goldens.rope_reference(setting))
