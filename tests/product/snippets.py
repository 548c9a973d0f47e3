"""Code blocks of a Markdown file, to be run by tests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """One fenced block: its language, its code, and the line where it begins."""

    language: str
    code: str
    line: int

    @property
    def raises(self) -> str | None:
        """The exception that its first line announces."""
        match = re.match(r"# raises: (\w+)", self.code)
        return match.group(1) if match else None


def snippets(path: str, language: str) -> list[Snippet]:
    """The blocks of one language in a file of the repository."""
    text = (ROOT / path).read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        if match.group(1) == language:
            line = text.count("\n", 0, match.start()) + 1
            found.append(Snippet(language, match.group(2), line))
    return found
