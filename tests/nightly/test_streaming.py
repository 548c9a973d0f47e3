"""Longer tests beside those of tests/engine/test_streaming.py."""

import asyncio
import json
import subprocess
import sys

import jax
import pytest

from rooflax import LLM, AsyncLLM, ExecutionOptions
from rooflax.engine.compilation import count_compilations
from rooflax.loading import load
from rooflax.loading.save import save_model
from rooflax.models.initialize import random_weights
from rooflax.models.registry import read_config
from tests import goldens
from tests.engine import test_streaming as beside
from tests.engine.test_streaming import GREEDY, PROMPTS, budget_of, layers_of, pair, same, tokens
from tests.sharding import CONFIGS, write_checkpoint

folder = beside.folder


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("gpt_oss", {"quantize": "int8"}),
        ("qwen2", {"dtype": "bfloat16"}),
        ("llama", {"speculate": "ngram"}),
        ("gpt2", {"options": ExecutionOptions(use_cache=False)}),
        ("llama", {"options": ExecutionOptions(kernels="xla")}),
        ("gpt2", {"check": True}),
    ],
)
def test_every_setting_says_the_same(folder, name, how):
    same(*pair(folder(name), **how))


def test_a_device_with_memory_of_its_own_takes_layers_there(folder, monkeypatch):
    """Off CPU there is no arena: the device's memory is taken and given back."""
    monkeypatch.setattr(load, "Arena", lambda size: None)
    same(*pair(folder("qwen2"), dtype="float32"))
    same(*pair(folder("qwen2"), quantize="int8"))


def test_drafts_that_hold_share_what_is_read(folder):
    """The model drafts for itself, whole."""
    whole, streamed = pair(folder("llama"), speculate=str(folder("llama")))
    assert tokens(streamed) == tokens(whole)
    assert streamed.model.counts.num_steps < GREEDY.max_tokens


def test_a_server_streams_and_compiles_nothing(folder):
    whole, streamed = pair(folder("qwen2"))
    wanted = tokens(whole)
    budget = streamed.offload_plan.budget_bytes
    how = {"max_num_seqs": 2, "max_model_len": 64, "weights_budget": budget}
    server = AsyncLLM(folder("qwen2"), **how)

    async def ask(prompt):
        return [d.completion async for d in server.stream(prompt, GREEDY)][-1].tokens

    async def ask_all():
        try:
            return await asyncio.gather(*map(ask, PROMPTS))
        finally:
            await server.shutdown()

    with count_compilations() as counts:
        assert asyncio.run(ask_all()) == wanted
    assert counts.requests == 0


@pytest.mark.parametrize(("name", "groups"), [("llama", 1), ("gpt_oss", 2)])
def test_programs_do_not_grow_with_the_depth(tmp_path, monkeypatch, name, groups):
    found = []
    for depth in (4, 8):
        monkeypatch.setitem(CONFIGS, name, CONFIGS[name] | {"num_hidden_layers": depth})
        where = write_checkpoint(tmp_path / str(depth), name)
        llm = LLM(where, weights_budget=budget_of(where))
        assert len(llm.offload_plan.offloaded) == depth - 1
        jax.clear_caches()
        with count_compilations() as counts:
            llm.generate(PROMPTS[:1], GREEDY)
        found.append(counts.requests)
    assert found[0] == found[1]
    assert found[0] <= 2 * (2 + groups)  # of prompts and of decoding: both ends, and the layers


MEASURE = """
import json, sys
import jax, jax.numpy as jnp
jax.jit(lambda x: x + 1)(jnp.zeros(3)).block_until_ready()
from rooflax import LLM, SamplingParams
from rooflax.nn.host_memory import AnonymousPeak, anonymous_bytes
folder, budget = sys.argv[1:]
baseline = anonymous_bytes()
with AnonymousPeak() as sampled:
    llm = LLM(folder, weights_budget=int(budget) or None)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (found,) = llm.generate([[5, 6, 7, 8]], params)
print(json.dumps({"peak": sampled.peak - baseline, "tokens": found.tokens}))
"""


SIXTEEN_LAYERS = {
    "model_type": "llama", "vocab_size": 263, "hidden_size": 768, "intermediate_size": 2048,
    "num_hidden_layers": 16, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is Linux's to tell")
def test_half_the_weights_of_memory_give_the_same_tokens(tmp_path):
    """A checkpoint of 404 MB in float32 in its own process, with all its weights and with half."""
    name, config = read_config(SIXTEEN_LAYERS)
    save_model(tmp_path, name, config, random_weights(name, config), dtype="float32")
    goldens.write_tokenizer(tmp_path)
    plan = layers_of(tmp_path)
    weights = plan.fixed_bytes + sum(plan.layer_bytes)
    assert weights > 380_000_000

    def run(budget):
        command = [sys.executable, "-c", MEASURE, str(tmp_path), str(budget)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return json.loads(done.stdout)

    whole, half = run(0), run(weights // 2)
    assert half["tokens"] == whole["tokens"]
    assert whole["peak"] > weights
    assert half["peak"] < weights // 2 + 2 * max(plan.layer_bytes)
