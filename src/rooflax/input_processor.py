"""`InputProcessor`: from what a caller sent to sequences that an engine runs.

It checks a request against the model and the context, before any device is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from rooflax.completion import Sample
from rooflax.engine.features.grammar import constrain
from rooflax.engine.features.registry import FEATURES
from rooflax.engine.request_checks import check_length, check_prompt, check_salt, check_sequence
from rooflax.engine.sampling_params import SamplingParams
from rooflax.engine.sequence import KVState
from rooflax.engine.sequence import Sequence as EngineSequence
from rooflax.errors import RequestError
from rooflax.fields.kinds import is_whole
from rooflax.fields.sampling import CHAT_SAMPLING
from rooflax.inputs import Prompt
from rooflax.loading.generation_config import GenerationDefaults
from rooflax.loading.incremental import IncrementalDecoder
from rooflax.loading.model_info import ModelInfo
from rooflax.loading.plan import Plan
from rooflax.structured import Grammars


def check_generates(info: ModelInfo) -> None:
    """
    Raises:
        RequestError: the checkpoint has no head to generate with.
    """
    if not info.config.is_causal:
        does = "score pairs of texts" if info.pooling and info.pooling.scores else "embed texts"
        raise RequestError(f"{info.name} attends both ways, to {does}; it generates none.")
    if not (info.config.has_head or info.config.tied_embeddings):
        raise RequestError(f"{info.name} embeds texts and has no head to generate with.")


class InputProcessor:
    """Encodes prompts, and makes the sequences of a request.

    Attributes:
        tokenizer: of the model.
        defaults: what the checkpoint says of sampling.
        grammars: the grammars that were asked for, compiled.
    """

    def __init__(self, plan: Plan):
        info = plan.info
        self._vocab_size = info.config.vocab_size
        self.max_model_len, self.max_num_seqs = plan.max_model_len, plan.max_num_seqs
        self.tokenizer = info.tokenizer()
        self.defaults = info.generation_defaults(self.tokenizer)
        if plan.generation_config == "none":
            self.forget_sampling_defaults()
        self.grammars = Grammars(self.tokenizer, self._vocab_size, self.stop_ids)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every end-of-sequence id of the checkpoint."""
        # What the model cannot generate ends nothing.
        return frozenset(i for i in self.defaults.eos_token_ids if i < self._vocab_size)

    def encode(self, prompt: Prompt) -> list[int]:
        """A prompt's ids; ids are taken as they are.

        Raises:
            RequestError: it is neither text nor token ids.
        """
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        is_list = isinstance(prompt, Iterable) and not isinstance(prompt, Mapping | bytes)
        ids = list(prompt) if is_list else []
        if set(map(type, ids)) <= {int} and is_list:
            return ids
        if not is_list or not all(is_whole(token) for token in ids):
            raise RequestError(
                f"A prompt is {prompt!r:.80}; it must be text or a list of token ids.",
                param="prompt",
            )
        return [int(token) for token in ids]

    def prompt_ids(self, prompt: Prompt, *, new_tokens: int = 1) -> list[int]:
        """As `encode`, of a prompt that may fit; one that cannot is rejected without being encoded.

        Args:
            new_tokens: that must have room behind it.

        Raises:
            RequestError: it is neither text nor token ids, or longer than the context.
        """
        if isinstance(prompt, str):
            self.check_text(prompt)
        elif isinstance(prompt, Sequence) and len(prompt) >= self.max_model_len:
            check_length(len(prompt), self.max_model_len, new_tokens=new_tokens)
        return self.encode(prompt)

    def check_text(self, text: str) -> None:
        """Rejects a text that cannot fit, without encoding it.

        Raises:
            RequestError: with both numbers.
        """
        longest = self.tokenizer.longest_token
        if longest is not None and len(text) > self.max_model_len * longest:
            raise RequestError(
                f"The prompt has {len(text):,} characters and the context holds "
                f"{self.max_model_len} tokens of at most {longest}; shorten the prompt.",
                param="prompt",
            )

    def samples(
        self,
        request_id: int,
        ids: list[int],
        params: SamplingParams,
        cache_salt: str = "",
        adapter: tuple[int, str] = (0, ""),
    ) -> list[Sample]:
        """A request's `n` sequences, checked, each with its way back to text.

        With beams these are the first `n` of the group.

        Args:
            adapter: its slot, and what keeps its cached prompts apart.

        Raises:
            RequestError: what this model cannot do, or a form that cannot be compiled.
            UnsupportedModelError: the checkpoint's defaults cannot be computed.
        """
        stated_max, params = params.max_tokens, self._with_defaults(params, len(ids))
        vocab = self._vocab_size
        check_prompt(ids, vocab, self.max_model_len)
        check_salt(cache_salt)
        salt = (
            sha256(f"{adapter[1]} {cache_salt}".encode()).hexdigest() if adapter[1] else cache_salt
        )
        stop = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop |= self.stop_ids
        room = self.max_model_len - len(ids)
        if stated_max is not None and stated_max > room:
            raise RequestError(
                f"max_tokens is {stated_max} and the context of {self.max_model_len} has room for "
                f"{room} after a prompt of {len(ids)}; lower it, or leave it out to fill the "
                f"context.",
                param="max_tokens",
            )
        max_tokens = min(params.max_tokens or room, room)
        constraint = None
        if params.structured_output is not None:
            constraint = self.grammars.constraint(params, stop)
        sequences = [
            EngineSequence(
                request_id,
                ids,
                params,
                max_tokens,
                stop,
                index,
                kv=KVState(salt, adapter=adapter[0]),
            )
            for index in range(max(params.n, params.num_beams))
        ]
        if constraint is not None:
            for sequence in sequences:
                constrain(sequence, constraint.copy() if sequence.sample_index else constraint)
        for feature in FEATURES:
            feature.prepare(sequences)
        check_sequence(sequences[0], vocab, self.max_model_len)
        for feature in FEATURES:
            feature.check(sequences[0], vocab, self.max_num_seqs)
        return [
            Sample(sequence, IncrementalDecoder(self.tokenizer, ids))
            for sequence in sequences[: params.n]
        ]

    def forget_sampling_defaults(self) -> None:
        """Requests that leave a field open get the built-in value, not the checkpoint's. What ends
        a sequence stays."""
        d = self.defaults
        self.defaults = GenerationDefaults(
            do_sample=True, eos_token_ids=d.eos_token_ids,
            bos_token_id=d.bos_token_id, pad_token_id=d.pad_token_id,
        )  # fmt: skip

    def _with_defaults(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Fills in the checkpoint's defaults, and merges values that both may set."""
        d = self.defaults
        d.check()
        params = params.with_defaults(self.default_values())
        if d.max_length is not None and params.max_tokens is None:
            room = d.max_length - num_prompt_tokens
            if room < 1:
                raise RequestError(
                    f"The prompt has {num_prompt_tokens} tokens and the checkpoint's "
                    f"generation_config.json a max_length of {d.max_length}; give max_tokens.",
                    param="max_tokens",
                )
            params = replace(params, max_tokens=room)
        least = d.min_new_tokens
        least = (d.min_length or 0) - num_prompt_tokens if least is None else least
        least = max(params.min_tokens, min(least, params.max_tokens or least))
        if not (d.stop or d.banned_token_ids or d.logit_bias) and least == params.min_tokens:
            return params
        known = range(self._vocab_size)
        banned = (*params.banned_token_ids, *(i for i in d.banned_token_ids if i in known))
        bias = {i: value for i, value in d.logit_bias.items() if i in known}
        return replace(
            params,
            min_tokens=least,
            stop=tuple(dict.fromkeys((*params.stop, *d.stop))),
            banned_token_ids=tuple(dict.fromkeys(banned)),
            logit_bias=bias | dict(params.logit_bias),
        )

    def chat_values(self) -> Mapping[str, float]:
        """Sampling of a chat whose user leaves it open: nothing where the checkpoint says any."""
        says_any = bool(self.defaults.sampling) or self.defaults.do_sample is not None
        return {} if says_any else CHAT_SAMPLING

    def default_values(self) -> dict[str, Any]:
        """Sampling defaults of the checkpoint, by the fields of `SamplingParams`."""
        d = self.defaults
        values = {**d.sampling, "max_tokens": d.max_new_tokens}
        if d.do_sample is False:  # said outright: greedy, as in transformers
            values["temperature"] = 0.0
        return values
