"""Preference training: TRL's losses and rewards, the reference, resuming, what is rejected."""

import dataclasses
import io
import math

import jax
import numpy as np
import pytest

from rooflax.errors import CheckpointError, RequestError
from rooflax.models.adapters import LowRank
from rooflax.train.data import Encoded, open_corpus, write_corpus
from rooflax.train.log import read_log
from rooflax.train.loop import make_loss, run_training
from rooflax.train.memory import training_memory
from rooflax.train.preferences import PairRows, make_reference
from rooflax.train.step import init_state, make_optimizer, make_train_step
from tests import preference_cases as cases
from tests.support.train import tiny

pytestmark = pytest.mark.oldest_jax

SEQ = 24


def written(path, pairs, vocab):
    documents = []
    for pair in pairs:
        for key in ("chosen", "rejected"):
            trained = [False] * len(pair["prompt"]) + [True] * len(pair[key])
            documents.append(Encoded([*pair["prompt"], *pair[key]], trained, 1))
    write_corpus(path, documents, vocab, is_whole=True)
    return open_corpus(path)


def leaves(tree):
    if isinstance(tree, dict) and any(isinstance(each, LowRank) for each in tree.values()):
        tree = [(part.a, part.b) for _, part in sorted(tree.items())]
    return jax.tree.leaves(tree)


def settings(case, **changes):
    """Of a case of TRL's: its rate is constant."""
    mode = "orpo" if case == "orpo" else "dpo"
    given = {
        "steps": cases.STEPS, "batch_size": cases.PAIRS, "seq_len": SEQ, "train_mode": mode,
        "learning_rate": cases.RATE, "min_lr_ratio": 1.0, "warmup_steps": 0, "weight_decay": 0.0,
    }  # fmt: skip
    return tiny.settings(**given | cases.CASES[case] | changes)


@pytest.mark.parametrize("trl", cases.CASES)
def test_losses_and_rewards_equal_trls(trl, case, tmp_path):
    config, model = settings(trl), case(cases.VARIANT).model
    rows = PairRows(written(tmp_path / "a", cases.pairs(), model.config.vocab_size), SEQ)
    make_reference(model, config)(model.weights, model.rope, rows, range(rows.num_rows))
    optimizer = make_optimizer(model.table, model.weights, config)
    state = init_state(model.weights, optimizer)
    step = make_train_step(model, optimizer, config, None, make_loss(model, config, None))
    found = []
    for first in range(0, rows.num_rows, cases.PAIRS):
        batch = rows.take(range(first, first + cases.PAIRS))
        state, metrics = step(state, model.rope, batch)
        found.append([float(metrics.loss), *(float(metrics.more[n]) for n in cases.NAMES)])
    wanted = [[line["loss"], *(line[n] for n in cases.NAMES)] for line in cases.committed()[trl]]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-4)
    if trl == "sigmoid":
        assert found[0][0] == pytest.approx(math.log(2), abs=1e-6)


def test_label_smoothing_by_hand(pairs):
    """Mitchell's conservative DPO, of which TRL has no loss any more."""
    model = tiny.make_model(noise=0.1)
    config = tiny.settings(train_mode="dpo", label_smoothing=0.2, beta=0.5, batch_size=2)
    rows = PairRows(pairs[0], 12)
    make_reference(model, config)(model.weights, model.rope, rows, [0, 1])
    ratios = np.array([2.0, -1.0, 0.5, 0.75], np.float32)
    rows.reference[:4] -= ratios
    sums = jax.jit(make_loss(model, config, None).sums)
    total, more = sums(model.weights, model.rope, rows.take([0, 1]))
    deltas = 0.5 * (ratios[::2] - ratios[1::2])
    wanted = 0.8 * np.log1p(np.exp(-deltas)) + 0.2 * np.log1p(np.exp(deltas))
    assert float(total) == pytest.approx(wanted.sum(), abs=1e-4)
    assert float(more["rewards/margins"]) == pytest.approx(deltas.sum(), abs=1e-4)
    assert float(more["rewards/accuracies"]) == 1


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """(training, held out): the chosen answer counts up, the rejected one is noise."""
    random = np.random.RandomState(5)

    def some(count):
        for _ in range(count):
            first = int(random.randint(2, 200))
            up = [first + 1 + index for index in range(int(random.randint(2, 6)))]
            noise = random.randint(2, tiny.VOCAB, random.randint(2, 6)).tolist()
            yield {"prompt": [first, first], "chosen": [*up, 0], "rejected": [*noise, 0]}

    folder = tmp_path_factory.mktemp("pairs")
    return tuple(written(folder / name, some(n), tiny.VOCAB) for name, n in (("a", 30), ("b", 7)))


RUN = {
    "train_mode": "dpo", "batch_size": 4, "seq_len": 12, "steps": 12, "learning_rate": 3e-3,
    "eval_every": 4, "checkpoint_every": 5, "micro_batches": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        {"fine_tune_type": "lora", "lora_rank": 3},
        pytest.param({"train_mode": "orpo", "save_best": True}, marks=pytest.mark.nightly),
    ],
)
def test_a_run_and_the_same_one_killed(pairs, tmp_path, more):
    config = tiny.settings(**RUN | more)
    model, said = tiny.make_model(), []
    whole = run_training(model, config, *pairs, tmp_path / "whole", say=said.append)
    lines = read_log(tmp_path / "whole/log.jsonl")
    steps = [line for line in lines if "loss" in line]
    assert steps[-1]["rewards/margins"] > steps[0]["rewards/margins"]
    held_out = [line for line in lines if "held_out_loss" in line]
    assert whole.held_out["rewards/accuracies"] == held_out[-1]["rewards/accuracies"] > 0.5
    assert whole.bits_per_byte is None and "bits_per_byte" not in held_out[0]
    if config.train_mode == "dpo":
        assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert held_out[0]["held_out_loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert any("log-probabilities of 37 pairs" in line for line in said)
    assert any(", rewards/accuracies " in line for line in said)

    class Killed(BaseException):
        pass

    def killed(line):
        if line.startswith("step 8"):
            raise Killed

    with pytest.raises(Killed):
        run_training(model, config, *pairs, tmp_path / "cut", say=killed)
    again = run_training(model, config, *pairs, tmp_path / "cut")
    assert tiny.comparable(read_log(tmp_path / "cut/log.jsonl")) == tiny.comparable(lines)
    trained = (r.adapter.matrices if r.adapter else r.model.weights for r in (again, whole))
    for one, other in zip(*map(leaves, trained), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_longer_run_takes_the_reference_of_its_further_pairs(pairs, tmp_path):
    model = tiny.make_model()
    config = tiny.settings(**RUN | {"steps": 2, "checkpoint_every": 0})
    run_training(model, config, *pairs, tmp_path)
    path = tmp_path / "reference.npy"
    few = np.load(path)
    run_training(model, dataclasses.replace(config, steps=8, warmup_steps=1), *pairs, tmp_path)
    more = np.load(path)
    is_known = ~np.isnan(few)
    assert 0 < is_known.sum() < np.isfinite(more).sum() == more.size == 2 * 37
    np.testing.assert_array_equal(few[is_known], more[is_known])
    archive = io.BytesIO()
    np.savez(archive, more)
    longer = dataclasses.replace(config, steps=9, warmup_steps=1)
    for damaged in (path.read_bytes()[:-4], archive.getvalue()):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"cannot read .*reference\.npy"):
            run_training(model, longer, *pairs, tmp_path)


def test_micro_batches_change_nothing(pairs):
    model = tiny.make_model(noise=0.1)
    found = []
    for changes in ({"micro_batches": 1}, {"micro_batches": 2}):
        config = tiny.settings(**RUN | {"train_mode": "orpo"} | changes)
        rows = PairRows(pairs[0], 12)
        rows.reference[:] = 0.0
        optimizer = make_optimizer(model.table, model.weights, config)
        step = make_train_step(model, optimizer, config, None, make_loss(model, config, None))
        _, metrics = step(init_state(model.weights, optimizer), model.rope, rows.batch(0, 4))
        found.append([float(metrics.loss), float(metrics.grad_norm)])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_the_memory_of_pairs(pairs):
    model = tiny.make_model()
    config = tiny.settings(**RUN)
    parts = training_memory(model, config)
    longer = training_memory(model, dataclasses.replace(config, seq_len=48))
    name = "gradients, activations and logits"
    assert longer[name] > parts[name] > 0


def test_settings_of_other_modes_are_rejected():
    for given, said in (
        ({"beta": 0.2}, "`beta` is of preferences; set `train_mode`"),
        ({"train_mode": "orpo", "label_smoothing": 0.1}, "`label_smoothing` is of dpo, and"),
        ({"train_mode": "dpo", "loss_type": "ipo", "label_smoothing": 0.1}, "`loss_type` is ipo"),
        ({"train_mode": "dpo", "beta": 0.0}, "`beta` is 0, by which dpo learns nothing"),
    ):
        with pytest.raises(RequestError, match=said):
            tiny.settings(**given)
