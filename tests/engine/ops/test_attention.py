"""Attention for every implementation, against loops in NumPy; paged against contiguous."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.errors import RequestError
from rooflax.ops.attention import Paging, attention, paged_attention
from rooflax.ops.kv_pool import QuantizedPool, tokens_as_fp8, tokens_as_int8
from tests.marks import cases
from tests.support.ops.cases import ATTENTION, normal, rng

pytestmark = pytest.mark.oldest_jax

IMPLEMENTATIONS = ["reference", "xla", None]
attend = jax.jit(attention, static_argnames="implementation")


@jax.jit
def attend_each(q, k, v, dense, args):
    """By every implementation, with K/V heads grouped and copied; in order, where that is said."""
    told = [(dense, replace(args, repeat_kv=repeat_kv)) for repeat_kv in (False, True)]
    if q.shape[1] == k.shape[2]:
        told.append((replace(dense, causal_order=True), args))
    return [attention(q, k, v, *each, implementation=i) for i in IMPLEMENTATIONS for each in told]


@jax.jit
def attend_each_paged(q, k_pool, v_pool, paging, args):
    told = [replace(args, repeat_kv=repeat_kv) for repeat_kv in (False, True)]
    return [
        paged_attention(q, k_pool, v_pool, paging, each, implementation=i)
        for i in IMPLEMENTATIONS
        for each in told
    ]


def by_hand(q, k, v, dense, args):
    """One query at a time, float64."""
    rows, queries, heads, _ = q.shape
    window, sinks, segments = args.window, args.sinks, dense.segment_ids
    q = args.scale * q.astype(np.float64)
    out = np.zeros(q.shape, np.float64)
    for b, t, n in np.ndindex(rows, queries, heads):
        kv_head = n // (heads // k.shape[1])
        here = dense.positions[b, t]
        seen = [
            s
            for s, there in enumerate(dense.key_positions[b])
            if (there <= here or not args.causal)
            and there < dense.context_lens[b]
            and (window is None or abs(here - there) < window)
            and (segments is None or segments[b, s] == segments[b, t])
        ]
        scores = [float(q[b, t, n] @ k[b, kv_head, s]) for s in seen]
        if args.bias is not None:
            distances = dense.key_positions[b, seen] - here + args.bias.shape[1] // 2
            scores = (scores + args.bias[n, distances]).tolist()
        logits = np.array(scores if sinks is None else [*scores, float(sinks[n])], np.float64)
        if not seen:
            continue
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        out[b, t, n] = sum(p * v[b, kv_head, s] for p, s in zip(shares, seen, strict=False))
    return out


@pytest.mark.parametrize(
    "case",
    cases(
        ATTENTION, nightly=["multi-head", "multi-query", "one head"], every_jax=["sinks and window"]
    ),
    ids=lambda c: c.name,
)
def test_attention(case):
    q, k, v, dense, args = case.arrays()
    exact = by_hand(q, k, v, dense, args)
    outs = attend_each(q, k, v, dense, args)
    assert len(outs) == len(IMPLEMENTATIONS) * (3 if case.in_order else 2)
    for out in outs:
        np.testing.assert_allclose(out, exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_in_and_out(implementation):
    q, k, v, *given = ATTENTION[0].arrays()
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in (q, k, v))
    out = attend(q, k, v, *given, implementation=implementation)
    assert out.dtype == jnp.bfloat16
    exact = by_hand(*(np.asarray(a).astype(np.float32) for a in (q, k, v)), *given)
    np.testing.assert_allclose(out.astype(np.float32), exact, rtol=0, atol=2e-2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_scores_do_not_overflow(implementation):
    q, k, v, *given = ATTENTION[0].arrays()
    out = attend(q * 1e3, k * 1e3, v, *given, implementation=implementation)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, by_hand(q * 1e3, k * 1e3, v, *given), rtol=0, atol=1e-4)


def into_blocks(k, v, context_lens, first_positions, block_size, tables_len):
    """Pools in which the rows' keys lie in shuffled blocks, garbage everywhere else."""
    rows, kv_heads, _, head_dim = k.shape
    num_blocks = 1 + rows * tables_len
    pools = [1e4 * normal(num_blocks, kv_heads, block_size, head_dim, seed=s) for s in (7, 8)]
    order = rng(3).permutation(np.arange(1, num_blocks))
    tables = np.zeros((rows, tables_len), np.int32)
    for b in range(rows):
        count = -(-(context_lens[b] - first_positions[b]) // block_size)
        for i in range(max(count, 0)):
            block = tables[b, i] = order[b * tables_len + i]
            for offset in range(block_size):
                position = first_positions[b] + i * block_size + offset
                if position < context_lens[b]:
                    pools[0][block, :, offset] = k[b, :, position]
                    pools[1][block, :, offset] = v[b, :, position]
    return *pools, tables


PAGED = [case for case in ATTENTION if not case.segments]


@pytest.mark.parametrize(
    "case",
    cases(PAGED, nightly=["one head", "window of one"], every_jax=["sinks and window"]),
    ids=lambda c: c.name,
)
def test_paged_attention(case):
    check_paged(case)


@pytest.mark.parametrize(
    "as_codes", cases([tokens_as_int8, tokens_as_fp8], nightly=[tokens_as_fp8])
)
@pytest.mark.parametrize(
    "case",
    cases(
        PAGED,
        default=["sinks and window", "decode", "a row of padding"],
        every_jax=["sinks and window"],
    ),
    ids=lambda c: c.name,
)
def test_paged_attention_over_codes(case, as_codes):
    """Exact is what the codes say: rounding them again changes nothing."""
    check_paged(case, as_codes)


def check_paged(case, as_codes=None):
    q, k, v, dense, args = case.arrays()
    if as_codes is not None:
        k, v = (rounded(a, as_codes) for a in (k, v))
    exact = by_hand(q, k, v, dense, args)
    context, block_size = dense.context_lens, 3
    firsts = [np.zeros_like(context)]
    if case.window is not None:  # blocks that no query of this step can see are gone
        oldest = np.maximum(dense.positions[:, 0] - case.window + 1, 0)
        firsts.append((oldest // block_size * block_size).astype(np.int32))
    for first in firsts:
        length = int(-(-(context - first).max() // block_size)) + 2
        k_pool, v_pool, tables = into_blocks(k, v, context, first, block_size, length)
        if as_codes is not None:
            k_pool, v_pool = (QuantizedPool(*as_codes(jnp.asarray(a))) for a in (k_pool, v_pool))
        paging = Paging(tables, first, dense.positions, context)
        for out in attend_each_paged(q, k_pool, v_pool, paging, args):
            np.testing.assert_allclose(out, exact, rtol=0, atol=2e-6)


def rounded(x, as_codes):
    values, scales = as_codes(jnp.asarray(x))
    return np.asarray(values.astype(jnp.float32) * scales[..., None])


def as_jax(*arrays):
    return [jnp.asarray(a) for a in arrays]


@pytest.mark.every_jax
def test_heads_that_do_not_divide_are_rejected():
    q, k, v, *given = ATTENTION[0].arrays()
    with pytest.raises(ValueError, match="6 query heads.*4"):
        attend(q, np.repeat(k, 2, 1), np.repeat(v, 2, 1), *given)


@pytest.mark.every_jax
def test_an_implementation_that_is_not_here_is_rejected_by_name():
    with pytest.raises(RequestError, match="attention's 'pallas' cannot run"):
        attend(*ATTENTION[0].arrays(), implementation="pallas")
