"""The processes of a training job: each computes with its own devices, and the first one writes.

All of them read the same folder and run the same steps; whatever is decided by something that only
one process sees, such as a signal, is decided by the first.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from rooflax.errors import RequestError, first_line
from rooflax.nn.placement import put
from rooflax.processes import check_started_alike

WAIT_MS = 1_000
"""Milliseconds of one wait, after which is looked whether another process failed."""
_ROOT = "rooflax/job"
_FAILED = f"{_ROOT}/failed"
_counts: Counter[str] = Counter()
"""Number of times that each part was run."""


def leads() -> bool:
    """Whether this process writes: the first of a job, or the only one."""
    return jax.process_index() == 0


def by_first(part: str, work: Callable[[], Any] = lambda: None) -> None:
    """Runs `work` in the first process of the job, for whose end the others wait.

    They wait for a key in the store of JAX's client: the first exchange between devices fails where
    a process is half a minute late.

    Args:
        part: a name of this part of the run, the same in all of them.

    Raises:
        RequestError: in the others, because the first one (or another) failed.
    """
    if jax.process_count() == 1:
        work()
        return
    _counts[part] += 1
    key = f"{_ROOT}/{part}/{_counts[part]}"
    if leads():
        with told_failures():
            work()
        _client().key_value_set(key, "")
    else:
        _awaited(key)


@contextlib.contextmanager
def told_failures() -> Iterator[None]:
    """While inside, an error of one process is one of the others.

    Raises:
        RequestError: in place of the exchange that failed because another process had an error.
    """
    try:
        yield
    except Exception as error:
        if jax.process_count() > 1:
            if isinstance(error, jax.errors.JaxRuntimeError):
                _check_others()
            key = f"{_FAILED}/{jax.process_index()}"
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the store may be gone
                _client().key_value_set(key, first_line(error), allow_overwrite=True)
        raise


def check_alike(facts: Mapping[str, Any]) -> None:
    """Compares what each process of the job was started with.

    Raises:
        RequestError: naming the first fact that differs from the first process's.
    """
    if jax.process_count() == 1:
        return
    rank, plain = jax.process_index(), json.loads(json.dumps(facts))
    _client().key_value_set(f"{_ROOT}/facts/{rank}", json.dumps(plain))
    for other in range(jax.process_count()):
        check_started_alike(rank, plain, other, json.loads(_awaited(f"{_ROOT}/facts/{other}")))


def _client() -> Any:
    return distributed.global_state.client


def _awaited(key: str) -> str:
    """The value of a key, once it is there.

    Raises:
        RequestError: another process failed.
    """
    while True:
        try:
            return _client().blocking_key_value_get(key, WAIT_MS)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        _check_others()


def _check_others() -> None:
    """
    Raises:
        RequestError: another process failed.
    """
    for key, reason in _client().key_value_dir_get(_FAILED):
        rank = key.rpartition("/")[2]
        if rank != str(jax.process_index()):
            raise RequestError(f"process {rank} ended: {reason}")


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
