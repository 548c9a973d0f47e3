"""TrainConfig rejects what cannot be meant, naming the field."""

import dataclasses
import json
import math

import pytest

from rooflax.errors import RequestError
from rooflax.loading.adapter_config import MAX_ALPHA, MAX_RANK
from rooflax.train.config import MAY_CHANGE, REMAT, TrainConfig

FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}
POSITIVE = ("steps", "tokens", "batch_size", "seq_len", "micro_batches",
            "eval_batches", "keep", "patience", "lora_rank", "num_layers", "num_generations",
            "max_completion_length", "num_iterations")  # fmt: skip
NOT_NEGATIVE = ("warmup_steps", "seed", "eval_every", "checkpoint_every")
MAY_BE_NONE = ("warmup_steps", "micro_batches", "beta")
FLAGS = ("save_best", "use_rslora")
TEXTS = ("target_modules", "modules_to_save", "target_parameters", "reward", "mesh")
NUMBERS = ("learning_rate", "min_lr_ratio", "weight_decay", "clip_norm", "beta1", "beta2",
           "lora_alpha", "lora_dropout", "beta", "label_smoothing", "epsilon")  # fmt: skip
CHOICES = ("dtype", "remat", "layers", "save_dtype", "fine_tune_type", "train_mode", "loss_type",
           "optimizer")  # fmt: skip


def make(**given):
    if not {"steps", "tokens", "epochs"} & given.keys():
        given["steps"] = 10
    return TrainConfig(**given)


def rejected(**given):
    name = next(iter(given))
    with pytest.raises(RequestError, match=rf"^{name} is ") as caught:
        make(**given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_field_is_of_one_kind():
    fields = {*POSITIVE, *NOT_NEGATIVE, *NUMBERS, *CHOICES, *FLAGS, *TEXTS, "epochs"}
    assert fields == FIELDS.keys()


def test_no_adapter_is_trained_that_is_not_read():
    lora = {"fine_tune_type": "lora"}
    make(lora_rank=MAX_RANK, lora_alpha=MAX_ALPHA, **lora)
    rejected(lora_rank=MAX_RANK + 1, **lora)
    rejected(lora_alpha=MAX_ALPHA + 1, **lora)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("value", [1, 2.5, ["q_proj"]])
def test_texts(name, value):
    rejected(**{name: value})


@pytest.mark.parametrize("name", POSITIVE)
@pytest.mark.parametrize("value", [0, -1, 1.0, 2.5, True, "4", math.nan, math.inf])
def test_sizes(name, value):
    rejected(**{name: value})


@pytest.mark.parametrize("name", NOT_NEGATIVE)
@pytest.mark.parametrize("value", [-1, 1.0, True, False, None, "4", math.nan])
def test_counts_that_may_be_zero(name, value):
    assert getattr(make(**{name: 0}), name) == 0
    if value is not None or name not in MAY_BE_NONE:
        rejected(**{name: value})


@pytest.mark.parametrize(
    ("steps", "warmup"), [(1, 0), (9, 0), (10, 1), (50, 5), (999, 99), (1000, 100), (10**6, 10**5)]
)
def test_the_default_warm_up_ends_long_before_the_steps_do(steps, warmup):
    config = make(steps=steps)
    assert config.warmup_steps == warmup
    assert make(tokens=64 * steps, batch_size=4, seq_len=16).warmup_steps == warmup
    assert config.to_json()["warmup_steps"] == warmup  # a resumed run is held to it
    assert make(steps=steps, warmup_steps=70).warmup_steps == 70


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "value",
    [-1e-9, -math.inf, math.inf, math.nan, True, None, "0.1", pytest.param(10**400, id="huge")],
)
def test_numbers(name, value):
    if value is not None or name not in MAY_BE_NONE:
        rejected(**{name: value})


def test_edges_of_numbers():
    rejected(learning_rate=0)
    rejected(learning_rate=0.0)
    rejected(min_lr_ratio=1.5)
    for name in ("beta1", "beta2"):  # at 1 the moments never begin, and the step is 0 / 0
        rejected(**{name: 1.0})
        rejected(**{name: 1})
        assert getattr(make(**{name: 0.0}), name) == 0.0
    for name in ("min_lr_ratio", "weight_decay", "clip_norm"):
        assert getattr(make(**{name: 0}), name) == 0
    assert make(min_lr_ratio=1).min_lr_ratio == 1


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("value", ["", "no such", True, 0, math.nan, "Float32", ("scan",)])
def test_choices(name, value):
    sentence = rejected(**{name: value})
    assert "must be one of" in sentence


def test_the_policies_are_those_of_the_layers():
    from rooflax.nn.layers import REMAT_POLICIES

    assert {None, *REMAT} == {None, *REMAT_POLICIES}


def test_steps_or_tokens():
    for given in ({}, {"steps": 3, "tokens": 100}, {"epochs": 1, "steps": 3}):
        with pytest.raises(RequestError, match="give one of them"):
            TrainConfig(**given)


@pytest.mark.parametrize(
    ("epochs", "rows", "steps"), [(1, 40, 10), (3, 41, 31), (0.5, 40, 5), (0.001, 4, 1)]
)
def test_epochs_become_steps_once_the_rows_are_known(epochs, rows, steps):
    config = make(epochs=epochs, batch_size=4)
    assert config.warmup_steps is None
    found = config.resolved(rows)
    assert (found.num_steps, found.epochs, found.warmup_steps) == (steps, None, steps // 10)
    assert found.resolved(0) == found
    rejected(epochs=0)


def test_what_watches_held_out_losses_needs_them():
    for given in ({"patience": 2}, {"save_best": True}):
        with pytest.raises(RequestError, match="need held-out losses"):
            make(eval_every=0, **given)


@pytest.mark.parametrize(("tokens", "steps"), [(1, 1), (64, 1), (65, 2), (640, 10), (641, 11)])
def test_tokens_become_whole_steps(tokens, steps):
    config = make(tokens=tokens, batch_size=4, seq_len=16)
    assert (config.tokens_per_step, config.num_steps) == (64, steps)


def test_rows_divide():
    with pytest.raises(RequestError, match=r"batch_size is 6, .* multiple of 4"):
        make(batch_size=6, micro_batches=4)
    with pytest.raises(RequestError, match=r"batch_size is 18, .* multiple of 12"):
        make(batch_size=18, micro_batches=2, mesh="data=3,fsdp=2,tensor=2")


def test_each_device_has_micro_batches_and_another_number_of_devices_others():
    whole, split = make(batch_size=16, seq_len=256), make(batch_size=16, seq_len=256, mesh="data=2")
    assert (whole.resolved(0, 1024).micro_batches, split.resolved(0, 1024).micro_batches) == (4, 2)
    saved = json.loads(json.dumps(split.resolved(0, 1024).to_json()))
    whole.resolved(0, 1024).check_same(saved)
    with pytest.raises(RequestError, match="^micro_batches is 4, but"):
        make(batch_size=16, seq_len=256, mesh="data=2", micro_batches=4).check_same(saved)


@pytest.mark.parametrize(
    ("batch", "length", "given", "found"),
    [(16, 512, None, 8), (16, 256, None, 4), (6, 256, None, 2), (5, 300, None, 5), (4, 64, None, 1),
     (4, 4096, None, 4), (16, 512, 2, 2)],
)  # fmt: skip
def test_micro_batches_are_chosen(batch, length, given, found):
    config = make(batch_size=batch, seq_len=length, micro_batches=given)
    assert config.resolved(0, 1024).micro_batches == found
    assert config.resolved(0).micro_batches == (given or 1)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().steps = 5


OTHER = {
    "steps": 9, "batch_size": 32, "seq_len": 256, "micro_batches": 2,
    "optimizer": "muon", "learning_rate": 2e-3, "min_lr_ratio": 0.2, "warmup_steps": 7,
    "weight_decay": 0.2,
    "clip_norm": 2.0, "beta1": 0.8, "beta2": 0.9, "seed": 1, "dtype": "bfloat16",
    "remat": "dots", "layers": "scan", "mesh": "data=2", "eval_every": 3, "eval_batches": 5,
    "checkpoint_every": 9, "keep": 7, "save_dtype": "float32", "patience": 3,
    "save_best": True,
    "fine_tune_type": "lora", "lora_rank": 4, "lora_alpha": 3.0, "lora_dropout": 0.1,
    "use_rslora": True, "target_modules": "q_proj", "modules_to_save": "lm_head",
    "target_parameters": "mlp.experts.down_proj",
    "num_layers": 2,
    "train_mode": "orpo", "beta": 0.2, "loss_type": "ipo", "label_smoothing": 0.1,
    "reward": "b.py:f", "num_generations": 4, "max_completion_length": 9, "epsilon": 0.1,
    "num_iterations": 2,
}  # fmt: skip


OF_ADAPTERS = (
    "lora_rank", "lora_alpha", "lora_dropout", "use_rslora", "target_modules",
    "modules_to_save", "target_parameters", "num_layers",
)  # fmt: skip


OF_DPO = ("beta", "loss_type", "label_smoothing")
OF_GRPO = ("reward", "num_generations", "max_completion_length", "epsilon", "num_iterations")
NEEDED = (
    {name: {"fine_tune_type": "lora"} for name in OF_ADAPTERS}
    | {name: {"train_mode": "dpo"} for name in OF_DPO}
    | {name: {"train_mode": "grpo", "reward": "a.py:f"} for name in OF_GRPO}
)
"""What a field is of, beside itself."""


@pytest.mark.parametrize("given", [{"fine_tune_type": "lora"}, {"mesh": "data=2"}])
def test_muon_is_for_all_weights_on_one_device(given):
    (name,) = given
    with pytest.raises(RequestError, match=f"`optimizer` muon is not for `{name}`.*take adamw"):
        make(optimizer="muon", **given)
    assert make(**given).optimizer == "adamw"


@pytest.mark.parametrize("name", [*OF_DPO, *OF_GRPO])
def test_what_is_of_a_mode_needs_it(name):
    with pytest.raises(RequestError, match=rf"^`{name}` is of \w+; set `train_mode` to"):
        make(**{name: OTHER[name]})
    assert getattr(make(**NEEDED[name] | {name: OTHER[name]}), name) == OTHER[name]


@pytest.mark.parametrize("name", OF_ADAPTERS)
def test_what_is_of_adapters_needs_one(name):
    with pytest.raises(RequestError, match=f"^`{name}` is of an adapter; set `fine_tune_type`"):
        make(**{name: OTHER[name]})
    assert getattr(make(fine_tune_type="lora", **{name: OTHER[name]}), name) == OTHER[name]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fine_tune_type": "dora"}, "fine_tune_type dora"),
        ({"lora_dropout": 0.1}, "lora_dropout"),
        ({"layers": "scan"}, "layers scan"),
    ],
)
def test_what_experts_do_not_go_with(given, said):
    settings = {"fine_tune_type": "lora", "target_parameters": "mlp.experts.down_proj"} | given
    with pytest.raises(RequestError, match=f"^`target_parameters` does not go with {said}; leave"):
        make(**settings)


@pytest.mark.parametrize(
    "given", [{"fine_tune_type": "dora"}, {"modules_to_save": "lm_head"}, {"mesh": "data=2"}]
)
def test_what_grpo_does_not_go_with(given):
    settings = {"fine_tune_type": "lora", "reward": "a.py:f", "train_mode": "grpo"} | given
    with pytest.raises(RequestError, match=rf"^`{next(iter(given))}`.* is not for `train_mode`"):
        make(**settings)


@pytest.mark.parametrize("mode", ["dpo", "orpo"])
def test_preferences_are_compared_without_dropout(mode):
    with pytest.raises(RequestError, match=f"^`lora_dropout` is not for `train_mode` {mode}, whi"):
        make(fine_tune_type="lora", train_mode=mode, lora_dropout=0.1)


def test_lengths_that_no_checkpoint_can_number():
    rejected(steps=10**8)
    rejected(tokens=10**16)
    rejected(epochs=1e7)
    with pytest.raises(RequestError, match="^The run has 1,000,000,000 steps; the most are"):
        make(epochs=1e6, batch_size=1).resolved(1000)


# Of a resolved run, tokens and epochs are steps.
@pytest.mark.parametrize("name", [name for name in FIELDS if name not in ("tokens", "epochs")])
def test_a_resumed_run_has_the_same_settings(name):
    first = make(steps=10, **NEEDED.get(name, {}))
    saved = json.loads(json.dumps(first.to_json()))
    first.check_same(saved)
    other = dataclasses.replace(first, **{name: OTHER[name]})
    if name in MAY_CHANGE:
        other.check_same(saved)
    else:
        with pytest.raises(RequestError, match="checkpoint was trained with") as caught:
            other.check_same(saved)
        assert str(caught.value).startswith(f"{name} is ")


def test_a_run_may_be_made_longer():
    saved = json.loads(json.dumps(make(steps=10).to_json()))
    make(steps=30).check_same(saved)  # with a longer warm-up, too
    with pytest.raises(RequestError, match="^seed is 1"):
        make(steps=30, seed=1).check_same(saved)
    with pytest.raises(RequestError, match=r"^steps is 9, .*made longer, not shorter"):
        make(steps=9).check_same(saved)


def test_a_setting_that_the_checkpoint_does_not_know():
    saved = make().to_json()
    del saved["beta2"]
    make().check_same(saved)
    with pytest.raises(RequestError, match=r"^beta2 is 0\.9, .* with 0\.95"):
        make(beta2=0.9).check_same(saved)
