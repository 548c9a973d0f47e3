"""The tokenizer that training makes."""

import json
import re
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from rooflax.loading.tokenizer import Tokenizer
from rooflax.train.tokenizer_training import (
    END_OF_TEXT,
    MAX_TOKEN_LENGTH,
    save_tokenizer,
    train_tokenizer,
)
from tests.support.train import tiny

PYTHON = st.text("abcXYZ_019 \t\n\r()[]{}:=+-*/.,'\"#\\éß中\U0001f600", max_size=60)


@pytest.fixture(scope="session")
def large(documents):
    """With room for words."""
    return train_tokenizer(documents, 1200)


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


@settings(max_examples=300, deadline=None)
@given(text=st.one_of(st.text(max_size=80), PYTHON))
def test_any_text_comes_back(large, text):
    ids = encode(large, text).ids
    assert large.decode(ids, skip_special_tokens=False) == text
    assert END_OF_TEXT in text or 0 not in ids


@settings(max_examples=200, deadline=None)
@given(text=PYTHON)
def test_no_token_reaches_across_a_piece(large, text):
    """Letters follow one sign at most, digits stand alone, and nothing follows a line break but
    spaces."""
    for span in (text[a:b] for a, b in encode(large, text).offsets):
        if span.isascii() and span:
            assert re.fullmatch(r"[0-9]|[^\r\n0-9a-zA-Z]?[a-zA-Z]+|[^0-9a-zA-Z]+", span), span
            assert not re.search(r"[\r\n]\S", span), span


def test_size_and_first_ids(tokenizer, large):
    assert tokenizer.get_vocab_size() == tiny.VOCAB
    assert large.get_vocab_size() == 1200
    assert large.token_to_id(END_OF_TEXT) == tiny.SEPARATOR == 0
    assert sorted(large.get_vocab().values()) == list(range(1200))
    assert max(len(t) for t in large.get_vocab() if t != END_OF_TEXT) <= MAX_TOKEN_LENGTH


def test_all_bytes_are_there_even_without_text():
    bare = train_tokenizer([], 400)
    assert bare.get_vocab_size() == 257
    assert bare.decode(bare.encode("é\x00\t\U0001f600").ids) == "é\x00\t\U0001f600"


def test_the_same_text_gives_the_same_tokenizer(documents):
    assert train_tokenizer(documents[:20], 400).to_str() == (
        train_tokenizer(documents[:20], 400).to_str()
    )


@pytest.mark.parametrize("indent", ["    ", "        ", "            ", "\t"])
def test_indentation_is_a_token_but_for_what_belongs_to_the_name(indent):
    source = f"if a:\n{indent}b = 1\n{indent}c = 2\n\n{indent}d = 3\n" * 40
    trained = train_tokenizer([source], 320)
    pieces = [source[a:b] for a, b in trained.encode(source).offsets]
    assert {":\n", f"{indent[-1]}b"} <= set(pieces)
    assert indent[:-1] in {*pieces, ""}
    assert "\n\n" in pieces


def test_indentation_of_real_text(large):
    source = "class A:\n    def f(self):\n        return self.x\n"
    pieces = [source[a:b] for a, b in large.encode(source).offsets]
    assert {":\n", "   ", "       ", " return"} <= set(pieces)


def test_digits_stand_alone(large):
    assert len(large.encode("1234567890").ids) == 10


def test_nothing_is_added(large):
    plain = large.encode("x = 1", add_special_tokens=False).ids
    assert large.encode("x = 1", add_special_tokens=True).ids == plain


@pytest.fixture(scope="session")
def saved(large, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "new" / "folder"
    save_tokenizer(large, folder, model_max_length=77)
    return folder


SAMPLES = [
    "def f(x):\n    return x + 1\n",
    "class A:\n\tpass\r\n\r\n  # é中\U0001f600\n",
    "  leading and trailing  \n\n\n",
    "a , b . c ! don't",  # what clean_up_tokenization_spaces would change
    "",
    "x" * 100 + "-" * 100 + "1" * 20,
    f"one{END_OF_TEXT}two",
]


def test_saved_files(saved, large):
    assert {path.name for path in saved.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    config = json.loads((saved / "tokenizer_config.json").read_text())
    assert (config["model_max_length"], config["eos_token"]) == (77, END_OF_TEXT)
    assert Backend.from_file(str(saved / "tokenizer.json")).to_str() == large.to_str()


def test_our_reader_gives_the_same_ids(saved, large):
    read = Tokenizer(saved)
    assert (read.eos_id, read.bos_id, read.vocab_size) == (0, None, 1200)
    for text in SAMPLES:
        assert read.encode(text) == large.encode(text).ids
        assert read.decode(read.encode(text), skip_special_tokens=False) == text


def test_transformers_gives_the_same_ids(saved, large, documents):
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoTokenizer.from_pretrained(saved)
        assert theirs.eos_token_id == 0
        assert theirs.bos_token_id is None
        for text in [*SAMPLES, *documents[:20]]:
            ids = theirs(text)["input_ids"]
            assert ids == large.encode(text).ids
            assert theirs.decode(ids) == text
