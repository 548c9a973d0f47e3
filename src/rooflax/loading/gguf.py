"""The GGUF container: a memory-mapped reader of metadata and tensors.

A file is a header (magic, version, two counts), metadata (key, type, value), a list of tensors
(name, dimensions innermost first, type, offset) and the data. Everything is checked in Python
integers against the file's length before a view of the map is handed out, so that a malformed file
is an error with its reason and never a wrong array.

This module knows bytes and ggml's type names. What the metadata and the tensors mean, and how a
block becomes numbers, is known elsewhere.

Source: https://github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from rooflax.errors import CheckpointError
from rooflax.files import check_mapped, open_regular, reject_stand_in
from rooflax.loading.safetensors import TensorInfo

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 65_535
MAX_ELEMENTS = 1 << 24
"""Items of one array of metadata: far more than any vocabulary has, far less than memory holds."""


Fill = Callable[[int, int], None]


class BlockType(NamedTuple):
    """A ggml type: `values` numbers share a block of `nbytes` bytes."""

    name: str
    values: int
    nbytes: int


TYPES: Mapping[int, BlockType] = {
    number: BlockType(name, values, nbytes)
    for number, name, values, nbytes in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110), (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210), (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50), (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136),
        (29, "IQ1_M", 256, 56), (30, "BF16", 1, 2), (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66), (39, "MXFP4", 32, 17),
    )
}  # fmt: skip
PLAIN = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Types whose values are numbers as they lie; the others are blocks."""

_SCALARS: Mapping[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


class GGUFFile:
    """A validated, memory-mapped GGUF file; `open_gguf` also opens one of several parts.

    Attributes:
        metadata: key to value: int, float, bool, str, an array of numbers, or a list of strings.

    Args:
        path: the file.
        fill: called with a range of bytes before it is read, to put them into the file; None where
            they are there.

    Raises:
        CheckpointError: the file is missing or breaks a rule of the format; the sentence names the
            file and the rule.
    """

    def __init__(self, path: str | os.PathLike[str], fill: Fill | None = None):
        self.path, self._fill = Path(path), fill
        try:
            with open_regular(self.path) as file:
                head = file.read(64)
                reject_stand_in(self.path, head)
                if head[:4] != MAGIC:
                    raise self._bad(f"it begins with {head[:4]!r}, not {MAGIC!r}")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror or error}") from error
        self._parts: dict[str, GGUFFile] = {}
        self._infos: dict[str, TensorInfo] = {}
        self._begins: dict[str, int] = {}
        self._types: dict[str, BlockType] = {}
        self._read_header(_Cursor(self.path, self._map, 4, fill))

    def _bad(self, reason: str) -> CheckpointError:
        return _bad(self.path, reason)

    def _read_header(self, cursor: _Cursor) -> None:
        version = cursor.number("<u4")
        if version not in VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
                raise self._bad("it is big-endian, and only little-endian files are read here")
            raise self._bad(f"it has version {version}, and only versions 2 and 3 are read here")
        num_tensors, num_keys = cursor.count("tensors", 24), cursor.count("metadata", 13)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string()
            if key in self.metadata:
                raise self._bad(f"it has the key {key!r} twice")
            self.metadata[key] = cursor.value(key, cursor.number("<u4"))
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 16 or alignment.bit_count() > 1:
            raise self._bad(f"general.alignment is {alignment!r}, not a power of two from 8 on")
        for _ in range(num_tensors):
            self._read_tensor(cursor)
        self._place(-(-cursor.position // alignment) * alignment, alignment)

    def _read_tensor(self, cursor: _Cursor) -> None:
        name = cursor.string()
        if name in self._infos:
            raise self._bad(f"it has the tensor {name!r} twice")
        dimensions = cursor.number("<u4")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._bad(f"tensor {name!r} has {dimensions} dimensions, not 1 to 4")
        shape = tuple(cursor.number("<u8") for _ in range(dimensions))[::-1]
        number, self._begins[name] = cursor.number("<u4"), cursor.number("<u8")
        if number not in TYPES:
            raise self._bad(f"tensor {name!r} has the type {number}, which is not read here")
        kind = TYPES[number]
        if 0 in shape or shape[-1] % kind.values:
            raise self._bad(
                f"tensor {name!r} of type {kind.name} has the shape {list(shape)}; no axis may be "
                f"0 and the last must be a multiple of {kind.values}"
            )
        self._types[name] = kind
        self._infos[name] = TensorInfo(kind.name, shape, prod(shape) // kind.values * kind.nbytes)

    def _place(self, start: int, alignment: int) -> None:
        """Checks that the tensors fill the data one after another, and turns offsets absolute."""
        position, previous = 0, "the metadata"
        for name, offset in sorted(self._begins.items(), key=lambda item: item[1]):
            if offset % alignment:
                raise self._bad(f"tensor {name!r} begins at {offset}, no multiple of {alignment}")
            if offset < position:
                raise self._bad(f"tensors {previous!r} and {name!r} overlap")
            if offset - position >= alignment:
                raise self._bad(f"bytes {position} to {offset} of the data belong to no tensor")
            position, previous = offset + self._infos[name].nbytes, name
            if start + position > len(self._map):
                raise self._bad(
                    f"tensor {name!r} ends at {start + position} but the file has "
                    f"{len(self._map)} bytes; it was cut off"
                )
            self._begins[name] = start + offset

    def join(self, other: GGUFFile) -> None:
        """Takes the tensors of a further part as its own.

        Raises:
            CheckpointError: a tensor is in both.
        """
        for name in other.names():
            if name in self._infos or name in self._parts:
                raise self._bad(f"its part {other.path.name} has the tensor {name!r} again")
            self._parts[name] = other

    def names(self) -> list[str]:
        """The tensors' names, in the file's order."""
        return [*self._infos, *self._parts]

    def info(self, name: str) -> TensorInfo:
        """Type (as ggml calls it), shape (outermost axis first) and bytes of a tensor.

        Raises:
            CheckpointError: there is no tensor of this name.
        """
        if name in self._parts:
            return self._parts[name].info(name)
        if name not in self._infos:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        return self._infos[name]

    def read(self, name: str) -> np.ndarray:
        """A read-only view of a tensor in the map.

        Plain types come as arrays of their shape; of block types the last axis is bytes,
        uint8 [..., blocks, bytes of a block].
        """
        if name in self._parts:
            return self._parts[name].read(name)
        info, kind = self.info(name), self._types[name]
        if self._fill is not None:
            self._fill(self._begins[name], self._begins[name] + info.nbytes)
        check_mapped(self._map, self.path)
        raw = np.frombuffer(self._map, np.uint8, info.nbytes, self._begins[name])
        if info.dtype in PLAIN:
            return raw.view(PLAIN[info.dtype]).reshape(info.shape)
        return raw.reshape(*info.shape[:-1], info.shape[-1] // kind.values, kind.nbytes)

    def release(self, name: str) -> None:
        """Tells the system that a tensor's pages may go; a later read brings them back."""
        self._advise(name, "MADV_DONTNEED")

    def prefetch(self, name: str) -> None:
        """Asks the system to read a tensor's pages, without waiting for it."""
        self._advise(name, "MADV_WILLNEED")

    def _advise(self, name: str, advice: str) -> None:
        if name in self._parts:
            self._parts[name]._advise(name, advice)
            return
        end = self._begins[name] + self.info(name).nbytes
        begin = self._begins[name] // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin and hasattr(self._map, "madvise"):
            self._map.madvise(getattr(mmap, advice), begin, end - begin)


_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


def first_part(name: str) -> str:
    """The name of the first part of a file that is split, as llama.cpp names them; else its own."""
    part = _PART.fullmatch(name)
    return f"{part['stem']}-00001-of-{part['count']}.gguf" if part else name


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """A GGUF file; of one that is split, any part opens all of them.

    Raises:
        CheckpointError: `GGUFFile` rejects a part, one is missing, or they are not of one file.
    """
    path = Path(path)
    file = GGUFFile(path)
    count = _split_number(file, "count", 1)
    if count in (0, 1):
        return file
    named, digits = _PART.fullmatch(path.name), f"{count:05d}"
    if named is None or named["count"] != digits:
        raise CheckpointError(
            f"{path} is one of {count} parts, whose names must end in -00001-of-{digits}.gguf and "
            f"so on; give it its name back, or join the parts with llama-gguf-split --merge."
        )
    names = [f"{named['stem']}-{i:05d}-of-{digits}.gguf" for i in range(1, count + 1)]
    missing = [name for name in names if not os.path.isfile(path.with_name(name))]
    if missing:
        raise CheckpointError(
            f"{path} is one of {count} parts; beside it, {len(missing)} are missing: "
            f"{', '.join(missing[:3])}{' ...' if missing[3:] else ''}."
        )
    parts = [file if name == path.name else GGUFFile(path.with_name(name)) for name in names]
    for number, part in enumerate(parts):
        stated = _split_number(part, "no", 0), _split_number(part, "count", 1)
        if stated != (number, count):
            raise CheckpointError(
                f"{part.path} says that it is part {stated[0] + 1} of {stated[1]}; its name says "
                f"{number + 1} of {count}."
            )
    first, *others = parts
    for part in others:
        first.join(part)
    total = _split_number(first, "tensors.count", len(first.names()))
    if total != len(first.names()):
        raise CheckpointError(
            f"{first.path} has {total} tensors in all its parts, which hold {len(first.names())}."
        )
    return first


def _split_number(file: GGUFFile, key: str, default: int) -> int:
    value = file.metadata.get(f"split.{key}", default)
    if type(value) is not int or value < 0:
        raise CheckpointError(f"{file.path}: split.{key} is not one whole number.")
    return value


def gguf_in(folder: Path) -> Path | None:
    """The one model among a folder's GGUF files, of a split one the first part; None without any.

    Raises:
        CheckpointError: there are several, or files of other kinds alone.
    """
    paths = sorted(path for path in folder.glob("*.gguf") if path.is_file())
    names = list(model_files(path.name for path in paths))
    if len(names) > 1:
        names = [name for name in names if _is_model(folder / name)] or names
    if len(names) == 1:
        return folder / names[0]
    if not paths or (not names and (folder / "config.json").is_file()):
        return None
    if not names:
        raise CheckpointError(f"{folder} has {paths[0].name}, which is no model of its own.")
    raise CheckpointError(
        f"{folder} holds {len(names)} models: {', '.join(names[:8])}{' ...' if names[8:] else ''}; "
        f"name one of them, as in {folder / names[0]}."
    )


def model_files(names: Iterable[str]) -> dict[str, list[str]]:
    """GGUF files that may be models, each with the names of its parts, by that of the first."""
    by_first: dict[str, list[str]] = {}
    for name in sorted(names):
        beside = any(kind in name.lower().rpartition("/")[2] for kind in ("mmproj", "imatrix"))
        if name.endswith(".gguf") and not beside:
            by_first.setdefault(first_part(name), []).append(name)
    return by_first


def _is_model(path: Path) -> bool:
    """Whether a file says that it is a model; a damaged one is left to be opened by name."""
    try:
        return GGUFFile(path).metadata.get("general.type", "model") == "model"
    except CheckpointError:
        return True


class _Cursor:
    """Reads values one after another, none beyond the file's end."""

    def __init__(self, path: Path, data: mmap.mmap, position: int, fill: Fill | None = None):
        self.path, self.data, self.position, self.fill = path, data, position, fill

    def _take(self, nbytes: int) -> int:
        begin = self.position
        if nbytes > len(self.data) - begin:
            raise _bad(
                self.path,
                f"{nbytes} bytes are wanted at {begin} but the file has {len(self.data)}; it was "
                f"cut off",
            )
        self.position = begin + nbytes
        if self.fill is not None:
            self.fill(begin, self.position)
        return begin

    def number(self, dtype: str) -> Any:
        kind = np.dtype(dtype)
        begin = self._take(kind.itemsize)
        return np.frombuffer(self.data, kind, 1, begin)[0].item()

    def count(self, what: str, least: int) -> int:
        """A count of things that take at least `least` bytes each."""
        count = self.number("<u8")
        if count * least > len(self.data) - self.position:
            raise _bad(self.path, f"it claims {count} {what}, more than its bytes could hold")
        return count

    def string(self, most: int = MAX_NAME_BYTES) -> str:
        length = self.number("<u8")
        if length > most:
            raise _bad(self.path, f"a string at {self.position} claims {length} bytes")
        return self._text(self._take(length), length)

    def _text(self, begin: int, length: int) -> str:
        try:
            return self.data[begin : begin + length].decode("utf-8")
        except UnicodeDecodeError:
            raise _bad(self.path, f"the string at {begin} is not UTF-8") from None

    def value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self.string(most=len(self.data))
        if kind != _ARRAY:
            return self._scalar(key, kind)
        element = self.number("<u4")
        nbytes = np.dtype(_SCALARS[element]).itemsize if element in _SCALARS else 8
        count = self.count(f"elements of {key!r}", nbytes)
        if count > MAX_ELEMENTS:
            raise _bad(self.path, f"{key!r} has {count} elements, more than {MAX_ELEMENTS}")
        if element == _STRING:
            return self._strings(count)
        if element not in _SCALARS:
            raise _bad(self.path, f"{key!r} is an array of type {element}, which is not read here")
        dtype = np.dtype(_SCALARS[element])
        return np.frombuffer(self.data, dtype, count, self._take(count * dtype.itemsize)).copy()

    def _scalar(self, key: str, kind: int) -> Any:
        if kind not in _SCALARS:
            raise _bad(self.path, f"{key!r} has the unknown type {kind}")
        value = self.number(_SCALARS[kind])
        # The shortest decimal of a float32: 1e-5, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind == 6 else value

    def _strings(self, count: int) -> list[str]:
        strings, data, size = [], self.data, len(self.data)
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            begin = self._take(8) + 8
            (length,) = unpack(data, begin - 8)
            if length > size - begin:
                raise _bad(self.path, f"a string at {begin} claims {length} bytes")
            strings.append(self._text(self._take(length), length))
        return strings


def _bad(path: Path, reason: str) -> CheckpointError:
    # A file's own strings may be as long as it likes.
    return CheckpointError(f"{path} is not a valid GGUF file: {reason[:400]}")
