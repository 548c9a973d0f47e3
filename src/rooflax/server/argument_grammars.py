"""Lark grammars of a call's arguments: as JSON, between tags, or in a notation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from rooflax.server.call_formats import Calls, Style, Tags
from rooflax.server.lark import ANY_TEXT, LarkGrammar, Unforceable
from rooflax.server.notation import Notation

_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_SCALARS = ("integer", "number")
_OF_TEXT = {"type", "minLength", "maxLength"}
_ANNOTATIONS = {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema",
    "$id", "$comment", "$defs", "definitions", "nullable",
}  # fmt: skip
_KNOWN = {
    "string": {"minLength", "maxLength"},
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}


def object_schema(schema: Any) -> dict[str, Any]:
    """A function's parameters, which are an object whatever else their schema allows."""
    return {**(schema or {}), "type": "object"}


def _json_arguments(grammar: LarkGrammar, calls: Calls, schema: Any) -> tuple[str, str]:
    return grammar.json(object_schema(schema)), "}" if calls.style == "json" else ""


def _tagged_arguments(grammar: LarkGrammar, calls: Calls, schema: Any) -> tuple[str, str]:
    assert calls.tags is not None
    if schema is None:
        return _any_tagged(grammar, calls.tags), calls.tags.body_end
    return _tagged(grammar, calls, schema), calls.tags.body_end


def _noted_arguments(grammar: LarkGrammar, calls: Calls, schema: Any) -> tuple[str, str]:
    assert calls.notation is not None
    values = _Values(grammar, calls.notation, schema or {})
    return values.any_arguments() if schema is None else values.arguments(), ""


ARGUMENTS: dict[Style, Callable[[LarkGrammar, Calls, Any], tuple[str, str]]] = {
    "json": _json_arguments,
    "named": _json_arguments,
    "harmony": _json_arguments,
    "tagged": _tagged_arguments,
    "python": _noted_arguments,
    "gemma": _noted_arguments,
}
"""By a format's style, the rule of a call's arguments and the text that ends them."""


def _tagged(grammar: LarkGrammar, calls: Calls, schema: Mapping[str, Any]) -> str:
    """Parameters one by one: texts as they are, everything else as JSON."""
    tags, shared = calls.tags, {k: schema[k] for k in ("$defs", "definitions") if k in schema}
    assert tags is not None
    parameters = []
    for key, of_key in schema.get("properties", {}).items():
        head = grammar.text(tags.key_open + key + tags.key_close + tags.value_open)
        end = tags.value_close
        if is_text(of_key):
            _check(of_key, _OF_TEXT)
            value = grammar.until(end, _text_pattern(of_key))
        elif isinstance(of_key, Mapping) and "enum" in of_key and _texts(of_key["enum"]):
            value = grammar.choice([grammar.text(item + end) for item in of_key["enum"]])
        else:
            json_schema = {**of_key, **shared} if isinstance(of_key, Mapping) else of_key
            value = f"%json {json.dumps(json_schema)} {grammar.text(end)}"
        optional = "" if key in schema.get("required", ()) else "?"
        parameters.append(f"({head} {value}){optional}")
    return " ".join(parameters) or '""'


def _any_tagged(grammar: LarkGrammar, tags: Tags) -> str:
    """Parameters of any names and texts."""
    value = grammar.until(tags.value_close)
    head, behind = grammar.text(tags.key_open), grammar.text(tags.key_close + tags.value_open)
    return f"({head} {_KEY} {behind} {value})*"


def is_text(schema: Any) -> bool:
    """Whether a schema means any text, which is then written without quotes."""
    return isinstance(schema, Mapping) and schema.get("type") == "string" and "enum" not in schema


def _texts(items: Any) -> bool:
    return isinstance(items, list) and bool(items) and all(isinstance(item, str) for item in items)


def _text_pattern(schema: Mapping[str, Any]) -> str:
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return f"/(?s:.{{{least},{most}}})/" if least or most != "" else ANY_TEXT


def _check(schema: Mapping[str, Any], known: set[str]) -> None:
    """
    Raises:
        Unforceable: it has a keyword that the notation cannot force.
    """
    for name in schema:
        if name not in known | _ANNOTATIONS:
            raise Unforceable(f"{name[:40]} cannot be forced in this model's format")


class _Values:
    """Values of a notation by their schemas."""

    def __init__(self, grammar: LarkGrammar, notation: Notation, root: Mapping[str, Any]):
        self._grammar, self._notation, self._root = grammar, notation, root
        self._refs: dict[str, str] = {}
        self._any = ""

    def any_arguments(self) -> str:
        """Pairs of any names and values."""
        text, notation = self._grammar.text, self._notation
        pair = f"{_KEY} {text(notation.assign)} {self.any()}"
        inner = f"({pair} ({text(notation.comma)} {pair})*)?"
        return f"{text(notation.open)} {inner} {text(notation.close)}"

    def arguments(self) -> str:
        notation = self._notation
        return self._pairs(self._root, notation.open, notation.close, notation.assign, is_bare=True)

    def _pairs(
        self, schema: Mapping[str, Any], open: str, close: str, assign: str, *, is_bare: bool
    ) -> str:
        """An object: properties in their order, those that need not be there perhaps left out."""
        grammar, required = self._grammar, schema.get("required", ())
        first = more = grammar.text(close)
        for key, of_key in reversed(schema.get("properties", {}).items()):
            name = key if is_bare else self._quoted(key)
            pair = f"{grammar.text(name + assign)} {self.value(of_key)}"
            behind = f"{grammar.text(self._notation.comma)} {pair} {more}"
            if key in required:
                first, more = grammar.rule(f"{pair} {more}"), grammar.rule(behind)
            else:
                first = grammar.rule(f"{pair} {more} | {first}")
                more = grammar.rule(f"{behind} | {more}")
        return f"{grammar.text(open)} {first}"

    def _quoted(self, text: str) -> str:
        quote = self._notation.quote
        return f"{quote}{text}{quote}" if quote else json.dumps(text, ensure_ascii=False)

    def value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping) or not set(schema) - _ANNOTATIONS:
            return self.any()
        if "$ref" in schema:
            return self._ref(schema["$ref"])
        if "enum" in schema or "const" in schema:
            items = schema["enum"] if "enum" in schema else [schema["const"]]
            return self._grammar.choice([self._grammar.text(self.literal(i)) for i in items])
        for name in ("anyOf", "oneOf"):
            if name in schema:
                _check(schema, {name, "type"})
                return self._grammar.choice([self.value(each) for each in schema[name]])
        kind = schema.get("type")
        if isinstance(kind, list):
            ways = [self.value({**schema, "type": each}) for each in kind]
            return self._grammar.choice(ways)
        return self._of_kind(kind, schema)

    def _of_kind(self, kind: Any, schema: Mapping[str, Any]) -> str:
        grammar, words = self._grammar, self._notation.words
        if kind in _SCALARS:
            return f"%json {json.dumps({**schema, 'type': kind})}"
        if kind in ("boolean", "null"):
            return grammar.choice([grammar.text(w) for w in words[:2]]) if kind == "boolean" else (
                grammar.text(words[2])
            )  # fmt: skip
        _check(schema, {"type", *_KNOWN.get(kind, ())})
        if kind == "string":
            return self._string(schema)
        if kind == "array":
            return self._array(schema)
        if kind == "object" and "properties" in schema:
            return self._pairs(schema, "{", "}", self._notation.pair, is_bare=self._has_bare_keys)
        return self.any()

    @property
    def _has_bare_keys(self) -> bool:
        return bool(self._notation.quote)

    def _string(self, schema: Mapping[str, Any]) -> str:
        quote = self._notation.quote
        if not quote:
            return f"%json {json.dumps({**schema, 'type': 'string'})}"
        return f"{self._grammar.text(quote)} {self._grammar.until(quote, _text_pattern(schema))}"

    def _array(self, schema: Mapping[str, Any]) -> str:
        grammar, item = self._grammar, self.value(schema.get("items"))
        item = grammar.rule(item)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        behind = f"({grammar.text(self._notation.comma)} {item})"
        times = f"{{{max(0, least - 1)},{'' if most is None else max(0, most - 1)}}}"
        items = f"{item} {behind}{times}"
        inner = items if least else f"({items})?"
        return f'"[" {inner if most != 0 else ""} "]"'

    def _ref(self, ref: Any) -> str:
        if not isinstance(ref, str) or not ref.startswith("#/"):
            _check({"$ref": ref}, set())
        if ref in self._refs:
            return self._refs[ref]
        target: Any = self._root
        for part in ref.removeprefix("#/").split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        if target is None:
            _check({"$ref": ref}, set())
        name = self._refs[ref] = f"ref{len(self._refs)}x{len(self._grammar.rules)}"
        self._grammar.rules.append(f"{name}: {self.value(target)}")
        return name

    def any(self) -> str:
        """Any value."""
        if self._any:
            return self._any
        grammar, notation = self._grammar, self._notation
        name = self._any = f"any{len(grammar.rules)}"
        comma, quote = grammar.text(notation.comma), notation.quote
        text = self._string({})
        key = _KEY if quote else text
        pair = f"{key} {grammar.text(notation.pair)} {name}"
        words = " | ".join(grammar.text(word) for word in notation.words)
        several = [f'"[" ({name} ({comma} {name})*)? "]"', f'"{{" ({pair} ({comma} {pair})*)? "}}"']
        body = f'{text} | %json {{"type": "number"}} | {words} | {" | ".join(several)}'
        grammar.rules.append(f"{name}: {body}")
        return name

    def literal(self, value: Any) -> str:
        """A value as it is written."""
        notation = self._notation
        if isinstance(value, str):
            return self._quoted(value)
        if isinstance(value, bool) or value is None:
            return notation.words[{True: 0, False: 1, None: 2}[value]]
        if isinstance(value, list):
            return f"[{notation.comma.join(map(self.literal, value))}]"
        if isinstance(value, Mapping):
            pairs = [
                f"{key if self._has_bare_keys else self._quoted(key)}{notation.pair}"
                f"{self.literal(item)}"
                for key, item in value.items()
            ]
            return f"{{{notation.comma.join(pairs)}}}"
        return json.dumps(value)
