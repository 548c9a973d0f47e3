"""llama.cpp batching as its server does: a step has one token of each running slot, then prompts of
the newly admitted, up to 512 tokens together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np
from serve import ServingJob, seen

STEP_TOKENS = 512
CONTEXT = 1024

Row = tuple[int, int, int, bool]
"""Token, position, slot, and whether its logits are wanted."""


@dataclass
class Request:
    """One on its way.

    Attributes:
        todo: ids of the prompt that are not computed yet.
        position: of the next token.
        times: when each of its tokens came.
    """

    number: int
    todo: list[int]
    position: int = 0
    last: int = 0
    times: list[float] = field(default_factory=list)


class Server:
    """A context of its own for a loaded model; greedy."""

    def __init__(self, model: Any, threads: int, job: ServingJob):
        self.job, self.runs = job, 0
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = CONTEXT * job.slots, job.slots
        params.n_batch = params.n_ubatch = STEP_TOKENS
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(model, params)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(STEP_TOKENS, 0, 1)

    def run(self, arrivals: Sequence[float]) -> dict[str, float]:
        """Serves the job's requests, each at its time; `arrivals` are in order."""
        llama_cpp.llama_memory_clear(self.memory, True)
        self.running: dict[int, Request] = {}
        self.free = list(range(self.job.slots))
        self.waiting = deque(map(Request, range(self.job.requests), self.job.prompts(self.runs)))
        self.runs += 1
        done: list[Request] = []
        start = time.perf_counter()
        while self.waiting or self.running:
            rows = self._rows(arrivals, time.perf_counter() - start)
            if rows:
                done += self._step(rows, start)
            else:
                time.sleep(max(0.0, arrivals[self.waiting[0].number] + start - time.perf_counter()))
        done.sort(key=lambda request: request.number)
        return seen(self.job, arrivals, [request.times for request in done])

    def _rows(self, arrivals: Sequence[float], now: float) -> list[Row]:
        rows = [(r.last, r.position, slot, True) for slot, r in self.running.items() if not r.todo]
        begun = [slot for slot, r in self.running.items() if r.todo]
        while len(rows) < STEP_TOKENS:
            if begun:
                slot = begun.pop()
            elif self.waiting and self.free and arrivals[self.waiting[0].number] <= now:
                slot = self.free.pop()
                self.running[slot] = self.waiting.popleft()
            else:
                break
            rows += self._prompt_rows(slot, STEP_TOKENS - len(rows))
        return rows

    def _prompt_rows(self, slot: int, room: int) -> list[Row]:
        request = self.running[slot]
        part, request.todo = request.todo[:room], request.todo[room:]
        first, request.position = request.position, request.position + len(part)
        last = -1 if request.todo else request.position - 1
        return [(token, at, slot, at == last) for at, token in enumerate(part, first)]

    def _step(self, rows: list[Row], start: float) -> list[Request]:
        """Computes it; the requests that are done."""
        batch, done = self.batch, []
        batch.n_tokens = len(rows)
        for i, (token, position, slot, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, slot
        if llama_cpp.llama_decode(self.context, batch):
            raise ValueError("llama_decode failed")
        for i, (_, position, slot, wanted) in enumerate(rows):
            if not wanted:
                continue
            request, logits = self.running[slot], llama_cpp.llama_get_logits_ith(self.context, i)
            request.last = int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())
            request.position = position + 1
            request.times.append(time.perf_counter() - start)
            if len(request.times) == self.job.new_tokens:
                llama_cpp.llama_memory_seq_rm(self.memory, slot, -1, -1)
                self.free.append(slot)
                done.append(self.running.pop(slot))
        return done
