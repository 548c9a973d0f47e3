"""All figures of a GPU in one go: kernels against references, ceilings, decode, prefill, ladder.

    python benchmarks/gpu.py OUT                  on a GPU; ten minutes at most
    python benchmarks/gpu.py OUT --only NAME ...  some parts, the others' figures kept
    python benchmarks/gpu.py OUT --dry-run        every part on the CPU, tiny, to see that it works

Each part runs in a process of its own with a time of its own; OUT/figures.json and OUT/table.md are
written after each. A part that fails or takes too long is written down, and the rest goes on. Rows
of models are taken by `rooflax bench`'s own measuring code, but for their weights: a preset's are
made on the host, which takes longer than all figures, so these are drawn on the device, in the
packed forms themselves. `--packages FOLDER` is where transformers lies if the machine has none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

BUDGET_S = 590
LADDER = (
    ("baseline", {}, "1.0x"),
    ("+ GQA", {"gqa": "grouped"}, "1.08x"),
    ("+ MoE grouping", {"moe": "grouped"}, "1.2x"),
    ("+ KV cache", {"use_cache": True}, "50x"),
    ("+ jit", {"jit": True}, "2.0x"),
    ("default settings", {"kernels": None}, ""),
)
"""In the documents' order, with their factors for an A100; in plain JAX but for the last row."""
SLOWEST = {
    "use_cache": False, "jit": False, "gqa": "repeat", "moe": "per_token", "kernels": "xla",
}  # fmt: skip

Figures = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        job: a function of JOBS.
        limit_s: after which it is ended.
        target: what is wanted of it, from the project's targets; for the table.
    """

    name: str
    job: str
    arguments: Figures
    limit_s: int
    target: str = ""


def parts(tiny: bool) -> list[Part]:
    """In order of what is worth most if the time runs out."""
    llama, oss = ("llama-tiny", "gpt-oss-tiny") if tiny else ("llama-3.1-8b", "gpt-oss-20b")
    short = {"prompt_tokens": 16, "output_tokens": 4, "trials": 2} if tiny else {}
    decode = {"prompt_tokens": 128, "output_tokens": 128, "trials": 5} | short
    long = {"prompt_tokens": 4096, "output_tokens": 2, "trials": 5} | short
    climb = {"prompt_tokens": 4 if tiny else 16, "output_tokens": 2 if tiny else 4, "trials": 1}

    def row(name: str, model: str, work: Figures, target: str, **precision: Any) -> Part:
        arguments = {"model": f"preset:{model}", "work": work, "precision": precision}
        return Part(name, "model", arguments, 100, target)

    found = [
        Part("kernels", "check_kernels", {"tiny": tiny}, 150, "equal to their references"),
        Part("ceilings", "ceilings", {"tiny": tiny}, 40),
        row("decode bf16", llama, decode, "75% of bandwidth"),
        row("decode int8", llama, decode, "65% of bandwidth", quantize="w8a16"),
        row("decode int4", llama, decode, "50% of bandwidth", quantize="w4a16"),
        row("decode gpt-oss mxfp4", oss, decode, "50% of bandwidth", quantize="mxfp4-a16"),
        row("prefill bf16", llama, long, "60% of the matmul rate"),
        Part("transformers", "transformers", {"tiny": tiny, "work": decode}, 100, "we: 1.2x"),
    ]
    options = dict(SLOWEST)
    for label, change, theirs in LADDER:
        options = options | change
        arguments = {"model": f"preset:{oss}", "work": climb, "precision": {}, "options": options}
        found.append(Part(f"ladder: {label}", "model", arguments, 90, f"A100: {theirs}"))
    return found


# What runs in a part's process.


def model(model: str, work: Figures, precision: Figures, options: Figures | None = None) -> Figures:
    """One row of `rooflax bench`, with weights drawn on the device."""
    from rooflax.bench.measure import measure
    from rooflax.bench.workload import Workload
    from rooflax.nn.execution import ExecutionOptions, Precision

    row = Workload(model, **work, precision=Precision(**precision))
    row = replace(row, options=ExecutionOptions(**(options or {})))
    with weights_on_device():
        found = measure(row)
    found.pop("tokens")
    return found


@contextlib.contextmanager
def weights_on_device() -> Iterator[None]:
    """Presets get weights of the same shapes, types and spread, made where they are used."""
    from rooflax.loading import load
    from rooflax.models import presets

    before, load.random_weights = load.random_weights, drawn
    presets.PRESETS.setdefault("llama-tiny", {**presets.PRESETS["llama-3.2-1b"], **TINY_LLAMA})
    try:
        yield
    finally:
        load.random_weights = before


TINY_LLAMA = {
    "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


def drawn(
    name: str, config: Any, *, seed: int, storage: Any, stacked: bool = False, **_: Any
) -> Figures:
    """`random_weights`, on the device: normal, or packed bytes of any bits at a fitting scale."""
    from functools import partial

    import jax

    from rooflax.nn.stacking import Stacks
    from rooflax.nn.weights import assemble

    one = jax.jit(_one, static_argnums=(1, 2, 3, 4))
    keys = partial(jax.random.fold_in, jax.random.key(seed, impl="rbg"))

    def arrays() -> Iterator[tuple[Any, Any]]:
        for number, slot in enumerate(config.slots()):
            std = 0.02 / (2 * config.num_layers) ** 0.5 if slot.weight.init == "residual" else 0.02
            kind = _kind(slot, config, storage, std)
            yield slot, one(keys(number), *kind)

    if stacked:
        return Stacks(config.num_layers, config.groups.period).filled(arrays())
    return assemble(config.num_layers, arrays())


def _kind(slot: Any, config: Any, storage: Any, std: float) -> tuple[Any, ...]:
    """What `_one` must know of a weight: (how it begins, shape, dtype or format, deviation)."""
    from rooflax.nn.storage import matmul_shape

    shape = slot.weight.shape(config.axis_sizes)
    if (found := storage.format_of(slot, config)) is None:
        return slot.weight.init, shape, storage.dtype_of(slot, config, False), std
    return "packed", (shape[: slot.weight.num_stacked], *matmul_shape(slot, config)), found, std


def _one(key: Any, init: str, shape: Any, kind: str, std: float) -> Any:
    import jax
    import jax.numpy as jnp

    if init in ("ones", "zeros"):
        return jnp.full(shape, float(init == "ones"), kind)
    if init != "packed":
        return (jax.random.normal(key, shape, jnp.float32) * std).astype(kind)
    import math

    from rooflax.ops.formats import FORMATS
    from rooflax.ops.weights import class_of

    stack, in_shape, out_shape = shape
    sizes = (math.prod(in_shape), math.prod(out_shape))
    values, scales, sums = class_of(kind).like(*sizes, stack)
    code = FORMATS[kind].code
    bits = jax.random.bits(key, values.shape, jnp.uint8)
    if code == "fp8":  # none that is NaN, and all below 2
        bits = bits & 0xBF
    spread = {"int8": 74.0, "int8-g32": 74.0, "int4": 4.6, "mxfp4": 2.9, "fp8": 0.7}[code]
    scale = std / spread
    exponent = 127 + round(math.log2(scale))
    packed = jax.lax.bitcast_convert_type(bits, values.dtype)
    of_output = packed.astype(jnp.int32).sum(axis=(-3, -1)) if code == "int8" else jnp.zeros(0)
    return class_of(kind)(
        packed,
        jnp.full(scales.shape, exponent if code == "mxfp4" else scale, scales.dtype),
        of_output.reshape(sums.shape).astype(sums.dtype),
        kind,
        in_shape,
        out_shape,
    )


def ceilings(tiny: bool) -> Figures:
    """A copy, and a matmul of random numbers (of equal ones it runs faster) in bfloat16."""
    import jax
    import jax.numpy as jnp

    from rooflax.bench.ceilings import ceiling_reader
    from rooflax.bench.timing import best_of, timed

    reading = ceiling_reader(1 << 20 if tiny else 1 << 30, "bfloat16")()
    size = 256 if tiny else 8192
    a, b = (jax.random.normal(jax.random.key(k), (size, size), jnp.bfloat16) for k in (0, 1))
    product = jax.jit(jnp.matmul)
    timed(product, a, b)
    rate = 2 * size**3 / best_of(product, a, b, repeats=10)
    return {**asdict(reading), "random_flops_per_s": rate}


def check_kernels(tiny: bool) -> Figures:
    """Every kernel on this device against its reference; and the bytes a second it reads."""
    import jax

    from rooflax.ops import accelerator

    if jax.__version_info__ < accelerator.OLDEST_GPU_JAX:
        raise NotImplementedError(f"GPU kernels need JAX 0.11 or later, not {jax.__version__}")
    rows: list[Figures] = []
    interpreted = contextlib.nullcontext()
    if jax.default_backend() == "cpu":
        from jax.experimental.pallas import mosaic_gpu as plgpu

        interpreted = plgpu.force_gpu_interpret_mode()
    with interpreted:
        for name, case in kernel_cases(tiny):
            row = {"name": name}
            try:
                row |= case()
            except Exception as error:
                row |= {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
            rows.append(row)
            sys.stderr.write(f"{json.dumps(row)}\n")
    return {"rows": rows, "wrong": [r["name"] for r in rows if not r.get("equal")]}


PATTERN = {"window": 1024, "first": 64, "stride": 8, "block": 128}
TINY_PATTERN = {"window": 20, "first": 8, "stride": 3, "block": 32}
"""What is not hidden of a context, as `Pattern` says it: its strides, and both its ends."""


def kernel_cases(tiny: bool) -> Iterator[tuple[str, Callable[[], Figures]]]:
    """Names and checks."""
    formats = ["w4a16", "w8a16", "mxfp4-a16", "fp8-a16", "w8a16-g32", "w8a8", "w4a8"]
    inner, outer = (96, 200) if tiny else (4096, 14336)
    for format in formats[:1] if tiny else formats:
        for few in (1,) if tiny else (1, 8):
            yield (
                f"linear {format} rows {few}",
                lambda f=format, r=few: linear_case(f, r, inner, outer, timed=not tiny),
            )
    if not tiny:
        yield "linear w8a8 rows 512", lambda: linear_case("w8a8", 512, inner, outer, timed=False)
        yield (
            "linear mxfp4-a16 rows 512",
            lambda: linear_case("mxfp4-a16", 512, inner, outer, timed=False),
        )
    kinds = ["bfloat16"] if tiny else ["bfloat16", "float32", "int8"]
    for kind in kinds:
        for head_dim in (64,) if tiny else (64, 128):
            for window in (None,) if tiny else (None, 128):
                yield (
                    f"attention {kind} head {head_dim} window {window}",
                    lambda k=kind, h=head_dim, w=window: attention_case(k, h, w, tiny),
                )
    heads, pattern = (64,) if tiny else (64, 128), TINY_PATTERN if tiny else PATTERN
    chunk, near = (40, 20) if tiny else (512, 128)
    for queries, window, hidden in (
        (1, None, pattern),
        (chunk, near, None),
        (chunk, None, pattern),
    ):
        sight = "pattern" if hidden else f"window {window}"
        for head_dim in heads:
            yield (
                f"attention bfloat16 head {head_dim} queries {queries} {sight}",
                lambda h=head_dim, n=queries, w=window, o=hidden: attention_case(
                    "bfloat16", h, w, tiny, queries=n, pattern=o
                ),
            )
    for kind in ("bfloat16",) if tiny else ("bfloat16", "mxfp4-a16"):
        for tokens in (1,) if tiny else (1, 8, 512):
            yield (
                f"experts {kind} tokens {tokens}",
                lambda k=kind, t=tokens: experts_case(k, t, tiny),
            )


def compared(found: Any, wanted: Any, tolerance: float) -> Figures:
    """The largest difference as a share of the largest value."""
    import numpy as np

    found, wanted = (np.asarray(a, np.float64) for a in (found, wanted))
    error = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    return {"error": error, "tolerance": tolerance, "equal": error <= tolerance}


def seconds_each(function: Callable[..., Any], first: Any, *rest: Any, times: int = 20) -> float:
    """Of one of many calls in one program, so that dispatching is no part of it."""
    import jax
    import jax.numpy as jnp

    from rooflax.bench.timing import best_of, timed

    def many(first: Any, rest: Any) -> Any:
        def one(_: Any, total: Any) -> Any:
            some = function(first + (0 * total).astype(first.dtype), *rest)
            return total + some.ravel()[0].astype(jnp.float32)

        return jax.lax.fori_loop(0, times, one, jnp.float32(0))

    run = jax.jit(many)
    timed(run, first, rest)
    return best_of(run, first, rest, repeats=5) / times


def linear_case(format: str, rows: int, inner: int, outer: int, *, timed: bool) -> Figures:
    """Against the reference in float32; read from as many matrices as the cache does not hold."""
    import jax
    import jax.numpy as jnp

    from rooflax.ops.linear import gpu, linear
    from rooflax.ops.linear.args import LinearArgs

    members = 8
    x = jax.random.normal(jax.random.key(1), (members, rows, inner), jnp.bfloat16)
    w = _one(jax.random.key(0), "packed", ((members,), (inner,), (outer,)), format, 0.02)
    one, x32 = w.member(jnp.int32(3)), x.astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(lambda a, w: linear(a, w, implementation="reference"))(x32[3], one)
    found = jax.jit(lambda a, w: gpu.matmul(LinearArgs(a, w, dtype=a.dtype)))(x[3], one)
    row = compared(found.astype(jnp.float32), wanted, 2**-7)
    if timed and rows <= gpu.MOST_ROWS:
        ids, count = jnp.arange(members, dtype=jnp.int32), jnp.full(1, members, jnp.int32)
        run = jax.jit(gpu.products)
        exact = run(x32, w, ids, count)
        row |= {"float32": compared(exact[3], wanted, 1e-4)}
        seconds = seconds_each(gpu.products, x32, w, ids, count)
        row["read_gb_per_s"] = w.nbytes / seconds / 1e9
    return row


def attention_case(
    kind: str,
    head_dim: int,
    window: int | None,
    tiny: bool,
    *,
    queries: int = 1,
    pattern: Figures | None = None,
) -> Figures:
    """The last queries of each row over blocks in no order, with sinks.

    Args:
        queries: one is decoding; many are a prompt's chunk behind an offset, in bfloat16.
    """
    import jax
    import jax.numpy as jnp

    from rooflax.ops.attention import AttentionArgs, Paging, gpu, paged_attention
    from rooflax.ops.attention.pattern import Pattern
    from rooflax.ops.kv_pool import QuantizedPool, as_pool, tokens_as_int8

    rows, kv_heads, heads, block, table = (2, 1, 2, 16, 12) if tiny else (8, 8, 64, 16, 512)
    if queries > 1:
        rows = 2  # the reference holds every score
    keys = jax.random.split(jax.random.key(0), 4)
    blocks = 1 + rows * table
    pools = [jax.random.normal(k, (blocks, kv_heads, block, head_dim)) for k in keys[:2]]
    if kind == "int8":
        pools = [QuantizedPool(*tokens_as_int8(pool)) for pool in pools]
        size = sum(p.values.nbytes + p.scales.nbytes for p in pools)
    else:
        pools = [pool.astype(kind) for pool in pools]
        size = sum(pool.nbytes for pool in pools)
    dtype = "float32" if kind == "float32" else "bfloat16"
    q = jax.random.normal(keys[2], (rows, queries, heads, head_dim)).astype(dtype)
    lengths = jnp.asarray([table * block - 7 * row for row in range(rows)], jnp.int32)
    order = jax.random.permutation(keys[3], jnp.arange(1, blocks, dtype=jnp.int32))
    paging = Paging(
        block_tables=order.reshape(rows, table),
        first_positions=jnp.zeros(rows, jnp.int32),
        positions=lengths[:, None] + jnp.arange(-queries, 0, dtype=jnp.int32),
        context_lens=lengths,
    )
    args = AttentionArgs(
        scale=head_dim**-0.5,
        window=window,
        sinks=jnp.linspace(-1, 1, heads),
        pattern=None if pattern is None else Pattern(**pattern),
    )
    given = (*pools, paging, args)
    q32 = q.astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        wanted = paged_attention(q32, *given, implementation="reference")

    def attend(q: Any, k_pool: Any, v_pool: Any, *where: Any) -> Any:
        return gpu.paged_attention(q, as_pool(k_pool), as_pool(v_pool), *where)

    run = jax.jit(attend)
    if queries > 1:  # weights are rounded for the tensor cores
        row = compared(run(q, *given).astype(jnp.float32), wanted, 2**-7)
        return row if tiny else row | {"seconds": seconds_each(run, q, *given)}
    row = compared(run(q32, *given), wanted, 1e-4)
    if not tiny and pattern is not None:
        row["seconds"] = seconds_each(run, q, *given)
    elif not tiny and window is None:
        row["read_gb_per_s"] = size / seconds_each(run, q, *given) / 1e9
    return row


def experts_case(kind: str, tokens: int, tiny: bool) -> Figures:
    """GPT-OSS's shapes, or tiny ones."""
    import jax
    import jax.numpy as jnp

    from rooflax.ops.activation import clamped_swiglu
    from rooflax.ops.moe import experts, gpu, route
    from rooflax.ops.moe.args import MoeArgs

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
    biases = jnp.ones((count, 2, size)), jnp.ones((count, size))
    arguments = (ids, shares, up, biases[0], down, biases[1])
    some = min(tokens, 8)  # the reference runs every expert on every token
    with jax.default_matmul_precision("highest"):
        head = (x[:some].astype(jnp.float32), ids[:some], shares[:some], *arguments[2:])
        wanted = experts(*head, activation=clamped_swiglu, implementation="reference")
    run = jax.jit(lambda *a: gpu.experts(MoeArgs.of(*a, activation=clamped_swiglu)))
    row = compared(run(x, *arguments)[:some].astype(jnp.float32), wanted, 2**-6)
    if not tiny:
        seconds = seconds_each(run, x, *arguments)
        total = sum(a.nbytes for a in jax.tree.leaves((up, down)))
        touched = len(set(ids.reshape(-1).tolist())) / count
        row |= {"seconds": seconds, "read_gb_per_s": total * touched / seconds / 1e9}
    return row


def transformers(tiny: bool, work: Figures) -> Figures:
    """The LLaMA shape in bfloat16 with a static cache and torch.compile, batch 1, greedy."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    from rooflax.models.presets import PRESETS

    name = "llama-3.2-1b" if tiny else "llama-3.1-8b"
    raw = {**PRESETS[name], **(TINY_LLAMA if tiny else {})}
    raw = {k: v for k, v in raw.items() if k not in ("model_type", "rope_scaling")}
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    with torch.device(device):
        torch.set_default_dtype(dtype)
        net = LlamaForCausalLM(LlamaConfig(**raw)).eval()
        torch.set_default_dtype(torch.float32)
    prompt_tokens, new = work["prompt_tokens"], work["output_tokens"]
    prompt = torch.arange(prompt_tokens, device=device)[None] * 7 % raw["vocab_size"]
    step = torch.compile(net.forward, mode="reduce-overhead", fullgraph=True) if on_gpu else net

    def wait() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    @torch.inference_mode()
    def trial() -> tuple[float, float]:
        cache = caches[0]
        cache.reset()
        start = wait()
        logits = net(input_ids=prompt, past_key_values=cache, logits_to_keep=1).logits
        token, first = logits[:, -1:].argmax(-1), wait()
        for at in range(prompt_tokens, prompt_tokens + new - 1):
            place = torch.tensor([at], device=device)
            torch.compiler.cudagraph_mark_step_begin()
            found = step(
                input_ids=token.clone(),
                past_key_values=cache,
                cache_position=place,
                position_ids=place[None],
            )
            token = found.logits[:, -1:].argmax(-1)
        return first - start, wait() - first

    caches = [StaticCache(config=net.config, max_cache_len=prompt_tokens + new)]
    for _ in range(1 if tiny else 3):
        trial()
    trials = [trial() for _ in range(work["trials"])]
    from rooflax.bench.statistics import Summary

    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "prefill_tok_per_s": Summary.of([prompt_tokens / a for a, _ in trials]).as_json(),
        "decode_tok_per_s": Summary.of([(new - 1) / b for _, b in trials]).as_json(),
    }


JOBS: dict[str, Callable[..., Figures]] = {
    "model": model,
    "ceilings": ceilings,
    "check_kernels": check_kernels,
    "transformers": transformers,
}


# What starts them, and writes down what they found.


def run_part(part: Part, limit_s: float, environment: dict[str, str]) -> Figures:
    """What a part's process gave; where it failed, why."""
    start = time.perf_counter()
    job = json.dumps({"job": part.job, "arguments": part.arguments})
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--job", job],
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        failed = done.returncode != 0
        said = done.stderr
        found = {"failed": _last(said)} if failed else json.loads(done.stdout)
    except subprocess.TimeoutExpired as late:
        said = (late.stderr or b"").decode(errors="replace")
        found = {"failed": f"not done after {limit_s:.0f} s"}
    spent = round(time.perf_counter() - start, 1)
    return {"part": asdict(part), "seconds": spent, **found, "said": said[-4000:]}


def _last(said: str) -> str:
    lines = said.strip().splitlines()
    return lines[-1][:500] if lines else "no reason given"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS")
    parser.add_argument("--packages", type=Path, help="a folder with transformers in it")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        return run_job(json.loads(args.job))
    if args.out is None:
        parser.error("OUT is missing: the folder for figures.json and table.md.")
    chosen = [p for p in parts(args.dry_run) if not args.only or _is_asked(p.name, args.only)]
    if not chosen:
        names = ", ".join(p.name for p in parts(args.dry_run))
        parser.error(f"--only names none of the parts: {names}.")
    environment = dict(os.environ)
    if args.dry_run:
        environment["JAX_PLATFORMS"] = "cpu"
    args.out.mkdir(parents=True, exist_ok=True)
    saved = args.out / "figures.json"
    figures = json.loads(saved.read_text()) if args.only and saved.exists() else {}
    begun = time.perf_counter()
    for part in chosen:
        left = args.budget - (time.perf_counter() - begun)
        own = environment
        if part.job == "transformers" and args.packages:
            paths = [str(args.packages), own.get("PYTHONPATH", "")]
            own = {**own, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if left < 5:
            figures[part.name] = {"part": asdict(part), "failed": "no time was left", "seconds": 0}
        else:
            figures[part.name] = run_part(part, min(part.limit_s, left), own)
        saved.write_text(json.dumps(figures, indent=1))
        (args.out / "table.md").write_text(markdown(figures))
        state = figures[part.name].get("failed", "done")
        sys.stderr.write(f"{figures[part.name]['seconds']:6.1f} s  {part.name}: {state}\n")
    sys.stdout.write(markdown(figures))
    return 0


def _is_asked(name: str, only: list[str]) -> bool:
    return any(name.startswith(asked) for asked in only)


def run_job(given: Figures) -> int:
    """A part, in its own process: its figures on stdout."""
    with contextlib.redirect_stdout(sys.stderr):
        found = {"result": JOBS[given["job"]](**given["arguments"])}
        if given["job"] != "transformers":
            from rooflax.bench.environment import environment

            found["environment"] = environment()
    json.dump(found, sys.stdout)
    return 0


def markdown(figures: Figures) -> str:
    """A table of all parts, and one of the kernels."""
    first = next((f["environment"] for f in figures.values() if "environment" in f), None)
    about = "nothing ran"
    if first:
        about = f"{first['device']}, JAX {first['jax']}, Python {first['python']}, {first['date']}"
    lines = [
        "# GPU figures", "", about, "",
        "| part | decode tok/s | share | prefill tok/s | share | wanted | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for name, found in figures.items():
        lines.append(_line(name, found))
    kernels = figures.get("kernels", {}).get("result")
    if kernels:
        lines += ["", "| kernel | error | equal | GB/s |", "| --- | --- | --- | --- |"]
        lines += [_kernel_line(row) for row in kernels["rows"]]
    ceiling = figures.get("ceilings", {}).get("result")
    if ceiling:
        rates = [ceiling[k] / 1e12 for k in ("flops_per_s", "random_flops_per_s")]
        products = f"{rates[0]:.1f} TFLOP/s of ones, {rates[1]:.1f} of random numbers"
        copied = f"{ceiling['read_gb_per_s']:.0f} GB/s copied"
        lines += ["", f"Ceilings: {copied}; bfloat16 products {products}."]
    lines += ["", *_ladder(figures)]
    return "\n".join(lines).rstrip() + "\n"


def _line(name: str, found: Figures) -> str:
    target, seconds = found["part"]["target"], found["seconds"]
    if "failed" in found:
        return f"| {name} | {found['failed']} | | | | {target} | {seconds} |"
    result = found["result"]
    cells = []
    for kind in ("decode", "prefill"):
        speed = result.get(f"{kind}_tok_per_s")
        share = result.get(f"{kind}_roofline")
        cells.append("" if speed is None else f"{speed['median']:.1f}")
        cells.append("" if share is None else f"{share:.0%}")
    return f"| {name} | {' | '.join(cells)} | {target} | {seconds} |"


def _kernel_line(row: Figures) -> str:
    error, speed = row["error"], row.get("read_gb_per_s")
    shown = error if isinstance(error, str) else f"{error:.1e}"
    rate = f"{speed:.0f}" if speed else ""
    return f"| {row['name']} | {shown} | {row.get('equal', False)} | {rate} |"


def _ladder(figures: Figures) -> list[str]:
    """Each step over the one before, beside the documents' A100."""
    rows = [(label, theirs, figures.get(f"ladder: {label}", {})) for label, _, theirs in LADDER]
    speeds = [
        found["result"]["decode_tok_per_s"]["median"] if "result" in found else None
        for _, _, found in rows
    ]
    lines = ["| ladder | tok/s | over the row before | A100 | over the baseline |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for at, (label, theirs, _) in enumerate(rows):
        here, before = speeds[at], speeds[max(at - 1, 0)]
        cells = ["" if here is None else f"{here:.3g}"]
        cells += [f"{here / base:.2f}x" if here and base else "" for base in (before, speeds[0])]
        lines.append(f"| {label} | {cells[0]} | {cells[1]} | {theirs} | {cells[2]} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
