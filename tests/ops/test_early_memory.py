"""Memory made ready while JAX is imported: who gets it, and what becomes of the rest."""

import argparse
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from rooflax.cli import session
from rooflax.nn.host_memory import anonymous_bytes
from rooflax.ops import early_memory as lib
from rooflax.ops.host_arrays import aligned_empty

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is none")
MIB = 1 << 20


@pytest.fixture
def made(monkeypatch):
    """What `early_memory` made, in order."""
    found = []

    class Prequantized(lib.EarlyMemory):
        def __init__(self, num_bytes):
            super().__init__(num_bytes)
            found.append(self)

    monkeypatch.setattr(lib, "EarlyMemory", Prequantized)
    return found


def is_in(array, memory):
    return np.shares_memory(array, memory._memory)


def test_large_arrays_lie_in_it_one_after_the_other_and_outlive_it(made):
    with lib.early_memory(100 * MIB):
        (memory,) = made
        one, other = aligned_empty((3, 5), np.dtype("int8")), aligned_empty((MIB,), np.dtype("f4"))
        assert is_in(one, memory)
        assert is_in(other, memory)
        assert not np.shares_memory(one, other)
        assert one.ctypes.data % lib.ALIGNMENT == other.ctypes.data % lib.ALIGNMENT == 0
        too_much = aligned_empty((100, MIB), np.dtype("int8"))
        assert not is_in(too_much, memory)
        one[...], other[...] = 7, 0.5
    assert not is_in(aligned_empty((MIB,), np.dtype("f4")), memory)
    assert (one == 7).all()
    assert (other == 0.5).all()
    del memory
    made.clear()
    assert (other == 0.5).all()


def test_pages_are_there_before_they_are_taken_and_the_rest_is_given_back(made):
    before = anonymous_bytes()
    with lib.early_memory(200 * MIB):
        made[0]._thread.join()
        touched = anonymous_bytes() - before
        if touched < 10 * MIB:
            pytest.skip("this kernel has no MADV_POPULATE_WRITE")
        assert touched > 190 * MIB
        kept = aligned_empty((50, MIB), np.dtype("int8"))
    assert 45 * MIB < anonymous_bytes() - before < 70 * MIB
    del kept
    made.clear()
    assert anonymous_bytes() - before < 20 * MIB


def test_what_fails_inside_ends_it_and_small_models_have_none(made):
    with pytest.raises(ZeroDivisionError), lib.early_memory(100 * MIB):
        _ = 1 // 0
    assert lib.take(1) is None
    with lib.early_memory(lib.SMALLEST - 1):
        assert lib.take(1) is None
    assert len(made) == 1
    with lib.early_memory(100 * MIB):
        lib.drop()
        assert lib.take(1) is None


def test_what_stands_ready_counts_as_free_and_stays_with_who_took_it(made):
    with lib.early_memory(100 * MIB):
        made[0]._thread.join()
        if not made[0]._touched:
            pytest.skip("this kernel has no MADV_POPULATE_WRITE")
        assert lib.untaken_bytes() == 100 * MIB
        kept = lib.take(30 * MIB)
        assert lib.untaken_bytes() == 70 * MIB
        memory = made[0]
    kept[...] = 3
    assert memory.take(1) is None  # what was given back is nobody's
    assert lib.untaken_bytes() == 0
    assert (kept == 3).all()


def test_no_memory_for_it_is_no_fault(monkeypatch):
    def refuses(num_bytes):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(lib, "private_map", refuses)
    with lib.early_memory(100 * MIB):
        assert lib.take(1) is None


def test_folders_whose_weights_stay_as_they_are_have_it(tmp_path):
    arrays = {"a": np.zeros(100, np.float32), "b": np.zeros((3, 4), np.float16)}
    save_file(arrays, tmp_path / "model.safetensors")
    save_file({"a": np.zeros(9)}, tmp_path / "consolidated.safetensors")  # nobody's

    def stored(model=tmp_path, **given):
        return session._stored_bytes(argparse.Namespace(model=str(model), **given))

    assert stored() == stored(quantize=None, dtype=None) == 448 + 64  # each aligned
    changes = {"quantize": "int4", "dtype": "bfloat16", "weights_budget": "1GiB", "kernels": "xla"}
    for name, value in changes.items():
        assert stored(**{name: value}) == 0
    save_file({"a": np.zeros(9, np.float16)}, tmp_path / "model.safetensors")
    assert stored() == 0  # becomes float32
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    assert stored() == 0
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("gone")
    assert stored() == 0
    for model in ("", "preset:gpt2", "no/such/folder", "model.gguf", "x" * 300):
        assert stored(model) == 0
    assert session._stored_bytes(argparse.Namespace(model=None)) == 0
