"""The fields of requests as Markdown: `python tools/server_docs.py > docs/server-fields.md`."""

from __future__ import annotations

import sys

from rooflax.server.app import POSTS
from rooflax.server.fields import Field, FieldTable

HEAD = """\
# The server's fields

Made by `python tools/server_docs.py > docs/server-fields.md`, from the tables that check
requests. In chat, completions, embeddings and rerank a field not listed is an error that names
it, unless `--unknown-fields report`; responses and messages pass it over and name it in the
header `x-rooflax-ignored`. null is the same as leaving a field out.
"""


def page() -> str:
    """The page."""
    return "\n".join([HEAD, *(_section(path, table) for path, (_, table) in POSTS.items())])


def _section(path: str, table: FieldTable) -> str:
    parts = [f"## POST {path}\n", "| field | what it does |", "| --- | --- |"]
    of = {"honoured": [], "label": [], "rejected": []}
    for field in table.fields.values():
        of[field.policy].append(field)
    parts += [f"| `{field.name}` | {_says(field)} |" for field in of["honoured"]]
    if of["label"]:
        names = ", ".join(f"`{field.name}`" for field in of["label"])
        parts.append(f"\nAccepted, and changing nothing: {names}.")
    if of["rejected"]:
        reasons = ", ".join(f"`{field.name}` ({field.text})" for field in of["rejected"])
        parts.append(f"\nRejected: {reasons}.")
    return "\n".join([*parts, ""])


def _says(field: Field) -> str:
    inner = field.type[0] if isinstance(field.type, list) else field.type
    if not isinstance(inner, FieldTable):
        return field.text
    names = [f"`{each.name}`" for each in inner.fields.values() if each.policy == "honoured"]
    return f"{field.text}: {', '.join(names)}"


if __name__ == "__main__":
    sys.stdout.write(page())
