"""Models over meshes of eight simulated devices: the single device's tokens and logits."""

import itertools
import json

import numpy as np
import pytest

from rooflax.errors import RequestError
from rooflax.models import registry
from rooflax.models.memory import estimate
from rooflax.models.registry import read_config
from rooflax.nn.shard_sizes import config_on, part_sizes
from rooflax.nn.shards import Shards, parse_mesh
from rooflax.nn.storage import Storage
from tests import encoder_cases
from tests.engine.engine.test_families import WRAPPERS
from tests.marks import cases
from tests.sharding import CONFIGS, Worker

pytestmark = [pytest.mark.first, pytest.mark.oldest_jax]

ROWS = 8
"""Of a step: the five prompts' bucket."""
SPLITS = {
    "tensor=4": "llama",
    "data=2": "qwen2",
    "sequence=4": "gpt2",
    "expert=2": "gpt_oss",
    "stage=2": "gpt_oss",
    "tensor=2,data=2,stage=2": "llama",
}
"""The default tests: each split once, and all that fit at once; one family for each."""
STATEFUL = ("lfm2", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    found = Worker(tmp_path_factory.mktemp("sharding"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def ask(worker):
    """What a model says over a mesh; asked once."""
    known = {}

    def get(model, mesh=None, **settings):
        key = json.dumps([str(model), mesh, settings], sort_keys=True)
        if key not in known:
            known[key] = worker.ask(model=str(model), mesh=mesh, **settings)
        return known[key]

    return get


def same(ask, model, mesh, **settings):
    one, many = ask(model, **settings), ask(model, mesh, **settings)
    assert "error" not in many, many
    assert many["tokens"] == one["tokens"]
    np.testing.assert_allclose(many["logits"], one["logits"], rtol=0, atol=1e-5)
    return one, many


def check_bytes(model, mesh, one, many):
    """Each device holds 1/N of what is split N ways, the vocabulary padded, and all of the rest."""
    _, config = read_config(CONFIGS[model])
    shards = parse_mesh(mesh)
    slots = list(config.params())
    config = config_on(config, shards)
    whole, part = config.axis_sizes, part_sizes(config, shards)
    assert whole["vocab"] == 263 and part["vocab"] == -(-263 // shards.tensor)
    wanted = sum(
        np.prod(slot.line.shape(part)) * 4 // (1 if slot.layer is None else shards.stage)
        for slot in slots
    )
    assert many["bytes"] == [wanted] * shards.num_devices
    how = {"storage": Storage(), "kv_dtype": "float32", "rows": 1, "tokens": 16}
    counted = estimate(read_config(CONFIGS[model])[1], **how, shards=shards).weights
    pairs = zip(config.ropes, config.rope_dims, strict=True)
    columns = sum(dim + bool(rope.query_beta) for rope, dim in pairs)
    assert counted == wanted + columns * 4 * config.max_position
    kinds = read_config(CONFIGS[model])[1].attentions
    copies = {max(1, shards.tensor // kind.num_kv_heads) for kind in kinds}
    part = many["cache_bytes"] * shards.tensor * shards.stage / one["cache_bytes"]
    assert part == min(copies) if len(copies) == 1 else min(copies) < part < max(copies)


def check_gathers(many):
    """What is gathered are activations, [rows, tokens, ...] or [rows, vocab], and no weight's."""
    weights: set[tuple[int, ...]] = set()
    for whole, own in (map(tuple, pair) for pair in many["weights"].values()):
        # what a device has already is not what a gather gives
        stacked = {whole, whole[1:], (1, *whole[1:])}  # or one of a stack
        weights |= stacked - {own, own[1:], (1, *own[1:])}
    for shape in many["gathered"]:
        assert shape[0] in (1, ROWS) and tuple(shape) not in weights, shape


@pytest.mark.parametrize(
    "mesh", cases(SPLITS, nightly=["data=2", "stage=2"], every_jax=["tensor=4", "expert=2"])
)
def test_a_split_gives_the_single_devices_tokens(ask, mesh):
    model = SPLITS[mesh]
    one, many = same(ask, model, mesh)
    check_bytes(model, mesh, one, many)
    check_gathers(many)
    exchanged = any(axis in mesh for axis in ("tensor", "data", "sequence"))
    assert bool(many["gathered"]) == exchanged


def test_every_family_is_split():
    """Those with a vision tower are their text models."""
    families = set(registry.families()) - set(WRAPPERS) - encoder_cases.FAMILIES
    assert {raw["model_type"] for raw in CONFIGS.values()} == families


@pytest.mark.parametrize(
    ("model", "mesh"),
    cases(
        itertools.product(STATEFUL, ["tensor=4", "tensor=2,stage=2"]),
        default=[("qwen3_5_text", "tensor=2,stage=2")],
    ),
)
def test_states_are_split_by_their_first_axis_and_not_over_tokens(ask, model, mesh):
    check_bytes(model, mesh, *same(ask, model, mesh))
    for mesh in ("data=2", "tensor=2,sequence=2"):
        assert "layers with state, which rooflax splits over" in ask(model, mesh)["error"]


@pytest.mark.parametrize(
    ("model", "mesh"),
    cases(
        [
            ("gemma4_text", "tensor=4"),
            ("gemma4_text", "expert=2,stage=2"),
            ("gemma4_shared", "tensor=2,data=2"),
        ],
        default=[("gemma4_text", "tensor=4")],
    ),
)
def test_kinds_of_attention_are_split_and_copied_each_by_its_own_heads(ask, model, mesh):
    one, many = same(ask, model, mesh)
    check_bytes(model, mesh, one, many)
    check_gathers(many)


def test_layers_that_do_not_repeat_have_no_stages(ask):
    assert "4 layers do not divide over 2 devices" in ask("gemma4_shared", "stage=2")["error"]


@pytest.mark.parametrize(
    ("model", "mesh"),
    cases(
        [("deepseek_v3", "tensor=4"), ("deepseek_v2", "tensor=2,expert=2,data=2")],
        default=[("deepseek_v3", "tensor=4")],
    ),
)
def test_heads_of_latent_attention_are_split_and_its_cache_is_copied(ask, model, mesh):
    one, many = same(ask, model, mesh)
    check_bytes(model, mesh, one, many)
    check_gathers(many)
    assert many["cache_bytes"] == one["cache_bytes"]
    found = ask(model, "tensor=3")["error"]
    assert "8 query_heads do not divide over 3 devices (8 = 3 x 2 + 2)" in found


@pytest.mark.parametrize("mesh", ["stage=2,tensor=2"])
def test_stages_of_scanned_layers(ask, mesh):
    same(ask, "gpt_oss", mesh, options={"layers": "scan"})


@pytest.mark.parametrize(
    ("model", "mesh", "format"),
    [
        pytest.param("llama", "tensor=4", "w4a16", marks=pytest.mark.nightly),
        ("gpt_oss", "tensor=2,expert=2,stage=2", "mxfp4-a16"),
        pytest.param("qwen2", "tensor=2", "w8a16-g32", marks=pytest.mark.nightly),
        pytest.param("gpt_oss", "expert=4,tensor=2", "w4a16+head=w8a16", marks=pytest.mark.nightly),
        pytest.param("llama", "stage=2,data=2", "int8", marks=pytest.mark.nightly),
    ],
)
def test_groups_of_quantised_weights_are_the_same_in_every_part(ask, model, mesh, format):
    one, many = same(ask, model, mesh, settings={"quantize": format})
    check_gathers(many)
    assert mesh == "stage=2,data=2" or one["bytes"][0] > 1.5 * many["bytes"][0]


@pytest.mark.every_jax
def test_a_split_that_cuts_a_group_is_rejected_with_the_arithmetic(ask):
    found = ask("gpt_oss", "tensor=4", settings={"quantize": "int4"})
    assert "mlp.down has 16 inputs on each device" in found["error"]
    assert "(16 = 0 x 32 + 16)" in found["error"]


@pytest.mark.every_jax
def test_what_does_not_divide_is_rejected_with_the_arithmetic(ask):
    for model, mesh, said in (
        ("llama", "tensor=3", "4 kv_heads do not divide over 3 devices (4 = 3 x 1 + 1)"),
        ("gpt_oss", "expert=3", "4 experts do not divide over 3 devices (4 = 3 x 1 + 1)"),
        ("gpt_oss", "stage=4", "2 x 2 layers do not divide over 4 devices (2 = 4 x 0 + 2)"),
        ("llama", "stage=3", "4 layers do not divide over 3 devices (4 = 3 x 1 + 1)"),
        ("llama", "expert=2", "expert=2 and this model has no experts"),
        ("llama", "tensor=4,data=4", "needs 16 = 4 x 4 devices, here: 8"),
    ):
        assert said in ask(model, mesh)["error"], mesh


def test_a_norm_of_all_heads_is_not_split_further_than_its_heads():
    _, config = read_config(CONFIGS["olmo2"] | {"num_key_value_heads": 2})
    assert config_on(config, Shards(tensor=2)) == config
    with pytest.raises(RequestError, match="tensor=4 and the model 2 K/V heads"):
        config_on(config, Shards(tensor=4))
