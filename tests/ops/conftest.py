"""What tests of several operations need."""

import pytest

from rooflax.ops import native


@pytest.fixture(params=native.INSTRUCTION_SETS)
def instruction_set(request):
    """Forces one instruction set."""
    if not native.force_instruction_set(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    native.force_instruction_set("")
