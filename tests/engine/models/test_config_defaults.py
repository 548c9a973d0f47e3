"""Keys of config.json that are absent or null: what transformers computes then, or a rejection."""

import copy
import json

import numpy as np
import pytest

from rooflax import load
from rooflax.errors import RooflaxError
from rooflax.models.config_reader import ConfigReader
from rooflax.models.registry import family, read_config
from tests import goldens
from tests.engine.models.test_parity import TOLERANCE
from tests.engine.models.test_text_parts import (
    GEMMA4,
    MINISTRAL3,
    MISTRAL3,
    QWEN3_5,
    QWEN3_5_MOE,
    WHOLE,
)
from tests.support.models.programs import full_logits

pytestmark = pytest.mark.skipif(
    not goldens.HAVE_TORCH, reason="asks transformers, which is not installed"
)

WRAPPERS = (WHOLE, MISTRAL3, MINISTRAL3, QWEN3_5, QWEN3_5_MOE, GEMMA4)


def changes(raw):
    """The object without each of the keys that are asked for, and with a null in its place."""
    reader = ConfigReader(raw)
    family(raw["model_type"]).config_from_hf(reader)
    for key in sorted(set(raw) | set(reader._read)):
        if key not in ("model_type", "architectures"):
            yield key, "absent", {k: v for k, v in raw.items() if k != key}
            yield key, "null", raw | {key: None}


def read_as_here(raw):
    """The model; None where the object is rejected, in one sentence."""
    try:
        return read_config(raw)
    except RooflaxError as error:
        reason = str(error)
    assert "\n" not in reason and reason.endswith(".")
    return None


def read_as_transformers(raw):
    """The object with all the defaults of transformers' class; None where that rejects it."""
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        return transformers.AutoConfig.for_model(**copy.deepcopy(raw)).to_dict()
    except Exception:  # of many types, some from a library that checks the fields
        return None


DROPPED = "per_layer_config", "partial_rotary_factor"
"""Keys whose null transformers computes with, and does not write; their tests are below."""


def check(raw, key, how, other):
    """Whether the defaults were compared.

    Null stands for several things, and transformers leaves it to the model: those are below.
    """
    ours, theirs = read_as_here(other), read_as_transformers(other)
    if ours is None or theirs is None or (how == "null" and key in DROPPED):
        return False
    assert read_as_here(theirs) == ours, f"{key} {how}"
    return True


STATED = {
    "granitemoehybrid": {"num_local_experts": 0, "layer_types": ["attention"] * 32},
    "glm4_moe": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 6},
}
"""What the defaults of transformers' classes lack to be a model that opens here."""
REQUIRED = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
}  # fmt: skip
REQUIRED_BY = {
    "gpt_oss": {"max_position_embeddings"},
    "ministral3": {"max_position_embeddings"},
    "granitemoehybrid": {"num_local_experts", "layer_types"},
    "glm4_moe": {"head_dim"},
    "deepseek_v2": {"num_experts_per_tok"},
}
"""A file without one of these may be rejected by its name; of all others there is a default."""


@pytest.mark.parametrize("name", sorted({raw["model_type"] for raw in goldens.VARIANTS.values()}))
def test_every_key_that_a_family_reads_has_the_default_of_transformers(name):
    """In transformers' own model of the family, where no key contradicts another's default."""
    import transformers

    whole = transformers.AutoConfig.for_model(name, **STATED.get(name, {})).to_dict()
    required, wanted, keys = REQUIRED | REQUIRED_BY.get(name, set()), read_config(whole), set()
    for key, how, other in changes(whole):
        theirs = read_as_transformers(other) if how == "null" else whole
        keys.add(key)
        ours = read_as_here(other)
        if how == "null" and key in DROPPED:
            continue
        if ours is None:
            assert how == "null" or key in required, f"{key} {how}"
        elif theirs is not None and theirs.get(key, 0) == whole.get(key, 0):
            assert ours == wanted, f"{key} {how}"
    assert {"vocab_size", "tie_word_embeddings"} < keys


@pytest.mark.parametrize("variant", goldens.one_each(goldens.VARIANTS))
def test_keys_that_are_absent_or_null_have_the_defaults_of_transformers(variant):
    """In a tiny model, whose kinds of layers the default of a class need not have."""
    raw = goldens.VARIANTS[variant]
    assert sum(check(raw, *change) for change in changes(raw)) > 5


@pytest.mark.parametrize("raw", WRAPPERS, ids=lambda raw: raw["text_config"]["model_type"])
def test_so_have_keys_of_text_parts(raw):
    tied = raw["text_config"]["tie_word_embeddings"]  # both state it, else some are contradictions
    found, raw = 0, raw | {"tie_word_embeddings": tied}
    for key, how, text in changes(raw["text_config"]):
        found += check(raw, key, how, raw | {"text_config": text})
    assert found > 5
    for key, how, other in changes(raw):
        if key not in ("tie_word_embeddings", "text_config"):  # the tensors say the first
            assert check(raw, key, how, other) or how == "null", key


@pytest.mark.parametrize("variant", [v for v in goldens.VARIANTS if v.startswith("gemma4_text")])
def test_gemma4_without_heads_layer_by_layer_has_the_same_in_all(variant, tmp_path, monkeypatch):
    """transformers takes the null, and drops it when it writes the file."""
    raw = goldens.VARIANTS[variant] | {"per_layer_config": None}
    monkeypatch.setitem(goldens.VARIANTS, variant, raw)
    check_logits(variant, raw, tmp_path)
    heads = {layer.attention.head_dim for layer in read_config(raw)[1].layers}
    assert heads == {raw["head_dim"]} != {raw["global_head_dim"]}


@pytest.mark.parametrize("variant", ["glm4", "glm4_moe", "qwen3_next", "qwen3_5_text"])
def test_a_share_of_rope_that_is_null_is_all(variant, tmp_path, monkeypatch):
    """An absent one is the family's default."""
    raw = goldens.VARIANTS[variant] | {"partial_rotary_factor": None}
    assert read_config(raw) == read_config(raw | {"partial_rotary_factor": 1.0})
    if variant == "glm4":
        monkeypatch.setitem(goldens.VARIANTS, variant, raw)
        check_logits(variant, raw, tmp_path)


TOP = {}, {"rope_theta": 77.0}
LINEAR, BY_TYPE = {"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}
DEFAULT = {"rope_type": "default"}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
SPELLINGS = (
    *TOP,
    *({"rope_scaling": one} | top for one in (LINEAR, BY_TYPE, LINEAR | {"rope_theta": 55.0})
      for top in TOP),
    *({"rope_parameters": rope | inner} | top for rope in (LINEAR, BY_TYPE, DEFAULT)
      for inner in ({}, {"rope_theta": 55.0}) for top in TOP),
    *({key: DYNAMIC | inner} | top for key in ("rope_scaling", "rope_parameters")
      for inner in ({}, {"rope_theta": 55.0}) for top in TOP),
    *({"rope_parameters": one | inner, "rope_scaling": other} | top
      for one in (LINEAR, DEFAULT, {}) for inner in TOP
      for other in (LINEAR, BY_TYPE, DEFAULT, {}) for top in TOP),
    *({"rope_parameters": {"full_attention": one, "sliding_attention": other}} | more
      for one in (LINEAR, BY_TYPE, DEFAULT | {"rope_theta": 55.0}, None)
      for other in (LINEAR | {"rope_theta": 33.0}, DEFAULT, None)
      for more in ({}, {"rope_theta": 77.0}, {"rope_scaling": BY_TYPE}, {"rope_scaling": LINEAR})),
)  # fmt: skip
"""Ways to state RoPE, some of them twice and otherwise."""


@pytest.mark.parametrize(
    "variant", ["llama_gqa", "olmo3", "gemma3_text", "exaone4", "gemma4_text", "gpt_oss"]
)
def test_rope_is_what_transformers_takes_or_is_rejected(variant):
    raw = {k: v for k, v in goldens.VARIANTS[variant].items() if not k.startswith("rope_")}
    taken = 0
    for spelling in SPELLINGS:
        ours, theirs = read_as_here(raw | spelling), read_as_transformers(raw | spelling)
        if ours is not None and theirs is not None:
            assert read_as_here(theirs) == ours, spelling
            taken += 1
    assert taken > 2


@pytest.mark.parametrize("variant", ["llama_gqa", "exaone4", "gpt_oss", "hunyuan_v1_dense"])
def test_a_theta_of_rope_parameters_goes_before_one_beside_them(variant):
    rope = {"rope_parameters": DEFAULT | {"rope_theta": 55.0}, "rope_scaling": None}
    raw = goldens.VARIANTS[variant] | rope
    theirs = read_as_transformers(raw | {"rope_theta": 77.0})
    assert read_config(raw | {"rope_theta": 77.0}) == read_config(theirs) == read_config(raw)


def check_logits(variant, raw, folder, said=""):
    """Of a folder with this object, which is `VARIANTS[variant]`, against transformers' model."""
    import torch

    model = goldens.reference_model(variant)
    with torch.no_grad():
        wanted = model(torch.tensor(goldens.tokens())).logits.numpy()
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw))
    loaded = load(folder, max_model_len=goldens.MAX_MODEL_LEN.get(variant))
    logits = np.asarray(full_logits(loaded, goldens.tokens()))
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=TOLERANCE, err_msg=said)
