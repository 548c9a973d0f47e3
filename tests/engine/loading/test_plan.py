"""What is decided about a model before anything is loaded, and what it will then take."""

import asyncio
import inspect
from dataclasses import replace

import jax
import numpy as np
import pytest

from rooflax import LLM, AsyncLLM, ExecutionOptions, SamplingParams, load, save
from rooflax.engine.engine import Engine
from rooflax.errors import RequestError
from rooflax.fields.declaration import declarations
from rooflax.loading import plan as plans
from rooflax.loading.load import load_plan
from rooflax.loading.model_info import model_info
from rooflax.loading.plan import make_plan
from rooflax.loading.settings import EngineSettings, ServingSettings
from rooflax.models.memory import plan_blocks
from rooflax.models.registry import read_config
from rooflax.nn.shards import Shards
from rooflax.ops import accelerator, kernels
from rooflax.ops.weights import packed_format
from tests import gguf_cases, goldens

NATIVE = kernels.chosen(None)["linear"] == "native"
_, CONFIG = read_config(
    {
        "model_type": "olmo3",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 5,
        "num_attention_heads": 2,
        "sliding_window": 32,
        "layer_types": [
            f"{kind}_attention" for kind in ("full", "sliding", "full", "sliding", "sliding")
        ],
    }
)
WORK = {"kv_dtype": "float32", "num_slots": 4, "max_tokens": 160, "new_tokens": 64}


def blocks(limit_bytes, **given):
    return plan_blocks(CONFIG, block_size=16, limit_bytes=limit_bytes, **WORK | given)


def test_without_a_limit_every_slot_has_its_longest_context():
    full, window = blocks(None)
    assert full == 1 + 4 * 10  # 160 tokens
    assert window == 1 + 4 * 7  # 32 + 64 - 1 tokens, and a block that is begun


def test_weights_that_leave_nothing_are_said():
    for limit_bytes in (0, -5):
        with pytest.raises(RequestError, match="and the weights leave nothing for it; lower"):
            blocks(limit_bytes)


def test_a_limit_is_kept_and_the_arithmetic_is_said():
    block = 2 * 2 * 8 * 4 * 16
    need = [2 * (1 + n * 10) + 3 * (1 + n * 7) for n in range(5)]
    assert blocks(need[4] * block) == blocks(None)
    assert blocks(need[4] * block - 1) == (1 + 3 * 10, 1 + 3 * 7)
    assert blocks(need[1] * block) == (11, 8)
    least = need[1] * block
    with pytest.raises(
        RequestError, match=rf"{least:,} bytes\) and .*{least - 1:,} bytes\) is left"
    ):
        blocks(least - 1)
    assert blocks(need[4] * block // 2, kv_dtype="bfloat16") == blocks(None)


def preset(dtype):
    """A model of which only the published dtype is known."""
    info = model_info("preset:gpt2-tiny")
    return replace(info, raw_config=dict(info.raw_config) | {"torch_dtype": dtype})


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By what the checkpoint holds; of "unsaid" only the tensors say bfloat16."""
    root = tmp_path_factory.mktemp("plan")
    folder = goldens.write_checkpoint(root / "m", "qwen3", goldens.committed("qwen3"))
    save(load(folder, quantize="int8"), root / "packed", files_from=folder)
    return {
        "float32": preset("float32"),
        "bfloat16": preset("bfloat16"),
        "unsaid": model_info(
            goldens.write_checkpoint(root / "unsaid", "gpt_oss", goldens.committed("gpt_oss"))
        ),
        "Q8_0": model_info(gguf_cases.gguf("llama3", "q8_0")),
        "packed": model_info(root / "packed"),
    }


@pytest.mark.parametrize(
    ("checkpoint", "platform", "asked", "format", "dtype", "kv_dtype"),
    [
        # on a CPU activations are float32, and bfloat16 weights stay so where a kernel reads them
        ("float32", "cpu", {}, "float32", "float32", "float32"),
        ("bfloat16", "cpu", {}, "bfloat16", "float32", "float32"),
        ("unsaid", "cpu", {}, "bfloat16", "float32", "float32"),
        ("bfloat16", "cpu", {"kernels": "xla"}, "float32", "float32", "float32"),
        ("bfloat16", "cpu", {"dtype": "float32"}, "float32", "float32", "float32"),
        ("bfloat16", "cpu", {"dtype": "bfloat16"}, "bfloat16", "bfloat16", "bfloat16"),
        ("float32", "cpu", {"dtype": "bfloat16"}, "bfloat16", "bfloat16", "bfloat16"),
        # elsewhere both are bfloat16
        ("float32", "gpu", {}, "bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "gpu", {}, "bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "tpu", {}, "bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "tpu", {"dtype": "float32"}, "float32", "float32", "float32"),
        # a format is for the weights alone; the KV cache is float16 beside float32 on a CPU
        ("bfloat16", "cpu", {"quantize": "int4"}, "iq4_nl", "float32", "float16"),
        ("float32", "cpu", {"quantize": "w8a16"}, "w8a16", "float32", "float16"),
        ("float32", "cpu", {"quantize": "int8", "kv_dtype": "int8"}, "w8a8-h64", "float32", "int8"),
        (
            "float32",
            "cpu",
            {"quantize": "int8", "dtype": "bfloat16"},
            "w8a8-h64",
            *["bfloat16"] * 2,
        ),
        ("float32", "gpu", {"quantize": "int8"}, "w8a8", "bfloat16", "bfloat16"),
        ("float32", "gpu", {"quantize": "int8", "dtype": "float32"}, "w8a8", *["float32"] * 2),
        ("float32", "cpu", {"kv_dtype": "float8_e4m3fn"}, "float32", "float32", "fp8"),
        # what the checkpoint holds quantized stays so, unless a dtype or a format is asked for
        ("Q8_0", "cpu", {}, "w8a8-g32", "float32", "float16"),
        ("Q8_0", "cpu", {"dtype": "float32"}, "float32", "float32", "float32"),
        ("Q8_0", "cpu", {"quantize": "w4a8"}, "w4a8", "float32", "float16"),
        ("Q8_0", "gpu", {}, "w8a8-g32", "bfloat16", "bfloat16"),
        # and in a folder that was saved so, always
        ("packed", "cpu", {}, "w8a8", "float32", "float16"),
        ("packed", "cpu", {"dtype": "bfloat16"}, "w8a8", "bfloat16", "bfloat16"),
        ("packed", "tpu", {}, "w8a8", "bfloat16", "bfloat16"),
    ],
)
def test_the_rules_of_precision(
    models, monkeypatch, checkpoint, platform, asked, format, dtype, kv_dtype
):
    asked = dict(asked)
    if platform == "cpu" and not NATIVE and format == "bfloat16" and dtype == "float32":
        pytest.skip("no native kernels here")
    monkeypatch.setattr(accelerator, "platform", lambda: platform)
    options = ExecutionOptions(kernels=asked.pop("kernels", None))
    plan = make_plan(models[checkpoint], options=options, **asked)
    assert (plan.storage.format, plan.storage.dtype, plan.kv_dtype) == (format, dtype, kv_dtype)
    assert plan.precision.dtype == dtype
    if platform == "cpu" and checkpoint in ("Q8_0", "packed"):
        model = load_plan(plan)
        formats = {leaf.format.replace("a8x2", "a8") for leaf in packed_leaves(model)}
        assert formats == (set() if format == "float32" else {format})


def packed_leaves(model):
    def is_packed(leaf):
        return packed_format(leaf) is not None

    return filter(is_packed, jax.tree.leaves(model.weights, is_leaf=is_packed))


def test_a_format_over_codes_is_rejected(models):
    with pytest.raises(RequestError, match="quantized already"):
        make_plan(models["packed"], quantize="int8")


FEW = {"max_num_seqs": 3, "max_model_len": 64}
ASK = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


def test_a_plan_is_what_is_loaded():
    plan = make_plan("preset:gpt-oss-tiny", quantize="int8", **FEW)
    llm = LLM(plan)
    assert llm.plan is plan
    assert plan.memory.weights == sum(a.nbytes for a in jax.tree.leaves(llm.model))
    engine = llm.new_engine(3, 64)
    assert engine.runner.num_blocks == plan.num_blocks
    assert engine.kv_cache_bytes == plan.memory.kv_cache
    same = LLM("preset:gpt-oss-tiny", quantize="int8", **FEW)
    assert llm.generate([[1, 2, 3]], ASK)[0].tokens == same.generate([[1, 2, 3]], ASK)[0].tokens


@pytest.mark.parametrize(
    "given",
    [
        {"quantize": "int8", "max_num_seqs": 3, "dtype": "float32", "revision": "main"},
        {"max_num_seqs": 3, "quantize": "int8"},
        {"max_num_seqs": 1},
        {"offline": True},
        {"speculate": "ngram"},
    ],
)
def test_what_a_plan_has_decided_is_not_asked_again(given):
    plan = make_plan("preset:gpt2-tiny")
    with pytest.raises(RequestError, match=f"{next(iter(given))} is given beside a Plan"):
        LLM(plan, **given)


@pytest.mark.parametrize("taker", [LLM, AsyncLLM, make_plan])
def test_signatures_show_every_setting_with_its_type(taker):
    table = ServingSettings if taker is AsyncLLM else EngineSettings
    shown = inspect.signature(taker).parameters
    assert set(declarations(table)) <= set(shown) and "settings" not in shown
    assert "self" not in shown
    found = {name: shown[name].annotation for name in declarations(table)}
    assert inspect.Parameter.empty not in found.values()
    assert (found["max_num_seqs"], found["mesh"]) == (int | None, "Mesh | Shards | str | None")
    with pytest.raises(TypeError, match=rf"^{taker.__name__}\(\) got .* keyword argument 'foo'$"):
        taker("preset:gpt2-tiny", foo=1, bar=2)


def test_a_subclass_has_the_signature_of_its_own():
    class Mine(LLM):
        def __init__(self, path):
            super().__init__(path)

    assert list(inspect.signature(Mine).parameters) == ["path"]


@pytest.mark.parametrize(("given", "wanted"), [(None, True), (True, True), (False, False)])
def test_prefix_caching_is_on_where_nothing_is_said(given, wanted):
    plan = make_plan("preset:gpt2-tiny", prefix_caching=given)
    assert plan.prefix_caching is wanted and LLM(plan).prefix_caching is wanted
    assert LLM(plan, prefix_caching=None).prefix_caching is wanted


def test_a_split_that_blocks_of_a_format_do_not_take_is_planned():
    """A weight whose inputs on each device are no whole blocks stands in another format."""
    split = make_plan("preset:qwen2.5-tiny", quantize="int8", mesh=Shards(tensor=4))
    assert 0 < split.memory.weights < split.estimate(shards=Shards()).weights


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("prefix_caching", "no", "true or false"),
        ("offline", 1, "true or false"),
        ("ignore_config_keys", "abc", "a list"),
        ("max_num_seqs", True, "a whole number from 1 up"),
        ("max_num_seqs", 2.0, "a whole number from 1 up"),
        ("num_draft_tokens", 0, "a whole number from 1"),
        ("quantize", 8, "text"),
        ("dtype", 32, "text"),
        ("revision", 1, "text"),
        ("generation_config", "Auto", "one of 'auto', 'none'"),
    ],
)
def test_a_setting_of_another_kind_is_rejected(name, value, wanted):
    with pytest.raises(RequestError) as error:
        make_plan("preset:gpt2-tiny", **{name: value})
    assert f"{name} is {value!r}; it must be {wanted}" in str(error.value)
    assert error.value.param == name


def test_a_number_of_numpy_is_a_whole_one():
    assert make_plan("preset:gpt2-tiny", max_num_seqs=np.int64(3)).max_num_seqs == 3


def test_a_plan_for_devices_that_are_not_here_is_not_loaded():
    plan = make_plan("preset:llama-3.1-70b", mesh=Shards(tensor=8), max_model_len=512)
    assert plan.memory.weights < 20e9 < 140e9 < plan.estimate(shards=Shards()).weights
    with pytest.raises(RequestError, match="for tensor=2 without devices"):
        load_plan(make_plan("preset:gpt2-tiny", mesh=Shards(tensor=2)))


def blocks_of(server):
    runner = server._thread.engine.runner
    asyncio.run(server.shutdown(drain=False))
    return runner.num_blocks, runner.cache.num_bytes


def test_a_server_has_the_blocks_that_were_planned(monkeypatch):
    """For all sequences, or for as many as half of the memory beside the weights holds."""
    name = "preset:gpt-oss-tiny"
    monkeypatch.setattr(Engine, "warm_up_all", lambda self, report: [])  # not what is asked here
    whole = make_plan(name, **FEW).serving()
    assert blocks_of(AsyncLLM(name, **FEW)) == (whole.num_blocks, whole.memory.kv_cache)
    one = make_plan(name, max_num_seqs=1, max_model_len=64).serving()

    def free(num_devices=1):
        return whole.memory.weights + 2 * whole.memory.kv_cache - 1

    monkeypatch.setattr(plans, "free_bytes", free)
    least = make_plan(name, **FEW).serving()
    assert (least.full_length_seqs(), whole.full_length_seqs()) == (2, 3)
    assert one.memory.kv_cache < least.memory.kv_cache < whole.memory.kv_cache
    assert least.memory.kv_cache <= whole.memory.kv_cache - 1
    given = AsyncLLM(make_plan(name, **FEW), max_tokens_per_step=16, kv_blocks=(9, 9))
    assert blocks_of(given)[0] == (9, 9)


def test_a_server_whose_weights_do_not_fit_is_told_so(monkeypatch):
    monkeypatch.setattr(plans, "free_bytes", lambda num_devices=1: 20 << 30)
    plan = make_plan("preset:llama-3.1-70b", max_model_len=2048)
    with pytest.raises(RequestError) as error:
        plan.serving()
    assert "131.42 GiB for weights" in str(error.value) and "weights_budget" in str(error.value)
    assert "max_model_len" not in str(error.value)


@pytest.mark.parametrize(("platform", "chunk"), [("cpu", 512), ("gpu", 2048), ("tpu", 512)])
def test_tokens_of_a_prompt_in_a_step(monkeypatch, platform, chunk):
    """What is asked for with a server; what a prompt gets by itself; what a step takes."""
    monkeypatch.setattr(accelerator, "platform", lambda: platform)
    plan = make_plan("preset:gpt2-large", max_model_len=1024)
    assert plan.prefill_chunk == plan.max_tokens_per_step == min(chunk, 1024)
    plan = make_plan("preset:llama-3.1-8b", max_model_len=8192)
    asked = [plan.serving(max_tokens_per_step=n, num_blocks=(999,)) for n in (None, 100, 4096)]
    found = [(p.prefill_chunk, p.max_tokens_per_step) for p in asked]
    assert found == [(chunk, chunk), (100, 100), (chunk, 4096)]
    assert asked[0].burst_s < plan.burst_s  # a stream of a server looks smooth


def test_a_server_without_room_is_rejected_before_it_is_loaded(monkeypatch):
    name = "preset:gpt-oss-tiny"
    need = make_plan(name, max_num_seqs=1).memory
    loaded = []
    monkeypatch.setattr(plans, "free_bytes", lambda _=1: need.weights + need.kv_cache)
    with pytest.raises(RequestError, match="KV cache of one sequence of .* lower max_model_len"):
        AsyncLLM(name, max_num_seqs=1, progress=loaded.append)
    assert loaded == []


def test_a_drafting_models_memory_is_not_the_servers(monkeypatch):
    name = "preset:gpt2-tiny"
    alone = make_plan(name, max_num_seqs=8)
    pair = make_plan(name, max_num_seqs=8, speculate=name, num_draft_tokens=3)
    assert (alone.draft, alone.num_draft_tokens) == (None, 0)
    assert (pair.draft.info.name, pair.num_draft_tokens) == (name, 3)
    enough = 2 * (alone.memory.weights + alone.memory.kv_cache)
    monkeypatch.setattr(plans, "free_bytes", lambda _=1: enough)
    assert alone.serving().full_length_seqs() == 8
    assert pair.serving().full_length_seqs() < 8
    monkeypatch.setattr(plans, "free_bytes", lambda _=1: alone.memory.weights * 3 // 2)
    with pytest.raises(RequestError, match=f"{name} with {name} drafting needs .* for weights"):
        pair.check_fits()
