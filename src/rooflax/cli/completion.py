"""`rooflax completion bash|zsh|fish`: a script by which the shell completes verbs and flags."""

from __future__ import annotations

import argparse

from rooflax.cli import flags
from rooflax.cli.parser import Parser

TAKES_MODEL = False
SHELLS = ("bash", "zsh", "fish")


def add_flags(parser: Parser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")
    flags.add_output(parser, json=False, progress=False)


def run(args: argparse.Namespace) -> int:
    """Prints a completion script: `source <(rooflax completion bash)`, or `... fish | source`."""
    print(fish() if args.shell == "fish" else bash(args.shell == "zsh"), end="")
    return 0


def flags_of_verbs() -> dict[str, list[tuple[str, str]]]:
    """Per verb its long flags, each with its help."""
    from rooflax.cli.main import VERBS, parser_of

    flags = {}
    for verb in VERBS:
        actions = parser_of(verb)._actions
        flags[verb] = [
            (flag, action.help or "")
            for action in actions
            for flag in action.option_strings
            if flag.startswith("--")
        ]
    return flags


def bash(is_zsh: bool) -> str:
    """zsh runs bash's script."""
    verbs = flags_of_verbs()
    lines = ["autoload -U +X bashcompinit && bashcompinit"] if is_zsh else []
    lines += [
        "_rooflax() {",
        '    local word="${COMP_WORDS[COMP_CWORD]}" words',
        '    if [ "$COMP_CWORD" -eq 1 ]; then',
        f'        words="{" ".join(verb for verb in verbs if " " not in verb)} help version"',
        '    elif [ "${word#-}" = "$word" ]; then',
        '        COMPREPLY=($(compgen -f -- "$word"))',
        "        return",
        "    else",
        '        case "${COMP_WORDS[1]} ${COMP_WORDS[2]}" in',
    ]
    for verb, known in sorted(verbs.items(), key=lambda pair: -pair[0].count(" ")):
        lines.append(f'            "{verb}"*) words="{" ".join(flag for flag, _ in known)}" ;;')
    lines += [
        "        esac",
        "    fi",
        '    COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        "complete -o filenames -F _rooflax rooflax",
    ]
    return "\n".join(lines) + "\n"


def fish() -> str:
    from rooflax.cli.main import VERBS

    lines = []
    for verb, known in flags_of_verbs().items():
        summary = _quoted(VERBS[verb])
        if " " in verb:
            words = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in verb.split())
            first, last = verb.split()
            seen = f"'__fish_seen_subcommand_from {first}'"
            lines.append(f"complete -c rooflax -n {seen} -a {last} -d {summary}")
            lines += [
                f"complete -c rooflax -n '{words}' -l {flag[2:]} -d {_quoted(text)}"
                for flag, text in known
            ]
            continue
        lines.append(f"complete -c rooflax -n __fish_use_subcommand -a {verb} -d {summary}")
        for flag, text in known:
            seen = f"'__fish_seen_subcommand_from {verb}'"
            lines.append(f"complete -c rooflax -n {seen} -l {flag[2:]} -d {_quoted(text)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
