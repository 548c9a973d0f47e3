"""Files that a user names: regular and bounded ones are read, and one process writes."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from rooflax.cli import lines
from rooflax.errors import CheckpointError, RequestError
from rooflax.files import only_writer, open_regular, read_input, read_regular, read_text, replacing
from rooflax.loading.gguf import GGUFFile
from rooflax.loading.safetensors import SafetensorsFile
from tests import gguf_cases

HOLD = """
import sys
from rooflax.files import only_writer
with only_writer(*sys.argv[1:]):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def holding(*paths):
    """A process that writes a path."""
    command = [sys.executable, "-c", HOLD, *map(str, paths)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_a_second_writer_is_rejected_until_the_first_has_ended(tmp_path):
    out = tmp_path / "out"
    with holding(out) as process:
        said = pytest.raises(RequestError, match="out is being written by another process")
        with said, only_writer(out):
            pass
        with only_writer(tmp_path / "another"):
            pass
        process.stdin.close()
        assert process.wait() == 0
        with only_writer(out):
            pass
    assert not list(tmp_path.iterdir())


def test_a_killed_writer_leaves_no_lock(tmp_path):
    with holding(tmp_path / "out") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert len(list(tmp_path.iterdir())) == 1
        with only_writer(tmp_path / "out"):
            pass
    assert not list(tmp_path.iterdir())


def test_a_signal_while_the_lock_is_taken_leaves_none(tmp_path, monkeypatch):
    flock, calls = fcntl.flock, []

    def interrupted(descriptor, how):
        flock(descriptor, how)
        calls.append(descriptor)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(fcntl, "flock", interrupted)
    with pytest.raises(KeyboardInterrupt), only_writer(tmp_path / "out"):
        pass
    assert not list(tmp_path.iterdir())


def test_every_name_of_a_file_is_that_file(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "there").symlink_to("folder/new")
    monkeypatch.chdir(tmp_path)
    names = ["folder/new", "link/new", "there", "folder/../link/new", tmp_path / "folder/new"]
    for name in names:
        with holding(name):
            for other in names:
                with pytest.raises(RequestError), only_writer(other):
                    pass


def test_a_lock_within_a_folder_that_is_new(tmp_path):
    out = tmp_path / "a/b"
    with only_writer(out, out / ".lock", makes_folders=True):
        assert [path.name for path in out.iterdir()] == [".lock"]
    assert not list(tmp_path.iterdir())
    with only_writer(out, out / ".lock", makes_folders=True):
        (out / "kept").touch()
    assert [path.name for path in out.iterdir()] == ["kept"]
    with only_writer(tmp_path / "new/out"), only_writer(tmp_path / "new/out"):
        assert not (tmp_path / "new").exists()  # nothing can be written there


TAKE_TURNS = """
import sys, time
from pathlib import Path
from rooflax.errors import RequestError
from rooflax.files import only_writer
folder, until = Path(sys.argv[1]), time.monotonic() + 2
while time.monotonic() < until:
    try:
        with only_writer(folder / "out"):
            (folder / "mark").touch(exist_ok=False)  # fails where another one is inside
            (folder / "mark").unlink()
            with open(folder / "count", "a") as file:
                file.write("x")
    except RequestError:
        pass
"""


def test_of_many_at_once_one_writes(tmp_path):
    """Also while locks are removed and made again."""
    command = [sys.executable, "-c", TAKE_TURNS, str(tmp_path)]
    running = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait() for process in running] == [0] * 4
    assert len((tmp_path / "count").read_text()) > 10
    assert [path.name for path in tmp_path.iterdir()] == ["count"]


def test_where_no_lock_can_be_made_there_is_none():
    with only_writer("/proc/out"), only_writer("/proc/out"):
        pass


def test_what_is_no_regular_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "zero", tmp_path):
        for read in (read_regular, read_input, open_regular):
            started = time.monotonic()
            with pytest.raises(OSError) as caught:
                read(path)
            assert caught.value.strerror in (
                "it is not a regular file", "Is a directory", "nothing was written into the pipe"
            )  # fmt: skip
            assert time.monotonic() - started < 1


@contextlib.contextmanager
def piped(data):
    """The name of a pipe that gets so many bytes, slowly, as of `<(...)`."""
    source, sink = os.pipe()

    def write():
        with contextlib.suppress(BrokenPipeError), open(sink, "wb", buffering=0) as file:
            for begin in range(0, len(data), 50_000):
                time.sleep(0.01)
                file.write(data[begin : begin + 50_000])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield f"/dev/fd/{source}"
    finally:
        os.close(source)
        writer.join()


def test_a_pipe_is_read_to_its_end_or_its_bound(monkeypatch):
    data = b"0123456789" * 40_000
    with piped(data) as name:
        assert read_input(name) == data
    with piped(b"a\r\nb") as name:
        assert read_text(name) == "a\nb"
    with piped(data) as name, pytest.raises(OSError) as caught:
        read_input(name, 399_999)
    assert caught.value.strerror.startswith("it has more than 399999 bytes")
    for most, fits in ((5, True), (4, False)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"12345")))
        with contextlib.nullcontext() if fits else pytest.raises(OSError):
            assert read_input("-", most) == b"12345"


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_a_mapped_file_that_was_cut_is_not_read(tmp_path, kind):
    """Reading beyond its end would end the process with a signal."""
    copy = tmp_path / f"m.{kind}"
    if kind == "gguf":
        shutil.copy(gguf_cases.gguf("llama3", "f32"), copy)
        file, name = GGUFFile(copy), "output_norm.weight"
    else:
        arrays = {"a": np.arange(10_000, dtype=np.float32), "b": np.ones(5_000, np.float32)}
        safetensors.numpy.save_file(arrays, copy)
        file, name = SafetensorsFile(copy), "b"
    whole = np.array(file.read(name))
    data = copy.read_bytes()
    os.truncate(copy, 4096)
    with pytest.raises(CheckpointError, match=rf"m.{kind} was cut from \d+ to 4096 bytes"):
        file.read(name)
    copy.write_bytes(data + b"more")
    np.testing.assert_array_equal(file.read(name), whole)


def test_what_is_too_large_is_not_read(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"12345678")
    assert read_regular(file, 8) == b"12345678"
    with pytest.raises(OSError) as caught:
        read_regular(file, 7)
    assert caught.value.strerror == "it has 8 bytes, and at most 7 are read"
    os.truncate(file, 1 << 40)  # sparse
    with pytest.raises(OSError):
        read_regular(file)
    grows = "/proc/self/status"  # it states no size
    assert read_regular(grows, 1 << 16) and Path(grows).stat().st_size == 0
    with pytest.raises(OSError):
        read_regular(grows, 10)


def test_text_is_utf8_with_one_kind_of_line_end(tmp_path):
    (tmp_path / "file").write_bytes("ä\r\nb\rc\n".encode())
    assert read_text(tmp_path / "file") == "ä\nb\nc\n"
    (tmp_path / "file").write_bytes(b"\xff")
    with pytest.raises(UnicodeDecodeError):
        read_text(tmp_path / "file")


def test_what_is_replaced_keeps_its_links_and_is_whole_or_as_before(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/file")
    for text in ("one", "two"):  # the first is made where the link leads
        with replacing(tmp_path / "link", "utf-8") as file:
            file.write(text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "folder/file").read_text() == text

    def fails():
        with replacing(tmp_path / "link") as file:
            file.write(b"three")
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert (tmp_path / "folder/file").read_text() == "two"
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["file"]


def test_a_line_of_input_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_TEXT_BYTES", 8)
    path = tmp_path / "in.txt"
    path.write_bytes(b"1234567\n\n12345678")
    assert list(lines.text_lines(str(path))) == [(1, "1234567"), (3, "12345678")]
    path.write_bytes(b"one\n123456789\n")
    with pytest.raises(RequestError, match=r"^Line 2 of .* has more than 8 bytes"):
        list(lines.text_lines(str(path)))
