"""Structured output: from a JSON schema, a regex or a Lark grammar to the tokens that may follow.

llguidance, an extra, does the parsing; here it meets the tokenizer. The engine sees `Constraint`s
only, which hold a mask over the vocabulary and are told what was chosen.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rooflax import processes
from rooflax.engine.sampling_params import SamplingParams
from rooflax.engine.sequence import NO_CONTINUATION
from rooflax.errors import QueueFull, RequestError, first_line
from rooflax.loading.incremental import spelled_bytes

if TYPE_CHECKING:
    from rooflax.loading.tokenizer import Tokenizer

COMPILE_S = 3.0
"""The most that compiling may take."""
MAX_COMPILING = 16
"""Forms that may wait to be compiled."""
KEPT = 16
"""Compiled grammars that are kept, because requests often share one."""
MISSING = (
    "{kind} needs the package llguidance, which is not installed; say `pip install llguidance`."
)


class _Place(NamedTuple):
    """State of a grammar after a text: the tokens allowed next, whether only the end is, and why
    none are."""

    mask: np.ndarray
    is_complete: bool
    error: str | None


class GrammarConstraint:
    """The tokens that may come next, as an `engine.sequence.Constraint`.

    Args:
        matcher: an `llguidance.LLMatcher` of its own, at the beginning of a text.
        grammars: what it was compiled by.
        ends: ids that end a sequence.
    """

    def __init__(self, matcher: Any, grammars: Grammars, ends: frozenset[int]):
        self._beginning, self._grammars = matcher, grammars
        self._matcher = matcher.deep_copy()
        self._ends = np.array(sorted(end for end in ends if end < grammars.vocab_size), np.int64)
        self._words = np.zeros(grammars.num_words, np.int32)
        self._pointer, self._num_bytes = self._words.ctypes.data, self._words.nbytes
        self._tokens: list[int] = []
        self._ahead: deque[tuple[int, _Place]] = deque()
        self._place = self._look()

    @property
    def mask(self) -> np.ndarray:
        return self._place.mask

    @property
    def is_complete(self) -> bool:
        return self._place.is_complete

    @property
    def error(self) -> str | None:
        return self._place.error

    def copy(self) -> GrammarConstraint:
        """Another that stands at the same place; nothing has been accepted yet."""
        assert not self._tokens
        return GrammarConstraint(
            self._beginning.deep_copy(), self._grammars, frozenset(self._ends.tolist())
        )

    def accept(self, token: int) -> None:
        self._tokens.append(token)
        if self._ahead:
            looked_at, self._place = self._ahead.popleft()
            assert looked_at == token
        else:
            self._matcher.consume_token(token)
            self._place = self._look()

    def look_ahead(self, token: int) -> np.ndarray:
        try:
            self._matcher.consume_token(token)
            place = self._look()
        except BaseException as fault:  # a library's panic is no Exception
            why = f"The grammar failed: {first_line(fault)}"
            place = _Place(np.zeros_like(self.mask), False, why)
        self._ahead.append((token, place))
        return place.mask

    def go_back(self) -> None:
        self._ahead.clear()
        self._matcher = self._beginning.deep_copy()  # one in error cannot be reset
        if self._tokens:
            self._matcher.consume_tokens(self._tokens)

    def _look(self) -> _Place:
        """The mask of what comes next; where that is the end alone, the text is complete."""
        grammars, matcher, error = self._grammars, self._matcher, None
        may_end = matcher.is_accepting()
        is_complete = may_end and matcher.is_stopped()
        if not is_complete and not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(self._pointer, self._num_bytes)
        if is_complete or matcher.is_error():
            self._words[:] = 0
        if matcher.is_error():
            error = f"{NO_CONTINUATION}: {reason(matcher)}."
        words = self._words & grammars.known
        if error is None and words.tobytes() == grammars.no_words:  # faster than any()
            is_complete = may_end
            if not may_end:
                error = f"{NO_CONTINUATION}: no token fits."
        if may_end and error is None:
            np.bitwise_or.at(words.view(np.uint32), self._ends // 32, _bit(self._ends))
        return _Place(words[: grammars.num_mask_words], is_complete, error)


@dataclass
class _Awaited:
    """A compilation, and how many requests wait for it."""

    future: Future[Any]
    waiting: int = 0


class Grammars:
    """Compiles what requests to one model ask for; safe on any thread.

    Args:
        tokenizer: of the model.
        vocab_size: the model's; ids beyond it are never allowed.
        eos_ids: ids that end every text, and so are never a part of one.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]):
        self.vocab_size = vocab_size
        self._tokenizer, self._eos_ids = tokenizer, frozenset(eos_ids)
        self._end = max(vocab_size, tokenizer.vocab_size)  # an id of our own, where texts may end
        self.num_words = (self._end + 32) // 32
        self.num_mask_words = (vocab_size + 31) // 32
        self.no_words = bytes(4 * self.num_words)
        self._lock, self._compiling = threading.Lock(), threading.Lock()
        self._awaited: dict[tuple[str, str], _Awaited] = {}
        self._vocabulary: Any = None
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()

    @cached_property
    def known(self) -> np.ndarray:
        """A mask of the ids that may ever be chosen and do not end a text."""
        known = np.ones(self.num_words * 32, bool)
        known[self.vocab_size :] = False
        known[[token for token in self._eos_ids if token < self.vocab_size]] = False
        return np.packbits(known, bitorder="little").view(np.int32)

    def constraint(self, params: SamplingParams, ends: frozenset[int]) -> GrammarConstraint:
        """The constraint that `params` ask for; they must ask for one.

        Args:
            ends: ids that end the sequence; allowed where the grammar may end.

        Raises:
            RequestError: it cannot be compiled, or not within the limits; llguidance is missing.
        """
        structured_output = params.structured_output
        assert structured_output is not None
        matcher = self._begin(structured_output)
        constraint = GrammarConstraint(
            self._compile_once(structured_output) if matcher is None else matcher, self, ends
        )
        if constraint.error is not None:
            raise RequestError(f"{structured_output[0]} has no valid output. {constraint.error}")
        if constraint.is_complete:
            raise RequestError(
                f"{structured_output[0]} allows no text but the empty one; ask for another."
            )
        return constraint

    def has(self, params: SamplingParams) -> bool:
        """Whether `constraint` takes no time: there is no grammar, or it is compiled."""
        return params.structured_output is None or params.structured_output in self._compiled

    @contextmanager
    def compiling(self, executor: Executor, params: SamplingParams) -> Iterator[Future[Any]]:
        """Compiles the grammar that `params` ask for, once for all who wait for it; what has not
        begun when the last of them leaves does not begin.

        Raises:
            QueueFull: too many wait.
        """
        structured_output = params.structured_output
        assert structured_output is not None
        with self._lock:
            if structured_output not in self._awaited:
                if len(self._awaited) >= MAX_COMPILING:
                    raise QueueFull(
                        f"{MAX_COMPILING} schemas, regexes or grammars wait to be compiled; try "
                        f"again later."
                    )
                self._awaited[structured_output] = _Awaited(
                    executor.submit(self._compile_once, structured_output)
                )
            awaited = self._awaited[structured_output]
            awaited.waiting += 1
        try:
            yield awaited.future
        finally:
            with self._lock:
                awaited.waiting -= 1
                is_last = awaited.waiting == 0
                if is_last:
                    del self._awaited[structured_output]
            if is_last:
                awaited.future.cancel()

    def _compile_once(self, structured_output: tuple[str, str]) -> Any:
        """A matcher of one's own, compiled if it must be."""
        with self._compiling:  # one at a time, while what is compiled can be had
            matcher = self._begin(structured_output)
            if matcher is None:
                self._keep(structured_output, self._compile(*structured_output))
                matcher = self._begin(structured_output)
            return matcher

    def _begin(self, structured_output: tuple[str, str]) -> Any:
        """A matcher of one's own; None if the grammar is not compiled yet."""
        with self._lock:
            if structured_output not in self._compiled:
                return None
            self._compiled.move_to_end(structured_output)
            return self._compiled[structured_output].deep_copy()

    def _keep(self, structured_output: tuple[str, str], matcher: Any) -> None:
        with self._lock:
            self._compiled[structured_output] = matcher
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)

    def _compile(self, kind: str, text: str) -> Any:
        grammar_probe = _probe(kind)
        (fault,) = _try_apart(kind, [text])
        if fault:
            raise RequestError(f"{kind} cannot be used: {fault}.")
        if self._vocabulary is None:
            self._vocabulary = self._read_vocabulary()
        compiled = grammar_probe.with_stack(
            2 * grammar_probe.STACK_BYTES,
            lambda: grammar_probe.compile_grammar(self._vocabulary, kind, text),
        )
        if compiled.is_error():
            raise RequestError(f"{kind} cannot be used: {reason(compiled)}.")
        return compiled

    def _read_vocabulary(self) -> Any:
        import llguidance

        return llguidance.LLTokenizer(_Vocabulary(self._tokenizer, self._end))  # type: ignore[arg-type]


MARK = "\x02"


class _Vocabulary:
    """A tokenizer for llguidance's TokenizerWrapper.

    Called, it cuts text that the grammar forces as the tokenizer would cut it within a text.
    """

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, end: int):
        spelled = spelled_bytes(tokenizer)
        self.tokens = [*spelled, *[b""] * (end - len(spelled)), b"<end>"]
        self.special_token_ids = [*sorted(tokenizer.special_token_ids), end]
        self.eos_token_id = end
        self._encode, self._marks = tokenizer.encode_plain, len(tokenizer.encode_plain(MARK))
        ordinary = set(range(end)) - tokenizer.special_token_ids
        self._ids = {self.tokens[i]: i for i in sorted(ordinary, reverse=True) if self.tokens[i]}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        # Sentencepiece puts a space before a text, and not where something stands before it.
        for ids in (self._encode(text), self._encode(MARK + text)[self._marks :]):
            if b"".join([self.tokens[i] for i in ids]) == text.encode():
                return ids
        return self._cut(text.encode())

    def _cut(self, text: bytes) -> list[int]:
        """The longest token that fits, again and again; for text that the tokenizer rewrites."""
        ids, at = [], 0
        while at < len(text):
            sizes = range(min(self._longest, len(text) - at), 0, -1)
            size = next((n for n in sizes if text[at : at + n] in self._ids), None)
            if size is None:
                break
            ids.append(self._ids[text[at : at + size]])
            at += size
        return ids


def faults(grammars: Sequence[str]) -> list[str]:
    """Reasons why Lark grammars cannot be compiled; "" for one that can.

    Raises:
        RequestError: llguidance is missing.
    """
    _probe("grammar")
    try:
        return _try_apart("grammar", grammars)
    except RequestError as error:  # of all of them together
        return [str(error).replace("grammar", "it", 1).rstrip(".")] * len(grammars)


def _probe(kind: str) -> Any:
    try:
        from rooflax import grammar_probe
    except ImportError:
        raise RequestError(MISSING.format(kind=kind)) from None
    return grammar_probe


def _try_apart(kind: str, texts: Sequence[str]) -> list[str]:
    """Reasons why texts are rejected, found in another process; "" for one that is not.

    Raises:
        RequestError: compiling goes beyond its limits of time, memory and depth.
    """
    request = json.dumps({"kind": kind, "texts": texts})
    try:
        done = processes.run("rooflax.grammar_probe", stdin=request, timeout_s=COMPILE_S)
    except processes.TimeoutExpired:
        raise RequestError(
            f"{kind} takes more than {COMPILE_S:g} s to compile; make it simpler."
        ) from None
    if done.returncode != 0:
        raise RequestError(
            f"{kind} is too large or nested too deeply to be compiled; make it simpler."
        )
    return [fault and _sentence(fault) for fault in json.loads(done.stdout)]


_PLACE_OF_SCHEMA = re.compile(r"at \d+\(\d+\): failed to compile JSON schema: ")
_UNKNOWN_KEYS = "Unimplemented keys: "
_PATTERN = re.compile(rf"({_PLACE_OF_SCHEMA.pattern})?regex parse error")
"""Error about a pattern of a schema; a regex that was asked for itself is said to be one."""


def reason(matcher: Any) -> str:
    """Error of an `llguidance.LLMatcher`, in one line."""
    return _sentence(matcher.get_error())


def _sentence(message: str) -> str:
    """A parser's message without its picture of the place: the last line that says "error"."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    text = (errors or lines or ["no reason was given"])[-1 if errors else 0].rstrip(".:")
    text = _PLACE_OF_SCHEMA.sub("", text)
    if text.startswith("NoExtension"):
        return "no text fits it"
    if text.startswith(_UNKNOWN_KEYS):
        return f"{' and '.join(json.loads(text.removeprefix(_UNKNOWN_KEYS)))} cannot be forced"
    if "coerce_one_of" in text:
        return (
            "what a oneOf offers may overlap; write anyOf, or let each require a property with a "
            "const of its own"
        )
    if errors and _PATTERN.match(message):
        return f"a pattern cannot be forced ({text})"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _bit(ids: np.ndarray) -> np.ndarray:
    return np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32))
