"""Compiles a JSON schema, a regex or a Lark grammar; as a program, to see whether that goes well.

A grammar of a kilobyte can ask for minutes, gigabytes or a deeper stack than there is, and nothing
can end a thread. So `structured` has a process of its own try it first, and ends that. It knows no
tokenizer: the process uses one of 256 bytes and a special token. Imports nothing of rooflax, so
that it starts fast.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import llguidance

MOST_BYTES = 2 << 30
"""Address space of the process."""
STACK_BYTES = 4 << 20
"""Stack of the thread that compiles; `structured` compiles with twice as much."""
WORK_STACK_BYTES = 256 << 10
"""Stack of the thread that makes a mask, less than any thread of an engine has."""
WHITESPACE = " "
"""Between the parts of JSON, at most once: small models repeat white space for ever. A schema's
own "x-guidance": {"whitespace_pattern": ...} wins."""
MAX_LEXER_STATES = 25_000
"""About 2 kB each."""
MAX_ITEMS_IN_ROW = 6_000
"""Items of the parser: four for each property that may be absent. A mask of so many takes 30 ms."""
MOST_KEPT_BYTES = 32 << 20
"""Bytes that a compiled grammar may take, its first mask included; most take 2 MB."""


SPECIAL = 257
_SPECIAL = re.compile(r"<\[\d+\]>")


def compile_grammar(tokenizer: Any, kind: str, text: str) -> Any:
    """An `llguidance.LLMatcher` at the beginning of a text; its `get_error()` says what is wrong.

    Args:
        tokenizer: an `llguidance.LLTokenizer`.
        kind: a field of SamplingParams: "json_schema", "regex" or "grammar".
    """
    matcher = llguidance.LLMatcher
    limits = llguidance.LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES, max_items_in_row=MAX_ITEMS_IN_ROW, verbose_errors=False
    )
    if kind == "json_schema":
        options: Any = {"whitespace_pattern": WHITESPACE}
        source = matcher.grammar_from_json_schema(text, defaults=options)
    elif kind == "regex":
        source = matcher.grammar_from_regex(text)
    else:
        source = matcher.grammar_from_lark(text)
    return matcher(tokenizer, source, log_level=0, limits=limits)


def with_stack(size: int, work: Callable[[], Any]) -> Any:
    """Runs `work` in a thread with a larger stack; returns and raises as it does."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    before = threading.stack_size(size)
    try:
        thread = threading.Thread(target=run, name="rooflax-grammar")
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


class _Bytes:
    """A vocabulary of every byte, an end, and one token that stands for all special ones."""

    eos_token_id, bos_token_id = 256, None
    tokens = (*(bytes([value]) for value in range(256)), b"<end>", b"<special>")
    special_token_ids = (256, SPECIAL)
    is_tokenizer_wrapper = True

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _first_mask(matcher: Any) -> None:
    words = (ctypes.c_int32 * 9)()
    matcher.unsafe_compute_mask_ptr(ctypes.addressof(words), ctypes.sizeof(words))


def _peak_bytes() -> int:
    """The most memory that the process has had; 0 where that is not known.

    Not getrusage's, which begins with that of the process before exec.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            lines = [line.split() for line in file]
    except OSError:
        return 0
    return next((int(line[1]) << 10 for line in lines if line[:1] == ["VmHWM:"]), 0)


def main() -> None:
    """Reads {"kind", "texts"} from stdin; writes what is wrong with each, "" where nothing is."""
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    request = json.load(sys.stdin)
    tokenizer = llguidance.LLTokenizer(_Bytes())  # type: ignore[arg-type]
    json.dump([_fault(tokenizer, request["kind"], text) for text in request["texts"]], sys.stdout)


def _fault(tokenizer: Any, kind: str, text: str) -> str:
    before = _peak_bytes()
    if kind == "grammar":
        text = _SPECIAL.sub(f"<[{SPECIAL}]>", text)
    work = partial(compile_grammar, tokenizer, kind, text)
    try:
        matcher = with_stack(STACK_BYTES, work)
    except ValueError as error:  # JSON that Python reads and llguidance does not
        return str(error)
    if matcher.is_error():
        return matcher.get_error()
    with_stack(WORK_STACK_BYTES, lambda: _first_mask(matcher))
    if matcher.is_error():
        return matcher.get_error()
    grown, most = _peak_bytes() - before, MOST_KEPT_BYTES
    if grown > most:
        return f"it takes {grown >> 20} MiB of memory and may take {most >> 20}"
    return ""


if __name__ == "__main__":
    main()
