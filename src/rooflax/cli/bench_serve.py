"""`rooflax bench serve`: load on an OpenAI server, and how fast it answers."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Any

from rooflax.cli import flags, terminal
from rooflax.cli.own_server import own_server, words_of
from rooflax.cli.parser import Parser, at_least_one, number, whole
from rooflax.errors import RequestError
from rooflax.http_client import Server

if TYPE_CHECKING:
    from rooflax.bench.load import ServerLoad


def add_flags(parser: Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?",
        help="model to serve with `rooflax serve`; default: the embedded chat model",
    )  # fmt: skip
    add = parser.group("the server").add_argument
    add("--url", metavar="URL", help="URL of a running server, in place of MODEL")
    add("--model-name", metavar="NAME", help="name at --url; default the first one there")
    add("--api-key", metavar="KEY", help="default ROOFLAX_API_KEY")
    add("--serve-flags", metavar="FLAGS", help='for MODEL: --serve-flags="-q int8"')
    add = parser.group("the load").add_argument
    add("--concurrency", metavar="N", type=at_least_one, help="requests open at once; default 16")
    add("--request-rate", metavar="R", type=number,
        help="requests arriving at R per second, in place of --concurrency")  # fmt: skip
    add("--requests", metavar="N", type=at_least_one, default=64, help="default 64")
    add("--mix", metavar="NAME", default="fixed", help="lengths: fixed (default), chat (log-normal "
        "around these), prefix (3/4 of a prompt shared), long (every 10th times 8)")  # fmt: skip
    add("--prompt-tokens", metavar="N", type=at_least_one, default=64, help="default 64")
    add("--output-tokens", metavar="N", type=at_least_one, default=64, help="default 64")
    add("--seed", metavar="N", type=whole, default=0, help="of lengths, prompts and arrivals; "
        "another one misses the server's prefix cache; default 0")  # fmt: skip
    add("--target-ttft", metavar="S", type=number, default=1.0, help="for goodput; default 1")
    add("--target-tpot", metavar="S", type=number, default=0.1, help="seconds a token; default 0.1")
    flags.add_output(parser)


def run(args: argparse.Namespace) -> int:
    for one, other in (("url", "model"), ("url", "serve_flags"), ("concurrency", "request_rate")):
        if one in args.stated and other in args.stated:
            names = ["MODEL" if n == "model" else f"--{n.replace('_', '-')}" for n in (one, other)]
            raise RequestError(f"{names[0]} and {names[1]} exclude each other; drop one of them")
    if args.url is None and args.model_name is not None:
        raise RequestError("--model-name is for --url; give that too")
    from rooflax.bench.load import ServerLoad, load_table

    load = ServerLoad(
        num_requests=args.requests,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        mix=args.mix,
        concurrency=args.concurrency or 16,
        per_s=args.request_rate,
        target_ttft_s=args.target_ttft,
        target_tpot_s=args.target_tpot,
        seed=args.seed,
    )
    with contextlib.ExitStack() as stack:
        show = stack.enter_context(terminal.statuses(args.quiet))
        show("starting the server" if args.url is None else f"asking {args.url[:60]}")
        url = args.url or stack.enter_context(
            own_server(args.model, words_of("--serve-flags", args.serve_flags or ""))
        )
        show(f"{args.requests} requests")
        result = asyncio.run(_measure(server_at(url, args.api_key), load, args.model_name))
    if args.json:
        terminal.print_json(result)
    else:
        print(terminal.harmless(load_table(result)))
    return 0 if result["failed"] == 0 else 1


def server_at(url: str, key: str | None) -> Server:
    """The server of a flag, with its key."""
    return Server.of(url, key or os.environ.get("ROOFLAX_API_KEY", "").split(",")[0] or None)


async def _measure(server: Server, load: ServerLoad, model: str | None) -> dict[str, Any]:
    from rooflax.bench.load import LoadTarget, run_load

    async with LoadTarget(server, model) as target:
        return await run_load(target, load)
