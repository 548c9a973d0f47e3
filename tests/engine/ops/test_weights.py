"""Weights as objects: every kind by its verbs, and a weight made of weights over each of them."""

import itertools
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import rooflax
from rooflax import ExecutionOptions, decode_step, new_cache, prefill
from rooflax.errors import RequestError
from rooflax.models.initialize import random_weights
from rooflax.models.model import build
from rooflax.models.presets import PRESETS
from rooflax.models.registry import read_config
from rooflax.nn.storage import Storage
from rooflax.ops import dispatch, native
from rooflax.ops.dispatch import Ran, what_ran
from rooflax.ops.format_names import FORMATS, KNOWN, Format
from rooflax.ops.linear import Norm, linear, lookup, unembed
from rooflax.ops.linear.api import matmul, take
from rooflax.ops.moe import experts
from rooflax.ops.weights import (
    Composite,
    Dense,
    Operand,
    StackMember,
    as_operand,
    as_table,
    at,
    quantize,
    split_leaf,
)
from rooflax.ops.weights.formats import Int8
from rooflax.ops.weights.quantized import CODES
from tests.marks import cases
from tests.support.ops.calls import by_each
from tests.support.ops.cases import normal

KINDS = ("float32", "bfloat16", *FORMATS)
BACKENDS = ("reference", "xla", None)
EXACT = [kind for kind in KINDS if kind not in FORMATS or not FORMATS[kind].quantizes_activations]
"""Whose matmuls are those of the numbers that they hold."""
INNER, OUTER, RANK = 64, 37, 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRank(Composite):
    """base + a b, as an adapter has it: a takes the inputs to a few, b those to the outputs."""

    base: Operand
    a: Dense
    b: Dense

    in_shape = property(lambda self: self.base.in_shape)
    out_shape = property(lambda self: self.base.out_shape)
    dtype = property(lambda self: self.base.dtype)

    def matmul(
        self, x, bias, *, prologue, residual, num_rows, dtype, implementation
    ):  # fmt: skip
        how = {"num_rows": num_rows, "implementation": implementation}
        first = {"prologue": prologue, "residual": residual, "dtype": dtype}
        y = matmul(self.base, x, bias, **first, **how)
        few = matmul(self.a, x, prologue=prologue, dtype=jnp.float32, **how)
        return matmul(self.b, few, residual=y, dtype=y.dtype, **how)

    def take(self, ids, **how):
        rows = take(self.base, ids, **how)
        return rows.astype(jnp.float32) + take(self.b, ids, **how) @ self.a.array.T

    def at(self, index):
        return LowRank(self.base.at(index), self.a.at(index), self.b.at(index))


def stored(kind, *shape, seed=0):
    """A leaf [*shape] whose last axis is the outputs."""
    return kept(kind, normal(*shape, seed=seed))


def kept(kind, w):
    if kind in FORMATS:
        return quantize(w, kind, w.shape[-2:-1], w.shape[-1:])
    return jnp.asarray(w, kind)


def low_rank(base, seed=0, scale=1.0):
    a = jnp.asarray(normal(base.inner, RANK, seed=seed + 1) * np.float32(scale))
    b = jnp.asarray(normal(RANK, base.outer, seed=seed + 2))
    return LowRank(base, as_operand(a), Dense(b, (RANK,), base.out_shape))


@jax.jit
def total(w):
    """What a low-rank weight stands for, as a matrix."""
    return w.base.numbers() + w.a.numbers() @ w.b.numbers()


@jax.jit
def parts(w, x):
    """Rows as a weight's matmul takes them, and its numbers."""
    return w.activations(x), w.numbers()


taken = jax.jit(take)


def test_a_class_for_every_code_and_a_native_kernel():
    codes = {format.code for format in FORMATS.values()}
    read = {*native.LAYOUTS, *native.READ_AS} - {"matrix", "table", "pairs"}
    assert codes <= read == set(CODES)
    names = {name for cls in CODES.values() for name in (*cls.blocks.values(), *cls.names)}
    assert names <= set(KNOWN)


@pytest.mark.parametrize("layers", ["unrolled", "scan"])
def test_a_new_format_is_a_class_and_a_name(monkeypatch, layers):
    """Without a kernel it is XLA's, and the record says why."""
    monkeypatch.setitem(CODES, "int7", Int8)  # the class takes its place until the test ends

    class Int7(Int8):
        code, has_sums = "int7", False

        @staticmethod
        def encoded(rows):
            codes, scales, largest = Int8.encoded(rows)
            return codes // 2, scales * 2, largest

    monkeypatch.setitem(FORMATS, "w7a16", Format("int7", False))
    monkeypatch.setattr(dispatch, "_record", {})
    model = rooflax.load("preset:qwen2.5-tiny", quantize="w7a16", max_model_len=32)
    leaf = model.weights["layers"][0]["mlp.down"]
    assert isinstance(leaf, Int7) and not leaf.sums.size
    exact = rooflax.load("preset:qwen2.5-tiny", quantize="w8a16", max_model_len=32)
    options = ExecutionOptions(layers=layers)
    found = []
    for one in (model, exact):
        one = one.stacked() if layers == "scan" else one
        cache = new_cache(one, 1, 16, options=options)
        tokens = jnp.arange(12, dtype=jnp.int32)[None]
        found.append(np.asarray(jax.jit(partial(prefill, options=options))(one, cache, tokens)[0]))
    error = np.linalg.norm(found[0] - found[1]) / np.linalg.norm(found[1])
    assert 0 < error < 0.05
    if native.is_ready():
        why = (("native", "the native kernels have no int7 weights"),)
        assert Ran("xla", why) in what_ran(None)["linear"]


@pytest.mark.parametrize("kind", KINDS)
def test_verbs(kind):
    leaf, x = stored(kind, INNER, OUTER), jnp.asarray(normal(3, INNER, seed=1))
    w, ids = as_operand(leaf), np.array([0, OUTER - 1, 5])
    assert w.shape == leaf.shape == (INNER, OUTER) and w.nbytes == leaf.nbytes
    norm, residual = Norm(jnp.asarray(normal(INNER, seed=2))), normal(3, OUTER, seed=3)
    rows, numbers = map(np.asarray, parts(w, norm(x)))
    for y in by_each(matmul, BACKENDS)(w, x, prologue=norm, residual=residual):
        np.testing.assert_allclose(y, rows @ numbers + residual, rtol=1e-5, atol=2e-4)
    np.testing.assert_array_equal(taken(w, ids), numbers.T[ids])


@pytest.mark.parametrize("kind", KINDS)
def test_one_of_a_stack_is_a_weight(kind):
    stack, x = stored(kind, 3, INNER, OUTER), jnp.asarray(normal(2, INNER, seed=1))
    one = as_operand(at(stack, jnp.int32(1)))
    assert isinstance(one, StackMember) and one.shape == (INNER, OUTER)
    alone, each = as_operand(kept(kind, normal(3, INNER, OUTER)[1])), by_each(matmul, BACKENDS)
    for found, wanted in zip(each(one, x), each(alone, x), strict=True):
        np.testing.assert_array_equal(found, wanted)
    ids = np.arange(OUTER)
    np.testing.assert_array_equal(taken(one, ids), taken(alone, ids))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_mesh_splits(kind):
    """As each part of outputs is packed by itself; of a table the rows."""
    leaf = stored(kind, 3, INNER, OUTER)
    spec = split_leaf(leaf, ("expert", None, "tensor"), 1, ("stage",))
    if kind not in FORMATS:
        assert spec == PartitionSpec("stage", "expert", None, "tensor")
        w = Dense(leaf.reshape(3, INNER, OUTER), (8, 8), (OUTER,))
        assert w.split(("expert", "tensor", None, None), 1).array == PartitionSpec(
            "expert", "tensor", None
        )
        table = as_table(leaf[0].T)
        assert table.split(("tensor", None)).array == PartitionSpec("tensor", None)
        return
    assert spec.values == spec.scales == PartitionSpec("stage", "expert", "tensor")
    assert spec.sums == (spec.values if leaf.sums.size else PartitionSpec("stage"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_low_rank_weight_over_each_format(kind):
    w = low_rank(as_operand(stored(kind, INNER, OUTER)))
    x, bias = jnp.asarray(normal(3, INNER, seed=5)), normal(OUTER, seed=6)
    norm, residual = Norm(jnp.asarray(normal(INNER, seed=7))), normal(3, OUTER, seed=8)
    rows = norm(x)
    base_rows, numbers = map(np.asarray, parts(w.base, rows))
    added = np.asarray(w.a.numbers()) @ np.asarray(w.b.numbers())
    exact = base_rows @ numbers + np.asarray(rows) @ added + bias + residual
    for found in by_each(linear, BACKENDS)(x, w, bias, prologue=norm, residual=residual):
        np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", EXACT)
def test_a_low_rank_embedding_and_head(kind):
    table = stored(kind, INNER, OUTER)
    base = as_operand(table) if kind in FORMATS else as_table(table.T)
    w, x = low_rank(base), normal(2, 3, INNER, seed=5)
    whole, ids = np.asarray(total(w)), np.array([[0, 5], [OUTER - 1, 5]])
    np.testing.assert_allclose(jax.jit(unembed)(x, w), x @ whole, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(jax.jit(lookup)(w, ids), whole.T[ids], rtol=1e-5, atol=1e-5)


def test_experts_take_no_low_rank_weight():
    x, ids, shares = jnp.ones((1, INNER)), jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1))
    w = low_rank(as_operand(stored("float32", INNER, OUTER)))
    biases = jnp.ones((1, 2, 8)), jnp.ones((1, INNER))
    with pytest.raises(RequestError, match="LowRank cannot be a weight of experts"):
        experts(x, ids, shares, w, biases[0], w, biases[1], activation=lambda h: h)


def adapted(model, scale):
    """Low-rank weights in place of every matmul's of the layers, and the same as plain arrays."""
    config, layers, dense = model.config, [], []
    for index, layer in enumerate(model.weights["layers"]):
        mine, plain = dict(layer), dict(layer)
        for key in ("attn.qkv", "attn.o", "mlp.gate_up", "mlp.down"):
            line = config.table[f"layers.{{i}}.{key}"]
            inner = len(line.in_out_shape(config.axis_sizes)[0])
            base = as_operand(layer[key], contract=inner)
            mine[key] = low_rank(base, seed=index, scale=scale)
            plain[key] = total(mine[key]).reshape(layer[key].shape)
        layers.append(mine)
        dense.append(plain)
    both = (model.weights | {"layers": tuple(found)} for found in (layers, dense))
    return [replace(model, weights=weights) for weights in both]


@pytest.mark.parametrize(
    ("kind", "layers"),
    cases(
        itertools.product(
            ["float32", "w8a8", "w8a16", "w4a16", "mxfp4-a16", "fp8-a16"], ["unrolled", "scan"]
        ),
        default=[
            ("float32", "scan"),
            ("w8a8", "unrolled"),
            ("w4a16", "unrolled"),
            ("mxfp4-a16", "scan"),
        ],
    ),
)
def test_a_whole_model_of_low_rank_weights(kind, layers):
    """Equal to the model whose weights are the sums; with nothing added, to the base's bits."""
    name, config = read_config(PRESETS["qwen2.5-tiny"] | {"num_hidden_layers": 2})
    quantized = Storage(quantize=kind if kind in FORMATS else None)
    model = build(name, config, random_weights(name, config, storage=quantized), 64)
    exact = kind in EXACT
    mine, dense = adapted(model, 0.01 if exact else 0.0)
    dense = dense if exact else model
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, config.vocab_size, jnp.int32)
    options, found = ExecutionOptions(layers=layers), []

    def logits(model):
        cache = new_cache(model, 2, 32, options=options)
        first, cache = prefill(model, cache, tokens, options=options)
        at = jnp.full(2, 9, jnp.int32)
        return first, decode_step(model, cache, tokens[:, 0], at, options=options)[0]

    for one in (mine, dense):
        run = jax.jit(logits)
        found.append(run(one.stacked() if layers == "scan" else one))
    for ours, theirs in zip(*found, strict=True):
        tolerance = 1e-4 if exact else 0
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)
    if exact:
        unchanged = jax.jit(logits)(model.stacked() if layers == "scan" else model)
        assert np.abs(np.asarray(unchanged[0]) - np.asarray(found[0][0])).max() > 1e-2
