"""What sentence-transformers writes beside a checkpoint that embeds or scores."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Module = tuple[str, dict[str, Any]]
"""A module's type, and its settings."""
MODULES = "sentence_transformers.models"
TRANSFORMER = {"name": "0", "path": "", "type": f"{MODULES}.Transformer"}
POOLING, DENSE = f"{MODULES}.Pooling", f"{MODULES}.Dense"
NORMALIZE: Module = (f"{MODULES}.Normalize", {})
SCORE = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
IDENTITY = {"activation_function": "torch.nn.modules.linear.Identity"}


def pooling(mode: str, size: int = 54) -> Module:
    return POOLING, {
        "word_embedding_dimension": size, f"pooling_mode_{mode}": True, "include_prompt": True,
    }  # fmt: skip


def dense(inner: int, outer: int) -> Module:
    """Without a bias; `write_dense` gives its weight."""
    return DENSE, {"in_features": inner, "out_features": outer, "bias": False} | IDENTITY


def write_dense(folder: Path, weight: np.ndarray) -> None:
    save_file({"linear.weight": weight.astype(np.float32)}, folder / "model.safetensors")


def write_modules(folder: Path, *modules: Module) -> None:
    """modules.json of a transformer and these, and a folder of each."""
    lines: list[dict[str, Any]] = [TRANSFORMER]
    for index, (kind, config) in enumerate(modules, start=1):
        path = f"{index}_{kind.rpartition('.')[2]}"
        lines.append({"idx": index, "name": str(index), "path": path, "type": kind})
        (folder / path).mkdir(exist_ok=True)
        (folder / path / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(lines))
