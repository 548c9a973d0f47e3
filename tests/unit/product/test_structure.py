"""Few dependencies, no pickle, no remote code, torch and transformers in one place."""

from __future__ import annotations

import ast
import graphlib
import re
import tomllib
from pathlib import Path

from rooflax.models.registry import families
from tests.support.product.snippets import ROOT

SOURCES = sorted((ROOT / "src" / "rooflax").rglob("*.py"))


def test_at_most_twelve_dependencies_each_with_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.split(r"[<>=\[]", line)[0] for line in project["dependencies"]]
    assert len(names) <= 12
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for name in names:
        assert f"| {name} |" in contributing, name


def test_no_pickle_and_no_code_from_checkpoints() -> None:
    forbidden = re.compile(r"^\s*(import pickle|from pickle|import dill|import joblib)|\bexec\(")
    for path in SOURCES:
        for line in path.read_text(encoding="utf-8").splitlines():
            assert not forbidden.search(line), f"{path}: {line}"


def test_families_are_named_in_tables_alone() -> None:
    """Outside rooflax.models, no function asks for a family by its name.

    GGUF files name kinds of tokenizers "gpt2" and "llama", which are no families there.
    """
    for path in SOURCES:
        inside = path.relative_to(ROOT / "src" / "rooflax")
        tokenizers = inside.name in ("gguf_tokenizer.py", "gguf_vocabulary.py")
        if inside.parts[0] not in ("ops", "nn", "engine", "loading"):
            continue
        names = set(families()) - ({"gpt2", "llama"} if tokenizers else set())
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                texts = [n.value for n in ast.walk(function) if isinstance(n, ast.Constant)]
                found = names.intersection(text for text in texts if isinstance(text, str))
                assert not found, f"{inside}, {function.name}: {found}"


def test_torch_and_transformers_are_imported_by_verify_alone() -> None:
    pattern = re.compile(r"^\s*(import|from) (torch|transformers)\b", re.MULTILINE)
    allowed = {Path("cli/verify.py")}
    for path in SOURCES:
        inside = path.relative_to(ROOT / "src" / "rooflax")
        if inside not in allowed:
            assert not pattern.search(path.read_text(encoding="utf-8")), inside


def test_no_files_import_each_other() -> None:
    """Not even within functions or for annotations."""
    names = [".".join(path.relative_to(ROOT / "src").with_suffix("").parts) for path in SOURCES]
    modules = {
        name.removesuffix(".__init__"): path for name, path in zip(names, SOURCES, strict=True)
    }
    graph = {}
    for module, path in modules.items():
        imported = set[str]()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                inner = {f"{node.module}.{alias.name}" for alias in node.names} & modules.keys()
                imported |= inner or {f"{node.module}"}
        graph[module] = imported & modules.keys() - {module}
    graphlib.TopologicalSorter(graph).prepare()  # a CycleError names them
