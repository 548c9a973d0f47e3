"""`rooflax models`: what is downloaded, embedded, and known by name."""

from __future__ import annotations

import argparse
from typing import Any

from rooflax.cli import flags, terminal
from rooflax.cli.parser import Parser
from rooflax.errors import RooflaxError
from rooflax.loading.json_files import read_config_json
from rooflax.models.presets import EMBEDDED, PREFIX, PRESETS
from rooflax.nn.execution import gib

TAKES_MODEL = False


def add_flags(parser: Parser) -> None:
    parser.group("what to do").add_argument(
        "--remove", metavar="ID", help="remove a downloaded model, all revisions of it"
    )
    flags.add_output(parser, progress=False)


def run(args: argparse.Namespace) -> int:
    """Lists, or removes one and says what became free."""
    from rooflax.loading import hub

    if args.remove is not None:
        freed = hub.remove(args.remove)
        if args.json:
            terminal.print_json({"removed": args.remove, "freed_bytes": freed})
        else:
            print(f"removed {args.remove}, {gib(freed)} free again")
        return 0
    listing = document()
    if args.json:
        terminal.print_json(listing)
    else:
        _print(listing)
    return 0


def document() -> dict[str, Any]:
    """The three lists, as `--json` prints them."""
    from rooflax.loading.hub import cached_models

    return {
        "downloaded": [
            {"model": m.repo_id, "bytes": m.size_on_disk, "revisions": len(m.revisions)}
            for m in cached_models()
        ],
        "embedded": embedded(),
        "presets": [
            {"model": f"{PREFIX}{name}", **architecture(raw)} for name, raw in PRESETS.items()
        ],
    }


def embedded() -> list[dict[str, Any]]:
    """The embedded models that this installation has whole."""
    from rooflax.loading.model_info import embedded_folder

    rows = []
    for name in EMBEDDED:
        try:
            folder = embedded_folder(name)
            raw = read_config_json(folder)
        except RooflaxError:
            continue
        size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        rows.append({"model": name, "bytes": size, **architecture(raw)})
    return rows


def architecture(raw: dict[str, Any]) -> dict[str, Any]:
    """The family and the number of parameters of a config.json."""
    from rooflax.models.registry import read_config

    name, config = read_config(raw)
    return {"family": name, "parameters": config.num_parameters}


def _print(listing: dict[str, Any]) -> None:
    print("downloaded")
    rows = [(m["model"], gib(m["bytes"])) for m in listing["downloaded"]]
    _print_rows(rows or [("none", "")], right=(1,))
    print("embedded (when no MODEL is named; the second one for chat)")
    rows = [
        (m["model"], m["family"], gib(m["bytes"]), f"{billions(m['parameters'])} parameters")
        for m in listing["embedded"]
    ]
    _print_rows(rows or [("none in this installation", "", "", "")])
    print("presets (random weights, for measuring)")
    rows = [
        (m["model"], m["family"], f"{billions(m['parameters'])} parameters")
        for m in sorted(listing["presets"], key=lambda m: (m["family"], m["parameters"]))
    ]
    _print_rows(rows, right=(2,))


def _print_rows(rows: list[tuple[str, ...]], right: tuple[int, ...] = ()) -> None:
    for line in terminal.table(rows, right=right):
        print(f"  {line}")


def billions(count: int) -> str:
    """A number of parameters for people: "7.62 B", "124.4 M", "28.8 k"."""
    if count >= 1e9:
        return f"{count / 1e9:.2f} B"
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count / 1e3:.1f} k"
