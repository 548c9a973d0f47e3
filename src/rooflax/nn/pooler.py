"""`Pooler`: what becomes of a sequence's hidden states when no token is generated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pooler:
    """Pooler: how hidden states become one vector.

    Attributes:
        kind: "last" is the last token's and "first" the first one's, "mean" the mean of all,
            "weighted" the one where the first counts once, the second twice and so on, "max" the
            largest of each number; "tokens" the last token's logits of a few tokens.
        tokens: those.
    """

    kind: str = "last"
    tokens: tuple[int, ...] = ()

    @property
    def needs_all(self) -> bool:
        """Whether it reads other tokens than the last."""
        return self.kind not in ("last", "tokens")
