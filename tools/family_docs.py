"""The tables of families and of repositories in docs/models.md, from the registry, the definitions
and the tests; and src/rooflax/models/repositories.json.

python tools/family_docs.py
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from rooflax.models.presets import PRESETS
from rooflax.models.registry import families, family, gguf_families

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
HEAD = """\
| model_type | models | presets | GGUF | rejected | compared with transformers |
| --- | --- | --- | --- | --- | --- |
"""
TABLE = re.compile(re.escape(HEAD.partition("\n")[0]) + r"\n(\|.*\n)+")
TEXT_PARTS = {
    "gemma3": ("gemma3_text",), "gemma4": ("gemma4_text",), "mistral3": ("mistral", "ministral3"),
    "qwen3_5": ("qwen3_5_text",), "qwen3_5_moe": ("qwen3_5_moe_text",),
}  # fmt: skip
"""Families whose vision and audio parts are left out; GGUF files are of their text models."""


def page(text: str) -> str:
    """docs/models.md with the tables as they are now."""
    from tools import repositories

    of_families = HEAD + "".join(map(row, families()))
    for pattern, table in (TABLE, of_families), (repositories.TABLE, repositories.table()):
        text, count = pattern.subn(lambda _, table=table: table, text)
        assert count == 1, "docs/models.md lacks a table"
    return text


def row(name: str) -> str:
    about = " ".join((family(name).__doc__ or "").split())
    models, _, _ = about.partition(": ")
    rejected = re.search(r"Rejected: (.*?)\. Source:", about)
    presets = [p for p, raw in PRESETS.items() if raw["model_type"] == name and "tiny" not in p]
    texts = TEXT_PARTS.get(name, (name,))
    specs = [gguf_families()[text] for text in texts if text in gguf_families()]
    cells = (
        f"`{name}`",
        models,
        ", ".join(presets),
        ", ".join(f"`{spec.architecture}`" for spec in specs) or "no",
        rejected[1] if rejected else "",
        proven(name),
    )
    return "| " + " | ".join(cells) + " |\n"


def proven(name: str) -> str:
    """Tiny checkpoints and published chat templates held to transformers, and published config.json
    files that open."""
    from tests import encoder_cases
    from tests.goldens import NOT_COMPARED, VARIANTS

    variants = VARIANTS | encoder_cases.VARIANTS
    tiny = [v for v, raw in variants.items() if raw["model_type"] == name and v not in NOT_COMPARED]
    data = ROOT / "tests" / "data"
    rows = json.loads((data / "published_configs" / "configs.json").read_text())
    configs = [r for r in rows if r["outcome"] == "opens" and r["config"]["model_type"] == name]
    rows = json.loads((data / "published_templates.json").read_text())["templates"]
    templates = [row for row in rows if name in row["families"]]
    parts = [f"{len(tiny)} tiny checkpoint{plural(tiny)}"] if tiny else ["as its text model"]
    for kind, found in (("config", configs), ("chat template", templates)):
        parts += [f"{len(found)} published {kind}{plural(found)}"] if found else []
    return ", ".join(parts)


def plural(found: list) -> str:
    return "s" * (len(found) != 1)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from tools import repositories

    repositories.FILE.write_text(repositories.document(), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
