"""What tests of several operations need."""

import pytest

from rooflax.ops import accelerator, native


@pytest.fixture(params=native.INSTRUCTION_SETS)
def instruction_set(request):
    """Forces one instruction set."""
    if not native.force_instruction_set(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    native.force_instruction_set("")


@pytest.fixture
def interpreted(monkeypatch):
    """Mosaic GPU kernels run on the CPU; memory nobody wrote is NaN.

    A program's warpgroups wait for each other on the threads of XLA's client, which has two here.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from rooflax.ops.linear import gpu_rows

    monkeypatch.setattr(gpu_rows, "MOST_WARPGROUPS", 2)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(out_of_bounds_reads="raise")):
        yield


@pytest.fixture
def on_gpu(monkeypatch, interpreted):
    """Dispatch believes that this is a GPU."""
    monkeypatch.setattr(accelerator, "platform", lambda: "gpu")
