"""`rooflax doctor`: what is here to run on, and what is missing."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform as python_platform
from dataclasses import asdict
from typing import Any

from rooflax import __version__
from rooflax.cli import flags, platform, terminal
from rooflax.cli.parser import Parser
from rooflax.nn.execution import ExecutionOptions, gib
from rooflax.nn.host_memory import available_bytes

TAKES_MODEL = False
DEPENDENCIES = (
    "jax", "jaxlib", "numpy", "ml_dtypes", "tokenizers", "jinja2", "huggingface_hub", "optax",
    "tqdm",
)  # fmt: skip
OPTIONAL = ("transformers", "torch", "matplotlib")


def add_flags(parser: Parser) -> None:
    flags.add_device(parser)
    parser.group("kernels").add_argument(
        "--time-kernels", action="store_true",
        help="time the kernels' variants again, for the formats of models that ran here",
    )  # fmt: skip
    flags.add_output(parser, progress=False)


def run(args: argparse.Namespace) -> int:
    """Prints the findings."""
    platform.start_jax(args)
    report = {
        "versions": versions(),
        "devices": devices(),
        "host": host(),
        "kernels": kernels(),
        "variants": variants(again=args.time_kernels),
        "defaults": defaults(),
        "compile_cache": compile_cache(),
        "hub": hub(),
    }
    if args.json:
        terminal.print_json(report)
    else:
        _print(report)
    return 0


def versions() -> dict[str, str | None]:
    """Versions of Python, rooflax and its dependencies; None if not installed."""
    by_name: dict[str, str | None] = {
        "python": python_platform.python_version(),
        "rooflax": __version__,
    }
    for name in (*DEPENDENCIES, *OPTIONAL):
        try:
            by_name[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            by_name[name] = None
    return by_name


def devices() -> list[dict[str, Any]]:
    """JAX's devices; memory in bytes where the runtime says."""
    import jax

    rows = []
    for device in jax.devices():
        limit = (device.memory_stats() or {}).get("bytes_limit")
        rows.append(
            {"platform": device.platform, "kind": device.device_kind, "memory_bytes": limit}
        )
    return rows


def host() -> dict[str, Any]:
    """Threads and memory."""
    stated = os.environ.get(platform.THREADS_VARIABLE)
    return {
        "cores": os.cpu_count(),
        "threads": int(stated) if stated and stated.isdigit() else None,
        "available_bytes": available_bytes(),
    }


def kernels() -> dict[str, dict[str, str]]:
    """Per operation, each implementation: for which weights (or caches) it is used, for which not
    and why, "available", or why it is not there."""
    from rooflax.ops import native
    from rooflax.ops.dispatch import MISSING, TRAINED
    from rooflax.ops.kernels import OPERATIONS, by_default

    by_label = {}
    for label, cases in by_default().items():
        here = OPERATIONS[label].available()
        states = {}
        for name in (each for each in OPERATIONS[label].backends if each != TRAINED):
            used = [case for case, ran in cases.items() if ran.implementation == name]
            states[name] = "available"
            if name not in here:
                states[name] = f"cannot run: {MISSING[name]()}"
            elif used:
                states[name] = "used" if len(used) == len(cases) else f"used for {', '.join(used)}"
            whys: dict[str, list[str]] = {}
            for case, ran in cases.items():
                for why in [why for other, why in ran.passed_over if other == name in here]:
                    whys.setdefault(why, []).append(case)
            for why, passed_over in whys.items():
                states[name] += f"; not for {', '.join(passed_over)}: {why}"
        if "native" in here:
            states["native"] += f" ({native.status().reason})"
        by_label[label] = states
    return by_label


def variants(*, again: bool) -> dict[str, dict[str, dict[str, Any]]]:
    """Per weight format and kind of work, the native kernels' variant and the median microseconds
    of each; of the formats of models that ran on this machine.

    Args:
        again: they are measured now.
    """
    from rooflax.ops import native
    from rooflax.ops import variants as measured

    if not native.is_ready():
        return {}
    table = measured.measure_again() if again else measured.read_table(measured.table_path())
    return {
        name: {
            work: {
                "used": used,
                "us": {n: round(1e6 * s, 1) for n, s in entry.seconds.get(work, {}).items()},
            }
            for work, used in entry.variants().items()
        }
        for name, entry in table.items()
    }


def defaults() -> dict[str, str]:
    """Defaults on this machine of settings that no flag sets."""
    from rooflax.engine.compilation import compiler_options
    from rooflax.ops.dot import FLOAT32

    options = asdict(ExecutionOptions())
    words = {True: "yes", False: "no"}
    return {
        **{name: str(words.get(value, value)) for name, value in options.items()},
        "layers": options["layers"] or "scan where kernels read stacked weights, else unrolled",
        "kernels": options["kernels"] or "the best of each operation, as above",
        "decode_steps": str(options["decode_steps"] or "as many as fit into a moment, at most 32"),
        "float32_products": FLOAT32.name.lower(),
        "xla_options": _xla_options(compiler_options(options["kernels"])),
    }


def _xla_options(asked: dict[str, bool] | None) -> str:
    flags = os.environ.get("XLA_FLAGS") or "XLA's own; XLA_FLAGS is not set"
    return "; the engine's: ".join([flags, *(f"{name}={on}" for name, on in (asked or {}).items())])


def compile_cache() -> dict[str, Any]:
    """Folder of the compile cache, and whether a tiny program was found there."""
    import jax
    import numpy as np

    from rooflax.engine.compilation import count_compilations, enable_persistent_cache

    folder = enable_persistent_cache()

    def doctors_program(x: Any) -> Any:
        return x * 2 + 1

    with count_compilations() as counts:
        jax.jit(doctors_program)(np.arange(3, dtype=np.float32)).block_until_ready()
    state = "hit" if counts.cache_hits else "miss" if counts.cache_misses else "off"
    return {"folder": str(folder) if folder else None, "tiny_program": state}


def hub() -> dict[str, Any]:
    """The hub's cache folder, and whether the hub may be reached."""
    from huggingface_hub import constants

    return {"folder": str(constants.HF_HUB_CACHE), "offline": bool(constants.HF_HUB_OFFLINE)}


def _print(report: dict[str, Any]) -> None:
    _section("versions", [(n, v or "not installed") for n, v in report["versions"].items()])
    rows = [(d["platform"], d["kind"], _size(d["memory_bytes"])) for d in report["devices"]]
    _section("devices", rows)
    host = report["host"]
    threads = f"{host['threads'] or 'as many as JAX likes'}"
    _section(
        "host",
        [
            ("threads", f"{threads} of {host['cores']} cores"),
            ("memory", f"{_size(host['available_bytes'])} free"),
        ],
    )
    rows = []
    for operation, states in report["kernels"].items():
        for name, state in states.items():
            rows.append((operation, name, state))
            operation = ""
    _section("kernels", rows)
    timed: list[tuple[str, ...]] = [
        (name, work, medians["used"], ", ".join(f"{n} {us:.0f}" for n, us in medians["us"].items()))
        for name, works in report["variants"].items()
        for work, medians in works.items()
    ]
    title = "variants of the native kernels, and median microseconds"
    _section(title, timed or [("measured when a large model first runs",)])
    _section("defaults", [(n.replace("_", " "), text) for n, text in report["defaults"].items()])
    cache, offline = report["compile_cache"], "yes" if report["hub"]["offline"] else "no"
    _section(
        "caches",
        [
            ("compiled programs", cache["folder"] or "cannot be kept: the folder is not writable"),
            ("a tiny program", cache["tiny_program"]),
            ("downloaded models", report["hub"]["folder"]),
            ("HF_HUB_OFFLINE", offline),
        ],
    )


def _section(title: str, rows: list[tuple[str, ...]]) -> None:
    print(title)
    for line in terminal.table(rows):
        print(f"  {line}")


def _size(count: int | None) -> str:
    return "" if count is None else gib(count)
