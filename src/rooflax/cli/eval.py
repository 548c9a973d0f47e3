"""`rooflax eval`: perplexity of texts and chats, accuracy of multiple-choice questions.

A .jsonl file whose first row has choices holds questions; others are scored token by token.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooflax.cli import flags, terminal
from rooflax.cli.parser import Parser
from rooflax.cli.perplexity import add_window, check_finite, perplexity, score_windows, window_of
from rooflax.cli.session import open_llm
from rooflax.cli.windows import windows
from rooflax.errors import RequestError
from rooflax.fields.declaration import declarations
from rooflax.fields.kinds import is_whole
from rooflax.train.config import DataConfig
from rooflax.train.corpus import (
    HUB,
    Document,
    documents,
    file_documents,
    hub_values,
    jsonl_values,
)

if TYPE_CHECKING:
    from rooflax.llm import LLM

PROMPTS = ("question", "question_stem", "prompt", "ctx")
CHOICES = ("choices", "endings")
ANSWERS = ("answer", "answerKey", "label")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SCORED = ("mask_prompt", "assistant_only_loss")
"""Fields of DataConfig: which tokens of a chat count."""
NAME_WIDTH = 26
COLUMNS = {
    "data": str, "rows": "{:,}".format, "tokens": "{:,}".format, "loss": "{:.4f}".format,
    "perplexity": "{:,.4f}".format, "acc": "{:.4f}".format, "acc_norm": "{:.4f}".format,
}  # fmt: skip


@dataclass(frozen=True)
class Question:
    """A multiple-choice question.

    Attributes:
        where: its line, as errors name it.
        prompt: what stands before each choice.
        answer: number of the right choice.
    """

    where: str
    prompt: str
    choices: tuple[str, ...]
    answer: int


def add_flags(parser: Parser) -> None:
    flags.add_model(parser)
    flags.add_lora(parser)
    flags.add_check(parser)
    group = "what to score"
    parser.group(group).add_argument(
        "--data", metavar="FILE", nargs="+", required=True,
        help="texts; .jsonl of text, of messages, of prompt and completion, or of questions with "
        "choices and an answer; or a hub's dataset, hub:OWNER/NAME:SPLIT",
    )  # fmt: skip
    for name in SCORED:
        one = declarations(DataConfig)[name]
        words = one.help.replace("train", "score")
        flags.add_field(parser, replace(one, group=group, help=words))
    add_window(parser)
    flags.add_precision(parser, kv=False)
    flags.add_weights_budget(parser)
    flags.add_execution(parser, cached=False)
    flags.add_device(parser, mesh=True)
    flags.add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Scores each file and prints a line for it."""
    config = DataConfig(**{name: getattr(args, name) for name in SCORED})
    files = {path: _read(path) for path in args.data}
    asked = [path for path, rows in files.items() if isinstance(rows[0], Question)]
    if config.masks and asked:
        flag = "--mask-prompt" if config.mask_prompt else "--assistant-only-loss"
        raise RequestError(f"{flag} is for chats, and {asked[0]} holds questions; drop it.")
    llm = open_llm(args)
    results = []
    for path, rows in files.items():
        if path in asked:
            measured = _accuracy(llm, rows, args.quiet)
        else:
            measured = _losses(llm, rows, config, args)
        results.append({"data": path, "rows": len(rows), **measured})
    if args.json:
        terminal.print_json({"model": llm.info.name, "lora": args.lora, "results": results})
        return 0
    shown = [name for name in COLUMNS if any(name in one for one in results)]
    cells = [
        [COLUMNS[name](one[name]) if name in one else "" for name in shown]
        for one in ({**one, "data": _short(one["data"])} for one in results)
    ]
    for line in terminal.table([shown, *cells], right=range(1, len(shown))):
        print(line)
    return 0


def _short(path: str) -> str:
    return path if len(path) <= NAME_WIDTH else f"...{path[3 - NAME_WIDTH :]}"


def _read(path: str) -> list[Any]:
    """A file's or data set's questions, or its rows as training takes them.

    Raises:
        RequestError: there are none, or a line is no such row.
    """
    values = None
    if path.startswith(HUB):
        values = [value for part in hub_values(path).values() for value in part]
    elif path.endswith(".jsonl"):
        values = list(jsonl_values(Path(path)))
    if values and isinstance(values[0][0], dict) and _first(values[0][0], CHOICES) is not None:
        return [question(value, place) for value, _, place in values]
    rows = list(file_documents([Path(path)]) if values is None else documents(values))
    if not rows:
        raise RequestError(f"{path} holds nothing to score.")
    return rows


def question(value: Any, place: str) -> Question:
    """The question of a row, by the keys of MMLU, ARC, OpenBookQA, HellaSwag and their like.

    The right choice is stated by its number from 0, by its label among those of the choices, or by
    a letter. A `question` is put as lm-evaluation-harness puts those of ARC; others stand as they
    are.

    Args:
        place: the line, for errors.

    Raises:
        RequestError: a key is missing, or is not what it must be.
    """
    if not isinstance(value, dict):
        raise RequestError(f"{place} is not a JSON object with a question, choices and an answer.")
    key = next((name for name in PROMPTS if name in value), None)
    prompt = value.get(key)
    choices: Any = _first(value, CHOICES)
    if not isinstance(prompt, str) or not prompt.strip():
        raise RequestError(f"{place} has no text under {_either(PROMPTS)}.")
    labels: Any = None
    if isinstance(choices, dict):
        choices, labels = choices.get("text"), choices.get("label")
    is_list = isinstance(choices, list) and len(choices) > 1
    if not is_list or not all(isinstance(each, str) and each.strip() for each in choices):
        raise RequestError(f"{place} has no list of two or more texts under {_either(CHOICES)}.")
    if labels is None:
        labels = list(LETTERS[: len(choices)])
    answer = _first(value, ANSWERS)
    if isinstance(labels, list) and len(labels) == len(choices) and answer in labels:
        number = labels.index(answer)
    else:
        is_digits = isinstance(answer, str) and answer.isascii() and answer.isdigit()
        number = int(answer) if is_digits and len(answer) < 4 else answer
    if not is_whole(number, int) or not 0 <= number < len(choices):
        raise RequestError(
            f"{place} has no number from 0 to {len(choices) - 1} and no label of a choice under "
            f"{_either(ANSWERS)}."
        )
    if key == "question":
        prompt = f"Question: {prompt}\nAnswer:"
    return Question(place, prompt, tuple(choices), number)


def _first(value: dict[str, Any], names: Iterable[str]) -> Any:
    return next((value[name] for name in names if name in value), None)


def _either(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _losses(
    llm: LLM, rows: list[Any], config: DataConfig, args: argparse.Namespace
) -> dict[str, Any]:
    """Mean loss of the tokens that count, each given those of its row before it."""
    length = window_of(llm, args)
    encoded = [_encoded(llm, row, config) for row in rows]
    cut = [windows(len(ids), length, max(length // 2, 1)) for ids, _ in encoded]
    loss, count = 0.0, 0
    with terminal.bar("scoring", sum(map(len, cut)), "window", args.quiet) as update:
        for (ids, scored), each in zip(encoded, cut, strict=True):
            logprobs = score_windows(llm, ids, each, update)
            logprobs = logprobs if scored is None else logprobs[scored[1:]]
            loss -= float(logprobs.sum(dtype="float64"))
            count += len(logprobs)
    return {"tokens": count, **perplexity(loss / count)}


def _encoded(llm: LLM, row: Any, config: DataConfig) -> tuple[list[int], list[bool] | None]:
    """A row's tokens, and which of them count; None is all but the first."""
    from rooflax.train.data import separator_of
    from rooflax.train.rows import encode_row, where

    if isinstance(row, Document) and not config.masks:  # as `rooflax perplexity` has it
        ids, scored = llm.encode(row.text), None
    else:
        ids, scored = encode_row(row, llm.tokenizer, separator_of(llm.tokenizer), config)
    if not any(ids[1:] if scored is None else scored[1:]):
        raise RequestError(f"{where(row)} has no token to score that has another before it.")
    return ids, scored


def _accuracy(llm: LLM, rows: list[Question], quiet: bool) -> dict[str, Any]:
    """Shares of questions whose right choice has the largest log-probability: `acc` its sum over
    the choice's tokens, `acc_norm` that over the choice's characters."""
    right = normalized = 0
    with terminal.bar("scoring", len(rows), "question", quiet) as update:
        for row in rows:
            sums = choice_logprobs(llm, row)
            over = [total / len(choice) for total, choice in zip(sums, row.choices, strict=True)]
            right += sums.index(max(sums)) == row.answer
            normalized += over.index(max(over)) == row.answer
            update(1)
    return {"acc": right / len(rows), "acc_norm": normalized / len(rows)}


def choice_logprobs(llm: LLM, row: Question) -> list[float]:
    """Log-probability of each choice behind the prompt, in nats.

    Choices follow a space. A prompt's own tokens are those that it has alone, without blanks at its
    end, as in lm-evaluation-harness.

    Raises:
        RequestError: the prompt has no token, or one with its choice does not fit the context.
    """
    space = "" if row.prompt[-1].isspace() else " "
    first = len(llm.encode(row.prompt.rstrip()))
    ids = [llm.encode(row.prompt + space + choice) for choice in row.choices]
    try:
        if not all(0 < first < len(each) for each in ids):
            raise RequestError("a choice adds no token to the prompt.")
        scores = llm.score([each[:first] for each in ids], [each[first:] for each in ids])
    except RequestError as error:
        raise RequestError(f"{row.where}: {error}") from None
    sums = [float(each.sum(dtype="float64")) for each in scores]
    check_finite(sum(sums))
    return sums
