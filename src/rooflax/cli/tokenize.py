"""`rooflax tokenize`: the token ids of a text."""

from __future__ import annotations

import argparse

from rooflax.cli import flags, terminal
from rooflax.cli.parser import Parser


def add_flags(parser: Parser) -> None:
    flags.add_model(parser)
    group = parser.group("the text")
    group.add_argument("-p", "--prompt", metavar="TEXT", help="default: stdin")
    group.add_argument(
        "--no-special-tokens", action="store_true",
        help="leave out special tokens that the tokenizer adds, such as BOS",
    )  # fmt: skip
    flags.add_output(parser, progress=False)


def run(args: argparse.Namespace) -> int:
    """Ids on one line, or a JSON document that spells them too."""
    where = flags.find_arguments(args)
    text = terminal.read_stdin("--prompt TEXT") if args.prompt is None else args.prompt
    from rooflax.loading.model_info import model_info

    tokenizer = model_info(args.model, **where).tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=not args.no_special_tokens)
    if args.json:
        pieces = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
        terminal.print_json({"tokens": ids, "pieces": pieces, "num_tokens": len(ids)})
    else:
        print(" ".join(map(str, ids)))
    return 0
