"""A process with four simulated devices that trains tiny models on meshes.

`python -m tests.support.train.meshes FOLDER` prints what it found, as JSON on its last line.
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
    "full": {"micro_batches": 2},
    "dora": {"fine_tune_type": "dora", "lora_dropout": 0.2, "layers": "scan"},
    "dpo": {"train_mode": "dpo"},
}
MESHES = {
    "full": (None, "data=2", "fsdp=4", "tensor=2", "fsdp=2,tensor=2"),
    "dora": (None, "fsdp=4"),
    "dpo": (None, "data=2,fsdp=2"),
}


def found(folder: Path) -> Any:
    """What the process prints."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.train.meshes", str(folder)],
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
    folder.mkdir()
    texts = corpus(is_whole=config.train_mode == "dpo")
    trained = _Run(model, config, texts, texts, None, folder, *[None] * 4)
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


def resumed(folder: Path) -> dict[str, list[float]]:
    """Losses of a run on one device, and of one that four devices begin and two end."""
    from rooflax.train.log import read_log
    from rooflax.train.loop import run_training
    from tests.support.train import tiny

    by_name = {}
    for name, meshes in {"one": (None,), "four, then two": ("fsdp=4", "data=2")}.items():
        for mesh in meshes:
            config = settings("full", mesh=mesh, checkpoint_every=2, micro_batches=None)
            run_training(tiny.make_model(**WIDE), config, corpus(), None, folder / name)
            if mesh == "fsdp=4":  # killed behind the second step
                shutil.rmtree(folder / name / "checkpoints/step-00000004")
        lines = read_log(folder / name / "log.jsonl")
        by_name[name] = [line["loss"] for line in lines if "loss" in line]
    return by_name


def main(folder: Path) -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from rooflax.engine.compilation import enable_persistent_cache

    enable_persistent_cache()
    every = {
        kind: {
            str(mesh): run(settings(kind, mesh=mesh), folder / f"{kind}-{mesh}") for mesh in meshes
        }
        for kind, meshes in MESHES.items()
    }
    print("\n" + json.dumps({"runs": every, "resumed": resumed(folder)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
