"""float32 matmuls say their precision: accelerators default to TF32, or a pass of bfloat16."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from rooflax.ops.activation import clamped_swiglu
from rooflax.ops.attention import Paging, paged_attention
from rooflax.ops.format_names import FORMATS
from rooflax.ops.linear import linear
from rooflax.ops.moe import experts, route
from rooflax.ops.weights import quantize
from tests.engine.ops.test_attention import into_blocks
from tests.support.ops.cases import ATTENTION, MOE, normal

pytestmark = pytest.mark.oldest_jax
HIGHEST = (jax.lax.Precision.HIGHEST,) * 2


def dots(jaxpr):
    """Every product in a program, those of inner programs too; not those for CPUs alone."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        branches = eqn.params.get("branches", ())
        if "branches_platforms" in eqn.params:
            platforms = eqn.params["branches_platforms"]
            branches = [b for b, own in zip(branches, platforms, strict=True) if own != ("cpu",)]
        inner = [eqn.params[k] for k in ("jaxpr", "call_jaxpr", "body_jaxpr") if k in eqn.params]
        for each in (*branches, *inner):
            yield from dots(getattr(each, "jaxpr", each))


def check(function, *arguments):
    found = list(dots(jax.make_jaxpr(function)(*arguments).jaxpr))
    assert found
    for eqn in found:
        if jnp.dtype("float32") in {v.aval.dtype for v in eqn.invars}:
            assert eqn.params["precision"] == HIGHEST, eqn


def test_a_product_that_says_nothing_is_found():
    x = jnp.ones((2, 2))
    with pytest.raises(AssertionError):
        check(jax.jit(jnp.matmul), x, x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", [None, *FORMATS])
def test_linear(format, dtype):
    x, w = jnp.asarray(normal(3, 64), dtype), normal(64, 32)
    w = jnp.asarray(w, dtype) if format is None else quantize(w, format, (64,), (32,))
    check(lambda x, w: linear(x, w, implementation="xla"), x, w)


@pytest.mark.parametrize("method", ["grouped", "per_token", "dense"])
@pytest.mark.parametrize("format", [None, "w4a16"])
def test_experts(method, format):
    case = replace(MOE[0], hidden=64, mlp=32)
    x, logits, (up, up_bias, down, down_bias) = case.arrays()
    if format:
        up = quantize(up, format, (64,), (2, 32))
        down = quantize(down, format, (32,), (64,))
    else:
        up, down = jnp.asarray(up), jnp.asarray(down)
    ids, shares = route(jnp.asarray(logits), case.chosen)
    biases = jnp.asarray(up_bias), jnp.asarray(down_bias)

    def run(x, ids, shares, up, down):
        how = {"activation": clamped_swiglu, "method": method, "implementation": "xla"}
        return experts(x, ids, shares, up, biases[0], down, biases[1], **how)

    check(run, jnp.asarray(x), ids, shares, up, down)


def test_attention():
    q, k, v, dense, args = ATTENTION[0].arrays()
    first = 0 * dense.context_lens
    pools = into_blocks(k, v, dense.context_lens, first, 8, 4)
    paging = Paging(pools[2], first, dense.positions, dense.context_lens)
    arrays = jax.tree.map(jnp.asarray, (q, *pools[:2], paging))
    check(lambda *a: paged_attention(*a, args, implementation="xla"), *arrays)
