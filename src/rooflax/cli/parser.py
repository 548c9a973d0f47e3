"""argparse with our manners: one sentence for a mistake, help of one shape on every Python."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from rooflax.errors import RequestError, did_you_mean

WIDTH = 80
FLAG_COLUMN = 29
FIELDS = {"no_cache": "use_cache", "no_jit": "jit"}
"""Flags whose fields in Python have other names."""
_AS_MODEL = "MODEL is given without a flag"
_WHOLE = "all layers run on the device; --weights-budget limits the memory for them"
_TOOLS = "tool calls are read as the chat template writes them, without a flag"
ELSEWHERE = {
    "-m": _AS_MODEL,
    "--model": _AS_MODEL,
    "-hf": _AS_MODEL,
    "--hf-repo": _AS_MODEL,
    "-ngl": _WHOLE,
    "--n-gpu-layers": _WHOLE,
    "--gpu-layers": _WHOLE,
    "--trust-remote-code": "no code of a checkpoint is ever run",
    "--enable-auto-tool-choice": _TOOLS,
    "--tool-call-parser": _TOOLS,
}
"""Flags of llama.cpp, vLLM and mlx-lm that have no namesake here. Some begin like one of ours."""
SEEN = "_seen"
"""The attribute in which a namespace says, while it is filled, which flags were given."""


def see_help(verb: str) -> str:
    """Points to the help of a verb."""
    return f"see rooflax {verb} --help"


class _Once(argparse._StoreAction):
    """A value that is given at most once: which of two counts is nothing to guess."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if option_string is not None:
            seen = vars(namespace).setdefault(SEEN, set())
            if self.dest in seen:
                parser.error(f"{option_string} is given twice, and takes one value; give it once")
            seen.add(self.dest)
        super().__call__(parser, namespace, values, option_string)


class Parser(argparse.ArgumentParser):
    """The flags of one verb."""

    def __init__(self, verb: str, summary: str, *, takes_model: bool):
        self.verb = verb
        super().__init__(
            prog=f"rooflax {verb}",
            usage=f"rooflax {verb} {'[MODEL] ' if takes_model else ''}[flags]",
            description=f"{summary[0].upper()}{summary[1:]}.",
            formatter_class=_Formatter,
            allow_abbrev=False,
            add_help=False,
        )
        for name in (None, "store"):
            self.register("action", name, _Once)
        self._positionals.title = "the model"
        self.color = False  # from Python 3.14 on; help is the same text everywhere

    def error(self, message: str) -> NoReturn:
        """Rejects the arguments in one sentence, without printing the usage."""
        raise RequestError(f"{self._in_our_words(message)}; {see_help(self.verb)}")

    def _in_our_words(self, message: str) -> str:
        if message.startswith("unrecognized arguments: "):
            unknown = message.removeprefix("unrecognized arguments: ")
            flag = unknown.split()[0].partition("=")[0]
            for flag_name in () if flag.startswith("-") else ("--prompt", "--tokens"):
                if flag_name in self._option_string_actions:
                    return f"unknown: {unknown} (what is to be read follows {flag_name})"
            return f"unknown: {unknown}{did_you_mean(flag, self._option_string_actions)}"
        message = message.removeprefix("argument ")
        if message.endswith("expected one argument"):
            return f"{message} (one that begins with - is given as --flag=VALUE)"
        return message

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """As argparse does; and rejects --quiet together with --verbose.

        Words are converted once: what they name may be a pipe.

        Returns:
            The values, and in `stated` the names of those that were stated, in the help's order.
        """
        for word in args[0] if args else ():
            flag = word.partition("=")[0]
            if flag in ELSEWHERE and flag not in self._option_string_actions:
                self.error(f"unknown: {flag} ({ELSEWHERE[flag]})")
        unset = argparse.Namespace(**{action.dest: None for action in self._actions})
        words = vars(super().parse_args(*args, **kwargs | {"namespace": unset}))
        words.pop(SEEN, None)
        stated = {name: value for name, value in words.items() if value is not None}
        names = kwargs.get("namespace", argparse.Namespace())
        for action in self._actions:
            if not hasattr(names, action.dest):
                default = action.default
                text = isinstance(default, str)
                setattr(names, action.dest, self._get_value(action, default) if text else default)
        vars(names).update(stated)
        if getattr(names, "quiet", False) and names.verbose:
            self.error("--quiet and --verbose contradict each other")
        names.stated = list(stated)
        return names

    @property
    def flag_names(self) -> dict[str, str]:
        """Long flag of each field, the first of several, by the field's name in Python."""
        by_name: dict[str, str] = {}
        for action in self._actions:
            longs = [flag for flag in action.option_strings if flag.startswith("--")]
            long_flag = f"--{action.dest.replace('_', '-')}"
            if longs:
                name = FIELDS.get(action.dest, action.dest)
                by_name.setdefault(name, long_flag if long_flag in longs else longs[0])
        return by_name

    def flag_of(self, dest: str) -> str:
        """A value of the namespace as it is written on the command line."""
        return self.flag_names.get(FIELDS.get(dest, dest), "MODEL")

    def group(self, title: str) -> Any:
        """A titled group of flags, made at its first use."""
        for group in self._action_groups:
            if group.title == title:
                return group
        return self.add_argument_group(title)


class _Formatter(argparse.HelpFormatter):
    """Flags as "-p, --prompt TEXT" on every Python, in eighty columns."""

    def __init__(self, prog: str, **kwargs: Any):
        kwargs |= {"width": WIDTH, "max_help_position": FLAG_COLUMN}
        super().__init__(prog, **kwargs)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return str(action.metavar or action.dest)
        flags = ", ".join(action.option_strings)
        if action.nargs == 0:
            return flags
        return f"{flags} {self._format_args(action, action.dest.upper())}"


def whole(text: str) -> int:
    """A whole number, for `type=`."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    """A number, for `type=`; what it may be is checked where it is used."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def token_ids(text: str) -> list[int]:
    """ "1,2,3" as ids, for `type=`."""
    return [whole(part.strip()) for part in text.split(",")]


def bias(text: str) -> tuple[int, float]:
    """ "ID=VALUE", for `type=`."""
    token, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=VALUE, such as 13=-5")
    return whole(token), number(value)


def at_least_one(text: str) -> int:
    """A whole number from 1 up, for `type=`."""
    value = whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value
