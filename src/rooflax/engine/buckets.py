"""`Buckets`: the few shapes that steps are padded to, each compiled once. Pure Python, no jax."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rooflax.nn.layout import ceil_div

SMALLEST_STEP = 16
"""Tokens; steps with prompt chunks are padded to multiples of it, which XLA rounds alike."""


class StepKind(StrEnum):
    """Kinds of device calls, each a step function of its own."""

    DECODE = "decode"
    """One token per sequence, several times over."""
    STEP = "step"
    """A list of tokens, decode rows and prompt chunks together."""
    SCORED = "scored"
    """A chunk of one prompt with log-probabilities of every token."""
    VERIFY = "verify"
    """Decode rows with lookahead tokens."""
    DENSE = "dense"
    """Whole sequences, without a cache."""
    SCORED_DENSE = "scored dense"

    __hash__ = str.__hash__  # Enum's takes as long as a step's other look-ups together

    @property
    def is_dense(self) -> bool:
        return self in (StepKind.DENSE, StepKind.SCORED_DENSE)


class Shape(NamedTuple):
    """Shape that one device call is compiled for.

    Attributes:
        sequences: how many.
        tokens: of the list; of each sequence where it is dense.
        context: the most tokens that a sequence may see.
    """

    kind: StepKind
    sequences: int
    tokens: int
    context: int

    def __str__(self) -> str:
        by_sequence = self.kind in (StepKind.DECODE, StepKind.VERIFY)
        size = f"{self.sequences} sequences" if by_sequence else f"{self.tokens} tokens"
        return f"{self.kind} of {size}, context {self.context}"


def bucket(n: int, smallest: int = 1) -> int:
    """The power of two times `smallest` that holds n."""
    size = smallest
    while size < n:
        size *= 2
    return size


@dataclass(frozen=True)
class Buckets:
    """One list of shapes.

    Attributes:
        decode_rows: ascending; the last is the number of slots.
        tokens: of a step with prompt chunks, ascending; the last is the token budget.
        contexts: ascending; the last holds every sequence.
        lookahead_tokens: the most that a decode row has to verify; 0 is none.
        pads: what a bucket is larger than its tokens is computed, too. Otherwise it costs little.
    """

    decode_rows: tuple[int, ...]
    tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    lookahead_tokens: int = 0
    pads: bool = False

    @staticmethod
    def of_server(
        num_slots: int,
        max_tokens: int,
        token_budget: int,
        *,
        reads_in_place: bool,
        pads: bool,
        lookahead_tokens: int = 0,
        lists: int = 1,
    ) -> Buckets:
        """A short list for any mixture of requests.

        Args:
            reads_in_place: the cost of attention follows what a sequence sees, whatever its table's
                length; otherwise short contexts have shapes of their own. Where padding is
                computed, too, this is an accelerator: up to 128 tokens cost it about what reading
                the weights does, and its compiler takes long, so that there are few shapes.
            lists: parts of the list of tokens, each of which may hold a whole budget.
        """
        contexts = (1024, max_tokens) if not reads_in_place and max_tokens > 1024 else (max_tokens,)
        on_accelerator = pads and reads_in_place
        few = on_accelerator or len(contexts) > 1
        smallest = (8 if few else 2) * bucket(num_slots, 16)
        factor = 2 if pads and not few else 4
        tokens = [token_budget]
        while tokens[0] > smallest:
            tokens.insert(0, max(smallest, ceil_div(tokens[0], factor * 16) * 16))
        rows = (
            {1, num_slots} if not pads or len(contexts) > 1 else {1, min(4, num_slots), num_slots}
        )
        sizes = tuple(lists * size for size in tokens)
        return Buckets(tuple(sorted(rows)), sizes, contexts, lookahead_tokens, pads)

    def shapes(self) -> list[Shape]:
        """All of them, the ones that every request needs first."""
        slots = self.decode_rows[-1]
        verify_rows = self.decode_rows if self.lookahead_tokens else ()
        return [
            *(Shape(StepKind.STEP, slots, t, c) for c in self.contexts for t in self.tokens),
            *(self.decode(rows, c) for c in self.contexts for rows in self.decode_rows),
            *(self.verify(rows, c) for c in self.contexts for rows in verify_rows),
        ]

    def context(self, needed: int) -> int:
        return next(c for c in self.contexts if c >= needed)

    def decode(self, rows: int, context: int) -> Shape:
        rows = self._rows(rows)
        return Shape(StepKind.DECODE, rows, rows, self.context(context))

    def verify(self, rows: int, context: int) -> Shape:
        rows = self._rows(rows)
        tokens = rows * (1 + self.lookahead_tokens)
        return Shape(StepKind.VERIFY, rows, tokens, self.context(context))

    def step(self, tokens: int, context: int) -> Shape | None:
        """None where no bucket holds so many tokens."""
        held = next((t for t in self.tokens if t >= tokens), None)
        if held is None:
            return None
        return Shape(StepKind.STEP, self.decode_rows[-1], held, self.context(context))

    def _rows(self, needed: int) -> int:
        return next(r for r in self.decode_rows if r >= needed)

    def worth_running(self, decodes: int, tokens: int) -> int:
        """Number of these tokens, decode rows and prompt chunks, that a step should run now.

        Where padding costs as much as tokens, the last prompt chunk is cut so that a bucket is
        full, unless the bucket above is at least four fifths full or the cut would leave no prompt
        token.
        """
        above = next((t for t in self.tokens if t >= tokens), tokens)
        below = max((t for t in self.tokens if t <= tokens), default=0)
        if not self.pads or 5 * tokens >= 4 * above or below <= decodes:
            return tokens
        return below
