"""How families of models write tool calls and reasoning, as data: a file each beside this one."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

import msgspec

HARMONY = "harmony"
"""GPT-OSS's: an answer is a series of channels."""


class CallGrammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The text around a call that a grammar forces.

    Attributes:
        between: of two calls in one answer; None where an answer has one call.
    """

    before: str
    after: str
    between: str | None


class Calls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a call is written.

    Attributes:
        style: "json" is an object (or a list of them) with name and arguments; "named" has the
            name before the arguments; "xml" is qwen3-coder's; "harmony" has headers.
        open, close: texts around a call; without `close` the end of the message.
        is_whole_message: `open` counts at the very beginning only.
        name_end: of "named": between name and arguments.
        id_length: of the calls' ids; 0 is OpenAI's kind.
        grammar: None where calls cannot be forced.
    """

    style: str
    open: tuple[str, ...]
    close: str | None = None
    arguments_key: str = "arguments"
    is_whole_message: bool = False
    name_end: str = ""
    id_length: int = 0
    grammar: CallGrammar | None = None


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Texts around the reasoning."""

    open: str
    close: str


class Format(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One format, and the chat templates that are written in it.

    Attributes:
        template_has, template_lacks: texts by which a chat template is known.
    """

    name: str
    template_has: tuple[str, ...]
    template_lacks: tuple[str, ...]
    calls: Calls | None
    reasoning: Reasoning | None

    def fits(self, template: str) -> bool:
        """Whether a chat template is written in it."""
        has = all(text in template for text in self.template_has)
        return has and not any(text in template for text in self.template_lacks)


@cache
def formats() -> tuple[Format, ...]:
    """All of them."""
    found = sorted(path.name for path in files(__name__).iterdir() if path.name.endswith(".json"))
    return tuple(
        msgspec.convert(json.loads((files(__name__) / name).read_text("utf-8")), Format)
        for name in found
    )


def format_of(template: str | None) -> Format | None:
    """The format that a chat template is written in; None where none is known."""
    return next((each for each in formats() if template and each.fits(template)), None)
