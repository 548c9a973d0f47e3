"""The kernels and steps of version 0.1.0, measured as `gpu_compile.py` measures those of today.

    git worktree add --detach build/0.1.0 19ed4f4
    PYTHONPATH=build/0.1.0/src .venv-gpu/bin/python tools/gpu_0_1_0.py [--only NAME ...] [--write]

Names are those of today's rows; what could not be compiled says why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gpu_compile  # first: it says where CUDA is
import jax
import jax.numpy as jnp
from gpu_compile import Row
from rooflax.ops.quantization import QuantizedArray, QuantizedPool, packed_arrays

from rooflax.engine import packing, steps
from rooflax.engine.packing import Layout
from rooflax.models.model import Model
from rooflax.models.presets import PRESETS
from rooflax.models.registry import family, read_config
from rooflax.nn import kv_cache
from rooflax.nn.execution import ExecutionOptions
from rooflax.nn.rope import RopeTable
from rooflax.nn.storage import Storage, product_shape
from rooflax.nn.weights import assemble, slots
from rooflax.ops.activation import clamped_swiglu
from rooflax.ops.attention import gpu as attention
from rooflax.ops.attention.pattern import Pattern
from rooflax.ops.formats import FORMATS
from rooflax.ops.linear import gpu as linear
from rooflax.ops.moe import gpu as moe
from rooflax.ops.sampling import TokenCounts

Struct = jax.ShapeDtypeStruct
ABSENT = {
    "kernels": {
        "linear bfloat16": "no kernel for plain weights, XLA multiplied",
        "attention step": "no kernel, the operations ran one after the other",
    },
    "steps": {"qwen3-8b w4a16": "no such family"},
}
"""What is in today's table and was not there."""


class Case:
    """As `gpu_cases.Case`."""

    def __init__(
        self, name: str, function: Any, arguments: Any, weights: int = 0, products: int = 1
    ) -> None:
        self.name, self.function, self.arguments = name, function, arguments
        self.weights, self.products = weights, products


class Step:
    """As `gpu_steps.Step`."""

    layers = (2, 4)

    def __init__(self, model: str, format: str | None, kind: str) -> None:
        self.name = f"{model} {format or 'bf16'}, {kind}"
        self.model, self.format, self.kind = model, format, kind


def packed(format: str, inner: Any, outer: Any, stack: tuple[int, ...] = ()) -> QuantizedArray:
    sizes = [1, 1]
    for at, axes in enumerate((inner, outer)):
        for axis in axes:
            sizes[at] *= axis
    return QuantizedArray(*packed_arrays(format, *sizes, stack), format, inner, outer)  # type: ignore


def products() -> Iterator[Case]:
    for format in ("w8a16", "w8a8", "w8a16-g32", "w4a16", "w4a8", "mxfp4-a16", "fp8-a16"):
        name = FORMATS[format].code
        code = linear.CODES[name]
        w = packed(format, (4096,), (14336,))
        for rows in (1, 8, 16, 64, 512):
            x = Struct((rows, 4096), jnp.bfloat16)
            weights = 4 * code.slots if rows <= linear.MOST_ROWS else 0
            is_float = name in ("fp8", "mxfp4")  # which takes a multiplication for unpacking, too
            each = weights * (min(rows, linear.ROWS_AT_ONCE) + is_float)
            run = lambda x, w: linear.matmul(x, w, None)  # noqa: E731
            yield Case(f"linear {format}, rows {rows}", run, (x, w), weights, each)


def attentions() -> Iterator[Case]:
    strided = Pattern(1024, first=64, stride=8)
    shapes = {
        "llama": (32, 8, 128, None, None),
        "gpt-oss": (64, 8, 64, 128, None),
        "gemma": (8, 4, 256, 1024, None),
        "llama, pattern": (32, 8, 128, None, strided),
        "gpt-oss, pattern": (64, 8, 64, None, strided),
    }
    for name, (heads, kv_heads, head_dim, window, pattern) in shapes.items():
        for kind in ("bfloat16", "float32", "int8"):
            for length in (1, 512) if kind == "bfloat16" else (1,):
                size = (257, kv_heads, 16, head_dim)
                pool: Any = Struct(size, kind)
                if kind == "int8":
                    pool = QuantizedPool(pool, Struct(size[:3], jnp.float32))  # type: ignore
                whole = [Struct(s, jnp.int32) for s in ((1, 256), (1,), (1, length), (1,))]
                q = Struct((1, length, heads, head_dim), jnp.bfloat16)
                sinks = Struct((heads,), "f4") if "gpt-oss" in name else None

                def run(q, k, v, tables, firsts, at, lens, sinks, window=window, pattern=pattern):
                    return attention.paged_attention(
                        q, k, v, block_tables=tables, first_positions=firsts, positions=at,
                        context_lens=lens, scale=0.1, window=window, sinks=sinks, repeat_kv=False,
                        pattern=pattern,
                    )  # fmt: skip

                given = (q, pool, pool, *whole, sinks)
                yield Case(f"attention {name} {kind}, queries {length}", run, given)


def mixtures() -> Iterator[Case]:
    count, size = 32, 2880
    for kind in ("bfloat16", "mxfp4-a16"):
        ups, downs = ((size,), (2, size)), ((size,), (size,))
        up, down = (Struct((count, *a, *b), jnp.bfloat16) for a, b in (ups, downs))
        if kind == "mxfp4-a16":
            up, down = (packed(kind, a, b, (count,)) for a, b in (ups, downs))
        biases = Struct((count, 2, size), jnp.bfloat16), Struct((count, size), jnp.bfloat16)
        for tokens in (1, 8, 1024):
            x = Struct((tokens, size), jnp.bfloat16)
            chosen = Struct((tokens, 4), jnp.int32), Struct((tokens, 4), jnp.float32)
            run = partial(moe.experts, activation=clamped_swiglu, method="grouped")
            given = (x, *chosen, up, biases[0], down, biases[1])
            yield Case(f"experts {kind}, tokens {tokens}", run, given)


def every_step() -> Iterator[Step]:
    models = (
        ("llama-3.1-8b", None), ("llama-3.1-8b", "w8a16"), ("llama-3.1-8b", "w4a16"),
        ("qwen2.5-0.5b", None), ("gpt-oss-20b", "mxfp4-a16"),
    )  # fmt: skip
    for model, format in models:
        yield from (Step(model, format, kind) for kind in ("decode", "prefill"))


def program(step: Step, layers: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Of one row, greedy: one token, or a chunk of 512."""
    name, config = read_config({**PRESETS[step.model], "num_hidden_layers": layers})
    storage = Storage("bfloat16", step.format, narrow=True)
    arrays = [(s, _weight(s, config, storage)) for s in slots(family(name).weights(config), layers)]
    context, block, half = 4096, 16, config.head_dim // 2
    rope = RopeTable(*[Struct((context, half), jnp.float32)] * 2)
    model = Model(assemble(layers, iter(arrays)), rope, name, config, context, "bfloat16")
    groups = config.groups
    blocks = tuple(1 + context // block for _ in groups.windows)
    shapes = kv_cache.pool_shapes(groups, blocks, config.num_kv_heads, config.head_dim, block)
    pools = tuple(Struct(s, jnp.bfloat16) for s in shapes)
    cache = kv_cache.KVCache(pools, pools, groups, block)
    counts = TokenCounts(*(Struct((2, config.vocab_size), d) for d in (jnp.bool_, jnp.int32)))
    tokens = 1 if step.kind == "decode" else 512
    layout = Layout(tokens, tuple(context // block for _ in groups.windows))
    rows = (Struct((n, w), jnp.int32) for n, w in ((1, layout.width), (2, packing.PARAMS_WIDTH)))
    given = steps.StepInput(*rows, None, layout, plain=True)  # type: ignore[arg-type]
    how: dict[str, Any] = {"options": ExecutionOptions(), "shards": None}
    run = steps.prefill
    if step.kind == "decode":
        run, how = steps.decode, {**how, "max_steps": 32}
    return partial(run, **how), (model, (cache, counts), given)


def _weight(slot: Any, config: Any, storage: Storage) -> Any:
    shape = slot.weight.shape(config.axis_sizes)
    if (format := storage.format_of(slot, config)) is None:
        return Struct(shape, storage.dtype_of(slot, config, True))
    return packed(format, *product_shape(slot, config), shape[: slot.weight.num_stacked])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--write", action="store_true", help="keep the table")
    args = parser.parse_args()
    rows: list[tuple[str, str, Callable[[], Row]]] = [
        ("kernels", case.name, partial(gpu_compile.kernel_row, case))
        for group in (products, attentions, mixtures)
        for case in group()
    ]
    rows += [
        ("steps", step.name, partial(gpu_compile.step_row, step, program)) for step in every_step()
    ]
    asked = args.only or [""]
    table = gpu_compile.measured(row for row in rows if any(name in row[1] for name in asked))
    for part, absent in ABSENT.items():
        table[part] |= {name: {"failed": why} for name, why in absent.items()}
    if args.write:
        gpu_compile.keep("0.1.0", table)


if __name__ == "__main__":
    sys.exit(main())
