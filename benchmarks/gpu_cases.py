"""The GPU kernels on a device, each against its reference first and timed then; and what the device
allows.

What is called more than once is jitted by itself, so that it is lowered once.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_models import _one

_one = jax.jit(_one, static_argnums=(1, 2, 3, 4))
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


def seconds_each(
    function: Callable[..., Any],
    first: Any,
    *rest: Any,
    state: Sequence[tuple[Any, ...]] = (),
    times: int = 20,
    chained: int = 8,
    repeats: int = 5,
) -> float:
    """Of one of many calls in one program, so that dispatching is no part of it. Between two calls
    there is one more launch, which makes the one wait for the other.

    Args:
        state: for calls in turn, what they take and give back behind their first argument and
            result: what is written in place, or must not lie in the L2 cache from the last call.
        chained: calls of one turn of the loop, whose own launches are then a small part.
    """
    from rooflax.bench.timing import best_of, timed

    call = jax.jit(function)

    def many(first: Any, state: Any, rest: Any) -> Any:
        def turn(_: Any, carried: Any) -> Any:
            total, states = carried
            for number in range(chained):
                own = number % len(states) if states else 0
                given = states[own] if states else ()
                found = call(first + (0 * total).astype(first.dtype), *given, *rest)
                if states:
                    found, states = found[0], [*states[:own], found[1:], *states[own + 1 :]]
                # all of a result: of one element XLA would compute no more than that
                total += jax.lax.optimization_barrier(found).ravel()[0].astype(jnp.float32)
            return total, states

        return jax.lax.fori_loop(0, times, turn, (jnp.float32(0), state))[0]

    run = jax.jit(many)
    given = first, list(state), rest
    timed(run, *given)
    return best_of(run, *given, repeats=repeats) / (times * chained)


def with_answers(measure: Callable[[], Figures], count: int) -> Iterator[Figures]:
    """Measures a case by its kernels' rules, then by so many other answers to each question.

    Yields the rule's figures; then of each answer its name (`answer`) before it begins, and behind
    it the name with its figures or with why it `failed`.

    Args:
        measure: checks and times, traced anew.
    """
    from rooflax.ops import block_sizes

    with as_a_gpu(), block_sizes.recording() as asked:
        row = measure()
    yield row
    shapes = Counter[str]()
    for question in asked.values():
        kernel, shape = question.key
        shapes[kernel] += 1  # experts ask for both of their matmuls
        label = kernel if shapes[kernel] == 1 else f"{kernel} ({shapes[kernel]})"
        for sizes in nearest(question, count):
            name = {"answer": f"{label} {' '.join(map(str, sizes))}"}
            yield name
            with as_a_gpu(), block_sizes.trying({question.key: sizes}):
                try:
                    found = measure()
                except Exception as error:  # another answer may still do
                    found = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
            yield {**name, "kernel": kernel, "shape": shape, "sizes": sizes, **found}


def nearest(question: Any, count: int) -> list[tuple[int, ...]]:
    """The answers that differ least from the rule's, which come first where all are as far."""

    def apart(sizes: tuple[int, ...]) -> float:
        both = zip(sizes, question.rule, strict=True)
        return sum(abs(np.log2((a + 1) / (b + 1))) for a, b in both)

    return sorted(question.others, key=apart)[:count]


def few(tiny: bool) -> dict[str, int]:
    """Calls of `seconds_each`; on a CPU they show that it works."""
    return {"times": 1, "chained": 1, "repeats": 1} if tiny else {}


def linear_case(
    format: str, rows: int, tiny: bool, implementation: str | None, answers: int = 0
) -> Iterator[Figures]:
    """Against the reference in float32; read from as many matrices as the cache does not hold."""
    from rooflax.ops.format_names import FORMATS
    from rooflax.ops.linear import linear
    from rooflax.ops.weights import StackMember, StoredOperand, as_operand

    (inner, outer), members = (96, 224) if tiny else (4096, 14336), 2 if tiny else 16
    x = jax.random.normal(jax.random.key(1), (rows, inner), jnp.bfloat16)
    sizes = ((members,), (inner,), (outer,))
    if format in FORMATS:
        w = _one(jax.random.key(0), "packed", sizes, format, 0.02)
    else:
        w = as_operand(_one(jax.random.key(0), "normal", sum(sizes, ()), format, 0.02), stack=1)
    w = cast(StoredOperand, w)
    name = implementation or "pallas"
    with jax.default_matmul_precision("highest"):
        exact = partial(linear, implementation="reference")
        wanted = jax.jit(exact)(x.astype(jnp.float32), w.member(jnp.int32(1)))

    def measure() -> Figures:
        run = jax.jit(lambda a, i, w: linear(a, StackMember(w, i), implementation=name))
        row = compared(run(x, jnp.int32(1), w).astype(jnp.float32), wanted, 2**-7)

        def all_members(x: Any, w: Any) -> Any:
            # a row of its own for each matrix: what prepares it is a part of the call
            found = [run(x * (1 + i / 256), jnp.int32(i), w) for i in range(members)]
            return sum(found[1:], start=found[0])

        seconds = seconds_each(all_members, x, w, **few(tiny) | {"chained": 1})
        return row | {"read_gb_per_s": w.nbytes / seconds / 1e9, "seconds": seconds / members}

    yield from with_answers(measure, answers)


def attention_case(
    kind: str,
    head_dim: int,
    queries: int,
    window: int | None,
    patterned: bool,
    tiny: bool,
    implementation: str | None,
    answers: int = 0,
    latent: int | None = None,
) -> Iterator[Figures]:
    """The last queries of each row over blocks in no order, with sinks.

    Args:
        queries: one is decoding; many are a prompt's chunk behind an offset, in bfloat16.
        latent: elements of the keys that are the values, of the 16 heads of DeepSeek's V2-Lite.
    """
    from rooflax.ops.attention import AttentionArgs, Paging, paged_attention
    from rooflax.ops.attention.pattern import Pattern
    from rooflax.ops.kv_pool import QuantizedPool, tokens_as_int8

    rows, kv_heads, heads, block, table = (2, 1, 2, 16, 12) if tiny else (8, 8, 64, 16, 512)
    if queries > 1:
        rows = 2  # the reference holds every score
    if latent:
        kv_heads, heads = 1, 16
    keys = jax.random.split(jax.random.key(0), 4)
    blocks = 1 + rows * table
    pools = [jax.random.normal(k, (blocks, kv_heads, block, head_dim)) for k in keys[:2]]
    if kind == "int8":
        pools = [QuantizedPool(*tokens_as_int8(pool)) for pool in pools]
    else:
        pools = [pool.astype(kind) for pool in pools]
    pools = pools[:1] * 2 if latent else pools
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(pools)) // (2 if latent else 1)
    on_tensor_cores = kind != "float32"  # whose weights are rounded
    dtype = "bfloat16" if on_tensor_cores else "float32"
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
        values_in_keys=latent,
    )
    given = (*pools, paging, args)
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(partial(paged_attention, implementation="reference"))
        wanted = exact(q.astype(jnp.float32), *given)

    def measure() -> Figures:
        attend = partial(paged_attention, implementation=implementation or "pallas")
        run = jax.jit(lambda *arrays: attend(*arrays))
        tolerance = 2**-7 if on_tensor_cores else 1e-4
        found = run(q, *given).astype(jnp.float32)
        row = compared(found[..., :latent], wanted[..., :latent], tolerance)
        row["seconds"] = seconds_each(run, q, *given, **few(tiny))
        if queries == 1 and window is None and not patterned:
            row["read_gb_per_s"] = size / row["seconds"] / 1e9
        return row

    yield from with_answers(measure, answers)


def needs_gpu_jax() -> None:
    """
    Raises:
        NotImplementedError: this JAX has no GPU kernels, and XLA none for the case.
    """
    from rooflax.ops.accelerator import OLDEST_GPU_JAX

    if jax.__version_info__ < OLDEST_GPU_JAX:
        raise NotImplementedError("GPU kernels need JAX 0.11 or later")


UNCACHED_BYTES = 128 << 20
"""Read between two uses of an array, so that the L2 cache (50 to 60 MB) no longer holds it."""


def null_kernel(tiny: bool, implementation: str | None) -> Figures:
    """Times a kernel that does nothing: the share of launches in the time of each other kernel."""
    del implementation
    needs_gpu_jax()
    from rooflax.ops.mosaic import launch

    def null(*refs: Any) -> None:
        del refs

    x = jnp.zeros(128, jnp.float32)
    run = launch(null, jax.ShapeDtypeStruct(x.shape, x.dtype), {"program": 132}, by_lane=True)
    with as_a_gpu():
        return {"seconds": seconds_each(run, x, **few(tiny))}


def step_case(
    head_dim: int, tiny: bool, implementation: str | None, answers: int = 0
) -> Iterator[Figures]:
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
    exact = jax.jit(partial(attention, implementation="reference"))(q, *wanted, sequences, args)
    turns = 2 if tiny else -(-UNCACHED_BYTES // sum(pool.nbytes for pool in pools))
    copies = [tuple(map(jnp.copy, pools)) for _ in range(turns)]

    def measure() -> Figures:
        attend = partial(attention_step, implementation="pallas")
        run = jax.jit(lambda *arrays: attend(*arrays))
        out, *found = run(new, *pools, sequences, args)
        row = compared(out.astype(jnp.float32), exact, 2**-7)
        for pool, other in zip(found, wanted, strict=True):
            compared(pool.astype(jnp.float32), other.astype(jnp.float32), 2**-8)

        def again(qkv: Any, *rest: Any) -> Any:
            return run(replace(new, qkv=qkv), *rest)

        # so many calls that copying the pools into the loop is little of them
        many: Any = {"state": copies, "times": 80} | few(tiny)
        return row | {"seconds": seconds_each(again, qkv, sequences, args, **many)}

    yield from with_answers(measure, answers)


def experts_case(
    kind: str, tokens: int, tiny: bool, implementation: str | None, answers: int = 0
) -> Iterator[Figures]:
    """GPT-OSS's shapes, or tiny ones; and the choice of experts, which has a kernel, too."""
    from rooflax.ops.linear.prologue import ClampedSwiglu
    from rooflax.ops.moe import experts, route

    count, chosen, size = (4, 2, 64) if tiny else (32, 4, 2880)
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (tokens, size), jnp.bfloat16)
    logits = jax.random.normal(keys[1], (tokens, count))
    routes = jax.jit(route, static_argnames=("experts_per_token", "implementation"))
    ids, shares = routes(logits, experts_per_token=chosen, implementation="xla")
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
        wanted = jax.jit(partial(run, implementation="reference"))(*head)
    with as_a_gpu():
        name = implementation or "pallas"
        same, theirs = routes(logits, experts_per_token=chosen, implementation=name)
        compared(same, ids, 0.0)
        compared(theirs, shares, 1e-5)
    total = sum(a.nbytes for a in jax.tree.leaves((up, down)))
    read = total * len(set(ids.reshape(-1).tolist())) / count

    # as many pairs of an expert in each call, but of others
    turns = [((ids + chosen * number) % count,) for number in range(count // chosen)]

    def measure() -> Figures:
        mixed = jax.jit(lambda *arrays: run(*arrays, implementation=name))

        def in_turn(x: Any, ids: Any, *rest: Any) -> Any:
            return mixed(x, ids, *rest), ids

        found = mixed(x, ids, shares, *weights)[:some]
        row = compared(found.astype(jnp.float32), wanted, 2**-6)
        seconds = seconds_each(in_turn, x, shares, *weights, state=turns, **few(tiny))
        return row | {"seconds": seconds, "read_gb_per_s": read / seconds / 1e9}

    yield from with_answers(measure, answers)


def ceilings(tiny: bool, implementation: str | None) -> Figures:
    """What `rooflax bench` compares with, for the types that models multiply."""
    del implementation
    from rooflax.bench.ceilings import DEVICE_MATRIX, ceiling_reader, device_reader

    rates = {}
    for dtype in ("bfloat16", "int8", "float32"):
        read = device_reader(1 << 20, 128, dtype) if tiny else ceiling_reader(0, dtype)
        found = read()
        rates[dtype] = found.flops_per_s
        del read
    row = {"matrix": 128 if tiny else DEVICE_MATRIX, "flops_per_s": rates}
    return row | {"read_gb_per_s": found.read_gb_per_s, "buffer_bytes": found.buffer_bytes}
