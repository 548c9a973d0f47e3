"""`rooflax chat --url`: the conversation of a server, not of a model that is loaded here."""

from __future__ import annotations

import argparse
import http.client
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from rooflax.cli import terminal
from rooflax.cli.bench_serve import server_at
from rooflax.cli.chat_input import is_command
from rooflax.cli.statistics import Speed
from rooflax.cli.wrapping import LineWrapper
from rooflax.engine.sampling_params import SamplingParams
from rooflax.errors import EngineError, RequestError
from rooflax.fields.declaration import CHAT
from rooflax.fields.kinds import is_whole as is_whole_number
from rooflax.fields.sampling import SAMPLING
from rooflax.http_client import (
    MOST_LINE,
    TOO_LONG,
    BadAnswer,
    Chunks,
    Server,
    choices,
    event,
    most_of,
    part,
    reason,
    too_long,
)

MEANT = (
    "model", "url", "api_key", "system", "prompt", "show_thinking", "quiet", "verbose",
    *(one.name for one in SAMPLING.values() if one.http_of(CHAT)),
)  # fmt: skip
"""Flags that mean something to a server."""
SILENCE_S = 600.0
READ_BYTES = 1 << 16


def check_flags(args: argparse.Namespace) -> None:
    """
    Raises:
        RequestError: a flag is about a model that is loaded here, or only for --url.
    """
    if args.url is None:
        if args.api_key is not None:
            raise RequestError("--api-key is for --url; give that too")
        return
    for name in args.stated:
        if name not in MEANT:
            from rooflax.cli.main import parser_of

            raise RequestError(
                f"{parser_of('chat').flag_of(name)} is about a model that is loaded here; with "
                f"--url drop it, or give it to the server"
            )


def run(args: argparse.Namespace, params: SamplingParams, questions: Iterable[str]) -> int:
    """Sends each question with what was said before; exits with 1 where one of them was rejected
    and stdin is no terminal."""
    server, messages = server_at(args.url, args.api_key), []
    is_watched, has_failed = terminal.is_terminal(sys.stdin), False
    if is_watched and not args.quiet:
        hint = f"{server.host}:{server.port} answers. Ctrl-C stops an answer, Ctrl-D or /bye ends."
        terminal.say(hint, is_faint=True)
    if args.system is not None:
        messages.append({"role": "system", "content": args.system})
    for question in questions:
        if is_command(question):
            terminal.say("rooflax: there are no commands with --url but /bye.")
            continue
        messages.append({"role": "user", "content": question})
        body = {"messages": messages, "stream": True} | body_of(params)
        if args.model is not None:
            body["model"] = args.model
        speed = Speed(args.quiet)
        if speed.is_shown:
            body["stream_options"] = {"include_usage": True}
        try:
            answer = _turn(server, body, args.show_thinking, speed)
        except RequestError as error:
            messages.pop()
            terminal.say(f"rooflax: {error}")
            has_failed = True
            continue
        if answer:
            messages.append({"role": "assistant", "content": answer})
        else:
            messages.pop()
        terminal.write("\n")
        speed.say()
    return 1 if has_failed and not is_watched else 0


def body_of(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters that differ from their defaults, as fields of a request."""
    plain = SamplingParams()
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    return {
        name: {str(token): bias for token, bias in value.items()} if isinstance(value, dict)
        else value
        for name, value in values.items() if value != getattr(plain, name)
    }  # fmt: skip


def _turn(server: Server, body: dict[str, Any], shows_thinking: bool, speed: Speed) -> str:
    """Writes an answer as it comes, until Ctrl-C; what it is.

    Raises:
        RequestError: the server rejects the question.
        EngineError: it does not answer, or fails.
    """
    kind = http.client.HTTPSConnection if server.is_tls else http.client.HTTPConnection
    connection = kind(server.host, server.port, timeout=SILENCE_S)
    answer, is_thinking, wrap = "", False, LineWrapper()
    try:
        path = f"{server.base}/v1/chat/completions"
        connection.request("POST", path, json.dumps(body).encode(), server.headers())
        reply = connection.getresponse()
        if reply.status != 200:
            _reject(reply)
        for thought, text in _pieces(reply, speed):
            if thought and shows_thinking:
                terminal.write_faint(thought)
                is_thinking = True
            if text and is_thinking:
                terminal.say()
                is_thinking = False
            answer += text
            if text:
                terminal.write(text, wrap)
    except KeyboardInterrupt:
        pass  # the server ends its answer when the connection closes
    except (EngineError, OSError, http.client.HTTPException) as error:
        if answer:
            terminal.write("\n")
        if isinstance(error, EngineError):
            raise
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if not isinstance(error, BadAnswer):
            why = f"The server {server.host}:{server.port} does not answer: {why}"
        raise EngineError(f"{why[0].upper()}{why[1:300]}.") from None
    finally:
        connection.close()
    return answer


def _pieces(reply: http.client.HTTPResponse, speed: Speed) -> Iterator[tuple[str, str]]:
    """Thoughts and text, as they come.

    Args:
        speed: is told when they come, and how many tokens the server counts.

    Raises:
        EngineError: the server fails while answering.
        BadAnswer: it is no such answer, or ends before its end.
    """
    is_whole = has_begun = False
    for data in _events(reply):
        has_begun = True
        if data == b"[DONE]":
            return
        chunk = event(data)
        if chunk.get("error") is not None:
            raise EngineError(reason(chunk) or "the server gives no reason")
        for choice in choices(chunk):
            is_whole |= choice.get("finish_reason") is not None
            delta = part(choice, "delta", dict)
            thought = part(delta, "reasoning_content") or part(delta, "reasoning")
            speed.count(0)
            yield thought, part(delta, "content")
        usage = chunk.get("usage")
        if isinstance(usage, dict) and is_whole_number(usage.get("completion_tokens"), int):
            speed.count(0, total=usage["completion_tokens"])
    if not is_whole:
        raise BadAnswer(f"the server's answer {'was cut' if has_begun else 'is no stream'}")


def _events(reply: http.client.HTTPResponse) -> Iterator[bytes]:
    """The data of server-sent events; each is one line."""
    rest = b""
    for data in _body(reply):
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > MOST_LINE:
            raise BadAnswer(TOO_LONG)
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _body(reply: http.client.HTTPResponse) -> Iterator[bytes]:
    """As it comes. http.client's own reading takes sizes of chunks below 0.

    Raises:
        BadAnswer: it is too long, or has no length that can be read.
    """
    if not reply.chunked and reply.length is None and reply.headers["content-length"] is not None:
        raise BadAnswer("the server's answer has a Content-Length that is not a number")
    chunks = Chunks() if reply.chunked else None
    read = reply.read1 if chunks is None else reply.fp.read1
    count, most = 0, most_of(reply.status)
    while data := read(READ_BYTES):
        count += len(data)
        if count > most:
            raise too_long(reply.status)
        yield data if chunks is None else chunks.take(data)
        if chunks is not None and chunks.is_whole:
            return


def _reject(reply: http.client.HTTPResponse) -> None:
    body = b"".join(_body(reply))
    try:
        message = reason(json.loads(body))
    except (ValueError, RecursionError):
        message = None
    status = reply.status
    kind = EngineError if status >= 500 and status != 503 else RequestError
    raise kind(message or f"status {status}")
