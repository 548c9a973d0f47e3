"""Longer tests beside those of tests/engine/ops/test_gpu.py."""

from dataclasses import replace

import jax.numpy as jnp

from tests.engine.ops.test_gpu import (
    SIZED,
    moe_arguments,
    reference_experts,
    run_experts,
)
from tests.support.ops.answers import each_answer
from tests.support.ops.cases import WITH_GPU_KERNELS, close

pytestmark = WITH_GPU_KERNELS


def test_experts_in_tiles_of_any_size(interpreted):
    arguments = moe_arguments(replace(SIZED["few tokens"], hidden=256), "float32")
    wanted, tried = reference_experts(*arguments), []
    for kernel, sizes, found in each_answer(lambda: run_experts(*arguments)):
        close(found, wanted)
        tried.append((kernel, *sizes))
    assert {kernel for kernel, *_ in tried} == {"linear.gpu plain"} and len(tried) > 1


def test_experts_of_many_tokens_in_tiles_of_any_size(interpreted):
    x, *rest = moe_arguments(replace(SIZED["many tokens"], hidden=256), "bfloat16")
    x = x.astype(jnp.bfloat16)
    wanted, tried = reference_experts(x.astype(jnp.float32), *rest), []
    for kernel, sizes, found in each_answer(lambda: run_experts(x, *rest)):
        close(found.astype(jnp.float32), wanted, 2**-7)
        tried.append((kernel, *sizes))
    assert {kernel for kernel, *_ in tried} == {"experts.gpu tiles"} and len(tried) > 3
