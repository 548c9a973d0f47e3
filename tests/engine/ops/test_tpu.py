"""The TPU's kernels, interpreted on CPU, against references; and lowered for a TPU without one."""

import functools
import itertools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax import LLM, ExecutionOptions, SamplingParams
from rooflax.errors import RequestError
from rooflax.models.presets import PRESETS
from rooflax.nn.kv_cache import Heads, LayerGroups, allocate, bytes_per_token
from rooflax.ops import accelerator, native, tpu
from rooflax.ops.accelerator import block_size
from rooflax.ops.attention import AttentionArgs, Paging, paged_attention
from rooflax.ops.attention.paging import gather
from rooflax.ops.attention.pattern import Pattern
from rooflax.ops.attention.plan import visible_tiles
from rooflax.ops.format_names import FORMATS
from rooflax.ops.kernels import chosen
from rooflax.ops.kv_pool import QuantizedPool, tokens_as_fp8, tokens_as_int8
from rooflax.ops.linear import Activation, ClampedSwiglu, Norm, linear, lookup, unembed
from rooflax.ops.moe import experts, route
from rooflax.ops.weights import StackMember, class_of, packed_bytes, quantize
from rooflax.ops.weights.matrix_packing import as_matrix, as_panels
from tests.engine.ops.test_attention import PAGED, as_jax, by_hand, into_blocks
from tests.engine.ops.test_moe import by_hand as experts_by_hand
from tests.marks import cases
from tests.support.ops.cases import LINEAR, MOE, PATTERNS, normal, rng, seen_by_hand

pytestmark = pytest.mark.oldest_jax


@pytest.fixture(autouse=True, scope="module")
def _on_tpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerator, "platform", lambda: "tpu")
        patch.setattr(native, "status", lambda: native.Status(False, "this is a TPU"))
        patch.setattr(tpu, "interpreted", lambda: True)
        yield


@functools.cache
def attend(implementation):
    return jax.jit(functools.partial(paged_attention, implementation=implementation))


@pytest.mark.parametrize(
    "case",
    cases(
        PAGED,
        default=["one head", "sinks and window", "a row of padding", "a row of padding and sinks"],
    ),
    ids=lambda c: c.name,
)
def test_paged_attention(case):
    q, k, v, dense, args = case.arrays()
    exact = by_hand(q, k, v, dense, args)
    context, size = dense.context_lens, 3
    first = np.zeros_like(context)
    if case.window is not None:  # blocks that no query of this step can see are gone
        oldest = np.maximum(dense.positions[:, 0] - case.window + 1, 0)
        first = (oldest // size * size).astype(np.int32)
    length = int(-(-(context - first).max() // size)) + 2
    k_pool, v_pool, tables = into_blocks(k, v, context, first, size, length)
    paging = Paging(tables, first, dense.positions, context)
    out = attend("pallas")(q, k_pool, v_pool, paging, args)
    np.testing.assert_allclose(out, exact, rtol=0, atol=2e-6)


def paged(
    queries, heads, kv_heads, head_dim, block_size, context, *, first=0, sinks=True, window=None
):
    """q, two pools and what else it takes: rows of different lengths, some tiles of keys long."""
    rows, length = 2, -(-(context - first) // block_size) + 1
    contexts = np.array([context, max(first + 1, context * 2 // 3)], np.int32)
    begin = np.maximum(contexts - queries, first)
    return (
        normal(rows, queries, heads, head_dim, seed=0),
        *(normal(1 + rows * length, kv_heads, block_size, head_dim, seed=n) for n in (1, 2)),
        Paging(
            block_tables=1 + rng().permutation(rows * length).reshape(rows, -1).astype("i4"),
            first_positions=np.full(rows, first, np.int32),
            positions=(begin[:, None] + np.arange(queries)).astype(np.int32),
            context_lens=contexts,
        ),
        AttentionArgs(0.3, window, normal(heads, seed=3) if sinks else None),
    )


LONG = {
    "decode": {"queries": 1, "context": 1200},
    "decode in a window": {"queries": 1, "context": 1200, "first": 96, "window": 100},
    "tiles of queries": {"queries": 150, "context": 700},
    "tiles of queries in a window": {"queries": 150, "context": 1300, "first": 32, "window": 530},
    "no sinks": {"queries": 5, "context": 700, "sinks": False},
}


@pytest.mark.parametrize(
    ("name", "pool"),
    cases(
        [
            *((name, "float32") for name in LONG),
            ("tiles of queries in a window", "bfloat16"),
            ("decode", "int8"),
            ("tiles of queries in a window", "int8"),
        ],
        default=[("no sinks", "float32")],
    ),
)
def test_long_contexts(name, pool):
    q, k, v, *given = paged(heads=8, kv_heads=2, head_dim=16, block_size=16, **LONG[name])
    if pool == "int8":
        k, v = (QuantizedPool(*tokens_as_int8(jnp.asarray(a))) for a in (k, v))
    else:
        k, v = (jnp.asarray(a, pool) for a in (k, v))
    outs = [attend(name)(q, k, v, *given) for name in ("reference", "pallas")]
    np.testing.assert_allclose(outs[1], outs[0], rtol=0, atol=3e-6)


@pytest.mark.parametrize("dtype", ["fp8", "float16"])
def test_a_cache_of_another_type_is_left_to_xla(dtype):
    q, k, v, *given = paged(6, 8, 2, 16, 16, 90)
    pools = [jnp.asarray(a) for a in (k, v)]
    if dtype == "fp8":
        pools = [QuantizedPool(*tokens_as_fp8(pool)) for pool in pools]
    else:
        pools = [pool.astype(dtype) for pool in pools]
    with pytest.raises(RequestError, match=f"no {dtype} KV cache"):
        attend("pallas")(q, *pools, *given)
    chosen, wanted = (attend(n)(q, *pools, *given) for n in (None, "xla"))
    np.testing.assert_array_equal(chosen, wanted)


def test_heads_lie_padded_in_the_cache():
    """A token's head takes a row of lanes; what is behind it does not count."""
    q, k, v, *given = paged(6, 8, 2, 16, 16, 90)
    wide = [np.pad(a, ((0, 0), (0, 0), (0, 0), (0, 112))) for a in (k, v)]
    exact = attend("reference")(q, k, v, *given)
    for name in ("reference", "xla", "pallas"):
        out = attend(name)(q, *wide, *given)
        np.testing.assert_allclose(out, exact, rtol=0, atol=3e-6)
    cache = allocate(LayerGroups.from_windows((None,), ((2, 16),)), (3,), block_size=block_size())
    assert cache.k[0].shape == (3, 2, 128, 128)
    assert cache.num_bytes == 3 * 128 * bytes_per_token(Heads(2, 16), "float32")


@pytest.mark.parametrize("queries", cases([1, 70], nightly=[70]))
def test_blocks_that_no_query_sees_are_not_read(queries):
    window = 200
    q, k, v, paging, args = paged(queries, 8, 2, 16, 16, 2300, window=window)
    keys = tpu.attention_tiles(queries, 4, 2, 16, 16, 4).blocks * 16
    oldest = paging.positions[:, 0] - window + 1
    ends = -(-paging.context_lens // keys)
    for row in range(2):  # whole tiles of keys before the window, and behind the context
        tiles = paging.block_tables[row].copy()
        tiles[oldest[row] // keys * (keys // 16) : ends[row] * (keys // 16)] = 0
        k[tiles[tiles > 0]] = v[tiles[tiles > 0]] = np.nan
    assert np.isnan(k).any()
    out = np.asarray(attend("pallas")(q, k, v, paging, args))
    assert np.isfinite(out).all()


def test_visits_follow_what_is_visible():
    """Against every query and every key, one by one."""
    positions = np.array([[[5, 6, 7], [8, 9, -1]], [[40, 41, 42], [43, 44, 45]]], np.int32)
    first, context, keys, num_tiles = np.array([0, 16]), np.array([10, 44]), 4, 8
    tables = np.zeros((2, num_tiles), np.int32)
    paging = Paging(*as_jax(tables, first, positions.reshape(2, 6), context))
    for window in (None, 1, 6, 99):
        visits, counts = visible_tiles(
            paging, AttentionArgs(1.0, window), queries=3, keys=keys, num_tiles=num_tiles
        ).listed(num_tiles)
        for row, tile in np.ndindex(2, 2):
            seen = {
                (s - first[row]) // keys
                for s in range(first[row], first[row] + keys * num_tiles)
                for t in positions[row, tile]
                if s <= t and s < context[row] and (window is None or t - s < window)
            }
            found = np.asarray(visits)[row, tile, : counts[row, tile]].tolist()
            assert found == sorted(seen)


@pytest.mark.every_jax
def test_copied_heads_are_rejected():
    *arrays, args = paged(1, 8, 2, 16, 16, 20)
    with pytest.raises(RequestError, match="gqa=repeat"):
        attend("pallas")(*arrays, replace(args, repeat_kv=True))


@functools.cache
def product(implementation):
    return jax.jit(functools.partial(unembed, implementation=implementation))


@pytest.mark.parametrize("format", cases(FORMATS, nightly=["mxfp4-a8", "w4a8", "w8a8-g32"]))
@pytest.mark.parametrize("dtype", cases(["float32", "bfloat16"], nightly=["float32"]))
def test_products(format, dtype):
    """Small, and with several tiles of rows, inputs and outputs."""
    for rows, inner, outer in ((3, 96, 37), (300, 4096, 200)):
        x, w = normal(rows, inner, seed=1), normal(inner, outer, seed=2)
        x, w = jnp.asarray(x, dtype), quantize(w, format, (inner,), (outer,))
        exact = np.asarray(product("reference")(x, w))
        scale = np.abs(exact).max()
        y = product("pallas")(x, w)
        assert y.dtype == jnp.float32
        np.testing.assert_allclose(y, exact, rtol=0, atol=3e-6 * scale)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_quantised_weights_take_no_six_passes(dtype):
    """As float32 ones at the highest precision do, which attention in float32 still has."""
    for format in FORMATS:
        x, w = like((3, 96), dtype), matrix_like(format, 96, 37)
        text = str(jax.make_jaxpr(product("pallas"))(x, w))
        assert "dot_general" in text and "HIGHEST" not in text, format
    q, k, v, *given = paged(1, 8, 2, 16, 16, 90)
    assert "HIGHEST" in str(jax.make_jaxpr(attend("pallas"))(q, k, v, *given))


@pytest.mark.parametrize("case", LINEAR, ids=lambda c: c.name)
def test_linear(case):
    x, w, bias = case.arrays()
    w = quantize(w, "w8a16", case.contracted, case.out)
    contract = functools.partial(linear, contract=len(case.contracted), implementation="pallas")
    y = jax.jit(contract)(x, w, bias)
    assert y.shape == (*case.batch, *case.out)
    flat = np.asarray(w.numbers()).reshape(*case.contracted, *case.out)
    exact = np.tensordot(x, flat, axes=len(case.contracted))
    np.testing.assert_allclose(y, exact if bias is None else exact + bias, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("prologue", [Norm(jnp.ones(96)), Activation("silu", gated=True)])
def test_what_happens_before_and_behind(prologue):
    gated = getattr(prologue, "gated", False)
    x = jnp.asarray(normal(5, 2, 96) if gated else normal(5, 96))
    w, residual = quantize(normal(96, 37), "w8a16", (96,), (37,)), jnp.asarray(normal(5, 37))
    outs = [
        linear(x, w, jnp.ones(37), prologue=prologue, residual=residual, implementation=name)
        for name in ("reference", "pallas")
    ]
    np.testing.assert_allclose(outs[1], outs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format", cases(["w8a8", "mxfp4-a16"], nightly=["w8a8"]))
def test_one_of_a_stack_is_read_where_it_lies(format):
    stack, x = quantize(normal(3, 96, 37), format, (96,), (37,)), normal(5, 96)
    exact = jit_linear("reference")(x, StackMember(stack, jnp.int32(1)))
    others = replace(stack, values=stack.values.at[::2].set(0))
    for packed in (stack, in_panels(stack), others):
        y = jit_linear("pallas")(x, StackMember(packed, jnp.int32(1)))
        np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5)


in_panels = jax.jit(as_panels)


@functools.cache
def jit_linear(implementation):
    return jax.jit(functools.partial(linear, implementation=implementation))


def test_unquantised_products_are_xlas():
    x, w = jnp.ones((3, 5)), jnp.ones((5, 7))
    with pytest.raises(RequestError, match="quantised weights, and this one is float32"):
        linear(x, w, implementation="pallas")
    assert linear(x, w).shape == (3, 7)
    assert unembed(x, w.T).shape == (3, 7)


@pytest.mark.parametrize("format", FORMATS)
def test_matrices_hold_what_panels_hold(format):
    panels = in_panels(quantize(normal(3, 96, 37), format, (96,), (37,)))
    matrix, back = jax.jit(lambda w: (as_matrix(w), as_panels(as_matrix(w))))(panels)
    assert matrix.shape == panels.shape and matrix.stack == (3,)
    for mine, theirs in zip(jax.tree.leaves(back), jax.tree.leaves(panels), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    table = quantize(normal(96, 37), format, (96,), (37,))
    assert table.is_matrix and packed_bytes(format, 96, 37) == table.nbytes
    index = jnp.asarray([[0, 36], [17, 5]])
    both = jax.jit(lambda one, table: (one.numbers(), lookup(table, index)))
    pairs = zip(both(matrix, table), both(panels, in_panels(table)), strict=True)
    for mine, theirs in pairs:
        np.testing.assert_array_equal(mine, theirs)


@functools.cache
def run_experts(implementation):
    function = functools.partial(experts, implementation=implementation)
    return jax.jit(functools.partial(function, activation=ClampedSwiglu()))


@pytest.mark.parametrize("case", cases(MOE, default=["all experts chosen"]), ids=lambda c: c.name)
def test_experts(case):
    x, logits, weights = case.arrays()
    ids, shares = route(jnp.asarray(logits), case.chosen)
    exact = experts_by_hand(x, np.asarray(ids), np.asarray(shares), *weights)
    out = run_experts("pallas")(x, ids, shares, *weights)
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize(
    ("format", "tokens"),
    cases([*((f, 3) for f in FORMATS), ("w8a8", 150), ("mxfp4-a16", 150)], default=[("w8a8", 3)]),
)
def test_quantised_experts(format, tokens):
    x, logits = jnp.asarray(normal(tokens, 64)), jnp.asarray(normal(tokens, 5, seed=1))
    ids, shares = route(logits, 2)
    gate_up = quantize(normal(5, 64, 2, 32, seed=2) / 8, format, (64,), (2, 32))
    down = quantize(normal(5, 32, 64, seed=3) / 8, format, (32,), (64,))
    biases = normal(5, 2, 32, seed=4), normal(5, 64, seed=5)
    outs = [
        np.asarray(run_experts(name)(x, ids, shares, gate_up, biases[0], down, biases[1]))
        for name in ("reference", "pallas")
    ]
    if not FORMATS[format].quantizes_activations:
        np.testing.assert_allclose(outs[1], outs[0], rtol=1e-4, atol=2e-4)
        return
    # A rounding that falls the other way moves an output by a step of its row.
    assert np.isclose(outs[1], outs[0], rtol=1e-4, atol=2e-4).mean() > 0.97
    np.testing.assert_allclose(outs[1], outs[0], atol=0.05)


@pytest.mark.parametrize("format", [None, "fp8-a16"])
def test_experts_that_nobody_chose_are_not_read(format):
    ids = jnp.asarray([[1, 3], [3, 1]])
    gate_up, down = normal(5, 64, 2, 32), normal(5, 32, 64)
    for array in (gate_up, down):
        array[[0, 2, 4]] = np.nan
    if format is not None:
        gate_up, down = (
            quantize(np.nan_to_num(w), format, w.shape[1:2], w.shape[2:]) for w in (gate_up, down)
        )
        lost = jnp.asarray([True, False, True, False, True])[:, None, None]
        gate_up, down = (  # 127 is e4m3's NaN
            replace(w, values=jnp.where(lost, jnp.uint8(127), w.values)) for w in (gate_up, down)
        )
    arrays = (gate_up, np.zeros((5, 2, 32), "f4"), down, np.zeros((5, 64), "f4"))
    out = run_experts("pallas")(normal(2, 64), ids, jnp.full((2, 2), 0.5), *arrays)
    assert np.isfinite(out).all()
    ids = ids.at[0, 0].set(2)
    out = run_experts("pallas")(normal(2, 64), ids, jnp.full((2, 2), 0.5), *arrays)
    assert not np.isfinite(out).all()


@pytest.mark.every_jax
def test_slow_ways_are_rejected():
    x, logits, weights = MOE[1].arrays()
    ids, shares = route(jnp.asarray(logits), MOE[1].chosen)
    weights = [jnp.asarray(w) for w in weights]
    with pytest.raises(RequestError, match="moe=dense"):
        experts(
            jnp.asarray(x), ids, shares, *weights, activation=ClampedSwiglu(), method="dense",
            implementation="pallas",
        )  # fmt: skip


def lowered(function, *args):
    """The program for a TPU, as StableHLO, Mosaic's kernels in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tpu, "interpreted", lambda: False)
        return jax.export.export(jax.jit(function), platforms=["tpu"])(*args).mlir_module()


def like(shape, dtype):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


MODELS = {  # heads, kv_heads, head_dim, window, sinks
    "llama-3.1-8b": (32, 8, 128, None, False),
    "qwen2.5-0.5b": (14, 2, 64, None, False),
    "gpt-oss-20b": (64, 8, 64, 128, True),
    "gpt2": (12, 12, 64, None, False),
}


@pytest.mark.parametrize(
    ("model", "pool"),
    cases(
        itertools.product(MODELS, ["bfloat16", "float32", "int8"]),
        default=[
            ("llama-3.1-8b", "bfloat16"), ("gpt-oss-20b", "bfloat16"), ("gpt-oss-20b", "int8"),
            ("qwen2.5-0.5b", "int8"), ("gpt2", "float32"),
        ],
    ),
)  # fmt: skip
def test_attention_lowers_for_a_tpu(model, pool):
    heads, kv_heads, head_dim, window, sinks = MODELS[model]
    for rows, queries, size in ((8, 1, 128), (1, 512, 128), (2, 1, 16), (1, 64, 16)):
        length = 4096 // size
        blocks = like((rows * length, kv_heads, size, head_dim), pool)
        if pool == "int8":
            blocks = QuantizedPool(blocks, like(blocks.shape[:3], "float32"))
        q = like((rows, queries, heads, head_dim), "float32" if pool == "float32" else "bfloat16")
        row = like((rows,), "int32")
        logits = like((heads,), "float32") if sinks else None

        tables, positions = like((rows, length), "int32"), like((rows, queries), "int32")
        paging, args = Paging(tables, row, positions, row), AttentionArgs(0.1, window, logits)
        step = functools.partial(paged_attention, implementation="pallas")
        text = lowered(step, q, blocks, blocks, paging, args)
        assert text.count("tpu_custom_call") == 1
        assert "stablehlo.gather" not in text or pool == "int8"  # of scales only


def matrix_like(format, inner, outer, stack=(), out_shape=None):
    arrays = class_of(format).like(inner, outer, stack)
    weight = class_of(format)(*arrays, format, (inner,), out_shape or (outer,))
    return jax.eval_shape(as_matrix, weight)


SIZES = ((1, 4096, 6144), (512, 14336, 4096), (8, 2880, 201088))


@pytest.mark.parametrize(
    ("format", "sizes"),
    cases(
        itertools.product(FORMATS, SIZES),
        nightly=[*itertools.product(FORMATS.keys() - {"w8a8", "mxfp4-a16"}, SIZES[1:])],
    ),
)
def test_products_lower_for_a_tpu(format, sizes):
    rows, inner, outer = sizes
    step = functools.partial(unembed, implementation="pallas")
    text = lowered(step, like((rows, inner), "bfloat16"), matrix_like(format, inner, outer))
    assert text.count("tpu_custom_call") == 1
    assert not re.search(rf"<{inner}x{outer}x(f32|bf16)", text)


@pytest.mark.parametrize("format", ["mxfp4-a16", "w8a8", "bfloat16"])
def test_experts_lower_for_a_tpu(format):
    for tokens in (1, 512):
        if format == "bfloat16":
            gate_up, down = like((32, 2880, 2, 2880), format), like((32, 2880, 2880), format)
        else:
            gate_up = matrix_like(format, 2880, 5760, (32,), (2, 2880))
            down = matrix_like(format, 2880, 2880, (32,))
        text = lowered(
            functools.partial(experts, activation=ClampedSwiglu(), implementation="pallas"),
            like((tokens, 2880), "bfloat16"),
            like((tokens, 4), "int32"),
            like((tokens, 4), "float32"),
            gate_up,
            like((32, 2, 2880), "bfloat16"),
            down,
            like((32, 2880), "bfloat16"),
        )
        assert text.count("tpu_custom_call") == 2


TINY = {
    "llama": {
        "model_type": "llama", "vocab_size": 4099, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
    },
    "gpt-oss": {
        "model_type": "gpt_oss", "vocab_size": 4099, "hidden_size": 64, "intermediate_size": 32,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24,
        "max_position_embeddings": 256,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "format", "options"),
    [
        ("llama", "w8a16", {}),
        pytest.param(
            "gpt-oss",
            "mxfp4-a16",
            {"kernels": "pallas", "layers": "scan"},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_whole_models_give_the_tokens_that_xla_gives(model, format, options, monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", TINY[model])
    greedy = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    prompts = [list(range(40, 190)), [7, 8, 9]]  # more than a block, and less
    found = []
    for kernels in ("xla", options.get("kernels")):
        settings = ExecutionOptions(**options | {"kernels": kernels})
        llm = LLM(
            "preset:tiny",
            quantize=format,
            kv_dtype="float32",  # the CPU's choice beside MXFP4 is float16
            options=settings,
            max_model_len=200,
        )
        assert chosen(kernels)["attention"] == (kernels or "pallas")
        found.append([completion.tokens for completion in llm.generate(prompts, greedy)])
    assert found[1] == found[0]


@pytest.mark.parametrize("name", cases(PATTERNS, default=["window and first tokens"]))
@pytest.mark.parametrize(("queries", "window"), cases([(1, None), (70, 300)], nightly=[(70, 300)]))
def test_patterns_are_dense_attention_under_their_mask(name, queries, window):
    pattern = PATTERNS[name]
    q, k, v, paging, args = paged(queries, 4, 2, 8, 16, 700, window=window)
    gathered = [np.asarray(gather(*as_jax(a, paging.block_tables))) for a in (k, v)]
    context, scores = paging.context_lens, np.einsum(
        "btkgh,bksh->bkgts", q.reshape(2, queries, 2, 2, 8), gathered[0]
    )  # fmt: skip
    keep = np.zeros((2, queries, gathered[0].shape[2]), bool)
    for b, t, s in np.ndindex(keep.shape):
        here = paging.positions[b, t]
        keep[b, t, s] = s <= here and s < context[b] and seen_by_hand(pattern, here, s)
        keep[b, t, s] &= window is None or here - s < window
    scores = np.where(keep[:, None, None], 0.3 * scores.astype(np.float64), -np.inf)
    sinks = np.broadcast_to(args.sinks.reshape(1, 2, 2, 1, 1), (*scores.shape[:4], 1))
    weights = np.exp(np.concatenate([scores, sinks], axis=4))
    weights = weights[..., :-1] / weights.sum(axis=4, keepdims=True)
    exact = np.einsum("bkgts,bksh->btkgh", weights, gathered[1]).reshape(q.shape)
    for implementation in ("reference", "xla", "pallas"):
        out = attend(implementation)(q, k, v, paging, replace(args, pattern=pattern))
        np.testing.assert_allclose(out, exact, rtol=0, atol=3e-6)


@pytest.mark.parametrize("name", cases(PATTERNS, default=["window and first tokens"]))
@pytest.mark.parametrize("queries", cases([1, 64], nightly=[64]))
def test_visits_follow_the_pattern(name, queries):
    """Against every query and key; what is hidden is not read, and long contexts stay cheap."""
    pattern, context = PATTERNS[name], 2048
    keys = pattern.block
    positions = np.arange(context - queries, context, dtype=np.int32)
    num_tiles = context // keys + 3
    zeros = np.zeros((1, num_tiles), np.int32)
    paging = Paging(*as_jax(zeros, zeros[:, 0], positions[None], np.full(1, context)))
    args = AttentionArgs(1.0, pattern=pattern)
    visits, counts = visible_tiles(
        paging, args, queries=queries, keys=keys, num_tiles=num_tiles
    ).listed(num_tiles)
    seen = {
        s // keys
        for t in positions
        for s in range(context)
        if s <= t and seen_by_hand(pattern, t, s)
    }
    assert np.asarray(visits)[0, 0, : counts[0, 0]].tolist() == sorted(seen)
    assert int(counts[0, 0]) <= context // keys // 2

    q, k, v, paging, args = paged(queries, 4, 2, 8, 16, context)
    tables = paging.block_tables
    hidden = [i for i in range(context // 16) if i * 16 // keys not in seen]
    k[tables[0, hidden]] = v[tables[0, hidden]] = np.nan
    out = np.asarray(attend("pallas")(q, k, v, paging, replace(args, pattern=pattern)))
    assert np.isfinite(out[0]).all()


@pytest.mark.every_jax
def test_patterns_that_are_none_are_rejected():
    with pytest.raises(ValueError, match="stride is 0; it must be at least 1"):
        Pattern(8, stride=0)
