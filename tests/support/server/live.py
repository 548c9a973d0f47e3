"""A server on a free port of this machine, on a thread, with a real engine or a scripted one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from rooflax import LLM, SamplingParams
from rooflax.completion import Delta
from rooflax.engine.compilation import CompileCounts
from rooflax.engine.sequence import StepOutput, TokenLogprobs
from rooflax.engine.thread import Health
from rooflax.server.listening import listen
from rooflax.server.run import ServerRunner
from rooflax.server.settings import Settings

Script = Callable[[list[int], SamplingParams, int], list[int]]


class ScriptedLLM:
    """Speaks as `AsyncLLM` does, what a script says: token ids by prompt, params and sample.

    Attributes:
        asked: of each stream: its prompt, params and salt.
        num_open, num_cut: streams that are open; that were closed before their end.
        error: is raised after as many tokens as its number says.
        is_merged: the whole answer comes at once.
    """

    def __init__(self, llm: LLM, script: Script | None = None):
        self.llm = llm
        self.script = script or self.says("Hello, world. How are you?")
        self.pause_s, self.is_merged = 0.0, False
        self.asked: list[tuple[list[int], SamplingParams, str]] = []
        self.num_open = self.num_cut = 0
        self.error: tuple[int, Exception] | None = None
        self.loras: dict[str, Any] = {}
        self.state = Health(False, None, 0, 0.0)

    def says(self, text: str, *, ends: bool = True) -> Script:
        """A script that says a text, whose special tokens are meant."""
        ids = self.llm.tokenizer.encode(text, add_special_tokens=False)
        end = [max(self.llm.stop_ids)] if ends else []
        return lambda prompt, params, index: [*ids, *end]

    async def stream(
        self,
        prompt: Any,
        params: Any = None,
        *,
        cache_salt: str = "",
        lora: str | None = None,
        decoders: Any = None,
    ) -> AsyncGenerator[Delta, None]:
        self.asked.append((list(prompt), params, cache_salt))
        samples = self.llm.processor.samples(0, list(prompt), params, cache_salt)
        lines = {}
        for sample in samples:
            index = sample.sequence.sample_index
            if decoders is not None:
                sample.decoder = decoders(index)
            lines[index] = self.script(list(prompt), params, index)
            sample.sequence.sampler.prompt_logprobs = [_logprobs(t) for t in list(prompt)[1:]]
        self.num_open += 1
        open_, number = list(samples), 0
        try:
            while open_:
                if self.error is not None and number == self.error[0]:
                    raise self.error[1]
                await asyncio.sleep(self.pause_s)
                for sample in list(open_):
                    delta = self._step(sample, lines[sample.sequence.sample_index], number)
                    if delta.completion is not None:
                        open_.remove(sample)
                    yield delta
                number += 1
        finally:
            self.num_open -= 1
            self.num_cut += bool(open_)

    def _step(self, sample: Any, line: list[int], number: int) -> Delta:
        sequence, token = sample.sequence, line[number % len(line)]
        reason = None
        if self.is_merged:
            return self._merged(sample, tuple(line))
        if token in sequence.stop_ids:
            reason = "stop"
        elif number + 1 == sequence.max_tokens:
            reason = "length"
        wants = sequence.params.logprobs is not None
        output = StepOutput(
            sequence, (token,), (time.perf_counter(),), (_logprobs(token),) if wants else (), reason
        )
        return sample.take(output, 0.0, CompileCounts())

    def _merged(self, sample: Any, ids: tuple[int, ...]) -> Delta:
        logprobs = ()
        if sample.sequence.params.logprobs is not None:
            logprobs = tuple(map(_logprobs, ids))
        now = (time.perf_counter(),) * len(ids)
        return sample.take(
            StepOutput(sample.sequence, ids, now, logprobs, "stop"), 0.0, CompileCounts()
        )

    def metrics(self) -> dict[str, Any]:
        from rooflax.engine.metrics import Metrics

        return Metrics(blocks_used=[1], blocks_total=[4]).as_dict()

    def health(self) -> Health:
        return self.state

    async def shutdown(self, *, drain: bool = True) -> None:
        pass


def _logprobs(token: int) -> TokenLogprobs:
    return TokenLogprobs(-0.5, ((token, -0.5), ((token + 1) % 4000, -1.5)))


class Live:
    """A running server and a client of it."""

    def __init__(self, runner: ServerRunner, port: int, thread: threading.Thread):
        self.runner, self.service, self.port, self.thread = runner, runner.service, port, thread
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=60.0, trust_env=False)

    def post(self, path: str, body: Any, **how: Any) -> httpx.Response:
        return self.http.post(path, json=body, **how)

    def settle(self) -> None:
        """Waits until nothing is open."""
        wait_for(lambda: self.service.open == 0)


def wait_for(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.01)


@contextmanager
def serving(
    load: Callable[[Any], Any],
    *,
    is_ready: bool = True,
    make: Callable[[Settings, Any], ServerRunner] | None = None,
    **settings: Any,
) -> Iterator[Live]:
    """A server of what `load` gives.

    Args:
        make: the runner of another kind of server.
    """
    chosen = Settings(**{"port": 0} | settings)
    with listen(chosen) as listener:
        make = make or (lambda chosen, load: ServerRunner(chosen, load, lambda _: None))
        runner = make(chosen, load)
        port = listener.getsockname()[1]
        failed: list[BaseException] = []

        def run() -> None:
            try:
                runner.run(listener)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        live = Live(runner, port, thread)
        try:
            if is_ready:
                wait_for(lambda: runner.service.state == "ready" or bool(failed), 120)
                assert not failed, failed
            yield live
        finally:
            live.http.close()
            if thread.is_alive():
                runner.stop()
            thread.join(30)
            assert not thread.is_alive()
