"""Attention of whole sequences by the native kernel beside the reference, forward and backward."""

import hashlib
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.ops import native
from rooflax.ops.attention import AttentionArgs, Dense, Paging, attention, cpu, reference
from rooflax.ops.attention.api import TRAINED
from rooflax.ops.attention.trained import unsupported
from rooflax.ops.kv_pool import as_pool
from tests.engine.train.test_step import deviation, gradient, settings
from tests.support.train import tiny

pytestmark = [
    pytest.mark.oldest_jax,
    pytest.mark.skipif(not native.is_ready(), reason="needs the native library"),
]

EVERYWHERE = 2**31 - 1
# rows, queries, heads, K/V heads, head_dim, window, sinks, causal, documents
CASES = {
    "causal": (2, 130, 4, 2, 16, None, False, True, 1),
    "one head for all, few rows": (1, 200, 4, 1, 48, None, False, True, 1),
    "windows": (1, 150, 4, 4, 32, 33, False, True, 1),
    "sinks": (2, 65, 6, 2, 16, 9, True, True, 1),
    "documents": (2, 190, 4, 2, 16, None, False, True, 4),
    "all of it": (2, 140, 4, 2, 16, 21, True, True, 3),
    "both ways": (1, 70, 2, 2, 16, 9, True, False, 2),
    "longer than its context": (2, 64, 4, 2, 64, None, False, False, 0),
}


def arrays(rows, length, heads, kv_heads, head_dim, window, sinks, causal, documents):
    """(q, k, v, sinks), how they attend but for sinks, and what the output is multiplied by."""
    random = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(random.standard_normal(shape, np.float32))

    segments = np.sort(random.integers(0, max(documents, 1), (rows, length)), axis=1)
    starts = [[np.argmax(row == one) for one in row] for row in segments]
    positions = jnp.asarray(np.arange(length) - np.array(starts), jnp.int32)
    context = jnp.full(rows, EVERYWHERE if documents else length - 7, jnp.int32)
    own = jnp.asarray(segments, jnp.int32) if documents > 1 else None
    dense = Dense(positions, positions, context, own, causal)
    values = (
        normal(rows, length, heads, head_dim),
        normal(rows, kv_heads, length, head_dim),
        normal(rows, kv_heads, length, head_dim),
        normal(heads) if sinks else None,
    )

    def args(sinks):
        return AttentionArgs(head_dim**-0.5, window, sinks, causal=causal)

    return values, dense, args, normal(rows, length, heads, head_dim)


def found(run, values, dense, args, factors):
    """The output and the gradients of its sum, each number times a factor."""

    def total(q, k, v, sinks):
        out = run(q, k, v, dense, args(sinks))
        return jnp.sum(out * factors), out

    wanted = (0, 1, 2) if values[3] is None else (0, 1, 2, 3)
    grads, out = jax.jit(jax.grad(total, argnums=wanted, has_aux=True))(*values)
    return out, *grads


def trained(q, k, v, dense, args):
    return attention(q, k, v, dense, args, trains=True)


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_the_references(instruction_set, case):
    given = arrays(*CASES[case])
    assert TRAINED.choose(None, *given[0][:3], given[1], given[2](None)).implementation == "native"
    ours, theirs = found(trained, *given), found(reference.attention, *given)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["causal", "windows", "sinks"])
def test_of_grpo_the_sums_are_the_engines(case):
    """To the bit, in pools of other blocks; with gradients as without."""
    values, dense, args, factors = arrays(*CASES[case])
    named = partial(attention, implementation="trained", trains=True)
    out, *grads = found(named, values, dense, args, factors)
    for a, b in zip(grads, found(trained, values, dense, args, factors)[1:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    q, k, v, sinks = values
    rows, heads, length, width = k.shape
    size = 32
    blocks = -(-length // size)

    def pool(tokens):
        padded = jnp.pad(tokens, ((0, 0), (0, 0), (0, blocks * size - length), (0, 0)))
        split = padded.reshape(rows, heads, blocks, size, width).swapaxes(1, 2)
        return as_pool(split.reshape(-1, heads, size, width))

    tables = jnp.arange(rows * blocks, dtype=jnp.int32).reshape(rows, blocks)
    paging = Paging(tables, jnp.zeros(rows, jnp.int32), dense.positions, jnp.full(rows, length))
    engine = cpu.paged_attention(q, pool(k), pool(v), paging, args(sinks))
    np.testing.assert_array_equal(out, engine)
    np.testing.assert_array_equal(out, jax.jit(named)(q, k, v, dense, args(sinks)))


def test_rows_of_several_documents_have_no_sums_of_the_engine():
    values, dense, args, factors = arrays(*CASES["documents"])
    named = partial(attention, implementation="trained", trains=True)
    for a, b in zip(
        *(found(run, values, dense, args, factors) for run in (named, trained)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_a_query_that_sees_nothing_gives_zeros():
    values, dense, args, factors = arrays(*CASES["causal"])
    blind = Dense(dense.positions, dense.key_positions, jnp.zeros(2, jnp.int32))
    for array in found(trained, values, blind, args, factors):
        assert not np.asarray(array).any()


def test_what_is_not_a_number_stays_that():
    values, dense, args, _ = arrays(*CASES["causal"])
    q = values[0].at[0, 100, 0, 0].set(jnp.nan)
    out = np.asarray(trained(q, *values[1:3], dense, args(None)))
    assert np.isnan(out[0, 100, 0]).all()
    assert np.isfinite(out[0, :, 1:]).all()


def test_scores_beyond_float32_give_no_numbers():
    (q, k, v, sinks), dense, args, _ = arrays(*CASES["sinks"])
    large = jnp.zeros((1, 1, 1, 16)).at[..., 3].set(1e20)  # no sum of two is NaN
    for given in ((large * q, large * k, sinks), (q, k, sinks.at[1].set(jnp.nan))):
        out, wanted = (
            np.isfinite(run(*given[:2], v, dense, args(given[2])))
            for run in (trained, reference.attention)
        )
        np.testing.assert_array_equal(out, wanted)
        assert 0 < wanted.mean() < 1


def test_what_the_kernel_does_not_do():
    values, dense, args, _ = arrays(*CASES["causal"])
    q, k, v, _ = values
    assert unsupported(q, k, v, dense, args(None)) is None
    assert "multiple of 16" in str(unsupported(q[..., :10], k, v, dense, args(None)))
    for other in (AttentionArgs(1.0, bias=jnp.zeros((4, 3))), AttentionArgs(1.0, cap=9.0)):
        assert "biases and soft-caps" in str(unsupported(q, k, v, dense, other))
    ran = TRAINED.choose(None, q[..., :10], k[..., :10], v[..., :10], dense, args(None))
    assert ran.implementation == "xla"


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_training_steps_gradients(family, monkeypatch):
    """Packed rows; gpt_oss has windows and sinks."""
    model = tiny.make_model(family, noise=0.1, head_dim=16)
    batch = tiny.random_batch(4, 66)
    config = settings(batch_size=4, seq_len=66)
    loss, grads, _, _ = gradient(model, config, batch)
    monkeypatch.setitem(TRAINED.backends, "native", TRAINED.backends["xla"])
    wanted, others, _, _ = gradient(model, config, batch)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    assert 0 < deviation(grads, others) < 1e-5


def digest():
    """Of all bits of a case whose keys are shared out."""
    arrays_ = found(trained, *arrays(*CASES["one head for all, few rows"]))
    return hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in arrays_)).hexdigest()


def test_the_same_bits_whatever_the_number_of_threads():
    command = "from tests.engine.ops.test_trained_attention import digest; print(digest())"
    digests = [
        subprocess.run(
            [sys.executable, "-c", command],
            env=os.environ | {"PJRT_NPROC": str(threads)},
            cwd=Path(__file__).parents[3],
            capture_output=True, text=True, check=True,
        ).stdout.split()[-1]
        for threads in (1, 3)
    ]  # fmt: skip
    assert set(digests) == {digest()}
