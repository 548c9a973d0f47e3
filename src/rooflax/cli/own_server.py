"""A `rooflax serve` of one's own, in a process beside this one, for verbs that talk to a server."""

from __future__ import annotations

import contextlib
import re
import shlex
import threading
import time
from collections.abc import Iterator

from rooflax import processes
from rooflax.errors import EngineError, RequestError

LISTENING = re.compile(r"listening on (http://127\.0\.0\.1:\d+)")
END_S = 60.0


def words_of(flag: str, text: str) -> list[str]:
    """Flags given as one text.

    Raises:
        RequestError: its quotes have no end.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise RequestError(f"{flag} is {text!r}: {error}") from None


@contextlib.contextmanager
def own_server(model: str | None, flags: list[str]) -> Iterator[str]:
    """The URL of a server that is ready; it is ended afterwards.

    Args:
        flags: further ones of `rooflax serve`.

    Raises:
        RequestError: the server rejects the model or a flag.
        EngineError: it fails.
    """
    process = processes.start(
        "rooflax",
        ["serve", *([model] if model else []), *flags, "--host", "127.0.0.1", "--port", "0"],
        stderr=processes.PIPE,
        stdin=processes.DEVNULL,
        encoding="utf-8",
        errors="replace",
    )
    lines: list[str] = []
    assert process.stderr is not None
    reader = threading.Thread(target=lines.extend, args=(process.stderr,), daemon=True)
    try:
        url = _url(process, lines)
        reader.start()
        while not _is_ready(url):
            if process.poll() is not None:
                _failed(process.returncode, lines)
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except processes.TimeoutExpired:
            process.kill()
            process.wait()
        if reader.ident is not None:
            reader.join(END_S)
        process.stderr.close()


def _url(process: processes.Popen[str], lines: list[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)
        match = LISTENING.search(line)
        if match is not None:
            return match[1]
    return _failed(process.wait(), lines)


def _failed(code: int, lines: list[str]) -> str:
    why = next((line for line in reversed(lines) if line.startswith("rooflax:")), "no reason given")
    kind = RequestError if code == 2 else EngineError
    raise kind(why.removeprefix("rooflax:").strip())


def _is_ready(url: str) -> bool:
    import http.client  # 20 ms, which the other verbs need not wait

    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
