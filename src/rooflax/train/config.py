"""`TrainConfig`: how to train, apart from what the model is. Knows no arrays, imports no jax."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from rooflax.errors import RequestError

NEW_WEIGHTS_RATE = 1e-3
FINE_TUNING_RATE = 2e-5
"""Learning rates to begin with: for random weights; for a checkpoint's, which more would undo."""

COMPUTE_DTYPES = ("float32", "bfloat16")
LAYERS = ("unrolled", "scan")
REMAT = (None, "nothing", "dots", "dots_no_batch", "everything")
MAY_CHANGE = frozenset({"checkpoint_every", "keep"})
"""Fields that a resumed run may state differently; any other would change its losses."""


@dataclass(frozen=True)
class TrainConfig:
    """A training run's settings.

    Attributes:
        steps: optimizer steps; or give `tokens`.
        tokens: tokens to see in all; becomes steps, rounded up.
        batch_size: rows per step, all micro-batches together.
        seq_len: tokens per row.
        micro_batches: parts that a step's rows are computed in, one after the other.
        learning_rate: at its highest, after the warm-up; the default is for new weights, and
            FINE_TUNING_RATE is for a checkpoint's.
        min_lr_ratio: what is left of it at the end of the cosine.
        warmup_steps: steps of linear rise; None becomes a tenth of all steps, at most 100.
        weight_decay: of matrices; norms and biases are not decayed.
        clip_norm: largest global norm of a step's gradient; 0 does not clip.
        beta1, beta2: AdamW's.
        seed: of the order of rows.
        dtype: of the forward and backward computation; weights and optimizer are float32.
        remat: name of a policy in nn.layers.REMAT_POLICIES; None keeps every intermediate. On CPU
            it needs layers="scan": XLA there merges what unrolled layers compute twice.
        layers: "unrolled" or "scan".
        loss_rows: rows whose logits exist at a time; None is all of a micro-batch.
        eval_every: steps between held-out losses; 0 only at the end.
        eval_batches: held-out batches in each of them; the last one takes all.
        checkpoint_every: steps between checkpoints; 0 only at the end.
        keep: checkpoints to keep.
    """

    steps: int | None = None
    tokens: int | None = None
    batch_size: int = 16
    seq_len: int = 512
    micro_batches: int = 1
    learning_rate: float = NEW_WEIGHTS_RATE
    min_lr_ratio: float = 0.1
    warmup_steps: int | None = None
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: str | None = None
    layers: Literal["unrolled", "scan"] = "unrolled"
    loss_rows: int | None = None
    eval_every: int = 200
    eval_batches: int = 8
    checkpoint_every: int = 100
    keep: int = 2

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.tokens is None):
            raise RequestError(
                f"steps is {self.steps} and tokens is {self.tokens}; give exactly one of the two."
            )
        for name in ("batch_size", "seq_len", "micro_batches", "eval_batches", "keep"):
            self._check_whole(name, 1)
        for name in ("steps", "tokens", "loss_rows", "warmup_steps"):
            if getattr(self, name) is not None:
                self._check_whole(name, 0 if name == "warmup_steps" else 1)
        for name in ("seed", "eval_every", "checkpoint_every"):
            self._check_whole(name, 0)
        self._check_number("learning_rate", 0.0, math.inf, above=True)
        self._check_number("min_lr_ratio", 0.0, 1.0)
        self._check_number("weight_decay", 0.0, math.inf)
        self._check_number("clip_norm", 0.0, math.inf)
        for name in ("beta1", "beta2"):  # at 1 the moments stay 0 and the step is 0 / 0
            self._check_number(name, 0.0, 1.0, below=True)
        self._check_choice("dtype", COMPUTE_DTYPES)
        self._check_choice("remat", REMAT)
        self._check_choice("layers", LAYERS)
        self._check_divides("batch_size", self.batch_size, self.micro_batches)
        if self.loss_rows is not None:
            rows = self.batch_size // self.micro_batches
            self._check_divides("rows per micro-batch", rows, self.loss_rows)
        if self.warmup_steps is None:
            object.__setattr__(self, "warmup_steps", min(100, self.num_steps // 10))

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def num_steps(self) -> int:
        """Steps in all, whichever of `steps` and `tokens` was given."""
        if self.steps is not None:
            return self.steps
        return math.ceil((self.tokens or 0) / self.tokens_per_step)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def check_same(self, saved: dict[str, Any]) -> None:
        """Rejects to resume a run that was started with other settings.

        Raises:
            RequestError: a field that would change the losses differs; it names the first.
        """
        for field in fields(self):
            now, then = getattr(self, field.name), saved.get(field.name)
            if field.name not in MAY_CHANGE and now != then:
                how = "resume with the same settings or train into another folder"
                if field.name in ("steps", "tokens"):
                    how = (
                        "the learning rates of a run depend on its length, so train on from the "
                        "model that it saved, into another folder"
                    )
                raise RequestError(
                    f"{field.name} is {now!r}, but the checkpoint was trained with {then!r}; {how}."
                )

    def _check_whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if type(value) is not int or value < least:
            raise RequestError(f"{name} is {value!r}; it must be a whole number from {least} up.")

    def _check_number(
        self, name: str, least: float, most: float, *, above: bool = False, below: bool = False
    ) -> None:
        value = getattr(self, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # Not math.isfinite: it fails at whole numbers that no float can hold.
        if not number or not least <= value <= min(most, sys.float_info.max):
            raise RequestError(f"{name} is {value!r}; it must be a number from {least} to {most}.")
        if above and value == least:
            raise RequestError(f"{name} is {value!r}; it must be above {least}.")
        if below and value == most:
            raise RequestError(f"{name} is {value!r}; it must be below {most}.")

    def _check_choice(self, name: str, choices: tuple[object, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            wanted = ", ".join(repr(choice) for choice in choices)
            raise RequestError(f"{name} is {value!r}; it must be one of {wanted}.")

    def _check_divides(self, name: str, value: int, divisor: int) -> None:
        if value % divisor:
            raise RequestError(
                f"{name} is {value}, which does not divide by {divisor}; "
                f"choose a multiple of {divisor}."
            )
