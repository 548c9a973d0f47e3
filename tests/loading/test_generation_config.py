"""generation_config.json: its defaults, every end-of-sequence id, and malformed values."""

import json

import pytest

from rooflax.errors import CheckpointError
from rooflax.loading.generation_config import GenerationDefaults, read_generation_defaults

pytestmark = pytest.mark.unit


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
        eos_token_ids=(128001, 128008, 128009),
        bos_token_id=128000,
        pad_token_id=None,
        max_new_tokens=2048,
    )
    assert not defaults.greedy


def test_eos_of_config_json_where_the_other_is_silent(tmp_path):
    write(tmp_path, "generation_config.json", {"temperature": 1.0, "eos_token_id": None})
    write(tmp_path, "config.json", {"eos_token_id": 0})
    assert read_generation_defaults(tmp_path, tokenizer_eos_id=6).eos_token_ids == (0,)


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
    ],
)
def test_malformed_values(tmp_path, value, reason):
    write(tmp_path, "generation_config.json", value)
    with pytest.raises(CheckpointError, match=reason):
        read_generation_defaults(tmp_path)
