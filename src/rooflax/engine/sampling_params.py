"""`SamplingParams`: how one request wants its tokens chosen. Pure Python, no jax."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from rooflax.errors import RequestError
from rooflax.ops.sampling_limits import MAX_ALLOWED_IDS, MAX_LOGIT_BIAS, MAX_LOGPROBS

MAX_SAMPLES = 1024
MAX_TOP_K = 2**31 - 1
MAX_BEAMS = 10
MAX_LENGTH_PENALTY = 10.0
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 64, 4096
"""They are looked for after every token."""
MAX_FORM_BYTES = 64 * 1024
"""Of a JSON schema, a regex or a grammar."""
FORMS = ("json_schema", "regex", "grammar")
MAX_FACTOR = 1e6  # of temperature and repetition_penalty; float32 overflows far above


_UNDRAWN = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
"""What draws of a token, and what turns each off: beams have all of them off."""
_UNSEEN = {
    "stop": (), "logprobs": None, "prompt_logprobs": None,
    "json_schema": None, "regex": None, "grammar": None,
}  # fmt: skip
"""What a beam search does not do."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    A field that is None is unset: generation_config.json decides, and after it the default named
    below.

    Attributes:
        max_tokens: most new tokens; default: to the end of the context.
        min_tokens: new tokens before anything may end the text but max_tokens; default 0.
        temperature: up to 1e6; 0 takes the most likely token; default 1.
        top_k: keep the k most likely tokens, 0 is off; default off.
        top_p: keep the fewest tokens whose probability reaches p, in (0, 1]; default 1.
        min_p: keep tokens at least this fraction as likely as the best, in [0, 1]; default 0.
        seed: of the draws; the same seed gives the same tokens in any batch; default 0.
        stop: strings that end the text, at most 64 of 4096 characters together; they are not part
            of it.
        stop_token_ids: ids that end the text, besides the end-of-sequence ids.
        repetition_penalty: from 1e-6 to 1e6, 1 is off; default 1.
        presence_penalty, frequency_penalty: in [-2, 2]; default 0.
        logit_bias: token id to a bias in [-100, 100]; with banned_token_ids at most 1,024 of them.
        allowed_token_ids: the only ids that may be chosen, at most 1024; empty allows all.
        banned_token_ids: ids that are never chosen.
        logprobs: log-probabilities of the chosen token and this many of the best, 0 to 20.
        prompt_logprobs: the same for every token of the prompt but the first.
        n: samples per prompt, 1 to 1024; with beams the best texts to return, up to num_beams.
        ignore_eos: go on after end-of-sequence ids.
        num_beams: 2 to 10 searches for the likeliest whole texts, as transformers does: nothing is
            drawn, and penalties and bias act on log-probabilities; default 1, off.
        length_penalty: of beams: a text's score is the sum of its log-probabilities divided by
            its number of tokens to this power, in [-10, 10]; default 1.
        early_stopping: of beams: true ends the search with num_beams finished texts; false goes on
            while an open beam scores better as it stands, "never" while it could by the longest
            text; default false.
        json_schema: the text shall be JSON that this schema (a mapping, or its JSON) accepts, with
            at most one space between its parts.
        regex: the text shall match this regular expression as a whole.
        grammar: the text shall follow this Lark grammar. Of the three at most one, of up to 64 KiB;
            a text that max_tokens or `stop` cuts is the beginning of one that fits.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    ignore_eos: bool = False
    num_beams: int = 1
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _several("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids"):
            object.__setattr__(self, name, _ids(name, getattr(self, name)))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        _whole("max_tokens", self.max_tokens, 1)
        _whole("min_tokens", -1 if self.min_tokens is None else self.min_tokens, 0)
        _number("temperature", self.temperature, 0.0, MAX_FACTOR)
        _whole("top_k", self.top_k, 0, MAX_TOP_K)
        _number("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _whole("seed", self.seed, 0, 2**32 - 1)
        _number("repetition_penalty", self.repetition_penalty, 1 / MAX_FACTOR, MAX_FACTOR)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _whole("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _whole("n", 0 if self.n is None else self.n, 1, MAX_SAMPLES)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(
                f"ignore_eos is {self.ignore_eos!r}; it must be true or false.", param="ignore_eos"
            )
        _whole("num_beams", 0 if self.num_beams is None else self.num_beams, 1, MAX_BEAMS)
        _number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        self._check_beams()
        object.__setattr__(self, "json_schema", _schema(self.json_schema))
        _check_grammars({name: getattr(self, name) for name in FORMS})
        _check_stop(self.stop)
        _check_bias(self.logit_bias)
        self._check_sizes()

    def _check_sizes(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}; the first "
                f"cannot be more.",
                param="min_tokens",
            )
        both = len(self.logit_bias) + len(self.banned_token_ids)
        if both > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias and banned_token_ids have {both} entries; at most "
                f"{MAX_LOGIT_BIAS} fit.",
                param="logit_bias",
            )
        if len(self.allowed_token_ids) > MAX_ALLOWED_IDS:
            raise RequestError(
                f"allowed_token_ids has {len(self.allowed_token_ids)} entries; at most "
                f"{MAX_ALLOWED_IDS} fit.",
                param="allowed_token_ids",
            )

    def _check_beams(self) -> None:
        early = self.early_stopping
        if not (early is None or isinstance(early, bool) or early == "never"):
            raise RequestError(
                f'early_stopping is {early!r}; it must be true, false or "never".',
                param="early_stopping",
            )
        if self.num_beams == 1:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) is not None:
                    raise RequestError(
                        f"{name} is for beams; raise num_beams or leave it out.", param=name
                    )
            return
        if self.n > self.num_beams:
            raise RequestError(
                f"n is {self.n} and num_beams {self.num_beams}; beams give at most as many texts.",
                param="n",
            )
        for name, off in (_UNDRAWN | _UNSEEN).items():
            if getattr(self, name) not in (None, off):
                why = "beams are not drawn" if name in _UNDRAWN else "beams do not have it"
                raise RequestError(
                    f"{name} is {getattr(self, name)!r} and num_beams {self.num_beams}; {why}, "
                    f"so leave one of them out.",
                    param=name,
                )

    def __hash__(self) -> int:
        values = [getattr(self, f.name) for f in fields(self) if f.name != "logit_bias"]
        return hash((*values, *sorted(self.logit_bias.items())))

    @property
    def is_greedy(self) -> bool:
        """Takes the most likely token, changes no logit and wants no log-probabilities.

        Of parameters without unset fields.
        """
        return (
            self.temperature == 0
            and not self.has_penalties
            and not (self.logit_bias or self.allowed_token_ids or self.banned_token_ids)
            and self.min_tokens == 0
            and self.logprobs is None
            and self.num_beams == 1
            and self.structured_output is None
        )

    @property
    def structured_output(self) -> tuple[str, str] | None:
        """The field that says what the text shall look like, and its value."""
        given = ((name, getattr(self, name)) for name in FORMS)
        return next((pair for pair in given if pair[1] is not None), None)

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far change the next one's chances."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    def with_defaults(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Unset fields filled from `defaults`, then from the built-in ones.

        Beams take nothing from `defaults` that is about drawing.
        """
        builtin = {
            "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0,
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        }  # fmt: skip
        merged = builtin | {k: v for k, v in defaults.items() if v is not None}
        if self.num_beams > 1:
            merged |= _UNDRAWN | {"length_penalty": 1.0, "early_stopping": False}
        return replace(self, **{k: v for k, v in merged.items() if getattr(self, k) is None})


def _whole(
    name: str, value: Any, low: int, high: int | None = None, *, what: str | None = None
) -> None:
    if value is None:
        return
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= low
    if not fits or (high is not None and value > high):
        limit = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(
            f"{what or name} is {value!r}; it must be a whole number {limit}.", param=name
        )


def _number(
    name: str,
    value: Any,
    low: float,
    high: float,
    *,
    above_low: bool = False,
    what: str | None = None,
) -> None:
    if value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = number and low <= value <= high
    if not fits or (above_low and value == low):
        begin = "above" if above_low else "at least"
        raise RequestError(
            f"{what or name} is {value!r}; it must be a finite number {begin} {low:g} and at most "
            f"{high:g}.",
            param=name,
        )


def _several(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise RequestError(f"{name} is {value!r}; it must be a list.", param=name)
    return tuple(value)


def _bias(value: Any) -> dict[int, float]:
    if value is not None and not isinstance(value, Mapping):
        raise RequestError(
            f"logit_bias is {value!r}; it must map token ids to numbers.", param="logit_bias"
        )
    return dict(value or {})


def _ids(name: str, value: Any) -> tuple[int, ...]:
    ids = _several(name, value)
    for item in ids:
        _whole(name, -1 if item is None else item, 0)
    return ids


def _schema(value: Any) -> str | None:
    """The schema as JSON, its keys in the order that they came in: the text will keep it."""
    if value is None:
        return None
    try:
        read = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(read, allow_nan=False) if isinstance(read, Mapping) else None
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"json_schema is not JSON: {error}.", param="json_schema") from None
    if text is None:
        raise RequestError(
            f"json_schema is {_start(value)}; it must be a JSON object.", param="json_schema"
        )
    return text


def _check_grammars(grammars: Mapping[str, Any]) -> None:
    given = {name: text for name, text in grammars.items() if text is not None}
    if len(given) > 1:
        raise RequestError(
            f"{' and '.join(given)} are given; a text can have one grammar; drop one.",
            param=next(iter(given)),
        )
    for name, text in given.items():
        if not isinstance(text, str) or not text:
            raise RequestError(
                f"{name} is {_start(text)}; it must be text that is not empty.", param=name
            )
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise RequestError(
                f"{name} holds half a surrogate pair, which is no text.", param=name
            ) from None
        if size > MAX_FORM_BYTES:
            raise RequestError(
                f"{name} has {size} bytes and may have {MAX_FORM_BYTES}; make it smaller.",
                param=name,
            )
        if name == "regex":
            check_regex(text)


def check_regex(regex: str) -> None:
    """
    Raises:
        RequestError: its last sign escapes nothing, which a compiler may pass over.
    """
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise RequestError(
            "regex ends with a backslash that escapes nothing; drop it, or write two.",
            param="regex",
        )


def _start(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _check_stop(stop: tuple[str, ...]) -> None:
    size = sum(len(item) for item in stop if isinstance(item, str))
    if len(stop) > MAX_STOP_STRINGS or size > MAX_STOP_CHARACTERS:
        raise RequestError(
            f"stop has {len(stop)} strings of {size} characters together; it may have "
            f"{MAX_STOP_STRINGS} of {MAX_STOP_CHARACTERS}.",
            param="stop",
        )
    for item in stop:
        if not isinstance(item, str) or not item:
            raise RequestError(
                f"stop holds {item!r}; it must hold strings that are not empty.", param="stop"
            )


def _check_bias(bias: Mapping[int, float]) -> None:
    for token, value in bias.items():
        _whole("logit_bias", token, 0, what="logit_bias token id")
        _number("logit_bias", value, -100.0, 100.0, what="logit_bias value")
