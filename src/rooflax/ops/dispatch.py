"""Choosing the implementation of an operation: the platform's best, or the one asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rooflax.ops import accelerator, native


def choose(
    operation: str, implementations: Mapping[str, Callable[..., Any]], name: str | None
) -> Callable[..., Any]:
    """The implementation called `name`; None takes the best that is here, the last that can run.

    Of the Pallas kernels, None goes on to the next where one refuses what it is given. An operation
    that nobody wrote a kernel for is XLA's on every platform: there "native" and "pallas" are that.

    Raises:
        NotImplementedError: no implementation of that name is here.
    """
    here = available(implementations)
    if name is None:
        *others, (best_name, best) = here.items()
        return _or_else(best, others[-1][1]) if best_name == "pallas" else best
    if name in here:
        return here[name]
    if name in MISSING:
        if why := MISSING[name]():
            raise NotImplementedError(f"{operation}'s {name!r} cannot run: {why}.")
        return here["xla"]
    raise NotImplementedError(
        f"{operation} has no {name!r} implementation, only {', '.join(here)}."
    )


def _or_else(kernel: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return kernel(*args, **kwargs)
        except NotImplementedError:
            return other(*args, **kwargs)

    return run


def available(
    implementations: Mapping[str, Callable[..., Any]],
) -> dict[str, Callable[..., Any]]:
    """Those that can run here: the native ones need the library and the CPU as platform, Pallas
    ones a GPU or a TPU.
    """
    return {
        name: function
        for name, function in implementations.items()
        if name not in MISSING or not MISSING[name]()
    }


MISSING: Mapping[str, Callable[[], str | None]] = {
    "native": lambda: None if native.is_ready() else native.status().reason,
    "pallas": accelerator.missing,
}
"""Implementations that need something: what is missing here, or None."""
