"""The process that renders chat templates: `python -m rooflax.loading.template_worker`.

A template comes with a checkpoint from a stranger. jinja2's immutable sandbox keeps it from
reaching the interpreter; what it takes in time and memory is the operating system's matter: this
process limits its own memory and processor time, and `template_pool`, its parent, ends it at a
deadline. It reads requests from stdin and writes answers to stdout, each as JSON behind its length
in eight bytes, and ends when stdin does. Of rooflax it imports the
pipes' format only, so that it starts quickly.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, BinaryIO, NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.optimizer import optimize
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from rooflax.loading.frames import read_frame, write_frame

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None

MAX_MEMORY = 256 * 2**20
"""Bytes of address space, the interpreter's own included."""
CPU_SECONDS = 2
"""Beyond the parent's deadline: it ends a worker whose parent is gone."""

_ROLE = "role of a message"  # a filter's name that no template can spell


class _Rejection(jinja2.TemplateError):
    """The template itself called `raise_exception`."""


class _LimitError(Exception):
    """The template makes more than it may."""


class _TemplateNamespace(Namespace):
    # jinja2's signature: `namespace(self=...)` works.
    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

    def parse(self, parser: Any) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _raise_exception(message: Any) -> NoReturn:
    raise _Rejection(str(message)[:500])


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's `tojson`: without escaping HTML, with json.dumps' options."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        loader=jinja2.DictLoader({}),
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _make_dict,
        "namespace": _TemplateNamespace,
    }
    return environment


# Texts that these take are looked for, not written.
_SEARCHES = frozenset(
    ["count", "endswith", "find", "index", "lstrip", "partition", "removeprefix", "removesuffix",
     "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "startswith", "strip"]
)  # fmt: skip
_SEARCH_FILTERS = frozenset(
    ["attr", "groupby", "map", "reject", "rejectattr", "select", "selectattr", "trim", "unique"]
)


class _Marking(NodeTransformer):
    """Writes marks where the template writes special tokens, so that nothing else can.

    A text that the template compares with, searches for or looks up by stays as it is.

    Args:
        marks: what stands for each special token's string.
        roles: for each role of which a special token's string is made, what stands for it.
    """

    def __init__(self, marks: Mapping[str, str], roles: Mapping[str, str]):
        longest_first = sorted(marks, key=len, reverse=True)
        special = re.compile("|".join(map(re.escape, longest_first)))
        self._sub = partial(special.sub, lambda match: marks[match[0]])
        self._roles = roles

    def _marked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._sub(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._marked(item) for item in value)
        if isinstance(value, dict):
            return {key: self._marked(item) for key, item in value.items()}
        return value

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        node.data = self._sub(node.data)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        node.value = self._marked(node.value)
        return node

    def visit_Compare(self, node: nodes.Node) -> nodes.Node:
        return node

    visit_Test = visit_Compare

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        node.node = self.visit(node.node)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        node.value = self.visit(node.value)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        method = node.node.attr if isinstance(node.node, nodes.Getattr) else ""
        if method in _SEARCHES:
            node.node = self.visit(node.node)
            return node
        return self._except_first_argument(node) if method == "replace" else self._visit_all(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        if node.name in _SEARCH_FILTERS:
            node.node = None if node.node is None else self.visit(node.node)
            return node
        return (
            self._except_first_argument(node) if node.name == "replace" else self._visit_all(node)
        )

    def _except_first_argument(self, node: Any) -> nodes.Node:
        first, node.args = node.args[:1], node.args[1:]
        self.generic_visit(node)
        node.args = [*first, *node.args]
        return node

    def _visit_all(self, node: nodes.Node) -> nodes.Node:
        self.generic_visit(node)
        return self._with_roles(node)

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        left, right = cast(Any, node.left), cast(Any, node.right)
        if isinstance(left, nodes.Add) and _is_text(left.right) and _is_text(right):
            text = cast(Any, left.right).value + right.value
            node.left, node.right = left.left, nodes.Const(text, lineno=node.lineno)
            return self.visit_Add(node)
        return self._visit_all(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        merged: list[Any] = []
        for part in cast("list[Any]", node.nodes):
            if merged and _is_text(merged[-1]) and _is_text(part):
                text = merged.pop().value + part.value
                part = nodes.Const(text, lineno=node.lineno)
            merged.append(part)
        node.nodes = merged
        return self._visit_all(node)

    visit_Output = _visit_all

    def _with_roles(self, node: Any) -> nodes.Node:
        if self._roles and isinstance(node, nodes.Add):
            node.left, node.right = self._role(node.left), self._role(node.right)
        elif self._roles and isinstance(node, (nodes.Concat, nodes.Output)):
            node.nodes = [self._role(part) for part in node.nodes]
        return node

    def _role(self, node: Any) -> Any:
        if isinstance(node, nodes.Name):
            is_role = "role" in node.name
        elif isinstance(node, nodes.Getattr):
            is_role = node.attr == "role"
        else:
            is_role = isinstance(node, nodes.Getitem) and getattr(node.arg, "value", 0) == "role"
        if not is_role:
            return node
        return nodes.Filter(node, _ROLE, [], [], None, None, lineno=node.lineno)


def _is_text(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, str)


def _mark_role(roles: Mapping[str, str], value: Any) -> Any:
    return roles.get(value, value) if isinstance(value, str) else value


# Few, because compiled templates stay in the memory that the next one has.
@lru_cache(maxsize=4)
def _compiled(
    source: str, marks: tuple[tuple[str, str], ...], roles: tuple[tuple[str, str], ...]
) -> jinja2.Template:
    environment = _environment()
    tree = environment.parse(source)
    if marks:
        environment.filters[_ROLE] = partial(_mark_role, dict(roles))
        # First what is constant becomes one constant: special tokens may be put together.
        tree = _Marking(dict(marks), dict(roles)).visit(optimize(tree, environment))
    code: Any = environment.compile(tree)
    return environment.template_class.from_code(environment, code, environment.globals)


def _render(request: Mapping[str, Any]) -> str:
    marks, roles = (tuple(request[name].items()) for name in ("marks", "roles"))
    template = _compiled(request["template"], marks, roles)
    pieces, length = [], 0
    for piece in template.generate(**request["variables"]):
        length += len(piece)
        if length > request["max_characters"]:
            raise _LimitError(f"it writes more than {request['max_characters']} characters")
        pieces.append(piece)
    return "".join(pieces)


def _names(source: str) -> str:
    """Variables that a template reads, and its constant texts, as JSON."""
    tree = _environment().parse(source)
    texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return json.dumps([sorted(jinja2.meta.find_undeclared_variables(tree)), sorted(texts)])


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The rendered text, or what is wrong: `{"text"}`, or `{"error", "reason"}`. Without
    `variables` what the template reads.

    Errors are "rejection", "limit", "invalid", "forbidden" and "failure"; reasons are one line.

    Raises:
        MemoryError: there is not enough of it.
    """
    try:
        text = _render(request) if "variables" in request else _names(request["template"])
        text.encode()
        return {"text": text}
    except _Rejection as error:
        return _error("rejection", error)
    except _LimitError as error:
        return _error("limit", error)
    except MemoryError:
        raise
    except RecursionError:
        return _error("limit", "it nests without end")
    except OverflowError as error:  # a range or a number beyond what there may be
        return _error("limit", f"it counts too far: {error}")
    except UnicodeEncodeError:
        return _error("limit", "it writes a lone surrogate, which is no Unicode text")
    except jinja2.TemplateSyntaxError as error:
        return _error("invalid", f"(line {error.lineno}): {error.message}")
    except SecurityError as error:
        return _error("forbidden", error)
    except jinja2.TemplateNotFound as error:
        return _error("forbidden", f"it asks for another template, {error.message}")
    except SyntaxError:  # of the Python code that jinja2 makes, for example too many nested blocks
        return _error("invalid", "(it nests too deeply)")
    except Exception as error:
        return _error("failure", str(error) or type(error).__name__)


def _error(kind: str, reason: object) -> dict[str, Any]:
    text = str(reason)[:2000].encode("utf-8", "backslashreplace").decode()
    return {"error": kind, "reason": " ".join(text.split())[:500]}


# What is left of a worker's memory is not the next template's matter: it is the last answer.
_OUT_OF_MEMORY = json.dumps(
    _error("limit", "it needs more than 256 MiB of memory") | {"last": True}
).encode()


def _limit_memory() -> None:
    if resource is None:
        return
    for kind, most in ((resource.RLIMIT_AS, MAX_MEMORY), (resource.RLIMIT_CORE, 0)):
        _limit(kind, most)
    _limit(resource.RLIMIT_FSIZE, 0)


def _limit_time() -> None:
    if resource is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + CPU_SECONDS)


def _limit(kind: int, most: int) -> None:
    if resource is None:
        return
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    try:
        resource.setrlimit(kind, (most, hard))
    except (OSError, ValueError):  # macOS rejects a limit of memory
        return


def _serve(source: BinaryIO, sink: BinaryIO) -> None:
    while True:
        try:
            data = read_frame(source)
        except EOFError:
            return
        _limit_time()
        try:
            reply = json.dumps(answer(json.loads(data)), ensure_ascii=False).encode()
        except MemoryError:
            reply = _OUT_OF_MEMORY
        write_frame(sink, reply)


def main() -> None:
    """Says that it is there, then answers until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's matter
    datetime.now().strftime("%c")  # time zones are read before files are out of reach
    _limit_memory()
    write_frame(sys.stdout.buffer, b"{}")
    _serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
