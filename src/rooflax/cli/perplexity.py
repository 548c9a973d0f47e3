"""`rooflax perplexity`: how well a model predicts a text."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rooflax.cli import flags, terminal
from rooflax.cli.parser import Parser, whole
from rooflax.cli.session import open_llm
from rooflax.cli.windows import Window, windows
from rooflax.errors import RequestError

if TYPE_CHECKING:
    import numpy as np

    from rooflax.llm import LLM

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
    add_window(parser)
    flags.add_precision(parser, kv=False)
    flags.add_weights_budget(parser)
    flags.add_execution(parser, cached=False)
    flags.add_device(parser, mesh=True, hosts=True)
    flags.add_output(parser)


def add_window(parser: Parser) -> None:
    flags.add_max_model_len(
        parser, help="tokens of a window", shown_default=f"the model's, at most {LONGEST_WINDOW}"
    )


def window_of(llm: LLM, args: argparse.Namespace) -> int:
    """Tokens of a window."""
    return args.max_model_len or min(llm.max_model_len, LONGEST_WINDOW)


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
    length = window_of(llm, args)
    stride = args.stride if args.stride is not None else max(length // 2, 1)
    cut = windows(len(ids), length, stride)
    with terminal.bar("scoring", len(cut), "window", args.quiet) as update:
        loss = -float(score_windows(llm, ids, cut, update).sum(dtype="float64"))
    measured = result(loss, len(ids) - 1, len(text.encode("utf-8")))
    measured = {"model": llm.info.name, **measured, "window": length, "stride": stride}
    if args.json:
        terminal.print_json(measured)
    else:
        _print(measured)
    return 0


def score_windows(
    llm: LLM, ids: Sequence[int], cut: Sequence[Window], update: Callable[[int], Any]
) -> np.ndarray:
    """Log-probability of each token but the first, in nats.

    Args:
        update: called with the number of windows that are done.
    """
    import numpy as np

    scores: list[np.ndarray] = []
    for begin in range(0, len(cut), AT_ONCE):
        batch = cut[begin : begin + AT_ONCE]
        scores += llm.score(
            [ids[window.start : window.first] for window in batch],
            [ids[window.first : window.end] for window in batch],
        )
        update(len(batch))
    return np.concatenate(scores)


def check_finite(logprob: float) -> float:
    """
    Raises:
        RequestError: it is no number.
    """
    if not math.isfinite(logprob):
        raise RequestError(
            "the model gives probabilities that are not finite; look for NaN weights with --check."
        )
    return logprob


def perplexity(loss: float) -> dict[str, float]:
    """Perplexity of a mean loss in nats per token, and that loss.

    Raises:
        RequestError: the loss is no number.
    """
    check_finite(loss)
    return {"perplexity": math.exp(loss) if loss < 700 else sys.float_info.max, "loss": loss}


def result(loss: float, num_tokens: int, num_bytes: int) -> dict[str, Any]:
    """Perplexity and bits per byte of a summed loss.

        perplexity = exp(loss / tokens)          bits per byte = loss / (ln 2 * bytes)

    Args:
        loss: sum of -log p in nats.
        num_tokens: scored ones.
        num_bytes: of the whole text in UTF-8.
    """
    return {
        **perplexity(loss / num_tokens),
        "bits_per_byte": loss / math.log(2) / num_bytes,
        "tokens": num_tokens,
        "bytes": num_bytes,
    }


def _print(measured: dict[str, Any]) -> None:
    print(f"perplexity     {measured['perplexity']:.4f}")
    print(f"bits per byte  {measured['bits_per_byte']:.4f}")
    print(f"tokens         {measured['tokens']:,} scored, {measured['bytes']:,} bytes of text")
    print(f"windows        {measured['window']} tokens, {measured['stride']} apart")
