"""An engine in a process of its own, stopped whenever it is not asked for anything.

Some runtimes keep their threads spinning after work; a stopped process cannot. `cpu_s` says what a
process has computed, so that a caller can check it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ANSWER_WITHIN_S = 900.0
CLOSE_WITHIN_S = 20.0


class EngineFailed(Exception):
    """An engine said that it cannot, died, or did not answer."""


class EngineProcess:
    """A driver, loaded and waiting.

    Args:
        name: of the engine.
        command: that starts its driver.
        environment: added to this process's.
        log: where what it prints goes.

    Raises:
        EngineFailed: it did not start.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path
    ):
        self.name, self.log = name, log
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env={**os.environ, **environment},
            )
        self.pending = b""
        try:
            self.about = self._answer()
        except EngineFailed:
            self.close()
            raise

    def ask(self, **message: Any) -> dict[str, Any]:
        """Lets it run until it has answered.

        Raises:
            EngineFailed: the answer is an error, or there is none.
        """
        self.process.send_signal(signal.SIGCONT)
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise EngineFailed(f"{self.name} ended; see {self.log.name}") from error
        return self._answer()

    def cpu_s(self) -> float | None:
        """Processor seconds so far; None where the system does not say."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Ends it; by force if it does not."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(CLOSE_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        found = json.loads(self._line())
        self._stop()
        if "error" in found:
            raise EngineFailed(f"{self.name}: {found['error']}")
        return found

    def _stop(self) -> None:
        """Returns when it stands still, or has ended."""
        self.process.send_signal(signal.SIGSTOP)
        if self.process.returncode is None:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _line(self) -> bytes:
        assert self.process.stdout is not None
        while b"\n" not in self.pending:
            ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_WITHIN_S)
            if not ready:
                raise EngineFailed(f"{self.name} gave no answer in {ANSWER_WITHIN_S:.0f} s")
            piece = os.read(self.process.stdout.fileno(), 1 << 16)
            if not piece:
                raise EngineFailed(f"{self.name} ended; see {self.log.name}")
            self.pending += piece
        line, _, self.pending = self.pending.partition(b"\n")
        return line
