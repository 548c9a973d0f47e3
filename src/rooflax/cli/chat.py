"""`rooflax chat`: a conversation in the terminal. Ctrl-C stops the answer, Ctrl-D ends."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rooflax.cli import flags, terminal
from rooflax.cli.generate import first_delta_awaited
from rooflax.cli.parser import Parser
from rooflax.cli.session import open_llm
from rooflax.cli.signals import stop_asked
from rooflax.conversation import Conversation
from rooflax.errors import CheckpointError, EngineError, RequestError, RooflaxError
from rooflax.loading.harmony import FINAL, HarmonyFilter, speaks_harmony

if TYPE_CHECKING:
    from rooflax.engine.sampling_params import SamplingParams
    from rooflax.llm import LLM

SUMMARY = "a conversation in the terminal"
DEFAULT_MAX_TOKENS = 512
PROMPT = "> "


def add_flags(parser: Parser) -> None:
    flags.add_model(parser)
    flags.add_check(parser)
    group = parser.group("conversation")
    group.add_argument("--system", metavar="TEXT", help="what the system message says")
    group.add_argument(
        "--show-thinking", action="store_true", help="show GPT-OSS's other channels too, faint"
    )
    flags.add_sampling(parser, max_tokens=DEFAULT_MAX_TOKENS, samples=False)
    flags.add_max_model_len(parser, "longest conversation in tokens; default the model's")
    flags.add_precision(parser)
    flags.add_weights_budget(parser)
    flags.add_execution(parser)
    flags.add_speculation(parser)
    flags.add_device(parser, mesh=True)
    flags.add_output(parser, json=False)


def run(args: argparse.Namespace) -> int:
    """Reads turns until the input ends."""
    params = flags.sampling_params(args)
    llm = open_llm(args)
    _check_flags_fit(llm, args)
    conversation = Conversation(llm, args.system)
    if not args.quiet:
        _greet(conversation)
    for question in _questions():
        try:
            _turn(conversation, question, params, args)
        except (CheckpointError, EngineError):
            raise
        except RooflaxError as error:
            terminal.say(f"rooflax: {error}")
    return 0


def _check_flags_fit(llm: LLM, args: argparse.Namespace) -> None:
    if args.system is not None and llm.tokenizer.chat_template is None:
        raise RequestError(f"--system needs a chat template, and {llm.info.name} has none.")
    if args.show_thinking and not speaks_harmony(llm.tokenizer):
        raise RequestError(
            f"--show-thinking is for GPT-OSS's channels, and {llm.info.name} has none."
        )


def _greet(conversation: Conversation) -> None:
    name = conversation.llm.info.name
    if not conversation.has_template:
        terminal.say(f"{name} has no chat template: it goes on with what you write.")
    if terminal.is_terminal(sys.stdin):
        hint = "Ctrl-C stops an answer, Ctrl-D ends the conversation."
        terminal.say(terminal.dim(hint, sys.stderr))


def _questions() -> Iterator[str]:
    """The user's lines; empty ones are passed over."""
    for line in _terminal_lines() if terminal.is_terminal(sys.stdin) else _piped_lines():
        if line.strip():
            yield line


def _terminal_lines() -> Iterator[str]:
    """Lines typed at the prompt; Ctrl-C twice in a row interrupts."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (editing and history for input())
    interrupted = False
    while True:
        try:
            line = input(PROMPT)
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            terminal.say("\n(Ctrl-D ends)")
            continue
        except EOFError:
            terminal.say()
            return
        except UnicodeDecodeError:
            raise RequestError("what was typed is not UTF-8; set the terminal to UTF-8.") from None
        interrupted = False
        yield line


def _piped_lines() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, start=1):
        yield terminal.decode(line, f"line {number} of stdin").rstrip("\r\n")


def _turn(
    conversation: Conversation, question: str, params: SamplingParams, args: argparse.Namespace
) -> None:
    llm = conversation.llm
    room = min(params.max_tokens or DEFAULT_MAX_TOKENS, max(llm.max_model_len // 2, 1))
    ids, forgotten = conversation.ask(question, room)
    if forgotten and not args.quiet:
        turns = "turn" if forgotten == 1 else f"{forgotten} turns"
        terminal.say(f"(the oldest {turns} no longer fit into the context and are forgotten)")
    show = _shower(llm, args)
    answer = ""
    with stop_asked() as stopped:
        deltas = first_delta_awaited(llm.stream([ids], params), "reading", args.quiet)
        try:
            for delta in deltas:
                answer += show(delta)
                if stopped():
                    break
        except RooflaxError:
            conversation.withdraw()
            raise
        finally:
            deltas.close()  # type: ignore[attr-defined]
    conversation.answer(answer)
    terminal.write("\n")


def _shower(llm: LLM, args: argparse.Namespace) -> Callable[[Any], str]:
    """What writes a delta to stdout and returns its part of the answer."""
    if speaks_harmony(llm.tokenizer) and llm.tokenizer.chat_template is not None:
        return _HarmonyWriter(HarmonyFilter(llm.tokenizer), args.show_thinking)

    def show(delta: Any) -> str:
        if delta.text:
            terminal.write(delta.text)
        return delta.text

    return show


class _HarmonyWriter:
    """Writes the final channel; the others too, faint and on stderr, if they are wanted."""

    def __init__(self, channels: HarmonyFilter, show_thinking: bool):
        self._channels, self._show_thinking = channels, show_thinking
        self._thinking = False

    def __call__(self, delta: Any) -> str:
        pieces = list(self._channels.push(delta.tokens))
        if delta.completion is not None:
            pieces += self._channels.flush()
        for channel, text in pieces:
            self._write(channel, text)
        return "".join(text for channel, text in pieces if channel == FINAL)

    def _write(self, channel: str, text: str) -> None:
        if channel == FINAL:
            if self._thinking:
                terminal.say()
                self._thinking = False
            terminal.write(text)
        elif self._show_thinking:
            shown = terminal.dim(terminal.harmless(text), sys.stderr)
            print(shown, end="", file=sys.stderr, flush=True)
            self._thinking = True
