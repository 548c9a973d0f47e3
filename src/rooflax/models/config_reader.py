"""Reading config.json as a closed world: every key is read, waived by name, or an error.

An unread key might change the numbers; to ignore it silently would make the model
wrong without a word. This module knows JSON values and error messages, not architectures.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.fields.kinds import is_whole

WAIVED = (
    "_*", "architectures", "model_type", "transformers_version", "dtype", "torch_dtype",
    "use_cache", "return_dict", "return_dict_in_generate", "output_attentions",
    "output_hidden_states", "output_scores", "output_router_logits", "output_past",
    "initializer_range", "initializer_factor", "router_aux_loss_coef", "*dropout*", "*_pdrop",
    "task_specific_params", "summary_*", "finetuning_task", "problem_type", "id2label",
    "label2id", "num_labels", "gradient_checkpointing", "torchscript", "use_bfloat16",
    "tokenizer_class", "prefix", "decoder_start_token_id", "sep_token_id",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "chunk_size_feed_forward",
    "is_decoder", "is_encoder_decoder", "tie_encoder_decoder",
    "predict_special_tokens", "internal_version", "attn_implementation",
    "transformers.js_config", "unsloth_*", "pretraining_tp", "n_ctx", "auto_map",
    "remove_invalid_values", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens",
    "begin_suppress_tokens", "max_length", "min_length", "do_sample", "early_stopping",
    "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p",
    "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "exponential_decay_length_penalty", "tf_legacy_loss", "name_or_path", "hidden_dropout",
    "use_return_dict", "cache_implementation", "model_name",
)  # fmt: skip
"""Keys that change no logit here: bookkeeping, training, generation defaults, other tasks."""

SAME_LENGTH = object()
"""Stands in `ACCEPTED` for the context that the model has, stated or the family's own."""

ACCEPTED: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "is_llama_config": (True,),
    "max_sequence_length": (SAME_LENGTH,),
    "n_special": (0,),
    "partial_rotary_factor": (1, None),
    "pruned_heads": ({}, [], None),
    "qk_layer_norms": (False,),
    "reorder_and_upcast_attn": (False, True),  # scores are float32 here anyway
    "rope_interleaved": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "use_mrope": (False,),
}
"""Keys that say what is computed here anyway as long as they have one of these values."""

MISSING = object()


class ConfigReader:
    """config.json, read key by key; `finish` rejects unread keys. A null is absence.

    Args:
        ignore: keys (or patterns) to waive; one of an object within may be named with its path, as
            in `rope_scaling.finetuned`.
        path: of the object in config.json, with a dot at its end.
    """

    def __init__(self, raw: Mapping[str, Any], *, ignore: Sequence[str] = (), path: str = ""):
        self._raw = dict(raw)
        self._ignore, self._path = tuple(ignore), path
        self._read: dict[str, Any] = {}  # with the value that was given for it
        self._parts: list[ConfigReader] = []

    @property
    def model_type(self) -> str:
        return str(self._raw.get("model_type"))[:80]

    def get(self, key: str, default: Any = MISSING) -> Any:
        """The value of `key`; a null counts as absent.

        Raises:
            CheckpointError: the key is absent and has no default.
        """
        value = self._raw.get(key)
        if value is None:
            if default is MISSING:
                raise CheckpointError(
                    f"config.json has no {key!r:.80}, which {self.model_type} needs."
                )
            value = default
        self._read[key] = value
        return value

    def waive(self, *patterns: str) -> None:
        """Keys that say nothing of the part of the model that is read."""
        self._ignore += patterns

    def part(self, key: str) -> ConfigReader:
        """An object of config.json, as closed a world as the whole."""
        value = self.get(key)
        if not isinstance(value, dict):
            raise CheckpointError(f"config.json has {key} = {value!r:.80}; it must be an object.")
        self._parts.append(self.inner(key, value))
        return self._parts[-1]

    def objects(self) -> list[str]:
        """The keys whose values are objects."""
        return [key for key, value in self._raw.items() if isinstance(value, dict)]

    def inner(self, path: str, raw: Mapping[str, Any]) -> ConfigReader:
        """A reader of what stands at a path within, with the same keys waived."""
        return ConfigReader(raw, ignore=self._ignore, path=f"{self._path}{path}.")

    def rename(self, keys: Mapping[str, str]) -> None:
        """Reads keys by other names: a family's own by those that others have for them."""
        for name, theirs in keys.items():
            if theirs in self._raw:
                self._raw[name] = self._raw.pop(theirs)

    def assume(self, **defaults: Any) -> None:
        """Values of keys that are absent or null: a family's own, which its files leave out."""
        stated = {key: value for key, value in self._raw.items() if value is not None}
        self._raw = self._raw | defaults | stated

    def has(self, key: str) -> bool:
        """Whether the key is there, null or not: some families take an absent one for another."""
        return key in self._raw

    def is_null(self, key: str) -> bool:
        """Whether the key is there, with a null."""
        return key in self._raw and self._raw[key] is None

    def size(
        self, key: str, default: Any = MISSING, *, least: int = 1, most: int = 2**31 - 1
    ) -> int:
        """A whole number from `least` to `most`."""
        value = self.get(key, default)
        if not is_whole(value, int) or not least <= value <= most:
            raise CheckpointError(
                f"config.json has {key} = {value!r:.80}; it must be a whole number from {least} "
                f"to {most}."
            )
        return value

    def sizes(self, key: str, default: Any = MISSING) -> tuple[int, int]:
        """Two whole numbers above 0."""
        value = self.get(key, default)
        are_whole = isinstance(value, list) and all(is_whole(n, int) and n > 0 for n in value)
        if not are_whole or len(value) != 2:
            raise CheckpointError(
                f"config.json has {key} = {value!r:.80}; it must be two whole numbers above 0."
            )
        return value[0], value[1]

    def number(self, key: str, default: Any = MISSING, *, most: float = math.inf) -> float:
        """A finite number above zero and, at most, `most`."""
        value = self.get(key, default)
        return self.positive(key, value, most=most)

    def flag(self, key: str, default: Any = MISSING) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(
                f"config.json has {key} = {value!r:.80}; it must be true or false."
            )
        return value

    def expect(self, key: str, *supported: Any) -> None:
        """The key is absent or has one of the values that we compute.

        Raises:
            UnsupportedModelError: it has another value.
        """
        value = self.get(key, supported[0])
        if value not in supported:
            raise _not_computed(key, value, supported)

    def choice(self, key: str, choices: Sequence[str], default: Any = MISSING) -> str:
        value = self.get(key, default)
        if value not in choices:
            raise _not_computed(key, value, choices)
        return value

    def layer_types(
        self,
        num_layers: int,
        default: Sequence[str],
        known: Sequence[str] = ("full_attention", "sliding_attention"),
    ) -> list[str]:
        """Per layer one of the known kinds, or `default`."""
        types = self.get("layer_types", list(default))
        if not isinstance(types, list) or any(kind not in known for kind in types):
            raise UnsupportedModelError(
                f"config.json has layer_types = {types!r:.80}; only {' and '.join(known)} are "
                f"computed."
            )
        if len(types) != num_layers:
            raise CheckpointError(
                f"config.json has {len(types)} layer_types for {num_layers} layers."
            )
        return types

    def positive(
        self, key: str, value: Any, *, or_zero: bool = False, most: float = math.inf
    ) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"config.json has {key} = {value!r:.80}; it must be a number.")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number < 0 or (number == 0 and not or_zero):
            least = "not below 0" if or_zero else "above 0"
            raise CheckpointError(
                f"config.json has {key} = {value!r:.80}; it must be finite and {least}."
            )
        if number > most:
            raise CheckpointError(
                f"config.json has {key} = {value!r:.80}; it must be at most {most:g}."
            )
        return number

    def finish(self) -> None:
        """Rejects keys that were neither read nor waived.

        Raises:
            UnsupportedModelError: naming the keys, or the value of one that says what we do not do.
        """
        for part in self._parts:
            part.finish()
        left = sorted(
            key
            for key in self._raw.keys() - self._read.keys()
            if self._raw[key] is not None
            and not any(fnmatch.fnmatchcase(key, pattern) for pattern in WAIVED)
            and not self.waives(key)
        )
        unknown = []
        for key in left:
            if key not in ACCEPTED:
                unknown.append(key)
            elif self._raw[key] not in (wanted := self._accepted(key)):
                raise _not_computed(key, self._raw[key], wanted)
        if unknown:
            raise UnsupportedModelError(
                f"config.json has {', '.join(f'{key!r:.80}' for key in unknown[:10])}, which "
                f"rooflax does not read for {self.model_type}; if that changes no logit, pass "
                f"ignore_config_keys {unknown[0]:.80}."
            )

    def waives(self, key: str, paths: Sequence[str] = ("",)) -> bool:
        """Whether the caller waives a key, by its name or with a path to it."""
        names = (key, *(f"{self._path}{path}{key}" for path in paths))
        return any(fnmatch.fnmatchcase(n, pattern) for n in names for pattern in self._ignore)

    def _accepted(self, key: str) -> list[Any]:
        same = self._read.get("max_position_embeddings")
        return [same if value is SAME_LENGTH else value for value in ACCEPTED[key]]


def _not_computed(key: str, value: Any, wanted: Sequence[Any]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"config.json has {key} = {value!r:.80}, which rooflax does not compute "
        f"(only {' or '.join(f'{x!r:.80}' for x in wanted)})."
    )
