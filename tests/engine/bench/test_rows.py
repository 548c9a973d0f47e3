"""Rows in processes of their own, ablations, breakdowns, comparisons, and how they print."""

import json
from dataclasses import replace

import jax
import pytest

from rooflax.bench import report
from rooflax.bench.ablate import SWITCHES, ablation, comparable, summarise
from rooflax.bench.breakdown import (
    DISPATCH,
    TraceEvent,
    breakdown,
    covered,
    instruction_parts,
    merge_parts,
    shares,
)
from rooflax.bench.compare import compare_documents
from rooflax.bench.document import READ, document, read_document
from rooflax.bench.environment import cpu_name, environment
from rooflax.bench.worker import measure_apart
from rooflax.bench.workload import Workload, combinations
from rooflax.cli.main import main
from rooflax.errors import EngineError, RequestError
from rooflax.loading.model_info import model_info
from rooflax.nn.execution import ExecutionOptions, Precision
from rooflax.ops import native
from tests.support.bench.samples import NATIVE, XLA, measured, row

pytestmark = pytest.mark.oldest_jax

TINY = Workload("preset:qwen2.5-tiny", prompt_tokens=4, output_tokens=6, trials=5)


def test_a_fault_in_a_row_is_one_sentence():
    with pytest.raises(RequestError, match="no preset"):
        measure_apart(replace(TINY, model="preset:nothing"))
    with pytest.raises(RequestError, match="context"):
        measure_apart(replace(TINY, prompt_tokens=100_000))
    missing = "tpu" if jax.default_backend() != "tpu" else "gpu"
    with pytest.raises(RequestError, match=f"platform '{missing}' is not here"):
        measure_apart(replace(TINY, platform=missing))


@pytest.mark.parametrize("name", ["batch", "prompt_tokens", "output_tokens", "trials"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_absurd_sizes_are_rejected(name, value):
    with pytest.raises(RequestError, match=name):
        replace(TINY, **{name: value})


def test_every_combination_and_back_from_json():
    works = combinations(
        TINY,
        batches=[1, 2],
        prompt_tokens=[3],
        output_tokens=[4, 5],
        settings=[
            (ExecutionOptions(), Precision()),
            (ExecutionOptions(layers="scan"), Precision("bfloat16")),
        ],
    )
    assert len(works) == len(set(map(repr, works))) == 8
    assert [Workload.from_json(json.loads(json.dumps(w.as_json()))) for w in works] == works


def test_ablation_turns_on_what_the_architecture_has():
    labels = {
        name: [r.label for r in ablation(TINY, model_info(f"preset:{name}").config, NATIVE)]
        for name in ("gpt2-tiny", "qwen2.5-tiny", "gpt-oss-tiny")
    }
    assert labels["gpt2-tiny"] == [
        "baseline", "+ KV cache", "+ jit", "+ native kernels", "+ decode steps",
        "all but KV cache", "all but jit", "all but native kernels", "all, int8", "all, int4",
    ]  # fmt: skip
    assert "+ grouped GQA" in labels["qwen2.5-tiny"]
    assert "all but MoE grouping" in labels["gpt-oss-tiny"]
    rows = ablation(TINY, model_info("preset:gpt-oss-tiny").config, NATIVE)
    slowest, full = rows[0].work.options, rows[6].work.options
    assert (slowest.use_cache, slowest.jit, slowest.gqa, slowest.moe) == (
        False, False, "repeat", "per_token",
    )  # fmt: skip
    assert full == TINY.options
    assert len({repr(r.work) for r in rows}) == len(rows)
    assert [r.label for r in rows if not r.exact] == ["all, int8", "all, int4"]
    bare = ablation(TINY, model_info("preset:gpt-oss-tiny").config, XLA)
    assert not any("native" in r.label for r in bare)


COARSE = Precision("float32", "float16", "int8")


def test_the_cache_of_an_ablation_rounds_nothing():
    """Beside matmuls that round it would be float16, and a row without a cache knows no width."""
    quantized = replace(TINY, precision=Precision(quantize="int8"))
    assert comparable(quantized, COARSE).precision.kv_dtype == "float32"
    chosen = replace(TINY, precision=Precision(kv_dtype="int8", quantize="int8"))
    assert comparable(chosen, replace(COARSE, kv_dtype="int8")) == chosen
    assert comparable(TINY, Precision("float32", "float32")) == TINY
    assert comparable(TINY, COARSE).precision.kv_dtype == "float32"  # a folder written so


SWITCHED = {
    "KV cache": {"use_cache": False},
    "jit": {"jit": False},
    "grouped GQA": {"gqa": "repeat"},
    "MoE grouping": {"moe": "dense"},
    "decode steps": {"decode_steps": 1},
}


@pytest.mark.parametrize("name", SWITCHED)
def test_what_is_slow_in_the_best_setting_already_has_no_row(name):
    config = model_info("preset:gpt-oss-tiny").config
    all_names = {s.name for s in SWITCHES}
    work = replace(TINY, options=ExecutionOptions(**SWITCHED[name]))
    rows = ablation(work, config, NATIVE)
    left = {r.label.removeprefix("+ ") for r in rows if r.label.startswith("+ ")}
    assert left == all_names - {name} - ({"decode steps"} if name == "KV cache" else set())
    assert len({repr(r.work) for r in rows}) == len(rows), "two rows measure the same"
    full = [r for r in rows if r.label.startswith("+ ")][-1]
    assert full.work == work


def test_kernels_by_name_are_not_asked_for_what_they_reject():
    work = replace(TINY, options=ExecutionOptions(kernels="native"))
    rows = ablation(work, model_info("preset:gpt-oss-tiny").config, NATIVE)
    assert {r.work.options.kernels for r in rows} == {"xla", None}
    assert "+ native kernels" in [r.label for r in rows]


def test_decode_steps_that_were_asked_for_wait_for_the_cache():
    work = replace(TINY, options=ExecutionOptions(decode_steps=4))
    for r in ablation(work, model_info("preset:gpt2-tiny").config, XLA):
        assert r.work.options.use_cache or r.work.options.decode_steps is None, r.label


def test_other_tokens_in_an_ablation_are_seen():
    rows = ablation(TINY, model_info(TINY.model).config, NATIVE)
    results = [row(r.work) for r in rows]
    results[2]["tokens"][0][0] += 1
    assert [r["same_tokens"] for r in summarise(rows, results)].count(False) == 1
    assert "DIFFERENT" in report.ablation_table(summarise(rows, results))


def test_shares_of_a_trace_by_hand():
    program = """
  %dot.1 = f32[1,4]{1,0} dot(%a, %b), metadata={op_name="jit(decode)/while/body/matmuls/dot"}
  %dot.2 = f32[1,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}
  ROOT %fusion.3 = f32[4]{0} fusion(%x), metadata={op_name="jit(decode)/attention/norms/exp"}
  %while.4 = (s32[]) while(%t), metadata={op_name="jit(decode)/while"}
  %add.5 = f32[4]{0} add(%x, %y), metadata={op_name="jit(decode)/add"}
  %mul.6 = f32[4]{0} multiply(%x, %y), metadata={op_name="jit(decode)/matmuls/norms/mul"}
"""
    parts = instruction_parts(program)
    assert parts == {
        "dot.1": "matmuls", "dot.2": "matmuls", "fusion.3": "attention", "while.4": None,
        "add.5": "other", "mul.6": "norms",
    }  # fmt: skip
    events = [
        TraceEvent("m", "while.4", 0, 100),
        TraceEvent("m", "dot.1", 0, 40),
        TraceEvent("m", "dot.1", 10, 50),  # another thread
        TraceEvent("m", "fusion.3", 60, 80),
    ]
    found = shares(events, parts, 100e-9)
    assert found["matmuls"] == pytest.approx(0.7 * 0.8)
    assert found["attention"] == pytest.approx(0.7 * 0.2)
    assert found[DISPATCH] == pytest.approx(0.3)
    assert sum(found.values()) == pytest.approx(1)
    assert covered([(0, 2), (1, 3), (5, 6)]) == 4
    with pytest.raises(EngineError, match="no event"):
        shares([], parts, 1.0)


def breakdown_of(work, **where):
    """Again where other work left the programs of the trace next to no time, at most twice."""
    for last in (False, False, True):
        try:
            found = measure_apart(work, "breakdown", **where)["result"]
        except EngineError as error:
            if last or "holds no event" not in str(error):
                raise
            continue
        if last or all(phase["shares"][DISPATCH] < 0.95 for phase in found["phases"].values()):
            return found
    raise AssertionError


def test_breakdown_and_profile(tmp_path):
    work = replace(TINY, prompt_tokens=512, output_tokens=17)
    found = breakdown_of(work, folder=str(tmp_path))
    assert list(tmp_path.rglob("*.xplane.pb"))
    for phase in found["phases"].values():
        assert sum(phase["shares"].values()) == pytest.approx(1)
        busy = 1 - phase["shares"][DISPATCH]  # how much that is depends on what else runs here
        assert phase["shares"]["matmuls"] > 0.02 * busy > 0
        assert phase["shares"]["attention"] > 0.02 * busy
    assert "matmuls" in report.breakdown_table(found)
    plain = breakdown_of(replace(work, options=ExecutionOptions(kernels="xla")))
    for phase in plain["phases"].values():
        assert phase["shares"]["norms"] > 0
    with pytest.raises(RequestError, match="`jit` is off"):
        breakdown(replace(work, options=ExecutionOptions(jit=False)))


def test_comparing_documents():
    a = document([measured(TINY)])
    b = json.loads(json.dumps(a))
    b["results"][0]["decode_tok_per_s"]["trials"] = [20.0, 20.1, 19.9, 20.0, 20.0]
    b["results"][0]["options"]["layers"] = "scan"
    (found,) = compare_documents(a, b)
    assert found.decode.verdict == "faster"
    assert found.decode.ratio == pytest.approx(2.0, rel=0.01)
    assert found.prefill.verdict == "no difference shown"
    assert "layers None -> scan" in found.label
    b["results"][0]["batch"] = 7
    with pytest.raises(RequestError, match="no row in common"):
        compare_documents(a, b)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[1]", "has no results"),
        ('{"results": [{}]}', "a row without 'model'"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_documents_that_are_none(tmp_path, text, words):
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RequestError, match=words):
        read_document(path)


def test_rows_with_the_same_settings_are_compared_with_each_other_alone():
    works = [replace(TINY, precision=Precision(quantize=name)) for name in (None, "int8")]
    both = document([measured(work) for work in works])
    labels = [c.label for c in compare_documents(both, both)]
    assert len(labels) == 2
    assert not any("->" in label for label in labels)
    plain = document([measured(works[0])])
    assert ["-> None" in c.label for c in compare_documents(both, plain)] == [False, True]


HOSTILE = (None, True, 0, -1, 1.5, "", "x", "\x1b[2J", "\ud800", [], [[]], [["x"]], {}, {"x": []},
           {"trials": 1}, {"trials": ["1"]}, {"trials": [0.0]}, {"trials": [-1.0]},
           {"trials": [True]}, {"trials": [10**400]}, {"trials": [float("inf")]},
           {"trials": [float("nan")]}, {"trials": [1.0] * 10_001}, {"\x1b": 1})  # fmt: skip


@pytest.mark.parametrize("field", READ)
def test_a_spoilt_document_is_compared_or_rejected_in_a_sentence(tmp_path, capsys, field):
    """Whatever stands in a field: a comparison, or exit code 2; never a fault."""
    good, spoilt, rejected = tmp_path / "good.json", tmp_path / "spoilt.json", 0
    document_ = document([measured(TINY)])
    good.write_text(json.dumps(document_))
    for value in HOSTILE:
        document_["results"][0][field] = value
        spoilt.write_text(json.dumps(document_))
        for files in ((good, spoilt), (spoilt, spoilt)):
            code = main(["bench", "--compare", *map(str, files)])
            said = capsys.readouterr()
            assert code in (0, 2), (value, said.err)
            assert "\x1b" not in said.out + said.err
            assert "fault" not in said.err
            rejected += code == 2 and repr(field) in said.err
            assert code == 0 or said.err.count("\n") == 1
    assert rejected > len(HOSTILE)


def test_tables_fit_a_terminal_and_name_what_differs():
    works = [TINY, replace(TINY, batch=16, options=ExecutionOptions(use_cache=False))]
    whole = document([measured(work) for work in works])
    text = report.table(whole["results"])
    assert all(len(line) <= 80 for line in text.splitlines()), text
    assert "use_cache=False" in text
    assert report.markdown(whole["results"]).count("\n") == 5
    full = report.full_report(whole)
    assert "a processor" in full
    assert "10 ± 0" in full
    whole["results"][1]["batch"] = whole["results"][0]["batch"]
    assert "0.06x faster than that" in report.full_report(whole)


def test_notes_say_which_row_they_are_about():
    works = [TINY, replace(TINY, batch=2)]
    whole = document([measured(work) for work in works])
    whole["results"][1]["warnings"] = ["doubtful"]
    assert "note: batch 2: doubtful" in report.notes(whole)
    alone = report.notes({**whole, "results": whole["results"][1:]})
    assert "note: doubtful" in alone


def test_an_ablation_fits_a_terminal():
    rows = ablation(TINY, model_info("preset:gpt-oss-tiny").config, NATIVE)
    found = summarise(rows, [row(r.work) for r in rows])
    for result in found:
        result |= {"decode_tok_per_s": 12345.6, "peak_rss_bytes": 900 << 20, "total_ratio": 1234.5}
    lines = report.ablation_table(found).splitlines()
    assert max(map(len, lines)) <= 80, lines


def test_programs_of_one_name_are_merged():
    parts = {"dot.1": "matmuls", "add.2": "norms"}
    merge_parts(parts, {"add.2": "rope", "exp.3": "attention"})
    assert parts == {"dot.1": "matmuls", "add.2": "other", "exp.3": "attention"}


def test_the_processor_is_named_with_what_the_kernels_use_of_it():
    used = native.instruction_set() if native.is_ready() else "without native kernels"
    assert environment()["cpu"] == f"{cpu_name()} ({used})"
