"""`Reader`: one sample's tokens as content, reasoning and tool calls, while they arrive.

It is the sample's decoder, so stop strings are looked for in the content only. Every token costs
the same, however long the answer is. What is no call is content, as it was written; one whose
streamed arguments turn out not to parse is marked at its end.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from rooflax.loading.incremental import IncrementalDecoder
from rooflax.server.arguments import StringEnd
from rooflax.server.call_formats import HARMONY, CallFormat, Calls
from rooflax.server.open_call import Event, OpenCall

if TYPE_CHECKING:
    from rooflax.loading.tokenizer import Tokenizer

_TAIL_TOKENS = 32
_HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>",
                  "<|call|>", "<|return|>")  # fmt: skip
_HARMONY_ENDS = ("<|start|>", "<|end|>", "<|call|>", "<|return|>")
_AGAIN = 64
"""Characters that are read at once where some are read a second time."""
_TOKENS = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]")
"""Pattern of a special token within a text."""
_RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_-]{1,64})")


class ReaderState(StrEnum):
    """State of the reader."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"
    HEADER = "header"
    """Head of a harmony message: its channel and its recipient."""


class ReaderStep(StrEnum):
    """Event that moves the reader from state to state."""

    THINK = "reasoning opens"
    ANSWER = "reasoning closes"
    CALL = "a call opens"
    END = "a call ends, or is none"
    MESSAGE = "a message begins"


TRANSITIONS = {
    (ReaderState.CONTENT, ReaderStep.THINK): ReaderState.REASONING,
    (ReaderState.REASONING, ReaderStep.ANSWER): ReaderState.CONTENT,
    (ReaderState.CONTENT, ReaderStep.CALL): ReaderState.CALL,
    (ReaderState.CALL, ReaderStep.END): ReaderState.CONTENT,
    (ReaderState.CONTENT, ReaderStep.MESSAGE): ReaderState.HEADER,
    (ReaderState.REASONING, ReaderStep.MESSAGE): ReaderState.HEADER,
    (ReaderState.HEADER, ReaderStep.MESSAGE): ReaderState.HEADER,
    (ReaderState.HEADER, ReaderStep.ANSWER): ReaderState.CONTENT,
    (ReaderState.HEADER, ReaderStep.THINK): ReaderState.REASONING,
    (ReaderState.HEADER, ReaderStep.CALL): ReaderState.CALL,
}
"""docs/server.md draws them."""


class Reading(NamedTuple):
    """Events since the last time, as far as they are certain, and counts.

    Attributes:
        events: text, reasoning and calls, in their order.
        spans: of each new token, the characters of the whole answer that it spells, begin and end.
        num_certain: characters of the whole answer of which nothing can change any more.
        num_calls, num_reasoning_tokens, num_failed: of the whole answer so far.
    """

    events: list[Event]
    spans: list[tuple[int, int]]
    num_certain: int
    num_calls: int
    num_reasoning_tokens: int
    num_failed: int


class Reader:
    """Reads one sample; `take` gives what it has read, and nothing else of it is looked at.

    Args:
        format: None is content only.
        prompt: token ids, of which the end may have opened the reasoning.
        reads_calls: whether tools were offered.
        schemas: the tools' parameters by name, from which types of plain texts follow.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        format: CallFormat | None,
        prompt: Sequence[int] = (),
        *,
        reads_calls: bool = False,
        schemas: Mapping[str, object] | None = None,
    ):
        calls = format.calls if format is not None else None
        self._is_harmony = calls is not None and calls.style == HARMONY
        self._calls: Calls | None = calls if reads_calls and not self._is_harmony else None
        self._reasoning = format.reasoning if format is not None else None
        self._reads_calls, self._schemas = reads_calls, schemas or {}
        self._marks = self._texts()
        texts = (*self._marks, *(self._calls.texts if self._calls is not None else ()))
        named = {name for text in texts for name in (text, *_TOKENS.findall(text))}
        kept = {tokenizer.token_to_id(name) for name in named}
        self._skipped = tokenizer.special_token_ids - kept
        self._decoder = IncrementalDecoder(tokenizer, prompt, skip_special_tokens=False)
        self._longest = max(map(len, self._marks), default=0)
        self._firsts = frozenset(mark[0] for mark in self._marks)
        self._pending = ""  # text that may be the beginning of a mark
        self._doubt: StringEnd | None = None  # text from a mark on that may be a part of a string
        self._state = ReaderState.CONTENT
        self._has_content = self._trims = False
        self._space, self._space_at = "", 0  # white space that may turn out to stand before a call
        self._gaps: list[Event] = []  # around calls behind content; said if more content comes
        self._call: OpenCall | None = None
        self._header = ""
        self._events: list[Event] = []
        self._at = self._decoded = 0
        self._spans: list[tuple[int, int]] = []
        self._num_calls = self._num_reasoning_tokens = self._num_failed = 0
        self._unclosed: list[str] | None = None
        """Text behind the mark of reasoning that the prompt has opened."""
        tail = tokenizer.decode(list(prompt)[-_TAIL_TOKENS:], skip_special_tokens=False)
        if self._is_harmony and tail:
            self._go(ReaderStep.MESSAGE)
        if self._reasoning is not None:
            opened, closed = tail.rfind(self._reasoning.open), tail.rfind(self._reasoning.close)
            if opened > closed:
                self._go(ReaderStep.THINK)
                self._unclosed = []

    def _texts(self) -> tuple[str, ...]:
        if self._is_harmony:
            return _HARMONY_MARKS
        texts: list[str] = []
        if self._reasoning is not None:
            texts += [self._reasoning.open, self._reasoning.close]
        if self._calls is not None:
            texts += [*self._calls.open, *([self._calls.close] if self._calls.close else [])]
            texts += self._calls.skipped
            if self._calls.tags is not None and self._calls.tags.body_end:
                texts.append(self._calls.tags.body_end)
        return tuple(texts)

    def take(self, num_characters: int, *, is_last: bool = False) -> Reading:
        """The reading since the last time.

        Args:
            num_characters: of content that no stop string can cut any more.
            is_last: nothing follows; what is left is cut off.
        """
        events, num_certain = self._taken(num_characters, is_last=is_last)
        spans, self._spans = self._spans, []
        counts = self._num_calls, self._num_reasoning_tokens, self._num_failed
        return Reading(events, spans, num_certain, *counts)

    def _taken(self, num_characters: int, *, is_last: bool) -> tuple[list[Event], int]:
        """The events that are certain, and the end of what is."""
        taken: list[Event] = []
        for number, each in enumerate(self._events):
            if each.kind == "content" and len(each.text) > num_characters:
                kept, held = each.text[:num_characters], each.text[num_characters:]
                if kept:
                    taken.append(each._replace(text=kept))
                end = each.at + len(kept)
                rest = self._events[number + 1 :]
                self._events = [each._replace(text=held, at=end), *rest]
                return taken, end
            if each.kind == "content":
                num_characters -= len(each.text)
            taken.append(each)
        self._events = []
        return taken, sys.maxsize if is_last else self._settled

    @property
    def _settled(self) -> int:
        """Start of the text that is held back."""
        if self._call is not None and not self._call.is_certain:
            return self._call.at
        return self._space_at if self._space else self._at

    def push(self, token_id: int) -> str:
        """The content that became certain with this token."""
        if self._state is ReaderState.REASONING:
            self._num_reasoning_tokens += 1
        begun, is_skipped = self._decoded, token_id in self._skipped
        text = self._decoder.flush() if is_skipped else self._decoder.push(token_id)
        self._decoded += len(text)
        # What is no whole character yet belongs to the next one.
        end = begun if is_skipped else max(begun + 1, self._decoded)
        self._spans.append((begun, end))
        number = len(self._events)
        self._read(text, is_last=False)
        return self._content(number)

    def flush(self, *, is_cut: bool) -> str:
        """Returns the text that was held back, at the end of the answer.

        Reasoning that the prompt has opened and the model has not closed is the answer: it is read
        once more, for text and calls.
        """
        number = len(self._events)
        self._read(self._decoder.flush(), is_last=True)
        if self._unclosed and not is_cut:
            text, self._unclosed, self._at, self._space = "".join(self._unclosed), None, 0, ""
            self._go(ReaderStep.ANSWER)
            self._read_again(text, is_last=True)
        if self._state is ReaderState.CALL:
            self._end_call(is_cut=is_cut)
        if self._state is ReaderState.CONTENT and not self._gaps:
            self._say(self._space, self._space_at)
        self._space = ""
        return self._content(number)

    def _content(self, number: int) -> str:
        """Content since the first `number` events."""
        return "".join(each.text for each in self._events[number:] if each.kind == "content")

    def _say_gaps(self) -> None:
        for gap in self._gaps:
            self._say(gap.text, gap.at)
        self._gaps = []

    def _say(self, text: str, at: int) -> None:
        if text:
            self._events.append(Event("content", text, at))
            self._has_content = True

    def _read(self, text: str, *, is_last: bool) -> None:
        """Goes from mark to mark."""
        if self._doubt is not None:
            self._doubt.push(text)
            if self._doubt.is_decided or is_last:
                self._resolve(self._doubt, is_last=is_last)
            return
        if not self._pending and self._firsts.isdisjoint(text):
            self._take(text)  # as most tokens: no mark begins in it
            return
        text, self._pending = self._pending + text, ""
        while text:
            at, mark = self._next_mark(text)
            if mark is None:
                size = len(text) - (0 if is_last else self._held(text))
                self._pending = text[size:]
                self._take(text[:size])
                return
            self._take(text[:at])
            stream = self._call.stream if self._call is not None else None
            if stream is not None and stream.is_in_string:
                self._doubt = StringEnd(mark, stream.is_escaped)
                self._read(text[at:], is_last=is_last)
                return
            text = text[at + len(mark) :]
            self._turn(mark)

    def _resolve(self, doubt: StringEnd, *, is_last: bool) -> None:
        """Reads on where a mark may stand in a string of a call's arguments: it does where the
        string ends behind it as one of JSON, else the mark is one and the call is no JSON."""
        self._doubt = None
        text, begun = doubt.text, doubt.size or len(doubt.mark)
        if doubt.size:
            self._take(text[:begun])
        else:
            self._turn(doubt.mark)
        self._read_again(text[begun:], is_last=is_last)

    def _read_again(self, text: str, *, is_last: bool) -> None:
        for at in range(0, len(text), _AGAIN):
            self._read(text[at : at + _AGAIN], is_last=False)
        if is_last:
            self._read("", is_last=True)

    def _watched(self) -> tuple[str, ...]:
        """The marks that mean something here."""
        if self._is_harmony:
            return _HARMONY_MARKS
        if self._state is ReaderState.REASONING and self._reasoning is not None:
            return (self._reasoning.close,)
        if self._state is ReaderState.CALL and self._calls is not None:
            if self._call is not None and self._call.close is not None:
                return (self._call.close,)
            return () if self._calls.is_whole_message else self._calls.open
        marks = [self._reasoning.open] if self._reasoning and not self._has_content else []
        calls = self._calls
        if calls is not None and not (calls.is_whole_message and self._has_content):
            marks += [*calls.open, *calls.skipped]
        return tuple(marks)

    def _next_mark(self, text: str) -> tuple[int, str | None]:
        places = [(text.find(mark), mark) for mark in self._watched()]
        places = [pair for pair in places if pair[0] >= 0]
        is_first = self._calls is not None and self._calls.is_whole_message
        if is_first and self._state is ReaderState.CONTENT:
            places = [pair for pair in places if not text[: pair[0]].strip()]
        return min(places, key=lambda pair: (pair[0], -len(pair[1])), default=(0, None))

    def _held(self, text: str) -> int:
        """Characters at the end that may begin a mark."""
        watched = self._watched()
        for size in range(min(self._longest, len(text)), 0, -1):
            end = text[-size:]
            if any(len(mark) > size and mark.startswith(end) for mark in watched):
                return size
        return 0

    def _go(self, step: ReaderStep) -> None:
        self._state = TRANSITIONS[self._state, step]
        self._trims = not self._is_harmony and step is not ReaderStep.CALL

    def _turn(self, mark: str) -> None:
        """Changes the state at a mark."""
        if self._is_harmony:
            self._at += len(mark)
            self._harmony_turn(mark)
            return
        if self._reasoning is not None and mark in (self._reasoning.open, self._reasoning.close):
            self._at += len(mark)
            self._space, self._unclosed = "", None
            self._go(ReaderStep.THINK if mark == self._reasoning.open else ReaderStep.ANSWER)
            return
        assert self._calls is not None
        if self._call is not None:
            is_end = mark == self._call.close
            if is_end and self._call.has_close:
                self._take(mark)
            elif is_end:
                self._at += len(mark)
            self._end_call(is_closed=is_end)
            if is_end:
                return
        if mark in self._calls.skipped:
            self._at += len(mark)
            self._trims = not self._has_content
            return
        at = self._space_at if self._space else self._at
        self._go(ReaderStep.CALL)
        self._call = OpenCall(self._calls, mark, self._space, at)
        self._space = ""
        if self._calls.is_body(mark):
            self._take(mark)
        else:
            self._at += len(mark)

    def _take(self, text: str) -> None:
        """Text between marks, of the region that it is in."""
        at = self._at
        self._at += len(text)
        if self._state is ReaderState.HEADER:
            self._header += text
            return
        if self._call is not None:
            self._events += self._call.push(text)
            if self._call.is_none:
                self._end_call(is_cut=True)
            return
        if self._unclosed is not None:
            self._unclosed.append(text)
        if self._trims:
            text = text.lstrip("\n") if self._state is ReaderState.CONTENT else text.lstrip()
            at = self._at - len(text)
        if not text:
            return
        self._trims = False
        if self._state is ReaderState.REASONING or self._calls is not None:
            kept = text.rstrip()
            before, before_at, rest = self._space, self._space_at, text[len(kept) :]
            if not kept:
                self._space, self._space_at = before + rest, before_at if before else at
                return
            self._space, self._space_at, text = rest, at + len(kept), kept
        else:
            before, before_at = "", 0
        if self._state is ReaderState.REASONING:
            self._events.append(Event("reasoning", before + text))
            return
        self._say_gaps()
        self._say(before, before_at)
        self._say(text, at)

    def _end_call(self, *, is_cut: bool = False, is_closed: bool = False) -> None:
        """Ends a call, or says it as content where it is none.

        Args:
            is_cut: more was to come.
            is_closed: by its mark.
        """
        call, self._call = self._call, None
        self._go(ReaderStep.END)
        self._trims = not self._has_content
        assert call is not None
        events, raw = call.end(is_cut, is_closed, self._schemas)
        self._events += events
        num_ended = sum(each.kind == "call_end" for each in events)
        num_failed = sum(each.kind == "call_end" and bool(each.text) for each in events)
        self._num_calls += num_ended - num_failed
        self._num_failed += num_failed and not is_cut
        if raw is None:
            if self._has_content:
                self._gaps.append(Event("content", call.before, call.at))
            return
        self._num_failed += not call.is_none
        self._trims = False
        self._say_gaps()
        self._say(raw, call.at)

    def _harmony_turn(self, mark: str) -> None:
        if self._state is ReaderState.CALL:
            self._end_call()
        if mark in _HARMONY_ENDS:
            self._space = ""
        if mark in _HARMONY_ENDS or self._state is not ReaderState.HEADER:
            self._go(ReaderStep.MESSAGE)
            self._header = ""
        if mark == "<|channel|>":
            self._header += mark
        elif mark != "<|message|>":
            self._header += " "
        else:
            self._begin_message(self._header)

    def _begin_message(self, header: str) -> None:
        named = _RECIPIENT.search(header)
        if named is not None and self._reads_calls:
            self._go(ReaderStep.CALL)
            self._call = OpenCall(_HARMONY_CALLS, "<|message|>", "", self._at, name=named[1])
        else:
            words = header.replace("<|channel|>", " ").split()
            self._go(ReaderStep.THINK if "analysis" in words else ReaderStep.ANSWER)


_HARMONY_CALLS = Calls(style="named", open=())
