"""From a checkpoint's tensors to a model's weights: one slot at a time, by the family's table.

Every tensor of the checkpoint is used, waived by name, or an error. Memory holds the weights
made so far and those that come next: the file's pages are let go of as they are consumed.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from rooflax.errors import CheckpointError
from rooflax.loading import mxfp4
from rooflax.loading.safetensors import DTYPES, TensorInfo, dtype_name
from rooflax.models.registry import family
from rooflax.nn.host_arrays import ALIGNMENT, Arena, Put, aligned_empty, arena_bytes
from rooflax.nn.host_memory import give_back_freed
from rooflax.nn.placement import Placer
from rooflax.nn.stacking import Stacks
from rooflax.nn.storage import Storage, check_groups, is_head, product_shape
from rooflax.nn.weights import Slot, Where, assemble, slots
from rooflax.ops.formats import FORMATS, GROUP
from rooflax.ops.quantization import E8M0_VALUES, QuantizedArray, pack

WAIVED_BUFFERS = re.compile(r"(.*\.)?(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)")
"""Buffers that old checkpoints carry: causal masks and RoPE frequencies; we compute both."""

NAMED_IN_ERRORS = 10
DEFAULT_STORAGE = Storage()
READERS = 2
"""Threads that copy weights out of the file's pages; what takes memory to make is made in turn."""


class Source(Protocol):
    """Where tensors come from: safetensors files, or arrays already in memory."""

    def names(self) -> list[str]: ...
    def info(self, name: str) -> TensorInfo: ...
    def read(self, name: str) -> np.ndarray: ...
    def release(self, name: str) -> None: ...
    def prefetch(self, name: str) -> None: ...


def load_weights(
    source: Source,
    name: str,
    config: Any,
    *,
    storage: Storage = DEFAULT_STORAGE,
    check: bool = False,
    progress: Callable[[int], None] | None = None,
    place: Placer | None = None,
    stacked: bool = False,
    kept: Kept | None = None,
    own: Mapping[str, tuple[str, ...]] | None = None,
) -> dict[str, Any]:
    """The weights of a model, on the device.

    Args:
        source: the checkpoint's tensors.
        name: the family.
        storage: at which width each weight is kept.
        check: refuse weights that hold NaN or infinity.
        progress: called with the bytes of each weight when it is done.
        place: reads of each slot what devices of a mesh hold, and puts it there.
        stacked: gather the layers in stacks, for `layers="scan"`; with `place` that comes later.
        kept: gives the slots of `storage.kept`.
        own: by slot, tensors of ours that hold it packed, in place of the table's.

    Raises:
        CheckpointError: tensors missing, superfluous, of another shape, or of a type that is no
            weight's (the first ten named).
    """
    how = {"storage": storage, "check": check, "place": place, "kept": kept, "own": own}
    reader = WeightReader(source, name, config, **how)
    return reader.weights(progress, stacked=stacked)


class WeightReader:
    """A model's weights, slot by slot or layer by layer; the arguments of `load_weights`.

    Attributes:
        slots: all of them, those outside the layers first.

    Raises:
        CheckpointError: tensors missing, superfluous, of another shape, or of a type that is no
            weight's; nothing was read yet.
    """

    def __init__(
        self,
        source: Source,
        name: str,
        config: Any,
        *,
        storage: Storage = DEFAULT_STORAGE,
        check: bool = False,
        place: Placer | None = None,
        kept: Kept | None = None,
        own: Mapping[str, tuple[str, ...]] | None = None,
    ):
        self._plan = _Plan(source, name, config, own or {})
        self._config, self._storage, self._check = config, storage, check
        self._place, self._kept = place, kept
        self._readers = ThreadPoolExecutor(READERS, "layers")  # of streamed layers
        self.slots = self._plan.slots

    def num_bytes(self, slot: Slot) -> int:
        """What a weight takes on its device."""
        narrow = self._plan.is_narrow(slot)
        return self._storage.num_bytes(slot, self._config, stored_narrow=narrow)

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
                yield slot, array if in_stack else self._kept_as(slot, array)
            self._done(slot, progress)

    def _done(self, slot: Slot, progress: Callable[[int], None] | None) -> None:
        self._plan.release(slot)
        if progress:
            progress(self.num_bytes(slot))

    def weights(
        self, progress: Callable[[int], None] | None = None, *, stacked: bool = False
    ) -> dict[str, Any]:
        """All of them; stacked ones of a mesh are stacked when they are placed."""
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
        if slot.name in self._plan.own and self._kept is not None:
            return self._kept.packed(slot, *([arena.put] if arena else []))
        array = self._array(slot, arena.empty if arena else None)
        return None if array is None else jax.device_put(array)

    def _streamed(self, slot: Slot, put: Callable[[np.ndarray], Any]) -> Any:
        if self._kept is not None and self._storage.is_kept(slot):
            return self._kept.packed(slot, put)
        array = self._plan.read(slot, self._storage, self._config)
        return self._storage.keep(slot, array, self._config, put)

    def _array(self, slot: Slot, empty: Callable[..., np.ndarray] | None) -> np.ndarray | None:
        storage = self._storage
        made = storage.quantize is not None or storage.is_kept(slot) or self._plan.is_mxfp4(slot)
        if self._place is not None or made:
            return None
        return self._plan.read(slot, storage, self._config, empty=empty)

    def _copied(
        self, slot: Slot, empty: Callable[..., np.ndarray] | None = None
    ) -> np.ndarray | None:
        """The host array of a slot that is only copied, which takes no memory beyond its own."""
        array = self._array(slot, empty)
        if array is not None and self._check:
            _check_finite(slot, array)
        return array

    def _kept_as(self, slot: Slot, array: np.ndarray) -> Any:
        return self._storage.keep(slot, array, self._config)

    def _made(self, slot: Slot, put: Put | None = None) -> Any:
        if self._kept is not None and self._storage.is_kept(slot):
            return self._packed(slot, self._kept, put)
        storage, config = self._storage, self._config

        def read(where: Where | None) -> np.ndarray:
            array = self._plan.read(slot, storage, config, where)
            if self._check:
                _check_finite(slot, array)
            return array

        if self._place is None:
            return self._kept_as(slot, read(None))
        return self._place(slot, read, lambda part, _: storage.keep_part(slot, part, config))

    def _packed(self, slot: Slot, kept: Kept, put: Put | None) -> Any:
        if self._place is not None:
            format = self._storage.kept[slot.name]
            parts = _KeptParts(kept, slot, format, self._config, self._check)
            return self._place(slot, parts.rows, parts.keep)
        leaf = kept.packed(slot, *([put] if put else []))
        if self._check:
            _check_scales(slot, np.asarray(leaf.scales))
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


class Kept(Protocol):
    """A checkpoint's own quantised weights."""

    def packed(self, slot: Slot, put: Callable[[np.ndarray], Any] = ...) -> QuantizedArray: ...
    def codes(self, slot: Slot, experts: slice = ...) -> tuple[np.ndarray, np.ndarray]: ...


class _KeptParts:
    """Parts of a weight that a checkpoint holds quantised, for a `Placer`.

    What is split there are not the codes but the numbers of the weight's outputs.
    """

    def __init__(self, kept: Kept, slot: Slot, format: str, config: Any, check: bool):
        self._kept, self._slot, self._format, self._config = kept, slot, format, config
        self._check, self._experts = check, slice(0)
        self._codes, self._scales = np.zeros(0), np.zeros(0, np.float32)

    def rows(self, where: Where) -> np.ndarray:
        """Numbers of a part's outputs; every other axis has one entry."""
        weight = self._slot.weight
        _, out_shape = product_shape(self._slot, self._config)
        numbers = np.arange(math.prod(out_shape)).reshape(out_shape)
        if is_head(self._slot, self._config):
            return numbers[where[0]][:, None]
        inner = len(weight.axis_names) - len(out_shape)
        return numbers[where[inner:]][(None,) * inner]

    def keep(self, rows: np.ndarray, where: Where) -> QuantizedArray:
        """The codes of these outputs and of the inputs that the part has."""
        slot, stacked = self._slot, self._slot.weight.num_stacked
        in_shape, out_shape = product_shape(slot, self._config)
        experts = where[0] if stacked else slice(None)
        if self._experts != experts:
            self._codes, self._scales = self._kept.codes(slot, experts)
            self._experts = experts
            if self._check:
                _check_scales(slot, self._scales)
        own_in, own_out = in_shape, rows.shape[-len(out_shape) :]
        begin, end = 0, math.prod(in_shape)
        if is_head(slot, self._config):
            own_out = rows.shape[:1]
        else:
            first, each = where[stacked], end // in_shape[0]
            begin, end = first.start * each, first.stop * each
            own_in = (first.stop - first.start, *in_shape[1:])
        check_groups(slot, self._format, end - begin)
        flat = rows.reshape(-1)
        codes = self._codes[..., flat, begin:end]
        if FORMATS[self._format].grouped:
            scales = self._scales[..., flat, begin // GROUP : end // GROUP]
        else:
            scales = self._scales[..., flat]
        return pack(self._format, codes, scales, own_in, own_out, put=np.asarray)


class _Plan:
    """Which tensors each slot is made of, checked before the first one is read."""

    def __init__(self, source: Source, name: str, config: Any, own: Mapping[str, tuple[str, ...]]):
        self.source, self.sizes, self.own = source, config.axis_sizes, own
        self.slots = list(slots(family(name).weights(config), config.num_layers))
        self.names = _NameMap(set(source.names()), family(name))
        self._check(config)

    def read(
        self,
        slot: Slot,
        storage: Storage,
        config: Any,
        where: Where | None = None,
        empty: Callable[..., np.ndarray] | None = None,
    ) -> np.ndarray:
        """A slot's tensors in our layout: a copy, or the file's own pages where that will do.

        Args:
            where: of each axis what is wanted, and alone read; None is everything.
            empty: makes what a copy is written to; None makes it anew.
        """
        shape, whole = slot.weight.shape(self.sizes), where is None
        found = self._found(slot)
        first = where[0] if where and any(map(self.names.is_mxfp4, found)) else slice(None)
        parts = [self._read(hf, first) for hf in found]
        if where is not None:
            sizes = [len(range(*w.indices(n))) for w, n in zip(where, shape, strict=True)]
            if first != slice(None):  # these experts alone were made
                shape, where = (sizes[0], *shape[1:]), (slice(None), *where[1:])
            parts, shape = slot.weight.layout.narrow(parts, shape, where), tuple(sizes)
        if storage.takes_views(slot, config):
            return parts[0].reshape(shape)
        dtype = storage.dtype_of(slot, config, self.is_narrow(slot))
        out = (empty or aligned_empty)(shape, jnp.dtype(dtype))
        slot.weight.layout.join(parts, out)
        if whole:  # else there may be more of it to read
            self.release(slot)
        return out

    def release(self, slot: Slot) -> None:
        """Lets go of the file's pages behind a slot."""
        for name in self._tensors(slot):
            self.source.release(name)

    def prefetch(self, slot: Slot) -> None:
        """Has the system read the file's pages behind a slot."""
        for name in self._tensors(slot):
            self.source.prefetch(name)

    def _tensors(self, slot: Slot) -> list[str]:
        found = [stored for hf in self._found(slot) for stored in self.names.stored(hf)]
        return [*self.own.get(slot.name, ()), *found]

    def is_mxfp4(self, slot: Slot) -> bool:
        """Whether a slot's tensors are MXFP4 halves in the checkpoint."""
        return any(self.names.is_mxfp4(hf) for hf in self._found(slot))

    def is_narrow(self, slot: Slot) -> bool:
        """Whether a slot's tensors are bfloat16 in the checkpoint, and so are other layers'."""
        return self._narrow[slot.key]

    @cached_property
    def _narrow(self) -> dict[str, bool]:
        narrow = {slot.key: True for slot in self.slots}
        for slot in self.slots:
            stored = (name for hf in self._found(slot) for name in self.names.stored(hf))
            narrow[slot.key] &= all(self.source.info(name).dtype == "BF16" for name in stored)
        return narrow

    def _found(self, slot: Slot) -> list[str]:
        names = [self.names.find(hf) for hf in slot.hf_names]
        return [name for name in names if name is not None]

    def _read(self, name: str, experts: slice) -> np.ndarray:
        if self.names.is_mxfp4(name):
            blocks, scales = (self.source.read(n)[experts] for n in self.names.stored(name))
            return mxfp4.dequantize(blocks, scales)
        return self.source.read(name)

    def _shape(self, name: str) -> tuple[int, ...]:
        if self.names.is_mxfp4(name):
            blocks, scales = (self.source.info(n).shape for n in self.names.stored(name))
            return mxfp4.dequantized_shape(name, blocks, scales)
        return self.source.info(name).shape

    def _wrong_types(self, name: str) -> list[str]:
        """The stored tensors of a weight whose type cannot be one's, as text."""
        halves = self.names.is_mxfp4(name)
        wanted = "U8" if halves else "floating point"
        types = {stored: self.source.info(stored).dtype for stored in self.names.stored(name)}
        return [
            f"{stored} is {dtype}, wanted {wanted}"
            for stored, dtype in types.items()
            if (dtype != "U8" if halves else not _is_floating(dtype))
        ]

    def _check(self, config: Any) -> None:
        missing, mistyped, misshapen = [], [], []
        used = {name for names in self.own.values() for name in names}
        for slot in self.slots:
            if slot.name in self.own:
                continue
            for hf, wanted in zip(slot.hf_names, slot.weight.hf_shapes(self.sizes), strict=True):
                found = self.names.find(hf)
                if found is None:
                    missing.append(f"{hf} {list(wanted)}")
                    continue
                used.update(self.names.stored(found))
                if wrong := self._wrong_types(found):
                    mistyped += wrong
                    continue
                shape = self._shape(found)
                if shape != wanted:
                    misshapen.append(f"{hf} is {list(shape)}, wanted {list(wanted)}")
        left = sorted(self.names.present - used)
        superfluous = [
            f"{n} {list(self.source.info(n).shape)}" for n in left if not self._waived(n, config)
        ]
        _refuse("lacks", missing)
        _refuse("has weights of a type that is not read here:", mistyped)
        _refuse("has tensors of another shape than config.json says:", misshapen)
        _refuse("has tensors that this architecture does not use:", superfluous)

    def _waived(self, name: str, config: Any) -> bool:
        if WAIVED_BUFFERS.fullmatch(name):
            return True
        if name != "lm_head.weight" or not config.tied_embeddings:
            return False
        embed = self.names.find(self.slots[0].hf_names[0])
        if embed is None:
            return False
        same = self.source.info(name).shape == self.source.info(embed).shape and np.array_equal(
            self.source.read(name), self.source.read(embed)
        )
        if not same:
            raise CheckpointError(
                "The checkpoint's lm_head.weight differs from its embedding, but config.json says "
                "tie_word_embeddings; set that to false to use both."
            )
        self.source.release(name)
        return True


class _NameMap:
    """Where a table's name is found: as it is, under another prefix, or as MXFP4 halves."""

    def __init__(self, present: set[str], module: Any):
        self.present = present
        self.prefixes: tuple[str, ...] = getattr(module, "HF_PREFIXES", ("",))

    def find(self, name: str) -> str | None:
        """The name under which a tensor lies in the checkpoint, None if it does not."""
        bare = name.removeprefix(self.prefixes[0])
        for prefix in self.prefixes:
            candidate = name if name == bare else prefix + bare
            if candidate in self.present or self.is_mxfp4(candidate):
                return candidate
        return None

    def is_mxfp4(self, name: str) -> bool:
        return name not in self.present and all(n in self.present for n in mxfp4.names(name))

    def stored(self, name: str | None) -> tuple[str, ...]:
        """The tensors in the checkpoint that make up `name`."""
        if name is None:
            return ()
        return mxfp4.names(name) if self.is_mxfp4(name) else (name,)


def _is_floating(dtype: str) -> bool:
    return dtype in DTYPES and jnp.issubdtype(DTYPES[dtype], jnp.floating)


def _refuse(what: str, items: list[str]) -> None:
    if items:
        rest = len(items) - NAMED_IN_ERRORS
        more = f" and {rest} more" if rest > 0 else ""
        raise CheckpointError(f"The checkpoint {what} {'; '.join(items[:NAMED_IN_ERRORS])}{more}.")


def _check_scales(slot: Slot, scales: np.ndarray) -> None:
    _check_finite(slot, E8M0_VALUES[scales] if scales.dtype == np.uint8 else scales)


def _check_finite(slot: Slot, array: np.ndarray) -> None:
    flat = array.reshape(-1)
    step = 1 << 20
    for start in range(0, flat.size, step):
        chunk = flat[start : start + step].astype(np.float32)
        if not np.isfinite(chunk).all():
            raise CheckpointError(
                f"The checkpoint's weight {slot.hf_names[0]} holds NaN or infinity; "
                f"the file is damaged or was saved from a run that diverged."
            )


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
        """Nothing to let go of."""

    def prefetch(self, name: str) -> None:
        """Nothing to read."""
