"""`rooflax perplexity`: how well a model predicts a text."""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING, Any

from rooflax.cli import flags, terminal
from rooflax.cli.parser import Parser, whole
from rooflax.cli.session import open_llm
from rooflax.cli.windows import Window, windows
from rooflax.errors import RequestError

if TYPE_CHECKING:
    from rooflax.llm import LLM

SUMMARY = "perplexity and bits per byte of a text"
LONGEST_WINDOW = 1024
AT_ONCE = 16


def add_flags(parser: Parser) -> None:
    flags.add_model(parser)
    flags.add_check(parser)
    group = parser.group("the text")
    group.add_argument("-f", "--file", metavar="FILE", help="a UTF-8 text; default: stdin")
    group.add_argument(
        "--stride", metavar="N", type=whole,
        help="stride in tokens between two windows; default half a window. Every "
        "token but the first is scored once, in the first window that holds it",
    )  # fmt: skip
    flags.add_max_model_len(
        parser, help="tokens of a window", shown_default=f"the model's, at most {LONGEST_WINDOW}"
    )
    flags.add_precision(parser, kv=False)
    flags.add_weights_budget(parser)
    flags.add_execution(parser, cached=False)
    flags.add_device(parser, mesh=True, hosts=True)
    flags.add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Scores the text and prints the result."""
    text = (
        terminal.read_stdin("--file FILE") if args.file is None else terminal.read_file(args.file)
    )
    if not text:
        raise RequestError(f"{args.file or 'stdin'} is empty; give a text to score.")
    llm = open_llm(args)
    ids = llm.encode(text)
    if len(ids) < 2:
        raise RequestError(f"the text has {len(ids)} token; scoring needs at least 2.")
    length = args.max_model_len or min(llm.max_model_len, LONGEST_WINDOW)
    stride = args.stride if args.stride is not None else max(length // 2, 1)
    cut = windows(len(ids), length, stride)
    loss = score_windows(llm, ids, cut, args.quiet)
    measured = result(loss, len(ids) - 1, len(text.encode("utf-8")))
    measured = {"model": llm.info.name, **measured, "window": length, "stride": stride}
    if args.json:
        terminal.print_json(measured)
    else:
        _print(measured)
    return 0


def score_windows(llm: LLM, ids: list[int], cut: list[Window], quiet: bool) -> float:
    """The sum of -log p over all scored tokens, in nats."""
    from tqdm import tqdm

    shown = not quiet and terminal.is_terminal(sys.stderr)
    total = 0.0
    with tqdm(total=len(cut), desc="scoring", unit="window", leave=False, disable=not shown) as bar:
        for begin in range(0, len(cut), AT_ONCE):
            some = cut[begin : begin + AT_ONCE]
            scores = llm.score(
                [ids[window.start : window.first] for window in some],
                [ids[window.first : window.end] for window in some],
            )
            for logprobs in scores:
                total -= float(logprobs.sum(dtype="float64"))
            bar.update(len(some))
    return total


def result(loss: float, num_tokens: int, num_bytes: int) -> dict[str, Any]:
    """Perplexity and bits per byte of a summed loss.

        perplexity = exp(loss / tokens)          bits per byte = loss / (ln 2 * bytes)

    Args:
        loss: sum of -log p in nats.
        num_tokens: scored ones.
        num_bytes: of the whole text in UTF-8.
    """
    mean = loss / num_tokens
    if not math.isfinite(mean):
        raise RequestError(
            "the model gives probabilities that are not finite; look for NaN weights with --check."
        )
    return {
        "perplexity": math.exp(mean) if mean < 700 else sys.float_info.max,
        "bits_per_byte": loss / math.log(2) / num_bytes,
        "loss": mean,
        "tokens": num_tokens,
        "bytes": num_bytes,
    }


def _print(measured: dict[str, Any]) -> None:
    print(f"perplexity     {measured['perplexity']:.4f}")
    print(f"bits per byte  {measured['bits_per_byte']:.4f}")
    print(f"tokens         {measured['tokens']:,} scored, {measured['bytes']:,} bytes of text")
    print(f"windows        {measured['window']} tokens, {measured['stride']} apart")
