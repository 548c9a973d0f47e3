"""`OffloadedModel`: a model of which some layers are read from the file at every step.

What the budget holds stays in memory. The other layers are read one ahead of the computation, in
the same order at every step, into memory that was taken once. How a layer is read is the caller's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from rooflax.errors import RequestError
from rooflax.models.model import Model
from rooflax.nn.decoder import Decoder
from rooflax.nn.execution import gib
from rooflax.nn.layers import LayerWeights
from rooflax.nn.weights import WeightLine

AHEAD = 2
"""Streamed layers in memory: the one that computes and the one that is read."""


@dataclass(frozen=True)
class OffloadPlan:
    """Plan of layer offloading: which layers stay in memory.

    Attributes:
        budget_bytes: the most that weights may take.
        fixed_bytes: of what is outside the layers: embedding, head, last norm, RoPE table.
        layer_bytes: of each layer.
        offloaded: the layers that are read at every step; none if all fit.
    """

    budget_bytes: int
    fixed_bytes: int
    layer_bytes: tuple[int, ...]
    offloaded: tuple[int, ...]

    @property
    def num_resident(self) -> int:
        return len(self.layer_bytes) - len(self.offloaded)

    @property
    def bytes_per_step(self) -> int:
        """Bytes of weights read at every step."""
        return sum(self.layer_bytes[index] for index in self.offloaded)

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights in memory: resident layers, and the buffers of offloaded ones."""
        resident = sum(self.layer_bytes) - self.bytes_per_step
        passing = AHEAD * max((self.layer_bytes[index] for index in self.offloaded), default=0)
        return self.fixed_bytes + resident + passing


def plan_offloading(
    budget: int, fixed_bytes: int, layer_bytes: Sequence[int], what: str
) -> OffloadPlan:
    """As many layers as the budget holds stay, spread among those that are offloaded.

    While a layer that stays computes, the next offloaded one has time to come.

    Args:
        what: whose weights these are, for the rejection.

    Raises:
        RequestError: the budget is below what cannot be offloaded and the layers on their way.
    """
    count, largest = len(layer_bytes), max(layer_bytes)
    if fixed_bytes + sum(layer_bytes) <= budget:
        return OffloadPlan(budget, fixed_bytes, tuple(layer_bytes), ())
    passing = min(AHEAD, count)
    least = fixed_bytes + passing * largest
    if budget < least:
        raise RequestError(
            f"{what} needs {gib(fixed_bytes)} for embedding and head + {passing} x {gib(largest)} "
            f"for layers on their way = {gib(least)} ({least:,} bytes) of weights at once, and "
            f"the budget is {budget:,} bytes; give a larger one, or quantize.",
            param="weights_budget",
        )
    offloaded = count - min((budget - least) // largest, count - passing)
    spread = (i for i in range(count) if (i + 1) * offloaded // count > i * offloaded // count)
    return OffloadPlan(budget, fixed_bytes, tuple(layer_bytes), tuple(spread))


@dataclass
class OffloadCounts:
    """Counts of offloaded layers.

    Attributes:
        num_steps: passes over the layers that computed something.
        num_bytes: of weights that those passes read.
        seconds: that they took, computing included.
    """

    num_steps: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class LayerReader:
    """Layers in a fixed order, again and again, each read ahead of its use.

    Args:
        read: gives a layer's weights on the device, from any thread, in one of the places.
        order: the layers' numbers.
        places: memory for one layer each, whatever `read` takes it to be; there are `AHEAD`.
    """

    def __init__(
        self, read: Callable[[int, Any], LayerWeights], order: Sequence[int], places: Sequence[Any]
    ):
        self._read, self._order = read, tuple(order)
        self._free, self._next = list(places), 0
        self._coming: deque[tuple[int, Any, Future[LayerWeights]]] = deque()
        self._held: tuple[Any, LayerWeights] | None = None
        self._thread = ThreadPoolExecutor(1, "layers")

    def take(self, index: int) -> LayerWeights:
        """A layer's weights, until `give_back`. Out of order it starts anew from there."""
        self.give_back()
        if self._coming and self._coming[0][0] != index:
            self._drop()
        if not self._coming:
            self._next = self._order.index(index)
            self._fill()
        _, place, coming = self._coming.popleft()
        try:
            weights = coming.result()
        except BaseException:
            self._free.append(place)
            raise
        self._held = place, weights
        return weights

    def give_back(self) -> None:
        """Returns a layer's buffer, which nothing reads any more; another layer is read into it."""
        if self._held is None:
            return
        place, weights = self._held
        self._held = None
        self._release(place, weights)
        self._fill()

    def _fill(self) -> None:
        while self._free:
            index, place = self._order[self._next], self._free.pop()
            self._next = (self._next + 1) % len(self._order)
            self._coming.append((index, place, self._thread.submit(self._read, index, place)))

    def _drop(self) -> None:
        while self._coming:
            _, place, coming = self._coming.popleft()
            failed = not coming.cancel() and coming.exception() is not None
            self._release(place, {} if coming.cancelled() or failed else coming.result())

    def _release(self, place: Any, weights: LayerWeights) -> None:
        for leaf in jax.tree.leaves(weights):
            leaf.delete()
        self._free.append(place)


@dataclass(frozen=True, eq=False)
class OffloadedModel:
    """A model whose layers run one by one, those that stay and those that are offloaded.

    Attributes:
        ends: everything but the layers, as a model that has none.
        layers: weights of those that stay; the others are empty.
        stream: gives the others.
        plan: which are which.
        counts: what was offloaded so far.
    """

    ends: Model
    layers: tuple[LayerWeights, ...]
    stream: LayerReader
    plan: OffloadPlan
    counts: OffloadCounts = field(default_factory=OffloadCounts)

    @property
    def config(self) -> Decoder:
        return self.ends.config

    @property
    def table(self) -> dict[str, WeightLine]:
        return self.ends.table

    @property
    def weights(self) -> dict[str, Any]:
        """Resident weights."""
        return self.ends.weights | {"layers": self.layers}

    @property
    def num_parameters(self) -> int:
        return self.ends.num_parameters

    @property
    def weights_bytes(self) -> int:
        """Bytes of weights in memory, buffers of offloaded layers included."""
        return self.plan.memory_bytes

    def group(self, index: int) -> int:
        """The layer's group in the KV cache; layers of one group are one program."""
        return self.config.groups.of_layer[index]

    def layer(self, index: int, weights: LayerWeights) -> Model:
        """A model of one layer."""
        return replace(
            self.ends,
            weights=self.ends.weights | {"layers": (weights,)},
            config=self.config.only(index),
        )


AnyModel = Model | OffloadedModel


def whole(model: AnyModel) -> Model:
    """A model that has all its weights in memory.

    Raises:
        RequestError: some of its layers are offloaded.
    """
    if isinstance(model, OffloadedModel):
        raise RequestError(
            f"{len(model.plan.offloaded)} of {len(model.layers)} layers are offloaded, and this "
            f"needs all of them in memory; load the model without a weights budget."
        )
    return model
