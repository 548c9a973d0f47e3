"""`Embedder`: from texts to token ids, and from an engine's vectors to what callers get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rooflax.engine.features.pooling import Pooled
from rooflax.engine.request_checks import check_prompt, check_salt
from rooflax.engine.sampling_params import SamplingParams
from rooflax.engine.sequence import NOT_FINITE, KVState
from rooflax.engine.sequence import Sequence as EngineSequence
from rooflax.errors import EngineError, RequestError
from rooflax.fields.kinds import is_whole
from rooflax.input_processor import InputProcessor
from rooflax.loading.chat_template import encode_chat
from rooflax.loading.model_info import ModelInfo
from rooflax.loading.pooling import ACTIVATIONS, SIGMOID, Pooling
from rooflax.nn.pooler import Pooler

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
QWEN3_RERANKER = (
    (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
    ),
    "<Instruct>: {}\n<Query>: {}\n<Document>: {}",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
RERANKERS: Mapping[str, tuple[tuple[str, ...], str, str]] = {"qwen3": (QWEN3_RERANKER, "yes", "no")}
"""Templates of checkpoints without modules.json, by family: what stands before instruction, query
and document, around them and behind, and the tokens whose logits decide.

Source: the model card of Qwen3-Reranker.
"""


class Embedder:
    """Embedding and reranking: everything they need beside an engine.

    Attributes:
        pooling: of the checkpoint; None where it says nothing of it.
    """

    def __init__(self, info: ModelInfo, processor: InputProcessor):
        self._info, self._processor = info, processor
        self._tokenizer = processor.tokenizer
        self.pooling: Pooling | None = info.pooling

    def pooler(self, *, scores: bool = False) -> Pooler:
        """Pooler that the engine runs.

        Args:
            scores: for reranking.

        Raises:
            RequestError: this model does not do that.
        """
        pooling, family = self.pooling, self._info.family
        if pooling is not None and pooling.scores == scores:
            return pooling.pooler
        if scores and pooling is None and family in RERANKERS:
            _, yes, no = RERANKERS[family]
            return Pooler("tokens", tuple(self._id(token) for token in (yes, no)))
        what = "scores pairs of texts (use rerank)" if pooling and pooling.scores else (
            "embeds texts (use embed)" if pooling else "has no modules.json that says how"
        )  # fmt: skip
        other = "a reranker, such as Qwen/Qwen3-Reranker-0.6B" if scores else (
            "an embedding model, such as Qwen/Qwen3-Embedding-0.6B"
        )  # fmt: skip
        verb = "rerank" if scores else "embed texts"
        raise RequestError(f"{self._info.name} does not {verb}: it {what}; choose {other}.")

    def _id(self, token: str) -> int:
        ids = self._tokenizer.encode(token, add_special_tokens=False)
        if len(ids) != 1:
            raise RequestError(f"{self._info.name} has no token {token!r} to score with.")
        return ids[0]

    def text_ids(
        self,
        text: Any,
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate: int | None = None,
    ) -> list[int]:
        """A text's ids, behind a prompt; ids are taken as they are.

        Args:
            prompt_name: one of the checkpoint's prompts; None is its default one, if it has one.
                Not with ids.
            prompt: in its place.
            truncate: as `longest`.

        Raises:
            RequestError: it is neither text nor ids, it is too long, or no prompt has the name.
        """
        if not isinstance(prompt, str | None):
            raise RequestError(f"prompt is {prompt!r:.80}; it must be text.", param="prompt")
        for name, value in (("prompt_name", prompt_name), ("prompt", prompt)):
            if value and not isinstance(text, str) and isinstance(text, Sequence):
                raise RequestError(
                    f"{name} stands before a text, and token ids are taken as they are; leave it "
                    f"out, or give texts.",
                    param=name,
                )
        before = self._prompt(prompt_name) if prompt is None else prompt
        most = self.longest(truncate)
        if isinstance(text, str):
            if truncate is not None:
                return self._checked(self._tokenizer.encode_cut(before + text, None, most)[0])
            text = before + text
        elif truncate is not None:
            text = self._processor.encode(text)[:most]
        return self._checked(self._processor.prompt_ids(text, new_tokens=0))

    def longest(self, truncate: int | None = None) -> int:
        """Tokens of the longest text.

        Args:
            truncate: to so many tokens texts are cut; -1 is to as many as the model takes. None
                cuts nothing: what is longer is rejected.

        Raises:
            RequestError: the model does not take so many.
        """
        longest = self._processor.max_model_len
        if self.pooling is not None and self.pooling.max_tokens is not None:
            longest = min(longest, self.pooling.max_tokens)
        if truncate is None or truncate == -1:
            return longest
        if not is_whole(truncate) or not 1 <= truncate <= longest:
            raise RequestError(
                f"truncate_prompt_tokens is {truncate!r:.40}; it must be from 1 to {longest}, or "
                f"-1 for as many as the model takes.",
                param="truncate_prompt_tokens",
            )
        return truncate

    def _prompt(self, name: str | None) -> str:
        pooling = self.pooling
        prompts = {} if pooling is None else pooling.prompts
        name = name if name is not None or pooling is None else pooling.default_prompt
        if name is not None and not (isinstance(name, str) and name in prompts):
            raise RequestError(
                f"The model has no prompt {name!r:.60}; it has {', '.join(prompts) or 'none'}.",
                param="prompt_name",
            )
        return "" if name is None else prompts[name]

    def pair_ids(
        self, query: str, document: str, instruction: str | None, truncate: int | None = None
    ) -> list[int]:
        """The ids that a reranker is asked with. The checkpoint's default prompt, if it has one,
        stands before a cross-encoder's query, and is a chat template's instruction.

        Args:
            truncate: as `longest`, of a cross-encoder.

        Raises:
            RequestError: they are no texts, or too long; or a cross-encoder gets an instruction.
        """
        for name, text in (("query", query), ("document", document)):
            if not isinstance(text, str):
                raise RequestError(f"The {name} is {text!r:.80}; it must be text.", param=name)
            if truncate is None:
                self._processor.check_text(text)
        most, config = self.longest(truncate), self._info.config
        if not config.is_causal:
            if instruction is not None:
                raise RequestError(
                    f"{self._info.name} scores pairs without an instruction; leave it out.",
                    param="instruction",
                )
            cut = None if truncate is None else most
            ids, types = self._tokenizer.encode_cut(self._prompt(None) + query, document, cut)
            self._checked(ids)
            if config.token_types < 2:
                return ids
            return [i + t * config.vocab_size for i, t in zip(ids, types, strict=True)]
        if truncate is not None:
            raise RequestError(
                f"{self._info.name} scores by a prompt, of which nothing is cut; leave "
                f"truncate_prompt_tokens out.",
                param="truncate_prompt_tokens",
            )
        if self.pooling is not None:
            return self._checked(self._templated(query, document, instruction))
        (before, form, behind), *_ = RERANKERS[self._info.family]
        text = form.format(INSTRUCTION if instruction is None else instruction, query, document)
        start, end = (
            self._tokenizer.encode(piece, add_special_tokens=False) for piece in (before, behind)
        )
        return self._checked(start + self._tokenizer.encode_plain(text) + end)

    def beginning(self, text: str, max_tokens: int) -> str:
        """A text without the tokens behind the first so many."""
        ids, places = self._tokenizer.encode_offsets(text)
        return text if len(ids) <= max_tokens else text[: places[max_tokens][0]]

    def _templated(self, query: str, document: str, instruction: str | None) -> list[int]:
        """Renders the checkpoint's chat template, which knows these two roles."""
        told = self._prompt(None) if instruction is None else instruction
        system = [{"role": "system", "content": told}] if told else []
        pair = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        assert self.pooling is not None
        begins = self.pooling.transformer.generation_prompt
        return encode_chat(self._tokenizer, [*system, *pair], add_generation_prompt=begins)

    def _checked(self, ids: list[int]) -> list[int]:
        longest = self.longest()
        if len(ids) > longest:
            raise RequestError(
                f"The text has {len(ids)} tokens and the model takes {longest}; shorten it, or let "
                f"it be cut (truncate_prompt_tokens).",
                param="prompt",
            )
        check_prompt(ids, self._info.config.vocab_size, longest, new_tokens=0)
        return ids

    def sequences(self, texts: Sequence[list[int]], cache_salt: str = "") -> list[EngineSequence]:
        """Sequences for the engine, one for each text."""
        check_salt(cache_salt)
        params = SamplingParams(max_tokens=1, temperature=0).with_defaults({})
        return [
            EngineSequence(i, ids, params, 1, frozenset(), kv=KVState(cache_salt))
            for i, ids in enumerate(texts)
        ]

    @property
    def size(self) -> int:
        """Numbers of a vector of which nothing is cut."""
        dense = () if self.pooling is None else self.pooling.dense
        return dense[-1].weight.shape[0] if dense else self._info.config.hidden_size

    def dimensions(self, dimensions: int | None) -> int:
        """Numbers of a vector.

        Args:
            dimensions: that are asked for; None is as many as the checkpoint keeps.
        """
        kept = None if self.pooling is None else self.pooling.dimensions
        return dimensions or min(kept or self.size, self.size)

    def check_dimensions(self, dimensions: int | None) -> None:
        """
        Raises:
            RequestError: a vector cannot be cut to so many.
        """
        is_cut = dimensions is not None
        if is_cut and not (is_whole(dimensions) and 1 <= dimensions <= self.size):
            raise RequestError(
                f"dimensions is {dimensions!r:.40}; it must be from 1 to {self.size}.",
                param="dimensions",
            )

    def vectors(
        self, done: Sequence[EngineSequence], dimensions: int | None, normalize: bool | None
    ) -> np.ndarray:
        """[texts, dimensions] float32.

        Args:
            dimensions: the first so many; None is as many as the checkpoint keeps.
            normalize: to length one, after the cut; None is as the checkpoint says, which makes it
                so before a cut of its own.

        Raises:
            EngineError: what ended one of them, or layers behind the pooling give NaN or infinity.
        """
        assert self.pooling is not None
        most = self.dimensions(dimensions)
        if not done:
            return np.zeros((0, most), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            pooled = self.pooling.finish(_rows(done))
        if dimensions is not None or normalize is not None:
            pooled = pooled[:, :most]
        if not np.isfinite(pooled).all():
            raise EngineError(NOT_FINITE)
        if self.pooling.normalizes if normalize is None else normalize:
            pooled = pooled / np.maximum(np.linalg.norm(pooled, axis=1, keepdims=True), 1e-12)
        return pooled[:, :most]

    def scores(self, done: Sequence[EngineSequence]) -> list[float]:
        """Two tokens' logits, one less the other, or what a score head gives, behind the
        checkpoint's activation; a sigmoid makes the former the first token's probability."""
        if not done:
            return []
        pooling, rows = self.pooling, _rows(done)
        with np.errstate(over="ignore", invalid="ignore"):
            if pooling is not None and pooling.has_head:
                numbers = pooling.finish(rows)[:, 0]
            else:
                numbers = rows[:, 0].astype(np.float64) - rows[:, 1]
            scored = ACTIVATIONS[SIGMOID if pooling is None else pooling.activation](numbers)
        if not np.isfinite(scored).all():
            raise EngineError(NOT_FINITE)
        return [float(score) for score in scored]


def _rows(done: Sequence[EngineSequence]) -> np.ndarray:
    """
    Raises:
        EngineError: what ended one of them.
    """
    for sequence in done:
        if sequence.finish_reason != "stop":
            raise EngineError(sequence.error or f"A text ended with {sequence.finish_reason}.")
    return np.stack([sequence.features[Pooled].vector for sequence in done]).astype(np.float32)
