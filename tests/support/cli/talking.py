"""`rooflax chat` with a model that repeats what it is asked.

`python -m tests.support.cli.talking [FLAGS]`. No JAX, so that a terminal can be driven quickly.
"""

from __future__ import annotations

import contextlib
import fcntl
import sys
import termios
import time
from types import SimpleNamespace

from rooflax.cli import chat
from rooflax.cli.main import main
from rooflax.models.presets import CHAT_NAME

SLOW = "slow"
"""A question that begins so is answered without end."""


class Echo:
    """Answers `[what was asked]`, a word at a time."""

    max_model_len = 100_000
    info = SimpleNamespace(
        name=CHAT_NAME,
        config=SimpleNamespace(num_parameters=4_676_352, is_causal=True, has_head=True),
    )
    processor = SimpleNamespace(chat_values=dict)
    tokenizer = SimpleNamespace(chat_template="x", convert_token_to_id=lambda token: None)

    def encode_chat(self, messages):
        return [ord(character) for character in messages[-1]["content"]]

    def stream(self, prompts, params):
        asked = "".join(map(chr, prompts[0]))
        if asked.startswith(SLOW):
            while True:
                yield SimpleNamespace(text="and on ", tokens=(1, 2), completion=None)
                time.sleep(0.05)
        for word in f"[{asked}] seed {params.seed}".split(" "):
            yield SimpleNamespace(text=f"{word} ", tokens=(1,), completion=None)


if __name__ == "__main__":
    with contextlib.suppress(PermissionError):  # of a shell's child, which has its terminal
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C there interrupts this process
    chat.open_llm = lambda args: Echo()  # type: ignore[assignment]
    chat.speaks_harmony = lambda tokenizer: False
    sys.exit(main(["chat", *sys.argv[1:]]))
