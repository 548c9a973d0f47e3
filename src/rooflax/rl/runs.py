"""Training runs that a client steps: gradients of its data, optimizer steps, and samples.

Each run is a LoRA adapter beside the one model that is loaded. Its losses are sums over tokens, as
Tinker's API defines them; what they are divided by is the client's matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rooflax.engine.buckets import bucket
from rooflax.errors import RequestError
from rooflax.llm import LLM
from rooflax.models.adapters import adapted, targets
from rooflax.models.model import Model
from rooflax.rl.grpo import SAMPLER_KERNELS
from rooflax.train.adapters import ROUTER, LoraTraining, Matrices
from rooflax.train.config import LORA, TrainConfig
from rooflax.train.loop import tokens_at_once
from rooflax.train.step import TrainState, global_norm, make_token_losses

ALPHA = 32.0
"""Alpha of every adapter, whatever its rank."""
DEVICE_TOKENS = 8192
"""Tokens of which the gradient is computed at once on a GPU or TPU, unless a row has more."""
SHORTEST = 16
"""Tokens of a row, with what is added."""
TARGETS = "target_tokens"


@dataclass(frozen=True)
class LossFunction:
    """A loss of each token's log-probability.

    Attributes:
        inputs: numbers for each token that it takes, beside the targets.
        settings: its settings with their defaults.
        of: (log-probabilities, inputs, settings) -> the losses of tokens.
    """

    inputs: tuple[str, ...]
    settings: Mapping[str, float]
    of: Callable[[Any, Mapping[str, Any], Mapping[str, Any]], Any]


def _cross_entropy(logprobs: Any, given: Mapping[str, Any], _: Mapping[str, Any]) -> Any:
    return -given["weights"] * logprobs


def _ratio(logprobs: Any, given: Mapping[str, Any]) -> Any:
    return jnp.exp(logprobs - given["logprobs"])


def _clipped(ratio: Any, settings: Mapping[str, Any]) -> Any:
    return jnp.clip(ratio, settings["clip_low_threshold"], settings["clip_high_threshold"])


def _importance_sampling(logprobs: Any, given: Mapping[str, Any], _: Mapping[str, Any]) -> Any:
    return -_ratio(logprobs, given) * given["advantages"]


def _ppo(logprobs: Any, given: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    ratio, gain = _ratio(logprobs, given), given["advantages"]
    return -jnp.minimum(ratio * gain, _clipped(ratio, settings) * gain)


def _cispo(logprobs: Any, given: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    factor = jax.lax.stop_gradient(_clipped(_ratio(logprobs, given), settings))
    return -factor * logprobs * given["advantages"]


def _dro(logprobs: Any, given: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    apart = jnp.square(logprobs - given["logprobs"])
    return settings["beta"] * apart / 2 - logprobs * given["advantages"]


_SAMPLED = ("logprobs", "advantages")
_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: Mapping[str, LossFunction] = {
    "cross_entropy": LossFunction(("weights",), {}, _cross_entropy),
    "importance_sampling": LossFunction(_SAMPLED, {}, _importance_sampling),
    "ppo": LossFunction(_SAMPLED, _CLIPS, _ppo),
    "cispo": LossFunction(_SAMPLED, _CLIPS, _cispo),
    "dro": LossFunction(_SAMPLED, {"beta": 0.05}, _dro),
}
"""By their names in Tinker's API.

Sources: Schulman et al., Proximal Policy Optimization, 2017; MiniMax-M1, 2025 (CISPO); Richemond et
al., Offline Regularised Reinforcement Learning for Large Language Models Alignment, 2024 (DRO).
"""


@dataclass(frozen=True)
class Datum:
    """A row to train on.

    Attributes:
        tokens: int32 [n], what the model reads.
        inputs: [n] arrays by name: `target_tokens`, and what the loss takes.
    """

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class AdamSettings:
    """AdamW's settings of one step, PyTorch's by their names and meanings."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            most = 1.0 if name.startswith("beta") else float("inf")
            with np.errstate(over="ignore"):
                fits = 0 <= np.float32(value) < most
            if not fits:
                raise RequestError(f"{name} is {value}; it must be from 0 to below {most:g}.")


class Rows(NamedTuple):
    """Rows of one length as the program takes them; `mask` is 0 where a row was filled up."""

    tokens: Any
    targets: Any
    positions: Any
    segment_ids: Any
    mask: Any
    inputs: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """Result of a forward pass: the sum of the losses, and each row's log-probabilities."""

    loss: float
    logprobs: list[np.ndarray]


@dataclass(frozen=True)
class LoraShape:
    """Size of a run's adapter: the rank, and which of the model's layers have one."""

    rank: int
    seed: int = 0
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


@dataclass
class Run:
    """An adapter with its optimizer's state and the gradients since its last step.

    Attributes:
        base: the model, whose arrays stay as they are.
        shape: as the client asked for it.
    """

    base: Model
    shape: LoraShape
    lora: LoraTraining = field(init=False)
    state: TrainState = field(init=False)
    gradients: Matrices | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        config = TrainConfig(
            steps=1,
            fine_tune_type=LORA,
            lora_rank=self.shape.rank,
            lora_alpha=ALPHA,
            seed=self.shape.seed,
            target_modules=",".join(_modules(self.base, self.shape)),
        )
        self.lora = LoraTraining(self.base, config)
        self.state = fresh_state(self.lora.start())
        losses = make_token_losses(self.base, config, self.lora, SAMPLER_KERNELS)
        self._forward = jax.jit(partial(_forward, losses), static_argnums=0)
        self._backward = jax.jit(
            partial(_backward, losses), static_argnums=0, donate_argnames="gradients"
        )

    def sampler(self) -> Model:
        """The model with the adapter as it is now, for the engine."""
        return adapted(self.base, self.lora.adapters(self.state.weights))

    def forward(
        self, name: str, data: Sequence[Datum], settings: Mapping[str, float], *, backward: bool
    ) -> Outcome:
        """The losses of rows, whose gradients are added to those since the last step if asked for.

        Args:
            name: of the loss, one of `LOSSES`.
            data: checked by `check`.
            settings: of the loss, in place of its defaults.

        Raises:
            RequestError: a loss or a gradient is not finite; nothing was added.
        """
        known = {k: np.float32(v) for k, v in {**LOSSES[name].settings, **settings}.items()}
        gradients = jax.tree.map(jnp.zeros_like, self.state.weights) if backward else None
        total, logprobs = 0.0, [np.empty(0, np.float32)] * len(data)
        for indices, rows in batches(data, LOSSES[name]):
            if gradients is None:
                loss, found = self._forward(name, self.state.weights, self.base, rows, known)
            else:
                loss, found, gradients = self._backward(
                    name, self.state.weights, self.base, rows, known, gradients=gradients
                )
            total += float(loss)
            values = np.asarray(found)
            for row, index in enumerate(indices):
                logprobs[index] = values[row, : len(data[index].tokens)]
        if not np.isfinite(total):
            raise RequestError(f"The loss is {total}, and its gradients were dropped.")
        if gradients is not None:
            norm = float(_norm(gradients))
            if not np.isfinite(norm):
                raise RequestError(f"The gradients' norm is {norm}, and they were dropped.")
            before = self.gradients
            self.gradients = (
                gradients if before is None else jax.tree.map(jnp.add, before, gradients)
            )
        return Outcome(total, logprobs)

    def step(self, settings: AdamSettings) -> dict[str, float]:
        """One step of AdamW by the gradients since the last one; numbers of it by name.

        Raises:
            RequestError: there are none, or the weights would not be finite.
        """
        if self.gradients is None:
            raise RequestError("There are no gradients; send forward_backward before optim_step.")
        gradients, self.gradients = self.gradients, None
        numbers = {name: np.float32(value) for name, value in vars(settings).items()}
        after, norm, size = _adam_step(self.state, gradients, numbers)
        if not np.isfinite(float(size)):
            raise RequestError(
                f"The step of gradients with the norm {float(norm):g} gives weights that are not "
                f"finite; it was not made."
            )
        self.state = after
        return {"grad_norm": float(norm), "step": float(after.step)}


def check(name: str, data: Sequence[Datum], settings: Mapping[str, float], llm: LLM) -> None:
    """
    Raises:
        RequestError: there is no such loss or setting; a row lacks an input, is too long, or holds
            what is no token or no finite number. It names the row.
    """
    if name not in LOSSES:
        raise RequestError(f"loss_fn is {name!r:.80}; there is {', '.join(LOSSES)}.")
    loss, vocab_size = LOSSES[name], llm.info.config.vocab_size
    for key, value in settings.items():
        if key not in loss.settings:
            known = ", ".join(loss.settings) or "none"
            raise RequestError(f"{name} has no setting {key!r:.80}; there is {known}.")
        if not np.isfinite(value):
            raise RequestError(f"{key} of {name} is {value}; it must be finite.")
    if not data:
        raise RequestError("data is empty; give at least one row.")
    for number, datum in enumerate(data):
        where, count = f"data[{number}]", len(datum.tokens)
        if not 0 < count <= llm.max_model_len:
            raise RequestError(
                f"{where} has {count} tokens; a row has 1 to {llm.max_model_len} of them."
            )
        wanted = {TARGETS, *loss.inputs}
        if datum.inputs.keys() != wanted:
            has, needs = (", ".join(sorted(names)) for names in (datum.inputs, wanted))
            raise RequestError(f"{where} has {has or 'no inputs'}, and {name} takes {needs}.")
        for key, values in datum.inputs.items():
            if values.shape != (count,):
                raise RequestError(
                    f"{key} of {where} has the shape {list(values.shape)}, and its row {count} "
                    f"tokens."
                )
        if datum.inputs[TARGETS].dtype.kind != "i":
            raise RequestError(f"{TARGETS} of {where} are no whole numbers.")
        for key, ids in (("model_input", datum.tokens), (TARGETS, datum.inputs[TARGETS])):
            if ids.min() < 0 or ids.max() >= vocab_size:
                raise RequestError(f"{key} of {where} holds what is no token id.")
        for key in loss.inputs:
            if not np.isfinite(datum.inputs[key]).all():
                raise RequestError(f"{key} of {where} holds NaN or infinity.")


def batches(data: Sequence[Datum], loss: LossFunction) -> list[tuple[list[int], Rows]]:
    """The rows in parts of one length each, with their numbers; the longest come first."""
    parts, most_tokens = [], tokens_at_once(True) or DEVICE_TOKENS
    order = sorted(range(len(data)), key=lambda index: -len(data[index].tokens))
    while order:
        length = bucket(len(data[order[0]].tokens), SHORTEST)
        most = max(1, most_tokens // length)
        indices, order = order[:most], order[most:]
        parts.append((indices, _rows([data[index] for index in indices], length, loss)))
    return parts


def _rows(data: Sequence[Datum], length: int, loss: LossFunction) -> Rows:
    shape, longest = (bucket(len(data)), length), max(len(datum.tokens) for datum in data)
    ids = {key: np.zeros(shape, np.int32) for key in ("tokens", TARGETS, "positions")}
    numbers = {key: np.zeros(shape, np.float32) for key in ("mask", *loss.inputs)}
    for row, datum in enumerate(data):
        count = len(datum.tokens)
        ids["tokens"][row, :count] = datum.tokens
        ids[TARGETS][row, :count] = datum.inputs[TARGETS]
        ids["positions"][row, :count] = np.arange(count)
        ids["positions"][row, count:] = np.minimum(np.arange(length - count), longest - 1)
        numbers["mask"][row, :count] = 1.0
        for key in loss.inputs:
            numbers[key][row, :count] = datum.inputs[key]
    mask = numbers.pop("mask")
    return Rows(
        tokens=ids["tokens"],
        targets=ids[TARGETS],
        positions=ids["positions"],
        segment_ids=(1 - mask).astype(np.int32),  # what fills a row up is a text of its own
        mask=mask,
        inputs=numbers,
    )


def _forward(losses: Any, name: str, weights: Any, base: Model, rows: Rows, settings: Any) -> Any:
    """(the sum of the losses, the log-probabilities [rows, seq])."""
    logprobs = -losses(weights, base, rows, None)
    each = LOSSES[name].of(logprobs, rows.inputs, settings)
    return jnp.sum(jnp.where(rows.mask > 0, each, 0.0)), logprobs


def _backward(
    losses: Any,
    name: str,
    weights: Any,
    base: Model,
    rows: Rows,
    settings: Any,
    *,
    gradients: Any,
) -> Any:
    """As `_forward`, with the gradients added to those that were given."""

    def total(weights: Any) -> Any:
        return _forward(losses, name, weights, base, rows, settings)

    (loss, logprobs), more = jax.value_and_grad(total, has_aux=True)(weights)
    return loss, logprobs, jax.tree.map(jnp.add, gradients, more)


@jax.jit
def _adam_step(state: TrainState, gradients: Any, settings: Any) -> tuple[TrainState, Any, Any]:
    """The state after a step, the gradients' norm before they were clipped, and the weights'."""
    norm, most = global_norm(gradients), settings["grad_clip_norm"]
    factor = jnp.where((most > 0) & (norm > most), most / norm, 1.0)
    clipped = jax.tree.map(lambda grad: grad * factor, gradients)
    optimizer = optax.adamw(
        settings["learning_rate"],
        b1=settings["beta1"],
        b2=settings["beta2"],
        eps=settings["eps"],
        weight_decay=settings["weight_decay"],
    )
    with jax.numpy_dtype_promotion("standard"):
        updates, moments = optimizer.update(clipped, state.opt_state, state.weights)
        weights: Any = optax.apply_updates(state.weights, updates)
    return TrainState(weights, moments, state.step + 1), norm, global_norm(weights)


_norm = jax.jit(global_norm)


def fresh_state(weights: Matrices) -> TrainState:
    """A run's state before its first step."""
    moments = optax.adamw(0.0).init(weights)
    return TrainState(dict(weights), moments, jnp.zeros((), jnp.int32))


def _modules(model: Model, shape: LoraShape) -> list[str]:
    """The linear layers with an adapter: attention's are those with `attn` or `attention` in their
    path, the MLP's all others but the head.

    Raises:
        RequestError: none is left.
    """
    names = []
    for module, target in targets(model.family, model.config).items():
        if not target.is_usual or target.param.key.endswith(ROUTER):
            continue
        is_attention = "attn" in module or "attention" in module
        wanted = shape.train_attn if is_attention else shape.train_mlp
        if shape.train_unembed if target.is_head else wanted:
            names.append(module)
    if not names:
        raise RequestError("train_mlp, train_attn and train_unembed leave no layer to train.")
    return names
