"""What is compared: models, widths, engines, jobs, and the targets beside each row.

There are two kinds of jobs: batches of prompts of one length, and requests that are served.

Which format of an engine counts for a width is written here once. An engine without one takes no
part in that width.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

MODELS = ("gpt2", "qwen2.5-0.5b")
FAMILIES = ("qwen3-0.6b", "gemma-3-270m", "qwen3-moe-3b", "lfm2-350m", "qwen3.5-0.8b")
"""Compared when named, with llama.cpp alone, whose files rooflax writes."""
PUBLISHED = {"smollm2-135m": "SmolLM2 135M, Q4_1", "gemma-3-270m-file": "Gemma 3 270M, Q4_K_M"}
"""GGUF files that people have, which llama.cpp reads too, when named; with what is in them."""
WIDTHS = ("float32", "bf16", "int8", "int4")
FILE = "file"
"""The one width of PUBLISHED: the file's own formats."""
OURS = "rooflax"
PEERS = ("llama.cpp", "OpenVINO", "CTranslate2", "transformers", "onnxruntime-genai")
KINDS = ("batches", "serving")

FORMATS = {
    OURS: {"float32": "float32", "bf16": "bfloat16", "int8": "int8", "int4": "int4", FILE: FILE},
    "llama.cpp": {"float32": "f32", "bf16": "bf16", "int8": "q8_0", "int4": "q4_0", FILE: FILE},
    "OpenVINO": {"int8": "int8", "int4": "int4"},
    "CTranslate2": {"float32": "float32", "int8": "int8"},
    "transformers": {"float32": "float32", "bf16": "bfloat16"},
    "onnxruntime-genai": {"int4": "int4"},
}

PEERS_MULTIPLY = {"bf16": ("bfloat16",), "int4": ("int4", "int8"), FILE: ("int4", "int8")}
"""What engines of a width may multiply, where it is not what rooflax does: bfloat16 by bfloat16,
and codes with coarser scales; of several the ceiling is the fastest."""

PROMPT_TOKENS = 64
NEW_TOKENS, QUICK_NEW_TOKENS = 64, 32
BATCHES, QUICK_BATCHES = (1, 4, 8, 16), (1, 8)
ROUNDS, QUICK_ROUNDS = 5, 3
LONG_PROMPT = 512
PREFILL_BATCH = 8
"""Of the decode jobs, the one whose prefill is a row of its own."""

BATCH_1_RATIO = {"float32": 1.0, "bf16": 1.2, "int8": 1.5, "int4": 1.4}
BATCH_1_SHARE = {"float32": 0.90, "bf16": 0.90, "int8": 0.85, "int4": 0.75}
BATCH_RATIO = {8: 1.8, 16: 1.5}
BATCH_RATIO_WIDTHS = ("int8", "int4")
PREFILL_RATIO, FAMILY_PREFILL_RATIO = 1.1, 1.0
FILE_PREFILL_RATIO = {"smollm2-135m": 5.0, "gemma-3-270m-file": 3.0}
STATE_RATIO = {"lfm2-350m": 1.2, "qwen3.5-0.8b": 1.2}
"""Models with a state per sequence, in any width, of llama.cpp."""
FILE_SHARE = 0.75
"""Of the roofline of a file's own bytes, at one row."""
FILE_RATIO = {("smollm2-135m", 8): 5.0, ("gemma-3-270m-file", 8): 4.0}
"""Of llama.cpp, by model and rows."""
EXPERTS_SHARE = {"qwen3-moe-3b": 0.65}
"""Models of experts: of the bytes of those that are chosen."""
PEER_NEAR_CEILING, OWN_SHARE_THEN = 0.80, 0.90
"""A batch-1 peer above the first leaves no room: then not slower, and at least the second."""

SERVED = {"gpt2": "int8", "qwen2.5-0.5b": "int4"}
"""The width in which a model is served."""
SERVING = {"requests": 32, "new_tokens": 64, "slots": 16}
SERVING_PEER = "llama.cpp"
OUR_WAYS = ("AsyncLLM", "LLM.generate")
AT_ONCE, SPREAD = "at once", "Poisson"
LOAD = 0.6
"""Of the requests a second that the serving peer completes when all come at once."""

SERVING_RATIO = {"avx512": 2.5, "avx2": 2.0}
SERVING_SHARE = 0.85
LONGEST_GAP_S = 1.0
"""Targets of all requests at once; of spread ones it is the peer's time to first token."""


def widths_of(model: str, wanted: Sequence[str]) -> Sequence[str]:
    """Those in which a model is compared."""
    return (FILE,) if model in PUBLISHED else wanted


@dataclass(frozen=True)
class Job:
    """Prompts of one length, then decode steps after the first token; 0 steps is a prefill."""

    batch: int
    prompt_tokens: int
    new_tokens: int

    @property
    def name(self) -> str:
        kind = f"+ {self.new_tokens}" if self.new_tokens else "prefill"
        return f"{self.batch} x {self.prompt_tokens} {kind}"

    @property
    def tests(self) -> list[str]:
        """Which parts of its trials are rows."""
        if not self.new_tokens:
            return ["prefill"]
        return ["decode"] + ["prefill"] * (self.batch == PREFILL_BATCH)


def jobs(batches: tuple[int, ...], *, quick: bool) -> list[Job]:
    """All shapes of work; a quick run has no long prompt, and half as many steps."""
    steps = QUICK_NEW_TOKENS if quick else NEW_TOKENS
    decoding = [Job(batch, PROMPT_TOKENS, steps) for batch in batches]
    return decoding if quick else [*decoding, Job(1, LONG_PROMPT, 0)]


PARTS = {"prefill": Job(8, PROMPT_TOKENS, 0), "decode": Job(16, PROMPT_TOKENS, NEW_TOKENS)}
"""What the ideal time of serving is made of."""


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Arrivals of `count` requests, `rate` a second on average; the first comes at 0."""
    draw, times = random.Random(seed), [0.0]
    while len(times) < count:
        times.append(times[-1] + draw.expovariate(rate))
    return [round(at, 4) for at in times]


def ideal_s(prompt_tokens: int, new_tokens: int, parts: dict[str, float]) -> float:
    """Seconds for this many tokens at the rates of PARTS.

    Args:
        parts: seconds that each of PARTS took.
    """
    prefill, decode = PARTS["prefill"], PARTS["decode"]
    return prompt_tokens * parts["prefill"] / (
        prefill.batch * prefill.prompt_tokens
    ) + new_tokens * parts["decode"] / (decode.batch * decode.new_tokens)


@dataclass(frozen=True)
class Verdict:
    """A target in words, and whether it is met; both None where there is none."""

    target: str | None = None
    met: bool | None = None


def prefill_ratio(model: str) -> float:
    """What is wanted of the best peer's prefill."""
    if model in PUBLISHED:
        return FILE_PREFILL_RATIO[model]
    return FAMILY_PREFILL_RATIO if model in FAMILIES else PREFILL_RATIO


def decode_verdict(
    model: str,
    width: str,
    batch: int,
    ratio: float | None,
    share: float,
    peer_share: float | None,
) -> Verdict:
    """Of a decode row; a ratio of None is a row without a peer."""
    if batch == 1 and model in PUBLISHED:
        return Verdict(f"{FILE_SHARE:.0%}", share >= FILE_SHARE)
    if (model, batch) in FILE_RATIO:
        wanted = FILE_RATIO[model, batch]
        return Verdict(f">= {wanted}x", None if ratio is None else ratio >= wanted)
    if batch == 1 and model in EXPERTS_SHARE:
        part = EXPERTS_SHARE[model]
        return Verdict(f"{part:.0%} of the chosen experts' bytes", share >= part)
    if batch == 1 and model in STATE_RATIO:
        wanted = STATE_RATIO[model]
        return Verdict(f">= {wanted}x", None if ratio is None else ratio >= wanted)
    if batch == 1:
        return _batch_1(width, ratio, share, peer_share)
    if model in FAMILIES or batch not in BATCH_RATIO or width not in BATCH_RATIO_WIDTHS:
        return Verdict()
    wanted = BATCH_RATIO[batch]
    return Verdict(f">= {wanted}x", None if ratio is None else ratio >= wanted)


def _batch_1(width: str, ratio: float | None, share: float, peer_share: float | None) -> Verdict:
    wanted, part = BATCH_1_RATIO[width], BATCH_1_SHARE[width]
    reached = ratio is not None and ratio >= wanted
    if peer_share is not None and peer_share > PEER_NEAR_CEILING:
        kept_up = ratio is not None and ratio >= 1.0 and share >= OWN_SHARE_THEN
        words = f">= {wanted}x, or >= 1x and {OWN_SHARE_THEN:.0%} (peer near the ceiling)"
        return Verdict(words, reached or kept_up)
    return Verdict(f">= {wanted}x or {part:.0%}", reached or share >= part)


def serving_ratio(cpu: str) -> float:
    """What is wanted of the peer's tokens a second, on a processor as `environment` names it."""
    return SERVING_RATIO["avx512" if "avx512" in cpu.lower() else "avx2"]
