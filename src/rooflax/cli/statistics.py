"""Statistics of `generate` and `chat`: timings and memory, as JSON and as lines."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rooflax.cli.terminal import is_terminal, say, seconds
from rooflax.errors import EngineError
from rooflax.nn.execution import gib
from rooflax.nn.host_memory import peak_rss_bytes

if TYPE_CHECKING:
    from rooflax.llm import LLM, Completion


def memory(llm: LLM) -> dict[str, int | None]:
    """The "memory" of `generate --json`."""
    held = bytes_per_device(llm.model.weights)
    if llm.offload_plan is not None:  # one device, and layers that come and go
        held = llm.model.weights_bytes
    return {
        "peak_rss_bytes": peak_rss_bytes(),
        "weights_bytes": llm.model.weights_bytes,
        "weights_bytes_per_device": held,
        "kv_cache_bytes": llm.kv_cache_bytes,
    }


def bytes_per_device(arrays: Any) -> int:
    """The most bytes that any one device holds of these arrays."""
    import jax

    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(arrays):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values(), default=0)


def offloading(llm: LLM, completions: Sequence[Completion]) -> dict[str, Any] | None:
    """The "offloading" of `generate --json`; None where all layers are in memory."""
    from rooflax.models.offloading import OffloadedModel

    if not isinstance(llm.model, OffloadedModel):
        return None
    plan, counts = llm.model.plan, llm.model.counts
    tokens = sum(len(c.tokens) for c in completions)
    return {
        "layers": len(plan.layer_bytes),
        "layers_offloaded": len(plan.offloaded),
        "bytes_per_step": plan.bytes_per_step,
        "steps": counts.num_steps,
        "bytes_per_token": counts.num_bytes / max(tokens, 1),
        "gb_per_s": counts.num_bytes / counts.seconds / 1e9 if counts.seconds else 0.0,
    }


def num_devices(llm: LLM) -> int:
    return 1 if llm.mesh is None else llm.mesh.size


def say_statistics(llm: LLM, completions: Sequence[Completion]) -> None:
    """A small table on stderr; fits eighty columns."""
    offloaded = offloading(llm, completions)
    for line in lines(completions, memory(llm), num_devices(llm), offloaded):
        say(line, is_faint=True)


def lines(
    completions: Sequence[Completion],
    used: Mapping[str, int | None],
    devices: int,
    offloaded: Mapping[str, Any] | None = None,
) -> list[str]:
    """The table's lines."""
    first = completions[0]
    times = first.timings
    count = sum(len(c.tokens) for c in completions)
    compiled = int(times["compilations"])
    compiling = f"{seconds(times['compile_s'])} ({counted(compiled, 'compilation')})"
    if not compiled:
        compiling = f"nothing; programs from the cache in {seconds(times['compile_s'])}"
    prompt = counted(len(first.prompt_tokens), "token")
    first_token = seconds(times["ttft_s"])
    rate = times["decode_tok_per_s"] * len(completions)
    speed = f"{rate:,.1f} tok/s" if rate else "one step only"
    several = f" in {len(completions)} samples" if len(completions) > 1 else ""
    where = f" on each of {devices} devices" if devices > 1 else ""
    peak = used["peak_rss_bytes"]
    peak_text = "" if peak is None else f", peak {gib(peak)}"
    weights = gib(used["weights_bytes_per_device"] or 0)
    kv_cache = gib(used["kv_cache_bytes"] or 0)
    drafts = sum(c.num_draft_tokens for c in completions)
    accepted = sum(c.num_accepted_tokens for c in completions)
    drafted = f", {accepted:,} of {drafts:,} draft tokens accepted" if drafts else ""
    return [
        f"load     {seconds(times['load_s'])}",
        f"compile  {compiling}",
        f"prefill  {prompt}, {times['prefill_tok_per_s']:,.1f} tok/s, first after {first_token}",
        f"decode   {counted(count, 'token')}{several}, {speed}{drafted}",
        *_offloading_lines(offloaded),
        f"memory   weights {weights}{where}, KV cache {kv_cache}{peak_text}",
    ]


def _offloading_lines(offloaded: Mapping[str, Any] | None) -> list[str]:
    if offloaded is None:
        return []
    layers = f"{offloaded['layers_offloaded']} of {offloaded['layers']} layers"
    per_token = gib(int(offloaded["bytes_per_token"]))
    return [f"offload  {layers}, {per_token} per token, {offloaded['gb_per_s']:.2f} GB/s"]


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def sample(completion: Completion) -> dict[str, Any]:
    """A completion as JSON.

    Raises:
        EngineError: it holds what JSON cannot.
    """
    row: dict[str, Any] = {
        "tokens": list(completion.tokens),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
    }
    if completion.score is not None:
        row["score"] = completion.score
    if completion.logprobs is not None:
        values = [x for e in completion.logprobs for x in (e.logprob, *(v for _, v in e.top))]
        if not all(map(math.isfinite, values)):
            raise EngineError(
                "the model gives log-probabilities that are not finite, which JSON cannot hold; "
                "look for NaN weights with --check."
            )
        row["logprobs"] = [
            {"logprob": entry.logprob, "top": [list(pair) for pair in entry.top]}
            for entry in completion.logprobs
        ]
    return row


class Speed:
    """The tokens of an answer, and the seconds between the first and the last of them."""

    def __init__(self, quiet: bool):
        self.is_shown = not quiet and is_terminal(sys.stdin)
        """To a person who reads along."""
        self._tokens = self._first_tokens = 0
        self._first_s = self._last_s = 0.0

    def count(self, tokens: int, total: int | None = None) -> None:
        """Notes that tokens have come.

        Args:
            total: of the whole answer, where the number so far was not known.
        """
        if total is not None:
            self._tokens, self._first_tokens = total, 1
            return
        self._last_s = time.monotonic()
        if not self._first_s:
            self._first_s, self._first_tokens = self._last_s, tokens
        self._tokens += tokens

    def say(self) -> None:
        """Says both, faint."""
        if not self.is_shown or not self._tokens:
            return
        spent, later = self._last_s - self._first_s, self._tokens - self._first_tokens
        rate = f", {later / spent:,.0f} tokens/s" if spent and later else ""
        say(f"({counted(self._tokens, 'token')}{rate})", is_faint=True)
