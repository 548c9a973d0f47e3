"""transformers with torch, eager, a dynamic cache, and no `generate` around the model's calls.

python transformers_driver.py CHECKPOINT float32|bfloat16
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from serve import Job, arguments, clock, serve


class Transformers:
    def __init__(self, folder: str, dtype: str, threads: int):
        torch.set_num_threads(threads)
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(folder, dtype=getattr(torch, dtype)).eval()

    def about(self) -> dict[str, Any]:
        attention = self.model.config._attn_implementation
        return {
            "version": transformers.__version__,
            "torch": torch.__version__,
            "attention": attention,
        }

    def open(self, job: Job) -> dict[str, Any]:
        self.job = job
        return self.trial()

    @torch.inference_mode()
    def trial(self) -> dict[str, Any]:
        self.cache = transformers.DynamicCache(config=self.model.config)
        prompts = [self.job.prompt(row) for row in range(self.job.batch)]
        self.ids = torch.tensor(prompts)
        return clock(self._step, self._decode)

    def _decode(self) -> None:
        for _ in range(self.job.new_tokens):
            self._step()

    def _step(self) -> None:
        found = self.model(
            input_ids=self.ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        self.ids = found.logits[:, -1:].argmax(-1)


if __name__ == "__main__":
    args = arguments(__doc__)
    serve(lambda: Transformers(args.model, args.format, args.threads))
