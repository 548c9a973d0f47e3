"""Declarations of fields: everything that is to be known of one, beside its type and default.

A dataclass whose fields are made by `declare` is a table. Checks, flags, environment variables,
HTTP routes, the sampler's columns and the docs read it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, TypeVar

from rooflax.fields.kinds import Kind, is_whole

Api = Literal["completions", "chat", "responses", "messages"]
COMPLETIONS: Api = "completions"
CHAT: Api = "chat"
RESPONSES: Api = "responses"
MESSAGES: Api = "messages"
_KEY = "declaration"
Class = TypeVar("Class", bound=type)
Taker = TypeVar("Taker", bound=Callable)


@dataclass(frozen=True)
class Http:
    """A field as an API has it.

    Attributes:
        name: there; None is the field's own.
        kind: where the API takes another range.
        help: where the API means something else by it.
        is_computed: the route makes the field's value of this and of other fields.
    """

    apis: tuple[Api, ...] = (COMPLETIONS, CHAT)
    name: str | None = None
    kind: Kind | None = None
    help: str | None = None
    required: bool = False
    is_computed: bool = False


BOTH = (Http(),)
"""Completions and chats have the field as it is here."""


@dataclass(frozen=True)
class Declaration:
    """A field.

    Attributes:
        help: one sentence without a full stop, for every reader.
        default: of the dataclass; None is unset.
        unset: what an unset field means in the end; None says nothing.
        shown_default: what people read instead of `unset` and `default`.
        shows_range: people read the range wherever they read the help, not in docstrings alone.
        flags: of the command line; with a metavar alone, the one of the field's name.
        metavar: of the flags' value.
        group: heading of the flags.
        http: how APIs have it.
    """

    name: str
    kind: Kind
    help: str
    default: Any = None
    unset: Any = None
    shown_default: str | None = None
    shows_range: bool = False
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    group: str = ""
    http: tuple[Http, ...] = ()

    @property
    def default_text(self) -> str:
        """The default for people; empty where it goes without saying."""
        if self.shown_default is not None:
            return self.shown_default
        known = self.default if self.unset is None else self.unset
        if known is None or known is False or known == ():
            return ""
        return f"{known:g}" if isinstance(known, float) else f"{known}"

    @property
    def sentence(self) -> str:
        """The help with the default."""
        return self.described(self.shows_range)

    def described(self, shows_range: bool = True) -> str:
        """The help with the default, and the range if it is to be shown."""
        ends = f"; {self.kind.range}" if shows_range and self.kind.range else ""
        default = f"; default {self.default_text}" if self.default_text else ""
        return f"{self.help}{ends}{self.kind.words}{default}"

    def http_of(self, api: Api) -> list[Http]:
        """Names of the field in one API: none, one or several."""
        return [one for one in self.http if api in one.apis]


def declare(
    kind: Kind,
    help: str,
    *,
    default: Any = None,
    factory: Callable[[], Any] | None = None,
    of: type[Declaration] = Declaration,
    repr: bool = True,
    **further: Any,
) -> Any:
    """A dataclass field with its declaration.

    Args:
        of: what else the table says of its fields.
        repr: whether the dataclass shows the value.
        further: as `of` has it.
    """
    declared = of("", kind, help, default, **further)
    default_or_factory: dict[str, Any] = (
        {"default": default} if factory is None else {"default_factory": factory}
    )
    return dataclasses.field(metadata={_KEY: declared}, repr=repr, **default_or_factory)


@cache
def declarations(table: type) -> dict[str, Any]:
    """The fields of a table by name, in order.

    Args:
        table: a dataclass of `declare`d fields, or a TypedDict annotated with declarations.
    """
    if dataclasses.is_dataclass(table):
        declared = {field.name: field.metadata.get(_KEY) for field in dataclasses.fields(table)}
    else:
        declared = {name: kind.__metadata__[0] for name, kind in table.__annotations__.items()}
    named = {}
    for name, one in declared.items():
        if one is not None:
            by_name = (f"--{name.replace('_', '-')}",) if one.metavar else ()
            named[name] = replace(one, name=name, flags=one.flags or by_name)
    return named


def variable_of(flags: Sequence[str]) -> str:
    """The environment variable that may stand for a flag: ROOFLAX_API_KEY for --api-key."""
    long = next((flag for flag in flags if flag.startswith("--")), "")
    return f"ROOFLAX_{long.removeprefix('--').replace('-', '_').upper()}"


def read_fields(values: Any) -> None:
    """Checks the fields of a table's new instance, and keeps what their kinds make of them.

    Raises:
        RequestError: with the field.
    """
    for name, one in declarations(type(values)).items():
        value = getattr(values, name)
        if value is not None or one.default is not None or one.kind.repeats:
            object.__setattr__(values, name, one.kind.read(name, value))


def documented(table: Class) -> Class:
    """Ends the docstring of a table with its fields."""
    table.__doc__ = f"{inspect.cleandoc(table.__doc__ or '')}\n\nAttributes:\n{_listed(table)}"
    return table


def read_settings(taker: str, settings: Mapping[str, Any], table: type) -> dict[str, Any]:
    """The settings as their fields keep them; None stays, and is the default.

    Args:
        taker: who was given them, for the error.

    Raises:
        TypeError: a setting is no field of the table.
        RequestError: a value is of another kind than the field's, or out of range.
    """
    known, found = declarations(table), dict[str, Any]()
    for name, value in settings.items():
        if name not in known:
            raise TypeError(f"{taker}() got an unexpected keyword argument {name!r}")
        whole = int(value) if is_whole(value) else value
        found[name] = None if value is None else known[name].kind.read(name, whole)
    return found


def takes(table: type) -> Callable[[Taker], Taker]:
    """Shows the fields of a table in place of `**settings`, in a signature and its docstring.

    Args:
        table: a TypedDict annotated with declarations.
    """

    def shown(taker: Taker) -> Taker:
        function: Any = taker
        if inspect.isclass(function):  # its own __signature__ would be that of its subclasses too
            function = function.__init__
        signature = inspect.signature(function)
        taken = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        for name, one in declarations(table).items():
            kind = table.__annotations__[name].__origin__
            kind = getattr(kind, "__forward_arg__", kind)
            keyword = inspect.Parameter.KEYWORD_ONLY
            taken.append(inspect.Parameter(name, keyword, default=one.default, annotation=kind))
        function.__signature__ = signature.replace(parameters=taken)
        doc = inspect.cleandoc(taker.__doc__ or "")
        taker.__doc__ = re.sub(r"(?m)^    settings: .*$", lambda _: _listed(table), doc)
        return taker

    return shown


def _listed(table: type) -> str:
    named = declarations(table).items()
    return "\n".join(f"    {name}: {one.described()}." for name, one in named)
