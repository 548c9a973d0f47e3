"""Fields of sampling: `SamplingFields` is the table, of which `SamplingParams` keeps the values.

A new field is declared here and computed in ops/sampling.py and csrc/sample.h; nothing else names
it. The order of those with a column is that of `SamplingRow` in csrc/sample.h.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from rooflax.errors import RequestError
from rooflax.fields.declaration import (
    BOTH,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Declaration,
    Http,
    declarations,
    declare,
)
from rooflax.fields.kinds import (
    Choice,
    Flag,
    Kind,
    Number,
    Several,
    Whole,
    as_tuple,
    reject,
)

MAX_LOGIT_BIAS = 1024
"""Ids of logit_bias and banned_token_ids together; a fixed size of the sampler's row."""
MAX_BIAS = 100
MAX_ALLOWED_IDS = 1024
MAX_STOP_IDS = 32
"""Stop ids that the device knows; min_tokens needs all of them there."""
MAX_LOGPROBS = 20
MAX_INT32 = 2**31 - 1
MAX_FACTOR = 1e6  # of temperature and repetition_penalty; float32 overflows far above
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 64, 4096
"""They are looked for after every token."""
MAX_FORM_BYTES = 64 * 1024
"""Bytes of a JSON schema, a regex or a grammar."""
PER_REQUEST = 16
"""Answers that an API may ask for at once."""
DEFAULT_COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions where a request has none, as OpenAI's."""
OF_BEAMS: Mapping[str, Any] = {"length_penalty": 1.0, "early_stopping": False}
"""Fields of beam search alone, with their values where a request has none."""


@dataclass(frozen=True)
class SamplingField(Declaration):
    """A field of sampling.

    Attributes:
        column: type of its column in the sampler's row; None has none.
        off: value that costs and changes nothing, where that is not `unset`.
        is_drawn: it is about draws, so a beam search has it off.
        in_beams: a beam search has it.
        is_form: it says what the text must look like; a request has one of these.
        checkpoint: what generation_config.json may say of it; None reads nothing.
        gguf: its key in a GGUF file, behind `general.sampling.`.
        per_prompt: its flags are for one prompt only.
        on_page: the chat page offers it.
    """

    column: Literal["float", "unsigned", "int"] | None = None
    off: Any = None
    is_drawn: bool = False
    in_beams: bool = True
    is_form: bool = False
    checkpoint: Kind | None = None
    gguf: str | None = None
    per_prompt: bool = False
    on_page: bool = False

    @property
    def off_value(self) -> Any:
        return self.unset if self.off is None else self.off

    @property
    def default_text(self) -> str:
        text = super().default_text
        return text if self.checkpoint is None else f"the checkpoint's, else {text}"


@dataclass(frozen=True)
class StopTexts(Kind):
    """Texts that end a text.

    Attributes:
        longest: characters of all together.
        each: characters of one, where an API takes fewer.
        takes_one: a text that is in no list is taken too.
    """

    most: int = MAX_STOP_STRINGS
    longest: int = MAX_STOP_CHARACTERS
    each: int = MAX_STOP_CHARACTERS
    takes_one: bool = True
    repeats = True

    @property
    def range(self) -> str:
        return f"at most {self.most} of {self.longest} characters together"

    def read(self, name: str, value: Any, *, what: str | None = None) -> tuple[str, ...]:
        stop = (value,) if isinstance(value, str) else as_tuple(name, value)
        size = sum(len(item) for item in stop if isinstance(item, str))
        if len(stop) > self.most or size > self.longest:
            raise RequestError(
                f"{name} has {len(stop)} strings of {size} characters together; it may have "
                f"{self.most} of {self.longest}.",
                param=name,
            )
        for item in stop:
            if not isinstance(item, str) or not item:
                raise RequestError(
                    f"{name} holds {item!r}; it must hold strings that are not empty.", param=name
                )
        return stop


@dataclass(frozen=True)
class Bias(Kind):
    """Token ids and what is added to their logits."""

    value: Number
    most: int = MAX_LOGIT_BIAS
    repeats = True

    @property
    def range(self) -> str:
        return f"{self.value.range}, for at most {self.most} ids"

    def read(self, name: str, value: Any, *, what: str | None = None) -> dict[int, float]:
        if value is not None and not isinstance(value, Mapping):
            reject(name, value, "a map from token ids to numbers")
        bias = dict(value or {})
        for token, number in bias.items():
            Whole().read(name, token, what=f"{name} token id")
            self.value.read(name, number, what=f"{name} value")
        return bias


class Form(Kind):
    """A rule for the whole text, in words of its own."""

    @property
    def range(self) -> str:
        return f"up to {MAX_FORM_BYTES // 1024} KiB"

    def read(self, name: str, value: Any, *, what: str | None = None) -> str:
        if not isinstance(value, str) or not value:
            reject(name, value, "text that is not empty")
        try:
            size = len(value.encode())
        except UnicodeEncodeError:
            raise RequestError(
                f"{name} holds half a surrogate pair, which is no text.", param=name
            ) from None
        if size > MAX_FORM_BYTES:
            raise RequestError(
                f"{name} has {size} bytes and may have {MAX_FORM_BYTES}; make it smaller.",
                param=name,
            )
        return value


class Regex(Form):
    """A regular expression."""

    def read(self, name: str, value: Any, *, what: str | None = None) -> str:
        check_regex(super().read(name, value))
        return value


class JsonSchema(Form):
    """A JSON schema, as a mapping or its JSON; kept as JSON with its keys in their order."""

    def read(self, name: str, value: Any, *, what: str | None = None) -> str:
        try:
            read = json.loads(value) if isinstance(value, str) else value
            text = json.dumps(read, allow_nan=False) if isinstance(read, Mapping) else None
        except (ValueError, TypeError, RecursionError) as error:
            raise RequestError(f"{name} is not JSON: {error}.", param=name) from None
        if text is None:
            reject(name, value, "a JSON object")
        return super().read(name, text)


class Grammar(Form):
    """A Lark grammar."""


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


_field = partial(declare, of=SamplingField, group="choosing tokens")
_drawn = partial(_field, is_drawn=True, on_page=True)
_form = partial(_field, is_form=True, in_beams=False, per_prompt=True)
PENALTY = Number(-2, 2)
LOGPROBS = Whole(0, MAX_LOGPROBS)
IDS = Several(Whole())


# fmt: off
@dataclass(frozen=True)
class SamplingFields:
    """Values of the fields of sampling."""

    max_tokens: int | None = _field(
        Whole(1), "maximum number of new tokens", on_page=True,
        shown_default="to the end of the context",
        flags=("-n", "--max-tokens", "--max-new-tokens", "--n-predict"), metavar="N",
        http=(
            Http((COMPLETIONS,), None, Whole(),
                 f"default {DEFAULT_COMPLETION_TOKENS}; 0 with echo only", is_computed=True),
            Http((CHAT,), "max_completion_tokens", is_computed=True),
            Http((CHAT,), help="as max_completion_tokens, which wins", is_computed=True),
            Http((RESPONSES,), "max_output_tokens"),
            Http((MESSAGES,), help="maximum number of new tokens", required=True)))
    min_tokens: int = _field(
        Whole(), "minimum number of new tokens; before it only max_tokens ends the text", default=0,
        http=BOTH, on_page=True)
    temperature: float | None = _drawn(
        Number(0, MAX_FACTOR), "sampling temperature; 0 is greedy", unset=1.0, off=0.0,
        flags=("--temperature", "--temp"), metavar="T",
        http=(Http((COMPLETIONS, CHAT, RESPONSES), kind=Number(0, 2)),
              Http((MESSAGES,), kind=Number(0, 1))),
        column="float", checkpoint=Number(0), gguf="temp")
    top_k: int | None = _drawn(
        Whole(0, MAX_INT32), "keep the k most likely tokens; 0 is off", unset=0, metavar="K",
        http=(Http(kind=Whole(-1, MAX_INT32), help="keep the k most likely tokens; 0 and -1 are "
                   "off; default the checkpoint's, else 0"),
              Http((MESSAGES,))), column="int", checkpoint=Whole(0, MAX_INT32), gguf="top_k")
    top_p: float | None = _drawn(
        Number(0, 1, above=True), "keep the fewest tokens whose probabilities reach p", unset=1.0,
        metavar="P", http=(Http((COMPLETIONS, CHAT, RESPONSES, MESSAGES)),), column="float",
        checkpoint=Number(0, 1, above=True), gguf="top_p")
    min_p: float | None = _drawn(
        Number(0, 1), "keep tokens at least p times as likely as the best", unset=0.0, metavar="P",
        http=BOTH, column="float", checkpoint=Number(0, 1), gguf="min_p")
    seed: int | None = _drawn(
        Whole(0, 2**32 - 1), "random seed; the same tokens in any batch", unset=0,
        flags=("-s", "--seed"), metavar="N",
        http=(Http(kind=Whole(-(2**63), 2**63 - 1), is_computed=True,
                   help="random seed; by default each request gets its own, returned in "
                   "x-rooflax-seed"),), column="unsigned")
    stop: tuple[str, ...] = _field(
        StopTexts(), "strings that end the text and are left out of it", default=(), in_beams=False,
        metavar="TEXT",
        http=(Http(kind=StopTexts(each=256)),
              Http((MESSAGES,), "stop_sequences", StopTexts(each=256, takes_one=False))))
    stop_token_ids: tuple[int, ...] = _field(
        IDS, "ids that end the text, besides the end-of-sequence ids", default=(),
        metavar="ID,ID", http=BOTH)
    repetition_penalty: float | None = _field(
        Number(1 / MAX_FACTOR, MAX_FACTOR), "values above 1 penalize repetition", unset=1.0,
        metavar="X", http=BOTH, on_page=True, column="float", checkpoint=Number(0, above=True),
        gguf="penalty_repeat")
    presence_penalty: float | None = _field(
        PENALTY, "subtracted once from the logit of a token already used", unset=0.0,
        shows_range=True, metavar="X", http=BOTH, on_page=True, column="float")
    frequency_penalty: float | None = _field(
        PENALTY, "subtracted from a token's logit per use", unset=0.0, shows_range=True,
        metavar="X", http=BOTH, on_page=True, column="float")
    logit_bias: Mapping[int, float] = _field(
        Bias(Number(-MAX_BIAS, MAX_BIAS)), "added to the logits of token ids", factory=dict,
        shows_range=True, metavar="ID=VALUE", http=BOTH)
    allowed_token_ids: tuple[int, ...] = _field(
        Several(Whole(), MAX_ALLOWED_IDS), "the only ids that may be sampled; empty allows all",
        default=(), http=BOTH)
    banned_token_ids: tuple[int, ...] = _field(
        IDS, "ids that are never sampled, counted among those of logit_bias", default=())
    logprobs: int | None = _field(
        LOGPROBS, "log-probabilities of the sampled token and of the N most likely",
        in_beams=False, per_prompt=True, metavar="N",
        http=(
            Http((COMPLETIONS,), is_computed=True),
            Http((CHAT,), kind=Flag(), help="log-probabilities of the tokens", is_computed=True),
            Http((CHAT,), "top_logprobs", is_computed=True,
                 help="and of the N most likely; needs logprobs"),
            Http((RESPONSES,), "top_logprobs", is_computed=True,
                 help="of each token; with include message.output_text.logprobs")))
    prompt_logprobs: int | None = _field(
        LOGPROBS, "log-probabilities of the prompt's tokens and of the N most likely",
        in_beams=False, http=BOTH)
    n: int = _field(
        Whole(1, 1024), "samples per prompt; of a beam search the best", default=1,
        per_prompt=True, flags=("--samples",), metavar="N",
        http=(Http(kind=Whole(1, PER_REQUEST)),))
    ignore_eos: bool = _field(
        Flag(), "continue after end-of-sequence tokens", default=False, flags=("--ignore-eos",),
        http=BOTH)
    num_beams: int = _field(
        Whole(1, 10), "number of beams of a beam search, as in transformers",
        default=1, shown_default="1, off", per_prompt=True, metavar="N")
    length_penalty: float | None = _field(
        Number(-10, 10),
        "beam search: exponent of the length that log-probabilities are divided by; "
        "larger values favor long texts", shown_default="1", per_prompt=True, metavar="X",
        http=(Http((COMPLETIONS,), kind=Number()),))
    early_stopping: bool | str | None = _field(
        Choice((True, False, "never")),
        "beam search: stop with num_beams texts (true), once no open beam scores better "
        "(false), or once none can at the maximum length (never)", shown_default="false",
        per_prompt=True,
        metavar="HOW")
    json_schema: Mapping[str, Any] | str | None = _form(
        JsonSchema(), "JSON schema that the text must satisfy", metavar="FILE_OR_JSON")
    regex: str | None = _form(
        Regex(), "regular expression that the whole text must match", metavar="REGEX")
    grammar: str | None = _form(
        Grammar(), "Lark grammar that the text must follow", metavar="FILE_OR_TEXT")
# fmt: on


SAMPLING: dict[str, SamplingField] = declarations(SamplingFields)
FORMS = tuple(name for name, one in SAMPLING.items() if one.is_form)
OFF = {name: one.off_value for name, one in SAMPLING.items() if one.is_drawn}
"""Values that turn off each field about draws: beams have all of them off."""
UNSET = {name: one.unset for name, one in SAMPLING.items() if one.unset is not None}
"""Values where neither a request nor a checkpoint says anything."""
CHAT_SAMPLING: Mapping[str, float] = {"temperature": 0.7, "top_p": 0.9}
"""Values of a person's chat instead: at 1 and 1 small models make no sense."""
OF_CHECKPOINT = tuple(name for name, one in SAMPLING.items() if one.checkpoint is not None)
