"""`rooflax chat` in a process with a terminal of its own."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

READY = "<ready>"
TIMEOUT_S = 30


class Terminal:
    """A chat at a terminal of its own."""

    def __init__(self, folder, *flags, columns=200, **env):
        self._fd, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        env = {"TERM": "xterm", "XDG_STATE_HOME": str(folder), "PYTHONPATH": os.getcwd()} | env
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.cli.talking", *flags], stdin=inner, stdout=inner,
            stderr=inner, env=os.environ | env, start_new_session=True,
        )  # fmt: skip
        os.close(inner)
        self.written, self._read = b"", 0

    def type(self, text):
        os.write(self._fd, text.encode())

    def until(self, wanted):
        """What it writes up to a text, and with it."""
        end = time.monotonic() + TIMEOUT_S
        while (at := self.plain.find(wanted, self._read)) < 0:
            assert time.monotonic() < end, (wanted, self.plain[self._read :])
            if select.select([self._fd], [], [], 0.1)[0]:
                self.written += os.read(self._fd, 1 << 16)
        begin, self._read = self._read, at + len(wanted)
        return self.plain[begin : self._read]

    @property
    def plain(self):
        """All that it wrote, without escapes but for READY where it waits for a message."""
        text = self.written.decode(errors="replace").replace("\x1b[?2004h", READY)
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\b]", "", text)

    def ask(self, text):
        """Sends a line and waits for the answer and until it may be asked again."""
        self.type(f"{text}\r")
        return self.until("tokens") + self.until(READY)

    def ends(self):
        """The exit code, and all that was still written."""
        with contextlib.suppress(OSError):  # the other end is closed
            while more := os.read(self._fd, 1 << 16):
                self.written += more
        return self.process.wait(TIMEOUT_S), self.plain[self._read :]

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._fd)
