"""`OpenCall`: a tool call while it is being written, as events of the answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from rooflax.server.arguments import (
    ArgumentStream,
    ToolCall,
    calls_of,
    is_object,
    may_be_call,
    notation_calls,
    tagged_calls,
)
from rooflax.server.call_formats import Calls

EventKind = Literal["content", "reasoning", "call", "arguments", "call_end"]
LONGEST_HEAD = 512
"""Characters within which a call must have said its name to be streamed."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Event(NamedTuple):
    """A piece of an answer.

    Attributes:
        text: of a call its name; of its end "", or where its arguments do not parse, the whole
            call as the model wrote it.
        at: of content: characters of the whole answer before it.
        id: of a call, where the model has written one.
    """

    kind: EventKind
    text: str
    at: int = 0
    id: str = ""


class OpenCall:
    """A call that is being written: its name and arguments as soon as they are certain.

    Args:
        before: white space that stands before it.
        at: where that begins in the whole answer.

    Attributes:
        close: ends it; without one the message does.
        has_close: that is a part of it.
        is_none: what was pushed cannot be a call.
        stream: the arguments that are being streamed, once there are some.
    """

    def __init__(self, calls: Calls, mark: str, before: str, at: int, name: str | None = None):
        self._calls, self._parts, self.before, self.at = calls, [before], before, at
        if not calls.is_body(mark):  # else it comes as text too
            self._parts.append(mark)
        self.close = calls.close
        self.has_close = calls.tags is not None and mark == calls.name_open
        if calls.tags is not None and self.has_close:
            self.close = calls.tags.body_end
        self._is_bare = calls.style == "json" and calls.is_body(mark)
        self.is_none = False
        self._num_before = len(self._parts)
        self._name, self._seeks = name, calls.style in ("json", "named")
        self.stream: ArgumentStream | None = None
        self._arguments: list[str] = []

    @property
    def is_certain(self) -> bool:
        """Whether it can no longer turn out to be content."""
        return self.stream is not None

    @property
    def _body(self) -> str:
        return "".join(self._parts[self._num_before :])

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        self._parts.append(text)
        if self.stream is None:
            if not self._seeks:
                return []
            body = self._body
            begun = self._begin(body)
            if begun is None:
                self._seeks = len(body) <= LONGEST_HEAD
                self.is_none = self._is_bare and not may_be_call(body)
                return []
            name, text, identity = begun
            self.stream = ArgumentStream()
            events.append(Event("call", name, id=identity))
        piece = self.stream.push(text)
        if piece:
            self._arguments.append(piece)
            events.append(Event("arguments", piece))
        return events

    def _begin(self, body: str) -> tuple[str, str, str] | None:
        """The name, what of the arguments has come, and the id; None as long as that is not
        certain."""
        if self._name is not None:
            return (self._name, body, "") if body.strip() else None
        calls = self._calls
        if calls.style == "named":
            name, end, rest = body.partition(calls.name_close)
            name, identity = name.strip().removeprefix(calls.name_open), ""
            if calls.id_open:
                name, _, identity = name.partition(calls.id_open)
            return (name, rest, identity) if end and _NAME.fullmatch(name) else None
        head = ArgumentStream.head(body)
        return None if head is None else (*head, "")

    def end(
        self, is_cut: bool, is_closed: bool, schemas: Mapping[str, object]
    ) -> tuple[list[Event], str | None]:
        """Its last events, and the raw text if it is no call."""
        close = self.close if is_closed and self.close and not self.has_close else ""
        raw = "".join(self._parts) + close
        if self.stream is not None:
            events: list[Event] = []
            if not self._arguments and not is_cut:
                self._arguments.append("{}")
                events.append(Event("arguments", "{}"))
            parses = is_object("".join(self._arguments))
            return [*events, Event("call_end", "" if parses else raw)], None
        calls = [] if is_cut else self._whole(schemas)
        if not calls:
            return [], raw
        events = []
        for name, arguments, identity in calls:
            events += [Event("call", name, id=identity), Event("arguments", arguments)]
            events.append(Event("call_end", ""))
        return events, None

    def _whole(self, schemas: Mapping[str, object]) -> list[ToolCall]:
        """The calls of a body that was not streamed."""
        calls, body = self._calls, self._body
        if self._name is not None:  # of harmony, without a body
            return [ToolCall(self._name, "{}")]
        if calls.tags is not None:
            return tagged_calls(body, calls, schemas)
        if calls.notation is not None:
            return notation_calls(body, calls)
        name = body.strip().removeprefix(calls.name_open).strip()
        if calls.style == "named" and name in schemas:
            return [ToolCall(name, "{}")]
        return calls_of(body, schemas if self._is_bare else None)
