"""Load on an OpenAI server: what is asked, when, and what came of it. Needs no jax.

Lengths, prompts and arrivals follow a stated rule and a seed: equal seeds ask the same. A server
that was asked before answers from its prefix cache; a further run takes another seed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rooflax.bench.figures import latency_lines, percentiles
from rooflax.errors import EngineError, RequestError
from rooflax.http_client import BadAnswer, Client, Reply, Server, choices, event, part, reason

MIXES = {
    "fixed": "every request has --prompt-tokens and --output-tokens",
    "chat": "log-normal around them, sigma 1 (prompts) and 0.7 (answers), cut at 4 times",
    "prefix": "as fixed; three quarters of a prompt are one of 4 shared texts",
    "long": "as fixed; every tenth prompt is 8 times as long",
}
NUM_PREFIXES, LONG_EACH, LONG_TIMES, MOST_TIMES = 4, 10, 8, 4
_WORDS = ("time", "house", "water", "people", "small", "light", "garden", "winter", "open", "stone")


@dataclass(frozen=True)
class ServerLoad:
    """Load on a server: its requests and their arrival.

    Attributes:
        mix: a key of `MIXES`.
        concurrency: requests open at once; a new one is sent when another ends (closed loop).
        per_s: requests a second, at exponential gaps, whatever is open (open loop); None is the
            closed loop.
        target_ttft_s, target_tpot_s: a request that keeps both counts as good.
    """

    num_requests: int = 64
    prompt_tokens: int = 64
    output_tokens: int = 64
    mix: str = "fixed"
    concurrency: int = 16
    per_s: float | None = None
    target_ttft_s: float = 1.0
    target_tpot_s: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mix not in MIXES:
            raise RequestError(
                f"mix is {self.mix!r}; it must be one of {', '.join(MIXES)}.", param="mix"
            )
        if self.seed < 0:
            raise RequestError(f"seed is {self.seed}; it must be at least 0.", param="seed")
        for name in ("per_s", "target_ttft_s", "target_tpot_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise RequestError(
                    f"{name} is {value:g}; it must be a finite number above 0.", param=name
                )

    def lengths(self) -> list[tuple[int, int]]:
        """Tokens of each prompt, and of its answer."""
        count, rng = self.num_requests, np.random.default_rng((self.seed, 0))
        prompts = np.full(count, self.prompt_tokens)
        answers = np.full(count, self.output_tokens)
        if self.mix == "chat":
            prompts = _spread(rng, self.prompt_tokens, 1.0, count)
            answers = _spread(rng, self.output_tokens, 0.7, count)
        elif self.mix == "long":
            prompts[LONG_EACH - 1 :: LONG_EACH] *= LONG_TIMES
        return list(zip(prompts.tolist(), answers.tolist(), strict=True))

    def prompts(self, vocab_size: int | None) -> list[list[int] | str]:
        """Random token ids; random words where the size of the vocabulary is not known."""
        rng = np.random.default_rng((self.seed, 1))

        def some(size: int) -> list[Any]:
            drawn = rng.integers(0, vocab_size or len(_WORDS), size).tolist()
            return drawn if vocab_size else [_WORDS[i] for i in drawn]

        shared = [some(3 * self.prompt_tokens // 4) for _ in range(NUM_PREFIXES)]
        all_tokens = []
        for number, (size, _) in enumerate(self.lengths()):
            head = shared[number % NUM_PREFIXES] if self.mix == "prefix" else []
            all_tokens.append([*head, *some(size - len(head))])
        return all_tokens if vocab_size else [" ".join(words) for words in all_tokens]

    def arrivals_s(self) -> list[float]:
        """Arrival times of an open loop's requests, in seconds."""
        assert self.per_s is not None
        rng = np.random.default_rng((self.seed, 2))
        return np.cumsum(rng.exponential(1 / self.per_s, self.num_requests)).tolist()


def _spread(rng: np.random.Generator, median: int, sigma: float, count: int) -> np.ndarray:
    drawn = median * rng.lognormal(0.0, sigma, count)
    return np.clip(np.rint(drawn), 2, MOST_TIMES * median).astype(int)


@dataclass(frozen=True)
class Answered:
    """One request, as its client saw it.

    Attributes:
        due_s: when it should be sent; TTFT and end-to-end time count from here.
        times_s: of each piece with text.
        error: why it failed; None if it did not.
    """

    due_s: float
    sent_s: float
    times_s: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.due_s

    @property
    def decode_s(self) -> float:
        return self.times_s[-1] - self.times_s[0]

    @property
    def tpot_s(self) -> float:
        return self.decode_s / max(1, self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.times_s[-1] - self.due_s


class LoadTarget:
    """A server that is asked /v1/completions, streamed.

    Args:
        model: as it is served; None is the first that the server names.
    """

    def __init__(self, server: Server, model: str | None = None):
        self.client, self.model, self.vocab_size = Client(server), model, None
        self._more: dict[str, Any] = {"ignore_eos": True}

    async def __aenter__(self) -> LoadTarget:
        """Asks for the model's name, and whether answers can be held to their length.

        Raises:
            RequestError: it is no such server.
        """
        try:
            await self._find()
        except BaseException as error:
            self.client.close()
            if not isinstance(error, OSError):
                raise
            server = self.client.server
            why = error.strerror or str(error) or type(error).__name__
            raise RequestError(
                f"url {server.host}:{server.port} does not answer ({why}).",
                param="url",
            ) from None
        return self

    async def __aexit__(self, *_: object) -> None:
        self.client.close()

    async def _find(self) -> None:
        reply = await self.client.get("/v1/models")
        listed = reply.json()
        try:
            named = (m for m in listed["data"] if isinstance(m["id"], str))
            first = next(m for m in named if self.model in (None, m["id"]))
        except (TypeError, KeyError, StopIteration):
            wanted = "model" if self.model is None else f"model {self.model!r}"
            why = f"names no {wanted}" if reply.status == 200 else "does not name its models"
            raise RequestError(
                f"url {self.client.server.host}:{self.client.server.port} {why} at /v1/models "
                f"({_reason(reply)}).",
                param="url",
            ) from None
        self.model = first["id"]
        meta = first.get("meta")
        stated = meta.get("n_vocab") if isinstance(meta, dict) else None
        self.vocab_size = (_is_count(stated) and stated) or None
        reply = await self.client.ask(self.request("Hello", 2))
        if reply.status == 400:
            self._more = {}
            reply = await self.client.ask(self.request("Hello", 2))
        if reply.status != 200:
            raise RequestError(
                f"url does not answer /v1/completions ({_reason(reply)}).", param="url"
            )

    def request(self, prompt: list[int] | str, max_tokens: int) -> bytes:
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True}, **self._more,
        }  # fmt: skip
        return self.client.server.request("/v1/completions", body)


def answered(due_s: float, reply: Reply) -> Answered:
    """Reads a streamed reply: when each token came, and how the request ended."""
    try:
        if reply.status != 200:
            raise BadAnswer(_reason(reply))
        return _read(due_s, reply)
    except BadAnswer as error:
        return Answered(due_s, reply.started_s, (), 0, 0, str(error))


def _read(due_s: float, reply: Reply) -> Answered:
    times, usage, error = [], {}, None
    for at_s, data in reply.events():
        if data == "[DONE]":
            break
        chunk = event(data)
        usage = part(chunk, "usage", dict) or usage
        if chunk.get("error") is not None:
            error = (reason(chunk) or "the server gives no reason")[:100]
        if "".join(part(choice, "text") for choice in choices(chunk)):
            times.append(at_s)
    else:
        error = error or "the stream was cut"
    if not times:
        error = error or "no text"
    stated = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if not all(number is None or _is_count(number) for number in stated):
        raise BadAnswer("the server's answer is not one with usage that is numbers of tokens")
    tokens = stated[0] or 0, len(times) if stated[1] is None else stated[1]
    return Answered(due_s, reply.started_s, tuple(times), *tokens, error)


async def run_load(target: LoadTarget, load: ServerLoad) -> dict[str, Any]:
    """Figures of one load.

    Raises:
        EngineError: no request was answered.
    """
    prompts = load.prompts(target.vocab_size)
    requests = [
        target.request(prompt, answer)
        for prompt, (_, answer) in zip(prompts, load.lengths(), strict=True)
    ]
    before_s, started = time.process_time(), time.perf_counter()
    if load.per_s is None:
        replies = await closed_loop(target.client, requests, load.concurrency)
    else:
        due = [started + at for at in load.arrivals_s()]
        replies = await _open_loop(target.client, requests, due)
    seconds, used_s = time.perf_counter() - started, time.process_time() - before_s
    answers = [
        Answered(due_s, due_s, (), 0, 0, reply) if isinstance(reply, str) else
        answered(due_s if load.per_s is not None else reply.started_s, reply)
        for due_s, reply in replies
    ]  # fmt: skip
    return summary(target.model or "", load, answers, seconds, has_ids=bool(target.vocab_size)) | {
        "generator_cpu_s": used_s,
        "generator_share_of_a_core": used_s / seconds,
    }


def _reason(reply: Reply) -> str:
    message = reason(reply.json())
    return f"status {reply.status}" + (f": {message[:200].rstrip('.')}" if message else "")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


Sent = tuple[float, Reply | str]
"""The time at which a request was due, and its reply or the reason why there is none."""


async def _send(client: Client, request: bytes) -> Reply | str:
    try:
        return await client.ask(request)
    except BadAnswer as error:
        return str(error)
    except (OSError, TimeoutError) as error:
        return type(error).__name__


async def closed_loop(client: Client, requests: Sequence[bytes], concurrency: int) -> list[Sent]:
    """Every request, so many at once."""
    sent: list[Sent] = [(0.0, "")] * len(requests)
    coming = iter(enumerate(requests))

    async def one_after_another() -> None:
        for number, request in coming:
            sent[number] = (time.perf_counter(), await _send(client, request))

    await asyncio.gather(*(one_after_another() for _ in range(concurrency)))
    return sent


async def _open_loop(client: Client, requests: Sequence[bytes], due: list[float]) -> list[Sent]:
    async def one(request: bytes, due_s: float) -> Sent:
        await asyncio.sleep(due_s - time.perf_counter())
        return due_s, await _send(client, request)

    return list(await asyncio.gather(*map(one, requests, due)))


def summary(
    model: str,
    load: ServerLoad,
    answers: Sequence[Answered],
    seconds: float,
    *,
    has_ids: bool = True,
) -> dict[str, Any]:
    """The document of `bench serve --json` and of `bench --request-rate`.

    Args:
        has_ids: prompts are token ids, else words.

    Raises:
        EngineError: no request was answered.
    """
    done = [one for one in answers if one.error is None]
    errors = Counter(one.error for one in answers if one.error is not None)
    if not done:
        why = errors.most_common(1)[0][0]
        raise EngineError(f"No request was answered: {why.rstrip('.')}.")
    good = [
        one for one in done if one.ttft_s <= load.target_ttft_s and one.tpot_s <= load.target_tpot_s
    ]
    gaps = [b - a for one in done for a, b in zip(one.times_s, one.times_s[1:], strict=False)]
    output = sum(one.output_tokens for one in done)
    return {
        "model": model,
        "mix": load.mix,
        "seed": load.seed,
        "rule": MIXES[load.mix],
        "prompts": "random ids" if has_ids else "random words",
        "loop": "closed" if load.per_s is None else "open",
        "concurrency": load.concurrency if load.per_s is None else None,
        "request_rate": load.per_s,
        "requests": len(answers),
        "failed": len(answers) - len(done),
        "errors": dict(errors),
        "seconds": seconds,
        "prompt_tokens": sum(one.prompt_tokens for one in done),
        "output_tokens": output,
        "requests_per_s": len(done) / seconds,
        "output_tok_per_s": output / seconds,
        "decode_tok_per_s_per_stream": _mean([1 / o.tpot_s for o in done if o.tpot_s > 0]),
        "ttft_s": percentiles([one.ttft_s for one in done]),
        "tpot_s": percentiles([one.tpot_s for one in done]),
        "itl_s": percentiles(gaps or [0.0]),
        "e2e_s": percentiles([one.e2e_s for one in done]),
        "target_ttft_s": load.target_ttft_s,
        "target_tpot_s": load.target_tpot_s,
        "good_requests": len(good),
        "goodput_per_s": len(good) / seconds,
        "sent_late_s": percentiles([one.sent_s - one.due_s for one in done]),
    }


def _mean(values: Sequence[float]) -> float | None:
    """None of nothing: each answer came in one piece."""
    return float(np.mean(values)) if values else None


def load_table(result: dict[str, Any]) -> str:
    """Lines of a load test for the terminal."""
    arrival = (
        f"{result['concurrency']} at once"
        if result["loop"] == "closed"
        else f"{result['request_rate']:g} a second"
    )
    head = (
        f"{result['model']}: {result['requests']} requests, {arrival}, {result['mix']} "
        f"({result['prompt_tokens']} + {result['output_tokens']} tokens in all): "
        f"{result['output_tok_per_s']:.0f} tok/s, {result['requests_per_s']:.2f} requests/s"
    )
    lines = [head, *latency_lines(result, "ttft_s", "tpot_s", "itl_s", "e2e_s")]
    if "generator_share_of_a_core" in result:
        lines.append(f"the load generator used {result['generator_share_of_a_core']:.1%} of a core")
    lines += [f"failed: {number} x {why}" for why, number in result["errors"].items()]
    return "\n".join(lines)
