"""A server of one's own: ready when it is given, gone afterwards, its failures told."""

import contextlib
import http.client

import pytest

from rooflax.cli.own_server import own_server, words_of
from rooflax.errors import RequestError
from rooflax.models.presets import CHAT_NAME

pytestmark = pytest.mark.oldest_jax


def status(url: str) -> int:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", "/ready")
        return connection.getresponse().status


def test_it_is_ready_and_it_ends():
    with own_server(CHAT_NAME, ["--max-num-seqs", "1", "--max-model-len", "64"]) as url:
        assert status(url) == 200
    with pytest.raises(ConnectionRefusedError):
        status(url)


@pytest.mark.parametrize(
    ("model", "flags", "said"),
    [("preset:none", [], "no preset 'none'"), (CHAT_NAME, ["--nonsense"], "nonsense")],
)
def test_what_it_rejects_is_said(model, flags, said):
    with pytest.raises(RequestError, match=said), own_server(model, flags):
        pass


def test_flags_in_one_text():
    assert words_of("--serve", "--name 'a b' -q int8") == ["--name", "a b", "-q", "int8"]
    with pytest.raises(RequestError, match="--serve"):
        words_of("--serve", "'a")
