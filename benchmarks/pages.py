"""Pages whose tables a script writes, between markers."""

from __future__ import annotations

from collections.abc import Mapping


def with_blocks(page: str, blocks: Mapping[str, str]) -> str:
    """The page with what is between each pair of markers replaced.

    Raises:
        ValueError: it lacks a marker.
    """
    for name, text in blocks.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"the page lacks {begin.strip()} or {end}")
        page = f"{before}{begin}{text}\n{end}{after}"
    return page
