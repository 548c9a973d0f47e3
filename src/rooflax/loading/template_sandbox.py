"""Chat templates in jinja2's sandbox, with a bound on their time, their memory and their output.

A template comes with a checkpoint from a stranger. jinja2's immutable sandbox keeps it from
reaching the interpreter; this module also keeps it from running or growing without end, without
threads, signals or clocks: the same template and messages are always refused or always rendered.

How: the parsed template is rewritten so that every loop, comparison, concatenation, literal and
slice passes through a `Budget`, and every filter, test, call and growing operator is wrapped. A
value is measured before something longer is made of it. It knows nothing of chats or tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from string import Formatter
from types import CodeType
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

MAX_TEMPLATE_CHARACTERS = 131_072
MAX_DEPTH = 64
MAX_INT_BITS = 8_192
MAX_WIDTH = 10_000
# About a second of work, and room for templates that handle each character a few times.
BASE_STEPS = 1_000_000
BASE_SIZE = 1_000_000
PER_INPUT_CHARACTER = 8
CHARACTERS_PER_STEP = 32


class TemplateLimitError(Exception):
    """A template wants more time, memory or depth than there is."""


class Budget:
    """How much a rendering may still do, and how large any one value of it may be.

    A step is about a microsecond. Sizes count characters and elements, nested ones included, and
    shared ones as often as they occur, because that is what printing or comparing them costs.

    Args:
        input_size: size of what is rendered; budget and size limit grow with it.
    """

    def __init__(self, input_size: int = 0):
        self.steps = BASE_STEPS + PER_INPUT_CHARACTER * input_size
        self.max_size = BASE_SIZE + PER_INPUT_CHARACTER * input_size
        # In the immutable sandbox a container never changes, so its size and depth can be kept;
        # holding the container keeps its id from being used again.
        self._known: dict[int, tuple[Any, int, int]] = {}

    def charge(self, steps: int) -> None:
        """Takes steps; TemplateLimitError when none are left."""
        self.steps -= steps
        if self.steps < 0:
            raise TemplateLimitError("it runs for too long")

    def require(self, size: int) -> None:
        """TemplateLimitError if a value of this size is too large; charges for making it."""
        if size > self.max_size:
            raise TemplateLimitError("it makes a text or a list that is too long")
        self.charge(1 + max(0, size) // CHARACTERS_PER_STEP)

    def measure(self, value: Any) -> int:
        """Size of a value, TemplateLimitError if it is too large or nested too deeply."""
        return self._weigh(value, 0)[0]

    def _weigh(self, value: Any, depth: int) -> tuple[int, int]:
        if isinstance(value, str):
            return 1 + len(value), 0
        if isinstance(value, int):
            if value.bit_length() > MAX_INT_BITS:
                raise TemplateLimitError("it makes a number that is too large")
            return 1, 0
        if isinstance(value, _CONTAINERS):
            known = self._known.get(id(value))
            return known[1:] if known else self._weigh_container(value, depth)
        return (max(1, len(value)) if isinstance(value, range) else 1), 0

    def _weigh_container(self, value: Any, depth: int) -> tuple[int, int]:
        size, levels = 1, 1
        for item in _contents(value):
            item_size, item_levels = self._weigh(item, depth + 1)
            size, levels = size + item_size, max(levels, item_levels + 1)
            if depth + levels > MAX_DEPTH:
                raise TemplateLimitError(f"it nests values more than {MAX_DEPTH} deep")
            if size > self.max_size:
                raise TemplateLimitError("it makes a text or a list that is too long")
        if not isinstance(value, _VIEWS):
            self._known[id(value)] = (value, size, levels)
        return size, levels

    def consume(self, *values: Any) -> int:
        """Charges for an operation that looks at all of these values; gives their size."""
        size = sum(self.measure(value) for value in values)
        self.charge(1 + size // CHARACTERS_PER_STEP)
        return size

    def checked(self, value: Any) -> Any:
        """A value just made, charged and measured; what is lazy is made now, within the limits."""
        if isinstance(value, str):
            self.require(len(value))
        elif isinstance(value, _CONTAINERS) and not isinstance(value, (_VIEWS, _Items)):
            self.charge(1 + len(value))
            self.measure(value)
        elif isinstance(value, Iterator) and not isinstance(value, _Items):
            value = _Items(self._take(value))
            self.measure(value)
        elif isinstance(value, int):
            self.measure(value)
        return value

    def _take(self, iterator: Iterator[Any]) -> list[Any]:
        items = []
        for item in iterator:
            self.charge(1)
            items.append(item)
        return items


class _Items:
    """What a lazy filter gives: true, without length, used up by one pass, like a generator."""

    def __init__(self, items: list[Any]):
        self.items = items
        self._iterator = iter(items)

    def __iter__(self) -> _Items:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)


_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS = (list, tuple, dict, set, frozenset, _Items, *_VIEWS)


def _contents(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value
        yield from value.values()
    else:
        yield from value.items if isinstance(value, _Items) else value


class _OpaqueNamespace(Namespace):
    # Namespaces can be changed and so can hold each other: they must not print their contents.
    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


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


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The immutable sandbox, with every way to spend time or memory tied to a budget.

    Args:
        budget: of one rendering; an environment is made for each.
        functions: global functions of the templates.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, budget: Budget, functions: Mapping[str, Callable[..., Any]]):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
            # Nothing is computed while compiling, where no budget counts.
            optimized=False,
            finalize=_finalizer(budget),
        )
        self.budget = budget
        self.filters = {name: self._filter(name) for name in _FILTER_NAMES}
        self.filters |= {name: _without_context(f) for name, f in self._internal().items()}
        self.tests = {name: self._test(name, test) for name, test in TESTS.items()}
        del self.globals["lipsum"]
        self.globals |= {"dict": _make_dict, "namespace": _OpaqueNamespace, **functions}
        self.globals["range"] = self._range

    def _internal(self) -> dict[str, Callable[[Any], Any]]:
        # The names have a space: no template can call them.
        return {
            "is ticked": self.budget.charge,
            "is iterated": self._iterated,
            "is created": self.budget.checked,
            "is compared": self._compared,
            "is searched": self._searched,
            "is concatenated": self._concatenated,
        }

    def _iterated(self, value: Any) -> Any:
        value = self.budget.checked(value)
        self.budget.charge(len(value) if hasattr(value, "__len__") else 1)
        return value

    def _compared(self, value: Any) -> Any:
        self.budget.consume(value)
        return value

    def _searched(self, value: Any) -> Any:
        return value if isinstance(value, dict) else self._compared(value)

    def _concatenated(self, values: tuple[Any, ...]) -> str:
        self.budget.require(sum(self.budget.measure(value) for value in values))
        return self.budget.checked("".join(map(str, values)))

    def _range(self, *args: int) -> range:
        numbers = range(*args)
        try:
            self.budget.charge(len(numbers))
        except OverflowError:
            raise TemplateLimitError("it runs for too long") from None
        return numbers

    def _filter(self, name: str) -> Callable[..., Any]:
        budget = self.budget
        function = _filter_function(name, budget)
        wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", None)
        guard = _FILTER_GUARDS.get(name)

        @pass_context
        def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
            if name in _CONSTANT_TIME:
                budget.charge(1)
            else:
                budget.consume(value, *args, *kwargs.values())
            if guard is not None:
                guard(budget, value, *args, **kwargs)
            first = () if wanted is None else (_argument(context, wanted),)
            return budget.checked(function(*first, value, *args, **kwargs))

        return bounded

    def _test(self, name: str, test: Callable[..., Any]) -> Callable[..., Any]:
        wanted = getattr(getattr(test, "jinja_pass_arg", None), "name", None)
        budget = self.budget

        @pass_context
        def bounded(context: Context, value: Any, *args: Any) -> Any:
            if args:
                budget.consume(value, *args)
            first = () if wanted is None else (_argument(context, wanted),)
            return test(*first, value, *args)

        return bounded

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, _CONTAINERS):
            self.budget.consume(argument)
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        self.budget.charge(4)
        given = [*args, *(v for k, v in kwargs.items() if k not in ("_loop_vars", "_block_vars"))]
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            self._check_string_method(owner, obj.__name__, given)
        elif owner is not None and owner is not self:
            self._check_method(owner, getattr(obj, "__name__", ""), given)
        if not self.is_safe_callable(obj):
            raise SecurityError("the template calls what it may not call")
        return self.budget.checked(context.call(obj, *args, **kwargs))

    def _check_string_method(self, text: str, name: str, args: list[Any]) -> None:
        if name not in _STRING_METHODS:
            raise SecurityError(f"the string method {name} is not available")
        size = self.budget.consume(text, *args)
        if name in ("center", "ljust", "rjust", "zfill"):
            self.budget.require(len(text) + sum(abs(a) for a in args if isinstance(a, int)))
        elif name == "replace":
            _check_replace(self.budget, text, *args)
        elif name == "join" and args:
            _check_join(self.budget, args[0], text)
        elif name in ("rfind", "rindex", "rsplit", "rpartition") and args:
            # Searching from the right may compare the whole needle at every place.
            self.budget.charge(size * self.budget.measure(args[0]) // 1024)

    def _check_method(self, owner: Any, name: str, args: list[Any]) -> None:
        if isinstance(owner, _CONTAINERS):
            if name not in _CONTAINER_METHODS:
                raise SecurityError(f"the method {name} is not available")
            self.budget.consume(*args, *([owner] if name in ("count", "index") else []))
        elif name in _HELPER_METHODS:
            self.budget.consume(*args)
        else:
            raise SecurityError(f"the method {name} is not available")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        inner = super().wrap_str_format(value)
        if inner is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            _check_format(self.budget, value.__self__, [*args, *kwargs.values()])
            return self.budget.checked(inner(*args, **kwargs))

        return bounded

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.budget.charge(1)
        if operator == "*":
            _check_product(self.budget, left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            _check_percent(self.budget, left, right)
        elif operator == "+" and isinstance(left, (str, list, tuple)):
            self.budget.require(self.budget.measure(left) + self.budget.measure(right))
        return self.budget.checked(super().call_binop(context, operator, left, right))


def _filter_function(name: str, budget: Budget) -> Callable[..., Any]:
    return partial(_to_json, budget) if name == "tojson" else FILTERS[name]


def _without_context(function: Callable[[Any], Any]) -> Callable[..., Any]:
    @pass_context
    def wrapped(context: Context, value: Any) -> Any:
        return function(value)

    return wrapped


def _argument(context: Context, wanted: str) -> Any:
    if wanted == "context":
        return context
    return context.eval_ctx if wanted == "eval_context" else context.environment


def _finalizer(budget: Budget) -> Callable[..., str]:
    @pass_context
    def finalize(context: Context, value: Any) -> str:
        budget.consume(value)
        return budget.checked(str(value))

    return finalize


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _check_product(budget: Budget, left: Any, right: Any) -> None:
    for value, count in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(count, int):
            budget.require(budget.measure(value) * max(0, count))
    whole = isinstance(left, int) and isinstance(right, int)
    if whole and left.bit_length() + right.bit_length() > MAX_INT_BITS:
        raise TemplateLimitError("it makes a number that is too large")


def _check_power(base: Any, exponent: Any) -> None:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and base.bit_length() * abs(exponent) > MAX_INT_BITS:
        raise TemplateLimitError("it makes a number that is too large")


# A width of four digits or taken from an argument, and a key in which brackets nest.
_WIDE_PERCENT = re.compile(r"%(?:\([^()]*\))?[#0\- +]*(?:\*|\d{4}|\d*\.(?:\*|\d{4}))|%\([^()]*\(")


def _check_percent(budget: Budget, text: str, values: Any) -> None:
    if _WIDE_PERCENT.search(text):
        raise TemplateLimitError("it pads a text to a width that is too large")
    budget.require(len(text) + text.count("%") * (budget.measure(values) + 1000))


def _check_format(budget: Budget, text: str, values: list[Any]) -> None:
    num_fields = 0
    for _, field, spec, _ in Formatter().parse(text):
        num_fields += field is not None
        if spec and ("{" in spec or re.search(r"\d{4}", spec)):
            raise TemplateLimitError("it pads a text to a width that is too large")
    size = sum(budget.measure(value) for value in values)
    budget.require(len(text) + num_fields * (size + 1000))


def _check_replace(budget: Budget, value: Any, old: Any = "", new: Any = "", *_: Any) -> None:
    text, old, new = str(value), str(old), str(new)
    budget.require(len(text) + text.count(old) * max(0, len(new) - len(old)))


def _check_join(budget: Budget, value: Any, d: Any = "", *_: Any, **__: Any) -> None:
    size = budget.measure(value)
    count = len(value) if hasattr(value, "__len__") else size
    budget.require(size + count * budget.measure(d))


def _check_indent(budget: Budget, value: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    per_line = len(width) if isinstance(width, str) else abs(int(width))
    budget.require(len(str(value)) + (str(value).count("\n") + 2) * per_line)


def _check_filter_format(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    _check_percent(budget, str(value), kwargs or args)


def _check_sum(budget: Budget, value: Any, attribute: Any = None, start: Any = 0, **_: Any) -> None:
    # Adding up lists copies them again and again.
    if not isinstance(start, (int, float)):
        raise SecurityError("sum is available for numbers only")


def _check_numbers(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> None:
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, int) and abs(argument) > MAX_WIDTH:
            raise TemplateLimitError(f"it gives a filter a number above {MAX_WIDTH}")
        if isinstance(argument, int):
            budget.charge(abs(argument))


def _check_round(budget: Budget, value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    if not isinstance(precision, int) or abs(precision) > 100:
        raise TemplateLimitError("it rounds to more than 100 digits")


def _to_json(
    budget: Budget,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's `tojson`: json.dumps without escaping HTML, with its options."""
    if separators is not None and budget.measure(separators) > 64:
        raise TemplateLimitError("it separates JSON by texts that are too long")
    if (len(indent) if isinstance(indent, str) else indent or 0) > 32:
        raise TemplateLimitError("it indents JSON too far")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None:
        return encoder.encode(value)
    pieces, size = [], 0
    for piece in encoder.iterencode(value):
        size += len(piece)
        budget.charge(1)
        if size > budget.max_size:
            raise TemplateLimitError("it makes a text or a list that is too long")
        pieces.append(piece)
    return "".join(pieces)


# Absent: pprint, random, striptags, urlize, wordwrap, xmlattr. No chat template has a use for
# them, and they are slow, or not the same twice.
_FILTER_NAMES = sorted(
    set(FILTERS) - {"pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr"}
)
_CONSTANT_TIME = frozenset(
    ("length", "count", "first", "last", "default", "d", "safe", "attr", "items")
)
_FILTER_GUARDS: dict[str, Callable[..., None]] = {
    "batch": _check_numbers,
    "center": _check_numbers,
    "format": _check_filter_format,
    "indent": _check_indent,
    "join": _check_join,
    "replace": _check_replace,
    "round": _check_round,
    "slice": _check_numbers,
    "sum": _check_sum,
    "truncate": _check_numbers,
}
_STRING_METHODS = frozenset(
    [
        "capitalize",
        "casefold",
        "center",
        "count",
        "endswith",
        "find",
        "format",
        "format_map",
        "index",
        "isalnum",
        "isalpha",
        "isascii",
        "isdecimal",
        "isdigit",
        "islower",
        "isnumeric",
        "isspace",
        "istitle",
        "isupper",
        "join",
        "ljust",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "replace",
        "rfind",
        "rindex",
        "rjust",
        "rpartition",
        "rsplit",
        "rstrip",
        "split",
        "splitlines",
        "startswith",
        "strip",
        "swapcase",
        "title",
        "upper",
        "zfill",
    ]
)
_CONTAINER_METHODS = frozenset(["copy", "count", "get", "index", "items", "keys", "values"])
_HELPER_METHODS = frozenset(["changed", "current", "cycle", "next", "reset"])


class _Bounding(NodeTransformer):
    """Rewrites a parsed template so that what the sandbox cannot intercept is charged too."""

    def _through(self, node: Any, name: str) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def _tick(self, body: list[nodes.Node], lineno: int) -> nodes.Node:
        text = sum(len(data.data) for data in _own_text(body))
        cost = nodes.Const(2 + text // CHARACTERS_PER_STEP, lineno=lineno)
        return nodes.ExprStmt(self._through(cost, "is ticked"), lineno=lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        tick = self._tick(node.body, node.lineno)
        self.generic_visit(node)
        node.iter = self._through(node.iter, "is iterated")
        node.body.insert(0, tick)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        tick = self._tick(node.body, node.lineno)
        self.generic_visit(node)
        node.body.insert(0, tick)
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        tick = self._tick(node.body, node.lineno)
        # The call itself must stay a call.
        for child in node.iter_child_nodes(exclude=("call",)):
            self.visit(child)
        self.generic_visit(node.call)
        node.body.insert(0, tick)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return self._through(node, "is created")

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return self._through(node, "is created") if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._through(node, "is created") if isinstance(node.arg, nodes.Slice) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        values = nodes.Tuple(node.nodes, "load", lineno=node.lineno)
        return self._through(values, "is concatenated")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        operands = [node.expr, *(operand.expr for operand in node.ops)]
        searches = any(operand.op in ("in", "notin") for operand in node.ops)
        # Comparing with a constant costs no more than the constant is long.
        if not searches and any(isinstance(operand, nodes.Const) for operand in operands):
            return node
        node.expr = self._through(node.expr, "is compared")
        for operand in node.ops:
            kind = "is searched" if operand.op in ("in", "notin") else "is compared"
            operand.expr = self._through(operand.expr, kind)
        return node

    def _refuse(self, node: nodes.Node) -> nodes.Node:
        kind = type(node).__name__
        raise jinja2.TemplateSyntaxError(f"{kind} is not available in a template", node.lineno)

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _refuse
    visit_EvalContextModifier = visit_ScopedEvalContextModifier = _refuse


def _own_text(body: list[nodes.Node]) -> Iterator[nodes.TemplateData]:
    # Text of inner loops is charged when they turn.
    for node in body:
        if isinstance(node, nodes.TemplateData):
            yield node
        elif not isinstance(node, (nodes.For, nodes.Macro)):
            yield from _own_text(list(node.iter_child_nodes()))


@lru_cache(maxsize=16)
def compile_template(source: str) -> CodeType:
    """Parses, rewrites and compiles a template; the result holds no state.

    Raises:
        TemplateLimitError: it is too long.
        jinja2.TemplateSyntaxError: it is not a template, or uses a tag or filter that is not here.
    """
    if len(source) > MAX_TEMPLATE_CHARACTERS:
        raise TemplateLimitError(f"it is longer than {MAX_TEMPLATE_CHARACTERS} characters")
    environment = BoundedEnvironment(Budget(), {})
    tree = _Bounding().visit(environment.parse(source))
    return environment.compile(tree)  # type: ignore[return-value]


def render_bounded(
    source: str, variables: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]]
) -> str:
    """Renders a template within a budget that grows with its input.

    Args:
        source: the template.
        variables: plain data (str, int, float, bool, None, list, dict).
        functions: global functions of the template.

    Raises:
        TemplateLimitError: it would take too long or make too much.
        jinja2.TemplateError: it is wrong, forbidden, or raised by itself.
    """
    code = compile_template(source)
    size = _input_size(variables)
    budget = Budget(size)
    environment = BoundedEnvironment(budget, functions)
    template = environment.template_class.from_code(environment, code, environment.globals)
    pieces, length = [], 0
    for piece in template.generate(**variables):
        length += len(piece)
        if length > budget.max_size:
            raise TemplateLimitError("it writes a text that is too long")
        pieces.append(piece)
    return "".join(pieces)


def _input_size(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(_input_size(k) + _input_size(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return 1 + sum(map(_input_size, value))
    return 1 + len(value) if isinstance(value, str) else 1
