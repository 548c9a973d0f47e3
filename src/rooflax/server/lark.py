"""Rules of a Lark grammar that are being written.

Special tokens stand in them as `<[id]>`: no text spells those, so free text ends where one comes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

ANY_TEXT = "/(?s:.*)/"


class LarkGrammar:
    """Rules that are being written.

    Args:
        special: ids of special tokens by their texts.
    """

    def __init__(self, special: Mapping[str, int]):
        self._special = special
        texts = sorted(special, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None
        self.rules: list[str] = []

    def finish(self, start: str) -> str:
        """All of it."""
        return "\n".join([f"start: {start}", *self.rules])

    def rule(self, body: str, *, kind: str = "r", attribute: str = "") -> str:
        """The name of a new rule."""
        name = f"{kind}{len(self.rules)}"
        self.rules.append(f"{name}{attribute}: {body}")
        return name

    def _parts(self, text: str) -> list[str]:
        return [part for part in self._split.split(text) if part] if self._split else [text]

    def text(self, text: str) -> str:
        """A fixed text, with the special tokens that it names."""
        return " ".join(self._term(part) for part in self._parts(text)) or '""'

    def _term(self, part: str) -> str:
        if part in self._special:
            return f"<[{self._special[part]}]>"
        return json.dumps(part, ensure_ascii=False)

    def is_special(self, text: str) -> bool:
        """Whether a text begins with a special token."""
        return bool(text) and self._parts(text)[0] in self._special

    def until(self, close: str, pattern: str = ANY_TEXT) -> str:
        """Free text, and what ends it."""
        if self.is_special(close):
            return f"{pattern} {self.text(close)}"
        first, *rest = self._parts(close)
        body = f"{pattern} {json.dumps(first, ensure_ascii=False)}"
        return " ".join([self.rule(body, attribute="[lazy]"), *(self._term(each) for each in rest)])

    def json(self, schema: Any) -> str:
        """JSON of a schema."""
        return f"%json {json.dumps(schema)}"

    def choice(self, several: Sequence[str]) -> str:
        return self.rule(" | ".join(several))


class Unforceable(Exception):
    """Reason why a format's notation cannot force a schema."""
