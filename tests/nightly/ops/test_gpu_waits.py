"""GPU kernels wait: for copies before they read, for products and loads before what these read is
filled again, and for what they write.

On the lowered module, without a GPU; `make gpu-compile` looks for the same in the machine code.
"""

import functools
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from rooflax import ops
from rooflax.ops.attention import gpu_flash, gpu_step, gpu_wide
from rooflax.ops.kv_pool import QuantizedPool, as_pool, tokens_as_int8
from rooflax.ops.linear import gpu_plain_tiles, gpu_tiles
from rooflax.ops.moe import gpu as moe_gpu
from rooflax.ops.weights import as_operand
from tests.engine.ops.test_gpu import (
    FEW,
    PROMPTS,
    SIZED,
    attend,
    kernel,
    moe_arguments,
    on_cuda_cores,
    paged,
    patterned,
    run_experts,
    weights,
)
from tests.engine.ops.test_gpu import wide as wide_heads
from tests.engine.ops.test_gpu_step import Case
from tests.marks import cases
from tests.support.ops.cases import WITH_GPU_KERNELS

pytestmark = WITH_GPU_KERNELS


def experts(inner):
    """Tiles of plain weights. Argument 3 of the kernel says how many are wanted."""
    s = jax.ShapeDtypeStruct
    x, w = s((2, 128, inner), jnp.bfloat16), s((2, inner, 128), jnp.bfloat16)
    return moe_gpu._tile_matmuls, (x, w, s((2,), jnp.int32), s((1,), jnp.int32)), {3: 2}


def linear(format, rows=40, outer=200, wanted=None):
    """Tiles of packed weights, of seven stages, or 13 of 256 rows; argument 4 as above."""
    x, members = jnp.zeros((2, rows, 800), jnp.bfloat16), jnp.zeros(2, jnp.int32)
    count, bias = (jnp.full(1, wanted), None) if wanted else (None, jnp.zeros(outer))

    def run(x, w):
        return gpu_tiles._multiplied(x, w, members, count, bias, jnp.float32, 1)

    return run, (x, weights(format, 800, outer)), {4: wanted or 0}


def attention(given, end=5):
    """A prompt. Argument 8 says where the tiles of keys end that are visited."""
    *wide, paging, args = given
    return attend, (*(a.astype(jnp.bfloat16) for a in wide), paging, args), {8: end}


def over_int8():
    """Few queries over codes, which are upcast in shared memory; argument 10 as above's 8."""
    q, *pools, paging, args = paged(replace(PROMPTS[0], query_len=1, head_dim=128))
    coded = [QuantizedPool(*tokens_as_int8(pool)) for pool in pools]
    return attend, (q.astype(jnp.bfloat16), *coded, paging, args), {10: 5}


def wide(name):
    """Few queries with wide heads; arguments 7 or 8 as the prompt's 8."""
    q, pools, paging, args = wide_heads(name)
    if args.values_in_keys is None:
        return attend, (q, *pools, paging, args), {8: 5}

    def run(q, pool, paging):
        return attend(q, pool, pool, paging, args)

    return run, (q, pools[0], paging), {7: 5}


def over_float32():
    """The same over float32, whose heads have 64 elements."""
    return attend, paged(replace(PROMPTS[0], query_len=1)), {8: 5}


def several_rows():
    """Of plain weights, eight stages of inputs a program; argument 2 is the member."""

    def run(x, w, member):
        return gpu_plain_tiles.matmul(x, as_operand(w).in_stack()[0], member)

    x, w = jnp.zeros((8, 1024), jnp.bfloat16), jnp.zeros((1024, 128), jnp.bfloat16)
    return run, (x, w, jnp.zeros(1, jnp.int32)), {2: 0}


def attention_step():
    """A row whose token stands at 300; arguments 3 and 4 say so."""
    case = Case("one row", (300,), (0,), dtype="bfloat16", table_len=24, head_dim=128)
    (new, args), (pools, sequences) = case.arrays(), case.cache()

    def run(new, k, v, sequences):
        return gpu_step.attention_step(new, as_pool(k), as_pool(v), sequences, args)

    return run, (new, *pools, sequences), {3: 1, 4: 300}


def one_row(format, outer=53):
    """A row that the kernel cuts into bytes; argument 3 as above."""
    return kernel, (jnp.zeros((1, 1120), jnp.bfloat16), weights(format, 1120, outer)), {3: 1}


WIDE = replace(PROMPTS[0], head_dim=256)
ARRIVALS = ["products", "copies", "arrive", "arrivals"]
"""What orders accesses: warpgroups say that they are done, and the one that copies waits for it."""
MEETINGS = ["products", "copies", "meet", "fence"]
"""Of one warpgroup, whose warps meet; a fence between what they store and products read."""
KERNELS = {
    "experts": (partial(experts, 640), [*MEETINGS, "copies out"]),
    "experts mxfp4-a16": (partial(linear, "mxfp4-a16", wanted=2), ARRIVALS),
    "linear w4a16": (partial(linear, "w4a16"), ARRIVALS),
    "linear w8a16": (partial(linear, "w8a16"), ARRIVALS),
    "linear w8a16, 256 rows": (partial(linear, "w8a16", rows=256), ARRIVALS),
    "linear w8a16, one warpgroup": (partial(linear, "w8a16", outer=53), ["products", "copies"]),
    "linear w8a16-g32": (partial(linear, "w8a16-g32"), ARRIVALS),
    "linear mxfp4-a16": (partial(linear, "mxfp4-a16"), ARRIVALS),
    "linear fp8-a16": (partial(linear, "fp8-a16"), ARRIVALS),
    "attention": (partial(attention, paged(PROMPTS[0])), MEETINGS),
    "attention, pattern": (
        partial(attention, patterned("bfloat16, prompt", "strided"), end=16),
        MEETINGS,
    ),
    "attention, heads of 256": (partial(attention, paged(WIDE)), MEETINGS),
    "attention over int8": (over_int8, MEETINGS),
    "attention, heads of 512": (partial(wide, "heads of 512"), MEETINGS),
    "attention over float32": (over_float32, MEETINGS),
    "attention over latents": (partial(wide, "a latent of 576"), MEETINGS),
    "several rows": (several_rows, ["products", "copies", "meet"]),
    "attention, a decode step": (attention_step, [*MEETINGS, "arrive"]),
    "one row of w4a16": (partial(one_row, "w4a16"), ["arrive", "arrivals"]),
    "one row of w8a16": (partial(one_row, "w8a16"), ["arrive", "arrivals"]),
    "one row of mxfp4-a16": (partial(one_row, "mxfp4-a16"), ["arrive", "arrivals"]),
}
"""Each way of a kernel, and what in it is left out once to see that this is found."""
ROWS = [name for name in KERNELS if name.startswith("one row")]
DEFAULT = ["experts", "experts mxfp4-a16", "linear w4a16", "linear w8a16", "attention"]
DEFAULT += ["attention, a decode step", "one row of w4a16"]
FURTHER = [name for name in KERNELS if name not in DEFAULT]
ALIKE = {"attention, a decode step": {"nothing orders a store and a store"}}
"""What is not wrong: all warps store the same vector there."""


@functools.cache
def lowered(name):
    """The kernel, and what its arguments hold."""
    from tests.support.ops.mosaic_modules import modules

    function, arguments, known = KERNELS[name][0]()
    module, *_ = modules(function, *arguments)  # a step merges in another
    return module, known


def run(name, without=()):
    from tests.support.ops.mosaic_run import Run

    return Run(*lowered(name), without)


@pytest.mark.parametrize("name", cases(KERNELS, default=DEFAULT))
def test_every_access_is_ordered(name):
    found = run(name)
    assert found.wrong == ALIKE.get(name, set())
    assert found.accesses
    assert found.refilled or name in ("attention, a decode step", *ROWS)


EDGES = [(name, edge) for name, (_, edges) in KERNELS.items() for edge in edges]


@pytest.mark.parametrize(
    ("name", "edge"),
    [pytest.param(*e, marks=[pytest.mark.nightly] * (e[0] not in DEFAULT)) for e in EDGES],
)
def test_what_is_left_out_is_found(name, edge):
    whole = run(name)
    waits = {"copies": whole.filled, "arrivals": whole.awaited - whole.filled}
    left_out = waits.get(edge, {edge})
    assert left_out and run(name, left_out).wrong > whole.wrong


@pytest.mark.parametrize("name", ["experts", "attention"])
def test_each_wait_for_a_copy_counts(name):
    """For each stage, and for the queries."""
    for barrier in run(name).filled:
        assert run(name, {barrier}).wrong


def test_where_copies_go_is_checked(monkeypatch):
    """Stages of rows and weights lie 8 KiB apart, and so not all by 16."""
    from tests.support.ops import mosaic_run

    monkeypatch.setattr(mosaic_run, "ALIGNED", 1 << 14)
    assert "a copy goes where TMA does not copy to" in run("experts").wrong


@pytest.mark.parametrize("late", [None, 1])
def test_the_experts_kernel_that_raced_is_found(late, monkeypatch):
    """As it was, without any wait; and with one that leaves a group too many."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from tests.support.ops.mosaic_modules import modules
    from tests.support.ops.mosaic_run import Run

    waits = plgpu.wgmma_wait
    monkeypatch.setattr(plgpu, "wgmma_wait", lambda n: late and waits(n + late))
    function, arguments, known = experts(640)
    (module,) = modules(function, *arguments)
    found = Run(module, known)
    assert "nothing orders a copy and a product" in found.wrong


def test_no_other_kernel_copies_or_multiplies_on_the_side():
    """A new one belongs into KERNELS. What others read is in registers at once."""
    sources = Path(ops.__file__).parent.rglob("*.py")
    names = r"plgpu\.(wgmma|copy_\w+|async_\w+|emit_pipeline)\("
    found = {path.name for path in sources if re.search(names, path.read_text())}
    modules = gpu_tiles, gpu_plain_tiles, gpu_flash, gpu_step, gpu_wide
    assert found == {Path(m.__file__).name for m in modules} | {"gpu.py"}


def one_of_each():
    """Every other kernel, with its arguments."""
    yield attend, on_cuda_cores(replace(FEW[0], query_len=1))
    for format in ("w8a16", "w8a16-g32", "w4a16", "mxfp4-a16", "fp8-a16"):
        yield kernel, (jnp.zeros((2, 1120), jnp.float32), weights(format, 1120, 53))
    plain = jnp.zeros((1120, 96), jnp.bfloat16)
    for rows in (1, 2):
        yield kernel, (jnp.zeros((rows, 1120), jnp.bfloat16), plain)
    for name, kind in (("one token", "mxfp4-a16"), ("few tokens", "bfloat16")):
        yield run_experts, moe_arguments(SIZED[name], kind)


def test_the_other_kernels_copy_and_multiply_nothing_on_the_side():
    from tests.support.ops.mosaic_modules import texts

    for function, arguments in one_of_each():
        found = texts(function, *arguments)
        assert found and not any(re.search(r"cp\.async|wgmma", text) for text in found)
