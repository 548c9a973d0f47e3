"""Longer tests beside those of tests/engine/test_async_llm.py."""

import asyncio

from rooflax.engine.compilation import count_compilations
from tests.engine import test_async_llm as beside
from tests.engine.test_async_llm import settle
from tests.support.engine.load import random_requests

alone = beside.alone
server = beside.server


def test_many_callers_get_what_each_gets_alone(server, alone):
    requests = [r for r in random_requests(5, 24) if r.aborts is None]

    async def all_at_once():
        return await asyncio.gather(*(server.generate(r.prompt, r.params) for r in requests))

    with count_compilations() as counts:
        together = asyncio.run(all_at_once())
    assert counts.requests == 0
    for request, (completion,) in zip(requests, together, strict=True):
        wanted = alone.generate([request.prompt], request.params)[0]
        assert (completion.tokens, completion.text) == (wanted.tokens, wanted.text)
    settle(server)
