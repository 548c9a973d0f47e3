"""`rooflax generate --input FILE --output FILE`: prompts from a file, answers in their order.

A line of the input has `prompt` (text or token ids) or `messages`, and may have `id` and fields of
SamplingParams, which replace the flags'; or all lines are plain text, each a prompt. A line of the
output has `id` (else the line's number), `text`, `tokens` and `finish_reason`, and of several
samples all as `samples`. A second run appends to the answers that the file has.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rooflax.cli import terminal
from rooflax.cli.statistics import sample
from rooflax.engine.sampling_params import SamplingParams
from rooflax.errors import EngineError, RequestError, RooflaxError
from rooflax.files import MAX_TEXT_BYTES, only_writer, open_regular, read_input
from rooflax.inputs import FIELDS

if TYPE_CHECKING:
    from rooflax.completion import Completion
    from rooflax.llm import LLM

DEFAULT_MAX_TOKENS = 256
BEGIN = b'{"id": '
"""The beginning of every line of the output."""
Fits = Callable[[dict[str, Any]], bool]
AT_ONCE = 8
"""Requests in a batch for every sequence that runs at once."""


@dataclass(frozen=True)
class LineRequest:
    """A line of the input."""

    name: Any
    ids: list[int]
    params: SamplingParams


def run(llm: LLM, args: argparse.Namespace, params: SamplingParams) -> int:
    """Answers the input's lines that have no answer yet."""
    check_output(args.input, args.output)
    requests = read_requests(llm, args.input, params)
    with open_output(args.output, args.force) as (file, done):
        todo = unanswered(requests, done)
        if done and not args.quiet:
            terminal.say(f"{len(done)} of {len(requests)} are answered already")
        finished, size = len(done), AT_ONCE * llm.max_num_seqs
        for begin in range(0, len(todo), size):
            batch = todo[begin : begin + size]
            for request, completions in answers(llm, batch):
                file.write(json_line(line_of(request, completions)).encode())
                file.flush()
            finished += len(batch)
            if not args.quiet:
                terminal.say(f"{finished} of {len(requests)} answered")
    return 0


def text_lines(path: str) -> Iterator[tuple[int, str]]:
    """A file's lines that are not empty as they are needed, or a pipe's; each with its number. "-"
    is stdin.

    Raises:
        RequestError: the file cannot be read, or a line is too long.
    """
    is_file = path != "-" and Path(path).is_file()
    try:
        with open_regular(path) if is_file else io.BytesIO(read_input(path)) as file:
            lines = iter(partial(file.readline, MAX_TEXT_BYTES + 1), b"")
            for number, raw in enumerate(lines, start=1):
                if len(raw) > MAX_TEXT_BYTES:
                    raise RequestError(
                        f"Line {number} of {path} has more than {MAX_TEXT_BYTES} bytes; "
                        f"put each request on a line of its own.",
                        param="input",
                    )
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\n")
                if line.strip():
                    yield number, line
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise RequestError(f"{path} cannot be read: {why}.", param="input") from None


def json_lines(path: str, text: str, begins: str = "{[") -> Iterator[tuple[int, Any]]:
    """The values of a file's lines that are not empty, each with its number.

    Args:
        text: the key of a plain text in an object.
        begins: all lines are texts unless the first begins with one of these.

    Raises:
        RequestError: the file cannot be read, or naming the line that is not JSON.
    """
    is_text = None
    for number, line in text_lines(path):
        is_text = line.lstrip()[0] not in begins if is_text is None else is_text
        try:
            yield number, {text: line.rstrip("\r")} if is_text else json.loads(line)
        except (ValueError, RecursionError):
            raise RequestError(f"Line {number} of {path} is not JSON.") from None


def json_line(value: Any) -> str:
    """A line of JSON, in Unicode but for a lone surrogate: no file holds one, so it is escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode() + "\n"


def read_requests(llm: LLM, path: str, params: SamplingParams) -> list[LineRequest]:
    """The input's requests, all of them checked.

    Raises:
        RequestError: naming the line.
    """
    requests = []
    for number, raw in json_lines(path, "prompt"):
        try:
            requests.append(_request(llm, number, raw, params))
        except RooflaxError as error:
            raise RequestError(f"Line {number} of {path}: {error}") from None
    return requests


def _request(llm: LLM, number: int, raw: Any, params: SamplingParams) -> LineRequest:
    if not isinstance(raw, dict) or ("prompt" in raw) == ("messages" in raw):
        raise RequestError("it must be an object with either prompt or messages.")
    rest = {key: value for key, value in raw.items() if key not in ("prompt", "messages", "id")}
    for name in rest:
        if name not in FIELDS:
            raise RequestError(
                f"{name!r} is neither id, prompt, messages nor a sampling parameter."
            )
    request_params = replace(params, **rest)
    if "messages" in raw:
        ids = llm.encode_chat(raw["messages"])
    else:
        ids = llm.processor.prompt_ids(raw["prompt"])
    if request_params.max_tokens is None:
        most = min(DEFAULT_MAX_TOKENS, llm.max_model_len - len(ids))
        request_params = replace(request_params, max_tokens=max(1, most))
    llm.processor.samples(0, ids, request_params)
    return LineRequest(raw.get("id", number), ids, request_params)


def open_output(path: str, force: bool) -> AbstractContextManager[tuple[IO[bytes], list[Any]]]:
    """The output's file at its end, and the names of the requests that it answers."""
    keys = {"id", "text", "tokens", "finish_reason"}
    return open_lines(path, force, lambda line: keys <= line.keys(), "answers")


def check_output(source: str | None, path: str) -> None:
    """Rejects an output that would take the input's place, or is no file.

    Args:
        source: the input's name; None and "-" are no file.

    Raises:
        RequestError: it is the input, also by a link, or no regular file.
    """
    if path == "-" or not os.path.exists(path):
        return
    if source not in (None, "-") and os.path.exists(source) and os.path.samefile(source, path):
        raise RequestError(f"{path} is the input; choose another output.", param="output")
    if not os.path.isfile(path):
        raise RequestError(f"{path} is not a regular file; choose another.", param="output")


@contextmanager
def open_lines(
    path: str, force: bool, fits: Fits, what: str
) -> Iterator[tuple[IO[bytes], list[Any]]]:
    """A file of JSON lines at its end, and the `id` of each of its lines; or stdout, which is "-".

    Nobody else writes it meanwhile. A last line without its end, as of a run that was killed, is
    cut off.

    Args:
        force: what is there is dropped.
        fits: whether a line's object is one of them; it has an `id`.
        what: the lines are, for errors.

    Raises:
        RequestError: the file holds something else, or cannot be written.
    """
    if path == "-":
        yield sys.stdout.buffer, []
        return
    with only_writer(path):
        yield from _opened_lines(path, force, fits, what)


def _opened_lines(
    path: str, force: bool, fits: Fits, what: str
) -> Iterator[tuple[IO[bytes], list[Any]]]:
    done: list[Any] = []
    try:
        file = open(path, "r+b" if Path(path).exists() else "w+b")  # noqa: SIM115
    except OSError as error:
        why = error.strerror
        raise RequestError(f"{path} cannot be written: {why}.", param="output") from None
    with file:
        if not Path(path).is_file():
            raise RequestError(f"{path} is not a regular file; choose another.", param="output")
        if force:
            file.truncate(0)
        end = 0
        for line in file:
            if not line.endswith(b"\n") and (line.startswith(BEGIN) or BEGIN.startswith(line)):
                break
            done.append(_name_of(path, line, fits, what))
            end += len(line)
        file.truncate(end)
        file.seek(end)
        yield file, done


def _name_of(path: str, line: bytes, fits: Fits, what: str) -> Any:
    """The id of a line of the output."""
    try:
        raw = json.loads(line)
        if fits(raw):
            return raw["id"]
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass
    raise RequestError(
        f"{path} holds something else than {what}; choose another file, or replace it with "
        f"--force.",
        param="output",
    )


def unanswered(requests: list[LineRequest], done: list[Any]) -> list[LineRequest]:
    """The requests behind those that are answered.

    Raises:
        RequestError: the answers are not those to the first requests.
    """
    if [request.name for request in requests[: len(done)]] != done:
        raise RequestError(
            "The output has answers to other requests than the input's first ones; choose another "
            "file, or replace it with --force.",
            param="output",
        )
    return requests[len(done) :]


def answers(llm: LLM, batch: list[LineRequest]) -> Iterator[tuple[LineRequest, list[Completion]]]:
    """The samples of each request, in order, as soon as those before it are there.

    Raises:
        EngineError: what ended one of them.
    """
    prompts, params = [request.ids for request in batch], [request.params for request in batch]
    completions: list[list[Completion]] = [[] for _ in batch]
    at = 0
    for delta in llm.stream(prompts, params):
        if delta.completion is None:
            continue
        if delta.completion.error is not None:
            raise EngineError(delta.completion.error)
        completions[delta.prompt].append(delta.completion)
        while at < len(batch) and len(completions[at]) == batch[at].params.n:
            yield batch[at], sorted(completions[at], key=lambda completion: completion.index)
            at += 1


def line_of(request: LineRequest, completions: list[Completion]) -> dict[str, Any]:
    samples = [sample(completion) for completion in completions]
    several = {"samples": samples} if len(samples) > 1 else {}
    return {"id": request.name, **samples[0], **several}
