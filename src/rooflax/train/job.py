"""The processes of a training job: each computes with its own devices, and the first one writes.

All of them read the same folder and run the same steps; whatever is decided by something that only
one process sees, such as a signal, is decided by the first.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from rooflax.nn.placement import put


def leads() -> bool:
    """Whether this process writes: the first of a job, or the only one."""
    return jax.process_index() == 0


def await_others(reason: str) -> None:
    """Waits until all processes of the job are here.

    Args:
        reason: the same in all of them.
    """
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(reason)


def agreed(value: bool) -> bool:
    """The first process's value, in all of them."""
    if jax.process_count() == 1:
        return value
    return bool(multihost_utils.broadcast_one_to_all(np.int32(value)))


def on_host(tree: Any) -> Any:
    """Arrays in whole: on every host, where other processes have parts of them."""
    if jax.process_count() == 1:
        return tree
    return jax.tree.map(
        lambda array: np.asarray(multihost_utils.process_allgather(array, tiled=True)), tree
    )


def placed(array: Any, sharding: NamedSharding) -> jax.Array:
    """An array that every process has in whole, on the devices of all of them."""
    if jax.process_count() == 1:
        return jax.device_put(array, sharding)
    return put(array, cast(Mesh, sharding.mesh), sharding.spec)
