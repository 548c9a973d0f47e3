"""Messages between processes: bytes behind their length in eight bytes."""

from __future__ import annotations

import struct
from typing import IO


def read_frame(source: IO[bytes], max_bytes: int | None = None) -> bytes:
    """The next message; EOFError at the end, ValueError if it is longer than it may be."""
    header = source.read(8)
    if len(header) < 8:
        raise EOFError
    (length,) = struct.unpack(">Q", header)
    if max_bytes is not None and length > max_bytes:
        raise ValueError(f"a message of {length} bytes")
    data = source.read(length)
    if len(data) < length:
        raise EOFError
    return data


def write_frame(sink: IO[bytes], data: bytes) -> None:
    """Writes one message."""
    sink.write(struct.pack(">Q", len(data)))
    sink.write(data)
    sink.flush()
