"""onnxruntime-genai on a folder that its own model builder wrote.

python onnxruntime_genai_driver.py FOLDER FORMAT
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnxruntime_genai
from serve import Job, arguments, clock, serve


class OnnxRuntimeGenai:
    def __init__(self, folder: str, threads: int):
        config = onnxruntime_genai.Config(folder)
        session = {"session_options": {"intra_op_num_threads": threads}}
        config.overlay(json.dumps({"model": {"decoder": session}}))
        self.model = onnxruntime_genai.Model(config)

    def about(self) -> dict[str, Any]:
        return {"version": onnxruntime_genai.__version__}

    def open(self, job: Job) -> dict[str, Any]:
        self.job = job
        prompts = [job.prompt(row) for row in range(job.batch)]
        self.prompts = np.array(prompts, np.int32)
        return self.trial()

    def trial(self) -> dict[str, Any]:
        job = self.job
        length = job.prompt_tokens + job.new_tokens + 1
        params = onnxruntime_genai.GeneratorParams(self.model)
        params.set_search_options(
            batch_size=job.batch, max_length=length, min_length=length, do_sample=False
        )
        self.generator = onnxruntime_genai.Generator(self.model, params)
        return clock(self._prefill, self._decode)

    def _prefill(self) -> None:
        self.generator.append_tokens(self.prompts)
        self.generator.generate_next_token()

    def _decode(self) -> None:
        for _ in range(self.job.new_tokens):
            self.generator.generate_next_token()


if __name__ == "__main__":
    args = arguments(__doc__)
    serve(lambda: OnnxRuntimeGenai(args.model, args.threads))
