"""Weights made layer by layer, gathered as `layers="scan"` takes them: one stack per weight.

On CPU each layer's part is written into its row as it comes, so that no second copy of the layers
ever is. Elsewhere the parts are on the device already, and one stack at a time is made of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rooflax.nn.host_arrays import aligned_empty
from rooflax.nn.weights import Slot
from rooflax.ops import accelerator


def assemble_stacked(
    num_layers: int, period: int, arrays: Iterator[tuple[Slot, Any]]
) -> dict[str, Any]:
    """The pytree of weights from (slot, leaf) pairs, with "stacked_layers".

    Args:
        period: layers that repeat; layer i becomes row i // period of group i % period.
        arrays: leaves are arrays, or trees of them, of one shape and dtype in all rows.
    """
    make = _HostStack if accelerator.platform() == "cpu" else _DeviceStack
    groups: list[dict[str, Any]] = [{} for _ in range(period)]
    weights: dict[str, Any] = {}
    for slot, leaf in arrays:
        if slot.layer is None:
            weights[slot.key] = leaf
            continue
        row, index = divmod(slot.layer, period)
        group = groups[index]
        if slot.key not in group:
            group[slot.key] = make(num_layers // period)
        group[slot.key].add(row, leaf)
    stacked = tuple({key: group.pop(key).done() for key in list(group)} for group in groups)
    return weights | {"stacked_layers": stacked}


class _HostStack:
    """Rows in host memory that a CPU device takes over without a copy."""

    def __init__(self, rows: int):
        self._rows, self._arrays = rows, None

    def add(self, row: int, leaf: Any) -> None:
        parts, self._tree = jax.tree.flatten(leaf)
        if self._arrays is None:
            self._arrays = [aligned_empty((self._rows, *p.shape), p.dtype) for p in parts]
        for stack, part in zip(self._arrays, parts, strict=True):
            assert (stack.shape[1:], stack.dtype) == (part.shape, part.dtype)
            stack[row] = np.asarray(part)

    def done(self) -> Any:
        assert self._arrays is not None
        return jax.tree.unflatten(self._tree, [jax.device_put(array) for array in self._arrays])


class _DeviceStack:
    """Rows on the device until all have come."""

    def __init__(self, rows: int):
        self._leaves: list[Any] = [None] * rows

    def add(self, row: int, leaf: Any) -> None:
        self._leaves[row] = leaf

    def done(self) -> Any:
        leaves, self._leaves = self._leaves, []
        return jax.jit(lambda rows: jax.tree.map(lambda *parts: jnp.stack(parts), *rows))(leaves)
