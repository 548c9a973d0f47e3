"""The training loop: steps, log, held-out loss, checkpoints, resuming, SIGINT.

Everything that a run leaves lies in one folder: `log.jsonl`, `curves.png`, `checkpoints/`.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from rooflax.errors import CheckpointError, EngineError, RequestError
from rooflax.files import only_writer
from rooflax.loading.adapter_config import AdapterConfig
from rooflax.models.adapters import LowRank
from rooflax.models.model import Model
from rooflax.models.registry import family
from rooflax.nn.layers import unstack_layers
from rooflax.processes import check_not_forked
from rooflax.signals import stop_asked
from rooflax.train.adapters import LORA, LoraTraining
from rooflax.train.checkpoint import (
    checkpoint_name,
    list_checkpoints,
    load_state,
    read_about,
    remove_checkpoints,
    remove_unfinished,
    save_checkpoint,
)
from rooflax.train.config import TrainConfig
from rooflax.train.data import Corpus, Rows
from rooflax.train.log import TrainLog, best_held_out, read_log
from rooflax.train.plot import plot_curves
from rooflax.train.report import write_report
from rooflax.train.step import (
    Metrics,
    TrainState,
    init_state,
    learning_rate,
    make_eval_step,
    make_optimizer,
    make_train_step,
)

CPU_TOKENS = 1024
"""Of a micro-batch on CPU: as fast as more, in less memory."""


@dataclass(frozen=True)
class TrainedAdapter:
    """What LoRA has trained: the matrices by module, and the config that PEFT needs with them."""

    matrices: dict[str, LowRank]
    config: AdapterConfig


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        model: with the trained float32 weights, layers unrolled; with LoRA the base.
        step: optimizer steps done.
        tokens: tokens seen.
        loss: of the last step; None if there was none.
        held_out_loss, bits_per_byte: over all held-out rows; None if interrupted or without any.
        test_loss: over all rows to test; None if interrupted or without any.
        interrupted: stopped by SIGINT; a checkpoint was saved.
        adapter: what LoRA has trained; None where all weights were.
        was_complete: the folder held the whole run already, and nothing was trained.
        best_step: whose weights the model has, if that is not the last step.
        stopped_early: held-out losses did not fall any more (`patience`).
    """

    model: Model
    step: int
    tokens: int
    loss: float | None
    held_out_loss: float | None
    bits_per_byte: float | None
    interrupted: bool
    was_complete: bool
    test_loss: float | None = None
    best_step: int | None = None
    stopped_early: bool = False
    adapter: TrainedAdapter | None = None


def run_training(
    model: Model,
    config: TrainConfig,
    training: Corpus,
    held_out: Corpus | None,
    folder: Path,
    *,
    test: Corpus | None = None,
    progress: bool | None = None,
    say: Callable[[str], None] | None = None,
    keeps_model: bool = True,
) -> TrainResult:
    """Trains a model, resuming from the folder's newest checkpoint if there is one.

    Killed at any moment and started again with the same arguments, a run gives the same losses
    as one that was not (bit for bit on CPU). SIGINT ends the step at hand, saves and returns.

    Args:
        model: where to start; its weights are copied. A resumed run takes only its architecture.
        held_out: for held-out losses; None does without.
        test: for one loss at the end.
        folder: of this run, outside of which nothing is written.
        progress: show a bar on stderr; None shows it on a terminal.
        say: takes a line whenever there is something to know: where a run goes on, held-out losses.
        keeps_model: False gives the model's arrays up once they are copied, if all of them are
            trained: their memory is free then, and the model cannot be used any more.

    Raises:
        RequestError: settings that do not fit the corpus, the model or the checkpoint; or another
            run is writing to the folder.
        CheckpointError: a checkpoint of another model.
        OSError: the disk is full; the newest checkpoint stays whole.
    """
    check_not_forked()
    check_trainable(model, config)
    with only_writer(folder, folder / ".run.lock", makes_folders=True):
        run = _Run(model, config, training, held_out, test, folder, say)
        if not keeps_model and run.lora is None:
            for leaf in jax.tree.leaves((model.weights, run.model.weights)):
                leaf.delete()
        return run.train(progress)


def resolved(config: TrainConfig, training: Corpus) -> TrainConfig:
    """The settings with their length in steps, and their micro-batches."""
    num_rows = 0 if config.epochs is None else Rows(training, config.seq_len).num_rows
    return config.resolved(num_rows, CPU_TOKENS if jax.default_backend() == "cpu" else None)


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
    if config.fine_tune_type == LORA:
        return
    if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(model.weights)):
        raise RequestError(
            "The model has quantized weights, which cannot be trained; load it without `quantize`, "
            "or the model that it was made from, or train an adapter (`fine_tune_type` lora)."
        )


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


def _finite(loss: float, step: int) -> float:
    if not math.isfinite(loss):
        raise EngineError(
            f"The loss is {loss} at step {step}: the run diverged; lower the learning rate and "
            f"start again, or resume from the newest checkpoint with other settings."
        )
    return loss


class _Run:
    """A run's parts, and where it stands."""

    def __init__(
        self,
        model: Model,
        config: TrainConfig,
        training: Corpus,
        held_out: Corpus | None,
        test: Corpus | None,
        folder: Path,
        say: Callable[[str], None] | None,
    ):
        check_seq_len(config, model.max_model_len)
        config = resolved(config, training)
        self.config, self.folder, self.held_out = config, folder, held_out
        self._say = say
        if (config.patience or config.save_best) and held_out is None:
            raise RequestError("`patience` and `save_best` need held-out rows, and there are none.")
        _check_ids(model, training, "corpus")
        self.model = model.stacked() if config.layers == "scan" else model
        self.rows = Rows(training, config.seq_len, config.seed)
        self.held_out_rows = self._other_rows(held_out, "held-out corpus")
        self.test_rows = self._other_rows(test, "corpus to test on")
        self.lora = LoraTraining(self.model, config) if config.fine_tune_type == LORA else None
        self.fixed = self.model.rope if self.lora is None else self.model
        self.optimizer = make_optimizer(model.table, self.model.weights, config)
        self.train_step = make_train_step(self.model, self.optimizer, config, self.lora)
        self.eval_step = make_eval_step(self.model, config, self.lora)
        self.rate = learning_rate(config)
        self.loss: float | None = None
        self.unsettled: tuple[int, float, Metrics] | None = None
        self.began = 0.0
        self.saved_step, self.best_step = -1, None
        self.state, position = self._start()
        self.step = int(self.state.step)
        self.log = TrainLog(folder / "log.jsonl", position)
        try:
            lines = read_log(folder / "log.jsonl")
        except CheckpointError:
            self.log.close()
            raise
        self.held_out_lines = [line for line in lines if line.get("whole") is False]
        settings = [line for line in lines if "settings" in line]
        if [line["settings"] for line in settings[-1:]] != [config.to_json()]:
            settings.append({"step": self.step, "settings": config.to_json()})
            self.log.write(settings[-1])
        self.settings_step = settings[-1]["step"]

    def _other_rows(self, corpus: Corpus | None, called: str) -> Rows | None:
        if corpus is None:
            return None
        _check_ids(self.model, corpus, called)
        return Rows(corpus, self.config.seq_len, called=called)

    @property
    def architecture(self) -> dict[str, Any]:
        """The model as config.json says it, in JSON's types."""
        described = family(self.model.family).config_to_hf(self.model.config)
        return json.loads(json.dumps(described))

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def _start(self) -> tuple[TrainState, int]:
        """The state to go on from, and how much of the log belongs to it."""
        trained = self.model.weights if self.lora is None else self.lora.start()
        state = init_state(trained, self.optimizer)
        remove_unfinished(self.checkpoints)
        found = list_checkpoints(self.checkpoints)
        if not found:
            remove_checkpoints(self.folder / "best")
            return state, 0
        info = read_about(found[-1])
        self.config.check_same(info["config"])
        check_same_model(info.get("model"), self.architecture)
        self.loss, self.saved_step = info["loss"], info["step"]
        state = load_state(found[-1], state)
        self.say_resumed(info)
        return state, info["log_position"]

    def say(self, line: str) -> None:
        """A line above the bar."""
        if self._say is not None:
            from tqdm import tqdm

            with tqdm.external_write_mode(file=sys.stderr):
                self._say(line)

    def say_resumed(self, info: dict[str, Any]) -> None:
        step, steps, before = info["step"], self.config.num_steps, info["config"]["steps"]
        if step < steps:
            self.say(f"resumes from step {step:,} of {steps:,}")
        if steps != before:
            saved = {name: info["config"][name] for name in ("steps", "warmup_steps")}
            old = learning_rate(replace(self.config, **saved))
            self.say(
                f"the run was for {before:,} steps: the learning rate, {float(old(step - 1)):.3g} "
                f"in the last step, goes on at {float(self.rate(step)):.3g} by the schedule of "
                f"{steps:,} steps"
            )

    def train(self, progress: bool | None) -> TrainResult:
        """All steps that are left, unless SIGINT comes."""
        num_steps = self.config.num_steps
        was_complete = self.step >= num_steps or self.has_lost_patience
        with contextlib.closing(self.log), stop_asked() as stop, self.bar(progress) as bar:
            if self.step == 0 and self.config.eval_every:
                self.watch()
            self.began = time.perf_counter()
            while self.step < num_steps and not self.has_lost_patience and not stop():
                self.advance(bar)
            self.settle(bar)
            interrupted = self.step < num_steps and not self.has_lost_patience
            if self.config.save_best and not interrupted and not was_complete:
                self.watch()
            self.save()
            self.take_best(interrupted)
            held_out_loss = test_loss = None
            if not interrupted:
                held_out_loss = self.evaluate(self.held_out_rows, None)
                self.log_held_out(held_out_loss, whole=True)
                test_loss = self.evaluate(self.test_rows, None)
        result = self.result(held_out_loss, interrupted, was_complete)
        return replace(result, test_loss=test_loss)

    def advance(self, bar: Any) -> None:
        """One step, and what is due after it."""
        batch = self.rows.batch(self.step, self.config.batch_size)
        lr = float(self.rate(self.step))
        self.state, metrics = self.train_step(self.state, self.fixed, batch)
        self.settle(bar)
        self.step += 1
        self.unsettled = self.step, lr, metrics
        if self._due(self.config.eval_every):
            self.settle(bar)
            self.watch()
        if self._due(self.config.checkpoint_every):
            self.settle(bar)
            self.save()
        if self.unsettled is None:
            self.began = time.perf_counter()

    def settle(self, bar: Any) -> None:
        """Awaits the loss of the step before, while the next one runs, and logs it."""
        if self.unsettled is None:
            return
        step, lr, metrics = self.unsettled
        self.unsettled = None
        self.loss = _finite(float(metrics.loss), step)
        now = time.perf_counter()
        step_s, self.began = now - self.began, now
        self.log.write(
            {
                "step": step,
                "tokens": step * self.config.tokens_per_step,
                "loss": self.loss,
                "lr": lr,
                "grad_norm": float(metrics.grad_norm),
                "time": {
                    "step_s": round(step_s, 4),
                    "tok_per_s": round(self.config.tokens_per_step / step_s, 1),
                },
            }
        )
        bar.update(1)
        bar.set_postfix_str(f"loss {self.loss:.3f}", refresh=False)

    def watch(self) -> None:
        """A held-out loss on the way, unless this step has one."""
        if self.held_out_lines and self.held_out_lines[-1]["step"] == self.step:
            return
        loss = self.evaluate(self.held_out_rows, self.config.eval_batches)
        if loss is None:
            return
        self.log_held_out(loss, whole=False)
        best = self.best()
        is_best = best["step"] == self.step
        said = "the best so far" if is_best else (
            f"the best was {best['held_out_loss']:.4f} at step {best['step']:,}"
        )  # fmt: skip
        training = "" if self.loss is None else f"loss {self.loss:.4f}, "
        if self.step == 0:
            said = "before training"
        self.say(f"step {self.step:,}: {training}held-out loss {loss:.4f} ({said})")
        if is_best and self.config.save_best:
            save_checkpoint(self.folder / "best", self.weights_alone(), {}, keep=1)

    def best(self) -> dict[str, Any]:
        return best_held_out(self.held_out_lines) or {"step": self.step}

    @property
    def has_lost_patience(self) -> bool:
        """Whether the best of the held-out losses has been followed by enough others."""
        since = max(self.best()["step"], self.settings_step)  # longer runs wait anew
        after = [line for line in self.held_out_lines if line["step"] > since]
        return self.config.patience is not None and len(after) >= self.config.patience

    def weights_alone(self) -> TrainState:
        return TrainState(self.state.weights, (), self.state.step)

    def take_best(self, interrupted: bool) -> None:
        """The weights of the best held-out loss in place of the last, where that is asked for."""
        if not self.config.save_best or interrupted:
            return
        best = self.best()["step"]
        if best != self.step:
            saved = self.folder / "best" / checkpoint_name(best)
            if not saved.exists():  # a later one took its place before the run was killed
                self.say(f"the weights of step {best:,} are gone; those of the last step are taken")
                return
            state = load_state(saved, self.weights_alone())
            self.state = replace(self.state, weights=state.weights)
        self.best_step = best

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0 and self.step < self.config.num_steps

    def evaluate(self, rows: Rows | None, num_batches: int | None) -> float | None:
        """Mean loss of rows in nats per token; None without any."""
        if rows is None:
            return None
        total = count = 0.0
        for batch in rows.spread(num_batches, self.config.batch_size):
            loss, tokens = self.eval_step(self.state.weights, self.fixed, batch)
            total, count = total + float(loss), count + float(tokens)
        return total / max(count, 1.0)

    def log_held_out(self, loss: float | None, *, whole: bool) -> None:
        if loss is None or self.held_out is None:
            return
        line = {
            "step": self.step,
            "tokens": self.step * self.config.tokens_per_step,
            "held_out_loss": loss,
            "bits_per_byte": self.held_out.bits_per_byte(loss),
            "whole": whole,
        }
        self.log.write(line)
        if not whole:
            self.held_out_lines.append(line)

    def save(self) -> None:
        """A checkpoint of this step, unless there is one."""
        if self.saved_step == self.step:
            return
        info = {
            "config": self.config.to_json(),
            "loss": self.loss,
            "log_position": self.log.position(),
            "model": self.architecture,
        }
        save_checkpoint(self.checkpoints, self.state, info, keep=self.config.keep)
        self.saved_step = self.step

    def bar(self, progress: bool | None) -> Any:
        from tqdm import tqdm

        return tqdm(
            total=self.config.num_steps,
            initial=self.step,
            desc="training",
            unit="step",
            disable=not (sys.stderr.isatty() if progress is None else progress),
        )

    def result(
        self, held_out_loss: float | None, interrupted: bool, was_complete: bool
    ) -> TrainResult:
        model, adapter = self.model, None
        if self.lora is None:
            weights = self.state.weights
            weights = unstack_layers(weights) if self.config.layers == "scan" else weights
            model = replace(self.model, weights=weights)
        else:
            adapter = TrainedAdapter(self.lora.adapters(self.state.weights), self.lora.config)
        bits = None
        if held_out_loss is not None and self.held_out is not None:
            bits = self.held_out.bits_per_byte(held_out_loss)
        return TrainResult(
            model=model,
            adapter=adapter,
            step=self.step,
            tokens=self.step * self.config.tokens_per_step,
            loss=self.loss,
            held_out_loss=held_out_loss,
            bits_per_byte=bits,
            interrupted=interrupted,
            was_complete=was_complete,
            best_step=self.best_step,
            stopped_early=self.has_lost_patience,
        )


def write_curves(folder: Path) -> list[Path]:
    """A run's log as `report.html`, and as `curves.png` where matplotlib is installed."""
    lines = read_log(folder / "log.jsonl")
    page, picture = folder / "report.html", folder / "curves.png"
    write_report(lines, page)
    has_steps = any("loss" in line for line in lines)
    return [page, picture] if has_steps and plot_curves(lines, picture) else [page]


def check_seq_len(config: TrainConfig, most: int) -> None:
    """Rejects rows that are longer than the model's context."""
    if config.seq_len > most:
        raise RequestError(
            f"seq_len is {config.seq_len}, but the model takes {most} tokens; choose at most that."
        )


def _check_ids(model: Model, corpus: Corpus, called: str) -> None:
    """An id beyond the embedding would not fail by itself: its loss is NaN."""
    largest, size = int(corpus.tokens.max(initial=0)), model.config.vocab_size
    if largest >= size:
        raise RequestError(
            f"the {called} holds the token id {largest}, but the model has {size} tokens; "
            f"encode the text with the model's own tokenizer."
        )
