"""Rewards: a user's Python function, loaded by its file's path, and the checks of what it gives.

The file is the user's own code and runs as such, with all that the user may do.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import os
import reprlib
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np

from rooflax.errors import RequestError, RewardError, first_line
from rooflax.train.corpus import Prompt

LARGEST = float(np.finfo(np.float32).max)
NO_LISTS = (str, bytes, Mapping, Set)
"""Types whose items are no rewards, or in no order."""


class Reward:
    """A function of prompts and completions, as TRL calls its reward functions.

    It is called by keyword: `prompts` and `completions`, lists of one item per answer, texts where
    the rows have texts and lists of messages where they have those; and each further key of the
    rows, as far as the function takes it. It gives as many finite numbers.

    Args:
        spec: "FILE.py:function".

    Raises:
        RequestError: there is no such file or function, or the file fails.
    """

    def __init__(self, spec: str):
        name, colon, function = spec.rpartition(":")
        self.path = Path(name)
        if not colon or self.path.suffix != ".py" or not function.isidentifier():
            raise RequestError(f"reward is {spec!r:.200}; give FILE.py:function.", param="reward")
        self.function = self._load(function)
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):  # some builtins
            raise RequestError(
                f"{self.path} has {function}, whose parameters nobody can tell; write a function.",
                param="reward",
            ) from None
        self._takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        self._names = {one.name for one in parameters}

    def _load(self, function: str) -> Callable[..., Any]:
        if not self.path.is_file():
            raise RequestError(f"reward names {self.path}, which is no file.", param="reward")
        spec = importlib.util.spec_from_file_location("rooflax_reward", self.path.resolve())
        if spec is None or spec.loader is None:
            raise RequestError(f"{self.path} cannot be loaded as Python.", param="reward")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where dataclasses look their module up
        try:
            with contextlib.redirect_stdout(sys.stderr):
                spec.loader.exec_module(module)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise RequestError(f"{self._where(error)} raised {_said(error)}.") from None
        loaded = getattr(module, function, None)
        if not callable(loaded):
            raise RequestError(f"{self.path} has no function {function}.", param="reward")
        return loaded

    def __call__(self, rows: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
        """A reward per completion.

        Args:
            rows: of each completion.

        Raises:
            RewardError: the function raised, or gave something else than as many finite numbers;
                with file and line.
        """
        keys = dict.fromkeys(key for row in rows for key in row.columns)
        arguments: dict[str, Any] = {
            "prompts": [
                row.prompt if isinstance(row.prompt, str) else list(row.prompt) for row in rows
            ],
            "completions": [
                text if isinstance(row.prompt, str) else [{"role": "assistant", "content": text}]
                for row, text in zip(rows, texts, strict=True)
            ],
        } | {key: [row.columns.get(key) for row in rows] for key in keys}
        if not self._takes_all:
            arguments = {key: value for key, value in arguments.items() if key in self._names}
        code = getattr(self.function, "__code__", None)
        at = f"{self.path}, line {code.co_firstlineno}," if code else f"{self.path}"
        result = self._called(copy.deepcopy(arguments))  # rows come again, and must be the same
        try:
            rewards = _numbers(result)
        except Exception:  # of the user's own types
            raise RewardError(
                f"The reward at {at} gave {reprlib.repr(result)}; it must give a list of numbers."
            ) from None
        if len(rewards) != len(texts):
            raise RewardError(
                f"The reward at {at} gave {len(rewards)} numbers for {len(texts)} completions."
            )
        for row, reward in zip(rows, rewards, strict=True):
            if not abs(reward) <= LARGEST:
                raise RewardError(
                    f"The reward at {at} gave {reward} for {row.where}; it must be finite in "
                    f"float32."
                )
        return rewards

    def _called(self, arguments: dict[str, Any]) -> Any:
        """The function's result, as a list if it has an order; what it prints goes to stderr."""
        process = os.getpid()
        try:
            with contextlib.redirect_stdout(sys.stderr):
                result = self.function(**arguments)
                is_list = isinstance(result, Iterable) and not isinstance(result, NO_LISTS)
                result = list(result) if is_list else result
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # of the user's own kinds
            raise RewardError(
                f"The reward at {self._where(error)} raised {_said(error)}."
            ) from None
        finally:
            if os.getpid() != process:  # the function forked; training is its parent's
                os._exit(1)
        return result

    def _where(self, error: BaseException) -> str:
        """The last line of the user's file that an error came through."""
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(self.path.resolve())
        ]
        if isinstance(error, SyntaxError) and error.lineno is not None:
            lines = [error.lineno]
        return f"{self.path}, line {lines[-1]}," if lines else f"{self.path}"


def _numbers(values: Any) -> list[float]:
    if not isinstance(values, list) or any(isinstance(each, str | bytes) for each in values):
        raise TypeError("no list of numbers")
    return [float(each) for each in values]


def _said(error: BaseException) -> str:
    try:
        line = first_line(error)
    except Exception:  # its own text fails
        return type(error).__name__
    return f"{type(error).__name__}: {line:.300}".rstrip(".")
