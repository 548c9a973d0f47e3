"""Starting a job of `worker` in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rooflax.bench.workload import Workload

ROOT = Path(__file__).resolve().parents[2]


def apart(job: str, work: Workload, label: str, **arguments: Any) -> dict[str, Any]:
    """What `worker.JOBS[job]` gives, measured in a new process without a compile cache.

    Raises:
        RuntimeError: the process failed; with the end of what it said.
    """
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.founding.worker", job],
        input=json.dumps({"work": work.as_json(), "arguments": arguments}),
        cwd=ROOT,
        env={"JAX_PLATFORMS": "cpu", **os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        end = "\n".join(done.stderr.strip().splitlines()[-12:])
        raise RuntimeError(f"{label}: exit status {done.returncode}\n{end}")
    say(f"  {time.perf_counter() - start:6.1f} s  {label}")
    return json.loads(done.stdout)


def say(line: str) -> None:
    """Progress, on stderr."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
