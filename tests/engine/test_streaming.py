"""Weights beyond a budget are streamed: the resident model's tokens, in little memory."""

import threading
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from rooflax import LLM, ExecutionOptions, SamplingParams, save
from rooflax.engine.engine import Engine
from rooflax.engine.offloaded_functions import step_functions
from rooflax.errors import CheckpointError, RequestError
from rooflax.loading.load import load_plan
from rooflax.loading.plan import PLANNED, make_plan
from rooflax.loading.save import save_model
from rooflax.models.initialize import random_weights
from rooflax.models.offloading import LayerReader, plan_offloading
from rooflax.models.registry import read_config
from rooflax.models.steps import new_cache
from rooflax.nn.engine_config import EngineConfig
from rooflax.nn.execution import parse_bytes
from tests import gguf_cases, goldens
from tests.marks import cases
from tests.sharding import CONFIGS, write_checkpoint

pytestmark = pytest.mark.oldest_jax

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
PROMPTS = [np.random.RandomState(n).randint(0, 263, n).tolist() for n in (5, 16, 17, 33, 9)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A family's tiny checkpoint of four layers; written once."""
    root, made = tmp_path_factory.mktemp("streaming"), {}

    def get(name):
        if name not in made:
            made[name] = write_checkpoint(root, name)
        return made[name]

    return get


def layers_of(where, **how):
    """What an endless budget would hold."""
    asked = {name: value for name, value in how.items() if name in PLANNED}
    return make_plan(where, weights_budget=1 << 40, **asked).offloading


def budget_of(where, **how):
    """Room for one layer that stays and two on their way."""
    plan = layers_of(where, **how)
    return plan.fixed_bytes + 3 * max(plan.layer_bytes)


def tokens(llm, params=GREEDY):
    return [c.tokens for c in llm.generate(PROMPTS, params)]


def pair(where, **how):
    """The resident model, and the same streamed."""
    whole = LLM(where, **how)
    streamed = LLM(where, weights_budget=budget_of(where, **how), **how)
    assert streamed.offload_plan is not None
    layers = streamed.model.config.num_layers
    assert streamed.offload_plan.offloaded == tuple(range(1, layers))
    return whole, streamed


def same(whole, streamed):
    assert tokens(streamed) == tokens(whole)
    np.testing.assert_array_equal(streamed.logits(PROMPTS[2]), whole.logits(PROMPTS[2]))
    np.testing.assert_array_equal(streamed.score([PROMPTS[3]])[0], whole.score([PROMPTS[3]])[0])
    counts = streamed.model.counts
    assert counts.num_bytes == counts.num_steps * streamed.offload_plan.bytes_per_step > 0


@pytest.mark.parametrize(
    "name",
    cases(
        CONFIGS,
        nightly=["gpt2", "gpt_oss", "qwen2", "qwen3", *goldens.beyond_foundation(CONFIGS)],
        every_jax=["llama"],
    ),
)
def test_every_family_says_the_same(folder, name):
    same(*pair(folder(name), dtype="float32"))


def test_a_packed_folder_is_streamed_as_it_is(folder, tmp_path):
    packed = LLM(folder("llama"), quantize="int4")
    save(packed.model, tmp_path / "m", dtype="float32", files_from=folder("llama"))
    same(*pair(tmp_path / "m"))


@pytest.mark.parametrize(("name", "kind"), [("llama3", "q8_0"), ("gpt_oss_mxfp4", "bf16")])
def test_gguf_and_mxfp4_are_streamed(name, kind):
    """Of files with two layers only, so both are."""
    whole = LLM(gguf_cases.gguf(name, kind))
    plan = make_plan(whole.info, weights_budget=1 << 40)
    model = load_plan(replace(plan, offloading=replace(plan.offloading, offloaded=(0, 1))))
    run = step_functions(model, ExecutionOptions(decode_steps=1), None, 1).logits
    ids = np.array([PROMPTS[2]], np.int32)
    found, _ = run(model, (None, ()), ids, np.array([ids.size], np.int32))
    far = np.abs(found[0] - whole.logits(PROMPTS[2])).max(axis=1)
    assert np.median(far) <= 1e-5
    assert far.max() <= 1e-3  # an activation that lies between two steps may go to either


def test_a_chunk_of_a_prompt_reads_each_layer_once(folder):
    _, streamed = pair(folder("qwen2"))
    (sample,) = streamed.processor.samples(
        0, PROMPTS[3], SamplingParams(temperature=0.0, max_tokens=4)
    )
    engine = Engine(
        streamed.model,
        EngineConfig(
            options=streamed.options,
            max_num_seqs=2,
            max_model_len=64,
            prefill_chunk=16,
            prefix_caching=False,
        ),
    )
    engine.warm_up([sample.sequence])
    assert streamed.model.counts.num_steps == 0  # padding reads nothing but what it compiles
    engine.add([sample.sequence])
    while engine.has_unfinished:
        engine.step()
    assert len(PROMPTS[3]) == 33
    assert streamed.model.counts.num_steps == 3 + 3  # chunks, and tokens after the first


def test_the_plan_is_the_budgets_arithmetic():
    layers = [10] * 12
    assert plan_offloading(130, 10, layers, "m").offloaded == ()
    half = plan_offloading(70, 10, layers, "m")
    assert (half.num_resident, half.bytes_per_step, half.memory_bytes) == (4, 80, 70)
    assert half.offloaded == (1, 2, 4, 5, 7, 8, 10, 11)  # spread, so that reading never waits
    least = plan_offloading(30, 10, layers, "m")
    assert (least.num_resident, least.memory_bytes) == (0, 30)
    for budget in range(30, 130):
        plan = plan_offloading(budget, 10, layers, "m")
        assert budget - 10 < plan.memory_bytes <= budget
    with pytest.raises(RequestError, match=r"m needs .* \+ 2 x .* = .* and the budget is"):
        plan_offloading(29, 10, layers, "m")


def test_the_estimates_weights_are_the_plans(folder):
    plan = layers_of(folder("gpt_oss"), quantize="int8")
    need = make_plan(folder("gpt_oss"), quantize="int8").memory
    assert plan.fixed_bytes + sum(plan.layer_bytes) == need.weights == plan.memory_bytes


@pytest.mark.every_jax
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"mesh": "tensor=2"}, "drop the mesh"),
        ({"options": ExecutionOptions(jit=False)}, "leave jit on"),
        ({"options": ExecutionOptions(layers="scan")}, 'set layers to "unrolled"'),
        ({"options": ExecutionOptions(decode_steps=4)}, "leave decode_steps out"),
        (
            {"weights_budget": 1000},
            r"\+ 2 x 0.3 MiB for layers on their way = .* budget is 1,000 bytes",
        ),
        ({"weights_budget": "half"}, "weights_budget is 'half'; it must be a size such as 8GB"),
        ({"weights_budget": True}, "must be a size"),
    ],
)
def test_what_streaming_cannot_do_is_rejected(folder, how, said):
    with pytest.raises(RequestError, match=said):
        LLM(folder("llama"), **({"weights_budget": "1MB"} | how))


def test_random_weights_have_no_file_to_stream_from():
    with pytest.raises(RequestError, match="no file to read them from"):
        LLM("preset:gpt2-tiny", weights_budget="1GB")


def test_what_fits_is_not_streamed(folder):
    llm = LLM(folder("llama"), weights_budget="1GB")
    assert (llm.offload_plan, llm.options.decode_steps) == (None, None)


def test_a_streamed_model_is_not_saved_nor_run_by_hand(folder, tmp_path):
    _, streamed = pair(folder("llama"))
    with pytest.raises(RequestError, match="3 of 4 layers are offloaded"):
        save(streamed.model, tmp_path / "m")
    assert not (tmp_path / "m").exists()
    with pytest.raises(RequestError, match="without a weights budget"):
        new_cache(streamed.model)


def test_weights_that_are_not_finite_are_found_in_streamed_layers(tmp_path):
    where = write_checkpoint(tmp_path, "llama")
    budget = budget_of(where)
    name, config = read_config(CONFIGS["llama"])
    weights = random_weights(name, config)
    weights["layers"][1]["mlp.down"] = weights["layers"][1]["mlp.down"].at[0, 0].set(jnp.nan)
    save_model(where, name, config, weights, dtype="float32")
    goldens.write_tokenizer(where)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj.* NaN"):
        LLM(where, weights_budget=budget, check=True)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("8GB", 8 * 10**9), ("512MiB", 1 << 29), ("1.5g", 1_500_000_000), ("77", 77), (12, 12)],
)
def test_sizes_are_numbers_with_units(text, wanted):
    assert parse_bytes(text) == wanted


@pytest.mark.every_jax
@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "1e9", "8 XB", 1.5, None, [1]])
def test_what_is_no_size_is_rejected(text):
    with pytest.raises(RequestError, match="must be a size"):
        parse_bytes(text)


class Reads:
    """Layers that say where and when they were read; the third one fails once, if asked to."""

    def __init__(self):
        self.order, self.places, self.fails = [], set(), False

    def __call__(self, index, place):
        self.order.append(index)
        assert place not in self.places  # nobody else has it
        self.places.add(place)
        if self.fails and index == 2:
            self.fails = False
            self.places.remove(place)
            raise OSError("the disk is gone")
        return {"w": Leaf(index, lambda: self.places.remove(place))}


class Leaf:
    def __init__(self, index, on_delete):
        self.index, self.delete = index, on_delete


def settled(stream):
    for _, _, coming in stream._coming:
        coming.exception()


def test_a_stream_reads_ahead_in_a_circle_and_holds_two_layers():
    reads = Reads()
    stream = LayerReader(reads, (1, 2, 4), ("a", "b"))
    for index in (1, 2, 4, 1, 2):
        assert stream.take(index)["w"].index == index
        settled(stream)
        assert len(reads.places) <= 2
        stream.give_back()
    settled(stream)
    assert reads.order == [1, 2, 4, 1, 2, 4, 1]
    assert stream.take(1)["w"].index == 1  # out of order: it begins there
    assert stream.take(2)["w"].index == 2


def test_a_stream_goes_on_after_a_failure():
    reads = Reads()
    stream = LayerReader(reads, (1, 2, 4), ("a", "b"))
    reads.fails = True
    stream.take(1)
    with pytest.raises(OSError, match="the disk is gone"):
        stream.take(2)
    for index in (1, 2, 4, 1):
        assert stream.take(index)["w"].index == index
    assert threading.active_count() < 50
