"""Sources of a checkpoint's tensors: files, or arrays already in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np

from rooflax.errors import CheckpointError
from rooflax.loading.safetensors import TensorInfo, dtype_name


class Source(Protocol):
    """Source of tensors: safetensors files, or arrays already in memory."""

    def names(self) -> list[str]: ...
    def info(self, name: str) -> TensorInfo: ...
    def read(self, name: str) -> np.ndarray: ...
    def release(self, name: str) -> None: ...
    def prefetch(self, name: str) -> None: ...


class ArraySource:
    """Tensors already in memory, by their checkpoint names: NumPy or anything with __dlpack__."""

    def __init__(self, mapping: Mapping[str, Any]):
        self._arrays = mapping

    def names(self) -> list[str]:
        return list(self._arrays)

    def info(self, name: str) -> TensorInfo:
        array = self.read(name)
        try:
            return TensorInfo(dtype_name(array.dtype), array.shape, array.nbytes)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from None

    def read(self, name: str) -> np.ndarray:
        array = self._arrays[name]
        if isinstance(array, np.ndarray):
            return array
        if not hasattr(array, "__dlpack__"):
            raise CheckpointError(
                f"{name} is a {type(array).__name__}; from_state_dict takes NumPy arrays or "
                f"arrays with __dlpack__."
            )
        return np.asarray(jax.dlpack.from_dlpack(array))

    def release(self, name: str) -> None:
        """Does nothing: arrays in memory stay."""

    def prefetch(self, name: str) -> None:
        """Does nothing: arrays are in memory."""


class DerivedSource:
    """A source whose tensors are made of those of another.

    Args:
        source: the stored tensors.
    """

    def __init__(self, source: Source):
        self._source = source

    def stored(self, name: str) -> tuple[str, ...]:
        """The stored tensors that one is made of."""
        return (name,)

    def release(self, name: str) -> None:
        for stored in self.stored(name):
            self._source.release(stored)

    def prefetch(self, name: str) -> None:
        for stored in self.stored(name):
            self._source.prefetch(stored)
