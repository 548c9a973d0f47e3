"""Two promises, measured: how soon a second start answers, and what a quantised model takes.

    python benchmarks/start_and_memory.py [FOLDER]
    python benchmarks/start_and_memory.py --start ROOFLAX [ROOFLAX]   second starts of these

Start: `rooflax generate` on GPT-2 124M, saved as a folder, from the start of the process until the
first byte of its text comes out, beside `import jax` alone in the same run. Limit: that plus 1.2 s,
nothing compiled, until the end of the text either.

Memory: Qwen2.5 0.5B written by `rooflax quantize` in int4, then loaded and decoded; and quantised
while it is loaded. Anonymous memory above the process's own after its first jit, as a share of the
file's size. Limits: 1.3 while decoding, 1.5 at any time while loading.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

START_LIMIT_S, DECODE_LIMIT, LOAD_LIMIT = 1.2, 1.3, 1.5
TRIALS = 7
ROOFLAX = str(Path(sys.executable).parent / "rooflax")

SAVE = """
import sys
import rooflax
from rooflax.loading.model_info import embedded_folder
model = rooflax.load(sys.argv[1])
rooflax.save(model, sys.argv[2], dtype="float32", files_from=embedded_folder())
"""
MEASURE = """
import json, sys
import jax, jax.numpy as jnp
from rooflax import LLM, SamplingParams
from rooflax.nn.host_memory import AnonymousPeak, anonymous_bytes
jax.jit(lambda x: x + 1)(jnp.zeros(4)).block_until_ready()
baseline = anonymous_bytes()
with AnonymousPeak() as loading:
    llm = LLM(sys.argv[1], quantize=sys.argv[2] or None)
loaded = anonymous_bytes()
with AnonymousPeak() as decoding:
    llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=32, temperature=0, ignore_eos=True))
print(json.dumps({
    "loading": loading.peak - baseline, "loaded": loaded - baseline,
    "decoding": decoding.peak - baseline, "weights": llm.model.weights_bytes}))
"""


def timed(*command: str) -> tuple[float, str]:
    """Seconds that a process takes from its start to its end, and what it printed."""
    begin = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return time.perf_counter() - begin, done.stdout


def first_byte(*command: str) -> tuple[float, str]:
    """Seconds from a process's start until its first byte of output, and its stderr."""
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1), "it printed nothing"
        seconds = time.perf_counter() - begin
        _, err = process.communicate()
    assert process.returncode == 0, err.decode()
    return seconds, err.decode()


def start(folder: Path, rooflax: tuple[str, ...] = (ROOFLAX,)) -> dict[str, Any]:
    """Second starts of each command next to `import jax`, interleaved."""
    arguments = ("generate", str(folder), "-p", "def fibonacci(n):", "-n", "16")
    for command in rooflax:
        timed(command, *arguments)  # compiles, and keeps the programs
    imports: list[float] = []
    starts: dict[str, list[float]] = {command: [] for command in rooflax}
    compiled = 0
    for _ in range(TRIALS):
        imports.append(timed(sys.executable, "-c", "import jax")[0])
        for command in rooflax:
            seconds, statistics = first_byte(command, *arguments)
            starts[command].append(seconds)
            found = re.search(r"\((\d+) compilations?\)", statistics)
            compiled += int(found.group(1)) if found else 0
    over = {command: median(took) - median(imports) for command, took in starts.items()}
    return {
        "import_jax_s": imports,
        "first_token_s": starts,
        "over_s": over,
        "compilations": compiled,
        "met": max(over.values()) <= START_LIMIT_S and compiled == 0,
    }


def memory(folder: Path, quantize: str, file_bytes: int) -> dict[str, Any]:
    """Shares of the file's size."""
    found = json.loads(timed(sys.executable, "-c", MEASURE, str(folder), quantize)[1])
    shares = {name: value / file_bytes for name, value in found.items()}
    met = shares["decoding"] <= DECODE_LIMIT and shares["loading"] <= LOAD_LIMIT
    return {**shares, "file_bytes": file_bytes, "met": met}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, help="keeps the models of the measurement")
    parser.add_argument(
        "--start", nargs="+", metavar="ROOFLAX", help="only second starts, of these"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        base = args.folder or Path(made)
        if args.start:
            if not (base / "gpt2").exists():
                timed(sys.executable, "-c", SAVE, "preset:gpt2", str(base / "gpt2"))
            found = start(base / "gpt2", tuple(args.start))
            print(json.dumps(found, indent=1))
            return 0 if found["met"] else 1
        gpt2, qwen, packed = base / "gpt2", base / "qwen", base / "qwen-int4"
        for preset, folder in (("gpt2", gpt2), ("qwen2.5-0.5b", qwen)):
            if not folder.exists():
                timed(sys.executable, "-c", SAVE, f"preset:{preset}", str(folder))
        if not packed.exists():
            timed(ROOFLAX, "quantize", str(qwen), "-q", "int4", "-o", str(packed), "--quiet")
        size = (packed / "model.safetensors").stat().st_size
        results = {
            "second start, GPT-2 124M": start(gpt2),
            "Qwen2.5 0.5B, its int4 folder": memory(packed, "", size),
            "Qwen2.5 0.5B, quantised while loading": memory(qwen, "int4", size),
        }
    print(json.dumps(results, indent=1))
    return 0 if all(result["met"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
