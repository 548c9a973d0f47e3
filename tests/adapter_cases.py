"""LoRA adapters that PEFT wrote, and the logits that it computes with them.

A tensor's values are a function of its name and shape, so that a case is its adapter_config.json
and a list of names. `python -m tests.adapter_cases` writes tests/data/adapters; it needs peft
beside the test environment.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from pathlib import Path

import numpy as np

from rooflax.loading.safetensors import SafetensorsFile, TensorToWrite, write_safetensors
from tests import gguf_cases, goldens

FOLDER = Path(__file__).parent / "data" / "adapters"
CASES = {
    "rslora": ("llama_gqa", {"target_modules": "all-linear", "use_rslora": True, "r": 3}),
    "patterns": (
        "llama_gqa",
        {
            "target_modules": r".*\.(q_proj|down_proj)",
            "exclude_modules": ["model.layers.1.mlp.down_proj"],
            "rank_pattern": {"down_proj": 3},
            "alpha_pattern": {r"layers\.2\..*q_proj": 11},
        },
    ),
    "layers": (
        "llama_gqa",
        {"target_modules": ["k_proj", "o_proj", "up_proj"], "layers_to_transform": [0, 2]},
    ),
    "dora": ("llama_gqa", {"target_modules": ["q_proj", "gate_proj"], "use_dora": True}),
    "head": ("llama_gqa", {"target_modules": ["lm_head", "v_proj"]}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "fused": ("phi3", {"target_modules": "all-linear"}),
}
"""Per case the variant of `goldens`, and arguments of LoraConfig."""
WHOLE = {"modules_to_save": ["lm_head", "embed_tokens"]}
EXPERTS = {
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
MERGED = {
    "whole": ("llama_gqa", {"target_modules": ["q_proj", "up_proj"]} | WHOLE),
    "experts": ("gpt_oss", EXPERTS),
    "down": ("gpt_oss", EXPERTS | {"target_parameters": ["experts.down_proj"]}),
}
"""Cases that are merged only."""


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor's values, float32."""
    noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    return ((1 + 0.2 * noise) if "magnitude" in name else 0.15 * noise).astype(np.float32)


def read(name: str) -> tuple[dict, np.ndarray]:
    """What PEFT says: its config and names with shapes, and logits at `goldens.KEPT_POSITIONS`."""
    said = json.loads((FOLDER / f"{name}.json").read_text())
    return said, np.load(FOLDER / f"{name}.npz")["logits"]


def write_adapter(folder: Path, name: str, base: Path) -> Path:
    """The folder that PEFT saved.

    Args:
        base: the model's folder, of which PEFT saves the head beside the adapter's.
    """
    said, _ = read(name)
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(said["config"]))
    written = []
    for tensor, shape in said["tensors"].items():
        array = values(tensor, tuple(shape))
        if tensor.endswith("base_layer.weight"):
            array = SafetensorsFile(base / "model.safetensors").read("lm_head.weight")
        written.append(TensorToWrite(tensor, "F32", array.shape, lambda array=array: array))
    write_safetensors(folder / "adapter_model.safetensors", written)
    return folder


def reference_model(variant: str):
    """The model of transformers; of what is quantized, the numbers that it stands for."""
    if variant != QUANTIZED:
        return goldens.reference_model(variant)
    import torch
    from transformers import AutoModelForCausalLM

    path = gguf_cases.gguf(QUANTIZED, "q4_k_m")
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def peft_model(variant: str, arguments: dict):
    """A tiny model of transformers with an adapter of PEFT, whose numbers are `values`."""
    import torch
    from peft import LoraConfig, get_peft_model

    model = reference_model(variant)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **{"r": 2} | arguments))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            stored = (
                name.replace(".default", "")
                .replace("magnitude_vector.weight", "magnitude_vector")
                .replace(".modules_to_save", "")
            )
            parameter.data = torch.tensor(values(stored, tuple(parameter.shape)))
    return adapted.eval()


STEPS, ROWS, TOKENS = 20, 4, 24
TRAINED = ("llama_gqa", {"lora_rank": 4, "lora_alpha": 6.0, "learning_rate": 3e-3})
"""Whose losses of so many steps PEFT and torch's AdamW say, and settings of TrainConfig."""


KINDS = {
    "lora": ({}, {}),
    "dora": ({"fine_tune_type": "dora"}, {"use_dora": True}),
    "quantized": ({}, {}),
    "whole": ({"modules_to_save": "lm_head,embed_tokens"}, WHOLE),
    "experts": ({name: ",".join(names) for name, names in EXPERTS.items()}, EXPERTS),
}
"""What is trained: settings of TrainConfig, and arguments of LoraConfig."""
QUANTIZED = "llama_k"
VARIANTS = dict.fromkeys(KINDS, TRAINED[0]) | {"experts": "gpt_oss", "quantized": QUANTIZED}
"""Of `goldens`, or the GGUF file of this name."""
WRAPPED = {
    "mlp.experts.base_layer": "mlp.experts.gate_up_proj",
    "mlp.experts": "mlp.experts.down_proj",
}
"""Ends of modules' paths in PEFT, where both parameters have adapters, and of what they change."""


def train_config(kind: str = "lora"):
    from rooflax.train.config import TrainConfig

    settings = {"fine_tune_type": "lora", "weight_decay": 0.1} | TRAINED[1] | KINDS[kind][0]
    return TrainConfig(steps=STEPS, batch_size=ROWS, seq_len=TOKENS, **settings)


def batches() -> np.ndarray:
    """[steps, rows, tokens + 1] token ids."""
    shape = (STEPS, ROWS, TOKENS + 1)
    return np.random.RandomState(7).randint(0, goldens.VOCAB, shape).astype(np.int32)


def peft_losses(kind: str, start) -> list[float]:
    """The losses of PEFT.

    Args:
        start: matrices by module, as `LoraTraining.start` has them.
    """
    import torch

    from rooflax.train.step import learning_rate

    config = train_config(kind)
    arguments = {"target_modules": "all-linear", "r": config.lora_rank} | KINDS[kind][1]
    model = peft_model(VARIANTS[kind], arguments | {"lora_alpha": config.lora_alpha}).train()
    names = {
        ".lora_A.": "a", ".lora_B.": "b", ".lora_magnitude_vector.": "magnitude",
        ".modules_to_save.": "weight",
    }  # fmt: skip
    trained = []
    for name, parameter in model.named_parameters():
        for part, key in names.items():
            module, has, _ = name.partition(part)
            if has:
                module = module.removeprefix("base_model.model.")
                for end, parameter_path in WRAPPED.items():
                    if module.endswith(f".{end}"):
                        module = module.removesuffix(end) + parameter_path
                own = start[module][key]
                parameter.data = torch.tensor(np.asarray(own))
                trained.append(parameter)
    betas, rate = (config.beta1, config.beta2), learning_rate(config)
    optimizer = torch.optim.AdamW(trained, betas=betas, weight_decay=config.weight_decay)
    found = []
    for step, batch in enumerate(torch.tensor(batches()).long()):
        for group in optimizer.param_groups:
            group["lr"] = float(rate(step))
        logits = model(batch[:, :-1]).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, config.clip_norm)
        optimizer.step()
        found.append(float(loss))
    return found


def committed_losses(kind: str) -> list[float]:
    return json.loads((FOLDER / "losses.json").read_text())[kind]


def started(kind: str = "lora"):
    """The base model and what trains its adapter."""
    from rooflax.loading.load import load
    from rooflax.loading.model_info import model_info
    from rooflax.train.adapters import LoraTraining

    variant = VARIANTS[kind]
    if variant == QUANTIZED:
        model = load(model_info(gguf_cases.gguf(variant, "q4_k_m")), dtype=None)
        return model, LoraTraining(model, train_config(kind))
    with tempfile.TemporaryDirectory() as folder:
        path = goldens.write_checkpoint(Path(folder) / variant, variant, goldens.committed(variant))
        model = load(path)
    return model, LoraTraining(model, train_config(kind))


def main() -> None:
    import torch

    FOLDER.mkdir(exist_ok=True)
    losses = {kind: peft_losses(kind, started(kind)[1].start()) for kind in KINDS}
    (FOLDER / "losses.json").write_text(json.dumps(losses) + "\n")
    for name, (variant, arguments) in (CASES | MERGED).items():
        model = peft_model(variant, arguments)
        with tempfile.TemporaryDirectory() as saved, torch.no_grad():
            model.save_pretrained(saved)
            file = SafetensorsFile(Path(saved) / "adapter_model.safetensors")
            config = json.loads((Path(saved) / "adapter_config.json").read_text())
            logits = model(torch.tensor(goldens.tokens()).long()).logits.numpy()
            tensors = {n: file.info(n).shape for n in sorted(file.names())}
        config["base_model_name_or_path"] = variant
        if isinstance(config["target_modules"], list):
            config["target_modules"].sort()
        said = {"config": config, "tensors": tensors}
        (FOLDER / f"{name}.json").write_text(json.dumps(said, indent=1, sort_keys=True) + "\n")
        np.savez_compressed(FOLDER / f"{name}.npz", logits=logits[:, list(goldens.KEPT_POSITIONS)])


if __name__ == "__main__":
    main()
