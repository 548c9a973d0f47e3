"""Lark grammars of answers: calls that are forced or strict, and forms that come behind reasoning.

Special tokens stand in them as `<[id]>`: no text spells those, so free text ends where one comes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rooflax.errors import RequestError
from rooflax.fields.sampling import check_regex
from rooflax.server.errors import ApiError
from rooflax.server.formats import CALL_KEYS, Calls, Format, Style, Tags
from rooflax.server.notation import Notation

Thinks = Literal["opened", "may", "not"]
"""The prompt's end has opened the reasoning; the answer may begin with it, or does not."""
ANY_TEXT = "/(?s:.*)/"
_BARE_SLASH = re.compile(r"(?P<escaped>(?<!\\)(?:\\\\)*)/")
"""One that no backslash stands before, or that those before it do not escape."""
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


class LarkGrammar:
    """Rules that are being written.

    Args:
        special: ids of special tokens by their texts.
    """

    def __init__(self, special: Mapping[str, int]):
        self._special = special
        texts = sorted(special, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None
        self._rules: list[str] = []
        self._refs: dict[str, str] = {}

    def finish(self, start: str) -> str:
        """All of it."""
        return "\n".join([f"start: {start}", *self._rules])

    def rule(self, body: str, *, kind: str = "r", attribute: str = "") -> str:
        """The name of a new rule."""
        name = f"{kind}{len(self._rules)}"
        self._rules.append(f"{name}{attribute}: {body}")
        return name

    def _parts(self, text: str) -> list[str]:
        return [part for part in self._split.split(text) if part] if self._split else [text]

    def text(self, text: str) -> str:
        """A fixed text, with the special tokens that it names."""
        return " ".join(self._term(part) for part in self._parts(text)) or '""'

    def _term(self, part: str) -> str:
        if part in self._special:
            return f"<[{self._special[part]}]>"
        return json.dumps(part, ensure_ascii=False)

    def is_special(self, text: str) -> bool:
        """Whether a text begins with a special token."""
        return bool(text) and self._parts(text)[0] in self._special

    def until(self, close: str, pattern: str = ANY_TEXT) -> str:
        """Free text, and what ends it."""
        if self.is_special(close):
            return f"{pattern} {self.text(close)}"
        first, *rest = self._parts(close)
        body = f"{pattern} {json.dumps(first, ensure_ascii=False)}"
        return " ".join([self.rule(body, attribute="[lazy]"), *(self._term(each) for each in rest)])

    def json(self, schema: Any) -> str:
        """JSON of a schema."""
        return f"%json {json.dumps(schema)}"

    def choice(self, several: Sequence[str]) -> str:
        return self.rule(" | ".join(several))


class Unforceable(Exception):
    """Reason why a format's notation cannot force a schema."""


def call_alone(
    format: Format | None, name: str, schema: Any, special: Mapping[str, int]
) -> str | None:
    """The grammar of one call, by which is tried whether its schema can be forced; None where the
    format has none.

    Raises:
        Unforceable: the schema is beyond what the format's notation can force.
    """
    calls = format.calls if format is not None else None
    if calls is None or calls.grammar is None:
        return None
    grammar = LarkGrammar(special)
    return grammar.finish(_call(grammar, calls, name, schema))


def call_grammar(
    format: Format,
    schemas: Mapping[str, Any],
    special: Mapping[str, int],
    *,
    is_forced: bool,
    is_parallel: bool,
    thinks: Thinks,
    form: Mapping[str, Any] | None = None,
) -> str | None:
    """The grammar of an answer with valid calls; None where the format has none.

    Args:
        schemas: the parameters of each function that may be called; None takes any.
        is_forced: without a call there is no answer.
        thinks: whether reasoning comes first.
        form: of an answer without calls; free text if there is none.

    Raises:
        Unforceable: as `call_alone`.
        ApiError: the form is a grammar itself.
    """
    calls = format.calls
    written = calls.grammar if calls is not None else None
    if calls is None or written is None:
        return None
    grammar = LarkGrammar(special)
    # Beside a form that begins as a call does, both have to be the same kind of rule.
    write = _json_call if form and calls.style == "json" and calls.is_whole_message else _call
    call = grammar.choice([write(grammar, calls, name, each) for name, each in schemas.items()])
    more = ""
    if is_parallel and written.between is not None:
        more = f" ({grammar.text(written.between)} {call})*"
    before, after = grammar.text(written.first), grammar.text(written.last)
    body = f"{before} {call}{more} {after}"
    text = "" if format.channels is None else grammar.text(format.channels.answer)
    if form and not is_forced:
        body = f"({body} | {text} {grammar.rule(_form(form, 'tools'))})"
    elif not is_forced:
        body = _with_text(grammar, calls, schemas, (call, f"{more} {after}"), text)
    return grammar.finish(f"{_thought(grammar, format, thinks)}{body}")


def _with_text(
    grammar: LarkGrammar,
    calls: Calls,
    schemas: Mapping[str, Any],
    parts: tuple[str, str],
    channel: str,
) -> str:
    """An answer of text, or with calls: free text ends where the mark of a call begins.

    Args:
        parts: the first call, and what comes behind it.
        channel: what opens the text, in formats with channels.
    """
    assert calls.grammar is not None
    call, behind = parts
    opened = grammar.text(calls.grammar.first)
    head = calls.grammar.first + calls.head(next(iter(schemas)))
    if channel:
        return f"({channel} {ANY_TEXT} | {call}{behind})"
    others = "|".join(_escaped(mark) for mark in calls.open if mark == calls.name_open)
    without = f" & ~/(?s:.*({others}).*)/" if others else ""
    if grammar.is_special(head):
        text = grammar.rule(ANY_TEXT + without, kind="T") if others else ANY_TEXT
        return f"{text} ({opened} {call}{behind})?"
    marks = [each for each in (calls.grammar.first, *calls.open) if each and head.startswith(each)]
    mark = max(marks, key=len)
    pattern = _escaped(mark)
    if calls.style == "json" and calls.is_body(mark):
        pattern += rf'\s*"({"|".join(CALL_KEYS)})"'
    if calls.is_whole_message:
        text = rf"{ANY_TEXT} & ~/\s*({pattern})(?s:.*)/"
        return f"({grammar.rule(text, kind='T')} | {opened} {call}{behind})"
    text = grammar.rule(f"{ANY_TEXT} & ~/(?s:.*({pattern}).*)/{without}", kind="T")
    lead = grammar.rule(f"/(?s:.*)({pattern})/{without}", attribute="[lazy]")
    heads = [
        _call(grammar, calls, name, schema, skipped=mark, before=calls.grammar.first)
        for name, schema in schemas.items()
    ]
    return f"({text} | {lead} {grammar.choice(heads)}{behind})"


def _object(schema: Any) -> dict[str, Any]:
    """A function's parameters, which are an object whatever else their schema allows."""
    return {**(schema or {}), "type": "object"}


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _thought(grammar: LarkGrammar, format: Format, thinks: Thinks) -> str:
    """Optional or required prefix before the answer: reasoning or channels."""
    if format.channels is not None:
        ways = [
            f"{grammar.text(each)} {grammar.until(format.channels.close)}"
            for each in format.channels.open
        ]
        return f"{grammar.choice(ways)}* "
    if thinks == "not" or format.reasoning is None:
        return ""
    thought = rf"{grammar.until(format.reasoning.close)} /\n*/ "
    return thought if thinks == "opened" else f"({grammar.text(format.reasoning.open)} {thought})? "


def behind_reasoning(
    form: Mapping[str, Any],
    format: Format,
    special: Mapping[str, int],
    *,
    thinks: Thinks,
) -> dict[str, Any]:
    """A form of the answer alone, where reasoning or channels come before it.

    Raises:
        ApiError: it is a grammar, which cannot stand within another.
    """
    if not form or (thinks == "not" and format.channels is None):
        return dict(form)
    if "grammar" in form and thinks == "may":
        return dict(form)
    grammar = LarkGrammar(special)
    answer = grammar.rule(_form(form, "reasoning"))
    opened = f"{grammar.text(format.channels.answer)} " if format.channels else ""
    thought = _thought(grammar, format, thinks)
    return {"grammar": grammar.finish(f"{thought}{opened}{answer}")}


def _form(form: Mapping[str, Any], beside: str) -> str:
    """The form of an answer within another grammar.

    Raises:
        ApiError: it is a grammar itself.
    """
    ((kind, value),) = form.items()
    if kind == "json_schema":
        return f"%json {value if isinstance(value, str) else json.dumps(value)}"
    if kind == "regex":
        try:
            check_regex(value)
        except RequestError as error:
            said = str(error)
            raise ApiError(said, code="invalid_schema", param="structured_outputs") from None
        return "/" + _BARE_SLASH.sub(r"\g<escaped>\/", value) + "/"
    raise ApiError(
        f"A grammar or a choice does not go with {beside}; ask for a JSON schema or a regex, or "
        f"leave the {beside} out.",
        code="unsupported_value",
        param="structured_outputs",
    )


def _call(
    grammar: LarkGrammar,
    calls: Calls,
    name: str,
    schema: Any,
    *,
    skipped: str = "",
    before: str = "",
) -> str:
    """One call, without the part of its head that was said already."""
    assert calls.grammar is not None
    head = (before + calls.head(name)).removeprefix(skipped)
    opened, after = grammar.text(head), calls.grammar.after
    if calls.grammar.has_id:
        length = calls.id_length
        opened += f" /[A-Za-z0-9]{{{length}}}/ {grammar.text(calls.name_close)}"
    arguments, end = ARGUMENTS[calls.style](grammar, calls, schema)
    return f"{opened} {arguments} {grammar.text(end + after)}"


def _json_arguments(grammar: LarkGrammar, calls: Calls, schema: Any) -> tuple[str, str]:
    return grammar.json(_object(schema)), "}" if calls.style == "json" else ""


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


def _json_call(grammar: LarkGrammar, calls: Calls, name: str, schema: Any) -> str:
    """One call as JSON of a schema."""
    key = calls.arguments_key
    arguments = _moved(_object(schema), f"#/properties/{key}")
    pairs = {"name": {"const": name}, key: arguments}
    return grammar.json(
        {"type": "object", "properties": pairs, "required": ["name", key],
         "additionalProperties": False}
    )  # fmt: skip


def _moved(schema: Any, to: str) -> Any:
    """A schema that stands at a place within another; what it refers to has moved with it."""
    if isinstance(schema, list):
        return [_moved(each, to) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: to + each[1:]
        if name == "$ref" and isinstance(each, str) and each.startswith("#")
        else _moved(each, to)
        for name, each in schema.items()
    }


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
        some = f"{item} {behind}{times}"
        inner = some if least else f"({some})?"
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
        name = self._refs[ref] = f"ref{len(self._refs)}x{len(self._grammar._rules)}"
        self._grammar._rules.append(f"{name}: {self.value(target)}")
        return name

    def any(self) -> str:
        """Any value."""
        if self._any:
            return self._any
        grammar, notation = self._grammar, self._notation
        name = self._any = f"any{len(grammar._rules)}"
        comma, quote = grammar.text(notation.comma), notation.quote
        text = self._string({})
        key = _KEY if quote else text
        pair = f"{key} {grammar.text(notation.pair)} {name}"
        words = " | ".join(grammar.text(word) for word in notation.words)
        several = [f'"[" ({name} ({comma} {name})*)? "]"', f'"{{" ({pair} ({comma} {pair})*)? "}}"']
        body = f'{text} | %json {{"type": "number"}} | {words} | {" | ".join(several)}'
        grammar._rules.append(f"{name}: {body}")
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
