"""`LLM`: text in, text out, over the engine.

Here meet the tokenizer, the chat template, stop strings and the engine. Scheduling, shapes and
devices are the engine's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import jax
import numpy as np

from rooflax.completion import Completion, Delta, Sample
from rooflax.drafting import Drafting, check_same_tokens
from rooflax.embedding import Embedder
from rooflax.engine.buckets import bucket
from rooflax.engine.compilation import CompileCounts, count_compilations, enable_persistent_cache
from rooflax.engine.engine import Engine
from rooflax.engine.features.speculation import Speculation
from rooflax.engine.offloaded_functions import OffloadedFunctions, step_functions
from rooflax.engine.request_checks import check_prompt
from rooflax.engine.sampling_params import SamplingParams
from rooflax.engine.sequence import Sequence as EngineSequence
from rooflax.engine.sequence import with_siblings
from rooflax.engine.step_functions import StepFunctions
from rooflax.errors import RequestError
from rooflax.fields.declaration import read_settings, takes
from rooflax.fields.kinds import is_whole
from rooflax.input_processor import InputProcessor, check_generates
from rooflax.inputs import Message, Prompt, as_conversations, as_params, as_prompts
from rooflax.loading.generic_tools import as_served
from rooflax.loading.load import load_plan
from rooflax.loading.model_info import ModelInfo
from rooflax.loading.plan import Plan, make_plan
from rooflax.loading.settings import EngineSettings
from rooflax.models.model import Model
from rooflax.models.offloading import OffloadPlan
from rooflax.nn.pooler import Pooler
from rooflax.processes import check_not_forked

SMALLEST_ENGINE_TOKENS = 256


@takes(EngineSettings)
class LLM:
    """A model with its tokenizer, ready to generate.

    Several threads may call it: their requests run one after the other, step by step, in an engine
    of each. `AsyncLLM` runs them together. It pickles as its arguments: a process that
    multiprocessing's "spawn" starts opens the model again. One that is forked after a first use may
    encode and decode, and nothing else.

    Args:
        model: checkpoint folder, .gguf file, hub id ("owner/name"), "package:NAME" (an installed
            package that ships a GGUF file), "preset:NAME", or None for the embedded default; or
            what `model_info` found, or what `make_plan` planned, which decides all settings but
            `prefix_caching`.
        check: reject NaN and infinite weights.
        progress: called with the bytes of each weight loaded.
        settings: as `EngineSettings` declares them.

    Raises:
        RooflaxError: one sentence that says what is wrong.
    """

    def __init__(
        self,
        model: str | Path | ModelInfo | Plan | None = None,
        *,
        check: bool = False,
        progress: Callable[[int], None] | None = None,
        **settings: Unpack[EngineSettings],
    ):
        given = read_settings("LLM", settings, EngineSettings)
        check_not_forked()
        self._recipe = model, check, given
        enable_persistent_cache()
        started = time.perf_counter()
        plan = make_plan(model, **given)
        _check_processes(plan)
        self.plan = plan
        self.info, self.options, self.mesh = plan.info, plan.options, plan.mesh
        self.max_model_len, self.max_num_seqs = plan.max_model_len, plan.max_num_seqs
        self.processor = InputProcessor(plan)
        self.tokenizer = self.processor.tokenizer
        if plan.draft is not None:
            draft = plan.draft.info
            check_same_tokens(self.info.name, self.tokenizer, draft.name, draft.tokenizer())
        self._compiled = CompileCounts()  # of loading, until the first generation reports it
        with count_compilations(self._compiled):
            self.model = load_plan(plan, check=check, progress=progress)
        self.load_s = time.perf_counter() - started
        self.embedder = Embedder(self.info, self.processor)
        self._engine: Engine | None = None
        self._lock = threading.Lock()  # of engines: steps of several threads take turns
        self._drafting = None
        if plan.num_draft_tokens:
            smaller = None if plan.draft is None else LLM(plan.draft, check=check)
            self._drafting = Drafting(
                self.info.config.vocab_size,
                plan.num_draft_tokens,
                smaller and smaller.new_engine,
                smaller.max_model_len if smaller else 0,
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as its arguments, without weights: unpickled, the model is opened again."""
        model, check, settings = self._recipe
        if isinstance(model, ModelInfo | Plan):
            raise RequestError(
                f"An LLM that was made of a {type(model).__name__} does not pickle; make it of the "
                f"model's name and settings."
            )
        return partial(type(self), model, check=check, **settings), ()

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every end-of-sequence id of the checkpoint."""
        return self.processor.stop_ids

    @property
    def format(self) -> str:
        """Width of the matmuls' weights: a quantised format, "bfloat16" or "float32"."""
        return self.plan.storage.format

    @property
    def prefix_caching(self) -> bool:
        """Whether prompts that begin the same share what they computed."""
        return self.plan.prefix_caching

    @property
    def offload_plan(self) -> OffloadPlan | None:
        """Plan of layer offloading; None if all layers are in memory."""
        return self.plan.offloading if self.plan.is_offloaded else None

    @property
    def kv_cache_bytes(self) -> int:
        """KV-cache bytes of the latest engine."""
        return self._engine.kv_cache_bytes if self._engine else 0

    def encode(self, prompt: Prompt) -> list[int]:
        """A prompt's ids; ids are taken as they are.

        Raises:
            RequestError: it is neither text nor token ids.
        """
        return self.processor.encode(prompt)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids.

        Raises:
            RequestError: one of them is no token id.
        """
        token_ids = list(ids)
        if not all(is_whole(token) and token >= 0 for token in token_ids):
            raise RequestError(f"ids is {token_ids!r:.80}; it must be a list of token ids.")
        return self.tokenizer.decode(map(int, token_ids), skip_special_tokens=skip_special_tokens)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """A conversation's ids, by the checkpoint's chat template.

        Args:
            messages: dicts with `role` and `content`, as clients store them: arguments of calls may
                be JSON text, results of tools and system messages may stand anywhere.
            tools: JSON schemas of functions that the model may call; where the template shows none,
                they stand in the system message, and earlier calls and results are text.
            add_generation_prompt: end with what begins the assistant's answer.
            chat_template: in place of the checkpoint's, as jinja2.
            chat_template_kwargs: further variables of the template, such as `enable_thinking`.

        Raises:
            RequestError: the checkpoint has no chat template, or it rejects the messages.
            CheckpointError: the template is not valid, or does something forbidden.
        """
        _, _, ids = as_served(
            self.tokenizer,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            template=chat_template,
            **(chat_template_kwargs or {}),
        )
        return ids

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """Completions of one prompt or several, in order; `n` samples of a prompt are adjacent.

        Args:
            prompts: text, or token ids, or a list of either.
            params: one for all, or one per prompt.
            sampling: single fields of SamplingParams, as in `temperature=0.5`.

        Raises:
            RequestError: a prompt or parameter that this model cannot run; the field is its
                `param`.
            EngineError: the model or the device failed.
        """
        done: dict[tuple[int, int], Completion] = {}
        for delta in self.stream(prompts, params, **sampling):
            if delta.completion is not None:
                done[delta.prompt, delta.index] = delta.completion
        return [done[key] for key in sorted(done)]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """The assistant's answers to one conversation or several, in order.

        Args:
            messages: dicts with `role` and `content`, or a list of such conversations.
            params, sampling: as for `generate`.
            tools, chat_template, chat_template_kwargs: as for `encode_chat`.

        Raises:
            RequestError, CheckpointError, EngineError: as `encode_chat` and `generate`.
        """
        template_options: dict[str, Any] = {
            "tools": tools,
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
        }
        prompts = [self.encode_chat(one, **template_options) for one in as_conversations(messages)]
        return self.generate(prompts, params, **sampling)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **sampling: Any,
    ) -> Iterator[Delta]:
        """As `generate`, piece by piece as the tokens come; a beam search comes when it is over.

        A conversation's answer is `stream(llm.encode_chat(messages))`.
        """
        check_generates(self.info)
        prompt_list = as_prompts(prompts)
        param_list = as_params(params, len(prompt_list), sampling)
        samples = []
        for index, (prompt, one_params) in enumerate(zip(prompt_list, param_list, strict=True)):
            samples += self.processor.samples(index, self.processor.prompt_ids(prompt), one_params)
        if samples:
            yield from self._run(samples)

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> np.ndarray:
        """[texts, dimensions] float32: a vector of each text, as sentence-transformers computes it.

        Args:
            texts: text, or token ids, or a list of either.
            prompt_name: which of the checkpoint's prompts stands before each text; None is its
                default one, if it has one. Not with token ids.
            prompt: in its place.
            dimensions: keep the first so many, as Matryoshka embeddings allow; None is as many as
                the checkpoint keeps, mostly all.
            normalize: to length one, after the cut; None is as the checkpoint says, which makes it
                so before a cut of its own.
            truncate_prompt_tokens: cut longer texts to so many tokens, -1 to as many as the model
                takes; None rejects a text that is longer than the model takes.

        Raises:
            RequestError: the checkpoint does not embed, or a text is too long.
            EngineError: the model or the device failed.
        """
        pooler = self.embedder.pooler()
        self.embedder.check_dimensions(dimensions)
        options = prompt_name, prompt, truncate_prompt_tokens
        ids = [self.embedder.text_ids(text, *options) for text in as_prompts(texts)]
        return self.embedder.vectors(self._pooled(ids, pooler), dimensions, normalize)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[float]:
        """Scores each document against the query, in the order given: from 0 to 1, or unbounded if
        the checkpoint says so.

        Args:
            instruction: what makes a document relevant; None is the model's own.
            truncate_prompt_tokens: of a cross-encoder: cut longer pairs to so many tokens, the
                longer text first; -1 to as many as the model takes. None rejects them.

        Raises:
            RequestError: the checkpoint is no reranker, or a document is too long.
            EngineError: the model or the device failed.
        """
        pooler = self.embedder.pooler(scores=True)
        options = instruction, truncate_prompt_tokens
        ids = [self.embedder.pair_ids(query, document, *options) for document in documents]
        return self.embedder.scores(self._pooled(ids, pooler))

    def _pooled(self, texts: list[list[int]], pooler: Pooler) -> list[EngineSequence]:
        """The texts' sequences, each with its vector."""
        check_not_forked()
        sequences = self.embedder.sequences(texts)
        if not sequences:
            return []
        try:
            with self._lock:
                engine = self.engine_for(sequences, pooler)
                engine.warm_up_prefill(sequences)
                engine.add(sequences)
            while not all(sequence.is_finished for sequence in sequences):
                with self._lock:
                    engine.step()
        except BaseException:
            self._engine = None  # what a failed step leaves of its cache cannot be used
            raise
        return sequences

    def _run(self, samples: list[Sample]) -> Iterator[Delta]:
        check_not_forked()
        sequences = [sample.sequence for sample in samples]
        by_sequence = {id(sample.sequence): sample for sample in samples}
        compiled, engine = CompileCounts(), None
        try:
            with self._lock:
                engine = self.engine_for(sequences)
                compiled, self._compiled = self._compiled, compiled
                with count_compilations(compiled):
                    engine.warm_up_prefill(sequences)
                    # Who waits anyway waits once, before any text; all processes must run alike.
                    is_warm = compiled.compilations > 0 or jax.process_count() > 1
                    if is_warm:
                        engine.warm_up_decode()
                engine.add(sequences)
            while not all(s.is_finished for s in sequences):  # then the engine may be another's
                with self._lock, count_compilations(compiled):
                    if not is_warm and engine.decodes_next:
                        is_warm = True
                        _run_untimed(engine.warm_up_decode, samples)
                    stepped = engine.step()
                for output in stepped:
                    sample = by_sequence.get(id(output.sequence))
                    if sample is None:  # a beam beyond `n`
                        continue
                    delta = sample.take(output, self.load_s, compiled)
                    if delta.completion is not None:
                        with self._lock:
                            engine.abort(output.sequence, "stop")  # a stop string may have ended it
                    yield delta
        except GeneratorExit:
            raise
        except BaseException:
            self._engine = None  # what a failed step leaves of its cache cannot be used
            raise
        finally:
            if engine is not None:
                with self._lock:
                    for sequence in sequences:
                        engine.abort(sequence)

    def use(self, model: Model) -> None:
        """Runs other weights from now on, as training hands them over; those of other shapes in an
        engine of their own.

        Raises:
            RequestError: a request is running.
        """
        with self._lock:
            if self._engine is not None and self._engine.has_unfinished:
                raise RequestError("Requests are running; weights change between them.")
            if self._engine is not None and _shapes(model) != _shapes(self.model):
                self._engine = None
            self.model = model
            if self._engine is not None:
                self._engine.use(model)

    def engine_for(self, sequences: list[EngineSequence], pooler: Pooler | None = None) -> Engine:
        """The engine at hand if it holds these sequences, else a larger one."""
        slots = min(bucket(len(with_siblings(sequences))), self.max_num_seqs)
        if not self.info.config.is_causal:  # slots cost nothing where no cache is kept
            slots = self.max_num_seqs
        longest = max(s.longest for s in sequences)
        tokens = min(bucket(longest, SMALLEST_ENGINE_TOKENS), self.max_model_len)
        engine = self._engine
        idle = engine is not None and not engine.has_unfinished  # else a stream still owns it
        if engine and idle and engine.config.holds(slots, tokens, pooler):
            return engine
        self._engine = None
        self._engine = self.new_engine(slots, tokens, pooler)
        return self._engine

    def new_engine(self, num_slots: int, max_tokens: int, pooler: Pooler | None = None) -> Engine:
        """An engine with blocks for all its slots.

        Raises:
            RequestError: its KV cache does not fit into memory.
        """
        speculation = None
        if pooler is None:
            speculation = self.speculation(num_slots, max_tokens)  # its memory comes first
        self.plan.check_fits(num_slots, max_tokens)
        return Engine(self.model, self.plan.sized(num_slots, max_tokens, pooler), speculation)

    def speculation(self, num_slots: int, max_tokens: int) -> Speculation | None:
        """Draft settings for an engine of this size."""
        return self._drafting and self._drafting.for_engine(num_slots, max_tokens)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt] | None = None,
    ) -> list[np.ndarray]:
        """Log-probability of each token given those before it, float32; the first has none.

        Args:
            continuations: one per prompt, to score these tokens alone, given the prompt.

        Returns:
            Per prompt an array of natural logarithms: one per token but the first, or one per
            token of the continuation.
        """
        check_generates(self.info)
        prompt_list = as_prompts(prompts)
        if continuations is None:
            return [self._score(self.encode(prompt), 1) for prompt in prompt_list]
        texts = as_prompts(continuations)
        if len(texts) != len(prompt_list):
            raise RequestError(
                f"{len(texts)} continuations for {len(prompt_list)} prompts; give one for each."
            )
        ids = [(self.encode(p), self.encode(c)) for p, c in zip(prompt_list, texts, strict=True)]
        if not all(prompt for prompt, _ in ids):
            raise RequestError("The prompt has no tokens; give at least one.")
        return [self._score([*prompt, *continuation], len(prompt)) for prompt, continuation in ids]

    def logits(self, prompt: Prompt) -> np.ndarray:
        """[tokens, vocab] float32: the logits after each token of a prompt."""
        check_generates(self.info)
        return self._dense(self._functions.logits, self.encode(prompt))

    def _score(self, ids: list[int], first: int) -> np.ndarray:
        """Log-probabilities of the tokens from number `first` on."""
        count = len(ids) - first
        num_places = min(bucket(max(count, 1), 16), self.max_model_len)
        places = np.arange(first - 1, first - 1 + num_places, dtype=np.int32)
        places = np.minimum(places, max(len(ids) - 1, 0))[None]
        return self._dense(self._functions.score, ids, places)[:count]

    @property
    def _functions(self) -> StepFunctions | OffloadedFunctions:
        return step_functions(self.model, self.options, self.mesh, max_steps=1)

    def _dense(self, function: Callable, ids: list[int], *more: np.ndarray) -> np.ndarray:
        """Runs a step function without a cache; returns its values for each token or place of a
        sequence."""
        check_not_forked()
        check_prompt(ids, self.info.config.vocab_size, self.max_model_len, new_tokens=0)
        padded = np.zeros((1, min(bucket(len(ids), 16), self.max_model_len)), np.int32)
        padded[0, : len(ids)] = ids
        lengths = np.array([len(ids)], np.int32)
        hidden, _ = function(self.model, (None, ()), padded, lengths, *more)
        return np.asarray(hidden)[0, : len(ids)]


def _shapes(model: Any) -> tuple[Any, list[Any]]:
    """Structure of a model, and its arrays' shapes and types, of which its programs are."""
    leaves, structure = jax.tree.flatten(model)
    return structure, [(np.shape(leaf), getattr(leaf, "dtype", None)) for leaf in leaves]


def _run_untimed(work: Callable[[], None], samples: list[Sample]) -> None:
    """Does something between two steps that is not in the samples' times."""
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    for sequence in with_siblings(sample.sequence for sample in samples):
        sequence.pause(seconds)
    for sample in samples:
        sample.times_s = [time_s + seconds for time_s in sample.times_s]


def _check_processes(plan: Plan) -> None:
    """
    Raises:
        RequestError: what several processes of one job cannot do alike.
    """
    if jax.process_count() == 1:
        return
    if plan.mesh is None:
        raise RequestError(
            f"There are {jax.process_count()} processes and no mesh; give one of all their "
            f"{jax.device_count()} devices."
        )
    if not plan.options.jit:
        raise RequestError("Several processes run compiled steps only; leave jit on.")
    if plan.num_draft_tokens:
        raise RequestError(
            "speculate goes by each process's own clock, and several processes must do the same; "
            "leave it out."
        )
