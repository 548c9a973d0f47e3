"""Execution options, compilation, sharding: what may change speed and never a token."""

import itertools
import re
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

import rooflax
from rooflax import LLM, ExecutionOptions, SamplingParams, decode_step, new_cache, prefill
from rooflax.engine.compilation import LOOP_EMITTERS, compiler_options, count_compilations
from rooflax.errors import RequestError
from rooflax.nn.shards import Shards, check_split
from rooflax.nn.storage import Storage
from rooflax.nn.weights import assemble
from rooflax.ops import native
from rooflax.ops.format_names import resolve_format
from rooflax.ops.tiles import padded_vocab
from tests import goldens
from tests.chunks import assert_same_bits
from tests.marks import cases

pytestmark = pytest.mark.oldest_jax

FAMILIES = goldens.by_family(
    qwen2="qwen2_window", smollm3="smollm3_window", seed_oss="seed_oss_bias",
    qwen3_moe="qwen3_moe_dense", cohere2="cohere2_bias", hunyuan_v1_dense="hunyuan_bias",
    granitemoehybrid="granitemoehybrid_nope", phi3="phi3_long", ernie4_5="ernie4_5_bias",
    deepseek_v2="deepseek_v2_groups", gemma4_moe="gemma4_text_moe",
    gemma4_shared="gemma4_text_shared",
)  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=goldens.NEW_TOKENS, ignore_eos=True)

SWITCHES = {
    "use_cache": (True, False),
    "layers": ("unrolled", "scan"),
    "gqa": ("grouped", "repeat"),
    "moe": ("grouped", "per_token", "dense"),
    "kernels": (None, "reference", "xla"),
    "decode_steps": (None, 1, 5),
}


def pairs():
    """A few settings in which every pair of values of two switches occurs."""
    names = list(SWITCHES)
    wanted = {
        frozenset([(a, va), (b, vb)])
        for a, b in itertools.combinations(names, 2)
        for va in SWITCHES[a]
        for vb in SWITCHES[b]
    }
    settings = []
    every = [
        dict(zip(names, values, strict=True)) for values in itertools.product(*SWITCHES.values())
    ]
    while wanted:
        covered = [{p for p in wanted if all(s[name] == value for name, value in p)} for s in every]
        best = max(range(len(every)), key=lambda i: len(covered[i]))
        settings.append(every[best])
        wanted -= covered[best]
    return settings


PAIRS = pairs()


def name_of(setting):
    return ExecutionOptions(**setting).describe()


def check(case, variant, **options):
    this = case(variant)
    got = this.llm(**options).generate(goldens.prompts(), GREEDY)
    assert [list(c.tokens) for c in got] == this.reference.greedy.tolist()


@pytest.mark.parametrize("setting", cases(PAIRS, default=PAIRS[2:4]), ids=name_of)
def test_pairs_of_switches_leave_the_tokens_unchanged(case, setting):
    check(case, "gpt_oss_short", **setting)


@pytest.mark.parametrize(
    "variant",
    cases(
        ["gpt2", "llama_bias", "qwen2_window", "gpt_oss"],
        default=["gpt2", "gpt_oss"],
        every_jax=["gpt2"],
    ),
)
def test_scanned_layers_leave_the_tokens_unchanged(case, variant):
    check(case, variant, layers="scan")


@pytest.mark.parametrize("variant", ["gemma4_text", "gemma4_text_shared"])
def test_a_prefix_hit_in_layers_of_several_kinds_leaves_the_tokens_unchanged(case, variant):
    this = case(variant)
    llm = this.llm()
    for hits in (0, 16):
        got = llm.generate(goldens.prompts(), GREEDY)
        assert [list(c.tokens) for c in got] == this.reference.greedy.tolist()
        assert got[2].num_cached_tokens >= hits


@pytest.mark.nightly  # by default a model with states goes without jit (test_state)
@pytest.mark.parametrize(("variant", "use_cache"), [("gpt2", False), ("gpt_oss_short", True)])
def test_without_jit_the_tokens_are_the_same(case, variant, use_cache):
    """Short: every operation is dispatched by itself."""
    this = case(variant)
    few = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    got = this.llm(jit=False, use_cache=use_cache).generate(goldens.prompts()[:1], few)
    assert [list(c.tokens) for c in got] == this.reference.greedy[:1, :2].tolist()


def test_kernels_that_are_not_here_are_an_error_not_a_fallback(case, monkeypatch):
    with pytest.raises((NotImplementedError, RequestError), match="pallas"):
        case("llama_gqa").llm(kernels="pallas").generate([[1, 2]], GREEDY)
    monkeypatch.setattr(native, "status", lambda: native.Status(False, "it was not built"))
    with pytest.raises((NotImplementedError, RequestError), match="native"):
        case("llama_gqa").llm(kernels="native").generate([[1, 2]], GREEDY)


@pytest.mark.every_jax
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_cache", 2), ("jit", "yes"), ("layers", "rolled"), ("gqa", None), ("moe", "sparse"),
        ("kernels", "cuda"), ("decode_steps", 0), ("decode_steps", True), ("decode_steps", 1.5),
        ("decode_steps", 1025),
    ],
)  # fmt: skip
def test_an_option_that_does_not_exist_is_rejected(field, value):
    with pytest.raises(RequestError, match=field):
        ExecutionOptions(**{field: value})


@pytest.mark.every_jax
@pytest.mark.parametrize("variant", ["llama3_tied", "gpt_oss"])
def test_the_lowered_decode_step_holds_no_sine_and_no_cosine(case, variant):
    model = case(variant).model
    cache = new_cache(model, rows=2, max_tokens=64)
    ids = np.zeros(2, np.int32)
    text = jax.jit(decode_step).lower(model, cache, ids, ids).as_text()
    assert "dot_general" in text or "rooflax_matmul" in text
    assert not re.search(r"stablehlo\.(sine|cosine|tan)\b", text)


@pytest.mark.every_jax
@pytest.mark.skipif(not native.is_ready(), reason=native.status().reason)
@pytest.mark.parametrize(("name", "kinds"), [("preset:gpt2-tiny", 1), ("preset:gpt-oss-tiny", 2)])
def test_a_layer_is_lowered_once_for_all_layers_of_its_kind(name, kinds):
    """GPT-2 has four matmuls a layer, GPT-OSS five, in layers with and without a window."""
    model = rooflax.load(name)
    cache = new_cache(model, max_tokens=64)
    ids = np.zeros(1, np.int32)
    text = jax.jit(decode_step).lower(model, cache, ids, ids).as_text()
    products = {1: 4, 2: 5}[kinds]
    assert text.count("@rooflax_matmul") == kinds * products + 1


@pytest.fixture(scope="module")
def tiny():
    return LLM("preset:gpt2-tiny")


def test_two_hundred_tokens_across_bucket_edges_compile_nothing_after_warm_up(tiny):
    """Contexts from 240 to 600 tokens cross the edges at 256 and 512."""
    prompts = [np.random.RandomState(n).randint(0, 4096, n).tolist() for n in (240, 400, 17)]
    many = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    first, later = (
        set(),
        [],
    )  # tests/engine/test_late_warm_up.py: what is compiled is so before it runs
    with count_compilations() as counts:
        for delta in tiny.stream(prompts, many):
            if delta.prompt in first:  # the first token may come before decoding is compiled
                later.append(counts.requests)
            first.add(delta.prompt)
            if delta.completion is not None:
                assert len(delta.completion.tokens) == 200
    assert later[0] == later[-1]
    others = [[(token + 1) % 4096 for token in prompt] for prompt in prompts]
    with count_compilations() as counts:  # nothing of these is in the prefix cache
        tiny.generate(others, many)
    assert counts.requests == 0
    tiny.generate(prompts, many)  # what a prefix hit leaves is a smaller prefill
    with count_compilations() as counts:
        tiny.generate(prompts, many)
    assert counts.requests == 0


@pytest.mark.every_jax
def test_another_checkpoint_of_the_same_shape_compiles_nothing(case, tmp_path):
    this = case("llama_gqa")

    def change(tensors):
        tensors["model.norm.weight"] *= 1.5
        tensors["lm_head.weight"] = tensors["lm_head.weight"][::-1].copy()

    other = goldens.write_checkpoint(tmp_path / "b", "llama_gqa", this.reference, change=change)
    first = this.llm().generate(goldens.prompts(), GREEDY)
    with count_compilations() as counts:
        second = LLM(other).generate(goldens.prompts(), GREEDY)
    assert counts.requests == counts.cache_misses == 0
    assert [c.tokens for c in second] != [c.tokens for c in first]
    assert second[0].timings["compilations"] == 0


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2,), ("tensor",))


@pytest.mark.every_jax
@pytest.mark.parametrize(
    "options",
    cases(
        [{}, {"layers": "scan"}, {"use_cache": False}],
        nightly=[{"use_cache": False}],
        every_jax=[{}, {"layers": "scan"}],
    ),
    ids=["plain", "scan", "no cache"],
)
def test_two_devices_give_the_single_devices_tokens(case, mesh, options):
    """The vocabulary of 263 does not divide by two, so it is padded."""
    assert padded_vocab(goldens.VOCAB, 2) == goldens.VOCAB + 1
    this = case("llama_bias")
    llm = LLM(this.folder, mesh=mesh, options=ExecutionOptions(**options))
    split = llm.model.weights["lm_head"].sharding
    assert len(split.device_set) == 2 and not split.is_fully_replicated
    got = llm.generate(goldens.prompts(), GREEDY)
    assert [list(c.tokens) for c in got] == this.reference.greedy.tolist()


@pytest.mark.parametrize("variant", ["gpt2", "gpt_oss_short"])
def test_other_families_on_two_devices(case, mesh, variant):
    this = case(variant)
    got = LLM(this.folder, mesh=mesh).generate(goldens.prompts(), GREEDY)
    assert [list(c.tokens) for c in got] == this.reference.greedy.tolist()


@pytest.mark.every_jax
def test_a_split_that_leaves_a_remainder_is_rejected_with_the_arithmetic(case, mesh):
    with pytest.raises(RequestError, match=r"3 kv_heads.*3 = 2 x 1 \+ 1"):
        LLM(case("qwen2").folder, mesh=mesh)
    with pytest.raises(RequestError, match=r"5 experts do not divide .*5 = 2 x 2 \+ 1"):
        check_split({"experts": 5}, Shards(expert=2))
    with pytest.raises(RequestError, match=r"104 mlp.*104 = 3 x 34 \+ 2"):
        check_split({"kv_heads": 6, "mlp": 104}, Shards(tensor=3))


FORMATS = (None, "int8", "int4", "mxfp4")
BY_DEFAULT = {
    ("gpt_oss", "mxfp4"), ("qwen3", "int4"), ("smollm3_window", None), ("deepseek_v3", "int8"),
}  # fmt: skip
EACH_FORMAT = pytest.mark.parametrize(
    ("variant", "format"),
    cases(
        itertools.product(FAMILIES.values(), FORMATS),
        default=BY_DEFAULT,
        every_jax=[("gpt_oss", "mxfp4")],
    ),
)


@pytest.mark.skipif(not native.is_ready(), reason=native.status().reason)
@EACH_FORMAT
def test_native_logits_are_the_same_bits_in_any_chunk_and_batch(case, variant, format):
    """On CPU: a prompt whole, in chunks, token by token, and beside another row."""
    model = case(variant).model
    if format:
        model = replace(model, weights=quantized_weights(model, format))
    assert_same_bits(model)


@pytest.mark.skipif(not native.is_ready(), reason=native.status().reason)
@EACH_FORMAT
def test_scanned_layers_give_the_unrolled_layers_bits(case, variant, format):
    """On CPU: the logits of a prompt and of the token after it."""
    model = case(variant).model
    if format:
        model = replace(model, weights=quantized_weights(model, format))
    tokens = np.random.default_rng(1).integers(0, 60, (2, 19)).astype(np.int32)
    found = []
    for options in (ExecutionOptions(), ExecutionOptions(layers="scan")):
        this = model.stacked() if options.layers == "scan" else model
        run, step = (jax.jit(partial(f, options=options)) for f in (prefill, decode_step))
        cache = new_cache(this, rows=2, max_tokens=32, options=options)
        first, cache = run(this, cache, tokens)
        second, _ = step(this, cache, tokens[:, 0], np.full(2, 19, np.int32))
        found.append((np.asarray(first), np.asarray(second)))
    np.testing.assert_array_equal(found[1], found[0])


@pytest.mark.every_jax
@pytest.mark.skipif(not native.is_ready(), reason=native.status().reason)
@pytest.mark.parametrize(
    ("name", "quantize"),
    cases(
        itertools.product(["preset:gpt2-tiny", "preset:gpt-oss-tiny"], [None, "int8"]),
        default=[("preset:gpt2-tiny", None), ("preset:gpt-oss-tiny", "int8")],
    ),
)
def test_scanned_layers_copy_neither_weights_nor_cache(name, quantize):
    """The engine's programs, the decode loop among them, need no more memory than unrolled."""
    temporaries = {}
    for how in ("unrolled", "scan"):
        llm = LLM(name, quantize=quantize, options=ExecutionOptions(layers=how))
        sequences = [s.sequence for s in llm.processor.samples(0, [1, 2, 3], GREEDY)]
        engine = llm.engine_for(sequences)
        engine.warm_up(sequences)
        for program, lowered in engine.runner.lowered():
            used = lowered.compile().memory_analysis()
            temporaries.setdefault(program, []).append(used.temp_size_in_bytes)
    (stacked, *_) = llm.model.weights["stacked_layers"]
    repeats = stacked["attn.norm"].shape[0]
    matrix = max(leaf.nbytes for leaf in jax.tree.leaves(stacked["attn.o"])) // repeats
    assert len(temporaries) == 2
    for unrolled, scanned in temporaries.values():
        assert scanned < unrolled + matrix // 2, temporaries


def quantized_weights(model, format):
    """The model's weights as `--quantize` keeps them."""
    storage = Storage("float32", resolve_format(format))
    found = model.config.params()

    def leaf(slot):
        layers = model.weights["layers"]
        return (model.weights if slot.layer is None else layers[slot.layer])[slot.key]

    prequantized = (
        (slot, storage.of(slot, model.config).keep(np.asarray(leaf(slot)))) for slot in found
    )
    return assemble(model.config.num_layers, prequantized)


def test_the_engine_asks_for_older_emitters_where_they_are_and_nobody_else_chose(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    old = jax.__version_info__ < (0, 11) and native.is_ready()
    assert compiler_options(None) == ({LOOP_EMITTERS: False} if old else None)
    assert compiler_options("xla") is None
    monkeypatch.setenv("XLA_FLAGS", f"--{LOOP_EMITTERS}=true")
    assert compiler_options(None) is None
