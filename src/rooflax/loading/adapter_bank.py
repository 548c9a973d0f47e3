"""`Bank`: LoRA adapters in slots beside one model, of which each request has one or none."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rooflax.errors import RequestError
from rooflax.loading.adapters import Adapter, open_adapter
from rooflax.loading.model_info import ModelInfo
from rooflax.models.adapters import HEAD, Adapters, banked, slot_bytes, targets
from rooflax.models.model import Model

log = logging.getLogger("rooflax.loading")
MOST_CHARACTERS = 200
DEFAULT_RANK = 16
"""Rank of slots without an adapter at the start."""


@dataclass(frozen=True)
class Named:
    """An adapter under the name that requests choose it by.

    Attributes:
        number: no other in this process has it, also of the same name: it keeps their cached
            prompts apart.
    """

    name: str
    adapter: Adapter
    number: int = field(default_factory=itertools.count(1).__next__)


@dataclass(frozen=True)
class Bank:
    """Adapters by their names, in slots of one size.

    Attributes:
        adapters: of each slot; None is an empty one.
        modules: the linear layers that have slots.
        rank: the most of an adapter.
        dtype: of the matrices in slots.
        slot_bytes: of a slot's matrices.
    """

    adapters: tuple[Named | None, ...]
    modules: tuple[str, ...]
    rank: int
    dtype: str
    slot_bytes: int

    @property
    def nbytes(self) -> int:
        return len(self.adapters) * self.slot_bytes

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.adapters if one is not None)

    def slot(self, name: str) -> tuple[int, str]:
        """An adapter's slot, from 1 on, and what keeps its cached prompts apart.

        Raises:
            RequestError: there is none of that name.
        """
        for number, one in enumerate(self.adapters, start=1):
            if one is not None and one.name == name:
                return number, str(one.number)
        raise RequestError(
            f"lora is {name!r:.80}; there is {', '.join(self.names) or 'none'}.", param="lora"
        )

    def beside(self, model: Model, info: ModelInfo, before: Bank | None = None) -> Model:
        """The model with these adapters; with others of the same bank nothing compiles.

        Args:
            before: the bank that the model has; an adapter of both is not read again. None is none.
        """

        def matrices(slot: int) -> Adapters | None:
            one = self.adapters[slot]
            if before is not None and one is before.adapters[slot]:
                return None
            return {} if one is None else one.adapter.read(info)

        banks = [matrices(slot) for slot in range(len(self.adapters))]
        return banked(model, banks, self.modules, self.rank, self.dtype)

    def with_adapter(self, name: str, folder: str, info: ModelInfo) -> Bank:
        """The bank with one more.

        Raises:
            RooflaxError: the name is taken, no slot is free, or the adapter does not fit.
        """
        if not _is_name(name):
            raise RequestError(
                f"An adapter's name has 1 to {MOST_CHARACTERS} characters, all of them printable."
            )
        if name in self.names:
            raise RequestError(f"There is an adapter {name!r} already.")
        if None not in self.adapters:
            raise RequestError(
                f"All {len(self.adapters)} slots hold adapters; unload one, or start with more "
                f"`max_loras`.",
                param="max_loras",
            )
        adapter = _checked(name, open_adapter(folder, info))
        if adapter.rank > self.rank:
            raise RequestError(
                f"{folder} has rank {adapter.rank}, and slots hold {self.rank}; start with a "
                f"larger `max_lora_rank`."
            )
        if beyond := adapter.targets.keys() - set(self.modules):
            raise RequestError(
                f"{folder} changes {min(beyond)}, which has no slots: none of the adapters at the "
                f"start changed it."
            )
        adapters = list(self.adapters)
        adapters[adapters.index(None)] = Named(name, adapter)
        return replace(self, adapters=tuple(adapters))

    def without(self, name: str) -> Bank:
        """The bank with one less; its slot is free.

        Raises:
            RequestError: there is none of that name.
        """
        freed = self.slot(name)[0] - 1
        return replace(self, adapters=(*self.adapters[:freed], None, *self.adapters[freed + 1 :]))


def open_bank(
    loras: Sequence[str],
    info: ModelInfo,
    max_loras: int | None,
    max_rank: int | None,
    dtype: str = "float32",
) -> Bank:
    """The adapters that NAME=DIR name, in slots; without any, slots for all linear layers.

    Args:
        dtype: of the matrices in slots.

    Raises:
        RooflaxError: a name twice, or no adapter of the model; more than the slots hold.
    """
    named: dict[str, Adapter] = {}
    for one in loras:
        name, equals, folder = one.partition("=")
        if not equals or not folder or not _is_name(name):
            raise RequestError(f"loras has {one!r:.80}; it must be NAME=DIR.", param="loras")
        if name in named:
            raise RequestError(f"loras names {name!r} twice; give each a name.", param="loras")
        named[name] = _checked(name, open_adapter(Path(folder), info))
    slots = max_loras or len(named)
    if len(named) > slots:
        raise RequestError(
            f"max_loras is {slots}, and {len(named)} adapters are given.", param="max_loras"
        )
    largest = max((adapter.rank for adapter in named.values()), default=DEFAULT_RANK)
    rank = max_rank or largest
    if named and largest > rank:
        raise RequestError(
            f"max_lora_rank is {rank}, and an adapter has {largest}.", param="max_lora_rank"
        )
    modules = {module for adapter in named.values() for module in adapter.targets}
    known = targets(info.family, info.config)
    modules = modules or known.keys() - {HEAD}
    ordered = tuple(module for module in known if module in modules)
    filled = (*(Named(*one) for one in named.items()), *(None for _ in range(slots - len(named))))
    each = slot_bytes(info.family, info.config, ordered, rank, dtype)
    return Bank(filled, ordered, rank, dtype, each)


def _is_name(name: str) -> bool:
    return 0 < len(name) <= MOST_CHARACTERS and name.isprintable()


def _checked(name: str, adapter: Adapter) -> Adapter:
    """The adapter; what it warns of is logged.

    Raises:
        RequestError: it does more than add to a layer's product.
    """
    if adapter.config.use_dora or HEAD in adapter.targets:
        what = "is a DoRA" if adapter.config.use_dora else "changes the head"
        raise RequestError(
            f"The adapter {name} {what}, which is not served beside others; merge it with rooflax "
            f"fuse, and serve the result.",
            param="loras",
        )
    if adapter.config.warning is not None:
        log.warning("%s", adapter.config.warning)
    return adapter
