"""Names of the weight formats. A format states both widths: w4a8 is 4 bits times 8.

"a16" leaves the activations as they are, "a8" rounds them to int8, and "a8x2" to whole numbers of
16 bits, each as two of int8. "g32" scales int8 weights in groups of 32 inputs instead of one scale
per output; "h64" rotates inputs in blocks of 64 first, so that one scale is enough. Formats of four
and six bits always have groups of 32.

"int4+head=int8+v=int8" keeps some matrices in other formats: the head (and embedding), or those of
a layer by their names in LLaMA's checkpoints: q, k, v, o, gate, up and down.
"""

from __future__ import annotations

import re
from collections import ChainMap
from dataclasses import dataclass

from rooflax.errors import RequestError

GROUP = 32
"""Inputs that share a scale, where scales are not the output's."""
PANEL = 16
"""Outputs that are packed side by side for CPU."""


@dataclass(frozen=True)
class Format:
    """Format of a matmul's weights, and the rounding of its activations.

    Attributes:
        code: of the weights; `ops.weights.formats` has a class for each.
        quantizes_activations: activations are rounded to int8, with one scale per row or per group.
        num_terms: int8 numbers that a rounded activation consists of, 256 times the first and the
            second. Kernels of GPUs and TPUs take one.
    """

    code: str
    quantizes_activations: bool
    num_terms: int = 1


FORMATS = {
    "w8a8": Format("int8", True),
    "w8a16": Format("int8", False),
    "w8a8-g32": Format("int8-g32", True),
    "w8a16-g32": Format("int8-g32", False),
    "w4a8": Format("int4", True),
    "w4a16": Format("int4", False),
    "mxfp4-a8": Format("mxfp4", True),
    "mxfp4-a16": Format("mxfp4", False),
    "fp8-a16": Format("fp8", False),
}
CPU_FORMATS = {
    "w8a8-h64": Format("int8-h64", True),
    "iq4_nl": Format("iq4_nl", True),
    "w6a8": Format("int6", True),
    "w6a16": Format("int6", False),
}
"""Formats that kernels of CPUs alone read; `format_on` says what others get."""
UNROTATED = {"w8a8-h64": "w8a8"}
"""Formats that kernels without the rotation read in place of a packed weight's own."""
ELSEWHERE = {"w8a8-h64": "w8a8", "iq4_nl": "w4a8", "w6a8": "w8a8-g32", "w6a16": "w8a16-g32"}
KNOWN = ChainMap[str, Format]({}, CPU_FORMATS, FORMATS)
"""These and what files hold beside them, which `quantize` does not make; their classes add it."""
ALIASES = {
    "int8": "w8a8-h64",
    "int6": "w6a8",
    "int4": "iq4_nl",
    "mxfp4": "mxfp4-a8",
    "fp8": "fp8-a16",
}
PLUS = "+"
"""Before a matrix with a format of its own."""
HEAD = "head"
PARTS = (HEAD, "q", "k", "v", "o", "gate", "up", "down")
WIDER = {"iq4_nl": {HEAD: "w8a8-h64", "v": "w6a8", "down": "w6a8"}}
"""The matrices that a format leaves wider unless they are named: few bytes, much of the loss."""
AT_ENDS = ("down",)
"""Parts of WIDER that are so in the layers alone that `is_at_an_end` chooses."""
BESIDE = "|"
"""Between the formats of a fused weight's tensors, in their order."""


def resolve_format(name: str) -> str:
    """A format's own name, with those of the matrices that have another one.

    Raises:
        RequestError: there is no such format, or no such matrix.
    """
    base, *named = str(name).split(PLUS)
    each = [one.partition("=") for one in named]
    if unknown := [part for part, equals, _ in each if not equals or part not in PARTS]:
        raise RequestError(
            f"quantize is {name!r}, and {unknown[0]!r} is not one of {', '.join(PARTS)} with a "
            f"format, as in int4+head=int8.",
            param="quantize",
        )
    return PLUS.join([_resolved(base, name), *(f"{p}={_resolved(f, name)}" for p, _, f in each)])


def format_of(name: str, part: str | None = None, *, at_an_end: bool = False) -> str:
    """The format of a resolved name for a matrix.

    Args:
        part: one of PARTS; None is everything else.
        at_an_end: what `is_at_an_end` says of its layer.
    """
    base, *named = name.split(PLUS)
    by_part = dict(one.split("=") for one in named)
    wider = WIDER.get(base, {})
    wider = {p: f for p, f in wider.items() if at_an_end or p not in AT_ENDS}
    return (wider | by_part).get(part or "", base)


def is_at_an_end(layer: int, num_layers: int) -> bool:
    """Whether a layer is of the first or the last eighth, which are the most sensitive."""
    edge = max(1, num_layers // 8)
    return layer < edge or layer >= num_layers - edge


def of_two_terms(name: str) -> str:
    """The format with the same codes and activations of two int8 numbers each."""
    return name.replace("a8", "a8x2") if "a8" in name else f"{name}-a8x2"


def formats_of(name: str) -> tuple[str, ...]:
    """The formats of a weight's tensors, as in "q4_k|q4_k|q6_k", or the one of all of them."""
    return tuple(name.split(BESIDE))


def format_on(platform: str, name: str) -> str:
    """A resolved name with what a platform has in place of the formats of CPUs."""
    if platform == "cpu":
        return name
    base, *named = name.split(PLUS)
    each = (one.split("=") for one in named)
    return PLUS.join([_elsewhere(base), *(f"{part}={_elsewhere(f)}" for part, f in each)])


def is_read(platform: str, name: str) -> bool:
    """Whether a platform's kernels read a format: those of CPUs read every one."""
    return platform == "cpu" or name in FORMATS


def stored_format_on(platform: str, name: str) -> str:
    """The format of a packed weight on a platform; others are read by dequantizing."""
    return name if platform == "cpu" else UNROTATED.get(name, name)


def mixes_formats(platform: str) -> bool:
    """Whether layers may differ in format, and the tensors of a fused weight.

    Off the CPU they are alike, because layers may be stacked.
    """
    return platform == "cpu"


def rounded_format(platform: str) -> str:
    """The format of a checkpoint's codes that no kernel reads.

    On a CPU activations are rounded too, as they are beside its other formats of blocks.
    """
    return "w8a8-g32" if platform == "cpu" else "w8a16-g32"


def _elsewhere(format: str) -> str:
    return ELSEWHERE.get(format, format)


def _resolved(part: str, whole: str) -> str:
    resolved = ALIASES.get(part, part)
    if resolved not in FORMATS and resolved not in CPU_FORMATS:
        names = ", ".join((*ALIASES, *FORMATS, *CPU_FORMATS))
        of_gguf = re.match(r"(?i)i?q\d", part) is not None
        hint = " (a type of GGUF files is for rooflax quantize --gguf)" if of_gguf else ""
        raise RequestError(
            f"quantize is {whole!r}{hint}; it must be one of {names}, or several as in "
            f"int4+head=int8.",
            param="quantize",
        )
    return resolved
