"""What LoRA adapters in slots cost while a model decodes, beside the model alone.

`python benchmarks/adapters.py [--model preset:qwen2.5-0.5b] [-q int8] [--cases 1x1 4x4 16x4]`
A case is ROWSxADAPTERS: rows have the adapters in turn, of random numbers, rank 16 and all linear
layers. The model alone and with adapters run in turn in one process, at equal prompts. Prints one
line per case; exits with 1 if 16 rows with four adapters have less than 85% of the model's speed.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median

import numpy as np

from rooflax import LLM, SamplingParams
from rooflax.bench.figures import MIN_PAIRS, paired_ratio
from rooflax.bench.timeline import Timeline
from rooflax.engine.compilation import count_compilations
from rooflax.engine.engine import Engine
from rooflax.engine.sequence import KVState, Sequence
from rooflax.models.adapters import HEAD, LowRank, banked, targets
from rooflax.models.model import Model
from rooflax.models.offloading import whole
from rooflax.nn.engine_config import EngineConfig

LEAST_RATIO, JUDGED = 0.85, "16x4"
PROMPT = 16


def with_adapters(llm: LLM, count: int, rank: int) -> Model:
    """The model with this many random adapters beside its weights, which it shares."""
    known = targets(llm.info.family, llm.info.config)
    modules = [name for name in known if name != HEAD]
    rng = np.random.default_rng(0)

    def factor(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) * np.float32(0.01)

    banks = [
        {
            name: LowRank(factor(rank, known[name].inputs), factor(known[name].outputs, rank), 2.0)
            for name in modules
        }
        for _ in range(count)
    ]
    return banked(whole(llm.model), banks, modules, rank, llm.plan.storage.adapter_dtype)


class Side:
    """An engine of one model that decodes rows."""

    def __init__(self, llm: LLM, model: Model, rows: int, adapters: int, tokens: int):
        self.adapters, self.tokens = adapters, tokens
        self.prompts = [[7 + row] * PROMPT for row in range(rows)]
        self.params = SamplingParams(temperature=0.0).with_defaults(llm.processor.default_values())
        self.engine = Engine(
            model,
            EngineConfig(
                options=llm.options,
                max_num_seqs=rows,
                max_model_len=PROMPT + tokens,
                kv_dtype=llm.plan.kv_dtype,
                prefix_caching=False,
            ),
        )

    def speed(self) -> float:
        """Tokens per second of all rows after their first."""
        rows = []
        for row, prompt in enumerate(self.prompts):
            slot = 1 + row % self.adapters if self.adapters else 0
            kv = KVState(cache_salt=str(slot), adapter=slot)
            rows.append(Sequence(row, prompt, self.params, self.tokens, frozenset(), kv=kv))
        self.engine.warm_up(rows)
        start = time.perf_counter()
        self.engine.add(rows)
        while self.engine.has_unfinished:
            self.engine.step()
        times, tokens = ([s.times.tokens_s for s in rows], [tuple(s.output_tokens) for s in rows])
        return Timeline(start, times, tokens).decode_tok_per_s


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("-q", "--quantize")
    parser.add_argument(
        "--cases", nargs="*", default=["1x1", "4x4", "16x4"], metavar="ROWSxADAPTERS"
    )
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--trials", type=int, default=9)
    args = parser.parse_args()
    if args.trials < MIN_PAIRS:
        parser.error(f"--trials must be at least {MIN_PAIRS}")
    llm, passed = LLM(args.model, quantize=args.quantize, max_model_len=PROMPT + args.tokens), True
    cases = {name: tuple(map(int, name.split("x"))) for name in args.cases}
    models = {count: with_adapters(llm, count, args.rank) for _, count in cases.values()}
    for name, (rows, count) in cases.items():
        alone = Side(llm, whole(llm.model), rows, 0, args.tokens)
        beside = Side(llm, models[count], rows, count, args.tokens)
        pairs: list[tuple[float, float]] = []
        for trial in range(args.trials + 1):  # the first one warms up
            sides = (alone, beside) if trial % 2 else (beside, alone)
            with count_compilations() as compiled:
                found = {side: side.speed() for side in sides}
            if trial:
                assert compiled.compilations == 0
                pairs.append((found[alone], found[beside]))
        base, adapted = zip(*pairs, strict=True)
        ratio = paired_ratio(base, adapted)
        passed &= name != JUDGED or ratio.ratio >= LEAST_RATIO
        print(
            f"{llm.info.name} {llm.format}, {rows} rows, {count} adapters of rank {args.rank}: "
            f"{median(base):,.0f} -> {median(adapted):,.0f} tok/s, {ratio.ratio:.3f} "
            f"({ratio.low:.3f} to {ratio.high:.3f})",
            flush=True,
        )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
