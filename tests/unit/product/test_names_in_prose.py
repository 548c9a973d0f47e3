"""Names in backticks, in docstrings and comments, are names of something that exists."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.product.snippets import ROOT

PACKAGE = ROOT / "src/rooflax"
NAME = r"[A-Za-z_]\w*"
QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
COMMENT = re.compile(r"(?:^|\s)# (.*)$")
NAMED = re.compile(rf"(--[a-z][a-z0-9-]*|{NAME}(?:\.{NAME})*)(?:\(.*\)|\[.*\]| .*)?")
WORD = re.compile(NAME)
CODE = re.compile(rf"{NAME}|--[a-z][a-z0-9-]*")
FOREIGN = {
    "jax": {"ragged_dot"},
    "transformers": {"apply_chat_template", "render_jinja_template", "to_dict", "_beam_search"},
    "torch": {"state_dict"},
}
"""Names of other projects that no code of ours spells."""


def looks_like_ours(name: str) -> bool:
    """CamelCase, snake_case with an underscore, dotted, or a flag."""
    camel = re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", name) is not None
    return camel or "_" in name.strip("_") or "." in name or name.startswith("--")


class Module(NamedTuple):
    """A module's comments and bare strings, as (line, text), and the names in all else of it."""

    prose: list[tuple[int, str]]
    names: set[str]


def read(source: str) -> Module:
    lines = source.splitlines()
    prose = []
    for node in bare_strings(ast.parse(source)):
        prose.append((node.lineno, node.value))
        for number in range(node.lineno - 1, node.end_lineno):
            lines[number] = ""
    for number, line in enumerate(lines, start=1):
        comment = COMMENT.search(line)
        if comment is not None:
            prose.append((number, comment[1]))
            lines[number - 1] = line[: comment.start()]
    return Module(prose, {*CODE.findall("\n".join(lines))})


def bare_strings(node: ast.AST) -> Iterator[Any]:
    """Strings that are statements: docstrings, and those below attributes and constants."""
    for body in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(node, body, ()) if not isinstance(node, ast.expr) else ():
            if isinstance(child, ast.Expr):
                if isinstance(child.value, ast.Constant) and isinstance(child.value.value, str):
                    yield child.value
            else:
                yield from bare_strings(child)


@cache
def modules() -> dict[Path, Module]:
    return {path: read(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}


@cache
def known() -> frozenset[str]:
    found = {*dir(builtins), "rooflax"}.union(*FOREIGN.values())
    for path, module in modules().items():
        found.update(module.names, path.relative_to(PACKAGE).with_suffix("").parts)
    for path in (ROOT / "csrc").iterdir():
        found.update(WORD.findall(path.read_text(encoding="utf-8")), (path.stem,))
    return frozenset(found)


def is_file(name: str) -> bool:
    return any((folder / name).exists() for folder in (ROOT, PACKAGE))


def exists(parts: list[str]) -> bool:
    """Whether each part is a name, and what stands behind a module's path is one of its names."""
    for size in range(len(parts) - 1, 0, -1):
        module = modules().get((PACKAGE / "/".join(parts[:size])).with_suffix(".py"))
        if module is not None and parts[size] not in module.names:
            return False
    return known().issuperset(parts)


def dead_names() -> list[str]:
    found = []
    for path, module in modules().items():
        for begin, text in module.prose:
            for at in QUOTED.finditer(text):
                quoted, line = at[1], begin + text.count("\n", 0, at.start())
                spelled = NAMED.fullmatch(quoted)
                if spelled is None or not looks_like_ours(spelled[1]) or is_file(quoted):
                    continue
                parts = [spelled[1]] if spelled[1].startswith("--") else spelled[1].split(".")
                if not exists(parts):
                    found.append(f"{path.relative_to(ROOT)}:{line}: `{quoted}`")
    return found


def test_backticked_names_exist():
    assert not dead_names()


@pytest.mark.parametrize(
    ("name", "is_there"),
    [
        ("AsyncLLM", True), ("engine.sequence.Constraint", True), ("--max-tokens", True),
        ("Guide", False), ("engine.sequence.Guide", False), ("engine.sequence.LLM", False),
        ("product_shape", False), ("StreamedModel", False), ("--no-such-flag", False),
    ],
)  # fmt: skip
def test_what_does_not_exist_is_found(name, is_there):
    assert looks_like_ours(name)
    assert exists([name] if name.startswith("--") else name.split(".")) == is_there


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    begins = re.compile(r"\s*(What|Of|Where|That|Which|How)\b")
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in bare_strings(ast.parse(path.read_text(encoding="utf-8"))):
            assert not begins.match(node.value), f"{path}:{node.lineno}: {node.value[:60]}"
