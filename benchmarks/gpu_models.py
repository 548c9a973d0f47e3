"""Rows of whole models on a GPU: weights drawn where they are used, and a peer beside them.

A preset's own weights are made on the host, which takes longer than all figures.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

Figures = dict[str, Any]
LADDER = (
    ("baseline", {}, "1.0x"),
    ("+ GQA", {"gqa": "grouped"}, "1.08x"),
    ("+ MoE grouping", {"moe": "grouped"}, "1.2x"),
    ("+ KV cache", {"use_cache": True}, "50x"),
    ("+ jit", {"jit": True}, "2.0x"),
    ("default settings", {"kernels": None}, ""),
)
"""In the documents' order, with their factors for an A100; in plain JAX but for the last row."""
SLOWEST = {
    "use_cache": False, "jit": False, "gqa": "repeat", "moe": "per_token", "kernels": "xla",
}  # fmt: skip


def model(
    model: str,
    work: Figures,
    precision: Figures,
    options: Figures | None = None,
    layers: int | None = None,
    chunk: int | None = None,
    implementation: str | None = None,
) -> Figures:
    """One row of `rooflax bench`, with weights drawn on the device.

    Args:
        layers: how many of the preset's; None is all.
        chunk: the most tokens of a prompt in a step; None is the engine's default.
        implementation: of every operation, where the kernels failed.
    """
    from rooflax.bench.measure import measure

    with weights_on_device(), prompts_by(chunk) as chunks:
        row, all_layers = workload(model, work, precision, options, layers, implementation)
        found = measure(row)
    found.pop("tokens")
    return {**found, "prefill_chunk": chunks[-1], "all_layers": all_layers}


def workload(
    model: str,
    work: Figures,
    precision: Figures,
    options: Figures | None,
    layers: int | None,
    implementation: str | None,
) -> tuple[Any, int]:
    """A row of `rooflax bench`, of a preset with so many layers; and how many the preset has."""
    from rooflax.bench.workload import Workload
    from rooflax.models.presets import PRESETS
    from rooflax.nn.execution import ExecutionOptions, Precision

    shape = PRESETS.get(model, {})
    if layers is not None:
        model = f"{model}, {layers} layers"
        PRESETS[model] = {**shape, "num_hidden_layers": layers}
    row = Workload(f"preset:{model}", **work, precision=Precision(**precision))
    named = {"kernels": implementation} if implementation else {}
    row = replace(row, options=ExecutionOptions(**{**(options or {}), **named}))
    return row, shape.get("num_hidden_layers", 0)


def mixed(
    model: str, work: Figures, precision: Figures, layers: int, implementation: str | None = None
) -> Figures:
    """Tokens a second of half of the rows, which decode while the prompts of the others are taken;
    and tokens of these prompts."""
    from rooflax.bench.measure import Bench

    with weights_on_device():
        row, all_layers = workload(model, work, precision, None, layers, implementation)
        bench = Bench(row)
    rates: dict[str, list[float]] = {"decode": [], "prefill": []}
    for trial in range(2 + row.trials):  # two compile
        sequences = bench._sequences()
        decoding, coming = sequences[: row.batch // 2], sequences[row.batch // 2 :]
        bench.engine.add(decoding)
        while not all(each.output_tokens for each in decoding):
            bench.engine.step()
        begin, before = time.perf_counter(), sum(len(each.output_tokens) for each in decoding)
        bench.engine.add(coming)
        while not all(each.output_tokens for each in coming):
            bench.engine.step()
        took = time.perf_counter() - begin
        decoded = sum(len(each.output_tokens) for each in decoding) - before
        while bench.engine.has_unfinished:
            bench.engine.step()
        if trial >= 2:
            rates["decode"].append(decoded / took)
            rates["prefill"].append(row.prompt_tokens * len(coming) / took)
    found = {f"{kind}_tok_per_s": {"median": median(each)} for kind, each in rates.items()}
    return {**found, "batch": row.batch, "all_layers": all_layers}


@contextlib.contextmanager
def prompts_by(chunk: int | None) -> Iterator[list[int]]:
    """Engines take prompts by so many tokens a step; gives what each of them has taken."""
    from rooflax import llm

    chunks: list[int] = []
    build = llm.Engine

    def engine(model: Any, config: Any, *more: Any) -> Any:
        if chunk is not None:
            config = replace(config, prefill_chunk=chunk, max_tokens_per_step=0)
        made = build(model, config, *more)
        chunks.append(made.config.prefill_chunk)
        return made

    llm.Engine = engine
    try:
        yield chunks
    finally:
        llm.Engine = build


@contextlib.contextmanager
def weights_on_device() -> Iterator[None]:
    """Presets get weights of the same shapes, types and spread, made where they are used."""
    from rooflax.loading import load
    from rooflax.models import presets

    before, load.random_weights = load.random_weights, drawn
    presets.PRESETS.setdefault("llama-tiny", {**presets.PRESETS["llama-3.2-1b"], **TINY_LLAMA})
    try:
        yield
    finally:
        load.random_weights = before


TINY_LLAMA = {
    "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


def drawn(
    name: str, config: Any, *, seed: int, storage: Any, stacked: bool = False, **_: Any
) -> Figures:
    """`random_weights`, on the device: normal, or packed bytes of any bits at a fitting scale."""
    from functools import partial

    import jax

    from rooflax.nn.stacking import Stacks
    from rooflax.nn.weights import assemble

    one = jax.jit(_one, static_argnums=(1, 2, 3, 4))
    keys = partial(jax.random.fold_in, jax.random.key(seed, impl="rbg"))

    def arrays() -> Iterator[tuple[Any, Any]]:
        for number, slot in enumerate(config.params()):
            std = 0.02 / (2 * config.num_layers) ** 0.5 if slot.line.init == "residual" else 0.02
            kind = _kind(slot, config, storage, std)
            yield slot, one(keys(number), *kind)

    if stacked:
        return Stacks(config.num_layers, config.groups.period).filled(arrays())
    return assemble(config.num_layers, arrays())


def _kind(slot: Any, config: Any, storage: Any, std: float) -> tuple[Any, ...]:
    """What `_one` must know of a weight: (how it begins, shape, dtype or format, deviation)."""
    from rooflax.nn.storage import matmul_shape

    shape = slot.line.shape(config.axis_sizes)
    plan = storage.of(slot, config, is_bfloat16=False)
    if (found := plan.format) is None:
        return slot.line.init, shape, plan.dtype, std
    return "packed", (shape[: slot.line.num_stacked], *matmul_shape(slot, config)), found, std


def _one(key: Any, init: str, shape: Any, kind: str, std: float) -> Any:
    import jax
    import jax.numpy as jnp

    if init in ("ones", "zeros"):
        return jnp.full(shape, float(init == "ones"), kind)
    if init != "packed":
        return (jax.random.normal(key, shape, jnp.float32) * std).astype(kind)
    import math

    from rooflax.ops.format_names import FORMATS
    from rooflax.ops.weights import class_of

    stack, in_shape, out_shape = shape
    sizes = (math.prod(in_shape), math.prod(out_shape))
    values, scales, sums = class_of(kind).like(*sizes, stack)
    code = FORMATS[kind].code
    bits = jax.random.bits(key, values.shape, jnp.uint8)
    if code == "fp8":  # none that is NaN, and all below 2
        bits = bits & 0xBF
    spread = {"int8": 74.0, "int8-g32": 74.0, "int4": 4.6, "mxfp4": 2.9, "fp8": 0.7}[code]
    scale = std / spread
    exponent = 127 + round(math.log2(scale))
    packed = jax.lax.bitcast_convert_type(bits, values.dtype)
    of_output = packed.astype(jnp.int32).sum(axis=(-3, -1)) if code == "int8" else jnp.zeros(0)
    return class_of(kind)(
        packed,
        jnp.full(scales.shape, exponent if code == "mxfp4" else scale, scales.dtype),
        of_output.reshape(sums.shape).astype(sums.dtype),
        kind,
        in_shape,
        out_shape,
    )


def transformers(tiny: bool, work: Figures, implementation: str | None = None) -> Figures:
    """The LLaMA shape in bfloat16 with a static cache and torch.compile, batch 1, greedy."""
    del implementation
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    from benchmarks.gpu_torch import compiled, rates, shape, target

    raw = shape(tiny)
    given = {k: v for k, v in raw.items() if k not in ("model_type", "rope_scaling")}
    device, dtype = target()
    with torch.device(device):
        torch.set_default_dtype(dtype)
        net = LlamaForCausalLM(LlamaConfig(**given)).eval()
        torch.set_default_dtype(torch.float32)
    cache = StaticCache(
        config=net.config, max_cache_len=work["prompt_tokens"] + work["output_tokens"]
    )

    def run(tokens: Any, at: Any) -> Any:
        found = net(
            input_ids=tokens,
            past_key_values=cache,
            cache_position=at,
            position_ids=at[None],
            logits_to_keep=1,
        )
        return found.logits[:, -1:].argmax(-1)

    read = sum(p.nbytes for n, p in net.named_parameters() if "embed_tokens" not in n)
    return rates(run, compiled(run), cache.reset, raw, read, work)
