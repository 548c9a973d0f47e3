"""The GPU kernels that `gpu_compile.py` compiles: sizes of published models, one row or many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rooflax.ops.attention import (
    AttentionArgs,
    Paging,
    Projected,
    Sequences,
    gpu_flash,
    gpu_step,
)
from rooflax.ops.attention import gpu as attention
from rooflax.ops.attention.pattern import Pattern
from rooflax.ops.kv_pool import QuantizedPool, as_pool
from rooflax.ops.linear import gpu as linear
from rooflax.ops.linear import gpu_plain, gpu_tiles
from rooflax.ops.linear.args import LinearArgs
from rooflax.ops.linear.gpu_rows import ROWS_AT_ONCE, Rows
from rooflax.ops.linear.prologue import ClampedSwiglu
from rooflax.ops.moe import gpu as moe
from rooflax.ops.moe.args import MoeArgs
from rooflax.ops.weights import as_operand, class_of

Struct = jax.ShapeDtypeStruct
THREADS = 128
"""Of a warpgroup."""


@dataclass(frozen=True)
class Case:
    """A function of one or two kernels.

    Attributes:
        arguments: shapes.
        weights: that a thread multiplies in one turn of the kernel's loop; 0 where not counted.
        products: instructions that multiply in one turn.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    weights: int = 0
    products: int = 1


FORMATS = ("w8a16", "w8a8", "w8a16-g32", "w4a16", "w4a8", "mxfp4-a16", "fp8-a16")


def products() -> Iterator[Case]:
    """A LLaMA 3.1 8B's largest weight, plain and in every code, for one row and eight; for more,
    what the tensor cores take. Where either would do, also by the one that is not taken."""
    inner, outer = 4096, 14336
    for rows in (1, linear.FEW_ROWS):
        x, w = (Struct(shape, jnp.bfloat16) for shape in ((rows, inner), (inner, outer)))
        turn = gpu_plain.LOADS * gpu_plain.LOAD_BYTES // 2
        yield Case(f"linear bfloat16, rows {rows}", multiply, (x, w), turn, turn * rows)
    for format in FORMATS:
        kind = class_of(format)
        w = kind(*kind.like(inner, outer), format, (inner,), (outer,))  # type: ignore[arg-type]
        tiled = not w.quantizes_activations
        for rows in (1, 8, 16, 64, 512) if tiled else (1, 4, 8, 9, linear.MOST_ROWS):
            x, taken = Struct((rows, inner), jnp.bfloat16), rows > 1 and tiled
            for tiles in (taken, not taken) if rows == 8 and tiled else (taken,):
                name = f"linear {format}, rows {rows}"
                name += "" if tiles == taken else " by tiles" if tiles else " by few rows"
                run = by_tiles if tiles else by_few_rows
                yield Case(name, run, (x, w), *turn_of(w, rows, tiles))


def turn_of(w: Any, rows: int, tiles: bool) -> tuple[int, int]:
    """Weights of a thread, and instructions that multiply, in one turn of the kernel's loop."""
    if tiles:  # a group of 32 inputs is two products of 64 x 16 weights
        return 64 * 32 // THREADS, 2
    num_inputs, turns = (
        linear.CODES[w.code].num_inputs,
        -(-rows // ROWS_AT_ONCE),
    )  # each reads all weights
    rows = -(-rows // turns)
    if w.code == "fp8":  # which takes one for unpacking, too
        return 4 * num_inputs, 4 * num_inputs * (rows + 1)
    return 4 * num_inputs // turns, num_inputs * (1 if w.quantizes_activations else 2) * rows


def multiply(x: Any, w: Any) -> Any:
    return linear.matmul(LinearArgs(x, as_operand(w).in_stack()[0]))


def by_few_rows(x: Any, w: Any) -> Any:
    one = jnp.ones(1, jnp.int32)
    return linear.few_matmuls(Rows(x[None], x.dtype), w, one - 1, one)[0]


def by_tiles(x: Any, w: Any) -> Any:
    return gpu_tiles.matmul(x, w, jnp.zeros(1, jnp.int32), None, jnp.bfloat16)


def attend(q: Any, k_pool: Any, v_pool: Any, *where: Any) -> Any:
    return attention.paged_attention(q, as_pool(k_pool), as_pool(v_pool), *where)


def attend_latents(q: Any, pool: Any, *where: Any) -> Any:
    return attend(q, pool, pool, *where)


def attentions() -> Iterator[Case]:
    """LLaMA's, GPT-OSS's, Gemma's and DeepSeek's heads: a step of decoding, and a chunk of a
    prompt."""
    strided = Pattern(1024, first=64, stride=8)
    shapes = {
        "llama": (32, 8, 128, None, None),
        "gpt-oss": (64, 8, 64, 128, None),
        "gemma": (8, 4, 256, 1024, None),
        "gemma 4": (32, 4, 512, None, None),
        "llama, pattern": (32, 8, 128, None, strided),
        "gpt-oss, pattern": (64, 8, 64, None, strided),
    }
    for name, (heads, kv_heads, head_dim, window, pattern) in shapes.items():
        wide = head_dim > gpu_flash.WIDEST  # whose prompts are XLA's
        kinds = ("bfloat16", "int8") if pattern else ("bfloat16", "float32", "int8")
        for kind in kinds[:1] if wide else kinds:
            for length in (1, 512) if kind == "bfloat16" and not wide else (1,):
                size = (257, kv_heads, 16, head_dim)
                pool: Any = Struct(size, kind)
                if kind == "int8":
                    pool = QuantizedPool(pool, Struct(size[:3], jnp.float32))  # type: ignore
                whole = [Struct(s, jnp.int32) for s in ((1, 256), (1,), (1, length), (1,))]
                q, sinks = (
                    Struct((1, length, heads, head_dim), jnp.bfloat16),
                    Struct((heads,), "f4"),
                )
                args = AttentionArgs(0.1, window, sinks, pattern=pattern)  # type: ignore
                given = (q, pool, pool, Paging(*whole), args)  # type: ignore[arg-type]
                yield Case(f"attention {name} {kind}, queries {length}", attend, given)
    whole = [Struct(s, jnp.int32) for s in ((1, 256), (1,), (1, 1), (1,))]
    for name, heads in (("V2-Lite", 16), ("V3", 128)):
        q = Struct((1, 1, heads, 576), jnp.bfloat16)
        pool, args = Struct((257, 1, 16, 576), jnp.bfloat16), AttentionArgs(0.1, values_in_keys=512)
        given = (q, pool, Paging(*whole), args)  # type: ignore[arg-type]
        yield Case(f"attention DeepSeek {name} bfloat16, queries 1", attend_latents, given)


def attention_steps() -> Iterator[Case]:
    """What LLaMA, GPT-OSS and Qwen3 do between projections, of one row."""
    shapes = {"llama": (4, 128, None), "gpt-oss": (8, 64, 128), "qwen3": (4, 128, None)}
    for name, (group, head_dim, window) in shapes.items():
        qkv = Struct((1, 1, 8, group + 2, head_dim), jnp.bfloat16)
        angle, norm = Struct((1, 1, head_dim // 2), "f4"), Struct((head_dim,), jnp.bfloat16)
        norms = (norm, norm) if name == "qwen3" else None
        new = Projected(qkv, angle, angle, norms, 1e-6)  # type: ignore[arg-type]
        sinks = Struct((8 * group,), jnp.bfloat16) if window else None
        args = AttentionArgs(0.1, window, sinks)  # type: ignore[arg-type]
        pool, one = Struct((257, 8, 16, head_dim), jnp.bfloat16), Struct((1,), jnp.int32)
        table = Struct((1, 256), jnp.int32)
        where = Sequences(*[one] * 4, table, one, 1)  # type: ignore[arg-type]
        yield Case(f"attention step {name}", step, (new, pool, pool, where, args))


def step(new: Any, k_pool: Any, v_pool: Any, *where: Any) -> Any:
    return gpu_step.attention_step(new, as_pool(k_pool), as_pool(v_pool), *where)


def mixtures() -> Iterator[Case]:
    """GPT-OSS 20B's experts."""
    count, size = 32, 2880
    for kind in ("bfloat16", "mxfp4-a16"):
        ups, downs = ((size,), (2, size)), ((size,), (size,))
        up, down = (Struct((count, *a, *b), jnp.bfloat16) for a, b in (ups, downs))
        if kind == "mxfp4-a16":
            up, down = (
                class_of(kind)(
                    *class_of(kind).like(size, b[-1] * len(b), (count,)),
                    kind,
                    a,
                    b,  # type: ignore
                )
                for a, b in (ups, downs)
            )
        biases = Struct((count, 2, size), jnp.bfloat16), Struct((count, size), jnp.bfloat16)
        for tokens in (1, 8, 64, 1024):
            x = Struct((tokens, size), jnp.bfloat16)
            chosen = Struct((tokens, 4), jnp.int32), Struct((tokens, 4), jnp.float32)

            def run(*arrays):
                return moe.experts(MoeArgs.of(*arrays, activation=ClampedSwiglu()))

            given = (x, *chosen, up, biases[0], down, biases[1])
            yield Case(f"experts {kind}, tokens {tokens}", run, given)


GROUPS = (products, attentions, attention_steps, mixtures)
