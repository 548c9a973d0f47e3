"""Bytes of GPT-2's weights and cache: theirs, counted, and as they lie on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.founding import text
from benchmarks.founding.apart import apart
from benchmarks.founding.counted import cache_bytes
from benchmarks.founding.settings import Settings
from rooflax.loading.model_info import model_info
from rooflax.nn.execution import Precision

MODEL = "preset:gpt2"
TOKENS = 1024
THEIRS = {"weights": 163e6, "cache": 38e6}


def measure(settings: Settings) -> dict[str, Any]:
    """Counted from the config, and the arrays' own bytes."""
    found: dict[str, Any] = {"counted": counted()}
    for name, precision in (
        ("float32", Precision("float32")),
        ("bfloat16", Precision("bfloat16")),
        ("int8", Precision("float32", quantize="int8")),
    ):
        work = replace(settings.gpt2.work(1), precision=precision)
        found[name] = apart("memory", work, f"memory, {name}", tokens=TOKENS)
    return found | {"model": settings.gpt2.model}


def counted() -> dict[str, int]:
    """Plain arithmetic on GPT-2's shape."""
    info = model_info(MODEL)
    config = info.config
    parameters = config.num_parameters
    return {
        "parameters": parameters,
        "head_parameters": config.vocab_size * config.hidden_size,
        "cache_float32": cache_bytes(config, TOKENS, "float32"),
        "cache_bfloat16": cache_bytes(config, TOKENS, "bfloat16"),
        "cache_one_float32": cache_bytes(config, TOKENS, "float32", parts=1),
    }


def markdown(found: dict[str, Any], settings: dict[str, Any]) -> str:
    """The table and what theirs counted."""
    c = found["counted"]
    once, twice = c["parameters"], c["parameters"] + c["head_parameters"]
    own = {
        (dtype, part): _mb(found[dtype][f"{part}_bytes"])
        for dtype in ("float32", "bfloat16", "int8")
        for part in ("weights", "kv_cache")
    }
    both = _mb(found["int8"]["weights_bytes"] + found["float32"]["kv_cache_bytes"])
    rows = [
        ("weights, INT8", "163 MB", _mb(once), own["int8", "weights"]),
        ("weights, float32", "", _mb(4 * once), own["float32", "weights"]),
        ("weights, bfloat16", "", _mb(2 * once), own["bfloat16", "weights"]),
        ("cache, float32", "38 MB", _mb(c["cache_float32"]), own["float32", "kv_cache"]),
        ("cache, bfloat16", "", _mb(c["cache_bfloat16"]), own["bfloat16", "kv_cache"]),
        ("INT8 weights + float32 cache", "201 MB", _mb(once + c["cache_float32"]), both),
    ]
    where = "" if found["model"] == MODEL else f" (of {found['model']})"
    return "\n\n".join(
        [
            f"## Memory of {MODEL} at {TOKENS} tokens",
            text.table(("what", "theirs", "counted", f"on the device{where}"), rows),
            text.bullets(_sentences(c, once, twice)),
        ]
    )


def _sentences(c: dict[str, int], once: int, twice: int) -> list[str]:
    return [
        (
            f"Their 163 MB are {twice:,} parameters of one byte: the head counted beside the "
            f"embedding that it is tied to. Counted once they are {once:,}, {_mb(once)}. On "
            f"the device there are scales too, and in float32 what multiplies nothing."
        ),
        (
            f"Their 38 MB are the keys or the values in float32 "
            f"({_mb(c['cache_one_float32'])}), not both; both take {_mb(c['cache_float32'])} in "
            f"float32 and {_mb(c['cache_bfloat16'])} in bfloat16."
        ),
        (
            f"The one counts too much and the other too little: their sum of 201 MB is close to "
            f"the right one of {_mb(once + c['cache_float32'])} all the same."
        ),
        "A cache on the device is larger than the count by one scratch block of 16 tokens.",
    ]


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
