"""Preference training: pairs of answers in rows, the losses of DPO and ORPO, DPO's reference.

Sources: Rafailov et al., Direct Preference Optimization, 2023; Hong et al., ORPO, 2024; the losses
beside the first are of Zhao et al., SLiC-HF, 2023 (hinge), Azar et al., 2023 (ipo), Mitchell, 2023
(label smoothing) and Chowdhury et al., 2024 (robust), as TRL computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rooflax.errors import CheckpointError
from rooflax.files import open_regular, replacing
from rooflax.models.model import Model
from rooflax.train.adapters import LoraTraining
from rooflax.train.config import ORPO, TrainConfig
from rooflax.train.data import Corpus, Rows
from rooflax.train.devices import ONE_DEVICE, ROWS, OneDevice
from rooflax.train.step import Loss, make_token_losses


class PairBatch(NamedTuple):
    """Rows of one document each, the chosen answers at 0, 2, 4 ... and the rejected ones behind
    them.

    Attributes:
        tokens, targets, mask, positions, segment_ids: as of `PackedBatch`; the mask has answers.
        reference: [rows] float32, of each answer the log-probability under the model as it was.
        share: [rows, seq] float32, what ORPO takes of each target's loss: all of a prompt and its
            chosen answer, over their number in the batch, times the pairs.
    """

    tokens: Any
    targets: Any
    mask: Any
    positions: Any
    segment_ids: Any
    reference: Any
    share: Any


class PairRows(Rows):
    """A corpus of pairs: documents 0 and 1 are one, 2 and 3 the next; `num_rows` counts them.

    Attributes:
        reference: [2 num_rows] float32, of each document; NaN where it is not known.
    """

    def __init__(self, corpus: Corpus, seq_len: int, seed: int = 0, *, called: str = "corpus"):
        super().__init__(corpus, seq_len, seed, called=called)
        self.num_rows //= 2
        self.reference = np.full(2 * self.num_rows, np.nan, np.float32)

    def take(self, pairs: Sequence[int]) -> PairBatch:
        return self._pack([(pair, 0) for pair in pairs])

    def _fit(self, starts: np.ndarray, lengths: np.ndarray) -> list[list[tuple[int, int]]]:
        return [[pair] for pair in zip(starts.tolist(), lengths.tolist(), strict=True)]

    def _pack(self, rows: list[tuple[int, int]], missing: int = 0) -> PairBatch:
        numbers = [2 * pair + answer for pair, _ in rows for answer in (0, 1)]
        batch = super()._pack([(number, 0) for number in numbers], 2 * missing)
        lengths = np.array([self._whole[number][0][1] for number in numbers])
        lengths[1::2] = 0
        lengths[len(numbers) - 2 * missing :] = 0
        share = (np.arange(self.seq_len)[None] < lengths[:, None] - 1).astype(np.float32)
        share *= (len(rows) - missing) / max(share.sum(), 1.0)
        return PairBatch(*batch, reference=self.reference[numbers], share=share)


def preference_loss(model: Model, config: TrainConfig, lora: LoraTraining | None = None) -> Loss:
    """The loss of pairs, with rewards as TRL names them."""
    token_losses = make_token_losses(model, config, lora)
    per_pair = _orpo if config.train_mode == ORPO else _dpo
    beta = config.beta or 0.0

    def sums(weights: Any, fixed: Any, batch: PairBatch, seeds: Any = None) -> tuple[Any, Any]:
        losses = token_losses(weights, fixed, batch, seeds)
        is_there = _pairs(batch)
        loss, rewards, more = per_pair(losses, batch, config)
        chosen, rejected = jax.lax.stop_gradient(beta * rewards)
        means = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (chosen > rejected).astype(jnp.float32),
        } | more
        return _sum(loss, is_there), {name: _sum(each, is_there) for name, each in means.items()}

    return Loss(sums, lambda batch: jnp.sum(_pairs(batch)))


def _sum(each: Float[Array, " pairs"], is_there: Array) -> Float[Array, ""]:
    return jnp.sum(jnp.where(is_there > 0, each, 0.0))


def _pairs(batch: PairBatch) -> Float[Array, " pairs"]:
    """1 of each pair, 0 of what fills the batch up."""
    return jnp.max(batch.mask[::2], axis=1)


def _both(rows: Array) -> Float[Array, "2 pairs"]:
    return rows.reshape(-1, 2).T


def _dpo(
    losses: Float[Array, "rows seq"], batch: PairBatch, config: TrainConfig
) -> tuple[Array, Array, dict[str, Array]]:
    """delta = log (p chosen / reference) - log (p rejected / reference)

    sigmoid: -(1 - s) log sigmoid(beta delta) - s log sigmoid(-beta delta), s the smoothing
    robust:  (-(1 - s) log sigmoid(beta delta) + s log sigmoid(-beta delta)) / (1 - 2 s)
    hinge:   max(0, 1 - beta delta)
    ipo:     (delta - 1 / (2 beta))^2, of means per token
    """
    ratios = -jnp.sum(batch.mask * losses, axis=1) - batch.reference
    beta, smoothing = config.beta or 0.0, config.label_smoothing
    per_token = ratios / jnp.maximum(jnp.sum(batch.mask, axis=1), 1.0)
    chosen, rejected = _both(per_token if config.loss_type == "ipo" else ratios)
    delta = chosen - rejected
    if config.loss_type == "hinge":
        loss = jnp.maximum(0.0, 1.0 - beta * delta)
    elif config.loss_type == "ipo":
        loss = jnp.square(delta - 1 / (2 * beta))
    else:
        right, wrong = jax.nn.log_sigmoid(beta * delta), jax.nn.log_sigmoid(-beta * delta)
        if config.loss_type == "robust":
            loss = (smoothing * wrong - (1 - smoothing) * right) / (1 - 2 * smoothing)
        else:
            loss = -(1 - smoothing) * right - smoothing * wrong
    return loss, _both(ratios), {}


def _orpo(
    losses: Float[Array, "rows seq"], batch: PairBatch, config: TrainConfig
) -> tuple[Array, Array, dict[str, Array]]:
    """nll - beta log sigmoid(log odds(chosen) - log odds(rejected)), odds = p / (1 - p) of means
    per token; the nll is of the prompt and the chosen answer."""
    counts = jnp.maximum(jnp.sum(batch.mask, axis=1), 1.0)
    means = -jnp.sum(batch.mask * losses, axis=1) / counts
    # A token that is certain has p = 1: no float32 below it but one step has finite odds.
    odds = means - jnp.log(jnp.maximum(-jnp.expm1(means), jnp.finfo(jnp.float32).tiny))
    chosen, rejected = _both(odds)
    ratio = jax.nn.log_sigmoid(chosen - rejected)
    nll = jnp.sum(batch.share * losses, axis=1)[::2]
    loss = nll - (config.beta or 0.0) * ratio
    return loss, _both(means), {"nll_loss": nll, "log_odds_ratio": ratio}


def make_reference(
    model: Model,
    config: TrainConfig,
    lora: LoraTraining | None = None,
    devices: OneDevice = ONE_DEVICE,
) -> Callable[[Any, Any, PairRows, Sequence[int]], None]:
    """The function (weights, fixed, rows, pairs) that fills in `rows.reference` of some pairs."""
    token_losses = make_token_losses(model, config, lora)
    size = config.batch_size // (config.micro_batches or 1)

    def of_device(weights: Any, fixed: Any, batch: PairBatch) -> Array:
        whole = devices.whole(weights, fixed)
        return -jnp.sum(batch.mask * token_losses(*whole, batch), axis=1)

    answers = jax.jit(devices.mapped(of_device, ROWS))

    def fill(weights: Any, fixed: Any, rows: PairRows, pairs: Sequence[int]) -> None:
        for first in range(0, len(pairs), size):
            chunk = list(pairs[first : first + size])
            batch = rows.take([*chunk, *[0] * (size - len(chunk))])
            logprobs = np.asarray(answers(weights, fixed, batch)).reshape(-1, 2)
            rows.reference.reshape(-1, 2)[chunk] = logprobs[: len(chunk)]

    return fill


def save_reference(path: Path, parts: Sequence[PairRows]) -> None:
    """Writes the reference's log-probabilities of all corpora; a file that was there is replaced
    whole."""
    with replacing(path) as file:
        np.save(file, np.concatenate([rows.reference for rows in parts]), allow_pickle=False)


def load_reference(path: Path, parts: Sequence[PairRows]) -> None:
    """Reads what `save_reference` wrote.

    Raises:
        CheckpointError: it is missing, or of other corpora.
    """
    try:
        with open_regular(path) as file:
            saved = np.lib.format.read_array(file, allow_pickle=False)
    except (OSError, ValueError, EOFError, MemoryError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; give another --out.") from None
    ends = np.cumsum([rows.reference.size for rows in parts])
    if saved.shape != (ends[-1],) or saved.dtype != np.float32:
        raise CheckpointError(
            f"{path} has {saved.dtype}{list(saved.shape)}, and the data {ends[-1]} answers; give "
            f"another --out."
        )
    for rows, part in zip(parts, np.split(saved, ends[:-1]), strict=True):
        rows.reference[:] = part
