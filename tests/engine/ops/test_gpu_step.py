"""A decode step's attention by one kernel and its merge: against the operations one after the
other, in interpret mode, with NaN in what nobody may read.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.models.initialize import random_weights
from rooflax.models.model import build
from rooflax.models.registry import read_config
from rooflax.nn.batch import Batch
from rooflax.nn.execution import ExecutionOptions
from rooflax.nn.kv_cache import allocate
from rooflax.ops import dispatch
from rooflax.ops.attention import AttentionArgs, Projected, Sequences, gpu_step, ragged_attention
from rooflax.ops.cache_write import cache_write
from rooflax.ops.dispatch import what_ran
from rooflax.ops.kv_pool import QuantizedPool, as_pool
from rooflax.ops.norm import rms_norm
from rooflax.ops.rope import apply_rope
from tests.marks import cases
from tests.support.ops.cases import WITH_GPU_KERNELS, close, lowered, normal

pytestmark = [pytest.mark.oldest_jax, WITH_GPU_KERNELS]
BLOCK = 16
NOT_WRITTEN = 1 << 30


@dataclass(frozen=True)
class Case:
    """Rows of one token each at these positions; a negative one is padding."""

    name: str
    positions: tuple[int, ...] = (37, 5)
    firsts: tuple[int, ...] = (0, 0)
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    dtype: str = "float32"
    window: int | None = None
    sinks: bool = False
    norms: bool = False
    turns: bool = True
    table_len: int = 12

    def arrays(self):
        rows = len(self.positions)
        shape = (1, rows, self.kv_heads, self.group + 2, self.head_dim)
        qkv = jnp.asarray(normal(*shape, seed=1), self.dtype)
        angles = normal(1, rows, self.head_dim // 2, seed=2)
        cos, sin = (jnp.asarray(f(angles)) for f in (np.cos, np.sin))
        norms = tuple(jnp.asarray(1 + normal(self.head_dim, seed=n), self.dtype) for n in (3, 4))
        new = Projected(
            qkv,
            *((cos, sin) if self.turns else (None, None)),
            norms=norms if self.norms else None,
            eps=1e-5,
        )
        sinks = jnp.asarray(normal(self.kv_heads * self.group, seed=5), self.dtype)
        args = AttentionArgs(0.17, self.window, sinks if self.sinks else None)
        return new, args

    def cache(self):
        """Pools with NaN wherever no past token is, and the rows' blocks in them."""
        rows = len(self.positions)
        shape = (1 + rows * self.table_len, self.kv_heads, BLOCK, self.head_dim)
        pools = [np.full(shape, np.nan, np.float32) for _ in range(2)]
        tables = np.zeros((rows, self.table_len), np.int32)
        numbers = np.random.default_rng(6).permutation(np.arange(1, shape[0]))
        for row, (position, first) in enumerate(zip(self.positions, self.firsts, strict=True)):
            if position < 0:
                continue
            count = (position - first) // BLOCK + 1
            tables[row, :count] = numbers[row * self.table_len :][:count]
            for at in range(first, position):
                block, offset = tables[row, (at - first) // BLOCK], (at - first) % BLOCK
                for number, pool in enumerate(pools):
                    pool[block, :, offset] = normal(*shape[1::2], seed=7 + 2 * at + number)
        real = np.array(self.positions) >= 0
        sequences = Sequences(
            jnp.arange(rows, dtype=jnp.int32),
            jnp.asarray(real, jnp.int32),
            jnp.asarray(np.where(real, self.positions, 0), jnp.int32),
            jnp.asarray(np.where(real, self.positions, -1) + 1, jnp.int32),
            jnp.asarray(tables),
            jnp.asarray(self.firsts, jnp.int32),
            longest=1,
        )
        return [jnp.asarray(pool, self.dtype) for pool in pools], sequences

    def slots(self, sequences):
        at = np.array(self.positions) - np.array(self.firsts)
        blocks = np.asarray(sequences.block_tables)[np.arange(len(at)), np.maximum(at, 0) // BLOCK]
        slots = np.where(np.array(self.positions) < 0, NOT_WRITTEN, blocks * BLOCK + at % BLOCK)
        return jnp.asarray(slots, jnp.int32)


CASES = [
    Case("two rows"),
    Case("one row, whole heads", (64,), (0,), head_dim=128),
    Case("padding between rows", (20, -1, 3), (0, 0, 0)),
    Case("the first token", (0,), (0,)),
    Case("window and sinks", (150, 9), (96, 0), window=40, sinks=True),
    Case("norms", (37, 16), norms=True),
    Case("no RoPE, sinks", turns=False, sinks=True),
    Case("bfloat16", dtype="bfloat16", norms=True, sinks=True),
    Case("more queries than a warpgroup takes", group=9, kv_heads=1),
    Case("many shares", (190,), (0,), kv_heads=1),
]


def one_after_the_other(case, new, pools, sequences, args):
    group = new.qkv.shape[3] - 2
    q, k, v = jnp.split(new.qkv, (group, group + 1), axis=3)
    if new.norms is not None:
        q, k = (rms_norm(a, w, eps=new.eps) for a, w in zip((q, k), new.norms, strict=True))
    if new.cos is not None:
        q, k = (apply_rope(a, new.cos, new.sin) for a in (q, k))
    slots = case.slots(sequences)
    k_pool, v_pool = (
        cache_write(pool, a[0, :, :, 0], slots, implementation="reference")
        for pool, a in zip(pools, (k, v), strict=True)
    )
    q = q[0].reshape(q.shape[1], -1, q.shape[-1])
    seen = [jnp.nan_to_num(pool) for pool in (k_pool, v_pool)]
    out = ragged_attention(q, *seen, sequences, args, implementation="reference")
    return out, k_pool, v_pool


@pytest.mark.parametrize("case", cases(CASES, every_jax=["two rows"]), ids=lambda c: c.name)
def test_a_step_is_its_operations(case, interpreted):
    new, args = case.arrays()
    pools, sequences = case.cache()
    wanted = one_after_the_other(case, new, pools, sequences, args)
    given = new, *map(as_pool, pools), sequences, args
    assert gpu_step.unsupported(*given) is None
    found = gpu_step.attention_step(*given)
    tolerance = 2e-6 if case.dtype == "float32" else 2**-8
    assert found[0].dtype == new.qkv.dtype
    real = np.array(case.positions) >= 0
    out, other = (np.asarray(a[0], np.float32) for a in (found, wanted))
    close(out[real], other[real], tolerance)
    assert not out[~real].any()
    for pool, other in zip(found[1:], wanted[1:], strict=True):
        pool, other = (np.asarray(a, np.float32) for a in (pool, other))
        np.testing.assert_array_equal(np.isnan(pool), np.isnan(other))
        close(np.nan_to_num(pool), np.nan_to_num(other), 1e-6 if tolerance < 1e-5 else 2**-8)


@pytest.mark.parametrize("case", CASES[:2] + CASES[4:6], ids=lambda c: c.name)
def test_it_lowers_for_cuda(case):
    case = replace(case, dtype="bfloat16")
    new, args = case.arrays()
    pools, sequences = case.cache()

    def step(new, pools, sequences, args):
        return gpu_step.attention_step(new, *map(as_pool, pools), sequences, args)

    assert lowered(step, new, pools, sequences, args).count("mosaic_gpu_v2") >= 2


def test_what_it_leaves_to_others():
    case = CASES[0]
    new, args = case.arrays()
    pools, sequences = case.cache()
    whole = [as_pool(pool) for pool in pools]
    codes = QuantizedPool(pools[0].astype(jnp.int8), pools[0][..., 0])
    assert "one token" in gpu_step.unsupported(new, *whole, replace(sequences, longest=2), args)
    assert "writes float32" in gpu_step.unsupported(new, codes, codes, sequences, args)
    assert "causal" in gpu_step.unsupported(new, *whole, sequences, replace(args, causal=False))
    narrow = Projected(new.qkv[..., :48])
    assert "heads by 64" in gpu_step.unsupported(narrow, *whole, sequences, args)


LAYERS = {
    "model_type": "qwen3", "vocab_size": 40, "hidden_size": 36, "intermediate_size": 44,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip


@pytest.mark.every_jax
@pytest.mark.parametrize("layers", cases(["unrolled", "scan"], nightly=["scan"]))
def test_layers_decode_by_it(layers, on_gpu, monkeypatch):
    monkeypatch.setattr(dispatch, "_record", {})
    family, config = read_config(LAYERS)
    weights = random_weights(family, config, stacked=layers == "scan")
    model = build(family, config, weights, 64)
    found = {}
    for kernels in (None, "xla"):
        cache = allocate(config.groups, (7,), block_size=BLOCK, stacked=layers == "scan")
        options = ExecutionOptions(kernels=kernels, layers=layers)
        steps = []
        for step in range(2):
            batch = Batch.ragged(
                jnp.array([3 + step, 7]),
                jnp.arange(2, dtype=jnp.int32),
                jnp.ones(2, jnp.int32),
                jnp.array([step + 15, step]),
                (jnp.array([[5, 2], [3, 1]]),),
                (jnp.zeros(2, jnp.int32),),
                longest=1,
            )
            run = jax.jit(partial(model.forward, options=options))
            hidden, cache = run(batch, cache)
            steps.append(hidden)
        found[kernels] = jnp.stack(steps)
    close(found[None], found["xla"], 2e-6)
    assert [ran.implementation for ran in what_ran(None)["attention"]][-1] == "pallas"
