"""Arguments of tool calls: JSON text followed while it arrives, and whole bodies of calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call as clients are told it: arguments are the JSON of an object."""

    name: str
    arguments: str


_HEAD = (
    r'\s*\{{\s*"name"\s*:\s*"(?P<name>[A-Za-z0-9_.-]{{1,64}})"\s*,\s*"{key}"\s*:\s*(?P<rest>[{{].*)'
)
_NOTABLE = re.compile(r'["\\{}\[\]]')


class ArgumentStream:
    """Follows one JSON object: gives its text as it is written, and nothing of what comes after."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self.is_complete = False

    @staticmethod
    def head(body: str, arguments_key: str) -> tuple[str, str] | None:
        """Name and beginning of the arguments of `{"name": ..., "arguments": {...`; None where
        this is not what is written, or not yet."""
        found = re.match(_HEAD.format(key=re.escape(arguments_key)), body, re.DOTALL)
        return (found["name"], found["rest"]) if found else None

    def push(self, text: str) -> str:
        """The part of the text that belongs to the object."""
        if self.is_complete:
            return ""
        if self._depth == 0:
            text = text.lstrip()
        at = 0
        while True:
            if self._is_escaped:
                if at >= len(text):
                    return text
                self._is_escaped = False
                at += 1
            found = _NOTABLE.search(text, at)
            if found is None:
                return text
            at = found.end()
            if self._note(found[0]):
                return text[:at]

    def _note(self, sign: str) -> bool:
        """What a sign changes; whether it was the last."""
        if self._in_string:
            if sign == "\\":
                self._is_escaped = True
            elif sign == '"':
                self._in_string = False
        elif sign == '"':
            self._in_string = True
        elif sign in "{[":
            self._depth += 1
        elif sign in "}]":
            self._depth -= 1
            self.is_complete = self._depth <= 0
        return self.is_complete


def calls_of(body: str, arguments_key: str) -> list[Call]:
    """The calls of a whole body, an object or a list of them; none where it is neither."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return []
    calls = []
    for item in found if isinstance(found, list) else [found]:
        name = item.get("name") if isinstance(item, dict) else None
        if not isinstance(name, str) or not name:
            return []
        arguments = item.get(arguments_key)
        if isinstance(arguments, str):  # some models write JSON within JSON
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                return []
        if not isinstance(arguments, dict):
            return []
        calls.append(Call(name, json.dumps(arguments, ensure_ascii=False)))
    return calls


_FUNCTION = re.compile(r"\s*<function=([A-Za-z0-9_.-]{1,64})>")
_OPEN, _CLOSE = re.compile(r"<parameter=([^>\s]{1,64})>\n?"), "</parameter>"


def xml_calls(body: str, schemas: Mapping[str, Any]) -> list[Call]:
    """The call of `<function=N><parameter=K>V</parameter></function>`; none where it is none."""
    head = _FUNCTION.match(body)
    if head is None or "</function>" not in body:
        return []
    schema = schemas.get(head[1])
    known = schema.get("properties", {}) if isinstance(schema, Mapping) else {}
    arguments, at = {}, head.end()
    while (opened := _OPEN.search(body, at)) is not None:
        end = body.find(_CLOSE, opened.end())
        if end < 0:
            return []
        value = body[opened.end() : end].removesuffix("\n")
        arguments[opened[1]] = _typed(value, known.get(opened[1]))
        at = end + len(_CLOSE)
    return [Call(head[1], json.dumps(arguments, ensure_ascii=False))]


def _typed(text: str, schema: Any) -> Any:
    """A plain text as its schema wants it; text where that is not said, or does not fit."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind in (None, "string"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
