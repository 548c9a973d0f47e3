"""The loss of GRPO: clipped policy gradients with advantages within groups.

Sources: Shao et al., DeepSeekMath, 2024; the mean over all tokens of a step is of Yu et al., DAPO,
2025, TRL's default.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from rooflax.models.model import Model
from rooflax.train.adapters import LoraTraining
from rooflax.train.config import TrainConfig
from rooflax.train.step import Loss, make_token_losses

SAMPLER_KERNELS = "trained"
"""Kernels of the forward pass: their sums are the sampler's, and so are the log-probabilities."""
SMALLEST = 1e-4
"""Added to the deviation of a group's rewards."""


class GrpoBatch(NamedTuple):
    """Rows of a prompt and an answer that the model gave to it.

    Attributes:
        tokens, targets, mask, positions: as of `PackedBatch`; the mask has answers.
        segment_ids: None, as a row is one document.
        sampled: [rows, seq] float32, the log-probability of each target when it was sampled.
        reference: the same under the model as it was; zeros where `beta` is 0.
        advantages: [rows] float32.
    """

    tokens: Any
    targets: Any
    mask: Any
    positions: Any
    segment_ids: Any
    sampled: Any
    reference: Any
    advantages: Any


def advantages(rewards: np.ndarray) -> np.ndarray:
    """[groups, answers] rewards, each less its group's mean, over the group's deviation."""
    deviation = rewards.std(axis=1, ddof=1, keepdims=True)
    return (rewards - rewards.mean(axis=1, keepdims=True)) / (deviation + SMALLEST)


def grpo_loss(model: Model, config: TrainConfig, lora: LoraTraining | None = None) -> Loss:
    """ratio = p / p when sampled
    loss = -min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon) A) + beta KL

    The KL to the reference is estimated as r - log r - 1 of r = p of the reference / p.
    """
    token_losses = make_token_losses(model, config, lora, SAMPLER_KERNELS)
    beta, epsilon = config.beta or 0.0, config.epsilon

    def sums(weights: Any, fixed: Any, batch: GrpoBatch, seeds: Any = None) -> tuple[Any, Any]:
        logprobs = -token_losses(weights, fixed, batch, seeds)
        # What is no answer has no log-probability of its sampling.
        ratio = jnp.exp(batch.mask * (logprobs - batch.sampled))
        gain = batch.advantages[:, None]
        clipped = jnp.clip(ratio, 1 - epsilon, 1 + epsilon)
        loss = -jnp.minimum(ratio * gain, clipped * gain)
        is_clipped = (clipped * gain < ratio * gain).astype(jnp.float32)
        more = {"clip_ratio": jnp.sum(batch.mask * is_clipped)}
        if beta:
            less = batch.mask * (batch.reference - logprobs)
            kl = jnp.exp(less) - less - 1
            loss += beta * kl
            more["kl"] = jnp.sum(batch.mask * kl)
        return jnp.sum(batch.mask * loss), more

    return Loss(sums, lambda batch: jnp.sum(batch.mask))
