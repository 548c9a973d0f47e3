"""`rooflax chat --url`: the conversation of a server, not of a model that is loaded here."""

from __future__ import annotations

import argparse
import http.client
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rooflax.cli import terminal
from rooflax.cli.bench_serve import server_at
from rooflax.engine.sampling_params import SamplingParams
from rooflax.errors import EngineError, RequestError

if TYPE_CHECKING:
    from rooflax.http_client import Server

MEANT = (
    "model", "url", "api_key", "system", "prompt", "show_thinking", "max_tokens", "temperature",
    "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "stop", "stop_token_ids", "ignore_eos", "quiet", "verbose",
)  # fmt: skip
"""Flags that mean something to a server."""
SILENCE_S = 600.0


def check_flags(args: argparse.Namespace) -> None:
    """
    Raises:
        RequestError: a flag is about a model that is loaded here, or only for --url.
    """
    if args.url is None:
        if args.api_key is not None:
            raise RequestError("--api-key is for --url; give that too")
        return
    for name in args.given:
        if name not in MEANT:
            raise RequestError(
                f"--{name.replace('_', '-')} is about a model that is loaded here; with --url drop "
                f"it, or give it to the server"
            )


def run(args: argparse.Namespace, params: SamplingParams, questions: Iterable[str]) -> int:
    """Sends each question with what was said before; exits with 1 where one of them was rejected
    and nobody is there to ask another."""
    server, messages = server_at(args.url, args.api_key), []
    is_watched, has_failed = terminal.is_terminal(sys.stdin), False
    if is_watched and not args.quiet:
        hint = f"{server.host}:{server.port} answers. Ctrl-C stops an answer, Ctrl-D ends."
        terminal.say(hint, is_faint=True)
    if args.system is not None:
        messages.append({"role": "system", "content": args.system})
    for question in questions:
        if question.startswith("/"):
            terminal.say("rooflax: there are no commands with --url; Ctrl-D ends.")
            continue
        messages.append({"role": "user", "content": question})
        body = {"messages": messages, "stream": True} | body_of(params)
        if args.model is not None:
            body["model"] = args.model
        try:
            answer = _turn(server, body, args.show_thinking)
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
    return 1 if has_failed and not is_watched else 0


def body_of(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters that differ from their defaults, as fields of a request."""
    plain = SamplingParams()
    given = {field.name: getattr(params, field.name) for field in fields(params)}
    return {
        name: {str(token): bias for token, bias in value.items()} if isinstance(value, dict)
        else value
        for name, value in given.items() if value != getattr(plain, name)
    }  # fmt: skip


def _turn(server: Server, body: dict[str, Any], shows_thinking: bool) -> str:
    """Writes an answer as it comes, until Ctrl-C; what it is.

    Raises:
        RequestError: the server rejects the question.
        EngineError: it does not answer, or fails.
    """
    kind = http.client.HTTPSConnection if server.is_tls else http.client.HTTPConnection
    connection = kind(server.host, server.port, timeout=SILENCE_S)
    answer, is_thinking = "", False
    try:
        path = f"{server.base}/v1/chat/completions"
        connection.request("POST", path, json.dumps(body).encode(), server.headers())
        reply = connection.getresponse()
        if reply.status != 200:
            _reject(reply.status, reply.read())
        for chunk in _chunks(reply):
            if "error" in chunk:
                raise EngineError(_message(chunk))
            for choice in chunk.get("choices", ()):
                delta = choice.get("delta", {})
                thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
                if thought and shows_thinking:
                    shown = terminal.dim(terminal.harmless(thought), sys.stderr)
                    print(shown, end="", file=sys.stderr, flush=True)
                    is_thinking = True
                text = delta.get("content") or ""
                if text and is_thinking:
                    terminal.say()
                    is_thinking = False
                answer += text
                if text:
                    terminal.write(text)
    except KeyboardInterrupt:
        pass  # the server ends its answer when the connection closes
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise EngineError(
            f"The server {server.host}:{server.port} does not answer: {why}."
        ) from None
    finally:
        connection.close()
    return answer


def _chunks(reply: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in reply:
        data = line.strip().removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)


def _reject(status: int, body: bytes) -> None:
    try:
        said = _message(json.loads(body))
    except ValueError:
        said = f"status {status}"
    raise (EngineError if status >= 500 and status != 503 else RequestError)(said)


def _message(document: Any) -> str:
    error = document.get("error") if isinstance(document, dict) else None
    said = error.get("message") if isinstance(error, dict) else error
    return str(said or "the server gives no reason")[:300]
