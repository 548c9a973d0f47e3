"""Lark grammars of answers: forced or strict calls, and forms that come behind reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from rooflax.errors import RequestError
from rooflax.fields.sampling import check_regex
from rooflax.server.argument_grammars import ARGUMENTS, object_schema
from rooflax.server.call_formats import CALL_KEYS, CallFormat, Calls
from rooflax.server.errors import ApiError
from rooflax.server.lark import ANY_TEXT, LarkGrammar

Thinks = Literal["opened", "may", "not"]
"""The prompt's end has opened the reasoning; the answer may begin with it, or does not."""
_BARE_SLASH = re.compile(r"(?P<escaped>(?<!\\)(?:\\\\)*)/")
"""One that no backslash stands before, or that those before it do not escape."""


def call_alone(
    format: CallFormat | None, name: str, schema: Any, special: Mapping[str, int]
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
    format: CallFormat,
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


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _thought(grammar: LarkGrammar, format: CallFormat, thinks: Thinks) -> str:
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
    format: CallFormat,
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
            message = str(error)
            raise ApiError(message, code="invalid_schema", param="structured_outputs") from None
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


def _json_call(grammar: LarkGrammar, calls: Calls, name: str, schema: Any) -> str:
    """One call as JSON of a schema."""
    key = calls.arguments_key
    arguments = _moved(object_schema(schema), f"#/properties/{key}")
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
