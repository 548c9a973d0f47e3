"""Bodies of Tinker's API that are protocol buffers: the data of a forward pass, and results.

Two kinds of field are read (numbers and bytes with a length) and written, so that no generated code
is needed; unknown fields are skipped, as the format wants it.

Source: the field numbers of tinker 0.38.0, tinker_public.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rooflax.rl.runs import Datum, Outcome
from rooflax.server.errors import ApiError

CONTENT_TYPE = "application/x-protobuf"
VARINT, EIGHT_BYTES, BYTES, FOUR_BYTES = 0, 1, 2, 5
"""Wire types."""
MAX_VARINT_BYTES, MOST_ROWS = 10, 4096
FLOAT32, INT64, INT32 = 1, 2, 3
"""Types of tensors."""
TENSORS = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4")}
STOP, LENGTH = 0, 1
Value = int | memoryview


@dataclass
class ForwardRequest:
    """A forward pass, and the backward pass unless `forward_only`."""

    model_id: str = ""
    seq_id: int = 0
    loss_fn: str = ""
    forward_only: bool = False
    data: list[Datum] = field(default_factory=list)
    settings: dict[str, float] = field(default_factory=dict)
    num_bytes: int = 0


def read_forward(body: bytes) -> ForwardRequest:
    """
    Raises:
        ApiError: 400, it is malformed, or holds what a language model of text does not take.
    """
    request, older = ForwardRequest(num_bytes=len(body)), dict[str, float]()
    for number, value in fields(memoryview(body)):
        match number:
            case 1:
                request.model_id = _text(value)
            case 2:
                request.seq_id = _number(value)
            case 3:
                if len(request.data) == MOST_ROWS:
                    raise ApiError(f"data has more than {MOST_ROWS} rows; send fewer at once.")
                request.data.append(_datum(_bytes(value), len(request.data)))
            case 4:
                request.loss_fn = _text(value)
            case 5:
                key, number_of = _entry(value)
                older[key] = _double(number_of)
            case 6:
                request.forward_only = bool(_number(value))
            case 7:
                key, stated = _entry(value)
                request.settings[key] = _setting(key, stated)
            case _:
                pass
    request.settings = request.settings or older
    return request


def _datum(data: memoryview, row: int) -> Datum:
    where, tokens, inputs = f"data[{row}]", list[np.ndarray](), dict[str, np.ndarray]()
    for number, value in fields(data):
        if number == 1:
            tokens.append(_chunk(_bytes(value), where))
        elif number == 2:
            key, tensor = _entry(value)
            inputs[key] = _tensor(_bytes(tensor), f"{key[:80]} of {where}")
    ids = np.concatenate(tokens) if tokens else np.empty(0, np.int32)
    return Datum(ids, inputs)


def _chunk(data: memoryview, where: str) -> np.ndarray:
    for number, value in fields(data):
        if number != 1:
            raise ApiError(f"model_input of {where} holds an image or sound; the model reads text.")
        for inner, tokens in fields(_bytes(value)):
            if inner == 1:
                return _array(_bytes(tokens), TENSORS[INT32], where)
    return np.empty(0, np.int32)


def _tensor(data: memoryview, where: str) -> np.ndarray:
    dtype, shape, dense = FLOAT32, list[int](), memoryview(b"")
    for number, value in fields(data):
        match number:
            case 1:
                dense = _bytes(value)
            case 2:
                raise ApiError(f"{where} is sparse; send it dense, with one number for each token.")
            case 3:
                dtype = _number(value)
            case 4:
                shape += [value] if isinstance(value, int) else list(_varints(value))
            case _:
                pass
    if dtype not in TENSORS:
        raise ApiError(f"{where} has the type {dtype}; it must be float32 or int64.")
    array = _array(dense, TENSORS[dtype], where)
    if len(shape) > 1:
        raise ApiError(
            f"{where} has the shape {shape[:8]}; it must have one number for each token."
        )
    if shape and shape != [len(array)]:
        raise ApiError(f"{where} has {len(array)} numbers, and its shape is {shape}.")
    return array


def _array(data: memoryview, dtype: np.dtype, where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise ApiError(f"{where} ends within a number.")
    return np.frombuffer(data, dtype)


def _setting(key: str, value: Value) -> float:
    for number, stated in fields(_bytes(value)):
        if number == 1:
            return _double(stated)
    raise ApiError(f"{key[:80]} of loss_fn_config is no number.")


def _entry(value: Value) -> tuple[str, Value]:
    """Key and value of a map's entry."""
    key, found = "", memoryview(b"")
    for number, part in fields(_bytes(value)):
        if number == 1:
            key = _text(part)
        elif number == 2:
            found = part
    return key, found


def fields(data: memoryview) -> Iterator[tuple[int, Value]]:
    """Number and value of each field: an int, or bytes, of numbers in eight or four bytes too.

    Raises:
        ApiError: 400, it is malformed.
    """
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if kind == BYTES:
            size, at = _varint(data, at)
        elif kind in (EIGHT_BYTES, FOUR_BYTES):
            size = 8 if kind == EIGHT_BYTES else 4
        else:
            raise _malformed()
        if size > len(data) - at:
            raise _malformed()
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for place in range(MAX_VARINT_BYTES):
        if at + place >= len(data):
            break
        byte = data[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at + place + 1
    raise _malformed()


def _varints(data: memoryview) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value


def _malformed() -> ApiError:
    return ApiError("The body is no protocol buffer of this route.", code="invalid_protobuf")


def _bytes(value: Value) -> memoryview:
    if isinstance(value, int):
        raise _malformed()
    return value


def _number(value: Value) -> int:
    if not isinstance(value, int):
        raise _malformed()
    return value


def _double(value: Value) -> float:
    if isinstance(value, int) or len(value) not in (0, 8):
        raise _malformed()
    return struct.unpack("<d", value)[0] if value else 0.0


def _text(value: Value) -> str:
    try:
        return str(_bytes(value), "utf-8")
    except UnicodeDecodeError:
        raise _malformed() from None


def write_outcome(outcome: Outcome) -> bytes:
    """A forward pass's result: the log-probabilities of each row, and the sum of the losses."""
    offsets = np.cumsum([0, *(4 * len(row) for row in outcome.logprobs)]).astype("<i8")
    numbers = np.concatenate([np.empty(0, np.float32), *outcome.logprobs]).astype("<f4")
    tensor = _put(1, numbers.tobytes()) + _put(2, offsets.tobytes()) + _put_number(3, FLOAT32)
    record = _put(2, _put(1, b"logprobs") + _put(2, tensor))
    record += _put_number(3, len(outcome.logprobs))
    metric = _put(1, b"loss:sum") + _tag(2, EIGHT_BYTES) + struct.pack("<d", outcome.loss)
    return _put(1, b"ArrayRecord") + _put(2, record) + _put(3, metric)


@dataclass(frozen=True)
class Sampled:
    """A sample: its tokens with their log-probabilities, and whether something stopped it."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    is_stopped: bool


def write_samples(
    samples: Sequence[Sampled], prompt_logprobs: npt.ArrayLike | None, num_cached_tokens: int
) -> bytes:
    """The result of a request for samples.

    Args:
        prompt_logprobs: of each token of the prompt, NaN where there is none.
    """
    written = b""
    for one in samples:
        sequence = _put_number(1, STOP if one.is_stopped else LENGTH)
        sequence += _put(2, np.asarray(one.tokens, "<i4").tobytes())
        sequence += _put(3, np.asarray(one.logprobs, "<f4").tobytes())
        written += _put(1, sequence)
    if prompt_logprobs is not None:
        written += _put(2, np.asarray(prompt_logprobs, "<f4").tobytes())
    return written + _put_number(4, num_cached_tokens)


def _put(number: int, data: bytes) -> bytes:
    return _tag(number, BYTES) + _as_varint(len(data)) + data


def _put_number(number: int, value: int) -> bytes:
    return _tag(number, VARINT) + _as_varint(value)


def _tag(number: int, kind: int) -> bytes:
    return _as_varint(number << 3 | kind)


def _as_varint(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
