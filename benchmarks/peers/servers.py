"""`rooflax serve` beside llama.cpp's server, under the same load, in turns.

    python benchmarks/peers/servers.py MODEL FILE.gguf --llama-server PATH [--quantize int8]

Of 48 requests of 64 prompt and 64 new tokens, 16 at once, each round has its own, so that no prefix
cache answers. The server that is not asked is stopped (SIGSTOP). README.md says how to build
llama.cpp's server and how to write FILE.gguf, the same weights in its format.
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
from statistics import median
from typing import Any

from rooflax.bench.load import Load, Target, run_load
from rooflax.bench.statistics import paired_ratio
from rooflax.http_client import Server

SLOTS, REQUESTS, TOKENS, START_S = 16, 48, 64, 600


@contextlib.contextmanager
def running(name: str, command: list[str]) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server that answers /health, and its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with open(f"build/peers/{name}.log", "wb") as log:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("gguf", metavar="FILE.gguf")
    parser.add_argument("--llama-server", metavar="PATH", required=True)
    parser.add_argument("--quantize", choices=("int8", "int4"))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--least", type=float, default=0.0, help="exit with 1 below this ratio")
    args = parser.parse_args()
    threads = str(len(os.sched_getaffinity(0)))
    os.makedirs("build/peers", exist_ok=True)
    ours = [sys.executable, "-m", "rooflax", "serve", args.model, "--max-num-seqs", str(SLOTS)]
    ours += ["--max-model-len", "512", *(["-q", args.quantize] if args.quantize else [])]
    theirs = [args.llama_server, "-m", args.gguf, "-np", str(SLOTS), "-c", str(512 * SLOTS)]
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
    load = Load(
        num_requests=REQUESTS, prompt_tokens=TOKENS, output_tokens=TOKENS, concurrency=SLOTS,
        seed=seed,
    )  # fmt: skip
    async with Target(Server.of(url)) as target:
        return await run_load(target, load)


if __name__ == "__main__":
    sys.exit(main())
