"""Runs a module in a child of `processes.start`, and ends it with its parent.

`python -P -m rooflax.child FD MODULE ARGUMENTS`: FD reads a pipe that the parent holds open and
never writes to, so that it ends when the parent does, even by SIGKILL.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

GRACE_S = 60.0
"""From SIGTERM, on which a server drains, to the end."""


def _end_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(128 + signal.SIGTERM)


def main() -> None:
    """Runs the module that the command line names, as `python -m` does."""
    _, lifeline, module, *arguments = sys.argv
    os.set_inheritable(int(lifeline), False)
    threading.Thread(target=_end_with_parent, args=(int(lifeline),), daemon=True).start()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
