"""`rooflax quantize`: writes a checkpoint folder whose matmuls' weights are quantized, or a GGUF
file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooflax.cli import flags, platform, terminal
from rooflax.cli.parser import Parser
from rooflax.cli.session import find_plan, open_llm
from rooflax.engine.sampling_params import SamplingParams
from rooflax.errors import RequestError
from rooflax.files import only_writer
from rooflax.nn.execution import ExecutionOptions
from rooflax.signals import cleanup_on_sigterm

if TYPE_CHECKING:
    from rooflax.llm import LLM
    from rooflax.loading.plan import Plan
    from rooflax.models.model import Model

OWN_TEXTS, OWN_TOKENS = 16, 512
"""Number of texts that a model writes to be calibrated with, and their tokens."""


def add_flags(parser: Parser) -> None:
    flags.add_model(parser)
    flags.add_check(parser)
    add = parser.group("what to write").add_argument
    add(
        "-o", "--output", metavar="PATH", required=True, help="empty or new folder, or a .gguf file"
    )
    add(
        "--gguf", metavar="TYPE",
        help="a GGUF file for llama.cpp in place of a folder: F32, BF16, Q8_0, Q4_0, Q6_K, or "
        "Q4_K_M, llama.cpp's mixture of Q4_K and Q6_K",
    )  # fmt: skip
    add(
        "--calibrate", metavar="TEXT",
        help="with -q int4: what the model computes on this text (a file of some thousand tokens) "
        "says how its weights are rounded; auto is text that the model writes itself",
    )  # fmt: skip
    add("--force", action="store_true", help="overwrite a model in it, or the file")
    flags.add_precision(parser, kv=False)
    flags.add_device(parser)
    flags.add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Loads the model quantised and saves it as it lies in memory, or writes its GGUF file."""
    with cleanup_on_sigterm(), only_writer(args.output, makes_folders=True):
        written = _write_folder(args) if args.gguf is None else _write_gguf(args)
    if args.json:
        terminal.print_json(written)
    else:
        path = written.get("folder", written.get("file"))
        size = written["file_bytes"] / 2**20
        terminal.write(f"{path}: {written['format']}, {size:.1f} MiB\n")
    return 0


def _write_folder(args: argparse.Namespace) -> dict[str, Any]:
    check_output(args)
    options = ExecutionOptions(layers="unrolled")
    if args.calibrate is None:
        llm = open_llm(args, options=options)
        plan, model = llm.plan, llm.model
    else:
        plan, model = _calibrated(args, options)
    if not (plan.storage.quantize or plan.storage.prequantized):
        raise RequestError("no format was given: say --quantize int8, or another one.")
    from rooflax.loading.save import save

    dtype = "bfloat16" if plan.storage.keeps_bfloat16 else plan.storage.dtype
    with terminal.status(f"writing {args.output}", args.quiet):
        save(model, args.output, dtype=dtype, files_from=plan.info.folder)
    return {
        "model": plan.info.name,
        "folder": str(args.output),
        "format": plan.storage.format,
        "weights_bytes": model.weights_bytes,
        "file_bytes": (Path(args.output) / "model.safetensors").stat().st_size,
    }


def check_output(args: argparse.Namespace, *of_folders: str) -> None:
    """
    Args:
        of_folders: flags that say nothing of a GGUF file.

    Raises:
        RequestError: the output's name is not one of a folder, or with --gguf of such a file; or it
            is taken.
    """
    path = Path(args.output)
    if args.gguf is None:
        if path.suffix == ".gguf":
            raise RequestError(f"{path} is the name of a GGUF file; say its type with --gguf.")
        if path.is_file():
            raise RequestError(f"{path} is a file; give the name of a folder.")
        if (path / "config.json").exists() and not args.force:
            raise RequestError(
                f"{path} holds a model; give another folder, or replace it with --force."
            )
        return
    for name in of_folders:
        if name in args.stated:
            raise RequestError(
                f"--{name} is given beside --gguf, which says the type; leave it out."
            )
    if path.is_dir() or path.suffix != ".gguf":
        raise RequestError(f"{path} must be the name of a file that ends in .gguf.")
    if path.exists() and not args.force:
        raise RequestError(f"{path} exists; give another name, or replace it with --force.")


def _calibrated(args: argparse.Namespace, options: ExecutionOptions) -> tuple[Plan, Model]:
    text = None if args.calibrate == "auto" else terminal.read_file(args.calibrate)
    plan = find_plan(args, options=options)
    from rooflax.llm import LLM
    from rooflax.loading.calibration import calibrate, check_format

    check_format(plan)
    if text is None:
        with terminal.status(f"{plan.info.name} writes the text to calibrate with", args.quiet):
            ids = _own_text(LLM(plan.info, max_model_len=plan.max_model_len))
    else:
        ids = plan.info.tokenizer().encode(text)
    layers = plan.info.config.num_layers
    with terminal.statuses(args.quiet) as say:
        say("calibrating the first layer")

        def report(layer: int, error: float) -> None:
            say(f"calibrated {layer + 1} of {layers} layers: {error:.0%} of rounding's error")

        return plan, calibrate(plan, ids, report)


def _own_text(llm: LLM) -> list[int]:
    """Tokens that a model writes when nothing is asked."""
    length = min(OWN_TOKENS, llm.max_model_len)
    first = llm.tokenizer.bos_id if llm.tokenizer.bos_id is not None else llm.tokenizer.eos_id
    start = [0 if first is None else first]
    options = {"temperature": 1.0, "ignore_eos": True, "max_tokens": length - 1}
    prompts = [start] * OWN_TEXTS
    each = [SamplingParams(seed=i, **options) for i in range(OWN_TEXTS)]
    written = llm.generate(prompts, each)
    return [token for one in written for token in (*start, *one.tokens)]


def _write_gguf(args: argparse.Namespace) -> dict[str, Any]:
    path = Path(args.output)
    check_output(args, "quantize", "dtype", "calibrate")
    where = flags.find_arguments(args)
    with terminal.status("starting JAX", args.quiet):
        platform.start_jax(args)
        from rooflax.loading.gguf_save import check_file_type, save_gguf
        from rooflax.loading.model_info import model_info

    args.gguf = check_file_type(args.gguf)
    info = model_info(args.model, **where)
    with terminal.status(f"writing {path}", args.quiet):
        notes = save_gguf(info, path, args.gguf, check=args.check)
    for note in [] if args.quiet else notes:
        terminal.say(f"{path.name}: {note}.")
    return {
        "model": info.name,
        "file": str(path),
        "format": args.gguf,
        "file_bytes": path.stat().st_size,
        "differences": notes,
    }
