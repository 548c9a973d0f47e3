"""JSON of a request: read strictly, within bounds that are checked before anything is built."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any, NoReturn

from rooflax.server.errors import ApiError

MAX_DEPTH = 64
MAX_CONTAINERS = 100_000
"""Lists and objects; while Python's parser reads them, nothing else in this process runs."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""One that is not closed goes to the end: else each quote in it would be tried as a beginning."""
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_AS_SQUARE = bytes.maketrans(b"{}", b"[]")


def read_json(body: bytes) -> Any:
    """The value that a body holds.

    Raises:
        ApiError: it is no JSON, nested too deeply, or holds a key twice, NaN, a number that is out
            of range or half a surrogate pair.
    """
    _check_depth(body)
    try:
        document = _DECODER.decode(body.decode("utf-8"))
        json.dumps(document, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise _invalid("it holds half a surrogate pair, which is no text") from None
    except UnicodeDecodeError as error:
        raise _invalid(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _invalid(f"{error.msg} at character {error.pos}") from None
    return document


def _invalid(why: str) -> ApiError:
    return ApiError(f"The body is not valid JSON: {why}.", code="invalid_json")


def _check_depth(body: bytes) -> None:
    """Counts brackets outside of strings; every round removes the innermost level."""
    brackets = _STRING.sub(b"", body).translate(_AS_SQUARE, _NOT_BRACKETS)
    if len(brackets) > 2 * MAX_CONTAINERS:
        raise _invalid(f"it has more than {MAX_CONTAINERS:,} lists and objects")
    for _ in range(MAX_DEPTH):
        if not brackets:
            return
        left = brackets.replace(b"[]", b"")
        if len(left) == len(brackets):
            raise _invalid("its brackets do not match, or it is nested too deeply")
        brackets = left
    if brackets:
        raise _invalid(f"it is nested more than {MAX_DEPTH} levels deep")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise _invalid(f"an object has the key {twice[:40]!r} twice")
    return members


def _constant(text: str) -> NoReturn:
    raise _invalid(f"{text} is no JSON number")


def _whole(text: str) -> int:
    if len(text) > 20:
        raise _invalid(f"a whole number has {len(text)} digits")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _invalid("a number is out of range")
    return value


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_constant, parse_int=_whole, parse_float=_number
)
