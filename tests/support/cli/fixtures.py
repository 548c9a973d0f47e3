"""Running commands in this process, as a user would."""

import io
import os
import sys
from dataclasses import dataclass
from functools import cache

import pytest

from rooflax.bench import ceilings, prediction
from rooflax.cli.main import main


@dataclass
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def rooflax(capsys, monkeypatch):
    """`rooflax("generate", "-n", 3, stdin=b"...")`; the environment is put back afterwards.

    What bounds this processor's speed is measured once, not for each prediction.
    """
    before = dict(os.environ)
    monkeypatch.setattr(prediction, "ceiling_reader", lambda _, multiplied: _read_once(multiplied))

    def run(*argv, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capsys.readouterr()
        code = main([str(part) for part in argv])
        return Ran(code, *capsys.readouterr())

    yield run
    os.environ.clear()
    os.environ.update(before)


@cache
def _read_once(multiplied):
    reading = ceilings.ceiling_reader(ceilings.SMALLEST_BUFFER, multiplied)()
    return lambda: reading
