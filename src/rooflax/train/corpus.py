"""Collecting documents: texts of a folder, text files, rows of JSONL files.

The order and the held-out split depend on names alone, so that the same files give the same corpus
on every machine. Nothing here knows tokens.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rooflax.errors import RequestError, first_line
from rooflax.files import read_regular

SKIPPED_FOLDERS = frozenset({
    "site-packages", "dist-packages", "__pycache__", "_bundled", ".git", ".venv", "node_modules",
})  # fmt: skip
HELD_OUT_FRACTION = 0.1
MAX_FILE_BYTES = 1 << 34
"""Bytes of a training file; corpora are larger than what else is read into memory."""


@dataclass(frozen=True)
class Document:
    """A text and the relative path (or line) that names it."""

    name: str
    text: str

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode("utf-8"))


@dataclass(frozen=True)
class ChatRow:
    """A row of `messages`, or of a `prompt` and a `completion` that are lists of messages.

    Attributes:
        name: of its line, such as "chats.jsonl:3".
        where: the line as errors name it.
        num_prompt: how many messages are the prompt; None is all but the last.
        tools: JSON schemas of functions.
    """

    name: str
    where: str
    messages: tuple[dict[str, Any], ...]
    num_prompt: int | None = None
    tools: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True)
class PromptCompletion:
    """A row of a `prompt` and a `completion` that are texts."""

    name: str
    where: str
    prompt: str
    completion: str


@dataclass(frozen=True)
class Preference:
    """A row of a prompt with two answers, of which one is preferred.

    Attributes:
        chosen, rejected: the prompt with each.
    """

    name: str
    where: str
    chosen: ChatRow | PromptCompletion
    rejected: ChatRow | PromptCompletion


@dataclass(frozen=True)
class Prompt:
    """A row that the model answers itself.

    Attributes:
        prompt: a text, or messages.
        columns: what else the row has, by its keys.
    """

    name: str
    where: str
    prompt: str | tuple[dict[str, Any], ...]
    columns: dict[str, Any]
    tools: tuple[dict[str, Any], ...] | None = None


Row = Document | ChatRow | PromptCompletion | Preference
Value = tuple[Any, str, str]
"""A row as it was read, its name, and where it is, as errors name it."""
HUB = "hub:"
SPLITS = {"train": "train", "valid": "validation", "test": "test"}
"""Splits of a hub's datasets, by part."""
PARTS = ("train", "valid", "test")
AnyRow = TypeVar("AnyRow", bound=Row | Prompt)


def dataset_files(folder: Path) -> dict[str, Path]:
    """The files train.jsonl, valid.jsonl and test.jsonl of a folder that has the first, by part."""
    files = {part: folder / f"{part}.jsonl" for part in PARTS}
    present = {part: path for part, path in files.items() if path.is_file()}
    return present if "train" in present else {}


def folder_documents(
    folder: Path, pattern: str = "*.py", *, skip: Iterable[str] = ()
) -> Iterator[Document]:
    """Every file below a folder that matches, sorted by relative path.

    Files that are empty or not UTF-8 are left out.

    Args:
        pattern: a glob for the file's name, such as "*.py".
        skip: names of further folders to leave out.

    Raises:
        RequestError: the folder does not exist, or the pattern is no name's.
    """
    if not folder.is_dir():
        raise RequestError(f"{folder} is not a folder; give one that holds the training files.")
    if Path(pattern).is_absolute() or not pattern:
        raise RequestError(f"The glob is {pattern!r:.80}; give a pattern for names of files.")
    left_out = SKIPPED_FOLDERS | set(skip)
    paths = (p.relative_to(folder) for p in folder.rglob(pattern) if p.is_file())
    kept = (p for p in paths if left_out.isdisjoint(p.parts[:-1]))
    for path in sorted(kept, key=lambda p: p.as_posix()):
        text = _read_text(folder / path)
        if text:
            yield Document(path.as_posix(), text)


def file_documents(
    paths: Sequence[Path], *, field: str | None = None, pairs: bool = False
) -> Iterator[Row]:
    """Rows of files: each line of a .jsonl is one, of the kind that its keys say; any other file is
    a document.

    Args:
        field: key of the text in a JSONL line, whatever other keys there are; None looks for
            `messages` (and `tools`), then `prompt` and `completion`, then `chosen` and `rejected`,
            then `text`.
        pairs: `chosen` and `rejected` come before other keys, which data sets have beside them.

    Raises:
        RequestError: a file is missing or not UTF-8, or a line is no row.
    """
    for path in paths:
        if path.suffix == ".jsonl":
            yield from documents(jsonl_values(path), field=field, pairs=pairs)
        elif path.suffix == ".json":
            raise RequestError(
                f"{path} is a .json file, and rows are the lines of a .jsonl file; of an array of "
                f"rows, `jq -c '.[]' {path.name}` writes one a line."
            )
        elif text := _read(path):
            yield Document(path.name, text)


def file_prompts(paths: Sequence[Path]) -> Iterator[Prompt]:
    """Rows of .jsonl files that have a `prompt`, a text or messages, and perhaps `tools`; all
    other keys are columns.

    Raises:
        RequestError: as for `file_documents`.
    """
    for path in paths:
        if path.suffix != ".jsonl":
            raise RequestError(f"{path} is no .jsonl file; prompts are the lines of those.")
        yield from prompts(jsonl_values(path))


def prompts(values: Iterable[Value]) -> Iterator[Prompt]:
    """`file_prompts` of rows that are read already."""
    for value, name, where in values:
        if not isinstance(value, dict) or "prompt" not in value:
            raise RequestError(f"{where} is not a JSON object with a prompt.")
        if taken := {"prompts", "completions"} & value.keys():
            raise RequestError(
                f"{where} has {min(taken)}, which is an argument of rewards; call it otherwise."
            )
        prompt = value["prompt"]
        if not isinstance(prompt, str):
            prompt = _messages(value, "prompt", where)
        columns = {key: each for key, each in value.items() if key not in ("prompt", "tools")}
        yield Prompt(name, where, prompt, columns, _tools(value, where))


def is_held_out(name: str, fraction: float = HELD_OUT_FRACTION) -> bool:
    """Whether a document is among the held-out fraction; decided by its name alone.

    A document of a smaller fraction also belongs to every larger one.
    """
    digest = hashlib.sha256(name.encode("utf-8")).digest()
    tenths, rest = int.from_bytes(digest[:8], "big") % 10, int.from_bytes(digest[8:12], "big")
    return (tenths + rest / 2**32) / 10 < fraction


def split_held_out(
    documents: Iterable[AnyRow], fraction: float = HELD_OUT_FRACTION
) -> tuple[list[AnyRow], list[AnyRow]]:
    """(training, held-out) documents, each in the given order."""
    training: list[AnyRow] = []
    held_out: list[AnyRow] = []
    for document in documents:
        (held_out if is_held_out(document.name, fraction) else training).append(document)
    return training, held_out


def _read_text(path: Path) -> str | None:
    try:
        return read_regular(path, MAX_FILE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _read(path: Path) -> str:
    try:
        return read_regular(path, MAX_FILE_BYTES).decode("utf-8")
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise RequestError(f"line {line} of {path} is not UTF-8; convert it first.") from None


def jsonl_values(path: Path) -> Iterator[Value]:
    """The lines of a file that are not empty, without a byte order mark.

    Raises:
        RequestError: the file is missing or not UTF-8, or a line is not JSON, nested too deeply or
            has too long a number.
    """
    for number, line in enumerate(_read(path).removeprefix("\ufeff").split("\n"), start=1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise RequestError(
                f"{where} is not JSON: {error.msg} at character {error.pos + 1}."
            ) from None
        except RecursionError:
            raise RequestError(f"{where} is nested too deeply.") from None
        except ValueError:
            most = sys.get_int_max_str_digits()
            raise RequestError(f"{where} has a number of more than {most:,} digits.") from None
        yield value, f"{path.name}:{number}", where


def hub_values(spec: str) -> dict[str, Iterator[Value]]:
    """The rows of a hub's dataset by part; those of a split that is named are "train".

    Args:
        spec: "hub:OWNER/NAME", with "/CONFIG" where there are several, and ":SPLIT".

    Raises:
        RequestError: the `datasets` package is missing, or does not load it.
    """
    path, _, split = spec.removeprefix(HUB).partition(":")
    named = re.fullmatch(r"([^/]+/[^/]+)(?:/([^/]+))?", path)
    if named is None:
        raise RequestError(f"{spec:.80} is not {HUB}OWNER/NAME, with /CONFIG and :SPLIT perhaps.")
    try:
        module = importlib.import_module("datasets")
    except ImportError:
        raise RequestError(
            f"{spec:.80} needs the package datasets; say `pip install datasets`."
        ) from None
    try:
        dataset = module.load_dataset(named[1], named[2], split=split or None)
    except Exception as error:
        raise RequestError(f"{spec:.80} is not loaded: {first_line(error).rstrip('.')}.") from None
    splits = {"train": dataset} if split else {part: dataset.get(of) for part, of in SPLITS.items()}

    def values(part: str, rows: Iterable[Any]) -> Iterator[Value]:
        at = spec if split else f"{spec}:{SPLITS[part]}"
        for number, row in enumerate(rows):
            yield row, f"{spec}:{number}", f"row {number} of {at}"

    return {part: values(part, rows) for part, rows in splits.items() if rows is not None}


def documents(
    values: Iterable[Value], *, field: str | None = None, pairs: bool = False
) -> Iterator[Row]:
    """`file_documents` of rows that are read already."""
    for value, name, where in values:
        row = None
        if isinstance(value, dict) and pairs and {"chosen", "rejected"} <= value.keys():
            row = _preference(value, name, where)
        elif isinstance(value, dict):
            row = _row(value, name, where, field)
        if row is None:
            wanted = f"a string under {field or 'text'!r}"
            if field is None:
                wanted = (
                    f"messages, a prompt and a completion, a chosen and a rejected answer, or "
                    f"{wanted} (see --text-field)"
                )
            keys = list(value)[:6] if isinstance(value, dict) else []
            has = f"; it has {', '.join(keys)}" if keys else ""
            raise RequestError(f"{where} is not a JSON object with {wanted}{has}.")
        if not isinstance(row, Document) or row.text:
            yield row


def _row(value: dict[str, Any], name: str, where: str, field: str | None) -> Row | None:
    """A line's row, by its keys; None without any that is known."""
    if field is None and "messages" in value:
        messages = _messages(value, "messages", where)
        return ChatRow(name, where, messages, None, _tools(value, where))
    if field is None and {"prompt", "completion"} <= value.keys():
        return _answered(value, "completion", name, where)
    if field is None and {"chosen", "rejected"} <= value.keys():
        return _preference(value, name, where)
    text = value.get(field or "text")
    if not isinstance(text, str):
        return None
    if not _is_unicode(text):
        raise RequestError(
            f"{where} has a lone surrogate under {field or 'text'!r}, which is no Unicode text."
        )
    return Document(name, text)


def _answered(value: dict[str, Any], key: str, name: str, where: str) -> ChatRow | PromptCompletion:
    """A prompt with the answer under a key, both texts or both messages."""
    prompt, answer = value["prompt"], value[key]
    if isinstance(prompt, str) and isinstance(answer, str):
        return PromptCompletion(name, where, prompt, answer)
    if isinstance(prompt, str) or isinstance(answer, str):
        raise RequestError(
            f"{where} has prompt and {key} that are neither two texts nor two lists of messages."
        )
    before = _messages(value, "prompt", where)
    messages = before + _messages(value, key, where)
    return ChatRow(name, where, messages, len(before), _tools(value, where))


def _preference(value: dict[str, Any], name: str, where: str) -> Preference:
    """A pair; a prompt that is not stated, or a text beside lists of messages, is what both answers
    begin with, as TRL takes it."""
    chosen, rejected = value["chosen"], value["rejected"]
    is_text = isinstance(value.get("prompt"), str)
    if "prompt" not in value or (is_text and _are_objects(chosen) and _are_objects(rejected)):
        if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
            raise RequestError(
                f"{where} has chosen and rejected that are neither two texts nor two lists of "
                f"messages."
            )
        both = enumerate(zip(chosen, rejected, strict=False))
        same = next((index for index, (a, b) in both if a != b), 0)
        if isinstance(chosen, str) and chosen[:same].endswith(" "):
            same -= 1  # the space belongs to the answers
        if same == 0:
            raise RequestError(
                f"{where} has no prompt, which is what chosen and rejected begin with before they "
                f"differ."
            )
        value = value | {
            "prompt": chosen[:same], "chosen": chosen[same:], "rejected": rejected[same:],
        }  # fmt: skip
    pair = (_answered(value, key, name, where) for key in ("chosen", "rejected"))
    return Preference(name, where, *pair)


def _tools(value: dict[str, Any], where: str) -> tuple[dict[str, Any], ...] | None:
    tools = value.get("tools")
    if tools is not None and not _are_objects(tools):
        raise RequestError(f"{where} has tools that are not a list of JSON objects.")
    return tuple(tools) if tools else None


def _messages(value: dict[str, Any], key: str, where: str) -> tuple[dict[str, Any], ...]:
    chat = value[key]
    if _are_objects(chat) and chat and all(isinstance(m.get("role"), str) for m in chat):
        return tuple(chat)
    raise RequestError(f"{where} has {key} that are not a list of objects, each with a role.")


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _is_unicode(text: str) -> bool:
    """False where JSON spelled half a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
