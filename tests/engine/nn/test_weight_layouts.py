"""The weight table: every layout is undone by its inverse, and says what the checkpoint holds."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooflax.models.registry import read_config
from rooflax.nn.rope import Rope
from rooflax.nn.shards import Shards, split_axes
from rooflax.nn.tensor_layouts import (
    QKV,
    Conv1D,
    Flat,
    HeadPart,
    Linear,
    Parallel,
    Reordered,
    Rows,
    Swapped,
    TensorLayout,
)
from rooflax.nn.weights import WeightLine, assemble
from rooflax.ops.tiles import padded_vocab
from tests import goldens

HF = ("q", "k", "v")
CASES = {
    "plain": WeightLine("vocab hidden", "w"),
    "flat bias": WeightLine("heads head_dim", "w", Flat()),
    "conv1d": WeightLine("hidden -> mlp", "w", Conv1D()),
    "conv1d of two": WeightLine("heads head_dim -> hidden", "w", Conv1D()),
    "linear": WeightLine("hidden -> mlp", "w", Linear()),
    "linear of two": WeightLine("heads head_dim -> hidden", "w", Linear()),
    "qkv": WeightLine("hidden -> kv_heads group head_dim", HF, QKV()),
    "qkv bias": WeightLine("kv_heads group head_dim", HF, QKV(bias=True)),
    "gpt2 qkv": WeightLine("hidden -> heads three head_dim", "w", Swapped(3)),
    "gpt2 qkv bias": WeightLine("heads three head_dim", "w", Swapped(3)),
    "gate up": WeightLine("hidden -> two mlp", ("g", "u"), Parallel()),
    "gate up bias": WeightLine("two mlp", ("g", "u"), Parallel()),
    "fused qkv": WeightLine("hidden -> kv_heads group head_dim", "w", Rows(QKV())),
    "fused qkv bias": WeightLine("kv_heads group head_dim", "w", Rows(QKV(bias=True))),
    "fused gate up": WeightLine("hidden -> two mlp", "w", Rows(Parallel())),
    "three in one": WeightLine("hidden -> three mlp", "w", Rows(Parallel())),
    "three biases in one": WeightLine("three mlp", "w", Rows(Parallel())),
    "experts": WeightLine("experts | hidden -> two mlp", "w", Swapped(2)),
    "experts bias": WeightLine("experts two mlp", "w", Swapped(2)),
}
NAMES = ["vocab", "hidden", "mlp", "heads", "kv_heads", "head_dim", "experts"]
SIZES = st.lists(st.integers(1, 9), min_size=7, max_size=7).map(
    lambda values: dict(zip(NAMES, values, strict=True)) | {"two": 2, "three": 3}
)


@pytest.mark.parametrize("case", CASES)
@given(sizes=SIZES, queries=st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_join_and_split_are_inverse(case, sizes, queries):
    weight, sizes = CASES[case], sizes | {"group": queries + 2}
    shape = weight.shape(sizes)
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    parts = weight.split(array, sizes)
    assert [part.shape for part in parts] == [tuple(s) for s in weight.hf_shapes(sizes)]
    assert len(parts) == len(weight.names)
    assert sum(part.size for part in parts) == array.size
    back = np.full(shape, -1, np.float32)
    weight.layout.join([np.ascontiguousarray(part) for part in parts], back)
    np.testing.assert_array_equal(back, array)


def test_qkv_puts_a_kv_heads_queries_beside_it():
    """From the checkpoint's q_proj [heads * head_dim, hidden], the queries of K/V head 1."""
    sizes = {"hidden": 5, "kv_heads": 2, "group": 3 + 2, "head_dim": 4}
    rng = np.random.RandomState(0)
    q, k, v = (rng.standard_normal((rows, 5)).astype(np.float32) for rows in (24, 8, 8))
    out = np.empty(CASES["qkv"].shape(sizes), np.float32)
    CASES["qkv"].layout.join([q, k, v], out)
    heads = q.reshape(6, 4, 5)
    np.testing.assert_array_equal(out[:, 1, 0], heads[3].T)
    np.testing.assert_array_equal(out[:, 0, 2], heads[2].T)
    np.testing.assert_array_equal(out[:, 1, 3], k.reshape(2, 4, 5)[1].T)
    np.testing.assert_array_equal(out[:, 0, 4], v.reshape(2, 4, 5)[0].T)


@pytest.mark.parametrize(
    ("dim", "interleaved", "wanted"),
    [
        (None, False, None),
        (None, True, (0, 2, 4, 6, 1, 3, 5, 7)),
        (4, False, (0, 1, 4, 5, 2, 3, 6, 7)),
        (4, True, (0, 2, 4, 5, 1, 3, 6, 7)),
    ],
)
def test_pairs_of_a_checkpoint_are_ours(dim, interleaved, wanted):
    """Those that turn are first of each half; q and k follow, v does not; biases and norms too."""
    order = Rope(10.0, dim=dim).order(8, interleaved)
    assert order == wanted
    rng = np.random.RandomState(0)
    q, k, v = (rng.standard_normal((rows, 5)).astype(np.float32) for rows in (16, 8, 8))
    out = np.empty((5, 1, 4, 8), np.float32)
    layout = QKV(order=order)
    layout.join([q, k, v], out)
    order = order or tuple(range(8))
    np.testing.assert_array_equal(out[:, 0, 1], q.reshape(2, 8, 5)[1, list(order)].T)
    np.testing.assert_array_equal(out[:, 0, 2], k[list(order)].T)
    np.testing.assert_array_equal(out[:, 0, 3], v.T)
    for part, back in zip((q, k, v), layout.split(out, (5,)), strict=True):
        np.testing.assert_array_equal(back, part)
    bias, norm = np.empty((1, 4, 8), np.float32), np.empty(8, np.float32)
    QKV(bias=True, order=order).join([q[:, 0], k[:, 0], v[:, 0]], bias)
    np.testing.assert_array_equal(bias, out[0])
    Reordered(order).join([k[:, 0]], norm)
    np.testing.assert_array_equal(norm, out[0, 0, 2])
    np.testing.assert_array_equal(Reordered(order).split(norm, ())[0], k[:, 0])


def test_two_weights_of_one_tensor_are_each_heads_rows_of_a_kind():
    """The first kind's rows as they are, the second's transposed; together they are the tensor."""
    stored = np.random.RandomState(0).standard_normal((3 * (4 + 2), 5)).astype(np.float32)
    sizes = {"heads": 3, "four": 4, "two": 2, "rank": 5}
    axes, whole = ("heads | four -> rank", "heads | rank -> two"), 0
    for kind, wanted in ((0, slice(0, 4)), (1, slice(4, 6))):
        weight = WeightLine(axes[kind], "w", HeadPart((4, 2), kind))
        assert weight.hf_shapes(sizes) == [stored.shape]
        out = np.empty(weight.shape(sizes), np.float32)
        weight.layout.join([stored], out)
        rows = stored.reshape(3, 6, 5)[:, wanted]
        np.testing.assert_array_equal(out if kind == 0 else out.swapaxes(1, 2), rows)
        where = (slice(1, 3), slice(None), slice(None))
        parts = weight.layout.slice_parts([stored], out.shape, where)
        own = np.empty_like(out[1:])
        weight.layout.join(parts, own)
        np.testing.assert_array_equal(own, out[1:])
        whole = whole + weight.split(out, sizes)[0]
    np.testing.assert_array_equal(whole, stored)


def test_interleaved_experts():
    """gate is the checkpoint's even columns, up its odd ones (gpt-oss)."""
    stored = np.random.RandomState(0).standard_normal((3, 5, 8)).astype(np.float32)
    out = np.empty((3, 5, 2, 4), np.float32)
    Swapped(2).join([stored], out)
    np.testing.assert_array_equal(out[:, :, 0], stored[:, :, ::2])
    np.testing.assert_array_equal(out[:, :, 1], stored[:, :, 1::2])


def test_join_converts_the_dtype_on_the_way():
    import ml_dtypes

    out = np.empty((2, 3), ml_dtypes.bfloat16)
    TensorLayout().join([np.arange(6, dtype=np.float32).reshape(2, 3)], out)
    assert out.astype(np.float32).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("variant", list(goldens.VARIANTS))
def test_every_slot_once_and_all_parameters_counted(variant):
    _, config = read_config(goldens.VARIANTS[variant])
    sizes, found = config.axis_sizes, list(config.params())
    shared = [slot for slot in found if isinstance(slot.line.layout, HeadPart)]
    hf = [hf for slot in found for hf in slot.hf_names]
    assert len(hf) == len(set(hf)) + len(shared) // 2 and len(found) == len(
        {slot.name for slot in found}
    )
    shapes = {
        n: tuple(s)
        for slot in found
        for n, s in zip(slot.hf_names, slot.line.hf_shapes(sizes), strict=True)
    }
    assert shapes == goldens.stored_shapes(variant, goldens.committed(variant))
    count = sum(math.prod(shape) for shape in shapes.values())
    assert config.num_parameters == count
    tree = assemble(config.num_layers, ((slot, slot.name) for slot in found))
    assert len(tree["layers"]) == config.num_layers
    for index, layer in enumerate(tree["layers"]):
        assert all(value == f"layers.{index}.{key}" for key, value in layer.items())
    assert {key: value for key, value in tree.items() if key != "layers"} == {
        slot.key: slot.name for slot in found if slot.layer is None
    }


@pytest.mark.parametrize("variant", list(goldens.VARIANTS))
def test_sharding_splits_one_axis_of_what_is_large_and_nothing_else(variant):
    _, config = read_config(goldens.VARIANTS[variant])
    for key, weight in config.table.items():
        spec = split_axes(weight, Shards(tensor=2))
        split = [n for n, part in zip(weight.axis_names, spec, strict=True) if part is not None]
        assert len(split) <= 1, key
        whole = ("norm", "router", "shared_gate", "o_bias", "out_bias", "down_bias", "position",
                 "choice_bias", "scale", "scales", "per_layer.gate", "per_layer.up",
                 "per_layer.projection", "q_a", "kv_a", "q_a_bias", "kv_a_bias")  # fmt: skip
        small = key.endswith((*whole, "norm_bias", "router_bias"))
        small &= "kv_heads" not in weight.axis_names  # a norm of all heads together
        assert bool(split) != small, key
    assert padded_vocab(263, 2) == 264 and padded_vocab(264, 2) == 264
    assert padded_vocab(5, 8) == 8
