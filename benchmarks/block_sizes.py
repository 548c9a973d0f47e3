"""Which block sizes are fastest here, measured in a model's own programs.

`python benchmarks/block_sizes.py [MODEL] [--quantize FORMAT] [--batch N] [--prompt-tokens N]
[--trials N]` on a GPU or TPU prints a finding per kernel and shape as a line of JSON, then the
lines for `rooflax.ops.block_sizes.MEASURED`.

A program is traced once for the questions that its kernels ask (`ops.block_sizes`). Then each
question's candidates are compiled into it and timed interleaved with the rule's sizes, one question
after the other, the answers so far in place. A candidate wins if the confidence interval of its
ratio to the rule says that it is faster. Compiling is outside the clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rooflax.bench.figures import MIN_PAIRS, Ratio, paired_ratio
from rooflax.bench.timing import timed
from rooflax.errors import RequestError
from rooflax.loading.model_info import ModelInfo, model_info
from rooflax.loading.plan import make_plan
from rooflax.models.initialize import random_weights
from rooflax.models.memory import check_fits, estimate
from rooflax.models.model import Model, build
from rooflax.models.presets import SEED
from rooflax.models.steps import decode_step, new_cache, prefill
from rooflax.nn.decoder import Decoder
from rooflax.nn.device_memory import free_bytes
from rooflax.nn.execution import ExecutionOptions, Precision
from rooflax.ops import accelerator, block_sizes
from rooflax.ops.block_sizes import Key, Question, Sizes

DECODE_STEPS = 16
"""In one dispatch, so that its cost is small beside theirs."""
MOST_PROMPT_TOKENS = 1024
"""Where nothing is said, and the model takes as many."""


@dataclass
class Program:
    """A function of a state, which it is given back after each run, and of arguments.

    Attributes:
        function: gives the next state, of the same shapes.
    """

    name: str
    function: Callable[..., Any]
    state: Any
    args: tuple[Any, ...] = ()

    def lower(self) -> Any:
        """Traced anew, because what kernels ask is answered while they are traced."""

        def anew(state: Any, *args: Any) -> Any:
            return self.function(state, *args)

        return jax.jit(anew, donate_argnums=0).lower(self.state, *self.args)

    def run(self, compiled: Callable[..., Any]) -> Any:
        """One run, on from the last one's state."""
        self.state = compiled(self.state, *self.args)
        return self.state


@dataclass(frozen=True)
class Finding:
    """What was measured for one question.

    Attributes:
        program: in which.
        best: the rule's sizes, or those that beat them.
        ratio: how many times as fast the program is with `best`; None for the rule.
        seconds: median per run by sizes, the rule's first.
        rejected: sizes that the compiler did not take.
    """

    program: str
    question: Question
    best: Sizes
    ratio: Ratio | None
    seconds: Mapping[Sizes, float]
    rejected: tuple[Sizes, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "kernel": self.question.kernel,
            "shape": list(self.question.shape),
            "program": self.program,
            "rule": list(self.question.rule),
            "best": list(self.best),
            "ratio": None if self.ratio is None else self.ratio.as_json(),
            "candidates": [
                {"sizes": list(sizes), "median_s": median} for sizes, median in self.seconds.items()
            ],
            "rejected": [list(sizes) for sizes in self.rejected],
        }


@dataclass(frozen=True)
class Work:
    """What the programs do.

    Attributes:
        batch: rows that decode together.
        prompt_tokens: of the prompt, and of the context that decoding sees; None is the model's
            longest, at most MOST_PROMPT_TOKENS.
        trials: timed runs of each candidate.
    """

    batch: int = 1
    prompt_tokens: int | None = None
    trials: int = 10
    precision: Precision = field(default_factory=Precision)

    def __post_init__(self) -> None:
        if self.trials < MIN_PAIRS:
            raise RequestError(
                f"trials is {self.trials}; telling sizes apart needs at least {MIN_PAIRS}."
            )

    def length(self, info: ModelInfo) -> int:
        """`prompt_tokens`, resolved; RequestError for more than the model takes."""
        most = info.config.max_position
        if self.prompt_tokens is not None and self.prompt_tokens > most:
            raise RequestError(
                f"prompt_tokens is {self.prompt_tokens}; the context of {info.name} holds {most}."
            )
        return self.prompt_tokens or min(most, MOST_PROMPT_TOKENS)


def check_here() -> None:
    """
    Raises:
        RequestError: no kernel that runs here asks for sizes.
    """
    if why := accelerator.missing():
        raise RequestError(
            f"There are no block sizes to tune here: {why} (the native kernels' are fixed when "
            f"they are built)."
        )


def tune_model(
    info: ModelInfo, work: Work, progress: Callable[[str], None] = lambda text: None
) -> list[Finding]:
    """Measures the programs of a model: one prompt, and decode steps at its end.

    Args:
        progress: told what is measured now.

    Raises:
        RequestError: nothing here asks for sizes, or the work is more than the model takes.
    """
    check_here()
    progress("making weights")
    found = tune(model_programs(info, work), work.trials, progress)
    if not found:
        raise RequestError(
            f"The programs of {info.name} ask for no block sizes here: all its kernels are XLA's "
            f"own; another format may have kernels that ask."
        )
    return found


def model_programs(info: ModelInfo, work: Work) -> list[Program]:
    """Prefill of one row and decode steps of all, of a model of as few layers as differ.

    Weights are random, at the widths that `LLM` would keep them with.
    """
    length, config = work.length(info), one_period(info.config)
    plan = make_plan(info, **vars(work.precision), max_model_len=length)
    storage, kv_dtype = plan.storage, plan.kv_dtype
    sizes = {"storage": storage, "kv_dtype": kv_dtype, "rows": work.batch + 1, "tokens": length}
    check_fits(estimate(config, **sizes), free_bytes(), f"a layer of {info.name}")
    weights = random_weights(info.family, config, seed=SEED, storage=storage)
    model = build(info.family, config, weights, length, storage.dtype)
    options = ExecutionOptions().with_layers(kernels_read_stacks=False)
    rng = np.random.default_rng(SEED)

    def cache_and_tokens(rows: int, *seq: int) -> tuple[Any, jax.Array]:
        tokens = rng.integers(0, config.vocab_size, (rows, *seq), np.int32)
        return new_cache(model, rows, length, dtype=kv_dtype), jnp.asarray(tokens)

    positions = jnp.full(work.batch, length - 1, jnp.int32)
    decode, prompt = partial(_decode, options=options), partial(_prefill, options=options)
    return [
        Program("decode", decode, cache_and_tokens(work.batch), (model, positions)),
        Program("prefill", prompt, cache_and_tokens(1, length), (model,)),
    ]


def one_period(config: Decoder) -> Any:
    """The config of the first layers, one of each kind."""
    return config.first(config.groups.period)


def _decode(
    state: tuple[Any, jax.Array], model: Model, positions: jax.Array, *, options: ExecutionOptions
) -> tuple[Any, jax.Array]:
    def step(_: Any, state: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        logits, cache = decode_step(model, *state, positions, options=options)
        return cache, jnp.argmax(logits, axis=1).astype(jnp.int32)

    return jax.lax.fori_loop(0, DECODE_STEPS, step, state)


def _prefill(
    state: tuple[Any, jax.Array], model: Model, *, options: ExecutionOptions
) -> tuple[Any, jax.Array]:
    logits, cache = prefill(model, *state, options=options)
    return cache, state[1].at[:, 0].set(jnp.argmax(logits, axis=1).astype(jnp.int32))


def tune(
    programs: Sequence[Program], trials: int, progress: Callable[[str], None] = lambda text: None
) -> list[Finding]:
    """A finding for each question of the programs, in the first that asks it."""
    found: list[Finding] = []
    best: dict[Key, Sizes] = {}
    for program in programs:
        for question in _questions(program):
            if question.key not in best:
                count = f"{len(question.others)} sizes instead of {list(question.rule)}"
                progress(f"{program.name}, {question.kernel}: {count}")
                found.append(_measured(program, question, best, trials))
                best[question.key] = found[-1].best
    return found


def _questions(program: Program) -> list[Question]:
    with block_sizes.trying({}), block_sizes.recording() as asked:
        program.lower()
    return list(asked.values())


def _measured(
    program: Program, question: Question, others: Mapping[Key, Sizes], trials: int
) -> Finding:
    """Each candidate in turn with the rule, in a program with the others' answers."""
    runs = dict(_compiled(program, question, others))
    times: dict[Sizes, list[float]] = {sizes: [] for sizes in runs}
    for run in runs.values():
        jax.block_until_ready(program.run(run))
    for _ in range(trials):
        for sizes, run in runs.items():
            times[sizes].append(timed(program.run, run))
    rule = times[question.rule]
    ratios = {sizes: paired_ratio(own, rule) for sizes, own in times.items()}
    faster = {sizes: ratio for sizes, ratio in ratios.items() if ratio.verdict == "faster"}
    best = max(faster, key=lambda sizes: faster[sizes].ratio, default=question.rule)
    return Finding(
        program.name,
        question,
        best,
        faster.get(best),
        {sizes: statistics.median(own) for sizes, own in times.items()},
        tuple(sizes for sizes in question.others if sizes not in runs),
    )


REFUSALS = (
    jax.errors.JaxRuntimeError, ValueError, NotImplementedError, RecursionError, RequestError,
)  # fmt: skip
"""What compilers raise, while lowering too, for sizes that they do not take."""


def _compiled(
    program: Program, question: Question, others: Mapping[Key, Sizes]
) -> Iterator[tuple[Sizes, Callable[..., Any]]]:
    """The program with each of the question's answers that the compiler takes."""
    for sizes in (question.rule, *question.others):
        try:
            with block_sizes.trying({**others, question.key: sizes}):
                lowered = program.lower()
            compiled = lowered.compile()
        except REFUSALS:
            if sizes == question.rule:
                raise
        else:
            yield sizes, compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--quantize")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--trials", type=int, default=10)
    args = parser.parse_args()
    precision = Precision(quantize=args.quantize)
    work = Work(args.batch, args.prompt_tokens, args.trials, precision)
    found = tune_model(model_info(args.model), work, lambda text: print(text, file=sys.stderr))
    for finding in found:
        print(json.dumps(finding.as_json()))
    for finding in found:
        if finding.ratio is not None:
            print(f"    {finding.question.key}: {finding.best},")


if __name__ == "__main__":
    main()
