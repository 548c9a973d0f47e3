"""The Python API as one Markdown page, from signatures and docstrings.

python tools/api_docs.py > docs/api.md
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
from typing import Any

import rooflax

HEAD = """\
# Python API

Made by `python tools/api_docs.py > docs/api.md`; a test compares it with the docstrings.
Names are imported from `rooflax`.
"""
GROUPS = {
    "Generating": ("LLM", "AsyncLLM", "SamplingParams", "Completion", "Delta"),
    "Options": ("ExecutionOptions", "Precision"),
    "Models": (
        "model_info", "ModelInfo", "make_plan", "Plan", "Tokenizer", "load", "from_state_dict",
        "save", "Model",
    ),
    "Steps for a loop of your own": ("new_cache", "prefill", "decode_step"),
    "Errors": (
        "RooflaxError", "UnsupportedModelError", "CheckpointError", "RequestError", "QueueFull",
        "EngineError",
    ),
}  # fmt: skip
SECTIONS = re.compile(r"^(Args|Attributes|Raises|Returns|Source):(.*)$", re.MULTILINE)


def page() -> str:
    parts = [HEAD]
    for title, names in GROUPS.items():
        parts.append(f"## {title}\n")
        parts += [described(name, getattr(rooflax, name)) for name in names]
    return "\n".join(parts)


def described(name: str, found: Any) -> str:
    lines = [f"### `{name}`\n"]
    is_error = inspect.isclass(found) and issubclass(found, Exception)
    if not is_error:
        lines.append(f"```\n{signature(name, found)}\n```\n")
    lines.append(text_of(found))
    if inspect.isclass(found) and not is_error:
        for key, member in vars(found).items():
            if key.startswith("_") or not inspect.getdoc(member):
                continue
            function = getattr(member, "__func__", member)
            if inspect.isfunction(function):
                lines.append(f"#### `{name}.{signature(key, function, method=True)}`\n")
                lines.append(text_of(function))
            elif isinstance(member, property):
                lines.append(f"#### `{name}.{key}`\n")
                lines.append(text_of(member))
    return "\n".join(lines)


def signature(name: str, found: Any, *, method: bool = False) -> str:
    """The call, without types; a dataclass's fields with their defaults."""
    if dataclasses.is_dataclass(found):
        given = [f"{f.name}{default_of(f)}" for f in dataclasses.fields(found) if f.init]
    else:
        parameters = list(inspect.signature(found).parameters.values())
        parameters = parameters[1:] if method else parameters
        given, is_keyword = [], False
        for parameter in parameters:
            if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
                given.append("*")
                is_keyword = True
            shown = parameter.replace(annotation=parameter.empty)
            if callable(parameter.default) and parameter.default is not parameter.empty:
                shown = shown.replace(default=...)
            given.append(str(shown).replace(" = ", "=").replace("Ellipsis", "..."))
    call = f"{name}({', '.join(given)})"
    if method or len(call) <= 88:
        return call
    indent = {"initial_indent": "    ", "subsequent_indent": "    "}
    return f"{name}(\n{textwrap.fill(', '.join(given), 84, **indent)}\n)"


def default_of(found: dataclasses.Field) -> str:
    if found.default is not dataclasses.MISSING:
        return f"={found.default!r}"
    return "={}" if found.default_factory is not dataclasses.MISSING else ""


def text_of(found: Any) -> str:
    """A docstring as Markdown: sections become lists."""
    doc = inspect.getdoc(found) or ""
    parts = SECTIONS.split(doc)
    lines = [parts[0].strip(), ""]
    for title, rest, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        lines.append(f"**{title}**{': ' + rest.strip() if rest.strip() else ''}\n")
        items: list[str] = []
        for line in textwrap.dedent(body.strip("\n")).splitlines():
            if line.startswith(" ") and items:
                items[-1] += " " + line.strip()
            elif line.strip():
                items.append(line.strip())
        is_list = title in ("Args", "Attributes", "Raises")
        lines += [f"- {item}" if is_list else item for item in items]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
