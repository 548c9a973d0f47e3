"""Longer tests beside those of tests/engine/ops/test_gpu_tiles.py."""

import pytest

from tests.engine.ops.test_gpu import weights
from tests.engine.ops.test_gpu_tiles import multiplied, reference, rows_of
from tests.support.ops.answers import each_answer
from tests.support.ops.cases import WITH_GPU_KERNELS, close

pytestmark = WITH_GPU_KERNELS


@pytest.mark.parametrize("format", ["w4a16", "w8a16"])
def test_tiles_of_any_size(format, interpreted):
    w, x = weights(format, 1120, 53), rows_of(137, 1120)
    wanted, tried = reference(x, w), []
    for kernel, sizes, found in each_answer(lambda: multiplied(x, w)):
        close(found, wanted)
        tried.append((kernel, *sizes))
    assert {kernel for kernel, *_ in tried} == {"linear.gpu tiles"} and len(tried) > 2
