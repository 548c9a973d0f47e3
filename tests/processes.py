"""One process of a job of several: `python -m tests.processes PORT N I JOB FOLDER MESH`.

Each prints what it found, as JSON on its last line.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

DEVICES = 4


def devices(count: int) -> dict[str, str]:
    """The environment of a process that simulates so many CPU devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    return os.environ | {"XLA_FLAGS": flags}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def ask(job: str, folder: Path, mesh: str, processes: int = 2) -> list[Any]:
    """What each process of a job found."""
    port = free_port()
    env = devices(DEVICES) | {"PJRT_NPROC": str(2 * DEVICES)}
    command = [sys.executable, "-m", "tests.processes", str(port), str(processes)]
    running = [
        subprocess.Popen(
            [*command, str(index), job, str(folder), mesh],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
            cwd=Path(__file__).parents[1],
        )
        for index in range(processes)
    ]  # fmt: skip
    done = [process.communicate(timeout=280) for process in running]
    for process, (_, errors) in zip(running, done, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in done]


def tokens(folder: str, mesh: str) -> Any:
    """What the model says, as the tests of meshes ask for it."""
    from tests.sharding import run

    return run(folder, mesh, {}, {})


def memory(folder: str, mesh: str) -> Any:
    """Anonymous memory while loading, and the bytes that this process's devices then hold."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec

    from rooflax import LLM
    from rooflax.nn.host_memory import AnonymousPeak, anonymous_bytes
    from rooflax.nn.mesh import make_mesh
    from rooflax.nn.placement import put

    ones = put(np.ones(8, np.float32), make_mesh(mesh), PartitionSpec())
    jax.block_until_ready(jax.jit(jnp.sum)(ones))
    before = anonymous_bytes()
    with AnonymousPeak() as sampled:
        llm = LLM(folder, mesh=mesh)
    leaves = jax.tree.leaves(llm.model.weights)
    held = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    assert sampled.peak is not None and before is not None
    return {"held": held, "grown": sampled.peak - before, "whole": llm.model.weights_bytes}


def train(folder: str, mesh: str) -> Any:
    """A run that all processes train, as the tests of its meshes have it."""
    from tests.support.train import meshes

    config = meshes.settings("full", mesh=mesh, checkpoint_every=2)
    return meshes.run(config, Path(folder) / "run")


def main(port: str, count: str, index: str, job: str, folder: str, mesh: str) -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    jax.distributed.initialize(f"localhost:{port}", int(count), int(index))
    found = {"tokens": tokens, "memory": memory, "train": train}[job](folder, mesh)
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
