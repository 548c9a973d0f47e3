"""A checkpoint's own defaults for generation, and every id that ends a sequence.

Reads `generation_config.json` as a closed world: each key is honoured as transformers does, changes
no token here, or is rejected by name. End-of-sequence ids are those of every file that states one.
It does not sample: what a request leaves open is filled from here elsewhere.
"""

from __future__ import annotations

import fnmatch
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.fields.kinds import Number, is_number, is_whole
from rooflax.fields.sampling import MAX_BIAS, MAX_LOGIT_BIAS, OF_CHECKPOINT, SAMPLING
from rooflax.fields.sampling import MAX_INT32 as MAX_NUMBER
from rooflax.loading.json_files import read_json_object

LABELS = (
    "_*", "transformers_version", "model_type", "trust_remote_code", "attn_implementation",
    "output_*", "return_dict_in_generate", "use_cache", "cache_implementation", "cache_config",
    "max_cache_len", "prefill_chunk_size", "low_memory", "compile_config", "disable_compile",
    "continuous_batching_config",
    # No token changes: logits are finite and a softmax follows; drafts are checked.
    "renormalize_logits", "remove_invalid_values", "use_mtp", "is_assistant",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit",
    "assistant_lookbehind", "target_lookbehind", "speculation_type",
    # Of beams, which only a request asks for, and of encoders.
    "early_stopping", "length_penalty", "decoder_start_token_id",
    # Of vendors' own programs; transformers does not read them either.
    "chat_format", "max_window_size", "stop_words_type", "user_token_id", "assistant_token_id",
)  # fmt: skip
"""Keys of generation_config.json that change no token here."""

OFF: Mapping[str, tuple[Any, ...]] = {
    "typical_p": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "top_h": (),
    "num_beams": (1,), "num_beam_groups": (1,), "diversity_penalty": (0,),
    "num_return_sequences": (1,), "penalty_alpha": (0,), "dola_layers": (),
    "constraints": ([],), "force_words_ids": ([],), "assistant_ensemble_weight": (0,),
    "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,), "exponential_decay_length_penalty": (),
    "begin_suppress_tokens": ([],), "forced_bos_token_id": (), "forced_eos_token_id": (),
    "token_healing": (False,), "guidance_scale": (1,), "watermarking_config": (), "max_time": (),
    "frequency_penalty": (0,), "presence_penalty": (0,),
}  # fmt: skip
"""Keys that are rejected unless they have one of these values, or null: nothing is computed."""
DRAWN = ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
"""Those of OFF that count only where tokens are drawn."""


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling defaults of a checkpoint; None where it has none.

    `do_sample` false or absent means greedy in transformers' `generate`. The fields here are what
    the file says, whatever `do_sample` is: for the reference's behaviour take
    `greedy`.

    Attributes:
        sampling: values of fields of `SamplingParams` that a checkpoint may state.
        do_sample: None if absent.
        eos_token_ids: every id that ends a sequence, in the file's order.
        bos_token_id: the id that begins a sequence.
        pad_token_id: the id that fills batches.
        max_new_tokens, min_new_tokens: the file's limits of new tokens.
        max_length, min_length: the file's limits of a text with its prompt, which count where it
            has no limit of new tokens.
        stop: texts that end a text.
        banned_token_ids: ids that are never chosen; some may be beyond the vocabulary.
        logit_bias: added to the logits of ids.
        rejected: a sentence about what the file asks for and is not computed here.
    """

    sampling: Mapping[str, float] = field(default_factory=dict)
    do_sample: bool | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    max_length: int | None = None
    min_length: int | None = None
    stop: tuple[str, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    rejected: str | None = None

    def check(self) -> None:
        """
        Raises:
            UnsupportedModelError: the file asks for what is not computed here.
        """
        if self.rejected is not None:
            raise UnsupportedModelError(self.rejected)

    @property
    def greedy(self) -> bool:
        """Whether transformers' `generate` would take the most probable token each time."""
        return not self.do_sample


def read_generation_defaults(
    folder: str | os.PathLike[str], *, tokenizer_eos_id: int | None = None
) -> GenerationDefaults:
    """Reads the defaults of a checkpoint folder; files that are missing say nothing.

    End-of-sequence ids are those of generation_config.json, of config.json and its text_config, and
    the tokenizer's, together.

    Args:
        folder: the checkpoint.
        tokenizer_eos_id: the tokenizer's own end of sequence.

    Raises:
        CheckpointError: a file is not a JSON object, or a value has the wrong type or range.
    """
    path, config = (Path(folder) / name for name in ("generation_config.json", "config.json"))
    defaults = generation_defaults(read_json_object(path), path)
    raw = read_json_object(config)
    text = raw.get("text_config")
    ends = list(defaults.eos_token_ids)
    for values in (raw, text if isinstance(text, dict) else {}):
        ends += _Fields(config, values).ids("eos_token_id")
    ends += [] if tokenizer_eos_id is None else [tokenizer_eos_id]
    return replace(defaults, eos_token_ids=tuple(dict.fromkeys(ends)))


def generation_defaults(values: Mapping[str, Any], where: Path) -> GenerationDefaults:
    """The defaults that an object like generation_config.json states, checked.

    Args:
        where: the file that errors name.

    Raises:
        CheckpointError: a value has the wrong type or range.
    """
    fields = _Fields(where, values)
    ends = fields.ids("eos_token_id")
    bias = fields.biases("sequence_bias")
    # An end among the bad words would never come; transformers leaves it out, too.
    bad = [id_ for id_ in fields.words("bad_words_ids") if id_ not in ends]
    banned = [*fields.ids("suppress_tokens"), *bad, *(i for i in bias if bias[i] == -math.inf)]
    if len({*banned, *bias}) > MAX_LOGIT_BIAS:
        fields.not_computed.append(f"more than {MAX_LOGIT_BIAS} ids that are suppressed or biased")
    return GenerationDefaults(
        sampling=fields.sampling(),
        do_sample=fields.flag("do_sample"),
        eos_token_ids=ends,
        bos_token_id=fields.count("bos_token_id"),
        pad_token_id=fields.count("pad_token_id"),
        max_new_tokens=fields.count("max_new_tokens"),
        min_new_tokens=fields.count("min_new_tokens"),
        max_length=fields.count("max_length"),
        min_length=fields.count("min_length"),
        stop=fields.texts("stop_strings"),
        banned_token_ids=tuple(dict.fromkeys(banned)),
        logit_bias={i: value for i, value in bias.items() if value != -math.inf},
        rejected=fields.rejected(),
    )


class _Fields:
    """One JSON object whose values are taken with their checks."""

    def __init__(self, path: Path, values: Mapping[str, Any]):
        self.path, self.values = path, values
        self._read: set[str] = set()
        self.not_computed: list[str] = []

    def _value(self, name: str) -> Any:
        self._read.add(name)
        return self.values.get(name)

    def _bad(self, name: str, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {name} is {self.values[name]!r:.60}, not {wanted}.")

    def sampling(self) -> dict[str, float]:
        sampled = {}
        for name in OF_CHECKPOINT:
            kind = SAMPLING[name].checkpoint
            value = self.number(name, kind) if isinstance(kind, Number) else self.count(name)
            if value is not None:
                sampled[name] = value
        return sampled

    def number(self, name: str, kind: Number) -> float | None:
        value = self._value(name)
        if value is None:
            return None
        if not is_number(value):
            raise self._bad(name, "a finite number")
        if not kind.holds(value):
            raise self._bad(name, kind.range)
        return float(value)

    def count(self, name: str) -> int | None:
        value = self._value(name)
        if value is None:
            return None
        # Some files write -1 for a pad token that does not exist.
        if name == "pad_token_id" and value == -1:
            return None
        if not is_whole(value, int) or not 0 <= value <= MAX_NUMBER:
            raise self._bad(name, f"a whole number of at least 0 and at most {MAX_NUMBER}")
        return value

    def flag(self, name: str) -> bool | None:
        value = self._value(name)
        if value is not None and not isinstance(value, bool):
            raise self._bad(name, "true or false")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        value = self._value(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(map(_is_id, ids)):
            raise self._bad(name, "a token id or a list of them")
        return tuple(dict.fromkeys(ids))

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._value(name)
        texts = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise self._bad(name, "a text or a list of texts that are not empty")
        return tuple(dict.fromkeys(texts))

    def words(self, name: str) -> list[int]:
        """The ids of words of one token; longer ones are not computed."""
        value = self._value(name)
        if value is not None and not (isinstance(value, list) and all(map(_is_word, value))):
            raise self._bad(name, "a list of lists of token ids")
        return [id_ for word in value or () for id_ in self._single(name, word)]

    def biases(self, name: str) -> dict[int, float]:
        """Biases on the logits of single tokens; longer sequences are not supported."""
        value = self._value(name)
        if value is not None and not (isinstance(value, list) and all(map(_is_bias, value))):
            raise self._bad(name, "a list of pairs of token ids and a number")
        by_token = {}
        for word, bias in value or ():
            by_token |= dict.fromkeys(self._single(name, word), float(bias))
            if bias != -math.inf and not -MAX_BIAS <= bias <= MAX_BIAS:
                self.not_computed.append(f"{name} of {bias:g}")
        return by_token

    def _single(self, name: str, word: list[int]) -> list[int]:
        if len(word) == 1:
            return word
        self.not_computed.append(f"{name} of {len(word)} tokens, {word!r:.40}")
        return []

    def rejected(self) -> str | None:
        """A sentence about the first key that is not computed; None where all are."""
        reasons = list(self.not_computed)
        greedy = self.values.get("do_sample") is False
        for name, value in self.values.items():
            is_label = any(fnmatch.fnmatchcase(name, label) for label in LABELS)
            if name in self._read or is_label or value is None or value in OFF.get(name, ()):
                continue
            if not (greedy and name in DRAWN):
                reasons.append(f"{name!r:.80} = {value!r:.60}")
        if not reasons:
            return None
        return (
            f"{self.path} has {reasons[0]}, which rooflax does not compute; pass generation_config "
            f"none to generate without the file's defaults."
        )


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_NUMBER


def _is_word(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_id, value))


def _is_bias(value: Any) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2 and _is_word(value[0])
    return is_pair and (is_number(value[1]) or value[1] == -math.inf)
