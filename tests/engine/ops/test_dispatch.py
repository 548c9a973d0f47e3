"""Which backend runs, why a better one does not, and the record of both."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.bench.measure import kernels_that_ran
from rooflax.errors import RequestError
from rooflax.ops import accelerator, dispatch, native
from rooflax.ops.attention import AttentionArgs, Paging, paged_attention
from rooflax.ops.dispatch import Backend, Operation, Ran, what_ran
from rooflax.ops.kernels import by_default
from rooflax.ops.linear import linear
from rooflax.ops.moe import experts, route
from rooflax.ops.sampling import ARGMAX
from tests.support.ops.cases import MOE, normal


@pytest.fixture(autouse=True)
def record(monkeypatch):
    """An empty one."""
    monkeypatch.setattr(dispatch, "_record", {})


@pytest.fixture
def on_hopper(monkeypatch):
    """Dispatch believes that this is a Hopper GPU with a JAX that its kernels take."""
    monkeypatch.setattr(accelerator, "platform", lambda: "gpu")
    monkeypatch.setattr(accelerator, "OLDEST_GPU_JAX", (0, 0))


def never(*_):
    raise AssertionError("it must not run")


def test_the_best_that_takes_the_arguments_runs_and_the_record_says_why():
    small = lambda x: "x is too large" if x > 5 else None  # noqa: E731
    double = Operation("double", {
        "xla": Backend(lambda x: ("xla", 2 * x)),
        "reference": Backend(lambda x: ("reference", x + x), small),
    })  # fmt: skip
    assert double(None, 4) == ("reference", 8) and double(None, 7) == ("xla", 14)
    passed_over = Ran("xla", (("reference", "x is too large"),))
    assert what_ran(None) == {"double": [Ran("reference"), passed_over]}
    assert double("xla", 1) == ("xla", 2)
    assert what_ran("xla") == {"double": [Ran("xla")]}


def test_a_name_is_that_one_or_an_error_before_any_work():
    rejecting = Backend(never, lambda _: "it takes nothing")
    operation = Operation("double", {"xla": Backend(lambda x: 2 * x), "reference": rejecting})
    with pytest.raises(RequestError, match=r"^it takes nothing\.$") as caught:
        operation("reference", 1)
    assert caught.value.param == "kernels"
    with pytest.raises(RequestError, match="double has no 'cuda' implementation, only xla, ref"):
        operation("cuda", 1)
    assert what_ran("reference") == {}


def test_odd_weights_on_a_gpu_are_recorded_as_xlas(on_hopper):
    x, w = (jnp.asarray(normal(*s), jnp.bfloat16) for s in ((3, 16), (16, 7)))
    y = linear(x, w)
    exact = np.asarray(x, np.float32) @ np.asarray(w, np.float32)
    np.testing.assert_allclose(np.asarray(y, np.float32), exact, rtol=2**-7, atol=1e-2)
    (ran,) = what_ran(None)["linear"]
    assert ran.implementation == "xla"
    ((better, why),) = ran.passed_over
    assert better == "pallas" and "outputs by 32, not 16 and 7" in why
    with pytest.raises(RequestError, match="outputs by 32"):
        linear(x, w, implementation="pallas")
    said = kernels_that_ran(None)
    assert said["kernels"] == {"linear": "xla", "attention": None, "moe": None}
    assert said["passed_over"] == [f"linear: pallas was passed over: {why}."]


def test_an_older_gpu_is_a_reason(monkeypatch, on_hopper):
    monkeypatch.setattr(accelerator, "capability", lambda: "8.0")
    linear(jnp.ones((1, 4)), jnp.ones((4, 3)))
    ((name, why),) = what_ran(None)["linear"][0].passed_over
    assert name == "pallas" and "this GPU has 8.0" in why


def test_a_library_that_was_not_built_is_a_reason(monkeypatch):
    monkeypatch.setattr(native, "status", lambda: native.Status(False, "it was not built"))
    linear(jnp.ones((1, 4)), jnp.ones((4, 3)))
    assert what_ran(None)["linear"] == [Ran("xla", (("native", "it was not built"),))]


@pytest.mark.skipif(not native.is_ready(), reason=native.status().reason)
def test_what_the_native_kernels_do_not_do_is_xlas():
    x, logits, weights = MOE[0].arrays()
    ids, shares = route(jnp.asarray(logits), MOE[0].chosen)
    run = partial(experts, jnp.asarray(x), ids, shares, *map(jnp.asarray, weights))
    run(activation=lambda h: h[..., 0, :], method="per_token")
    (ran,) = what_ran(None)["experts"]
    assert ran.implementation == "xla" and "always groups (moe=per_token)" in ran.passed_over[0][1]
    q, pool = jnp.ones((1, 1, 4, 8)), jnp.ones((2, 2, 4, 8))
    at = jnp.zeros(1, jnp.int32)
    paging, args = Paging(at[None] + 1, at, at[None], at + 1), AttentionArgs(1.0)
    paged_attention(q, pool, pool, paging, args)
    paged_attention(q, pool, pool, paging, replace(args, repeat_kv=True))
    fast, slow = what_ran(None)["attention"]
    assert fast == Ran("native")
    assert slow.implementation == "xla" and "gqa=repeat" in slow.passed_over[0][1]


@pytest.mark.skipif(not native.is_ready(), reason=native.status().reason)
def test_an_operation_without_that_kernel_is_recorded_as_what_ran():
    dense = Operation("dense", {"reference": Backend(never), "xla": Backend(lambda x: x)})
    assert dense("native", 3) == 3
    assert what_ran("native") == {"dense": [Ran("xla")]}
    ARGMAX(None, jnp.ones((1, 4)))
    assert what_ran(None)["argmax"] == [Ran("native")]


def test_what_runs_by_default_is_known_without_running_it(on_hopper):
    found = by_default()
    kinds = ("bfloat16", "int8", "int4", "mxfp4", "fp8")
    assert {found["linear"][kind] for kind in kinds} == {Ran("pallas")}
    assert found["attention"]["int8"] == Ran("pallas")
    assert found["moe"]["bfloat16"] == Ran("pallas")
    assert what_ran(None) == {}
