"""Which cases of a parametrized test are nightly, said where the test stands."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cases(
    values: Iterable[Any],
    *,
    nightly: Collection[Any] = (),
    default: Collection[Any] | None = None,
    every_jax: Collection[Any] = (),
) -> list[Any]:
    """The values of `pytest.mark.parametrize`, some of them marked.

    Args:
        values: plain ones, tuples of several arguments, or cases that have a `name`.
        nightly: of these (values, or their names), those that run with --every-case only.
        default: the ones that are not nightly, instead of `nightly`.
        every_jax: those that run on every JAX, in a module that is `oldest_jax`.

    Raises:
        ValueError: one of them is not among the values.
    """
    values = list(values)
    names = [getattr(value, "name", value) for value in values]
    if unknown := [one for one in (*nightly, *(default or ()), *every_jax) if one not in names]:
        raise ValueError(f"{unknown} are not among the cases {names}.")
    marked = []
    for value, name in zip(values, names, strict=True):
        left_out = name in nightly if default is None else name not in default
        marks = [pytest.mark.nightly] * left_out + [pytest.mark.every_jax] * (name in every_jax)
        marked.append(pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks))
    return marked
