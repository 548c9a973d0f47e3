"""Training runs that a client steps: losses, gradients, AdamW, samples, and what is saved."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from rooflax.engine.sampling_params import SamplingParams
from rooflax.errors import CheckpointError, RequestError
from rooflax.llm import LLM
from rooflax.loading.adapters import open_adapter
from rooflax.nn.execution import ExecutionOptions
from rooflax.rl.runs import LOSSES, AdamSettings, Datum, LoraShape, Run, batches, check
from rooflax.rl.trainer import MOST_SAMPLERS, Session, Trainer

SHAPE = LoraShape(rank=3, seed=5)


@pytest.fixture(scope="module")
def llm():
    options = ExecutionOptions(layers="unrolled")
    return LLM(
        "preset:qwen2.5-tiny", max_num_seqs=4, max_model_len=96, options=options,
        prefix_caching=False, generation_config="none",
    )  # fmt: skip


@pytest.fixture
def trainer(llm, tmp_path):
    llm.use(llm.model)
    base = llm.model
    made = Trainer(llm, tmp_path / "runs")
    made.sessions["s"] = Session()
    yield made
    llm.use(base)


def rows(loss="cross_entropy", lengths=(9, 21, 5), seed=0):
    random, vocab = np.random.default_rng(seed), 200
    made = []
    for count in lengths:
        inputs = {"target_tokens": random.integers(0, vocab, count)}
        for name in LOSSES[loss].inputs:
            values = random.standard_normal(count).astype(np.float32)
            inputs[name] = -np.abs(values) - 4 if name == "logprobs" else values
        made.append(Datum(random.integers(0, vocab, count).astype(np.int32), inputs))
    return made


def moved(trainer, steps=2):
    """A run whose adapter changes the model."""
    trainer.create("s:train:0", SHAPE)
    for _ in range(steps):
        trainer.forward("s:train:0", "cross_entropy", rows(), {}, backward=True)
        trainer.step("s:train:0", AdamSettings(learning_rate=1e-2))
    return trainer.run("s:train:0")


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_that_of_its_formula_on_the_log_probabilities(trainer, loss):
    run = moved(trainer)
    data = rows(loss)
    found = run.forward(loss, data, {}, backward=False)
    total = 0.0
    for datum, logprobs in zip(data, found.logprobs, strict=True):
        p, given = logprobs.astype(np.float64), datum.inputs
        if loss == "cross_entropy":
            total += -(given["weights"] * p).sum()
            continue
        ratio, gain = np.exp(p - given["logprobs"]), given["advantages"]
        clipped = np.clip(ratio, 0.8, 1.2)
        total += {
            "importance_sampling": lambda r=ratio, g=gain: -(r * g).sum(),
            "ppo": lambda r=ratio, c=clipped, g=gain: -np.minimum(r * g, c * g).sum(),
            "cispo": lambda c=clipped, p=p, g=gain: -(c * p * g).sum(),
            "dro": lambda p=p, g=gain, q=given: (
                0.025 * np.square(p - q["logprobs"]) - p * g
            ).sum(),
        }[loss]()
    assert found.loss == pytest.approx(total, rel=1e-5)
    assert [len(each) for each in found.logprobs] == [9, 21, 5]


def test_settings_of_a_loss_replace_its_defaults(trainer):
    run, data = moved(trainer), rows("ppo")
    narrow = {"clip_low_threshold": 0.999, "clip_high_threshold": 1.001}
    assert run.forward("ppo", data, narrow, backward=False).loss != pytest.approx(
        run.forward("ppo", data, {}, backward=False).loss
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_a_gradient_is_the_slope_of_the_loss(trainer, loss):
    """Along itself, by differences; CISPO's ratio is held, so its slope is apart."""
    run, data = moved(trainer), rows(loss)
    run.forward(loss, data, {}, backward=True)
    leaves = jax.tree.leaves(run.gradients)
    slope = math.sqrt(sum(float(np.square(g).sum()) for g in leaves))
    direction = jax.tree.map(lambda g: g / slope, run.gradients)
    weights, size = run.state.weights, 5e-4

    def at(sign):
        run.state = dataclasses.replace(
            run.state, weights=jax.tree.map(lambda w, d: w + sign * size * d, weights, direction)
        )
        return run.forward(held, data, {}, backward=False)

    if loss == "cispo":  # the slope of weights times log-probabilities
        held = "cross_entropy"
        base = run.forward("cispo", data, {}, backward=False).logprobs
        data = [
            Datum(
                one.tokens,
                {
                    "target_tokens": one.inputs["target_tokens"],
                    "weights": np.clip(np.exp(p - one.inputs["logprobs"]), 0.8, 1.2)
                    * one.inputs["advantages"],
                },
            )
            for one, p in zip(data, base, strict=True)
        ]
    else:
        held = loss
    measured = (at(1).loss - at(-1).loss) / (2 * size)
    run.state = dataclasses.replace(run.state, weights=weights)
    assert slope == pytest.approx(measured, rel=0.02)


def test_gradients_add_up_over_calls_and_rows(trainer):
    run, data = moved(trainer), rows(lengths=(9, 21, 5, 40, 17))
    run.forward("cross_entropy", data, {}, backward=True)
    together, run.gradients = run.gradients, None
    losses = [run.forward("cross_entropy", [one], {}, backward=True) for one in data]
    for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(run.gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    whole = run.forward("cross_entropy", data, {}, backward=False)
    assert whole.loss == pytest.approx(sum(one.loss for one in losses), rel=1e-5)
    for found, (alone,) in zip(whole.logprobs, (one.logprobs for one in losses), strict=True):
        np.testing.assert_allclose(found, alone, atol=1e-5)


def test_parts_have_rows_of_one_length_and_no_more_tokens_than_fit():
    data = rows(lengths=[3] * 300 + [70] * 70)
    found = batches(data, LOSSES["cross_entropy"])
    assert sorted(index for indices, _ in found for index in indices) == list(range(370))
    for indices, part in found:
        assert part.tokens.size <= 1024
        assert part.tokens.shape[1] >= max(len(data[index].tokens) for index in indices)
        assert part.positions.max() < 70


def test_a_step_is_adamws(trainer):
    trainer.create("s:train:0", SHAPE)
    run, settings = trainer.run("s:train:0"), AdamSettings(0.01, 0.8, 0.9, 1e-8, 0.1, 0.5)
    weights = [np.float64(w) for w in jax.tree.leaves(run.state.weights)]
    first = second = [np.zeros_like(w) for w in weights]
    for count in (1, 2, 3):
        trainer.forward("s:train:0", "cross_entropy", rows(seed=count), {}, backward=True)
        grads = [np.float64(g) for g in jax.tree.leaves(run.gradients)]
        norm = math.sqrt(sum(np.square(g).sum() for g in grads))
        grads = [g * min(1.0, 0.5 / norm) for g in grads]
        first = [0.8 * m + 0.2 * g for m, g in zip(first, grads, strict=True)]
        second = [0.9 * v + 0.1 * g * g for v, g in zip(second, grads, strict=True)]
        for index, (m, v) in enumerate(zip(first, second, strict=True)):
            update = (m / (1 - 0.8**count)) / (np.sqrt(v / (1 - 0.9**count)) + 1e-8)
            weights[index] = weights[index] - 0.01 * (update + 0.1 * weights[index])
        assert trainer.step("s:train:0", settings)["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert run.gradients is None
    for w, wanted in zip(jax.tree.leaves(run.state.weights), weights, strict=True):
        np.testing.assert_allclose(w, wanted, atol=2e-5)


def test_samples_have_the_log_probabilities_that_training_gives_them(trainer):
    run = moved(trainer)
    trainer.publish("s:train:0", "s:sample:0")
    model = trainer.sampler("s:sample:0")
    params = SamplingParams(n=2, max_tokens=12, seed=3, logprobs=0, ignore_eos=True)
    groups = trainer.sample(model, [([5, 6, 7], params), ([9], params)])
    assert [len(group) for group in groups] == [2, 2]
    for one in (one for group in groups for one in group):
        ids = np.array([*one.prompt_tokens, *one.tokens], np.int32)
        datum = Datum(ids[:-1], {"target_tokens": ids[1:], "weights": np.ones(len(ids) - 1)})
        (trained,) = run.forward("cross_entropy", [datum], {}, backward=False).logprobs
        sampled = [each.logprob for each in one.logprobs]
        np.testing.assert_allclose(trained[len(one.prompt_tokens) - 1 :], sampled, atol=1e-5)


def test_a_sampler_stays_as_it_was_while_the_run_goes_on(trainer):
    moved(trainer)
    trainer.publish("s:train:0", "s:sample:0")
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0, ignore_eos=True)

    def answer(name):
        ((one,),) = trainer.sample(trainer.sampler(name), [([5, 6, 7], params)])
        return [each.logprob for each in one.logprobs]

    before = answer("s:sample:0")
    trainer.forward("s:train:0", "cross_entropy", rows(seed=9), {}, backward=True)
    trainer.step("s:train:0", AdamSettings(learning_rate=0.05))
    trainer.publish("s:train:0", "s:sample:1")
    trainer.open_sampler("s:sample:2", None)
    assert answer("s:sample:1") != before
    assert answer("s:sample:2") not in (before, answer("s:sample:1"))
    assert answer("s:sample:0") == before
    for number in range(3, 3 + MOST_SAMPLERS):
        trainer.open_sampler(f"s:sample:{number}", None)
    with pytest.raises(RequestError, match="the newest"):
        trainer.sampler("s:sample:0")


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_a_saved_run_goes_on_as_if_it_had_not_stopped(trainer, has_optimizer):
    run = moved(trainer)
    path = trainer.save("s:train:0", "weights", "step-2")
    assert path == "tinker://s:train:0/weights/step-2"
    trainer.load("s:train:1", path, has_optimizer=has_optimizer)
    again = trainer.run("s:train:1")
    assert again.shape == run.shape
    for name in ("s:train:0", "s:train:1"):
        trainer.forward(name, "cross_entropy", rows(seed=4), {}, backward=True)
        trainer.step(name, AdamSettings())
    same = all(
        np.array_equal(one, other)
        for one, other in zip(
            jax.tree.leaves(run.state.weights), jax.tree.leaves(again.state.weights), strict=True
        )
    )
    assert same == has_optimizer


def test_saved_weights_are_an_adapter_that_every_verb_takes(trainer, tmp_path):
    run = moved(trainer)
    path = trainer.save("s:train:0", "sampler_weights", "out")
    folder = tmp_path / "runs" / "s-train-0" / "sampler_weights" / "out"
    parts = open_adapter(folder, trainer.llm.info).read(trainer.llm.info)
    assert parts.keys() == run.state.weights.keys()
    trainer.open_sampler("s:sample:0", path)
    trainer.publish("s:train:0", "s:sample:1")
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    saved, kept = (
        trainer.sample(trainer.sampler(name), [([5, 6, 7], params)])[0][0].tokens
        for name in ("s:sample:0", "s:sample:1")
    )
    assert saved == kept
    with pytest.raises(RequestError, match="no optimizer's state"):
        trainer.load("s:train:1", path, has_optimizer=True)
    with pytest.raises(RequestError, match="exists"):
        trainer.save("s:train:0", "sampler_weights", "out")
    assert trainer.save("s:train:0", "sampler_weights", "out", overwrites=True) == path


@pytest.mark.parametrize(
    "path",
    [
        "tinker://s:train:0/weights/../x", "tinker://../weights/x", "tinker://s/other/x",
        "/etc/passwd", "tinker://s:train:0/weights/.hidden", "tinker://s/weights/a/b", "",
        "tinker://s/weights/" + "a" * 200,
    ],
)  # fmt: skip
def test_paths_stay_within_the_folder(trainer, path):
    with pytest.raises(RequestError, match="no path of saved weights"):
        trainer.load("s:train:0", path, has_optimizer=False)


def test_damaged_runs_are_rejected(trainer, tmp_path):
    moved(trainer)
    path = trainer.save("s:train:0", "weights", "a")
    folder = tmp_path / "runs" / "s-train-0" / "weights" / "a"
    (folder / "run.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"run\.json"):
        trainer.load("s:train:1", path, has_optimizer=True)
    with pytest.raises(RequestError, match="nothing was saved"):
        trainer.load("s:train:1", path + "b", has_optimizer=True)


def bad_row(**changes):
    (one,) = rows(lengths=(4,))
    tokens = changes.pop("tokens", one.tokens)
    return [Datum(np.asarray(tokens, np.int32), dict(one.inputs) | changes)]


@pytest.mark.parametrize(
    ("loss", "data", "settings", "message"),
    [
        ("gspo", bad_row(), {}, "loss_fn is 'gspo'"),
        ("ppo", bad_row(), {}, "and ppo takes advantages, logprobs, target_tokens"),
        ("ppo", rows("ppo"), {"beta": 1.0}, "no setting 'beta'"),
        ("dro", rows("dro"), {"beta": math.nan}, "beta of dro is nan"),
        ("cross_entropy", [], {}, "data is empty"),
        ("cross_entropy", bad_row(tokens=[]), {}, "has 0 tokens"),
        ("cross_entropy", bad_row(tokens=[1] * 97), {}, "has 97 tokens"),
        ("cross_entropy", bad_row(tokens=[-1, 1, 1, 1]), {}, "no token id"),
        ("cross_entropy", bad_row(target_tokens=np.full(4, 10**9)), {}, "no token id"),
        ("cross_entropy", bad_row(weights=np.ones(3)), {}, r"has the shape \[3\]"),
        ("cross_entropy", bad_row(weights=np.array([1, math.inf, 1, 1])), {}, "NaN or infinity"),
        ("cross_entropy", bad_row(target_tokens=np.ones(4)), {}, "no whole numbers"),
        ("cross_entropy", bad_row(other=np.ones(4)), {}, "has other, target_tokens, weights"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_trained_are_rejected(llm, loss, data, settings, message):
    with pytest.raises(RequestError, match=message):
        check(loss, data, settings, llm)


def test_numbers_that_are_not_finite_change_nothing(trainer):
    run = moved(trainer)
    before = run.state
    data = bad_row(weights=np.full(4, 1e38, np.float32))
    with pytest.raises(RequestError, match="loss is"):
        trainer.forward("s:train:0", "cross_entropy", data * 9, {}, backward=True)
    assert run.gradients is None
    inputs = {"logprobs": np.full(4, -200.0), "advantages": np.ones(4)}
    data = bad_row(**inputs)
    del data[0].inputs["weights"]
    with pytest.raises(RequestError, match="norm is"):  # of a clipped ratio beyond float32
        trainer.forward("s:train:0", "ppo", data, {}, backward=True)
    assert run.gradients is None
    with pytest.raises(RequestError, match="no gradients"):
        trainer.step("s:train:0", AdamSettings())
    assert run.state is before


@pytest.mark.parametrize(
    "values",
    [
        {"learning_rate": -1.0},
        {"learning_rate": 1e300},
        {"beta1": 1.0},
        {"beta1": 0.99999999},
        {"beta2": math.nan},
        {"eps": math.inf},
    ],
)
def test_settings_of_adamw_are_checked(values):
    with pytest.raises(RequestError, match="it must be from 0"):
        AdamSettings(**values)


@pytest.mark.parametrize(
    ("parts", "ends"),
    [
        ({"train_mlp": False, "train_unembed": False}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"train_attn": False, "train_unembed": False}, {"gate_proj", "up_proj", "down_proj"}),
        ({"train_attn": False, "train_mlp": False}, {"lm_head"}),
    ],
)
def test_a_run_trains_the_layers_that_were_asked_for(trainer, parts, ends):
    trainer.create("s:train:0", LoraShape(rank=2, **parts))
    run = trainer.run("s:train:0")
    assert {module.rpartition(".")[2] for module in run.state.weights} == ends
    trainer.forward("s:train:0", "cross_entropy", rows(), {}, backward=True)
    trainer.step("s:train:0", AdamSettings())


def test_a_run_without_layers_is_rejected(trainer):
    shape = LoraShape(rank=2, train_attn=False, train_mlp=False, train_unembed=False)
    with pytest.raises(RequestError, match="leave no layer"):
        Run(trainer.base, shape)
