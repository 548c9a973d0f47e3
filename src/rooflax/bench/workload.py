"""Workload of a benchmark's row: a model, batch and lengths, and settings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from rooflax.engine.sampling_params import SamplingParams
from rooflax.fields.kinds import Whole
from rooflax.nn.execution import ExecutionOptions, Precision

PROMPT_SEED = 0
AT_LEAST = {"batch": 1, "prompt_tokens": 1, "output_tokens": 2, "trials": 1}


@dataclass(frozen=True)
class Workload:
    """One row.

    Attributes:
        model: as for `LLM`; None is the embedded default.
        batch: prompts at once.
        prompt_tokens, output_tokens: per prompt; at least two output tokens, or there is no decode.
        trials: timed runs.
        source: how the model is found, as arguments of `model_info`.
        deterministic: fixed matmul precision, and XLA's deterministic operations.
        platform: that must be here, "cpu", "gpu" or "tpu"; None takes the best.
        mesh: devices that share the work, as in "tensor=4,data=2"; None is one.
        lora: the folder of an adapter beside the weights.
    """

    model: str | None
    batch: int = 1
    prompt_tokens: int = 64
    output_tokens: int = 64
    trials: int = 5
    options: ExecutionOptions = field(default_factory=ExecutionOptions)
    precision: Precision = field(default_factory=Precision)
    source: dict[str, Any] = field(default_factory=dict)
    deterministic: bool = False
    platform: str | None = None
    mesh: str | None = None
    lora: str | None = None

    def __post_init__(self) -> None:
        for name, least in AT_LEAST.items():
            Whole(least).read(name, getattr(self, name))

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random ids, the same in every run."""
        rng = np.random.default_rng(PROMPT_SEED)
        return rng.integers(0, vocab_size, (self.batch, self.prompt_tokens)).tolist()

    def params(self) -> SamplingParams:
        """Greedy, and never ended by an end-of-sequence token."""
        params = SamplingParams(max_tokens=self.output_tokens, temperature=0, ignore_eos=True)
        return params.with_defaults({})

    def as_json(self) -> dict[str, Any]:
        """JSON that `from_json` reads."""
        return asdict(self)

    @staticmethod
    def from_json(raw: dict[str, Any]) -> Workload:
        """The row that `as_json` wrote."""
        options, precision = ExecutionOptions(**raw["options"]), Precision(**raw["precision"])
        return Workload(**raw | {"options": options, "precision": precision})


def combinations(
    base: Workload,
    *,
    batches: Sequence[int],
    prompt_tokens: Sequence[int],
    output_tokens: Sequence[int],
    settings: Sequence[tuple[ExecutionOptions, Precision]],
) -> list[Workload]:
    """Every combination, the shapes of work innermost; the rest is `base`'s."""
    return [
        replace(
            base,
            batch=batch,
            prompt_tokens=prompt,
            output_tokens=output,
            options=options,
            precision=precision,
        )
        for (options, precision), batch, prompt, output in itertools.product(
            settings, batches, prompt_tokens, output_tokens
        )
    ]
