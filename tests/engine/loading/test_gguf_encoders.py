"""GGUF files of encoders, by llama.cpp's own converter, are the checkpoints that they were made
from."""

import numpy as np
import pytest

from rooflax import LLM
from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.loading.gguf import open_gguf
from rooflax.loading.gguf_save import save_gguf
from rooflax.loading.gguf_tokenizer import read_gguf_tokenizer
from rooflax.loading.model_info import model_info
from rooflax.loading.pooling import gguf_pooling
from rooflax.loading.tokenizer import Tokenizer
from tests import gguf_encoder_cases as cases
from tests import tokenizer_cases

TEXTS = [
    "def f(x): return x+1", "the model, and its Words café", "x", "wide \uff21 \ufb01ne\u3000space",
]  # fmt: skip


class Changed:
    """A file with other metadata or tensors."""

    def __init__(self, name, without=(), **metadata):
        self._file = open_gguf(cases.kept(name))
        self.path, self.metadata = self._file.path, dict(self._file.metadata)
        self.metadata |= {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
        self.metadata = {k: v for k, v in self.metadata.items() if v is not None}
        self._without = without

    def names(self):
        return [name for name in self._file.names() if name not in self._without]

    def info(self, name):
        return self._file.info(name)

    def read(self, name):
        return self._file.read(name)


@pytest.mark.parametrize("name", cases.CASES)
def test_a_file_is_its_checkpoint(name, tmp_path):
    """Token ids of texts and pairs, and vectors or scores."""
    folder = cases.write(tmp_path / name, name)
    ours, theirs = Tokenizer(open_gguf(cases.kept(name))).backend, Tokenizer(folder).backend
    pairs = [(a, b) for a in TEXTS for b in TEXTS]
    for text in (*TEXTS, *tokenizer_cases.TEXTS, *pairs):
        one, other = (b.encode(*text) if type(text) is tuple else b.encode(text)
                      for b in (ours, theirs))  # fmt: skip
        if type(text) is tuple and name == "modernbert":
            continue  # its kind of files has no pairs
        assert one.ids == other.ids
        assert type(text) is str or name == "xlm_roberta" or one.type_ids == other.type_ids
    file, checkpoint = LLM(cases.kept(name)), LLM(folder)
    if cases.CASES[name][1]:
        np.testing.assert_allclose(file.embed(TEXTS), checkpoint.embed(TEXTS), atol=1e-6)
    else:
        both = (model.rerank(TEXTS[0], TEXTS) for model in (file, checkpoint))
        np.testing.assert_allclose(*both, atol=1e-6)


def test_files_of_other_encoders_are_berts():
    info = model_info(cases.kept("xlm_roberta"))
    assert (info.family, info.config.first_position, info.config.token_types) == ("bert", 0, 1)
    assert info.config.max_position == 129  # less the rows that no token reads


def test_an_older_file_names_first_and_last_tokens_by_custom():
    """As converters of 2024 wrote BERT's: [CLS] is 101 where nothing says so, and no flags."""
    keys = ("bos_token_id", "eos_token_id", "add_bos_token", "add_eos_token")
    old = Changed("bert", **dict.fromkeys((*keys, "normalizer.lowercase")))
    with pytest.raises(CheckpointError, match="names no first and last token"):
        read_gguf_tokenizer(old)
    named = Changed("bert", cls_token_id=2, bos_token_id=None, **dict.fromkeys(keys[1:]))
    backend, special, _ = read_gguf_tokenizer(named)
    assert backend.encode("X").ids == cases.tokenizer("wordpiece").encode("x").ids
    assert special["sep_token"] == "[SEP]"


def test_case_and_accents_stay_where_the_file_says_so():
    backend, _, _ = read_gguf_tokenizer(Changed("bert", **{"normalizer.lowercase": False}))
    assert backend.normalizer.normalize_str("Café") == "Café"
    both = {"normalizer.lowercase": True, "normalizer.strip_accents": False}
    backend, _, _ = read_gguf_tokenizer(Changed("bert", **both))
    assert backend.normalizer.normalize_str("Café") == "café"


def test_an_encoder_without_a_pooling_gives_the_mean():
    file = Changed("bert")
    del file.metadata["bert.pooling_type"]
    assert gguf_pooling(file).pooler.kind == "mean"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": []}, "unknown_token_id = 3, but 0 tokens|has tokens, types and scores"),
        ({"unknown_token_id": 10**6, "token_type": np.ones(202, np.int32)}, "unknown pieces"),
        ({"precompiled_charsmap": np.array([255, 255], np.uint8)}, "damaged precompiled_charsmap"),
        ({"scores": np.full(202, np.nan)}, "scores that are not finite"),
    ],
)
def test_damaged_tokenizers_are_one_sentence(change, said):
    with pytest.raises(CheckpointError, match=said):
        read_gguf_tokenizer(Changed("xlm_roberta", **change))


def test_heads_of_several_labels_and_other_poolings_are_rejected():
    file = Changed("xlm_roberta")
    file.metadata["bert.embedding_length"] = 23
    with pytest.raises(UnsupportedModelError, match="not of a head with one label"):
        gguf_pooling(file)
    file = Changed("xlm_roberta")
    file.metadata["bert.classifier.pooling_type"] = 4
    with pytest.raises(UnsupportedModelError, match="behind the pooling 4"):
        gguf_pooling(file)


def test_encoders_are_not_written(tmp_path):
    info = model_info(cases.write(tmp_path / "bert", "bert"))
    with pytest.raises(UnsupportedModelError, match="writes no GGUF files of bert"):
        save_gguf(info, tmp_path / "x.gguf", "F32")


def test_a_head_whose_first_layer_is_left_out_is_rejected():
    """As the converter does with BERT's pooler."""
    with pytest.raises(UnsupportedModelError, match=r"without cls\.weight"):
        gguf_pooling(Changed("xlm_roberta", without=("cls.weight", "cls.bias")))
