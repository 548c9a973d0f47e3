"""Random weights: for training from scratch, and for presets that are only measured."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from rooflax.nn.decoder import Decoder
from rooflax.nn.placement import Placer
from rooflax.nn.stacking import Stacks
from rooflax.nn.storage import Storage
from rooflax.nn.weights import Slot, assemble

DEVIATION = 0.02
DEFAULT_STORAGE = Storage()


def random_weights(
    name: str,
    config: Decoder,
    *,
    seed: int = 0,
    storage: Storage = DEFAULT_STORAGE,
    place: Placer | None = None,
    stacked: bool = False,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Weights as a family's table initialises them.

    Normal with deviation 0.02, divided by sqrt(2 * layers) for projections onto the residual
    stream; norms are ones, biases zeros. Each array has its own generator, seeded by its name, so
    that its values depend on nothing else. Made array by array on the host.

    Args:
        storage: at which width each weight is kept.
        place: puts of each slot's host array what devices of a mesh hold there.
        stacked: gather the layers in stacks, for `layers="scan"`; with `place` that comes later.
        progress: called with the bytes of each weight when it is done.
    """

    def put(slot: Slot, array: np.ndarray) -> Any:
        if place is None:
            return storage.keep(slot, array, config)
        return place(
            slot, lambda w: array[w], lambda part, _: storage.keep_part(slot, part, config)
        )

    def arrays() -> Iterator[tuple[Slot, Any]]:
        for slot in config.slots():
            shape = slot.line.shape(config.axis_sizes)
            is_quantized = storage.format_of(slot, config) is not None
            dtype = storage.dtype if is_quantized else storage.dtype_of(slot, config, True)
            array = _values(slot, shape, config, seed, dtype)
            yield slot, put(slot, array)
            if progress:
                progress(storage.num_bytes(slot, config, stored_bfloat16=storage.keeps_bfloat16))

    if stacked and place is None:
        return Stacks(config.num_layers, config.groups.period).filled(arrays())
    return assemble(config.num_layers, arrays())


def _values(
    slot: Slot, shape: tuple[int, ...], config: Decoder, seed: int, dtype: str
) -> np.ndarray:
    init = slot.line.init
    if init in ("ones", "zeros"):
        return np.full(shape, float(init == "ones"), jnp.dtype(dtype))
    rng = np.random.default_rng((seed, zlib.crc32(slot.name.encode())))
    std = DEVIATION / np.sqrt(2 * config.num_layers) if init == "residual" else DEVIATION
    return (rng.standard_normal(shape, np.float32) * np.float32(std)).astype(jnp.dtype(dtype))
