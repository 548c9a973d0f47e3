"""A checkpoint's own `response_template`, transformers' description of its answers, as a format.

Taken where it can be followed token by token in linear time: literal marks, names between two
literals, and bodies of JSON, or of JSON whose texts have marks of their own for quotes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rooflax.server.call_formats import CallFormat, CallGrammar, Calls, Reasoning, formats

_NAMED = re.compile(r"(?P<head>.*)\(\?P<name>[^()]*\)(?P<tail>.*)", re.DOTALL)
_FIELDS = ("thinking", "reasoning_content", "reasoning", "content", "tool_calls", "role")
_KEYS = {"open", "open_pattern", "close", "content", "content_args", "repeats", "optional",
         "transform", "join"}  # fmt: skip
_JSON_ARGS = {"unquoted_keys", "string_delims", "allow_non_json"}


class Unreadable(Exception):
    """Reason why a response_template is not followed, as the end of a sentence."""


def read_response_template(spec: Any) -> CallFormat:
    """
    Raises:
        Unreadable: it is none, or beyond what is followed.
    """
    fields = spec.get("fields") if isinstance(spec, Mapping) else None
    if not isinstance(fields, Mapping) or spec.get("version", 1) != 1:
        raise Unreadable("it has no fields of version 1")
    for name, field in fields.items():
        if name not in _FIELDS or not isinstance(field, Mapping):
            raise Unreadable(f"the field {str(name)[:40]!r} is not known")
        unknown = sorted(set(field) - _KEYS)
        if unknown:
            raise Unreadable(f"{name}.{unknown[0]} is not followed")
    thoughts = [fields[name] for name in _FIELDS[:3] if name in fields]
    reasoning = _reasoning(thoughts[0]) if thoughts else None
    if "open" in fields.get("content", {}) or "open_pattern" in fields.get("content", {}):
        raise Unreadable("its content has marks of its own")
    calls = _calls(fields["tool_calls"]) if "tool_calls" in fields else None
    return CallFormat("response_template", (), (), calls, reasoning)


def _reasoning(field: Mapping[str, Any]) -> Reasoning:
    if field.get("content", "text") != "text":
        raise Unreadable("its reasoning is no text")
    return Reasoning(_literal(field, "open"), _literal(field, "close"))


def _literal(field: Mapping[str, Any], name: str) -> str:
    text = field.get(name)
    if not isinstance(text, str) or not text:
        raise Unreadable(f"{name} is not one literal text")
    return text


def _calls(field: Mapping[str, Any]) -> Calls:
    if field.get("content") != "json":
        raise Unreadable(f"calls in {field.get('content', 'text')!r:.40} are not followed")
    args = field.get("content_args", {})
    if not isinstance(args, Mapping) or set(args) - _JSON_ARGS:
        raise Unreadable("content_args are not followed")
    close = _literal(field, "close") if "close" in field else None
    quote = _quote(args)
    if "open_pattern" not in field:
        if quote:
            raise Unreadable("calls without a name before their arguments have quotes of their own")
        return _like_known(Calls("json", (_literal(field, "open"),), close))
    head, tail = _around_name(field["open_pattern"])
    _check_transform(field.get("transform"))
    if quote:
        mark, _, name_open = head.partition(">")
        mark = f"{mark}>" if _ else head
        named = Calls("gemma", (mark,), close, name_open=name_open, name_close=tail, quote=quote)
        return _like_known(named)
    if not tail:
        raise Unreadable("nothing ends the name of a call")
    return _like_known(Calls("named", (head,), close, name_close=tail))


def _quote(args: Mapping[str, Any]) -> str:
    delims = args.get("string_delims", [])
    if not delims:
        return ""
    pairs = [pair for pair in delims if isinstance(pair, list) and len(pair) == 2]
    if len(delims) != 1 or len(pairs) != 1 or pairs[0][0] != pairs[0][1] or not pairs[0][0]:
        raise Unreadable("string_delims are more than one mark")
    return pairs[0][0]


def _around_name(pattern: Any) -> tuple[str, str]:
    """The literal texts around the group `name` of a pattern."""
    match = _NAMED.fullmatch(pattern) if isinstance(pattern, str) else None
    if match is None:
        raise Unreadable("open_pattern is more than a name between two literal texts")
    return _unescaped(match["head"]), _unescaped(match["tail"])


def _unescaped(pattern: str) -> str:
    """The text that a pattern of literals means; white space that may be there is left out."""
    text = re.sub(r"\\s[*?]", "", pattern)
    if re.search(r"(?<!\\)[.^$*+?{}()|\[\]]|\\[A-Za-mo-z0-9]", text):
        raise Unreadable("open_pattern is more than a name between two literal texts")
    return re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], text)


def _check_transform(transform: Any) -> None:
    function = transform.get("function") if isinstance(transform, Mapping) else None
    wanted = {"name": "{name}", "arguments": "{content}"}
    if function != wanted and transform != wanted:
        raise Unreadable("transform does something else than to name the call")


def _like_known(calls: Calls) -> Calls:
    """Adds the grammar of a known format with the same marks, or one made of its own."""
    import msgspec

    for known in (each.calls for each in formats()):
        if known is not None and msgspec.structs.replace(known, grammar=None) == calls:
            return known
    close = calls.close or ""
    after = "" if calls.style == "named" and calls.close is None else close
    written = CallGrammar(calls.open[0], after, "" if calls.close else None)
    return msgspec.structs.replace(calls, grammar=written)
