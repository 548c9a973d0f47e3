"""Training data: rows of files and folders, written as token files, which resumed runs open."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooflax.cli import terminal
from rooflax.cli.statistics import counted
from rooflax.cli.train_start import Start
from rooflax.errors import CheckpointError, RequestError
from rooflax.files import read_regular, replacing
from rooflax.train.config import GRPO, PREFERENCES, SFT, DataConfig
from rooflax.train.corpus import (
    HUB,
    Document,
    Prompt,
    Row,
    dataset_files,
    documents,
    file_documents,
    file_prompts,
    folder_documents,
    hub_values,
    prompts,
    split_held_out,
)

if TYPE_CHECKING:
    from rooflax.loading.tokenizer import Tokenizer
    from rooflax.train.data import Corpus

TOKEN_FILES = {"train": "training", "valid": "held_out", "test": "test"}
"""Names of a part's token files."""
NOUNS = {GRPO: "prompt"} | dict.fromkeys(PREFERENCES, "pair")
"""Names of a row by `train_mode`; of another it is a document."""
DIGEST = "sha256"
"""Key of data.json: of the text."""


def prepare(
    args: argparse.Namespace, data: DataConfig, seq_len: int, start: Start, out: Path
) -> tuple[Corpus, Corpus | None, Corpus | None]:
    """The tokenizer and the token files to train on, held out and to test; made once, and opened by
    a resumed run.

    Raises:
        RequestError: the folder holds a run on other data, or there is no text.
        CheckpointError: what the folder says of its data is damaged.
    """
    from rooflax.train import job
    from rooflax.train.data import open_corpus

    settings = data_settings(args, data, seq_len) | {"config": start.raw}

    def note() -> None:
        note_data(args, data, settings, out, lambda: _encode(args, data, seq_len, start, out))

    job.by_first("data", note)
    if args.vocab_size is not None:
        start.tokenizer_folder = out / "tokenizer"
    training, *others = (out / f"{name}.bin" for name in TOKEN_FILES.values())
    held_out, test = (
        None if file.exists() and not file.stat().st_size else open_corpus(file) for file in others
    )
    return open_corpus(training), held_out, test


def note_data(
    args: argparse.Namespace,
    data: DataConfig,
    settings: dict[str, Any],
    out: Path,
    encode: Callable[[], str],
) -> None:
    """data.json: what the run's data depends on, written once the data is there.

    Args:
        encode: makes the data, and gives its digest.

    Raises:
        RequestError, CheckpointError: as for `prepare`.
    """
    from rooflax.train.checkpoint import list_checkpoints

    note = out / "data.json"
    other = _difference(_read_note(note), settings, args, data) if note.exists() else None
    if other and list_checkpoints(out / "checkpoints"):
        raise RequestError(f"{out} holds a run on {other} another --out.")
    if other or not note.exists():
        note.unlink(missing_ok=True)
        settings = settings | {DIGEST: encode()}
        with replacing(note, "utf-8") as file:
            file.write(json.dumps(settings, indent=2) + "\n")


def _read_note(note: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(read_regular(note)))
    except (ValueError, TypeError, RecursionError):
        raise CheckpointError(
            f"{note} is damaged, so that the run in {note.parent} cannot go on; give another --out."
        ) from None


def data_settings(args: argparse.Namespace, data: DataConfig, seq_len: int) -> dict[str, Any]:
    """Settings that the token files depend on."""
    names = ("tokenizer", "vocab_size", "model")
    settings = {"data": [str(path) for path in args.data]} | {n: getattr(args, n) for n in names}
    mode = {} if args.train_mode == SFT else {"train_mode": args.train_mode}
    return settings | asdict(data) | {"seq_len": seq_len} | mode


def _difference(
    noted: dict[str, Any], info: dict[str, Any], args: argparse.Namespace, data: DataConfig
) -> str:
    """Differences to a run's data.json. Text that is gone is not looked for: the token files are
    there."""
    digest = noted.pop(DIGEST, None)  # 0.1.0 wrote none
    if noted != info:
        return (
            "other data or masks, another tokenizer, seq_len or another config; give the same "
            "flags to go on, or"
        )
    is_there = all(Path(path).exists() for path in args.data)
    if digest and is_there and digest_of(parts_of(args, data)) != digest:
        return f"what {' '.join(args.data)} held before it changed; give"
    return ""


def digest_of(parts: dict[str, list[Any]]) -> str:
    """A digest of the rows; of what JSON has no word for, as dates and images of the hub's, the
    type."""
    digest = hashlib.sha256()
    for part, rows in parts.items():
        for row in rows:
            try:
                values = [part, *asdict(row).values()]
                text = json.dumps(values, default=lambda value: type(value).__qualname__)
                digest.update(text.encode())
            except RecursionError:
                raise RequestError(f"{row.name} has a row that is nested too deeply.") from None
    return digest.hexdigest()


def parts_of(args: argparse.Namespace, data: DataConfig) -> dict[str, list[Any]]:
    """The rows of each part; those to be held out of the first are still in it."""
    is_grpo = args.train_mode == GRPO
    options: dict[str, Any] = {"field": data.text_field, "pairs": args.train_mode in PREFERENCES}

    def read(file: Path) -> Iterator[Row | Prompt]:
        return file_prompts([file]) if is_grpo else file_documents([file], **options)

    parts: dict[str, list[Any]] = {part: [] for part in TOKEN_FILES}
    for named in args.data:
        path = Path(named)
        if named.startswith(HUB):
            for part, rows in hub_values(named).items():
                parts[part] += prompts(rows) if is_grpo else documents(rows, **options)
            continue
        files = dataset_files(path) if data.glob is None else {}
        for part, file in files.items():
            parts[part] += read(file)
        if path.is_dir() and not files:
            if is_grpo:
                raise RequestError(f"{path} has no train.jsonl, whose lines are the prompts.")
            parts["train"] += folder_documents(path, data.glob or "*.txt")
        elif not files:
            parts["train"] += read(path)
    return parts


def split(
    args: argparse.Namespace, data: DataConfig, parts: dict[str, list[Any]]
) -> dict[str, list[Any]]:
    """The parts, with rows held out of the first where there is none to watch.

    Raises:
        RequestError: nothing is left to train on.
    """
    training, held_out = parts["train"], parts["valid"]
    if not held_out:
        training, held_out = split_held_out(training, data.held_out_fraction)
    if held_out and not training:
        raise RequestError(
            f"all {len(held_out)} {_noun(args)}s are held out; give more, or less to "
            f"--held-out-fraction."
        )
    if not training:
        raise RequestError(
            f"--data {' '.join(args.data)} holds no text to train on; see --glob and --text-field."
        )
    return parts | {"train": training, "valid": held_out}


def _encode(
    args: argparse.Namespace, data: DataConfig, seq_len: int, start: Start, out: Path
) -> str:
    """Writes the token files; the digest of the text."""
    parts = parts_of(args, data)
    digest = digest_of(parts)
    parts = split(args, data, parts)
    training, held_out, test = parts.values()
    out.mkdir(parents=True, exist_ok=True)
    say_sizes(args, data, training, held_out, test)
    if args.vocab_size is not None:
        with terminal.status("training the tokenizer", args.quiet):
            _train_tokenizer(training, args.vocab_size, start, out)
    tokenizer = start.tokenizer()
    with terminal.status("encoding", args.quiet):
        notes = _write_tokens(parts, tokenizer, data, seq_len, out, args.train_mode)
    if not args.quiet:
        for line in notes:
            terminal.say(line)
    return digest


def _write_tokens(
    parts: dict[str, list[Any]],
    tokenizer: Tokenizer,
    data: DataConfig,
    seq_len: int,
    out: Path,
    mode: str,
) -> list[str]:
    """Writes the token files; what is to be said of them."""
    from rooflax.train.data import separator_of, write_corpus
    from rooflax.train.rows import RowEncoder, has_whole_rows

    notes, encoder = [], RowEncoder(tokenizer, separator_of(tokenizer), data, seq_len)
    encode = encoder.pairs if mode in PREFERENCES else encoder.rows
    for part, rows in parts.items():
        info = write_corpus(
            out / f"{TOKEN_FILES[part]}.bin",
            encode(rows),
            tokenizer.vocab_size,
            is_whole=has_whole_rows(rows),
        )
        if rows and not info.num_documents:
            raise RequestError(
                f"no row of the {part} data has anything left to train once it is cut to "
                f"--seq-len {seq_len}; raise --seq-len."
            )
        if part == "train" and (data.masks or mode in PREFERENCES):
            notes.append(f"{info.num_trained:,} of {info.num_tokens:,} tokens are trained")
    if encoder.shortened:
        left_out = f"; {encoder.dropped:,} of them train nothing and are left out"
        rows = counted(encoder.shortened, "row")
        notes.append(f"{rows} cut to {seq_len + 1:,} tokens{left_out if encoder.dropped else ''}")
    return notes


def _train_tokenizer(rows: list[Row], size: int, start: Start, out: Path) -> None:
    from rooflax.train.tokenizer_training import save_tokenizer, train_tokenizer

    if not all(isinstance(row, Document) for row in rows):
        raise RequestError("--vocab-size trains a tokenizer on texts, and --data has other rows.")
    tokenizer = train_tokenizer((row.text for row in rows if isinstance(row, Document)), size)
    start.tokenizer_folder = out / "tokenizer"
    longest = start.config.max_position
    save_tokenizer(tokenizer, start.tokenizer_folder, model_max_length=longest)


def _noun(args: argparse.Namespace) -> str:
    return NOUNS.get(args.train_mode, "document")


def say_sizes(args: argparse.Namespace, data: DataConfig, *parts: list[Any]) -> None:
    if args.quiet:
        return
    training, held_out, test = parts
    tested = f", {len(test)} to test" if test else ""
    size = counted(len(training), _noun(args))
    terminal.say(f"{size} to train on, {len(held_out)} held out{tested}")
    if not held_out and data.held_out_fraction:
        what = "reward" if args.train_mode == GRPO else "loss"
        more = "raise --held-out-fraction, or " if len(training) > 1 else ""
        terminal.say(
            f"no {_noun(args)} is among the held-out share of {data.held_out_fraction:g}, so that "
            f"there is no held-out {what}; {more}give a valid.jsonl"
        )
