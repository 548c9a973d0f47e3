"""`rooflax tune`: what it prints, where it says the table is, and what it refuses."""

import json

import pytest

from rooflax.bench import tuning
from rooflax.folders import CACHE_VARIABLE
from rooflax.ops import block_sizes
from tests.bench.samples import finding

TINY = "preset:gpt2-tiny"


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))


@pytest.fixture
def measured(monkeypatch):
    """Figures made by hand stand in for measuring; the table is written."""
    found = [finding(), finding(None)]
    monkeypatch.setattr(tuning, "check_here", lambda: None)
    monkeypatch.setattr(tuning, "tune_model", lambda about, work, progress: found[:1])
    return found


def test_on_cpu_there_is_nothing_to_tune(rooflax):
    ran = rooflax("tune", "no-such-folder/at-all")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("rooflax: There are no block sizes to tune here: Pallas kernels are")
    assert ran.err.count("\n") == 1
    assert not block_sizes.table_path().exists()


def test_too_few_trials_are_refused(rooflax):
    ran = rooflax("tune", TINY, "--trials", 3)
    assert (ran.code, ran.out) == (2, "")
    assert "trials is 3; telling sizes apart needs at least 5" in ran.err


def test_what_is_faster_is_kept_and_shown(rooflax, measured):
    ran = rooflax("tune", TINY)
    assert (ran.code, ran.err) == (0, "")
    title, row, last = ran.out.splitlines()
    assert title.split() == ["program", "kernel", "shape", "rule", "best", "times", "as", "fast"]
    assert "linear.tpu  1 x 8 x 4096 x int8  2048 x 256  1024 x 512  1.250 (1.240 to" in row
    assert last == f"1 of 1 are faster than the rule, and kept in {block_sizes.table_path()}"
    assert block_sizes.table() == {measured[0].question.key: (1024, 512)}


def test_what_no_longer_beats_the_rule_is_forgotten(rooflax, measured):
    block_sizes.keep({measured[0].question.key: (1024, 256), ("another", (1,)): (3,)})
    measured.reverse()
    ran = rooflax("tune", TINY, "--verbose")
    assert "2048 x 256  the rule" in ran.out and "0 of 1 are faster" in ran.out
    assert block_sizes.table() == {("another", (1,)): (3,)}
    assert "2048 x 256           10.0 ms" in ran.err and "does not compile" in ran.err


def test_json(rooflax, measured):
    found = json.loads(rooflax("tune", TINY, "--json").out)
    assert (found["model"], found["table"]) == (TINY, str(block_sizes.table_path()))
    (row,) = found["findings"]
    assert (row["shape"], row["best"]) == ([1, 8, 4096, "int8"], [1024, 512])
    assert row["ratio"]["ratio"] == 1.25 and row["refused"] == [[1024, 256]]


def test_a_table_that_cannot_be_written_is_said_before_measuring(rooflax, monkeypatch):
    monkeypatch.setattr(tuning, "check_here", lambda: None)
    monkeypatch.setattr(tuning, "tune_model", None)
    block_sizes.table_path().parent.write_text("a file where a folder should be")
    ran = rooflax("tune", TINY)
    assert (ran.code, ran.out) == (1, "")
    assert "File exists" in ran.err and "block_sizes" in ran.err


def test_doctor_says_what_is_kept(rooflax):
    found = json.loads(rooflax("doctor", "--json").out)["tuned_block_sizes"]
    assert found == {"file": str(block_sizes.table_path()), "entries": 0, "problem": None}
    block_sizes.keep({("linear.tpu", (1,)): (2,)})
    assert f"1 in {block_sizes.table_path()}" in rooflax("doctor").out
    block_sizes.table_path().write_text("{")
    ran = rooflax("doctor")
    assert ran.code == 0 and "cannot be read: it is no table of block sizes" in ran.out
