"""Tools of a request: checked, chosen, and the grammar that forces calls of them."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rooflax.server.errors import ApiError
from rooflax.server.formats import CallGrammar, Format
from rooflax.server.tables import MAX_TOOLS

MAX_SCHEMA_BYTES = 64 * 1024
_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolChoice:
    """What may be called.

    Attributes:
        tools: as chat templates take them; none where nothing may be called.
        is_forced: a call must be made.
        name: of the one function that must be called.
        is_parallel: several calls an answer are allowed.
        format: in which calls are written.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    is_forced: bool = False
    name: str | None = None
    is_parallel: bool = True
    format: Format | None = None

    @property
    def schemas(self) -> dict[str, Any]:
        """The parameters of each function."""
        return {
            tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in self.tools
        }

    @property
    def is_strict(self) -> bool:
        """Whether some function's arguments must be valid."""
        return any(tool["function"].get("strict") for tool in self.tools)

    def grammar(self, *, opens_reasoning: bool) -> str | None:
        """The Lark grammar of the answer; None where it is free.

        Args:
            opens_reasoning: the prompt's end has opened the reasoning, which comes first.
        """
        if not (self.is_forced or self.is_strict or (self.tools and not self.is_parallel)):
            return None
        assert self.format is not None
        written = self.format.calls and self.format.calls.grammar
        if written is None:
            what = "tool_choice" if self.is_forced else "parallel_tool_calls"
            raise ApiError(
                f"Calls cannot be forced in this model's format ({self.format.name}); leave "
                f"tool_choice at auto, and strict and parallel_tool_calls out.",
                code="unsupported_value",
                param=what,
            )
        return _grammar(self, written, opens_reasoning)


def tool_choice(found: Mapping[str, Any], format: Format | None) -> ToolChoice:
    """
    Args:
        format: of the model; None where it has none.

    Raises:
        ApiError: the tools or the choice cannot be.
    """
    tools, choice = found.get("tools", []), found.get("tool_choice")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError("tool_choice is given without tools; give some.", param="tool_choice")
        return ToolChoice()
    _check(tools)
    if choice == "none":
        return ToolChoice()
    if format is None or format.calls is None:
        raise ApiError(
            "The model's chat template knows no tools; ask without them.",
            code="tools_not_supported",
            param="tools",
        )
    name = None
    if isinstance(choice, dict):
        name = _named(choice, [tool["function"]["name"] for tool in tools])
    elif choice not in (None, "auto", "required"):
        raise ApiError(
            f"tool_choice is {choice!r:.60}; it must be auto, none, required or a function.",
            param="tool_choice",
        )
    return ToolChoice(
        tuple(tools),
        is_forced=choice == "required" or name is not None,
        name=name,
        is_parallel=found.get("parallel_tool_calls", True),
        format=format,
    )


def _check(tools: Sequence[Mapping[str, Any]]) -> None:
    names = [tool["function"]["name"] for tool in tools]
    if len(tools) > MAX_TOOLS:
        raise ApiError(f"There are {len(tools)} tools; at most {MAX_TOOLS} fit.", param="tools")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ApiError(f"Two tools are named {twice!r}; name each once.", param="tools")
    size = len(json.dumps(tools).encode())
    if size > MAX_SCHEMA_BYTES:
        raise ApiError(
            f"The tools have {size} bytes; they may have {MAX_SCHEMA_BYTES}.",
            code="invalid_schema",
            param="tools",
        )


def _named(choice: Mapping[str, Any], known: Sequence[str]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else choice.get("name")
    if choice.get("type") != "function" or not isinstance(name, str):
        raise ApiError(
            "tool_choice is an object of another kind; it must be type function with a name.",
            param="tool_choice",
        )
    if name not in known:
        raise ApiError(
            f"tool_choice names {name[:64]!r}; the tools are {', '.join(known)[:200]}.",
            param="tool_choice",
        )
    return name


def _grammar(choice: ToolChoice, written: CallGrammar, opens_reasoning: bool) -> str:
    format = choice.format
    assert format is not None
    assert format.calls is not None
    names = [choice.name] if choice.name else list(choice.schemas)
    heads = [
        f'{written.before}{{"name": {json.dumps(name)}, "{format.calls.arguments_key}": '
        for name in names
    ]
    ends = [
        f"%json {json.dumps(choice.schemas[name] or {'type': 'object'})} "
        f"{_literal('}' + written.after)}"
        for name in names
    ]

    def calls(skipped: str) -> str:
        of_each = [
            f"{_literal(head.removeprefix(skipped))} {end}"
            for head, end in zip(heads, ends, strict=True)
        ]
        return " | ".join(of_each)

    rules, more = [f"call: {calls('')}"], ""
    if choice.is_parallel and choice.name is None and written.between is not None:
        more = f" ({_literal(written.between)} call)*"
    body = f"call{more}"
    if not choice.is_forced:
        # Text ends where a call begins, if one does: its mark is the text's last part.
        mark = next(each for each in format.calls.open if heads[0].startswith(each))
        pattern = re.escape(mark).replace("/", r"\/")
        rules += [
            f"called: {calls(mark)}",
            f"lead[lazy]: /(?s:.*)({pattern})/",
            f"TEXT: /(?s:.*)/ & ~/(?s:.*({pattern}).*)/",
        ]
        body = f"(TEXT | lead called{more})"
    think = ""
    if opens_reasoning and format.reasoning is not None:
        rules.append(rf"thought[lazy]: /(?s:.*)/ {_literal(format.reasoning.close)}")
        think = r"thought /\n*/ "
    return "\n".join([f"start: {think}{body}", *rules])


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def call_id(length: int = 0, prefix: str = "call_") -> str:
    """A new id of a call.

    Args:
        length: of families whose templates want ids of so many letters and digits.
    """
    size = length or 24
    drawn = "".join(secrets.choice(_ALPHABET) for _ in range(size))
    return drawn if length else prefix + drawn
