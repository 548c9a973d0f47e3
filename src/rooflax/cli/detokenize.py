"""`rooflax detokenize`: the text of token ids."""

from __future__ import annotations

import argparse
import re

from rooflax.cli import flags, terminal
from rooflax.cli.parser import Parser
from rooflax.errors import RequestError


def add_flags(parser: Parser) -> None:
    flags.add_model(parser)
    group = parser.group("the tokens")
    group.add_argument("--tokens", metavar="IDS", help="such as 1,2,3 or '1 2 3'; default: stdin")
    group.add_argument("--skip-special-tokens", action="store_true", help="leave these out")
    flags.add_output(parser, json=False, progress=False)


def run(args: argparse.Namespace) -> int:
    """The text, and nothing behind it."""
    where = flags.find_arguments(args)
    listed = terminal.read_stdin("--tokens 1,2,3") if args.tokens is None else args.tokens
    words = re.split(r"[\s,]+", listed.strip("[] \t\r\n"))
    if not all(word.isascii() and word.isdigit() and len(word) < 11 for word in words):
        raise RequestError(
            f"the tokens are {listed[:60]!r}; they must be whole numbers with spaces or commas "
            f"between them."
        )
    from rooflax.loading.model_info import model_info

    tokenizer = model_info(args.model, **where).tokenizer()
    text = tokenizer.decode(map(int, words), skip_special_tokens=args.skip_special_tokens)
    terminal.write(text)
    return 0
