"""Tuning: the fastest sizes win, in the program that asks, and are what the next program gets."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import block_sizes as tuning
from benchmarks.block_sizes import Program, Work, model_programs, one_period, tune, tune_model
from rooflax.errors import RequestError
from rooflax.loading.model_info import model_info
from rooflax.nn.execution import Precision
from rooflax.ops import accelerator, block_sizes, native, tpu

pytestmark = pytest.mark.oldest_jax

SECONDS = {(1,): 0.004, (2,): 0.001, (3,): 0.008}
"""What a fake kernel takes, by the size of its blocks."""
CLOCK = [0.0]
"""It goes on when a fake kernel runs, and a little from run to run."""


def kernel(x, name="fake", seconds=SECONDS):
    """Adds the size of its blocks, after as long as that takes."""
    sizes = block_sizes.of(name, (len(x),), (1,), list(seconds))

    def wait(x):
        CLOCK[0] += seconds[sizes]
        return x + np.float32(sizes[0])

    return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def program(function, name="program"):
    return Program(name, function, jnp.zeros(4))


@pytest.fixture
def fake_time(monkeypatch):
    def timed(function, *args):
        before = CLOCK[0]
        jax.block_until_ready(function(*args))
        return (CLOCK[0] - before) * (1 + 0.1 * (CLOCK[0] * 1e3 % 3))

    monkeypatch.setattr(tuning, "timed", timed)


def test_the_fastest_wins_and_is_what_the_next_program_gets(fake_time, monkeypatch):
    said = []
    found = tune([program(kernel)], 6, said.append)
    assert [f.best for f in found] == [(2,)]
    (finding,) = found
    assert 3 < finding.ratio.ratio < 5 and finding.ratio.low > 1
    assert list(finding.seconds) == [(1,), (2,), (3,)]
    assert finding.seconds[(2,)] < finding.seconds[(1,)] < finding.seconds[(3,)]
    assert said == ["program, fake: 2 sizes instead of [1]"]
    assert np.all(jax.jit(kernel)(jnp.zeros(4)) == 1)
    monkeypatch.setattr(block_sizes, "MEASURED", {finding.question.key: finding.best})
    assert np.all(jax.jit(lambda x: kernel(x))(jnp.zeros(4)) == 2)
    assert np.all(jax.jit(lambda x: kernel(x))(jnp.zeros(5)) == 1)


def test_the_rule_stays_where_nothing_beats_it(fake_time, monkeypatch):
    monkeypatch.setattr(block_sizes, "MEASURED", {("fake", (4,)): (2,)})
    slower = {(1,): 0.001, (2,): 0.004, (3,): 0.002}
    found = tune([program(lambda x: kernel(x, seconds=slower))], 5)
    assert [(f.best, f.ratio) for f in found] == [((1,), None)]


def test_each_question_is_measured_once_with_the_answers_so_far(fake_time):
    seen = []

    def both(x):
        first, second = (kernel(x, name) for name in ("first", "second"))
        seen.append(
            tuple(block_sizes.of(n, (4,), (1,), list(SECONDS)) for n in ("first", "second"))
        )
        return (first + second).at[0].set(0)

    found = tune([program(both, "one"), program(both, "two")], 5)
    assert [(f.program, f.question.kernel, f.best) for f in found] == [
        ("one", "first", (2,)),
        ("one", "second", (2,)),
    ]
    rule, win, lose = (1,), (2,), (3,)
    of_first = [(sizes, rule) for sizes in (rule, win, lose)]
    of_second = [(win, sizes) for sizes in (rule, win, lose)]
    assert seen == [(rule, rule), *of_first, *of_second, (rule, rule)]


def test_sizes_that_do_not_compile_are_named(fake_time, monkeypatch):
    lower = Program.lower

    class Rejected:
        def compile(self):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of vmem")

    def sometimes(self):
        (size,) = block_sizes.of("fake", (4,), (1,), list(SECONDS))
        return Rejected() if size == rejected else lower(self)

    monkeypatch.setattr(Program, "lower", sometimes)
    rejected = 3
    (finding,) = tune([program(kernel)], 5)
    assert (finding.rejected, finding.best) == (((3,),), (2,))
    rejected = 1
    with pytest.raises(jax.errors.JaxRuntimeError):
        tune([program(kernel)], 5)


def test_what_makes_no_sense_is_rejected(monkeypatch):
    with pytest.raises(RequestError, match="trials is 4; telling sizes apart needs at least 5"):
        Work(trials=4)
    with pytest.raises(RequestError, match="no block sizes to tune here.*JAX runs on cpu"):
        tune_model(model_info("preset:gpt2-tiny"), Work())
    monkeypatch.setattr(accelerator, "missing", lambda: None)
    with pytest.raises(RequestError, match="prompt_tokens is 2000; .* holds 1024"):
        tune_model(model_info("preset:gpt2-tiny"), Work(prompt_tokens=2000))
    monkeypatch.setattr(tuning, "model_programs", lambda *_: [])
    with pytest.raises(RequestError, match="gpt2-tiny ask for no block sizes here"):
        tune_model(model_info("preset:gpt2-tiny"), Work())


@pytest.mark.parametrize("name", ["gpt2-tiny", "qwen2.5-tiny", "gpt-oss-tiny"])
def test_one_period_has_a_layer_of_each_kind(name):
    whole = model_info(f"preset:{name}").config
    cut = one_period(whole)
    assert cut.num_layers == whole.groups.period < whole.num_layers
    assert cut.groups.windows == whole.groups.windows
    assert replace(whole, layers=cut.layers) == cut
    assert set(cut.layers) == set(whole.layers)


@pytest.fixture
def on_tpu(monkeypatch):
    monkeypatch.setattr(accelerator, "platform", lambda: "tpu")
    monkeypatch.setattr(native, "status", lambda: native.Status(False, "this is a TPU"))
    monkeypatch.setattr(tpu, "interpreted", lambda: True)


def test_a_models_programs_ask_for_its_shapes(on_tpu):
    info = model_info("preset:gpt-oss-tiny")
    precision = Precision(kv_dtype="float32", quantize="w8a16")
    programs = model_programs(info, Work(3, 40, precision=precision))
    asked = {p.name: [q.key for q in tuning._questions(p)] for p in programs}
    attention, rows = (2, 2, 128, 128, 4, 0), [(1, 16, 128, 256, "int8"), (1, 64, 128, 256, "int8")]
    assert ("attention.tpu", (1, *attention)) in asked["decode"]
    assert ("attention.tpu", (64, *attention)) in asked["prefill"]
    for (name, questions), products in zip(asked.items(), rows, strict=True):
        assert ("linear.tpu", products) in questions, name
        experts = [
            shape for kernel, shape in questions if kernel == "linear.tpu" and shape[1] == 32
        ]
        assert experts, name
