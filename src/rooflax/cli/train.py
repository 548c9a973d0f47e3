"""`rooflax train`: from scratch or from a checkpoint, all weights or LoRA; resumes where it was."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rooflax.cli import flags, platform, session, terminal
from rooflax.cli.parser import Parser, whole
from rooflax.cli.statistics import counted
from rooflax.errors import CheckpointError, RequestError
from rooflax.fields.declaration import declarations
from rooflax.files import only_writer, read_regular, replacing
from rooflax.loading.json_files import read_json_object
from rooflax.nn.execution import ExecutionOptions, gib
from rooflax.train.config import (
    DEFAULTS,
    DORA,
    FULL,
    GRPO,
    LORA,
    PREFERENCES,
    SFT,
    DataConfig,
    TrainConfig,
)
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
from rooflax.train.trackers import TRACKERS, tracker_module, tracking

if TYPE_CHECKING:
    from rooflax.llm import LLM
    from rooflax.loading.tokenizer import Tokenizer
    from rooflax.models.model import Model
    from rooflax.rl.rollouts import Rollouts
    from rooflax.train.data import Corpus
    from rooflax.train.loop import TrainResult

TOKEN_FILES = {"train": "training", "valid": "held_out", "test": "test"}
"""Names of a part's token files."""
DIGEST = "sha256"
"""Key of data.json: of the text."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip


def add_flags(parser: Parser) -> None:
    flags.add_model(parser)
    flags.add_check(parser)
    add = parser.group("what to train").add_argument
    add(
        "--data", metavar="PATH", nargs="+", required=True,
        help="text and .jsonl files, or a folder with train.jsonl (valid.jsonl, test.jsonl), or of "
        "texts; or a hub's dataset, hub:OWNER/NAME",
    )  # fmt: skip
    for one in declarations(DataConfig).values():
        flags.add_field(parser, one)
    add("--out", metavar="FOLDER", required=True, help="the run; the same command resumes")
    add("--config", metavar="FILE", help="a config.json to start from random weights")
    add("--tokenizer", metavar="FOLDER", help="folder with a tokenizer; default MODEL's own")
    add("--vocab-size", metavar="N", type=whole, help="train a byte-level BPE of N tokens")
    add("--dry-run", action="store_true", help="check the data and say the memory, train nothing")
    _add_settings(parser)
    add = parser.group("watching").add_argument
    add(
        "--sample", metavar="TEXT", action="append", default=[],
        help="a prompt to answer, greedily, with each held-out loss and at the end (repeatable)",
    )  # fmt: skip
    add(
        "--report-to", metavar="NAME", choices=TRACKERS,
        help=f"send the log's numbers to {', '.join(TRACKERS[:-1])} or {TRACKERS[-1]}",
    )  # fmt: skip
    flags.add_device(parser, hosts=True)
    flags.add_output(parser)


def _add_settings(parser: Parser) -> None:
    """One flag per field of TrainConfig."""
    new, full = DEFAULTS["new weights"], DEFAULTS["full"]
    for one in declarations(TrainConfig).values():
        if one.name in full:
            shown = f"{full[one.name]:g}, of an adapter {DEFAULTS['lora'][one.name]:g}, "
            if DEFAULTS["full, not sft"][one.name] != full[one.name]:
                both = (DEFAULTS[f"{kind}, not sft"][one.name] for kind in ("full", "lora"))
                shown += "of dpo, orpo and grpo {:g} and {:g}, ".format(*both)
            shown += f"and {new[one.name]:g} with --config"
            one = replace(one, default=None, shown_default=shown)
        flags.add_field(parser, one)


def run(args: argparse.Namespace) -> int:
    """Trains; 130 if it was interrupted (and saved)."""
    values = {field.name: getattr(args, field.name) for field in fields(TrainConfig)}
    kind = FULL if args.fine_tune_type == FULL else LORA
    if args.config is not None:
        kind = "new weights"
    elif args.train_mode != SFT:
        kind += ", not sft"
    for name, value in DEFAULTS[kind].items():
        if values[name] is None:
            values[name] = value
    config, data = TrainConfig(**values), DataConfig(**flags.values_of(args, DataConfig))
    _check_flags(args)
    platform.start_jax(args)
    from rooflax.train import job
    from rooflax.train.checks import check_job

    check_job(config)
    out = Path(args.out)
    lock = only_writer(out, out / ".lock", makes_folders=True)
    with platform.ends_with_its_job(), job.told_failures():
        job.check_alike(config.to_json())
        with lock if job.leads() else nullcontext():
            code = _train(args, config, data, out)
        job.by_first("end")  # once the model is saved
        return code


def _train(args: argparse.Namespace, config: TrainConfig, data: DataConfig, out: Path) -> int:
    from rooflax.engine.compilation import enable_persistent_cache
    from rooflax.train import job
    from rooflax.train.checks import check_seq_len
    from rooflax.train.loop import resolved, run_training, write_curves

    enable_persistent_cache()
    if not args.quiet:
        session.say_without_kernels()
    start = _Start(args)
    check_seq_len(config, start.config.max_position)
    corpora: tuple[Corpus | None, ...] = (None, None, None)
    rollouts = llm = sampler = None
    if config.train_mode == GRPO:
        config, rollouts = _rollouts(args, config, data, start, out)
        llm = rollouts.llm
        model = cast("Model", llm.model)
        size = f"{config.batch_size:,} answers"
    else:
        corpora = prepare(args, data, config.seq_len, start, out)
        if args.sample:
            llm = _engine(args, start, max_num_seqs=len(args.sample))
        model = start.model(config.seed) if llm is None else cast("Model", llm.model)
        assert corpora[0] is not None
        config = resolved(config, corpora[0])
        size = f"{config.tokens_per_step:,} tokens; the data has {corpora[0].info.num_tokens:,}"
    if args.sample and llm is not None:
        from rooflax.rl.samples import Samples

        sampler = Samples(llm, args.sample)
    if not args.quiet:
        terminal.say(
            f"{model.num_parameters:,} parameters, {counted(config.num_steps, 'step')} of {size}"
        )
        terminal.say(
            f"learning rate {config.learning_rate:g} after "
            f"{counted(config.warmup_steps or 0, 'step')} of warm-up, "
            f"{config.learning_rate * config.min_lr_ratio:g} at the end; weight decay "
            f"{config.weight_decay:g}"
        )
    if args.dry_run:
        _report_memory(args, model, config, rollouts)
        return 0
    if args.verbose:
        terminal.say(f"settings: {json.dumps(config.to_json())}")
    training, held_out, test = corpora
    tracker = args.report_to if job.leads() else None
    with tracking(tracker, out, config.to_json()) as track:
        result = run_training(
            model, config, training, held_out, out, test=test, rollouts=rollouts,
            progress=False if args.quiet else None, say=None if args.quiet else terminal.say,
            keeps_model=False, sampler=sampler, track=track,
        )  # fmt: skip
    if not job.leads():
        return 130 if result.interrupted else 0
    if rollouts is not None and not args.quiet and rollouts.largest_difference:
        terminal.say(
            f"the log-probabilities of sampler and trainer differed by at most "
            f"{rollouts.largest_difference:.1e}"
        )
    curves = write_curves(out)
    if not args.quiet:
        terminal.say(f"curves: {', '.join(map(str, curves))}")
    if result.interrupted:
        terminal.say(f"interrupted after step {result.step}; the same command resumes it.")
        return 130
    if result.stopped_early and not args.quiet:
        terminal.say(
            f"stopped after step {result.step}: the held-out loss was not below the best for "
            f"{counted(config.patience or 0, 'time')} in a row"
        )
    if result.was_complete:
        terminal.say(
            f"the run in {out} was complete after {result.step:,} steps; nothing was trained. "
            f"To go on, give more steps"
        )
    if result.adapter is None:
        folder = _save(out, start, result, config.save_dtype)
    else:
        folder = _save_adapter(out, start, result)
    _report(args, result, folder)
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    """Rejects what does not go together, before anything is read."""
    if args.config is not None and args.model is not None:
        raise RequestError("--config begins with new weights and MODEL goes on; give one of them.")
    if args.config is not None and args.fine_tune_type != "full":
        raise RequestError("--config begins with new weights, and an adapter is beside a MODEL's.")
    if args.train_mode != SFT:
        if args.config is not None:
            raise RequestError(
                f"--train-mode {args.train_mode} starts from a MODEL; --config makes new weights."
            )
        for name in ("mask_prompt", "assistant_only_loss", "text_field", "glob"):
            if getattr(args, name):
                flag = "--" + name.replace("_", "-")
                raise RequestError(
                    f"{flag} is for --train-mode sft; {args.train_mode} has its own rows."
                )
    if args.train_mode == GRPO and (args.tokenizer or args.truncation != "reject"):
        flag = "--tokenizer" if args.tokenizer else "--truncation"
        raise RequestError(
            f"{flag} is not for --train-mode grpo, which takes prompts as the MODEL does."
        )
    unfit = {
        "--config": args.config, "--tokenizer": args.tokenizer, "--mesh": args.mesh,
        "--layers scan": args.layers == "scan", "--modules-to-save": args.modules_to_save,
        "--target-parameters": args.target_parameters,
        "--fine-tune-type dora": args.fine_tune_type == DORA,
    }  # fmt: skip
    if args.sample and (flag := next((flag for flag, is_set in unfit.items() if is_set), None)):
        raise RequestError(f"--sample does not go with {flag}; drop one of them.")
    if args.report_to is not None:
        tracker_module(args.report_to)
    if args.config is None and args.vocab_size is not None:
        raise RequestError("--vocab-size is for new weights (--config); MODEL has its tokenizer.")
    if args.config is not None and (args.tokenizer is None) == (args.vocab_size is None):
        raise RequestError("--config needs a tokenizer: give --tokenizer or --vocab-size.")
    if args.vocab_size is not None and args.vocab_size < 257:
        raise RequestError(f"--vocab-size is {args.vocab_size}; it must be at least 257.")
    if args.config is not None and (args.revision or args.offline or args.check):
        raise RequestError("--revision, --offline and --check are for MODEL, not for --config.")
    paths = [Path(path) for path in args.data]
    if args.glob is not None and not any(path.is_dir() for path in paths):
        raise RequestError("--glob is for folders, and --data names none.")
    has_lines = any(path.suffix == ".jsonl" or dataset_files(path) for path in paths)
    is_hub = any(path.startswith(HUB) for path in args.data)
    if args.text_field is not None and not has_lines and not is_hub:
        raise RequestError("--text-field is for .jsonl files, and --data names none.")
    if Path(args.out).exists() and not Path(args.out).is_dir():
        raise RequestError(f"--out {args.out} is a file; give the name of a folder.")


class _Start:
    """Start of a training: an architecture, its tokenizer's folder, and perhaps weights."""

    def __init__(self, args: argparse.Namespace):
        from rooflax.embedding import check_generates
        from rooflax.loading.model_info import model_info
        from rooflax.loading.packed import is_packed
        from rooflax.models.registry import read_config

        where = flags.find_arguments(args) if args.config is None else {}
        self.check, self.trains_all = args.check, args.fine_tune_type == "full"
        self.info = None
        self.raw: dict[str, Any] | None = None
        self.tokenizer_folder = Path(args.tokenizer) if args.tokenizer else None
        if args.config is not None:
            self.raw = _read_config_file(Path(args.config))
            self.family, self.config = read_config(self.raw, ignore=args.ignore_config_keys)
            if args.vocab_size is not None and args.vocab_size > self.config.vocab_size:
                raise RequestError(
                    f"--vocab-size is {args.vocab_size}, and the embedding of {args.config} has "
                    f"{self.config.vocab_size} rows; choose at most that."
                )
            return
        self.info = model_info(args.model, **where)
        check_generates(self.info)
        if is_packed(self.info.raw_config) and args.fine_tune_type == "full":
            raise RequestError(
                f"{self.info.name} has quantized weights, which cannot be trained; train the model "
                f"that it was made from, and quantize the result."
            )
        self.family, self.config = self.info.family, self.info.config
        if self.tokenizer_folder is None:
            self.tokenizer_folder = self.info.tokenizer().folder

    def model(self, seed: int) -> Model:
        """The model with float32 weights."""
        from rooflax.loading.load import load
        from rooflax.models.initialize import random_weights
        from rooflax.models.model import build

        if self.info is not None:
            dtype = "float32" if self.trains_all else None
            return load(self.info, dtype=dtype, check=self.check)
        weights = random_weights(self.family, self.config, seed=seed)
        return build(self.family, self.config, weights, None)


def _read_config_file(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(read_regular(path))
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror or error}.") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is not JSON.") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a {type(raw).__name__}; it must be a JSON object.")
    return raw


def prepare(
    args: argparse.Namespace, data: DataConfig, seq_len: int, start: _Start, out: Path
) -> tuple[Corpus, Corpus | None, Corpus | None]:
    """The tokenizer and the token files to train on, held out and to test; made once, a run that
    goes on opens them.

    Raises:
        RequestError: the folder holds a run on other data, or there is no text.
        CheckpointError: what the folder says of its data is damaged.
    """
    from rooflax.train import job
    from rooflax.train.data import open_corpus

    settings = _data_settings(args, data, seq_len) | {"config": start.raw}

    def note() -> None:
        _note_data(args, data, settings, out, lambda: _encode(args, data, seq_len, start, out))

    job.by_first("data", note)
    if args.vocab_size is not None:
        start.tokenizer_folder = out / "tokenizer"
    training, *others = (out / f"{name}.bin" for name in TOKEN_FILES.values())
    held_out, test = (open_corpus(file) if file.stat().st_size else None for file in others)
    return open_corpus(training), held_out, test


def _note_data(
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


def _rollouts(
    args: argparse.Namespace, config: TrainConfig, data: DataConfig, start: _Start, out: Path
) -> tuple[TrainConfig, Rollouts]:
    """The prompts, the reward and the engine of GRPO, and the settings with their length in steps.

    Raises:
        RequestError: as for `prepare`, or of the reward's file.
    """
    from rooflax.rl.rewards import Reward
    from rooflax.rl.rollouts import Rollouts
    from rooflax.train.loop import tokens_at_once

    reward = Reward(config.reward or "")
    training, held_out, test = _split(args, data, _parts(args, data)).values()
    settings = _data_settings(args, data, config.seq_len) | {"config": None}
    _note_data(args, data, settings, out, lambda: _digest(_parts(args, data)))
    config = config.resolved(len(training) * config.num_generations, tokens_at_once())
    _say_sizes(args, "prompt", training, held_out, test)
    length = min(config.seq_len + 1, start.config.max_position)
    llm = _engine(args, start, max_num_seqs=config.batch_size, max_model_len=length)
    return config, Rollouts(llm, training, held_out, test, reward, config)


def _say_sizes(args: argparse.Namespace, noun: str, *parts: list[Any]) -> None:
    if not args.quiet:
        training, held_out, test = parts
        tested = f", {len(test)} to test" if test else ""
        size = counted(len(training), noun)
        terminal.say(f"{size} to train on, {len(held_out)} held out{tested}")


def _engine(args: argparse.Namespace, start: _Start, **settings: Any) -> LLM:
    """The model that training starts from, ready to generate."""
    from rooflax.llm import LLM

    with terminal.status("loading the model", args.quiet):
        return LLM(
            start.info, dtype="float32" if start.trains_all else None, check=args.check,
            generation_config="none", prefix_caching=False,
            options=ExecutionOptions(layers="unrolled"), **settings,
        )  # fmt: skip


def _read_note(note: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(read_regular(note)))
    except (ValueError, TypeError, RecursionError):
        raise CheckpointError(
            f"{note} is damaged, so that the run in {note.parent} cannot go on; give another --out."
        ) from None


def _data_settings(args: argparse.Namespace, data: DataConfig, seq_len: int) -> dict[str, Any]:
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
    if digest and is_there and _digest(_parts(args, data)) != digest:
        return f"what {' '.join(args.data)} held before it changed; give"
    return ""


def _digest(parts: dict[str, list[Any]]) -> str:
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


def _parts(args: argparse.Namespace, data: DataConfig) -> dict[str, list[Any]]:
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


def _split(
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
            f"all {len(held_out)} documents are held out; give more, or less to "
            f"--held-out-fraction."
        )
    if not training:
        raise RequestError(
            f"--data {' '.join(args.data)} holds no text to train on; see --glob and --text-field."
        )
    return parts | {"train": training, "valid": held_out}


def _encode(
    args: argparse.Namespace, data: DataConfig, seq_len: int, start: _Start, out: Path
) -> str:
    """Writes the token files; the digest of the text."""
    parts = _parts(args, data)
    digest = _digest(parts)
    parts = _split(args, data, parts)
    training, held_out, test = parts.values()
    out.mkdir(parents=True, exist_ok=True)
    _say_sizes(args, "document", training, held_out, test)
    if args.vocab_size is not None:
        with terminal.status("training the tokenizer", args.quiet):
            _train_tokenizer(training, args.vocab_size, start, out)
    tokenizer = _tokenizer(start)
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


def _train_tokenizer(rows: list[Row], size: int, start: _Start, out: Path) -> None:
    from rooflax.train.tokenizer_training import save_tokenizer, train_tokenizer

    if not all(isinstance(row, Document) for row in rows):
        raise RequestError("--vocab-size trains a tokenizer on texts, and --data has other rows.")
    tokenizer = train_tokenizer((row.text for row in rows if isinstance(row, Document)), size)
    start.tokenizer_folder = out / "tokenizer"
    longest = start.config.max_position
    save_tokenizer(tokenizer, start.tokenizer_folder, model_max_length=longest)


def _tokenizer(start: _Start) -> Tokenizer:
    """The tokenizer, checked to fit the embedding if it is not the model's own."""
    from rooflax.loading.tokenizer import Tokenizer

    tokenizer = Tokenizer(start.tokenizer_folder or "")
    rows = start.config.vocab_size
    is_own = start.info is not None and start.tokenizer_folder == start.info.folder
    if tokenizer.vocab_size > rows and not is_own:
        raise RequestError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the embedding {rows} rows; "
            f"choose a vocab_size of at least {tokenizer.vocab_size}."
        )
    return tokenizer


def _save(out: Path, start: _Start, result: TrainResult, dtype: str) -> Path:
    """The trained model as a Hugging Face folder, with its tokenizer."""
    from rooflax.loading.save import companions, save_model

    files = companions(start.tokenizer_folder or out, TOKENIZER_FILES)
    tokenizer = _tokenizer(start)
    ends = start.info.generation_defaults(tokenizer).eos_token_ids if start.info else ()
    eos = tokenizer.eos_id
    defaults = {}
    if start.info and start.info.folder and start.info.gguf is None:
        defaults = read_json_object(start.info.folder / "generation_config.json")
    with only_writer(out / "model"):
        save_model(
            out / "model",
            start.family,
            start.config,
            result.model.weights,
            dtype=dtype,
            eos_token_ids=ends or (() if eos is None else (eos,)),
            bos_token_id=tokenizer.bos_id,
            generation=defaults,
            files=files,
        )
    return out / "model"


def _report_memory(
    args: argparse.Namespace, model: Model, config: TrainConfig, rollouts: Rollouts | None
) -> None:
    from rooflax.train.memory import training_memory

    parts = training_memory(model, config, rollouts)
    if args.json:
        terminal.print_json({"bytes": dict(parts), "total": sum(parts.values())})
        return
    for name, num_bytes in [*parts.items(), ("in all", sum(parts.values()))]:
        print(f"{name:<34}{gib(num_bytes):>12}")


def _save_adapter(out: Path, start: _Start, result: TrainResult) -> Path:
    """The trained adapter as PEFT's folder."""
    from rooflax.loading.adapters import save_adapter
    from rooflax.loading.save import replace_folder

    adapter, info, folder = result.adapter, start.info, out / "adapter"
    assert adapter is not None
    assert info is not None
    with only_writer(folder):
        write = partial(
            save_adapter,
            adapters=adapter.matrices,
            config=adapter.config,
            name=info.family,
            model=info.config,
            base=info.name,
            whole=adapter.whole,
        )
        replace_folder(folder, write)
    return folder


def _report(args: argparse.Namespace, result: TrainResult, folder: Path) -> None:
    if args.json:
        terminal.print_json(
            {
                "model": str(folder),
                "steps": result.step,
                "tokens": result.tokens,
                "loss": result.loss,
                "held_out_loss": result.held_out_loss,
                "bits_per_byte": result.bits_per_byte,
                **result.held_out,
                "test_loss": result.test_loss,
                "best_step": result.best_step,
            }
        )
        return
    held_out = ""
    if result.held_out_loss is not None:
        held_out = f", held out {result.held_out_loss:.4f}"
    if result.bits_per_byte is not None:
        held_out += f" ({result.bits_per_byte:.4f} bits/byte)"
    held_out += "".join(f", {name} {mean:.4f}" for name, mean in result.held_out.items())
    test = "" if result.test_loss is None else f", test {result.test_loss:.4f}"
    loss = "" if result.loss is None else f", loss {result.loss:.4f}"
    print(f"{counted(result.step, 'step')}, {result.tokens:,} tokens{loss}{held_out}{test}")
    of_step = "" if result.best_step is None else f", as it was after step {result.best_step:,}"
    what = "model" if result.adapter is None else "adapter"
    print(f"the {what} is in {folder}{of_step}")
