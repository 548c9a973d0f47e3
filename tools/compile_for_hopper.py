"""Compiles the GPU kernels for an H200 where there is none, down to machine code.

    python -m venv /tmp/hopper && /tmp/hopper/bin/pip install "jax[cuda13]" jaxtyping
    PATH=$PATH:$(dirname $(find /tmp/hopper -name ptxas)) PYTHONPATH=src \\
        /tmp/hopper/bin/python tools/compile_for_hopper.py

XLA compiles for a described device, and Mosaic GPU's kernels on the way; ptxas assembles them for
sm_90a. Printed per kernel: registers and spilled bytes, temporary memory, and what XLA runs beside
it. This proves that they compile and what they take; not that they compute, nor how fast.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from rooflax.ops.activation import clamped_swiglu
from rooflax.ops.attention import AttentionArgs, Paging
from rooflax.ops.attention import gpu as attention
from rooflax.ops.attention.pattern import Pattern
from rooflax.ops.kv_pool import QuantizedPool, as_pool
from rooflax.ops.linear import gpu as linear
from rooflax.ops.linear.args import LinearArgs
from rooflax.ops.moe import gpu as moe
from rooflax.ops.moe.args import MoeArgs
from rooflax.ops.weights import class_of

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 150754820096 cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA" device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 patch: 0 }
runtime_version { major: 13 minor: 0 patch: 0 }
"""
Struct = jax.ShapeDtypeStruct
Case = tuple[str, Callable[..., Any], tuple[Any, ...]]


def multiply(x: Any, w: Any) -> Any:
    return linear.matmul(LinearArgs(x, w, dtype=x.dtype))


def products() -> Iterator[Case]:
    """A LLaMA 3.1 8B's largest weight, in every code, for one row and for eight."""
    inner, outer = 4096, 14336
    for format in ("w8a8", "w8a16-g32", "w4a16", "mxfp4-a16", "fp8-a16"):
        kind = class_of(format)
        w = kind(*kind.like(inner, outer), format, (inner,), (outer,))  # type: ignore[arg-type]
        for rows in (1, 8):
            x = Struct((rows, inner), jnp.bfloat16)
            yield (
                f"linear {format}, rows {rows}",
                lambda x, w: linear.matmul(LinearArgs(x, w)),
                (x, w),
            )


def attend(q: Any, k_pool: Any, v_pool: Any, *where: Any) -> Any:
    return attention.paged_attention(q, as_pool(k_pool), as_pool(v_pool), *where)


def attentions() -> Iterator[Case]:
    """LLaMA's and GPT-OSS's heads: a step of decoding, and a chunk of a prompt."""
    strided = Pattern(1024, first=64, stride=8)
    shapes = {
        "llama": (32, 8, 128, None, None),
        "gpt-oss": (64, 8, 64, 128, None),
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
                q, sinks = (
                    Struct((1, length, heads, head_dim), jnp.bfloat16),
                    Struct((heads,), "f4"),
                )
                args = AttentionArgs(0.1, window, sinks, pattern=pattern)  # type: ignore
                yield f"attention {name} {kind}, queries {length}", attend, (
                    q, pool, pool, Paging(*whole), args,  # type: ignore
                )  # fmt: skip


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
        for tokens in (1, 8, 1024):
            x = Struct((tokens, size), jnp.bfloat16)
            chosen = Struct((tokens, 4), jnp.int32), Struct((tokens, 4), jnp.float32)

            def run(*arrays):
                return moe.experts(MoeArgs.of(*arrays, activation=clamped_swiglu))

            yield f"experts {kind}, tokens {tokens}", run, (
                x, *chosen, up, biases[0], down, biases[1],
            )  # fmt: skip


def compiled(function: Callable[..., Any], arguments: tuple[Any, ...], place: Any) -> str:
    """One line about a program for the described device."""
    with tempfile.TemporaryFile() as heard:
        before = os.dup(1)
        os.dup2(heard.fileno(), 1)  # ptxas's report is printed by C++
        try:
            jitted = jax.jit(function, in_shardings=place, out_shardings=place)
            program = jitted.lower(*arguments).compile()
        finally:
            os.dup2(before, 1)
            os.close(before)
        heard.seek(0)
        said = heard.read().decode(errors="replace")
    registers = re.findall(r"Used (\d+) registers", said)
    spilled = re.findall(r"(\d+) bytes spill stores", said)
    text = program.as_text()
    kinds = Counter(re.findall(r"= \S+ ([a-z-]+)\(", text[text.index("ENTRY") :]))
    beside = {k: n for k, n in kinds.items() if k in ("fusion", "custom-call", "copy", "while")}
    temporary = program.memory_analysis().temp_size_in_bytes / 1e6
    return (
        f"registers {', '.join(registers) or 'cached'}; spilled {', '.join(spilled) or '-'}; "
        f"temporary {temporary:.1f} MB; {beside}"
    )


def main() -> None:
    device = topologies.get_topology_desc(
        "h200", platform="cuda", target_config=H200, topology="1x1x1"
    ).devices[0]
    place = jax.sharding.SingleDeviceSharding(device)
    for group in (products, attentions, mixtures):
        for name, function, arguments in group():
            if not sys.argv[1:] or any(asked in name for asked in sys.argv[1:]):
                sys.stdout.write(f"{name}: {compiled(function, arguments, place)}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
