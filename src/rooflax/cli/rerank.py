"""`rooflax rerank`: how well texts answer a query, the best first, as JSON lines."""

from __future__ import annotations

import argparse
import sys

from rooflax.cli import flags
from rooflax.cli.embed import read_texts
from rooflax.cli.lines import json_line
from rooflax.cli.parser import Parser, at_least_one
from rooflax.cli.session import open_llm
from rooflax.errors import RequestError


def add_flags(parser: Parser) -> None:
    flags.add_model(parser, "none; it must be a reranker")
    flags.add_check(parser)
    group = parser.group("the texts")
    group.add_argument("--query", metavar="TEXT", required=True, help="the query")
    group.add_argument(
        "-d", "--document", metavar="TEXT", action="append", help="one text, again for more"
    )
    group.add_argument(
        "--input", metavar="FILE",
        help="lines of text, or JSON lines with text and perhaps id; - is stdin",
    )  # fmt: skip
    group.add_argument("--top-n", metavar="N", type=at_least_one, help="the best N; default all")
    group.add_argument(
        "--instruction",
        metavar="TEXT",
        help="instruction for the model: what makes a text relevant",
    )
    flags.add_pooled_run(parser, group, longest="pair")


def run(args: argparse.Namespace) -> int:
    """Scores, and writes a line for each text."""
    if (args.document is None) == (args.input is None):
        raise RequestError("give the texts either as --document or as --input.")
    if args.input is None:
        texts = list(enumerate(args.document, start=1))
    else:
        texts = [(name, text) for _, name, text in read_texts(args.input)]
    llm = open_llm(args)
    scores = llm.rerank(
        args.query,
        [text for _, text in texts],
        instruction=args.instruction,
        truncate_prompt_tokens=-1 if args.truncate else None,
    )
    ranked = sorted(zip(scores, texts, strict=True), key=lambda pair: -pair[0])
    for score, (name, text) in ranked[: args.top_n]:
        line = {"id": name, "score": float(f"{score:.9g}"), "text": text}
        sys.stdout.write(json_line(line))
    return 0
