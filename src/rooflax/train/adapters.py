"""Training LoRA: small matrices beside a model that stays as it is, at its own width.

The state has A and B of each linear layer by its module's path in transformers, as PEFT names them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from rooflax.errors import RequestError
from rooflax.loading.adapter_config import ALL_LINEAR, AdapterConfig
from rooflax.models.adapters import (
    LowRank,
    Target,
    adapted_weights,
    expert_targets,
    output_order,
    tables,
    targets,
)
from rooflax.models.model import Model
from rooflax.nn.storage import is_head, is_matmul, matmul_shape
from rooflax.ops.linear.adapted import Adapted, Dropout
from rooflax.ops.linear.frozen import Frozen, lengths
from rooflax.ops.weights import Operand, as_table
from rooflax.train.config import DORA, TrainConfig

Matrices = dict[str, dict[str, Array]]
"""By module: "a" [rank, in], "b" [out, rank], and with DoRA "magnitude" [out]; or "weight"."""
ROUTER = "router"


class LoraTraining:
    """The adapters of a run.

    Args:
        model: the base, layers unrolled or stacked.

    Attributes:
        config: as adapter_config.json has it.
        targets: the linear layers that get adapters, by module.
        experts: those that get adapters, by parameter.
        tables: layers of which the whole weight is trained, by module.

    Raises:
        RequestError: no layer is one of those that are to be trained, or a weight has no gradients.
    """

    def __init__(self, model: Model, config: TrainConfig):
        self.dropout = config.lora_dropout
        self.config, self.targets = resolved(model, config)
        every = tables(model.family, model.config)
        self.tables = {m: target for m, target in every.items() if self.config.replaces(m)}
        experts = expert_targets(model.family, model.config)
        self.experts = {p: t for p, t in experts.items() if self.config.changes_experts(p)}
        _check_stacks(model)
        self._seed, self._base = config.seed, model
        self._is_split = config.mesh is not None

    def start(self) -> Matrices:
        """The matrices before the first step: A uniform within 1 / sqrt(in), B zero, magnitudes the
        lengths of the base's weights, as in PEFT."""
        matrices: Matrices = {}
        counts = dict.fromkeys(self.targets, 1) | {p: t.count for p, t in self.experts.items()}
        for module, target in (self.targets | self.experts).items():
            random = np.random.default_rng([self._seed, zlib.crc32(module.encode())])
            bound, rank = 1 / math.sqrt(target.inputs), self.config.rank * counts[module]
            a = random.uniform(-bound, bound, (rank, target.inputs)).astype(np.float32)
            b = np.zeros((target.outputs, rank), np.float32)
            matrices[module] = {"a": jnp.asarray(a), "b": jnp.asarray(b)}
        if self.config.use_dora:
            for module, length in self._base_lengths():
                matrices[module]["magnitude"] = length
        for module, target in self.tables.items():
            w = as_table(self._base.weights[target.param.key]).in_stack()[0].numbers().T
            matrices[module] = {"weight": w}
        return matrices

    def _base_lengths(self) -> Iterator[tuple[str, Array]]:
        """Lengths of each module's weights, for each output."""
        sizes, weights = self._base.config.axis_sizes, frozen(self._base, self._is_split)
        stacked = weights.get("stacked_layers")
        layers = stacked or weights["layers"]
        length = jax.jit(lengths)
        for module, target in self.targets.items():
            layer, key = target.param.layer, target.param.key
            leaf = weights[key] if layer is None else layers[layer % len(layers)][key]
            if layer is not None and stacked:
                leaf = leaf.at(layer // len(layers))
            outputs = math.prod(leaf.out_shape)
            norms = length(leaf, jnp.zeros((target.inputs, 1)), jnp.zeros((1, outputs)))
            if not target.is_head:
                shape = target.param.line.in_out_shape(sizes)[1]
                order, counts = output_order(target.param.line.layout, shape)
                in_order = jnp.zeros_like(norms).at[order].set(norms)
                norms = jnp.split(in_order, np.cumsum(counts)[:-1])[target.index]
            yield module, norms

    def adapters(self, matrices: Mapping[str, Mapping[str, Any]]) -> dict[str, LowRank]:
        """The matrices with their scales."""
        return {
            module: LowRank(
                parts["a"],
                parts["b"],
                self.config.scale_of(module),
                magnitude=parts.get("magnitude"),
            )
            for module, parts in matrices.items()
            if module not in self.tables
        }

    def whole(self, matrices: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The weights that are trained whole, [out, in]."""
        return {module: matrices[module]["weight"] for module in self.tables}

    def model(self, base: Model, matrices: Matrices, seeds: Int[Array, " rows"] | None) -> Model:
        """The base with these adapters, inside a program.

        Args:
            seeds: of each row of the batch, for dropout; None leaves that out.
        """
        weights, adapters = frozen(base, self._is_split), self.adapters(matrices)
        linear = {module: adapters[module] for module in self.targets}
        weights = adapted_weights(base.family, base.config, weights, linear)
        if seeds is not None and self.dropout > 0:
            weights = _with_dropout(weights, seeds, self.dropout, self._seed)
        for module, target in self.tables.items():
            weights[target.param.key] = matrices[module]["weight"]
        for parameter, target in self.experts.items():
            place, key = weights["layers"][target.param.layer], target.param.key
            place[key] = target.adapted(place[key], adapters[parameter], base.config.axis_sizes)
        return replace(base, weights=weights)


def resolved(model: Model, config: TrainConfig) -> tuple[AdapterConfig, dict[str, Target]]:
    """The layers that are trained: as PEFT's config says it, and by module.

    Raises:
        RequestError: nothing is.
    """
    known = {m: t for m, t in targets(model.family, model.config).items() if t.is_usual}
    count = model.config.num_layers
    layers = None
    if config.num_layers is not None:
        layers = tuple(range(max(count - config.num_layers, 0), count))
    names = config.target_modules
    wanted = names if names.lower() == ALL_LINEAR else tuple(filter(None, names.split(",")))
    stated_config = AdapterConfig(
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        target_modules=wanted,
        layers=layers,
        use_rslora=config.use_rslora,
        use_dora=config.fine_tune_type == DORA,
        dropout=config.lora_dropout,
        modules_to_save=tuple(filter(None, (config.modules_to_save or "").split(","))),
        target_parameters=tuple(filter(None, (config.target_parameters or "").split(","))),
    )
    stated_config = _of_experts(model, stated_config)
    _check_saved(model, stated_config, wanted)
    if not isinstance(wanted, str):
        ends = {module.rpartition(".")[2] for module in known}
        for name in wanted:
            if not any(module == name or module.endswith(f".{name}") for module in known):
                raise RequestError(
                    f"target_modules names {name!r:.80}, and {model.family} has "
                    f"{', '.join(sorted(ends))}.",
                    param="target_modules",
                )
    chosen = {m: target for m, target in known.items() if stated_config.changes(m)}
    if isinstance(wanted, str):  # PEFT's routers of experts are no linear layers
        chosen = {m: t for m, t in chosen.items() if not t.param.key.endswith(ROUTER)}
    if not chosen:
        raise RequestError(
            f"target_modules {names!r:.80} and num_layers {config.num_layers} leave no layer of "
            f"{model.family} to train.",
            param="target_modules",
        )
    ends = tuple(sorted({module.rpartition(".")[2] for module in chosen}))
    stated = replace(stated_config, target_modules=ends)
    if {m for m in known if stated.changes(m)} != set(chosen):
        stated = replace(stated_config, target_modules=tuple(chosen), layers=None)
    return stated, chosen


def _of_experts(model: Model, stated: AdapterConfig) -> AdapterConfig:
    """The same with whole paths of the experts' parameters where some layers alone are trained:
    PEFT takes these parameters by their names, whatever layer they are in.

    Raises:
        RequestError: there are none of a name, or none in these layers.
    """
    if not stated.target_parameters:
        return stated
    experts = expert_targets(model.family, model.config)
    for name in stated.target_parameters:
        if not any(p == name or p.endswith(f".{name}") for p in experts):
            raise RequestError(
                f"target_parameters names {name!r:.80}, and {model.family} has no experts in one "
                f"parameter of that name.",
                param="target_parameters",
            )
    if stated.layers is None:
        return stated
    kept = tuple(
        parameter
        for parameter, target in experts.items()
        if stated.changes_experts(parameter)
        and (target.param.layer in stated.layers or parameter in stated.target_parameters)
    )
    if not kept:
        raise RequestError(
            f"target_parameters {','.join(stated.target_parameters)!r:.80} and num_layers "
            f"{len(stated.layers)} leave no experts of {model.family} to train.",
            param="target_parameters",
        )
    return replace(stated, target_parameters=kept)


def _check_saved(model: Model, stated: AdapterConfig, wanted: tuple[str, ...] | str) -> None:
    """
    Raises:
        RequestError: of a module there is no weight to train whole, or an adapter too.
    """
    known = tables(model.family, model.config)
    for name in stated.modules_to_save:
        module = next((m for m in known if m == name or m.endswith(f".{name}")), None)
        if module is None:
            has = f"has {' and '.join(known)}" if known else "has its head tied to its embedding"
            raise RequestError(
                f"modules_to_save names {name!r:.80}, and {model.family} {has}.",
                param="modules_to_save",
            )
        if not isinstance(wanted, str) and name in wanted:
            raise RequestError(
                f"target_modules and modules_to_save both name {name}.", param="modules_to_save"
            )


def frozen(model: Model, is_split: bool) -> dict[str, Any]:
    """The weights of which those that multiply have gradients through activations alone.

    Args:
        is_split: as `Frozen` has it.
    """
    config, weights = model.config, dict(model.weights)
    stacked = "stacked_layers" in weights
    layers = [dict(layer) for layer in weights["stacked_layers" if stacked else "layers"]]
    for param in config.params():
        if not is_matmul(param, config) or param.line.num_stacked:
            continue
        if param.layer is None:
            place = weights
        elif param.layer >= len(layers):
            continue
        else:
            place = layers[param.layer]
        leaf = place[param.key]
        shape, head = matmul_shape(param, config), is_head(param, config)
        place[param.key] = Frozen(leaf, *shape, is_table=head, is_split=is_split)
    return weights | {"stacked_layers" if stacked else "layers": tuple(layers)}


def _check_stacks(model: Model) -> None:
    """
    Raises:
        RequestError: experts round activations, which has no gradient.
    """
    layers = model.weights.get("stacked_layers") or model.weights["layers"]
    for layer in layers:
        for leaf in layer.values():
            leaves = jax.tree.leaves(leaf, is_leaf=lambda one: isinstance(one, Operand))
            stacks = any(getattr(one, "stack", ()) for one in leaves)
            if stacks and any(getattr(one, "quantizes_activations", False) for one in leaves):
                if "stacked_layers" in model.weights:
                    raise RequestError(
                        "Beside quantized weights rooflax trains an adapter with `layers` unrolled."
                    )
                raise RequestError(
                    f"The model is {model.family} with quantized experts, beside which rooflax "
                    f"trains no adapter; take a checkpoint that is not quantized."
                )


def _with_dropout(weights: dict[str, Any], seeds: Array, rate: float, seed: int) -> dict[str, Any]:
    """Every adapter with a number of its own, by which its dropout differs."""
    numbers = iter(range(1 << 30))
    key = int(np.random.SeedSequence(seed).generate_state(1)[0]) >> 1  # a seed may have any size

    def changed(leaf: Any) -> Any:
        if not isinstance(leaf, Adapted):
            return leaf
        lead = leaf.a.shape[:-2]
        stack = [next(numbers) for _ in range(math.prod(lead))]
        number = jnp.asarray(stack, jnp.int32).reshape(lead)
        return replace(leaf, dropout=Dropout(seeds, number, rate, key))

    return jax.tree.map(changed, weights, is_leaf=lambda leaf: isinstance(leaf, Adapted))
