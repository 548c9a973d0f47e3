"""The engine under load: requests at a given rate, and what batching and shared prefixes bring."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from rooflax.bench.load import Answered, ServerLoad, summary
from rooflax.bench.workload import PROMPT_SEED, Workload
from rooflax.engine.engine import Engine
from rooflax.engine.sequence import Sequence
from rooflax.errors import EngineError, RequestError
from rooflax.llm import LLM
from rooflax.loading.model_info import model_info

NUM_SLOTS = 16
PREFIX_TOKENS, SUFFIX_TOKENS = 512, 16
LEAST_SPEEDUP, LEAST_SHARE, LEAST_TTFT_RATIO = 4.0, 0.85, 5.0


class Served:
    """A model behind a warm engine of `NUM_SLOTS`.

    Args:
        least_tokens: of context, without which nothing can be measured.
        max_tokens: of context, as far as the model has it; None is `least_tokens`.

    Raises:
        RequestError: the context does not hold the work.
    """

    def __init__(self, work: Workload, least_tokens: int, max_tokens: int | None = None):
        info = model_info(work.model, **work.source)
        self.llm = LLM(
            info,
            **vars(work.precision),
            options=work.options,
            max_num_seqs=NUM_SLOTS,
            lora=work.lora,
        )
        self.work, self.vocab = work, info.config.vocab_size
        if least_tokens > self.llm.max_model_len:
            raise RequestError(
                f"the work takes {least_tokens} tokens of context, and that of {info.name} holds "
                f"{self.llm.max_model_len}"
            )
        self.max_tokens = min(max_tokens or least_tokens, self.llm.max_model_len)
        plan = self.llm.plan.sized(NUM_SLOTS, self.max_tokens, None)
        config = replace(plan, prefill_chunk=0, max_tokens_per_step=0)
        self.engine = Engine(self.llm.model, config)
        self.warm_up_report = self.engine.warm_up_all()

    def sequence(self, prompt: list[int], output_tokens: int) -> Sequence:
        return Sequence(0, prompt, self.work.params(), output_tokens, frozenset())

    def run(self, sequences: list[Sequence]) -> float:
        """All of them at once, to their ends; seconds."""
        started = time.perf_counter()
        self.engine.add(sequences)
        while self.engine.has_unfinished:
            self.engine.step()
        return time.perf_counter() - started


def under_rate(work: Workload, load: ServerLoad) -> dict[str, Any]:
    """Percentiles of TTFT, ITL and end-to-end under load, and how many requests were good."""
    served = Served(work, work.prompt_tokens + work.output_tokens)
    prompts = cast(list[list[int]], load.prompts(served.vocab))
    sequences = [served.sequence(prompt, work.output_tokens) for prompt in prompts]
    start = time.perf_counter()
    _play(served.engine, sequences, [start + at_s for at_s in load.arrivals_s()])
    seconds = max(s.times.tokens_s[-1] for s in sequences) - start
    answers = [
        Answered(
            t.arrival_s, t.arrival_s, tuple(t.tokens_s), work.prompt_tokens, work.output_tokens
        )
        for t in (sequence.times for sequence in sequences)
    ]
    metrics = {"metrics": served.engine.metrics.as_dict()}
    return summary(served.llm.info.name, load, answers, seconds) | metrics


def _play(engine: Engine, sequences: list[Sequence], arrivals: list[float]) -> None:
    """Adds each sequence at its time, and steps in between."""
    coming = list(zip(sequences, arrivals, strict=True))
    while coming or engine.has_unfinished:
        while coming and coming[0][1] <= time.perf_counter():
            sequence, arrival_s = coming.pop(0)
            engine.add([sequence], arrival_s)
        if engine.has_unfinished:
            engine.step()
        else:
            time.sleep(max(0.0, coming[0][1] - time.perf_counter()))


@dataclass(frozen=True)
class BatchingGain:
    """Gain from batching in the engine; medians of interleaved trials.

    Attributes:
        prefix_tokens: that prompts share.
        parts_tok_per_s: what the kernels allow: the time of all prompts, computed together, and of
            decode steps with all sequences.
    """

    prefix_tokens: int
    alone_tok_per_s: float
    together_tok_per_s: float
    parts_tok_per_s: float
    cold_ttft_s: float
    warm_ttft_s: float

    @property
    def speedup(self) -> float:
        return self.together_tok_per_s / self.alone_tok_per_s

    @property
    def share(self) -> float:
        """Percentage of the throughput that the parts allow."""
        return self.together_tok_per_s / self.parts_tok_per_s

    @property
    def ttft_ratio(self) -> float:
        return self.cold_ttft_s / self.warm_ttft_s

    @property
    def passed(self) -> bool:
        batches = self.speedup >= LEAST_SPEEDUP or self.share >= LEAST_SHARE
        return batches and self.ttft_ratio >= LEAST_TTFT_RATIO


def batching_gain(work: Workload) -> BatchingGain:
    """Sixteen requests at once against one after another, and a shared prefix against none.

    Raises:
        EngineError: the tokens differ between the two ways.
    """
    least = work.prompt_tokens + work.output_tokens
    served = Served(work, least, max(least, PREFIX_TOKENS + SUFFIX_TOKENS + 1))
    rng = np.random.default_rng(PROMPT_SEED)
    trials = [_trial(served, rng) for _ in range(work.trials)]
    medians = (float(np.median(column)) for column in zip(*trials, strict=True))
    return BatchingGain(_prefix_tokens(served), *medians)


def _prefix_tokens(served: Served) -> int:
    """Length of the shared prefix: as much of the context as fits, in whole blocks of any size."""
    return min(PREFIX_TOKENS, (served.max_tokens - SUFFIX_TOKENS - 1) // 64 * 64)


def _trial(served: Served, rng: np.random.Generator) -> tuple[float, ...]:
    work = served.work

    def prompts(count: int, tokens: int) -> list[list[int]]:
        return rng.integers(0, served.vocab, (count, tokens)).tolist()

    def run(lists: list[list[int]], once: Callable[[list[Sequence]], float]) -> tuple[float, list]:
        sequences = [served.sequence(prompt, work.output_tokens) for prompt in lists]
        seconds = once(sequences)
        return NUM_SLOTS * work.output_tokens / seconds, [s.output_tokens for s in sequences]

    token_lists = prompts(NUM_SLOTS, work.prompt_tokens)
    served.engine.forget_all()  # nothing of the prompts is cached, for either way
    alone, wanted = run(token_lists, lambda all_: sum(served.run([one]) for one in all_))
    served.engine.forget_all()
    together, tokens = run(token_lists, served.run)
    if tokens != wanted:
        raise EngineError("requests gave other tokens together than one after another")
    parts = _parts(served, prompts(NUM_SLOTS, work.prompt_tokens))
    prefix, (first, second) = prompts(1, _prefix_tokens(served))[0], prompts(2, SUFFIX_TOKENS)
    cold, warm = (served.sequence([*prefix, *suffix], 1) for suffix in (first, second))
    return alone, together, parts, served.run([cold]), served.run([warm])


def _parts(served: Served, prompts: list[list[int]]) -> float:
    """Tokens per second if prompts and decode steps ran as fast as by themselves."""
    served.engine.forget_all()
    output_tokens = served.work.output_tokens
    first_s = served.run([served.sequence(prompt, 1) for prompt in prompts])
    sequences = [served.sequence(prompt, output_tokens) for prompt in prompts]
    served.run(sequences)  # their prompts are cached: what counts comes after
    started = max(s.times.tokens_s[0] for s in sequences)
    after = sum(t > started for s in sequences for t in s.times.tokens_s)
    decode_s = max(s.times.tokens_s[-1] for s in sequences) - started
    each_s = decode_s / after if after else 0.0
    return len(prompts) * output_tokens / (first_s + each_s * len(prompts) * (output_tokens - 1))


def gain_lines(gain: BatchingGain) -> str:
    """Lines of the batching gain for the terminal."""
    return (
        f"{NUM_SLOTS} requests one after another {gain.alone_tok_per_s:.0f} tok/s, at once "
        f"{gain.together_tok_per_s:.0f} tok/s: {gain.speedup:.1f}x (at least "
        f"{LEAST_SPEEDUP:.0f}x, or {LEAST_SHARE:.0%} of what prompts and decode steps by "
        f"themselves allow; here {gain.share:.0%}), the same tokens\n"
        f"prompt of {gain.prefix_tokens + SUFFIX_TOKENS} tokens: first token after "
        f"{1000 * gain.cold_ttft_s:.0f} ms, with {gain.prefix_tokens} of them cached after "
        f"{1000 * gain.warm_ttft_s:.0f} ms: {gain.ttft_ratio:.1f}x (at least "
        f"{LEAST_TTFT_RATIO:.0f}x)\n"
        f"{'passed' if gain.passed else 'FAILED'}"
    )
