"""Formats of tool calls and reasoning, as data: one file per format."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Literal

import msgspec

from rooflax.server.notation import PYTHON, Notation, gemma

CALL_KEYS = ("name", "type", "arguments", "parameters")
"""One of these comes first in a call that is JSON."""
Style = Literal["json", "named", "tagged", "python", "gemma", "harmony"]
GENERIC = "generic"
"""Calls of a model whose chat template shows none that are known."""
HARMONY = "harmony"
"""GPT-OSS's: an answer is a series of channels."""


class CallGrammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The text around calls that a grammar forces.

    Attributes:
        before, after: each call.
        between: of two calls in one answer; None where an answer has one call.
        first, last: around all calls.
        has_id: between a call's name and its arguments.
    """

    before: str
    after: str
    between: str | None
    first: str = ""
    last: str = ""
    has_id: bool = False


class Tags(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Texts around each parameter's name and value, and behind all of them.

    Attributes:
        padding: may stand around a value, once, and is no part of it.
    """

    key_open: str
    key_close: str
    value_open: str
    value_close: str
    body_end: str = ""
    padding: str = ""


class Calls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Format of a tool call.

    Attributes:
        style: "json" is an object (or a list of them) with name and arguments; in the others the
            name comes before the arguments, which are JSON ("named"), parameters between tags
            ("tagged"), or in a notation of their own ("python", "gemma"); "harmony" has headers.
        open, close: texts around a call; without `close` the end of the message. A call may also
            begin with `name_open`.
        is_whole_message: `open` counts at the very beginning only, and is a part of the call where
            it is no mark such as <|python_tag|>.
        name_open, name_close: around the name.
        id_open: before an id behind the name.
        quote: of "gemma": around texts.
        skipped: texts that stand around calls and mean nothing.
        id_length: of the calls' ids; 0 is OpenAI's kind.
        grammar: None where calls cannot be forced.
    """

    style: Style
    open: tuple[str, ...]
    close: str | None = None
    arguments_key: str = "arguments"
    is_whole_message: bool = False
    name_open: str = ""
    name_close: str = ""
    id_open: str = ""
    tags: Tags | None = None
    quote: str = ""
    skipped: tuple[str, ...] = ()
    id_length: int = 0
    grammar: CallGrammar | None = None

    @property
    def notation(self) -> Notation | None:
        """Notation of the arguments, if they are not JSON."""
        if self.style == "python":
            return PYTHON
        return gemma(self.quote) if self.style == "gemma" else None

    def head(self, name: str) -> str:
        """A forced call up to its id, or its arguments."""
        assert self.grammar is not None
        if self.style == "json":
            return f'{self.grammar.before}{{"name": {json.dumps(name)}, "{self.arguments_key}": '
        behind = self.id_open if self.grammar.has_id else self.name_close
        return f"{self.grammar.before}{self.name_open}{name}{behind}"

    def is_body(self, mark: str) -> bool:
        """Whether a mark of `open` is itself a part of the call."""
        return mark == self.name_open or (self.is_whole_message and not mark.startswith("<"))

    @property
    def texts(self) -> tuple[str, ...]:
        """All that may name a special token which has to be read."""
        tags = () if self.tags is None else msgspec.structs.astuple(self.tags)
        return (*self.open, self.close or "", self.name_open, self.name_close,
                self.id_open, self.quote, *self.skipped, *tags)  # fmt: skip


class Channels(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Headers of an answer's parts, in grammars.

    Attributes:
        open, close: around what comes before the answer.
        answer: opens it.
    """

    open: tuple[str, ...]
    close: str
    answer: str


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Texts around the reasoning."""

    open: str
    close: str


class CallFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One format, and the chat templates that are written in it.

    Attributes:
        template_has, template_lacks: texts by which a chat template is known.
    """

    name: str
    template_has: tuple[str, ...]
    template_lacks: tuple[str, ...]
    calls: Calls | None
    reasoning: Reasoning | None
    channels: Channels | None = None

    def fits(self, template: str) -> bool:
        """Whether a chat template is written in it."""
        has = all(text in template for text in self.template_has)
        return has and not any(text in template for text in self.template_lacks)


@cache
def formats() -> tuple[CallFormat, ...]:
    """All of them."""
    names = sorted(path.name for path in files(__name__).iterdir() if path.name.endswith(".json"))
    return tuple(
        msgspec.convert(json.loads((files(__name__) / name).read_text("utf-8")), CallFormat)
        for name in names
    )


def format_of(template: str | None) -> CallFormat | None:
    """The format that a chat template is written in; None where none is known."""
    return next((each for each in formats() if template and each.fits(template)), None)


def with_calls(format: CallFormat | None) -> CallFormat:
    """A format whose calls are known: of one without them, Hermes's beside its own reasoning.

    A forced answer has one of them: models that never saw calls repeat them without end.
    """
    if format is not None and format.calls is not None:
        return format
    hermes = next(each.calls for each in formats() if each.name == "hermes" and each.calls)
    one = hermes.grammar and msgspec.structs.replace(hermes.grammar, between=None)
    calls = msgspec.structs.replace(hermes, grammar=one)
    if format is None:
        return CallFormat(GENERIC, (), (), calls, None)
    return msgspec.structs.replace(format, name=GENERIC, calls=calls)
