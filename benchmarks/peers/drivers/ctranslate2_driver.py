"""CTranslate2 on a folder that ct2-transformers-converter wrote; FORMAT is a compute type.

    python ctranslate2_driver.py FOLDER float32|int8

A callback notes when each token came; it costs a few microseconds a token.
"""

from __future__ import annotations

import time
from typing import Any

from serve import Job, arguments, serve

args = arguments(__doc__)  # threads are set before the library is loaded

import ctranslate2  # noqa: E402


class CTranslate2:
    def __init__(self, folder: str, compute_type: str, threads: int):
        self.generator = ctranslate2.Generator(
            folder,
            device="cpu",
            compute_type=compute_type,
            inter_threads=1,
            intra_threads=threads,
        )

    def about(self) -> dict[str, Any]:
        version = ctranslate2.__version__
        return {"version": version, "compute_type": self.generator.compute_type}

    def open(self, job: Job) -> dict[str, Any]:
        self.job = job
        # The prompt is text to this engine. Its last token is the first that is decoded.
        self.prompts = [["a"] * job.prompt_tokens] * job.batch
        return self.trial()

    def trial(self) -> dict[str, Any]:
        arrivals: list[list[float]] = [[] for _ in range(self.job.batch)]

        def note(result: Any) -> bool:
            arrivals[result.batch_id].append(time.perf_counter())
            return False

        count = self.job.new_tokens + 1
        start = time.perf_counter()
        self.generator.generate_batch(
            self.prompts,
            max_length=count,
            min_length=count,
            include_prompt_in_result=False,
            beam_size=1,
            callback=note,
        )
        if any(len(row) != count for row in arrivals):
            raise ValueError(f"{[len(row) for row in arrivals]} tokens came, not {count} a row")
        first = max(row[0] for row in arrivals)
        return {"prefill_s": first - start, "decode_s": max(row[-1] for row in arrivals) - first}


if __name__ == "__main__":
    serve(lambda: CTranslate2(args.model, args.format, args.threads))
