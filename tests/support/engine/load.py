"""A random load: requests that share beginnings, arrive and abort at random, on an engine that is
too small for them. The engine knows the time only by its steps, so every run is the same."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rooflax.engine.engine import Engine
from rooflax.engine.sampling_params import SamplingParams
from rooflax.engine.sequence import Sequence
from tests import goldens

MAX_TOKENS = 131
NUM_REQUESTS = 64


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    params: SamplingParams
    arrives: int
    aborts: int | None = None
    stop_ids: frozenset[int] = frozenset()

    def sequence(self, request_id: int) -> Sequence:
        tokens = self.params.max_tokens or 1
        return Sequence(request_id, self.prompt, self.params, tokens, self.stop_ids)


def random_requests(seed: int = 0, count: int = NUM_REQUESTS) -> list[Request]:
    """Half greedy, half drawn; a third begins like others; one in eight is aborted."""
    state = np.random.RandomState(seed)
    common = state.randint(0, goldens.VOCAB, 48).tolist()
    requests, now = [], 0
    for index in range(count):
        own = state.randint(0, goldens.VOCAB, state.randint(1, 60)).tolist()
        prompt = common[: state.randint(17, 48)] + own[:20] if index % 3 == 0 else own
        given = {} if index % 2 else {"temperature": 1.3, "seed": index, "top_k": 40}
        if index % 5 == 0:
            given |= {"repetition_penalty": 1.3, "frequency_penalty": 0.4}
        params = SamplingParams(
            **({"temperature": 0.0, "max_tokens": int(state.randint(1, 40))} | given)
        )
        now += int(state.randint(0, 3))
        aborts = now + int(state.randint(1, 12)) if index % 8 == 7 else None
        stop = frozenset(state.randint(0, goldens.VOCAB, 4).tolist())
        requests.append(Request(prompt, params.with_defaults({}), now, aborts, stop))
    return requests


@dataclass
class Run:
    """What a load gave: per request its sequence, and the steps it took."""

    sequences: list[Sequence]
    num_steps: int
    tokens: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [s.output_tokens for s in self.sequences]


def run_load(engine: Engine, requests: list[Request]) -> Run:
    """Every request, at its time."""
    sequences = [request.sequence(index) for index, request in enumerate(requests)]
    step = 0
    while step <= max(r.arrives for r in requests) or engine.has_unfinished:
        for request, sequence in zip(requests, sequences, strict=True):
            if request.arrives == step:
                engine.add([sequence])
            if request.aborts == step:
                engine.abort(sequence)
        engine.step()
        step += 1
    assert not any(engine.scheduler.blocks.num_used)
    return Run(sequences, step)


def run_alone(engine: Engine, requests: list[Request]) -> list[list[int]]:
    """Each request by itself, to its end."""
    tokens = []
    for index, request in enumerate(requests):
        sequence = request.sequence(index)
        engine.add([sequence])
        while engine.has_unfinished:
            engine.step()
        tokens.append(sequence.output_tokens)
    return tokens
