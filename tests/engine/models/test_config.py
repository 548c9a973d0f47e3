"""Reading config.json: nothing is silently ignored, and every field of a Config counts."""

import dataclasses
import itertools
import json
import math

import jax
import numpy as np
import pytest

from rooflax.errors import CheckpointError, RequestError, RooflaxError, UnsupportedModelError
from rooflax.loading.json_files import read_config_json
from rooflax.loading.model_info import model_info
from rooflax.models.config_reader import ConfigReader
from rooflax.models.initialize import random_weights
from rooflax.models.model import build, resolve_max_model_len
from rooflax.models.presets import PRESETS, preset_config
from rooflax.models.registry import family, read_config
from rooflax.nn.batch import Batch
from rooflax.nn.latent import LatentAttention
from rooflax.nn.rope import RopeScaling, query_scale, rope_arrays
from tests import goldens
from tests.marks import cases

pytestmark = pytest.mark.oldest_jax

FAMILIES = goldens.by_family(
    qwen2="qwen2_window", qwen3="qwen3_window", smollm3="smollm3_window", gpt_oss="gpt_oss_short",
    seed_oss="seed_oss_bias", mixtral="mixtral_window", glm4_moe="glm4_moe_plain",
    ernie4_5="ernie4_5_bias", gemma4_text="gemma4_text_moe", deepseek_v2="deepseek_v2_groups",
    lfm2="lfm2_bias",
)  # fmt: skip

KINDS = ("linear", "llama3", "yarn", "longrope", "proportional")
YARN = RopeScaling("yarn", 4.0, 16)
LLAMA3 = RopeScaling("llama3", 4.0, 16)
ORIGINAL = "original_max_position_embeddings"
OTHER = {
    "activation": "relu",
    "window": 3,
    "eps": 0.5,
    "num_heads": 12,
    "num_kv_heads": 1,
    "alpha": 0.7,
    "limit": 0.05,
    "experts_per_token": 1,
    "qk_norm": 0.5,
    "key": "other",
    "logit_cap": 2.0,
    "score_cap": 0.3,
    "scale": 0.05,
    "groups": 2,
    "embed_scale": 5.0,
}
"""A value that differs from every tiny config's own; other numbers grow by one, flags flip."""


def fields_of(value, path=()):
    """The path of every field of a part, and of the parts in it."""
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if field.name in ("layers", "names", "ropes", "rope_dims"):
            continue
        if field.name in ("per_layer", "beside", "embed_norm") and inner is None:
            continue
        if dataclasses.is_dataclass(inner) and field.name != "rope":
            yield from fields_of(inner, (*path, field.name))
        else:
            yield (*path, field.name)


def changed(part, path):
    """The part with another value at a path."""
    name, *rest = path
    value = getattr(part, name)
    if rest:
        return dataclasses.replace(part, **{name: changed(value, rest)})
    if name in OTHER:
        other = OTHER[name]
    elif isinstance(value, bool):
        other = not value
    else:
        other = value + (6 if name == "hidden_size" else 1)
    assert other != value
    return dataclasses.replace(part, **{name: other})


SHARES = ("mlp", "renormalise"), ("mlp", "scale")


def is_without_meaning(config, layer, path):
    """Whether a field of a layer says nothing of this model."""
    return (
        path[-1] == "rope"  # changed below
        or (path[-1] == "interleaved" and not config.ropes)
        or (path[-1] == "num_kv_heads" and isinstance(layer.attention, LatentAttention))  # a mesh's
        or (path[-1] == "mscale" and not layer.attention.rope.scaling)
        or (path[-1] in ("groups", "chosen_groups") and config.moe.groups == 1)  # both must differ
        or (path[-1] == "norm_after_rope" and layer.attention.flat_norm)
        or (path[-1] == "norm_after_rope" and not (config.ropes and layer.attention.qk_norm))
        or (path[-1] == "shared_gated" and not (config.moe and config.moe.shared))
        or (path in SHARES and config.moe and config.moe.beside)  # a norm follows
        or (path[-1] == "key" and len(config.attentions) > 1)  # in which they must differ
        or (path == ("parallel",) and (config.moe or not layer.attention.wiring.before))
        or (path == ("parallel",) and len({type(x.attention) for x in config.layers}) > 1)
        or (path[:2] == ("mlp", "norm") and layer.parallel)
        or (path[-1] == "stacked" and any("mlp.gate_up" in key for key, _ in config.names.stored))
    )


def variations(config):
    """The config with each of its fields changed; those of a layer in every layer."""
    for path in fields_of(config):
        if path == ("first_position",) and not config.learned_positions:
            continue
        if path != ("has_head",) or not config.tied_embeddings:
            yield path, changed(config, path)
    firsts = {type(layer.attention): layer for layer in reversed(config.layers)}
    for kind, first in firsts.items():  # of the attention of other layers, each kind by itself
        for path in fields_of(first):
            own = path[0] == "attention"
            if is_without_meaning(config, first, path) or not (own or first is config.layers[0]):
                continue
            layers = tuple(
                layer if own and type(layer.attention) is not kind else changed(layer, path)
                for layer in config.layers
            )
            yield path, dataclasses.replace(config, layers=layers)
    for rope in config.ropes:
        same = dataclasses.replace
        others = same(rope, theta=77.0), same(rope, scaling=YARN), None
        for other in others[: 2 if isinstance(config.attention, LatentAttention) else 3]:
            layers = tuple(
                same(layer, attention=same(layer.attention, rope=other))
                if layer.attention.rope
                else layer
                for layer in config.layers
            )
            yield ("rope", str(other)), dataclasses.replace(config, layers=layers, ropes=())


def shapes_of(config):
    sizes, table = config.axis_sizes, config.table
    return {key: (w.shape(sizes), w.hf, w.layout) for key, w in table.items()}


def noisy(weights):
    """Larger than their initialisation, so that every part of the model has a say."""
    state = np.random.RandomState(5)

    def noise(array):
        return array + 0.3 * state.standard_normal(array.shape).astype(np.float32)

    return jax.tree.map(lambda a: noise(np.asarray(a)), weights)


@pytest.fixture(scope="module")
def logits_of():
    def run(model, tokens):
        hidden, _ = model.forward(Batch.dense(tokens), None)
        return model.logits(hidden)

    jitted = jax.jit(run)
    return lambda model: np.asarray(jitted(model, goldens.tokens()[:, :19]))


@pytest.mark.parametrize(
    "name",
    cases(
        FAMILIES,
        nightly=["gpt_oss", "llama", "qwen2", "smollm3", *goldens.beyond_foundation(FAMILIES)],
    ),
)
def test_changing_any_field_changes_weights_logits_or_length(name, logits_of):
    _, config = read_config(goldens.VARIANTS[FAMILIES[name]])
    if name in goldens.FOUNDATION:  # where no layer reads another: a program for each variation
        kinds = tuple(x for i, x in enumerate(config.layers) if x not in config.layers[:i])
        config = dataclasses.replace(config, layers=kinds)
    weights = noisy(random_weights(name, config))
    before = logits_of(build(name, config, weights, None))
    for path, other in variations(config):
        if shapes_of(other) != shapes_of(config):
            continue
        if resolve_max_model_len(other, None) != resolve_max_model_len(config, None):
            continue
        after = logits_of(build(name, other, weights, None))
        difference = np.abs(after - before).max()
        assert difference > 1e-4, f"{name}: {'.'.join(path)} changes nothing"


@pytest.mark.parametrize(
    "field",
    [f for f in dataclasses.fields(RopeScaling) if f.name != "kind"],
    ids=lambda f: f.name,
)
def test_changing_any_field_of_rope_scaling_changes_the_table(field):

    differs = False
    for kind, original in itertools.product(KINDS, (256, 31)):
        plain = RopeScaling(
            kind, 8.0, original, low_freq_factor=1.5, beta_fast=20.5, beta_slow=1.5,
            attention_factor=1.25, short_factor=(1.5,) * 10, long_factor=(2.5,) * 10, share=0.25,
        )  # fmt: skip
        value = getattr(plain, field.name)
        doubled = tuple(2 * x for x in value) if isinstance(value, tuple) else 2 * value
        value = not value if isinstance(value, bool) else doubled
        other = dataclasses.replace(plain, **{field.name: value})
        tables = [np.stack(rope_arrays(20, 32, 500.0, s)) for s in (plain, other)]
        differs |= bool(np.abs(tables[0] - tables[1]).max() > 1e-4)
    assert differs


@pytest.mark.parametrize("name", FAMILIES)
def test_config_survives_its_own_config_json(name):
    variants = [v for v, raw in goldens.VARIANTS.items() if raw["model_type"] == name]
    for variant in variants:
        _, config = read_config(goldens.VARIANTS[variant])
        written = json.loads(json.dumps(family(name).config_to_hf(config)))
        assert read_config(written) == (name, config), variant


def test_of_two_epsilons_the_familys_own_counts():
    """As transformers has it; the other one alone is a key that nobody reads."""
    raw = goldens.VARIANTS["lfm2"] | {"norm_eps": 1e-3}
    _, config = read_config(raw | {"rms_norm_eps": 0.5})
    assert {layer.attention.norm.eps for layer in config.layers} == {1e-3}
    with pytest.raises(UnsupportedModelError, match="'rms_norm_eps'"):
        read_config({k: v for k, v in raw.items() if k != "norm_eps"} | {"rms_norm_eps": 0.5})


def test_a_window_of_one_token_both_ways_is_written_as_transformers_writes_it():
    """As 0, which only this attention takes."""
    raw = goldens.VARIANTS["gemma3_text"] | {"use_bidirectional_attention": True}
    _, config = read_config(raw | {"sliding_window": 1})
    assert {layer.attention.window for layer in config.layers} == {1, None}
    written = family("gemma3_text").config_to_hf(config)
    assert written["sliding_window"] == 0
    assert read_config(written)[1] == config
    with pytest.raises(CheckpointError, match="sliding_window = 0"):
        read_config(written | {"use_bidirectional_attention": False})


def test_layers_without_rope_stay_without_when_none_has_a_window():
    """EXAONE 4, whose layers without a window have RoPE only if there is no size of one."""
    raw = goldens.VARIANTS["exaone4"] | {"layer_types": ["full_attention"] * 4}
    _, config = read_config(raw)
    assert not config.ropes
    assert read_config(family("exaone4").config_to_hf(config))[1] == config
    assert read_config(raw | {"sliding_window": None})[1].ropes


@pytest.mark.parametrize("name", FAMILIES)
def test_an_unknown_key_is_an_error_that_names_it_unless_the_caller_waives_it(name):
    raw = goldens.VARIANTS[FAMILIES[name]] | {"new_attention_trick": 2}
    with pytest.raises(UnsupportedModelError, match="'new_attention_trick'.*ignore_config_keys"):
        read_config(raw)
    expected = read_config(goldens.VARIANTS[FAMILIES[name]])
    assert read_config(raw, ignore=["new_attention_trick"]) == expected
    assert read_config(raw, ignore=["new_*"]) == expected
    with pytest.raises(RequestError, match="names 'new_trick', which config.json does not have"):
        read_config(raw, ignore=["new_attention_trick", "new_trick"])
    nested = {**raw, "text_part": {"new_trick": 1}}
    assert read_config(nested, ignore=["new_trick", "new_attention_trick", "text_part"]) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_benign_keys_are_waived_by_name_or_pattern(name):
    benign = {
        "_name_or_path": "x", "_anything": [1], "task_specific_params": {"a": 1},
        "summary_type": "cls_index", "summary_use_proj": True, "unsloth_fixed": True,
        "transformers.js_config": {"dtype": "q4"}, "torch_dtype": "bfloat16", "dtype": "bfloat16",
        "transformers_version": "4.40.0", "use_cache": True, "bos_token_id": 1,
        "eos_token_id": [2, 3], "pad_token_id": None, "initializer_range": 0.02,
        "attention_dropout": 0.0, "hidden_dropout": 0.1, "resid_pdrop": 0.1,
        "auto_map": {"AutoModel": "modeling.Evil"}, "pretraining_tp": 1, "id2label": {"0": "A"},
        "pruned_heads": {}, "cross_attention_hidden_size": None,
        "gradient_checkpointing": False, "router_aux_loss_coef": 0.9, "n_ctx": 1024,
    }  # fmt: skip
    raw = goldens.VARIANTS[FAMILIES[name]]
    assert read_config(raw | benign) == read_config(raw)


@pytest.mark.parametrize(
    ("variant", "change"),
    [
        ("gpt2", {"scale_attn_weights": False}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt2", {"add_cross_attention": True}),
        ("gpt2", {"activation_function": "mish"}),
        ("llama_gqa", {"hidden_act": "mish"}),
        ("llama_gqa", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "alpha": 1}}),
        ("llama_gqa", {"partial_rotary_factor": 0.5}),
        ("llama_gqa", {"pruned_heads": {"1": [0]}}),
        ("llama_gqa", {"cross_attention_hidden_size": 0}),
        ("llama_gqa", {"swiglu_limit_comment": "seven"}),
        ("qwen2", {"layer_types": ["chunked_attention"] * 4}),
        ("gpt_oss", {"hidden_act": "relu"}),
        ("glm4", {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}),
        ("glm4_moe", {"n_group": 2}),
        ("deepseek_v2", {"norm_topk_prob": True}),
        ("deepseek_v2", {"topk_method": "noaux_tc"}),
        ("deepseek_v2", {"scoring_func": "sigmoid"}),
        ("deepseek_v2", {"mlp_bias": True}),
        ("deepseek_v3", {"topk_method": "group_limited_greedy"}),
        ("deepseek_v3", {"moe_layer_freq": 2}),
        ("deepseek_v3", {"num_key_value_heads": 2}),
        ("deepseek_v3", {"head_dim": 22}),
        ("cohere2", {"use_qk_norm": True}),
        ("cohere2", {"head_dim": 12}),
        ("granitemoehybrid", {"num_local_experts": 4}),
        ("granitemoehybrid", {"layer_types": ["attention", "mamba", "attention"]}),
        ("hunyuan_v1_dense", {"use_cla": True}),
        ("phi3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ],
)
def test_what_would_change_the_numbers_and_is_not_computed_is_rejected(variant, change):
    with pytest.raises(
        UnsupportedModelError, match=next(iter(change)).replace("rope_scaling", "RoPE")
    ):
        read_config(goldens.VARIANTS[variant] | change)


def test_mlxs_older_key_says_what_it_is():
    raw = goldens.VARIANTS["llama_gqa"]
    with pytest.raises(UnsupportedModelError, match="quantised by 'mlx'.*unquantised checkpoint"):
        read_config(raw | {"quantization": "mlx"})
    for value in (None, {"group_size": 64, "bits": 4}):
        assert read_config(raw | {"quantization": value}) == read_config(raw)


@pytest.mark.parametrize("method", ["hqq", "quip", "aqlm", None])
def test_quantised_checkpoints_of_other_kinds_are_rejected_by_name(method):
    raw = goldens.VARIANTS["llama_gqa"] | {"quantization_config": {"quant_method": method}}
    with pytest.raises(UnsupportedModelError, match=str(method)):
        read_config(raw)
    with pytest.raises(UnsupportedModelError, match="'gptq'"):
        read_config(raw | {"quantization_config": "gptq"})


def test_rope_stated_twice_must_agree():
    raw = goldens.VARIANTS["llama3_tied"]
    scaling = {k: v for k, v in raw["rope_parameters"].items() if k != "rope_theta"}
    assert read_config(raw | {"rope_scaling": scaling, "rope_theta": 500.0}) == read_config(raw)
    with pytest.raises(CheckpointError, match="'factor'"):
        read_config(raw | {"rope_scaling": scaling | {"factor": 9.0}})
    assert read_config(raw | {"rope_theta": 10.0}) == read_config(raw)  # as transformers takes it
    with pytest.raises(CheckpointError, match="rope_scaling.*object"):
        read_config(raw | {"rope_scaling": 4.0})


ABSURD = (0, -1, True, 2.0, 2**31, 10**30, "12", [], float("nan"), None)
SIZES = {
    "gpt2": ("vocab_size", "n_embd", "n_head", "n_layer", "n_positions", "n_inner"),
    "llama": (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
    ),
    "qwen2": ("vocab_size", "hidden_size", "num_hidden_layers", "sliding_window"),
    "gpt_oss": ("num_local_experts", "num_experts_per_tok", "sliding_window", "head_dim"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "key"), [(n, k) for n, keys in SIZES.items() for k in keys])
def test_absurd_sizes_are_rejected(name, key):
    raw = goldens.VARIANTS[FAMILIES[name]]
    for value in ABSURD:
        if value is None and key not in ("vocab_size", "hidden_size", "num_hidden_layers"):
            continue  # null is "not given", and these have defaults
        with pytest.raises(CheckpointError, match=key):
            read_config(raw | {key: value})


@pytest.mark.parametrize(
    ("variant", "key"),
    [
        ("mixtral", "num_local_experts"),
        ("gpt_oss", "num_local_experts"),
        ("qwen2_moe", "num_experts"),
        ("qwen3_next", "num_experts"),
        ("gemma4_text_moe", "num_experts"),
        ("glm4_moe", "n_routed_experts"),
        ("deepseek_v3", "n_routed_experts"),
    ],
)
def test_more_than_ten_thousand_experts_are_rejected(variant, key):
    with pytest.raises(CheckpointError, match=f"{key} = 10001; .* from 1 to 10000"):
        read_config(goldens.VARIANTS[variant] | {key: 10_001})


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta", "swiglu_limit", "swiglu_alpha"])
def test_absurd_numbers_are_rejected(key):
    for value in (0, -1.0, float("nan"), float("inf"), 10**400, True, "1"):
        with pytest.raises(CheckpointError, match=key):
            read_config(goldens.VARIANTS["gpt_oss"] | {key: value})


LONG = "x" * 100_000
HOSTILE = (
    1e308, 5e-324, float("inf"), float("nan"), -1, -1e308, 10**400, 2**31 - 1, True, LONG,
    [LONG], {"a": LONG}, {LONG: 1}, [], [{}], [None], None,
)  # fmt: skip


def with_values(raw, values, path=()):
    """The object with each value at each of its keys, also those of objects in it."""
    for key, inner in raw.items():
        for value in values:
            yield f"{path}.{key} = {value!r:.20}", raw | {key: value}
        if isinstance(inner, dict):
            for label, changed in with_values(inner, values, f"{path}.{key}"):
                yield label, raw | {key: changed}


@pytest.mark.parametrize("name", FAMILIES)
def test_any_value_of_any_key_is_read_or_rejected_in_one_sentence(name):
    """Without warnings of NumPy, which are errors here, and with finite tables."""
    raw = goldens.VARIANTS[FAMILIES[name]]
    reader = ConfigReader(raw)
    family(name).config_from_hf(reader)
    absent = {"rope_theta": None, "rope_scaling": None, "rope_parameters": None}
    keys = dict.fromkeys(reader._read) | absent | raw
    for label, changed in with_values(keys, HOSTILE):
        changed = {k: v for k, v in changed.items() if k in raw or v is not None}
        try:
            _, decoder = read_config(changed)
        except (CheckpointError, UnsupportedModelError) as error:
            said = str(error)
            assert len(said) < 700 and "\n" not in said and said.endswith("."), label
            continue
        for rope in decoder.ropes:
            tables = rope_arrays(64, 8, rope.theta, rope.scaling) if not is_long(rope) else ()
            assert all(np.isfinite(table).all() for table in tables), label
            query_scale(rope, 8)


def is_long(rope):
    """Whether its factors are for one size of heads."""
    return rope.scaling is not None and rope.scaling.kind == "longrope"


@pytest.mark.parametrize(
    ("variant", "change", "numbers"),
    [
        ("gpt2", {"n_head": 5}, "44.*5"),
        ("llama_gqa", {"num_key_value_heads": 4}, "6.*4"),
        ("qwen2", {"num_attention_heads": 9}, "48.*9"),
        ("llama_gqa", {"head_dim": 21}, "21.*even"),
        ("gpt_oss", {"num_experts_per_tok": 6}, "6.*5"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "1 layer_types for 4 layers"),
        ("llama_gqa", {"attention_bias": 1}, "attention_bias.*true or false"),
        ("exaone4", {"layer_types": ["full_attention"] * 5}, "5 layer_types for 4 layers"),
        ("exaone4", {"sliding_window_pattern": "LXG"}, "pattern = 'LXG'.*number or a text of L"),
        (
            "exaone4",
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 4},
            "layer_types with a window, and no sliding_window",
        ),
        ("smollm3", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers = .*each of the 4 layers"),
        ("smollm3", {"no_rope_layers": [1] * 5}, "no_rope_layers = .*each of the 4 layers"),
        ("phi3_long", {"partial_rotary_factor": 0.5}, "0.5 of head_dim = 10; .*, 5, must be even"),
        ("phi3_long", {"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5"),
        (
            "phi3_long",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor = .*each of 4 frequencies",
        ),
        ("ministral3", {"rope_parameters": {"rope_type": "default"}}, "llama_4_scaling_beta"),
        (
            "ministral3",
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": -0.1}},
            "llama_4_scaling_beta = -0.1; it must be finite and not below 0",
        ),
        ("glm4_moe", {"num_experts_per_tok": 6}, "6.*5"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "= 5 of n_routed_experts = 6.*n_group = 3"),
        ("deepseek_v3", {"n_group": 4}, "n_group = 4"),
        ("deepseek_v3", {"n_group": 6, "topk_group": 5}, "a group needs two"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "must be even"),
        ("qwen2", {"max_window_layers": "2"}, "max_window_layers"),
        ("gpt_oss", {"rope_scaling": {"rope_type": "yarn", "factor": "8"}}, "factor"),
        (
            "gpt_oss",
            {"rope_scaling": {"rope_type": "yarn", "factor": 8, "attention_factor": "x"}},
            "attention_factor",
        ),
        ("gpt_oss", {"rope_scaling": {"rope_type": "yarn", "factor": 8, "mscale": "x"}}, "mscale"),
        ("gpt_oss", {"rope_theta": 1.0}, "rope_theta = 1.0; with yarn .* above 1"),
        ("llama_gqa", {"rope_theta": 1e308}, r"rope_theta = 1e\+308; RoPE takes"),
        ("phi3_long", {"partial_rotary_factor": 1e308}, "partial_rotary_factor = 1e.308"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": 1e308}}, "alpha = 1e"),
        ("lfm2", {"block_ffn_dim_multiplier": 1e308}, "block_ffn_dim_multiplier = 1e.308"),
        ("lfm2", {"full_attn_idxs": 5, "layer_types": None}, "full_attn_idxs = 5; .* a list"),
        ("gpt_oss", {"rope_scaling": YARN.to_hf() | {"factor": 10**400}}, "must be finite"),
        ("llama_gqa", {"rope_scaling": {"rope_type": ["yarn"]}}, "must be a string"),
        ("llama_gqa", {"rope_scaling": {"type": {}}}, "must be a string"),
        ("llama_gqa", {"rope_scaling": {"rope_type": False, "type": "linear"}}, "a string"),
        *(
            ("gpt_oss", {"rope_scaling": YARN.to_hf() | {ORIGINAL: value}}, ORIGINAL)
            for value in (0.5, 16.5, 0, True, "16", float("inf"), 2**31)
        ),
        ("llama_gqa", {"rope_scaling": LLAMA3.to_hf() | {ORIGINAL: None}}, ORIGINAL),
        ("llama_gqa", {"rope_scaling": LLAMA3.to_hf() | {"high_freq_factor": 1.0}}, "above low"),
    ],
)
def test_sizes_that_do_not_fit_each_other_are_rejected_with_both(variant, change, numbers):
    with pytest.raises(CheckpointError, match=numbers):
        read_config(goldens.VARIANTS[variant] | change)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[1, 2]", "a list"),
        (b"7", "an? int"),
        (b"{not json", "not JSON"),
        (b"", "is empty"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"9" * 5000, r"not JSON: .*5000 digits\.$"),
        (b"{}", "no model_type"),
        (b'{"model_type": 3}', "no model_type"),
        (b'{"model_type": "t5"}', r"'t5' .* one of the \d+ .* computes\. .*that rooflax runs"),
        (b'{"model_type": "qwen2_vl"}', "the nearest are qwen2, qwen2_moe, "),
        (b'{"model_type": "../../evil"}', "not one of"),
    ],
)
def test_config_json_that_is_no_config(content, reason, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=reason):
        model_info(str(tmp_path))


def test_config_json_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError, match="no config.json"):
        read_config_json(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="cannot read .*config.json"):
        read_config_json(tmp_path)


def test_an_adapter_in_place_of_a_model_is_rejected_by_name(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(
        UnsupportedModelError, match=r"an adapter .*, which is no model; name its base"
    ):
        read_config_json(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        UnsupportedModelError, match=r"an adapter .*, which is no model; name its base"
    ):
        read_config_json(tmp_path)


def test_the_folder_that_has_a_config_json_is_named(tmp_path):
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="name .*run/model, which has one"):
        read_config_json(tmp_path / "run")


def test_an_mscale_of_zero_counts_as_absent():
    """As transformers has it, and Devstral 2 writes it."""
    raw, yarn = goldens.VARIANTS["gpt_oss"], {"rope_type": "yarn", "factor": 64.0, ORIGINAL: 16}
    zero = yarn | {"mscale": 1.0, "mscale_all_dim": 0.0}
    _, decoder = read_config(raw | {"rope_scaling": zero})
    assert decoder == read_config(raw | {"rope_scaling": yarn})[1]
    assert decoder.ropes[0].scaling.attention_factor == 0.1 * math.log(64) + 1
    other = yarn | {"mscale": 1.0, "mscale_all_dim": 1.0}
    assert decoder != read_config(raw | {"rope_scaling": other})[1]


@pytest.mark.parametrize("variant", ["llama_gqa", "hunyuan_v1_dense", "gemma3_text"])
def test_dynamic_scaling_changes_nothing_within_the_models_context(variant):
    raw = {k: v for k, v in goldens.VARIANTS[variant].items() if not k.startswith("rope_")}
    for more in ({}, {ORIGINAL: 64}, {"finetuned": None}):
        for key in ("rope_type", "type") if variant != "gemma3_text" else ("rope_type",):
            scaling = {"rope_scaling": {key: "dynamic", "factor": 4.0} | more}
            assert read_config(raw | scaling) == read_config(raw)
    for factor in (None, 0, "x", math.inf):
        with pytest.raises(CheckpointError, match=r"rope_scaling.factor"):
            read_config(raw | {"rope_scaling": {"rope_type": "dynamic", "factor": factor}})


@pytest.mark.parametrize(
    ("variant", "part"),
    [
        ("llama_gqa", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("llama_gqa", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
        ("olmo3", {"rope_scaling": LLAMA3.to_hf()}),
        ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_type": "default"},
                                             "sliding_attention": {"rope_type": "default"}}}),
        ("gemma3", {"text_config": goldens.VARIANTS["gemma3_text"]}),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": 50.0}}),
    ],
    ids=["scaling", "parameters", "llama3", "kinds", "part", "alpha"],
)  # fmt: skip
def test_a_key_of_an_object_within_is_waived_by_its_name_or_with_its_path(variant, part):
    raw = goldens.VARIANTS.get(variant, {"model_type": variant})
    raw = {k: v for k, v in raw.items() if not k.startswith("rope_")} | part
    wanted = read_config(raw)

    def with_key(value, where):
        inner = value[where[0]]
        inner = with_key(inner, where[1:]) if where[1:] else inner | {"finetuned": True}
        return value | {where[0]: inner}

    (first,) = part
    paths = [[first, kind] for kind in part[first] if kind.endswith("_attention")] or [[first]]
    for where in paths:
        other = with_key(raw, where)
        with pytest.raises(UnsupportedModelError, match=r"'finetuned'.*ignore_config_keys finetun"):
            read_config(other)
        for name in ("finetuned", ".".join([*where, "finetuned"]), f"{where[0]}.*tuned"):
            assert read_config(other, ignore=[name]) == wanted
        for name in ("rope.finetuned", f"x.{where[0]}.finetuned"):
            with pytest.raises(RequestError, match="which config.json does not have"):
                read_config(other, ignore=[name])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_null_is_absence_at_every_level(name):
    raw = goldens.VARIANTS[FAMILIES[name]]
    more = {"sliding_window_pattern_": None, "new_attention_trick": None, "rope_scaling": None}
    more = {key: value for key, value in more.items() if key not in raw}
    assert read_config(raw | more) == read_config(raw)
    for key, value in raw.items():
        if isinstance(value, dict) and key in ("text_config", "rope_scaling", "rope_parameters"):
            assert read_config(raw | {key: value | {"new_trick": None}}) == read_config(raw)


def test_a_null_window_of_a_family_without_windows():
    raw = goldens.VARIANTS["llama_gqa"]
    assert read_config(raw | {"sliding_window": None, "attn_logit_cap": None}) == read_config(raw)


def test_queries_may_grow_by_nothing():
    raw = goldens.VARIANTS["ministral3"]
    rope = raw["rope_parameters"] | {"llama_4_scaling_beta": 0.0}
    name, decoder = read_config(raw | {"rope_parameters": rope})
    assert decoder.ropes[0].query_beta == 0.0
    assert decoder != read_config(raw)[1]
    assert read_config(family(name).config_to_hf(decoder)) == (name, decoder)


def test_the_original_context_may_be_written_as_a_float():
    raw = goldens.VARIANTS["llama_gqa"] | {"rope_scaling": LLAMA3.to_hf()}
    written = LLAMA3.to_hf() | {ORIGINAL: 16.0}
    assert read_config(raw | {"rope_scaling": written}) == read_config(raw)


def test_context_longer_than_the_model_is_rejected_with_both_numbers():
    _, config = read_config(goldens.VARIANTS["llama_gqa"])
    assert resolve_max_model_len(config, None) == 131
    assert resolve_max_model_len(config, 64) == 64
    for wrong in (0, -1, 132):
        with pytest.raises(RequestError, match=rf"{wrong}.*131"):
            resolve_max_model_len(config, wrong)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_read(name):
    _, config = read_config(preset_config(f"preset:{name}"))
    assert config.vocab_size and config.num_layers


def test_preset_parameters_are_those_of_the_models_they_are_named_after():
    known = {
        "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080,
        "gpt2-xl": 1_557_611_200, "qwen2.5-0.5b": 494_032_768, "llama-3.2-1b": 1_235_814_400,
        "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496,
        "seed-oss-36b": 36_151_104_512,
        "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672,
        "mistral-7b": 7_248_023_552, "mixtral-8x7b": 46_702_792_704, "qwen3-0.6b": 596_049_920,
        "qwen3-32b": 32_762_123_264, "qwen3-30b-a3b": 30_532_122_624, "smollm3-3b": 3_075_098_624,
        "gemma-3-270m": 268_098_176, "gemma-3-1b": 999_885_952, "phi-3-mini": 3_821_079_552,
        "phi-4": 14_659_507_200,
    }  # fmt: skip
    for preset, count in known.items():
        _, config = read_config(preset_config(preset))
        assert config.num_parameters == count, preset


def test_an_unknown_preset_names_one_that_is_close():
    said = r"'gpt3' \(did you mean gpt2\?\); `rooflax models` lists them"
    with pytest.raises(RequestError, match=said):
        preset_config("preset:gpt3")


@pytest.mark.parametrize("variant", ["qwen2_window", "qwen3", "qwen3_moe"])
def test_a_window_that_is_null_is_none(variant):
    """As transformers has it; without the key it is 4096."""
    raw = goldens.VARIANTS[variant] | {"use_sliding_window": True, "max_window_layers": 0}
    raw.pop("layer_types", None)
    _, config = read_config(raw | {"sliding_window": None})
    assert set(config.groups.windows) == {None}
    raw.pop("sliding_window", None)
    assert 4096 in read_config(raw)[1].groups.windows


@pytest.mark.parametrize(
    ("variant", "change", "said"),
    [
        ("lfm2", {"layer_types": ["conv"] * 5, "num_hidden_layers": 5}, "no layer with attention"),
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 3, "num_hidden_layers": 3},
         "no layer with attention"),
        ("deepseek_v3", {"first_k_dense_replace": 99}, "dense layers alone"),
        ("glm4_moe", {"first_k_dense_replace": 99}, "dense layers alone"),
        ("qwen3", {"an_odd_key": 1}, "an_odd_key"),
        ("qwen3", {"model_type": "t5"}, "t5"),
    ],
)  # fmt: skip
def test_what_is_not_computed_names_the_page_of_the_families(variant, change, said):
    with pytest.raises(UnsupportedModelError, match=f"{said}.*docs/models.md"):
        read_config(goldens.VARIANTS[variant] | change)


GONE = object()
OTHER_VALUES = (GONE, None, 1, 0.5, True)


def with_other_values(raw):
    """config.json with one key, also of an object within, changed."""
    for key, value in raw.items():
        if isinstance(value, dict):
            yield from (raw | {key: inner} for inner in with_other_values(value))
        for other in OTHER_VALUES:
            changed = {k: v for k, v in raw.items() if k != key}
            yield changed if other is GONE else changed | {key: other}


@pytest.mark.parametrize("name", goldens.one_each(goldens.VARIANTS))
def test_a_value_is_rejected_or_written_as_it_was_read(name):
    opened = 0
    for raw in with_other_values(goldens.VARIANTS[name]):
        try:
            found, config = read_config(raw)
        except RooflaxError:
            continue
        assert read_config(family(found).config_to_hf(config))[1] == config, raw
        opened += 1
    assert opened > 10
