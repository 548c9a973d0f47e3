"""Sizes of blocks: the rule's, a trial's, the measured ones."""

import jax
import pytest

from rooflax.ops import block_sizes
from rooflax.ops.block_sizes import Question, of, powers_of_two, recording, rounded_up, trying

RULE, OTHER, FOREIGN = (4, 8), (2, 8), (7, 7)
KEY = ("kernel", (16, "int8"))


def ask(key=KEY):
    return of(*key, RULE, [RULE, OTHER, (1, 8), OTHER])


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr(block_sizes, "MEASURED", {KEY: OTHER})


def test_the_rule_answers_where_nothing_is_known():
    assert ask() == RULE


def test_what_was_measured_answers_for_its_kernel_and_shape(measured):
    assert ask() == OTHER
    assert ask(("kernel", (32, "int8"))) == ask(("another", KEY[1])) == RULE


def test_a_trial_answers_before_what_was_measured(measured):
    with trying({KEY: (1, 8)}):
        assert ask() == (1, 8)
        with trying({}):
            assert ask() == RULE
        assert ask() == (1, 8)
    assert ask() == OTHER


def test_sizes_that_the_kernel_does_not_take_are_passed_over():
    with trying({KEY: FOREIGN}):
        assert ask() == RULE


def test_questions_are_recorded_while_a_program_is_traced():
    def program(x):
        return x * ask()[0] + of("settled", (1,), RULE, [RULE])[0] + ask()[1]

    with recording() as asked:
        jax.jit(program).trace(1.0)
    assert list(asked.values()) == [Question(*KEY, RULE, (OTHER, (1, 8)))]
    ask(("another", ()))
    assert len(asked) == 1


def test_neighbouring_sizes_share_an_answer():
    assert [rounded_up(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
    assert [powers_of_two(n) for n in (1, 5, 8)] == [[1], [1, 2, 4], [1, 2, 4, 8]]
