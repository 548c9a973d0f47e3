"""Variants of the kernels: what is measured, what is kept, and that bits do not depend on it."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rooflax
from rooflax.files import only_writer
from rooflax.ops import native, variants
from rooflax.ops.format_names import CPU_FORMATS, FORMATS, of_two_terms
from rooflax.ops.linear import Activation, Norm, linear, unembed
from rooflax.ops.weights import Dense, as_operand, quantize
from tests.engine.ops.test_two_terms import weight as drawn_weight

pytestmark = [
    pytest.mark.oldest_jax,
    pytest.mark.skipif(not native.is_ready(), reason=native.status().reason),
]

ROWS = (1, 3, 8, 16, 17, 40)
INNER, OUTER = 256, 1008
GATE = Activation("silu", True)
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def default_again(tmp_path, monkeypatch):
    """A cache folder of its own, and no preferences in the end."""
    monkeypatch.setenv("ROOFLAX_CACHE_DIR", str(tmp_path))
    yield
    for code in native.layouts():
        for form in (0, 1):
            prefer(native.instruction_set(), code, form)


def prefer(variant, code, form):
    """Whether the variant takes all kinds of work of a layout."""
    found = {native.prefer(variant, code, form, work) for work in range(len(variants.WORKS))}
    assert len(found) == 1
    return found.pop()


@jax.jit
def results(x, weight, bias, residual, norm, gates):
    """Of each number of rows: bare, and with what comes before and behind."""
    found = []
    for count in ROWS:
        how = {"bias": bias, "residual": residual[:count]}
        found += [
            linear(x[:count], weight, implementation="native"),
            linear(x[:count], weight, prologue=Norm(norm), implementation="native", **how),
            linear(gates[:count], weight, prologue=GATE, implementation="native"),
            linear(x[:count].astype(jnp.bfloat16), weight, implementation="native"),
        ]
    return found


@jax.jit
def logits(x, table):
    return [unembed(x[:count], table, implementation="native") for count in ROWS]


BLOCKS = ("q4_1", "q6_k", "q2_k")
TWO_TERMS = ("w4a8", *BLOCKS)
"""With activations that are sums of two int8 numbers."""


@pytest.mark.parametrize(
    "format",
    ["float32", "bfloat16", *FORMATS, *CPU_FORMATS, *BLOCKS, *map(of_two_terms, TWO_TERMS)],
)
def test_bits_do_not_depend_on_the_variant(format):
    """Every variant that may be preferred; others are refused."""
    w = RNG.standard_normal((INNER, OUTER)).astype(np.float32)
    if plain := format in ("float32", "bfloat16"):
        weight = jnp.asarray(w, format)
    elif name := next(
        (name for name in (*BLOCKS, *TWO_TERMS) if format in (name, of_two_terms(name))), None
    ):
        weight = replace(drawn_weight(name, INNER, OUTER), format=format)
    else:
        weight = quantize(w, format, (INNER,), (OUTER,))
    draw = [RNG.standard_normal(shape).astype(np.float32) for shape in (
        (40, INNER), (OUTER,), (40, OUTER), (INNER,), (40, 2, INNER),
    )]  # fmt: skip
    operand, _ = as_operand(weight).in_stack()
    form = int(format == "bfloat16" or operand.quantizes_activations)
    calls = [(operand.code, lambda: results(draw[0], weight, *draw[1:]))]
    if plain:
        calls.append(("table", lambda: logits(draw[0], jnp.asarray(w.T, format))))
    for code, call in calls:
        wanted = list(map(np.asarray, call()))
        taken = []
        for variant in native.INSTRUCTION_SETS:
            if not prefer(variant, code, form):
                continue
            taken.append(variant)
            for found, known in zip(call(), wanted, strict=True):
                np.testing.assert_array_equal(np.asarray(found), known)
        assert native.instruction_set() in taken
        assert "generic" not in taken or native.instruction_set() == "generic"
        if operand.packing and native.instruction_set() != "generic":
            assert "avx2" in taken


def test_a_forced_variant_wins():
    """Without instructions that multiply and add at once the sums are others."""
    if native.instruction_set() == "generic":
        pytest.skip("there is nothing else to force")
    x = RNG.standard_normal((3, INNER)).astype(np.float32)
    weight = quantize(RNG.standard_normal((INNER, OUTER)), "w8a16", (INNER,), (OUTER,))
    call = jax.jit(lambda x: linear(x, weight, implementation="native"))
    assert prefer("avx2", "int8", 0)
    preferred = np.asarray(call(x))
    native.force_instruction_set("generic")
    try:
        forced = np.asarray(call(x))
    finally:
        native.force_instruction_set("")
    assert not np.array_equal(forced, preferred)
    np.testing.assert_array_equal(np.asarray(call(x)), preferred)


def tree():
    """Weights of some layouts, in layers and beside them."""
    w = RNG.standard_normal((2, 256, 512)).astype(np.float32)
    return {
        "embed": jnp.asarray(w.reshape(1024, 256)),
        "lm_head": quantize(w[0], "w8a8", (256,), (512,)),
        "norm": jnp.ones(256),
        "stacked_layers": [
            {
                "up": quantize(w, "w4a8", (256,), (512,)),
                "down": quantize(w, "w8a16", (256,), (512,)),
                "attn": jnp.asarray(w),
            }
        ],
    }


@pytest.fixture
def all_count(monkeypatch):
    """Small weights are measured too, and all of them."""
    monkeypatch.setattr(variants, "LEAST_BYTES", 1 << 16)
    monkeypatch.setattr(variants, "BUDGET_S", 60.0)  # however busy the machine is


NAMES = {"table float32", "matrix float32", "w8a8", "w4a8", "w8a16"}


@pytest.fixture
def measured(monkeypatch):
    """What was measured, call after call."""
    calls, real = [], variants.measure

    def measure(weights, known, budget_s):
        calls.append(set(weights) - set(known))
        return real(weights, known, budget_s)

    monkeypatch.setattr(variants, "measure", measure)
    return calls


def test_each_format_is_measured_once(all_count, measured):
    for _ in range(3):
        variants.prefer_fastest(tree())
    assert measured == [NAMES]
    table = variants.read_table(variants.table_path())
    assert set(table) == NAMES
    for entry in table.values():
        assert all(used in native.INSTRUCTION_SETS for used in entry.variants().values())
    if native.instruction_set() in ("avx512", "avx512-far", "amx"):
        assert {"avx2", native.instruction_set()} <= set(table["w8a8"].seconds["one row"])


def test_a_small_model_is_not_measured(measured):
    variants.prefer_fastest(tree())
    assert measured == [] and not variants.table_path().exists()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: "[" * 100_000,
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"processor": "', '"processor": "another '),
        lambda text: text.replace('"one row": {', '"one row": {"generic": -1, '),
        lambda text: text.replace('"one row": {', '"one row": {"zmm": 1.0, '),
        lambda text: text.replace('"one row"', '"two rows"'),
        lambda text: text.replace('"inner": 256', '"inner": 1e999'),
        lambda text: text.replace('"inner": 256', '"inner": -256'),
        lambda text: json.dumps([json.loads(text)]),
        lambda text: text.replace('"code": "', '"code": "un'),
    ],
)
def test_a_broken_table_is_taken_again(spoil, all_count, measured):
    variants.prefer_fastest(tree())
    path = variants.table_path()
    text = path.read_text()
    path.write_text(spoil(text))
    assert path.read_text() != text
    variants.prefer_fastest(tree())
    assert measured[-1] == NAMES
    assert set(variants.read_table(path)) == NAMES


def test_without_a_folder_it_measures_and_goes_on(all_count, measured, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROOFLAX_CACHE_DIR", str(tmp_path / "file"))
    variants.prefer_fastest(tree())
    assert measured == [NAMES]
    assert (tmp_path / "file").read_text() == ""


def test_while_another_process_measures_the_default_holds(all_count, measured):
    with only_writer(variants.table_path(), makes_folders=True):
        variants.prefer_fastest(tree())
    assert measured == []
    variants.prefer_fastest(tree())
    assert measured == [NAMES]


def test_a_table_is_taken_again_without_a_model(all_count, monkeypatch):
    monkeypatch.setattr(variants, "AGAIN_BYTES", 1 << 20)
    assert variants.measure_again() == {}
    variants.prefer_fastest(tree())
    first = variants.read_table(variants.table_path())
    assert set(first) == NAMES
    monkeypatch.setattr(variants, "AGAIN_S", 60.0)
    again = variants.measure_again()
    assert again == variants.read_table(variants.table_path())
    for name, entry in first.items():
        assert again[name].layout == entry.layout
        assert again[name].seconds.keys() == variants.WORKS.keys()
        assert set(again[name].seconds["one row"]) >= set(entry.seconds["one row"])


def test_a_small_win_is_noise():
    seconds = {"amx": 1.0, "avx512": 0.96, "avx2": 0.97}
    assert variants.fastest(seconds, "amx") == "amx"
    assert variants.fastest(seconds | {"avx2": 0.95}, "amx") == "avx2"
    assert variants.fastest({}, "avx2") == "avx2"


def test_what_does_not_fit_is_not_timed():
    shape = 1, 64, 32
    dense = Dense(jnp.zeros((64, 32)), (64,), (32,))
    address = dense.array.unsafe_buffer_pointer()
    empty = 0, "float32", (0,), 0
    none = 0, "int32", (0,), 0

    def timed(variant, rank):
        arrays = [(address, "float32", (32, 32)[:rank], 0), empty, none]
        return native.matmul_seconds(
            variant, "matrix", quantizes=False, shape=(shape[0], 32, shape[2]), arrays=arrays,
            count=2,
        )  # fmt: skip

    assert (timed(native.instruction_set(), 2) or 0) > 0
    assert timed(native.instruction_set(), 1) is None
    assert timed("another", 2) is None
    if native.instruction_set() != "generic":
        assert timed("generic", 2) is None


def test_two_tables_give_the_same_tokens(all_count):
    """Each variant in turn made the fastest of all work."""
    if native.instruction_set() == "generic":
        pytest.skip("there is one variant")
    given = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    prompts = [[5, 6, 7], list(range(3, 40))]

    def tokens():
        llm = rooflax.LLM(max_model_len=64, quantize="int8")
        found = [each.tokens for each in llm.generate(prompts, **given)]
        return llm, found

    llm, wanted = tokens()
    path = variants.table_path()
    table = variants.read_table(path)
    assert table.keys() == variants.formats_of(llm.model.weights).keys() != set()
    for best in ("avx2", native.instruction_set()):
        seconds = {one: 1e-6 if one == best else 1e-3 for one in native.INSTRUCTION_SETS}
        each = dict.fromkeys(variants.WORKS, seconds)
        changed = {name: variants.Measured(one.layout, each) for name, one in table.items()}
        variants.write_table(path, changed)
        _, found = tokens()
        assert found == wanted
        assert variants.read_table(path) == changed


def test_what_there_is_no_time_for_is_measured_later(all_count, measured, monkeypatch):
    """One format's work in each run, when the budget is none."""
    monkeypatch.setattr(variants, "BUDGET_S", 0.0)
    known = []
    for _ in range(len(NAMES) * len(variants.WORKS) + 1):
        variants.prefer_fastest(tree())
        table = variants.read_table(variants.table_path())
        known.append(sum(len(entry.seconds) for entry in table.values()))
    assert known == [*range(1, len(known)), len(known) - 1]
    assert len(measured) == len(known) - 1
