"""`rooflax VERB [MODEL] [flags]`: finds the verb, runs it, turns what went wrong into an exit code.

0 done, 1 it failed at work, 2 the request was wrong, 130 interrupted. A verb is a module with
`add_flags(parser)` and `run(args) -> int`; it is imported when it is asked for.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from rooflax import __version__
from rooflax.cli import terminal
from rooflax.cli.parser import Parser, see_help
from rooflax.errors import EngineError, RequestError, RooflaxError, did_you_mean

VERBS = {
    "generate": "continue a plain text, streaming to stdout",
    "chat": "a conversation in the terminal",
    "serve": "the OpenAI-compatible server",
    "bench": "measure speed, memory and the share of the roofline",
    "bench serve": "measure an OpenAI server under load",
    "batch": "answer a file in OpenAI's batch format",
    "train": "train from scratch or from a checkpoint",
    "inspect": "architecture, weights, and the memory it will take",
    "verify": "compare logits and greedy tokens with a reference",
    "perplexity": "perplexity and bits per byte of a text",
    "eval": "perplexity of texts and chats, accuracy of choices",
    "embed": "vectors of texts, as JSON lines or .npy",
    "rerank": "scores of texts for a query, the best first",
    "quantize": "save a quantized model; it loads without conversion",
    "fuse": "merge a LoRA adapter into its model",
    "models": "list and remove downloaded models",
    "doctor": "devices, kernels, caches and versions",
    "tokenize": "print the token ids of a text",
    "detokenize": "print the text of token ids",
    "completion": "print a completion script for a shell",
}
"""And what each does, here so that help imports none of them."""

ELSEWHERE = {
    "pull": "a hub id is downloaded when it is first used, as in rooflax chat OWNER/NAME",
    "download": "a hub id is downloaded when it is first used, as in rooflax chat OWNER/NAME",
    "run": "a conversation is rooflax chat MODEL, one prompt rooflax generate MODEL -p TEXT",
    "list": "rooflax models lists what is downloaded",
    "ls": "rooflax models lists what is downloaded",
    "ps": "a model runs as long as its command; a server tells /health and /metrics what it does",
    "stop": "a model runs as long as its command; Ctrl-C or SIGTERM ends it",
    "rm": "rooflax models --remove ID removes a downloaded model",
    "show": "rooflax inspect MODEL shows it",
    "info": "rooflax inspect MODEL shows it",
    "cache": "rooflax models lists what is downloaded, and --remove ID removes it",
    "login": "HF_TOKEN, or hf auth login, gives access to the hub's gated models",
    "create": "any folder or .gguf file is a MODEL as it is; /system and /params in rooflax chat",
    "convert": "a checkpoint needs no conversion; rooflax quantize writes one in another format",
    "lora": "rooflax train --fine-tune-type lora trains an adapter; chat and generate take --lora",
    "merge": "rooflax fuse merges a LoRA adapter into its model",
    "finetune": "it is rooflax train",
    "evaluate": "it is rooflax eval",
}
"""Verbs of Ollama, llama.cpp and mlx-lm, and what does the same here."""
DONE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130
OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of writing, which come without a name."""
_TEMPORARY = re.compile(r"(^|/)\.[^/]*\.[0-9a-f]{12}\.tmp(/|$)")
"""Files that are written beside an output, and take its place."""


def main(argv: Sequence[str]) -> int:
    """Runs one command and returns its exit code; the reason of a failure goes to stderr."""
    args = None
    try:
        try:
            command = parse(argv)
            if command is None:
                return _flushed(DONE)
            module, args = command
            return _flushed(module.run(args))
        except BaseException as error:
            verb, _ = split(argv)
            flags = parser_of(verb).flag_names if verb in VERBS else {}
            output = getattr(args, "output", None) or getattr(args, "out", None)
            verbose = getattr(args, "verbose", False)
            return _exit_code(error, flags, output=output, verbose=verbose)
    except KeyboardInterrupt:  # a second one, while the first was being dealt with
        return INTERRUPTED


def parse(argv: Sequence[str]) -> tuple[ModuleType, Any] | None:
    """The verb's module and its arguments; None if help or the version was asked for and printed.

    Raises:
        RequestError: no such verb or flag, or a value of the wrong kind.
    """
    first, rest = split(argv) if argv else ("--help", ())
    if first == "help" and rest:
        first, rest = split(rest)[0], ("--help",)
    if first in ("-h", "--help", "help"):
        print(overview())
        return None
    if first in ("-V", "-v", "--version", "version"):
        print(f"rooflax {__version__}")
        return None
    if first in ELSEWHERE:
        raise RequestError(f"there is no verb {first!r}: {ELSEWHERE[first]}")
    if first not in VERBS:
        what = "flag" if first.startswith("-") else "verb"
        meant = did_you_mean(first, (*VERBS, "help", "version", "--help", "--version"))
        verbs = "" if meant else f"the verbs are {', '.join(VERBS)}; "
        raise RequestError(f"there is no {what} {first!r}{meant}; {verbs}see rooflax --help")
    _reject_broken_text(argv, first)
    parser = parser_of(first)
    if {"-h", "--help"} & set(rest):
        print(parser.format_help(), end="")
        return None
    return verb_module(first), parser.parse_args(rest)


def split(argv: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The verb, which may have two words, and what comes behind it."""
    size = 2 if " ".join(argv[:2]) in VERBS else 1
    return " ".join(argv[:size]), argv[size:]


def verb_module(verb: str) -> ModuleType:
    """The module of a verb; importing it imports no jax."""
    return importlib.import_module(f"rooflax.cli.{verb.replace(' ', '_')}")


def parser_of(verb: str) -> Parser:
    """The parser of one verb's flags."""
    module = verb_module(verb)
    parser = Parser(verb, VERBS[verb], takes_model=getattr(module, "TAKES_MODEL", True))
    module.add_flags(parser)
    return parser


def overview() -> str:
    """Help text of `rooflax --help`."""
    lines = [
        "rooflax runs, measures and trains language models in JAX, straight from their",
        "checkpoints.",
        "",
        "usage: rooflax VERB [MODEL] [flags]",
        "",
        *(f"  {verb:<12}{summary}" for verb, summary in VERBS.items()),
        "",
        "MODEL is a checkpoint folder, a .gguf file, a hub id (owner/name), package:NAME",
        "(an installed Python package that ships a .gguf file), preset:NAME (a known",
        "architecture with random weights), or is left out: then the embedded model.",
        "",
        "rooflax help VERB lists a verb's flags; rooflax version prints the version.",
    ]
    return "\n".join(lines)


def _reject_broken_text(argv: Sequence[str], verb: str) -> None:
    for value in argv:
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise RequestError(f"the argument {value!a} is not UTF-8; {see_help(verb)}")


def _flushed(code: int) -> int:
    """The exit code, once everything is written: a full disk or closed pipe shows only now."""
    sys.stdout.flush()
    return code


def _exit_code(
    error: BaseException, flags: Mapping[str, str], *, output: str | None, verbose: bool
) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED
    if isinstance(error, BrokenPipeError):
        terminal.let_go_of(sys.stdout)
        return DONE
    if isinstance(error, KeyboardInterrupt):
        _drop_output()
        return INTERRUPTED
    code, sentence = _explain(error, flags, output)
    if verbose and code == FAILED:
        import traceback

        traceback.print_exception(error)
    _say(f"rooflax: {sentence}")
    _drop_output()
    return code


def _explain(error: BaseException, flags: Mapping[str, str], output: str | None) -> tuple[int, str]:
    """The exit code and the sentence of an error.

    Args:
        flags: of the verb, by the fields that they set.
        output: what the command writes; the system does not say where a disk is full.
    """
    text = " ".join(str(error).split())
    if isinstance(error, RooflaxError):
        text = with_flags(text, error.param, flags)
    if isinstance(error, EngineError):
        return FAILED, text
    if isinstance(error, RooflaxError):
        return WRONG, text
    if isinstance(error, FileExistsError | NotADirectoryError) and output is not None:
        return WRONG, f"{output} cannot be written: a file is in the place of one of its folders"
    if isinstance(error, OSError):
        reason = error.strerror or text or type(error).__name__
        where = error.filename or (output if error.errno in OF_DISKS else None)
        if output is not None and _TEMPORARY.search(str(where)):
            where = output
        return FAILED, f"{reason}: {where}" if where else reason
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        return FAILED, f"out of memory: {text[:300] or 'nothing is left to allocate'}"
    return FAILED, (
        f"{type(error).__name__}: {text[:300]} (this is a fault of rooflax; --verbose shows where)"
    )


def with_flags(text: str, param: str | None, flags: Mapping[str, str]) -> str:
    """A library's sentence with the flags of the fields that it names.

    Args:
        param: the field at fault: its first mention is one, though it may be an English word.
    """
    for name, flag in flags.items():
        text = text.replace(f"`{name}`", flag)
        alone = rf"(?<![\w'/.-]){name}(?![\w/]|\.\w)"  # and no part of a path
        if "_" in name:
            text = re.sub(alone, flag, text)
        elif name == param:
            text = re.sub(alone, flag, text, count=1)
    return text


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        terminal.say(line)


def _drop_output() -> None:
    """Writes what is still buffered; if that fails too, nothing more is tried at exit."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        terminal.let_go_of(sys.stdout)
