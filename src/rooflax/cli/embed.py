"""`rooflax embed`: vectors of texts, as JSON lines or as the rows of a .npy file.

A second run resumes after what the output has, also after a kill.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rooflax.cli import flags, terminal
from rooflax.cli.lines import check_output, json_line, json_lines, open_lines
from rooflax.cli.parser import Parser, whole
from rooflax.cli.session import open_llm
from rooflax.errors import RequestError
from rooflax.files import only_writer

if TYPE_CHECKING:
    import numpy as np

    from rooflax.llm import LLM

AT_ONCE = 16
"""Texts in a batch for every sequence that runs at once."""
Text = tuple[int, Any, str]
"""A text with the number of its line and its name: an id, or that number."""


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
        "-o", "--output", metavar="FILE",
        help="JSON lines, or float32 rows in a .npy file; existing rows are kept, and the "
        "rest is added; default stdout, which is -",
    )  # fmt: skip
    group.add_argument("--force", action="store_true", help="overwrite the output")
    group.add_argument(
        "--prompt-name", metavar="NAME",
        help="prompt of the checkpoint to put before each text, such as query",
    )  # fmt: skip
    group.add_argument("--dimensions", metavar="N", type=whole, help="keep the first N numbers")
    flags.add_pooled_run(parser, group, longest="text")


def run(args: argparse.Namespace) -> int:
    """Embeds, and writes a vector for each text, in order."""
    if (args.prompt is None) == (args.input is None):
        raise RequestError("give the texts either as --prompt or as --input.")
    if args.force and args.output is None:
        raise RequestError("--force is for an --output; drop it, or name one.")
    if args.output is not None:
        check_output(args.input, args.output)
    texts: Iterable[Text] = [(1, 1, args.prompt)]
    total = 1
    if args.input is not None:
        is_rows = args.output is not None and args.output.endswith(".npy")
        texts = read_texts(args.input, has_empty=is_rows)
        if args.input == "-" or not Path(args.input).is_file():
            texts = list(texts)
            total = len(texts)
        else:
            total = sum(1 for _ in read_texts(args.input, has_empty=is_rows))
    llm = open_llm(args)
    llm.embedder.pooler()
    llm.embedder.check_dimensions(args.dimensions)
    truncate = -1 if args.truncate else None
    size = llm.embedder.dimensions(args.dimensions)
    with _output(args, total, size) as (write, done):
        texts = iter(texts)
        for name in done:
            if next(texts, (0, None, ""))[1] != name and name is not None:
                raise RequestError(
                    f"{args.output} has vectors of other texts than the input's first ones; choose "
                    f"another file, or replace it with --force.",
                    param="output",
                )
        finished, says = len(done), args.input is not None and not args.quiet
        if done and says:
            terminal.say(f"{finished} of {total} are embedded already")
        while part := list(itertools.islice(texts, AT_ONCE * llm.max_num_seqs)):
            ids = [_encoded(llm, args, text, truncate) for text in part]
            write([name for _, name, _ in part], llm.embed(ids, dimensions=args.dimensions))
            finished += len(part)
            if says:
                terminal.say(f"{finished} of {total} embedded")
    return 0


def numbers(vector: np.ndarray) -> list[float]:
    """As few digits as float32 needs."""
    return [float(f"{number:.9g}") for number in vector]


def _encoded(llm: LLM, args: argparse.Namespace, text: Text, truncate: int | None) -> list[int]:
    """A text's ids.

    Raises:
        RequestError: naming the line.
    """
    try:
        return llm.embedder.text_ids(text[2], args.prompt_name, None, truncate)
    except RequestError as error:
        if error.param == "prompt_name" or args.input is None:
            raise
        raise RequestError(f"Line {text[0]} of {args.input}: {error}") from None


def read_texts(path: str, *, has_empty: bool = False) -> Iterator[Text]:
    """The input's texts, a file's as they are needed.

    Args:
        has_empty: a line without text counts; rows of a .npy file have no numbers of lines.

    Raises:
        RequestError: naming the line.
    """
    lines = 0
    for number, raw in json_lines(path, "text", begins='{["'):
        lines, name = lines + 1, number
        if has_empty and lines != number:
            raise RequestError(
                f"Line {lines} of {path} is empty, and a .npy file has a row for each line; take "
                f"it out, or write JSON lines, which are numbered."
            )
        if isinstance(raw, dict) and raw.keys() <= {"id", "text"}:
            raw, name = raw.get("text"), raw.get("id", number)
        if not isinstance(raw, str):
            raise RequestError(
                f"Line {number} of {path} must be a text, or an object with text and perhaps id."
            )
        yield number, name, raw


@contextmanager
def _output(args: argparse.Namespace, total: int, size: int) -> Iterator[tuple[Any, list[Any]]]:
    """Returns a writer of names and vectors, and the names that have one already; None is any.

    Raises:
        RequestError: the file holds something else, or cannot be written.
    """
    path = args.output
    if path is None or path == "-":
        yield lambda names, vectors: _write_lines(sys.stdout, names, vectors), []
        return
    with contextlib.ExitStack() as stack:
        if path.endswith(".npy"):
            stack.enter_context(only_writer(path))
            file, done = stack.enter_context(_open_rows(path, args.force, total, size))

            def write(names: list[Any], vectors: np.ndarray) -> None:
                file.write(vectors.astype("<f4").tobytes())
                file.flush()

            yield write, [None] * done
            return

        def fits(line: dict[str, Any]) -> bool:
            return {"id", "embedding"} <= line.keys() and len(line["embedding"]) == size

        opened = open_lines(path, args.force, fits, f"vectors of {size} numbers")
        file, names = stack.enter_context(opened)
        text = _Utf8(file)
        yield lambda names, vectors: _write_lines(text, names, vectors), names


class _Utf8:
    """Text into a file of bytes."""

    def __init__(self, file: IO[bytes]):
        self._file, self.flush = file, file.flush

    def write(self, text: str) -> None:
        self._file.write(text.encode())


def _write_lines(file: Any, names: list[Any], vectors: np.ndarray) -> None:
    for name, vector in zip(names, vectors, strict=True):
        line = {"id": name, "embedding": numbers(vector)}
        file.write(json_line(line))
    file.flush()


@contextmanager
def _open_rows(path: str, force: bool, total: int, size: int) -> Iterator[tuple[IO[bytes], int]]:
    """A .npy file of [total, size] float32 at the end of its whole rows, and how many it has.

    Raises:
        RequestError: the file is of other vectors, or cannot be written.
    """
    import io

    import numpy as np

    head = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": (total, size)}
    np.lib.format.write_array_header_1_0(head, header)
    wanted = head.getvalue()
    try:
        file = open(path, "r+b" if Path(path).exists() else "w+b")  # noqa: SIM115
    except OSError as error:
        why = error.strerror
        raise RequestError(f"cannot write {path}: {why}.", param="output") from None
    with file:
        begun = b"" if force else file.read(len(wanted))
        if begun not in (wanted, wanted[: len(begun)]):
            raise RequestError(
                f"{path} is no array of {total} x {size} numbers; choose another file, or replace "
                f"it with --force.",
                param="output",
            )
        done = 0
        if begun == wanted:
            done = min(total, (file.seek(0, 2) - len(wanted)) // (4 * size))
        file.seek(0)
        file.write(wanted)
        file.seek(len(wanted) + 4 * size * done)
        file.truncate()
        yield file, done
