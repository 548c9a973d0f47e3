"""The command that converts a pickled checkpoint, run in a process of its own with torch."""

import subprocess
import sys

import numpy as np
import pytest

from rooflax.loading import safetensors as st

pytestmark = pytest.mark.oldest_jax


def test_conversion_command_works(tmp_path):
    torch = pytest.importorskip("torch")
    source, target = tmp_path / "a b.bin", tmp_path / "model.safetensors"
    torch.save({"w": torch.arange(4.0).bfloat16()}, source)
    command = st.conversion_command([source], target).replace("python", sys.executable, 1)
    subprocess.run(command, shell=True, check=True, capture_output=True)
    np.testing.assert_array_equal(
        st.SafetensorsFile(target).read("w").astype(np.float32), np.arange(4, dtype=np.float32)
    )
