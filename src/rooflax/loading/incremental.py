"""Text while tokens arrive: pieces whose concatenation is the text of all of them.

Two ways, chosen by the tokenizer's decoder. Byte-level tokenizers (GPT-2, Llama 3, Qwen, GPT-OSS)
spell bytes, so an incremental UTF-8 decoder is exact and costs a look-up per token. Others
(sentencepiece) are decoded in a window that begins where the last piece but one began.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from rooflax.errors import UnsupportedModelError

if TYPE_CHECKING:
    from rooflax.loading.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_PROMPT_WINDOW_TOKENS = 8


class IncrementalDecoder:
    """Decodes one sequence token by token and never emits half a character.

    `"".join(push of every id) + flush()` equals `tokenizer.decode(ids)`. Bytes that will never be
    a character come out as U+FFFD as soon as that is certain. The cost of a token does not depend
    on how many came before.

    Args:
        tokenizer: the tokenizer of the ids.
        prompt_ids: what stands before; it is not emitted, it only decides things like whether the
            first word keeps its leading space.
        skip_special_tokens: as in `Tokenizer.decode`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
    ):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder: _Decoder
        if _is_byte_level(tokenizer):
            self._decoder = _ByteDecoder(tokenizer)
        else:
            self._decoder = _WindowDecoder(tokenizer)
        window = [i for i in prompt_ids if i not in self._skipped][-_PROMPT_WINDOW_TOKENS:]
        for start in range(len(window), 0, -1):
            if tokenizer.id_to_token(window[start - 1]) is None:
                window = window[start:]
                break
        self._decoder.start(window)

    def push(self, token_id: int) -> str:
        """The text that became certain with this token, often one word, sometimes nothing."""
        if token_id in self._skipped:
            return ""
        if self._tokenizer.id_to_token(token_id) is None:
            return f"{self._decoder.finish()}<{token_id}>"
        return self._decoder.push(token_id)

    def flush(self, *, is_cut: bool = False) -> str:
        """Returns the text that was held back; afterwards the decoder starts anew."""
        return self._decoder.finish()

    def take(self, num_characters: int, *, is_last: bool) -> None:
        """Nothing: its text is all that it has read."""


class _Decoder(Protocol):
    def start(self, prompt: Sequence[int]) -> None: ...
    def push(self, token_id: int) -> str: ...
    def finish(self) -> str: ...


class _ByteDecoder:
    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def start(self, prompt: Sequence[int]) -> None:
        # Only the last tokens can hold the beginning of a character that is still to end.
        for token_id in prompt[-4:]:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        return self._utf8.decode(_token_bytes(self._tokenizer.id_to_token(token_id) or ""))

    def finish(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


class _WindowDecoder:
    """Emits decode(window + new)[len(decode(window)):], where the window is what came out last.

    A run of byte tokens (`<0xE2>`) is held until it ends, because such a decoder turns the whole
    run into U+FFFD if any part of it is not UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._start_over()

    def _start_over(self) -> None:
        self._window: list[int] = []
        self._window_text = ""
        self._new: list[int] = []

    def start(self, prompt: Sequence[int]) -> None:
        self._window = list(prompt)
        self._window_text = self._decode(self._window)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def push(self, token_id: int) -> str:
        self._new.append(token_id)
        if _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or ""):
            return ""
        return self._emit()

    def _emit(self) -> str:
        text = self._decode(self._window + self._new)
        if len(text) <= len(self._window_text):
            return ""
        piece = text[len(self._window_text) :]
        self._window, self._new = self._new, []
        self._window_text = self._decode(self._window)
        return piece

    def finish(self) -> str:
        piece = self._decode(self._window + self._new)[len(self._window_text) :]
        self._start_over()
        return piece


def spelled_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Bytes that each id stands for within a text; empty for an id without a token.

    Raises:
        UnsupportedModelError: the tokenizer is neither byte-level nor of sentencepiece's kind.
    """
    pieces = [tokenizer.id_to_token(token_id) or "" for token_id in range(tokenizer.vocab_size)]
    if _is_byte_level(tokenizer):
        return [_token_bytes(piece) for piece in pieces]
    kinds = {part.get("type") for part in _decoder_parts(tokenizer)}
    if not kinds & {"Metaspace", "Replace"} or not kinds <= _SENTENCEPIECE_PARTS:
        raise UnsupportedModelError(
            f"What each token of {tokenizer.folder} spells is not known: its decoder is made of "
            f"{', '.join(map(str, sorted(kinds, key=str))) or 'nothing'}; byte-level and "
            f"sentencepiece tokenizers are read."
        )
    return [
        bytes([int(piece[3:5], 16)])
        if _BYTE_TOKEN.fullmatch(piece)
        else piece.replace("▁", " ").encode("utf-8", "replace")
        for piece in pieces
    ]


_SENTENCEPIECE_PARTS = {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    return [part.get("type") for part in _decoder_parts(tokenizer)] == ["ByteLevel"]


def _decoder_parts(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    decoder = tokenizer.backend.decoder
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return state.get("decoders", []) if state.get("type") == "Sequence" else [state]


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    # GPT-2's bytes_to_unicode, turned round: printable bytes stand for themselves, the others
    # for the characters from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _token_bytes(token: str) -> bytes:
    table = _byte_of_character()
    try:
        return bytes([table[character] for character in token])
    except KeyError:  # an added token that is written as plain text
        return token.encode("utf-8", "replace")
