"""Checks of a training run: what it cannot train, each thing in one sentence."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from rooflax.errors import EngineError, RequestError
from rooflax.models.initialize import weight_shapes
from rooflax.models.model import Model, build
from rooflax.nn.decoder import Decoder
from rooflax.train.adapters import LoraTraining
from rooflax.train.config import DPO, GRPO, TrainConfig
from rooflax.train.data import Corpus
from rooflax.train.devices import DeviceMesh


def check_fits(family: str, architecture: Decoder, config: TrainConfig) -> None:
    """Rejects what an architecture cannot be trained as, before its weights are read.

    Raises:
        RequestError: its layers keep a state, an adapter names modules that it lacks, or it does
            not divide among the devices of the mesh.
    """
    model = build(family, architecture, weight_shapes(architecture), 1)
    check_trainable(model, config)
    if config.layers == "scan":
        model = jax.eval_shape(Model.stacked, model)
    lora = LoraTraining(model, config) if config.trains_adapter else None
    if config.mesh is None:
        return
    trained = model.weights
    if lora is not None:
        trained = jax.eval_shape(
            lambda weights: LoraTraining(replace(model, weights=weights), config).start(), trained
        )
    DeviceMesh(config.mesh, model, trained, model.rope if lora is None else model)


def check_trainable(model: Model, config: TrainConfig) -> None:
    """Rejects weights that have no gradients.

    Raises:
        RequestError: some are quantized, or layers keep a state.
    """
    if model.config.groups.state is not None:
        raise RequestError(
            f"The model is {model.family}, whose layers with state rooflax does not train; train a "
            f"model with attention alone."
        )
    if config.trains_adapter:
        return
    if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(model.weights)):
        raise RequestError(
            "The model has quantized weights, which cannot be trained; load it without `quantize`, "
            "or the model that it was made from, or train an adapter (`fine_tune_type` lora)."
        )


def check_job(config: TrainConfig) -> None:
    """Rejects what the processes of a job cannot train together.

    Raises:
        RequestError: there is no mesh of their devices, or preferences or rewards are trained by.
    """
    if jax.process_count() == 1:
        return
    if config.train_mode in (DPO, GRPO):
        raise RequestError(
            f"train_mode {config.train_mode} is for one process; several train sft or orpo."
        )
    if config.mesh is None:
        raise RequestError(
            f"There are {jax.process_count()} processes and no mesh; give one of all their "
            f"devices, as in data={len(jax.devices())}.",
            param="mesh",
        )


def check_seq_len(config: TrainConfig, most: int) -> None:
    """Rejects rows that are longer than the model's context."""
    if config.seq_len > most:
        raise RequestError(
            f"seq_len is {config.seq_len}, but the model takes {most} tokens; choose at most that."
        )


def check_held_out(config: TrainConfig, is_there: bool) -> None:
    """Rejects to look for the best of held-out losses that nothing gives."""
    if (config.patience or config.save_best) and not is_there:
        raise RequestError("`patience` and `save_best` need held-out rows, and there are none.")


def check_same_model(saved: Any, now: dict[str, Any]) -> None:
    """Rejects to resume a run of another architecture.

    Raises:
        RequestError: naming the first key of config.json that differs.
    """
    saved = saved if isinstance(saved, dict) else {}
    differ = [key for key in now if saved.get(key) != now[key]]
    if differ:
        key = differ[0]
        raise RequestError(
            f"the model's {key} is {now[key]!r}, but the checkpoint was trained with "
            f"{saved.get(key)!r}; resume with the same config or train into another folder."
        )


def check_ids(model: Model, corpus: Corpus, called: str) -> None:
    """An id beyond the embedding would not fail by itself: its loss is NaN."""
    largest, size = int(corpus.tokens.max(initial=0)), model.config.vocab_size
    if largest >= size:
        raise RequestError(
            f"the {called} holds the token id {largest}, but the model has {size} tokens; "
            f"encode the text with the model's own tokenizer."
        )


def finite(value: float, step: int, what: str = "loss") -> float:
    if not math.isfinite(value):
        raise EngineError(
            f"The {what} is {value} at step {step}: the run diverged; start again in another "
            f"folder with a lower learning rate."
        )
    return value
