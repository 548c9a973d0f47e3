"""The way of a request through the code: which files it enters, in order, once all is compiled.

python tools/trace_walk.py prompt    from `LLM.generate` to its tokens
python tools/trace_walk.py chat      from the socket to the engine's queue

The predicates of `rooflax.fields` are left out, as in trace_setting.py, and so is what `dataclass`
and `NamedTuple` generate: it has no line in a file.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from rooflax import LLM, AsyncLLM
from rooflax.models.presets import CHAT_NAME
from rooflax.server.listening import listen
from rooflax.server.run import ServerRunner
from rooflax.server.settings import Settings

MODEL = "preset:gpt2-tiny"
LEFT_OUT = ("rooflax.fields.",)


class Walk:
    """Files with the functions that are entered in them, while `is_watching`."""

    def __init__(self, end: str | None = None):
        self.files: dict[str, dict[str, None]] = {}
        self.is_watching, self._end = False, end

    def watch(self, frame: FrameType, event: str, argument: object) -> None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        is_ours = module.startswith("rooflax.") and not module.startswith(LEFT_OUT)
        is_ours &= not frame.f_code.co_filename.startswith("<")
        if event != "call" or not self.is_watching or not is_ours or name == "<module>":
            return
        self.files.setdefault(module, {})[name] = None
        self.is_watching = f"{module}.{name}" != self._end


def prompt() -> Walk:
    llm, walk = LLM(MODEL), Walk()
    llm.generate("Once upon", max_tokens=3, temperature=0.0)
    walk.is_watching = True
    sys.setprofile(walk.watch)
    try:
        llm.generate("Once upon a time", max_tokens=3, temperature=0.0)
    finally:
        sys.setprofile(None)
    return walk


def chat() -> Walk:
    walk, settings = Walk("rooflax.engine.thread.submit"), Settings(port=0)
    threading.setprofile(walk.watch)
    with listen(settings) as listener:
        runner = ServerRunner(settings, lambda _: AsyncLLM(CHAT_NAME), lambda _: None)
        thread = threading.Thread(target=runner.run, args=(listener,))
        thread.start()
        while runner.service.state == "loading":
            time.sleep(0.05)
        for walk.is_watching in (False, True):
            _ask(listener.getsockname()[1])
        runner.stop()
        thread.join()
    threading.setprofile(None)
    return walk


def _ask(port: int) -> None:
    body = {"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 3}
    connection = http.client.HTTPConnection("127.0.0.1", port)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    assert connection.getresponse().status == 200
    connection.close()


WALKS: dict[str, Callable[[], Walk]] = {"prompt": prompt, "chat": chat}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("walk", choices=WALKS)
    walk = WALKS[parser.parse_args().walk]()
    for module, functions in walk.files.items():
        sys.stdout.write(f"{module:36} {' '.join(functions)}\n")
    sys.stdout.write(f"{len(walk.files)} files\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
