"""From a checkpoint's tensors to a model's weights: one slot at a time, or one layer.

Memory holds the weights made so far and those that come next: the file's pages are let go of as
they are consumed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
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

DEFAULT_STORAGE = Storage()
READERS = 2
"""Threads that copy weights out of the file's pages; what takes memory to make is made in turn."""


class WeightReader:
    """A model's weights, slot by slot or layer by layer.

    Args:
        source: the checkpoint's tensors.
        name: the family.
        storage: at which width each weight is kept.
        check: reject weights that hold NaN or infinity.
        place: reads of each slot what devices of a mesh hold, and puts it there.
        prequantized: gives the slots of `storage.prequantized`.
        own: by slot, tensors of ours that hold it packed, in place of the table's.

    Attributes:
        slots: all of them, those outside the layers first.

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
        own: Mapping[str, tuple[str, ...]] | None = None,
    ):
        self._plan = TensorPlan(source, name, config, own or {})
        self._config, self._storage, self._check = config, storage, check
        self._place, self._prequantized = place, prequantized
        self._readers = ThreadPoolExecutor(READERS, "layers")  # of offloaded layers
        self.slots = self._plan.slots

    def num_bytes(self, slot: Slot) -> int:
        """What a weight takes on its device."""
        keeps_bfloat16 = self._plan.is_bfloat16(slot)
        return self._storage.num_bytes(slot, self._config, stored_bfloat16=keeps_bfloat16)

    def arena_bytes(self, index: int) -> int:
        """What `layer` takes of an `Arena`: three arrays at most for each weight."""
        found = [slot for slot in self.slots if slot.layer == index]
        return sum(arena_bytes(self.num_bytes(slot)) + 3 * ALIGNMENT for slot in found)

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

        def row(slot: Slot) -> Callable[..., np.ndarray] | None:
            if stacks is None or slot.layer is None:
                return None
            return partial(stacks.empty, slot)

        for slot, array in _ahead(lambda slot: self._copied(slot, row(slot)), slots):
            in_stack = row(slot) is not None
            if array is None:
                yield slot, self._made(slot, _as_it_is if in_stack else None)
            else:
                yield slot, array if in_stack else self._kept(slot, array)
            self._done(slot, progress)

    def _done(self, slot: Slot, progress: Callable[[int], None] | None) -> None:
        self._plan.release(slot)
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
        if arena is not None:
            arena.clear()
        found = [slot for slot in self.slots if slot.layer == index]
        for slot in found:
            self._plan.prefetch(slot)
        copies = list(self._readers.map(lambda slot: self._streamed_copy(slot, arena), found))
        put = arena.put if arena else jax.device_put
        layer: dict[str, Any] = {}
        for slot, leaf in zip(found, copies, strict=True):
            layer[slot.key] = self._streamed(slot, put) if leaf is None else leaf
            self._plan.release(slot)
        jax.block_until_ready(layer)
        if any(leaf is None for leaf in copies):  # packing left something behind
            give_back_freed()
        return layer

    def _streamed_copy(self, slot: Slot, arena: Arena | None) -> Any:
        """The weight of a slot that is only copied."""
        if slot.name in self._plan.own and self._prequantized is not None:
            return self._prequantized.packed(slot, *([arena.put] if arena else []))
        array = self._array(slot, arena.empty if arena else None)
        return None if array is None else jax.device_put(array)

    def _streamed(self, slot: Slot, put: Callable[[np.ndarray], Any]) -> Any:
        if self._prequantized is not None and self._storage.is_prequantized(slot):
            return self._prequantized.packed(slot, put)
        array = self._plan.read(slot, self._storage, self._config)
        return self._storage.keep(slot, array, self._config, put)

    def _array(self, slot: Slot, empty: Callable[..., np.ndarray] | None) -> np.ndarray | None:
        storage = self._storage
        made = (
            storage.quantize is not None
            or storage.is_prequantized(slot)
            or self._plan.is_mxfp4(slot)
        )
        if self._place is not None or made:
            return None
        return self._plan.read(slot, storage, self._config, empty=empty)

    def _copied(
        self, slot: Slot, empty: Callable[..., np.ndarray] | None = None
    ) -> np.ndarray | None:
        """The host array of a slot that is only copied, which takes no memory beyond its own."""
        array = self._array(slot, empty)
        if array is not None and self._check:
            check_finite(slot, array)
        return array

    def _kept(self, slot: Slot, array: np.ndarray) -> Any:
        return self._storage.keep(slot, array, self._config)

    def _made(self, slot: Slot, put: Put | None = None) -> Any:
        if self._prequantized is not None and self._storage.is_prequantized(slot):
            return self._packed(slot, self._prequantized, put)
        storage, config = self._storage, self._config

        def read(where: Where | None) -> np.ndarray:
            array = self._plan.read(slot, storage, config, where)
            if self._check:
                check_finite(slot, array, storage.format_of(slot, config))
            return array

        if self._place is None:
            return self._kept(slot, read(None))
        return self._place(slot, read, lambda part, _: storage.keep_part(slot, part, config))

    def _packed(self, slot: Slot, prequantized: Prequantized, put: Put | None) -> Any:
        if self._place is not None:
            format = self._storage.prequantized[slot.name]
            parts = PrequantizedParts(prequantized, slot, format, self._config, self._check)
            return self._place(slot, parts.rows, parts.keep)
        leaf = prequantized.packed(slot, *([put] if put else []))
        if self._check:
            check_scales(slot, np.asarray(leaf.scales))
        return leaf


def _as_it_is(array: np.ndarray) -> np.ndarray:
    """A packed array where it lies: it is copied into its row next."""
    return array


def _ahead(
    read: Callable[[Slot], np.ndarray | None], found: Iterable[Slot]
) -> Iterator[tuple[Slot, np.ndarray | None]]:
    """What is read of each slot, in order, by threads that are a little ahead."""
    with ThreadPoolExecutor(READERS) as pool:
        waiting: deque[tuple[Slot, Future]] = deque()
        for slot in found:
            waiting.append((slot, pool.submit(read, slot)))
            if len(waiting) > READERS:
                first, array = waiting.popleft()
                yield first, array.result()
        while waiting:
            first, array = waiting.popleft()
            yield first, array.result()
