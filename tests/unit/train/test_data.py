"""Token files and packed rows."""

import contextlib
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from rooflax.errors import CheckpointError, RequestError
from rooflax.loading.model_info import embedded_folder
from rooflax.loading.tokenizer import Tokenizer
from rooflax.train.data import (
    STARTS,
    TRAINED,
    Encoded,
    Rows,
    encode_texts,
    open_corpus,
    separator_of,
)
from rooflax.train.data import write_corpus as write_encoded
from tests.support.disk import FULL, Disk, Killed
from tests.support.train import tiny

END = 9  # the separator in hand-written rows


def batch_of(*rows):
    return tiny.pack_separated(np.array(rows, np.int32), END)


def test_one_row_by_hand():
    batch = batch_of([1, 2, END, 3, END, END, 4, 5, 6])
    assert batch.tokens.tolist() == [[1, 2, END, 3, END, END, 4, 5]]
    assert batch.targets.tolist() == [[2, END, 3, END, END, 4, 5, 6]]
    assert batch.segment_ids.tolist() == [[0, 0, 0, 1, 1, 2, 3, 3]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 0, 1]]
    # The end of a document is predicted; what follows it is another document's.
    assert batch.mask.tolist() == [[1, 1, 0, 1, 0, 0, 1, 1]]


def test_types():
    batch = batch_of([1, 2, 3], [4, END, 5])
    kinds = {name: str(array.dtype) for name, array in batch._asdict().items()}
    assert kinds == {
        "tokens": "int32", "targets": "int32", "mask": "float32", "positions": "int32",
        "segment_ids": "int32",
    }  # fmt: skip
    assert {array.shape for array in batch} == {(2, 2)}


def test_rows_against_a_loop():
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 4, (50, 24)).astype(np.int32)
    batch = tiny.pack_separated(rows, 0)
    for row, *found in zip(rows, *batch, strict=True):
        tokens, targets, mask, positions, segments = found
        segment = position = 0
        for i in range(23):
            assert (tokens[i], targets[i]) == (row[i], row[i + 1])
            assert (positions[i], segments[i]) == (position, segment)
            assert mask[i] == (row[i] != 0)
            position += 1
            if row[i] == 0:
                segment, position = segment + 1, 0


def write_corpus(path, texts, tokenizer, separator):
    encoded = encode_texts(texts, tokenizer, separator)
    return write_encoded(path, encoded, tokenizer.get_vocab_size())


def counting_corpus(size):
    """Token i is the number i + 1, so that a row says where it was cut."""
    return tiny.corpus_of(np.arange(1, size + 1), "uint32")


def starts(batch):
    return [int(row[0]) - 1 for row in batch.tokens]


@pytest.mark.parametrize(
    ("size", "seq_len"), [(1000, 16), (1001, 10), (32, 16), (47, 16), (48, 16)]
)
def test_every_row_once_per_epoch(size, seq_len):
    rows = Rows(counting_corpus(size), seq_len, seed=3)
    assert rows.num_rows == size // seq_len - 1
    offsets, orders = set(), set()
    for epoch in range(4):
        numbers = range(epoch * rows.num_rows, (epoch + 1) * rows.num_rows)
        found = [starts(rows.batch(number, 1))[0] for number in numbers]
        offset = min(found)
        assert offset < seq_len
        assert sorted(found) == [offset + i * seq_len for i in range(rows.num_rows)]
        assert max(found) + seq_len < size  # the last target exists
        offsets.add(offset)
        orders.add(tuple(f - offset for f in found))
    assert len(offsets) > 1
    assert rows.num_rows < 5 or len(orders) == 4


def test_a_batch_may_lie_across_epochs():
    rows = Rows(counting_corpus(200), 16, seed=1)  # 11 rows
    one_by_one = [starts(rows.batch(number, 1))[0] for number in range(40)]
    by_four = [start for step in range(10) for start in starts(rows.batch(step, 4))]
    assert by_four == one_by_one


def test_rows_are_a_function_of_seed_and_step():
    corpus = counting_corpus(3000)
    rows = Rows(corpus, 16, seed=5)
    steps = [rows.batch(step, 8) for step in range(120)]  # more than five epochs
    for step in (119, 0, 60, 1, 118, 23):  # fresh, and in any order
        for got, wanted in zip(Rows(corpus, 16, seed=5).batch(step, 8), steps[step], strict=True):
            np.testing.assert_array_equal(got, wanted)
    again = Rows(corpus, 16, seed=5)
    for step in reversed(range(120)):
        np.testing.assert_array_equal(again.batch(step, 8).tokens, steps[step].tokens)
    assert starts(Rows(corpus, 16, seed=6).batch(0, 8)) != starts(steps[0])


def test_the_order_is_the_same_on_every_machine():
    rows = Rows(counting_corpus(200), 16, seed=7)
    found = [start for step in range(3) for start in starts(rows.batch(step, 4))]
    assert found == [79, 111, 175, 15, 31, 63, 143, 127, 47, 95, 159, 173]


@pytest.mark.parametrize("size", [0, 1, 16, 31])
def test_a_corpus_too_short_for_a_row(size):
    with pytest.raises(RequestError, match=rf"has {size} tokens; rows of 16 need at least 32:"):
        Rows(counting_corpus(size), 16)
    assert Rows(counting_corpus(32), 16).num_rows == 1


def test_held_out_batches_are_spread_evenly():
    rows = Rows(counting_corpus(16 * 41), 16)  # 40 rows
    batches = list(rows.spread(2, 4))
    assert [s // 16 for batch in batches for s in starts(batch)] == [0, 5, 10, 15, 20, 25, 30, 35]
    assert all(batch.mask.all() for batch in batches)
    again = list(Rows(counting_corpus(16 * 41), 16, seed=9).spread(2, 4))
    for first, second in zip(batches, again, strict=True):
        np.testing.assert_array_equal(first.tokens, second.tokens)


def test_all_held_out_rows_once_and_the_rest_masked():
    rows = Rows(counting_corpus(16 * 12), 16)  # 11 rows
    batches = list(rows.spread(None, 4))
    assert [batch.tokens.shape for batch in batches] == [(4, 16)] * 3
    kept = [batch.mask.any(axis=1).tolist() for batch in batches]
    assert kept == [[True] * 4, [True] * 4, [True] * 3 + [False]]
    found = [s for batch in batches for s in starts(batch)][:11]
    assert found == [i * 16 for i in range(11)]


def test_more_held_out_batches_than_rows():
    rows = Rows(counting_corpus(16 * 4), 16)  # 3 rows
    batches = list(rows.spread(8, 2))
    assert len(batches) == 2
    assert sum(int(batch.mask.sum()) for batch in batches) == 3 * 16


def fake_tokenizer(size):
    """Ids are the text's code points."""
    return SimpleNamespace(
        get_vocab_size=lambda: size,
        encode_batch=lambda texts: [SimpleNamespace(ids=[ord(c) for c in text]) for text in texts],
    )


@pytest.mark.parametrize(
    ("size", "dtype"), [(300, "uint16"), (65536, "uint16"), (65537, "uint32"), (200_000, "uint32")]
)
def test_the_narrowest_type_that_holds_every_id(tmp_path, size, dtype):
    largest = min(size - 1, 0x10FFFF)
    text = "ab" + chr(largest if not 0xD800 <= largest < 0xE000 else 0xFFFF)
    info = write_corpus(tmp_path / "a.bin", ["x", text], fake_tokenizer(size), 3)
    corpus = open_corpus(tmp_path / "a.bin")
    assert info == corpus.info
    assert (corpus.tokens.dtype, info.dtype) == (np.dtype(dtype), dtype)
    assert corpus.tokens.tolist() == [ord("x"), 3, *map(ord, text), 3]
    size_in_file = (tmp_path / "a.bin").stat().st_size
    assert size_in_file == 6 * np.dtype(dtype).itemsize


def test_every_document_ends_with_the_separator(tmp_path, tokenizer):
    texts = [f"def f{i}():\n    return '{'é' * (i % 5)}'\n" for i in range(600)]  # several chunks
    info = write_corpus(tmp_path / "a.bin", iter(texts), tokenizer, tiny.SEPARATOR)
    tokens = open_corpus(tmp_path / "a.bin").tokens
    ends = np.flatnonzero(tokens == tiny.SEPARATOR)
    assert len(ends) == info.num_documents == 600
    pieces = np.split(tokens, ends + 1)
    assert pieces.pop().size == 0
    assert [tokenizer.decode(piece[:-1].tolist()) for piece in pieces] == texts
    assert info.num_tokens == tokens.size
    assert info.num_bytes == sum(len(text.encode()) for text in texts)
    assert {path.name for path in tmp_path.iterdir()} == {"a.bin", "a.bin.flags", "a.bin.json"}


def test_bits_per_byte(tmp_path):
    write_corpus(tmp_path / "a.bin", ["abc", "é"], fake_tokenizer(300), 0)
    corpus = open_corpus(tmp_path / "a.bin")
    # 4 characters and 2 separators for 5 bytes; ln 2 nats are one bit.
    assert corpus.bits_per_byte(math.log(2)) == pytest.approx(6 / 5)


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.bin"
    write_corpus(path, ["abc"], fake_tokenizer(300), 0)

    def texts():
        yield "x" * 1000
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_corpus(path, texts(), fake_tokenizer(300), 0)
    assert open_corpus(path).tokens.tolist() == [97, 98, 99, 0]


@pytest.mark.parametrize("error", [FULL, Killed()], ids=["full", "killed"])
def test_a_write_that_ends_anywhere_leaves_a_corpus_or_one_that_is_rejected(tmp_path, error):
    """The tokens, their flags and their description are three files; they are not mixed."""
    old, new = ["abc", "d"], ["x", "yzw"]  # as many tokens, and other flags
    for fail_at in range(1, 40):
        path = tmp_path / str(fail_at) / "a.bin"
        path.parent.mkdir()
        write_corpus(path, old, fake_tokenizer(300), 0)
        disk = Disk(path.parent, fail_at, error)
        with disk.watched(), contextlib.suppress(OSError, Killed):
            write_corpus(path, new, fake_tokenizer(300), 0)
        try:
            tokens = open_corpus(path).tokens.tolist()
        except CheckpointError:
            tokens = None
        assert tokens in (None, [97, 98, 99, 0, 100, 0], [120, 0, 121, 122, 119, 0])
        if tokens is not None:
            starts = np.flatnonzero(open_corpus(path).flags & STARTS).tolist()
            assert starts == ([0, 4] if tokens[0] == 97 else [0, 2]), disk.calls
        if not disk.has_failed:
            break
    assert fail_at > 12 and tokens is not None


class TestDamagedFiles:
    @pytest.fixture
    def path(self, tmp_path):
        path = tmp_path / "a.bin"
        write_corpus(path, ["abcdefgh"], fake_tokenizer(300), 0)
        return path

    def rejected(self, path, match):
        with pytest.raises(CheckpointError, match=match) as caught:
            open_corpus(path)
        assert "\n" not in str(caught.value)

    def test_missing(self, path):
        path.unlink()
        self.rejected(path, "cannot open the token file")

    def test_without_description(self, path):
        path.with_name("a.bin.json").unlink()
        self.rejected(path, r"cannot open the token file .*a\.bin\.json")

    def test_truncated(self, path):
        path.write_bytes(path.read_bytes()[:-4])
        self.rejected(path, r"a\.bin holds 7 tokens, but a\.bin\.json says 9; write it again")

    def test_empty(self, path):
        path.write_bytes(b"")
        self.rejected(path, "cannot open the token file")

    @pytest.mark.parametrize(
        "text", ["", "{", "[]", "3", "{}", '{"dtype": "uint16"}', "[" * 100_000],
        ids=lambda text: text[:10] or "nothing",
    )  # fmt: skip
    def test_description_that_is_none(self, path, text):
        path.with_name("a.bin.json").write_text(text)
        self.rejected(path, "cannot open the token file")

    @pytest.mark.parametrize("dtype", ["int16", "float16", "object", "int64", "no such", 7, None])
    def test_types_that_no_corpus_has(self, path, dtype):
        note = path.with_name("a.bin.json")
        note.write_text(json.dumps(json.loads(note.read_text()) | {"dtype": dtype}))
        self.rejected(path, "cannot open the token file")


class Vocabulary:
    """Ids by name; as `loading.tokenizer.Tokenizer`, as far as it is asked."""

    def __init__(self, *names, special=None):
        self.eos_id, self.token_to_id = 0, dict(zip(names, range(len(names)), strict=True)).get
        self.special_token_ids = frozenset(range(len(names)) if special is None else special)


def test_documents_are_separated_by_what_ends_no_turn_of_a_chat():
    assert separator_of(Vocabulary("<|im_end|>", "a", "<|endoftext|>")) == 2
    assert separator_of(Vocabulary("<|eot_id|>", "<|end_of_text|>")) == 1
    assert separator_of(Vocabulary("<end>", "a")) == 0
    # Gemma's: a tag of HTML is an ordinary token.
    assert separator_of(Vocabulary("<eos>", "</s>", special={0})) == 0
    assert separator_of(Vocabulary("<end_of_turn>", "</s>", "<eos>", special={0, 2})) == 2
    assert separator_of(Vocabulary("</s>", "<|endoftext|>")) == 0
    without = Vocabulary("a", "</s>", special=())
    without.eos_id = None
    assert separator_of(without) == 1


def test_documents_end_where_they_end_whatever_they_hold(tmp_path):
    """A text may hold the token that ends it; one that ends with it gets no second one."""
    tokenizer = Tokenizer(embedded_folder())
    end = separator_of(tokenizer)
    texts = ["one<|endoftext|>two", "three<|endoftext|>", ""]
    write_corpus(tmp_path / "c.bin", texts, tokenizer.backend, end)
    corpus = open_corpus(tmp_path / "c.bin")
    ids = [*(tokenizer.encode(text) for text in texts)]
    assert corpus.tokens.tolist() == [*ids[0], end, *ids[1], end]
    starts = [0, len(ids[0]) + 1, corpus.tokens.size - 1]
    assert np.flatnonzero(corpus.flags & STARTS).tolist() == starts
    assert (corpus.flags & TRAINED).all()


def test_documents_begin_as_prompts_do(tmp_path, write_folder):
    """With the tokenizer's BOS: it is an input of training as it is one of generate."""
    tokenizer = Tokenizer(write_folder(tmp_path / "tokenizer", "llama3"))
    write_corpus(tmp_path / "c.bin", ["hello"], tokenizer.backend, tokenizer.eos_id)
    ids = open_corpus(tmp_path / "c.bin").tokens.tolist()
    assert ids == [*tokenizer.encode("hello"), tokenizer.eos_id]
    assert ids[0] == tokenizer.bos_id


def whole_corpus(tmp_path, documents, trained=None):
    """Documents of ids that a row holds whole."""
    encoded = [Encoded(ids, None if trained is None else trained[n], len(ids))
               for n, ids in enumerate(documents)]  # fmt: skip
    write_encoded(tmp_path / "w.bin", encoded, 300, is_whole=True)
    return open_corpus(tmp_path / "w.bin")


def test_whole_documents_are_never_cut(tmp_path):
    rng = np.random.default_rng(2)
    documents = [[n + 1] * int(length) for n, length in enumerate(rng.integers(2, 18, 60))]
    corpus = whole_corpus(tmp_path, documents)
    rows = Rows(corpus, 16, seed=4)
    room = 17  # the last target of a row is no input
    assert rows.num_rows < 1.1 * len(corpus.tokens) / room  # few are filled up
    for epoch in range(2):
        seen = []
        for number in range(rows.num_rows):
            batch = rows.batch(epoch * rows.num_rows + number, 1)
            (ids,) = np.concatenate([batch.tokens, batch.targets[:, -1:]], axis=1)
            found = [n for n in dict.fromkeys(ids.tolist()) if n]
            assert [ids.tolist().count(n) for n in found] == [len(documents[n - 1]) for n in found]
            assert batch.mask.sum() == sum(len(documents[n - 1]) - 1 for n in found)
            seen += found
        assert sorted(seen) == list(range(1, 61))


def test_masks_and_filling_train_nothing(tmp_path):
    corpus = whole_corpus(
        tmp_path, [[1, 2, 3, 4], [5, 6, 7]], [[False, False, True, True], [True, False, True]]
    )
    assert corpus.info.num_trained == 4
    batch = Rows(corpus, 8).batch(0, 1)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7, 0]]
    assert batch.mask.tolist() == [[0, 1, 1, 0, 0, 1, 0, 0]]
    assert batch.segment_ids.tolist() == [[0, 0, 0, 0, 1, 1, 1, 2]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]


def test_a_whole_document_longer_than_a_row(tmp_path):
    corpus = whole_corpus(tmp_path, [[1] * 17, [2] * 18])
    with pytest.raises(RequestError, match="has 18 tokens; rows have room for 17: raise seq_len"):
        Rows(corpus, 16)
