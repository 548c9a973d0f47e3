"""The safetensors format: a memory-mapped reader and a streaming writer.

A file is eight bytes (the header's length, little-endian), a JSON header
(name -> dtype, shape, data_offsets; `__metadata__` maps strings to strings), and the data.
The reader checks everything in Python integers before it hands out a view of the map, so that
a malformed file is an error with its reason and never a wrong array. The writer asks for one
tensor at a time and puts the file in place only when it is complete.

This module knows files and bytes. It does not know models, configs, devices or JAX.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from rooflax.errors import CheckpointError
from rooflax.files import check_mapped, open_regular, reject_stand_in, replacing

MAX_HEADER_BYTES = 25_000_000
"""Room for 200,000 tensors in one file; the format allows 100 MB, which take half a minute."""
MAX_RANK = 32
MAX_DIGITS = 20  # of 2**64
MAX_REASON = 500
"""Characters of a reason that are shown: what a header holds may be long."""

DTYPES: Mapping[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype("<u1"),
    "I8": np.dtype("<i1"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "C64": np.dtype("<c8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
}
PACKED_FP4 = "F4"


@dataclass(frozen=True)
class TensorInfo:
    """Header entry of one tensor.

    Attributes:
        dtype: the file's name of the type, such as `"BF16"`.
        shape: the shape in values. For `"F4"` two values share a byte, so `read` gives a uint8
            array whose last axis is half as long (the low nibble is the earlier value).
        nbytes: bytes in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class TensorToWrite(NamedTuple):
    """One tensor for `write_safetensors`: `produce` is called once, when its turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    produce: Callable[[], np.ndarray]


def float32_tensors(arrays: Mapping[str, np.ndarray | None]) -> list[TensorToWrite]:
    """Tensors in float32 of the arrays that are not None."""
    return [
        TensorToWrite(name, "F32", array.shape, lambda array=array: array)
        for name, array in arrays.items()
        if array is not None
    ]


def dtype_name(dtype: Any) -> str:
    """The safetensors name of a NumPy (or ml_dtypes) type, for example `"BF16"`.

    Raises:
        CheckpointError: the format has no name for it.
    """
    wanted = np.dtype(dtype)
    for name, known in DTYPES.items():
        if known == wanted:
            return name
    raise CheckpointError(f"a safetensors file cannot hold the type {wanted}, convert it first")


def num_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes that a tensor of this type and shape takes in a file.

    Raises:
        CheckpointError: unknown type, or an FP4 shape whose last axis is odd.
    """
    if dtype == PACKED_FP4:
        if not shape or shape[-1] % 2:
            raise CheckpointError(f"shape {list(shape)} of an F4 tensor needs an even last axis")
        return prod(shape) // 2
    if dtype not in DTYPES:
        known = ", ".join([*DTYPES, PACKED_FP4])
        raise CheckpointError(f"dtype {dtype!r} is not one that is read here ({known})")
    return prod(shape) * DTYPES[dtype].itemsize


def _array_layout(info: TensorInfo) -> tuple[np.dtype, tuple[int, ...]]:
    if info.dtype == PACKED_FP4:
        return np.dtype(np.uint8), (*info.shape[:-1], info.shape[-1] // 2)
    return DTYPES[info.dtype], info.shape


class SafetensorsFile:
    """A validated safetensors file, memory-mapped unless it may change while it is open.

    Args:
        path: the file; a symbolic link is followed.
        is_mapped: False reads each tensor when it is asked for, and notices changes: the system
            kills a process that looks at a mapped page behind the end of a file that was cut.

    Raises:
        CheckpointError: the file is missing, is a pickle or a zip in disguise, or breaks a rule
            of the format; the sentence names the file and the rule.

    Source: https://github.com/huggingface/safetensors (README.md, format).
    """

    def __init__(self, path: str | os.PathLike[str], *, is_mapped: bool = True):
        self.path = Path(path)
        try:
            with open_regular(self.path) as file:
                self._version = _version(file)
                self._read_header(file)
                self._map = None
                if is_mapped:
                    self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror or error}") from error

    def _read_header(self, file: BinaryIO) -> None:
        size = os.fstat(file.fileno()).st_size
        head = file.read(64)
        reject_stand_in(self.path, head)
        _reject_pickle(self.path, head)
        if size < 8:
            raise self._bad(f"it has {size} bytes, fewer than the 8 that give the header's length")
        length = int.from_bytes(head[:8], "little")
        if length > MAX_HEADER_BYTES:
            raise self._bad(f"its header claims {length} bytes, more than {MAX_HEADER_BYTES}")
        if 8 + length > size:
            raise self._bad(f"its header claims {length} bytes but the file has {size}")
        file.seek(8)
        header = self._parse(file.read(length))
        self.metadata: dict[str, str] = self._check_metadata(header.pop("__metadata__", {}))
        self._data_start = 8 + length
        self._infos: dict[str, TensorInfo] = {}
        self._offsets: dict[str, tuple[int, int]] = {}
        for name, entry in header.items():
            self._infos[name], self._offsets[name] = self._check_entry(name, entry)
        self._check_layout(size - self._data_start)

    def _bad(self, reason: str) -> CheckpointError:
        if len(reason) > MAX_REASON:
            reason = f"{reason[:MAX_REASON]}..."
        return CheckpointError(f"{self.path} is not a valid safetensors file: {reason}")

    def _parse(self, raw: bytes) -> dict[str, Any]:
        if raw[:1] != b"{":
            raise self._bad("its header does not begin with '{'")
        try:
            header = json.loads(
                raw.decode("utf-8"), object_pairs_hook=_unique_pairs, parse_int=_short_number
            )
        except _HeaderError as error:
            raise self._bad(f"its header has {error}") from None
        except (ValueError, RecursionError):
            raise self._bad("its header is not JSON") from None
        if not isinstance(header, dict):
            raise self._bad("its header is not a JSON object")
        return header

    def _check_metadata(self, metadata: Any) -> dict[str, str]:
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise self._bad("its __metadata__ does not map strings to strings")
        return metadata

    def _check_entry(self, name: str, entry: Any) -> tuple[TensorInfo, tuple[int, int]]:
        if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
            raise self._bad(f"tensor {name!r} does not state dtype, shape and data_offsets")
        shape, offsets = entry["shape"], entry["data_offsets"]
        if isinstance(shape, list) and len(shape) > MAX_RANK:
            raise self._bad(f"tensor {name!r} has {len(shape)} axes, more than {MAX_RANK}")
        if not _are_counts(shape):
            raise self._bad(f"tensor {name!r} has the shape {shape!r}, not a list of sizes")
        if not _are_counts(offsets) or len(offsets) != 2:
            raise self._bad(f"tensor {name!r} has the data_offsets {offsets!r}, not [begin, end]")
        begin, end = offsets
        if begin > end:
            raise self._bad(f"tensor {name!r} ends at {end} before it begins at {begin}")
        if not isinstance(entry["dtype"], str):
            raise self._bad(f"tensor {name!r} has the dtype {entry['dtype']!r}, not a name")
        try:
            wanted = num_bytes(entry["dtype"], shape)
        except CheckpointError as error:
            raise self._bad(f"tensor {name!r}: {error}") from None
        if wanted != end - begin:
            raise self._bad(
                f"tensor {name!r} of dtype {entry['dtype']} and shape {shape} takes {wanted} bytes "
                f"but its offsets give it {end - begin}"
            )
        if prod(size or 1 for size in shape) >= 2**60:  # of no values, but NumPy rejects it
            raise self._bad(f"tensor {name!r} has the shape {shape}, beyond any memory")
        return TensorInfo(entry["dtype"], tuple(shape), wanted), (begin, end)

    def _check_layout(self, data_bytes: int) -> None:
        position, previous = 0, None
        for name, (begin, end) in sorted(self._offsets.items(), key=lambda item: item[1]):
            if end > data_bytes:
                raise self._bad(f"tensor {name!r} ends at {end} but there are {data_bytes} bytes")
            if begin < position:
                raise self._bad(f"tensors {previous!r} and {name!r} overlap")
            if begin > position:
                raise self._bad(f"bytes {position} to {begin} belong to no tensor")
            position, previous = end, name
        if position != data_bytes:
            raise self._bad(f"bytes {position} to {data_bytes} belong to no tensor")

    def names(self) -> list[str]:
        """The tensors' names, in the header's order."""
        return list(self._infos)

    def info(self, name: str) -> TensorInfo:
        """Header entry of a tensor.

        Raises:
            CheckpointError: there is no tensor of this name.
        """
        if name not in self._infos:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        return self._infos[name]

    def read(self, name: str) -> np.ndarray:
        """A read-only view of a tensor's bytes in the map; without a map a copy.

        Raises:
            CheckpointError: there is no tensor of this name, or the file was changed.
        """
        dtype, shape = _array_layout(self.info(name))
        count = prod(shape)
        if count == 0:
            empty = np.empty(shape, dtype)
            empty.flags.writeable = False
            return empty
        offset = self._data_start + self._offsets[name][0]
        if self._map is None:
            return np.frombuffer(self._bytes(offset, count * dtype.itemsize), dtype).reshape(shape)
        check_mapped(self._map, self.path)
        return np.frombuffer(self._map, dtype, count, offset).reshape(shape)

    def _bytes(self, offset: int, size: int) -> bytes:
        data = b""
        with contextlib.suppress(OSError), open_regular(self.path) as file:
            file.seek(offset)
            data = file.read(size)
            if _version(file) != self._version:
                data = b""
        if len(data) != size:
            raise CheckpointError(f"{self.path} was changed while it was read; read it again.")
        return data

    def release(self, name: str) -> None:
        """Tells the system that a tensor's pages may go; a later read brings them back.

        Raises:
            CheckpointError: there is no tensor of this name.
        """
        self._advise(name, "MADV_DONTNEED")

    def prefetch(self, name: str) -> None:
        """Asks the system to read a tensor's pages, without waiting for it.

        Raises:
            CheckpointError: there is no tensor of this name.
        """
        self._advise(name, "MADV_WILLNEED")

    def _advise(self, name: str, advice: str) -> None:
        self.info(name)
        begin, end = (self._data_start + offset for offset in self._offsets[name])
        begin -= begin % mmap.PAGESIZE
        if self._map is not None and end > begin and hasattr(self._map, "madvise"):
            self._map.madvise(getattr(mmap, advice), begin, end - begin)


def _version(file: BinaryIO) -> tuple[int, ...]:
    """Numbers that change when a file is written, or another takes its place."""
    stat = os.fstat(file.fileno())
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


class _HeaderError(Exception):
    """Invalid header."""


def _short_number(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _HeaderError(f"a number of {len(digits)} digits, more than {MAX_DIGITS}")
    return int(digits)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _HeaderError(f"the name {key!r} twice")
        result[key] = value
    return result


def _are_counts(values: Any) -> bool:
    # bool is an int in Python, but `true` is no size.
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _reject_pickle(path: Path, head: bytes) -> None:
    # A header of 640 bytes also begins with 80 02: byte 8 tells them apart.
    pickled = head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    if (pickled or head[:4] == b"PK\x03\x04") and head[8:9] != b"{":
        kind = "a pickle" if pickled else "a zip archive (what torch.save writes)"
        advice = conversion_command([path], path.with_name(f"{path.stem}.converted.safetensors"))
        raise CheckpointError(
            f"{path} is {kind}, which can run code when opened and is never read here, so convert "
            f"it where torch is installed, with: {advice}"
        )


def conversion_command(sources: Sequence[Path | str], target: Path) -> str:
    """The shell command that turns pickle files into one safetensors file, where torch is.

    Args:
        sources: the pickle files, merged in this order; a `str` is a shell pattern, left as it is.
        target: the file to write.
    """
    script = (
        "import sys, torch, safetensors.torch as st; d = {}; "
        "[d.update(torch.load(f, map_location='cpu', weights_only=True)) for f in sys.argv[2:]]; "
        "st.save_file({k: v.clone().contiguous() for k, v in d.items()}, sys.argv[1], "
        "{'format': 'pt'})"
    )
    words = [w if isinstance(w, str) else shlex.quote(str(w)) for w in [target, *sources]]
    files = " ".join(words)
    return f'python -P -c "{script}" {files}'


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Iterable[TensorToWrite | tuple[str, str, tuple[int, ...], Callable[[], np.ndarray]]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a safetensors file, one tensor in memory at a time, all or nothing.

    Tensors are laid out by falling item size, as the safetensors package does, so that every
    offset is a multiple of its item size; `produce` is called in that order. An existing file is
    replaced only when the new one is complete and on disk.

    Args:
        path: the file to write.
        tensors: (name, dtype, shape, produce) of each; dtype is the format's name ("BF16", see
            `dtype_name`), an F4 tensor is produced as packed uint8 (see `TensorInfo`).
        metadata: `__metadata__`, `{"format": "pt"}` unless given.

    Raises:
        CheckpointError: a name occurs twice or a type cannot be written.
        ValueError: `produce` gave another type or shape than announced.
        OSError: the disk is full or the folder cannot be written; an old file stays intact.
    """
    ordered = _in_layout_order(tensors)
    header = _header(ordered, {"format": "pt"} if metadata is None else dict(metadata))
    with replacing(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in ordered:
            file.write(_bytes_of(tensor).data)


def _in_layout_order(tensors: Iterable[Any]) -> list[TensorToWrite]:
    ordered = [TensorToWrite(*tensor) for tensor in tensors]
    names = [tensor.name for tensor in ordered]
    if len(set(names)) != len(names) or "__metadata__" in names:
        twice = next(name for name in names if names.count(name) > 1 or name == "__metadata__")
        raise CheckpointError(f"a safetensors file cannot hold the name {twice!r} (again)")

    def item_bytes(tensor: TensorToWrite) -> int:
        return DTYPES[tensor.dtype].itemsize if tensor.dtype in DTYPES else 0

    return sorted(ordered, key=item_bytes, reverse=True)


def _header(tensors: Sequence[TensorToWrite], metadata: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    begin = 0
    for name, dtype, shape, _ in tensors:
        end = begin + num_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return raw + b" " * (-len(raw) % 8)


def _bytes_of(tensor: TensorToWrite) -> np.ndarray:
    shape = tuple(tensor.shape)
    dtype, stored = _array_layout(TensorInfo(tensor.dtype, shape, 0))
    array = np.asarray(tensor.produce())
    if array.dtype != dtype or array.shape != stored:
        raise ValueError(
            f"tensor {tensor.name!r} was announced as {dtype}{list(stored)} "
            f"but is {array.dtype}{list(array.shape)}"
        )
    # ml_dtypes arrays do not offer the buffer protocol, their bytes do.
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
