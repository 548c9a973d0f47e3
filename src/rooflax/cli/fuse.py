"""`rooflax fuse`: merges a LoRA adapter into its model, as a checkpoint folder or a GGUF file; or
writes the adapter alone as llama.cpp's GGUF file.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from rooflax.cli import flags, platform, terminal
from rooflax.cli.parser import Parser
from rooflax.cli.quantize import check_output
from rooflax.errors import RequestError
from rooflax.files import only_writer
from rooflax.signals import cleanup_on_sigterm

DTYPES = ("float32", "bfloat16", "float16")


def add_flags(parser: Parser) -> None:
    flags.add_model(parser)
    flags.add_check(parser)
    flags.add_lora(parser)
    add = parser.group("what to write").add_argument
    add(
        "-o", "--output", metavar="PATH", required=True, help="empty or new folder, or a .gguf file"
    )
    add("--gguf", metavar="TYPE", help="a GGUF file, of the types of rooflax quantize --gguf")
    add(
        "-q", "--quantize", metavar="FORMAT",
        help="format of weights in the folder: int8, int4, ...; default none",
    )  # fmt: skip
    add(
        "--dtype", metavar="TYPE", default="float32", choices=DTYPES,
        help="dtype of the folder: float32, bfloat16 or float16; default float32, in which the "
        "sum is exact",
    )  # fmt: skip
    add(
        "--adapter-only", action="store_true",
        help="merge nothing: the adapter alone as a GGUF file for llama.cpp's --lora",
    )  # fmt: skip
    add("--force", action="store_true", help="overwrite a model in it, or the file")
    flags.add_device(parser)
    flags.add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Merges, and writes the whole result or nothing."""
    _check_flags(args)
    where = flags.find_arguments(args)
    with terminal.status("starting JAX", args.quiet):
        platform.start_jax(args)
        from rooflax.loading.adapters import fused, open_adapter
        from rooflax.loading.model_info import model_info

    info = model_info(args.model, **where)
    adapter = open_adapter(args.lora, info, merges=not args.adapter_only)
    if adapter.config.warning is not None and not args.quiet:
        terminal.say(adapter.config.warning)
    if args.adapter_only:
        write = partial(_write_adapter, args, info, adapter)
    elif args.gguf is None:
        write = partial(_write_folder, args, fused(info, adapter))
    else:
        write = partial(_write_gguf, args, fused(info, adapter))
    with (
        cleanup_on_sigterm(),
        only_writer(args.output, makes_folders=True),
        terminal.status(f"writing {args.output}", args.quiet),
    ):
        notes = write()
    path = Path(args.output)
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    written = {
        "model": info.name,
        "lora": args.lora,
        "output": args.output,
        "format": args.gguf or args.quantize or args.dtype,
        "file_bytes": sum(file.stat().st_size for file in files),
    }
    if args.json:
        terminal.print_json(written)
        return 0
    for note in [] if args.quiet else notes:
        terminal.say(f"{path.name}: {note}.")
    size = written["file_bytes"] / 2**20
    terminal.write(f"{args.output}: {written['format']}, {size:.1f} MiB\n")
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    """
    Raises:
        RequestError: flags that contradict each other, or a name that is taken.
    """
    if args.lora is None:
        raise RequestError("--lora names the adapter to merge; give its folder.")
    if args.gguf is None and args.adapter_only:
        raise RequestError("--adapter-only writes a GGUF file; say its type with --gguf.")
    check_output(args, "quantize", "dtype")


def _write_folder(args: argparse.Namespace, merged: Any) -> list[str]:
    from rooflax.loading.load import load
    from rooflax.loading.save import save

    model = load(merged, dtype="float32", quantize=args.quantize, check=args.check)
    save(model, args.output, dtype=args.dtype, files_from=merged.folder)
    return []


def _write_gguf(args: argparse.Namespace, merged: Any) -> list[str]:
    from rooflax.loading.gguf_save import save_gguf

    return save_gguf(merged, args.output, args.gguf, check=args.check)


def _write_adapter(args: argparse.Namespace, info: Any, adapter: Any) -> list[str]:
    from rooflax.loading.gguf_adapter_save import save_gguf_adapter

    save_gguf_adapter(info, adapter, args.output, args.gguf)
    return []
