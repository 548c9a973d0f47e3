"""transformers on the weights of a GGUF file, which gguf-py turns into numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


class Oracle:
    """The model in float32.

    transformers opens the file itself (`gguf_file=`) only beside accelerate, of which nothing else
    is wanted here.
    """

    def __init__(self, path: Path):
        config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        with torch.device("meta"):
            empty = transformers.AutoModelForCausalLM.from_config(config)
        found = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=empty)["tensors"]
        with no_init_weights():
            self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        missing = self.model.load_state_dict(found, strict=False)
        assert set(missing.missing_keys) <= {"lm_head.weight"}, missing
        assert not missing.unexpected_keys
        self.model.eval().tie_weights()

    def logits(self, ids: list[int]) -> np.ndarray:
        """[tokens, vocab]"""
        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0].float().numpy()


def nats(logits: np.ndarray, ids: list[int]) -> float:
    """Mean of -log p of the ids but the first, in float64."""
    wide = logits[:-1].astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    chosen = wide[np.arange(len(wide)), ids[1:]]
    return float((np.log(np.exp(wide).sum(-1)) - chosen).mean())
