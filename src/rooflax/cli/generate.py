"""`rooflax generate`: one prompt to stdout, streaming; statistics on stderr."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooflax.cli import flags, lines, terminal
from rooflax.cli.lines import DEFAULT_MAX_TOKENS
from rooflax.cli.parser import Parser
from rooflax.engine.sampling_params import SamplingParams
from rooflax.errors import EngineError, RequestError

if TYPE_CHECKING:
    from rooflax.llm import LLM, Completion, Delta


def add_flags(parser: Parser) -> None:
    flags.add_model(parser)
    flags.add_check(parser)
    flags.add_lora(parser)
    group = parser.group("the prompt")
    group.add_argument(
        "-p", "--prompt", metavar="TEXT",
        help="text to continue as it is, without the chat template; default: stdin, without its "
        "last line break",
    )  # fmt: skip
    group.add_argument(
        "--input",
        metavar="FILE",
        help="many prompts: lines of text, or JSON lines with prompt or messages; - is stdin",
    )
    group.add_argument(
        "-o", "--output", metavar="FILE", help="answers to --input; resumable; - is stdout"
    )
    group.add_argument("--force", action="store_true", help="overwrite --output")
    flags.add_sampling(parser, max_tokens=DEFAULT_MAX_TOKENS, samples=True)
    flags.add_max_model_len(parser)
    flags.add_precision(parser)
    flags.add_weights_budget(parser)
    flags.add_execution(parser)
    flags.add_speculation(parser)
    flags.add_device(parser, mesh=True, hosts=True)
    flags.add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Generates, and prints text or JSON."""
    from rooflax.cli.session import open_llm

    params = flags.sampling_params(args)
    _check_files(args)
    if args.input is not None:
        return lines.run(open_llm(args), args, params)
    if args.prompt is None and args.model and not is_model(args.model):
        raise RequestError(
            f"{args.model[:80]!r} is no model, and no prompt was given; a prompt follows --prompt."
        )
    prompt = args.prompt if args.prompt is not None else _prompt_from_stdin()
    if not prompt:
        raise RequestError("The prompt is empty; give text with --prompt or on stdin.")
    llm = open_llm(args)
    if params.max_tokens is None:
        room = llm.max_model_len - len(llm.processor.prompt_ids(prompt))
        params = replace(params, max_tokens=max(min(DEFAULT_MAX_TOKENS, room), 1))
    completions = _generate(llm, prompt, params, args)
    if args.json:
        terminal.print_json(document(llm, completions))
    elif not args.quiet:
        from rooflax.cli import statistics

        _say_empty(llm, completions)
        statistics.say_statistics(llm, completions)
    return 0


def _check_files(args: argparse.Namespace) -> None:
    if (args.input is None) != (args.output is None):
        raise RequestError("--input and --output belong together; give both.")
    if args.force and args.input is None:
        raise RequestError("--force is for --output; give --input and --output.")
    if args.input is not None and (args.prompt is not None or args.json):
        other = "--prompt" if args.prompt is not None else "--json"
        raise RequestError(f"--input has the prompts and --output the answers; drop {other}.")


def is_model(text: str) -> bool:
    """Whether a name looks like a model: a path, a file, a preset or a hub id."""
    return re.fullmatch(r"[^\s()'\"]+", text) is not None or Path(text).exists()


def _prompt_from_stdin() -> str:
    text = terminal.read_stdin('--prompt "def fibonacci(n):"')
    return text.removesuffix("\n").removesuffix("\r")


def _generate(
    llm: LLM, prompt: str, params: SamplingParams, args: argparse.Namespace
) -> list[Completion]:
    deltas = first_delta_awaited(llm.stream(prompt, params), "compiling and reading", args.quiet)
    if args.json:
        return _reject_errors(_completions(deltas))
    if params.n > 1:
        completions = _completions(deltas)
        for completion in completions:
            terminal.write(f"--- sample {completion.index + 1} of {params.n}\n{completion.text}\n")
    else:
        completions = _stream(deltas, prompt, args)
    for completion in _reject_errors(completions):
        if completion.logprobs is not None:
            _say_logprobs(llm, completion)
    return completions


def _reject_errors(completions: list[Completion]) -> list[Completion]:
    """
    Raises:
        EngineError: what ended one of them.
    """
    for completion in completions:
        if completion.error is not None:
            raise EngineError(completion.error)
    return completions


def first_delta_awaited(deltas: Iterator[Delta], text: str, quiet: bool) -> Iterator[Delta]:
    """The same deltas; a status line stands while the first one is on its way."""
    with terminal.status(text, quiet):
        first = next(deltas, None)
    if first is not None:
        yield first
        yield from deltas


def _completions(deltas: Iterator[Delta]) -> list[Completion]:
    done = [delta.completion for delta in deltas if delta.completion is not None]
    return sorted(done, key=lambda completion: completion.index)


def _stream(deltas: Iterator[Delta], prompt: str, args: argparse.Namespace) -> list[Completion]:
    """Writes text as it comes. Where all goes to one terminal, the prompt stands before it."""
    on_terminal = terminal.is_terminal(sys.stdout)
    echo = on_terminal and terminal.is_terminal(sys.stderr) and not args.quiet
    done, begun, last = [], False, ""
    for delta in deltas:
        if echo and not begun:
            terminal.write_faint(prompt)
        begun = True
        if delta.text:
            terminal.write(delta.text)
            last = delta.text
        if delta.completion is not None:
            done.append(delta.completion)
    if not last.endswith("\n"):
        terminal.write("\n")
    if not args.quiet:
        terminal.say()  # apart from the statistics, wherever the two go
    return done


def _say_empty(llm: LLM, completions: list[Completion]) -> None:
    """A line where the model ended a text at once, as one that learned from chats may."""
    ended = (
        each for each in completions if each.finish_reason == "stop" and each.stop_reason is None
    )
    if all(each.text for each in ended):
        return
    hint = ""
    if llm.tokenizer.chat_template is not None:
        hint = "; `generate` continues a plain text, `rooflax chat` has the chat template"
    terminal.say(f"the text ended before its first character{hint}")


def _say_logprobs(llm: LLM, completion: Completion) -> None:
    """One line per token on stderr: its log-probability, then the best others."""
    rows = []
    for token, entry in zip(completion.tokens, completion.logprobs or (), strict=True):
        others = (f"{_spelled(llm, i)} {value:.3f}" for i, value in entry.top)
        rows.append((str(token), _spelled(llm, token), f"{entry.logprob:.3f}", ", ".join(others)))
    for line in terminal.table([("id", "token", "logprob", "likeliest"), *rows], right=(0, 2)):
        terminal.say(line)


def _spelled(llm: LLM, token: int) -> str:
    return ascii(llm.tokenizer.decode([token], skip_special_tokens=False))


def document(llm: LLM, completions: list[Completion]) -> dict[str, Any]:
    """The JSON of `generate`: the first sample, and all of them if several were asked for."""
    from rooflax.cli import statistics

    first = completions[0]
    result: dict[str, Any] = {
        "model": llm.info.name,
        "prompt_tokens": list(first.prompt_tokens),
        **statistics.sample(first),
        "timings": dict(first.timings),
        "memory": statistics.memory(llm),
        "devices": statistics.num_devices(llm),
    }
    offloaded = statistics.offloading(llm, completions)
    if offloaded is not None:
        result["offloading"] = offloaded
    if any(completion.num_draft_tokens for completion in completions):
        result["num_draft_tokens"] = sum(c.num_draft_tokens for c in completions)
        result["num_accepted_tokens"] = sum(c.num_accepted_tokens for c in completions)
    if len(completions) > 1:
        result["samples"] = [statistics.sample(completion) for completion in completions]
    return result
