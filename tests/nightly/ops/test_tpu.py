"""Longer tests beside those of tests/engine/ops/test_tpu.py."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.ops import tpu
from rooflax.ops.attention import paged_attention
from rooflax.ops.attention.pattern import Pattern
from rooflax.ops.format_names import FORMATS
from rooflax.ops.kv_pool import QuantizedPool, tokens_as_int8
from rooflax.ops.linear import unembed
from rooflax.ops.weights import quantize
from tests.engine.ops import test_tpu as beside
from tests.engine.ops.test_tpu import LONG, attend, paged, product
from tests.support.ops.answers import each_answer
from tests.support.ops.cases import normal

_on_tpu = beside._on_tpu


def test_bfloat16_attention():
    q, k, v, *given = paged(9, 8, 2, 16, 16, 700)
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in (q, k, v))
    outs = [attend(name)(q, k, v, *given) for name in ("reference", "pallas")]
    assert outs[1].dtype == jnp.bfloat16
    wide = [np.asarray(out).astype(np.float32) for out in outs]
    np.testing.assert_allclose(wide[1], wide[0], rtol=2**-7, atol=4e-3)


@pytest.mark.parametrize(
    ("name", "pool", "count"),
    [
        ("decode", "float32", 5),
        ("decode in a window", "int8", 5),
        ("tiles of queries", "float32", 11),
        ("tiles of queries in a window", "int8", 11),
        ("no sinks", "float32", 2),
    ],
)
def test_attention_in_tiles_of_any_size(name, pool, count):
    kv_heads = 1 if name == "no sinks" else 2
    q, k, v, *given = paged(heads=8, kv_heads=kv_heads, head_dim=16, block_size=16, **LONG[name])
    if pool == "int8":
        k, v = (QuantizedPool(*tokens_as_int8(jnp.asarray(a))) for a in (k, v))

    def run(implementation):
        attend = functools.partial(paged_attention, implementation=implementation)
        return jax.jit(attend)(q, k, v, *given)

    exact, tried = run("reference"), []
    for kernel, sizes, out in each_answer(lambda: run("pallas")):
        np.testing.assert_allclose(out, exact, rtol=0, atol=3e-6)
        tried.append((kernel, *sizes))
    assert {kernel for kernel, *_ in tried} == {"attention.tpu"}
    assert len(set(tried)) == len(tried) == count


@pytest.mark.parametrize("format", FORMATS)
def test_products_in_tiles_of_any_size(format):
    x, w = jnp.asarray(normal(3, 2048)), quantize(normal(2048, 300), format, (2048,), (300,))
    exact, tried = np.asarray(product("reference")(x, w)), []
    for kernel, sizes, y in each_answer(lambda: unembed(x, w, implementation="pallas")):
        np.testing.assert_allclose(y, exact, rtol=0, atol=3e-6 * np.abs(exact).max())
        tried.append((kernel, *sizes))
    sizes = [(2048, 128), (1024, 384), (1024, 256), (1024, 128)]
    assert tried == [("linear.tpu", *own) for own in sizes]


@pytest.mark.parametrize("block", [24, 1 << 20])
def test_tiles_are_bounded_whatever_a_patterns_block(block):
    """Of a block that is no multiple of the cache's, and of one beyond every memory."""
    sizes = (3, 2, 2, 16, 8, 4)
    found = tpu.attention_tiles(*sizes, most_keys=block)
    assert found.blocks == min(block // 16, tpu.attention_tiles(*sizes).blocks)
    pattern = Pattern(40, first=20, stride=3, block=block)
    *arrays, args = paged(3, 4, 2, 8, 16, 1100)
    args = replace(args, pattern=pattern)
    outs = [attend(name)(*arrays, args) for name in ("reference", "pallas")]
    np.testing.assert_allclose(outs[1], outs[0], rtol=0, atol=3e-6)
