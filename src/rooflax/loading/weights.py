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
from rooflax.ops.weights import quantized_parts

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
        plans: what becomes of each, by its name.

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
        self._tensors = TensorPlan(source, name, config, own or {})
        self._config, self._check = config, check
        self._place, self._prequantized = place, prequantized
        self._readers = ThreadPoolExecutor(READERS, "layers")  # of offloaded layers
        self.slots, shards = self._tensors.slots, place and place.shards
        self.plans = {
            slot.name: storage.of(
                slot, config, is_bfloat16=self._tensors.is_bfloat16(slot), shards=shards
            )
            for slot in self.slots
        }

    def num_bytes(self, slot: Slot) -> int:
        """What a weight takes on its device."""
        return self.plans[slot.name].num_bytes()

    def arena_bytes(self, index: int) -> int:
        """What `layer` takes of an `Arena`: three arrays at most for each weight's part."""
        found = [slot for slot in self.slots if slot.layer == index]
        plans = [self.plans[slot.name] for slot in found]
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

        def row(slot: Slot) -> Callable[..., np.ndarray] | None:
            if stacks is None or slot.layer is None:
                return None
            return partial(stacks.empty, slot)

        def copied(slot: Slot) -> Any:
            if not self._is_copied(slot):
                return None
            plan = self.plans[slot.name]
            if plan.is_paired:
                return plan.keep(self._read(slot), _as_it_is)
            return self._read(slot, row(slot))

        for slot, leaf in _ahead(copied, slots):
            in_stack = row(slot) is not None
            if leaf is None:
                yield slot, self._made(slot, _as_it_is if in_stack else None)
            else:
                yield slot, leaf if in_stack else jax.device_put(leaf)
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
        if arena is not None:
            arena.clear()
        found = [slot for slot in self.slots if slot.layer == index]
        for slot in found:
            self._tensors.prefetch(slot)
        copies = list(self._readers.map(lambda slot: self._streamed_copy(slot, arena), found))
        put = arena.put if arena else None
        layer: dict[str, Any] = {}
        for slot, leaf in zip(found, copies, strict=True):
            layer[slot.key] = self._made(slot, put, check=False) if leaf is None else leaf
            self._tensors.release(slot)
        jax.block_until_ready(layer)
        if any(leaf is None for leaf in copies):  # packing left something behind
            give_back_freed()
        return layer

    def _streamed_copy(self, slot: Slot, arena: Arena | None) -> Any:
        """The weight of a slot that is only copied; None of one that takes memory to make."""
        if slot.name in self._tensors.own:
            return self._made(slot, arena.put if arena else None, check=False)
        if not self._is_copied(slot) or self.plans[slot.name].is_paired:
            return None
        empty = arena.empty if arena else None
        return jax.device_put(self._tensors.read(self.plans[slot.name], empty=empty))

    def _is_copied(self, slot: Slot) -> bool:
        """Whether a weight is its tensors' numbers, whole, and takes no memory beyond its own."""
        plain = self.plans[slot.name].format is None and not self._tensors.is_mxfp4(slot)
        return plain and self._place is None

    def _read(
        self, slot: Slot, empty: Callable[..., np.ndarray] | None = None, where: Where | None = None
    ) -> np.ndarray:
        """A weight's numbers, or a part of them, checked."""
        plan = self.plans[slot.name]
        array = self._tensors.read(plan, where, empty)
        if self._check:
            check_finite(slot, array, plan.format)
        return array

    def _made(self, slot: Slot, put: Put | None = None, *, check: bool = True) -> Any:
        """A weight on the device, or where `put` puts it."""
        plan, place = self.plans[slot.name], self._place
        how = {} if put is None else {"put": put}
        if plan.is_prequantized:
            assert self._prequantized is not None
            if place is not None:
                parts = PrequantizedParts(self._prequantized, plan, self._check)
                return place(plan, parts.rows, parts.keep)
            leaf = self._prequantized.packed(slot, **how)
            if check and self._check:
                for part in quantized_parts(leaf):
                    check_scales(slot, part.format, np.asarray(part.scales))
            return leaf
        if place is not None:
            return place(plan, lambda where: self._read(slot, where=where))
        return plan.keep(self._read(slot) if check else self._tensors.read(plan), **how)


def _as_it_is(array: np.ndarray) -> np.ndarray:
    """A packed array where it lies: it is copied into its row next."""
    return array


def _ahead(read: Callable[[Slot], Any], found: Iterable[Slot]) -> Iterator[tuple[Slot, Any]]:
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
