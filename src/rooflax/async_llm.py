"""`AsyncLLM`: text in, text out for many callers at once, over an engine on its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, Unpack

import jax
import numpy as np

from rooflax.completion import Completion, Delta, Sample, TextDecoder
from rooflax.engine.compilation import CompileCounts
from rooflax.engine.engine import Engine
from rooflax.engine.lockstep import Lockstep
from rooflax.engine.runner import Compiled
from rooflax.engine.sampling_params import SamplingParams
from rooflax.engine.sequence import FAULTS_OF_REQUESTS, Sequence, StepOutput
from rooflax.engine.thread import EngineThread, Health
from rooflax.errors import EngineError, RequestError, RooflaxError
from rooflax.fields.declaration import declarations, read_settings, takes
from rooflax.inputs import Prompt, as_params, as_prompts
from rooflax.llm import LLM
from rooflax.loading.model_info import ModelInfo
from rooflax.loading.plan import PLANNED, Plan, make_plan
from rooflax.loading.settings import ServingSettings
from rooflax.loading.tokenizer import LONG_TEXT
from rooflax.models.offloading import whole
from rooflax.nn.pooler import Pooler
from rooflax.processes import check_not_forked

VERSION = version("rooflax")
SERVING = {name: one for name, one in declarations(ServingSettings).items() if name not in PLANNED}
"""Settings that a plan without a server does not have."""
Conversation = Seq[Mapping[str, Any]]
T = TypeVar("T")


class _Inbox:
    """The outputs that one request has not read yet, merged to one per sequence.

    A slow reader so holds no more than its answer, and gets fewer and larger pieces.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._pending: dict[int, StepOutput] = {}
        self._has_some, self._has_end = asyncio.Event(), asyncio.Event()
        self._taken_s = 0.0

    def put(self, output: StepOutput) -> None:
        """Appends one output; runs on the event loop."""
        key = id(output.sequence)
        before = self._pending.get(key)
        self._pending[key] = output if before is None else before.then(output)
        self._has_some.set()
        if output.finish_reason is not None:
            self._has_end.set()

    async def take(self, pause_s: float) -> list[StepOutput]:
        """Returns the pending deltas, at most every `pause_s` seconds unless a sequence ended."""
        left = self._taken_s + pause_s - self.loop.time()
        if left > 0 and not self._has_end.is_set():
            timer = self.loop.call_later(left, self._has_end.set)
            await self._has_end.wait()
            timer.cancel()
        await self._has_some.wait()
        self._has_some.clear()
        self._has_end.clear()
        self._taken_s = self.loop.time()
        deltas, self._pending = list(self._pending.values()), {}
        return deltas


@takes(ServingSettings)
class AsyncLLM:
    """A model that serves many requests at once; nothing compiles once it is there.

    Args:
        model: as for `LLM`.
        report: is told of each program as warm-up has it.
        check, progress: as for `LLM`.
        settings: as `ServingSettings` declares them.

    Raises:
        RooflaxError: one sentence that says what is wrong.
    """

    def __init__(
        self,
        model: str | Path | ModelInfo | Plan | None = None,
        *,
        report: Callable[[Compiled], None] = lambda _: None,
        check: bool = False,
        progress: Callable[[int], None] | None = None,
        **settings: Unpack[ServingSettings],
    ):
        self._lockstep = Lockstep() if jax.process_count() > 1 else None
        if self._lockstep is not None and not self._lockstep.leads:
            raise RequestError(
                "AsyncLLM is made in process 0; the others call AsyncLLM.follow, with the same "
                "arguments."
            )
        plan, serving = _serving_plan(model, settings, self._lockstep)
        self.llm = LLM(plan, check=check, progress=progress)
        self._bank, self._loading = plan.bank, asyncio.Lock()
        self._leaving, self._uses = set[str](), Counter[int]()  # adapters; and of slots, requests
        self._is_unused = asyncio.Event()
        pooling = plan.info.pooling  # such a model embeds or scores, and does nothing else
        self._pooler = pooling and pooling.pooler
        engine = self._engine()
        self._inboxes: dict[int, _Inbox] = {}
        self._piece_s = 1 / (serving["max_pieces_per_s"] or math.inf)
        self._texts, self._compiler = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._thread = EngineThread(
            engine, self._deliver, max_waiting=serving["max_waiting"], report=report
        )
        self._thread.wait_until_warm()

    def _engine(self) -> Engine:
        plan, speculation = replace(self.llm.plan, pooler=self._pooler), None
        if self._pooler is None:
            speculation = self.llm.speculation(plan.max_num_seqs, plan.max_model_len)
        return Engine(self.llm.model, plan, speculation, lockstep=self._lockstep)

    @staticmethod
    def follow(
        model: str | Path | ModelInfo | Plan | None = None,
        *,
        check: bool = False,
        progress: Callable[[int], None] | None = None,
        **settings: Unpack[ServingSettings],
    ) -> None:
        """Repeats the device calls of the `AsyncLLM` in process 0 on this process's devices, until
        that shuts down.

        Args:
            model, check, progress, settings: as there.

        Raises:
            RooflaxError: as there; or process 0 failed.
        """
        lockstep = Lockstep()
        plan, _ = _serving_plan(model, settings, lockstep)
        llm = LLM(plan, check=check, progress=progress)
        engine = Engine(llm.model, plan, lockstep=lockstep)
        engine.runner.follow()

    @property
    def warm_up_report(self) -> list[Compiled]:
        """Every program, its seconds, and whether the persistent cache had it."""
        return self._thread.warm_up_report

    def metrics(self) -> dict[str, Any]:
        """Metrics for operators, as numbers, lists and dicts; see engine.metrics.Metrics.

        With adapters also `loras`: the number of slots, and the names that run and wait.
        """
        metrics = self._thread.engine.metrics.as_dict()
        if self._bank is not None:
            slots = self._bank.adapters
            used = {  # the engine may still hold a sequence of one that is gone
                what: [one.name for slot in metrics[f"adapters_{what}"] if (one := slots[slot - 1])]
                for what in ("running", "waiting")
            }
            metrics["loras"] = {"slots": len(slots), **used}
        return metrics

    def set_roofline(self, ideal_decode_s: Callable[[int, float], float]) -> None:
        """Sets the roofline: from now on the metrics report decoding as a percentage of it.

        Args:
            ideal_decode_s: seconds that a decode step must take at least, of its number of
                sequences and their mean number of tokens; as `bench.roofline.Roofline` counts them.
        """
        self._thread.engine.ideal_decode_s = ideal_decode_s

    @property
    def loras(self) -> dict[str, Path]:
        """The adapters that requests may choose: their names and folders."""
        bank = self._bank.adapters if self._bank else ()
        present = (one for one in bank if one is not None and one.name not in self._leaving)
        return {one.name: one.adapter.folder for one in present}

    async def load_lora(self, name: str, folder: str | Path) -> None:
        """One more adapter for requests to choose, in a free slot; nothing compiles.

        Raises:
            RooflaxError: there are no slots, none is free, or the adapter does not fit.
        """
        if self._lockstep is not None:
            raise RequestError("Several processes load adapters when they start; give `loras`.")
        if self._bank is None:
            raise RequestError("There are no slots of adapters; start with `loras` or `max_loras`.")
        info = self.llm.info
        async with self._loading:  # one after the other: each starts from the latest bank
            before = self._bank
            bank = await self._in_thread(partial(before.with_adapter, name, str(folder), info))
            model = await self._in_thread(partial(bank.beside, whole(self.llm.model), info, before))
            self.llm.model = self._thread.engine.runner.model = model
            self._bank = bank

    async def unload_lora(self, name: str) -> None:
        """Refuses new requests for an adapter, waits for its open ones, and frees its slot.

        Raises:
            RequestError: there is no such adapter.
        """
        slot, _ = self._adapter(name)
        if slot == 0:
            raise RequestError("The model itself is no adapter.")
        self._leaving.add(name)
        try:
            while self._uses[slot] > 0:
                self._is_unused.clear()
                await self._is_unused.wait()
            async with self._loading:
                assert self._bank is not None
                self._bank = self._bank.without(name)
        finally:
            self._leaving.discard(name)

    @contextlib.contextmanager
    def _using(self, slot: int) -> Iterator[None]:
        """Keeps an adapter's slot until the block ends."""
        self._uses[slot] += 1
        try:
            yield
        finally:
            self._uses[slot] -= 1
            self._is_unused.set()

    def _adapter(self, name: str | None) -> tuple[int, str]:
        """An adapter's slot, and what keeps its cached prompts apart."""
        if name is None:
            return 0, ""
        if self._bank is None or name in self._leaving:
            names = ", ".join(self.loras) or "none"
            raise RequestError(f"lora is {name!r:.80}; there is {names}.", param="lora")
        return self._bank.slot(name)

    def health(self) -> Health:
        """Whether the engine works, as of now."""
        return self._thread.health()

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        lora: str | None = None,
        decoders: Callable[[int], TextDecoder] | None = None,
        **sampling: Any,
    ) -> AsyncGenerator[Delta, None]:
        """Pieces of a prompt's completions as they come; to stop early, close the iterator.

        Args:
            cache_salt: only requests of the same salt share cached prompts.
            lora: the name of one of `loras`; None is the model alone.
            decoders: gives what turns the tokens of a sample, by its index, into text; stop strings
                are looked for in that text. None decodes all of them.
            sampling: single fields of SamplingParams, as in `temperature=0.5`.

        Raises:
            QueueFull: too many requests wait.
            RequestError: the request cannot be done.
            EngineError: it failed.
        """
        check_not_forked()
        if self._pooler is not None:
            raise RequestError(f"{self.llm.info.name} embeds texts or scores them; it writes none.")
        (one_params,) = as_params(params, 1, sampling)
        adapter = self._adapter(lora)
        with self._using(adapter[0]):
            samples = await self._samples(prompt, one_params, cache_salt, adapter)
            if decoders is not None:
                for sample in samples:
                    sample.decoder = decoders(sample.sequence.sample_index)
            open_ = {id(sample.sequence): sample for sample in samples}
            inbox = _Inbox()
            self._inboxes |= dict.fromkeys(open_, inbox)
            sequences = [sample.sequence for sample in samples]
            try:
                self._thread.submit(sequences)
            except RooflaxError:
                self._forget(sequences)
                raise
            try:
                while open_:
                    for output in await inbox.take(self._piece_s * len(self._inboxes)):
                        sample = open_.get(id(output.sequence))
                        if sample is not None:
                            delta = self._take(sample, output)
                            if delta.completion is not None:
                                del open_[id(output.sequence)]
                            yield delta
            finally:
                self._thread.abort(sequences)
                self._forget(sequences)

    async def _samples(
        self, prompt: Prompt, params: SamplingParams, cache_salt: str, adapter: tuple[int, str]
    ) -> list[Sample]:
        """Makes a request's sequences; slow work runs beside the loop, so that streams continue."""
        loop, processor = asyncio.get_running_loop(), self.llm.processor
        if isinstance(prompt, str) and len(prompt) > LONG_TEXT:
            ids = await loop.run_in_executor(self._texts, processor.prompt_ids, prompt)
        else:
            ids = processor.prompt_ids(prompt)
        while not processor.grammars.has(params):
            with processor.grammars.compiling(self._compiler, params) as compiled:
                waiting = asyncio.wrap_future(compiled)
                waiting.add_done_callback(_seen)  # even if the caller is gone
                await asyncio.shield(waiting)  # others may wait for it too
        return processor.samples(0, ids, params, cache_salt, adapter)

    async def embed(
        self,
        texts: Prompt | list[Prompt],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str = "",
    ) -> np.ndarray:
        """As `LLM.embed`, beside other callers.

        Raises:
            QueueFull, RequestError, EngineError: as `stream`.
        """
        embedder = self.llm.embedder
        self._check_pools(embedder.pooler())
        embedder.check_dimensions(dimensions)

        def encoded() -> list[list[int]]:
            options = prompt_name, prompt, truncate_prompt_tokens
            return [embedder.text_ids(text, *options) for text in as_prompts(texts)]

        done = await self.pool(await self._in_thread(encoded), cache_salt=cache_salt)
        return embedder.vectors(done, dimensions, normalize)

    async def rerank(
        self,
        query: str,
        documents: list[str],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str = "",
    ) -> list[float]:
        """As `LLM.rerank`, beside other callers.

        Raises:
            QueueFull, RequestError, EngineError: as `stream`.
        """
        embedder = self.llm.embedder
        self._check_pools(embedder.pooler(scores=True))

        def encoded() -> list[list[int]]:
            options = instruction, truncate_prompt_tokens
            return [embedder.pair_ids(query, document, *options) for document in documents]

        done = await self.pool(await self._in_thread(encoded), cache_salt=cache_salt)
        return embedder.scores(done)

    def _check_pools(self, pooler: Pooler) -> None:
        if pooler != self._pooler:
            raise RequestError(
                f"This AsyncLLM generates text; {self.llm.info.name} embeds and scores as LLM."
            )

    async def _in_thread(self, work: Callable[[], T]) -> T:
        check_not_forked()
        return await asyncio.get_running_loop().run_in_executor(self._texts, work)

    async def pool(self, texts: list[list[int]], *, cache_salt: str = "") -> list[Sequence]:
        """The sequences of texts that were encoded for embedding or reranking, with their vectors.

        As many as run at once are queued at a time.

        Raises:
            QueueFull, RequestError, EngineError: as `stream`.
        """
        check_not_forked()
        inbox, sequences = _Inbox(), self.llm.embedder.sequences(texts, cache_salt)
        at_once = self.llm.max_num_seqs
        for begin in range(0, len(sequences), at_once):
            part = sequences[begin : begin + at_once]
            open_ = {id(sequence) for sequence in part}
            self._inboxes |= dict.fromkeys(open_, inbox)
            try:
                self._thread.submit(part)
                while open_:
                    for output in await inbox.take(0.0):
                        if output.finish_reason is not None:
                            open_.discard(id(output.sequence))
            finally:
                self._thread.abort(part)
                self._forget(part)
        return sequences

    def _forget(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._inboxes.pop(id(sequence), None)

    def _take(self, sample: Sample, output: StepOutput) -> Delta:
        delta = sample.take(output, self.llm.load_s, CompileCounts())
        if delta.completion is not None and delta.completion.error is not None:
            message = delta.completion.error
            is_request = message.startswith(FAULTS_OF_REQUESTS)
            raise (RequestError if is_request else EngineError)(message)
        if delta.completion is not None and output.finish_reason is None:
            self._thread.abort([output.sequence], "stop")  # a stop string ended it
        return delta

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        lora: str | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """A prompt's `n` completions."""
        done: dict[int, Completion] = {}
        options: dict[str, Any] = {"cache_salt": cache_salt, "lora": lora, **sampling}
        async for delta in self.stream(prompt, params, **options):
            if delta.completion is not None:
                done[delta.index] = delta.completion
        return [done[index] for index in sorted(done)]

    async def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Conversation | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str = "",
        **sampling: Any,
    ) -> list[Completion]:
        """The assistant's `n` answers to a conversation.

        To have them in pieces, give `stream` what `llm.encode_chat` makes of the messages.

        Args:
            messages, tools, chat_template, chat_template_kwargs: as for `LLM.encode_chat`.

        Raises:
            RequestError, CheckpointError: as `LLM.encode_chat`.
            QueueFull, EngineError: as `stream`.
        """
        encode = partial(
            self.llm.encode_chat,
            messages,
            tools=tools,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )
        ids = await self._in_thread(encode)
        return await self.generate(ids, params, cache_salt=cache_salt, **sampling)

    def _deliver(self, outputs: list[StepOutput]) -> None:
        """Hands each output to the loop that waits for it; runs on the engine's thread."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Inbox, StepOutput]]]
        by_loop = defaultdict(list)
        for output in outputs:
            inbox = self._inboxes.get(id(output.sequence))
            if inbox is not None and not inbox.loop.is_closed():
                by_loop[inbox.loop].append((inbox, output))
        for loop, pairs in by_loop.items():
            with contextlib.suppress(RuntimeError):  # it was closed just now
                loop.call_soon_threadsafe(_put, pairs)

    async def shutdown(self, *, drain: bool = True) -> None:
        """Takes no more requests; those at hand finish (drain), or end with "abort"."""
        self._thread.stop(drain=drain)
        with ThreadPoolExecutor(1) as alone:  # a thread of its own
            await asyncio.get_running_loop().run_in_executor(alone, self._thread.join)
        for pool in (self._texts, self._compiler):
            pool.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown(drain=False)


def _serving_plan(
    model: str | Path | ModelInfo | Plan | None,
    settings: Mapping[str, Any],
    lockstep: Lockstep | None,
) -> tuple[Plan, dict[str, Any]]:
    """The plan of a server, which all processes have alike, and the settings beside it."""
    planned, serving = read_settings("AsyncLLM", settings, ServingSettings), dict[str, Any]()
    for name, one in SERVING.items():
        value = planned.pop(name, None)
        serving[name] = one.default if value is None else value
    plan = make_plan(model, **planned)
    if not (plan.options.use_cache and plan.options.jit):
        raise RequestError("AsyncLLM needs the KV cache and jit; use LLM to run without them.")
    if lockstep is not None and plan.info.pooling is not None:
        raise RequestError(
            "Several processes serve a model that writes; this one embeds or scores."
        )
    if serving["loras"] or serving["max_loras"]:
        names = ("loras", "max_loras", "max_lora_rank")
        plan = plan.with_bank(*(serving[name] for name in names))
    elif serving["max_lora_rank"]:
        raise RequestError("max_lora_rank is for `loras` and `max_loras`; give one of these.")
    options = {"max_tokens_per_step": serving["max_tokens_per_step"]}
    plan = plan.serving(**options, num_blocks=serving["kv_blocks"])
    if lockstep is not None:
        lockstep.agree(
            {
                "the version": VERSION,
                "the model": plan.info.name,
                "the number of layers": plan.info.config.num_layers,
                "the context": plan.max_model_len,
                "max_num_seqs": plan.max_num_seqs,
                "max_tokens_per_step": plan.max_tokens_per_step,
                "the format": plan.storage.format,
                "the KV cache's type": str(plan.kv_dtype),
                "the mesh": str(plan.shards),
                "the adapters": [Path(str(one)).name for one in serving["loras"] or ()],
            }
        )
        # Memory that is free differs between hosts.
        plan = plan.serving(**options, num_blocks=lockstep.least(plan.num_blocks))
    return plan, serving


def _seen(done: asyncio.Future[Any]) -> None:
    """Keeps an unread error out of the log."""
    if not done.cancelled():
        done.exception()


def _put(pairs: list[tuple[_Inbox, StepOutput]]) -> None:
    for inbox, output in pairs:
        inbox.put(output)
