"""Code blocks of a Markdown file, to be run by tests."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
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


@dataclass(frozen=True)
class Command:
    """One line of a shell block.

    Attributes:
        words: of the line, without its comment.
        output: the file that its stdout goes to.
        is_run: False where the page says "not run", of the line or of its block.
    """

    words: tuple[str, ...]
    output: str | None
    is_run: bool

    @property
    def is_ours(self) -> bool:
        return self.words[0] == "rooflax"


def commands(path: str) -> list[Command]:
    """The commands of a file's shell blocks, in order."""
    found = []
    for snippet in snippets(path, "sh"):
        block_is_run = not snippet.code.startswith("# not run: ")
        for line in snippet.code.replace("\\\n", " ").splitlines():
            words = tuple(shlex.split(line, comments=True))
            if not words:
                continue
            output = words[-1] if ">" in words[-2:-1] else None
            is_run = block_is_run and "(not run)" not in line
            found.append(Command(words[:-2] if output else words, output, is_run))
    return found
