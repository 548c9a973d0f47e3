"""Arguments of tool calls: JSON text followed while it arrives, and whole bodies of calls."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from rooflax.server.argument_grammars import is_text
from rooflax.server.call_formats import CALL_KEYS, Calls
from rooflax.server.notation import NoNotation, Scanner


class ToolCall(NamedTuple):
    """A call as clients are told it: arguments are the JSON of an object.

    Attributes:
        id: where the model has written one.
    """

    name: str
    arguments: str
    id: str = ""


_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[A-Za-z0-9_.-]{1,64})"'
    r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?P<rest>[{].*)',
    re.DOTALL,
)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_OF_CALL = {*CALL_KEYS, "id"}
_SAYS_TYPE = {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"}
_QUOTE_OR_ESCAPE = re.compile(r'["\\]')
_NOTABLE = re.compile(r'["\\{}\[\]]')


class ArgumentStream:
    """Follows one JSON object: gives its text as it is written, and nothing of what comes after."""

    def __init__(self) -> None:
        self._depth, self._in_string, self.is_escaped = 0, False, False
        self.is_complete = self._is_malformed = False

    @staticmethod
    def head(body: str) -> tuple[str, str] | None:
        """Name and beginning of the arguments of `{"name": ..., "arguments": {...`; None where
        this is not what is written, or not yet."""
        match = _HEAD.match(body)
        return (match["name"], match["rest"]) if match else None

    @property
    def is_in_string(self) -> bool:
        """Whether what comes next stands in a string; no longer known behind what is no JSON."""
        return self._in_string and not self._is_malformed

    def push(self, text: str) -> str:
        """The part of the text that belongs to the object."""
        if self.is_complete:
            return ""
        if self._depth == 0:
            text = text.lstrip()
        at = 0
        while True:
            if self.is_escaped:
                if at >= len(text):
                    return text
                self.is_escaped = False
                at += 1
            match = _NOTABLE.search(text, at)
            if match is None:
                return text
            at = match.end()
            if self._note(match[0]):
                return text[:at]

    def _note(self, sign: str) -> bool:
        """Changes the state at a character; whether it was the last."""
        if self._in_string:
            if sign == "\\":
                self.is_escaped = True
            elif sign == '"':
                self._in_string = False
        elif sign == '"':
            self._in_string = True
        elif sign == "\\":
            self._is_malformed = True
        elif sign in "{[":
            self._depth += 1
        elif sign in "}]":
            self._depth -= 1
            self.is_complete = self._depth <= 0
        return self.is_complete


class StringEnd:
    """Looks for the end of a string of JSON in what has been held back since within it.

    Args:
        mark: a text that has been read within the string, which may be a mark and no part of it.
        is_escaped: its first sign is.
    """

    def __init__(self, mark: str, is_escaped: bool):
        self.mark, self._parts, self._size = mark, list[str](), 0
        self._is_escaped = is_escaped
        self._end = 0
        self.is_decided = False

    @property
    def text(self) -> str:
        """All that was pushed."""
        return "".join(self._parts)

    @property
    def size(self) -> int:
        """Characters that belong to the string; 0 if it does not end as one of JSON does."""
        return self._end if self.is_decided else 0

    def push(self, text: str) -> None:
        at, begun = 0, self._size
        self._parts.append(text)
        self._size += len(text)
        while not self._end and at < len(text):
            if self._is_escaped:
                self._is_escaped, at = False, at + 1
                continue
            match = _QUOTE_OR_ESCAPE.search(text, at)
            if match is None:
                return
            at = match.end()
            self._is_escaped = match[0] == "\\"
            if not self._is_escaped:
                self._end = begun + at
        behind = text[at:].lstrip(" \t\r\n") if self._end else ""
        if behind and not self.is_decided:
            self.is_decided = True
            if behind[0] not in ",:]}":
                self._end = 0


def may_be_call(body: str) -> bool:
    """Whether the beginning of an object may be that of a call."""
    rest = body.lstrip().removeprefix("{").lstrip()
    keys = [f'"{key}"' for key in CALL_KEYS]
    return not rest or any(key.startswith(rest[: len(key)]) for key in keys)


def is_object(text: str) -> bool:
    """Whether a text is the JSON of an object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def calls_of(body: str, names: Container[str] | None = None) -> list[ToolCall]:
    """The calls of a whole body, an object or a list of them; none where it is neither.

    Args:
        names: those of which a call may have no arguments; None takes any.
    """
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return []
    calls = []
    for item in parsed if isinstance(parsed, list) else [parsed]:
        name = item.get("name") if isinstance(item, dict) else None
        if not isinstance(name, str) or not name:
            return []
        arguments = item.get("arguments", item.get("parameters"))
        if isinstance(arguments, str) and is_object(arguments):  # JSON within JSON
            arguments = json.loads(arguments)
        if arguments in (None, "") and set(item) <= _OF_CALL and (names is None or name in names):
            arguments = {}
        if not isinstance(arguments, dict):
            return []
        identity = item.get("id", "")
        call_id = identity if isinstance(identity, str) else ""
        calls.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False), call_id))
    return calls


def tagged_calls(body: str, calls: Calls, schemas: Mapping[str, Any]) -> list[ToolCall]:
    """The call of a name and parameters between tags; none where it is none."""
    tags = calls.tags
    assert tags is not None
    head = body.strip()
    if not head.startswith(calls.name_open) or tags.body_end not in head:
        return []
    head = head.removeprefix(calls.name_open)
    sizes = [head.find(end) for end in (calls.name_close.strip() or "\n", tags.key_open)]
    end = min((size for size in sizes if size >= 0), default=len(head))
    name = head[:end].strip()
    if not _NAME.fullmatch(name):
        return []
    schema = schemas.get(name)
    known = schema.get("properties", {}) if isinstance(schema, Mapping) else {}
    key_close, value_open = tags.key_close.strip(), tags.value_open.strip()
    arguments, at = {}, end
    while (opened := head.find(tags.key_open, at)) >= 0:
        opened += len(tags.key_open)
        closed = head.find(key_close, opened)
        begun = head.find(value_open, closed + len(key_close)) if closed >= 0 else -1
        ended = head.find(tags.value_close.strip(), begun + len(value_open)) if begun >= 0 else -1
        if ended < 0:
            return []
        value = head[begun + len(value_open) : ended]
        if tags.padding:
            value = value.removeprefix(tags.padding).removesuffix(tags.padding)
        key = head[opened:closed].strip()
        arguments[key] = _typed(value, known.get(key))
        at = ended
    return [ToolCall(name, json.dumps(arguments, ensure_ascii=False))]


def _typed(text: str, schema: Any) -> Any:
    """Converts a plain text to its schema's type; text if that is missing or does not fit."""
    if not isinstance(schema, Mapping) or is_text(schema) or not set(schema) & _SAYS_TYPE:
        return text
    if "enum" in schema and text in schema["enum"]:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def notation_calls(body: str, calls: Calls) -> list[ToolCall]:
    """The calls of a body in a notation of its own; none where it is something else."""
    notation = calls.notation
    assert notation is not None
    scanner, parsed = Scanner(body, notation), []
    is_list = calls.style == "python"

    def one() -> None:
        if calls.name_open:
            scanner.want(calls.name_open)
        name = scanner.name()
        arguments = {} if scanner.is_at_end and not is_list else scanner.arguments()
        parsed.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False)))

    try:
        if is_list:
            scanner.want("[")
            scanner.several("]", one)
        else:
            one()
    except NoNotation:
        return []
    return parsed if scanner.is_at_end else []
