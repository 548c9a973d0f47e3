"""The GPU kernels on a device, each against its reference first and timed then; and what the device
allows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_models import _one

Figures = dict[str, Any]
PATTERN = {"window": 1024, "first": 64, "stride": 8, "block": 128}
TINY_PATTERN = {"window": 20, "first": 8, "stride": 3, "block": 32}
"""What is not hidden of a context, as `Pattern` says it: its strides, and both its ends."""


@contextlib.contextmanager
def as_a_gpu() -> Iterator[None]:
    """On a CPU kernels are interpreted, and dispatch is told that it is a GPU."""
    from rooflax.ops import accelerator

    if jax.default_backend() != "cpu" or jax.__version_info__ < accelerator.OLDEST_GPU_JAX:
        yield
        return
    from jax.experimental.pallas import mosaic_gpu as plgpu

    before, accelerator.platform = accelerator.platform, lambda: "gpu"
    try:
        with plgpu.force_gpu_interpret_mode():
            yield
    finally:
        accelerator.platform = before


def compared(found: Any, wanted: Any, tolerance: float) -> Figures:
    """The largest difference as a share of the largest value.

    Raises:
        ValueError: it is more than the tolerance: such a kernel is not timed.
    """
    found, wanted = (np.asarray(a, np.float64) for a in (found, wanted))
    error = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    if not error <= tolerance:
        raise ValueError(f"differs from its reference by {error:.2e}, more than {tolerance:.2e}")
    return {"error": error, "tolerance": tolerance}


def seconds_each(function: Callable[..., Any], first: Any, *rest: Any, times: int = 20) -> float:
    """Of one of many calls in one program, so that dispatching is no part of it."""
    from rooflax.bench.timing import best_of, timed

    def many(first: Any, rest: Any) -> Any:
        def one(_: Any, total: Any) -> Any:
            some = function(first + (0 * total).astype(first.dtype), *rest)
            return total + some.ravel()[0].astype(jnp.float32)

        return jax.lax.fori_loop(0, times, one, jnp.float32(0))

    run = jax.jit(many)
    timed(run, first, rest)
    return best_of(run, first, rest, repeats=5) / times


def linear_case(format: str, rows: int, tiny: bool, implementation: str | None) -> Figures:
    """Against the reference in float32; read from as many matrices as the cache does not hold."""
    from rooflax.ops.formats import FORMATS
    from rooflax.ops.linear import linear
    from rooflax.ops.weights import Stacked, Stored, as_weight

    (inner, outer), members = (96, 224) if tiny else (4096, 14336), 2 if tiny else 8
    x = jax.random.normal(jax.random.key(1), (rows, inner), jnp.bfloat16)
    sizes = ((members,), (inner,), (outer,))
    if format in FORMATS:
        w = _one(jax.random.key(0), "packed", sizes, format, 0.02)
    else:
        w = as_weight(_one(jax.random.key(0), "normal", sum(sizes, ()), format, 0.02), stack=1)
    w = cast(Stored, w)
    name = implementation or "pallas"
    with jax.default_matmul_precision("highest"):
        exact = partial(linear, implementation="reference")
        wanted = jax.jit(exact)(x.astype(jnp.float32), w.member(jnp.int32(1)))
    with as_a_gpu():
        run = jax.jit(lambda a, i, w: linear(a, Stacked(w, i), implementation=name))
        row = compared(run(x, jnp.int32(1), w).astype(jnp.float32), wanted, 2**-7)
        if tiny:
            return row

        def all_members(x: Any, w: Any) -> Any:
            each = (Stacked(w, jnp.int32(i)) for i in range(members))
            found = [linear(x, one, implementation=name) for one in each]
            return sum(found[1:], start=found[0])

        seconds = seconds_each(all_members, x, w)
    return row | {"read_gb_per_s": w.nbytes / seconds / 1e9, "seconds": seconds / members}


def attention_case(
    kind: str,
    head_dim: int,
    queries: int,
    window: int | None,
    patterned: bool,
    tiny: bool,
    implementation: str | None,
) -> Figures:
    """The last queries of each row over blocks in no order, with sinks.

    Args:
        queries: one is decoding; many are a prompt's chunk behind an offset, in bfloat16.
    """
    from rooflax.ops.attention import AttentionArgs, Paging, paged_attention
    from rooflax.ops.attention.pattern import Pattern
    from rooflax.ops.kv_pool import QuantizedPool, tokens_as_int8

    rows, kv_heads, heads, block, table = (2, 1, 2, 16, 12) if tiny else (8, 8, 64, 16, 512)
    if queries > 1:
        rows = 2  # the reference holds every score
    keys = jax.random.split(jax.random.key(0), 4)
    blocks = 1 + rows * table
    pools = [jax.random.normal(k, (blocks, kv_heads, block, head_dim)) for k in keys[:2]]
    if kind == "int8":
        pools = [QuantizedPool(*tokens_as_int8(pool)) for pool in pools]
    else:
        pools = [pool.astype(kind) for pool in pools]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(pools))
    dtype = "float32" if kind == "float32" or queries == 1 else "bfloat16"
    q = jax.random.normal(keys[2], (rows, queries, heads, head_dim)).astype(dtype)
    lengths = jnp.asarray([table * block - 7 * row for row in range(rows)], jnp.int32)
    order = jax.random.permutation(keys[3], jnp.arange(1, blocks, dtype=jnp.int32))
    paging = Paging(
        block_tables=order.reshape(rows, table),
        first_positions=jnp.zeros(rows, jnp.int32),
        positions=lengths[:, None] + jnp.arange(-queries, 0, dtype=jnp.int32),
        context_lens=lengths,
    )
    strides = TINY_PATTERN if tiny else PATTERN
    args = AttentionArgs(
        scale=head_dim**-0.5,
        window=window,
        sinks=jnp.linspace(-1, 1, heads),
        pattern=Pattern(**strides) if patterned else None,
    )
    given = (*pools, paging, args)
    with jax.default_matmul_precision("highest"):
        q32 = q.astype(jnp.float32)
        wanted = paged_attention(q32, *given, implementation="reference")
    with as_a_gpu():
        run = jax.jit(partial(paged_attention, implementation=implementation or "pallas"))
        tolerance = 2**-7 if queries > 1 else 1e-4  # weights are rounded for the tensor cores
        row = compared(run(q, *given).astype(jnp.float32), wanted, tolerance)
        if tiny:
            return row
        row["seconds"] = seconds_each(run, q, *given)
    if queries == 1 and window is None and not patterned:
        row["read_gb_per_s"] = size / row["seconds"] / 1e9
    return row


def needs_gpu_jax() -> None:
    """
    Raises:
        NotImplementedError: this JAX has no GPU kernels, and XLA none for the case.
    """
    from rooflax.ops.accelerator import OLDEST_GPU_JAX

    if jax.__version_info__ < OLDEST_GPU_JAX:
        raise NotImplementedError("GPU kernels need JAX 0.11 or later")


def step_case(head_dim: int, tiny: bool, implementation: str | None) -> Figures:
    """What a decode step does between its projections, in one kernel and its merge, against the
    operations one after the other; new keys and values lie where they should."""
    from rooflax.ops.attention import AttentionArgs, Projected, Sequences, attention_step
    from rooflax.ops.attention import ragged_attention as attention
    from rooflax.ops.cache_write import cache_write
    from rooflax.ops.rope import apply_rope

    del implementation
    needs_gpu_jax()
    rows, kv_heads, group, block, table = (2, 1, 2, 16, 12) if tiny else (1, 8, 4, 16, 512)
    keys, blocks = jax.random.split(jax.random.key(0), 4), 1 + rows * table
    shape = (blocks, kv_heads, block, head_dim)
    pools = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:2]]
    qkv = jax.random.normal(keys[2], (1, rows, kv_heads, group + 2, head_dim), jnp.bfloat16)
    angles = jnp.arange(head_dim // 2, dtype=jnp.float32)[None, None] * jnp.ones((1, rows, 1))
    new = Projected(qkv, jnp.cos(angles), jnp.sin(angles))
    order = jax.random.permutation(keys[3], jnp.arange(1, blocks, dtype=jnp.int32))
    at = jnp.asarray([table * block - 1 - 7 * row for row in range(rows)], jnp.int32)
    each = jnp.arange(rows, dtype=jnp.int32)
    where = order.reshape(rows, table), each * 0
    sequences = Sequences(each, each * 0 + 1, at, at + 1, *where, longest=1)
    args = AttentionArgs(head_dim**-0.5, sinks=jnp.linspace(-1, 1, kv_heads * group))
    slots = where[0][each, at // block] * block + at % block
    q, k, v = jnp.split(qkv, (group, group + 1), axis=3)
    q, k = (apply_rope(a, new.cos, new.sin) for a in (q, k))
    wanted = [
        cache_write(pool, a[0, :, :, 0], slots, implementation="xla")
        for pool, a in zip(pools, (k, v), strict=True)
    ]
    q = q[0].reshape(rows, -1, head_dim).astype(jnp.float32)
    exact = attention(q, *wanted, sequences, args, implementation="reference")
    with as_a_gpu():
        run = jax.jit(partial(attention_step, implementation="pallas"))
        out, *found = run(new, *pools, sequences, args)
        row = compared(out.astype(jnp.float32), exact, 2**-7)
        for pool, other in zip(found, wanted, strict=True):
            compared(pool.astype(jnp.float32), other.astype(jnp.float32), 2**-8)
        if not tiny:

            def again(qkv: Any, *rest: Any) -> Any:
                return run(replace(new, qkv=qkv), *rest)[0]

            row["seconds"] = seconds_each(again, qkv, *pools, sequences, args)
    return row


def experts_case(kind: str, tokens: int, tiny: bool, implementation: str | None) -> Figures:
    """GPT-OSS's shapes, or tiny ones."""
    from rooflax.ops.linear.prologue import ClampedSwiglu
    from rooflax.ops.moe import experts, route

    count, chosen, size = (4, 2, 64) if tiny else (32, 4, 2880)
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (tokens, size), jnp.bfloat16)
    ids, shares = route(jax.random.normal(keys[1], (tokens, count)), chosen)
    if kind == "bfloat16":
        up = _one(keys[2], "normal", (count, size, 2, size), kind, 0.02)
        down = _one(keys[3], "normal", (count, size, size), kind, 0.02)
    else:
        up = _one(keys[2], "packed", ((count,), (size,), (2, size)), kind, 0.02)
        down = _one(keys[3], "packed", ((count,), (size,), (size,)), kind, 0.02)
    weights = (up, jnp.ones((count, 2, size)), down, jnp.ones((count, size)))
    some = min(tokens, 8)  # the reference runs every expert on every token
    run = partial(experts, activation=ClampedSwiglu())
    with jax.default_matmul_precision("highest"):
        head = (x[:some].astype(jnp.float32), ids[:some], shares[:some], *weights)
        wanted = run(*head, implementation="reference")
    with as_a_gpu():
        run = jax.jit(partial(run, implementation=implementation or "pallas"))
        found = run(x, ids, shares, *weights)[:some]
        row = compared(found.astype(jnp.float32), wanted, 2**-6)
        if tiny:
            return row
        seconds = seconds_each(run, x, ids, shares, *weights)
    total = sum(a.nbytes for a in jax.tree.leaves((up, down)))
    touched = len(set(ids.reshape(-1).tolist())) / count
    return row | {"seconds": seconds, "read_gb_per_s": total * touched / seconds / 1e9}


def ceilings(tiny: bool, implementation: str | None) -> Figures:
    """Bytes a second of a copy, and bfloat16 products of random numbers, with the loop inside one
    program: a buffer of 1 GiB with its dispatch reads 5 to 10% low."""
    del implementation
    from rooflax.bench.timing import best_of, timed

    length, size, turns = (1 << 18, 128, 2) if tiny else (1 << 31, 8192, 20)
    buffer = jax.lax.iota(jnp.int32, length)
    copies = jax.jit(lambda x: jax.lax.fori_loop(0, turns, lambda i, x: x ^ i, x))
    timed(copies, buffer)
    copied = 2 * buffer.nbytes * turns / best_of(copies, buffer, repeats=5)
    del buffer
    a, b = (jax.random.normal(jax.random.key(k), (size, size), jnp.bfloat16) for k in (0, 1))
    scale = jnp.bfloat16(size**-0.5)
    products = jax.jit(lambda a, b: jax.lax.fori_loop(0, turns, lambda _, a: (a @ b) * scale, a))
    timed(products, a, b)
    rate = 2 * size**3 * turns / best_of(products, a, b, repeats=5)
    return {"buffer_bytes": 4 * length, "copy_gb_per_s": copied / 1e9, "flops_per_s": rate}
