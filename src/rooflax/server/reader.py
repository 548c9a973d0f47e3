"""`Reader`: one sample's tokens as content, reasoning and tool calls, while they arrive.

It is the sample's decoder, so stop strings are looked for in the content only. Every token costs
the same, however long the answer is. What does not parse as a call is content, as it was written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from rooflax.loading.incremental import IncrementalDecoder
from rooflax.server.arguments import (
    ArgumentStream,
    Call,
    calls_of,
    notation_calls,
    tagged_calls,
)
from rooflax.server.formats import HARMONY, Calls, Format

if TYPE_CHECKING:
    from rooflax.loading.tokenizer import Tokenizer

Kind = Literal["reasoning", "call", "arguments", "call_end"]
_TAIL_TOKENS = 32
_HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>",
                  "<|call|>", "<|return|>")  # fmt: skip
_LONGEST_HEAD = 512
"""Characters within which a call must have said its name to be streamed."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TOKENS = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]")
"""What a special token may look like within a text."""
_RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_-]{1,64})")


class Event(NamedTuple):
    """A piece that is not content.

    Attributes:
        text: of a call its name; of its end "".
    """

    kind: Kind
    text: str


class Reader:
    """Reads one sample.

    Args:
        format: None is content only.
        prompt: token ids, of which the end may have opened the reasoning.
        reads_calls: whether tools were offered.
        schemas: the tools' parameters by name, from which types of plain texts follow.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        format: Format | None,
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
        self._region = "content"
        self._has_content = self._trims = False
        self._space = ""  # white space that may turn out to stand before a call
        self._call: _OpenCall | None = None
        self._header: str | None = None
        self.events: list[Event] = []
        self.num_calls = self.num_reasoning_tokens = self.num_failed = 0
        tail = tokenizer.decode(list(prompt)[-_TAIL_TOKENS:], skip_special_tokens=False)
        if self._is_harmony and tail:
            self._header = ""
        if self._reasoning is not None:
            opened, closed = tail.rfind(self._reasoning.open), tail.rfind(self._reasoning.close)
            if opened > closed:
                self._enter("reasoning")

    def _texts(self) -> tuple[str, ...]:
        if self._is_harmony:
            return _HARMONY_MARKS
        found: list[str] = []
        if self._reasoning is not None:
            found += [self._reasoning.open, self._reasoning.close]
        if self._calls is not None:
            found += [*self._calls.open, *([self._calls.close] if self._calls.close else [])]
            found += self._calls.skipped
        return tuple(found)

    def take_events(self) -> list[Event]:
        """The pieces that are not content, since the last time."""
        found, self.events = self.events, []
        return found

    def push(self, token_id: int) -> str:
        """The content that became certain with this token."""
        if self._region == "reasoning":
            self.num_reasoning_tokens += 1
        if token_id in self._skipped:
            return self._read(self._decoder.flush(), is_last=False)
        return self._read(self._decoder.push(token_id), is_last=False)

    def flush(self) -> str:
        """What was held back, at the end of the answer."""
        content = self._read(self._decoder.flush(), is_last=True)
        if self._region == "call":
            content += self._end_call(is_cut=self._calls is None or self._calls.close is not None)
        content, self._space = content + self._space, ""
        return content

    def _read(self, text: str, *, is_last: bool) -> str:
        """Goes from mark to mark; gives the content between them."""
        if not self._pending and self._firsts.isdisjoint(text):
            return self._take(text) if text else ""  # as most tokens: no mark begins in it
        text, content = self._pending + text, ""
        self._pending = ""
        while text:
            at, mark = self._next_mark(text)
            if mark is None:
                held = 0 if is_last else self._held(text)
                self._pending = text[len(text) - held :] if held else ""
                content += self._take(text[: len(text) - held])
                break
            content += self._take(text[:at])
            text = text[at + len(mark) :]
            content += self._turn(mark)
        return content

    def _watched(self) -> tuple[str, ...]:
        """The marks that mean something here."""
        if self._is_harmony:
            return _HARMONY_MARKS
        if self._region == "reasoning" and self._reasoning is not None:
            return (self._reasoning.close,)
        if self._region == "call" and self._calls is not None:
            if self._calls.close is not None:
                return (self._calls.close,)
            return () if self._calls.is_whole_message else self._calls.open
        found = [self._reasoning.open] if self._reasoning and not self._has_content else []
        calls = self._calls
        if calls is not None and not (calls.is_whole_message and self._has_content):
            found += [*calls.open, *calls.skipped]
        return tuple(found)

    def _next_mark(self, text: str) -> tuple[int, str | None]:
        found = [(text.find(mark), mark) for mark in self._watched()]
        found = [pair for pair in found if pair[0] >= 0]
        if self._calls is not None and self._calls.is_whole_message and self._region == "content":
            found = [pair for pair in found if not text[: pair[0]].strip()]
        return min(found, key=lambda pair: (pair[0], -len(pair[1])), default=(0, None))

    def _held(self, text: str) -> int:
        """Characters at the end that may begin a mark."""
        watched = self._watched()
        for size in range(min(self._longest, len(text)), 0, -1):
            end = text[-size:]
            if any(len(mark) > size and mark.startswith(end) for mark in watched):
                return size
        return 0

    def _enter(self, region: str) -> None:
        self._region, self._trims = region, True

    def _turn(self, mark: str) -> str:
        """What a mark changes; content that turned out to be some."""
        if self._is_harmony:
            return self._harmony_turn(mark)
        if self._reasoning is not None and mark in (self._reasoning.open, self._reasoning.close):
            self._space = ""
            self._enter("reasoning" if mark == self._reasoning.open else "content")
            return ""
        assert self._calls is not None
        raw = self._end_call(is_cut=False) if self._region == "call" else ""
        if mark == self._calls.close or mark in self._calls.skipped:
            self._trims = True
            return raw
        before, self._space = self._space, ""
        self._region = "call"
        self._call = _OpenCall(self._calls, mark, before)
        return raw + (self._take(mark) if self._calls.is_body(mark) else "")

    def _take(self, text: str) -> str:
        """Text between marks, of the region that it is in."""
        if self._header is not None:
            self._header += text
            return ""
        if self._region == "call" and self._call is not None:
            self.events += self._call.push(text)
            return ""
        if self._trims:
            text = text.lstrip("\n") if self._region == "content" else text.lstrip()
        if not text:
            return ""
        self._trims = False
        holds = self._region == "reasoning" or self._calls is not None
        text, self._space = self._space + text, ""
        if holds:
            kept = text.rstrip()
            text, self._space = kept, text[len(kept) :]
        if self._region == "reasoning":
            if text:
                self.events.append(Event("reasoning", text))
            return ""
        self._has_content = self._has_content or bool(text)
        return text

    def _end_call(self, *, is_cut: bool) -> str:
        """Closes a call; the raw text where it is none."""
        call, self._call = self._call, None
        self._region = "content"
        self._trims = True
        if call is None:
            return ""
        events, num_complete, raw = call.end(is_cut, self._schemas)
        self.events += events
        self.num_calls += num_complete
        if raw is None:
            return ""
        self.num_failed += 1
        self._trims, self._has_content = False, True
        return raw

    def _harmony_turn(self, mark: str) -> str:
        if mark == "<|message|>":
            header, self._header = self._header or "", None
            named = _RECIPIENT.search(header)
            words = header.replace("<|channel|>", " ").split()
            if named is not None and self._reads_calls:
                self._region = "call"
                self._call = _OpenCall(_HARMONY_CALLS, mark, "", name=named[1])
            else:
                self._enter("reasoning" if "analysis" in words else "content")
                self._trims = False
            return ""
        if mark in ("<|end|>", "<|call|>", "<|return|>", "<|start|>"):
            content = self._end_call(is_cut=False) if self._region == "call" else ""
            self._space = ""
            self._region, self._header = "content", ""
            return content
        self._header = (self._header or "") + (mark if mark == "<|channel|>" else " ")
        return ""


_HARMONY_CALLS = Calls(style="named", open=())


class _OpenCall:
    """A call that is being written: its name and arguments as soon as they are certain."""

    def __init__(self, calls: Calls, mark: str, before: str, name: str | None = None):
        self._calls, self._parts = calls, [before]
        if not calls.is_body(mark):  # else it comes as text too
            self._parts.append(mark)
        self._num_before = len(self._parts)
        self._name, self._seeks = name, calls.style in ("json", "named")
        self._stream: ArgumentStream | None = None

    @property
    def _body(self) -> str:
        return "".join(self._parts[self._num_before :])

    def push(self, text: str) -> list[Event]:
        found: list[Event] = []
        if self._stream is None:
            self._parts.append(text)
            if not self._seeks:
                return []
            body = self._body
            begun = self._begin(body)
            if begun is None:
                self._seeks = len(body) <= _LONGEST_HEAD
                return []
            name, text = begun
            self._stream = ArgumentStream()
            found.append(Event("call", name))
        piece = self._stream.push(text)
        if piece:
            found.append(Event("arguments", piece))
        return found

    def _begin(self, body: str) -> tuple[str, str] | None:
        """The name, and what of the arguments has come; None as long as that is not certain."""
        if self._name is not None:
            return (self._name, body) if body.strip() else None
        calls = self._calls
        if calls.style == "named":
            name, end, rest = body.partition(calls.name_close)
            name = name.strip().removeprefix(calls.name_open)
            return (name, rest) if end and _NAME.fullmatch(name) else None
        return ArgumentStream.head(body, calls.arguments_key)

    def end(
        self, is_cut: bool, schemas: Mapping[str, object]
    ) -> tuple[list[Event], int, str | None]:
        """Its last events, how many calls are complete, and the raw text if it is no call."""
        if self._stream is not None:
            return [Event("call_end", "")], int(self._stream.is_complete), None
        found: list[Call] = []
        if not is_cut and self._name is not None:  # of harmony, without a body
            found = [Call(self._name, "{}")]
        elif not is_cut and self._calls.tags is not None:
            found = tagged_calls(self._body, self._calls, schemas)
        elif not is_cut and self._calls.notation is not None:
            found = notation_calls(self._body, self._calls)
        elif not is_cut:
            found = calls_of(self._body, self._calls.arguments_key)
        if not found:
            close = "" if is_cut or self._calls.close is None else self._calls.close
            return [], 0, "".join(self._parts) + close
        events = []
        for name, arguments in found:
            events += [Event("call", name), Event("arguments", arguments), Event("call_end", "")]
        return events, len(found), None
