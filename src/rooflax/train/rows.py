"""Rows of training data as tokens: chats by the model's own template, and what of them is trained.

Conversations are encoded as `LLM.chat` encodes them, so that training sees what serving sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from rooflax.errors import CheckpointError, RequestError, RooflaxError
from rooflax.loading.chat_template import encode_answers
from rooflax.loading.generic_tools import as_served
from rooflax.loading.messages import SYSTEMS
from rooflax.loading.tokenizer import Tokenizer
from rooflax.train.config import DataConfig
from rooflax.train.corpus import ChatRow, Document, Preference, PromptCompletion, Row
from rooflax.train.data import Encoded, encode_texts

THREADS = 4
"""Rows that wait for templates, as many as there are processes that render them."""
WRITTEN_AT_ONCE = 1024  # rows


def has_whole_rows(rows: Iterable[Row]) -> bool:
    """Whether documents may not be cut, as those with a prompt may not."""
    return any(not isinstance(row, Document) for row in rows)


@dataclass
class RowEncoder:
    """Tokens of rows, in their order, and what truncation did to them.

    Attributes:
        separator: ends texts.
        seq_len: of the rows that are trained.
        shortened, dropped: rows that lost tokens, and those that have nothing left to train.
    """

    tokenizer: Tokenizer
    separator: int
    config: DataConfig
    seq_len: int
    shortened: int = 0
    dropped: int = 0

    def rows(self, rows: Sequence[Row]) -> Iterator[Encoded]:
        """Texts alone are for rows of tokens that cut them anywhere; as soon as one row has a
        prompt, all are held to the length of a row.

        Raises:
            RequestError, CheckpointError: the first row that cannot be trained on, with file and
                line.
        """
        if has_whole_rows(rows):
            yield from (one for one in self._encoded(rows, self.config) if one is not None)
            return
        if rows and self.config.masks:
            raise RequestError(
                f"{rows[0].name} is plain text, which has no prompt to mask; give rows of "
                f"messages, or of a prompt and a completion."
            )
        texts, done = (row.text for row in rows if isinstance(row, Document)), 0
        try:
            for encoded in encode_texts(texts, self.tokenizer.backend, self.separator):
                yield encoded
                done += 1
        except CheckpointError as error:
            raise _of_row(rows[done], error) from None

    def pairs(self, rows: Sequence[Row]) -> Iterator[Encoded]:
        """Preferences, each as two documents: the prompt with the chosen answer, and with the
        rejected one; the answers are trained. A pair of which nothing of an answer is left is
        dropped.

        Raises:
            RequestError, CheckpointError: as for `rows`, or of a row that is no preference.
        """
        both: list[Row] = []
        for row in rows:
            if not isinstance(row, Preference):
                raise RequestError(
                    f"{where(row)} has no chosen and rejected answer, which `train_mode` dpo and "
                    f"orpo learn from."
                )
            both += row.chosen, row.rejected
        encoded = self._encoded(both, replace(self.config, mask_prompt=True))
        for chosen, rejected in zip(encoded, encoded, strict=True):
            if chosen is not None and rejected is not None:
                yield from (chosen, rejected)

    def _encoded(self, rows: Sequence[Row], config: DataConfig) -> Iterator[Encoded | None]:
        """Each row; None of one that is cut to nothing."""

        def encoded(row: Row) -> tuple[Row, list[int], list[bool] | None]:
            return row, *encode_row(row, self.tokenizer, self.separator, config)

        with ThreadPoolExecutor(THREADS) as pool:
            for first in range(0, len(rows), WRITTEN_AT_ONCE):
                for each in pool.map(encoded, rows[first : first + WRITTEN_AT_ONCE]):
                    yield self._checked(*each, config)

    def _checked(
        self, row: Row, ids: list[int], trained: list[bool] | None, config: DataConfig
    ) -> Encoded | None:
        if len(ids) < 2:
            raise RequestError(f"{where(row)} has nothing to train on: it is empty.")
        if trained is not None and not any(trained[1:]):
            raise RequestError(
                f"{where(row)} has nothing to train on: no answer of the assistant is "
                f"{'the last message' if config.mask_prompt else 'among its messages'}."
            )
        most = self.seq_len + 1
        if len(ids) > most and config.truncation == "reject":
            raise RequestError(
                f"{where(row)} has {len(ids)} tokens, but rows of --seq-len {self.seq_len} hold "
                f"{most}; raise --seq-len, or cut such rows with --truncation cut."
            )
        self.shortened += len(ids) > most
        ids, trained = ids[:most], None if trained is None else trained[:most]
        if trained is not None and not any(trained[1:]):
            self.dropped += 1
            return None
        kept = ids if trained is None else [i for i, t in zip(ids, trained, strict=True) if t]
        return Encoded(ids, trained, len(self.tokenizer.decode(kept).encode("utf-8")))


def where(row: Row) -> str:
    """The row's file and line, as errors name them."""
    return row.name if isinstance(row, Document) else row.where


def encode_row(
    row: Row, tokenizer: Tokenizer, separator: int, config: DataConfig
) -> tuple[list[int], list[bool] | None]:
    """A row's tokens, and whether each is a target; None is all but the first.

    Raises:
        RequestError, CheckpointError: it cannot be encoded, with file and line.
    """
    try:
        if isinstance(row, Document):
            (encoded,) = encode_texts([row.text], tokenizer.backend, separator)
            if config.masks:
                raise RequestError("plain text has no prompt to mask")
            return list(encoded.ids), None
        if isinstance(row, Preference):
            raise RequestError(
                "it has a chosen and a rejected answer, which `train_mode` dpo and orpo learn from"
            )
        if isinstance(row, PromptCompletion):
            if tokenizer.chat_template is None:
                return _encode_completion(row, tokenizer, separator, config)
            row = _as_conversation(row)
        return _encode_conversation(row, tokenizer, config)
    except (RequestError, CheckpointError) as error:
        raise _of_row(row, error) from None


def _of_row(row: Row, error: RooflaxError) -> RooflaxError:
    """An error with the row's file and line."""
    return type(error)(f"{where(row)}: {str(error).rstrip('.')}.")


def _as_conversation(row: PromptCompletion) -> ChatRow:
    texts = (("user", row.prompt), ("assistant", row.completion))
    messages = tuple({"role": role, "content": content} for role, content in texts)
    return ChatRow(row.name, row.where, messages, 1)


def _encode_conversation(
    row: ChatRow, tokenizer: Tokenizer, config: DataConfig
) -> tuple[list[int], list[bool] | None]:
    messages, tools, _ = as_served(
        tokenizer, row.messages, tools=row.tools, add_generation_prompt=False
    )
    since = len(messages)  # of answers, none counts
    if config.assistant_only_loss:
        since = 0
    elif config.mask_prompt:
        since = _begin_of_completion(row, messages)
    ids, trained = encode_answers(tokenizer, messages, since=since, tools=tools)
    return ids, trained if config.masks else None


def _begin_of_completion(row: ChatRow, messages: Sequence[Mapping[str, Any]]) -> int:
    """The first message whose answer is trained, of those that became of a row's.

    Messages may have been added or joined, as results of tools are.

    Raises:
        RequestError: an answer of the prompt was joined with one of the completion.
    """
    if row.num_prompt is None:
        return len(messages) - 1
    answers = [number for number, message in enumerate(messages) if _is_answer(message)]
    begins = _begins_of_answers(row.messages, len(answers))
    completion = range(row.num_prompt, len(row.messages))
    first = next((n for n in completion if _is_answer(row.messages[n])), None)
    if first is None:
        return len(messages)
    if first not in begins:
        raise RequestError(
            "the chat template takes no two answers in a row, so that the prompt's last one and "
            "the completion's first are one message; move both into the completion, or put a "
            "message of the user between them"
        )
    return answers[begins.index(first)]


def _begins_of_answers(messages: Sequence[Mapping[str, Any]], count: int) -> list[int]:
    """The answers among a row's messages that begin one of those that the template was given.

    A template that takes no neighbours of a role was given them joined: those without calls, or all
    where calls are text.

    Args:
        count: of the answers that it was given.
    """
    spoken = [n for n, each in enumerate(messages) if each.get("role") not in SYSTEMS]
    before = {n: messages[previous] for previous, n in pairwise(spoken)}
    answers = [n for n in spoken if _is_answer(messages[n])]
    apart = [n for n in answers if not _is_answer(before.get(n, {}))]
    calls = [n for n in answers if n in apart or _has_calls(messages[n]) or _has_calls(before[n])]
    known = [begins for begins in (answers, calls, apart) if len(begins) == count]
    assert known, f"{count} of {len(answers)} answers"
    return known[0]


def _is_answer(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "assistant"


def _has_calls(message: Mapping[str, Any]) -> bool:
    return bool(message.get("tool_calls") or message.get("function_call"))


def _encode_completion(
    row: PromptCompletion, tokenizer: Tokenizer, separator: int, config: DataConfig
) -> tuple[list[int], list[bool] | None]:
    """Without a template: the prompt and, behind it, the completion."""
    ids, offsets = tokenizer.encode_offsets(row.prompt + row.completion, add_special_tokens=True)
    trained = [end > len(row.prompt) for _, end in offsets]
    if ids and ids[-1] == separator:
        trained[-1] = True  # one that the tokenizer adds stands for no characters
    else:
        ids, trained = [*ids, separator], [*trained, True]
    return ids, trained if config.masks else None
