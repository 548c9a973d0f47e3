"""A hook of mkdocs: README.md is the home page, and links to what is no page become names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
NOT_RUN = re.compile(r"^# not run: .*\n|[ ]*#? ?\(not run\)$", re.MULTILINE)
"""Marks for the tests, which run the other blocks and lines."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Adds the home page, whose links begin in docs/."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    home = LINK.sub(lambda m: f"{m[1]}[{m[2]}]({m[3].removeprefix('docs/')})", text)
    files.append(File.generated(config, "index.md", content=home))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any, **_: Any) -> str:
    """Rewrites links that leave docs/."""
    here = Path(config.docs_dir, page.file.src_uri).parent

    def rewritten(found: re.Match[str]) -> str:
        target = found[3].partition("#")[0]
        if not target or "://" in target or target.startswith("mailto:"):
            return found[0]
        path = (here / target).resolve()
        if not path.exists():  # the home page's own
            path = (ROOT / target).resolve()
        if path.suffix == ".json" or not path.is_relative_to(config.docs_dir):
            return found[2] if "`" in found[2] else f"{found[2]} (`{path.relative_to(ROOT)}`)"
        return found[0]

    return LINK.sub(rewritten, NOT_RUN.sub("", markdown))
