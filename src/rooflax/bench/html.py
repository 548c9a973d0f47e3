"""A document of `rooflax bench --json` as one page: no script, no font, nothing from elsewhere."""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rooflax.bench.plots import Plot, plots, row_labels
from rooflax.bench.report import ablation_cells, ceilings_of, options_of, share_of
from rooflax.errors import RequestError
from rooflax.files import replacing
from rooflax.nn.execution import gib

Result = dict[str, Any]
Columns = tuple[tuple[str, Callable[[Result], str]], ...]
FACTS: Columns = (
    ("model", lambda r: r["model"]),
    ("parameters", lambda r: f"{r['parameters'] / 1e6:,.1f} M"),
    ("format", lambda r: r["format"]),
    ("KV cache type", lambda r: r["precision"]["kv_dtype"]),
    ("batch", lambda r: f"{r['batch']:,}"),
    ("prompt tokens", lambda r: f"{r['prompt_tokens']:,}"),
    ("output tokens", lambda r: f"{r['output_tokens']:,}"),
    ("options", options_of),
    ("deterministic", lambda r: "yes" if r["deterministic"] else "no"),
    ("trials", lambda r: str(len(r["decode_tok_per_s"]["trials"]))),
)
"""Options that ran; those that all rows share are said once above them."""
FIGURES: Columns = (
    ("prefill, tok/s", lambda r: _speed(r["prefill_tok_per_s"])),
    ("of roofline", lambda r: share_of(r, "prefill")),
    ("decode, tok/s", lambda r: _speed(r["decode_tok_per_s"])),
    ("of roofline", lambda r: share_of(r, "decode")),
    ("weights", lambda r: gib(r["weights_bytes"])),
    ("KV cache", lambda r: gib(r["kv_cache_bytes"])),
    ("temporaries", lambda r: gib(r["memory"]["temporary_bytes"])),
    ("peak RSS", lambda r: _size(r["peak_rss_bytes"])),
    ("peak on device", lambda r: _size(r["peak_device_bytes"])),
)
UNKNOWN = "not known"
OPEN_WARNINGS = 12
"""More than this many are folded."""
LONG_CELL = 24
"""Characters from which a cell's text may wrap."""
CSS = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
HEAD = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'">
<style>
{CSS}</style>
"""


def write_page(path: Path, document: dict[str, Any]) -> None:
    """Writes the page of a document; a file that was there is replaced whole.

    Raises:
        RequestError: no page can be made here, or there.
        OSError: the disk is full, or the folder may not be written to.
    """
    check_page(path)
    with replacing(path) as file:
        file.write(page(document).encode("utf-8", errors="replace"))


def check_page(path: Path) -> None:
    """Rejects before anything is measured what `write_page` would reject after it.

    Raises:
        RequestError: the folder does not exist, or matplotlib is not installed.
    """
    if not path.parent.is_dir():
        raise RequestError(f"{path} cannot be written: there is no folder {path.parent}; make it")
    if importlib.util.find_spec("matplotlib") is None:
        raise RequestError(
            "a page has plots, which need matplotlib, and that is not installed: "
            "pip install matplotlib"
        )


def page(document: dict[str, Any]) -> str:
    """The page; the same document always gives the same text."""
    results = document["results"]
    title = "rooflax bench: " + ", ".join(dict.fromkeys(r["model"] for r in results))
    parts = [
        f"{HEAD}<title>{_safe(title)}</title>\n</head>\n<body>",
        f"<h1>{_safe(title)}</h1>\n<p>Ceilings, median reading: {_safe(ceilings_of(document))}</p>",
        "<h2>Results</h2>",
        *_results(results, row_labels(document) if "ablation" in document else None),
        *_warnings(results, row_labels(document)),
    ]
    if "ablation" in document:
        header, *rows = ablation_cells(document["ablation"])
        note = "Medians of decode speed; a step's ratio is to the row above it, or to all options."
        parts += [f"<h2>Ablation</h2>\n<p>{note}</p>", _table(header, rows)]
    parts += ["<h2>Plots</h2>", _plots(plots(document))]
    parts += ["<h2>Environment</h2>", _facts(_environment(document["environment"]))]
    return "\n".join([*parts, "</body>\n</html>\n"])


def _results(results: Sequence[Result], settings: list[str] | None) -> Iterable[str]:
    """Tables of the results: the shared settings once, then one row for each result."""
    facts, figures = (
        [(name, [text(r) for r in results]) for name, text in columns]
        for columns in (FACTS, FIGURES)
    )
    yield _facts((name, cells[0]) for name, cells in facts if len(set(cells)) == 1)
    columns = [] if settings is None else [("setting", settings)]
    columns += [(name, cells) for name, cells in facts if len(set(cells)) > 1]
    columns += [(name, cells) for name, cells in figures if set(cells) != {UNKNOWN}]
    header, cells = zip(*columns, strict=True)
    yield _table(header, zip(*cells, strict=True))


def _warnings(results: Sequence[Result], names: Sequence[str]) -> Iterable[str]:
    texts, count = [], 0
    for name, result in zip(names, results, strict=True):
        lines = list(result["warnings"])
        cost = result.get("deterministic_over_plain")
        if cost:
            lines.append(f"deterministic decode is {cost['ratio']:.3f}x the plain one's speed")
        if lines:
            items = "".join(f"<li>{_safe(line)}</li>" for line in lines)
            texts.append(f"<div>{_safe(name)}</div>\n<ul>{items}</ul>")
            count += len(lines)
    if not texts:
        return []
    opened = " open" if count <= OPEN_WARNINGS else ""
    summary = f"<summary>{count} about {len(texts)} of {len(results)} rows</summary>"
    return ["<h2>Warnings</h2>", f"<details{opened}>{summary}", *texts, "</details>"]


def _plots(drawn: Sequence[Plot]) -> str:
    figures = [
        f'<figure id="{plot.name}">\n<figcaption>{_safe(plot.caption)}</figcaption>\n'
        f"{plot.svg}</figure>"
        for plot in drawn
    ]
    return '<div class="plots">\n' + "\n".join(figures) + "\n</div>"


def _environment(environment: dict[str, Any]) -> Iterable[tuple[str, str]]:
    for name, value in environment.items():
        if name.endswith("_bytes"):
            yield name.removesuffix("_bytes").replace("_", " "), _size(value)
        elif value != "":
            text = UNKNOWN if value is None else str(value)
            yield name.replace("_", " ").replace("mhz", "MHz"), text


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    pairs = (f"<div><dt>{_safe(k)}</dt><dd>{_safe(v)}</dd></div>" for k, v in facts)
    return "<dl>\n" + "\n".join(pairs) + "\n</dl>"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{_safe(name)}</th>" for name in header)
    lines = ["".join(map(_cell, row)) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in [head, *lines])
    return f'<div class="table"><table>\n{body}\n</table></div>'


def _cell(text: str) -> str:
    wide = ' class="wide"' if len(text) > LONG_CELL else ""
    return f"<td{wide}>{_safe(text)}</td>"


def _speed(speed: dict[str, Any]) -> str:
    return f"{speed['mean']:,.1f} ± {speed['std']:,.1f}"


def _size(num_bytes: int | None) -> str:
    return UNKNOWN if num_bytes is None else gib(num_bytes)


def _safe(text: str) -> str:
    return html.escape(text)
