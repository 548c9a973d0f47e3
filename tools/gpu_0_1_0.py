"""The kernels and steps of version 0.1.0, measured as `gpu_compile.py` measures those of today.

    mkdir -p build/0.1.0 && git archive 19ed4f4 src | tar -x -C build/0.1.0
    PYTHONPATH=build/0.1.0/src .venv-gpu/bin/python tools/gpu_0_1_0.py [--only NAME ...] [--write]

Names are those of today's rows; what could not be compiled says why. A kernel of two rows is
assembled for the first: the committed numbers of w8a8 and w4a8 are from `--only a8`.
"""

from __future__ import annotations

import argparse
import math
from collections import namedtuple
from functools import partial

import gpu_compile  # first: it says where CUDA is
import jax
import jax.numpy as jnp
from rooflax.ops.quantization import QuantizedArray, QuantizedPool, packed_arrays

from rooflax.engine import packing, steps
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
Case = namedtuple("Case", "name function arguments weights products", defaults=(0, 1))
Step = namedtuple("Step", "name model format kind layers", defaults=((2, 4),))


def packed(format, inner, outer, stack=()):
    arrays = packed_arrays(format, math.prod(inner), math.prod(outer), stack)
    return QuantizedArray(*arrays, format, inner, outer)


def products():
    for format in ("w8a16", "w8a8", "w8a16-g32", "w4a16", "w4a8", "mxfp4-a16", "fp8-a16"):
        name, w = FORMATS[format].code, packed(format, (4096,), (14336,))
        for rows in (1, 8) if format.endswith("a8") else (1, 8, 16, 64, 512):
            weights = 4 * linear.CODES[name].slots if rows <= linear.MOST_ROWS else 0
            is_float = name in ("fp8", "mxfp4")  # which takes a multiplication for unpacking, too
            each = weights * (min(rows, linear.ROWS_AT_ONCE) + is_float)
            given = Struct((rows, 4096), jnp.bfloat16), w, None
            yield Case(f"linear {format}, rows {rows}", linear.matmul, given, weights, each)


def attentions():
    strided = Pattern(1024, first=64, stride=8)
    shapes = {
        "llama": (32, 8, 128, None, None),
        "gpt-oss": (64, 8, 64, 128, None),
        "gemma": (8, 4, 256, 1024, None),
        "llama, pattern": (32, 8, 128, None, strided),
        "gpt-oss, pattern": (64, 8, 64, None, strided),
    }
    for name, (heads, kv_heads, head_dim, window, pattern) in shapes.items():
        for kind in ("bfloat16", "int8") if pattern else ("bfloat16", "float32", "int8"):
            size = (257, kv_heads, 16, head_dim)
            pool = Struct(size, kind)
            if kind == "int8":
                pool = QuantizedPool(pool, Struct(size[:3], jnp.float32))
            for length in (1, 512) if kind == "bfloat16" else (1,):
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


def mixtures():
    count, size = 32, 2880
    run = partial(moe.experts, activation=clamped_swiglu, method="grouped")
    biases = Struct((count, 2, size), jnp.bfloat16), Struct((count, size), jnp.bfloat16)
    for kind in ("bfloat16", "mxfp4-a16"):
        sizes = ((size,), (2, size)), ((size,), (size,))
        up, down = (Struct((count, *a, *b), jnp.bfloat16) for a, b in sizes)
        if kind == "mxfp4-a16":
            up, down = (packed(kind, a, b, (count,)) for a, b in sizes)
        for tokens in (1, 8, 1024):
            x = Struct((tokens, size), jnp.bfloat16)
            chosen = Struct((tokens, 4), jnp.int32), Struct((tokens, 4), jnp.float32)
            given = (x, *chosen, up, biases[0], down, biases[1])
            yield Case(f"experts {kind}, tokens {tokens}", run, given)


def every_step():
    models = {"llama-3.1-8b": (None, "w8a16", "w4a16"), "qwen2.5-0.5b": (None,)}
    for model, formats in (models | {"gpt-oss-20b": ("mxfp4-a16",)}).items():
        for format in formats:
            for kind in ("decode", "prefill"):
                yield Step(f"{model} {format or 'bf16'}, {kind}", model, format, kind)


def program(step, layers):
    """Of one row, greedy: one token, or a chunk of 512."""
    name, config = read_config({**PRESETS[step.model], "num_hidden_layers": layers})
    storage, context, block = Storage("bfloat16", step.format, narrow=True), 4096, 16
    arrays = [(s, _weight(s, config, storage)) for s in slots(family(name).weights(config), layers)]
    rope = RopeTable(*[Struct((context, config.head_dim // 2), jnp.float32)] * 2)
    model = Model(assemble(layers, iter(arrays)), rope, name, config, context, "bfloat16")
    groups = config.groups
    blocks = tuple(1 + context // block for _ in groups.windows)
    shapes = kv_cache.pool_shapes(groups, blocks, config.num_kv_heads, config.head_dim, block)
    pools = tuple(Struct(s, jnp.bfloat16) for s in shapes)
    cache = kv_cache.KVCache(pools, pools, groups, block)
    counts = TokenCounts(*(Struct((2, config.vocab_size), d) for d in (jnp.bool_, jnp.int32)))
    tokens = 1 if step.kind == "decode" else 512
    layout = packing.Layout(tokens, tuple(context // block for _ in groups.windows))
    rows = (Struct((n, w), jnp.int32) for n, w in ((1, layout.width), (2, packing.PARAMS_WIDTH)))
    given = steps.StepInput(*rows, None, layout, plain=True)
    run = partial(steps.prefill, options=ExecutionOptions(), shards=None)
    if step.kind == "decode":
        run = partial(steps.decode, options=ExecutionOptions(), shards=None, max_steps=32)
    return run, (model, (cache, counts), given)


def _weight(slot, config, storage):
    shape = slot.weight.shape(config.axis_sizes)
    if (format := storage.format_of(slot, config)) is None:
        return Struct(shape, storage.dtype_of(slot, config, True))
    return packed(format, *product_shape(slot, config), shape[: slot.weight.num_stacked])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME")
    parser.add_argument("--write", action="store_true", help="keep the table")
    args = parser.parse_args()
    cases = (*products(), *attentions(), *mixtures())
    rows = [("kernels", case.name, partial(gpu_compile.kernel_row, case)) for case in cases]
    for step in every_step():
        rows.append(("steps", step.name, partial(gpu_compile.step_row, step, program)))
    table = gpu_compile.measured(row for row in rows if any(n in row[1] for n in args.only))
    if args.write:
        gpu_compile.keep("0.1.0", table)


if __name__ == "__main__":
    main()
