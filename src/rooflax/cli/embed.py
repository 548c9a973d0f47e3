"""`rooflax embed`: vectors of texts, as JSON lines."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rooflax.cli import flags, terminal
from rooflax.cli.lines import json_lines
from rooflax.cli.parser import Parser, whole
from rooflax.cli.session import open_llm
from rooflax.errors import RequestError
from rooflax.files import only_writer, replacing

if TYPE_CHECKING:
    import numpy as np

    from rooflax.llm import LLM

SUMMARY = "vectors of texts, as JSON lines"
AT_ONCE = 8
"""Texts in a batch for every sequence that runs at once."""


def add_flags(parser: Parser) -> None:
    flags.add_model(parser, "none; it must be an embedding model")
    flags.add_check(parser)
    group = parser.group("the texts")
    group.add_argument("-p", "--prompt", metavar="TEXT", help="one text")
    group.add_argument(
        "--input", metavar="FILE",
        help="lines of text, or JSON lines with text and perhaps id; - is stdin",
    )  # fmt: skip
    group.add_argument(
        "-o", "--output", metavar="FILE", help="a new file of vectors; default stdout"
    )
    group.add_argument(
        "--prompt-name", metavar="NAME",
        help="which of the checkpoint's prompts stands before each text, such as query",
    )  # fmt: skip
    group.add_argument("--dimensions", metavar="N", type=whole, help="keep the first N numbers")
    flags.add_max_model_len(parser, help="longest text in tokens")
    flags.add_precision(parser)
    flags.add_weights_budget(parser)
    flags.add_execution(parser)
    flags.add_device(parser, mesh=True)
    flags.add_output(parser, json=False)


def run(args: argparse.Namespace) -> int:
    """Embeds, and writes a line for each text, in order."""
    if (args.prompt is None) == (args.input is None):
        raise RequestError("give the texts either as --prompt or as --input.")
    lines = [] if args.input is None else _read(args.input)
    llm = open_llm(args)
    how = {"prompt_name": args.prompt_name, "dimensions": args.dimensions}
    texts = [(1, args.prompt)] if args.input is None else _encoded(llm, args, lines)
    size = AT_ONCE * llm.max_num_seqs
    with _output(args.output) as file:
        for begin in range(0, len(texts), size):
            part = texts[begin : begin + size]
            for (name, _), vector in zip(part, llm.embed([t for _, t in part], **how), strict=True):
                file.write(json.dumps({"id": name, "embedding": numbers(vector)}) + "\n")
            if args.input is not None and not args.quiet:
                terminal.say(f"{begin + len(part)} of {len(texts)} embedded")
    return 0


def numbers(vector: np.ndarray) -> list[float]:
    """As few digits as float32 needs."""
    return [float(f"{number:.9g}") for number in vector]


def _encoded(
    llm: LLM, args: argparse.Namespace, lines: list[tuple[int, Any, str]]
) -> list[tuple[Any, list[int]]]:
    """The texts' ids, each with its name.

    Raises:
        RequestError: naming the line.
    """
    found = []
    for number, name, text in lines:
        try:
            found.append((name, llm.embedder.text_ids(text, args.prompt_name, None)))
        except RequestError as error:
            if error.param == "prompt_name":
                raise
            raise RequestError(f"Line {number} of {args.input}: {error}") from None
    return found


def _read(path: str) -> list[tuple[int, Any, str]]:
    """The input's texts, each with the number of its line and its name: an id, or that number.

    Raises:
        RequestError: naming the line.
    """
    found = []
    for number, raw in json_lines(path, "text", '{["'):
        name = number
        if isinstance(raw, dict) and raw.keys() <= {"id", "text"}:
            raw, name = raw.get("text"), raw.get("id", number)
        if not isinstance(raw, str):
            raise RequestError(
                f"Line {number} of {path} must be a text, or an object with text and perhaps id."
            )
        found.append((number, name, raw))
    return found


@contextlib.contextmanager
def _output(path: str | None) -> Iterator[IO[str]]:
    """stdout, or a file that appears once it is whole.

    Raises:
        RequestError: there is one already, or it cannot be written.
    """
    if path is None:
        yield sys.stdout
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(only_writer(path))
        if Path(path).exists():
            raise RequestError(f"{path} exists; give the name of a new file.", param="output")
        try:
            file = stack.enter_context(replacing(path, "utf-8"))
        except OSError as error:
            raise RequestError(f"cannot write {path}: {error.strerror}.", param="output") from None
        yield file
