"""`rooflax train`: from scratch or from a checkpoint, all weights or LoRA; resumes where it was."""

from __future__ import annotations

import argparse
import json
import shutil
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rooflax.cli import flags, platform, session, terminal
from rooflax.cli.parser import Parser, whole
from rooflax.cli.statistics import counted
from rooflax.cli.train_data import (
    TOKEN_FILES,
    data_settings,
    digest_of,
    note_data,
    parts_of,
    prepare,
    say_sizes,
    split,
)
from rooflax.cli.train_start import Start
from rooflax.errors import RequestError
from rooflax.fields.declaration import declarations
from rooflax.files import only_writer
from rooflax.loading.json_files import read_json_object
from rooflax.nn.execution import ExecutionOptions, gib
from rooflax.train.config import (
    DEFAULTS,
    DORA,
    FULL,
    GRPO,
    LORA,
    SFT,
    DataConfig,
    TrainConfig,
)
from rooflax.train.corpus import (
    HUB,
    dataset_files,
)
from rooflax.train.log import read_log
from rooflax.train.trackers import TENSORBOARD, TRACKERS, tracker_module, tracking

if TYPE_CHECKING:
    from rooflax.llm import LLM
    from rooflax.models.model import Model
    from rooflax.rl.rollouts import Rollouts
    from rooflax.train.data import Corpus
    from rooflax.train.loop import TrainResult

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
    from rooflax.train.checks import check_fits, check_held_out, check_seq_len
    from rooflax.train.loop import resolved, run_training, write_curves

    enable_persistent_cache()
    if not args.quiet:
        session.say_without_kernels()
    start = Start(args)
    check_seq_len(config, start.config.max_position)
    check_fits(start.family, start.config, config)
    corpora: tuple[Corpus | None, ...] = (None, None, None)
    rollouts = llm = sampler = None
    if config.train_mode == GRPO:
        config, rollouts = _rollouts(args, config, data, start, out)
        check_held_out(config, rollouts.has_held_out)
        llm = rollouts.llm
        model = cast("Model", llm.model)
        size = f"{config.batch_size:,} answers"
    else:
        corpora = prepare(args, data, config.seq_len, start, out)
        check_held_out(config, corpora[1] is not None)
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
    if rollouts is not None and not args.quiet:
        _report_differences(out)
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


def _report_differences(out: Path) -> None:
    """Says the largest difference of log-probabilities in the whole log, also before a resume."""
    lines = read_log(out / "log.jsonl")
    found = [line["sampling_difference"] for line in lines if "sampling_difference" in line]
    if found:
        terminal.say(
            f"the log-probabilities of sampler and trainer differed by at most {max(found):.1e}"
        )


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
    _check_out(args.out)


WRITTEN_LATER = ("log.jsonl", "checkpoints", "model", "adapter", "report.html", "curves.png")
"""Names in a run's folder that are written once it has a data.json."""
FOLDERS = ("checkpoints", "best", "model", "adapter", "tokenizer", TENSORBOARD)
FILES = (
    "data.json", "log.jsonl", "report.html", "curves.png", "reference.npy",
    *(f"{name}.bin{end}" for name in TOKEN_FILES.values() for end in ("", ".flags", ".json")),
)  # fmt: skip
"""Names of folders and of files in a run's folder."""


def _check_out(name: str) -> None:
    """Rejects a folder whose files a run would replace, and that holds no run; and one in which
    something else is in the place of a run's files and folders."""
    if not name:
        raise RequestError("--out is empty; give the name of a folder.")
    out = Path(name)
    if out.exists() and not out.is_dir():
        raise RequestError(f"--out {name} is a file; give the name of a folder.")
    others = [file for file in WRITTEN_LATER if (out / file).exists()]
    if others and not (out / "data.json").exists():
        raise RequestError(
            f"--out {name} holds {others[0]}, which is of no run; give a folder of its own."
        )
    for kind, names, is_kind in (
        ("folder", FOLDERS, Path.is_dir),
        ("regular file", FILES, Path.is_file),
    ):
        for path in map(out.joinpath, names):
            if path.exists() and not is_kind(path):
                raise RequestError(
                    f"{path} is no {kind}, and a run has one there; move it away or give another "
                    f"--out."
                )


def _rollouts(
    args: argparse.Namespace, config: TrainConfig, data: DataConfig, start: Start, out: Path
) -> tuple[TrainConfig, Rollouts]:
    """The prompts, the reward and the engine of GRPO, and the settings with their length in steps.

    Raises:
        RequestError: as for `prepare`, or of the reward's file.
    """
    from rooflax.rl.rewards import Reward
    from rooflax.rl.rollouts import Rollouts
    from rooflax.train.loop import tokens_at_once

    reward = Reward(config.reward or "")
    training, held_out, test = split(args, data, parts_of(args, data)).values()
    settings = data_settings(args, data, config.seq_len) | {"config": None}
    note_data(args, data, settings, out, lambda: digest_of(parts_of(args, data)))
    say_sizes(args, data, training, held_out, test)
    length = min(config.seq_len + 1, start.config.max_position)
    llm = _engine(args, start, max_num_seqs=config.batch_size, max_model_len=length)
    num_answers = len(training) * config.num_generations
    config = config.resolved(num_answers, tokens_at_once(config.trains_adapter))
    return config, Rollouts(llm, training, held_out, test, reward, config)


def _engine(args: argparse.Namespace, start: Start, **settings: Any) -> LLM:
    """The model that training starts from, ready to generate."""
    from rooflax.llm import LLM

    with terminal.status("loading the model", args.quiet):
        return LLM(
            start.info, dtype="float32" if start.trains_all else None, check=args.check,
            generation_config="none", prefix_caching=False,
            options=ExecutionOptions(layers="unrolled"), **settings,
        )  # fmt: skip


def _save(out: Path, start: Start, result: TrainResult, dtype: str) -> Path:
    """The trained model as a Hugging Face folder, with its tokenizer."""
    from rooflax.loading.save import companions, save_model

    files = companions(start.tokenizer_folder or out, TOKENIZER_FILES)
    tokenizer = start.tokenizer()
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


def _save_adapter(out: Path, start: Start, result: TrainResult) -> Path:
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

        def fill(new: Path) -> None:
            write(new)
            for other in folder.iterdir() if folder.exists() else ():
                if not (new / other.name).exists() and other.is_file():
                    shutil.copy2(other, new)

        replace_folder(folder, fill)
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
