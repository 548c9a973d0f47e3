"""Many replicas on paper: the real scheduler and block pool, with measured costs of steps.

    python -m tools.simulate               simulates everything; writes docs/scale.md's tables
    python -m tools.simulate --render      writes the tables from docs/scale.json
    python -m tools.simulate --gb-per-s 12 other networks between prefill and decode replicas

A replica is one H200 with LLaMA 3.1 8B in bfloat16. Requests come whatever is open (an open loop).
Of many replicas behind a router, the router sees every request, and three replicas run: one from
the middle of each share of `STRATA`, ordered by how many requests they got, weighted by that share.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
from bisect import bisect
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.pages import with_blocks
from rooflax.engine.block_manager import BlockManager
from rooflax.engine.buckets import Buckets
from rooflax.engine.sampling_params import SamplingParams
from rooflax.engine.scheduler import Scheduler, StepPlan
from rooflax.engine.sequence import Sequence
from rooflax.nn.engine_config import EngineConfig
from rooflax.nn.execution import ExecutionOptions

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, FIGURES = DOCS / "scale.md", DOCS / "scale.json"
BLOCK_SIZE, KV_BYTES = 16, 131_072
"""Tokens of a block on a GPU, and bytes of a token's K and V: 32 layers x 2 x 8 heads x 128 x 2."""
KV_TOKENS = int((141e9 - 16.06e9) / 2 / KV_BYTES)
"""As a server takes them: half of what the weights leave."""
SLOTS, QUEUE, LONGEST, CHUNK = 128, 256, 32_768, 2048
MAX_TTFT_S, MAX_ITL_S = 2.0, 0.05
REFUSED_S = 600.0
"""What a refused request counts as in times to the first token."""
STRATA, ALL_RUN = (0.5, 0.95, 1.0), 8
"""Shares of many replicas of which one runs, and how many are few enough to run all."""


@dataclass(frozen=True)
class Costs:
    """Seconds of device calls, from runs on an H200 (docs/gpu.md).

    Attributes:
        points: tokens of a step, and its seconds without attention; between them a line.
        dispatch_s: of a dispatch of decode steps, besides these.
        context_s: of a token that a decode row sees.
        pair_s: of a query of a prompt and a key.
    """

    points: tuple[tuple[int, float], ...] = (
        (1, 4.93e-3), (128, 8.49e-3), (512, 16.96e-3), (4096, 109.0e-3),
    )  # fmt: skip
    dispatch_s: float = 1.2e-3
    context_s: float = 32.2e-9
    pair_s: float = 1.66e-9

    def tokens(self, count: int) -> float:
        """Seconds of a step of so many tokens, without attention."""
        at = min(max(bisect(self.points, (count, math.inf)), 1), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[at - 1 : at + 1]
        return y0 + (count - x0) * (y1 - y0) / (x1 - x0)

    def decode(self, rows: int, context: int, steps: int = 1) -> float:
        """Seconds of one dispatch; `context` is of all rows together."""
        return self.dispatch_s + steps * (self.tokens(rows) + self.context_s * context)

    def step(self, tokens: int, context: int, pairs: float) -> float:
        """Seconds of prompt chunks and decode rows together."""
        return self.tokens(tokens) + self.context_s * context + self.pair_s * pairs


@dataclass(frozen=True)
class Mix:
    """Lengths of requests: medians of log-normal ones (sigma 0.7, at most four times the median).

    Attributes:
        prefixes: different shared beginnings for each request a second; 0 is one for all.
        shared: tokens of a shared beginning.
        turns: mean number of requests of a session, each of which continues the one before.
        pause_s: mean time from an answer to the next request.
        seconds: simulated; the first third warms the caches up.
    """

    name: str
    prefixes: float
    shared: int
    turns: int
    message: int
    answer: int
    pause_s: float
    seconds: float


MIXES = {
    mix.name: mix
    for mix in (
        Mix("chat", 0, 500, 4, 60, 200, 15, 30),
        Mix("agents", 8, 6000, 4, 300, 60, 2, 30),
        Mix("long", 0, 0, 1, 150, 1000, 0, 60),
    )
}


class Request(NamedTuple):
    """A request of a session.

    Attributes:
    own: tokens of the prompt behind the shared ones.
    """

    arrival_s: float
    session: int
    prefix: int
    shared: int
    own: int
    answer: int

    def ids(self, begin: int, end: int) -> list[int]:
        """Tokens of the conversation; equal beginnings are equal."""
        split = self.shared
        first = range(_base(-1 - self.prefix) + begin, _base(-1 - self.prefix) + min(end, split))
        base = _base(self.session) - split
        return [*first, *range(base + max(begin, split), base + end)]


@lru_cache(maxsize=100_000)
def _base(stream: int) -> int:
    return random.Random(stream).getrandbits(30)


def requests(mix: Mix, rate: float, seed: int = 0) -> Iterator[Request]:
    """Requests in order of arrival, `rate` a second; sessions that began earlier are under way."""
    rng = random.Random(f"{seed} {mix.name}")
    weights = [1 / rank for rank in range(1, max(1, round(mix.prefixes * rate)) + 1)]
    popular = list(itertools.accumulate(weights))

    def length(median: int) -> int:
        return max(1, min(round(median * rng.lognormvariate(0, 0.7)), 4 * median))

    begun_s = -3.0 * mix.turns * mix.pause_s
    heap: list[tuple[float, int, int, int, int]] = []
    for session in itertools.count():
        begun_s += rng.expovariate(rate / mix.turns)
        while heap and heap[0][0] < min(begun_s, mix.seconds):
            arrival_s, key, prefix, own, left = heapq.heappop(heap)
            answer = length(mix.answer)
            if arrival_s >= 0:
                yield Request(arrival_s, key, prefix, mix.shared, own, answer)
            if left > 1:
                pause_s = 0.015 * answer + rng.expovariate(1 / mix.pause_s)
                own += answer + length(mix.message)
                heapq.heappush(heap, (arrival_s + pause_s, key, prefix, own, left - 1))
        if begun_s >= mix.seconds:
            return
        prefix = bisect(popular, rng.random() * popular[-1])
        turns = 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / mix.turns + 1e-12))
        heapq.heappush(heap, (begun_s, session, prefix, length(mix.message), turns))


class ReceivingBlocks(BlockManager):
    """Blocks of a decode replica: K and V of a prompt are there when its sequence is."""

    def num_cached(self, sequence: Sequence) -> int:
        arrived = sequence.schedule.num_preemptions == 0
        return sequence.num_tokens - 1 if arrived else super().num_cached(sequence)

    def admit(self, sequence: Sequence, num_cached: int) -> None:
        super().admit(sequence, super().num_cached(sequence))
        if sequence.num_computed_tokens < num_cached:
            self.allocate(sequence, num_cached)
            sequence.num_computed_tokens = num_cached


@dataclass
class Seen:
    """Requests of a replica after its warm-up, and how they went.

    Attributes:
        gaps_s: between tokens of different dispatches; `num_zero` come with the one before.
    """

    offered: int = 0
    finished: int = 0
    refused: int = 0
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    num_zero: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Replica:
    """One engine without a model.

    Args:
        budget: most tokens of a step (`max_tokens_per_step`).
        decode_steps: of a dispatch.
        kind: "both", or "prefill" or "decode" of replicas that have one part.
        transfer_s: of a token's K and V, from a prefill replica.
    """

    def __init__(
        self,
        costs: Costs,
        budget: int,
        decode_steps: int = 2,
        kind: str = "both",
        transfer_s: float = 0.0,
    ):
        self.costs, self.kind, self.transfer_s = costs, kind, transfer_s
        config = EngineConfig(
            options=ExecutionOptions(decode_steps=decode_steps), max_num_seqs=SLOTS,
            max_model_len=LONGEST, prefill_chunk=min(budget, CHUNK), max_tokens_per_step=budget,
            decode_steps=decode_steps,
        )  # fmt: skip
        shape = {"reads_in_place": True, "pads": True}
        self.buckets = Buckets.of_server(SLOTS, LONGEST, budget, **shape)
        blocks = (ReceivingBlocks if kind == "decode" else BlockManager)(
            (None,), (KV_TOKENS // BLOCK_SIZE,), BLOCK_SIZE
        )
        worth = self.buckets.worth_running
        self.scheduler = Scheduler(blocks, config, worth_running=worth)
        self._open: dict[int, tuple[Request, float | None]] = {}

    def run(self, jobs: Iterable[Request], warm_s: float = 0.0) -> Seen:
        """Serves the requests, in order of arrival, to their ends."""
        seen, now, coming = Seen(), 0.0, deque(enumerate(jobs))
        counted = {n for n, job in coming if job.arrival_s >= warm_s}
        seen.offered = len(counted)
        while coming or self.scheduler.has_unfinished:
            while coming and self._due(coming[0][1]) <= now:
                number, job = coming.popleft()
                if len(self.scheduler.waiting) + len(self.scheduler.running) >= SLOTS + QUEUE:
                    seen.refused += number in counted
                    continue
                self._add(number, job)
            plan = self.scheduler.plan()
            if plan is None:
                now = max(now, self._due(coming[0][1])) if coming else now
                continue
            now += self.seconds(plan)
            for sequence in plan.decodes:
                sequence.num_computed_tokens += plan.num_steps
                self._take(sequence, plan.num_steps, now, seen, counted)
            for sequence, count in plan.prefills:
                sequence.num_computed_tokens += count
                if sequence.num_uncomputed_tokens == 0:
                    self._take(sequence, 1, now, seen, counted)
            self.scheduler.finish_step(plan)
        return seen

    def _due(self, job: Request) -> float:
        return job.arrival_s + self.transfer_s * (job.shared + job.own)

    def _add(self, number: int, job: Request) -> None:
        prompt, answer = job.shared + job.own, job.answer
        last_s = None
        if self.kind == "decode":  # its first token is there
            prompt, answer, last_s = prompt + 1, max(1, answer - 1), job.arrival_s
        most = 1 if self.kind == "prefill" else answer
        ids = job.ids(0, prompt)
        self._open[number] = (job, last_s)
        self.scheduler.add(Sequence(number, ids, SamplingParams(), most, frozenset()))

    def seconds(self, plan: StepPlan) -> float:
        """Seconds of a plan, padded to its bucket."""
        context = sum(s.num_tokens for s in plan.decodes)
        if not plan.prefills:
            rows = self.buckets.decode(len(plan.decodes), 1).tokens
            return self.costs.decode(rows, context, plan.num_steps)
        shape = self.buckets.step(plan.num_tokens, 1)
        assert shape is not None
        pairs = sum(n * (s.num_computed_tokens + n / 2) for s, n in plan.prefills)
        return self.costs.step(shape.tokens, context, pairs)

    def _take(self, sequence: Sequence, n: int, now: float, seen: Seen, counted: set[int]) -> None:
        number = sequence.request_id
        job, last_s = self._open[number]
        sequence.tokens += job.ids(sequence.num_tokens, sequence.num_tokens + n)
        is_counted = number in counted
        if is_counted and last_s is None:
            seen.ttft_s.append(now - job.arrival_s)
            seen.prompt_tokens += sequence.num_prompt_tokens
            seen.cached_tokens += sequence.kv.num_cached_tokens or 0
        elif is_counted:
            seen.gaps_s.append(now - last_s)
            if sequence.num_output_tokens == n:  # of a decode replica, behind others
                seen.ttft_s.append(now - last_s)
        seen.num_zero += is_counted * (n - 1)
        self._open[number] = (job, now)
        if sequence.num_output_tokens >= sequence.max_tokens:
            sequence.finish("length")
            seen.finished += is_counted
            del self._open[number]


class Router:
    """Chooses a replica for each request, by what a gateway knows: who has what open, and where it
    sent which beginnings.

    A request is taken to be open for 15 ms a token of its answer. A replica is taken to remember as
    many beginnings as fill half of its KV cache.
    """

    def __init__(self, policy: str, replicas: int, seed: int = 0):
        self._choose: Callable[[Request], int] = getattr(self, f"_{policy.replace(' ', '_')}")
        self.open, self._rng, self._turn = [0] * replicas, random.Random(seed), 0
        self._ends: list[tuple[float, int]] = []
        self._home: dict[int, int] = {}
        self._holders: dict[int, list[int]] = {}
        self._held: list[OrderedDict[int, None]] = [OrderedDict() for _ in self.open]

    def choose(self, job: Request) -> int:
        while self._ends and self._ends[0][0] <= job.arrival_s:
            self.open[heapq.heappop(self._ends)[1]] -= 1
        at = self._choose(job)
        self.open[at] += 1
        heapq.heappush(self._ends, (job.arrival_s + 0.1 + 0.015 * job.answer, at))
        return at

    def _round_robin(self, job: Request) -> int:
        self._turn += 1
        return self._turn % len(self.open)

    def _least_busy(self, job: Request) -> int:
        """The less busy of two random ones."""
        return min((self._rng.randrange(len(self.open)) for _ in "ab"), key=self.open.__getitem__)

    def _session_hash(self, job: Request) -> int:
        return _base(job.session) % len(self.open)

    def _prefix_hash(self, job: Request) -> int:
        return _base(-1 - job.prefix) % len(self.open)

    def _prefix_aware(self, job: Request) -> int:
        """Where the session was, else where its beginning is, unless that is much busier."""
        holders = self._holders.setdefault(job.prefix, [])
        home = self._home.get(job.session)
        known = [home] if home is not None else holders and self._rng.choices(holders, k=2)
        at = min(known, key=self.open.__getitem__) if known else self._least_busy(job)
        if self.open[at] > 2 + 1.25 * len(self._ends) / len(self.open):
            at = self._least_busy(job)
        self._home[job.session] = at
        held = self._held[at]
        if job.prefix not in held:
            holders.append(at)
            if len(held) > KV_TOKENS / 2 / max(job.shared, 1):
                self._holders[held.popitem(last=False)[0]].remove(at)
        held[job.prefix] = None
        held.move_to_end(job.prefix)
        return at


def quantile(parts: list[tuple[list[float], float]], q: float) -> float:
    """Quantile of values with a weight each."""
    values = np.concatenate([np.asarray(part) for part, _ in parts])
    weights = np.concatenate([np.full(len(part), weight) for part, weight in parts])
    if not len(values):
        return 0.0
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, q * total[-1])])


def figures(runs: list[tuple[Seen, float]]) -> dict[str, Any]:
    """What replicas show together, each with a weight."""
    ttft = [(s.ttft_s + [REFUSED_S] * s.refused, w) for s, w in runs]
    gaps = [(s.gaps_s + [0.0] * s.num_zero, w) for s, w in runs]
    prompt = sum(w * s.prompt_tokens for s, w in runs)
    found = {f"ttft_p{p}_s": quantile(ttft, p / 100) for p in (50, 99)}
    found |= {f"itl_p{p}_s": quantile(gaps, p / 100) for p in (50, 99)}
    found["hits"] = sum(w * s.cached_tokens for s, w in runs) / max(prompt, 1)
    found["prompt_tokens"] = prompt / max(sum(w * len(s.ttft_s) for s, w in runs), 1)
    return {key: round(value, 4) for key, value in found.items()}


def evaluate(mix: Mix, rate: float, replicas: int = 1, policy: str = "round robin", **how: Any):
    """Figures at `rate` requests a second and replica."""
    router = Router(policy, replicas)
    given: list[list[Request]] = [[] for _ in range(replicas)]
    for job in requests(mix, rate * replicas):
        given[router.choose(job)].append(job)
    given.sort(key=len)
    runs, begin = [], 0
    shares = STRATA if replicas > ALL_RUN else [n / replicas for n in range(1, replicas + 1)]
    for end in sorted({math.ceil(share * replicas) for share in shares}):
        if end > begin:
            jobs = given[(begin + end) // 2]
            weight = sum(map(len, given[begin:end])) / max(len(jobs), 1)
            runs.append((Replica(Costs(), **how).run(jobs, mix.seconds / 3), weight))
            begin = end
    return {"rate": round(rate, 3)} | figures(runs)


def keeps(row: dict[str, Any]) -> bool:
    return row["ttft_p99_s"] <= MAX_TTFT_S and row["itl_p99_s"] <= MAX_ITL_S


def capacity(mix: Mix, within: float = 1.11, high: float = 24.0, **how: Any) -> dict[str, Any]:
    """Figures at the highest rate that keeps the objective, `within` a factor; 0 if 1 does not."""
    low, best = 1.0, {"rate": 0.0}
    while high / low > within:
        rate = math.sqrt(low * high)
        row = evaluate(mix, rate, **how)
        low, high, best = (rate, high, row) if keeps(row) else (low, rate, best)
    return best


STEPS = ((512, 2), (1024, 2), (2048, 2), (512, 1), (512, 4), (512, 16))
"""Tokens of a step, and decode steps of a dispatch."""
SIZES, BUDGET = (8, 64, 1000), 512
RATES = {"chat": 12.0, "agents": 6.0, "long": 4.0}
"""Requests a second and replica, where options are compared."""
POLICIES = {
    "chat": ("round robin", "session hash", "prefix aware"),
    "agents": ("round robin", "session hash", "prefix hash", "prefix aware"),
}


def steps(mix: Mix, budget: int, decode_steps: int) -> list[dict[str, Any]]:
    return [evaluate(mix, RATES[mix.name], budget=budget, decode_steps=decode_steps)]


def routing(mix: Mix, policy: str, replicas: int) -> list[dict[str, Any]]:
    return [evaluate(mix, RATES[mix.name], replicas, policy, budget=BUDGET)]


def parts(mix: Mix, gb_per_s: float) -> list[dict[str, Any]]:
    """Capacities of a replica that does both, a prefill and a decode replica, each for itself."""
    prefill = capacity(mix, high=96.0, budget=CHUNK, kind="prefill")
    transfer_s = KV_BYTES / (gb_per_s * 1e9)
    decode = capacity(mix, high=96.0, budget=BUDGET, kind="decode", transfer_s=transfer_s)
    return [capacity(mix, budget=BUDGET), prefill, decode]


def simulated(gb_per_s: float, workers: int) -> dict[str, Any]:
    """All figures, as docs/scale.json has them."""
    tasks: list[tuple[Any, ...]] = [
        (f"routing {m} {p} {n}", routing, MIXES[m], p, n)
        for m, policies in POLICIES.items()
        for p in policies
        for n in SIZES
    ]
    tasks += [(f"parts {m}", parts, mix, gb_per_s) for m, mix in MIXES.items()]
    tasks += [(f"steps {m} {b} {s}", steps, MIXES[m], b, s) for m in MIXES for b, s in STEPS]
    with ProcessPoolExecutor(workers) as pool:
        futures = {name: pool.submit(function, *args) for name, function, *args in tasks}
        return {"gb_per_s": gb_per_s, "rows": {n: f.result() for n, f in futures.items()}}


def _table(head: str, rows: Iterable[str]) -> str:
    columns = head.count("|") + 1
    return "\n".join([f"| {head} |", "| --- " * columns + "|", *(f"| {row} |" for row in rows)])


def _cells(row: dict[str, Any]) -> str:
    if not row["rate"]:
        return "none |  |  |  |  | "
    times = [f"{1000 * row[f'{k}_p{p}_s']:,.0f}" for k in ("ttft", "itl") for p in (50, 99)]
    return " | ".join([f"{row['rate']:.1f}", *times, f"{row['hits']:.0%}"])


TIMES = "requests/s | TTFT p50 | p99 | ITL p50 | p99 | hits"


def best_split(replicas: int, prefill: float, decode: float) -> tuple[int, float]:
    """Prefill replicas, and requests a second of all replicas together."""
    rates = [(min(n * prefill, (replicas - n) * decode), n) for n in range(1, replicas)]
    rate, count = max(rates)
    return count, rate


def tables(document: dict[str, Any]) -> dict[str, str]:
    """Blocks of docs/scale.md by their names."""
    rows = document["rows"]
    found: dict[str, list[str]] = {"steps": [], "routing": [], "parts": []}
    for mix in MIXES:
        for budget, count in STEPS:
            (row,) = rows[f"steps {mix} {budget} {count}"]
            found["steps"].append(f"{mix} | {budget:,} | {count} | {_cells(row)}")
        for policy, replicas in itertools.product(POLICIES.get(mix, ()), SIZES):
            (row,) = rows[f"routing {mix} {policy} {replicas}"]
            found["routing"].append(f"{mix} | {policy} | {replicas:,} | {_cells(row)}")
        kinds = rows[f"parts {mix}"]
        both, prefill, decode = (row["rate"] for row in kinds)
        sent = decode * kinds[1]["prompt_tokens"] * KV_BYTES / 1e9
        cells = [mix, *(f"{number:.1f}" for number in (both, prefill, decode, sent))]
        for replicas in SIZES:
            count, rate = best_split(replicas, prefill, decode)
            cells.append(f"{count} + {replicas - count}: {rate / replicas / both:.2f}x")
        found["parts"].append(" | ".join(cells))
    heads = {
        "steps": f"mix | tokens a step | steps a dispatch | {TIMES}",
        "routing": f"mix | policy | replicas | {TIMES}",
        "parts": "mix | both | prefill alone | decode alone | GB/s | 8 | 64 | 1,000",
    }
    return {name: _table(heads[name], lines) for name, lines in found.items()}


def page_with_figures(page: str, document: dict[str, Any]) -> str:
    """The page with what is between its markers replaced."""
    return with_blocks(page, tables(document))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--render", action="store_true", help="simulate nothing")
    parser.add_argument("--gb-per-s", metavar="N", type=float, default=40.0, help="default 40")
    parser.add_argument("--workers", metavar="N", type=int, default=2, help="processes; default 2")
    args = parser.parse_args()
    if not args.render:
        document = simulated(args.gb_per_s, args.workers)
        FIGURES.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    document = json.loads(FIGURES.read_text(encoding="utf-8"))
    PAGE.write_text(page_with_figures(PAGE.read_text(encoding="utf-8"), document), encoding="utf-8")


if __name__ == "__main__":
    main()
