"""rooflax serving requests: by `AsyncLLM`, or all of them in one `LLM.generate`.

Both share one model. Their other settings are the defaults, the prefix cache included.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from serve import ServingJob, seen

from rooflax import SamplingParams
from rooflax.async_llm import AsyncLLM
from rooflax.bench.trials import warm_up
from rooflax.nn.execution import Precision

CONTEXT = 1024


class Server:
    """Warmed up until nothing compiles any more.

    Args:
        precision: of the weights.
        job: what it will serve.
    """

    def __init__(self, folder: str, precision: Precision, job: ServingJob):
        self.job, self.runs = job, 0
        self.params = SamplingParams(max_tokens=job.new_tokens, temperature=0, ignore_eos=True)
        self.llm = AsyncLLM(
            folder,
            dtype=precision.dtype,
            quantize=precision.quantize,
            max_num_seqs=job.slots,
            max_model_len=CONTEXT,
        )
        self.ways: dict[str, Callable[..., list[list[float]]]] = {
            "AsyncLLM": self._async,
            "LLM.generate": self._generate,
        }
        at_once = [0.0] * job.requests
        self.warm_ups = {by: warm_up(lambda by=by: self.run(by, at_once)) for by in self.ways}

    def about(self) -> dict[str, Any]:
        lengths = [len(prompt) for prompt in self.job.prompts(0)]
        return {
            "format": self.llm.llm.format,
            "warm_ups": self.warm_ups,
            "prompt_tokens": lengths,
        }

    def run(self, by: str, arrivals: Sequence[float]) -> dict[str, float]:
        """Serves the job's requests, each at its time."""
        prompts = self.job.prompts(self.runs)
        self.runs += 1
        return seen(self.job, arrivals, self.ways[by](prompts, arrivals))

    def _async(self, prompts: Sequence[list[int]], arrivals: Sequence[float]) -> list[list[float]]:
        async def one(prompt: list[int], arrival: float) -> list[float]:
            await asyncio.sleep(arrival - (time.perf_counter() - start))
            times: list[float] = []
            async for delta in self.llm.stream(prompt, self.params):
                times += [time.perf_counter() - start] * len(delta.tokens)
            return times

        async def everyone() -> list[list[float]]:
            return list(await asyncio.gather(*map(one, prompts, arrivals)))

        start = time.perf_counter()
        return asyncio.run(everyone())

    def _generate(
        self, prompts: Sequence[list[int]], arrivals: Sequence[float]
    ) -> list[list[float]]:
        """`LLM.generate` is a loop over `LLM.stream`; this one notes the times."""
        if any(arrivals):
            raise ValueError("LLM.generate takes all requests at once")
        times: list[list[float]] = [[] for _ in prompts]
        start = time.perf_counter()
        for delta in self.llm.llm.stream(list(prompts), self.params):
            times[delta.prompt] += [time.perf_counter() - start] * len(delta.tokens)
        return times
