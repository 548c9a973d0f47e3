"""One training step: loss, gradient, accumulation, clipping, optimizer; one jitted function.

It knows a model by its `forward` and `logits` alone, and nothing of files or progress.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float
from optax.contrib import MuonDimensionNumbers, muon

from rooflax.models.model import Model
from rooflax.nn.batch import Batch
from rooflax.nn.execution import TrainingOptions
from rooflax.nn.shards import TENSOR
from rooflax.nn.weights import LAYER_PREFIX, WeightLine
from rooflax.train.adapters import LoraTraining
from rooflax.train.config import MUON, TrainConfig
from rooflax.train.data import PackedBatch
from rooflax.train.devices import GRADIENTS, ONE_DEVICE, TOTAL, OneDevice
from rooflax.train.loss import cross_entropy_sum, token_losses

ADAMW_RMS = 0.2
"""Root mean square of AdamW's updates, over the learning rate."""
JOINED = frozenset({"gate_up", "kv_heads", "qkv_group"})
"""Output axes that number matrices."""
Step = Callable[..., tuple["TrainState", "TrainMetrics"]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """State that training changes: float32 weights, the optimizer's moments, the steps done."""

    weights: dict[str, Any]
    opt_state: Any
    step: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainMetrics:
    """Numbers of one step: the mean loss, the norm of the gradient before clipping, what the loss
    is a mean over (`Loss.count`), and further means by name."""

    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    count: Float[Array, ""]
    more: dict[str, Float[Array, ""]]


@dataclass(frozen=True)
class Loss:
    """Loss that training lowers, as a mean: a sum, and what it is divided by.

    Attributes:
        sums: (weights, fixed, batch, seeds) -> (loss, further numbers to log by name), each summed
            over a part of the batch; `fixed` and `seeds` as `make_token_losses` has them.
        count: (batch) -> how many tokens (or pairs, or answers) the sums are over.
    """

    sums: Callable[..., tuple[Float[Array, ""], dict[str, Float[Array, ""]]]]
    count: Callable[[Any], Float[Array, ""]]


def learning_rate(config: TrainConfig) -> Callable[[Any], Any]:
    """The rate of step `count` (from 0): a linear rise, then half a cosine.

    rise: peak * (count + 1) / warmup_steps; without a warm-up the first step has the peak
    fall: peak * (r + (1 - r) * (1 + cos(pi * t)) / 2), t from 0 to 1 over the other steps
    """
    warmup = max(min(config.warmup_steps or 0, config.num_steps), 1)
    fall = max(config.num_steps - warmup, 1)
    peak, ratio = config.learning_rate, config.min_lr_ratio

    def rate(count: Any) -> Any:
        done = jnp.asarray(count, jnp.float32) + 1.0
        t = jnp.clip((done - warmup) / fall, 0.0, 1.0)
        cosine = peak * (ratio + (1.0 - ratio) * 0.5 * (1.0 + jnp.cos(jnp.pi * t)))
        return jnp.where(done < warmup, peak * done / warmup, cosine)

    return rate


def make_optimizer(
    table: dict[str, WeightLine], weights: dict[str, Any], config: TrainConfig
) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW or Muon, whose decay touches matrices only: all of an
    adapter.

    Muon's updates have the size of AdamW's, so that one learning rate does for both.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019; Jordan et al., Muon,
    2024; Liu et al., Muon is Scalable for LLM Training, 2025 (sizes and decay).
    """
    rate = learning_rate(config)

    def rate_of_update(count: Any) -> Any:
        return rate(count // config.num_iterations)

    if config.optimizer == MUON:
        axes: Any = partial(_muon_axes, table)
        optimizer = muon(
            rate_of_update,
            weight_decay=config.weight_decay,
            consistent_rms=ADAMW_RMS,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            muon_weight_dimension_numbers=axes,
        )
    else:
        optimizer = optax.adamw(
            rate_of_update,
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=None if config.trains_adapter else decay_mask(table, weights),
        )
    if config.clip_norm == 0:
        return _mixing_types(optimizer)
    return _mixing_types(optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer))


def _muon_axes(table: dict[str, WeightLine], weights: dict[str, Any]) -> dict[str, Any]:
    """Input and output axes of the matrices that Muon takes, those of the layers; None for others.

    What a fused weight joins are matrices of their own: heads, gate and up.
    """

    def axes(name: str, weight: Any) -> Any:
        line = table[name]
        num_inputs, num_axes = line.num_inputs, len(line.axis_names)
        if not name.startswith(LAYER_PREFIX) or not 0 < num_inputs < num_axes:
            return None
        first = getattr(weight, "ndim", num_axes) - num_axes  # behind the layers of a scan
        outputs = [i for i in range(num_inputs, num_axes) if line.axis_names[i] not in JOINED]
        return MuonDimensionNumbers(
            tuple(first + i for i in range(line.num_stacked, num_inputs)),
            tuple(first + i for i in outputs),
        )

    return {
        name: tuple({k: axes(LAYER_PREFIX + k, w) for k, w in layer.items()} for layer in value)
        if type(value) is tuple
        else axes(name, value)
        for name, value in weights.items()
    }


def _mixing_types(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """optax mixes floats and integers, which a process may have made an error."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(updates, state, params)

    return optax.GradientTransformation(optimizer.init, update)


def decay_mask(table: dict[str, WeightLine], weights: dict[str, Any]) -> dict[str, Any]:
    """For each array of `weights`, whether it is a matrix by its line in the table.

    Norms, biases and other vectors are not, stacked or not.
    """

    def matrix(name: str) -> bool:
        line = table[name]
        return line.init in ("normal", "residual") and len(line.axis_names) >= 2

    mask: dict[str, Any] = {}
    for name, value in weights.items():
        if isinstance(value, tuple):
            mask[name] = tuple({k: matrix(LAYER_PREFIX + k) for k in layer} for layer in value)
        else:
            mask[name] = matrix(name)
    return mask


def init_state(
    weights: dict[str, Any],
    optimizer: optax.GradientTransformation,
    devices: OneDevice = ONE_DEVICE,
) -> TrainState:
    """The state before the first step; weights become float32 copies that may be donated."""
    masters = jax.tree.map(lambda w: jnp.array(w, jnp.float32, copy=True), weights)
    masters = devices.placed(masters)
    shardings = devices.shardings(jax.eval_shape(optimizer.init, masters))
    opt_state = jax.jit(optimizer.init, out_shardings=shardings)(masters)
    return TrainState(masters, opt_state, devices.placed(jnp.zeros((), jnp.int32)))


def make_train_step(
    model: Model,
    optimizer: Any,
    config: TrainConfig,
    lora: LoraTraining | None = None,
    loss: Loss | None = None,
    devices: OneDevice = ONE_DEVICE,
) -> Step:
    """The jitted step: (state, fixed, batch) -> (state, metrics); the state is donated.

    With k micro-batches each device computes its rows in k parts, one after the other; each part's
    loss is its sum divided by the whole step's count, so that the gradient is that of one batch.

    Args:
        model: gives architecture and family; its arrays are not captured.
        lora: what is trained, if not all weights.
        loss: None is `cross_entropy`.
        devices: among which rows and arrays are split.
    """
    loss = loss or cross_entropy(model, config, lora)

    def of_device(weights: Any, fixed: Any, rows: Any, scale: Any) -> Any:
        """The loss of a device's rows, and its gradient."""

        def part(weights: Any, rows: Any) -> Any:
            sums = loss.sums(*devices.whole(weights, fixed), *rows)
            return jax.tree.map(lambda total: total * scale, sums)

        graded = jax.value_and_grad(part, has_aux=True)
        numbers, grads = _accumulate(graded, weights, rows, config.micro_batches or 1)
        return devices.summed(numbers), devices.summed_gradients(grads)

    of_rows = devices.mapped(of_device, (TOTAL, GRADIENTS))

    def step(state: TrainState, fixed: Any, batch: Any) -> tuple[TrainState, TrainMetrics]:
        count = loss.count(batch)
        scale = 1.0 / jnp.maximum(count, 1.0)
        rows = batch.mask.shape[0]
        seeds = state.step * rows + jnp.arange(rows, dtype=jnp.int32)
        (mean, more), grads = of_rows(state.weights, fixed, (batch, seeds), scale)
        norm = global_norm(grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.weights)
        weights = cast(dict[str, Any], optax.apply_updates(state.weights, updates))
        after = TrainState(weights, opt_state, state.step + 1)
        return devices.kept(after), TrainMetrics(mean, norm, count, more)

    def steps(state: TrainState, fixed: Any, batch: Any) -> tuple[TrainState, TrainMetrics]:
        def body(carry: TrainState, _: None) -> tuple[TrainState, TrainMetrics]:
            after, metrics = step(carry, fixed, batch)
            return replace(after, step=carry.step), metrics

        after, metrics = jax.lax.scan(body, state, length=config.num_iterations)
        return replace(after, step=state.step + 1), jax.tree.map(lambda each: each[-1], metrics)

    return jax.jit(step if config.num_iterations == 1 else steps, donate_argnums=0)


def make_eval_step(
    model: Model,
    config: TrainConfig,
    lora: LoraTraining | None = None,
    loss: Loss | None = None,
    devices: OneDevice = ONE_DEVICE,
) -> Callable[..., tuple[Any, Any, Any]]:
    """The jitted function (weights, fixed, batch) -> (summed loss, its count, further sums)."""
    loss = loss or cross_entropy(model, replace(config, remat=None), lora)

    def of_device(weights: Any, fixed: Any, batch: Any) -> Any:
        micro, whole = _split_rows(batch, config.micro_batches or 1), devices.whole(weights, fixed)
        sums = jax.lax.map(lambda part: loss.sums(*whole, part, None), micro)
        return devices.summed(jax.tree.map(jnp.sum, sums))

    of_rows = devices.mapped(of_device, TOTAL)

    def evaluate(weights: Any, fixed: Any, batch: Any) -> tuple[Any, Any, Any]:
        total, more = of_rows(weights, fixed, batch)
        return total, loss.count(batch), more

    return jax.jit(evaluate)


def cross_entropy(model: Model, config: TrainConfig, lora: LoraTraining | None = None) -> Loss:
    """The loss of each token given those before it, in nats, a mean over the mask."""
    loss_sum = make_loss_sum(model, config, lora)
    return Loss(lambda *part: (loss_sum(*part), {}), lambda batch: jnp.sum(batch.mask))


def make_loss_sum(
    model: Model, config: TrainConfig, lora: LoraTraining | None = None
) -> Callable[..., Float[Array, ""]]:
    """(weights, fixed, batch, seeds) -> cross-entropy summed over the mask, in nats, float32."""
    forward, options = _make_forward(model, config, lora)

    def loss_sum(
        weights: dict[str, Any], fixed: Any, batch: PackedBatch, seeds: Any = None
    ) -> Float[Array, ""]:
        computed, hidden = forward(weights, fixed, batch, seeds)
        return cross_entropy_sum(computed, hidden, batch.targets, batch.mask, options)

    return loss_sum


def make_token_losses(
    model: Model,
    config: TrainConfig,
    lora: LoraTraining | None = None,
    kernels: str | None = None,
) -> Callable[..., Float[Array, "rows seq"]]:
    """(weights, fixed, batch, seeds) -> -log p of each target, in nats, float32.

    `fixed` is what is not trained: RoPE's tables, or with an adapter the base model. `seeds` are
    the rows', for the adapter's dropout; None is none.

    Matrices are cast to the computation's dtype; norms, softmax and the loss stay float32.

    Args:
        model: gives architecture and family; its arrays are not captured.
        lora: what is trained, if not all weights.
        kernels: of the forward pass; "trained" sums as the engine's do, None is XLA's.
    """
    forward, options = _make_forward(model, config, lora, kernels)

    def losses(
        weights: dict[str, Any], fixed: Any, batch: Any, seeds: Any = None
    ) -> Float[Array, "rows seq"]:
        computed, hidden = forward(weights, fixed, batch, seeds)
        return token_losses(computed, hidden, batch.targets, options)

    return losses


def _make_forward(
    model: Model, config: TrainConfig, lora: LoraTraining | None, kernels: str | None = None
) -> tuple[Callable[..., tuple[Model, Float[Array, "rows seq D"]]], TrainingOptions]:
    """(weights, fixed, batch, seeds) -> the model with these weights, and its hidden states."""
    skeleton = replace(model, weights={}, rope=None)
    is_partitioned = config.mesh_sizes.get(TENSOR, 1) > 1
    options = TrainingOptions(layers=config.layers, is_partitioned=is_partitioned)
    if kernels is not None:
        options = replace(options, kernels=kernels)
    table = model.table
    dtype = jnp.dtype(config.dtype)

    def cast(weights: dict[str, Any]) -> dict[str, Any]:
        if dtype == jnp.float32:
            return weights
        mask = decay_mask(table, weights)
        return jax.tree.map(lambda w, matrix: w.astype(dtype) if matrix else w, weights, mask)

    def forward(weights: dict[str, Any], fixed: Any, batch: Any, seeds: Any) -> tuple[Model, Any]:
        if lora is None:
            computed = replace(skeleton, weights=cast(weights), rope=fixed, dtype=None)
        else:
            computed = replace(lora.model(fixed, weights, seeds), dtype=config.dtype)
        tokens = Batch.dense(batch.tokens, positions=batch.positions, segment_ids=batch.segment_ids)
        hidden, _ = computed.forward(tokens, None, options=options, remat=config.remat)
        return computed, hidden

    return forward, options


def global_norm(tree: Any) -> Float[Array, ""]:
    """The root of the sum of all squares."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def _split_rows(tree: Any, parts: int) -> Any:
    return jax.tree.map(lambda a: a.reshape(parts, a.shape[0] // parts, *a.shape[1:]), tree)


def _accumulate(part: Callable, weights: Any, batch: Any, parts: int) -> tuple[Any, Any]:
    """Sum of (numbers, gradient) over the micro-batches."""
    if parts == 1:
        return part(weights, batch)
    micro_batches = _split_rows(batch, parts)

    def body(carry: Any, micro: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, carry, part(weights, micro)), None

    shapes = jax.eval_shape(part, weights, jax.tree.map(lambda a: a[0], micro_batches))
    zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes)
    return jax.lax.scan(body, zeros, micro_batches)[0]
