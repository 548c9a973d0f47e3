"""The GPU kernels: in interpret mode against their references, and lowered for CUDA without a GPU.

Interpret mode proves what a kernel means; lowering, that Mosaic GPU finds a layout for every value
and makes a valid module. That a GPU computes the same is for `benchmarks/gpu.py` to say.
"""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.errors import RequestError
from rooflax.ops import accelerator, block_sizes
from rooflax.ops.activation import clamped_swiglu
from rooflax.ops.attention import AttentionArgs, Paging, gpu_flash, gpu_split, paged_attention
from rooflax.ops.attention import gpu as attention_gpu
from rooflax.ops.attention.plan import visible_tiles
from rooflax.ops.format_names import FORMATS
from rooflax.ops.kv_pool import QuantizedPool, as_pool, tokens_as_fp8, tokens_as_int8
from rooflax.ops.linear import gpu as linear_gpu
from rooflax.ops.linear import gpu_rows, gpu_values, linear, unembed
from rooflax.ops.linear.args import LinearArgs
from rooflax.ops.linear.prologue import Activation, ClampedSwiglu, Norm
from rooflax.ops.moe import experts, route
from rooflax.ops.moe import gpu as moe_gpu
from rooflax.ops.moe.args import MoeArgs
from rooflax.ops.weights import StackMember, as_operand, class_of, pack, quantize, taken
from tests.engine.ops.test_attention import by_hand, into_blocks
from tests.marks import cases
from tests.support.ops.answers import each_answer
from tests.support.ops.cases import (
    ATTENTION,
    MOE,
    PATTERNS,
    WITH_GPU_KERNELS,
    close,
    lowered,
    normal,
    seen_by_hand,
)

pytestmark = [pytest.mark.oldest_jax, WITH_GPU_KERNELS]


# Inner and outer sizes: panels of less than a tile of words, and of a tile and a part.
SIZES = {"few": (96, 200), "a tile and a part": (1120, 53)}
CODES = ["w8a16", "w8a16-g32", "w4a16", "mxfp4-a16", "fp8-a16"]
"""One format of each code: the others round their activations before the kernel."""


@functools.cache
def weights(format, inner, outer, members=None):
    shape = (inner, outer) if members is None else (members, inner, outer)
    return quantize(normal(*shape, seed=inner), format, (inner,), (outer,))


def arguments(x, w):
    return LinearArgs(x, *as_operand(w).in_stack(), dtype=x.dtype)


def kernel(x, w):
    """Linear by the kernel, whatever platform this is."""
    args = arguments(x, w)
    assert linear_gpu.unsupported(args) is None
    return linear_gpu.matmul(args)


def exact(x, w):
    return linear(x, w, implementation="reference")


def attend(q, k_pool, v_pool, paging, args):
    """Attention by the kernels, whatever platform this is."""
    arguments = q, as_pool(k_pool), as_pool(v_pool), paging, args
    assert attention_gpu.unsupported(*arguments) is None
    return attention_gpu.paged_attention(*arguments)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("format", cases(CODES, every_jax=["w8a16", "w8a16-g32"]))
def test_products_of_few_rows(format, size, interpreted):
    inner, outer = SIZES[size]
    w, x = weights(format, inner, outer), jnp.asarray(normal(2, inner))
    close(kernel(x, w), exact(x, w))


@pytest.mark.parametrize("format", sorted(set(FORMATS) - set(CODES)))
def test_formats_that_round_their_rows(format, interpreted):
    w, x = weights(format, 96, 200), jnp.asarray(normal(1, 96), jnp.bfloat16)
    wanted = exact(x.astype(jnp.float32), w)
    found = kernel(x, w)
    assert found.dtype == jnp.bfloat16
    close(found.astype(jnp.float32), wanted, 2**-8)


def test_more_rows_than_share_an_unpacking(interpreted):
    w, x = weights("w8a16", 96, 200), jnp.asarray(normal(gpu_rows.ROWS_AT_ONCE + 1, 96))
    close(kernel(x, w), exact(x, w))


def test_one_row_of_fp8_on_either_cores(interpreted):
    """CUDA cores by rule."""
    w, x = weights("fp8-a16", 96, 200), jnp.asarray(normal(1, 96), jnp.bfloat16)
    wanted, tried = exact(x.astype(jnp.float32), w), set()
    close(kernel(x, w).astype(jnp.float32), wanted, 2**-8)
    for name, sizes, found in each_answer(lambda: kernel(x, w)):
        close(found.astype(jnp.float32), wanted, 2**-8)
        tried.add((name, *sizes))
    assert ("linear.gpu tensor cores", 1) in tried


@pytest.mark.parametrize("format", ["w4a16", "w8a16"])
def test_a_panel_of_several_warpgroups(format, interpreted, monkeypatch):
    w, x = weights(format, 4 * 1120, 16), jnp.asarray(normal(1, 4 * 1120))
    wanted = exact(x, w)
    for enough in (0, 1, 99):
        monkeypatch.setattr(gpu_rows, "ENOUGH_WARPGROUPS", enough)
        close(kernel(x, w), wanted)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_program_of_several_panels(rows, interpreted, monkeypatch):
    w, x = weights("mxfp4-a16", 1120, 85), jnp.asarray(normal(rows, 1120))
    monkeypatch.setattr(gpu_rows, "ENOUGH_WARPGROUPS", 0)
    for enough in (1, 3):
        monkeypatch.setattr(gpu_rows, "ENOUGH_PROGRAMS", enough)
        close(kernel(x, w), exact(x, w))


@pytest.mark.parametrize(
    ("format", "warpgroups"),
    cases(
        itertools.product(["w4a16", "w8a16", "mxfp4-a16"], [1, 2]),
        default=[("w4a16", 1), ("w8a16", 2)],
    ),
)
def test_one_row_with_all_that_a_matmul_takes(format, warpgroups, interpreted, monkeypatch):
    """Packed in the kernel: 35 groups are no whole tiles, and 53 outputs no whole panels."""
    monkeypatch.setattr(gpu_rows, "ENOUGH_WARPGROUPS", 99 * (warpgroups - 1))
    w, bias, residual = weights(format, 1120, 53), normal(53, seed=2), normal(1, 53, seed=3)
    for name, prologue in PROLOGUES.items():
        copies = 2 if getattr(prologue, "gated", False) else 1
        x = jnp.asarray(3 * normal(1, copies * 1120, seed=copies))
        plain = LinearArgs(x, w, None, jnp.asarray(bias), prologue, jnp.asarray(residual))
        x = x.reshape(1, 2, 1120) if copies == 2 else x
        how = {"prologue": prologue, "residual": jnp.asarray(residual)}
        wanted = linear(x, w, jnp.asarray(bias), **how, implementation="reference")
        close(linear_gpu.matmul(plain), wanted), name


def test_a_row_in_bfloat16_rounds_as_the_others_do(interpreted):
    w = weights("w4a16", 1120, 64)
    x, residual = (jnp.asarray(normal(1, n), jnp.bfloat16) for n in (1120, 64))
    norm = Norm(jnp.asarray(1 + normal(1120, seed=8), jnp.bfloat16))
    how = {"prologue": norm, "residual": residual, "dtype": jnp.bfloat16}
    found = linear_gpu.matmul(LinearArgs(x, w, **how))
    assert found.dtype == jnp.bfloat16
    wanted = linear(x, w, prologue=norm, residual=residual, implementation="reference")
    close(found.astype(jnp.float32), wanted.astype(jnp.float32), 2**-8)


@pytest.mark.parametrize(
    "rows", [1, pytest.param(gpu_rows.ROWS_AT_ONCE + 1, marks=pytest.mark.nightly)]
)
def test_products_by_any_warpgroups(rows, interpreted):
    w, x = weights("w4a16", 4 * 1120, 16), jnp.asarray(normal(rows, 4 * 1120))
    wanted, tried = exact(x, w), []
    for name, sizes, found in each_answer(lambda: kernel(x, w)):
        close(found, wanted)
        tried.append((name, *sizes))
    # the rule takes the most
    others = [(1, 8, 0), (2, 8, 1)] if rows == 1 else [(1, 4, 0)]
    assert tried == [("linear.gpu", *other) for other in others]


def codes_of(name):
    """Every code as it is stored."""
    codes = np.arange(16 if name in ("int4", "mxfp4") else 256, dtype=np.uint8)
    if name == "fp8":
        codes = codes[(codes & 0x7F) != 0x7F]  # NaN
    return codes.view(np.int8) if "int8" in name else codes


def a_row_of_words(name, codes, x, dtype):
    """Codes [outputs, inputs] of one row of words times x [inputs], as the kernel multiplies."""
    kinds = FORMATS.items()
    format = next(f for f, k in kinds if k.code == name and not k.quantizes_activations)
    code, (outputs, inputs) = linear_gpu.CODES[name], codes.shape
    ones = np.full((outputs, 1), 127, np.uint8) if name == "mxfp4" else np.ones((outputs, 1))
    ones = ones if class_of(format).grouped else ones[:, 0].astype(np.float32)
    stored = pack(format, codes, ones, (inputs,), (outputs,))
    words = gpu_rows._words(stored, code.words)[0, :, 0].swapaxes(0, 1).reshape(code.words, -1)
    values = code.values(jnp.asarray(x, jnp.float32)[None], stored, dtype, None)
    values = values[0, :, gpu_values.begin_of(1)]
    found = code.dot(code.numbers(list(words), jnp.int32(0)), lambda at: values[at], len(values))
    return np.asarray(found, np.float64)[:outputs] * code.scale, np.asarray(stored.numbers())


@pytest.mark.parametrize("name", linear_gpu.CODES)
def test_every_code_is_multiplied_exactly(name, interpreted):
    """Each code at each place of a row of words, beside others, with each size of activations."""
    slots, codes = linear_gpu.CODES[name].num_inputs, codes_of(name)
    mixed = codes[(np.arange(len(codes))[:, None] + 7 * np.arange(slots)) % len(codes)]
    for dtype in (jnp.float32, jnp.bfloat16):
        for place in range(slots):
            one = np.zeros(slots)
            one[place] = -3.0
            found, numbers = a_row_of_words(name, mixed, one, dtype)
            np.testing.assert_array_equal(found, numbers[place] * -3.0)


@pytest.mark.parametrize("name", [n for n in linear_gpu.CODES if n != "fp8"])
def test_whole_numbers_are_summed_exactly(name, interpreted):
    """Activations of the most bits that a type may have: every partial sum is a whole number."""
    slots, codes = linear_gpu.CODES[name].num_inputs, codes_of(name)
    mixed = codes[(np.arange(len(codes))[:, None] + 7 * np.arange(slots)) % len(codes)]
    for bits, dtype in ((15, jnp.bfloat16), (23, jnp.float32)):
        x = np.random.default_rng(bits).integers(-(2**bits) + 1, 2**bits, slots)
        x[0] = 2**bits - 1
        found, numbers = a_row_of_words(name, mixed, x, dtype)
        wanted = numbers.astype(np.float64).T @ x
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2.0**-23 * np.abs(wanted).max())
        if dtype == jnp.bfloat16:
            np.testing.assert_array_equal(found, wanted.astype(np.float32))


def test_activations_as_whole_numbers_keep_their_digits():
    """To half a step of their group; what is not finite spoils its group alone."""
    x = normal(4, 3 * 32, seed=3) * np.float32(2.0) ** normal(4, 3 * 32, seed=4).round()
    x = x.reshape(12, 32)
    x[4, 5], x[6, 0], x[11] = np.nan, np.inf, 0
    for bits in (16, 24):
        step, inverse = map(
            np.asarray, gpu_values.step_of(jnp.abs(jnp.asarray(x)).max(axis=1), bits)
        )
        lost = np.isnan(step)
        assert np.flatnonzero(lost).tolist() == [4, 6] and np.all(step[~lost] > 0)
        with np.errstate(invalid="ignore"):
            scaled = x * inverse[:, None]
        whole = np.asarray(gpu_values.rounded(jnp.asarray(scaled), bits))
        assert np.abs(whole).max() < 2 ** (bits - 1) and not whole[4:7:2].any()
        error = np.abs(whole * step[:, None] - x)[~lost]
        assert np.all(error <= np.abs(x).max(axis=1)[~lost][:, None] * 2.0 ** (2 - bits))


PROLOGUES = {
    "norm": Norm(jnp.asarray(1 + normal(1120, seed=8)), eps=1e-5),
    "norm with a bias": Norm(*(jnp.asarray(normal(1120, seed=s)) for s in (8, 9))),
    "gate": Activation("silu", gated=True),
    "another gate": Activation("gelu", gated=True),
    "a clamped gate": ClampedSwiglu(limit=2.0),
}


@pytest.mark.parametrize("name", PROLOGUES)
@pytest.mark.parametrize("format", cases(["w4a16", "w8a16"], nightly=["w8a16"]))
def test_prologues_with_few_rows(format, name, interpreted):
    prologue, w = PROLOGUES[name], weights(format, 1120, 53)
    x = jnp.asarray(normal(3, 2, 1120) if getattr(prologue, "gated", False) else normal(3, 1120))
    args = LinearArgs(x.reshape(3, -1), w, prologue=prologue)
    wanted = linear(x, w, prologue=prologue, implementation="reference")
    close(linear_gpu.matmul(args), wanted)


@pytest.mark.parametrize("format", ["w4a16", "mxfp4-a16", "w8a16"])
def test_a_row_that_is_not_finite_spoils_itself_alone(format, interpreted):
    w, x = weights(format, 1120, 53), normal(3, 1120)
    wanted = exact(jnp.asarray(x), w)
    x[0, 7], x[2, 1119] = np.nan, np.inf
    found = np.asarray(kernel(jnp.asarray(x), w))
    assert not np.isfinite(found[[0, 2]]).any()
    close(found[1], wanted[1])


def test_scales_behind_the_last_group_are_not_used(interpreted):
    """Members of a stack lie behind each other: a tile of one reads rows of the next."""
    w, x = weights("mxfp4-a16", 1120, 53, members=3), jnp.asarray(normal(1, 1120))
    others = jnp.arange(3).reshape(3, 1, 1, 1) != 1
    spoilt = replace(w, scales=jnp.where(others, jnp.uint8(255), w.scales))  # NaN
    close(
        kernel(x, StackMember(spoilt, jnp.int32(1))), exact(x, taken(StackMember(w, jnp.int32(1))))
    )


@pytest.mark.every_jax
@pytest.mark.parametrize("format", ["w8a16", "mxfp4-a16"])
def test_one_of_a_stack_is_read_where_it_lies(format, interpreted):
    w, x = weights(format, 96, 200, members=3), jnp.asarray(normal(1, 96))
    one = StackMember(w, jnp.int32(2))
    close(kernel(x, one), exact(x, taken(one)))


def test_linear_and_unembed_dispatch_to_the_kernel(on_gpu):
    w, x = weights("w4a16", 96, 200), jnp.asarray(normal(1, 96))
    bias, residual = jnp.asarray(normal(200, seed=5)), jnp.asarray(normal(1, 200, seed=6))
    wanted = linear(x, w, bias, residual=residual, implementation="reference")
    close(linear(x, w, bias, residual=residual, implementation="pallas"), wanted)
    close(unembed(x, w), unembed(x, w, implementation="reference"))
    assert "mpmd_map" in str(jax.make_jaxpr(lambda x: linear(x, w))(x))


def test_another_gpu_than_a_hopper_takes_xla(on_gpu, monkeypatch):
    w, x = weights("w4a16", 96, 200), jnp.asarray(normal(1, 96))
    for found in ("8.0", "10.0"):
        monkeypatch.setattr(accelerator, "capability", lambda found=found: found)
        with pytest.raises(RequestError, match=f"Hopper.*this GPU has {found}"):
            linear(x, w, implementation="pallas")
        close(linear(x, w), linear(x, w, implementation="reference"))


def test_plain_weights_are_xlas(on_gpu):
    x, w = jnp.asarray(normal(3, 5)), jnp.asarray(normal(5, 7))
    close(linear(x, w), np.asarray(x) @ np.asarray(w))
    with pytest.raises(RequestError, match="by 16 and outputs by 32, not 5 and 7"):
        linear(x, w, implementation="pallas")


def test_products_of_many_rounded_rows_lose_nothing():
    w = weights("w8a8", 1120, 53)
    x = jnp.asarray(normal(37, 1120), jnp.bfloat16)
    wanted = exact(x.astype(jnp.float32), w)
    close(linear_gpu.int8_matmul(x, w), wanted)


@pytest.mark.every_jax
@pytest.mark.parametrize("format", ["w4a8", "w8a8-g32", "mxfp4-a8"])
def test_products_of_many_rows_that_round_by_groups_are_rejected(format):
    rows = jnp.zeros((17, 1120), jnp.bfloat16)
    why = linear_gpu.unsupported(arguments(rows, weights(format, 1120, 53)))
    assert f"for 16 rows of {format}" in why


@pytest.mark.parametrize("format", CODES)
def test_products_lower_for_cuda(format):
    x = jnp.zeros((2, 1120), jnp.bfloat16)
    text = lowered(lambda x, w: kernel(x, w), x, weights(format, 1120, 53))
    assert "1120x53x" not in text  # the weight is nowhere in another width


@pytest.mark.parametrize("format", cases(["w4a16", "mxfp4-a16"], every_jax=["w4a16"]))
def test_products_of_the_most_rows_lower_for_cuda(format):
    x = jnp.zeros((linear_gpu.MOST_ROWS, 1120), jnp.bfloat16)
    lowered(lambda x, w: kernel(x, w), x, weights(format, 1120, 200))


BLOCK = 8
"""The smallest block that the kernels take."""
LATER = {"whole sequences", "whole sequences, window and sinks", "longer than a chunk of queries"}
PAGED = [replace(case, head_dim=64) for case in ATTENTION if case.causal and not case.segments]
FEW = [case for case in PAGED if case.name not in LATER]


def paged(case, *, with_first=False):
    """q, pools, and what else `paged_attention` takes, for blocks in no order."""
    q, k, v, dense, args = case.arrays()
    context = dense.context_lens
    first = np.zeros_like(context)
    if with_first:  # blocks that no query of this step can see are gone
        oldest = np.maximum(dense.positions[:, 0] - case.window + 1, 0)
        first = (oldest // BLOCK * BLOCK).astype(np.int32)
    length = int(-(-(context - first).max() // BLOCK)) + 2
    k_pool, v_pool, tables = into_blocks(k, v, context, first, BLOCK, length)
    paging = Paging(tables, first, dense.positions, context)
    return jax.tree.map(jnp.asarray, (q, k_pool, v_pool, paging, args))


@pytest.mark.parametrize(
    "case", cases(FEW, every_jax=["sinks and window", "decode"]), ids=lambda c: c.name
)
def test_paged_attention_of_few_queries(case, interpreted):
    exact = by_hand(*case.arrays())
    for with_first in {False, case.window is not None}:
        out = attend(*paged(case, with_first=with_first))
        np.testing.assert_allclose(out, exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_paged_attention_over_narrow_pools(kind, interpreted):
    """Against the reference over the same pools: what is narrow is so before the kernel."""
    case = replace(FEW[0], head_dim=128, sinks=True, window=4)
    q, k_pool, v_pool, *given = paged(case)
    if kind == "int8":
        k_pool, v_pool = (QuantizedPool(*tokens_as_int8(pool)) for pool in (k_pool, v_pool))
    else:
        k_pool, v_pool = k_pool.astype(kind), v_pool.astype(kind)
    out = attend(q, k_pool, v_pool, *given)
    close(out, paged_attention(q, k_pool, v_pool, *given, implementation="reference"))


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_what_lies_behind_a_context_is_not_used(kind, interpreted):
    """A block's last slots hold what another sequence left there: NaN here."""
    case = replace(FEW[0], query_len=1, key_len=90, context_lens=(90, 33))
    q, k_pool, v_pool, *given = paged(case)
    if kind == "int8":
        k_pool, v_pool = (QuantizedPool(*tokens_as_int8(pool)) for pool in (k_pool, v_pool))
    wanted = paged_attention(q, k_pool, v_pool, *given, implementation="reference")
    paging = given[0]

    def spoilt(pool):
        for row, context in enumerate(np.asarray(paging.context_lens)):
            block, slot = paging.block_tables[row, context // BLOCK], context % BLOCK
            if isinstance(pool, QuantizedPool):
                pool = replace(pool, scales=pool.scales.at[block, :, slot:].set(jnp.nan))
            else:
                pool = pool.at[block, :, slot:].set(jnp.nan)
        return pool

    close(attend(q, spoilt(k_pool), spoilt(v_pool), *given), wanted)


@pytest.mark.every_jax
def test_caches_of_fp8_and_float16_are_rejected():
    q, *pools, paging, args = paged(replace(FEW[0], head_dim=128))
    narrow = {
        "fp8": [QuantizedPool(*tokens_as_fp8(pool)) for pool in pools],
        "float16": [pool.astype(jnp.float16) for pool in pools],
    }
    for name, others in narrow.items():
        why = attention_gpu.unsupported(q, *map(as_pool, others), paging, args)
        assert f"no {name} KV cache" in why


def test_heads_as_wide_as_latent_keys_are_rejected():
    """Keys of 576 are taken where they are the values, too, and in bfloat16."""
    q, *pools, paging, args = paged(replace(FEW[0], head_dim=576))
    why = attention_gpu.unsupported(q, *map(as_pool, pools), paging, args)
    assert why == "attention's GPU kernel takes heads of up to 512, not 576"
    q, *pools = (a.astype(jnp.bfloat16) for a in (q, *pools))
    why = attention_gpu.unsupported(q, *map(as_pool, pools), paging, args)
    assert why == "attention's tensor cores take heads of up to 512, not 576"
    latents, pools = replace(args, values_in_keys=512), [as_pool(pools[0])] * 2
    assert attention_gpu.unsupported(q, *pools, paging, latents) is None
    many = jnp.tile(q, (1, 18, 1, 1))  # of three heads
    why = attention_gpu.unsupported(many, *pools, paging, latents)
    assert why == "attention's tensor cores take up to 256 queries of such heads, not 270"


def on_cuda_cores(case):
    """Float32 over bfloat16, which the tensor cores do not take."""
    q, k_pool, v_pool, *given = paged(case)
    return q, k_pool.astype(jnp.bfloat16), v_pool.astype(jnp.bfloat16), *given


def test_contexts_split_over_programs(interpreted, monkeypatch):
    case = replace(FEW[0], heads=3, kv_heads=1, query_len=1, key_len=90, context_lens=(90, 1, 47))
    q, k_pool, v_pool, *given = on_cuda_cores(case)
    wanted = paged_attention(q, k_pool, v_pool, *given, implementation="reference")
    monkeypatch.setattr(gpu_split, "LEAST_BLOCKS", 1)
    for programs in (1, 15, 999):
        monkeypatch.setattr(gpu_split, "ENOUGH_PROGRAMS", programs)
        out = attend(q, k_pool, v_pool, *given)
        close(out, wanted)


@pytest.mark.parametrize(
    ("window", "splits"),
    [(20, (1, 2, 4)), pytest.param(None, (1, 2, 4, 8), marks=pytest.mark.nightly)],
)
def test_contexts_split_in_any_way(window, splits, interpreted):
    case = replace(FEW[0], heads=3, kv_heads=1, query_len=1, key_len=90, context_lens=(90, 1, 47))
    q, k_pool, v_pool, *given = on_cuda_cores(replace(case, window=window))
    wanted = paged_attention(q, k_pool, v_pool, *given, implementation="reference")

    def run():
        return attend(q, k_pool, v_pool, *given)

    tried = []
    for kernel, sizes, out in each_answer(run):
        close(out, wanted)
        tried.append((kernel, *sizes))
    assert tried == [("attention.gpu", count) for count in splits]  # the rule is 3, of 14 blocks


def test_paged_attention_dispatches_and_goes_on_to_xla(on_gpu):
    case = replace(FEW[0], query_len=1)
    q, k_pool, v_pool, *given = paged(case)
    wanted = paged_attention(q, k_pool, v_pool, *given, implementation="reference")
    close(paged_attention(q, k_pool, v_pool, *given), wanted)
    narrow = [a[..., :24] for a in (q, k_pool, v_pool)]
    wanted = paged_attention(*narrow, *given, implementation="reference")
    close(paged_attention(*narrow, *given), wanted)
    with pytest.raises(RequestError, match="heads by 64, not 8 and 24"):
        paged_attention(*narrow, *given, implementation="pallas")
    paging, args = given[0], replace(given[1], repeat_kv=True)
    with pytest.raises(RequestError, match="never copies"):
        paged_attention(q, k_pool, v_pool, paging, args, implementation="pallas")


PROMPTS = [
    replace(FEW[0], query_len=33, key_len=90, context_lens=(90, 33, 0), sinks=True, window=40),
    replace(next(c for c in PAGED if c.name.startswith("longer")), head_dim=128),
]


@pytest.mark.parametrize(
    "case",
    cases(PROMPTS, every_jax=[PROMPTS[0].name]),
    ids=["a chunk from an offset", "a whole prompt"],
)
def test_paged_attention_of_many_queries(case, interpreted):
    """On tensor cores: scores are float32, their weights bfloat16."""
    q, k_pool, v_pool, *given = paged(case)
    narrow = [a.astype(jnp.bfloat16) for a in (q, k_pool, v_pool)]
    out = attend(*narrow, *given)
    assert out.dtype == jnp.bfloat16
    wide = (narrow[0].astype(jnp.float32), *narrow[1:])
    wanted = paged_attention(*wide, *given, implementation="reference")
    close(out.astype(jnp.float32), wanted, 2**-7)
    for arrays in ((q, *narrow[1:]), (narrow[0], k_pool, v_pool)):
        q, *pools = arrays
        why = attention_gpu.unsupported(q, *map(as_pool, pools), *given)
        assert "bfloat16 over bfloat16 or int8 only" in why


@pytest.mark.parametrize("length", [1, 33])
def test_int8_pools_on_the_tensor_cores(length, interpreted):
    """Scales behind a context are NaN; they are what others left."""
    case = replace(PROMPTS[0], query_len=length, head_dim=128, window=None)
    q, k_pool, v_pool, *given = paged(case)
    pools = [QuantizedPool(*tokens_as_int8(pool)) for pool in (k_pool, v_pool)]
    wanted = paged_attention(q, *pools, *given, implementation="reference")
    for row, context in enumerate(np.asarray(given[0].context_lens)):
        block, slot = given[0].block_tables[row, context // BLOCK], context % BLOCK
        pools = [replace(p, scales=p.scales.at[block, :, slot:].set(jnp.nan)) for p in pools]
    q = q.astype(jnp.bfloat16)
    tried = []

    def run():
        return attend(q, *pools, *given)

    close(run().astype(jnp.float32), wanted, 2**-6)
    for kernel, sizes, out in each_answer(run):
        close(out.astype(jnp.float32), wanted, 2**-6)
        tried.append((kernel, *sizes))
    assert ("attention.gpu tiles", 1, gpu_flash.STAGES + 1) in tried


WIDE = {
    "a latent": replace(PROMPTS[0], head_dim=320, heads=18, kv_heads=1, query_len=1, window=None),
    "drafts": replace(PROMPTS[0], head_dim=320, heads=9, kv_heads=1, query_len=2),
    "heads of 512": replace(
        PROMPTS[0], head_dim=512, query_len=1, key_len=330, context_lens=(330, 241), window=None
    ),
    "a latent of 576": replace(
        PROMPTS[0], head_dim=576, heads=16, kv_heads=1, query_len=1, window=None, sinks=False
    ),
}
"""Few queries, of two tiles in the first two."""


def wide(name):
    """q, pools, what else attention takes, and how many elements are values."""
    q, *pools, paging, args = paged(WIDE[name])
    q, *pools = (a.astype(jnp.bfloat16) for a in (q, *pools))
    values = q.shape[3] - 64 if "latent" in name else None
    pools = [pools[0]] * 2 if values else pools
    return q, pools, paging, replace(args, values_in_keys=values)


@pytest.mark.parametrize("name", cases(WIDE, default=["a latent", "drafts"]))
def test_wide_heads_on_the_tensor_cores(name, interpreted):
    """What lies behind a context is NaN."""
    q, pools, paging, args = wide(name)
    wanted = paged_attention(
        q.astype(jnp.float32), *pools, paging, args, implementation="reference"
    )
    for row, context in enumerate(np.asarray(paging.context_lens)):
        block, slot = paging.block_tables[row, context // BLOCK], context % BLOCK
        pools = [pool.at[block, :, slot:].set(jnp.nan) for pool in pools]
    pools, tried, values = pools[:1] * 2 if args.values_in_keys else pools, [], args.values_in_keys

    def run():
        return attend(q, *pools, paging, args)

    out = run()
    assert out.dtype == jnp.bfloat16
    close(out[..., :values].astype(jnp.float32), wanted[..., :values], 2**-7)
    for kernel, sizes, out in each_answer(run):
        close(out[..., :values].astype(jnp.float32), wanted[..., :values], 2**-7)
        tried.append((kernel, *sizes))
    assert {kernel for kernel, *_ in tried} <= {"attention.gpu wide"} and tried


def test_float32_queries_keep_their_digits(interpreted):
    """Compiled as a whole, too, where XLA may leave casts out."""
    q, *pools, paging, args = paged(replace(FEW[0], query_len=1))
    out = jax.jit(lambda q, *pools: attend(q, *pools, paging, args))(q, *pools)
    close(out, paged_attention(q, *pools, paging, args, implementation="reference"))


@pytest.mark.parametrize("name", ["heads of 512", "a latent of 576"])
def test_attention_of_wide_heads_lowers_for_cuda(name):
    q, pools, *given = wide(name)
    lowered(attend, q, *pools, *given)


@pytest.mark.parametrize("head_dim", [64, 128, gpu_flash.WIDEST])
def test_paged_attention_of_many_queries_lowers_for_cuda(head_dim):
    q, k_pool, v_pool, *given = paged(replace(PROMPTS[0], head_dim=head_dim))
    narrow = (a.astype(jnp.bfloat16) for a in (q, k_pool, v_pool))
    lowered(attend, *narrow, *given)


@pytest.mark.every_jax
def test_prompts_with_wide_heads_are_rejected():
    """Tiles of 64 queries of 512 are more than shared memory; 256 are taken, by sixteens."""
    for query_len, said in ((90, "heads of up to 256, not 512"), (33, None), (1, None)):
        case = replace(PROMPTS[0], head_dim=512, query_len=query_len)
        q, k_pool, v_pool, *given = paged(case)
        narrow = [a.astype(jnp.bfloat16) for a in (q, k_pool, v_pool)]
        why = attention_gpu.unsupported(narrow[0], *map(as_pool, narrow[1:]), *given)
        assert why is None if said is None else said in why


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", ["bfloat16", "float32", "int8"])
def test_paged_attention_lowers_for_cuda(kind, head_dim):
    case = replace(FEW[0], head_dim=head_dim, query_len=1, sinks=True, window=4)
    q, k_pool, v_pool, *given = paged(case)
    if kind == "int8":
        k_pool, v_pool = (QuantizedPool(*tokens_as_int8(pool)) for pool in (k_pool, v_pool))
    else:
        q, k_pool, v_pool = (a.astype(kind) for a in (q, k_pool, v_pool))
    lowered(attend, q, k_pool, v_pool, *given)


LONG = replace(FEW[0], key_len=330, context_lens=(330, 241), sinks=True)
LONGER = replace(LONG, query_len=40, key_len=600, context_lens=(600, 531))
PATTERNED = {
    "float32": replace(LONG, query_len=2),
    "int8": replace(LONG, query_len=1, head_dim=128),
    "int8, window": replace(LONG, query_len=1, window=180),
    "bfloat16, prompt": LONGER,
    "bfloat16, prompt, window": replace(LONGER, window=380),
}
"""Each kernel, of rows that begin with the first token, or behind what a window has freed."""


def patterned(name, pattern):
    """q, pools and what else it takes, of one of them."""
    case, pattern = PATTERNED[name], PATTERNS[pattern]
    q, *pools, paging, args = paged(case, with_first=case.window is not None)
    if name.startswith("bfloat16"):
        q, *pools = (a.astype(jnp.bfloat16) for a in (q, *pools))
    if name.startswith("int8"):
        pools = [QuantizedPool(*tokens_as_int8(pool)) for pool in pools]
    return q, *pools, paging, replace(args, pattern=pattern)


def hidden_blocks(paging, args, keys):
    """Per row, the places in its table whose tile of keys no query of it sees: one by one."""
    hidden = []
    for row, first in enumerate(np.asarray(paging.first_positions)):
        context = int(paging.context_lens[row])
        seen = {
            (s - first) // keys
            for t in np.asarray(paging.positions)[row].tolist()
            for s in range(first, min(t + 1, context))
            if seen_by_hand(args.pattern, t, s) and (args.window is None or t - s < args.window)
        }
        blocks = range(-(-(context - first) // BLOCK))
        hidden.append([i for i in blocks if i * BLOCK // keys not in seen])
    return hidden


def without(pool, blocks):
    """A pool whose blocks are NaN, but for those that are read."""
    if isinstance(pool, QuantizedPool):
        return replace(pool, scales=pool.scales.at[blocks].set(jnp.nan))
    return pool.at[blocks].set(jnp.nan)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        pytest.param("float32", "window", marks=pytest.mark.nightly),
        ("float32", "window and first tokens"),
        ("int8", "strided"),
        ("int8, window", "all of it"),
        pytest.param("bfloat16, prompt", "window", marks=pytest.mark.nightly),
        ("bfloat16, prompt", "window and first tokens"),
        pytest.param("bfloat16, prompt", "strided", marks=pytest.mark.nightly),
        ("bfloat16, prompt, window", "all of it"),
    ],
)
def test_patterns_hide_blocks_that_are_not_read(name, pattern, interpreted):
    """Equal to the reference under the same mask, with NaN in every tile of keys it hides."""
    q, *pools, paging, args = patterned(name, pattern)
    wide, flash = q.astype(jnp.float32), name.startswith("bfloat16")
    tile = BLOCK if name.startswith("int8") else gpu_flash.TILE
    exact = paged_attention(wide, *pools, paging, args, implementation="reference")
    hidden = hidden_blocks(paging, args, tile)
    assert all(hidden)
    tables = np.asarray(paging.block_tables)
    lost = np.concatenate([tables[row, places] for row, places in enumerate(hidden)])
    pools = [without(pool, lost) for pool in pools]
    found = attend(q, *pools, paging, args)
    close(found.astype(jnp.float32), exact, 2**-7 if flash else 2e-6)


@pytest.mark.parametrize("keys", [16, gpu_flash.TILE])
@pytest.mark.parametrize("name", ["window", "window and first tokens"])
def test_visits_of_a_pattern_do_not_grow_with_the_context(name, keys):
    pattern, counts = PATTERNS[name], []
    for context in (1 << 12, 1 << 17):
        zeros, positions = jnp.zeros((1, 1), jnp.int32), jnp.arange(context - 20, context)[None]
        paging = Paging(zeros, zeros[:, 0], positions, jnp.full(1, context))
        args, num_tiles = AttentionArgs(1.0, pattern=pattern), context // keys
        begins, ends, order = visible_tiles(
            paging, args, queries=20, keys=keys, num_tiles=num_tiles
        )
        visited = np.asarray(order)[0, 0, int(begins[0, 0]) : int(ends[0, 0])]
        oldest = context - 20 - (pattern.window - 1)
        seen = {s // keys for s in range(context) if s >= oldest or s < pattern.first}
        assert visited.tolist() == sorted(seen)
        counts.append(len(visited))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", ["float32", "int8", "bfloat16, prompt, window"])
def test_patterns_lower_for_cuda(name):
    lowered(attend, *patterned(name, "all of it"))


def test_patterns_dispatch_to_the_kernel(on_gpu):
    given = patterned("int8, window", "strided")
    close(paged_attention(*given), paged_attention(*given, implementation="reference"))
    assert "mpmd_map" in str(jax.make_jaxpr(paged_attention)(*given))


SIZED = {case.name: replace(case, hidden=64, mlp=64) for case in MOE}
FORMATS_OF_EXPERTS = ("float32", "mxfp4-a16")


def moe_arguments(case, kind, dtype="float32"):
    x, logits, (gate_up, gate_up_bias, down, down_bias) = case.arrays()
    hidden, mlp = case.hidden, case.mlp
    if kind in FORMATS:
        gate_up = quantize(gate_up, kind, (hidden,), (2, mlp))
        down = quantize(down, kind, (mlp,), (hidden,))
        x = jnp.asarray(x, dtype)
    else:
        x, gate_up, down = (jnp.asarray(a, jnp.dtype(kind)) for a in (x, gate_up, down))
    ids, shares = route(jnp.asarray(logits), case.chosen)
    biases = jnp.asarray(gate_up_bias), jnp.asarray(down_bias)
    return jnp.asarray(x), ids, shares, gate_up, biases[0], down, biases[1]


def run_experts(*arrays):
    """Experts by the kernels, whatever platform this is."""
    args = MoeArgs.of(*arrays, activation=clamped_swiglu)
    assert moe_gpu.unsupported(args) is None
    return moe_gpu.experts(args)


def reference_experts(*arguments):
    return experts(*arguments, activation=clamped_swiglu, implementation="reference")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param("few tokens", "float32", marks=pytest.mark.every_jax),
        ("few tokens", "mxfp4-a16"),
        pytest.param("all tokens the same experts", "float32", marks=pytest.mark.nightly),
        pytest.param("more experts than pairs", "mxfp4-a16", marks=pytest.mark.nightly),
    ],
)
def test_experts_with_few_tokens(name, kind, interpreted):
    arguments = moe_arguments(SIZED[name], kind)
    close(run_experts(*arguments), reference_experts(*arguments))


@pytest.mark.parametrize(
    ("kind", "chosen", "size"),
    [("w8a16", 2, 528), ("w8a16", 3, 528), ("float32", 2, 544)],  # 3 are more than warpgroups
)
def test_pairs_of_token_and_expert(kind, chosen, size, interpreted):
    """With norm, biases, gate and residual in the two kernels: 33 groups are no whole tiles, and
    every expert that no token chose is NaN."""
    tokens, count, hidden, mlp = 1, 5, size, size
    sizes = ((count, hidden, 2 * mlp), (count, mlp, hidden))
    up, down = (normal(*size, seed=n) * size[1] ** -0.5 for n, size in enumerate(sizes))
    up = up.reshape(count, hidden, 2, mlp)
    if kind in FORMATS:
        up = quantize(up, kind, (hidden,), (2, mlp))
        down = quantize(down, kind, (mlp,), (hidden,))
    up, down = (w if kind in FORMATS else jnp.asarray(w) for w in (up, down))
    biases = (normal(count, 2, mlp, seed=3), normal(count, hidden, seed=4))
    x, residual = (jnp.asarray(normal(tokens, hidden, seed=n)) for n in (5, 6))
    logits = jnp.asarray(normal(tokens, count, seed=7))
    ids, shares = route(logits, chosen)
    given = x, ids, shares, up, jnp.asarray(biases[0]), down, jnp.asarray(biases[1])
    how = {
        "norm": Norm(jnp.asarray(1 + normal(hidden, seed=8)), eps=1e-5),
        "activation": ClampedSwiglu(limit=1.5),
        "residual": residual,
    }
    wanted = experts(*given, **how, implementation="reference")
    nobody = ~np.isin(np.arange(count), np.asarray(ids))

    def spoilt(w):
        numbers = w.scales if kind in FORMATS else w
        there = nobody.reshape(-1, *(1,) * (numbers.ndim - 1))
        numbers = jnp.where(there, np.float32(np.nan), numbers)
        return replace(w, scales=numbers) if kind in FORMATS else numbers

    given = *given[:3], spoilt(up), given[4], spoilt(down), given[6]
    args = MoeArgs.of(*given, **how)
    assert moe_gpu.unsupported(args) is None
    close(moe_gpu.experts(args), wanted)
    with block_sizes.recording() as asked:
        jax.make_jaxpr(lambda: moe_gpu.experts(args))()
    pairs = [question.key for question in asked.values() if question.kernel == "experts.gpu pairs"]
    assert len(pairs) == (kind in FORMATS and chosen <= gpu_rows.MOST_WARPGROUPS)
    for key in pairs:
        with block_sizes.trying({key: (0,)}):
            close(moe_gpu.experts(args), wanted)


@pytest.mark.parametrize("format", ["mxfp4-a16", "w4a16", "w8a8"])
def test_the_sum_over_a_tokens_experts(format, interpreted):
    """A warpgroup for each, with its own activations, bias and share."""
    inner, outer, chosen = 1056, 37, 2
    stack = weights(format, inner, outer, members=4)
    x, residual = normal(2 * chosen, 1, inner, seed=1), normal(2, 1, outer, seed=2)
    bias, shares = normal(4, outer, seed=3), normal(2, chosen, seed=4)
    members = jnp.array([3, 0, 1, 3], jnp.int32)
    rows = gpu_rows.Rows(
        jnp.asarray(x),
        jnp.float32,
        bias=jnp.asarray(bias),
        residual=jnp.asarray(residual),
        shares=jnp.asarray(shares),
    )
    found = gpu_rows.tiled_matmul(rows, stack, members, jnp.full(1, 2 * chosen, jnp.int32))
    wanted = np.array(residual[:, 0])
    for tile, member in enumerate(members):
        y = exact(jnp.asarray(x[tile]), taken(StackMember(stack, member)))[0] + bias[member]
        wanted[tile // chosen] += shares[tile // chosen, tile % chosen] * np.asarray(y)
    close(found[:, 0], wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("renormalise", [True, False])
def test_routes(renormalise, dtype, on_gpu):
    logits = np.concatenate([normal(2, 64, seed=1), np.round(normal(1, 64, seed=2)) + 0.0])
    logits = jnp.asarray(logits, dtype)
    how = {"renormalise": renormalise, "scale": 2.5}
    ids, weights = route(logits, 5, **how)
    wanted = route(logits, 5, **how, implementation="xla")
    np.testing.assert_array_equal(ids, wanted[0])
    np.testing.assert_allclose(weights, wanted[1], rtol=2e-6)
    assert "mpmd_map" in str(jax.make_jaxpr(lambda x: route(x, 5))(logits))
    lost = route(logits.at[0].set(jnp.nan), 5)[0]
    assert np.all((np.asarray(lost) >= 0) & (np.asarray(lost) < 64))
    np.testing.assert_array_equal(lost[1:], ids[1:])
    assert "mpmd_map" not in str(jax.make_jaxpr(lambda x: route(x, 5))(logits[:, :40]))


def test_only_the_chosen_experts_are_read(interpreted):
    """The others are NaN, or scaled by 2^127."""
    case = SIZED["one token"]
    for kind in FORMATS_OF_EXPERTS:
        x, ids, shares, gate_up, bias, down, down_bias = moe_arguments(case, kind)
        wanted = reference_experts(x, ids, shares, gate_up, bias, down, down_bias)
        chosen = np.isin(np.arange(case.experts), np.asarray(ids))

        def spoilt(w, chosen=chosen):
            if isinstance(w, jax.Array):
                return jnp.where(chosen.reshape(-1, *(1,) * (w.ndim - 1)), w, jnp.nan)
            rest = chosen.reshape(-1, *(1,) * (w.scales.ndim - 1))
            return replace(w, scales=jnp.where(rest, w.scales, jnp.uint8(254)))

        found = run_experts(x, ids, shares, spoilt(gate_up), bias, spoilt(down), down_bias)
        close(found, wanted)


@pytest.mark.every_jax
def test_experts_of_one_layer_of_a_stack(interpreted):
    arguments = moe_arguments(SIZED["few tokens"], "float32")
    stacks = [
        StackMember(jnp.stack([a * jnp.nan, a]), jnp.int32(1)) if at > 2 else a
        for at, a in enumerate(arguments)
    ]
    close(run_experts(*stacks), reference_experts(*arguments))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param("many tokens", "bfloat16", marks=pytest.mark.every_jax),
        ("experts without a token", "mxfp4-a16"),
        ("experts without a token", "w4a16"),
        pytest.param("many tokens", "w8a16", marks=pytest.mark.nightly),
    ],
)
def test_experts_with_many_tokens(name, kind, interpreted):
    """On tensor cores: between the matmuls rows are rounded to bfloat16, as the model's are."""
    x, *rest = moe_arguments(SIZED[name], kind)
    x = x.astype(jnp.bfloat16)
    found = run_experts(x, *rest)
    assert found.dtype == jnp.bfloat16
    close(found.astype(jnp.float32), reference_experts(x.astype(jnp.float32), *rest), 2**-7)


def test_experts_dispatch_and_go_on_to_xla(on_gpu):
    arguments = moe_arguments(SIZED["one token"], "float32")
    wanted = reference_experts(*arguments)
    close(experts(*arguments, activation=clamped_swiglu, implementation="pallas"), wanted)
    for method in ("per_token", "dense"):
        close(experts(*arguments, activation=clamped_swiglu, method=method), wanted)
    small = moe_arguments(MOE[0], "float32")
    close(experts(*small, activation=clamped_swiglu), reference_experts(*small))
    with pytest.raises(RequestError, match="by 32, not 6 and 14"):
        experts(*small, activation=clamped_swiglu, implementation="pallas")
    many = moe_arguments(SIZED["many tokens"], "float32")
    with pytest.raises(RequestError, match="take bfloat16, not float32"):
        experts(*many, activation=clamped_swiglu, implementation="pallas")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("one token", "mxfp4-a16"), ("few tokens", "bfloat16"), ("many tokens", "mxfp4-a16")],
)
def test_experts_lower_for_cuda(name, kind):
    dtype = "bfloat16" if name == "many tokens" else "float32"
    lowered(run_experts, *moe_arguments(SIZED[name], kind, dtype))
