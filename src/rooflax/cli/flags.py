"""Flags that several verbs share, and what they become: the values that Python takes.

The same name means the same on the command line and in Python. This module imports no jax, so
that a wrong value is rejected at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rooflax.cli.parser import Parser, at_least_one, bias, number, token_ids, whole
from rooflax.engine.sampling_params import SamplingParams
from rooflax.errors import RequestError
from rooflax.fields.declaration import Declaration, declarations
from rooflax.fields.kinds import Choice, Flag, Kind, Number, Several, Whole
from rooflax.fields.sampling import SAMPLING, Bias, Grammar, JsonSchema
from rooflax.files import read_text
from rooflax.loading.settings import ServingSettings
from rooflax.models.presets import EMBEDDED, PREFIX
from rooflax.nn.execution import (
    ExecutionOptions,
    Precision,
    check_speculate,
    offloading_options,
    parse_bytes,
)

SETTINGS: dict[str, Declaration] = declarations(ServingSettings)


def add_model(parser: Parser, default: str = "the embedded model", also: str = "") -> None:
    """MODEL, and how it is found and read.

    Args:
        also: what the verb takes beside.
    """
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help=f"checkpoint folder, .gguf file, hub id, package:NAME or preset:NAME{also}; default: "
        f"{default}",
    )
    for name in ("revision", "offline", "ignore_config_keys"):
        add_field(parser, SETTINGS[name])


def add_lora(parser: Parser) -> None:
    add_field(parser, SETTINGS["lora"])


def add_check(parser: Parser) -> None:
    parser.group("finding the model").add_argument(
        "--check", action="store_true", help="reject weights with NaN or infinity"
    )


def add_sampling(
    parser: Parser, *, max_tokens: int, samples: bool, unset: Mapping[str, float] | None = None
) -> None:
    """Adds the flags for sampling and stopping.

    Args:
        max_tokens: the verb's default.
        samples: offer what makes sense for one prompt only.
        unset: the verb's values of fields that neither flags nor the checkpoint set.
    """
    defaults = {name: str(value) for name, value in (unset or {}).items()}
    defaults["max_tokens"] = f"{max_tokens}, or what fits into the context"
    for one in SAMPLING.values():
        if one.flags and (samples or not one.per_prompt):
            add_field(parser, replace(one, shown_default=defaults.get(one.name, one.shown_default)))
    add_field(parser, SETTINGS["generation_config"])


def add_field(parser: Parser, one: Declaration, *, lists: bool = False) -> None:
    """The flags of a field that is declared.

    Args:
        lists: several values, with commas between them.
    """
    keywords: dict[str, Any] = {"help": one.sentence}
    if isinstance(one.kind, Flag):
        keywords["action"] = "store_true"
    elif one.kind.repeats:
        keywords |= {"action": "append", "default": [], "help": f"{one.sentence} (repeatable)"}
    else:
        keywords["default"] = one.default
    if not isinstance(one.kind, Flag):
        keywords |= {"metavar": one.metavar, "type": parser_of(one.kind)}
    if lists:
        keywords |= {"default": [None], "type": _listed(keywords["type"])}
    parser.group(one.group).add_argument(*one.flags, dest=one.name, **keywords)


def values_of(args: argparse.Namespace, table: type) -> dict[str, Any]:
    """Values of a table's fields that the verb has flags for."""
    named = declarations(table).values()
    return {one.name: getattr(args, one.name) for one in named if hasattr(args, one.name)}


def parser_of(kind: Kind) -> Callable[[str], Any]:
    """Returns a parser of a kind's values from text, for `type=`."""
    match kind:
        case Whole():
            return whole
        case Number():
            return number
        case Several(Whole()):
            return token_ids
        case Bias():
            return bias
        case JsonSchema():
            return _schema
        case Grammar():
            return _grammar
        case Choice(choices) if not all(isinstance(choice, str) for choice in choices):
            return partial(_chosen, {str(choice).lower(): choice for choice in choices})
    return str


def _chosen(words: dict[str, Any], text: str) -> Any:
    if text not in words:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(words)}")
    return words[text]


def _schema(text: str) -> str:
    if text.lstrip().startswith("{"):
        return text
    return _read("--json-schema", text, "JSON that begins with {")


def _grammar(text: str) -> str:
    if ":" in text and not Path(text[:255]).is_file():
        return text
    return _read("--grammar", text, 'rules such as start: "yes" | "no"')


def _read(flag: str, path: str, otherwise: str) -> str:
    """
    Raises:
        RequestError: no file that can be read.
    """
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RequestError(
            f"{flag} {path[:80]} cannot be read: {why}; give a file, or {otherwise}."
        ) from None


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The sampling flags as what they become in Python.

    Raises:
        RequestError: a value that cannot be.
    """
    repeated = {token for token, _ in args.logit_bias}
    if len(repeated) != len(args.logit_bias):
        raise RequestError("--logit-bias names a token id twice; give each once.")
    values = values_of(args, SamplingParams)
    values["logit_bias"] = dict(args.logit_bias)
    values["stop_token_ids"] = tuple(token for ids in args.stop_token_ids for token in ids)
    return SamplingParams(**values)


def add_pooled_run(parser: Parser, group: Any, *, longest: str) -> None:
    """Adds the flags for running a model that embeds or scores whole texts.

    Args:
        group: of the texts, for --truncate.
        longest: what --max-model-len limits.
    """
    add_truncate(group)
    add_max_model_len(parser, help=f"longest {longest} in tokens")
    add_precision(parser)
    add_weights_budget(parser)
    add_execution(parser)
    add_device(parser, mesh=True)
    add_output(parser, json=False)


def add_truncate(group: Any) -> None:
    group.add_argument(
        "--truncate", action="store_true",
        help="cut texts that are too long for the model; default: reject them",
    )  # fmt: skip


def add_max_model_len(parser: Parser, **changes: Any) -> None:
    """
    Args:
        changes: of the declaration, where the verb means something else by it.
    """
    add_field(parser, replace(SETTINGS["max_model_len"], **changes))


def add_precision(parser: Parser, *, kv: bool = True, lists: bool = False) -> None:
    """Widths, which may change tokens.

    Args:
        lists: several values, with commas between them.
    """
    for name in ("dtype", *(("kv_dtype",) if kv else ()), "quantize"):
        add_field(parser, SETTINGS[name], lists=lists)


def add_weights_budget(parser: Parser) -> None:
    add_field(parser, SETTINGS["weights_budget"])


def check_weights_budget(args: argparse.Namespace, options: ExecutionOptions) -> None:
    """
    Raises:
        RequestError: it is no size, or another flag does not go with it.
    """
    budget = getattr(args, "weights_budget", None)
    if budget is not None:
        parse_bytes(budget)
        offloading_options(options, getattr(args, "mesh", None) is not None)


def check_precision(args: argparse.Namespace) -> Precision:
    """The widths as they were asked for; RequestError for one that is not known."""
    quantize = getattr(args, "quantize", None)
    return Precision(args.dtype, getattr(args, "kv_dtype", None), quantize)


def add_execution(parser: Parser, *, cached: bool = True, lists: bool = False) -> None:
    """Switches that change speed, never a token.

    Args:
        cached: the verb decodes with a KV cache, step by step.
        lists: several values, with commas between them.
    """
    add = parser.group("speed, never tokens").add_argument

    if cached:
        add("--no-cache", action="store_true", help="recompute the whole sequence for every token")
        add("--no-jit", action="store_true", help="run every operation eagerly")
    for name, one in declarations(ExecutionOptions).items():
        if one.flags and (cached or name != "decode_steps"):
            add_field(parser, replace(one, default=None, unset=one.default), lists=lists)


def add_speculation(parser: Parser) -> None:
    """Drafts: never other tokens, sometimes more of them per second."""
    for name in ("speculate", "num_draft_tokens"):
        add_field(parser, SETTINGS[name])


def check_speculation(args: argparse.Namespace, options: ExecutionOptions) -> None:
    """
    Raises:
        RequestError: the flags of drafts have no meaning together.
    """
    what, most = getattr(args, "speculate", None), getattr(args, "num_draft_tokens", None)
    if what is None and most is not None:
        raise RequestError("--num-draft-tokens is given without --speculate; add that.")
    check_speculate(what, most, options.use_cache)


def _words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _listed(kind: Any) -> Any:
    """Values of a kind with commas between them, for `type=`."""
    return lambda text: [kind(part) for part in _words(text)]


def execution_options(args: argparse.Namespace) -> ExecutionOptions:
    """The switches as what they become in Python; RequestError for a wrong value."""
    if getattr(args, "no_cache", False) and args.decode_steps is not None:
        raise RequestError("--decode-steps needs the cache, and --no-cache is given; drop one.")
    values = values_of(args, ExecutionOptions)
    for flag, name in (("no_cache", "use_cache"), ("no_jit", "jit")):
        if getattr(args, flag, False):
            values[name] = False
    return ExecutionOptions.of(**values)


def add_device(parser: Parser, *, mesh: bool = False, hosts: bool = False) -> None:
    """Adds the flags for the device.

    Args:
        mesh: over several devices.
        hosts: and several processes, each with the same command but for its number.
    """
    add = parser.group("where to run").add_argument
    add("--platform", metavar="NAME", help="cpu, gpu or tpu; default the best available")
    add(
        "-t", "--threads", metavar="N", type=at_least_one,
        help="CPU threads; default the cores this process may use",
    )  # fmt: skip
    if mesh:
        add_field(parser, SETTINGS["mesh"])
    if hosts:
        add("--coordinator", metavar="HOST:PORT", help="address of process 0")
        add("--num-processes", metavar="N", type=at_least_one, help="number of processes")
        add("--process-id", metavar="I", type=whole, help="index of this process, from 0")


def add_output(parser: Parser, *, json: bool = True, progress: bool = True) -> None:
    """Adds the flags for output. Call it last, so that every help ends alike.

    Args:
        json: the verb has a JSON document to give.
        progress: the verb loads or computes, so it shows progress and can say what it uses.
    """
    add = parser.group("output").add_argument
    if json:
        add("--json", action="store_true", help="one JSON document on stdout")
    if progress:
        add("--quiet", action="store_true", help="no progress and no statistics")
        add("--verbose", action="store_true", help="more details; tracebacks of errors")
    add("-h", "--help", action="store_true", help="print this help")


def find_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """MODEL's flags as arguments of `model_info`.

    Raises:
        RequestError: a flag that has no meaning for this MODEL.
    """
    made_here = args.model is None or args.model in EMBEDDED or args.model.startswith(PREFIX)
    for flag, is_set in (
        ("--revision", args.revision),
        ("--ignore-config-key", args.ignore_config_keys),
    ):
        if made_here and is_set:
            name = args.model or "the embedded model"
            raise RequestError(f"{flag} is for checkpoints, and {name} is none; drop it.")
    return {name: getattr(args, name) for name in ("revision", "offline", "ignore_config_keys")}
