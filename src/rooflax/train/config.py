"""`TrainConfig`: how to train, apart from what the model is. Knows no arrays, imports no jax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, Literal

from rooflax.errors import RequestError
from rooflax.fields.declaration import declarations, declare, documented, read_fields
from rooflax.fields.kinds import Choice, Flag, Number, Text, Whole
from rooflax.nn.shards import DATA, FSDP, TRAINING_AXES, axis_sizes

DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "new weights": {"learning_rate": 1e-3, "weight_decay": 0.1},
    "full": {"learning_rate": 2e-5, "weight_decay": 0.0},
    "lora": {"learning_rate": 1e-4, "weight_decay": 0.0},
    "full, not sft": {"learning_rate": 1e-6, "weight_decay": 0.0},
    "lora, not sft": {"learning_rate": 1e-5, "weight_decay": 0.0},
}
"""Fields that nobody sets, by what is trained: random weights; all of a checkpoint's, which more
would undo; an adapter beside them, whose B begins as zeros; and both by preferences or rewards."""
SAVE_DTYPES = ("bfloat16", "float32", "float16")

SFT, DPO, ORPO, GRPO = "sft", "dpo", "orpo", "grpo"
TRAIN_MODES = (SFT, DPO, ORPO, GRPO)
PREFERENCES = (DPO, ORPO)
"""Modes of rows with a chosen and a rejected answer."""
LOSS_TYPES = ("sigmoid", "hinge", "ipo", "robust")
FULL, LORA, DORA = FINE_TUNE_TYPES = ("full", "lora", "dora")
COMPUTE_DTYPES = ("float32", "bfloat16")
TRUNCATIONS = ("reject", "cut")
ADAMW, MUON = OPTIMIZERS = ("adamw", "muon")
LAYERS = ("unrolled", "scan")
REMAT = ("nothing", "dots", "dots_no_batch", "everything")
MOMENT = Number(0, 1, below=True)  # at 1 the moments stay 0 and the step is 0 / 0
MAY_CHANGE = frozenset({"checkpoint_every", "keep", "save_dtype", "mesh"})
"""Fields that a resumed run may state differently; any other would change its losses."""
LENGTH = frozenset({"epochs", "tokens", "steps", "warmup_steps"})
"""Fields that a run which is made longer may state differently."""


MOST_STEPS = 99_999_999  # as checkpoints number them
MOST_ROWS = 2**20
LARGEST = 1e30  # which float32 has
NEW = DEFAULTS["new weights"]
_field = partial(declare, group="training")
ADAPTERS = "adapters"
_adapter = partial(declare, group=ADAPTERS)
PAIRS = "preferences"
_pairs = partial(declare, group=PAIRS)
REWARDS = "rewards"
_rewards = partial(declare, group=REWARDS)
_data = partial(declare, group="what to train")


# fmt: off
@documented
@dataclass(frozen=True)
class DataConfig:
    """Settings of reading training data."""

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

    steps: int | None = _field(Whole(1, MOST_STEPS), "optimizer steps; or tokens, or epochs",
        metavar="N")
    tokens: int | None = _field(
        Whole(1, 10**15), "training tokens in all, which become steps, rounded up", metavar="N")
    epochs: float | None = _field(
        Number(0, 1e6, above=True), "times that all rows are trained, which become steps",
        metavar="X")
    batch_size: int = _field(
        Whole(1, MOST_ROWS), "rows per step, all micro-batches together", default=16,
        flags=("--batch",), metavar="N")
    seq_len: int = _field(Whole(1), "tokens per row", default=512, metavar="N")
    micro_batches: int | None = _field(
        Whole(1, MOST_ROWS), "micro-batches per step (gradient accumulation)",
        shown_default="on CPU so many that one has 1,024 tokens or a row, of an adapter 512, else "
        "1", metavar="N")
    learning_rate: float = _field(
        Number(0, LARGEST, above=True), "peak learning rate, after the warm-up",
        default=NEW["learning_rate"], flags=("--learning-rate", "--lr"), metavar="X")
    min_lr_ratio: float = _field(
        Number(0, 1), "final learning rate over the peak, by a cosine", default=0.1, metavar="X")
    warmup_steps: int | None = _field(
        Whole(), "steps of linear warm-up, at most all", shown_default="a tenth of all steps",
        metavar="N")
    optimizer: Literal["adamw", "muon"] = _field(
        Choice(OPTIMIZERS), "muon takes the layers' matrices by their orthogonalized momentum, the "
        "rest by AdamW; for all weights of a model on one device", default=ADAMW, metavar="NAME")
    weight_decay: float = _field(
        Number(0, LARGEST), "the optimizer's, of matrices only", default=NEW["weight_decay"],
        metavar="X")
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
    mesh: str | None = _field(
        Text(), "devices by axis, as in data=2,fsdp=2: data splits rows, fsdp rows, weights and "
        "moments, tensor heads, MLPs and vocabulary", shown_default="one device",
        metavar="AXIS=N")
    layers: Literal["unrolled", "scan"] = _field(
        Choice(LAYERS), "how the program has the layers", default="unrolled", metavar="HOW")
    eval_every: int = _field(
        Whole(), "steps between held-out losses, from step 0; 0 only at the end", default=200,
        metavar="N")
    eval_batches: int = _field(
        Whole(1), "held-out batches in each; the last one takes all", default=8, metavar="N")
    patience: int | None = _field(
        Whole(1), "stop when so many held-out losses in a row were not below the best",
        metavar="N")
    save_best: bool = _field(
        Flag(), "save the weights of the best held-out loss, not the last", default=False,
        flags=("--save-best",))
    checkpoint_every: int = _field(
        Whole(), "steps between checkpoints; 0 only at the end", default=100, metavar="N")
    keep: int = _field(Whole(1), "checkpoints to keep", default=2, metavar="N")
    save_dtype: Literal["bfloat16", "float32", "float16"] = _field(
        Choice(SAVE_DTYPES), "of the saved model; training and checkpoints are float32",
        default="bfloat16", metavar="TYPE")
    fine_tune_type: Literal["full", "lora", "dora"] = _adapter(
        Choice(FINE_TUNE_TYPES), "all weights, or a LoRA adapter beside weights that stay as they "
        "are, quantized ones too (QLoRA); dora trains the length of each output's weights apart",
        default=FULL, metavar="TYPE")
    lora_rank: int = _adapter(
        Whole(1, 4096), "rank", default=8, flags=("--lora-rank", "--lora-r"), metavar="N")
    lora_alpha: float = _adapter(
        Number(0, 1e6, above=True), "what B A is multiplied by, over the rank", default=16.0,
        metavar="X")
    lora_dropout: float = _adapter(
        Number(0, 1, below=True), "share of what A multiplies that is dropped in training",
        default=0.0, metavar="X")
    use_rslora: bool = _adapter(
        Flag(), "rsLoRA: alpha over the root of the rank", default=False, flags=("--use-rslora",))
    target_modules: str = _adapter(
        Text(), "linear layers to train: all-linear, or names such as q_proj,v_proj",
        default="all-linear", metavar="NAMES")
    modules_to_save: str | None = _adapter(
        Text(), "modules whose whole weight is trained beside the adapter: lm_head, embed_tokens",
        metavar="NAMES")
    target_parameters: str | None = _adapter(
        Text(), "experts that are trained too, such as mlp.experts.gate_up_proj", metavar="NAMES")
    num_layers: int | None = _adapter(
        Whole(1), "the last layers alone", shown_default="all", metavar="N")
    train_mode: Literal["sft", "dpo", "orpo", "grpo"] = _pairs(
        Choice(TRAIN_MODES), "sft trains on rows as they are; dpo and orpo prefer the chosen of "
        "two answers; grpo samples answers and learns from their rewards", default=SFT,
        metavar="MODE")
    beta: float | None = _pairs(
        Number(0, LARGEST), "what leaving the starting model costs (dpo, grpo), the odds ratio's "
        "weight (orpo)", shown_default="0.1, of grpo 0, which needs no reference", metavar="X")
    loss_type: Literal["sigmoid", "hinge", "ipo", "robust"] = _pairs(
        Choice(LOSS_TYPES), "of dpo", default="sigmoid", metavar="TYPE")
    label_smoothing: float = _pairs(
        Number(0, 0.5, below=True), "of dpo, share of pairs that are the wrong way round",
        default=0.0, metavar="X")
    reward: str | None = _rewards(
        Text(), "of grpo: a Python function that gives completions their rewards; the file is your "
        "code, and runs", metavar="FILE.py:FUNCTION")
    num_generations: int = _rewards(
        Whole(2), "answers to each prompt, whose rewards are compared; a step's --batch has all of "
        "them", default=8, metavar="N")
    max_completion_length: int = _rewards(
        Whole(1), "tokens of an answer at most", default=256, metavar="N")
    epsilon: float = _rewards(
        Number(0, 1, above=True, below=True), "how far from 1 the ratio of probabilities counts",
        default=0.2, metavar="X")
    num_iterations: int = _rewards(
        Whole(1), "updates by the answers of a step", default=1, metavar="N")
    # fmt: on

    def __post_init__(self) -> None:
        read_fields(self)
        lengths = [name for name in ("steps", "tokens", "epochs") if getattr(self, name)]
        if len(lengths) != 1:
            what = "none of `steps`, `tokens` and `epochs` is"
            if lengths:
                what = f"both `{lengths[0]}` and `{lengths[1]}` are"
            raise RequestError(f"{what} given; give one of them.")
        if (self.patience or self.save_best) and not self.eval_every:
            raise RequestError("`patience` and `save_best` need held-out losses: set `eval_every`.")
        if not self.trains_adapter:
            self._check_unset(ADAPTERS, "an adapter; set `fine_tune_type` to lora")
        if self.train_mode == SFT:
            self._check_unset(PAIRS, "preferences; set `train_mode` to dpo or orpo")
        elif self.train_mode != DPO:
            mode = f"dpo, and `train_mode` is {self.train_mode}"
            self._check_unset(PAIRS, mode, "train_mode", "beta")
        if self.train_mode == GRPO:
            self._check_rewards()
        else:
            self._check_unset(REWARDS, "rewards; set `train_mode` to grpo")
        if self.label_smoothing and self.loss_type not in ("sigmoid", "robust"):
            raise RequestError(
                f"`label_smoothing` is of the sigmoid and robust losses, and `loss_type` is "
                f"{self.loss_type}."
            )
        if self.train_mode != SFT and self.beta is None:
            object.__setattr__(self, "beta", 0.0 if self.train_mode == GRPO else 0.1)
        if self.train_mode in PREFERENCES and self.lora_dropout:
            raise RequestError(
                f"`lora_dropout` is not for `train_mode` {self.train_mode}, which compares two "
                f"answers without dropout, as TRL does; leave it out."
            )
        if self.train_mode in PREFERENCES and not self.beta:
            raise RequestError(f"`beta` is 0, by which {self.train_mode} learns nothing.")
        if self.train_mode == GRPO and self.fine_tune_type == DORA:
            raise RequestError("`fine_tune_type` dora is not for `train_mode` grpo; take lora.")
        if self.optimizer == MUON and (self.trains_adapter or self.mesh is not None):
            what = "`mesh`" if self.mesh is not None else f"`fine_tune_type` {self.fine_tune_type}"
            raise RequestError(f"`optimizer` muon is not for {what}; take adamw.")
        for name in ("modules_to_save", "target_parameters"):
            if self.train_mode == GRPO and getattr(self, name) is not None:
                raise RequestError(f"`{name}` is not for `train_mode` grpo; leave it out.")
        if self.target_parameters is not None:
            self._check_experts()
        if self.train_mode == GRPO and self.mesh is not None:
            raise RequestError("`mesh` is not for `train_mode` grpo, which samples on one device.")
        parts = (self.micro_batches or 1) * self.row_parts
        self._check_divides("batch_size", self.batch_size, parts)
        if self.warmup_steps is None and self.epochs is None:
            object.__setattr__(self, "warmup_steps", self.num_steps // 10)

    @property
    def trains_adapter(self) -> bool:
        """Whether weights stay as they are, and matrices beside them are trained."""
        return self.fine_tune_type != FULL

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Devices by axis of the mesh.

        Raises:
            RequestError: `mesh` is no mesh of training.
        """
        return {} if self.mesh is None else axis_sizes(self.mesh, TRAINING_AXES)

    @property
    def row_parts(self) -> int:
        """Parts of a step's rows that are on devices of their own."""
        sizes = self.mesh_sizes
        return sizes.get(DATA, 1) * sizes.get(FSDP, 1)

    @property
    def rows_per_step(self) -> int:
        """Rows of tokens: two of a pair."""
        return self.batch_size * (2 if self.train_mode in PREFERENCES else 1)

    @property
    def tokens_per_step(self) -> int:
        return self.rows_per_step * self.seq_len

    @property
    def num_steps(self) -> int:
        """Steps in all; of epochs only once they are `resolved`."""
        if self.steps is not None:
            return self.steps
        return math.ceil((self.tokens or 0) / self.tokens_per_step)

    def resolved(self, num_rows: int, tokens_at_once: int | None = None) -> TrainConfig:
        """The same in steps and micro-batches.

        Args:
            num_rows: of an epoch.
            tokens_at_once: of a device's micro-batch, unless a row has more; None is all of a step.
        """
        steps = self.num_steps
        if self.epochs is not None:
            steps = math.ceil(self.epochs * num_rows / self.batch_size)
        if steps > MOST_STEPS:
            raise RequestError(f"The run has {steps:,} steps; the most are {MOST_STEPS:,}.")
        micro_batches = self.micro_batches or 1
        if self.micro_batches is None and tokens_at_once is not None:
            most, rows = max(tokens_at_once // self.seq_len, 1), self.batch_size // self.row_parts
            micro_batches = rows // next(n for n in range(most, 0, -1) if rows % n == 0)
        return replace(
            self, steps=steps, tokens=None, epochs=None, micro_batches=micro_batches
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def check_same(self, saved: dict[str, Any]) -> None:
        """Rejects to resume a run that was started with other settings.

        Both are `resolved`; a run may be made longer.

        Raises:
            RequestError: a field that would change the losses differs; it names the first.
        """
        may_change = MAY_CHANGE
        if type(saved.get("steps")) is int and self.num_steps > saved["steps"]:
            may_change |= LENGTH
        if self.mesh != saved.get("mesh"):
            may_change |= {"micro_batches"}
        for field in fields(self):
            # a field that the checkpoint lacks came later, and was as it is by default
            now, then = getattr(self, field.name), saved.get(field.name, field.default)
            if field.name not in may_change and now != then:
                advice = "resume with the same settings or train into another folder"
                if field.name == "steps":
                    advice = "a run can be made longer, not shorter"
                raise RequestError(
                    f"{field.name} is {now!r}, but the checkpoint was trained with {then!r}; "
                    f"{advice}."
                )

    def _check_rewards(self) -> None:
        if self.reward is None:
            raise RequestError("`train_mode` grpo needs `reward`: FILE.py:FUNCTION.")
        if self.layers != "unrolled" or self.seq_len <= self.max_completion_length:
            raise RequestError(
                f"`train_mode` grpo samples with `layers` unrolled, and prompts have the tokens of "
                f"`seq_len` that `max_completion_length` leaves; they are {self.layers}, "
                f"{self.seq_len} and {self.max_completion_length}."
            )
        self._check_divides("batch_size", self.batch_size, self.num_generations)

    def _check_experts(self) -> None:
        for name, has in (
            ("fine_tune_type dora", self.fine_tune_type == DORA),
            ("lora_dropout", self.lora_dropout > 0),
            ("layers scan", self.layers == "scan"),
        ):
            if has:
                raise RequestError(f"`target_parameters` does not go with {name}; leave one out.")

    def _check_unset(self, group: str, mode: str, *besides: str) -> None:
        declared = (one for one in declarations(TrainConfig).values() if one.group == group)
        set_names = [one.name for one in declared if getattr(self, one.name) != one.default]
        if other := [name for name in set_names if name not in besides]:
            raise RequestError(f"`{other[0]}` is of {mode}.")

    def _check_divides(self, name: str, value: int, divisor: int) -> None:
        if value % divisor:
            raise RequestError(
                f"{name} is {value}, which does not divide by {divisor}; "
                f"choose a multiple of {divisor}."
            )
