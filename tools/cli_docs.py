"""Every verb's --help as one Markdown page: `python tools/cli_docs.py > docs/cli.md`."""

from __future__ import annotations

import sys

from rooflax.cli.main import VERBS, overview, parser_of

HEAD = """\
# Command line

Made by `python tools/cli_docs.py > docs/cli.md`; a test compares it with `--help`.

Exit codes: 0 done (also when the reader closes the pipe); 1 it failed at work (a full disk);
2 the request was wrong (a flag, a file, a value); 130 interrupted. What is wrong is said in one
sentence on stderr; `--json` prints exactly one JSON document on stdout.
"""


def page() -> str:
    """The page."""
    parts = [HEAD, _section("rooflax --help", overview() + "\n")]
    parts += [_section(f"rooflax {verb}", parser_of(verb).format_help()) for verb in VERBS]
    return "\n".join(parts)


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n```\n{text}```\n"


if __name__ == "__main__":
    sys.stdout.write(page())
