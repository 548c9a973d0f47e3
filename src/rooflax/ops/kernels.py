"""Implementations of each operation that exist here, and those that run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rooflax.errors import RequestError
from rooflax.ops import accelerator
from rooflax.ops.attention.api import PAGED
from rooflax.ops.attention.args import AttentionArgs
from rooflax.ops.dispatch import Ran, what_ran
from rooflax.ops.format_names import ALIASES, format_on
from rooflax.ops.kv_pool import PlainPool, QuantizedPool
from rooflax.ops.linear.api import LINEAR
from rooflax.ops.linear.args import LinearArgs
from rooflax.ops.linear.prologue import ClampedSwiglu
from rooflax.ops.moe.api import EXPERTS
from rooflax.ops.moe.args import Experts, MoeArgs
from rooflax.ops.weights import Dense, StoredOperand, class_of

OPERATIONS = {"linear": LINEAR, "attention": PAGED, "moe": EXPERTS}


def check_kernels(name: str | None) -> None:
    """Rejects a name that some operation does not have.

    Raises:
        RequestError: naming the operation and what it has.
    """
    for label, operation in OPERATIONS.items():
        here = operation.available()
        if name is not None and name not in here:
            raise RequestError(f"kernels is {name!r}, but {label} has only {', '.join(here)} here.")


def chosen(name: str | None) -> dict[str, str]:
    """Per operation the implementation that is tried first when `name` is asked for."""
    return {label: name or operation.available()[-1] for label, operation in OPERATIONS.items()}


def ran(name: str | None) -> dict[str, list[Ran]]:
    """Per operation what ran in this process when `name` was asked for."""
    by_operation = what_ran(name)
    names = {"linear": "linear", "attention": "attention", "moe": "experts"}
    if "attention" not in by_operation:  # without a cache
        names["attention"] = "dense attention"
    return {label: by_operation.get(operation, []) for label, operation in names.items()}


def by_default() -> dict[str, dict[str, Ran]]:
    """Per operation, and by what it reads, what runs here in decoding; nothing is computed."""
    dtype = jnp.dtype("float32" if accelerator.platform() == "cpu" else "bfloat16")
    sizes, block_size = (256, 256), accelerator.block_size()
    width = accelerator.cache_width(64)
    x, ids = _like((1, sizes[0]), dtype), _like((1, 2), "int32")

    def weight(kind: str, *stack: int) -> StoredOperand:
        shapes = (sizes[:1], sizes[1:])
        if kind not in ALIASES:
            return Dense(_like((*stack, *sizes), kind), *shapes)
        format = format_on(accelerator.platform(), ALIASES[kind])
        arrays = class_of(format).like(*sizes, stack)
        return class_of(format)(*arrays, format, *shapes)  # type: ignore[arg-type]

    def experts(kind: str) -> MoeArgs:
        each = Experts(weight(kind, 4), None, _like((4, sizes[1]), dtype))
        return MoeArgs(x, ids, _like((1, 2), "float32"), each, each, ClampedSwiglu())

    def pool(kind: str) -> PlainPool | QuantizedPool:
        shape = (3, 2, block_size, width)
        if kind != "int8":
            return PlainPool(_like(shape, kind))
        return QuantizedPool(_like(shape, kind), _like(shape[:3], "float32"))

    kinds = ("float32", "bfloat16", *ALIASES)
    q, args = _like((1, 1, 4, width), dtype), AttentionArgs(1.0)
    return {
        "linear": {kind: LINEAR.choose(None, LinearArgs(x, weight(kind))) for kind in kinds},
        "attention": {
            kind: PAGED.choose(None, q, pool(kind), pool(kind), None, args)
            for kind in ("float32", "bfloat16", "int8")
        },
        "moe": {kind: EXPERTS.choose(None, experts(kind)) for kind in kinds},
    }


def _like(shape: tuple[int, ...], dtype: Any) -> Any:
    """Stands in for an array of which only shape and type are read."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
