"""The training loop: steps, log, held-out loss, checkpoints, resuming, SIGINT.

Everything that a run leaves lies in one folder: `log.jsonl`, `curves.png`, `checkpoints/`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from rooflax.errors import CheckpointError, RewardError
from rooflax.files import only_writer
from rooflax.loading.adapter_config import AdapterConfig
from rooflax.models.adapters import LowRank, adapted
from rooflax.models.model import Model
from rooflax.models.registry import family
from rooflax.nn.host_memory import give_back_freed
from rooflax.nn.layers import unstack_layers
from rooflax.processes import check_not_forked
from rooflax.signals import stop_asked
from rooflax.train import job
from rooflax.train.adapters import LoraTraining
from rooflax.train.checkpoint import (
    checkpoint_name,
    list_checkpoints,
    load_state,
    read_about,
    remove_checkpoints,
    remove_unfinished,
    save_checkpoint,
)
from rooflax.train.checks import (
    check_held_out,
    check_ids,
    check_job,
    check_same_model,
    check_seq_len,
    check_trainable,
    finite,
)
from rooflax.train.config import DPO, PREFERENCES, SFT, TrainConfig
from rooflax.train.data import Corpus, Rows
from rooflax.train.devices import ONE_DEVICE, DeviceMesh
from rooflax.train.log import NoLog, TrainLog, best_held_out, read_log
from rooflax.train.plot import plot_curves
from rooflax.train.preferences import (
    PairRows,
    load_reference,
    make_reference,
    preference_loss,
    save_reference,
)
from rooflax.train.report import write_report
from rooflax.train.step import (
    Loss,
    TrainMetrics,
    TrainState,
    cross_entropy,
    init_state,
    learning_rate,
    make_eval_step,
    make_optimizer,
    make_train_step,
)

CPU_TOKENS = 1024
"""Tokens of a micro-batch on CPU: as fast as more, in less memory. An adapter, whose gradients are
small to add up, takes half of them."""
SCREEN = 79
"""Characters of a sample's line."""
SAID_EVERY_S, SAID_SHARE = 30.0, 0.05
"""Seconds, and share of all steps, that are between two lines of progress without a bar."""
Sampler = Callable[[Model], list[tuple[str, str]]]
"""The model's answers to some prompts, each with its prompt."""


@dataclass(frozen=True)
class TrainedAdapter:
    """Result of LoRA: the matrices by module, the config that PEFT needs with them, and by
    module the weights that were trained whole."""

    matrices: dict[str, LowRank]
    config: AdapterConfig
    whole: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainResult:
    """End of a run.

    Attributes:
        model: with the trained float32 weights, layers unrolled; with LoRA the base.
        step: optimizer steps done.
        tokens: tokens seen.
        loss: of the last step; None if there was none.
        held_out_loss, bits_per_byte: over all held-out rows; None if interrupted or without any.
        held_out: further means over them, by name.
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
    held_out: Mapping[str, float] = field(default_factory=dict)


class Rollouts(Protocol):
    """Batches that the model at hand makes itself, as `rl.rollouts` has them."""

    @property
    def has_held_out(self) -> bool:
        """Whether `evaluate` has held-out rows."""
        ...

    def start(self, model: Model, fixed: Any, lora: LoraTraining | None) -> None:
        """Before anything else; the weights are the reference."""
        ...

    def loss(self, model: Model, config: TrainConfig, lora: LoraTraining | None) -> Loss:
        """The loss on them."""
        ...

    def shapes(self) -> Any:
        """Shapes of a batch."""
        ...

    def cache_bytes(self) -> int:
        """Bytes of the sampler's KV cache."""
        ...

    def batch(self, step: int, weights: Any) -> tuple[Any, dict[str, float]]:
        """The batch of a step, with numbers to log.

        Raises:
            EngineError: a reward failed, and the run is saved; or the engine did.
        """
        ...

    def evaluate(
        self, part: str, num_batches: int | None, weights: Any
    ) -> tuple[float | None, dict[str, float]]:
        """A loss of the "held-out" or "test" part, and further means by name."""
        ...


def run_training(
    model: Model,
    config: TrainConfig,
    training: Corpus | None,
    held_out: Corpus | None,
    folder: Path,
    *,
    test: Corpus | None = None,
    rollouts: Rollouts | None = None,
    progress: bool | None = None,
    say: Callable[[str], None] | None = None,
    keeps_model: bool = True,
    sampler: Sampler | None = None,
    track: Callable[[dict[str, Any]], None] | None = None,
) -> TrainResult:
    """Trains a model, resuming from the folder's newest checkpoint that is whole, if there is one.

    Killed at any moment and started again with the same arguments, a run gives the same losses
    as one that was not (bit for bit on CPU). SIGINT ends the step at hand, saves and returns.

    Args:
        model: where to start; its weights are copied. A resumed run takes only its architecture.
        held_out: for held-out losses; None does without.
        test: for one loss at the end.
        rollouts: in place of all corpora.
        folder: of this run, outside of which nothing is written.
        progress: show a bar on stderr; None shows it on a terminal.
        say: takes lines for a reader: where a run goes on, held-out losses, and without a bar now
            and then the step and its loss.
        keeps_model: False gives the model's arrays up once they are copied, if all of them are
            trained: their memory is free then, and the model cannot be used any more.
        sampler: takes the model whenever held-out losses are due, and at the end; its prompts and
            answers go into the log.
        track: takes each line of the log.

    Raises:
        RequestError: settings that do not fit the corpus, the model or the checkpoint; or another
            run is writing to the folder.
        CheckpointError: every checkpoint is damaged, or of another model.
        OSError: the disk is full; the newest checkpoint stays whole.
    """
    check_not_forked()
    check_trainable(model, config)
    check_job(config)
    lock = only_writer(folder, folder / ".run.lock", makes_folders=True)
    with lock if job.leads() else contextlib.nullcontext():
        corpora = {"training": training, "held-out": held_out, "test": test}
        run = _Run(
            model,
            config,
            corpora,
            folder,
            say=say,
            rollouts=rollouts,
            sampler=sampler,
            track=track,
        )
        if not keeps_model and run.lora is None and rollouts is None:
            for leaf in jax.tree.leaves((model.weights, run.model.weights)):
                leaf.delete()
        return run.train(progress)


def resolved(config: TrainConfig, training: Corpus) -> TrainConfig:
    """The settings with their length in steps, and their micro-batches."""
    num_rows = 0 if config.epochs is None else rows_of(config)(training, config.seq_len).num_rows
    return config.resolved(num_rows, tokens_at_once(config.trains_adapter))


def tokens_at_once(trains_adapter: bool) -> int | None:
    """Tokens of a micro-batch that is chosen here; None is all."""
    if jax.default_backend() != "cpu":
        return None
    return CPU_TOKENS // 2 if trains_adapter else CPU_TOKENS


def rows_of(config: TrainConfig) -> type[Rows]:
    return PairRows if config.train_mode in PREFERENCES else Rows


def make_loss(model: Model, config: TrainConfig, lora: LoraTraining | None) -> Loss:
    """The loss that the run lowers, by its `train_mode`."""
    make = preference_loss if config.train_mode in PREFERENCES else cross_entropy
    return make(model, config, lora)


class _Run:
    """A run's parts, and where it stands."""

    def __init__(
        self,
        model: Model,
        config: TrainConfig,
        corpora: Mapping[str, Corpus | None],
        folder: Path,
        *,
        say: Callable[[str], None] | None,
        rollouts: Rollouts | None,
        sampler: Sampler | None,
        track: Callable[[dict[str, Any]], None] | None,
    ):
        check_seq_len(config, model.max_model_len)
        training, held_out = corpora["training"], corpora["held-out"]
        if training is not None:
            config = resolved(config, training)
            check_ids(model, training, "corpus")
        self.config, self.folder, self.held_out = config, folder, held_out
        self._say, self.rollouts, self.sampler = say, rollouts, sampler
        self.watches = held_out is not None or (rollouts is not None and rollouts.has_held_out)
        check_held_out(config, self.watches)
        self.model = model.stacked() if config.layers == "scan" else model
        self.rows = training and rows_of(config)(training, config.seq_len, config.seed)
        self.other_rows = {
            "held-out": self._other_rows(held_out, "held-out corpus"),
            "test": self._other_rows(corpora["test"], "corpus to test on"),
        }
        self.lora = LoraTraining(self.model, config) if config.trains_adapter else None
        self.fixed = self.model.rope if self.lora is None else self.model
        trained = self.model.weights if self.lora is None else self.lora.start()
        self.devices = ONE_DEVICE
        if config.mesh is not None:
            self.devices = DeviceMesh(config.mesh, model, trained, self.fixed)
        self.fixed = self.devices.placed_fixed(self.fixed)
        self.optimizer = make_optimizer(model.table, self.model.weights, config)
        make = make_loss if rollouts is None else rollouts.loss
        loss = make(self.model, config, self.lora)
        self.train_step: Any = make_train_step(
            self.model, self.optimizer, config, self.lora, loss, self.devices
        )
        loss = make(self.model, replace(config, remat=None), self.lora)
        self.eval_step = make_eval_step(self.model, config, self.lora, loss, self.devices)
        self.rate = learning_rate(config)
        self.loss: float | None = None
        self.unsettled: tuple[int, float, TrainMetrics, dict[str, float]] | None = None
        self.began, self.is_compiled = 0.0, False
        self.said_step, self.said_at = 0, 0.0
        self.saved_step, self.best_step = -1, None
        if rollouts is not None:
            rollouts.start(self.model, self.fixed, self.lora)
        self.state, position = self._start(trained)
        self.step = int(self.state.step)
        if config.train_mode == DPO:
            self.take_reference(is_resumed=position > 0)
        path = folder / "log.jsonl"
        self.log = NoLog()
        lines = read_log(path, position)  # before what stands behind it is cut off
        job.by_first("log", lambda: self.open_log(path, position, track))
        self.held_out_lines = [line for line in lines if line.get("whole") is False]
        settings = [line for line in lines if "settings" in line]
        if [line["settings"] for line in settings[-1:]] != [config.to_json()]:
            settings.append({"step": self.step, "settings": config.to_json()})
            self.log.write(settings[-1])
        self.settings_step = settings[-1]["step"]

    def _other_rows(self, corpus: Corpus | None, called: str) -> Rows | None:
        if corpus is None:
            return None
        check_ids(self.model, corpus, called)
        return rows_of(self.config)(corpus, self.config.seq_len, called=called)

    @property
    def architecture(self) -> dict[str, Any]:
        """The model as config.json says it, in JSON's types."""
        described = family(self.model.family).config_to_hf(self.model.config)
        return json.loads(json.dumps(described))

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def _start(self, trained: dict[str, Any]) -> tuple[TrainState, int]:
        """The state to go on from, and how much of the log belongs to it."""
        state = init_state(trained, self.optimizer, self.devices)
        checkpoints = list_checkpoints(self.checkpoints)
        if job.leads():
            remove_unfinished(self.checkpoints)
            if not checkpoints:
                remove_checkpoints(self.folder / "best")
        if not checkpoints:
            return state, 0
        failures: list[CheckpointError] = []
        for checkpoint in reversed(checkpoints):
            try:
                info = read_about(checkpoint)
                self.config.check_same(info["config"])
                check_same_model(info.get("model"), self.architecture)
                state = load_state(checkpoint, state)
            except CheckpointError as error:
                failures.append(error)
                continue
            for passed, error in zip(reversed(checkpoints), failures, strict=False):
                self.say(f"{passed.name} is passed over: {error}")
            self.loss, self.saved_step = info["loss"], info["step"]
            self.say_resumed(info)
            return state, info["log_position"]
        raise failures[0]

    def take_reference(self, *, is_resumed: bool) -> None:
        """Takes DPO's reference: log-probabilities of the answers under the model that was given,
        of all pairs that the run will see and that are not yet in the file."""
        path = self.folder / "reference.npy"
        every = [self.rows, *self.other_rows.values()]
        parts = [rows for rows in every if isinstance(rows, PairRows)]
        if is_resumed:
            load_reference(path, parts)
        config, wanted = self.config, [range(rows.num_rows) for rows in parts]
        seen: set[int] = set()
        for step in range(config.num_steps):
            seen.update(pair for pair, _ in parts[0].numbers(step, config.batch_size))
            if len(seen) == parts[0].num_rows:
                break
        missing = [
            [pair for pair in pairs if np.isnan(rows.reference[2 * pair])]
            for rows, pairs in zip(parts, [sorted(seen), *wanted[1:]], strict=True)
        ]
        if not any(missing):
            return
        without = replace(config, remat=None)
        fill = make_reference(self.model, without, self.lora, self.devices)
        start = self.model.weights if self.lora is None else self.lora.start()
        start = self.devices.placed(start)
        for rows, pairs in zip(parts, missing, strict=True):
            fill(start, self.fixed, rows, pairs)
        save_reference(path, parts)
        self.say(f"the model's own log-probabilities of {sum(map(len, missing)):,} pairs are taken")

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
            if not was_complete:
                bar.set_postfix_str("compiling")  # for minutes, perhaps
            if self._due(self.config.eval_every) and (self.step == 0 or self.lacks_held_out):
                self.watch()
                self.sample()
            self.began = self.said_at = time.perf_counter()
            self.said_step = self.step
            while self.step < num_steps and not self.has_lost_patience:
                if job.agreed(stop()):
                    break
                self.advance(bar)
            self.settle(bar)
            interrupted = self.step < num_steps and not self.has_lost_patience
            if self.config.save_best and not interrupted:
                with self.saved_if_it_fails(bar):
                    self.watch()
            self.save()
            self.take_best(interrupted)
            held_out_loss = test_loss = None
            held_out: dict[str, float] = {}
            with self.saved_if_it_fails(bar):
                if not interrupted and not was_complete:
                    self.sample()
                if not interrupted:
                    held_out_loss, held_out = self.evaluate("held-out", None)
                    if held_out_loss is not None:
                        finite(held_out_loss, self.step, "held-out loss")
                    self.log_held_out(held_out_loss, held_out, whole=True)
                    test_loss, _ = self.evaluate("test", None)
        result = self.result(held_out_loss, interrupted, was_complete)
        return replace(result, test_loss=test_loss, held_out=held_out)

    def advance(self, bar: Any) -> None:
        """One step, and what is due after it."""
        with self.saved_if_it_fails(bar):
            batch, more = self.batch()
        lr = float(self.rate(self.step))
        self.compile(batch)
        self.state, metrics = self.train_step(self.state, self.fixed, batch)
        self.settle(bar)
        self.step += 1
        self.unsettled = self.step, lr, metrics, more
        if self._due(self.config.eval_every):
            self.settle(bar)
            with self.saved_if_it_fails(bar):
                self.watch()
                self.sample()
        if self._due(self.config.checkpoint_every):
            self.settle(bar)
            self.save()
        if self.unsettled is None:
            self.began = time.perf_counter()

    def compile(self, batch: Any) -> None:
        """Compiles the step, and gives what that took back before the step takes its own memory.

        On several devices it is compiled by its first call: arrays may be placed otherwise later.
        """
        if self.is_compiled or self.config.mesh is not None:
            return
        self.train_step = self.train_step.lower(self.state, self.fixed, batch).compile()
        self.is_compiled = True
        give_back_freed()

    @contextlib.contextmanager
    def saved_if_it_fails(self, bar: Any) -> Iterator[None]:
        """Saves the run where a reward fails: what was trained is sound, as it need not be where
        the engine does."""
        try:
            yield
        except RewardError:
            self.settle(bar)
            if self.step > 0:
                self.save()
                self.say(f"the run is saved after step {self.step:,}")
            raise

    @property
    def lacks_held_out(self) -> bool:
        """Whether this step's held-out loss is missing: a reward failed in it."""
        lines = self.held_out_lines
        return self.watches and not (lines and lines[-1]["step"] == self.step)

    def settle(self, bar: Any) -> None:
        """Awaits the loss of the step before, while the next one runs, and logs it."""
        if self.unsettled is None:
            return
        step, lr, metrics, more = self.unsettled
        self.unsettled = None
        self.loss = finite(float(metrics.loss), step)
        grad_norm = finite(float(metrics.grad_norm), step, "gradient's norm")
        now = time.perf_counter()
        step_s, self.began = now - self.began, now
        self.log.write(
            {
                "step": step,
                "tokens": step * self.config.tokens_per_step,
                "loss": self.loss,
                "lr": lr,
                "grad_norm": grad_norm,
                **more,
                **{name: float(mean) for name, mean in metrics.more.items()},
                "time": {
                    "step_s": round(step_s, 4),
                    "tok_per_s": round(self.config.tokens_per_step / step_s, 1),
                },
            }
        )
        bar.update(1)
        reward = f", reward {more['reward']:.3f}" if "reward" in more else ""
        bar.set_postfix_str(f"loss {self.loss:.3f}{reward}", refresh=False)
        if bar.disable:
            self.say_progress(step, f"loss {self.loss:.4f}{reward}")

    def say_progress(self, step: int, numbers: str) -> None:
        """A line now and then, where no bar is seen."""
        steps, seconds = step - self.said_step, time.perf_counter() - self.said_at
        if seconds < SAID_EVERY_S or steps < SAID_SHARE * self.config.num_steps:
            return
        self.say(f"step {step:,} of {self.config.num_steps:,}: {numbers}")
        self.said_step, self.said_at = step, time.perf_counter()

    def batch(self) -> tuple[Any, dict[str, float]]:
        """The batch of the next step, and numbers to log."""
        if self.rollouts is not None:
            return self.rollouts.batch(self.step, self.state.weights)
        assert self.rows is not None
        return self.rows.batch(self.step, self.config.batch_size), {}

    def watch(self) -> None:
        """A held-out loss on the way, unless this step has one."""
        if not self.lacks_held_out:
            return
        loss, more = self.evaluate("held-out", self.config.eval_batches)
        if loss is None:
            return
        self.log_held_out(loss, more, whole=False)
        best = self.best()
        is_best = best["step"] == self.step
        note = "the best so far" if is_best else (
            f"the best was {best['held_out_loss']:.4f} at step {best['step']:,}"
        )  # fmt: skip
        training = "" if self.loss is None else f"loss {self.loss:.4f}, "
        if self.step == 0:
            note = "before training"
        further = "".join(f", {name} {mean:.4f}" for name, mean in more.items())
        self.say(f"step {self.step:,}: {training}held-out loss {loss:.4f} ({note}){further}")
        if is_best and self.config.save_best:
            self.write(self.folder / "best", self.weights_alone(), {}, keep=1)

    def sample(self) -> None:
        """Answers to stated prompts: whole in the log, their beginnings on the screen."""
        if self.sampler is None:
            return
        answers = self.sampler(self.trained_model())
        samples = [{"prompt": prompt, "text": text} for prompt, text in answers]
        self.log.write({"step": self.step, "samples": samples})
        for prompt, text in answers:
            question = json.dumps(shortened(prompt, SCREEN // 3), ensure_ascii=False)
            answered = json.dumps(text, ensure_ascii=False)
            self.say(shortened(f"step {self.step:,}, {question}: {answered}", SCREEN))

    def trained_model(self) -> Model:
        """The model as it is now, layers as the run has them."""
        if self.lora is None:
            return replace(self.model, weights=self.state.weights)
        return adapted(self.model, self.lora.adapters(self.state.weights))

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

    def evaluate(self, part: str, num_batches: int | None) -> tuple[float | None, dict[str, float]]:
        """Mean loss of a part's rows, and further means by name; None without any rows."""
        if self.rollouts is not None:
            return self.rollouts.evaluate(part, num_batches, self.state.weights)
        rows = self.other_rows[part]
        if rows is None:
            return None, {}
        total = count = 0.0
        more: dict[str, float] = {}
        for batch in rows.spread(num_batches, self.config.batch_size):
            loss, number, sums = self.eval_step(self.state.weights, self.fixed, batch)
            total, count = total + float(loss), count + float(number)
            for name, value in sums.items():
                more[name] = more.get(name, 0.0) + float(value)
        count = max(count, 1.0)
        return total / count, {name: value / count for name, value in more.items()}

    def log_held_out(self, loss: float | None, more: Mapping[str, float], *, whole: bool) -> None:
        if loss is None:
            return
        line = {
            "step": self.step,
            "tokens": self.step * self.config.tokens_per_step,
            "held_out_loss": loss,
            **self.bits_per_byte(loss),
            **more,
            "whole": whole,
        }
        self.log.write(line)
        if not whole:
            self.held_out_lines.append(line)

    def bits_per_byte(self, loss: float) -> dict[str, float]:
        """Bits per byte of a loss in nats per token, by a held-out corpus."""
        if self.held_out is None or self.config.train_mode != SFT:
            return {}
        return {"bits_per_byte": self.held_out.bits_per_byte(loss)}

    def open_log(self, path: Path, position: int, track: Any) -> None:
        """The log, cut back to the checkpoint."""
        self.log = TrainLog(path, position, track)

    def save(self) -> None:
        """A checkpoint of this step, unless there is one."""
        if self.saved_step == self.step:
            return
        info = {"config": self.config.to_json(), "loss": self.loss, "model": self.architecture}
        if job.leads():
            info["log_position"] = self.log.position()
        self.write(self.checkpoints, self.state, info, keep=self.config.keep)
        self.saved_step = self.step

    def write(self, folder: Path, state: TrainState, info: dict[str, Any], *, keep: int) -> None:
        """A checkpoint by the process that writes, for which the others wait."""
        whole = job.on_host(state)
        job.by_first("checkpoint", lambda: save_checkpoint(folder, whole, info, keep=keep))

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
        model, adapter, weights = self.model, None, job.on_host(self.state.weights)
        if self.lora is None:
            weights = unstack_layers(weights) if self.config.layers == "scan" else weights
            model = replace(self.model, weights=weights)
        else:
            adapters, whole = self.lora.adapters(weights), self.lora.whole(weights)
            adapter = TrainedAdapter(adapters, self.lora.config, whole)
        bits = {} if held_out_loss is None else self.bits_per_byte(held_out_loss)
        return TrainResult(
            model=model,
            adapter=adapter,
            step=self.step,
            tokens=self.step * self.config.tokens_per_step,
            loss=self.loss,
            held_out_loss=held_out_loss,
            bits_per_byte=bits.get("bits_per_byte"),
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


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
