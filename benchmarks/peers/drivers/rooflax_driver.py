"""rooflax, measured as `rooflax bench` measures it; FORMAT is float32, bfloat16 or a quantised one.

    python rooflax_driver.py CHECKPOINT float32|bfloat16|int8|int4|file

A checkpoint has bfloat16 weights, which "bfloat16" leaves as they are; a GGUF file has its own
formats, which "file" leaves.
"""

from __future__ import annotations

from typing import Any

from rooflax_server import Server
from serve import Job, ServingJob, arguments, serve

import rooflax
from rooflax.bench.measure import Bench, check_output
from rooflax.bench.trials import warm_up
from rooflax.bench.workload import Workload
from rooflax.engine.compilation import count_compilations
from rooflax.nn.execution import Precision

PRECISIONS = {
    "float32": Precision(dtype="float32"),
    "bfloat16": Precision(dtype="bfloat16"),
    "file": Precision(),
}


class Rooflax:
    def __init__(self, folder: str, form: str):
        self.folder = folder
        self.precision = PRECISIONS.get(form) or Precision(quantize=form)
        self.bench: Bench | None = None
        self.server: Server | None = None

    def about(self) -> dict[str, Any]:
        return {"version": rooflax.__version__}

    def open(self, job: Job) -> dict[str, Any]:
        self.bench = None  # before the next one is loaded
        self.new_tokens = job.new_tokens
        work = Workload(
            self.folder,
            batch=job.batch,
            prompt_tokens=job.prompt_tokens,
            output_tokens=max(2, job.new_tokens + 1),
            precision=self.precision,
        )
        self.bench = bench = Bench(work)
        warm_ups = warm_up(bench.run)
        self.reference = bench.run()
        check_output([self.reference], work, bench.llm)
        steps = {"decode": bench.decode, "prefill": bench.prefill}
        return {
            "format": bench.llm.format,
            "kv_dtype": bench.llm.plan.kv_dtype,
            "kernels": bench.describe()["kernels"],
            "weights_bytes": bench.llm.model.weights_bytes,
            # Bench says float32 for a bfloat16 checkpoint even where it is quantised
            "dtype": bench.multiplied,
            "warm_ups": warm_ups,
            "costs": {name: vars(cost) for name, cost in steps.items()},
            **self._seconds(self.reference),
        }

    def trial(self) -> dict[str, Any]:
        assert self.bench is not None
        with count_compilations() as compiled:
            timeline = self.bench.run()
        if timeline.tokens != self.reference.tokens:
            raise ValueError("two trials of the same work gave different tokens")
        return {**self._seconds(timeline), "compilations": compiled.requests}

    def open_serving(self, job: ServingJob) -> dict[str, Any]:
        self.server = Server(self.folder, self.precision, job)
        return self.server.about()

    def serve(self, by: str, arrivals: list[float]) -> dict[str, Any]:
        assert self.server is not None
        with count_compilations() as compiled:
            found = self.server.run(by, arrivals)
        return {**found, "compilations": compiled.requests}

    def _seconds(self, timeline: Any) -> dict[str, float]:
        decode = timeline.decode_s if self.new_tokens else 0.0
        return {"prefill_s": timeline.ttft_s, "decode_s": decode}


if __name__ == "__main__":
    args = arguments(__doc__)
    serve(lambda: Rooflax(args.model, args.format))
