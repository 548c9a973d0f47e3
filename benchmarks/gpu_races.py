"""Races that interpretation cannot see, on a device: each kernel that copies to shared memory while
it multiplies, bit for bit as its serial variant, in many runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp

from benchmarks.gpu_cases import Figures, as_a_gpu, needs_gpu_jax
from benchmarks.gpu_models import _one


@contextlib.contextmanager
def replaced(module: Any, **values: Any) -> Iterator[None]:
    """Names of a module that mean something else, while a kernel is traced."""
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def copies_at_once() -> contextlib.AbstractContextManager[None]:
    """A warpgroup that waits for every copy where it asks for it: none is under way meanwhile. For
    kernels of one warpgroup."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    copies, waits, barriers = plgpu.copy_gmem_to_smem, plgpu.barrier_wait, plgpu.Barrier

    def copy(source: Any, target: Any, here: Any) -> None:
        copies(source, target, here)
        waits(here)

    def barrier(num_arrivals: int = 1, num_barriers: int = 1) -> Any:
        del num_arrivals  # of all copies of a stage
        return barriers(num_barriers=num_barriers)

    return replaced(plgpu, copy_gmem_to_smem=copy, barrier_wait=lambda _: None, Barrier=barrier)


def same_bits(
    kernel: Callable[..., Any], serial: Callable[..., Any], x: Any, tiny: bool
) -> Figures:
    """Of a kernel and its serial variant, in many runs with other inputs each.

    Raises:
        ValueError: some numbers differ.
    """
    repeats = 2 if tiny else 1000

    def differing(index: Any, total: Any) -> Any:
        changed = jnp.roll(x, index, axis=-1)
        return total + jnp.sum(kernel(changed) != serial(changed), dtype=jnp.int32)

    with as_a_gpu():
        run = jax.jit(lambda: jax.lax.fori_loop(0, repeats, differing, jnp.int32(0)))
        if wrong := int(run()):
            raise ValueError(f"{wrong} numbers of {repeats} runs differ from the serial kernel's")
    return {"repeats": repeats}


def race(stages: int, tiny: bool, implementation: str | None) -> Figures:
    """The experts' tiles with products under way, bit for bit as without any."""
    del implementation
    from rooflax.ops import block_sizes
    from rooflax.ops.moe import gpu

    needs_gpu_jax()
    from jax.experimental.pallas import mosaic_gpu as plgpu

    (count, inner, outer) = (1, 256, 128) if tiny else (16, 2880, 2944)
    keys = jax.random.split(jax.random.key(stages), 2)
    x = jax.random.normal(keys[0], (count, 128, inner), jnp.bfloat16)
    w = jax.random.normal(keys[1], (2, inner, outer), jnp.bfloat16)
    members, tiles = jnp.arange(count, dtype=jnp.int32) % 2, jnp.full(1, count, jnp.int32)
    shape = (block_sizes.rounded_up(count), 128, inner, outer)
    waits = plgpu.wgmma_wait

    def product(x: Any) -> Any:
        with block_sizes.trying({("experts.gpu tiles", shape): (128, stages)}):
            return gpu._tile_matmuls(x, w, members, tiles)

    def serial(x: Any) -> Any:
        with replaced(plgpu, wgmma_wait=lambda _: waits(0)):
            return product(x)

    return {"stages": stages} | same_bits(product, serial, x, tiny)


def linear_race(format: str, stages: int, tiny: bool, implementation: str | None) -> Figures:
    """Tiles of packed weights, whose warpgroups share stages, bit for bit as one warpgroup that
    waits for each copy."""
    del implementation
    from rooflax.ops import block_sizes
    from rooflax.ops.linear import gpu_tiles

    needs_gpu_jax()
    rows, inner, outer = (8, 128 * (stages + 1), 128) if tiny else (256, 4096, 4096)
    x = jax.random.normal(jax.random.key(stages), (rows, inner), jnp.bfloat16)
    w = cast(Any, _one(jax.random.key(0), "packed", ((1,), (inner,), (outer,)), format, 0.02))
    member, shape = jnp.zeros(1, jnp.int32), (block_sizes.rounded_up(rows), inner, outer, w.code)
    sizes = {("linear.gpu tiles", shape): (min(rows, 64), 1)}

    def product(x: Any, warpgroups: int = gpu_tiles.WARPGROUPS) -> Any:
        how = {"STAGES": stages, "WARPGROUPS": warpgroups}
        with replaced(gpu_tiles, **how), block_sizes.trying(sizes):
            return gpu_tiles.matmul(x, w, member, None, jnp.float32)

    def serial(x: Any) -> Any:
        with copies_at_once():
            return product(x, warpgroups=1)

    return {"stages": stages} | same_bits(product, serial, x, tiny)


def attention_race(head_dim: int, tiny: bool, implementation: str | None) -> Figures:
    """Prompts, or few queries with wide heads, tiles of keys and values ahead, bit for bit as with
    none on its way."""
    del implementation
    from rooflax.ops.attention import AttentionArgs, Paging, gpu, gpu_flash
    from rooflax.ops.kv_pool import as_pool

    needs_gpu_jax()
    heads, kv_heads, queries, block, table = (2, 1, 20, 64, 3) if tiny else (16, 4, 512, 16, 128)
    if head_dim > gpu_flash.WIDEST:
        queries = 2
    keys = jax.random.split(jax.random.key(head_dim), 4)
    shape = (1 + table, kv_heads, block, head_dim)
    pools = [as_pool(jax.random.normal(key, shape, jnp.bfloat16)) for key in keys[:2]]
    q = jax.random.normal(keys[2], (1, queries, heads, head_dim), jnp.bfloat16)
    order = jax.random.permutation(keys[3], jnp.arange(1, 1 + table, dtype=jnp.int32))[None]
    length = jnp.full(1, table * block, jnp.int32)
    positions = length[:, None] + jnp.arange(-queries, 0, dtype=jnp.int32)
    paging = Paging(order, 0 * length, positions, length)
    args = AttentionArgs(head_dim**-0.5, sinks=jnp.linspace(-1, 1, heads))

    def product(q: Any) -> Any:
        return gpu.paged_attention(q, *pools, paging, args)

    def serial(q: Any) -> Any:
        with copies_at_once():
            return product(q)

    return same_bits(product, serial, q, tiny)
