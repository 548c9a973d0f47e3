"""`rooflax serve`: the OpenAI-compatible server. SIGTERM drains it."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooflax.cli import flags, platform, serve_training, terminal
from rooflax.cli.parser import Parser
from rooflax.cli.session import follow, open_async_llm
from rooflax.errors import RequestError, RooflaxError, first_line
from rooflax.fields.declaration import declarations, variable_of
from rooflax.files import read_text
from rooflax.loading.settings import ServingSettings
from rooflax.models.presets import CHAT_NAME
from rooflax.server.settings import Settings

if TYPE_CHECKING:
    from rooflax.async_llm import AsyncLLM
    from rooflax.llm import LLM

NEEDED = ("starlette", "uvicorn", "httptools", "msgspec", "prometheus_client")
MAX_PIECES_PER_S = 2000
"""Pieces per second of all answers together: each costs a system call."""
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


def add_flags(parser: Parser) -> None:
    flags.add_model(parser, "the embedded chat model")
    flags.add_check(parser)
    for one in declarations(Settings).values():
        flags.add_field(parser, one)
    for name in (
        "loras",
        "max_loras",
        "max_lora_rank",
        "max_num_seqs",
        "max_tokens_per_step",
        "generation_config",
    ):
        flags.add_field(parser, flags.SETTINGS[name])
    _add_lora_flags_of_vllm(parser)
    flags.add_max_model_len(parser)
    flags.add_precision(parser)
    flags.add_weights_budget(parser)
    flags.add_execution(parser, cached=False)
    flags.add_speculation(parser)
    flags.add_device(parser, mesh=True, hosts=True)
    flags.add_output(parser, json=False)


def _add_lora_flags_of_vllm(parser: Parser) -> None:
    group = parser.group(flags.SETTINGS["loras"].group)
    group.add_argument(
        "--lora-modules", dest="loras", nargs="+", action="extend", default=[], metavar="NAME=DIR",
        help="as --lora, several at once, each NAME=DIR or JSON with name and path",
    )  # fmt: skip
    group.add_argument(
        "--enable-lora", action="store_true",
        help="room for an adapter, though none is given: --max-loras 1 unless it is said",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Listens, loads and serves until a signal."""
    take_variables(args)
    missing = next((name for name in NEEDED if importlib.util.find_spec(name) is None), None)
    if missing is not None:
        raise RequestError(
            f"The server needs the package {missing}; "
            "say `pip install '.[serve]'` in rooflax's folder."
        )
    template = _template(args.chat_template)
    settings = settings_of(args)
    args.model = args.model or CHAT_NAME
    args.loras = [lora_named(one) for one in args.loras]
    if args.enable_lora and not args.loras and args.max_loras is None:
        args.max_loras = 1
    for name in (lora.partition("=")[0] for lora in args.loras):
        if name in (settings.served_names or (args.model,)):
            raise RequestError(f"--lora {name} has the name of the model; give another.")
    if settings.lora_root is not None and not Path(settings.lora_root).is_dir():
        raise RequestError(f"--allow-lora-loading names {settings.lora_root}, which is no folder.")
    if settings.lora_root is not None and not args.loras and not args.max_loras:
        raise RequestError("--allow-lora-loading needs slots for adapters; give --max-loras.")
    if settings.training_folder is not None:
        serve_training.check_flags(args)
    platform.check_processes(args)
    if platform.names_job(args):
        platform.start_jax(args)
        import jax

        if jax.process_index() > 0:
            return _follow(args)
    from rooflax.server.listening import listen

    logging.basicConfig(handlers=[LogLines()], format="%(message)s", level=logging.WARNING)
    logging.getLogger("rooflax.server").setLevel(logging.INFO if args.verbose else logging.WARNING)
    says = (lambda _: None) if args.quiet else terminal.say
    with listen(settings) as listener, _signals_end_it():
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{port}"
        says(f"listening on {url}; loading {args.model}")
        if ip_address(host).is_unspecified:  # of this machine, and no address for others
            url = f"http://{socket.gethostname()}:{port}"
        from rooflax.server.run import ServerRunner

        if settings.training_folder is not None:
            says(f"the base URL for Tinker's clients is {url}")
            return serve_training.runner(args, settings, says).run(listener)
        says(f"the base URL for OpenAI's clients is {url}/v1")
        load = _loader(args, template, lambda: says(f"the page to chat is {url}/"))
        return ServerRunner(settings, load, says).run(listener)


def _follow(args: argparse.Namespace) -> int:
    """Runs what process 0 runs, until that ends; a signal, which all get, waits for its drain."""
    signals = (signal.SIGINT, signal.SIGTERM)

    def wait(number: int, frame: Any) -> None:
        for each in signals:
            signal.signal(each, _end)

    for number in signals:
        signal.signal(number, wait)
    follow(args, **_engine_settings(args))
    return 0


def _engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    names = ("max_num_seqs", "max_tokens_per_step", "loras", "max_loras", "max_lora_rank")
    return {name: getattr(args, name) for name in names}


class LogLines(logging.Handler):
    """Log records as lines on stderr, above a status that stands."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one."""
        terminal.say(self.format(record))


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
    from rooflax.cli.main import parser_of

    for action in parser_of("serve")._actions:
        name = variable_of(action.option_strings)
        text = os.environ.get(name)
        if text is None or action.dest in args.stated or not action.option_strings:
            continue
        if isinstance(action.default, list):
            parts = [text] if text.startswith("{") else text.split(",")  # JSON has commas too
            before = getattr(args, action.dest) or []  # of another flag for the same
            value: Any = [*before, *(part.strip() for part in parts if part.strip())]
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


def lora_named(text: str) -> str:
    """An adapter of --lora-modules as NAME=DIR: it is that, or JSON with name and path.

    Raises:
        RequestError: it is neither.
    """
    if not text.startswith("{"):
        if "=" not in text:
            raise RequestError(
                f"--lora has {text[:80]!r}, which is no NAME=DIR; MODEL stands before "
                f"--lora-modules."
            )
        return text
    try:
        stated = json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError(f"--lora-modules has {text[:80]}, which is no JSON.") from None
    if others := sorted(stated.keys() - {"name", "path"}):
        raise RequestError(f"--lora-modules has {others[0][:80]!r}; it takes name and path.")
    name, path = stated.get("name"), stated.get("path")
    if not (isinstance(name, str) and isinstance(path, str)) or "=" in name:
        raise RequestError(
            f"--lora-modules has {text[:80]}; name and path must be strings, name without =."
        )
    return f"{name}={path}"


def settings_of(args: argparse.Namespace) -> Settings:
    """The flags as what the server takes.

    Raises:
        RequestError: one of them cannot be.
    """
    for name, value in flags.values_of(args, ServingSettings).items():
        if value is not None:  # of the engine, which is made once the server listens
            flags.SETTINGS[name].kind.read(name, value)
    values = flags.values_of(args, Settings)
    if args.api_key_file is not None:
        values["api_keys"] = [*values["api_keys"], *_keys(args.api_key_file)]
    return Settings(**values)


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
        return read_text(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RequestError(f"{flag} {path[:80]} cannot be read: {why}.") from None


def _loader(
    args: argparse.Namespace, template: str | None, name_page: Callable[[], None]
) -> Callable[[Callable[[str], None]], AsyncLLM]:
    """Makes the engine, on whatever thread it is called.

    Args:
        name_page: called for a model that can be chatted with.
    """

    def load(progress: Callable[[str], None]) -> AsyncLLM:
        from rooflax.bench.roofline import Roofline

        with terminal.statuses(args.quiet) as show:

            def tell(text: str) -> None:
                progress(text)
                show(text)

            tell("loading the weights")
            engine = open_async_llm(
                args,
                max_waiting=args.max_waiting,
                max_pieces_per_s=MAX_PIECES_PER_S,
                **_engine_settings(args),
                report=lambda program: tell(f"compiling; {program.name} is done"),
            )
        if template is not None:
            engine.llm.tokenizer.chat_templates = {"default": template}
            engine.llm.tokenizer.response_template = None  # it is of the template before
        _warn_of_cache()
        if engine.llm.info.pooling is None:
            if engine.llm.tokenizer.chat_template is not None:
                name_page()
            _warn_of_template(engine.llm)
            tell("measuring what the machine allows")
            try:
                engine.set_roofline(Roofline(engine.llm).decode_s)
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
