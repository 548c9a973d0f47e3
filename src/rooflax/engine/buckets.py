"""`Buckets`: the few shapes that steps are padded to, each compiled once. Pure Python, no jax."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

CALL_COST = 64
"""A device call costs about as much as this many more tokens of prefill."""


class Shape(NamedTuple):
    """What one device call is compiled for.

    Attributes:
        kind: "decode", "prefill", "scored" (a prefill with log-probabilities of every token), or
            "verify" (a decode step with drafts).
        rows, seq: sequences, and tokens of each.
        context: the most tokens that a row may see.
    """

    kind: str
    rows: int
    seq: int
    context: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.rows} x {self.seq} tokens, context {self.context}"


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
        decode_rows: ascending.
        prefills: (rows, tokens per row); one of them has one row and the longest chunk.
        contexts: ascending; the last holds every sequence.
        draft_tokens: the most drafts of a row; 0 if nobody drafts.
    """

    decode_rows: tuple[int, ...]
    prefills: tuple[tuple[int, int], ...]
    contexts: tuple[int, ...]
    draft_tokens: int = 0

    @staticmethod
    def of_server(
        num_slots: int,
        max_tokens: int,
        prefill_chunk: int,
        *,
        reads_in_place: bool,
        draft_tokens: int = 0,
    ) -> Buckets:
        """At most ten shapes for any mixture of requests, and those of drafts.

        Args:
            reads_in_place: the cost of attention follows what a row sees, whatever its table's
                length; otherwise short contexts have shapes of their own.
        """
        short = 8192 if reads_in_place else 1024
        contexts = (short, max_tokens) if short < max_tokens else (max_tokens,)
        chunks = sorted({min(64, prefill_chunk), prefill_chunk})
        rows = {1, num_slots} if len(contexts) > 1 else {1, min(4, num_slots), num_slots}
        prefills = tuple((1, chunk) for chunk in chunks)
        return Buckets(tuple(sorted(rows)), prefills, contexts, draft_tokens)

    def shapes(self) -> list[Shape]:
        """All of them, the ones that every request needs first."""
        return [
            *(Shape("prefill", *p, c) for c in self.contexts for p in self.prefills),
            *(Shape("decode", rows, 1, c) for c in self.contexts for rows in self.decode_rows),
            *(self.verify(rows, c) for c in self.contexts for rows in self._verify_rows),
        ]

    @property
    def _verify_rows(self) -> tuple[int, ...]:
        return self.decode_rows if self.draft_tokens else ()

    def context(self, needed: int) -> int:
        return next(c for c in self.contexts if c >= needed)

    def decode(self, rows: int, context: int) -> Shape:
        return Shape("decode", self._rows(rows), 1, self.context(context))

    def verify(self, rows: int, context: int) -> Shape:
        return Shape("verify", self._rows(rows), 1 + self.draft_tokens, self.context(context))

    def _rows(self, needed: int) -> int:
        return next(r for r in self.decode_rows if r >= needed)

    def prefill_calls(
        self, counts: list[int], contexts: list[int]
    ) -> Iterator[tuple[list[int], Shape]]:
        """Which chunks run together, and as which shape.

        Args:
            counts: tokens of each chunk.
            contexts: what each will see.
        """
        left = sorted(range(len(counts)), key=lambda index: -counts[index])
        while left:
            together = self._smallest(len(left), counts[left[0]])
            alone = [self._smallest(1, counts[index]) for index in left]
            apart = sum(_cost(shape) for shape in alone if shape)
            take = left if together and _cost(together) <= apart else left[:1]
            shape = together if take is left else alone[0]
            assert shape is not None
            yield take, Shape("prefill", *shape, self.context(max(contexts[i] for i in take)))
            left = left[len(take) :]

    def _smallest(self, rows: int, seq: int) -> tuple[int, int] | None:
        fitting = [p for p in self.prefills if p[0] >= rows and p[1] >= seq]
        return min(fitting, key=_cost, default=None)


def _cost(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1] + CALL_COST
