"""The installed command, and `python -m rooflax`: both leave the current folder out of imports.

Only what Python has imported by itself may be imported before that.
"""

import os
import sys


def _leave_current_folder(by_module: bool) -> None:
    """Removes the current folder from sys.path, unless rooflax or a full name in PYTHONPATH is it.

    Args:
        by_module: started by `python -m`, which put that folder in front.
    """
    try:
        here = os.getcwd()
    except OSError:  # it was deleted
        return
    if os.path.dirname(os.path.dirname(os.path.realpath(__file__))) == os.path.realpath(here):
        return
    added = int(by_module and not sys.flags.safe_path)
    entries = os.environ.get("PYTHONPATH", "") if not sys.flags.ignore_environment else ""
    named = entries.split(os.pathsep) if entries else []
    if here not in named and any(os.path.normpath(entry) == os.curdir for entry in named):
        added += 1
    for _ in range(added):
        entry = next((path for path in sys.path if (path or here) == here), None)
        if entry is not None:
            sys.path.remove(entry)


def _open_missing_streams() -> None:
    """Opens nothing in place of standard streams that the caller closed.

    Else the next file or socket gets the number of one, and Python has None for it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
            if getattr(sys, name) is None:
                setattr(sys, name, open(number, "w" if number else "r"))  # noqa: SIM115


def entry() -> None:
    """The console script."""
    _open_missing_streams()
    _leave_current_folder(by_module=__name__ == "__main__")
    if sys.argv[1:2] == ["train"]:
        from rooflax.processes import take_huge_pages

        take_huge_pages()
    import signal

    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_usual:  # nothing is open yet that had to be tidied up
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    from rooflax.cli.main import main
    from rooflax.signals import keep_interrupts

    keep_interrupts()
    if is_usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    entry()
