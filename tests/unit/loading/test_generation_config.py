"""generation_config.json: its defaults, every end-of-sequence id, and malformed values."""

import fnmatch
import json

import pytest

from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.loading.generation_config import (
    DRAWN,
    LABELS,
    OFF,
    GenerationDefaults,
    read_generation_defaults,
)


def write(folder, name, value):
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_no_files_say_nothing(tmp_path):
    defaults = read_generation_defaults(tmp_path)
    assert defaults == GenerationDefaults()
    assert defaults.greedy
    assert read_generation_defaults(tmp_path, tokenizer_eos_id=7).eos_token_ids == (7,)


def test_all_fields(tmp_path):
    fields = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0,
        "repetition_penalty": 1.1,
        "do_sample": True,
        "eos_token_id": [128001, 128008, 128009, 128001],
        "bos_token_id": 128000,
        "pad_token_id": -1,
        "max_new_tokens": 2048,
        "transformers_version": "4.45.0",
    }
    write(tmp_path, "generation_config.json", fields)
    write(tmp_path, "config.json", {"eos_token_id": 5})
    defaults = read_generation_defaults(tmp_path, tokenizer_eos_id=6)
    assert defaults == GenerationDefaults(
        sampling={
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.9,
            "min_p": 0.0,
            "repetition_penalty": 1.1,
        },
        do_sample=True,
        eos_token_ids=(128001, 128008, 128009, 5, 6),
        bos_token_id=128000,
        pad_token_id=None,
        max_new_tokens=2048,
    )
    assert not defaults.greedy


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "ends"),
    [
        ({}, {"eos_token_id": 0}, 6, (0, 6)),
        ({"eos_token_id": None}, {"eos_token_id": [3, 0]}, None, (3, 0)),
        ({"eos_token_id": 2}, {"eos_token_id": 1}, 7, (2, 1, 7)),
        ({"eos_token_id": [1, 106]}, {"eos_token_id": 1}, 106, (1, 106)),
        ({"eos_token_id": 2}, {"text_config": {"eos_token_id": [4]}}, None, (2, 4)),
        ({}, {"eos_token_id": None, "text_config": None}, None, ()),
    ],
)
def test_what_ends_a_sequence_is_what_any_file_says(tmp_path, generation, config, tokenizer, ends):
    write(tmp_path, "generation_config.json", generation)
    write(tmp_path, "config.json", config)
    found = read_generation_defaults(tmp_path, tokenizer_eos_id=tokenizer)
    assert found.eos_token_ids == ends


@pytest.mark.parametrize("value", [-1, [0, -1], "x", 1.5, True, {}])
@pytest.mark.parametrize("beside", [{}, {"eos_token_id": 5}])
@pytest.mark.parametrize("part", ["config", "text_config"])
def test_an_end_that_is_no_id_is_rejected_in_every_file(tmp_path, value, beside, part):
    write(tmp_path, "generation_config.json", beside)
    config = {"eos_token_id": value}
    write(tmp_path, "config.json", config if part == "config" else {"text_config": config})
    with pytest.raises(CheckpointError, match=r"config.json: eos_token_id is .* not a token id"):
        read_generation_defaults(tmp_path)


def defaults_of(folder, **values):
    write(folder, "generation_config.json", values)
    return read_generation_defaults(folder)


def test_what_the_engine_has_is_honoured(tmp_path):
    found = defaults_of(
        tmp_path,
        suppress_tokens=[7, 8, 7],
        bad_words_ids=[[9], [2]],
        sequence_bias=[[[4], -1.5], [[5], 100]],
        eos_token_id=2,
        min_new_tokens=3,
        min_length=4,
        max_length=50,
        stop_strings="end",
    )
    assert found.rejected is None
    assert found.banned_token_ids == (7, 8, 9)  # not the end, as in transformers
    assert found.logit_bias == {4: -1.5, 5: 100.0}
    assert (found.min_new_tokens, found.min_length, found.max_length) == (3, 4, 50)
    assert found.stop == ("end",)
    write(tmp_path, "generation_config.json", '{"sequence_bias": [[[4], -Infinity], [[5], 1]]}')
    found = read_generation_defaults(tmp_path)
    assert (found.banned_token_ids, found.logit_bias) == ((4,), {5: 1.0})
    assert defaults_of(tmp_path, stop_strings=["a", "b", "a"]).stop == ("a", "b")


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("begin_suppress_tokens", [220], "'begin_suppress_tokens' = [220]"),
        ("no_repeat_ngram_size", 3, "'no_repeat_ngram_size' = 3"),
        ("bad_words_ids", [[5], [1, 2]], "bad_words_ids of 2 tokens, [1, 2]"),
        ("sequence_bias", [[[1, 2, 3], 1.0]], "sequence_bias of 3 tokens"),
        ("sequence_bias", [[[1], 101]], "sequence_bias of 101"),
        ("suppress_tokens", list(range(1025)), "more than 1024 ids"),
        ("num_beams", 4, "'num_beams' = 4"),
        ("penalty_alpha", 0.6, "'penalty_alpha' = 0.6"),
        ("typical_p", 0.9, "'typical_p' = 0.9"),
        ("guidance_scale", 1.5, "'guidance_scale' = 1.5"),
        ("watermarking_config", {"bias": 2}, "'watermarking_config' = "),
        ("new_sampler", 1, "'new_sampler' = 1"),
        ("x" * 5000, 1, "'xxx"),
    ],
)
def test_what_it_does_not_have_is_rejected_by_name(tmp_path, key, value, shown):
    found = defaults_of(tmp_path, **{key: value})
    assert found.rejected is not None and shown in found.rejected
    assert "generation_config none" in found.rejected and len(found.rejected) < 600
    with pytest.raises(UnsupportedModelError):
        found.check()
    defaults_of(tmp_path, **{key: None}).check()
    assert (defaults_of(tmp_path, do_sample=False, **{key: value}).rejected is None) == (
        key in DRAWN
    )


def test_every_key_of_transformers_is_known(tmp_path):
    """Honoured, a label, or rejected unless it is off; a new release's keys are none of these."""
    transformers = pytest.importorskip("transformers")
    keys = vars(transformers.GenerationConfig())
    assert len(keys) > 60
    read = {
        "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample", "eos_token_id",
        "bos_token_id", "pad_token_id", "max_new_tokens", "min_new_tokens", "max_length",
        "min_length", "stop_strings", "suppress_tokens", "bad_words_ids", "sequence_bias",
    }  # fmt: skip
    for key in keys:
        is_label = any(fnmatch.fnmatchcase(key, label) for label in LABELS)
        assert (key in read) + (key in OFF) + is_label == 1, key
        if key not in read:
            assert (defaults_of(tmp_path, **{key: "surprise"}).rejected is None) == is_label
            for value in OFF.get(key, ()):
                assert defaults_of(tmp_path, **{key: value}).rejected is None


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "not a JSON object"),
        ("[" * 100_000, "not JSON"),
        ('{"temperature": NaN}', "temperature is nan, not a finite number"),
        ('{"temperature": Infinity}', "not a finite number"),
        ('{"temperature": ' + "9" * 400 + "}", r"temperature is 9{60}, not a finite number"),
        ('{"top_k": ' + "9" * 400 + "}", "at most 2147483647"),
        ({"eos_token_id": 2**40}, "token id"),
        ({"temperature": "hot"}, "not a finite number"),
        ({"temperature": True}, "not a finite number"),
        ({"temperature": -1}, r"temperature is -1, not at least 0\.$"),
        ({"top_p": 0}, r"top_p is 0, not above 0 and at most 1\.$"),
        ({"top_p": 1.5}, "at most 1"),
        ({"min_p": 2}, "at least 0 and at most 1"),
        ({"repetition_penalty": 0}, "above 0"),
        ({"top_k": 1.5}, "whole number"),
        ({"top_k": -1}, "whole number"),
        ({"do_sample": "yes"}, "true or false"),
        ({"eos_token_id": "2"}, "token id"),
        ({"eos_token_id": [2, -3]}, "token id"),
        ({"eos_token_id": [True]}, "token id"),
        ({"suppress_tokens": [-1]}, "suppress_tokens is .* not a token id"),
        ({"bad_words_ids": [5]}, "a list of lists of token ids"),
        ({"bad_words_ids": [[]]}, "a list of lists of token ids"),
        ({"sequence_bias": {"5": 1.0}}, "a list of pairs of token ids and a number"),
        ({"sequence_bias": [[[5], "1"]]}, "a list of pairs of token ids and a number"),
        ('{"sequence_bias": [[[5], NaN]]}', "a list of pairs of token ids and a number"),
        ({"stop_strings": [""]}, "texts that are not empty"),
        ({"stop_strings": 5}, "texts that are not empty"),
        ({"min_new_tokens": -1}, "whole number"),
        ({"max_length": "long"}, "whole number"),
    ],
)
def test_malformed_values(tmp_path, value, reason):
    write(tmp_path, "generation_config.json", value)
    with pytest.raises(CheckpointError, match=reason):
        read_generation_defaults(tmp_path)
