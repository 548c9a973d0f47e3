"""LoRA adapters as PEFT saves them, with random numbers."""

import json
from pathlib import Path

import numpy as np

from rooflax.loading.safetensors import TensorToWrite, dtype_name, write_safetensors
from rooflax.models.adapters import targets

RANK = 4


def write_adapter(folder, info, modules=None, *, seed=0, tensors=None, **config):
    """A folder with an adapter of these modules, or of all that may have one.

    Args:
        modules: paths of modules, as `targets` has them.
        tensors: changes of the file's tensors, by their names there; None drops one.
        config: keys of adapter_config.json in place of those that fit.
    """
    known = targets(info.family, info.config)
    chosen = [m for m in known if known[m].is_usual] if modules is None else modules
    stated = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 6,
        "target_modules": chosen,
    } | config
    random, found = np.random.default_rng(seed), {}
    for module in chosen:
        path = f"base_model.model.{module}"
        target, rank = known[module], stated["r"]
        found[f"{path}.lora_A.weight"] = random.normal(0, 0.2, (rank, target.inputs))
        found[f"{path}.lora_B.weight"] = random.normal(0, 0.2, (target.outputs, rank))
    found |= tensors or {}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    kept = {
        name: np.asarray(
            array, getattr(array, "dtype", None) if tensors and name in tensors else np.float32
        )
        for name, array in found.items()
        if array is not None
    }
    write_safetensors(
        folder / "adapter_model.safetensors",
        [TensorToWrite(n, dtype_name(a.dtype), a.shape, lambda a=a: a) for n, a in kept.items()],
    )
    return folder
