"""`bench --quick`: the old method against the new one on a tiny model, in half a minute."""

from __future__ import annotations

from dataclasses import dataclass

from rooflax.bench.measure import Bench
from rooflax.bench.trials import warm_up
from rooflax.bench.workload import Workload
from rooflax.nn.execution import ExecutionOptions

MODEL = "preset:qwen2.5-tiny"
PROMPT_TOKENS, OUTPUT_TOKENS, TRIALS = 4, 64, 3
LEAST_RATIO = 3.0


@dataclass(frozen=True)
class QuickResult:
    """Speeds of both methods in tokens per second, and whether their tokens are the same."""

    old_tok_per_s: float
    new_tok_per_s: float
    same_tokens: bool

    @property
    def ratio(self) -> float:
        return self.new_tok_per_s / self.old_tok_per_s

    @property
    def passed(self) -> bool:
        return self.same_tokens and self.ratio >= LEAST_RATIO


def quick() -> QuickResult:
    """Best of interleaved trials without and with a KV cache, both jitted and warm."""
    jobs = [
        Bench(
            Workload(
                MODEL,
                prompt_tokens=PROMPT_TOKENS,
                output_tokens=OUTPUT_TOKENS,
                options=ExecutionOptions(use_cache=cached),
            )
        ).run
        for cached in (False, True)
    ]
    for job in jobs:
        warm_up(job)
    lines = [[job() for job in jobs] for _ in range(TRIALS)]
    old, new = (max(pair[i].decode_tok_per_s for pair in lines) for i in range(2))
    return QuickResult(old, new, len({run.tokens[0] for pair in lines for run in pair}) == 1)
