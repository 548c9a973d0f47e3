"""Answers a file of prompts on a Ray cluster, with a model in each actor or through a server.

    pip install 'ray[data]==2.60.0' rooflax
    python examples/ray_data.py prompts.jsonl answers/ --model Qwen/Qwen3-0.6B --replicas 4
    python examples/ray_data.py prompts.jsonl answers/ --url http://127.0.0.1:8000

Lines of the input are {"prompt": ...}; those of the output have "text" too. Decoding is greedy.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray

from rooflax import LLM


class Generate:
    """One model in one actor; an `LLM` travels as its arguments, and opens where it arrives."""

    def __init__(self, llm: LLM, asks: dict[str, Any]):
        self.llm, self.asks = llm, asks

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        done = self.llm.generate(list(batch["prompt"]), **self.asks)
        return batch | {"text": [one.text for one in done]}


def through(url: str, rows: Any, asks: dict[str, Any]) -> Any:
    """The rows with their answers from a server that speaks OpenAI's API."""
    from ray.data.llm import HttpRequestProcessorConfig, build_processor

    config = HttpRequestProcessorConfig(url=f"{url}/v1/completions", concurrency=2, batch_size=8)

    def payload(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"payload": asks | {"prompt": row["prompt"]}}

    def answer(row: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": row["prompt"], "text": row["http_response"]["choices"][0]["text"]}

    return build_processor(config, payload, answer)(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("input", "output"):
        parser.add_argument(name)
    for name, default in (("--model", "rooflax-chat-5m"), ("--url", None)):
        parser.add_argument(name, default=default)
    parser.add_argument("--replicas", type=int, default=2)
    args = parser.parse_args()
    rows, asks = ray.data.read_json(args.input), {"temperature": 0.0, "max_tokens": 64}
    if args.url is None:
        how = {"fn_constructor_kwargs": {"llm": LLM(args.model), "asks": asks}, "batch_size": 8}
        done = rows.map_batches(Generate, concurrency=args.replicas, num_cpus=1, **how)
    else:
        done = through(args.url, rows, asks)
    done.write_json(args.output)
