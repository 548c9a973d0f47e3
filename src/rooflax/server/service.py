"""`Service`: one model behind the routes. Whether it can be asked, by how many, and its answers.

Knows requests as token ids and sampling parameters; fields and bodies are the routes' matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rooflax import structured
from rooflax.completion import Delta, TextDecoder
from rooflax.engine.sampling_params import SamplingParams
from rooflax.errors import QueueFull, RequestError
from rooflax.loading.generic_tools import encode_as_text
from rooflax.loading.messages import encode
from rooflax.server.call_formats import GENERIC, CallFormat, format_of, with_calls
from rooflax.server.call_formats.response_template import Unreadable, read_response_template
from rooflax.server.errors import ApiError
from rooflax.server.sampling import Spelling
from rooflax.server.settings import Settings
from rooflax.structured import MAX_COMPILING

if TYPE_CHECKING:
    from rooflax.async_llm import AsyncLLM

log = logging.getLogger("rooflax.server")
ServiceState = Literal["loading", "ready", "draining", "failed"]
RETRY_LOADING_S, LONGEST_RETRY_S = 5, 30
MAX_WAITING_CONTEXTS = 8
"""Prompt tokens of all open requests, in contexts beyond those that run."""
TEXT_THREADS, MAX_TEXTS = 4, 256
MAX_FAULTS = 256
"""Schemas of tools of which it is kept whether they can be forced."""


class Service:
    """A model that is loading, ready, draining or failed.

    Attributes:
        progress: what loading does just now.
        open: sequences that were accepted and are not answered yet.
        num_body_bytes: of bodies that are being read.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.engine: AsyncLLM | None = None
        self.progress, self.failure, self._name = "starting", "", ""
        self.created, self.started_s, self.open = int(time.time()), time.monotonic(), 0
        self.cancelled, self.rejected = Counter[str](), Counter[str]()
        self.failed_calls = 0
        self._has_said_generic = False
        self._state: ServiceState = "loading"
        self._open_by_owner, self._tokens_by_owner = Counter[str](), Counter[str]()
        self._num_texts = self.num_body_bytes = 0
        self._mean_s = 1.0  # of the last requests, for Retry-After
        self._faults: dict[str, str] = {}
        self._num_trials, self._trials = 0, ThreadPoolExecutor(1, "rooflax-trial")
        self._texts = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="rooflax-text")

    def is_loaded(self, engine: AsyncLLM) -> None:
        """The model is there.

        Raises:
            RequestError: an adapter has the model's name.
        """
        self._name = public_name(engine.llm.info.name)
        if taken := set(self.names) & engine.loras.keys():
            raise RequestError(f"--lora {min(taken)} has the name of the model; give another.")
        self.engine, self._state = engine, "ready"

    def fails(self, reason: str) -> None:
        """Records a failure: the server answers nothing any more."""
        self.failure, self._state = reason, "failed"

    def drains(self) -> None:
        """Stops taking requests; running ones continue."""
        self._state = "draining"

    @property
    def state(self) -> ServiceState:
        """As of now; an engine that died or is stuck has failed."""
        if self._state in ("ready", "draining") and self.engine is not None:
            health = self.engine.health()
            if health.failure is not None:
                self.fails(health.failure)
            elif health.stalled_s > self.settings.stall_s:
                return "failed"
        return self._state

    @property
    def num_open(self) -> int:
        """Number of open answers, for which a drain waits."""
        return self.open

    @property
    def names(self) -> tuple[str, ...]:
        """Under which the model is served, and then its adapters."""
        base_names = self.base_names
        return base_names if self.engine is None else (*base_names, *self.engine.loras)

    @property
    def base_names(self) -> tuple[str, ...]:
        """Those of the model without an adapter."""
        return self.settings.served_names or (self._name,)

    def ready(self) -> AsyncLLM:
        """The engine.

        Raises:
            ApiError: 503, while there is none.
        """
        state = self.state
        if state == "ready" and self.engine is not None:
            return self.engine
        dead = ("The engine has stopped; the server must be restarted.", "engine_dead")
        stuck = ("The engine makes no steps; try again later.", "engine_stuck")
        message, code = {
            "loading": (f"The model is loading ({self.progress}); try again soon.", "loading"),
            "draining": ("The server is stopping; ask another.", "draining"),
        }.get(state, dead if self.failure else stuck)
        wait = {"Retry-After": str(RETRY_LOADING_S)}
        raise ApiError(message, status=503, code=code, headers=wait)

    def resolve(self, name: str | None) -> str:
        """The served name that a request means.

        Raises:
            ApiError: 404, no model has that name; 503, none is loaded.
        """
        self.ready()
        names = self.names
        if name is None or name in names:
            return name or names[0]
        raise ApiError(
            f"There is no model {name[:80]!r}; there is {', '.join(names)}.",
            status=404,
            code="model_not_found",
            param="model",
        )

    @cached_property
    def spelling(self) -> Spelling:
        """Texts of the model's tokens."""
        return Spelling(self.ready().llm.tokenizer)

    @cached_property
    def _own_format(self) -> CallFormat | None:
        """Format that the checkpoint itself declares."""
        stated = self.ready().llm.tokenizer.response_template
        if stated is None:
            return None
        try:
            return read_response_template(stated)
        except Unreadable as why:
            log.warning("the model's response_template is not followed: %s", why)
            return None

    @property
    def format(self) -> CallFormat:
        """Format of the model's calls and reasoning; a generic one if calls are unknown."""
        template = self.ready().llm.tokenizer.chat_template
        return with_calls(self._own_format or format_of(template))

    @cached_property
    def special(self) -> dict[str, int]:
        """Ids of the tokenizer's special tokens by their texts."""
        tokenizer = self.ready().llm.tokenizer
        pairs = ((tokenizer.id_to_token(i), i) for i in tokenizer.special_token_ids)
        return {text: number for text, number in pairs if text}

    @contextlib.contextmanager
    def reserved(self, num_sequences: int, owner: str) -> Iterator[None]:
        """A place for a request's sequences, taken before anything is computed for it.

        Raises:
            ApiError: 429, too many are open; or more than may ever be.
        """
        self.ready()
        most = min(self._most_open, self._share)
        if num_sequences > most:
            raise ApiError(
                f"The request has {num_sequences} answers and at most {most} may be open; lower "
                f"n, or send fewer prompts.",
                param="n",
            )
        if self._is_over(num_sequences, owner):
            raise self._no_place()
        self.open += num_sequences
        self._open_by_owner[owner] += num_sequences
        started = time.monotonic()
        try:
            yield
        finally:
            self.open -= num_sequences
            self._open_by_owner[owner] -= num_sequences
            self._mean_s += 0.1 * (time.monotonic() - started - self._mean_s)

    def no_place(self, owner: str) -> ApiError | None:
        """Error if no further request fits, before a body is read; None without an engine."""
        with contextlib.suppress(ApiError):
            return self._no_place() if self._is_over(1, owner) else None
        return None

    def _is_over(self, num_sequences: int, owner: str) -> bool:
        mine = self._open_by_owner[owner] + num_sequences
        return self.open + num_sequences > self._most_open or mine > self._share

    @property
    def _share(self) -> int:
        """The most answers that one key may have open."""
        most = self._most_open
        return (self.settings.max_per_key or max(1, most // 2)) if self._has_keys else most

    @property
    def _has_keys(self) -> bool:
        return len(self.settings.api_keys) > 1

    def _no_place(self) -> ApiError:
        return self.queue_full(f"{self.open} answers are open and {self._most_open} may be")

    @property
    def _most_open(self) -> int:
        return self.slots + self.settings.max_waiting

    def queue_full(self, why: str) -> ApiError:
        """429, with the seconds after which a place is likely."""
        wait_s = self._mean_s * max(1, self.open - self.slots) / self.slots
        seconds = min(LONGEST_RETRY_S, max(1, math.ceil(wait_s)))
        return ApiError(
            f"{why}; try again later.",
            status=429,
            code="queue_full",
            headers={"Retry-After": str(seconds)},
        )

    @contextlib.contextmanager
    def prompt_tokens(self, num_tokens: int, owner: str) -> Iterator[None]:
        """Room for a request's prompts; one of several keys has half of it.

        Raises:
            ApiError: 429, the open ones have too many tokens already.
        """
        most = self.ready().llm.max_model_len * (self.slots + MAX_WAITING_CONTEXTS)
        all_open, mine = self._tokens_by_owner.total(), self._tokens_by_owner[owner]
        share = most // 2 if self._has_keys else most
        if (all_open and all_open + num_tokens > most) or (mine and mine + num_tokens > share):
            raise self.queue_full(f"the open prompts have {all_open} tokens")
        self._tokens_by_owner[owner] += num_tokens
        try:
            yield
        finally:
            self._tokens_by_owner[owner] -= num_tokens

    @property
    def slots(self) -> int:
        """Sequences that run at once."""
        return self.ready().llm.max_num_seqs

    async def in_thread(self, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Work that takes long, beside the loop: encoding, templates, large JSON.

        Raises:
            ApiError: 429, too much of it waits.
        """
        if self._num_texts >= MAX_TEXTS:
            raise self.queue_full(f"{self._num_texts} texts wait to be read")
        self._num_texts += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._texts, lambda: work(*args, **options))
        finally:
            self._num_texts -= 1

    async def faults(self, grammars: Sequence[str]) -> list[str]:
        """Reasons why Lark grammars cannot be compiled; "" for one that can.

        Raises:
            ApiError: 429, too many wait to be tried.
            RequestError: llguidance is missing.
        """
        new = [text for text in grammars if text not in self._faults]
        if new:
            if self._num_trials >= MAX_COMPILING:
                raise self.queue_full(f"{self._num_trials} sets of tools wait to be tried")
            self._num_trials += 1
            try:
                loop = asyncio.get_running_loop()
                new_faults = await loop.run_in_executor(self._trials, structured.faults, new)
            finally:
                self._num_trials -= 1
            self._faults |= zip(new, new_faults, strict=True)
        known = [self._faults[text] for text in grammars]
        while len(self._faults) > MAX_FAULTS:
            del self._faults[next(iter(self._faults))]
        return known

    def check_size(self, num_characters: int) -> None:
        """
        Raises:
            ApiError: a text cannot fit the context, however it is cut into tokens.
        """
        llm = self.ready().llm
        longest = llm.tokenizer.longest_token
        if longest is not None and num_characters > llm.max_model_len * longest:
            raise ApiError(
                f"The prompt has {num_characters:,} characters and the context holds "
                f"{llm.max_model_len} tokens of at most {longest}; shorten the prompt.",
                code="context_length_exceeded",
                param="prompt",
            )

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt.

        Raises:
            ApiError: it cannot fit the context.
        """
        self.check_size(len(text))
        encode = self.ready().llm.tokenizer.encode
        return await self.in_thread(encode, text, add_special_tokens=add_special_tokens)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> list[int]:
        """Token ids of repaired messages, by the model's chat template, or with tools as text where
        its own format of them is not known.

        Args:
            variables: further ones of the template.

        Raises:
            RooflaxError: there is no template, or it rejects the messages.
        """
        llm = self.ready().llm
        template = llm.tokenizer.chat_template
        if template is None:
            raise ApiError(
                "The model has no chat template; start the server with --chat-template, or use "
                "/v1/completions.",
                param="messages",
            )
        options = {**variables, "tools": list(tools) or None}
        is_text = self.format.name == GENERIC and (tools or "tool_calls" not in template)
        if is_text and tools and not self._has_said_generic:
            self._has_said_generic = True
            log.warning(
                "the chat template shows no tools in a known format: they are stated in the system "
                "message, and calls are read as <tool_call>{...}</tool_call>"
            )
        work = encode_as_text if is_text else encode
        try:
            return await self.in_thread(partial(work, llm.tokenizer, messages, **options))
        except RequestError as error:
            raise ApiError(str(error), param="messages") from None

    def check_length(self, num_tokens: int, max_tokens: int | None, field: str) -> None:
        """
        Raises:
            ApiError: prompt and answer do not fit the context; both numbers are stated.
        """
        context = self.ready().llm.max_model_len
        if num_tokens + (max_tokens or 1) > context:
            limit = "" if max_tokens is None else f" and {field} is {max_tokens}"
            raise ApiError(
                f"The prompt has {num_tokens} tokens{limit}, and the context holds {context}; "
                f"shorten the prompt{' or lower ' + field if limit else ''}.",
                code="context_length_exceeded",
                param=field if limit else "prompt",
            )

    @contextlib.asynccontextmanager
    async def stream(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        owner: str,
        model: str = "",
        cache_salt: str = "",
        decoders: Callable[[int], TextDecoder] | None = None,
        form_field: str | None = None,
    ) -> AsyncIterator[AsyncGenerator[Delta, None]]:
        """Opens the stream of all prompts' samples; leaving the block ends them.

        Args:
            model: one of `names`.
            form_field: of the request, that asked for a schema, a regex or a grammar.

        Raises:
            RooflaxError: the request cannot be done, or failed.
        """
        engine = self.ready()
        lora = None if model in ("", *self.base_names) else model
        with self.prompt_tokens(sum(map(len, prompts)), owner):
            streams = [
                engine.stream(ids, params, cache_salt=cache_salt, lora=lora, decoders=decoders)
                for ids in prompts
            ]
            try:
                async with aclosing(streams[0] if len(streams) == 1 else _merged(streams)) as all_:
                    yield all_
            except QueueFull:
                raise
            except RequestError as error:  # what cannot be compiled has no field of its own
                if error.param == "lora":  # it was unloaded just now
                    self.resolve(model)
                if error.param is not None or params.structured_output is None:
                    raise
                message = str(error)
                raise ApiError(message, code="invalid_schema", param=form_field) from None


def public_name(model: str) -> str:
    """A model's name without the place where its files are."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


async def _merged(streams: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[Delta, None]:
    """The pieces of several prompts as they come, each with its prompt's number."""
    pieces: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue(len(streams))

    async def read(number: int, stream: Any) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    await pieces.put(replace(delta, prompt=number))
            await pieces.put(None)
        except Exception as error:
            await pieces.put(error)

    tasks = [asyncio.create_task(read(*each)) for each in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            piece = await pieces.get()
            if isinstance(piece, BaseException):
                raise piece
            if piece is None:
                left -= 1
            else:
                yield piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
