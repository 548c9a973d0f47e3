"""Reads a checkpoint's tensors as a model's weights: one slot at a time, or one layer.

Memory holds the weights made so far and those that come next: the file's pages are let go of as
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
from rooflax.nn.weights import Slot, Where, assemble
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
    """A model's weights, slot by slot or layer by layer.

    Args:
        source: the checkpoint's tensors.
        name: the family.
        storage: the width at which each weight is kept.
        check: reject weights that hold NaN or infinity.
        place: splits each weight over the devices of a mesh.
        prequantized: packs the slots of `storage.prequantized`.
        packed: by slot, the names of our own tensors that hold it packed, in place of the table's.

    Attributes:
        slots: all of them, those outside the layers first.
        plans: by a slot's name, what its weight becomes in memory.
        routes: by a slot's name, how its weight gets there.

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
        self.slots, shards = self._tensors.slots, place and place.shards
        self.plans = {
            slot.name: storage.of(
                slot, config, is_bfloat16=self._tensors.is_bfloat16(slot), shards=shards
            )
            for slot in self.slots
        }
        self.routes = {slot.name: self._route(slot) for slot in self.slots}

    def _route(self, slot: Slot) -> Route:
        plan = self.plans[slot.name]
        if self._place is not None:
            return Route.SPLIT_CODES if plan.is_prequantized else Route.SPLIT
        if plan.is_prequantized:
            return Route.PACKED if slot.name in self._tensors.packed else Route.REPACK
        if plan.format is not None or self._tensors.is_mxfp4(slot):
            return Route.CONVERT
        return Route.PAIR if plan.is_paired else Route.COPY

    def num_bytes(self, slot: Slot) -> int:
        """The bytes of a weight on its device."""
        return self.plans[slot.name].num_bytes()

    def _of_layer(self, index: int) -> list[Slot]:
        return [slot for slot in self.slots if slot.layer == index]

    def arena_bytes(self, index: int) -> int:
        """The bytes of an `Arena` for `layer`: three arrays at most for each weight's part."""
        plans = [self.plans[slot.name] for slot in self._of_layer(index)]
        arrays = 3 * sum(len(plan.parts()) if plan.format else 1 for plan in plans)
        return sum(arena_bytes(plan.num_bytes()) for plan in plans) + arrays * ALIGNMENT

    def leaves(
        self,
        slots: Iterable[Slot],
        progress: Callable[[int], None] | None = None,
        stacks: Stacks | None = None,
    ) -> Iterator[tuple[Slot, Any]]:
        """Each of these slots with its weight; the file's pages are let go of.

        Args:
            stacks: on the host; layers' weights are then host arrays, in their rows where they are
                only copied.
        """

        def read(slot: Slot) -> Callable[[], Any]:
            if stacks is None or slot.layer is None:
                return partial(self._read, slot)
            return partial(self._read, slot, _as_it_is, partial(stacks.empty, slot))

        for slot, leaf in self._ahead(slots, read, AHEAD):
            yield slot, leaf
            self._tensors.release(slot)
            if progress:
                progress(self.num_bytes(slot))

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
            return assemble(config.num_layers, self.leaves(self.slots, progress))
        stacks = Stacks(config.num_layers, config.groups.period)
        rows = stacks if stacks.on_host else None
        return stacks.filled(self.leaves(self.slots, progress, rows))

    def layer(self, index: int, arena: Arena | None) -> dict[str, Any]:
        """One layer's weights, ready for use, which are not checked again.

        Args:
            arena: cleared, then holds them on a CPU device; None leaves that to the device.
        """
        slots, put, empty = self._of_layer(index), None, None
        if arena is not None:
            arena.clear()
            put, empty = arena.put, arena.empty
        for slot in slots:
            self._tensors.prefetch(slot)

        def read(slot: Slot) -> Callable[[], Any]:
            is_copied = self.routes[slot.name] is Route.COPY
            return partial(self._read, slot, None if is_copied else put, empty, check=False)

        layer: dict[str, Any] = {}
        for slot, leaf in self._ahead(slots, read, AHEAD_IN_LAYER):
            layer[slot.key] = leaf
            self._tensors.release(slot)
        jax.block_until_ready(layer)
        if any(self.routes[slot.name] not in AHEAD_IN_LAYER for slot in slots):
            give_back_freed()  # what packing left behind
        return layer

    def _ahead(
        self, slots: Iterable[Slot], read: Callable[[Slot], Callable[[], Any]], routes: set[Route]
    ) -> Iterator[tuple[Slot, Any]]:
        """Each slot's weight in order; threads are a little ahead with those of `routes`."""
        waiting: deque[tuple[Slot, Callable[[], Any]]] = deque()
        for slot in slots:
            ahead = self.routes[slot.name] in routes
            waiting.append((slot, self._readers.submit(read(slot)).result if ahead else read(slot)))
            if len(waiting) > READERS:
                first, wait = waiting.popleft()
                yield first, wait()
        for slot, wait in waiting:
            yield slot, wait()

    def _read(
        self, slot: Slot, put: Put | None = None, empty: Empty | None = None, *, check: bool = True
    ) -> Any:
        """A weight by its route, where `put` puts it; None is on the device.

        Args:
            empty: makes the array that numbers are copied to.
        """
        plan, check = self.plans[slot.name], check and self._check
        keyword = {} if put is None else {"put": put}
        match self.routes[slot.name]:
            case Route.SPLIT:
                assert self._place is not None
                return self._place(plan, lambda where: self._numbers(slot, where, check=check))
            case Route.SPLIT_CODES:
                assert self._place is not None
                assert self._prequantized is not None
                parts = PrequantizedParts(self._prequantized, plan, check)
                return self._place(plan, parts.rows, parts.keep)
            case Route.PACKED | Route.REPACK:
                assert self._prequantized is not None
                leaf = self._prequantized.packed(slot, **keyword)
                for part in quantized_parts(leaf) if check else ():
                    check_scales(slot, part.format, np.asarray(part.scales))
                return leaf
            case Route.COPY:
                return plan.keep(self._numbers(slot, None, empty, check=check), **keyword)
        return plan.keep(self._numbers(slot, check=check), **keyword)

    def _numbers(
        self, slot: Slot, where: Where | None = None, empty: Empty | None = None, *, check: bool
    ) -> np.ndarray:
        """A weight's numbers, or a part of them."""
        plan = self.plans[slot.name]
        array = self._tensors.read(plan, where, empty)
        if check:
            check_finite(slot, array, plan.format)
        return array


def _as_it_is(array: np.ndarray) -> np.ndarray:
    """A packed array where it lies: it is copied into its row next."""
    return array
