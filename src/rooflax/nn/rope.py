"""RoPE tables: inverse frequencies with their scaling rules, and the table of a length.

Everything here is NumPy at load time; the device only ever sees the finished table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from rooflax.errors import CheckpointError

LEAST, MOST = 1e-6, 1e15
"""Bounds of theta and every factor: so float32 holds the angles of any position."""


def _check(name: str, *values: float) -> None:
    """
    Raises:
        CheckpointError: a number of which no table can be made.
    """
    for value in values:
        if not LEAST <= value <= MOST:
            raise CheckpointError(
                f"The model has {name} = {value!r}; RoPE takes {LEAST:g} to {MOST:g}."
            )


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the inverse frequencies; fields beyond a kind's own stay at their default.

    Attributes:
        kind: "linear", "llama3", "yarn", "longrope" or "proportional".
        factor: how many times longer the context gets.
        original_max_position: context length before scaling (llama3, yarn, longrope).
        low_freq_factor, high_freq_factor: llama3's band, in turns per original context.
        beta_fast, beta_slow: yarn's band, in turns per original context.
        truncate: yarn rounds the band to whole dimensions.
        attention_factor: yarn's and longrope's factor on cos and sin.
        short_factor, long_factor: longrope's divisor of each frequency, in tables up to the
            original context and in longer ones.
        share: proportional's part of the frequencies, the first ones; the others are 0.
    """

    kind: str
    factor: float
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    share: float = 1.0

    def __post_init__(self) -> None:
        for name in ("factor", "attention_factor", "low_freq_factor", "high_freq_factor"):
            _check(f"the RoPE scaling's {name}", getattr(self, name))
        _check("the RoPE scaling's short_factor", *self.short_factor)
        _check("the RoPE scaling's long_factor", *self.long_factor)

    def to_hf(self) -> dict[str, Any]:
        """The `rope_scaling` object of config.json."""
        scaling: dict[str, Any] = {"rope_type": self.kind, "factor": self.factor}
        if self.kind == "linear":
            return scaling
        if self.kind == "proportional":
            return scaling | {"partial_rotary_factor": self.share}
        scaling["original_max_position_embeddings"] = self.original_max_position
        if self.kind == "llama3":
            return scaling | {
                "low_freq_factor": self.low_freq_factor,
                "high_freq_factor": self.high_freq_factor,
            }
        if self.kind == "longrope":
            return scaling | {
                "attention_factor": self.attention_factor,
                "short_factor": list(self.short_factor),
                "long_factor": list(self.long_factor),
            }
        return scaling | {
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "truncate": self.truncate,
            "attention_factor": self.attention_factor,
        }


@dataclass(frozen=True)
class Rope:
    """Rotary positions: the frequencies theta^(-2i / dim), scaled.

    Attributes:
        dim: how many of a head's dimensions are rotated, the first ones; None is all.
        query_beta: queries are multiplied by 1 + query_beta ln(1 + floor(position / original
            context)), which `scaling` has.
    """

    theta: float
    scaling: RopeScaling | None = None
    dim: int | None = None
    query_beta: float = 0.0

    def __post_init__(self) -> None:
        _check("rope_theta", self.theta)

    def order(self, head_dim: int, interleaved: bool) -> tuple[int, ...] | None:
        """Checkpoint dimension of each of ours; None if they are the same.

        Ours are rotated in pairs (i, i + head_dim / 2), of which the first dim / 2 turn; a
        checkpoint's pairs are (i, i + dim / 2), interleaved ones (2i, 2i + 1).
        """
        dim = self.dim or head_dim
        if dim == head_dim and not interleaved:
            return None
        step, half = (2, 1) if interleaved else (1, dim // 2)
        first = range(0, step * (dim // 2), step)
        rest = (head_dim - dim) // 2
        still = range(dim, dim + rest), range(dim + rest, head_dim)
        return (*first, *still[0], *(i + half for i in first), *still[1])

    def to_hf(self) -> dict[str, Any]:
        """The `rope_parameters` object of config.json."""
        scaling = self.scaling.to_hf() if self.scaling else {"rope_type": "default"}
        beta = {"llama_4_scaling_beta": self.query_beta} if self.query_beta else {}
        return scaling | beta | {"rope_theta": self.theta}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RopeTable:
    """cos and sin of position x frequency, [max_len, head_dim / 2], float32; the factor of queries
    at a position, or None."""

    cos: Float[Array, "max_len half"]
    sin: Float[Array, "max_len half"]
    query_scale: Float[Array, "max_len one"] | None = None


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, max_len: int = 0
) -> np.ndarray:
    """theta^(-2i / head_dim), scaled; [head_dim / 2] float32.

    Args:
        max_len: of the table that they are for.

    Source: transformers, modeling_rope_utils.py; Peng et al., YaRN, 2023.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = (1.0 / np.float32(theta) ** exponent).astype(np.float32)
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / np.float32(scaling.factor)
    if scaling.kind == "proportional":
        turns = np.arange(head_dim // 2) < int(scaling.share * head_dim // 2)
        return plain * turns.astype(np.float32) / np.float32(scaling.factor)
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    if scaling.kind == "longrope":
        long = max_len > scaling.original_max_position
        factors = np.asarray(scaling.long_factor if long else scaling.short_factor, np.float32)
        return (1.0 / (factors * np.float32(theta) ** exponent)).astype(np.float32)
    return _yarn(plain, head_dim, theta, scaling)


def _llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Long wavelengths are stretched, short ones kept, those between blended."""
    turns = scaling.original_max_position * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (keep * plain + (1 - keep) * plain / scaling.factor).astype(np.float32)


def _yarn(plain: np.ndarray, head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Dimensions that turn often are kept, those that turn rarely are stretched."""

    def dimension(turns: float) -> float:
        wavelength = scaling.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    stretch = np.clip(ramp, 0.0, 1.0)
    return (plain / scaling.factor * stretch + plain * (1 - stretch)).astype(np.float32)


def rope_arrays(
    head_dim: int, max_len: int, theta: float, scaling: RopeScaling | None, dim: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin for positions 0 to max_len - 1, [max_len, head_dim / 2] float32.

    Args:
        dim: how many dimensions turn; the angles of the others are 0. None is all.
    """
    dim = dim or head_dim
    frequencies = inverse_frequencies(dim, theta, scaling, max_len)
    angles = np.arange(max_len, dtype=np.float32)[:, None] * frequencies[None, :]
    factor = np.float32(scaling.attention_factor if scaling else 1.0)
    still = ((0, 0), (0, (head_dim - dim) // 2))
    return (
        np.pad((np.cos(angles) * factor).astype(np.float32), still, constant_values=1),
        np.pad((np.sin(angles) * factor).astype(np.float32), still),
    )


def query_scale(rope: Rope, max_len: int) -> np.ndarray | None:
    """The factor of queries at positions 0 to max_len - 1, [max_len, 1] float32."""
    if not rope.query_beta or rope.scaling is None:
        return None
    far = np.arange(max_len, dtype=np.float32) // rope.scaling.original_max_position
    return (1 + np.float32(rope.query_beta) * np.log1p(far)).astype(np.float32)[:, None]
