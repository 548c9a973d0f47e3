"""`rooflax quantize`: writes a checkpoint folder whose matmuls' weights are quantized."""

from __future__ import annotations

import argparse
from pathlib import Path

from rooflax.cli import flags, terminal
from rooflax.cli.parser import Parser
from rooflax.cli.session import open_llm
from rooflax.errors import RequestError
from rooflax.nn.execution import ExecutionOptions

SUMMARY = "save a quantized model; it loads without conversion"


def add_flags(parser: Parser) -> None:
    flags.add_model(parser)
    flags.add_check(parser)
    add = parser.group("what to write").add_argument
    add("-o", "--output", metavar="FOLDER", required=True, help="empty or new folder")
    add("--force", action="store_true", help="overwrite a model in it")
    flags.add_precision(parser, kv=False)
    flags.add_device(parser)
    flags.add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Loads the model quantised and saves it as it lies in memory."""
    if Path(args.output).is_file():
        raise RequestError(f"{args.output} is a file; give the name of a folder.")
    if (Path(args.output) / "config.json").exists() and not args.force:
        raise RequestError(
            f"{args.output} holds a model; give another folder, or replace it with --force."
        )
    llm = open_llm(args, options=ExecutionOptions(layers="unrolled"))
    if not (llm.plan.storage.quantize or llm.plan.storage.prequantized):
        raise RequestError("no format was given: say --quantize int8, or another one.")
    from rooflax.loading.save import save

    dtype = "bfloat16" if llm.plan.storage.keeps_bfloat16 else llm.plan.storage.dtype
    with terminal.status(f"writing {args.output}", args.quiet):
        save(llm.model, args.output, dtype=dtype, files_from=llm.info.folder)
    written = {
        "model": llm.info.name,
        "folder": str(args.output),
        "format": llm.format,
        "weights_bytes": llm.model.weights_bytes,
        "file_bytes": (Path(args.output) / "model.safetensors").stat().st_size,
    }
    if args.json:
        terminal.print_json(written)
    else:
        terminal.write(
            f"{written['folder']}: {written['format']}, {written['file_bytes'] / 2**20:.1f} MiB\n"
        )
    return 0
