"""Compiles the GPU kernels and whole engine steps for an H200 where there is none.

    make gpu-compile                        everything, in an environment of its own
    python tools/gpu_compile.py --only linear   some, by their names
    python tools/gpu_compile.py --write     and keeps the table for this version of JAX

XLA compiles for a described device, and Mosaic GPU's kernels on the way; ptxas assembles them for
sm_90a and nvdisasm reads them back. XLA's autotuning is off: it would need the card, so that which
of cuBLAS's algorithms runs is not known. This shows that they compile, what they take, and that
they wait; not that they compute, nor how fast.

The table is compared with the one that is committed for this version of JAX: what spills, does not
wait, launches more or takes more instructions is an error, and so is a kernel that takes more than
LOWERING_S seconds of processor time to lower.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "src"), str(ROOT / "tools")]
WHEELS = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cu13"
os.environ |= {
    "JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_SASS": "1",
}  # fmt: skip
if "CUDA_ROOT" not in os.environ:  # JAX takes "None" for it where none is named
    found = shutil.which("nvcc")
    os.environ["CUDA_ROOT"] = str(WHEELS if WHEELS.exists() else Path(found or "").parents[1])
os.environ["PATH"] += f":{os.environ['CUDA_ROOT']}/bin"

import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402

from rooflax.ops import accelerator, native  # noqa: E402

accelerator.platform = lambda: "gpu"  # what dispatch believes while it traces
native.is_ready = lambda: False  # even where a CPU's kernels are built

import hlo  # noqa: E402
import sass  # noqa: E402
from gpu_docs import TABLES, Table, committed, kernels_and_steps  # noqa: E402

LOWERING_S = 4.0
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
Row = dict[str, Any]


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """What C++ prints on stdout meanwhile."""
    said: list[str] = []
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        before = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield said
        finally:
            os.dup2(before, 1)
            os.close(before)
            file.seek(0)
            said.append(file.read().decode(errors="replace"))


def compiled(function: Callable[..., Any], arguments: Any, **how: Any) -> tuple[Any, str, Row]:
    """A program for the described device, what its assembler said, and seconds of the processor."""
    device = topologies.get_topology_desc(
        "h200", platform="cuda", target_config=H200, topology="1x1x1"
    ).devices[0]
    place = jax.sharding.SingleDeviceSharding(device)
    jitted = jax.jit(function, in_shardings=place, out_shardings=place, **how)
    begin = time.process_time()
    lowered = jitted.lower(*arguments)
    lowering = time.process_time() - begin
    with heard() as said:
        program = lowered.compile()
    seconds = {
        "lowering_s": round(lowering, 2),
        "compiling_s": round(time.process_time() - begin - lowering, 2),
    }
    return program, said[0], seconds


def assembled(said: str) -> tuple[list[Row], Row]:
    """Per kernel of what the assembler printed: registers, spilled bytes, and its code. Of all
    kernels, what must be nothing."""
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", said)]
    spilled = [int(n) for n in re.findall(r"stack frame, (\d+) bytes spill stores", said)]
    codes = [sass.Code.parsed(part) for part in said.split("//--------------------- .text.")[1:]]
    each = zip(registers, spilled, codes, strict=True)
    return [{"registers": r, "spilled": s, "code": c} for r, s, c in each], {
        "spilled": sum(spilled),
        "unawaited": sum(code.unawaited() for code in codes),
        "overlooked": sum(len(code.overlooked()) for code in codes),
        "serialized": said.count("wgmma.mma_async instructions are serialized"),
    }


def kernel_row(case: Any) -> Row:
    """Of a `gpu_cases.Case`."""
    program, said, row = compiled(case.function, case.arguments)
    kernels, faults = assembled(said)
    row["kernels"] = len(kernels)
    row["registers"] = max((k["registers"] for k in kernels), default=0)
    row |= faults
    row["launches"] = sum(hlo.launches(program.as_text(), "kernel").values())
    if case.weights and kernels:
        code = max((k["code"] for k in kernels), key=lambda code: len(code.hot_loop()))
        each = sass.per_weight(code, case.weights, case.products)
        row["per_weight"] = round(each, 2) if each else None
    return row


def step_row(step: Any, program_of: Callable[..., Any]) -> Row:
    """Of a `gpu_steps.Step`.

    Args:
        program_of: function and arguments of a step with so many layers.
    """
    rows, counted, most = [], [], []
    for layers in step.layers:
        function, arguments = program_of(step, layers)
        program, said, row = compiled(function, arguments, donate_argnums=1)
        row |= assembled(said)[1]
        row["temporary_mb"] = round(program.memory_analysis().temp_size_in_bytes / 1e6, 1)
        rows.append(row)
        counted.append(hlo.launches(program.as_text(), step.kind))
        most.append(hlo.launches(program.as_text(), step.kind, asked=True).total())
    each = step.layers[1] - step.layers[0]
    total = [sum(c.values()) for c in counted]
    row = {key: sum(r[key] for r in rows) for key in FAULTS}
    row |= {key: rows[-1][key] for key in ("lowering_s", "compiling_s", "temporary_mb")}
    row["launches"] = (total[1] - total[0]) / each
    row["besides"] = total[0] - row["launches"] * step.layers[0]
    if most[0] > total[0]:  # there are conditionals, of what requests ask for
        row["asked"] = row["besides"] + most[0] - total[0]
    kinds = counted[1] - counted[0]
    row["of_a_layer"] = {kind: n / each for kind, n in sorted(kinds.items())}
    return row


DEFECTS = (
    ("experts bfloat16, tokens 1024", "wgmma_wait"),
    ("linear w8a16, rows 64", "wgmma_wait"),
    ("linear w4a16, rows 64", "barrier_arrive"),
    ("linear w4a16, rows 64", "barrier_wait"),
    ("attention llama bfloat16, queries 512", "barrier_wait"),
)
"""Kernels, and what they do no more: the first is the experts' kernel that raced."""


def control(cases: dict[str, Any]) -> list[str]:
    """Kernels without a wait must be found, or nothing that is found means much."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    wrong = []
    for name, wait in DEFECTS:
        case, kept = cases[name], getattr(plgpu, wait)
        setattr(plgpu, wait, lambda *_: None)
        try:  # traced for itself: a function is traced once
            row = kernel_row(replace(case, function=lambda *a, case=case: case.function(*a)))
        finally:
            setattr(plgpu, wait, kept)
        if not row["unawaited"]:
            wrong.append(f"{name} without {wait} was not found")
    return wrong


FAULTS = {
    "spilled": "bytes of registers are spilled",
    "unawaited": "copies and reads of shared memory do not wait for each other",
    "overlooked": "waits would not be missed",
    "serialized": "times the assembler makes products wait for each other",
}
"""Of a kernel or a step, where it is more than nothing."""
EXACT = ("launches", "besides", "asked", "kernels")
"""What must not be more than in the committed table; instructions may vary by a twentieth."""


def faults(name: str, row: Row) -> list[str]:
    """Lists what must be nothing in the machine code of a kernel or a step, and is not."""
    return [f"{name}: {row[key]} {what}" for key, what in FAULTS.items() if row[key]]


def worse(name: str, row: Row, before: Row | None) -> list[str]:
    """What is wrong with a row, beside the committed one."""
    if "failed" in row:
        return [f"{name}: {row['failed']}"]
    found = faults(name, row)
    if "registers" in row and row["lowering_s"] > LOWERING_S:  # of a kernel, not of a step
        found.append(f"{name}: lowering took {row['lowering_s']} s of processor time")
    if before is None:
        return [*found, f"{name}: not in the committed table; --write puts it there"]
    for key in EXACT:
        if row.get(key, 0) > before.get(key, 0):
            found.append(f"{name}: {key} {row[key]}, before {before.get(key, 0)}")
    if (row.get("per_weight") or 0) > 1.05 * (before.get("per_weight") or 1e9):
        found.append(f"{name}: {row['per_weight']} instructions a weight")
    return found


def measured(rows: Iterable[tuple[str, str, Callable[[], Row]]]) -> Table:
    """The table of these: kernels or steps, a name, and what measures it."""
    table: Table = {"kernels": {}, "steps": {}}
    for part, name, measure in rows:
        try:
            row = measure()
        except Exception as error:
            row = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        sys.stderr.write(f"{name}: {json.dumps(row)}\n")
        table[part][name] = row
    return table


def keep(name: str, table: Table) -> None:
    """Puts rows into a committed table."""
    whole = committed(name)
    for part, rows in table.items():
        whole[part] |= rows
    (TABLES / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n")


def main() -> int:
    import gpu_cases
    import gpu_steps

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--write", action="store_true", help="keep the table for this JAX")
    args = parser.parse_args()
    kept = f"jax-{jax.__version__}"
    before = committed(kept)
    cases = {case.name: case for group in gpu_cases.GROUPS for case in group()}
    rows: list[tuple[str, str, Callable[[], Row]]] = [
        ("kernels", name, partial(kernel_row, case)) for name, case in cases.items()
    ]
    rows += [
        ("steps", step.name, partial(step_row, step, gpu_steps.program))
        for step in gpu_steps.every()
    ]
    wrong = [] if args.only else control(cases)
    if args.only:
        rows = [row for row in rows if any(asked in row[1] for asked in args.only)]
    table = measured(rows)
    for part, of_part in table.items():
        for name, row in of_part.items():
            wrong += worse(name, row, before[part].get(name))
    table = {part: without_failures(of_part) for part, of_part in table.items()}
    if args.write:
        keep(kept, table)
        wrong = [w for w in wrong if "not in the committed table" not in w]
    sys.stdout.write(f"JAX {jax.__version__}, sm_90a, autotuning off\n\n")
    sys.stdout.write("\n".join(kernels_and_steps(table)) + "\n")
    sys.stdout.write("".join(f"WRONG {line}\n" for line in wrong))
    return bool(wrong)


def without_failures(rows: dict[str, Row]) -> dict[str, Row]:
    return {name: row for name, row in rows.items() if "failed" not in row}


if __name__ == "__main__":
    sys.exit(main())
