"""Detokenization: token ids to text, piece by piece, and the finished completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rooflax.engine.compilation import CompileCounts
from rooflax.engine.sequence import Sequence as EngineSequence
from rooflax.engine.sequence import StepOutput, TokenLogprobs


@dataclass(frozen=True)
class Completion:
    """Completion of one prompt.

    Attributes:
        text: without the stop string or the end-of-sequence token.
        tokens: generated ids, the one that ended it included.
        prompt_tokens: ids of the prompt.
        finish_reason: "stop" (an id or a string ended it, or its form is complete), "length",
            "abort" (the engine was shut down), or "error".
        stop_reason: the string of `stop` or the id of `stop_token_ids` that ended it; None where
            an end-of-sequence id or something else did.
        logprobs: per token, if asked for.
        prompt_logprobs: per token of the prompt but the first, if asked for.
        timings: seconds and tokens per second, the keys of `generate --json`.
        index: which of the `n` samples this is; of beams the best is 0.
        num_cached_tokens: of the prompt, taken from the prefix cache.
        num_draft_tokens, num_accepted_tokens: of speculative decoding.
        error: one sentence, if finish_reason is "error".
        score: of a beam: the sum of the tokens' log-probabilities, after penalties and bias,
            divided by their number to the power of length_penalty.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    index: int = 0
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    error: str | None = None
    score: float | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class Delta:
    """A piece of a stream: new text and ids of one sample of one prompt.

    Attributes:
        prompt: its number among the prompts.
        index: which of its `n` samples.
        text: may lag behind the tokens, where a stop string or a character may be beginning.
        tokens: new ids.
        completion: the whole, on the last piece.
        logprobs: per token of the piece, if asked for.
        prompt_logprobs: on a sample's first piece, per token of the prompt but the first, if asked
            for.
        reading: from a decoder of the caller; see `TextDecoder.take`.
    """

    prompt: int
    index: int
    text: str
    tokens: tuple[int, ...]
    completion: Completion | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    reading: Any = None

    @property
    def finish_reason(self) -> str | None:
        """The completion's; None while the stream runs."""
        return None if self.completion is None else self.completion.finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """The completion's; None while the stream runs."""
        return None if self.completion is None else self.completion.stop_reason


class TextDecoder(Protocol):
    """Turns one sample's tokens into text, such as an `IncrementalDecoder`."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""
        ...

    def flush(self, *, is_cut: bool) -> str:
        """Returns the text that was held back, at the end.

        Args:
            is_cut: the model did not end the text itself, as where max_tokens did.
        """
        ...

    def take(self, num_characters: int, *, is_last: bool) -> Any:
        """The `Delta.reading` of the next piece of text.

        Args:
            num_characters: of the piece, which no stop string can cut any more.
            is_last: nothing follows; what is left is cut off.
        """
        ...


@dataclass
class Sample:
    """One sample on its way: its sequence, and how far its text has come."""

    sequence: EngineSequence
    decoder: TextDecoder
    text: str = ""
    emitted: int = 0
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def take(self, output: StepOutput, load_s: float, compiled: CompileCounts) -> Delta:
        """New ids to text, held back where a stop string may be beginning."""
        sequence, reason, new = self.sequence, output.finish_reason, 0
        stop_reason: str | int | None = None
        for new, token in enumerate(output.tokens, start=1):
            is_last = reason is not None and new == len(output.tokens)
            self.tokens.append(token)
            before = len(self.text)
            if token not in sequence.stop_ids or not (is_last and reason == "stop"):
                self.text += self.decoder.push(token)
            if is_last:
                self.text += self.decoder.flush(is_cut=reason != "stop")
            stop_match = self._stop_string(before)
            if stop_match is not None:
                (cut, stop_reason), reason = stop_match, "stop"
                self.text = self.text[:cut]
                break
            if is_last and reason == "stop" and token in sequence.params.stop_token_ids:
                stop_reason = token
        prompt_logprobs = None
        if sequence.params.prompt_logprobs is not None and not self.times_s:
            prompt_logprobs = tuple(sequence.sampler.prompt_logprobs)
        self.times_s.extend(output.times_s[:new])
        logprobs = output.logprobs[:new]
        self.logprobs.extend(logprobs)
        ready = len(self.text) if reason else self._safe_length()
        piece = self.text[self.emitted : ready]
        self.emitted = max(self.emitted, ready)
        completion = None
        if reason:
            error = output.error if reason == "error" else None  # not what came after the end
            completion = self._completion(reason, stop_reason, error, load_s, compiled)
        return Delta(
            sequence.request_id,
            sequence.sample_index,
            piece,
            output.tokens[:new],
            completion,
            None if sequence.params.logprobs is None else logprobs,
            prompt_logprobs,
            self.decoder.take(len(piece), is_last=reason is not None),
        )

    def _stop_string(self, before: int) -> tuple[int, str] | None:
        """First stop string that the last token completed, and where it begins.

        What earlier tokens completed, below min_tokens, ends nothing, however many tokens come at a
        time.

        Args:
            before: characters without that token.
        """
        params = self.sequence.params
        if len(self.tokens) < params.min_tokens:
            return None
        places = [(self.text.find(s, max(0, before - len(s) + 1)), s) for s in params.stop]
        return min((pair for pair in places if pair[0] >= 0), default=None)

    def _safe_length(self) -> int:
        """Text that no stop string, begun at its end, could still cut."""
        held = 0
        for stop in self.sequence.params.stop:
            for length in range(min(len(stop) - 1, len(self.text)), held, -1):
                if self.text.endswith(stop[:length]):
                    held = length
                    break
        return len(self.text) - held

    def _completion(
        self,
        reason: str,
        stop_reason: str | int | None,
        error: str | None,
        load_s: float,
        compiled: CompileCounts,
    ) -> Completion:
        sequence = self.sequence
        params, fields = sequence.params, {}
        for state in sequence.features.values():
            fields |= state.completion_fields()
        return Completion(
            text=self.text,
            tokens=tuple(self.tokens),
            prompt_tokens=tuple(sequence.prompt_tokens),
            finish_reason=reason,
            logprobs=None if params.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=(
                None if params.prompt_logprobs is None else tuple(sequence.sampler.prompt_logprobs)
            ),
            timings=self._timings(load_s, compiled),
            index=sequence.sample_index,
            num_cached_tokens=sequence.kv.num_cached_tokens or 0,
            error=error,
            stop_reason=stop_reason,
            **fields,
        )

    def _timings(self, load_s: float, compiled: CompileCounts) -> dict[str, float]:
        times = self.times_s
        ttft = times[0] - self.sequence.times.arrival_s if times else 0.0
        decode_s = times[-1] - times[0] if times else 0.0
        return {
            "load_s": load_s,
            "compile_s": compiled.seconds,
            "compilations": compiled.compilations,
            "ttft_s": ttft,
            "prefill_tok_per_s": self.sequence.num_prompt_tokens / ttft if ttft > 0 else 0.0,
            "decode_tok_per_s": (len(times) - 1) / decode_s if decode_s > 0 else 0.0,
        }
