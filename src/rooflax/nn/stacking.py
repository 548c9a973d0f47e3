"""Weights made layer by layer, gathered as `layers="scan"` takes them: one stack per weight.

On CPU each layer's part is written into its row as it is read, so that no second copy of the layers
ever is. Elsewhere the parts are on the device already, and one stack at a time is made of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from rooflax.nn.weights import Param
from rooflax.ops import accelerator
from rooflax.ops.host_arrays import aligned_empty
from rooflax.ops.weights import stack_by_kind, stack_leaves

_ARRAY = jax.tree.structure(0)


class Stacks:
    """The weights of a model while they come.

    Args:
        period: layers that repeat; layer i becomes row i // period of group i % period.

    Attributes:
        on_host: whether layers' leaves may be NumPy arrays, and be made in their rows.
    """

    def __init__(self, num_layers: int, period: int):
        self.on_host = accelerator.platform() == "cpu"
        self._rows, self._period = num_layers // period, period
        self._groups: list[dict[str, Any]] = [{} for _ in range(period)]
        self._rest: dict[str, Any] = {}
        self._lock = threading.Lock()

    def empty(self, param: Param, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Place of a layer's weight of one array, to be written there; from any thread."""
        assert self.on_host
        stack, row = self._of(param)
        with self._lock:
            return stack.places(row, _ARRAY, [(shape, dtype)])[0]

    def filled(self, arrays: Iterable[tuple[Param, Any]]) -> dict[str, Any]:
        """The pytree of these weights on the device, with "stacked_layers".

        Args:
            arrays: leaves are arrays, or trees of them, of one shape and dtype in all rows.
        """
        for param, leaf in arrays:
            self._add(param, leaf)
        stacked = tuple(
            {key: group.pop(key).done() for key in list(group)} for group in self._groups
        )
        return self._rest | {"stacked_layers": stacked}

    def _add(self, param: Param, leaf: Any) -> None:
        """A weight; one that was made in its row is there already."""
        if param.layer is None:
            self._rest[param.key] = leaf
            return
        stack, row = self._of(param)
        stack.add(row, leaf)

    def _of(self, param: Param) -> tuple[Any, int]:
        assert param.layer is not None
        row, index = divmod(param.layer, self._period)
        with self._lock:
            group = self._groups[index]
            if param.key not in group:
                group[param.key] = (_HostStack if self.on_host else _DeviceStack)(self._rows)
            return group[param.key], row


class _HostStack:
    """Rows in host memory that a CPU device takes over without a copy.

    Layers whose leaves are alike share arrays with a row for each, one after the other; what is
    never written takes no memory. A stack whose layers are not alike becomes a `MixedStack`.
    """

    def __init__(self, count: int):
        self._kinds: dict[Any, tuple[list[np.ndarray], list[int]]] = {}
        self._of: list[Any] = [None] * count

    def places(
        self, row: int, tree: Any, parts: Sequence[tuple[tuple[int, ...], Any]]
    ) -> list[np.ndarray]:
        """Places for a layer's leaf of this structure, whose parts have these shapes and dtypes."""
        kind = tree, tuple((tuple(shape), np.dtype(dtype)) for shape, dtype in parts)
        if kind not in self._kinds:
            shapes = [((len(self._of), *shape), dtype) for shape, dtype in parts]
            self._kinds[kind] = [aligned_empty(*each) for each in shapes], []
        arrays, rows = self._kinds[kind]
        self._of[row] = kind
        if row not in rows:
            rows.append(row)
        return [array[rows.index(row)] for array in arrays]

    def add(self, row: int, leaf: Any) -> None:
        parts, tree = jax.tree.flatten(leaf)
        places = self.places(row, tree, [(part.shape, part.dtype) for part in parts])
        for place, part in zip(places, parts, strict=True):
            array = np.asarray(part)
            if place.ctypes.data != array.ctypes.data:
                place[...] = array

    def done(self) -> Any:
        return stack_by_kind(self._of, self._stack)

    def _stack(self, rows: list[int]) -> Any:
        """Stacks these layers, which are alike."""
        kind = self._of[rows[0]]
        arrays, written = self._kinds[kind]
        if written == rows:
            arrays = [array[: len(rows)] for array in arrays]
        else:  # readers that were ahead of each other
            order = [written.index(row) for row in rows]
            arrays = [array[order] for array in arrays]
        return jax.tree.unflatten(kind[0], [jax.device_put(array) for array in arrays])


class _DeviceStack:
    """Rows on the device until all have come."""

    def __init__(self, rows: int):
        self._leaves: list[Any] = [None] * rows

    def add(self, row: int, leaf: Any) -> None:
        self._leaves[row] = leaf

    def done(self) -> Any:
        leaves, self._leaves = self._leaves, []
        return jax.jit(stack_leaves)(leaves)
