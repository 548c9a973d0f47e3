"""From documents to training batches: one file of token ids, cut into packed rows.

Which rows a step sees is a pure function of (seed, step), so that resuming needs nothing but the
step's number. This module knows token ids, no model and no jax.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rooflax.errors import CheckpointError, RequestError
from rooflax.files import open_regular, read_regular, replacing

ENCODE_AT_ONCE = 256  # documents
DTYPES = ("uint16", "uint32")


@dataclass(frozen=True)
class CorpusInfo:
    """What is known of a token file.

    Attributes:
        dtype: "uint16" or "uint32".
        num_tokens: separators included.
        num_bytes: UTF-8 bytes of the texts.
        separator: id of the token that ends each document.
    """

    dtype: str
    num_tokens: int
    num_documents: int
    num_bytes: int
    separator: int


@dataclass(frozen=True)
class Corpus:
    """Token ids of many documents, each ended by the separator, memory-mapped."""

    tokens: np.ndarray
    info: CorpusInfo

    @property
    def tokens_per_byte(self) -> float:
        return self.info.num_tokens / max(self.info.num_bytes, 1)

    def bits_per_byte(self, loss: float) -> float:
        """A mean loss in nats per token, as bits per byte of text."""
        return loss * self.tokens_per_byte / math.log(2)


class PackedBatch(NamedTuple):
    """Rows of packed documents.

    Attributes:
        tokens, targets: [rows, seq] int32; targets[i] follows tokens[i] in the corpus.
        mask: [rows, seq] float32; 0 where the target belongs to another document.
        positions: [rows, seq] int32, from 0 in each document.
        segment_ids: [rows, seq] int32, from 0 in each row, one more at each document.
    """

    tokens: Any
    targets: Any
    mask: Any
    positions: Any
    segment_ids: Any


SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


def separator_of(tokenizer: Any) -> int | None:
    """The id to put between documents.

    It is of a token that ends texts and no turn of a chat, else the end-of-sequence token.

    Args:
        tokenizer: a `loading.tokenizer.Tokenizer`.
    """
    found = (tokenizer.token_to_id(name) for name in SEPARATORS)
    return next((token for token in found if token is not None), tokenizer.eos_id)


def write_corpus(path: Path, texts: Iterable[str], tokenizer: Any, separator: int) -> CorpusInfo:
    """Encodes texts into `path` and describes the file in `path`.json, which is written last.

    Args:
        tokenizer: a `tokenizers.Tokenizer`; its special tokens are not added.
        separator: id put after each document; attention does not cross it.

    Raises:
        RequestError: a document holds the separator.
    """
    dtype = "uint16" if tokenizer.get_vocab_size() <= 1 << 16 else "uint32"
    counts = {"num_tokens": 0, "num_documents": 0, "num_bytes": 0}
    with replacing(path) as file:
        for chunk in _chunks(texts, ENCODE_AT_ONCE):
            for text, encoding in zip(chunk, _encode(tokenizer, chunk), strict=True):
                if separator in encoding.ids:
                    raise RequestError(
                        f"A document holds the token {tokenizer.id_to_token(separator)!r}, which "
                        f"separates documents, so that attention would end there; take it out, or "
                        f"give the tokenizer an <|endoftext|> token."
                    )
                ids = np.asarray([*encoding.ids, separator], dtype)
                file.write(ids.tobytes())
                counts["num_tokens"] += ids.size
                counts["num_documents"] += 1
                counts["num_bytes"] += len(text.encode("utf-8"))
    info = CorpusInfo(dtype=dtype, separator=separator, **counts)
    _info_path(path).write_text(json.dumps(asdict(info), indent=2) + "\n", encoding="utf-8")
    return info


def open_corpus(path: Path) -> Corpus:
    """Opens what `write_corpus` wrote.

    Raises:
        CheckpointError: the file or its description is missing, or they disagree.
    """
    try:
        info = CorpusInfo(**json.loads(read_regular(_info_path(path))))
        if info.dtype not in DTYPES:
            raise ValueError(f"its dtype is {info.dtype!r}, not one of {', '.join(DTYPES)}")
        open_regular(path).close()
        tokens = np.memmap(path, np.dtype(info.dtype), "r")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"cannot open the token file {path}: {error}.") from None
    if tokens.size != info.num_tokens:
        raise CheckpointError(
            f"{path} holds {tokens.size} tokens, but {_info_path(path).name} says "
            f"{info.num_tokens}; write it again."
        )
    return Corpus(tokens, info)


class Rows:
    """A corpus cut into rows of `seq_len` inputs and their targets, shuffled anew each epoch.

    Each epoch cuts at another offset, so that no document is always broken at the same place.

    Args:
        called: what a sentence calls the corpus.

    Raises:
        RequestError: the corpus is too short for one row.
    """

    def __init__(self, corpus: Corpus, seq_len: int, seed: int = 0, *, called: str = "corpus"):
        self.corpus, self.seq_len, self.seed = corpus, seq_len, seed
        self.num_rows = (corpus.tokens.size - seq_len) // seq_len
        if self.num_rows < 1:
            raise RequestError(
                f"the {called} has {corpus.tokens.size} tokens; rows of {seq_len} need at least "
                f"{2 * seq_len}: give more text or a smaller seq_len."
            )
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def batch(self, step: int, batch_size: int) -> PackedBatch:
        """The rows of step `step`, counted from 0: a pure function of (seed, step)."""
        starts = []
        for number in range(step * batch_size, (step + 1) * batch_size):
            epoch, index = divmod(number, self.num_rows)
            order, offset = self._epoch(epoch)
            starts.append(offset + int(order[index]) * self.seq_len)
        return self._pack(starts)

    def spread(self, num_batches: int | None, batch_size: int) -> Iterator[PackedBatch]:
        """Batches spread evenly over the corpus, in order, the same each time (for evaluation).

        Args:
            num_batches: None takes every row; the last batch is filled up with masked rows.
        """
        wanted = self.num_rows if num_batches is None else num_batches * batch_size
        wanted = min(wanted, self.num_rows)
        rows = [index * self.num_rows // wanted for index in range(wanted)]
        for first in range(0, wanted, batch_size):
            starts = [row * self.seq_len for row in rows[first : first + batch_size]]
            missing = batch_size - len(starts)
            batch = self._pack(starts + [0] * missing)
            batch.mask[batch_size - missing :] = 0.0
            yield batch

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, int]:
        rng = np.random.default_rng((self.seed, epoch))
        offset = int(rng.integers(self.seq_len))
        return rng.permutation(self.num_rows), offset

    def _pack(self, starts: list[int]) -> PackedBatch:
        length = self.seq_len + 1
        rows = np.stack([self.corpus.tokens[s : s + length] for s in starts]).astype(np.int32)
        return pack(rows, self.corpus.info.separator)


def pack(rows: np.ndarray, separator: int) -> PackedBatch:
    """Rows of `seq + 1` ids as a batch: segments, positions and mask from the separators.

    A separator belongs to the document it ends: it is predicted, and predicts nothing.
    """
    tokens, targets = rows[:, :-1], rows[:, 1:]
    ends = tokens == separator
    starts = np.zeros_like(ends)
    starts[:, 1:] = ends[:, :-1]
    index = np.arange(tokens.shape[1], dtype=np.int32)[None, :]
    first = np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    return PackedBatch(
        tokens=np.ascontiguousarray(tokens),
        targets=np.ascontiguousarray(targets),
        mask=(~ends).astype(np.float32),
        positions=(index - first).astype(np.int32),
        segment_ids=np.cumsum(starts, axis=1, dtype=np.int32),
    )


def _info_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _encode(tokenizer: Any, texts: list[str]) -> list[Any]:
    return tokenizer.encode_batch(texts, add_special_tokens=False)


def _chunks(items: Iterable[str], size: int) -> Iterator[list[str]]:
    chunk: list[str] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
