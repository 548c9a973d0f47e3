"""Whole engine steps for a GPU that is not there: their shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from rooflax.engine import device_steps, packing
from rooflax.engine.packing import StepLayout
from rooflax.models.model import Model
from rooflax.models.presets import PRESETS
from rooflax.models.registry import read_config
from rooflax.nn import kv_cache
from rooflax.nn.execution import ExecutionOptions
from rooflax.nn.rope import RopeTable
from rooflax.nn.storage import Storage, matmul_shape
from rooflax.nn.weights import assemble
from rooflax.ops import sampling_columns, tiles
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
MAX_STEPS, CONTEXT, BLOCK = 32, 4096, tiles.block_size("gpu")
CHUNK = tiles.prefill_chunk("gpu")


@dataclass(frozen=True)
class Step:
    """A program of the engine, at two numbers of layers, whose difference is what a layer costs.

    Attributes:
        greedy: as most requests are, or with the whole sampler, as every step of a server.
    """

    name: str
    model: str
    format: str | None
    kind: str
    layers: tuple[int, ...]
    greedy: bool = True
    rows: int = 1


def every() -> Iterator[Step]:
    for model, format in ROWS:
        label = f"{model} {format or 'bf16'}"
        yield Step(f"{label}, decode", model, format, "decode", (2, 4))
        yield Step(f"{label}, prefill", model, format, "prefill", (2, 4))
    for model, format in (("llama-3.1-8b", "w4a16"), ("gpt-oss-20b", "mxfp4-a16")):
        yield Step(f"{model} {format}, decode, sampler", model, format, "decode", (2, 4), False)
    name = "llama-3.1-8b w4a16, decode, rows 8"
    yield Step(name, "llama-3.1-8b", "w4a16", "decode", (2, 4), rows=8)


def program(
    step: Step, layers: int | None, rows: int | None = None, tokens: int | None = None
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step as a function, and shapes of its arguments.

    Args:
        layers: None is all.
        rows: None is the step's own.
        tokens: of all rows; None is one each, or a chunk.
    """
    rows = rows or step.rows
    layers = layers or MODELS[step.model]["num_hidden_layers"]
    family, config = read_config({**MODELS[step.model], "num_hidden_layers": layers})
    storage = Storage("bfloat16", step.format, keeps_bfloat16=True)
    slots = [(slot, _weight(slot, config, storage)) for slot in config.params()]
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
    seen += [] if step.greedy else [Struct((rows + 1, MAX_STEPS), jnp.int32)]
    masks = None if step.greedy else Struct((rows + 1, -(-vocabulary // 32)), jnp.int32)
    tokens = tokens or (rows if step.kind == "decode" else CHUNK)
    longest = 1 if step.kind == "decode" else min(tokens, CHUNK)
    layout = StepLayout(rows, tokens, tuple(CONTEXT // BLOCK for _ in groups.windows), longest)
    size = packing.HEADER + rows * layout.width + layout.num_tokens
    given = device_steps.StepInput(
        Struct((size,), jnp.int32),  # type: ignore[arg-type]
        Struct((rows + 1, sampling_columns.WIDTH), jnp.int32),  # type: ignore[arg-type]
        masks,  # type: ignore[arg-type]
        layout,
        greedy=step.greedy,
    )
    how: dict[str, Any] = {"options": ExecutionOptions(), "shards": None}
    run = device_steps.run_step
    if step.kind == "scored":
        run = device_steps.scored
    if step.kind == "decode":
        run, how = device_steps.decode, {**how, "max_steps": MAX_STEPS}
    return partial(run, **how), (model, (cache, TokenCounts(*seen)), given)  # type: ignore[arg-type]


def _weight(slot: Any, config: Any, storage: Storage) -> Any:
    """Its shape and type, packed if the format says so."""
    shape = slot.line.shape(config.axis_sizes)
    plan = storage.of(slot, config)
    format = plan.format
    if format is None:
        return Struct(shape, plan.dtype)
    inner, outer = matmul_shape(slot, config)
    sizes = 1, 1
    for axis in inner:
        sizes = sizes[0] * axis, 1
    for axis in outer:
        sizes = sizes[0], sizes[1] * axis
    arrays = class_of(format).like(*sizes, shape[: slot.line.num_stacked])
    return class_of(format)(*arrays, format, inner, outer)  # type: ignore[arg-type]
