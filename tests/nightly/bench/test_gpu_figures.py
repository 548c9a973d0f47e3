"""The script that takes a GPU's figures: it works without one, and says what failed."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import gpu_cases, gpu_list, gpu_models, gpu_table
from rooflax.ops import block_sizes
from rooflax.ops.accelerator import OLDEST_GPU_JAX
from tests.support.product.snippets import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("benchmarks_gpu", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(out, *arguments):
    command = [sys.executable, str(SCRIPT), str(out), "--dry-run", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (out / "figures.jsonl").read_text().splitlines()]
    return lines, (out / "table.md").read_text()


def test_the_whole_dry_run(tmp_path):
    """Every case has a result: where there are no kernels from XLA, and its line says so."""
    lines, table = run(tmp_path)
    kernels = jax.__version_info__ >= OLDEST_GPU_JAX
    last = {line["name"]: line for line in lines}
    own = [name for name, line in last.items() if not {"rule", "counted"} & line.keys()]
    assert own == [case.name for case in gpu_list.cases(tiny=True)]
    answers = {line["rule"] for line in last.values() if "rule" in line}
    asked = {
        "linear fp8-a16 rows 1",
        *(f"attention {k} head 64 queries 1" for k in ("bfloat16", "int8", "float32")),
        *(f"attention bfloat16 head 320 queries 1{of}" for of in ("", " latent 256")),
    }
    assert answers >= asked or not kernels
    assert bool(answers) == kernels
    assert all(line["result"]["seconds"] > 0 for line in last.values() if "rule" in line)
    for case in gpu_list.cases(tiny=True):
        line = last[case.name]
        assert f"| {case.name}" in table
        if ("race" in case.job or case.job in ("step", "null")) and not kernels:
            assert "need JAX 0.11" in line["failed"]
            continue
        assert "result" in line, line
        falls_back = not kernels and case.job in ("linear", "attention", "experts")
        assert ("fell_back" in line) == falls_back, line
        result = line["result"]
        if case.job in ("linear", "attention", "experts"):
            assert result["error"] <= result["tolerance"] and result["seconds"] > 0
        if case.job in ("model", *gpu_list.PEERS):
            shares = [
                result[f"{kind}_{of}"] for kind in ("decode", "prefill") for of in ("mbu", "mfu")
            ]
            assert all(share > 0 for share in shares)
        if case.job == "mixed":
            assert all(result[f"{kind}_tok_per_s"]["median"] >= 0 for kind in ("decode", "prefill"))
        if case.job == "model":
            assert result["prefill_chunk"] == case.arguments.get("chunk", result["prefill_chunk"])
    assert last["ceilings"]["result"]["read_gb_per_s"] > 0
    assert ("(XLA: the kernel failed)" in table) != kernels
    assert "| decode llama-3.1-8b int4 | decode |" in table
    flags = last["command buffers for loops, int4, 4 layers"]["environment"]["xla_flags"]
    assert flags.endswith("+WHILE,+CONDITIONAL")
    assert any((tmp_path / "cache").glob("*-cache"))


def test_batches_of_every_size_are_measured_at_both_contexts():
    cases = [case for case in gpu_list.cases(tiny=False) if case.arguments.get("layers") == 8]
    works = [case.arguments["work"] for case in cases if case.job == "model"]
    found = {(work.get("batch", 1), work["prompt_tokens"]) for work in works}
    assert found >= {(rows, context) for rows in (8, 32, 64) for context in (1024, 4096)}


def test_every_kind_of_case_is_in_the_dry_run():
    """But for torch's and transformers' where they are not installed."""

    def kinds(tiny):
        """Jobs with what they are given, if not its value."""
        return {(case.job, *sorted(case.arguments)) for case in gpu_list.cases(tiny)}

    absent = {job for job in gpu_list.PEERS if importlib.util.find_spec(job) is None}
    missing = {kind for kind in kinds(tiny=False) - kinds(tiny=True) if kind[0] not in absent}
    assert not missing


def test_a_part_is_expected_to_end_in_time():
    """With a tenth to spare; and twice as long as expected, no case is ended."""
    for part, budget in gpu_list.BUDGETS_S.items():
        given = [case for case in gpu_list.cases(tiny=False) if case.part == part]
        peers = [case for case in given if case.job in gpu_list.PEERS]
        has_torch = importlib.util.find_spec("torch") is not None
        assert len(peers) == {2: has_torch, 3: 1 + has_torch}.get(part, 0)
        assert 0 < gpu_list.expected_s(given) <= 0.9 * budget, part
        assert all(2 * case.expected_s < case.limit_s < budget for case in given)
    many = [gpu_list.Case(str(n), 2, "", {}, "one" if n < 2 else str(n), 1.0) for n in range(4)]
    assert gpu_list.expected_s(many) == 4 + 3 * gpu_list.START_S
    first = [replace(case, part=1) for case in many]
    counted = gpu_list.COUNTED * gpu_list.COUNTERS_S
    assert gpu_list.expected_s(first) == gpu_list.expected_s(many) + counted
    assert gpu_list.BUDGETS_S[1] + gpu_list.BUDGETS_S[2] <= 12 * 60


def test_another_answer_that_is_faster_is_a_line_of_the_table():
    """Of two that are, the faster one; of a question whose rule is as fast, none."""

    def timed(name, seconds, **more):
        result = {"seconds": seconds, "kernel": "a", "shape": [8, "b"], **more}
        line = {"name": name, "seconds": 1, "target": "", "result": result}
        return line | ({"rule": "x"} if more else {})

    lines = [timed("x", 10e-6), timed("x: a 1", 9e-6, sizes=[1]), timed("x: a 2", 8e-6, sizes=[2])]
    table = gpu_table.markdown([*lines, timed("x: c 3", 9.9e-6, sizes=[3], kernel="c")])
    assert "    (\"a\", (8, 'b')): (2,),  # 0.80" in table and '"c"' not in table
    assert "| 8.0 |" in table
    assert "No other answer was faster." in gpu_table.markdown(lines[:1])


def test_the_slowest_beside_the_law_come_first(monkeypatch):
    monkeypatch.setattr(gpu_table, "predicted_by", lambda _: {"x": 10.0, "y": 10.0})
    lines = [{"name": n, "result": {"seconds": s}} for n, s in (("x", 1e-5), ("y", 2e-5), ("z", 1))]
    assert gpu_table.beside_law(lines) == [("y", pytest.approx(2.0)), ("x", pytest.approx(1.0))]


def test_a_card_is_judged_by_its_own_ceilings():
    """One that reads at 0.7 of the H200's rate is as good where it takes 1 / 0.7 of the time."""
    name, rates = "linear bfloat16 rows 1", {"bfloat16": 773e12}
    before = gpu_table.beside_law([{"name": name, "result": {"seconds": 36.5e-6}}])
    ceilings = {"read_gb_per_s": 0.7 * 4164, "flops_per_s": rates}
    lines = [{"name": "ceilings", "seconds": 1, "target": "", "result": ceilings}]
    lines.append({"name": name, "seconds": 1, "target": "", "result": {"seconds": 36.5e-6 / 0.7}})
    ((_, share),) = gpu_table.beside_law(lines)
    assert share == pytest.approx(before[0][1], rel=0.05) and 0.9 < share < 1.1
    (row,) = [row for row in gpu_table.markdown(lines).splitlines() if row.startswith(f"| {name}")]
    assert "| 52.1 |" in row and 1 / 0.7 * 35 < float(row.split("|")[-4]) < 1 / 0.7 * 39
    half = {"read_gb_per_s": 4164, "flops_per_s": {"bfloat16": 773e12 / 2}}
    by_name = [gpu_table.predicted_by(each)["linear w8a16 rows 512"] for each in (None, half)]
    assert 1.3 * by_name[0] < by_name[1] < 2 * by_name[0]


def test_the_first_part_reads_the_ceilings_before_all_else():
    first = next(case for case in gpu_list.cases(tiny=False) if case.part == 1)
    assert first.job == "ceilings"


@pytest.fixture
def profiled(script, monkeypatch, tmp_path):
    """Counts with a program in the profiler's place: what it has written, and the last line."""
    monkeypatch.setattr(gpu_table, "predicted_by", lambda _: {"linear w4a16 rows 1": 10.0})
    timed = {"name": "linear w4a16 rows 1", "result": {"seconds": 1e-5}, "target": "", "seconds": 1}
    (tmp_path / "figures.jsonl").write_text(json.dumps(timed) + "\n")
    given = [case for case in gpu_list.cases(tiny=True) if case.part == 1]
    own = {"PATH": os.pathsep.join([str(tmp_path), os.environ["PATH"]])}

    def count(text=None):
        if text is not None:
            (tmp_path / "ncu").write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / "ncu").chmod(0o755)
        script.count(given, tmp_path, own, 2 * gpu_list.COUNTERS_LIMIT_S)
        assert not (tmp_path / "counters-1.txt").exists()
        lines = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
        assert lines[-1]["name"] == "counters of linear w4a16 rows 1"
        return (tmp_path / "counters-0.txt"), lines

    return count


def test_the_profiler_counts_what_is_slowest(profiled):
    """A program in its place says what it is asked for."""
    path, lines = profiled('echo "$@"\necho "$XLA_FLAGS"\ncat')
    name, asked, flags, task = path.read_text().splitlines()
    assert name == "linear w4a16 rows 1" and asked.endswith("gpu.py --work")
    assert "--clock-control none" in asked and flags == "--xla_gpu_enable_command_buffer="
    assert "--kernel-name regex:_mosaic --launch-skip 120" in asked
    assert json.loads(task)["arguments"]["answers"] == 0
    assert lines[-1]["result"] == {"counters": "counters-0.txt"}


def test_the_table_says_why_there_are_no_counters(profiled):
    table = gpu_table.markdown(profiled("exit 1")[1])
    assert "| counters of linear w4a16 rows 1 | ended with 1 |" in table
    table = gpu_table.markdown(profiled("echo ==ERROR== ERR_NVGPUCTRPERM")[1])
    assert "| counters of linear w4a16 rows 1 | the counters are locked (ERR_NVGPUCTRPERM)" in table


def test_what_the_profiler_runs_ends_with_it(script, profiled, monkeypatch, tmp_path):
    """Where it is late: what it has started would hold the card."""
    monkeypatch.setattr(script, "COUNTERS_LIMIT_S", 2)
    path, lines = profiled("sleep 600 &\necho $!\nwait")
    child = int(path.read_text().splitlines()[1])
    assert lines[-1]["failed"] == "not done after 2 s"
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or " Z " in state.read_text()


def line(name, layers, seconds, **more):
    """A model's line whose time at the ceilings is a millisecond a layer, and one more."""
    result = {
        "tpot_s": {"median": seconds}, "ttft_s": {"median": seconds}, "all_layers": 32, "batch": 1,
        "prompt_tokens": 100, "decode_tok_per_s": {"median": 1 / seconds},
        "prefill_tok_per_s": {"median": 100 / seconds},
    }  # fmt: skip
    shares = {"mbu": (1 + layers) * 1e-3 / seconds, "mfu": 0.1}
    result |= {f"{kind}_{of}": v for kind in ("decode", "prefill") for of, v in shares.items()}
    name = f"{name}, {layers} layers"
    return {"name": name, "layers": layers, "seconds": 1, "target": "", "result": result, **more}


def test_two_depths_give_a_layer_the_rest_and_the_whole():
    """2 ms a layer and 3 ms besides; of all 67 ms the ceilings allow 33."""
    both = [line("decode x", 4, 0.011), line("decode x", 8, 0.019)]
    assert "| decode x | decode | 2.000 | 3.000 | 32 | 67.00 | 14.9 | 49% |" in gpu_table.markdown(
        both
    )
    long = [line("prefill x", 8, 0.019), line("prefill x", 4, 0.011)]
    assert "| prefill x | prefill | 2.000 | 3.000 | 32 | 67.00 | 1492.5 |" in gpu_table.markdown(
        long
    )


def test_what_failed_or_ran_with_xla_gives_no_slope():
    first = line("decode x", 4, 0.011)
    failed = {k: v for k, v in line("decode x", 8, 0.019, failed="why").items() if k != "result"}
    assert "| decode x | no slope: 8 layers failed |" in gpu_table.markdown([first, failed])
    xla = line("decode x", 8, 0.019, fell_back="why")
    assert "| decode x | no slope: 8 layers ran with XLA |" in gpu_table.markdown([first, xla])


def test_the_compiler_is_found_where_it_is(script, tmp_path, monkeypatch):
    """Named, on the path, or in a wheel; not a folder without one."""

    def made(name):
        tool = tmp_path / name / "bin" / "ptxas"
        tool.parent.mkdir(parents=True)
        tool.write_text("")
        tool.chmod(0o755)
        return tmp_path / name

    named, on_path, wheel = made("named"), made("toolkit"), made("site/nvidia/cuda_nvcc")
    (tmp_path / "site/nvidia/cu13/lib").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    path = str(on_path / "bin")
    assert script.cuda_root({"CUDA_ROOT": str(named), "PATH": path}) == named
    assert script.cuda_root({"CUDA_ROOT": str(tmp_path), "PATH": path}) == on_path
    assert script.cuda_root({"PATH": ""}) == wheel


def test_a_second_flag_of_xla_stands_behind_the_first(script):
    own = {"XLA_FLAGS": "--a", "B": "c"}
    assert script.joined(own, {"XLA_FLAGS": "--d"}) == {"XLA_FLAGS": "--a --d", "B": "c"}
    assert script.joined({"B": "c"}, {}) == {"B": "c"}


def test_annotations_need_no_jaxtyping(tmp_path):
    """rooflax is imported with the stand-in alone, as where it is not installed."""
    code = "import jaxtyping, rooflax.llm, rooflax.bench.measure; print(jaxtyping.__file__)"
    stand_in = ROOT / "benchmarks" / "stand_in"
    own = {**os.environ, "PYTHONPATH": os.pathsep.join([str(stand_in), str(ROOT / "src")])}
    done = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(stand_in / "jaxtyping.py")


def test_what_is_not_begun_in_time_says_so(tmp_path):
    lines, table = run(tmp_path, "--only", "ceilings", "--budget", "0")
    assert lines[0]["failed"] == "no time was left" and "no time was left" in table


@pytest.fixture
def began(script, tmp_path):
    """A process, and its lines' cases: of `nothing` models, and of a job that there is not."""
    with (tmp_path / "log.txt").open("a+b") as log:
        process = script.Process("key", dict(os.environ, JAX_PLATFORMS="cpu"), log)
        yield process
        process.end()


BROKEN = gpu_list.Case("row", 2, "model", {"model": "nothing", "work": {}, "precision": {}}, "", 9)


def only_line(process, case, limit_s):
    (line,) = process.lines(case, limit_s)
    return line


def test_a_case_that_fails_says_so_and_the_next_one_runs(began):
    assert "no preset 'nothing'" in only_line(began, BROKEN, 60)["failed"]
    ceilings = gpu_list.Case("ceilings", 2, "ceilings", {"tiny": True}, "", 9)
    assert "result" in only_line(began, ceilings, 60)
    unknown = gpu_list.Case("x", 2, "no job", {}, "", 9)
    assert "KeyError" in only_line(began, unknown, 60)["failed"]
    assert began.is_alive


def test_a_case_that_takes_too_long_says_so_and_ends_its_process(began):
    assert only_line(began, BROKEN, 0.1)["failed"].startswith("not done after")
    assert not began.is_alive


def answers_of(measure):
    """Rows of a case whose kernel asks one question of two other answers."""

    def asks():
        block_sizes.of("a", (8,), (1,), ((1,), (2,), (3,)))
        return measure(block_sizes.of("a", (8,), (1,), ((1,), (2,), (3,))))

    return gpu_cases.with_answers(asks, 2)


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_calls_that_are_timed_take_their_state_in_turn(turns):
    """Each by its own, which the next one of that turn takes as it was left."""
    seen = []

    def call(x, *rest):
        jax.debug.callback(lambda *given: seen.append([float(each) for each in given]), *rest)
        return (x, *(each + 1 for each in rest)) if rest else x

    state = [(np.float32(10 * turn),) for turn in range(turns)]
    how = {"times": 2, "chained": 3, "repeats": 1}
    assert gpu_cases.seconds_each(call, np.zeros(4, np.float32), state=state, **how) > 0
    jax.effects_barrier()
    wanted = {
        0: [[]] * 6,
        1: [[0], [1], [2], [3], [4], [5]],
        3: [[0], [10], [20], [1], [11], [21]],
    }
    assert sorted(seen[:6]) == sorted(wanted[turns])


def test_the_rules_figure_comes_before_other_answers():
    rows = answers_of(lambda sizes: {"seconds": 1.0 / sizes[0]})
    assert next(rows) == {"seconds": 1.0}
    assert next(rows) == {"answer": "a 2"}
    found = {"kernel": "a", "shape": (8,), "sizes": (2,), "seconds": 0.5}
    assert next(rows) == {"answer": "a 2", **found}
    assert [row["answer"] for row in rows] == ["a 3", "a 3"]


def test_an_answer_that_loses_the_device_is_the_last_of_its_process(script, monkeypatch):
    """One that is only wrong is not: the next one runs."""

    def measure(sizes):
        if sizes == (2,):
            raise ValueError("an illegal access")
        return {"seconds": 1.0}

    case = {"name": "x", "job": "linear", "arguments": {}}
    monkeypatch.setattr(script, "run_job", lambda *_: answers_of(measure))
    for answers, behind in ((True, ["x: a 3", "x: a 3", None]), (False, [])):
        monkeypatch.setattr(script, "device_answers", lambda answers=answers: answers)
        rule, begins, failed, *others = script.lines_of(case)
        assert rule["name"] == "x" and rule["result"] == {"seconds": 1.0} and not rule["ends"]
        assert begins == {"name": "x: a 2", "rule": "x", "begins": True}
        assert failed["name"] == "x: a 2" and failed["rule"] == "x"
        assert failed["failed"] == "ValueError: an illegal access"
        assert failed["ends"] is not answers
        assert [line.get("name") for line in others] == behind


WORKER = """
import json, os, sys, time
for text in sys.stdin:
    name = json.loads(text)["name"]
    answer = {"name": name + ": a 2", "rule": name}
    lines = [{"name": name, "seconds": 1, "result": {"pid": os.getpid()}}]
    if name != "sound":
        lines.append({**answer, "begins": True})
    if name == "lost":
        lines.append({**answer, "seconds": 1, "failed": "illegal access", "ends": True})
    if name == "sound":
        lines.append({"last": True})
    for line in lines:
        print(json.dumps(line), flush=True)
    if name == "ended":
        sys.exit("out of memory")
    if name != "sound":
        time.sleep(600)
"""


def test_an_answer_that_fails_leaves_the_rule_its_figure(script, monkeypatch, tmp_path):
    """It says how it failed, no rule is run with XLA for it, and the next case has a process of its
    own."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(script, "__file__", str(worker))
    monkeypatch.setattr(script, "START_LIMIT_S", 2)
    names = ("sound", "lost", "late", "ended", "sound")
    given = [gpu_list.Case(name, 1, "linear", {}, "one", -6.5) for name in names]
    script.run_part(given, 60, tmp_path, dict(os.environ))
    lines = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines if "result" in line] == list(names)
    failed = {line["name"]: line["failed"] for line in lines if "rule" in line}
    assert failed == {
        "lost: a 2": "illegal access",
        "late: a 2": "not done after 4 s",
        "ended: a 2": "ended with 1: out of memory",
    }
    assert not any("fell_back" in line or "ends" in line for line in lines)
    pids = [line["result"]["pid"] for line in lines if "result" in line]
    assert pids[0] == pids[1] and len(set(pids)) == 4


def test_a_process_that_ends_says_its_last_words(began):
    began.popen.kill()
    began.popen.wait()
    began.log.write(b"first\nan illegal access\n")
    failed = only_line(began, BROKEN, 60)["failed"]
    assert failed.startswith("ended with -9: ") and failed.endswith("an illegal access")


def test_only_names_a_case(tmp_path):
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--only", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "none of the cases: ceilings" in done.stderr


@pytest.mark.parametrize("format", ["w8a16", "w4a16", "mxfp4-a16", "fp8-a16"])
def test_packed_weights_drawn_on_the_device_spread_as_a_preset_does(script, format):
    w = gpu_models._one(jax.random.key(0), "packed", ((), (256,), (64,)), format, 0.02)
    numbers = np.asarray(w.numbers())
    assert 0.015 < numbers.std() < 0.027 and abs(numbers.mean()) < 0.003
    if format == "w8a16":
        codes = numbers / np.asarray(w.scales)[:64]
        np.testing.assert_allclose(codes.sum(axis=0), np.asarray(w.sums)[:64], atol=0.1)


def test_parts_have_presets_limits_and_names_of_their_own(script):
    from rooflax.models.presets import PRESETS

    known = script.cases(tiny=False)
    assert len({case.name for case in known}) == len(known)
    assert {case.part for case in known} == set(script.BUDGETS_S)
    for case in known:
        assert case.limit_s <= script.BUDGETS_S[case.part]
        assert case.arguments.get("model", "llama-3.1-8b") in PRESETS, case


@pytest.mark.parametrize("bits", [8, 4])
def test_the_torch_peer_multiplies_by_its_codes(bits):
    """Exactly, where weights are codes; and step by step it gives what a whole prompt gives."""
    torch = pytest.importorskip("torch")
    from benchmarks import gpu_torch

    rng, (inner, outer) = np.random.default_rng(0), (64, 32)
    codes = rng.integers(-127, 128, (outer, inner)) if bits == 8 else rng.integers(0, 16, (32, 64))
    codes[:, 0] = 127 if bits == 8 else 0
    codes[:, 32], codes[:, 1], codes[:, 33] = (127, 127, 127) if bits == 8 else (0, 15, 15)
    w = torch.tensor(codes * 0.25, dtype=torch.float32)
    x = torch.tensor(rng.standard_normal((3, inner)), dtype=torch.float32)
    torch.testing.assert_close(gpu_torch.LINEAR[bits](w)(x), x @ w.T, rtol=1e-5, atol=1e-4)

    raw = {**gpu_models.TINY_LLAMA, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
    with torch.inference_mode():
        net = gpu_torch.Llama(raw, gpu_torch.LINEAR[bits], 8, "cpu", torch.float32)
        tokens = torch.arange(8)[None] * 7
        whole = net(tokens, torch.arange(8))
        for cache in net.cache:
            cache.k.zero_(), cache.v.zero_()
        net(tokens[:, :6], torch.arange(6))
        for at in (6, 7):
            step = net(tokens[:, at : at + 1], torch.tensor([at]))
    torch.testing.assert_close(step, whole, rtol=1e-4, atol=1e-4)
