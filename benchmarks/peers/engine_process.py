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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ANSWER_WITHIN_S = 900.0
MOST_TRIES = 3
IDLE_CPU_S = 0.05
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


def timed(
    engine: EngineProcess,
    engines: Sequence[EngineProcess],
    ask: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """What `ask` gets of an engine; asked again if something compiled meanwhile.

    Args:
        engines: those that must stand still, and maybe the one that works.

    Raises:
        EngineFailed: it fails, it compiles every time, or a waiting engine computed.
    """
    waiting = [other for other in engines if other is not engine]
    for _ in range(MOST_TRIES):
        cpu = [other.cpu_s() for other in waiting]
        found = ask()
        for other, earlier in zip(waiting, cpu, strict=True):
            if earlier is not None and (other.cpu_s() or 0.0) - earlier > IDLE_CPU_S:
                raise EngineFailed(f"{other.name} computed while it was stopped")
        if not found.pop("compilations", 0):
            return found
    raise EngineFailed(f"{engine.name} compiled something in each of {MOST_TRIES} trials")


def rounded(figures: dict[str, Any]) -> dict[str, Any]:
    """Five digits are more than any of them is good for."""
    return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in figures.items()}
