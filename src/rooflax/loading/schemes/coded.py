"""Weights that another library quantized: which stored tensors are one, and what their codes are.

A scheme finds them in a checkpoint. `CodedWeights` shows each as the tensor that it stands for, and
`KeptCodes` packs those whose numbers a format of ours holds exactly; the others become float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import numpy as np

from rooflax.errors import CheckpointError
from rooflax.loading.checkpoint import Checkpoint
from rooflax.loading.prequantized import beside, output_order
from rooflax.loading.safetensors import TensorInfo
from rooflax.loading.source import DerivedSource
from rooflax.loading.tensor_plan import NameMap
from rooflax.models.registry import family
from rooflax.nn.decoder import Decoder
from rooflax.nn.storage import TABLES, is_head, is_matmul, matmul_shape, parts_of
from rooflax.nn.tensor_layouts import HeadPart, PerExpert, TensorLayout
from rooflax.nn.weights import Param
from rooflax.ops import accelerator
from rooflax.ops.format_names import BESIDE, GROUP
from rooflax.ops.host_arrays import Put
from rooflax.ops.weights import Fused, Quantized, class_of, pack
from rooflax.ops.weights.blocks import Zeros64

FLOAT16S = ("F16", "BF16")
"""Types of scales that float16 holds: bfloat16's down to 2^-17, smaller ones to steps of 2^-24."""
FLOATS = (*FLOAT16S, "F32")


@dataclass(frozen=True)
class Coded:
    """A weight of a checkpoint in codes.

    Attributes:
        shape: of the tensor that it stands for, mostly [out, in].
        stored: its tensors in the checkpoint.
        format: the one that holds its numbers exactly; None where none does.
        numbers: makes the tensor, in float32.
        codes: [out, in] and scales [out, ...] as `ops.weights.pack` takes them for the format.
        is_stack: of all experts: [experts, in, out], the codes [experts, out, in] in our order of
            outputs, and the scales likewise.
    """

    shape: tuple[int, ...]
    stored: tuple[str, ...]
    format: str | None
    numbers: Callable[[], np.ndarray]
    codes: Callable[[], tuple[np.ndarray, np.ndarray]]
    is_stack: bool = False


class CodedTensors(NamedTuple):
    """The weights that a scheme reads, and the tensors that it ignores.

    Attributes:
        weights: by the names of the tensors that they stand for.
        unused: stored tensors that change nothing here, such as scales of activations.
    """

    weights: dict[str, Coded]
    unused: set[str]


class Scheme(Protocol):
    """One library's way to store quantized weights, with what config.json says of them."""

    def find(self, tensors: Tensors) -> CodedTensors:
        """Reads headers alone.

        Raises:
            CheckpointError: tensors that do not fit each other, by name and file.
        """
        ...


class Tensors:
    """A checkpoint's tensors, and sentences that name them."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint
        self.read = checkpoint.read
        self.names = checkpoint.names()
        self._present = set(self.names)

    def __contains__(self, name: str) -> bool:
        return name in self._present

    def info(self, name: str) -> TensorInfo:
        return self._checkpoint.info(name)

    @property
    def metadata(self) -> dict[str, str]:
        """Texts of all files' headers."""
        return {key: text for file in self._checkpoint.files for key, text in file.metadata.items()}

    @property
    def folder(self) -> Path:
        return self._checkpoint.folder

    def error(self, name: str, reason: str) -> CheckpointError:
        where = self._checkpoint.path(name) if name in self else self._checkpoint.folder
        return CheckpointError(f"{name:.200} in {where} {reason}.")

    def expect(
        self, name: str, shape: tuple[int, ...] | None, *dtypes: str, beside: str
    ) -> TensorInfo:
        """Checks a tensor's header entry, and returns it.

        Args:
            shape: None is any.

        Raises:
            CheckpointError: it is not there, or something else.
        """
        if name not in self:
            raise self.error(beside, f"has no {name.rpartition('.')[2]:.80} beside it")
        info = self.info(name)
        if info.dtype not in dtypes or (shape is not None and info.shape != shape):
            wanted = "" if shape is None else f" {list(shape)}"
            raise self.error(
                name, f"is {info.dtype} {list(info.shape)}, wanted {' or '.join(dtypes)}{wanted}"
            )
        return info

    def num_groups(self, name: str, inner: int, group: int) -> int:
        """The groups of a tensor's inputs.

        Raises:
            CheckpointError: they do not divide them.
        """
        if not inner or inner % group:
            raise self.error(name, f"has {inner} inputs, which groups of {group} do not divide")
        return inner // group


class Groups(NamedTuple):
    """Whole numbers in groups of inputs: (codes - zeros) * scales.

    Attributes:
        codes: [out, in], of up to 8 bits.
        scales: [out, groups].
        zeros: [out, groups], or one number.
        order: the group of each input; None where those of a group lie together.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | int
    order: np.ndarray | None = None

    def numbers(self) -> np.ndarray:
        """[out, in] in float32."""
        codes, scales = self.codes.astype(np.float32), self.scales.astype(np.float32)
        zeros = np.broadcast_to(np.asarray(self.zeros, np.float32), scales.shape)
        if self.order is None:
            by_group = codes.reshape(*scales.shape, -1)
            by_group -= zeros[..., None]
            by_group *= scales[..., None]
            return by_group.reshape(codes.shape)
        codes -= zeros[:, self.order]
        codes *= scales[:, self.order]
        return codes


def affine(
    shape: tuple[int, int],
    stored: tuple[str, ...],
    *,
    bits: int,
    group: int,
    scales: str,
    zero: int | None,
    read: Callable[[], Groups],
    error: Callable[[str], CheckpointError],
) -> Coded:
    """A weight of whole numbers.

    Args:
        group: inputs that share a scale; 0 where the order of inputs is another.
        scales: their type.
        zero: of all groups; None where each has its own.
        read: `Groups` of the file; it need not look at zero points that are all `zero`.
        error: of what is found in them.
    """
    format = affine_format(shape[1], bits, group, scales, zero)

    def numbers() -> np.ndarray:
        return read().numbers()

    def codes() -> tuple[np.ndarray, np.ndarray]:
        groups = read()
        if zero is not None and np.any(groups.zeros != zero):
            raise error(f"holds other zero points than {zero}, which config.json calls symmetric")
        assert format is not None
        if format == "w8a16":
            return _less(groups, zero or 0), groups.scales.astype(np.float32)[:, 0]
        repeats = group // GROUP
        halves = groups.scales.astype(np.float16)
        if np.any(np.isinf(halves) & np.isfinite(groups.scales)):
            raise error("has a scale beyond 65504")
        if zero is None and issubclass(class_of(format), Zeros64):
            joined = Zeros64.joined_scales(halves, np.asarray(groups.zeros))
            return groups.codes, np.repeat(joined, repeats, axis=1)
        halves = np.repeat(halves, repeats, axis=1)
        if format == "w4a16":
            return groups.codes, halves
        return _less(groups, zero), halves

    return Coded(shape, stored, format, numbers, codes)


def affine_format(inner: int, bits: int, group: int, scales: str, zero: int | None) -> str | None:
    """Format for whole numbers with a scale, and perhaps a zero point, per group."""
    in_groups = group > 0 and group % GROUP == 0 and scales in FLOAT16S
    if group == inner and zero is not None and (bits == 8 or not in_groups):
        return "w8a16"
    if not in_groups:
        return None
    if zero is not None:
        return "w4a16" if (bits, zero) == (4, 8) else "w8a16-g32"
    for size in (128, 64) if bits == 4 else ():
        if format := accelerator.readable(f"w4a16-z{size}", group % size == 0):
            return format
    return "w8a16-g32" if bits < 8 else None


def _less(groups: Groups, zero: int | None) -> np.ndarray:
    """Codes less their zero points, as int8."""
    if zero is not None:
        return (groups.codes - np.uint8(zero)).view(np.int8)
    by_group = groups.codes.reshape(*groups.scales.shape, -1)
    less = by_group - np.asarray(groups.zeros, np.uint8)[..., None]
    return less.reshape(groups.codes.shape).view(np.int8)


def unpacked(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Codes [..., count] of `bits` each, which lie one after the other from the lowest bit on.

    Args:
        words: [..., n], 32 bits each.
    """
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets[..., :count]
    if bits == 4:
        pairs = octets.astype("<u2")
        pairs |= pairs << np.uint16(4)
        pairs &= np.uint16(0x0F0F)  # both halves of a byte, the low one first
        return pairs.view(np.uint8)[..., :count]
    if bits in (1, 2):
        codes = np.empty((*octets.shape, 8 // bits), np.uint8)
        for i in range(8 // bits):
            codes[..., i] = octets >> np.uint8(bits * i) & np.uint8(2**bits - 1)
        return codes.reshape(*octets.shape[:-1], -1)[..., :count]
    singles = np.unpackbits(octets, axis=-1, bitorder="little")[..., : count * bits]
    by_code = singles.reshape(*singles.shape[:-1], count, bits)
    return (by_code << np.arange(bits, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)


class CodedWeights(DerivedSource):
    """The interface of a checkpoint over one whose weights a scheme reads."""

    def __init__(self, checkpoint: Checkpoint, scheme: Scheme):
        super().__init__(checkpoint)
        self.weights, unused = scheme.find(Tensors(checkpoint))
        other = unused | {name for coded in self.weights.values() for name in coded.stored}
        self._names = [n for n in checkpoint.names() if n not in other] + list(self.weights)

    def names(self) -> list[str]:
        return self._names

    def info(self, name: str) -> TensorInfo:
        coded = self.weights.get(name)
        if coded is None:
            return self._source.info(name)
        nbytes = sum(self._source.info(stored).nbytes for stored in coded.stored)
        return TensorInfo("F32", coded.shape, nbytes)

    def read(self, name: str) -> np.ndarray:
        coded = self.weights.get(name)
        return self._source.read(name) if coded is None else coded.numbers()

    def stored(self, name: str) -> tuple[str, ...]:
        coded = self.weights.get(name)
        return (name,) if coded is None else coded.stored


class KeptCodes:
    """The weights of a checkpoint that stay in their codes, for `Storage.prequantized`.

    Attributes:
        formats: by parameter.
        dequantized: parameters in codes that become numbers, because no format holds them.
    """

    def __init__(self, source: CodedWeights, name: str, config: Decoder):
        self._source, self._config = source, config
        self._names = NameMap(set(source.names()), family(name))
        matmuls = [param for param in config.params() if is_matmul(param, config)]
        formats = {param.name: self._format(param) for param in matmuls}
        of_key: dict[str, set[str | None]] = {}
        for param in matmuls:
            of_key.setdefault(param.key, set()).add(formats[param.name])
        differ = accelerator.mixes_formats()
        kept = {
            k for k, kinds in of_key.items() if None not in kinds and (differ or len(kinds) == 1)
        }
        self.formats = {
            param.name: format
            for param in matmuls
            if param.key in kept and (format := formats[param.name])
        }
        params = [p for p in config.params() if is_matmul(p, config) or p.key in TABLES]
        coded = {param.key for param in params if any(self._coded(param))} - kept
        self.dequantized = frozenset(param.name for param in params if param.key in coded)

    def _coded(self, param: Param) -> list[Coded | None]:
        return [self._source.weights.get(self._names.find(n) or n) for n in param.hf_names]

    def _format(self, param: Param) -> str | None:
        """The format of a weight, or of each of its tensors; None where one has none."""
        layout = param.line.layout
        layout = layout.each if isinstance(layout, PerExpert) else layout
        coded_parts = self._coded(param)
        is_stack = any(coded and coded.is_stack for coded in coded_parts)
        transposed = type(layout) is TensorLayout and not is_head(param, self._config)
        if (transposed and not is_stack) or isinstance(layout, HeadPart):
            return None
        each = [coded and coded.format for coded in coded_parts]
        if len(set(each)) == 1:
            return each[0]
        _, sizes = param.line.layout.beside(matmul_shape(param, self._config)[1]) or (0, ())
        if not accelerator.mixes_formats() or None in each or len(sizes) != len(each):
            return None
        return BESIDE.join(format for format in each if format)

    def packed(self, param: Param, put: Put = jax.device_put) -> Quantized | Fused:
        """A matmul's weight from the checkpoint's own codes, its outputs in our order."""
        in_shape, out_shape = matmul_shape(param, self._config)
        parts = parts_of(param.line.layout, self.formats[param.name], out_shape)
        each = (
            pack(part.format, *codes, in_shape, part.out_shape(out_shape), put)
            for part, codes in zip(parts, self.codes(param), strict=True)
        )
        return beside(self.formats[param.name], parts, each)

    def codes(
        self, param: Param, experts: slice = slice(None)
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Codes and scales [*experts, out, ...] of each part, in our order of outputs."""
        coded_parts = [coded for coded in self._coded(param) if coded is not None]
        if coded_parts[0].is_stack:
            codes, scales = coded_parts[0].codes()
            return [(codes[experts], scales[experts])]
        if param.line.num_stacked:  # gate's outputs, then up's, as they lie here
            count = param.line.shape(self._config.axis_sizes)[0]
            size = len(coded_parts) // count
            chosen = [coded_parts[i * size : (i + 1) * size] for i in range(count)[experts]]
            each = [_joined([coded.codes() for coded in of_expert]) for of_expert in chosen]
            codes, scales = zip(*each, strict=True)
            return [(np.stack(codes), np.stack(scales))]
        _, out_shape = matmul_shape(param, self._config)
        rows = np.cumsum([0, *(coded.shape[0] for coded in coded_parts)])
        numbers = [np.arange(*ends, dtype=np.int32)[:, None] for ends in pairwise(rows)]
        order = output_order(param, self._config, numbers).reshape(out_shape)
        parts = []
        for part in parts_of(param.line.layout, self.formats[param.name], out_shape):
            codes, scales = _joined([coded.codes() for coded in coded_parts[part.tensors]])
            of_expert = order[part.index].reshape(-1) - rows[part.tensors.start or 0]
            if not np.array_equal(of_expert, np.arange(len(codes))):
                codes, scales = codes[of_expert], scales[of_expert]
            parts.append((codes, scales))
        return parts


def _joined(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    if len(parts) == 1:
        return parts[0]
    codes, scales = zip(*parts, strict=True)
    return np.concatenate(codes), np.concatenate(scales)


def modules(tensors: Tensors, end: str) -> dict[str, str]:
    """Modules that have a tensor of this suffix, by the names of their weights."""
    dot = f".{end}"
    names = (name.removesuffix(dot) for name in tensors.names if name.endswith(dot))
    return {f"{module}.weight": module for module in names}
