"""Writes src/rooflax/models/repositories.json, and its table for docs/models.md, from the published
config.json files in tests/data/published_configs.

Called by tools/family_docs.py. Memory is that of a CPU: weights and the KV cache of one sequence of
4,096 tokens, or of the longest that the model takes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rooflax.errors import RooflaxError
from rooflax.loading.schemes import read_scheme
from rooflax.loading.schemes.bitsandbytes import BitsAndBytes
from rooflax.loading.schemes.coded import affine_format
from rooflax.loading.schemes.gptq import Awq, Gptq
from rooflax.loading.schemes.mlx import FORMATS as MLX_FORMATS
from rooflax.loading.schemes.mlx import MODES, Mlx
from rooflax.models.memory import estimate
from rooflax.models.registry import families, read_config
from rooflax.models.repositories import sizes_of
from rooflax.nn.decoder import Decoder
from rooflax.nn.storage import Storage, is_matmul
from rooflax.ops.format_names import resolve_format

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data" / "published_configs"
FILE = ROOT / "src" / "rooflax" / "models" / "repositories.json"
HUB = re.compile(r"[\w.-]+/[\w.-]+")
TOKENS = 4096
WIDTHS = ("int8", "int4")
MIXED = ("mxfp4-a16",)
"""Formats that MLX has of experts alone."""
KEYS = ("quantization_config", "quantization", "compression_config")
HEAD = """\
| repository | family | quantized | opens | GiB as it is | `-q int8` | `-q int4` |
| --- | --- | --- | --- | --- | --- | --- |
"""
TABLE = re.compile(re.escape(HEAD.partition("\n")[0]) + r"\n(\|.*\n)+")


def rows() -> list[dict[str, Any]]:
    """Each repository of the hub whose config.json or quantization is known, by name."""
    configs = json.loads((DATA / "configs.json").read_text(encoding="utf-8"))
    by_name = {row["repository"]: row["config"] for row in configs}
    found: dict[str, dict[str, Any]] = {}
    for row in configs:
        name = row.get("hub", row["repository"])
        if HUB.fullmatch(name) and name not in found and "tiny" not in name:
            found[name] = _row(name, row["config"], row["outcome"])
    for row in json.loads((DATA / "quantization.json").read_text(encoding="utf-8")):
        declared = {key: row[key] for key in KEYS if key in row}
        raw = _plain(by_name.get(row.get("of"), row)) | declared
        found[row["repository"]] = _row(row["repository"], raw, row["outcome"])
    for row in json.loads((DATA / "others.json").read_text(encoding="utf-8")):
        reason = _reason({"model_type": row["model_type"]})
        found[row["repository"]] = _row(row["repository"], row, reason)
    return sorted(found.values(), key=lambda row: row["repository"].lower())


def _plain(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in KEYS}


def _reason(raw: dict[str, Any]) -> str:
    try:
        read_config(raw)
    except RooflaxError as error:
        return str(error).partition(" is not one of")[0]
    raise AssertionError(f"{raw} opens")


def _row(name: str, raw: dict[str, Any], outcome: str) -> dict[str, Any]:
    declared = next((raw[key] for key in KEYS if raw.get(key)), None)
    row: dict[str, Any] = {
        "repository": name, "family": raw.get("model_type"),
        "quantization": declared and declared.get("quant_method", "mlx"),
        "sizes": sizes_of(raw), "embeds": False, "bytes": {},
    }  # fmt: skip
    if row["family"] not in families():
        outcome = _reason(raw) if row["family"] else outcome
    if outcome != "opens":
        return row | {"rejected": outcome + " ...]" * (outcome.count("[") - outcome.count("]"))}
    if row["sizes"] is None:
        return row
    _, config = read_config(_plain(raw))
    format = kept_format(raw) if declared else None
    row["embeds"] = not config.is_causal
    is_mixed = isinstance(read_scheme(raw, Path()), Mlx) and format in MIXED
    row["bytes"] = {"": num_bytes(config, format, is_mixed=is_mixed)}
    if format in (None, "float32"):
        row["bytes"] |= {width: num_bytes(config, resolve_format(width)) for width in WIDTHS}
    return row


def kept_format(raw: dict[str, Any]) -> str | None:
    """The format of a quantized checkpoint's matrices, on CPU; "float32" where none keeps them."""
    declared = next(raw[key] for key in KEYS if raw.get(key))
    method = declared.get("quant_method", "mlx")
    if method == "mxfp4":
        return "mxfp4-a16"
    scheme = read_scheme(raw, Path())
    if isinstance(scheme, Awq):
        return affine_format(128, 4, scheme.group, "F16", None) or "float32"
    if isinstance(scheme, Gptq):
        s = scheme.settings
        group = s.group if s.ordered else 0
        zero = 1 << s.bits - 1 if s.symmetric else None
        return affine_format(128, s.bits, group, "F16", zero) or "float32"
    if isinstance(scheme, BitsAndBytes):
        return "w8a16" if declared.get("load_in_8bit") else "nf4-a16"
    if isinstance(scheme, Mlx):
        settings = scheme.settings
        is_float = settings.mode in MODES
        return MODES[settings.mode][2] if is_float else MLX_FORMATS.get(settings.bits, "float32")
    if method == "modelopt":
        return "nvfp4-a16" if "NVFP4" in declared.get("quant_algo", "") else "fp8-a16"
    if method == "compressed-tensors":
        return _compressed(next(iter(declared["config_groups"].values()))["weights"])
    return "fp8-a16-g32" if declared.get("weight_block_size") else "fp8-a16"


def _compressed(weights: dict[str, Any]) -> str:
    bits, strategy = weights["num_bits"], weights["strategy"]
    if weights["type"] == "float":
        by_strategy = {"block": "fp8-a16-g32", "tensor_group": "nvfp4-a16"}
        return by_strategy.get(strategy, "fp8-a16")
    if strategy == "channel":
        return "w8a16"
    zero = 1 << bits - 1 if weights["symmetric"] else None
    ordered = weights.get("actorder") in (None, False, "weight", "static")
    group = weights["group_size"] if ordered else 0
    return affine_format(128, bits, group, "BF16", zero) or "float32"


def num_bytes(config: Decoder, format: str | None, *, is_mixed: bool = False) -> int:
    """Weights and KV cache; embedding and head in bfloat16 beside a checkpoint's own codes.

    Args:
        format: of matrices; None is bfloat16.
        is_mixed: it is that of experts, and others have 8 bits, which become float32.
    """
    keeps = format != "float32"
    storage = Storage(quantize=format if keeps else None, keeps_bfloat16=keeps)
    if is_mixed and format:
        matrices = [param for param in config.params() if is_matmul(param, config)]
        experts = [param.name for param in matrices if param.line.num_stacked]
        storage = Storage(prequantized=dict.fromkeys(experts, format))
    need = estimate(
        config, storage=storage, kv_dtype="float16" if format and keeps else "float32", rows=1,
        tokens=min(TOKENS, config.max_position),
    )  # fmt: skip
    return need.weights + need.kv_cache


def document() -> str:
    """repositories.json, a row a line."""
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows())
    return f"[\n{lines}\n]\n"


def table() -> str:
    """The rows for docs/models.md."""
    lines = []
    for row in rows():
        sizes = row["bytes"]
        cells = [
            f"`{row['repository']}`",
            f"`{row['family']}`" if row["family"] else "",
            row["quantization"] or "",
            f"no: {row['rejected']}" if "rejected" in row else "yes",
            *(_gib(sizes.get(width)) for width in ("", *WIDTHS)),
        ]
        lines.append("| " + " | ".join(cells) + " |\n")
    return HEAD + "".join(lines)


def _gib(count: int | None) -> str:
    if count is None:
        return ""
    gib = count / 2**30
    return f"{gib:.2f}" if gib < 10 else f"{gib:.0f}"
