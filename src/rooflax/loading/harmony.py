"""GPT-OSS's answers: channels taken apart while tokens arrive.

An answer reads `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final
<|message|>...<|return|>`. This module knows token ids and their text, no model and no terminal.

Source: openai/harmony, docs/format.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rooflax.loading.incremental import IncrementalDecoder

if TYPE_CHECKING:
    from rooflax.loading.tokenizer import Tokenizer

FINAL = "final"
_MARKS = ("start", "channel", "message", "end", "return", "call")


def speaks_harmony(tokenizer: Tokenizer) -> bool:
    """Whether the vocabulary has the format's marks."""
    return all(tokenizer.token_to_id(f"<|{mark}|>") is not None for mark in _MARKS)


class HarmonyFilter:
    """Splits one answer into (channel, text) pieces; headers and marks are left out.

    Args:
        tokenizer: one that `speaks_harmony`.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._meaning = {tokenizer.token_to_id(f"<|{mark}|>"): mark for mark in _MARKS}
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens=False)
        self._in_header = True  # the prompt ends with <|start|>assistant
        self._header = ""
        self._channel = FINAL

    def push(self, ids: Iterable[int]) -> Iterator[tuple[str, str]]:
        """The pieces that became certain with these tokens."""
        for token in ids:
            mark = self._meaning.get(token)
            text = self._decoder.flush() if mark else self._decoder.push(token)
            if self._in_header:
                self._header += text
            elif text:
                yield self._channel, text
            if mark:
                self._turn(mark)

    def flush(self) -> Iterator[tuple[str, str]]:
        """Returns bytes that were held back as part of an incomplete character."""
        text = self._decoder.flush()
        if text and not self._in_header:
            yield self._channel, text

    def _turn(self, mark: str) -> None:
        """Changes the state at a mark."""
        if mark == "channel":
            self._in_header, self._header = True, ""
        elif mark == "message":
            # "analysis", "commentary to=functions.search"; without a channel it is the answer
            words = self._header.split()
            self._channel = words[0] if words and words[0] != "assistant" else FINAL
            self._in_header = False
        else:
            self._in_header, self._header = True, ""
