"""GPU kernels wait: for products before the memory they read is filled again, and for stores.

On the lowered module, without a GPU; `make gpu-compile` looks for the same in the machine code.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from rooflax.ops import accelerator
from rooflax.ops.moe import gpu as moe_gpu
from tests.ops.test_gpu import (
    FEW,
    PROMPTS,
    SIZED,
    attend,
    kernel,
    moe_arguments,
    paged,
    run_experts,
    weights,
)
from tests.ops.test_gpu_tiles import multiplied, rows_of

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < accelerator.OLDEST_GPU_JAX,
    reason=f"GPU kernels need JAX 0.11 or later, and this is {jax.__version__}",
)


def tiles(inner, outer=128):
    """Arguments of the experts' products on the tensor cores."""
    s = jax.ShapeDtypeStruct
    x, w = s((2, 128, inner), jnp.bfloat16), s((2, inner, outer), jnp.bfloat16)
    return x, w, s((2,), jnp.int32), s((1,), jnp.int32)


def read_at_refills(function, *arguments):
    """Of the one kernel of a function that has products; also that its stores are waited for."""
    from tests.ops.mosaic_modules import flat, groups_read_at_refills, modules

    (events,) = (found for found in modules(function, *arguments) if "product" in flat(found))
    names = list(flat(events))
    if "store" in names:
        assert "stored" in names[names.index("store") :]
    return groups_read_at_refills(events)


@pytest.mark.parametrize("inner", [128, 320, 2880])
def test_a_stage_is_refilled_when_its_products_are_done(inner):
    """One group may be under way, which reads the stage behind the one that is refilled."""
    assert set(read_at_refills(moe_gpu._tile_matmuls, *tiles(inner))) == {1}


def test_one_step_refills_nothing():
    assert read_at_refills(moe_gpu._tile_matmuls, *tiles(64)) == []


def test_a_kernel_that_does_not_wait_is_found(monkeypatch):
    """The experts' kernel as it was: every product so far may be reading what is refilled."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    monkeypatch.setattr(plgpu, "wgmma_wait", lambda _: None)
    assert max(read_at_refills(moe_gpu._tile_matmuls, *tiles(2880))) == 3


def test_attention_of_prompts_has_no_product_under_way_at_a_copy():
    q, k_pool, v_pool, *given = paged(PROMPTS[0])
    narrow = (a.astype(jnp.bfloat16) for a in (q, k_pool, v_pool))
    found = read_at_refills(attend, *narrow, *given)
    assert found and set(found) == {0}


@pytest.mark.parametrize("format", ["w4a16", "w8a16-g32", "w8a16", "mxfp4-a16", "fp8-a16"])
def test_upcast_operands_have_no_product_under_way_at_a_copy(format):
    """The rows that are refilled are the right operand of both warpgroups' products: each says that
    it has waited, and the one that copies waits for both."""
    given = rows_of(37, 1120), weights(format, 1120, 200)
    found = read_at_refills(multiplied, *given)
    assert found and set(found) == {0}


def test_upcast_operands_that_are_not_waited_for_are_found(monkeypatch):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    monkeypatch.setattr(plgpu, "wgmma_wait", lambda _: None)
    given = rows_of(37, 1120), weights("w8a16", 1120, 200)
    assert max(read_at_refills(multiplied, *given)) > 3


def one_of_each():
    """Every other kernel, with its arguments."""
    q, k_pool, v_pool, *given = paged(replace(FEW[0], query_len=1))
    yield attend, (q, k_pool, v_pool, *given)
    for format in ("w8a16", "w8a16-g32", "w4a16", "mxfp4-a16", "fp8-a16"):
        yield kernel, (jnp.zeros((2, 1120), jnp.bfloat16), weights(format, 1120, 53))
    plain = jnp.zeros((1120, 96), jnp.bfloat16)
    for rows in (1, 2):
        yield kernel, (jnp.zeros((rows, 1120), jnp.bfloat16), plain)
    for name, kind in (("one token", "mxfp4-a16"), ("few tokens", "bfloat16")):
        yield run_experts, moe_arguments(SIZED[name], kind)


def test_the_other_kernels_copy_and_multiply_nothing_on_the_side():
    """They read global memory into registers and multiply there: nothing to wait for."""
    from tests.ops.mosaic_modules import flat, modules

    for function, arguments in one_of_each():
        found = modules(function, *arguments)
        assert found and not any(list(flat(events)) for events in found)
