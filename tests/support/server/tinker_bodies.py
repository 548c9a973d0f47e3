"""Bodies of Tinker's API as its client writes them, and its results read; independent of ours."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

TYPES = {"<f4": 1, "<i8": 2}
numbers = itertools.count(1)
"""Of requests; the client numbers those of each run."""


def varint(value: int) -> bytes:
    out = []
    while True:
        value, low = value >> 7, value & 127
        out.append(low | (128 if value else 0))
        if not value:
            return bytes(out)


def field(number: int, data: bytes) -> bytes:
    return varint(8 * number + 2) + varint(len(data)) + data


def whole(number: int, value: int) -> bytes:
    return varint(8 * number) + varint(value)


def tensor(values: Sequence[float], dtype: str) -> bytes:
    dense = field(1, np.asarray(values, dtype).tobytes())
    return dense + whole(3, TYPES[dtype]) + field(4, varint(len(values)))


def datum(tokens: Sequence[int], inputs: Mapping[str, Sequence[float]]) -> bytes:
    body = field(1, field(1, field(1, np.asarray(tokens, "<i4").tobytes())))
    for name, values in inputs.items():
        dtype = "<i8" if name == "target_tokens" else "<f4"
        body += field(2, field(1, name.encode()) + field(2, tensor(values, dtype)))
    return body


def forward_body(
    model_id: str,
    data: Sequence[bytes],
    loss: str = "cross_entropy",
    *,
    forward_only: bool = False,
    settings: Mapping[str, float] | None = None,
) -> bytes:
    body = field(1, model_id.encode()) + whole(2, next(numbers))
    body += b"".join(field(3, one) for one in data) + field(4, loss.encode())
    for name, value in (settings or {}).items():
        number = varint(8 + 1) + struct.pack("<d", value)
        body += field(7, field(1, name.encode()) + field(2, number))
    return body + (whole(6, 1) if forward_only else b"")


def parts(data: bytes) -> list[tuple[int, Any]]:
    """Number and value of each field; of eight bytes a float."""
    found, at = [], 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte, at = data[at], at + 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        tag = number()
        if tag & 7 == 0:
            found.append((tag >> 3, number()))
        elif tag & 7 == 1:
            found.append((tag >> 3, struct.unpack("<d", data[at : at + 8])[0]))
            at += 8
        else:
            size = number()
            found.append((tag >> 3, data[at : at + size]))
            at += size
    return found


def outcome(data: bytes) -> tuple[float, list[np.ndarray]]:
    """The sum of the losses, and the rows' log-probabilities."""
    by_number = dict(parts(data))
    record, metric = dict(parts(by_number[2])), dict(parts(by_number[3]))
    assert by_number[1] == b"ArrayRecord"
    assert metric[1] == b"loss:sum"
    entry = dict(parts(record[2]))
    assert entry[1] == b"logprobs"
    held = dict(parts(entry[2]))
    offsets = np.frombuffer(held[2], "<i8") // 4
    assert held[3] == 1
    assert record[3] == len(offsets) - 1
    return metric[2], np.split(np.frombuffer(held[1], "<f4"), offsets[1:-1])


def samples(data: bytes) -> tuple[list[tuple[list[int], np.ndarray, int]], np.ndarray | None]:
    """Tokens, log-probabilities and stop reason of each sample; the prompt's log-probabilities."""
    found, prompt = [], None
    for number, value in parts(data):
        if number == 1:
            one = dict(parts(value))
            tokens = np.frombuffer(one[2], "<i4").tolist()
            found.append((tokens, np.frombuffer(one[3], "<f4"), one[1]))
        elif number == 2:
            prompt = np.frombuffer(value, "<f4")
    return found, prompt
