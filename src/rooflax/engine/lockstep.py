"""`Lockstep`: one engine over the devices of several processes.

Process 0 has the engine; the others repeat its device calls on their own devices. What a call is
made of goes through the key-value store of JAX's distributed client, and the call itself is one
program over the mesh. This module knows no requests and no sequences.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import distributed

from rooflax.errors import EngineError
from rooflax.processes import check_started_alike

ROOT = "rooflax"
WAIT_MS = 10_000
"""Milliseconds of one wait for an answer; it is asked for again, as long as the job lives."""
NOTICE_S = 20
"""Seconds to wait for JAX's client, which ends the process with a message of its own: more than
its heartbeat's limit in cli/platform.py."""
GROUP = 64
"""Calls that are acknowledged, and whose keys are deleted, together. Process 0 is at most two
groups ahead: where a step's rows are not split, its result needs no other process."""
END = "end"
Call = tuple[str, dict[str, Any], list[np.ndarray]]
"""A call's name, its facts and its arrays."""


class Lockstep:
    """This process's end of the channel from process 0 to all.

    Attributes:
        leads: whether this is process 0.
    """

    def __init__(self) -> None:
        self._client: Any = distributed.global_state.client
        self.rank, self.leads = jax.process_index(), jax.process_index() == 0
        self._others, self._num_sent = range(1, jax.process_count()), 0

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Checks that every process was started alike.

        Raises:
            RequestError: naming the first fact that differs.
        """
        text = json.dumps(facts)
        for number, others in enumerate(self._exchange("facts", text.encode())):
            check_started_alike(self.rank, json.loads(text), number, json.loads(others))

    def least(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The least of each number over all processes."""
        every = map(json.loads, self._exchange("numbers", json.dumps(list(numbers)).encode()))
        return tuple(map(min, zip(*every, strict=True)))

    def send(self, name: str, *arrays: np.ndarray | None, **facts: Any) -> None:
        """Tells the other processes of a call that this one makes now; waits where they are far
        behind.

        Args:
            facts: JSON values.
        """
        group, place = divmod(self._num_sent, GROUP)
        if place == 0 and group >= 2:
            self._delete(group - 2)
        shapes = [None if a is None else [a.dtype.str, list(a.shape)] for a in arrays]
        head = json.dumps({"call": name, "facts": facts, "arrays": shapes}).encode()
        parts = [head, b"\n", *(a.tobytes() for a in arrays if a is not None)]
        self._client.key_value_set_bytes(_key(self._num_sent), b"".join(parts))
        self._num_sent += 1

    def _delete(self, group: int) -> None:
        """Deletes a group's keys, once every process has read it."""
        for rank in self._others:
            self._get(_read_key(group, rank))
        for folder in ("calls", "read"):
            self._client.key_value_delete(f"{ROOT}/{folder}/{group}/")

    def end(self, failure: str | None) -> None:
        """Ends `calls` in the other processes, with an error where the engine failed."""
        self.send(END, failure=failure)

    def calls(self) -> Iterator[Call]:
        """Yields the calls of process 0, in order.

        Raises:
            EngineError: process 0 failed.
        """
        number = 0
        while True:
            head, _, data = self._get(_key(number)).partition(b"\n")
            group, place = divmod(number, GROUP)
            if place == GROUP - 1:
                self._acknowledge(group)
            stated, arrays, at = json.loads(head), [], 0
            for each in stated["arrays"]:
                if each is None:
                    arrays.append(None)
                    continue
                dtype, shape = np.dtype(each[0]), each[1]
                count = int(np.prod(shape, dtype=np.int64))
                arrays.append(np.frombuffer(data, dtype, count, at).reshape(shape))
                at += count * dtype.itemsize
            if stated["call"] == END:
                if stated["facts"]["failure"] is not None:
                    raise EngineError(f"process 0 ended: {stated['facts']['failure']}")
                return
            yield stated["call"], stated["facts"], arrays
            number += 1

    def _exchange(self, what: str, value: bytes) -> list[bytes]:
        """Values of all processes, of this one `value`; all of them have to ask."""
        self._client.key_value_set_bytes(f"{ROOT}/{what}/{self.rank}", value)
        return [self._get(f"{ROOT}/{what}/{number}") for number in range(jax.process_count())]

    def _acknowledge(self, group: int) -> None:
        try:
            self._client.key_value_set_bytes(_read_key(group, self.rank), b"")
        except jax.errors.JaxRuntimeError as error:
            raise self._failed(error) from None

    def _get(self, key: str) -> bytes:
        while True:
            try:
                return self._client.blocking_key_value_get_bytes(key, WAIT_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise self._failed(error) from None

    def _failed(self, error: Exception) -> EngineError:
        """The store's failure; where process 0 was lost, JAX's client ends this process first."""
        if "UNAVAILABLE" in str(error) and not self.leads:
            time.sleep(NOTICE_S)
        return EngineError(f"the job's key-value store fails: {error}")


def _key(number: int) -> str:
    return f"{ROOT}/calls/{number // GROUP}/{number}"


def _read_key(group: int, rank: int) -> str:
    return f"{ROOT}/read/{group}/{rank}"
