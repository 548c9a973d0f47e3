"""Options that change a model's speed, and options that change its numbers.

Two frozen values, apart from any model's config: `ExecutionOptions` never changes a token,
`Precision` may; and a budget of memory, which changes no token either. This module knows no arrays
and imports no jax.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

from rooflax.errors import RequestError
from rooflax.fields.declaration import declare, documented, read_fields
from rooflax.fields.kinds import Choice, Flag, Whole
from rooflax.ops.format_names import resolve_format

PLATFORMS = ("cpu", "gpu", "tpu")
KERNELS = ("reference", "xla", "native", "pallas")
DTYPES = ("float32", "bfloat16")
KV_DTYPES = (*DTYPES, "float16", "int8", "fp8")
KV_ALIASES = {"float8_e4m3fn": "fp8"}
MAX_DECODE_STEPS = 1024
NGRAM = "ngram"
DEFAULT_DRAFT_TOKENS = 7
MOST_DRAFT_TOKENS = 31


def _check_choice(field: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        wanted = ", ".join(repr(choice) for choice in choices if choice is not None)
        raise RequestError(f"{field} is {value!r}; it must be one of {wanted}.", param=field)


_field = partial(declare, group="speed, never tokens")


# fmt: off
@documented
@dataclass(frozen=True)
class ExecutionOptions:
    """Switches that change speed and memory, never a token (in float32, the KV cache too)."""

    use_cache: bool = _field(
        Flag(), "keep K and V of past tokens; off recomputes the whole sequence at every step",
        default=True)
    jit: bool = _field(
        Flag(), "compile the step; off dispatches every operation by itself", default=True)
    layers: Literal["unrolled", "scan"] | None = _field(
        Choice(("unrolled", "scan")), "unroll the layers in the program, or scan over stacked "
        "weights", shown_default="scan where kernels read stacked weights", metavar="HOW")
    gqa: Literal["grouped", "repeat"] = _field(
        Choice(("grouped", "repeat")), "read each K/V head once for its query heads, or copy it "
        "first", default="grouped", metavar="HOW")
    moe: Literal["grouped", "per_token", "dense"] = _field(
        Choice(("grouped", "per_token", "dense")), "tokens sorted by expert, one expert after the "
        "other, or every expert on every token", default="grouped", metavar="HOW")
    kernels: str | None = _field(
        Choice(KERNELS), "implementation of linear, attention and experts",
        shown_default="the best", metavar="NAME")
    decode_steps: int | None = _field(
        Whole(1, MAX_DECODE_STEPS), "decode steps per dispatch",
        shown_default="the engine's choice", metavar="N")
    # fmt: on

    def __post_init__(self) -> None:
        read_fields(self)

    @property
    def trains(self) -> bool:
        """Whether attention is asked of the best kernel that has gradients."""
        return False

    @classmethod
    def of(cls, **values: Any) -> ExecutionOptions:
        """Options of which a field that is None keeps its default.

        Raises:
            RequestError: a value that cannot be.
        """
        return cls(**{name: value for name, value in values.items() if value is not None})

    def with_layers(self, *, kernels_read_stacks: bool) -> ExecutionOptions:
        """The same with `layers` said: a scan where it copies no weights, else unrolled.

        A scan is as fast there, and its programs take a fifth of the memory and of the time.

        Args:
            kernels_read_stacks: linear's kernel does, and the weights are loaded into their stacks.
        """
        if self.layers is not None:
            return self
        scans = kernels_read_stacks and self.jit and self.moe == "grouped"
        return replace(self, layers="scan" if scans else "unrolled")

    def describe(self) -> str:
        """The switches that differ from the default, as "name=value, ..."."""
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return ", ".join(f"{f.name}={getattr(self, f.name)}" for f in changed) or "default"


DEFAULT_OPTIONS = ExecutionOptions()


@dataclass(frozen=True)
class TrainingOptions(ExecutionOptions):
    """Those of a training step: XLA's matmuls have gradients, and so has attention by a kernel.

    The grouped experts loop over a dynamic count, which has no reverse derivative.

    Attributes:
        is_partitioned: the compiler splits the program over devices, which it cannot do with a
            kernel: attention is XLA's too.
    """

    use_cache: bool = False
    moe: Literal["grouped", "per_token", "dense"] = "dense"
    kernels: str | None = "xla"
    is_partitioned: bool = False

    @property
    def trains(self) -> bool:
        return not self.is_partitioned


@dataclass(frozen=True)
class Precision:
    """Widths that may change tokens.

    Attributes:
        dtype: of activations and weights; None is float32 on CPU and bfloat16 elsewhere.
        kv_dtype: of the KV cache, "int8" and "fp8" (e4m3, also "float8_e4m3fn") with a scale per
            token and head; None is the activations' dtype, but float16 beside float32 where
            matmuls round weights or activations, on a CPU, which is tens of times as coarse.
            float16 ends at 65504; a key or value beyond it makes its sequence "not finite".
        quantize: format of the matmuls' weights, or an alias ("int8", "int4"); None keeps them.

    Norms, softmax, RoPE, logits, sampling and every accumulation are float32 whatever this says.
    """

    dtype: str | None = None
    kv_dtype: str | None = None
    quantize: str | None = None

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, (None, *DTYPES))
        if self.kv_dtype in KV_ALIASES:
            object.__setattr__(self, "kv_dtype", KV_ALIASES[self.kv_dtype])
        _check_choice("kv_dtype", self.kv_dtype, (None, *KV_DTYPES))
        if self.quantize is not None:
            object.__setattr__(self, "quantize", resolve_format(self.quantize))


_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("KMGT", 1)}


def gib(num_bytes: int) -> str:
    """Bytes for people: "1.50 GiB" or "12.3 MiB"."""
    if num_bytes >= 1 << 30:
        return f"{num_bytes / (1 << 30):.2f} GiB"
    return f"{num_bytes / (1 << 20):.1f} MiB"


def parse_bytes(size_text: object) -> int:
    """A number of bytes, or text such as "8GB" (10^9 bytes each), "512MiB" or "1.5G".

    Raises:
        RequestError: it is neither.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?|)B?\s*", str(size_text), re.IGNORECASE)
    size = 0
    if isinstance(size_text, int | str) and not isinstance(size_text, bool) and match is not None:
        unit = match[2].upper().replace("I", "i")
        size = int(float(match[1]) * _UNITS[unit])
    if size < 1:
        raise RequestError(
            f"weights_budget is {size_text!r}; it must be a size such as 8GB, 512MiB or 1.5G.",
            param="weights_budget",
        )
    return size


def offloading_options(options: ExecutionOptions, has_mesh: bool) -> ExecutionOptions:
    """The switches of a model whose layers are offloaded: one step per dispatch.

    Raises:
        RequestError: what streaming layers cannot do.
    """
    if has_mesh:
        raise RequestError("A weights budget streams layers to one device; drop the mesh.")
    for is_rejected, why in (
        (not options.jit, "runs compiled layers; leave jit on"),
        (options.layers == "scan", 'runs layers one by one; set layers to "unrolled"'),
        (
            options.decode_steps not in (None, 1),
            "reads layers at every step, so there is one in a dispatch; leave decode_steps out",
        ),
    ):
        if is_rejected:
            raise RequestError(f"A weights budget {why}.")
    return replace(options, decode_steps=1 if options.use_cache else None)


def check_speculate(speculate: object, num_draft_tokens: int | None, use_cache: bool) -> None:
    """
    Raises:
        RequestError: the arguments have no meaning together.
    """
    if num_draft_tokens is not None and speculate is None:
        raise RequestError(
            'num_draft_tokens is given without speculate; add speculate="ngram" or a model.'
        )
    if speculate is not None and not use_cache:
        raise RequestError("Speculative decoding needs the cache, and it is off; drop one of them.")
