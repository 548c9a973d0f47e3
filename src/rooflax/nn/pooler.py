"""`Pooler`: what becomes of a sequence's hidden states when no token is generated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pooler:
    """How hidden states become one vector.

    Attributes:
        kind: "last" is the last token's, "mean" the mean of all, "tokens" the last token's logits
            of a few tokens.
        tokens: those.
    """

    kind: str = "last"
    tokens: tuple[int, ...] = ()
