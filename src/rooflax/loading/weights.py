"""Reads a checkpoint's tensors as a model's weights: one parameter at a time, or one layer.

Memory holds the weights made so far and those that come next: the file's pages are released as
they are consumed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from typing import Any

import jax
import numpy as np

from rooflax.loading.finite import check_finite, check_scales
from rooflax.loading.prequantized import Prequantized, PrequantizedParts
from rooflax.loading.source import Source
from rooflax.loading.tensor_plan import TensorPlan
from rooflax.nn.decoder import Decoder
from rooflax.nn.host_memory import give_back_freed
from rooflax.nn.placement import Placer
from rooflax.nn.stacking import Stacks
from rooflax.nn.storage import Storage
from rooflax.nn.tensor_layouts import Where
from rooflax.nn.weights import Param, assemble
from rooflax.ops.host_arrays import ALIGNMENT, Arena, Put, arena_bytes
from rooflax.ops.weights import quantized_parts

DEFAULT_STORAGE = Storage()
READERS = 2
"""Threads that copy weights out of the file's pages; conversions run one at a time."""
Empty = Callable[..., np.ndarray]
"""Makes the array of a shape and a dtype that a weight is written to."""


class Route(Enum):
    """Route of a weight from the checkpoint to its device; `WeightReader` decides it once."""

    COPY = "its tensors' numbers, copied"
    PAIR = "bfloat16 numbers, copied and packed in pairs"
    PACKED = "quantized arrays of our own, copied"
    REPACK = "the checkpoint's own codes, packed as kernels read them"
    CONVERT = "numbers dequantized, quantized or both"
    SPLIT = "the parts of a mesh's devices, copied or quantized"
    SPLIT_CODES = "the codes of the parts of a mesh's devices"


AHEAD = {Route.COPY, Route.PAIR}
"""Read by threads when a whole model is loaded; the others take memory beyond their own."""
AHEAD_IN_LAYER = {Route.COPY, Route.PACKED}
"""The same of an offloaded layer, whose arena has room for every weight once."""


class WeightReader:
    """A model's weights, parameter by parameter or layer by layer.

    Args:
        source: the checkpoint's tensors.
        name: the family.
        storage: the width at which each weight is kept.
        check: reject weights that hold NaN or infinity.
        place: splits each weight over the devices of a mesh.
        prequantized: packs the parameters of `storage.prequantized`.
        packed: by parameter, our own tensors that hold it packed, in place of the table's.

    Attributes:
        parameters: all of them, those outside the layers first.
        plans: by a parameter's name, what its weight becomes in memory.
        routes: by a parameter's name, how its weight gets there.

    Raises:
        CheckpointError: tensors missing, superfluous, of another shape, or of a type that is no
            weight's (the first ten named); nothing was read yet.
    """

    def __init__(
        self,
        source: Source,
        name: str,
        config: Decoder,
        *,
        storage: Storage = DEFAULT_STORAGE,
        check: bool = False,
        place: Placer | None = None,
        prequantized: Prequantized | None = None,
        packed: Mapping[str, tuple[str, ...]] | None = None,
    ):
        self._tensors = TensorPlan(source, name, config, packed or {})
        self._config, self._check = config, check
        self._place, self._prequantized = place, prequantized
        self._readers = ThreadPoolExecutor(READERS, "weights")
        self.params, shards = self._tensors.params, place and place.shards
        self.plans = {
            param.name: storage.of(
                param, config, is_bfloat16=self._tensors.is_bfloat16(param), shards=shards
            )
            for param in self.params
        }
        self.routes = {param.name: self._route(param) for param in self.params}

    def _route(self, param: Param) -> Route:
        plan = self.plans[param.name]
        if self._place is not None:
            return Route.SPLIT_CODES if plan.is_prequantized else Route.SPLIT
        if plan.is_prequantized:
            return Route.PACKED if param.name in self._tensors.packed else Route.REPACK
        if plan.format is not None or self._tensors.is_mxfp4(param):
            return Route.CONVERT
        return Route.PAIR if plan.is_paired else Route.COPY

    def num_bytes(self, param: Param) -> int:
        """The bytes of a weight on its device."""
        return self.plans[param.name].num_bytes()

    def _of_layer(self, index: int) -> list[Param]:
        return [param for param in self.params if param.layer == index]

    def arena_bytes(self, index: int) -> int:
        """The bytes of an `Arena` for `layer`: three arrays at most for each weight's part."""
        plans = [self.plans[param.name] for param in self._of_layer(index)]
        arrays = 3 * sum(len(plan.parts()) if plan.format else 1 for plan in plans)
        return sum(arena_bytes(plan.num_bytes()) for plan in plans) + arrays * ALIGNMENT

    def leaves(
        self,
        params: Iterable[Param],
        progress: Callable[[int], None] | None = None,
        stacks: Stacks | None = None,
    ) -> Iterator[tuple[Param, Any]]:
        """Each of these parameters with its weight; the file's pages are released.

        Args:
            stacks: on the host; layers' weights are then host arrays, in their rows where they are
                only copied.
        """

        def read(param: Param) -> Callable[[], Any]:
            if stacks is None or param.layer is None:
                return partial(self._read, param)
            return partial(self._read, param, _as_it_is, partial(stacks.empty, param))

        for param, leaf in self._ahead(params, read, AHEAD):
            yield param, leaf
            self._tensors.release(param)
            if progress:
                progress(self.num_bytes(param))

    def weights(
        self, progress: Callable[[int], None] | None = None, *, stacked: bool = False
    ) -> dict[str, Any]:
        """All of them.

        Args:
            progress: called with the bytes of each weight when it is done.
            stacked: gather the layers in stacks, for `layers="scan"`; those of a mesh are stacked
                when they are placed.
        """
        config = self._config
        if not stacked or self._place is not None:
            return assemble(config.num_layers, self.leaves(self.params, progress))
        stacks = Stacks(config.num_layers, config.groups.period)
        rows = stacks if stacks.on_host else None
        return stacks.filled(self.leaves(self.params, progress, rows))

    def layer(self, index: int, arena: Arena | None) -> dict[str, Any]:
        """One layer's weights, ready for use, which are not checked again.

        Args:
            arena: cleared, then holds them on a CPU device; None leaves that to the device.
        """
        params, put, empty = self._of_layer(index), None, None
        if arena is not None:
            arena.clear()
            put, empty = arena.put, arena.empty
        for param in params:
            self._tensors.prefetch(param)

        def read(param: Param) -> Callable[[], Any]:
            is_copied = self.routes[param.name] is Route.COPY
            return partial(self._read, param, None if is_copied else put, empty, check=False)

        layer: dict[str, Any] = {}
        for param, leaf in self._ahead(params, read, AHEAD_IN_LAYER):
            layer[param.key] = leaf
            self._tensors.release(param)
        jax.block_until_ready(layer)
        if any(self.routes[param.name] not in AHEAD_IN_LAYER for param in params):
            give_back_freed()  # what packing left behind
        return layer

    def _ahead(
        self,
        params: Iterable[Param],
        read: Callable[[Param], Callable[[], Any]],
        routes: set[Route],
    ) -> Iterator[tuple[Param, Any]]:
        """Each parameter's weight in order; threads are a little ahead with those of `routes`."""
        waiting: deque[tuple[Param, Callable[[], Any]]] = deque()
        for param in params:
            ahead = self.routes[param.name] in routes
            waiting.append(
                (param, self._readers.submit(read(param)).result if ahead else read(param))
            )
            if len(waiting) > READERS:
                first, wait = waiting.popleft()
                yield first, wait()
        for param, wait in waiting:
            yield param, wait()

    def _read(
        self,
        param: Param,
        put: Put | None = None,
        empty: Empty | None = None,
        *,
        check: bool = True,
    ) -> Any:
        """A weight by its route, where `put` puts it; None is on the device.

        Args:
            empty: makes the array that numbers are copied to.
        """
        plan, check = self.plans[param.name], check and self._check
        keyword = {} if put is None else {"put": put}
        match self.routes[param.name]:
            case Route.SPLIT:
                assert self._place is not None
                return self._place(plan, lambda where: self._numbers(param, where, check=check))
            case Route.SPLIT_CODES:
                assert self._place is not None
                assert self._prequantized is not None
                parts = PrequantizedParts(self._prequantized, plan, check)
                return self._place(plan, parts.rows, parts.keep)
            case Route.PACKED | Route.REPACK:
                assert self._prequantized is not None
                leaf = self._prequantized.packed(param, **keyword)
                for part in quantized_parts(leaf) if check else ():
                    check_scales(param, part.format, np.asarray(part.scales))
                return leaf
            case Route.COPY:
                return plan.keep(self._numbers(param, None, empty, check=check), **keyword)
        return plan.keep(self._numbers(param, check=check), **keyword)

    def _numbers(
        self, param: Param, where: Where | None = None, empty: Empty | None = None, *, check: bool
    ) -> np.ndarray:
        """A weight's numbers, or a part of them."""
        plan = self.plans[param.name]
        array = self._tensors.read(plan, where, empty)
        if check:
            check_finite(param, array, plan.format)
        return array


def _as_it_is(array: np.ndarray) -> np.ndarray:
    """A packed array where it lies: it is copied into its row next."""
    return array
