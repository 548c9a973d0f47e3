"""Running commands in this process, as a user would."""

import io
import os
import sys
from dataclasses import dataclass

import pytest

from rooflax.cli.main import main


@dataclass
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def rooflax(capsys, monkeypatch):
    """`rooflax("generate", "-n", 3, stdin=b"...")`; the environment is put back afterwards."""
    before = dict(os.environ)

    def run(*argv, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capsys.readouterr()
        code = main([str(part) for part in argv])
        return Ran(code, *capsys.readouterr())

    yield run
    os.environ.clear()
    os.environ.update(before)
