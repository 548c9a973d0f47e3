"""One row in a process of its own: a Workload as JSON on stdin, its figures as JSON on stdout."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from rooflax import processes
from rooflax.bench.workload import Workload
from rooflax.errors import EngineError, RequestError, RooflaxError

FAILED, WRONG = 1, 2
DETERMINISTIC_FLAGS = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"


def measure_apart(work: Workload, job: str = "measure", **arguments: Any) -> dict[str, Any]:
    """`measure` in a new process, so that memory peaks are this row's own.

    Args:
        job: "measure", "breakdown" for a profile, or "kernels" for those that would run.
        arguments: of the job, as JSON can say them.

    Returns:
        {"result": what the job gave, "environment": of that process}.

    Raises:
        RequestError: the row's settings are at fault.
        EngineError: the process failed.
    """
    done = processes.run(
        "rooflax.bench.worker",
        [job],
        stdin=json.dumps({"work": work.as_json(), "arguments": arguments}),
        environment=_environment(work),
    )
    if done.returncode == 0:
        return json.loads(done.stdout)
    reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no reason given"
    if done.returncode < 0:
        reason = f"its process was ended by signal {-done.returncode} (out of memory?)"
    error = (RequestError if done.returncode == WRONG else EngineError)(reason)
    error.add_note(done.stderr)  # shown by --verbose
    raise error


def _environment(work: Workload) -> dict[str, str]:
    """Ours; with XLA's determinism flags in front of the user's, which win."""
    if not work.deterministic:
        return dict(os.environ)
    stated = os.environ.get("XLA_FLAGS", "")
    return {**os.environ, "XLA_FLAGS": f"{DETERMINISTIC_FLAGS} {stated}".strip()}


def main(job: str) -> int:
    """Runs a job; what it prints goes to stderr."""
    request = json.load(sys.stdin)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            document = _run(job, Workload.from_json(request["work"]), request["arguments"])
    except RooflaxError as error:
        sys.stderr.write(f"{error}\n")
        return FAILED if isinstance(error, EngineError) else WRONG
    except RuntimeError as error:
        no_platform = "Unable to initialize backend" in str(error)
        sys.stderr.write(" ".join(str(error).split())[:300] + "\n")
        return WRONG if no_platform else FAILED
    json.dump(document, sys.stdout)
    return 0


def _run(job: str, work: Workload, arguments: dict[str, Any]) -> dict[str, Any]:
    import jax

    from rooflax.bench.environment import environment

    backend = jax.default_backend()
    if work.platform not in (None, backend):  # JAX takes the CPU where a plugin is missing
        raise RequestError(f"the platform {work.platform!r} is not here: JAX runs on {backend!r}.")
    if job == "breakdown":
        from rooflax.bench.breakdown import breakdown

        return {"result": breakdown(work, **arguments), "environment": environment()}
    if job == "kernels":
        from rooflax.ops.kernels import check_kernels, chosen

        check_kernels(work.options.kernels)
        return {"result": chosen(work.options.kernels), "environment": environment()}
    from rooflax.bench.measure import measure

    return {"result": measure(work, **arguments), "environment": environment()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
