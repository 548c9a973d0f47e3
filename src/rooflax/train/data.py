"""From documents to training batches: a file of token ids, packed into rows.

A second file says of each token whether a document begins with it, and whether it is trained.
Which rows a step sees is a pure function of (seed, step), so that resuming needs nothing but the
step's number. This module knows token ids, no model and no jax.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rooflax.errors import CheckpointError, RequestError
from rooflax.files import open_regular, read_regular, replacing
from rooflax.loading.tokenizer_folder import library_errors

ENCODE_AT_ONCE = 256  # documents
DTYPES = ("uint16", "uint32")


STARTS, TRAINED = 1, 2
"""Bits of a token's flags: a document begins with it; it is a target."""


class Encoded(NamedTuple):
    """A document as tokens.

    Attributes:
        trained: whether each token is a target; None is all of them. The first one never is: no
            token is before it.
        num_bytes: UTF-8 bytes of the text that trained tokens stand for.
    """

    ids: Sequence[int]
    trained: Sequence[bool] | None
    num_bytes: int


@dataclass(frozen=True)
class CorpusInfo:
    """Counts and types of a token file.

    Attributes:
        dtype: "uint16" or "uint32".
        num_tokens: all of them.
        num_trained: those that are targets.
        num_bytes: UTF-8 bytes of the text that these stand for.
        is_whole: a row holds whole documents, so that none is cut; else rows are cut anywhere.
    """

    dtype: str
    num_tokens: int
    num_trained: int
    num_documents: int
    num_bytes: int
    is_whole: bool = False


@dataclass(frozen=True)
class Corpus:
    """Token ids of many documents and their flags, memory-mapped."""

    tokens: np.ndarray
    flags: np.ndarray
    info: CorpusInfo

    def bits_per_byte(self, loss: float) -> float:
        """A mean loss in nats per token, as bits per byte of text."""
        return loss * (self.info.num_trained / max(self.info.num_bytes, 1)) / math.log(2)


class PackedBatch(NamedTuple):
    """Rows of packed documents.

    Attributes:
        tokens, targets: [rows, seq] int32; targets[i] follows tokens[i] in the corpus.
        mask: [rows, seq] float32; 0 where the target belongs to another document or is untrained.
        positions: [rows, seq] int32, from 0 in each document.
        segment_ids: [rows, seq] int32, from 0 in each row, one more at each document.
    """

    tokens: Any
    targets: Any
    mask: Any
    positions: Any
    segment_ids: Any


SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


def separator_of(tokenizer: Any) -> int:
    """The id to put between documents.

    It is the end-of-sequence token if that ends texts and no turn of a chat, else a special token
    that does, else the end-of-sequence token, else any token that ends texts by its name. (In
    Gemma's vocabulary "</s>" is a tag of HTML.)

    Args:
        tokenizer: a `loading.tokenizer.Tokenizer`.

    Raises:
        RequestError: there is neither.
    """
    ids, separator = [tokenizer.token_to_id(name) for name in SEPARATORS], tokenizer.eos_id
    if separator is None or separator not in ids:
        special = tokenizer.special_token_ids
        separator = next((token for token in ids if token in special), separator)
    if separator is None:
        separator = next((token for token in ids if token is not None), None)
    if separator is None:
        raise RequestError(
            f"the tokenizer in {tokenizer.folder} has no end-of-sequence token to put "
            f"between documents; name one as eos_token in its tokenizer_config.json."
        )
    return separator


def encode_texts(texts: Iterable[str], tokenizer: Any, separator: int) -> Iterator[Encoded]:
    """Texts as `generate` encodes a prompt, BOS included, each ended by the separator.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.

    Raises:
        CheckpointError: the tokenizer fails on a text; those before it are there already.
    """
    for chunk in _chunks(texts, ENCODE_AT_ONCE):
        for text, encoding in zip(chunk, _encodings(chunk, tokenizer), strict=True):
            ids = encoding.ids
            if not ids or ids[-1] != separator:
                ids = [*ids, separator]
            yield Encoded(ids, None, len(text.encode("utf-8")))


def _encodings(texts: list[str], tokenizer: Any) -> Iterator[Any]:
    failure = "the tokenizer cannot encode this text"
    try:
        with library_errors(failure):
            encodings = tokenizer.encode_batch(texts)
    except CheckpointError:  # of one of them
        for text in texts:
            with library_errors(failure):
                encoding = tokenizer.encode(text)
            yield encoding
    else:
        yield from encodings


def write_corpus(
    path: Path, documents: Iterable[Encoded], vocab_size: int, *, is_whole: bool = False
) -> CorpusInfo:
    """Writes `path` and `path`.flags, and describes them in `path`.json, which is written last.

    Args:
        vocab_size: more than every id.
        is_whole: rows shall hold whole documents.
    """
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    counts = {"num_tokens": 0, "num_trained": 0, "num_documents": 0, "num_bytes": 0}
    with replacing(path) as file, replacing(_flags_path(path)) as flags_file:
        for ids, trained, num_bytes in documents:
            flags = np.full(len(ids), TRAINED, np.uint8)
            if trained is not None:
                flags *= np.asarray(trained, np.uint8)
            counts["num_trained"] += int(np.count_nonzero(flags))
            flags[0] |= STARTS
            file.write(np.asarray(ids, dtype).tobytes())
            flags_file.write(flags.tobytes())
            counts["num_tokens"] += len(ids)
            counts["num_documents"] += 1
            counts["num_bytes"] += num_bytes
        _info_path(path).unlink(missing_ok=True)  # it does not describe what comes now
    info = CorpusInfo(dtype=dtype, is_whole=is_whole, **counts)
    _info_path(path).write_text(json.dumps(asdict(info), indent=2) + "\n", encoding="utf-8")
    return info


def open_corpus(path: Path) -> Corpus:
    """Opens what `write_corpus` wrote.

    Raises:
        CheckpointError: the file or its description is missing, or they disagree.
    """
    try:
        info = _info(json.loads(read_regular(_info_path(path))))
        open_regular(path).close()
        open_regular(_flags_path(path)).close()
        tokens = np.memmap(path, np.dtype(info.dtype), "r")
        flags = np.memmap(_flags_path(path), np.uint8, "r")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot open the token file {path}: {error}.") from None
    for file, size in ((path, tokens.size), (_flags_path(path), flags.size)):
        if size != info.num_tokens:
            raise CheckpointError(
                f"{file} holds {size} tokens, but {_info_path(path).name} says "
                f"{info.num_tokens}; write it again."
            )
    return Corpus(tokens, flags, info)


def _info(raw: Any) -> CorpusInfo:
    """The description of a token file.

    Raises:
        ValueError: a value is missing or cannot be.
    """
    if not isinstance(raw, dict):
        raise ValueError("its description is no JSON object")
    values = {"is_whole": False} | raw
    for each in fields(CorpusInfo):
        value = values.pop(each.name, None)
        if type(value).__name__ != each.type:
            raise ValueError(f"its {each.name} is {value!r:.60}, and must be of type {each.type}")
    if values:
        raise ValueError(f"its description has {min(values)!r:.60}, which means nothing")
    if raw["dtype"] not in DTYPES:
        raise ValueError(f"its dtype is {raw['dtype']!r:.60}, not one of {', '.join(DTYPES)}")
    return CorpusInfo(**raw)


class Rows:
    """A corpus in rows of `seq_len` inputs and their targets, shuffled anew each epoch.

    Where documents may be cut, each epoch cuts at another offset, so that no document is always
    broken at the same place. Where they stay whole, each row holds what fits.

    Args:
        called: what a sentence calls the corpus.

    Raises:
        RequestError: the corpus is too short for one row, or a whole document too long.
    """

    def __init__(self, corpus: Corpus, seq_len: int, seed: int = 0, *, called: str = "corpus"):
        self.corpus, self.seq_len, self.seed = corpus, seq_len, seed
        self._whole: list[list[tuple[int, int]]] = []
        if corpus.info.is_whole:
            starts = np.flatnonzero(corpus.flags & STARTS)
            self._whole = self._fit(starts, np.diff(starts, append=corpus.tokens.size))
            self.num_rows = len(self._whole)
        else:
            self.num_rows = (corpus.tokens.size - seq_len) // seq_len
        if self.num_rows < 1:
            raise RequestError(
                f"the {called} has {corpus.tokens.size} tokens; rows of {seq_len} need at least "
                f"{2 * seq_len}: give more text, a smaller seq_len, or another held_out_fraction."
            )
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def _fit(self, starts: np.ndarray, lengths: np.ndarray) -> list[list[tuple[int, int]]]:
        return fit(starts, lengths, self.seq_len + 1)

    def batch(self, step: int, batch_size: int) -> Any:
        """The rows of step `step`, counted from 0: a pure function of (seed, step)."""
        return self._pack(self.numbers(step, batch_size))

    def numbers(self, step: int, batch_size: int) -> list[tuple[int, int]]:
        """The rows of a step by number, with the offset at which they are cut."""
        rows = []
        for number in range(step * batch_size, (step + 1) * batch_size):
            epoch, index = divmod(number, self.num_rows)
            order, offset = self._epoch(epoch)
            rows.append((int(order[index]), offset))
        return rows

    def spread(self, num_batches: int | None, batch_size: int) -> Iterator[Any]:
        """Batches spread evenly over the corpus, in order, the same each time (for evaluation).

        Args:
            num_batches: None takes every row; the last batch is filled up with masked rows.
        """
        wanted = self.num_rows if num_batches is None else num_batches * batch_size
        wanted = min(wanted, self.num_rows)
        rows = [(index * self.num_rows // wanted, 0) for index in range(wanted)]
        for first in range(0, wanted, batch_size):
            batch = rows[first : first + batch_size]
            missing = batch_size - len(batch)
            yield self._pack(batch + [(0, 0)] * missing, missing)

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, int]:
        rng = np.random.default_rng((self.seed, epoch))
        offset = int(rng.integers(self.seq_len))
        return rng.permutation(self.num_rows), offset

    def _pack(self, rows: list[tuple[int, int]], missing: int = 0) -> Any:
        """The rows of some numbers, each cut at an offset; the last ones masked."""
        ids = np.zeros((len(rows), self.seq_len + 1), np.int32)
        flags = np.full(ids.shape, STARTS, np.uint8)  # what stays empty is nobody's
        for row, (number, offset) in enumerate(rows):
            start = number * self.seq_len + offset
            spans = self._whole[number] if self._whole else [(start, self.seq_len + 1)]
            at = 0
            for start, length in spans:
                ids[row, at : at + length] = self.corpus.tokens[start : start + length]
                flags[row, at : at + length] = self.corpus.flags[start : start + length]
                at += length
        batch = pack(ids, flags)
        batch.mask[len(rows) - missing :] = 0.0
        return batch


def fit(starts: np.ndarray, lengths: np.ndarray, room: int) -> list[list[tuple[int, int]]]:
    """Documents put into rows, the longest first, each where the least room is left over.

    Args:
        room: tokens of a row.

    Returns:
        Of each row the (start, length) of its documents.

    Raises:
        RequestError: a document is longer than that.

    Source: Ding et al., Fewer Truncations Improve Language Modeling, 2024.
    """
    if lengths.size and lengths.max() > room:
        raise RequestError(
            f"a document has {lengths.max()} tokens; rows have room for {room}: raise seq_len."
        )
    rows: list[list[tuple[int, int]]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for index in np.argsort(-lengths, kind="stable"):
        start, length = int(starts[index]), int(lengths[index])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row, left = len(rows), room
            rows.append([])
        else:
            left = rooms[at]
            row = by_room[left].pop()
            if not by_room[left]:
                del rooms[at]
        rows[row].append((start, length))
        left -= length
        if not by_room.setdefault(left, []):
            insort(rooms, left)
        by_room[left].append(row)
    return rows


def pack(rows: np.ndarray, flags: np.ndarray) -> PackedBatch:
    """Rows of `seq + 1` ids and their flags as a batch: segments, positions and mask.

    A document's last token is predicted, and predicts nothing.
    """
    tokens, targets = rows[:, :-1], rows[:, 1:]
    is_start = (flags & STARTS).astype(bool)
    starts = is_start[:, :-1].copy()
    starts[:, 0] = False
    index = np.arange(tokens.shape[1], dtype=np.int32)[None, :]
    first = np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    is_target = (flags[:, 1:] & TRAINED).astype(bool) & ~is_start[:, 1:]
    return PackedBatch(
        tokens=np.ascontiguousarray(tokens),
        targets=np.ascontiguousarray(targets),
        mask=is_target.astype(np.float32),
        positions=(index - first).astype(np.int32),
        segment_ids=np.cumsum(starts, axis=1, dtype=np.int32),
    )


def _flags_path(path: Path) -> Path:
    return path.with_name(path.name + ".flags")


def _info_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _chunks(items: Iterable[str], size: int) -> Iterator[list[str]]:
    chunk: list[str] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
