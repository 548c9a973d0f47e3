"""What is measured: models, lengths, and how often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rooflax.bench.workload import Workload
from rooflax.nn.execution import ExecutionOptions, Precision

WANTED = {"gpt2": 16.32, "qwen2.5": 3.98, "gpt-oss": 60.0}
"""The totals of the founding documents, to be met by the default settings."""

PLAIN: dict[str, Any] = {"kernels": "xla"}
"""Plain JAX in every cell that theirs has too, whatever kernels there are."""

BASELINE = {**PLAIN, "use_cache": False, "jit": False}
"""Every operation dispatched by itself, every token runs all tokens again, in growing shapes."""


@dataclass(frozen=True)
class Shape:
    """A model, and the tokens of its table."""

    model: str
    prompt_tokens: int
    output_tokens: int

    def work(self, trials: int, **options: Any) -> Workload:
        """A row of this shape in float32, everything else as the product does it."""
        return Workload(
            self.model,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            trials=trials,
            options=ExecutionOptions(**options),
            precision=Precision(dtype="float32"),
        )


@dataclass(frozen=True)
class Settings:
    """One run of everything.

    Attributes:
        gpt2, qwen, gpt_oss: the three tables with a total.
        qwen_full: the full shape; one per number of tokens.
        short_warm_up: tokens of the warm-up that is too short.
        contexts, context_output: lengths of the curve (prompt and output together), and output.
        trials: of what takes milliseconds or a few seconds; eager_trials: of eager runs.
        processes: fresh processes per side where compilation is timed.
    """

    name: str
    gpt2: Shape
    qwen: Shape
    qwen_full: tuple[Shape, ...]
    gpt_oss: Shape
    contexts: tuple[int, ...]
    context_output: int
    short_warm_up: int
    trials: int
    eager_trials: int
    processes: int


def settings(*, smoke: bool, full: bool) -> Settings:
    """The measuring run; tiny shapes with `smoke`; 100 tokens of the full shape with `full`."""
    if smoke:
        return SMOKE
    tokens = (50, 100) if full else (50,)
    return Settings(
        name="full" if full else "default",
        gpt2=Shape("preset:gpt2", 4, 15),
        qwen=Shape("preset:qwen2.5-tiny", 5, 20),
        qwen_full=tuple(Shape("preset:qwen2.5-0.5b", 5, count) for count in tokens),
        gpt_oss=Shape("preset:gpt-oss-tiny", 32, 8),
        contexts=(64, 256, 1024, 2048),
        context_output=16,
        short_warm_up=5,
        trials=5,
        eager_trials=3,
        processes=3,
    )


SMOKE = Settings(
    name="smoke",
    gpt2=Shape("preset:gpt2-tiny", 4, 4),
    qwen=Shape("preset:qwen2.5-tiny", 5, 6),
    qwen_full=(Shape("preset:qwen2.5-tiny", 5, 3),),
    gpt_oss=Shape("preset:gpt-oss-tiny", 3, 2),
    contexts=(64, 256),
    context_output=3,
    short_warm_up=2,
    trials=2,
    eager_trials=1,
    processes=1,
)
