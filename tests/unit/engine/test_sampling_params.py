"""SamplingParams: each field has its range, and nothing outside of it is accepted."""

import dataclasses
import math

import pytest

from rooflax.engine.sampling_params import SamplingParams
from rooflax.errors import RequestError
from rooflax.fields.sampling import (
    MAX_ALLOWED_IDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    OF_CHECKPOINT,
    SAMPLING,
)

NOT_NUMBERS = (math.nan, math.inf, -math.inf, True, "1", [1])
NOT_WHOLE = (*NOT_NUMBERS, 1.5, 2.0)

GOOD = {
    "max_tokens": (1, 10**6, None),
    "min_tokens": (0, 1, 10**6),
    "temperature": (0, 0.0, 0.7, 5, 1e6, None),
    "top_k": (0, 1, 10**6, 2**31 - 1, None),
    "top_p": (1e-6, 0.5, 1, 1.0, None),
    "min_p": (0, 0.5, 1, None),
    "seed": (0, 2**32 - 1, None),
    "stop": ((), None, "a", ["a", "b"], ("\n\n",)),
    "stop_token_ids": ((), None, [3], (0, 5)),
    "repetition_penalty": (1e-3, 1, 2.5, 1e6, None),
    "presence_penalty": (-2, 0, 2.0, None),
    "frequency_penalty": (-2, 0, 2.0, None),
    "logit_bias": ({}, None, {3: 1.5, 0: -100, 7: 100.0}),
    "allowed_token_ids": ((), None, [3], tuple(range(MAX_ALLOWED_IDS))),
    "banned_token_ids": ((), None, [3], tuple(range(MAX_LOGIT_BIAS))),
    "logprobs": (0, MAX_LOGPROBS, None),
    "prompt_logprobs": (0, MAX_LOGPROBS, None),
    "n": (1, 7, 1024),
    "ignore_eos": (True, False),
    "num_beams": (1, 2, 10),
    "length_penalty": (-10, 0, 0.5, 1.0, 10, None),
    "early_stopping": (True, False, "never", None),
    "json_schema": (None, {}, {"type": "object"}, '{"type": "string"}'),
    "regex": (None, "a+", "a" * 65536),
    "grammar": (None, 'start: "a"'),
}
BESIDE = {"length_penalty": {"num_beams": 2}, "early_stopping": {"num_beams": 2}}
"""What a field needs to have a meaning."""
BAD = {
    "max_tokens": (0, -1, *NOT_WHOLE),
    "min_tokens": (-1, None, *NOT_WHOLE),
    "temperature": (-1e-9, -1, 1e7, 1e300, 10**400, *NOT_NUMBERS),
    "top_k": (-1, 2**31, *NOT_WHOLE),
    "top_p": (0, 0.0, -0.1, 1.0001, *NOT_NUMBERS),
    "min_p": (-0.1, 1.1, *NOT_NUMBERS),
    "seed": (-1, 2**32, *NOT_WHOLE),
    "stop": ("", ["a", ""], [3]),
    "stop_token_ids": ([-1], [True], [1.5], ["a"]),
    "repetition_penalty": (0, -1, 1e7, 10**400, *NOT_NUMBERS),
    "presence_penalty": (-2.1, 2.1, *NOT_NUMBERS),
    "frequency_penalty": (-2.1, 2.1, *NOT_NUMBERS),
    "logit_bias": (
        {-1: 1.0}, {True: 1.0}, {"a": 1.0}, {1: math.nan}, {1: 101}, {1: "x"},
        dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.5),
    ),
    "allowed_token_ids": ([-1], [True], [1.5], ["a"], [None], range(MAX_ALLOWED_IDS + 1)),
    "banned_token_ids": ([-1], [True], [1.5], ["a"], [None], range(MAX_LOGIT_BIAS + 1)),
    "logprobs": (-1, MAX_LOGPROBS + 1, *NOT_WHOLE),
    "prompt_logprobs": (-1, MAX_LOGPROBS + 1, *NOT_WHOLE),
    "n": (0, -1, 1025, None, *NOT_WHOLE),
    "ignore_eos": (1, 0, None, "yes"),
    "num_beams": (0, -1, 11, None, *NOT_WHOLE),
    "length_penalty": (-10.1, 11, *NOT_NUMBERS),
    "early_stopping": (1, 0, "yes", "true", 2.0, [True]),
    "json_schema": (
        "", "x", "{", "[]", "3", [], 3, True, b"{}", {"a": math.nan}, {"a": {1}},
        {"a": "x" * 65536},
    ),
    "regex": ("", 3, b"a", ["a"], True, "a" * 65537, "\ud800"),
    "grammar": ("", 3, b"a", {"start": "a"}, "a" * 65537),
}  # fmt: skip


def test_the_tables_here_name_every_field():
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(GOOD) == set(BAD) == names


@pytest.mark.parametrize("name", list(GOOD))
def test_values_in_range(name):
    for value in GOOD[name]:
        given = BESIDE.get(name, {}) | {name: value}
        params = SamplingParams(**given)
        assert hash(params) == hash(SamplingParams(**given))
        assert params == SamplingParams(**given)


@pytest.mark.parametrize("name", list(BAD))
def test_values_out_of_range_are_rejected_by_name(name):
    for value in BAD[name]:
        with pytest.raises(RequestError, match=name):
            SamplingParams(**(BESIDE.get(name, {}) | {name: value}))


WITH_BEAMS = {
    "max_tokens": 5, "min_tokens": 2, "stop_token_ids": [3], "repetition_penalty": 1.5,
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {3: 1.0},
    "allowed_token_ids": [1, 2, 3], "banned_token_ids": [3], "n": 3, "ignore_eos": True,
    "length_penalty": 0.5, "early_stopping": "never",
}  # fmt: skip
WITHOUT_BEAMS = {
    "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3, "stop": "end",
    "logprobs": 0, "prompt_logprobs": 0, "json_schema": {}, "regex": "a+", "grammar": 'start: "a"',
}  # fmt: skip


def test_beams_take_a_field_or_reject_it():
    """What is taken has its effect in test_beam_parity.py and test_beam_search.py."""
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {*WITH_BEAMS, *WITHOUT_BEAMS, "num_beams"} == names
    for name, value in WITH_BEAMS.items():
        params = SamplingParams(num_beams=3, **{name: value}).with_defaults({})
        assert not params.is_greedy
    for name, value in WITHOUT_BEAMS.items():
        with pytest.raises(RequestError, match=f"{name} is .* and num_beams 3"):
            SamplingParams(num_beams=3, **{name: value})
    with pytest.raises(RequestError, match="n is 4 and num_beams 3"):
        SamplingParams(num_beams=3, n=4)


@pytest.mark.parametrize("given", [{"length_penalty": 1.0}, {"early_stopping": False}])
def test_what_is_for_beams_alone_is_rejected_without(given):
    with pytest.raises(RequestError, match="is for beams"):
        SamplingParams(**given)


def test_beams_take_nothing_about_draws_from_the_checkpoint():
    drawn = {"temperature": 0.6, "top_k": 40, "top_p": 0.9, "min_p": 0.1}
    merged = SamplingParams(num_beams=2).with_defaults(drawn | {"repetition_penalty": 1.1})
    assert (merged.temperature, merged.top_k, merged.top_p, merged.min_p) == (0.0, 0, 1.0, 0.0)
    assert (merged.length_penalty, merged.early_stopping) == (1.0, False)
    assert (merged.repetition_penalty, merged.seed) == (1.1, 0)
    given = SamplingParams(num_beams=2, temperature=0, length_penalty=0.0, early_stopping=True)
    assert given.with_defaults(drawn).length_penalty == 0.0
    assert given.with_defaults(drawn).early_stopping is True


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop", 3), ("stop", b"a"), ("stop_token_ids", 5), ("logit_bias", [1, 2]), ("logit_bias", 3)],
)
def test_values_of_another_kind_are_rejected_by_name(name, value):
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


def test_a_stop_string_alone_is_not_taken_letter_by_letter():
    assert SamplingParams(stop="end").stop == ("end",)


def test_params_are_frozen_and_keep_no_reference_to_what_they_were_given():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[5] = 1.0
    assert params.logit_bias == {1: 2.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 3


def test_what_is_given_wins_over_the_checkpoints_defaults_and_these_over_ours():
    given = SamplingParams(temperature=0.0, top_k=0)
    merged = given.with_defaults({"temperature": 0.6, "top_k": 40, "top_p": 0.9, "min_p": None})
    assert (merged.temperature, merged.top_k, merged.top_p, merged.min_p) == (0.0, 0, 0.9, 0.0)
    assert (merged.seed, merged.repetition_penalty) == (0, 1.0)
    plain = SamplingParams().with_defaults({})
    assert (plain.temperature, plain.top_k, plain.top_p) == (1.0, 0, 1.0)
    assert plain.max_tokens is None


def test_help_says_who_decides_an_unset_field_and_what_it_may_be():
    """A checkpoint's generation_config.json comes before the built-in default."""
    for name, one in SAMPLING.items():
        assert ("; default the checkpoint's, else " in one.sentence) == (name in OF_CHECKPOINT)
    assert SAMPLING["top_k"].sentence.endswith("0 is off; default the checkpoint's, else 0")
    for name, ends in (("presence_penalty", 2), ("frequency_penalty", 2), ("logit_bias", 100)):
        assert f"; at least -{ends} and at most {ends}" in SAMPLING[name].sentence
    assert f"empty allows all; at most {MAX_ALLOWED_IDS}." in SamplingParams.__doc__
