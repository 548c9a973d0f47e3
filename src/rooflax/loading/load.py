"""Loads a model as planned, with its weights on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from rooflax.errors import RequestError
from rooflax.loading.model_info import ModelInfo, model_info
from rooflax.loading.plan import Plan, make_plan
from rooflax.loading.source import ArraySource
from rooflax.loading.weights import WeightReader
from rooflax.models.adapters import adapted
from rooflax.models.initialize import random_weights
from rooflax.models.memory import ONE_DEVICE
from rooflax.models.model import Model, build
from rooflax.models.offloading import (
    AHEAD,
    AnyModel,
    LayerReader,
    OffloadedModel,
    whole,
)
from rooflax.models.presets import SEED
from rooflax.models.registry import read_config
from rooflax.nn.execution import ExecutionOptions
from rooflax.nn.host_memory import give_back_freed
from rooflax.nn.placement import Placer
from rooflax.nn.storage import Storage
from rooflax.nn.weights import assemble
from rooflax.ops.host_arrays import Arena
from rooflax.ops.variants import prefer_fastest


def load(
    model: str | Path | ModelInfo | None = None,
    *,
    dtype: str | None = "float32",
    quantize: str | None = None,
    max_model_len: int | None = None,
    check: bool = False,
    progress: Callable[[int], None] | None = None,
    stacked: bool = False,
    **find: Any,
) -> Model:
    """A model with its weights on the device.

    Args:
        model: folder, GGUF file, hub id, "package:NAME", "preset:NAME", None for the embedded
            default, or a ModelInfo.
        dtype: of activations and weights, "float32" or "bfloat16"; None is as for `LLM`, and keeps
            bfloat16 and quantised weights as they are.
        quantize: format of the matmuls' weights ("int8", "int4", see ops.weights.formats).
        max_model_len: longest context; default what the model was made for.
        check: reject NaN and infinite weights.
        progress: called with the bytes of each weight loaded.
        stacked: for `layers="scan"`.
        find: `revision`, `offline`, `ignore_config_keys`, as for `model_info`.
    """
    options = ExecutionOptions(layers="scan" if stacked else "unrolled")
    info = model if isinstance(model, ModelInfo) else model_info(model, **find)
    plan = make_plan(
        info, dtype=dtype, quantize=quantize, max_model_len=max_model_len, options=options
    )
    return whole(load_plan(plan, check=check, progress=progress))


def load_plan(
    plan: Plan, *, check: bool = False, progress: Callable[[int], None] | None = None
) -> AnyModel:
    """The model as it was planned; a mesh's is placed on its devices.

    On a CPU it chooses the kernels' variants, which it measures once on a machine (`ops.variants`).

    Args:
        check, progress: as for `load`; offloaded layers are looked at once too.

    Raises:
        RequestError: it does not fit into memory, or it was planned for devices that are not here.
        CheckpointError: the weights are not those of the model, or not finite.
    """
    plan.check_fits()
    if plan.is_offloaded:
        model = _offloaded(plan, check, progress)
    else:
        model = _resident(plan, check, progress)
    jax.block_until_ready(model.weights)
    give_back_freed()
    if plan.mesh is None and not plan.is_offloaded:
        prefer_fastest(model.weights)
    return model


def _resident(plan: Plan, check: bool, progress: Callable[[int], None] | None) -> Model:
    info, storage, scan = plan.info, plan.storage, plan.options.layers == "scan"
    if plan.mesh is None and plan.shards != ONE_DEVICE:
        raise RequestError(
            f"The plan of {info.name} is for {plan.shards} without devices; give their mesh to "
            f"make_plan."
        )
    place = None if plan.mesh is None else Placer(info.config, plan.mesh)
    if info.folder is None:
        weights = random_weights(
            info.family,
            info.config,
            seed=SEED,
            storage=storage,
            place=place,
            stacked=scan,
            progress=progress,
        )
    else:
        reader = info.reader(storage, check=check, place=place)
        weights = reader.weights(progress, stacked=scan)
    model = build(info.family, info.config, weights, plan.max_model_len, storage.dtype)
    if plan.mesh is not None and place is not None:
        model = model.placed(place, plan.mesh, scan=scan)
    if plan.adapter is not None:
        model = adapted(model, plan.adapter.read(info))
    if plan.bank is not None:
        model = plan.bank.beside(model, info)
    return model


def _offloaded(plan: Plan, check: bool, progress: Callable[[int], None] | None) -> OffloadedModel:
    info, split = plan.info, plan.offloading
    assert split is not None
    reader = info.reader(plan.storage, check=check)
    staying = [param for param in reader.params if reader.plans[param.name].is_resident]
    passing = [param for param in reader.params if not reader.plans[param.name].is_resident]
    for _ in reader.leaves(passing) if check else ():
        pass
    weights = assemble(info.config.num_layers, reader.leaves(staying, progress))
    layers = weights.pop("layers")
    ends = weights | {"layers": ()}
    model = build(info.family, info.config, ends, plan.max_model_len, plan.storage.dtype)
    size = max(reader.arena_bytes(index) for index in split.offloaded)
    on_host = jax.default_backend() == "cpu"
    places = [Arena(size) if on_host else None for _ in range(AHEAD)]
    stream = LayerReader(reader.layer, split.offloaded, places)
    return OffloadedModel(model, layers, stream, split)


def from_state_dict(
    config: Mapping[str, Any],
    mapping: Mapping[str, Any],
    *,
    dtype: str = "float32",
    max_model_len: int | None = None,
    ignore_config_keys: Sequence[str] = (),
) -> Model:
    """A model from tensors already in memory.

    Args:
        config: the object of a config.json (for a transformers model, `model.config.to_dict()`).
        mapping: checkpoint names to NumPy arrays or arrays with __dlpack__ (a torch model's
            `state_dict()` on the CPU).
        ignore_config_keys: keys of the config to pass over.
    """
    name, parsed = read_config(config, ignore=ignore_config_keys)
    reader = WeightReader(ArraySource(mapping), name, parsed, storage=Storage(dtype))
    return build(name, parsed, reader.weights(), max_model_len, dtype)
