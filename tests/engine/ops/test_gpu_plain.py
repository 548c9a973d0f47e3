"""The GPU's kernel of few rows of plain weights: interpreted against the reference, and lowered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.errors import RequestError
from rooflax.ops.linear import gpu as linear_gpu
from rooflax.ops.linear import gpu_plain_tiles, gpu_rows, linear, unembed
from rooflax.ops.linear.args import LinearArgs
from rooflax.ops.linear.prologue import Activation, ClampedSwiglu, Norm
from rooflax.ops.weights import StackMember, as_operand
from tests.marks import cases
from tests.support.ops.answers import each_answer
from tests.support.ops.cases import WITH_GPU_KERNELS, close, lowered, normal

pytestmark = [pytest.mark.oldest_jax, WITH_GPU_KERNELS]

INNER, OUTER = 1120, 96
"""70 groups for a norm's squares, which are no whole tiles; outputs by 32, not by 64."""
PROLOGUES = {
    "nothing": None,
    "norm": Norm(jnp.asarray(1 + normal(INNER, seed=8)), eps=1e-5),
    "norm with a bias": Norm(*(jnp.asarray(normal(INNER, seed=s)) for s in (8, 9))),
    "gate": Activation("silu", gated=True),
    "another gate": Activation("gelu", gated=True),
    "no gate": Activation("gelu"),
    "a clamped gate": ClampedSwiglu(limit=2.0),
}


@functools.cache
def weights(dtype, *shape):
    return jnp.asarray(normal(*shape, seed=1), dtype)


def kernel(x, w, **how):
    """Linear by the kernel, whatever platform this is."""
    args = LinearArgs(x, *as_operand(w).in_stack(), **{"dtype": x.dtype, **how})
    assert linear_gpu.unsupported(args) is None
    return linear_gpu.matmul(args)


def exact(x, w, **how):
    return linear(x, w, **how, implementation="reference")


@pytest.mark.parametrize("rows", cases([1, 3, linear_gpu.FEW_ROWS], nightly=[3]))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_products_of_few_rows(dtype, rows, interpreted):
    """Rows are float32, so that nothing but the order of sums differs."""
    w, x = weights(dtype, INNER, OUTER), jnp.asarray(normal(rows, INNER))
    close(kernel(x, w), exact(x, w))


@pytest.mark.parametrize("rows", cases([2, 9, 16], nightly=[16]))
def test_several_rows_on_the_tensor_cores(rows, interpreted):
    """A norm, bias and residual around them; a member of a stack; the inputs shared in any way."""
    inner, outer = 2048, 192
    stack = weights("bfloat16", 3, inner, outer)
    x = jnp.asarray(normal(rows, inner), jnp.bfloat16)
    bias, residual = (jnp.asarray(normal(*n, seed=4)) for n in ((outer,), (rows, outer)))
    how = {"prologue": Norm(jnp.asarray(1 + normal(inner, seed=8)), eps=1e-5)}
    given = {**how, "residual": residual.astype(jnp.bfloat16)}
    wide = {k: v.astype(jnp.float32) if k == "residual" else v for k, v in given.items()}
    wanted = linear(x.astype(jnp.float32), stack[1], bias, **wide, implementation="reference")

    def run():
        args = LinearArgs(x, as_operand(stack, stack=1), jnp.int32(1), bias, dtype=x.dtype, **given)
        assert gpu_plain_tiles.unsupported(x, args.w) is None
        return linear_gpu.matmul(args).astype(jnp.float32)

    close(run(), wanted, 2**-7)
    tried = set()
    for kernel, sizes, out in each_answer(run):
        close(out, wanted, 2**-7)
        tried.add((kernel, sizes[0]))
    assert {("linear.gpu plain tiles", n) for n in (1, 2)} <= tried
    assert (("linear.gpu tensor cores", 0) in tried) == (rows <= linear_gpu.FEW_ROWS)


@pytest.mark.parametrize(("rows", "outer"), [(8, 14336), (16, 4096)])
def test_several_rows_lower_for_cuda(rows, outer):
    w = jax.ShapeDtypeStruct((4096, outer), jnp.bfloat16)
    lowered(kernel, jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16), w)


@pytest.mark.every_jax
@pytest.mark.parametrize("warpgroups", cases([1, 2], nightly=[1]))
def test_one_row_with_all_that_a_matmul_takes(warpgroups, interpreted, monkeypatch):
    monkeypatch.setattr(gpu_rows, "ENOUGH_WARPGROUPS", 99 * (warpgroups > 1))
    w, bias, residual = weights("float32", INNER, OUTER), normal(OUTER, seed=2), normal(1, OUTER)
    for name, prologue in PROLOGUES.items():
        copies = 2 if getattr(prologue, "gated", False) else 1
        x = jnp.asarray(normal(1, copies * INNER, seed=copies))
        added = {"bias": jnp.asarray(bias), "residual": jnp.asarray(residual)}
        found = kernel(x, w, prologue=prologue, **added)
        x = x.reshape(1, 2, INNER) if copies == 2 else x
        wanted = exact(x, w, prologue=prologue, **added)
        try:
            close(found, wanted)
        except AssertionError as error:
            raise AssertionError(name) from error


@pytest.mark.parametrize("name", ["norm", "gate"])
def test_prologues_with_several_rows(name, interpreted):
    w, prologue = weights("float32", INNER, OUTER), PROLOGUES[name]
    x = jnp.asarray(normal(3, 2, INNER) if name == "gate" else normal(3, INNER))
    found = kernel(x.reshape(3, -1), w, prologue=prologue)
    close(found, exact(x, w, prologue=prologue))


@pytest.mark.every_jax
@pytest.mark.parametrize("rows", [1, 3])
def test_rows_in_bfloat16_round_as_the_others_do(rows, interpreted):
    w = weights("bfloat16", INNER, OUTER)
    x, residual = (jnp.asarray(normal(rows, n), jnp.bfloat16) for n in (INNER, OUTER))
    norm = Norm(jnp.asarray(1 + normal(INNER, seed=8), jnp.bfloat16))
    found = kernel(x, w, prologue=norm, residual=residual)
    assert found.dtype == jnp.bfloat16
    wanted = exact(x, w, prologue=norm, residual=residual)
    close(found.astype(jnp.float32), wanted.astype(jnp.float32), 2**-8)
    wide = kernel(x, w, prologue=norm, dtype=jnp.float32)  # the same rounded rows, exact sums
    close(wide, exact(norm(x).astype(jnp.float32), w))


def test_a_row_too_short_for_the_kernels_norm(interpreted):
    x, w = jnp.asarray(normal(1, 64)), weights("bfloat16", 64, 64)
    norm = Norm(jnp.asarray(1 + normal(64, seed=8)))
    close(kernel(x, w, prologue=norm), exact(x, w, prologue=norm))


@pytest.mark.every_jax
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_of_a_stack_is_read_where_it_lies(dtype, interpreted):
    """The others are NaN."""
    w, x = weights(dtype, INNER, 64), jnp.asarray(normal(2, INNER))
    stack = jnp.stack([w * jnp.nan, w, w * jnp.nan])
    close(kernel(x, as_operand(StackMember(stack, jnp.int32(1)))), exact(x, w))


def test_a_row_that_is_not_finite_spoils_itself_alone(interpreted):
    w, x = weights("bfloat16", INNER, OUTER), normal(3, INNER)
    wanted = exact(jnp.asarray(x), w)
    x[0, 7], x[2, INNER - 1] = np.nan, np.inf
    found = np.asarray(kernel(jnp.asarray(x), w))
    assert not np.isfinite(found[[0, 2]]).any()
    close(found[1], wanted[1])


@pytest.mark.parametrize("rows", [1, 3])
def test_products_in_tiles_of_any_size(rows, interpreted):
    w, x = weights("bfloat16", INNER, 64), jnp.asarray(normal(rows, INNER))
    tried = []
    for name, sizes, found in each_answer(lambda: kernel(x, w)):
        close(found, exact(x, w))
        tried.append((name, *sizes))
    most = (1, 2) if rows == 1 else (1,)
    both = {("linear.gpu plain", width, n) for width in (64, 32) for n in most}
    assert set(tried) == both - {("linear.gpu plain", 32, most[-1])}  # which is the rule's


@pytest.mark.every_jax
def test_linear_and_unembed_dispatch_to_the_kernel(on_gpu):
    w, bias = weights("bfloat16", INNER, OUTER), jnp.asarray(normal(OUTER, seed=5))
    x = jnp.asarray(normal(linear_gpu.FEW_ROWS, INNER))
    close(linear(x, w, bias), exact(x, w, bias=bias))
    assert "mpmd_map" in str(jax.make_jaxpr(lambda x: linear(x, w))(x))
    many = jnp.concatenate([x, x[:1]])
    close(linear(many, w), exact(many, w))
    assert "mpmd_map" not in str(jax.make_jaxpr(lambda x: linear(x, w))(many))
    assert "mpmd_map" not in str(jax.make_jaxpr(lambda x: unembed(x, w.T))(x))
    assert "mpmd_map" in str(jax.make_jaxpr(lambda x: unembed(x, as_operand(w)))(x))


@pytest.mark.every_jax
def test_what_the_kernel_does_not_take_is_said(on_gpu):
    x, w = jnp.asarray(normal(3, 80)), jnp.asarray(normal(80, 96))
    kinds = {"inputs by 16 and outputs by 32, not 80 and 88": (x, w[:, :88])}
    kinds["inputs by 32 and outputs by 32, not 80 and 96"] = x, w.astype(jnp.bfloat16)
    kinds["takes 8 rows of plain weights"] = jnp.tile(x, (3, 1)), w
    for said, (rows, weight) in kinds.items():
        with pytest.raises(RequestError, match=said):
            linear(rows, weight, implementation="pallas")
        close(linear(rows, weight), exact(rows, weight))
    with pytest.raises(RequestError, match="reads no table"):
        unembed(x, w.T, implementation="pallas")


@pytest.mark.parametrize("rows", [1, linear_gpu.FEW_ROWS])
@pytest.mark.parametrize("name", ["norm", "gate"])
def test_products_lower_for_cuda(name, rows):
    width = 2 * INNER if name == "gate" else INNER
    x, w = jnp.zeros((rows, width), jnp.bfloat16), weights("bfloat16", INNER, OUTER)
    lowered(lambda x, w: kernel(x, w, prologue=PROLOGUES[name]), x, w)
