"""`TrainingService`: a trainer behind the routes, in place of an engine that answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from rooflax.engine.thread import Health
from rooflax.server.errors import ApiError
from rooflax.server.service import Service
from rooflax.server.settings import Settings
from rooflax.server.training.work import Work

if TYPE_CHECKING:
    from rooflax.async_llm import AsyncLLM
    from rooflax.rl.trainer import Trainer


class TrainingEngine:
    """A trainer with its thread, as the server's life wants an engine.

    Args:
        asked: the model as the operator named it.
    """

    def __init__(self, trainer: Trainer, asked: str):
        self.trainer, self.llm, self.asked = trainer, trainer.llm, asked
        self.work = Work(trainer)
        self.loras: Mapping[str, Any] = {}

    def health(self) -> Health:
        """Health of the worker, whose programs may compile for minutes."""
        return Health(False, None, self.work.num_waiting, 0.0)

    async def shutdown(self, *, drain: bool) -> None:
        """Ends the worker after what it does just now."""
        del drain
        await asyncio.to_thread(self.work.end)


class TrainingService(Service):
    """One model whose adapters clients train."""

    def __init__(self, settings: Settings):
        super().__init__(settings)
        self._training: TrainingEngine | None = None

    def is_loaded(self, engine: AsyncLLM) -> None:
        """The trainer is there; it takes an engine's place."""
        super().is_loaded(engine)
        self._training = cast(TrainingEngine, engine)

    @property
    def num_open(self) -> int:
        """Requests that are not done."""
        return 0 if self._training is None else self._training.work.num_waiting

    @property
    def _ready(self) -> TrainingEngine:
        if self._training is None:
            self.ready()
        assert self._training is not None
        return self._training

    @property
    def trainer(self) -> Trainer:
        """
        Raises:
            ApiError: 503, it is not there yet.
        """
        return self._ready.trainer

    @property
    def work(self) -> Work:
        """
        Raises:
            ApiError: 503, it is not there yet.
        """
        return self._ready.work

    @cached_property
    def tokenizer_id(self) -> str:
        """Name by which the client finds the tokenizer: a folder, or an id of the hub."""
        return self._ready.asked

    def check_base(self, name: str) -> None:
        """
        Raises:
            ApiError: it is not the model that is served.
        """
        known = (*self.names, self._ready.asked)
        if name not in known:
            raise ApiError(
                f"There is no model {name[:200]!r}; there is {', '.join(dict.fromkeys(known))}.",
                param="base_model",
            )
