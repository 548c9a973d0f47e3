"""`TrainConfig`: how to train, apart from what the model is. Knows no arrays, imports no jax."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Literal

from rooflax.errors import RequestError
from rooflax.fields.declaration import declare, documented, read_fields
from rooflax.fields.kinds import Choice, Flag, Number, Text, Whole

NEW_WEIGHTS_RATE = 1e-3
FINE_TUNING_RATE = 2e-5
"""Learning rates to begin with: for random weights; for a checkpoint's, which more would undo."""

COMPUTE_DTYPES = ("float32", "bfloat16")
TRUNCATIONS = ("reject", "cut")
LAYERS = ("unrolled", "scan")
REMAT = ("nothing", "dots", "dots_no_batch", "everything")
MOMENT = Number(0, 1, below=True)  # at 1 the moments stay 0 and the step is 0 / 0
MAY_CHANGE = frozenset({"checkpoint_every", "keep"})
"""Fields that a resumed run may state differently; any other would change its losses."""


_field = partial(declare, group="training")
_data = partial(declare, group="what to train")


# fmt: off
@documented
@dataclass(frozen=True)
class DataConfig:
    """How training data is read."""

    glob: str | None = _data(
        Text(), "files to take from a folder", shown_default="*.txt", metavar="GLOB")
    text_field: str | None = _data(
        Text(), "key of the text in a .jsonl line; without it the keys say what a line is",
        metavar="KEY")
    held_out_fraction: float = _data(
        Number(0, 1, below=True), "share of the rows for the held-out loss, unless a folder has "
        "valid.jsonl", default=0.1, metavar="X")
    mask_prompt: bool = _data(
        Flag(), "train the last answer (or the completion) alone", default=False,
        flags=("--mask-prompt",))
    assistant_only_loss: bool = _data(
        Flag(), "train every answer of the assistant, and nothing else", default=False,
        flags=("--assistant-only-loss",))
    truncation: str = _data(
        Choice(TRUNCATIONS), "what happens to chats and completions longer than --seq-len",
        default="reject", metavar="HOW")
    # fmt: on

    def __post_init__(self) -> None:
        read_fields(self)
        if self.mask_prompt and self.assistant_only_loss:
            raise RequestError(
                "both `mask_prompt` and `assistant_only_loss` are given; the first trains the last "
                "answer, the second all of them: give one."
            )

    @property
    def masks(self) -> bool:
        """Whether some tokens of a row are not trained."""
        return self.mask_prompt or self.assistant_only_loss


# fmt: off
@documented
@dataclass(frozen=True)
class TrainConfig:
    """A training run's settings."""

    steps: int | None = _field(Whole(1), "optimizer steps; or give tokens", metavar="N")
    tokens: int | None = _field(
        Whole(1), "training tokens in all, which become steps, rounded up", metavar="N")
    batch_size: int = _field(
        Whole(1), "rows per step, all micro-batches together", default=16, flags=("--batch",),
        metavar="N")
    seq_len: int = _field(Whole(1), "tokens per row", default=512, metavar="N")
    micro_batches: int = _field(
        Whole(1), "micro-batches per step (gradient accumulation)", default=1, metavar="N")
    learning_rate: float = _field(
        Number(0, above=True), "peak learning rate, after the warm-up", default=NEW_WEIGHTS_RATE,
        flags=("--learning-rate", "--lr"), metavar="X")
    min_lr_ratio: float = _field(
        Number(0, 1), "final learning rate over the peak, by a cosine", default=0.1, metavar="X")
    warmup_steps: int | None = _field(
        Whole(), "steps of linear warm-up", shown_default="a tenth of all steps, at most 100",
        metavar="N")
    weight_decay: float = _field(Number(0), "AdamW's, of matrices only", default=0.1, metavar="X")
    clip_norm: float = _field(
        Number(0), "clip gradients to this global norm, 0 for none", default=1.0, metavar="X")
    beta1: float = _field(MOMENT, "AdamW's", default=0.9, metavar="X")
    beta2: float = _field(MOMENT, "AdamW's", default=0.95, metavar="X")
    seed: int = _field(Whole(), "random seed of row order and new weights", default=0, metavar="N")
    dtype: Literal["float32", "bfloat16"] = _field(
        Choice(COMPUTE_DTYPES), "of activations and gradients; weights are float32",
        default="float32", metavar="TYPE")
    remat: str | None = _field(
        Choice(REMAT), "what the backward pass computes again, which on CPU needs layers scan",
        metavar="POLICY")
    layers: Literal["unrolled", "scan"] = _field(
        Choice(LAYERS), "how the program has the layers", default="unrolled", metavar="HOW")
    loss_rows: int | None = _field(
        Whole(1), "rows whose logits exist at a time", shown_default="all of a micro-batch",
        metavar="N")
    eval_every: int = _field(
        Whole(), "steps between held-out losses; 0 only at the end", default=200, metavar="N")
    eval_batches: int = _field(
        Whole(1), "held-out batches in each; the last one takes all", default=8, metavar="N")
    checkpoint_every: int = _field(
        Whole(), "steps between checkpoints; 0 only at the end", default=100, metavar="N")
    keep: int = _field(Whole(1), "checkpoints to keep", default=2, metavar="N")
    # fmt: on

    def __post_init__(self) -> None:
        read_fields(self)
        if (self.steps is None) == (self.tokens is None):
            what = "neither `steps` nor `tokens` is" if self.steps is None else (
                "both `steps` and `tokens` are"
            )  # fmt: skip
            raise RequestError(f"{what} given; give one of them.")
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

    def _check_divides(self, name: str, value: int, divisor: int) -> None:
        if value % divisor:
            raise RequestError(
                f"{name} is {value}, which does not divide by {divisor}; "
                f"choose a multiple of {divisor}."
            )
