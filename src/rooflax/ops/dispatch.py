"""Operations and their backends: which one runs is decided while a program is traced, and recorded.

`None` takes the best that supports the arguments; a name is that one or an error with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import jax

from rooflax.errors import RequestError
from rooflax.ops import accelerator, block_sizes, native


@dataclass(frozen=True)
class Backend:
    """An implementation of an operation. All its functions have the operation's arguments.

    Attributes:
        run: computes it.
        unsupported: why it cannot take the arguments, as a sentence, before any work; None if it
            can.
        reads_stacks: whether it reads a member of a stack where it lies, which is a function of the
            stack, a leaf of stacked weights; the others get copies.
        reads_blocks: it reads blocks of the KV cache where they lie, and keeps no scores.
        keeps_bf16: it reads bfloat16 weights at their width beside float32 activations.
    """

    run: Callable[..., Any]
    unsupported: Callable[..., str | None] = lambda *_, **__: None
    reads_stacks: Callable[[Any], bool] = lambda _: False
    reads_blocks: bool = False
    keeps_bf16: bool = False


@dataclass(frozen=True)
class Ran:
    """Record of the implementation that ran.

    Attributes:
        implementation: its name.
        passed_over: pairs of a better one's name and why it did not run, the best first.
    """

    implementation: str
    passed_over: tuple[tuple[str, str], ...] = ()


TRAINED = "trained"
"""Implementations with gradients, for training alone."""
PLATFORMS = {"native": ("cpu",), "pallas": ("gpu", "tpu")}
"""Platforms of the implementations that need something; the others are everywhere."""
MISSING: Mapping[str, Callable[[], str | None]] = {
    "native": lambda: None if native.is_ready() else native.status().reason,
    "pallas": accelerator.missing,
    TRAINED: lambda: None,
}
"""The reason why those cannot run here, or None. An operation that lacks one of them runs XLA's."""

_record: dict[tuple[str, str | None], dict[Ran, None]] = {}
"""By operation and by the implementation that was asked for. A compiled program is traced once in a
process, whichever thread runs it, so the record is the process's too."""


def what_ran(asked: str | None) -> dict[str, list[Ran]]:
    """Per operation what ran in this process where `asked` was the implementation's name."""
    return {name: list(ran) for (name, other), ran in _record.items() if other == asked}


@cache
def _shared(run: Callable[..., Any]) -> Callable[..., Any]:
    """Traced and lowered once for all layers of a program whose arguments have the same shapes: a
    kernel may take seconds, and XLA inlines the call."""
    return jax.jit(run)


class Operation:
    """An operation and its backends.

    Args:
        name: as errors and the record say it.
        backends: by name, the best last; a module's name stands for its `BACKEND`, and is imported
            when it is asked for: "{platform}" in it is the platform's.
    """

    def __init__(self, name: str, backends: Mapping[str, Backend | str]):
        self.name, self.backends = name, dict(backends)

    def __call__(self, implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        """Runs the best backend for the arguments, or the one of that name.

        Raises:
            RequestError: the one of that name is not here, or does not take these arguments.
        """
        ran = self.choose(implementation, *args, **kwargs)
        _record.setdefault((self.name, implementation), {})[ran] = None
        run = self.backend(ran.implementation).run
        if ran.implementation == "pallas" and not block_sizes.are_asked_for():
            run = _shared(run)
        return run(*args, **kwargs)

    def choose(self, implementation: str | None, *args: Any, **kwargs: Any) -> Ran:
        """Chooses the implementation for these arguments, by their shapes and types."""
        if implementation is not None:
            name = self._named(implementation)
            if why := self.backend(name).unsupported(*args, **kwargs):
                raise RequestError(f"{why}.", param="kernels")
            return Ran(name)
        platform, passed_over = accelerator.platform(), []
        for name in reversed(self.backends):
            if platform not in PLATFORMS.get(name, (platform,)):
                continue
            why = MISSING.get(name, lambda: None)()
            why = why or self.backend(name).unsupported(*args, **kwargs)
            if why is None:
                return Ran(name, tuple(passed_over))
            passed_over.append((name, why))
        raise AssertionError(f"nothing computes {self.name}: {passed_over}")

    def available(self) -> list[str]:
        """Names of those that can run here and be asked for, the best last."""
        names = (name for name in self.backends if name != TRAINED)
        return [name for name in names if not MISSING.get(name, lambda: None)()]

    def preferred(self, implementation: str | None) -> Backend:
        """The backend that is tried first: of that name, or the platform's best."""
        return self.backend(self._named(implementation or self.available()[-1]))

    def _named(self, name: str) -> str:
        """The backend of this name. An operation without a kernel is XLA's on every
        platform: there "native", "pallas" and "trained" are that.

        Raises:
            RequestError: it is not here.
        """
        if name in MISSING:
            if why := MISSING[name]():
                message = f"{self.name}'s {name!r} cannot run: {why}."
                raise RequestError(message, param="kernels")
            return name if name in self.backends else "xla"
        if name not in self.backends:
            here = ", ".join(self.available())
            message = f"{self.name} has no {name!r} implementation, only {here}."
            raise RequestError(message, param="kernels")
        return name

    def backend(self, name: str) -> Backend:
        """The one of this name, whether it can run here or not."""
        entry = self.backends[name]
        if isinstance(entry, Backend):
            return entry
        return import_module(entry.format(platform=accelerator.platform())).BACKEND
