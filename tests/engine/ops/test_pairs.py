"""`Pairs`: bfloat16 in panels, by XLA and by every instruction set's kernel."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import rooflax
from rooflax.loading.load import load_plan
from rooflax.loading.model_info import embedded_folder
from rooflax.loading.plan import make_plan
from rooflax.loading.save import save
from rooflax.ops import native
from rooflax.ops.linear import Activation, Norm, linear
from rooflax.ops.weights import Dense, Pairs, StackMember, pack_pairs
from rooflax.ops.weights.pairs import _packed
from tests.support.ops.cases import normal


@pytest.fixture(scope="module")
def bfloat16_checkpoint():
    return embedded_folder()


SHAPES = ((64, 48), (33, 17), (1, 1), (70, 16))
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


def _weight(inner: int, outer: int, *stack: int) -> np.ndarray:
    return np.asarray(normal(*stack, inner, outer)).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_packing_keeps_every_number(inner, outer):
    w = _weight(inner, outer, 2)
    packed = pack_pairs(w, (inner,), (outer,))
    np.testing.assert_array_equal(np.asarray(packed.array[1]), _packed(w[1]))
    np.testing.assert_array_equal(np.asarray(packed.matrix()), w)
    ids = np.array([outer - 1, 0, outer + 5])
    rows = np.asarray(packed.member(0).take(jnp.asarray(ids)))
    np.testing.assert_array_equal(rows, w[0].T[np.minimum(ids, outer - 1)].astype(np.float32))


@jax.jit
def products(x, packed, dense, bias, residual):
    """Of one of a stack: by the kernel, of the first row alone, and by XLA."""
    return [
        linear(
            x[:count], StackMember(stack, jnp.int32(2)), bias, residual=residual[:count],
            implementation=by,
        )
        for stack, count, by in (
            (packed, len(x), "native"), (packed, 1, "native"), (dense, len(x), "xla"),
        )
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_kernel_is_xlas_product(instruction_set, rows, inner, outer, dtype):
    w = _weight(inner, outer, 3)
    packed, dense = pack_pairs(w, (inner,), (outer,)), Dense(jnp.asarray(w), (inner,), (outer,))
    x = jnp.asarray(normal(rows, inner), dtype)
    how = {"bias": jnp.asarray(normal(outer)), "residual": jnp.asarray(normal(rows, outer), dtype)}
    found, alone, wanted = map(np.asarray, products(x, packed, dense, **how))
    assert found.dtype == wanted.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(found[:1], alone)
    near = TOLERANCE if dtype == "float32" else {"rtol": 2e-2, "atol": 2e-2}
    np.testing.assert_allclose(found.astype(np.float32), wanted.astype(np.float32), **near)


def test_prologues_in_bfloat16(instruction_set):
    w = _weight(64, 32)
    packed, dense = pack_pairs(w, (64,), (32,)), jnp.asarray(w)
    for prologue, shape in ((Norm(jnp.ones(64)), (64,)), (Activation("silu", True), (2, 64))):
        x = jnp.asarray(normal(6, *shape), "bfloat16")
        found, wanted = (
            np.asarray(linear(x, weight, prologue=prologue, implementation=by), np.float32)
            for weight, by in ((packed, "native"), (dense, "xla"))
        )
        np.testing.assert_allclose(found, wanted, rtol=3e-2, atol=3e-2)


def test_a_model_in_pairs_is_the_model(bfloat16_checkpoint, tmp_path):
    plan = make_plan(bfloat16_checkpoint, max_model_len=64)
    kinds = {}
    for pairs in (False, True):
        storage = replace(plan.storage, pairs_bfloat16=pairs)
        model = load_plan(replace(plan, storage=storage))
        layer = model.weights.get("stacked_layers") or model.weights["layers"]
        kinds[pairs] = {type(leaf) for leaf in layer[0].values() if isinstance(leaf, Pairs)}
        save(model, tmp_path / str(pairs), files_from=bfloat16_checkpoint)
    assert kinds == {False: set(), True: {Pairs}}
    a, b = ((tmp_path / str(pairs) / "model.safetensors").read_bytes() for pairs in kinds)
    assert a == b


def test_processors_that_multiply_pairs_keep_them(bfloat16_checkpoint):
    plan = make_plan(bfloat16_checkpoint, max_model_len=64)
    has_pairs = native.is_ready() and native.instruction_set() in ("amx", "avx512-bf16")
    assert plan.storage.pairs_bfloat16 == has_pairs
    llm = rooflax.LLM(bfloat16_checkpoint, max_model_len=64)
    tokens = llm.generate([[5, 6, 7]], max_tokens=4, temperature=0, ignore_eos=True)[0].tokens
    streamed = rooflax.LLM(bfloat16_checkpoint, max_model_len=64, weights_budget="5MiB")
    again = streamed.generate([[5, 6, 7]], max_tokens=4, temperature=0, ignore_eos=True)[0].tokens
    assert tokens == again
