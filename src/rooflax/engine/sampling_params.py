"""`SamplingParams`: sampling and stopping parameters of a request. Pure Python, no jax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from rooflax.errors import RequestError
from rooflax.fields.declaration import documented, read_fields
from rooflax.fields.sampling import (
    FORMS,
    MAX_LOGIT_BIAS,
    OF_BEAMS,
    OFF,
    SAMPLING,
    UNSET,
    SamplingFields,
)


@documented
@dataclass(frozen=True)
class SamplingParams(SamplingFields):
    """Sampling and stopping parameters.

    A field that is None is unset: generation_config.json decides, and after it the default named
    below. At most one of json_schema, regex and grammar says what the text must look like; a text
    that max_tokens or `stop` cuts is the beginning of one that fits.
    """

    def __post_init__(self) -> None:
        read_fields(self)
        self._check_beams()
        self._check_together()

    def _check_together(self) -> None:
        forms = [name for name in FORMS if getattr(self, name) is not None]
        if len(forms) > 1:
            raise RequestError(
                f"{' and '.join(forms)} are given; a text can have one grammar; drop one.",
                param=forms[0],
            )
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

    def _check_beams(self) -> None:
        if self.num_beams == 1:
            for name in OF_BEAMS:
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
        for name, one in SAMPLING.items():
            if one.in_beams and not one.is_drawn:
                continue
            if getattr(self, name) not in (None, one.off_value, one.default):
                why = "beams are not drawn" if one.is_drawn else "beams do not have it"
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
        """Whether it takes the most likely token, without log-probabilities or changed logits.

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
        forms = ((name, getattr(self, name)) for name in FORMS)
        return next((pair for pair in forms if pair[1] is not None), None)

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
        merged = UNSET | {k: v for k, v in defaults.items() if v is not None}
        if self.num_beams > 1:
            merged |= {**OFF, **OF_BEAMS}
        return replace(self, **{k: v for k, v in merged.items() if getattr(self, k) is None})
