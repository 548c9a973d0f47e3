"""RoPE as a config.json gives it: its theta, the share of a head that turns, and its scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.fields.kinds import is_whole
from rooflax.models.config_reader import ConfigReader
from rooflax.nn.rope import MOST, Rope, RopeScaling

_IMAGE_ROPE_KEYS = ("mrope_section", "mrope_interleaved")
"""Keys of the frequencies of an image's axes; a text's positions are the same on all."""
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "proportional": ("factor", "partial_rotary_factor"),
    "llama3": (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    ),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate",
        "attention_factor", "mscale", "mscale_all_dim",
    ),
    "longrope": (
        "factor", "original_max_position_embeddings", "attention_factor", "short_factor",
        "long_factor",
    ),
}  # fmt: skip


def read_rope(
    reader: ConfigReader,
    head_dim: int,
    default_theta: float = 10_000.0,
    partial: float | None = None,
    *,
    scales_queries: bool = False,
) -> Rope:
    """RoPE from `rope_theta` and `rope_scaling`, or from `rope_parameters`, whose theta has
    priority.

    Args:
        partial: the share of dimensions that turn where config.json has none; None is all, and
            another share is rejected. A null in config.json is all, as in transformers.
        scales_queries: `rope_parameters` have `llama_4_scaling_beta`.
    """
    rope = _stated_rope(reader, default_theta)
    stated = rope.pop("rope_theta", None), reader.get("rope_theta", None)
    theta = next((theta for theta in stated if theta is not None), default_theta)
    dim = _rotary_dim(reader, rope, head_dim, partial)
    theta, beta = reader.positive("rope_theta", theta), 0.0
    if scales_queries:
        _same_length(reader, rope.pop("max_position_embeddings", None))
        beta = rope.pop("llama_4_scaling_beta", None)
        beta = reader.positive("llama_4_scaling_beta", beta, or_zero=True, most=MOST)
    scaling = _rope_scaling(reader, rope, dim or head_dim)
    if partial is not None and scaling is not None and scaling.kind == "proportional":
        raise UnsupportedModelError(
            f"config.json asks for RoPE scaling of type 'proportional', which rooflax does not "
            f"compute for {reader.model_type}."
        )
    if scaling is not None and scaling.kind == "yarn" and theta <= 1:
        raise CheckpointError(
            f"config.json has rope_theta = {theta!r:.80}; with yarn scaling it must be above 1."
        )
    if scales_queries and not (scaling and scaling.original_max_position):
        raise CheckpointError("config.json has llama_4_scaling_beta and no original context.")
    return Rope(theta, scaling, dim, beta)


def _same_length(reader: ConfigReader, stated: Any) -> None:
    if stated not in (None, reader.get("max_position_embeddings", stated)):
        raise CheckpointError("config.json gives two values of max_position_embeddings.")


def _rotary_dim(
    reader: ConfigReader, rope: dict[str, Any], head_dim: int, partial: float | None
) -> int | None:
    key = "partial_rotary_factor"
    if partial is None:
        if rope.get(key) in (1, None):
            rope.pop(key, None)
        return None
    inner, top = rope.pop(key, None), reader.get(key, None)
    partial = 1.0 if reader.is_null(key) else partial
    share = reader.positive(key, next((x for x in (inner, top) if x is not None), partial))
    dim = int(round(head_dim * min(share, 1.0), 6))
    if share > 1 or dim < 2 or dim % 2:
        raise CheckpointError(
            f"config.json has {key} = {share!r} of head_dim = {head_dim}; so many dimensions, "
            f"{dim}, must be even and from 2 to all."
        )
    return None if dim == head_dim else dim


def _stated_rope(reader: ConfigReader, default_theta: float) -> dict[str, Any]:
    """`rope_scaling` or `rope_parameters`; whatever one of them leaves out, both mean the same.

    Raises:
        CheckpointError: they do not.
    """
    stated = []
    for key in ("rope_scaling", "rope_parameters"):
        value = reader.get(key, None)
        if value is not None and not isinstance(value, dict):
            raise CheckpointError(f"config.json has {key} = {value!r:.80}; it must be an object.")
        stated += [value] if value else []
    if len(stated) == 2:
        theta = reader.get("rope_theta", default_theta)
        legacy, modern = (
            {"rope_type": rope.get("type", "default"), "rope_theta": theta}
            | {key: value for key, value in rope.items() if key != "type"}
            for rope in stated
        )
        differ = sorted(k for k in legacy | modern if legacy.get(k) != modern.get(k))
        if differ:
            raise CheckpointError(
                f"config.json's rope_scaling and rope_parameters differ in {differ[0]!r:.80}; "
                f"keep one."
            )
    return dict(stated[0]) if stated else {}


def _rope_scaling(reader: ConfigReader, rope: dict[str, Any], dim: int) -> RopeScaling | None:
    named = (rope.pop("rope_type", None), rope.pop("type", None))
    kind = next((name for name in named if name is not None), "default")
    for name in named:
        if name is not None and not isinstance(name, str):
            raise CheckpointError(
                f"config.json has a RoPE scaling of type {name!r:.80}; it must be a string."
            )
    kind = "longrope" if kind == "su" else kind
    for key in _IMAGE_ROPE_KEYS:
        rope.pop(key, None)
    if kind not in _ROPE_KEYS:
        raise UnsupportedModelError(
            f"config.json asks for RoPE scaling of type {kind!r:.80}, which rooflax does not "
            f"compute (only {', '.join(_ROPE_KEYS)})."
        )
    paths = ("", "rope_scaling.", "rope_parameters.")
    # A null is absence, but of a kind of layer, which a family with kinds reads elsewhere.
    others = {k for k in rope if rope[k] is not None or k.endswith("_attention")}
    unknown = sorted(k for k in others - {*_ROPE_KEYS[kind]} if not reader.waives(k, paths))
    if unknown:
        raise UnsupportedModelError(
            f"config.json's RoPE scaling of type {kind!r:.80} has the key {unknown[0]!r:.80}, "
            f"which rooflax does not read; if that changes no logit, pass ignore_config_keys "
            f"{unknown[0]:.80}."
        )
    if kind == "dynamic":  # up to the model's context nothing is scaled, and that is our limit
        reader.positive("rope_scaling.factor", rope.get("factor"))
    if kind in ("default", "dynamic"):
        return None
    return (
        _longrope(reader, rope, dim) if kind == "longrope" else _scaling_values(reader, kind, rope)
    )


def _longrope(reader: ConfigReader, rope: dict[str, Any], dim: int) -> RopeScaling:
    length = reader.size("max_position_embeddings")
    inner = rope.get("original_max_position_embeddings")
    top = reader.get("original_max_position_embeddings", length if inner is None else inner)
    original = _original_length(top, None)
    stated = rope.get("factor")
    factor = length / original if stated is None else reader.positive("factor", stated)
    attention = rope.get("attention_factor")
    if attention is None:
        long = factor > 1 and original > 1
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if long else 1.0
    both = []
    for key in ("short_factor", "long_factor"):
        factors = rope.get(key)
        if not isinstance(factors, list) or len(factors) != dim // 2:
            raise CheckpointError(
                f"config.json has rope_scaling.{key} = {factors!r:.80}; it must be a list of a "
                f"number for each of {dim // 2} frequencies."
            )
        both.append(tuple(reader.positive(f"rope_scaling.{key}", x) for x in factors))
    attention = reader.positive("rope_scaling.attention_factor", attention)
    values = {"attention_factor": attention, "short_factor": both[0], "long_factor": both[1]}
    return RopeScaling("longrope", factor, original, **values)


def _scaling_values(reader: ConfigReader, kind: str, rope: dict[str, Any]) -> RopeScaling:
    def number(key: str, default: float | None = None) -> float:
        value = rope.get(key)
        if value is None and default is not None:
            return default
        return reader.positive(f"rope_scaling.{key}", value)

    factor = number("factor", 1.0 if kind == "proportional" else None)
    if kind == "proportional":
        share = number("partial_rotary_factor", 1.0)
        if share > 1:
            raise CheckpointError(
                f"config.json has partial_rotary_factor = {share!r}; it must be at most 1."
            )
        return RopeScaling("proportional", factor, share=share)
    if kind == "linear":
        return RopeScaling("linear", factor)
    fallback = None if kind == "llama3" else reader.size("max_position_embeddings")
    original = _original_length(rope.get("original_max_position_embeddings"), fallback)
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if high <= low:
            raise CheckpointError(
                f"config.json has rope_scaling.high_freq_factor = {high!r}; it must be above "
                f"low_freq_factor, {low!r}."
            )
        return RopeScaling("llama3", factor, original, low, high)
    truncate = rope.get("truncate", True)
    if not isinstance(truncate, bool):
        raise CheckpointError(
            f"config.json has rope_scaling.truncate = {truncate!r:.80}; it must be true or false."
        )
    values = {}
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        if rope.get(key) is not None:
            zero = key != "attention_factor"  # an mscale of 0 counts as absent
            name = f"rope_scaling.{key}"
            values[key] = reader.positive(name, rope[key], or_zero=zero, most=MOST)
    fast, slow = number("beta_fast", 32.0), number("beta_slow", 1.0)
    if not 1e-6 <= slow < fast <= 1e6:
        raise CheckpointError(
            f"config.json has rope_scaling.beta_fast = {fast!r} and beta_slow = {slow!r}; they "
            f"must be from 1e-6 to 1e6, the first above the second."
        )
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
        attention_factor=_yarn_attention_factor(factor, values),
    )


def _original_length(value: Any, default: int | None) -> int:
    if value is None and default is not None:
        return default
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if not is_whole(number, int) or number >= 2**31 or number < 1:
        raise CheckpointError(
            f"config.json has rope_scaling.original_max_position_embeddings = {value!r:.80}; "
            f"it must be a whole number from 1 to {2**31 - 1}."
        )
    return number


def _yarn_attention_factor(factor: float, values: Mapping[str, float]) -> float:
    """0.1 ln(factor) + 1, or what the config gives (transformers, modeling_rope_utils.py)."""
    if "attention_factor" in values:
        return values["attention_factor"]

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if values.get("mscale") and values.get("mscale_all_dim"):
        return mscale(values["mscale"]) / mscale(values["mscale_all_dim"])
    return mscale(1.0)
