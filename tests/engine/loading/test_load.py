"""From a name to a model: folders, presets, and what is known before weights are read."""

import itertools
import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.numpy import float32

from rooflax import LLM, ExecutionOptions, Precision, SamplingParams
from rooflax.engine.engine import Engine
from rooflax.engine.sequence import Sequence
from rooflax.errors import CheckpointError, RequestError, RooflaxError
from rooflax.loading.load import load, load_plan
from rooflax.loading.model_info import embedded_folder, model_info
from rooflax.loading.plan import make_plan, resolve_precision
from rooflax.models.memory import check_fits, estimate
from rooflax.models.registry import read_config
from rooflax.models.steps import new_cache
from rooflax.nn.engine_config import EngineConfig
from rooflax.nn.storage import Storage
from tests import goldens
from tests.marks import cases


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("load")
    return goldens.write_checkpoint(root / "m", "gpt_oss", goldens.committed("gpt_oss"))


def test_a_description_reads_no_weights(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    info = model_info(tmp_path)
    assert (info.family, info.folder, info.name) == ("gpt_oss", tmp_path, str(tmp_path))
    assert info.config.moe.num_experts == 5
    assert info.raw_config["model_type"] == "gpt_oss"
    with pytest.raises(CheckpointError, match="safetensors"):
        load(info)


def test_a_preset_has_no_folder_and_the_embedded_tokenizer():
    info = model_info("preset:qwen2.5-tiny")
    assert info.folder is None and info.family == "qwen2"
    assert info.config.num_layers == 4 and info.config.hidden_size == 128
    assert info.tokenizer().vocab_size <= info.config.vocab_size
    assert info.generation_defaults().eos_token_ids == ()


def test_a_key_is_ignored_when_the_caller_says_so(folder, tmp_path):
    raw = json.loads((folder / "config.json").read_text()) | {"surprise": 1}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(Exception, match="ignore_config_keys surprise"):
        model_info(tmp_path)
    assert model_info(tmp_path, ignore_config_keys=["surprise"]).family == "gpt_oss"


@pytest.mark.parametrize("name", ["", "no such/model/at/all", "preset:", "preset:gpt-5"])
def test_names_that_lead_nowhere(name):
    with pytest.raises((RequestError, CheckpointError)):
        model_info(name, offline=True)


def test_the_embedded_folder_has_a_tokenizer():
    assert (embedded_folder() / "tokenizer.json").is_file()


def test_max_model_len_sizes_the_rope_table(folder):
    assert load(folder).rope[0].cos.shape == (131, 10)
    model = load(folder, max_model_len=32)
    assert model.max_model_len == 32 and model.rope[0].sin.shape == (32, 10)


def planned_as(folder, *, reads_bfloat16):
    """The widths of a model's weights on a CPU where nobody asks for other ones."""
    info = model_info(folder)
    return resolve_precision(info, Precision(), "cpu", reads_bfloat16=reads_bfloat16)[1]


def test_the_tensors_say_their_width_where_config_json_does_not(folder, tmp_path):
    """As GPT-OSS's does not: its bfloat16 weights stay so, the same numbers in half the memory."""
    raw = json.loads((folder / "config.json").read_text())
    assert not {"dtype", "torch_dtype"} & raw.keys()
    assert planned_as(folder, reads_bfloat16=True).keeps_bfloat16
    assert not planned_as(folder, reads_bfloat16=False).keeps_bfloat16
    plan = make_plan(folder, options=ExecutionOptions(layers="unrolled"))
    keeps_bfloat16, wide = (
        load_plan(replace(plan, storage=Storage(keeps_bfloat16=True))),
        load(folder),
    )
    assert (
        keeps_bfloat16.weights["lm_head"].dtype == "bfloat16"
        and wide.weights["lm_head"].dtype == float32
    )
    assert keeps_bfloat16.weights["final_norm"].dtype == float32  # not a matmul's
    assert keeps_bfloat16.weights_bytes < 0.6 * wide.weights_bytes
    for a, b in zip(
        jax.tree.leaves(keeps_bfloat16.weights), jax.tree.leaves(wide.weights), strict=True
    ):
        assert (a.astype(float32) == b).all()

    other = goldens.write_checkpoint(tmp_path / "m", "llama_gqa", goldens.committed("llama_gqa"))
    assert not {"dtype", "torch_dtype"} & json.loads((other / "config.json").read_text()).keys()
    assert not planned_as(other, reads_bfloat16=True).keeps_bfloat16  # float32 in the file


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_estimate_counts_what_the_arrays_really_take(folder, dtype):
    model = load(folder, dtype=dtype)
    info = model_info(folder)
    need = estimate(
        info.config,
        storage=make_plan(folder, dtype=dtype).storage,
        kv_dtype=dtype,
        rows=3,
        tokens=64,
        prefill_chunk=64,
    )
    assert need.weights == sum(a.nbytes for a in jax.tree.leaves(model))  # and the RoPE table
    cache = new_cache(model, rows=3, max_tokens=64, dtype=dtype)
    assert need.kv_cache <= cache.num_bytes  # windows hold less than the whole
    assert need.total == need.weights + need.kv_cache + need.workspace


def temporaries(raw, rows):
    """Bytes that a step of a prompt of so many tokens takes, and those that are planned for it."""
    info = replace(model_info("preset:gpt2-tiny"), config=read_config(raw)[1], raw_config=raw)
    plan = make_plan(info, max_model_len=rows, max_num_seqs=1)
    engine = Engine(
        load_plan(plan), EngineConfig(options=plan.options, max_num_seqs=1, max_model_len=rows)
    )
    (tokens,) = np.zeros((1, rows - 1), int).tolist()
    greedy = SamplingParams(temperature=0.0).with_defaults({})
    engine.warm_up_prefill([Sequence(0, tokens, greedy, 1, frozenset())])
    return engine.temporary_bytes(), plan.memory.workspace


@pytest.mark.parametrize(
    ("variant", "key", "small", "large"),
    [
        ("gemma4_text_shared", "hidden_size_per_layer_input", 0, 256),
        ("gemma4_text_shared", "use_double_wide_mlp", False, True),
        ("qwen3_moe", "moe_intermediate_size", 256, 1024),
    ],
)
def test_the_workspace_grows_by_no_less_than_the_compiled_step(variant, key, small, large):
    """As XLA counts its temporaries."""
    raw = goldens.VARIANTS[variant] | {"intermediate_size": 1024}
    if variant.startswith("gemma4"):
        raw |= {"use_double_wide_mlp": False}
    (real, planned), (more_real, more_planned) = (
        temporaries(raw | {key: value}, 128) for value in (small, large)
    )
    assert 0 < more_real - real <= more_planned - planned


@pytest.mark.parametrize(
    ("model", "rows"),
    cases(
        itertools.product(["gpt2-tiny", "qwen2.5-tiny", "gpt-oss-tiny"], [1, 16]),
        default=[("gpt-oss-tiny", 16)],
    ),
)
def test_the_workspace_holds_every_program_of_a_server(model, rows):
    plan = make_plan(f"preset:{model}", max_num_seqs=rows)
    how = {"max_num_seqs": rows, "max_model_len": plan.max_model_len}
    engine = Engine(load_plan(plan), EngineConfig(options=plan.options, **how))
    engine.warm_up_all()
    assert 0 < engine.temporary_bytes() <= plan.memory.workspace


def test_what_does_not_fit_is_rejected_with_the_arithmetic(folder):
    info = model_info(folder)
    need = estimate(info.config, storage=Storage(), kv_dtype="float32", rows=1, tokens=64)
    check_fits(need, need.total, "it")
    with pytest.raises(RequestError, match=r"weights \+ .*KV cache \+ .*workspace = .*is free"):
        check_fits(need, need.total - 1, "it")


def test_a_model_too_large_for_this_machine_is_rejected_before_it_is_made():
    from rooflax import LLM

    with pytest.raises(RequestError, match=r"preset:gpt-oss-120b.*GiB for weights"):
        LLM("preset:gpt-oss-120b", dtype="float32")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"dtype": ["float32"]}, None),
        ({"torch_dtype": {}}, None),
        (
            {"rope_scaling": {
                "rope_type": "yarn", "factor": 2.0, "beta_fast": 1e308, "beta_slow": 1e-308
            }},
            "beta_fast = 1e[+]308",
        ),
        ({"vocab_size": 2**31 - 1}, "needs .* GiB for weights"),
    ],
)  # fmt: skip
def test_odd_values_of_a_config_are_sentences(tmp_path, changed, said):
    """No bare exception, and no gigabytes before the rejection."""
    folder = tmp_path / "m"
    shutil.copytree(embedded_folder(), folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changed))
    if said is None:
        assert len(LLM(folder).generate("import", max_tokens=2)[0].tokens) == 2
        return
    with pytest.raises(RooflaxError, match=said):
        LLM(folder)
