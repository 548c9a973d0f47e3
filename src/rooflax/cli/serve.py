"""`rooflax serve`: the OpenAI-compatible server. SIGTERM drains it."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooflax.cli import flags, terminal
from rooflax.cli.parser import Parser, at_least_one, number, whole
from rooflax.cli.session import open_async_llm
from rooflax.errors import RequestError, RooflaxError, first_line
from rooflax.models.presets import CHAT_NAME

if TYPE_CHECKING:
    from rooflax.async_llm import AsyncLLM
    from rooflax.llm import LLM
    from rooflax.server.settings import Settings

SUMMARY = "the OpenAI-compatible server"
NEEDED = ("starlette", "uvicorn", "httptools", "msgspec", "prometheus_client")
VARIABLES = "ROOFLAX_"
MAX_PORT = 65535
MAX_PIECES_PER_S = 2000
"""Of all answers together: each piece costs a system call, which nobody sees at this rate."""
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


def add_flags(parser: Parser) -> None:
    flags.add_model(parser, "the embedded chat model")
    flags.add_check(parser)
    add = parser.group("who may ask").add_argument
    add("--host", metavar="ADDRESS", default="127.0.0.1", help="default 127.0.0.1")
    add("--port", metavar="N", type=whole, default=8000, help="default 8000; 0 takes a free one")
    add("--api-key", metavar="KEY", action="append", default=[], help="who must be shown to ask; "
        "ROOFLAX_API_KEY hides it (repeatable)")  # fmt: skip
    add("--api-key-file", metavar="FILE", help="keys, one a line; # begins a comment")
    add("--insecure-no-auth", action="store_true", help="let everybody ask who reaches --host")
    add("--cors-origins", metavar="ORIGIN", action="append", default=[],
        help="pages that may ask; localhost is any port here (repeatable)")  # fmt: skip
    add = parser.group("answers").add_argument
    add("--served-model-name", metavar="NAME", action="append", default=[],
        help="in place of the model's own (repeatable)")  # fmt: skip
    add("--chat-template", metavar="FILE", help="jinja2, in place of the model's own")
    add("--generation-config", metavar="HOW", default="auto",
        help="auto (default) takes the checkpoint's sampling defaults, none the API's")  # fmt: skip
    add("--unknown-fields", metavar="HOW", default="reject",
        help="reject (default), or report in the header x-rooflax-ignored")  # fmt: skip
    add("--reasoning-field", metavar="NAME", default="reasoning_content",
        help="reasoning_content (default), reasoning, or both")  # fmt: skip
    add("--tokenizer-info", action="store_true",
        help="answer /tokenizer_info, with the chat template")  # fmt: skip
    add = parser.group("limits").add_argument
    add("--max-num-seqs", metavar="N", type=at_least_one, default=16,
        help="answers that run at once; default 16")  # fmt: skip
    add("--max-num-queued-seqs", metavar="N", type=at_least_one, default=64,
        help="answers that may wait; default 64")  # fmt: skip
    add("--max-inflight-per-key", metavar="N", type=at_least_one, default=0,
        help="answers a key may have open; default half with several keys")  # fmt: skip
    add("--max-body-bytes", metavar="N", type=at_least_one, default=4 * 2**20,
        help="of a request; default 4 MiB")  # fmt: skip
    add("--max-num-batched-tokens", metavar="N", type=at_least_one,
        help="tokens of a step; default what takes at most 0.3 s")  # fmt: skip
    add("--request-timeout", metavar="S", type=number, default=600.0, help="default 600")
    add("--drain-timeout", metavar="S", type=number, default=30.0,
        help="for open answers at the end; default 30")  # fmt: skip
    add("--watchdog", metavar="S", type=number, default=60.0,
        help="without a step before /health fails; default 60")  # fmt: skip
    add("--stay", action="store_true", help="answer 503 when the engine has died; else exit 1")
    flags.add_max_model_len(parser, "longest context, prompt included; default the model's")
    flags.add_precision(parser)
    flags.add_weights_budget(parser)
    flags.add_execution(parser, cached=False)
    flags.add_speculation(parser)
    flags.add_device(parser, mesh=True)
    flags.add_output(parser, json=False)


def run(args: argparse.Namespace) -> int:
    """Listens, loads and serves until a signal."""
    take_variables(args)
    missing = next((name for name in NEEDED if importlib.util.find_spec(name) is None), None)
    if missing is not None:
        raise RequestError(
            f"The server needs the package {missing}; say `pip install 'rooflax[serve]'`."
        )
    template = _template(args.chat_template)
    settings = settings_of(args)
    args.model = args.model or CHAT_NAME
    from rooflax.server.listening import listen

    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING)
    logging.getLogger("rooflax.server").setLevel(logging.INFO if args.verbose else logging.WARNING)
    says = (lambda _: None) if args.quiet else terminal.say
    with listen(settings) as listener, _signals_end_it():
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        says(f"listening on http://{shown}:{port}; loading {args.model}")
        from rooflax.server.run import Runner

        return Runner(settings, _loader(args, template), says).run(listener)


@contextlib.contextmanager
def _signals_end_it() -> Iterator[None]:
    """Until the loop has its own handlers; an event loop that starts may lose an exception."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [(number, signal.signal(number, _end)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _end(number: int, frame: Any) -> None:
    os._exit(0 if number == signal.SIGTERM else 130)


def take_variables(args: argparse.Namespace) -> None:
    """Flags that were not given, from ROOFLAX_* variables: --api-key is ROOFLAX_API_KEY.

    Raises:
        RequestError: a value is not of the flag's kind.
    """
    parser = Parser("serve", SUMMARY, takes_model=True)
    add_flags(parser)
    for action in parser._actions:
        name = f"{VARIABLES}{action.dest.upper()}"
        text = os.environ.get(name)
        if text is None or action.dest in args.given or not action.option_strings:
            continue
        if isinstance(action.default, list):
            value: Any = [part.strip() for part in text.split(",") if part.strip()]
        elif action.nargs == 0:
            if text.lower() not in (*_YES, *_NO):
                raise RequestError(f"{name} is {text[:40]!r}; it must be 1 or 0.")
            value = text.lower() in _YES
        else:
            try:
                value = action.type(text) if callable(action.type) else text
            except argparse.ArgumentTypeError as error:
                raise RequestError(f"{name}: {error}.") from None
        setattr(args, action.dest, value)


def settings_of(args: argparse.Namespace) -> Settings:
    """The flags as what the server takes.

    Raises:
        RequestError: one of them cannot be.
    """
    from rooflax.server.settings import Settings

    if not 0 <= args.port <= MAX_PORT:
        raise RequestError(f"port is {args.port}; it must be from 0 to {MAX_PORT}.", param="port")
    for flag, value, known in (
        ("--generation-config", args.generation_config, ("auto", "none")),
        ("--unknown-fields", args.unknown_fields, ("reject", "report")),
        ("--reasoning-field", args.reasoning_field, ("reasoning_content", "reasoning", "both")),
    ):
        if value not in known:
            raise RequestError(f"{flag} is {value!r}; it must be one of {', '.join(known)}.")
    for flag in ("request_timeout", "drain_timeout", "watchdog"):
        if not 0 < getattr(args, flag) < 1e9:
            raise RequestError(f"{flag} is {getattr(args, flag)}; it must be above 0.", param=flag)
    keys = [*args.api_key, *(_keys(args.api_key_file) if args.api_key_file else ())]
    return Settings(
        host=args.host,
        port=args.port,
        api_keys=tuple(keys),
        served_names=tuple(args.served_model_name),
        max_waiting=args.max_num_queued_seqs,
        max_per_key=args.max_inflight_per_key,
        max_body_bytes=args.max_body_bytes,
        cors_origins=tuple(args.cors_origins),
        reports_unknown_fields=args.unknown_fields == "report",
        reasoning_field=args.reasoning_field,
        request_s=args.request_timeout,
        drain_s=args.drain_timeout,
        stall_s=args.watchdog,
        stays=args.stay,
        tells_tokenizer=args.tokenizer_info,
        allows_anyone=args.insecure_no_auth,
    )


def _keys(path: str) -> list[str]:
    text = _read(path, "--api-key-file")
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    keys = [line for line in lines if line]
    if not keys:
        raise RequestError(f"--api-key-file {path[:80]} has no key; write one a line.")
    if os.name == "posix" and os.stat(path).st_mode & 0o004:
        terminal.say(f"rooflax: everybody on this machine can read {path}; chmod 600 it.")
    return keys


def _template(path: str | None) -> str | None:
    return None if path is None else _read(path, "--chat-template")


def _read(path: str, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RequestError(f"{flag} {path[:80]} cannot be read: {why}.") from None


def _loader(
    args: argparse.Namespace, template: str | None
) -> Callable[[Callable[[str], None]], AsyncLLM]:
    """Makes the engine, on whatever thread it is called."""

    def load(progress: Callable[[str], None]) -> AsyncLLM:
        from rooflax.bench.roofline import Roofline

        with terminal.statuses(args.quiet) as show:

            def tell(text: str) -> None:
                progress(text)
                show(text)

            tell("loading the weights")
            engine = open_async_llm(
                args,
                max_num_seqs=args.max_num_seqs,
                max_waiting=args.max_num_queued_seqs,
                max_tokens_per_step=args.max_num_batched_tokens,
                max_pieces_per_s=MAX_PIECES_PER_S,
                report=lambda program: tell(f"compiling; {program.name} is done"),
            )
        if template is not None:
            engine.llm.tokenizer.chat_templates = {"default": template}
            engine.llm.tokenizer.response_template = None  # it is of the template before
        if args.generation_config == "none":
            engine.llm.processor.forget_sampling_defaults()
        _warn_of_cache()
        if engine.llm.info.pooling is None:
            _warn_of_template(engine.llm)
            tell("measuring what the machine allows")
            try:
                engine.compares_with(Roofline(engine.llm).decode_s)
            except Exception as error:  # such as no memory for it; the server does without
                terminal.say(f"rooflax: the machine could not be measured: {first_line(error)}.")
        gc.collect()
        gc.freeze()  # what is there now stays; the collector need not look at it again
        return engine

    return load


def _warn_of_cache() -> None:
    """Says that the next start will compile again, where that is so."""
    from rooflax.engine.compilation import enable_persistent_cache
    from rooflax.folders import cache_folder

    if enable_persistent_cache() is None:
        terminal.say(
            f"rooflax: compiled programs cannot be kept: {cache_folder()} is not writable."
        )


def _warn_of_template(llm: LLM) -> None:
    """Says that chats will be rejected, where the template fails on the simplest one."""
    try:
        llm.encode_chat([{"role": "user", "content": "Hi"}])
    except RooflaxError as error:
        terminal.say(f"rooflax: chats will be rejected: {first_line(error)}")
