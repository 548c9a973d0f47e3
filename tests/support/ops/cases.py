"""One list of cases per operation; every implementation runs all of them. All sizes differ."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
import pytest

from rooflax.ops import accelerator
from rooflax.ops.attention import AttentionArgs, Dense
from rooflax.ops.attention.pattern import Pattern

WITH_GPU_KERNELS = pytest.mark.skipif(
    jax.__version_info__ < accelerator.OLDEST_GPU_JAX,
    reason=f"GPU kernels need JAX 0.11 or later, and this is {jax.__version__}",
)


def rng(seed=0):
    return np.random.RandomState(seed)


def normal(*shape, seed=0):
    return rng(seed).standard_normal(shape).astype(np.float32)


@dataclass(frozen=True)
class Linear:
    """x [*batch, *contracted] times w [*contracted, *out]."""

    name: str
    batch: tuple[int, ...]
    contracted: tuple[int, ...]
    out: tuple[int, ...]
    bias: bool

    def arrays(self):
        x = normal(*self.batch, *self.contracted, seed=1)
        w = normal(*self.contracted, *self.out, seed=2)
        return x, w, normal(*self.out, seed=3) if self.bias else None


LINEAR = [
    Linear("vector", (3,), (5,), (7,), False),
    Linear("one row with bias", (1,), (5,), (7,), True),
    Linear("batch and sequence", (2, 3), (5,), (7,), True),
    Linear("fused heads out", (2, 3), (5,), (4, 6, 7), True),
    Linear("two contracted axes", (2, 3), (4, 5), (7,), True),
    Linear("two contracted, several out", (3,), (4, 5), (6, 7), False),
    Linear("wider than a tile", (37,), (131,), (67,), True),
    Linear("no batch axis", (), (5,), (7,), True),
]


@dataclass(frozen=True)
class Attention:
    """A batch of queries over contiguous keys; queries are the last of each row's context."""

    name: str
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 8
    query_len: int = 5
    key_len: int = 11
    context_lens: tuple[int, ...] = (11, 7, 5)
    window: int | None = None
    sinks: bool = False
    segments: bool = False
    causal: bool = True
    bias: bool = False

    def arrays(self):
        """q, k, v, and what else `attention` takes."""
        rows, queries, keys = len(self.context_lens), self.query_len, self.key_len
        context = np.array(self.context_lens, np.int32)
        first = np.maximum(context - queries, 0)
        positions = first[:, None] + np.arange(queries, dtype=np.int32)[None]
        key_positions = np.tile(np.arange(keys, dtype=np.int32), (rows, 1))
        segment_ids = None
        if self.segments:
            segment_ids = np.sort(rng(9).randint(0, 3, (rows, queries)), axis=1).astype(np.int32)
        return (
            normal(rows, queries, self.heads, self.head_dim, seed=1),
            normal(rows, self.kv_heads, keys, self.head_dim, seed=2),
            normal(rows, self.kv_heads, keys, self.head_dim, seed=3),
            Dense(positions.astype(np.int32), key_positions, context, segment_ids),
            AttentionArgs(
                0.37,
                self.window,
                normal(self.heads, seed=4) * 2 if self.sinks else None,
                causal=self.causal,
                bias=normal(self.heads, 2 * keys - 1, seed=5) if self.bias else None,
            ),
        )

    @property
    def in_order(self):
        """Whether the keys are the queries themselves, so that `causal_order` may be said."""
        return self.query_len == self.key_len


WHOLE = {"query_len": 11, "key_len": 11, "context_lens": (11, 11, 4)}
ATTENTION = [
    Attention("grouped"),
    Attention("multi-query", kv_heads=1),
    Attention("multi-head", kv_heads=6),
    Attention("one head", heads=1, kv_heads=1),
    Attention("window", window=3),
    Attention("window of one", window=1),
    Attention("window beyond the context", window=99),
    Attention("sinks", sinks=True),
    Attention("sinks and window", sinks=True, window=4),
    Attention("decode", query_len=1),
    Attention("a row of padding", context_lens=(11, 0, 5)),
    Attention("a row of padding and sinks", context_lens=(11, 0, 5), sinks=True),
    Attention("whole sequences", **WHOLE),
    Attention("whole sequences, window and sinks", window=4, sinks=True, **WHOLE),
    Attention("both ways", causal=False, **WHOLE),
    Attention("both ways in a window, with sinks", causal=False, window=3, sinks=True, **WHOLE),
    Attention("both ways, decode", causal=False, query_len=1),
    Attention("bias of distances", causal=False, bias=True, **WHOLE),
    Attention(
        "bias of distances in a window, with sinks", causal=False, bias=True, window=3, sinks=True,
        **WHOLE,
    ),
    Attention("packed documents", segments=True, **WHOLE),
    Attention("packed documents and window", segments=True, window=2, **WHOLE),
    Attention(
        "longer than a chunk of queries", heads=2, kv_heads=1, head_dim=4, query_len=150,
        key_len=150, context_lens=(150, 131), window=140,
    ),
]  # fmt: skip


PATTERNS = {
    "window": Pattern(40, block=32),
    "window and first tokens": Pattern(40, first=20, block=32),
    "strided": Pattern(40, stride=5, block=32),
    "all of it": Pattern(33, first=5, stride=4, block=64),
}


def seen_by_hand(pattern, query, key):
    """Of keys that are not above the query."""
    near, begins = query - key < pattern.window, key < pattern.first
    blocks = query // pattern.block - key // pattern.block
    return near or begins or (pattern.stride is not None and blocks % pattern.stride == 0)


@dataclass(frozen=True)
class Moe:
    """Tokens, experts and how many each token chooses."""

    name: str
    tokens: int
    experts: int = 5
    chosen: int = 2
    hidden: int = 6
    mlp: int = 7
    router: str = "random"

    def arrays(self):
        x = normal(self.tokens, self.hidden, seed=1)
        logits = normal(self.tokens, self.experts, seed=2)
        if self.router == "same":
            logits = np.tile(logits[:1], (self.tokens, 1))
        if self.router == "unused":
            logits[:, 0] -= 100
            logits[:, self.experts - 1] -= 100
        if self.router == "ties":
            logits = np.round(logits) + 0.0  # no -0, which sorts below 0
        weights = (
            normal(self.experts, self.hidden, 2, self.mlp, seed=3),
            normal(self.experts, 2, self.mlp, seed=4),
            normal(self.experts, self.mlp, self.hidden, seed=5),
            normal(self.experts, self.hidden, seed=6),
        )
        return x, logits, weights


MOE = [
    Moe("one token", 1),
    Moe("few tokens", 3),
    Moe("many tokens", 211),
    Moe("all experts chosen", 4, chosen=5),
    Moe("one chosen", 13, chosen=1),
    Moe("experts without a token", 23, router="unused"),
    Moe("all tokens the same experts", 19, router="same"),
    Moe("ties", 17, router="ties"),
    Moe("more experts than pairs", 2, experts=11, chosen=3),
]


def lowered(function, *arguments):
    """The module for CUDA, as text."""
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    return text


def close(found, wanted, tolerance=2e-6):
    """Within a share of the largest value."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * np.abs(wanted).max())
