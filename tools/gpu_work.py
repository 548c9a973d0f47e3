"""What compiling shows of the GPU's kernels as `gpu_speed.Work`: registers, shared memory and
instructions from the machine code, programs and turns from the grid.

    PYTHONPATH=src .venv-gpu-0.11/bin/python tools/gpu_work.py [--only NAME ...]

writes tools/gpu_tables/work.json for `gpu_speed.py --predict`: the kernels of `benchmarks/gpu.py`,
but experts also by the answers to their questions (`ops/block_sizes.py`) nearest to the rule's. It
fails where one of them spills registers, lacks a wait or has serialized products.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "tools")]

import gpu_compile  # noqa: E402  (first: it says where CUDA is)
import hlo  # noqa: E402
import jax  # noqa: E402
import sass  # noqa: E402
from gpu_speed import WORK, Work  # noqa: E402

from benchmarks.gpu_cases import nearest  # noqa: E402
from benchmarks.gpu_list import cases as listed  # noqa: E402
from rooflax.ops import block_sizes  # noqa: E402
from rooflax.ops.attention import gpu_wide  # noqa: E402
from rooflax.ops.mosaic import plgpu  # noqa: E402

REGISTERS, SHARED, RESERVED = 65536, 233472, 1024
"""Of a multiprocessor; and shared bytes that each program takes besides its own."""
BLOCK, TILE = 16, 64
"""Tokens of a block, and keys of a tile of the tensor cores."""
ANSWERS = 2
"""To each question, besides the rule's, where benchmarks/gpu.py tries no more."""
Facts = dict[str, Any]


@dataclass(frozen=True)
class Launch:
    """A kernel as it was asked for.

    Attributes:
        grid: sizes by the names of axes.
    """

    name: str
    grid: dict[str, int]
    warpgroups: int
    shared: int


def recorded(function: Callable[..., Any], arguments: Any) -> tuple[list[Launch], str, str]:
    """Launches of a program, what the assembler said, and the program's text."""
    found: list[Launch] = []
    kernel = plgpu.kernel

    def record(body: Any, *rest: Any, **how: Any) -> Any:
        memory = jax.tree.leaves(how.get("scratch_types", ()), is_leaf=_is_memory)
        shared = sum(math.prod(m.shape) * _bytes(m.dtype) for m in memory if _is_memory(m))
        shared += how["compiler_params"].reduction_scratch_bytes
        grid = dict(zip(how["grid_names"], how["grid"], strict=True))
        found.append(Launch(body.__name__, grid, how.get("num_threads") or 1, shared))
        return kernel(body, *rest, **how)

    plgpu.kernel = record
    try:
        # a function of its own is traced anew, and so asks again
        program, said, _ = gpu_compile.compiled(lambda *given: function(*given), arguments)
    finally:
        plgpu.kernel = kernel
    return found, said, program.as_text()


def _is_memory(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _bytes(dtype: Any) -> int:
    return jax.numpy.dtype(dtype).itemsize if "barrier" not in str(dtype).lower() else 8


def works(
    launches: list[Launch],
    said: str,
    kernels: list[Facts],
    facts: Callable[[Launch], Facts | None],
) -> list[Work]:
    """Each launch with its machine code.

    Args:
        kernels: as `gpu_compile.assembled` reads them from what the assembler said.
        facts: what neither shows of a launch: turns, loads, waits, flops, bytes and, where not the
            whole grid has work, programs; `packs`, turns of a loop before the first load. None is a
            launch that is not timed.
    """
    names = [part.split()[0] for part in said.split("//--------------------- .text.")[1:]]
    made = []
    for launch in launches:
        mine = [n for n, name in enumerate(names) if name.startswith(f"{launch.name}_mosaic")]
        given = facts(launch)
        if not mine or given is None:
            continue
        own = kernels[mine[0]]
        if len(mine) > 1:  # of one name, in the order of their launches
            names[mine[0]] = ""
        known = dict(given)
        threads, registers = 128 * launch.warpgroups, -(-own["registers"] // 8) * 8
        held = min(
            REGISTERS // (registers * threads),
            SHARED // (launch.shared + RESERVED),
            2048 // threads,
        )
        hot, total = own["code"].hot_loop(), len(own["code"].instructions)
        packs = known.pop("packs", 0)
        if packs:  # a gate's multiplications are in the other loop
            loops = own["code"].inner_loops()
            hot = max(loops, key=lambda body: sum(i.kind == "IDP" for i in body))
        packing = [b for b in own["code"].inner_loops() if b != hot and packs]
        once = sum(len(body) for body in packing)
        first = sum(i.kind == "BAR" for body in packing for i in body)
        barriers = own["code"].counts()["BAR"] - first
        tail = total - len(hot) - once
        if not hot:
            known["turns"], hot, tail = 1, own["code"].instructions, 0
        rare = seldom(own["code"], hot) if launch.name.startswith("attention") else []
        kinds = Counter(i.kind for i in hot) - Counter(i.kind for i in rare)
        programs = known.pop("programs", math.prod(launch.grid.values()))
        made.append(
            Work(
                programs,
                threads // 32,
                max(1, held),
                head=packs * once,
                body=len(hot) - len(rare),
                slow=kinds["IDP"],
                accesses=kinds["LD"] + kinds["LDG"],
                meets=kinds["BAR"],
                first=packs * first,
                last=barriers - kinds["BAR"],
                tail=tail,
                **known,
            )
        )
    return made


def seldom(code: sass.Code, hot: tuple[sass.Instruction, ...]) -> list[sass.Instruction]:
    """Instructions of a loop that its last turn alone runs: what a branch passes over, if it loads
    and stores in shared memory and neither copies nor multiplies on the tensor cores."""
    at = next(
        n for n in range(len(code.instructions)) if code.instructions[n : n + len(hot)] == hot
    )
    most: list[sass.Instruction] = []
    for number, instruction in enumerate(hot, at):
        target = code.target(instruction)
        if target is None or not number < target < at + len(hot):
            continue
        passed = list(code.instructions[number + 1 : target])
        kinds = {i.kind for i in passed}
        in_shared = kinds & {"LDS", "LDSM"} and kinds & {"STS", "STSM"}
        if in_shared and not kinds & {"HGMMA", "UTMALDG"}:
            most = max(most, passed, key=len)
    return most


def others(text: str, launches: list[Launch]) -> int:
    """Launches of XLA in a program."""
    return max(0, sum(hlo.launches(text, "kernel").values()) - len(launches))


@dataclass(frozen=True)
class Case:
    """A case of benchmarks/gpu.py."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    facts: Callable[[Launch], Facts | None]


Struct = jax.ShapeDtypeStruct
INNER, OUTER = 4096, 14336


def linears() -> list[Case]:
    """One of the matrices, with what prepares its rows."""
    from rooflax.ops.linear import gpu as linear
    from rooflax.ops.linear.args import LinearArgs
    from rooflax.ops.weights import as_operand, class_of

    def multiply(x: Any, w: Any) -> Any:
        return linear.matmul(LinearArgs(x, as_operand(w).in_stack()[0], dtype=x.dtype))

    made = []
    formats = ("w4a16", "bfloat16", "mxfp4-a16", "w8a16", "w8a8", "w8a16-g32", "w4a8", "fp8-a16")
    for format in formats:
        if format == "bfloat16":
            w: Any = Struct((INNER, OUTER), jax.numpy.bfloat16)
            nbytes = w.size * 2
        else:
            kind = class_of(format)
            w = kind(*kind.like(INNER, OUTER), format, (INNER,), (OUTER,))
            nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(w))
        rows = (1, 8) if format == "bfloat16" or format.endswith("a8") else (1, 8, 64, 512)
        for count in rows:
            x = Struct((count, INNER), jax.numpy.bfloat16)
            facts = _linear_facts(format, nbytes, count)
            made.append(Case(f"linear {format} rows {count}", multiply, (x, w), facts))
    return made


def _linear_facts(format: str, nbytes: float, rows: int) -> Callable[[Launch], Facts | None]:
    """Of a matmul with one matrix."""

    def facts(launch: Launch) -> Facts | None:
        return _facts(
            launch, format, (INNER, OUTER), nbytes, -(-rows // launch.grid.get("tile", 1))
        )

    return facts


def _facts(
    launch: Launch, format: str, sizes: tuple[int, int], nbytes: float, tile: int
) -> Facts | None:
    """Of one kernel that multiplies tiles of rows.

    Args:
        sizes: inputs and outputs of the weight.
    """
    (inner, outer), warpgroups, grid = sizes, launch.warpgroups, launch.grid
    if launch.name == "matmul_rows":
        tiles = -(-(inner // (16 if format in ("w8a16", "w8a8", "fp8-a16") else 32)) // 32)
        each = -(-outer // 16 // grid["panel"])  # panels of a program
        packs = 0 if tile > 1 or format in ("w8a8", "w4a8", "fp8-a16") else -(-tiles // warpgroups)
        turns = -(-tiles // warpgroups) * each
        return {"turns": turns, "loads": 1, "packs": packs, "nbytes": nbytes}
    if launch.name == "matmul_plain":
        tiles = inner // (128 * 16 // (2 * (outer // grid["panel"])))
        together = max(n for n in (1, 2, 4, 8) if tiles % n == 0)
        return {"turns": -(-tiles // together // warpgroups), "loads": 1, "nbytes": nbytes}
    if launch.name == "matmul_plain_tiles":
        turns, flops = inner // 64 // grid["split"], 2.0 * 64 * (-(-tile // 8) * 8) * 64
        return {"turns": turns, "waits": 1, "flops": flops, "nbytes": nbytes}
    if launch.name == "multiply_tiles":
        tile = -(-tile // 8) * 8
        together = 4 if tile <= 128 else 2
        stages = -(-(inner // 32) // together)
        turns = -(-stages // grid["split"])
        waits = together if format in ("w4a16", "w8a16-g32") else 1
        flops = 2.0 * 64 * warpgroups * tile * 32 * together
        return {"turns": turns, "waits": waits, "flops": flops, "nbytes": nbytes}
    if "panel" not in grid:  # rows of activations are cut once for all matrices
        return None
    # the experts' pipeline over plain weights, of 64 inputs a turn
    flops = 2.0 * 128 * (outer // grid["panel"]) * 64
    return {"turns": inner // 64, "waits": 1, "flops": flops, "nbytes": nbytes}


CONTEXT, HEADS, KV_HEADS = 8192, 64, 8


def attentions() -> list[Case]:
    """Eight rows decode, or two take 512 queries, over 8,192 tokens."""
    from rooflax.ops.attention import AttentionArgs, Paging
    from rooflax.ops.attention import gpu as attention
    from rooflax.ops.attention.pattern import Pattern
    from rooflax.ops.kv_pool import QuantizedPool, as_pool

    def attend(q: Any, k: Any, v: Any, *where: Any) -> Any:
        return attention.paged_attention(q, as_pool(k), as_pool(v), *where)

    made = []
    for kind, width, queries, window, patterned in ATTENTIONS:
        rows, table = 8 if queries == 1 else 2, CONTEXT // BLOCK
        size = (1 + rows * table, KV_HEADS, BLOCK, width)
        pool: Any = Struct(size, jax.numpy.dtype(kind))
        if kind == "int8":
            pool = QuantizedPool(pool, Struct(size[:3], jax.numpy.float32))  # type: ignore
        nbytes = sum(2 * leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool))
        dtype = "float32" if kind == "float32" else "bfloat16"
        q = Struct((rows, queries, HEADS, width), jax.numpy.dtype(dtype))
        shapes = ((rows, table), (rows,), (rows, queries), (rows,))
        pattern = Pattern(1024, first=64, stride=8, block=128) if patterned else None
        sinks: Any = Struct((HEADS,), jax.numpy.float32)
        args = AttentionArgs(0.1, window, sinks, pattern=pattern)
        paging: Any = Paging(*[Struct(s, jax.numpy.int32) for s in shapes])
        label = f"attention {kind} head {width} queries {queries}"
        label += f" window {window}" if window else " patterned True" if patterned else ""
        keys = CONTEXT if window is None else window + 2 * TILE
        keys = 2048 if patterned else keys
        facts = _attention_facts(kind, width, keys, nbytes * keys / CONTEXT)
        made.append(Case(label, attend, (q, pool, pool, paging, args), facts))
    rows, table, width, values = 8, CONTEXT // BLOCK, 576, 512
    pool = Struct((1 + rows * table, 1, BLOCK, width), jax.numpy.bfloat16)
    shapes = ((rows, table), (rows,), (rows, 1), (rows,))
    paging = Paging(*[Struct(s, jax.numpy.int32) for s in shapes])  # type: ignore[arg-type]
    sinks = Struct((16,), jax.numpy.float32)
    args = AttentionArgs(0.1, None, sinks, values_in_keys=values)
    q = Struct((rows, 1, 16, width), jax.numpy.bfloat16)

    def attend_latents(q: Any, pool: Any, *where: Any) -> Any:
        return attend(q, pool, pool, *where)

    facts = _attention_facts("bfloat16", width, CONTEXT, 2.0 * pool.size, values)
    label = f"attention bfloat16 head {width} queries 1 latent {values}"
    made.append(Case(label, attend_latents, (q, pool, paging, args), facts))
    return made


ATTENTIONS = (
    *[("bfloat16", w, q, None, False) for w in (128, 64) for q in (1, 512)],
    *[("bfloat16", w, 512, None, True) for w in (128, 64)],
    ("int8", 128, 1, None, False), ("float32", 64, 1, None, False),
    ("bfloat16", 64, 1, 128, False), ("bfloat16", 128, 1, None, True),
    ("bfloat16", 64, 512, 128, False), ("bfloat16", 512, 1, None, False),
)  # fmt: skip


def _attention_facts(
    kind: str, width: int, keys: int, nbytes: float, latent: int | None = None
) -> Callable[[Launch], Facts | None]:
    """Of a kernel that visits so many keys of each context.

    Args:
        latent: elements of keys that are the values.
    """

    shares = [0]

    def facts(launch: Launch) -> Facts | None:
        splits, near = launch.grid.get("split", 1), 1.0 if nbytes else IN_L2
        shares[0] = max(shares[0], splits)
        if launch.name == "attention_merged":  # eight shares a turn, or sixteen
            merged = -(-shares[0] // (8 if width % 128 == 0 else 16))
            return {"turns": merged, "loads": IN_L2, "nbytes": 0.0}
        if launch.name == "attention_wide":  # a product takes the time of 16 columns at least
            turns, pools = -(-(keys // TILE) // splits), 1 if latent else 2
            flops = 2.0 * TILE * 16 * (width + (latent or width))
            flops *= len(gpu_wide.PRODUCTS) if kind == "float32" else 1
            return {
                "turns": turns,
                "loads": 0.3 * pools,
                "waits": 2,
                "flops": flops,
                "nbytes": nbytes,
            }
        if launch.name == "attention_flash" or launch.shared > 4096:
            flops = 4.0 * TILE * TILE * width
            turns = -(-(keys // TILE) // splits)
            return {
                "turns": turns,
                "loads": 0.3 * near,
                "waits": 2,
                "flops": flops,
                "nbytes": nbytes,
            }
        turns = -(-(keys // BLOCK) // splits)
        loads = LOADS.get((kind, width), SUNK)
        return {"turns": turns, "loads": loads * near, "nbytes": nbytes}

    return facts


LOADS = {("bfloat16", 64): 1.3, ("bfloat16", 128): 2.5}
SUNK = 2.1
"""Latencies of a block that follow one another: the table's is a third of one. Values are asked for
with the keys, one load after the other between the scores, or else at once among these."""
IN_L2 = 0.5
"""Of memory's latency, for what the L2 cache holds."""


def steps() -> list[Case]:
    from rooflax.ops.attention import AttentionArgs, Projected, Sequences, gpu_step
    from rooflax.ops.kv_pool import as_pool

    def step(new: Any, k: Any, v: Any, *where: Any) -> Any:
        return gpu_step.attention_step(new, as_pool(k), as_pool(v), *where)

    made = []
    for width in (128, 64):
        group, table = 4, CONTEXT // BLOCK
        qkv = Struct((1, 1, KV_HEADS, group + 2, width), jax.numpy.bfloat16)
        angle: Any = Struct((1, 1, width // 2), jax.numpy.float32)
        new = Projected(qkv, angle, angle)  # type: ignore[arg-type]
        sinks: Any = Struct((KV_HEADS * group,), jax.numpy.float32)
        pool = Struct((1 + table, KV_HEADS, BLOCK, width), jax.numpy.bfloat16)
        one = Struct((1,), jax.numpy.int32)
        where: Any = Sequences(*[one] * 4, Struct((1, table), jax.numpy.int32), one, 1)  # type: ignore
        given = (new, pool, pool, where, AttentionArgs(0.1, None, sinks))
        facts = _attention_facts("bfloat16", width, CONTEXT, 2 * 2.0 * pool.size)
        made.append(Case(f"decode step head {width}", step, given, facts))
    return made


COUNT, CHOSEN, SIZE = 32, 4, 2880


def mixtures() -> list[Case]:
    """GPT-OSS 20B's experts."""
    from rooflax.ops.linear.prologue import ClampedSwiglu
    from rooflax.ops.moe import gpu as moe
    from rooflax.ops.moe.args import MoeArgs
    from rooflax.ops.weights import class_of

    def run(*arrays: Any) -> Any:
        return moe.experts(MoeArgs.of(*arrays, activation=ClampedSwiglu()))

    made = []
    for kind, tokens in (
        *[("mxfp4-a16", n) for n in (1, 8, 512)],
        ("bfloat16", 1),
        ("bfloat16", 512),
    ):
        sizes = ((SIZE,), (2, SIZE)), ((SIZE,), (SIZE,))
        weights: list[Any] = [Struct((COUNT, *a, *b), jax.numpy.bfloat16) for a, b in sizes]
        if kind != "bfloat16":
            of = class_of(kind)
            weights = [
                of(*of.like(SIZE, b[-1] * len(b), (COUNT,)), kind, a, b)  # type: ignore
                for a, b in sizes
            ]
        up, down = weights
        biases = (
            Struct((COUNT, 2, SIZE), jax.numpy.float32),
            Struct((COUNT, SIZE), jax.numpy.float32),
        )
        x, ids = (
            Struct((tokens, SIZE), jax.numpy.bfloat16),
            Struct((tokens, CHOSEN), jax.numpy.int32),
        )
        given = (
            x,
            ids,
            Struct((tokens, CHOSEN), jax.numpy.float32),
            up,
            biases[0],
            down,
            biases[1],
        )
        name, facts = f"experts {kind} tokens {tokens}", _expert_facts(kind, tokens)
        made.append(Case(name, run, given, facts))
    return made


def counts(tokens: int) -> list[int]:
    """Pairs of each expert in the benchmark's routes."""
    keys = jax.random.split(jax.random.key(0), 4)
    ids = jax.lax.top_k(jax.random.normal(keys[1], (tokens, COUNT)), CHOSEN)[1]
    return [int(n) for n in jax.numpy.bincount(ids.reshape(-1), length=COUNT)]


def _expert_facts(kind: str, tokens: int) -> Callable[[Launch], Facts | None]:
    of_expert = [n for n in counts(tokens) if n]
    bits = 16 if kind == "bfloat16" else 4.25
    asked: list[str] = []

    def facts(launch: Launch) -> Facts | None:
        outer = SIZE if asked else 2 * SIZE  # up, then down
        asked.append(launch.name)
        if "panel" not in launch.grid:
            asked.pop()
            return {}
        nbytes = len(of_expert) * SIZE * outer * bits / 8
        grid, by_rows = launch.grid, launch.name == "matmul_rows"
        if by_rows or launch.name == "matmul_plain":
            found = _facts(launch, kind, (SIZE, outer), nbytes, 1) or {}
            if by_rows and outer == SIZE and launch.warpgroups == CHOSEN:
                tiles = SIZE // 32 // 32 + 1  # a pair a warpgroup: each has all inputs
                found |= {"turns": tiles, "packs": tiles}
            return found
        tile = 128
        if kind != "bfloat16":
            tile = max(8, min(128, 1 << ((tokens * CHOSEN - 1) // COUNT).bit_length()))
        tiles = sum(-(-n // tile) for n in of_expert)
        results = 2 * 4 * tiles * tile * outer  # written in float32, and read by what comes next
        found = _facts(launch, kind, (SIZE, outer), nbytes + results, tile) or {}
        return found | {"programs": tiles * grid["panel"]}

    return facts


def every() -> list[Case]:
    return [*linears(), *attentions(), *steps(), *mixtures()]


def row(case: Case) -> tuple[dict[str, Any], list[str]]:
    """Compiles a case: the row that `gpu_speed` reads, and the faults of its machine code."""
    launches, said, text = recorded(case.function, case.arguments)
    kernels, found = gpu_compile.assembled(said)
    works_of = [asdict(work) for work in works(launches, said, kernels, case.facts)]
    made = {"name": case.name, "launches": works_of, "others": others(text, launches)}
    return made, gpu_compile.faults(case.name, found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    args = parser.parse_args()
    counts = {case.name: case.arguments.get("answers", 0) for case in listed(tiny=False)}
    kept = {row["name"]: row for row in json.loads(WORK.read_text())} if args.only else {}
    wrong: list[str] = []
    for case in every():
        if args.only and case.name not in args.only:
            continue
        with block_sizes.recording() as asked:
            rows = [row(case)]
        if case.name.startswith("experts"):  # whose two matmuls ask by one name
            asked.clear()
        for question in asked.values():
            for sizes in nearest(question, max(ANSWERS, counts.get(case.name, 0))):
                name = f"{case.name}: {question.kernel} {' '.join(map(str, sizes))}"
                with block_sizes.trying({question.key: sizes}):
                    rows.append(row(replace(case, name=name)))
        for found, faults in rows:
            sys.stderr.write(f"{json.dumps(found)}\n")
            kept[found["name"]] = found
            wrong += faults
    WORK.write_text(json.dumps(list(kept.values()), indent=1) + "\n")
    sys.stdout.write("".join(f"WRONG {line}\n" for line in wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
