"""One tokenizer and two corpora for all tests here."""

from itertools import pairwise

import pytest

from rooflax.train.data import encode_texts, open_corpus, write_corpus
from rooflax.train.tokenizer_training import train_tokenizer
from tests.support.train import tiny


@pytest.fixture(scope="session")
def documents():
    """Real text, cut into documents of unequal length."""
    text = tiny.TEXT.read_text(encoding="utf-8")
    cuts = [0]
    while cuts[-1] < 60_000:
        cuts.append(cuts[-1] + 37 + 911 * len(cuts) % 1301)
    return [text[a:b] for a, b in pairwise(cuts)]


@pytest.fixture(scope="session")
def tokenizer(documents):
    return train_tokenizer(documents, tiny.VOCAB)


@pytest.fixture(scope="session")
def corpora(tmp_path_factory, tokenizer, documents):
    """(training, held-out), as files."""
    folder = tmp_path_factory.mktemp("corpora")
    parts = {"training.bin": documents[:-9], "held_out.bin": documents[-9:]}
    for name, part in parts.items():
        texts = encode_texts(part, tokenizer, tiny.SEPARATOR)
        write_corpus(folder / name, texts, tiny.VOCAB)
    return tuple(open_corpus(folder / name) for name in parts)
