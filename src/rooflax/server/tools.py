"""Tools of a request: checked, chosen, and the grammar that forces calls of them."""

from __future__ import annotations

import hashlib
import json
import secrets
import string
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rooflax.server.call_formats import CallFormat
from rooflax.server.errors import ApiError
from rooflax.server.grammars import Thinks, call_alone, call_grammar
from rooflax.server.lark import Unforceable
from rooflax.server.tables import MAX_TOOLS

MAX_SCHEMA_BYTES = 64 * 1024
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolChoice:
    """Tools that may be called.

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
    format: CallFormat | None = None

    @property
    def schemas(self) -> dict[str, Any]:
        """The parameters of each function."""
        return {tool["function"]["name"]: _parameters(tool["function"]) for tool in self.tools}

    @property
    def _functions(self) -> dict[str, Mapping[str, Any]]:
        """Functions that a forced answer may call."""
        functions = [tool["function"] for tool in self.tools]
        return {each["name"]: each for each in functions if self.name in (None, each["name"])}

    def trials(self, special: Mapping[str, int]) -> dict[str, str]:
        """Grammar by which each function's schema is tried."""
        grammars = {}
        for name, function in self._functions.items():
            if self.is_forced or function.get("strict"):
                with suppress(Unforceable):
                    schema = _parameters(function)
                    grammars[name] = call_alone(self.format, name, schema, special) or ""
        return {name: grammar for name, grammar in grammars.items() if grammar}

    def _schema(
        self, function: Mapping[str, Any], special: Mapping[str, int], faults: Mapping[str, str]
    ) -> Any:
        """The parameters by which a call is forced; None is any object.

        Raises:
            ApiError: the function is strict, and they cannot be forced.
        """
        name, schema = function["name"], _parameters(function)
        if not (self.is_forced or function.get("strict")):
            return None
        why = faults.get(name)
        try:
            call_alone(self.format, name, schema, special)
        except Unforceable as error:
            why = str(error)
        if not why:
            return schema
        if function.get("strict"):
            raise ApiError(
                f"The function {name!r} is strict, and its schema cannot be forced ({why}); change "
                f"that, or leave strict out.",
                code="invalid_schema",
                param="tools",
            )
        return None

    def grammar(
        self,
        special: Mapping[str, int],
        thinks: Thinks,
        form: Mapping[str, Any] | None = None,
        faults: Mapping[str, str] | None = None,
    ) -> str | None:
        """The Lark grammar of the answer; None where it is free.

        Args:
            special: ids of the tokenizer's special tokens.
            thinks: whether reasoning comes first.
            form: of an answer without calls.
            faults: by function, what is wrong with its trial.

        Raises:
            ApiError: the format has none, or not for the schema of a strict function.
        """
        is_strict = any(tool["function"].get("strict") for tool in self.tools)
        if not self.tools or not (self.is_forced or is_strict or form or not self.is_parallel):
            return None
        assert self.format is not None
        calls = call_grammar(
            self.format,
            {
                name: self._schema(function, special, faults or {})
                for name, function in self._functions.items()
            },
            special,
            is_forced=self.is_forced,
            is_parallel=self.is_parallel and self.name is None,
            thinks=thinks,
            form=form,
        )
        if calls is None:
            what = "tool_choice" if self.is_forced else "parallel_tool_calls"
            raise ApiError(
                f"Calls cannot be forced in this model's format ({self.format.name}); leave "
                f"tool_choice at auto, and strict and parallel_tool_calls out.",
                code="unsupported_value",
                param=what,
            )
        return calls


def tool_choice(fields: Mapping[str, Any], format: CallFormat) -> ToolChoice:
    """
    Args:
        format: of the model.

    Raises:
        ApiError: the tools or the choice cannot be.
    """
    tools, choice = fields.get("tools", []), fields.get("tool_choice")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError("tool_choice is given without tools; give some.", param="tool_choice")
        return ToolChoice()
    _check(tools)
    if choice == "none":
        return ToolChoice()
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
        is_parallel=fields.get("parallel_tool_calls", True),
        format=format,
    )


def _check(tools: Sequence[Mapping[str, Any]]) -> None:
    names = [tool["function"]["name"] for tool in tools]
    if len(tools) > MAX_TOOLS:
        raise ApiError(f"There are {len(tools)} tools; at most {MAX_TOOLS} fit.", param="tools")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ApiError(f"Two tools are named {twice!r}; name each once.", param="tools")
    for number, tool in enumerate(tools):
        check_parameters(_parameters(tool["function"]), f"tools[{number}].function.parameters")
    size = len(json.dumps(tools).encode())
    if size > MAX_SCHEMA_BYTES:
        raise ApiError(
            f"The tools have {size} bytes; they may have {MAX_SCHEMA_BYTES}.",
            code="invalid_schema",
            param="tools",
        )


def check_parameters(schema: Mapping[str, Any], where: str) -> None:
    """
    Raises:
        ApiError: the schema of a function's arguments, which stands at `where`, allows no object.
    """
    if not _may_be_object(schema):
        raise ApiError(
            f"{where} allows no object, and a function's arguments are one; say type: object.",
            code="invalid_schema",
            param=where,
        )


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's arguments; one that states none takes none, as OpenAI defines."""
    return function.get("parameters", _NO_PARAMETERS)


def _may_be_object(schema: Mapping[str, Any]) -> bool:
    """Whether the schema itself, without what it refers to, has room for an object."""
    kind = schema.get("type")
    if isinstance(kind, str | list) and kind != "object" and "object" not in kind:
        return False
    if "const" in schema and not isinstance(schema["const"], dict):
        return False
    values = schema.get("enum")
    return not isinstance(values, list) or any(isinstance(value, dict) for value in values)


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


def new_call_id(length: int = 0, prefix: str = "call_") -> str:
    """A new id of a call.

    Args:
        length: of families whose templates want ids of so many letters and digits.
    """
    size = length or 24
    drawn = "".join(secrets.choice(_ALPHABET) for _ in range(size))
    return drawn if length else prefix + drawn


def fit_call_ids(messages: Sequence[dict[str, Any]], length: int) -> None:
    """Ids of another's making, in a conversation, as ones that the template takes: the same each
    time.

    Args:
        length: of the ids; 0 takes any.
    """
    if not length:
        return

    def fitting(call_id: str) -> str:
        if len(call_id) == length and set(call_id) <= set(_ALPHABET):
            return call_id
        digest = hashlib.sha256(call_id.encode()).digest()
        return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in digest[:length])

    for message in messages:
        for call in message.get("tool_calls", ()):
            call["id"] = fitting(call["id"])
        if "tool_call_id" in message:
            message["tool_call_id"] = fitting(message["tool_call_id"])
