"""Random weights: for training from scratch, and for presets that are only measured."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rooflax.nn.decoder import Decoder
from rooflax.nn.placement import Placer
from rooflax.nn.stacking import Stacks
from rooflax.nn.storage import Storage, WeightPlan
from rooflax.nn.weights import Param, assemble

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
        place: puts of each parameter's host array what devices of a mesh hold there.
        stacked: gather the layers in stacks, for `layers="scan"`; with `place` that comes later.
        progress: called with the bytes of each weight when it is done.
    """

    def arrays() -> Iterator[tuple[Param, Any]]:
        for param in config.params():
            plan = storage.of(param, config, shards=place and place.shards)
            dtype = storage.dtype if plan.format else plan.dtype
            array = _values(plan, config, seed, dtype)
            yield param, plan.keep(array) if place is None else place(plan, array.__getitem__)
            if progress:
                progress(plan.num_bytes())

    if stacked and place is None:
        return Stacks(config.num_layers, config.groups.period).filled(arrays())
    return assemble(config.num_layers, arrays())


def weight_shapes(config: Decoder) -> dict[str, Any]:
    """Shapes of the float32 weights that `random_weights` makes, in the same tree."""
    plans = (DEFAULT_STORAGE.of(param, config) for param in config.params())
    shapes = ((plan.param, jax.ShapeDtypeStruct(plan.shape, jnp.float32)) for plan in plans)
    return assemble(config.num_layers, shapes)


def _values(plan: WeightPlan, config: Decoder, seed: int, dtype: str) -> np.ndarray:
    param, shape, init = plan.param, plan.shape, plan.param.line.init
    if init in ("ones", "zeros"):
        return np.full(shape, float(init == "ones"), jnp.dtype(dtype))
    rng = np.random.default_rng((seed, zlib.crc32(param.name.encode())))
    std = DEVIATION / np.sqrt(2 * config.num_layers) if init == "residual" else DEVIATION
    return (rng.standard_normal(shape, np.float32) * np.float32(std)).astype(jnp.dtype(dtype))
