"""Sizes of blocks: the rule's, a trial's, the table's; and the table in its file."""

import os

import jax
import pytest

from rooflax.errors import RequestError
from rooflax.folders import CACHE_VARIABLE
from rooflax.ops import block_sizes
from rooflax.ops.block_sizes import Question, about, keep, of, powers_of_two, recording, trying

RULE, OTHER, FOREIGN = (4, 8), (2, 8), (7, 7)
KEY = ("kernel", (16, "int8"))


def ask(key=KEY):
    return of(*key, RULE, [RULE, OTHER, (1, 8), OTHER])


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """An empty cache folder."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    return tmp_path


def test_the_rule_answers_where_nothing_is_known():
    assert ask() == RULE
    assert block_sizes.table() == {}


def test_what_is_kept_answers_until_it_is_forgotten():
    path = keep({KEY: OTHER})
    assert (path, ask()) == (block_sizes.table_path(), OTHER)
    assert ask(("kernel", (32, "int8"))) == ask(("another", KEY[1])) == RULE
    keep({KEY: None})
    assert ask() == RULE


def test_the_table_is_read_once(monkeypatch):
    keep({KEY: OTHER})
    assert ask() == OTHER
    block_sizes.table_path().unlink()
    assert ask() == OTHER


def test_a_trial_answers_before_the_table():
    keep({KEY: OTHER})
    with trying({KEY: (1, 8)}):
        assert ask() == (1, 8)
        with trying({}):
            assert ask() == RULE
        assert ask() == (1, 8)
    assert ask() == OTHER


def test_sizes_that_the_kernel_does_not_take_are_passed_over():
    keep({KEY: FOREIGN})
    assert ask() == RULE
    with trying({KEY: FOREIGN}):
        assert ask() == RULE


def test_several_processes_take_the_rule(monkeypatch):
    """Each reads a file of its own, and all must make the same program."""
    keep({KEY: OTHER})
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert ask() == RULE


def test_questions_are_recorded_while_a_program_is_traced():
    def program(x):
        return x * ask()[0] + of("settled", (1,), RULE, [RULE])[0] + ask()[1]

    with recording() as asked:
        jax.jit(program).trace(1.0)
    assert list(asked.values()) == [Question(*KEY, RULE, (OTHER, (1, 8)))]
    ask(("another", ()))
    assert len(asked) == 1


def test_writing_keeps_the_entries_of_other_shapes(folder):
    keep({KEY: OTHER, ("another", (1,)): (3,)})
    path = keep({KEY: (1, 8), ("third", ()): (5,), ("fourth", ()): None})
    assert block_sizes.table() == {KEY: (1, 8), ("another", (1,)): (3,), ("third", ()): (5,)}
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_table_stays_whole_where_writing_fails(monkeypatch):
    path = keep({KEY: OTHER})

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        keep({KEY: (1, 8)})
    assert (block_sizes.table(), ask()) == ({KEY: OTHER}, OTHER)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"block_sizes": 3}', '{"block_sizes": [{"kernel": "a"}]}', "\udcff",
        '{"block_sizes": [{"kernel": "a", "shape": [1.5], "sizes": [1]}]}',
        '{"block_sizes": [{"kernel": "a", "shape": [1], "sizes": ["1"]}]}',
        '{"block_sizes": [{"kernel": 3, "shape": [1], "sizes": [1]}]}',
    ],
)  # fmt: skip
def test_a_file_that_is_no_table_is_named_and_replaced(text):
    path = keep({})
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(RequestError, match="it is no table.*delete the file.*rooflax tune") as said:
        ask()
    assert str(path) in str(said.value)
    with trying({}):
        assert ask() == RULE
    keep({KEY: OTHER})
    assert ask() == OTHER


def test_a_table_that_cannot_be_opened_is_named():
    block_sizes.table_path().mkdir(parents=True)
    with pytest.raises(RequestError, match="cannot be read: Is a directory"):
        ask()


def test_neighbouring_sizes_share_an_answer():
    assert [about(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
    assert [powers_of_two(n) for n in (1, 5, 8)] == [[1], [1, 2, 4], [1, 2, 4, 8]]
