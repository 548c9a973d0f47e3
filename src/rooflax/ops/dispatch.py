"""Choosing the implementation of an operation: the platform's best, or the one asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

F = TypeVar("F", bound=Callable)


def choose(operation: str, implementations: Mapping[str, F], name: str | None) -> F:
    """The implementation called `name`; None takes the best that is here, the last of the mapping.

    Raises:
        NotImplementedError: this operation has no implementation of that name.
    """
    if name is None:
        return list(implementations.values())[-1]
    if name not in implementations:
        have = ", ".join(implementations)
        raise NotImplementedError(f"{operation} has no {name!r} implementation; it has {have}.")
    return implementations[name]
