"""Choosing the implementation of an operation: the platform's best, or the one asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from rooflax.ops import native

F = TypeVar("F", bound=Callable)


def choose(operation: str, implementations: Mapping[str, F], name: str | None) -> F:
    """The implementation called `name`; None takes the best that is here, the last that can run.

    Raises:
        NotImplementedError: no implementation of that name is here.
    """
    here = available(implementations)
    if name is None:
        return list(here.values())[-1]
    if name in here:
        return here[name]
    if name in implementations:
        raise NotImplementedError(f"{operation}'s {name!r} cannot run: {native.status().reason}.")
    raise NotImplementedError(
        f"{operation} has no {name!r} implementation, only {', '.join(here)}."
    )


def available(implementations: Mapping[str, F]) -> dict[str, F]:
    """Those that can run here: the native ones need the library, and the CPU as platform."""
    return {
        name: function
        for name, function in implementations.items()
        if name != "native" or native.is_ready()
    }
