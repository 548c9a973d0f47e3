"""Whole engine steps for a GPU that is not there: their shapes, and what they launch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from rooflax.engine import packing, steps
from rooflax.engine.packing import Layout
from rooflax.models.model import Model
from rooflax.models.presets import PRESETS
from rooflax.models.registry import read_config
from rooflax.nn import kv_cache
from rooflax.nn.execution import ExecutionOptions
from rooflax.nn.rope import RopeTable
from rooflax.nn.storage import Storage, matmul_shape
from rooflax.nn.weights import assemble
from rooflax.ops import sampling_columns
from rooflax.ops.sampling import TokenCounts
from rooflax.ops.weights import class_of

Struct = jax.ShapeDtypeStruct
QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
MODELS = {name: PRESETS[name] for name in ("llama-3.1-8b", "qwen2.5-0.5b", "gpt-oss-20b")}
MODELS["qwen3-8b"] = QWEN3
ROWS = (
    ("llama-3.1-8b", None), ("llama-3.1-8b", "w8a16"), ("llama-3.1-8b", "w4a16"),
    ("qwen2.5-0.5b", None), ("qwen3-8b", "w4a16"), ("gpt-oss-20b", "mxfp4-a16"),
)  # fmt: skip
MAX_STEPS, CONTEXT, CHUNK, BLOCK = 32, 4096, 512, 16


@dataclass(frozen=True)
class Step:
    """A program of the engine, at two numbers of layers, whose difference is what a layer costs."""

    name: str
    model: str
    format: str | None
    kind: str
    layers: tuple[int, ...]


def every() -> Iterator[Step]:
    for model, format in ROWS:
        label = f"{model} {format or 'bf16'}"
        yield Step(f"{label}, decode", model, format, "decode", (2, 4))
        yield Step(f"{label}, prefill", model, format, "prefill", (2, 4))


def program(
    step: Step, layers: int | None, rows: int = 1, tokens: int | None = None, greedy: bool = True
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step as a function, and shapes of its arguments; greedy, as most requests are.

    Args:
        layers: None is all.
        tokens: of all rows; None is one each, or a chunk.
    """
    layers = layers or MODELS[step.model]["num_hidden_layers"]
    family, config = read_config({**MODELS[step.model], "num_hidden_layers": layers})
    storage = Storage("bfloat16", step.format, keeps_bfloat16=True)
    slots = [(slot, _weight(slot, config, storage)) for slot in config.slots()]
    tables = tuple(
        RopeTable(*[Struct((CONTEXT, dim // 2), jnp.float32)] * 2) for dim in config.rope_dims
    )
    model = Model(assemble(layers, iter(slots)), tables, family, config, CONTEXT, "bfloat16")
    groups = config.groups
    blocks = tuple(1 + rows * CONTEXT // BLOCK for _ in groups.windows)
    shapes = kv_cache.pool_shapes(groups, blocks, BLOCK)
    pools = tuple(Struct(*shape, jnp.bfloat16) for shape in shapes)
    cache = kv_cache.KVCache(pools, pools, groups, BLOCK)
    vocabulary = config.vocab_size
    seen = [Struct((rows + 1, vocabulary), dtype) for dtype in (jnp.bool_, jnp.int32)]
    seen += [] if greedy else [Struct((rows + 1, MAX_STEPS), jnp.int32)]
    masks = None if greedy else Struct((rows + 1, -(-vocabulary // 32)), jnp.int32)
    tokens = tokens or (rows if step.kind == "decode" else CHUNK)
    longest = 1 if step.kind == "decode" else min(tokens, CHUNK)
    layout = Layout(rows, tokens, tuple(CONTEXT // BLOCK for _ in groups.windows), longest)
    size = packing.HEADER + rows * layout.width + layout.num_tokens
    given = steps.StepInput(
        Struct((size,), jnp.int32),  # type: ignore[arg-type]
        Struct((rows + 1, sampling_columns.WIDTH), jnp.int32),  # type: ignore[arg-type]
        masks,  # type: ignore[arg-type]
        layout,
        greedy=greedy,
    )
    how: dict[str, Any] = {"options": ExecutionOptions(), "shards": None}
    run = steps.run_step
    if step.kind == "decode":
        run, how = steps.decode, {**how, "max_steps": MAX_STEPS}
    return partial(run, **how), (model, (cache, TokenCounts(*seen)), given)  # type: ignore[arg-type]


def _weight(slot: Any, config: Any, storage: Storage) -> Any:
    """Its shape and type, packed if the format says so."""
    shape = slot.weight.shape(config.axis_sizes)
    format = storage.format_of(slot, config)
    if format is None:
        return Struct(shape, storage.dtype_of(slot, config, True))
    inner, outer = matmul_shape(slot, config)
    sizes = 1, 1
    for axis in inner:
        sizes = sizes[0] * axis, 1
    for axis in outer:
        sizes = sizes[0], sizes[1] * axis
    arrays = class_of(format).like(*sizes, shape[: slot.weight.num_stacked])
    return class_of(format)(*arrays, format, inner, outer)  # type: ignore[arg-type]


FREE = {
    "parameter",
    "get-tuple-element",
    "tuple",
    "constant",
    "bitcast",
    "after-all",
    "partition-id",
}
"""Operations that launch nothing."""
OPERATION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = .*?[\])}] ([a-z][\w\-]*)\(", re.M)
CALLED = re.compile(r"(?:body|condition|to_apply|calls|branch_computations)=\{?%?([\w.\-, %]+)\}?")


def launches(text: str, kind: str) -> Counter[str]:
    """What one step launches, by its kind, from the compiled program's HLO.

    Of a decode step, what the body and the condition of its loop run; what a conditional or an
    inner loop runs is counted once.
    """
    computations = {}
    for part in re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ \()", text):
        if name := re.match(r"(ENTRY )?%?([\w.\-]+) \(", part):
            computations[name[2]] = part
            if name[1]:
                computations["ENTRY"] = part
    if kind != "decode":
        return _counted(computations, "ENTRY")
    loops = re.findall(r" while\(.*?condition=%?([\w.\-]+), body=%?([\w.\-]+)", text)
    condition, body = max(loops, key=lambda names: len(computations[names[1]]))
    return _counted(computations, body) + _counted(computations, condition)


def _counted(computations: dict[str, str], name: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for line in computations[name].splitlines()[1:]:
        if not (operation := OPERATION.match(line)) or operation[1] in FREE:
            continue
        kind = operation[1]
        if kind in ("call", "while", "conditional", "async-start"):
            for called in CALLED.findall(line):
                for inner in re.split(r"[,\s%]+", called):
                    if inner in computations:
                        found += _counted(computations, inner)
            continue
        if kind.endswith("-done"):
            continue
        if target := re.search(r'custom_call_target="([^"]+)"', line):
            kind = target[1]
        found[kind] += 1
    return found
