"""What draws cost over greedy decoding where no token stands out: random weights, flat logits.

`python benchmarks/draws.py [--model preset:gpt2] [--quantize int8] [--rows 1 8] [--tokens 64]`
First the native sampler alone, one row, by vocabulary and wish; then decoding, greedy and drawing
interleaved. Exits with 1 if a median ratio of drawing to greedy is below 0.8.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from rooflax import LLM, SamplingParams
from rooflax.ops import sampling_columns
from rooflax.ops.sampling import TokenCounts, sample

LEAST_RATIO = 0.8
TRIALS = 5
OFF = {
    "temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": 1, "sample_index": 0, "top_k": 0,
    "num_logprobs": -1, "min_position": 0, "num_beams": 1, "is_guided": 0,
}  # fmt: skip
WISHES = {
    "greedy": {},
    "all tokens": {"temperature": 1.0},
    "temperature 0.8": {"temperature": 0.8},
    "top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "top-p 0.5": {"temperature": 1.0, "top_p": 0.5},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "top-k 40": {"temperature": 1.0, "top_k": 40},
    "top-k 20,000": {"temperature": 1.0, "top_k": 20_000},
    "top-k 20,000 and top-p 0.95": {"temperature": 1.0, "top_k": 20_000, "top_p": 0.95},
}
DRAWS = {
    "top-p 0.95": SamplingParams(temperature=1.0, top_p=0.95, seed=1),
    "min-p 0.05": SamplingParams(temperature=1.0, min_p=0.05, seed=1),
}


def sampler(vocab: int, wish: dict[str, float], spread: float) -> Callable[[], object]:
    """A call of the sampler for one row of normal logits."""
    rows = sampling_columns.empty(1)
    sampling_columns.write(rows[0], OFF | wish, {}, [], [])
    logits = np.random.default_rng(0).standard_normal((1, vocab)) * spread
    zero = jnp.zeros(1, jnp.int32)
    given = (
        jnp.asarray(logits, jnp.float32), jnp.asarray(rows), zero,
        TokenCounts(jnp.zeros((1, vocab), bool), jnp.zeros((1, vocab), jnp.int32)), zero,
    )  # fmt: skip
    run = jax.jit(sample)
    return lambda: jax.block_until_ready(run(*given))


def shortest_us(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(30):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times) * 1e6


def decode_speeds(llm: LLM, rows: int, tokens: int) -> dict[str, list[float]]:
    """Tokens per second of all rows together, greedy first, per trial."""
    prompts = [[7 + row] * 16 for row in range(rows)]
    asked = {"greedy": SamplingParams(temperature=0.0), **DRAWS}
    asked = {
        name: SamplingParams(**{**vars(p), "max_tokens": tokens, "ignore_eos": True})
        for name, p in asked.items()
    }
    speeds: dict[str, list[float]] = {name: [] for name in asked}
    for trial in range(TRIALS + 1):
        for name, params in asked.items():
            done = llm.generate(prompts, params)
            if trial:  # the first one warms up
                speeds[name].append(sum(c.timings["decode_tok_per_s"] for c in done))
    return speeds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="preset:gpt2")
    parser.add_argument("-q", "--quantize")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--no-alone", action="store_true", help="without the sampler alone")
    args = parser.parse_args()
    for vocab in () if args.no_alone else (50_257, 151_936):
        for spread in (0.5, 3.0):
            print(f"one row, {vocab:,} tokens, normal logits times {spread}")
            for name, wish in WISHES.items():
                print(f"  {name:28} {shortest_us(sampler(vocab, wish, spread)):7.0f} us")
    is_cheap = True
    llm = LLM(args.model, quantize=args.quantize, max_num_seqs=max(args.rows, default=1))
    for rows in args.rows:
        speeds = decode_speeds(llm, rows, args.tokens)
        for name, found in speeds.items():
            pairs = zip(found, speeds["greedy"], strict=True)
            ratio = statistics.median(draw / greedy for draw, greedy in pairs)
            is_cheap &= ratio >= LEAST_RATIO
            speed = f"{statistics.median(found):6.0f} tok/s, {ratio:.2f}x of greedy"
            print(f"{llm.info.name} {llm.format}, {rows} rows, {name:12} {speed}")
    return 0 if is_cheap else 1


if __name__ == "__main__":
    sys.exit(main())
