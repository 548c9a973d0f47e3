"""`rooflax serve` beside llama.cpp's server, under the same load, in turns.

    python benchmarks/peers/servers.py gpt2 --quantize int8 --llama-server PATH

Both read one checkpoint of random weights (checkpoint.py); llama.cpp's file of it is Q8_0 for int8
and Q4_0 for int4. Of 48 requests of 64 prompt and 64 new tokens, 16 at once, each round has its
own, so that no prefix cache answers. The server that is not asked is stopped (SIGSTOP). README.md
says how to build llama.cpp's server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from prepare import made

from rooflax.bench.figures import paired_ratio
from rooflax.bench.load import LoadTarget, ServerLoad, run_load
from rooflax.http_client import Server

FILES = Path("build/peers")
TYPES = {"int8": "Q8_0", "int4": "Q4_0"}
SLOTS, REQUESTS, TOKENS, START_S = 16, 48, 64, 600


@contextlib.contextmanager
def running(name: str, command: list[str]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server that answers /health, and its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with open(FILES / f"{name}.log", "wb") as log:
        full = [*command, "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(full, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(START_S):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            if process.poll() is not None:
                raise SystemExit(f"{name} ended with {process.returncode}; see {log.name}")
            time.sleep(1)
        yield url, process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait()


def files_of(model: str, kind: str) -> tuple[Path, Path]:
    """A checkpoint, and llama.cpp's file of it; made when first asked for, kept."""
    FILES.mkdir(parents=True, exist_ok=True)
    script = Path(__file__).parent / "checkpoint.py"
    checkpoint = made(FILES / model, lambda part: [[sys.executable, script, model, part]])
    command = [sys.executable, "-m", "rooflax", "quantize", checkpoint, "--gguf", kind]
    gguf = made(
        FILES / f"{model}.{kind.lower()}.gguf",
        lambda part: [[*command, "--force", "-o", part]],
        suffix=".part.gguf",
    )
    return checkpoint, gguf


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL", help="a preset's name")
    parser.add_argument("--llama-server", metavar="PATH", required=True)
    parser.add_argument("--quantize", choices=TYPES, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--least", type=float, default=0.0, help="exit with 1 below this ratio")
    args = parser.parse_args()
    threads = str(len(os.sched_getaffinity(0)))
    checkpoint, gguf = files_of(args.model, TYPES[args.quantize])
    ours = [sys.executable, "-m", "rooflax", "serve", str(checkpoint), "-q", args.quantize]
    ours += ["--max-num-seqs", str(SLOTS), "--max-model-len", "512"]
    theirs = [args.llama_server, "-m", str(gguf), "-np", str(SLOTS), "-c", str(512 * SLOTS)]
    theirs += ["-t", threads, "-tb", threads]
    with running("rooflax-serve", ours) as rooflax, running("llama-server", theirs) as llama:
        sides = {"rooflax": rooflax, "llama.cpp": llama}
        for _, process in sides.values():
            process.send_signal(signal.SIGSTOP)
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(args.rounds + 1):
            for name in list(sides) if number % 2 else list(reversed(sides)):
                url, process = sides[name]
                process.send_signal(signal.SIGCONT)
                found = asyncio.run(asked(url, number))
                process.send_signal(signal.SIGSTOP)
                if number:  # the first one warms up
                    rates[name].append(found["output_tok_per_s"])
    ratio = paired_ratio(rates["llama.cpp"], rates["rooflax"])
    print(json.dumps({"rates": rates, "ratio": ratio.as_json()}))
    for name, each in rates.items():
        print(f"{name:10s} {median(each):7.0f} tok/s")
    print(f"ratio      {ratio.ratio:7.2f} ({ratio.low:.2f} to {ratio.high:.2f})")
    return 0 if ratio.ratio >= args.least else 1


async def asked(url: str, seed: int) -> dict[str, Any]:
    """What one server made of a round's requests."""
    load = ServerLoad(
        num_requests=REQUESTS, prompt_tokens=TOKENS, output_tokens=TOKENS, concurrency=SLOTS,
        seed=seed,
    )  # fmt: skip
    async with LoadTarget(Server.of(url)) as target:
        return await run_load(target, load)


if __name__ == "__main__":
    sys.exit(main())
