"""What a Mosaic GPU kernel's lowered module does, in order: products, copies and waits.

Interpretation runs every copy and product to its end before the next operation, so that it cannot
see a copy that overwrites what a product still reads; here that is seen without a GPU.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import jax
from jax._src.interpreters import mlir
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir

EVENTS = {
    "commit": r"wgmma\.commit_group",
    "wait": r"wgmma\.wait_group\.sync\.aligned (\d+)",
    "product": r"wgmma\.mma_async",
    "load": r"cp\.async\.bulk\.tensor\.(?:\dd\.)?shared",  # with JAX 0.11 an operation of its own
    "store": r"nvvm\.cp\.async\.bulk\.tensor\.global",
    "stored": r"cp\.async\.bulk\.wait_group",
}


@dataclass
class Loop:
    """The body of a loop: events, and loops in it."""

    body: list = field(default_factory=list)


def modules(function, *arguments):
    """The kernels of a function lowered for CUDA, each as its events."""
    jitted = jax.jit(lambda *given: function(*given))  # a function of its own is traced anew
    lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
    packed = []

    def visit(op):
        if op.name == "stablehlo.custom_call" and "mosaic_gpu" in str(op):
            config = ir.DictAttr(op.attributes["mhlo.backend_config"])
            packed.append(ir.StringAttr(config["module"]).value_bytes)
        return ir.WalkResult.ADVANCE

    module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        module.operation.walk(visit)
    found = []
    for each in packed:
        with mlir.make_ir_context() as context:
            mgpu.dialect.register_dialect(context)
            context.allow_unregistered_dialects = True
            found.append(_events(ir.Module.parse(each).operation))
    return found


def _events(op):
    found = []
    for region in op.regions:
        for block in region:
            for inner in block:
                found += _event(inner)
                own = _events(inner)
                found += [Loop(own)] if own and inner.name.endswith("scf.for") else own
    return found


def _event(op):
    said = op.name
    if "asm_string" in op.attributes:
        said += " " + ir.StringAttr(op.attributes["asm_string"]).value
    if "group" in op.attributes and said.endswith("wait_group"):
        said += f" {op.attributes['group']}"
    for name, pattern in EVENTS.items():
        if match := re.search(pattern, said):
            return [(name, int(match[1]))] if match.groups() else [(name, 0)]
    return []


def groups_read_at_refills(events):
    """At each copy into shared memory behind a product, how many groups of products may still be
    reading it: those that were committed, less those that a wait has seen to.

    Every loop runs three times over, as its turns do.
    """
    found, state = [], {"flight": 0, "open": False, "ran": False}

    def run(events):
        for event in events:
            if isinstance(event, Loop):
                for _ in range(3):
                    run(event.body)
                continue
            name, number = event
            if name == "product":
                state.update(open=True, ran=True)
            elif name == "commit":
                state.update(flight=state["flight"] + 1, open=False)
            elif name == "wait":
                state["flight"] = min(state["flight"], number)
            elif name == "load" and state["ran"]:
                found.append(state["flight"] + state["open"])

    run(events)
    return found


def flat(events):
    """Names of all events, loops once."""
    for event in events:
        if isinstance(event, Loop):
            yield from flat(event.body)
        else:
            yield event[0]
