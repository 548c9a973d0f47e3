"""`Trainer`: one loaded model with the training runs and samplers of many clients.

Its calls run one after the other, on one thread. It knows nothing of HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rooflax.completion import Completion
from rooflax.engine.sampling_params import SamplingParams
from rooflax.errors import RequestError
from rooflax.llm import LLM
from rooflax.models.model import Model
from rooflax.rl.run_store import RunStore
from rooflax.rl.runs import AdamSettings, Datum, LoraShape, Outcome, Run, check

MOST_SESSIONS, MOST_RUNS, MOST_SAMPLERS = 1024, 16, 16
"""Sessions, runs of all of them, and samplers of each, that are kept in memory."""
LOST_S = 600.0
"""Seconds without a word of a client after which its session ends."""


@dataclass
class Session:
    """A client's runs and samplers in memory.

    Attributes:
        runs: by their numbers within the session.
        samplers: models by the samplers' ids, the oldest first.
        seen_s: when the client was last heard, by the monotonic clock.
    """

    runs: dict[str, Run] = field(default_factory=dict)
    samplers: dict[str, Model] = field(default_factory=dict)
    seen_s: float = field(default_factory=time.monotonic)


class Trainer:
    """Training runs beside one model.

    Args:
        llm: of the model, which samples; nobody else uses it.
        folder: where runs are saved.

    Raises:
        RequestError: the model's layers are not all in memory.
    """

    def __init__(self, llm: LLM, folder: Path):
        if not isinstance(llm.model, Model):
            raise RequestError("Training needs all layers in memory; leave weights_budget out.")
        self.llm, self.base = llm, llm.model
        self.store = RunStore(folder, llm.info)
        self.sessions: dict[str, Session] = {}

    @property
    def has_experts(self) -> bool:
        """Whether the model has weights that no adapter of a run is beside."""
        return any(param.line.num_stacked for param in self.base.config.params())

    def begin(self, session_id: str) -> None:
        """Begins a session.

        Raises:
            RequestError: there are too many whose clients live.
        """
        self._end_lost()
        if len(self.sessions) >= MOST_SESSIONS:
            raise RequestError(f"{MOST_SESSIONS} sessions are open; end one.")
        self.sessions[session_id] = Session()

    def session(self, session_id: str) -> Session:
        """
        Raises:
            RequestError: there is no such session.
        """
        if session_id not in self.sessions:
            raise RequestError(f"There is no session {session_id!r:.80}; it ended, or never began.")
        session = self.sessions[session_id]
        session.seen_s = time.monotonic()
        return session

    def _end_lost(self) -> None:
        """Ends the sessions whose clients were not heard for long; they beat every ten seconds."""
        now = time.monotonic()
        for name, session in list(self.sessions.items()):
            if now - session.seen_s > LOST_S:
                self.end(name)

    def end(self, session_id: str) -> None:
        """Lets go of all that a client has in memory; what it saved stays."""
        self.sessions.pop(session_id, None)

    def run(self, run_id: str) -> Run:
        """
        Raises:
            RequestError: there is no such run.
        """
        run = self.session(session_of(run_id)).runs.get(run_id)
        if run is None:
            raise RequestError(f"There is no training run {run_id!r:.200}.")
        return run

    def create(self, run_id: str, shape: LoraShape) -> None:
        """Begins a run.

        Raises:
            RequestError: there are too many, or nothing is to be trained.
        """
        session = self._with_room(run_id)
        session.runs[run_id] = Run(self.base, shape)

    def load(self, run_id: str, path: str, *, has_optimizer: bool) -> None:
        """Begins a run, or sets one, from what was saved.

        Raises:
            RequestError, CheckpointError: as `RunStore.run`, or there are too many.
        """
        session = self.session(session_of(run_id))
        if run_id not in session.runs:
            session = self._with_room(run_id)
        session.runs[run_id] = self.store.run(path, self.base, has_optimizer=has_optimizer)

    def _with_room(self, run_id: str) -> Session:
        """The session of a run to begin."""
        session = self.session(session_of(run_id))
        self._end_lost()
        if self._num_runs >= MOST_RUNS:
            raise RequestError(
                f"{MOST_RUNS} training runs are in memory, and no more fit; end a session."
            )
        return session

    @property
    def _num_runs(self) -> int:
        return sum(len(session.runs) for session in list(self.sessions.values()))

    def forward(
        self,
        run_id: str,
        loss: str,
        data: Sequence[Datum],
        settings: Mapping[str, float],
        *,
        backward: bool,
    ) -> Outcome:
        """As `Run.forward`; the data are checked first.

        Raises:
            RequestError: as `check`, and `Run.forward`.
        """
        run = self.run(run_id)
        check(loss, data, settings, self.llm)
        return run.forward(loss, data, settings, backward=backward)

    def step(self, run_id: str, settings: AdamSettings) -> dict[str, float]:
        """As `Run.step`."""
        return self.run(run_id).step(settings)

    def save(self, run_id: str, kind: str, name: str, *, overwrites: bool = False) -> str:
        """As `RunStore.save`."""
        return self.store.save(self.run(run_id), run_id, kind, name, overwrites=overwrites)

    def publish(self, run_id: str, sampler_id: str) -> None:
        """Makes a sampler of a run as it is now."""
        self._add(sampler_id, self.run(run_id).sampler())

    def open_sampler(self, sampler_id: str, path: str | None) -> None:
        """Makes a sampler of saved weights, or of the model without an adapter.

        Raises:
            RequestError, CheckpointError: as `RunStore.sampler`.
        """
        self._add(sampler_id, self.base if path is None else self.store.sampler(path, self.base))

    def _add(self, sampler_id: str, model: Model) -> None:
        samplers = self.session(session_of(sampler_id)).samplers
        self._end_lost()
        samplers[sampler_id] = model
        for oldest in list(samplers)[: max(len(samplers) - MOST_SAMPLERS, 0)]:
            samplers.pop(oldest, None)

    def sampler(self, sampler_id: str) -> Model:
        """
        Raises:
            RequestError: there is no such sampler, or newer ones took its place.
        """
        samplers = self.session(session_of(sampler_id)).samplers
        if sampler_id not in samplers:
            raise RequestError(
                f"There is no sampler {sampler_id!r:.200}; the newest {MOST_SAMPLERS} of a session "
                f"are kept."
            )
        return samplers[sampler_id]

    def sample(
        self, model: Model, requests: Sequence[tuple[list[int], SamplingParams]]
    ) -> list[list[Completion]]:
        """The samples of each request, all of them together.

        Raises:
            RequestError: the engine rejects one of them.
            EngineError: the engine failed.
        """
        if self.llm.model is not model:
            self.llm.use(model)
        prompts, params = [ids for ids, _ in requests], [one for _, one in requests]
        completions = iter(self.llm.generate(prompts, params))
        return [[next(completions) for _ in range(one.n)] for one in params]


def session_of(name: str) -> str:
    """The session of a run's or a sampler's id, which begins with it."""
    return name.partition(":")[0]


def check_sample(llm: LLM, ids: Iterable[int], params: SamplingParams) -> None:
    """
    Raises:
        RequestError: the engine would reject the request.
    """
    llm.processor.samples(0, llm.processor.prompt_ids(list(ids)), replace(params, n=1))
