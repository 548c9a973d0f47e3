"""The safetensors reader and writer: round trips, the safetensors package, every malformed file."""

import io
import json
import os
import pickle
import time

import ml_dtypes
import numpy as np
import pytest

from rooflax.errors import CheckpointError
from rooflax.loading import safetensors as st


def file_bytes(header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def write_arrays(path, arrays, **kwargs):
    st.write_safetensors(
        path,
        [(n, st.dtype_name(a.dtype), a.shape, lambda a=a: a) for n, a in arrays.items()],
        **kwargs,
    )


@pytest.fixture
def every_dtype():
    rng = np.random.default_rng(0)
    arrays = {}
    for i, (name, dtype) in enumerate(st.DTYPES.items()):
        raw = rng.integers(0, 2 if name == "BOOL" else 256, (3, 5 + i, dtype.itemsize), np.uint8)
        arrays[f"t.{name}"] = raw.view(dtype)[..., 0]
    return arrays | {"scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 4), np.float16)}


def test_round_trip_of_every_dtype(tmp_path, every_dtype):
    path = tmp_path / "model.safetensors"
    write_arrays(path, every_dtype)
    file = st.SafetensorsFile(path)
    assert sorted(file.names()) == sorted(every_dtype)
    assert file.metadata == {"format": "pt"}
    for name, array in every_dtype.items():
        got = file.read(name)
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        assert got.tobytes() == array.tobytes()
        assert file.info(name) == st.TensorInfo(
            st.dtype_name(array.dtype), array.shape, array.nbytes
        )
        assert not got.flags.writeable
        if array.size:
            assert not got.flags.owndata
            assert got.flags.aligned
        file.release(name)
        assert file.read(name).tobytes() == array.tobytes()


def test_a_file_that_changes_while_it_is_open_is_read_whole_or_not(tmp_path, every_dtype):
    path = tmp_path / "model.safetensors"
    write_arrays(path, every_dtype)
    file = st.SafetensorsFile(path, is_mapped=False)
    for name, array in every_dtype.items():
        assert file.read(name).tobytes() == array.tobytes()
        file.prefetch(name)
    content = path.read_bytes()
    for changed in (content[:-100], content[:-1] + b"!"):
        path.write_bytes(content)
        file = st.SafetensorsFile(path, is_mapped=False)
        os.utime(path, ns=(1, 1))  # some file systems' clocks are slow
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"model\.safetensors was changed while it was"):
            file.read("t.F64")


def test_reads_what_the_safetensors_package_writes_and_the_reverse(tmp_path):
    package = pytest.importorskip("safetensors.numpy")
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(5, dtype=np.int8),
        "c": np.array([True, False]),
        "d": np.arange(3, dtype=ml_dtypes.bfloat16),
    }
    plain = {name: array for name, array in arrays.items() if name != "d"}
    package.save_file(plain, tmp_path / "theirs")
    theirs = st.SafetensorsFile(tmp_path / "theirs")
    for name, array in plain.items():
        np.testing.assert_array_equal(theirs.read(name), array)
    write_arrays(tmp_path / "ours", arrays)
    ours = package.load_file(tmp_path / "ours")
    for name, array in arrays.items():
        np.testing.assert_array_equal(ours[name].astype(np.float32), array.astype(np.float32))
    raw = (tmp_path / "ours").read_bytes()
    assert int.from_bytes(raw[:8], "little") % 8 == 0


def test_fp4_is_two_values_per_byte(tmp_path):
    packed = np.arange(6, dtype=np.uint8).reshape(2, 3)
    st.write_safetensors(tmp_path / "f", [("x", "F4", (2, 6), lambda: packed)])
    file = st.SafetensorsFile(tmp_path / "f")
    assert file.info("x") == st.TensorInfo("F4", (2, 6), 6)
    np.testing.assert_array_equal(file.read("x"), packed)


X = {"x": entry()}
MALFORMED = {
    "empty file": (b"", "is empty"),
    "seven bytes": (b"\x01" * 7, "fewer than the 8"),
    "header longer than the file": ((99).to_bytes(8, "little") + b"{}", "claims 99 bytes but"),
    "absurd header": ((10**12).to_bytes(8, "little") + b"{}", "more than 25000000"),
    "not an object": (file_bytes([1]), "does not begin with"),
    "not JSON": (file_bytes(b"{nope}"), "not JSON"),
    "not UTF-8": (file_bytes(b'{"\xff":1}'), "not JSON"),
    "JSON without end": (file_bytes(b'{"a":' * 100_000), "not JSON"),
    "duplicate name": (
        file_bytes(b'{"x":%b,"x":%b}' % ((json.dumps(entry()).encode(),) * 2), b"0" * 8),
        "'x' twice",
    ),
    "unknown dtype": (file_bytes({"x": entry("F7")}, b"0" * 8), "dtype 'F7' is not one"),
    "dtype not a string": (file_bytes({"x": entry(3)}, b"0" * 8), "dtype 3, not a name"),
    "entry not an object": (file_bytes({"x": 1}), "does not state dtype"),
    "entry without shape": (file_bytes({"x": {"dtype": "F32"}}), "does not state dtype"),
    "bytes against shape": (file_bytes({"x": entry(shape=(3,))}, b"0" * 8), "takes 12 bytes but"),
    "huge shape": (file_bytes({"x": entry(shape=(2**62, 4))}, b"0" * 8), "takes 73786976294838206"),
    "huge and empty": (file_bytes({"x": entry(shape=(0, 2**62), offsets=(0, 0))}), "any memory"),
    "odd FP4": (file_bytes({"x": entry("F4", (3,), (0, 1))}, b"0"), "even last axis"),
    "negative dimension": (file_bytes({"x": entry(shape=(-2,))}, b"0" * 8), "not a list of sizes"),
    "fractional dimension": (file_bytes({"x": entry(shape=(2.0,))}, b"0" * 8), "list of sizes"),
    "boolean dimension": (file_bytes({"x": entry(shape=(True,))}, b"0" * 4), "list of sizes"),
    "shape not a list": (
        file_bytes({"x": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}, b"0" * 8),
        "list of sizes",
    ),
    "reversed offsets": (file_bytes({"x": entry(offsets=(8, 0))}, b"0" * 8), "before it begins"),
    "negative offsets": (
        file_bytes({"x": entry(offsets=(-8, 0))}, b"0" * 8),
        r"not \[begin, end\]",
    ),
    "three offsets": (file_bytes({"x": entry(offsets=(0, 4, 8))}, b"0" * 8), r"not \[begin, end\]"),
    "offsets outside": (file_bytes(X, b"0" * 4), "ends at 8 but there are 4"),
    "overlap": (
        file_bytes({"x": entry(), "y": entry(offsets=(4, 12))}, b"0" * 12),
        "'x' and 'y' overlap",
    ),
    "hole": (file_bytes({"x": entry(offsets=(4, 12))}, b"0" * 12), "0 to 4 belong to no tensor"),
    "bytes left over": (file_bytes(X, b"0" * 9), "8 to 9 belong to no tensor"),
    "metadata not strings": (file_bytes({"__metadata__": {"a": 1}}), "__metadata__"),
    "metadata not an object": (file_bytes({"__metadata__": []}), "__metadata__"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_file_is_rejected_with_its_reason(tmp_path, case):
    raw, reason = MALFORMED[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=reason) as caught:
        st.SafetensorsFile(path)
    assert "bad.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


def stated(shape=b"2", offsets=b"0,8", more=b""):
    """A header of one tensor, in bytes: json.dumps would not write such numbers."""
    return b'{"x":{"dtype":"F32","shape":[%b],"data_offsets":[%b]%b}}' % (shape, offsets, more)


LONG = b"9" * 4000
HUGE = {
    "sizes of 4,000 digits": (stated(b",".join([LONG] * 225)), "a number of 4000 digits, more"),
    "four megabytes of them": (stated(b",".join([LONG] * 1000)), "a number of 4000 digits, more"),
    "more digits than Python reads": (stated(b"9" * 5000), "a number of 5000 digits, more"),
    "offsets of 4,000 digits": (stated(offsets=LONG + b"," + LONG), "a number of 4000 digits"),
    "a size of 21 digits": (stated(b"1" + b"0" * 20), "a number of 21 digits, more than 20"),
    "digits in another key": (stated(more=b',"y":%b' % LONG), "a number of 4000 digits"),
    "300,000 axes": (stated(b",".join([b"9"] * 300_000)), "'x' has 300000 axes, more than 32"),
    "a million axes of 1": (stated(b",".join([b"1"] * 10**6)), "'x' has 1000000 axes"),
    "33 axes": (stated(b",".join([b"1"] * 33)), "'x' has 33 axes, more than 32"),
    "a long name": (stated(b"3").replace(b'"x"', b'"%b"' % (b"x" * 10**6)), r"xxx\.\.\.$"),
}


@pytest.mark.parametrize("case", HUGE)
def test_huge_numbers_ranks_and_names_are_rejected_at_once(tmp_path, case):
    raw, reason = HUGE[case]
    (tmp_path / "bad.safetensors").write_bytes(file_bytes(raw, b"0" * 8))
    begun = time.process_time()
    with pytest.raises(CheckpointError, match=reason) as caught:
        st.SafetensorsFile(tmp_path / "bad.safetensors")
    assert time.process_time() - begun < 2  # the slowest took 87 s
    assert len(str(caught.value)) < 1000


def test_a_scalar_and_32_axes_are_read(tmp_path):
    arrays = {"a": np.float32(3).reshape(()), "b": np.ones((1,) * 32, np.float32)}
    write_arrays(tmp_path / "m.safetensors", arrays)
    file = st.SafetensorsFile(tmp_path / "m.safetensors")
    assert {name: file.read(name).shape for name in arrays} == {"a": (), "b": (1,) * 32}


def test_many_small_tensors_are_read_in_seconds(tmp_path):
    """Of this thread's own time, whatever else the process does; a busy core takes three."""
    entries = {f"t{i}": entry(shape=(1,), offsets=(4 * i, 4 * i + 4)) for i in range(100_000)}
    (tmp_path / "m.safetensors").write_bytes(file_bytes(entries, b"0" * 400_000))
    begun = time.thread_time()
    file = st.SafetensorsFile(tmp_path / "m.safetensors")
    assert len(file.names()) == 100_000 and file.read("t99999").size == 1
    assert time.thread_time() - begun < 6


def test_truncation_at_every_byte_is_rejected(tmp_path):
    path = tmp_path / "whole"
    write_arrays(path, {"a": np.arange(3, dtype=np.float32), "b": np.zeros(5, np.int8)})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            st.SafetensorsFile(path)


def test_missing_file_and_unknown_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot read .*nothing"):
        st.SafetensorsFile(tmp_path / "nothing")
    write_arrays(tmp_path / "f", {"a": np.zeros(1, np.float32)})
    for method in ("info", "read", "release"):
        with pytest.raises(CheckpointError, match="no tensor 'b'"):
            getattr(st.SafetensorsFile(tmp_path / "f"), method)("b")


def zip_bytes():
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("data.pkl", b"x" * 100)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "raw", [*(pickle.dumps({"a": 1}, protocol=p) for p in (2, 3, 4, 5)), zip_bytes()]
)
def test_pickle_in_disguise_is_rejected_by_its_first_bytes(tmp_path, raw):
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"python -P -c .*weights_only=True.*save_file"):
        st.SafetensorsFile(path)


def test_header_length_that_looks_like_a_pickle_is_read(tmp_path):
    raw = json.dumps({"x": entry()}).encode()
    (tmp_path / "f").write_bytes(file_bytes(raw + b" " * (0x0280 - len(raw)), b"0" * 8))
    assert (tmp_path / "f").read_bytes()[:2] == b"\x80\x02"
    assert st.SafetensorsFile(tmp_path / "f").names() == ["x"]


def disk_full():
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("produce", "error"), [(disk_full, OSError), (lambda: np.zeros(3, np.float32), ValueError)]
)
def test_failure_while_writing_leaves_the_old_file_and_nothing_else(tmp_path, produce, error):
    path = tmp_path / "model.safetensors"
    write_arrays(path, {"a": np.ones(2, np.float32)})
    old = path.read_bytes()
    good = ("a", "F32", (2,), lambda: np.ones(2, np.float32))
    with pytest.raises(error):
        st.write_safetensors(path, [good, ("b", "F32", (2,), produce)])
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_full_disk_at_the_end_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    write_arrays(path, {"a": np.ones(2, np.float32)})
    old = path.read_bytes()
    monkeypatch.setattr(st.os, "fsync", lambda _: disk_full())
    with pytest.raises(OSError, match="No space"):
        write_arrays(path, {"a": np.zeros(2, np.float32)})
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_writer_rejects_what_the_format_cannot_hold(tmp_path):
    one = ("a", "F32", (1,), lambda: np.zeros(1, np.float32))
    with pytest.raises(CheckpointError, match="'a'"):
        st.write_safetensors(tmp_path / "f", [one, one])
    with pytest.raises(CheckpointError, match="F9"):
        st.write_safetensors(tmp_path / "f", [("a", "F9", (1,), one[3])])
    with pytest.raises(CheckpointError, match="complex128"):
        st.dtype_name(np.complex128)
    assert not os.listdir(tmp_path)


def test_writer_streams_one_tensor_at_a_time(tmp_path):
    alive = []

    class Watched(np.ndarray):
        def __del__(self):
            if self.base is None:
                alive.remove(id(self))

    def produce():
        array = np.zeros(1000, np.float32).view(Watched).copy()
        alive.append(id(array))
        assert len(alive) <= 2  # the one being written, and this
        return array

    st.write_safetensors(tmp_path / "f", [(f"t{i}", "F32", (1000,), produce) for i in range(9)])
    assert len(st.SafetensorsFile(tmp_path / "f").names()) == 9


def test_non_contiguous_arrays_are_written_in_row_order(tmp_path):
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    write_arrays(tmp_path / "f", {"a": array})
    np.testing.assert_array_equal(st.SafetensorsFile(tmp_path / "f").read("a"), array)
