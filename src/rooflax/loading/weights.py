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
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from rooflax.errors import CheckpointError
from rooflax.loading import mxfp4
from rooflax.loading.safetensors import DTYPES, TensorInfo, dtype_name
from rooflax.models.registry import family
from rooflax.nn.host_arrays import aligned_empty
from rooflax.nn.placement import Placer
from rooflax.nn.stacking import assemble_stacked
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
    plan = _Plan(source, name, config, own or {})

    def placed(slot: Slot) -> Any:
        def read(where: Where | None) -> np.ndarray:
            array = plan.read(slot, storage, config, where)
            if check:
                _check_finite(slot, array)
            return array

        if place is None:
            return storage.keep(slot, read(None), config)
        return place(slot, read, lambda part, _: storage.keep_part(slot, part, config))

    def packed(slot: Slot, kept: Kept) -> Any:
        if place is not None:
            parts = _KeptParts(kept, slot, storage.kept[slot.name], config, check)
            return place(slot, parts.rows, parts.keep)
        leaf = kept.packed(slot)
        if check:
            _check_scales(slot, np.asarray(leaf.scales))
        return leaf

    def leaf_of(slot: Slot) -> Any:
        return packed(slot, kept) if kept is not None and storage.is_kept(slot) else placed(slot)

    def copied(slot: Slot) -> np.ndarray | None:
        """The host array of a slot that is only copied, which takes no memory beyond its own."""
        made = storage.quantize is not None or storage.is_kept(slot) or plan.is_mxfp4(slot)
        if place is not None or made:
            return None
        array = plan.read(slot, storage, config)
        if check:
            _check_finite(slot, array)
        return array

    def arrays() -> Iterator[tuple[Slot, Any]]:
        for slot, array in _ahead(copied, plan.slots):
            yield slot, leaf_of(slot) if array is None else storage.keep(slot, array, config)
            plan.release(slot)
            if progress:
                progress(storage.num_bytes(slot, config, stored_narrow=plan.is_narrow(slot)))

    if stacked and place is None:
        return assemble_stacked(config.num_layers, config.groups.period, arrays())
    return assemble(config.num_layers, arrays())


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

    def packed(self, slot: Slot) -> QuantizedArray: ...
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
        self, slot: Slot, storage: Storage, config: Any, where: Where | None = None
    ) -> np.ndarray:
        """A slot's tensors in our layout: a copy, or the file's own pages where that will do.

        Args:
            where: of each axis what is wanted, and alone read; None is everything.
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
        out = aligned_empty(shape, jnp.dtype(dtype))
        slot.weight.layout.join(parts, out)
        if whole:  # else there may be more of it to read
            self.release(slot)
        return out

    def release(self, slot: Slot) -> None:
        """Lets go of the file's pages behind a slot."""
        for name in self.own.get(slot.name, ()):
            self.source.release(name)
        for hf in self._found(slot):
            for stored in self.names.stored(hf):
                self.source.release(stored)

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
