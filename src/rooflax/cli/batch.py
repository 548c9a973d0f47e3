"""`rooflax batch`: answers a file in OpenAI's batch format, through a server.

A line of the input has `custom_id`, `method` "POST", `url` and `body`; a line of the output
`custom_id` and `response` (or `error`), in the order in which answers come. Started again, it asks
what has no answer yet, or failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rooflax.cli import flags, terminal
from rooflax.cli.bench_serve import server_at
from rooflax.cli.lines import check_output, text_lines
from rooflax.cli.own_server import own_server, words_of
from rooflax.cli.parser import Parser, at_least_one
from rooflax.errors import RequestError
from rooflax.files import only_writer, read_regular, replacing
from rooflax.http_client import Client, Reply, reason

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
BUSY = (429, 503)
"""Statuses after which a request is sent again."""
MOST_TRIES, LONGEST_WAIT_S = 100, 30.0
MOST_REASONS, MOST_SAID = 5, 200


@dataclass(frozen=True)
class BatchRequest:
    """A line of the input."""

    name: str
    path: str
    body: dict[str, Any]


def add_flags(parser: Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?",
        help="model to serve with `rooflax serve`; default: the embedded chat model",
    )  # fmt: skip
    add = parser.group("the files").add_argument
    add("--input", "-i", metavar="FILE", required=True,
        help="requests, one JSON object a line; - is stdin")  # fmt: skip
    add("--output", "-o", metavar="FILE", required=True, help="answers; existing ones are kept")
    add("--force", action="store_true", help="replace existing answers")
    add = parser.group("the server").add_argument
    add("--url", metavar="URL", help="URL of a running server, in place of MODEL")
    add("--api-key", metavar="KEY", help="default ROOFLAX_API_KEY")
    add("--serve-flags", metavar="FLAGS", help='for MODEL: --serve-flags="-q int8"')
    add("--concurrency", metavar="N", type=at_least_one, default=32,
        help="requests open at once; default 32")  # fmt: skip
    flags.add_output(parser, json=False)


def run(args: argparse.Namespace) -> int:
    """Asks what has no answer; exits with 1 where a request failed."""
    for name in ("model", "serve_flags"):
        if args.url is not None and name in args.stated:
            shown = "MODEL" if name == "model" else "--serve-flags"
            raise RequestError(f"--url and {shown} exclude each other; drop one of them")
    if args.output == "-":
        raise RequestError("The answers go to a file, which a second run completes; name one.")
    requests = read_requests(args.input)
    with only_writer(args.output):
        return _answer(args, requests)


def _answer(args: argparse.Namespace, requests: list[BatchRequest]) -> int:
    check_output(args.input, args.output)
    done = set() if args.force else answered(args.output)
    todo = [request for request in requests if request.name not in done]
    try:
        file = open(args.output, "wb" if args.force else "ab")  # noqa: SIM115
    except OSError as error:
        raise RequestError(
            f"{args.output} cannot be written: {error.strerror}.", param="output"
        ) from None
    with file, contextlib.ExitStack() as stack:
        show = stack.enter_context(terminal.statuses(args.quiet))
        failed = Counter[str]()
        if todo:
            show("starting the server" if args.url is None else f"asking {args.url[:60]}")
            url = args.url or stack.enter_context(
                own_server(args.model, words_of("--serve-flags", args.serve_flags or ""))
            )
            server = server_at(url, args.api_key)
            asked = _ask_all(Client(server), todo, args.concurrency, file, show)
            failed = asyncio.run(asked)
    if failed and args.quiet:
        reason, count = failed.most_common(1)[0]
        terminal.say(f"{count} x {reason}")
    if not args.quiet:
        kept = f"; {len(requests) - len(todo)} were answered already" if done else ""
        num_failed = failed.total()
        terminal.say(f"{len(todo) - num_failed} answered, {num_failed} failed{kept}")
        for reason, count in failed.most_common(MOST_REASONS):
            terminal.say(f"{count} x {reason}")
    return 1 if failed else 0


def read_requests(path: str) -> list[BatchRequest]:
    """The input's requests.

    Raises:
        RequestError: naming the line.
    """
    requests: list[BatchRequest] = []
    names = set[str]()
    for number, line in text_lines(path):
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError):
            raise RequestError(f"Line {number} of {path} is not JSON.", param="input") from None
        try:
            request = _request(raw)
            if request.name in names:
                raise RequestError(f"custom_id {request.name[:60]!r} is there twice.")
        except RequestError as error:
            raise RequestError(f"Line {number} of {path}: {error}", param="input") from None
        names.add(request.name)
        requests.append(request)
    return requests


def _request(raw: Any) -> BatchRequest:
    wanted = {"custom_id": str, "method": str, "url": str, "body": dict}
    if not isinstance(raw, dict) or set(raw) != set(wanted):
        raise RequestError(f"it must be an object with {', '.join(wanted)}.")
    for name, kind in wanted.items():
        if not isinstance(raw[name], kind):
            raise RequestError(f"{name} must be {'an object' if kind is dict else 'text'}.")
    if raw["method"] != "POST" or raw["url"] not in ROUTES:
        raise RequestError(f"it must be a POST to one of {', '.join(ROUTES)}.")
    if raw["body"].get("stream"):
        raise RequestError("a batch has no streams; drop stream.")
    return BatchRequest(raw["custom_id"], raw["url"], raw["body"])


def answered(path: str) -> set[str]:
    """The custom_ids that the output has answers to. Lines of requests that failed, and one that
    was cut, are dropped from the file.

    Raises:
        RequestError: it holds something else.
    """
    if not Path(path).exists():
        return set()
    ids, kept, before = set[str](), [], read_regular(path)
    for line in before.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        try:
            raw = json.loads(line)
            name, has_failed = raw["custom_id"], _has_failed(raw)
            hash(name)
        except (ValueError, TypeError, KeyError, RecursionError):
            raise RequestError(
                f"{path} holds something else than a batch's answers; choose another file, or "
                f"replace it with --force.",
                param="output",
            ) from None
        if not has_failed:
            ids.add(name)
            kept.append(line)
    after = b"".join(kept)
    if after != before:
        with replacing(path) as file:
            file.write(after)
    return ids


def _has_failed(answer: dict[str, Any]) -> bool:
    return answer["error"] is not None or answer["response"]["status_code"] != 200


async def _ask_all(
    client: Client, todo: Sequence[BatchRequest], concurrency: int, file: IO[bytes], show: Any
) -> Counter[str]:
    """Asks all of them; why how many failed."""
    coming, failed, num_done, is_writable = iter(todo), Counter[str](), 0, True

    async def one_after_another() -> None:
        nonlocal num_done, is_writable
        for request in coming:
            answer = await _ask(client, request)
            if not is_writable:
                return  # another one's line may have been cut, and must stay the last
            is_writable = False
            file.write(terminal.json_text(answer).encode() + b"\n")
            file.flush()
            is_writable = True
            if _has_failed(answer):
                failed[_reason(answer)] += 1
            num_done += 1
            show(f"{num_done} of {len(todo)}")

    try:
        await asyncio.gather(*(one_after_another() for _ in range(min(concurrency, len(todo)))))
    finally:
        client.close()
    return failed


def _reason(answer: dict[str, Any]) -> str:
    if answer["error"] is not None:
        return str(answer["error"]["message"])[:MOST_SAID]
    message = reason(answer["response"]["body"])
    return (message or f"status {answer['response']['status_code']}")[:MOST_SAID]


async def _ask(client: Client, request: BatchRequest) -> dict[str, Any]:
    """A line of the output."""
    head = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": request.name}

    def failure(code: str, message: str) -> dict[str, Any]:
        return {**head, "response": None, "error": {"code": code, "message": message}}

    try:
        reply = await _patient(client, request)
    except OSError as error:
        return failure("connection_error", str(error) or type(error).__name__)
    except RecursionError:
        return failure("bad_request", "the body is nested too deeply")
    body = reply.json()
    if reply.status == 200 and not isinstance(body, dict):
        return failure("bad_answer", "the server's answer is not a JSON object")
    try:
        json.dumps(body)
    except RecursionError:
        return failure("bad_answer", "the server's answer is nested too deeply")
    response = {
        "status_code": reply.status,
        "request_id": reply.headers.get("x-request-id", ""),
        "body": body,
    }
    return {**head, "response": response, "error": None}


async def _patient(client: Client, request: BatchRequest) -> Reply:
    """Asks for the reply; retries after the time that a busy server states."""
    wait_s = 1.0
    for _ in range(MOST_TRIES - 1):
        reply = await client.post(request.path, request.body)
        if reply.status not in BUSY:
            return reply
        with contextlib.suppress(ValueError):
            stated = float(reply.headers.get("retry-after", wait_s))
            wait_s = stated if 0 <= stated < float("inf") else wait_s
        await asyncio.sleep(min(max(wait_s, 0.05), LONGEST_WAIT_S))
    return await client.post(request.path, request.body)
