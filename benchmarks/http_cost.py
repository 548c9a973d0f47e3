"""What HTTP costs: decoding and first tokens through `rooflax serve` and from AsyncLLM.

`python benchmarks/http_cost.py [MODEL ...] [--quantize int8] [--streams 1 16 64] [--json]`
As many prompts go to a server in a process beside this one and to an AsyncLLM in this one, in
turns. Decoding is measured while all streams decode: tokens after the last stream's first, until
the first stream ends. "Whole" is all tokens over the time from the start to the last, prompts
included. Exits with 1 if a mean ratio of decoding is below its least, or an idle first token takes
over 3 ms more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from bisect import bisect_right
from operator import itemgetter
from typing import Any

import numpy as np

from rooflax import AsyncLLM, SamplingParams
from rooflax.bench.figures import MIN_PAIRS, paired_ratio
from rooflax.bench.load import LoadTarget, answered, closed_loop
from rooflax.cli.own_server import own_server
from rooflax.http_client import Server

LEAST = {1: 0.97, 16: 0.97, 64: 0.95}
MOST_TTFT_S = 0.003
PROMPT_TOKENS, TTFT_PROMPT_TOKENS = 16, 64


Progress = list[tuple[float, int]]
"""Of a stream: seconds from the start to each piece, and how many tokens there are by then."""


class Sides:
    """A server, and an engine of the same model."""

    def __init__(self, target: LoadTarget, engine: AsyncLLM):
        self.target, self.engine = target, engine
        self._rng = np.random.default_rng(0)
        self.client_s = self.wall_s = 0.0

    def prompts(self, count: int, size: int) -> list[list[int]]:
        """Not asked before, so that nothing is cached."""
        return self._rng.integers(0, self.target.vocab_size, (count, size)).tolist()

    async def by_server(self, prompts: list[list[int]], tokens: int) -> list[Progress]:
        requests = [self._request(prompt, tokens) for prompt in prompts]
        before, started = time.process_time(), time.perf_counter()
        replies = await closed_loop(self.target.client, requests, len(requests))
        self.client_s += time.process_time() - before
        self.wall_s += time.perf_counter() - started
        found = []
        for due_s, reply in replies:
            assert not isinstance(reply, str), reply
            one = answered(due_s, reply)
            assert one.error is None, one
            assert one.output_tokens == tokens, one
            chunks = [(at, json.loads(data)) for at, data in reply.events() if data != "[DONE]"]
            found.append(
                [(at - started, chunk["usage"]["completion_tokens"]) for at, chunk in chunks]
            )
        return found

    def _request(self, prompt: list[int], tokens: int) -> bytes:
        body = {
            "model": self.target.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
        return self.target.client.server.request("/v1/completions", body)

    async def by_engine(self, prompts: list[list[int]], tokens: int) -> list[Progress]:
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        started = time.perf_counter()

        async def one(prompt: list[int]) -> Progress:
            progress, count = [], 0
            async for delta in self.engine.stream(prompt, params):
                count += len(delta.tokens)
                progress.append((time.perf_counter() - started, count))
            return progress

        return list(await asyncio.gather(*map(one, prompts)))


def decode_tok_per_s(streams: list[Progress]) -> float:
    """While all streams decode: what comes after each has its first token, until one has its last.
    A server's requests come one after another; this leaves out the prompts of the late ones."""
    begin, end = max(of[0][0] for of in streams), min(of[-1][0] for of in streams)
    tokens = sum(_tokens_at(of, end) - _tokens_at(of, begin) for of in streams)
    return tokens / (end - begin)


def _tokens_at(progress: Progress, at_s: float) -> int:
    return progress[bisect_right(progress, at_s, key=itemgetter(0)) - 1][1]


def whole_tok_per_s(streams: list[Progress]) -> float:
    """All tokens, over the time from the start to the last."""
    return sum(of[-1][1] for of in streams) / max(of[-1][0] for of in streams)


RATES = {"decode": decode_tok_per_s, "whole": whole_tok_per_s}


async def measure(sides: Sides, streams: list[int], tokens: int, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {"rows": [], "ttft": {}}
    ways = {"server": sides.by_server, "engine": sides.by_engine}
    for count in streams:
        trials: dict[str, list[list[Progress]]] = {name: [] for name in ways}
        sides.client_s = sides.wall_s = 0.0
        for number in range(rounds + 1):
            order = list(ways) if number % 2 else list(reversed(ways))
            for name in order:
                times = await ways[name](sides.prompts(count, PROMPT_TOKENS), tokens)
                if number:  # the first one warms up
                    trials[name].append(times)
        row: dict[str, Any] = {"streams": count}
        for kind, rate in RATES.items():
            rates = {name: list(map(rate, taken)) for name, taken in trials.items()}
            row[kind] = {f"{name}_tok_per_s": statistics.median(of) for name, of in rates.items()}
            row[kind]["ratio"] = paired_ratio(rates["engine"], rates["server"]).as_json()
        row["client_share_of_a_core"] = sides.client_s / sides.wall_s
        found["rows"].append(row)
    firsts: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(8 * rounds):
        for name in list(ways) if number % 2 else list(reversed(ways)):
            await asyncio.sleep(0.01)
            (((first_s, _), *_),) = await ways[name](sides.prompts(1, TTFT_PROMPT_TOKENS), 2)
            firsts[name].append(first_s)
    found["ttft"] = {f"{name}_s": statistics.median(values) for name, values in firsts.items()}
    pairs = zip(firsts["server"], firsts["engine"], strict=True)
    found["ttft"]["more_s"] = statistics.median(server - engine for server, engine in pairs)
    return found


async def one_model(model: str | None, url: str, engine: AsyncLLM, args: Any) -> dict[str, Any]:
    async with LoadTarget(Server.of(url)) as target, engine:
        found = await measure(Sides(target, engine), args.streams, args.tokens, args.rounds)
    rows = found["rows"]
    least = [(row["decode"]["ratio"]["ratio"], LEAST.get(row["streams"], 0.95)) for row in rows]
    passed = all(ratio >= wanted for ratio, wanted in least)
    passed &= found["ttft"]["more_s"] <= MOST_TTFT_S
    return {"model": target.model, "quantize": args.quantize, **found, "passed": passed}


def lines(found: dict[str, Any]) -> list[str]:
    said = [f"{found['model']} {found['quantize'] or ''}"]
    for row in found["rows"]:
        for kind in RATES:
            one, ratio = row[kind], row[kind]["ratio"]
            said.append(
                f"  {row['streams']:3d} streams, {kind:6s}: server {one['server_tok_per_s']:7.0f} "
                f"tok/s, engine {one['engine_tok_per_s']:7.0f}: {ratio['ratio']:.3f} "
                f"({ratio['low']:.3f} to {ratio['high']:.3f})"
            )
        said.append(f"      the client used {row['client_share_of_a_core']:.0%} of a core")
    ttft = found["ttft"]
    said.append(
        f"  idle first token: server {1000 * ttft['server_s']:.2f} ms, engine "
        f"{1000 * ttft['engine_s']:.2f} ms: {1000 * ttft['more_s']:+.2f} ms"
    )
    return [*said, "  passed" if found["passed"] else "  FAILED"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", metavar="MODEL", nargs="*", default=[None])
    parser.add_argument("--quantize", choices=("int8", "int4"))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.rounds < MIN_PAIRS:
        parser.error(f"--rounds is {args.rounds}; a comparison needs at least {MIN_PAIRS}.")
    results = []
    for model in args.models:
        most = max(args.streams)
        words = ["--max-num-seqs", str(most), "--max-model-len", "512"]
        words += ["-q", args.quantize] if args.quantize else []
        model = model or "rooflax-chat-5m"
        with own_server(model, words) as url:
            engine = AsyncLLM(model, quantize=args.quantize, max_num_seqs=most, max_model_len=512)
            results.append(asyncio.run(one_model(model, url, engine, args)))
        if not args.json:
            print("\n".join(lines(results[-1])), flush=True)
    if args.json:
        print(json.dumps({"results": results}, indent=2))
    return 0 if all(found["passed"] for found in results) else 1


if __name__ == "__main__":
    sys.exit(main())
