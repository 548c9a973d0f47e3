"""A process with four simulated devices that trains tiny models on meshes.

`python -m tests.support.train.meshes FOLDER [more]` prints what it found, as JSON on its last
line; with `more`, of further meshes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.processes import devices

DEVICES = 4
STEPS = 4
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 16}  # fmt: skip
"""Heads for the native kernel, which is how `data` and `fsdp` run attention."""
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "dora": {
        "fine_tune_type": "dora",
        "lora_dropout": 0.2,
        "layers": "scan",
        "micro_batches": 2,
    },
    "dpo": {"train_mode": "dpo"},
}
MESHES: dict[str, tuple[str | None, ...]] = {
    "full": (None, "fsdp=2,tensor=2"),
    "dora": (None, "fsdp=4"),
    "dpo": (None, "data=2,fsdp=2"),
}
"""Each axis once for all weights: `resumed` begins with fsdp=4 and ends on data=2."""

MORE_MESHES: dict[str, tuple[str | None, ...]] = {"full": (None, "data=2", "fsdp=4", "tensor=2")}


def found(folder: Path, *further: str) -> Any:
    """What the process prints."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.train.meshes", str(folder), *further],
        capture_output=True, text=True, timeout=560, cwd=Path(__file__).parents[3],
        env=devices(DEVICES) | {"PJRT_NPROC": str(2 * DEVICES)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


def settings(kind: str, **changes: Any) -> Any:
    from tests.support.train import tiny

    return tiny.settings(
        **{"steps": STEPS, "batch_size": 8, "seq_len": 24, "learning_rate": 1e-2}
        | KINDS[kind]
        | changes
    )


def corpus(*, is_whole: bool = False) -> Any:
    from tests.support.train import tiny

    ids = np.random.RandomState(5).randint(1, tiny.VOCAB, 2400)
    ids[::17] = tiny.SEPARATOR
    made = tiny.corpus_of(ids)
    return dataclasses.replace(made, info=dataclasses.replace(made.info, is_whole=is_whole))


def run(config: Any, folder: Path) -> dict[str, Any]:
    """Losses of a run, and bytes of its state: in all, and on the device that has the most."""
    import jax

    from rooflax.train.log import read_log
    from rooflax.train.loop import _Run
    from tests.support.train import tiny

    model = tiny.make_model(**WIDE)
    folder.mkdir(exist_ok=True)
    texts = corpus(is_whole=config.train_mode == "dpo")
    corpora = {"training": texts, "held-out": texts, "test": None}
    nothing = dict.fromkeys(("say", "rollouts", "sampler", "track"))
    trained = _Run(model, config, corpora, folder, **nothing)
    result = trained.train(progress=False)
    by_device: dict[str, int] = {}
    leaves = jax.tree.leaves(trained.state)
    for leaf in leaves:
        for shard in leaf.addressable_shards:
            by_device[str(shard.device)] = by_device.get(str(shard.device), 0) + shard.data.nbytes
    lines = read_log(folder / "log.jsonl")
    return {
        "losses": [line["loss"] for line in lines if "loss" in line],
        "held_out": result.held_out_loss,
        "bytes": sum(leaf.nbytes for leaf in leaves),
        "most": max(by_device.values()),
        "devices": len(by_device),
    }


def resumed(folder: Path) -> list[float]:
    """Losses of a run that four devices begin and two end."""
    from rooflax.train.log import read_log
    from rooflax.train.loop import run_training
    from tests.support.train import tiny

    for mesh in ("fsdp=4", "data=2"):
        config = settings("full", mesh=mesh, checkpoint_every=2)
        run_training(tiny.make_model(**WIDE), config, corpus(), None, folder / "resumed")
        if mesh == "fsdp=4":  # killed behind the second step
            shutil.rmtree(folder / "resumed/checkpoints/step-00000004")
    lines = read_log(folder / "resumed/log.jsonl")
    return [line["loss"] for line in lines if "loss" in line]


def main(folder: Path, *further: str) -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from rooflax.engine.compilation import enable_persistent_cache

    enable_persistent_cache()
    every = {
        kind: {
            str(mesh): run(settings(kind, mesh=mesh), folder / f"{kind}-{mesh}") for mesh in meshes
        }
        for kind, meshes in (MORE_MESHES if further else MESHES).items()
    }
    ends = None if further else resumed(folder)
    print("\n" + json.dumps({"runs": every, "resumed": ends}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
