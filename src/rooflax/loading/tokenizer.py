"""Text to token ids and back: a checkpoint's tokenizer, and decoding while tokens arrive.

It comes from a folder (`tokenizer_folder`) or a GGUF file. It does not render chat templates and
knows no model: ids go out, ids come in.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from rooflax.errors import RequestError
from rooflax.loading.gguf import GGUFFile, open_gguf
from rooflax.loading.gguf_tokenizer import read_gguf_tokenizer
from rooflax.loading.json_files import read_json_object
from rooflax.loading.tokenizer_folder import library_errors, read_folder

__all__ = ["PlainTokenizer", "Tokenizer", "lone_surrogate"]

LONG_TEXT = 16_384
"""Characters that take about 10 ms to encode."""


class Tokenizer:
    """The tokenizer of a checkpoint; gives the ids that transformers' AutoTokenizer gives.

    Attributes:
        special_tokens: the named ones as text, such as `{"bos_token": "<s>"}`.
        chat_templates: template by name; a lone one is called `"default"`.
        response_template: how answers are written, as transformers describes it; None if unstated.
        vocab_size: the highest id plus one, added tokens included.

    Args:
        folder: holds `tokenizer.json`, or `vocab.json` and `merges.txt`, or `vocab.txt`; or a
            GGUF file.

    Raises:
        CheckpointError: files are missing or malformed.
        UnsupportedModelError: a GGUF file has a tokenizer of another kind.
    """

    def __init__(self, folder: str | os.PathLike[str] | GGUFFile):
        if not isinstance(folder, GGUFFile) and Path(folder).is_file():
            folder = open_gguf(folder)
        if isinstance(folder, GGUFFile):
            self.folder = folder.path
            contents = read_gguf_tokenizer(folder)
        else:
            self.folder = Path(folder)
            contents = read_folder(self.folder)
        self.response_template: Any = None
        if self.folder.is_dir():
            config = read_json_object(self.folder / "tokenizer_config.json")
            self.response_template = config.get("response_template")
        self._tokenizer, self.special_tokens, self.chat_templates = contents
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {id_: token.content for id_, token in added.items() if token.special}
        self._plain: PlainTokenizer | None = None
        self._plain_lock = threading.Lock()

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The `tokenizers.Tokenizer` underneath; not to be changed."""
        return self._tokenizer

    @property
    def special_token_ids(self) -> frozenset[int]:
        """The ids that `decode` leaves out."""
        return frozenset(self._special_ids)

    @property
    def special_token_strings(self) -> frozenset[str]:
        """The texts that `encode` turns into one special id."""
        return frozenset(self._special_ids.values())

    @property
    def bos_id(self) -> int | None:
        """The id of the beginning of a sequence, None where the tokenizer has none."""
        return self.token_to_id(self.special_tokens.get("bos_token", ""))

    @property
    def eos_id(self) -> int | None:
        """The id that ends a sequence, None where the tokenizer has none."""
        return self.token_to_id(self.special_tokens.get("eos_token", ""))

    @property
    def chat_template(self) -> str | None:
        """The default chat template, None for a model without one."""
        return self.chat_templates.get("default")

    def files(self) -> dict[str, bytes]:
        """The files of a folder from which this tokenizer would be read."""
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self.special_tokens,
            "chat_template": [
                {"name": name, "template": text} for name, text in self.chat_templates.items()
            ],
        }
        if set(self.chat_templates) <= {"default"}:
            config["chat_template"] = self.chat_template
        if self.response_template is not None:
            config["response_template"] = self.response_template
        return {
            "tokenizer.json": self._tokenizer.to_str(pretty=True).encode(),
            "tokenizer_config.json": json.dumps(config, indent=2).encode(),
        }

    def token_to_id(self, token: str) -> int | None:
        """The id of one token's text, None if it is no token."""
        return self._tokenizer.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """One token as the vocabulary spells it, None for an id without a token."""
        return self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text in which special tokens' strings stand for these tokens.

        Args:
            text: any text.
            add_special_tokens: also what the tokenizer puts around a text, such as BOS.

        Raises:
            RequestError: the text holds a lone surrogate.
            CheckpointError: the tokenizer fails on it, for example by a regular expression that
                gives up.
        """
        return _encode(self._tokenizer, text, add_special_tokens)

    def encode_cut(
        self, text: str, pair: str | None = None, max_tokens: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Ids and token types of a text, or of a pair as the tokenizer puts it together.

        Args:
            max_tokens: what is longer loses its last tokens, of a pair the longer text's first;
                what the tokenizer puts around them stays. None cuts nothing.

        Raises:
            RequestError, CheckpointError: as `encode`.
        """
        texts = [text] if pair is None else [text, pair]
        parts = [_encoding(self._tokenizer, each, False) for each in texts]
        with library_errors("the tokenizer cannot encode this text"):
            if max_tokens is not None:
                num_special = self._tokenizer.num_special_tokens_to_add(pair is not None)
                lengths = _cut([len(part.ids) for part in parts], max(0, max_tokens - num_special))
                for part, length in zip(parts, lengths, strict=True):
                    part.truncate(length)
            first, *second = parts
            whole = self._tokenizer.post_process(first, second[0] if second else None)
            return whole.ids, whole.type_ids

    def encode_offsets(
        self, text: str, *, add_special_tokens: bool = False
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids as `encode` gives them, and from where to where each one's characters are."""
        encoding = _encoding(self._tokenizer, text, add_special_tokens)
        return encoding.ids, encoding.offsets

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text in which nothing is special: `"<s>"` is three characters."""
        return self.plain.encode(text)

    @cached_property
    def longest_token(self) -> int | None:
        """Characters that one token can stand for, at most; None where there is no limit."""
        model = self._tokenizer.model
        if getattr(model, "unk_token", None) is not None and not getattr(
            model, "byte_fallback", False
        ):
            return None
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=0)

    @property
    def plain(self) -> PlainTokenizer:
        """The same vocabulary with special tokens' strings taken as text, built when asked for."""
        with self._plain_lock:
            if self._plain is None:
                self._plain = PlainTokenizer(self._tokenizer, self._special_ids)
            return self._plain

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; an id without a token becomes `<id>`, such as `<70000>`.

        Args:
            ids: token ids.
            skip_special_tokens: leave special tokens out.
        """
        pieces: list[str] = []
        run: list[int] = []
        for token_id in ids:
            if self.id_to_token(token_id) is not None:
                run.append(token_id)
                continue
            pieces += [self._decode_run(run, skip_special_tokens), f"<{token_id}>"]
            run = []
        return "".join([*pieces, self._decode_run(run, skip_special_tokens)])

    def _decode_run(self, ids: list[int], skip_special_tokens: bool) -> str:
        if not ids:
            return ""
        with library_errors("the tokenizer cannot decode these tokens"):
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


class PlainTokenizer:
    """A twin of a tokenizer for text in which special tokens' strings are just text.

    Where a special token is really meant, the text carries `mark[string]` instead: a random string
    that no one can guess, so no input can forge a special token.

    Args:
        backend: the tokenizer to copy.
        special: id to text of its special tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: Mapping[int, str]):
        self._tokenizer = tokenizers.Tokenizer.from_str(backend.to_str())
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = backend.get_added_tokens_decoder()
        nonce = secrets.token_hex(8)
        self.mark = {text: f"\U0010fffd{nonce}:{id_}\U0010fffd" for id_, text in special.items()}
        self._tokenizer.add_tokens([_renamed(added[i], self.mark[special[i]]) for i in special])
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self._real_id = {ids[self.mark[text]]: id_ for id_, text in special.items()}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without BOS; `mark`ed strings become their special tokens."""
        return self._real(_encode(self._tokenizer, text, False))

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids as `encode` gives them, and from where to where each one's characters are."""
        encoding = _encoding(self._tokenizer, text, False)
        return self._real(encoding.ids), encoding.offsets

    def _real(self, ids: list[int]) -> list[int]:
        return [self._real_id.get(token_id, token_id) for token_id in ids]


def lone_surrogate(text: str) -> int | None:
    """Position of a lone UTF-16 surrogate in a text; None if there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _cut(lengths: list[int], most: int) -> list[int]:
    """Cuts texts to fit: the longer one loses tokens first, then the last one."""
    if len(lengths) == 1:
        return [min(lengths[0], most)]
    short = min(*lengths, most // 2)
    long = min(max(lengths), most - short)
    return [long, short] if lengths[0] > lengths[1] else [short, long]


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    return _encoding(backend, text, add_special_tokens).ids


def _encoding(
    backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool
) -> tokenizers.Encoding:
    with library_errors("the tokenizer cannot encode this text"):
        try:
            if len(text) > LONG_TEXT:  # a batch lets Python's other threads run
                return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
            return backend.encode(text, add_special_tokens=add_special_tokens)
        except Exception:
            at = lone_surrogate(text)
            if at is None:
                raise
    raise RequestError(
        f"the text holds a lone surrogate, U+{ord(text[at]):04X} at character {at}; it must be "
        "Unicode text"
    )


def _renamed(token: AddedToken, content: str) -> AddedToken:
    # special=False: the twin does not look for special tokens at all.
    return AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=False,
    )
