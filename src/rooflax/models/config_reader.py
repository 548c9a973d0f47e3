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
from rooflax.nn.rope import MOST, Rope, RopeScaling

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

    def number(self, key: str, default: Any = MISSING, *, most: float = math.inf) -> float:
        """A finite number above zero and, at most, `most`."""
        value = self.get(key, default)
        return self._positive(key, value, most=most)

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

    def rope(
        self,
        head_dim: int,
        default_theta: float = 10_000.0,
        partial: float | None = None,
        *,
        scales_queries: bool = False,
    ) -> Rope:
        """RoPE from `rope_theta` and `rope_scaling`, or from `rope_parameters`, whose theta has
        priority.

        Args:
            partial: the share of dimensions that turn where config.json has none; None is all, and
                another share is rejected. A null in config.json is all, as in transformers.
            scales_queries: `rope_parameters` have `llama_4_scaling_beta`.
        """
        rope = self._stated_rope(default_theta)
        stated = rope.pop("rope_theta", None), self.get("rope_theta", None)
        theta = next((theta for theta in stated if theta is not None), default_theta)
        dim = self._rotary_dim(rope, head_dim, partial)
        theta, beta = self._positive("rope_theta", theta), 0.0
        if scales_queries:
            self._same_length(rope.pop("max_position_embeddings", None))
            beta = rope.pop("llama_4_scaling_beta", None)
            beta = self._positive("llama_4_scaling_beta", beta, or_zero=True, most=MOST)
        scaling = self._rope_scaling(rope, dim or head_dim)
        if partial is not None and scaling is not None and scaling.kind == "proportional":
            raise UnsupportedModelError(
                f"config.json asks for RoPE scaling of type 'proportional', which rooflax does not "
                f"compute for {self.model_type}."
            )
        if scaling is not None and scaling.kind == "yarn" and theta <= 1:
            raise CheckpointError(
                f"config.json has rope_theta = {theta!r:.80}; with yarn scaling it must be above 1."
            )
        if scales_queries and not (scaling and scaling.original_max_position):
            raise CheckpointError("config.json has llama_4_scaling_beta and no original context.")
        return Rope(theta, scaling, dim, beta)

    def _same_length(self, stated: Any) -> None:
        if stated not in (None, self.get("max_position_embeddings", stated)):
            raise CheckpointError("config.json gives two values of max_position_embeddings.")

    def _rotary_dim(self, rope: dict[str, Any], head_dim: int, partial: float | None) -> int | None:
        key = "partial_rotary_factor"
        if partial is None:
            if rope.get(key) in (1, None):
                rope.pop(key, None)
            return None
        inner, top = rope.pop(key, None), self.get(key, None)
        partial = 1.0 if self.is_null(key) else partial
        share = self._positive(key, next((x for x in (inner, top) if x is not None), partial))
        dim = int(round(head_dim * min(share, 1.0), 6))
        if share > 1 or dim < 2 or dim % 2:
            raise CheckpointError(
                f"config.json has {key} = {share!r} of head_dim = {head_dim}; so many dimensions, "
                f"{dim}, must be even and from 2 to all."
            )
        return None if dim == head_dim else dim

    def _stated_rope(self, default_theta: float) -> dict[str, Any]:
        """`rope_scaling` or `rope_parameters`; whatever one of them leaves out, both mean the same.

        Raises:
            CheckpointError: they do not.
        """
        stated = []
        for key in ("rope_scaling", "rope_parameters"):
            value = self.get(key, None)
            if value is not None and not isinstance(value, dict):
                raise CheckpointError(
                    f"config.json has {key} = {value!r:.80}; it must be an object."
                )
            stated += [value] if value else []
        if len(stated) == 2:
            theta = self.get("rope_theta", default_theta)
            legacy, modern = (
                {"rope_type": rope.get("type", "default"), "rope_theta": theta}
                | {key: value for key, value in rope.items() if key != "type"}
                for rope in stated
            )
            differ = sorted(k for k in legacy | modern if legacy.get(k) != modern.get(k))
            if differ:
                raise CheckpointError(
                    f"config.json's rope_scaling and rope_parameters differ in {differ[0]!r:.80}; "
                    f"keep one."
                )
        return dict(stated[0]) if stated else {}

    def _rope_scaling(self, rope: dict[str, Any], dim: int) -> RopeScaling | None:
        named = (rope.pop("rope_type", None), rope.pop("type", None))
        kind = next((name for name in named if name is not None), "default")
        for name in named:
            if name is not None and not isinstance(name, str):
                raise CheckpointError(
                    f"config.json has a RoPE scaling of type {name!r:.80}; it must be a string."
                )
        kind = "longrope" if kind == "su" else kind
        for key in _IMAGE_ROPE_KEYS:
            rope.pop(key, None)
        if kind not in _ROPE_KEYS:
            raise UnsupportedModelError(
                f"config.json asks for RoPE scaling of type {kind!r:.80}, which rooflax does not "
                f"compute (only {', '.join(_ROPE_KEYS)})."
            )
        paths = ("", "rope_scaling.", "rope_parameters.")
        # A null is absence, but of a kind of layer, which a family with kinds reads elsewhere.
        others = {k for k in rope if rope[k] is not None or k.endswith("_attention")}
        unknown = sorted(k for k in others - {*_ROPE_KEYS[kind]} if not self._waives(k, paths))
        if unknown:
            raise UnsupportedModelError(
                f"config.json's RoPE scaling of type {kind!r:.80} has the key {unknown[0]!r:.80}, "
                f"which rooflax does not read; if that changes no logit, pass ignore_config_keys "
                f"{unknown[0]:.80}."
            )
        if kind == "dynamic":  # up to the model's context nothing is scaled, and that is our limit
            self._positive("rope_scaling.factor", rope.get("factor"))
        if kind in ("default", "dynamic"):
            return None
        return self._longrope(rope, dim) if kind == "longrope" else self._scaling_values(kind, rope)

    def _longrope(self, rope: dict[str, Any], dim: int) -> RopeScaling:
        length = self.size("max_position_embeddings")
        inner = rope.get("original_max_position_embeddings")
        top = self.get("original_max_position_embeddings", length if inner is None else inner)
        original = self._original_length(top, None)
        stated = rope.get("factor")
        factor = length / original if stated is None else self._positive("factor", stated)
        attention = rope.get("attention_factor")
        if attention is None:
            long = factor > 1 and original > 1
            attention = math.sqrt(1 + math.log(factor) / math.log(original)) if long else 1.0
        both = []
        for key in ("short_factor", "long_factor"):
            factors = rope.get(key)
            if not isinstance(factors, list) or len(factors) != dim // 2:
                raise CheckpointError(
                    f"config.json has rope_scaling.{key} = {factors!r:.80}; it must be a list of a "
                    f"number for each of {dim // 2} frequencies."
                )
            both.append(tuple(self._positive(f"rope_scaling.{key}", x) for x in factors))
        attention = self._positive("rope_scaling.attention_factor", attention)
        values = {"attention_factor": attention, "short_factor": both[0], "long_factor": both[1]}
        return RopeScaling("longrope", factor, original, **values)

    def _scaling_values(self, kind: str, rope: dict[str, Any]) -> RopeScaling:
        def number(key: str, default: float | None = None) -> float:
            value = rope.get(key)
            if value is None and default is not None:
                return default
            return self._positive(f"rope_scaling.{key}", value)

        factor = number("factor", 1.0 if kind == "proportional" else None)
        if kind == "proportional":
            share = number("partial_rotary_factor", 1.0)
            if share > 1:
                raise CheckpointError(
                    f"config.json has partial_rotary_factor = {share!r}; it must be at most 1."
                )
            return RopeScaling("proportional", factor, share=share)
        if kind == "linear":
            return RopeScaling("linear", factor)
        fallback = None if kind == "llama3" else self.size("max_position_embeddings")
        original = self._original_length(rope.get("original_max_position_embeddings"), fallback)
        if kind == "llama3":
            low, high = number("low_freq_factor"), number("high_freq_factor")
            if high <= low:
                raise CheckpointError(
                    f"config.json has rope_scaling.high_freq_factor = {high!r}; it must be above "
                    f"low_freq_factor, {low!r}."
                )
            return RopeScaling("llama3", factor, original, low, high)
        truncate = rope.get("truncate", True)
        if not isinstance(truncate, bool):
            raise CheckpointError(
                f"config.json has rope_scaling.truncate = {truncate!r:.80}; it must be true or "
                f"false."
            )
        values = {}
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            if rope.get(key) is not None:
                zero = key != "attention_factor"  # an mscale of 0 counts as absent
                name = f"rope_scaling.{key}"
                values[key] = self._positive(name, rope[key], or_zero=zero, most=MOST)
        fast, slow = number("beta_fast", 32.0), number("beta_slow", 1.0)
        if not 1e-6 <= slow < fast <= 1e6:
            raise CheckpointError(
                f"config.json has rope_scaling.beta_fast = {fast!r} and beta_slow = {slow!r}; they "
                f"must be from 1e-6 to 1e6, the first above the second."
            )
        return RopeScaling(
            "yarn",
            factor,
            original,
            beta_fast=fast,
            beta_slow=slow,
            truncate=truncate,
            attention_factor=_yarn_attention_factor(factor, values),
        )

    def _original_length(self, value: Any, default: int | None) -> int:
        if value is None and default is not None:
            return default
        number = int(value) if isinstance(value, float) and value.is_integer() else value
        if not is_whole(number, int) or number >= 2**31 or number < 1:
            raise CheckpointError(
                f"config.json has rope_scaling.original_max_position_embeddings = {value!r:.80}; "
                f"it must be a whole number from 1 to {2**31 - 1}."
            )
        return number

    def _positive(
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
            and not self._waives(key)
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

    def _waives(self, key: str, paths: Sequence[str] = ("",)) -> bool:
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


_IMAGE_ROPE_KEYS = ("mrope_section", "mrope_interleaved")
"""Which frequencies belong to which axis of an image; a text's positions are the same on all."""
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "proportional": ("factor", "partial_rotary_factor"),
    "llama3": (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    ),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate",
        "attention_factor", "mscale", "mscale_all_dim",
    ),
    "longrope": (
        "factor", "original_max_position_embeddings", "attention_factor", "short_factor",
        "long_factor",
    ),
}  # fmt: skip


def _yarn_attention_factor(factor: float, values: Mapping[str, float]) -> float:
    """0.1 ln(factor) + 1, or what the config gives (transformers, modeling_rope_utils.py)."""
    if "attention_factor" in values:
        return values["attention_factor"]

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if values.get("mscale") and values.get("mscale_all_dim"):
        return mscale(values["mscale"]) / mscale(values["mscale_all_dim"])
    return mscale(1.0)
