"""Bytes and operations of a step, against the arrays' own and against arithmetic by hand."""

import jax
import pytest

from rooflax.bench.counting import decode_cost, expected_experts, prefill_cost, visible_pairs
from rooflax.bench.measure import Bench
from rooflax.bench.workload import Workload
from rooflax.loading.model_info import model_info
from rooflax.models.memory import estimate
from rooflax.nn.storage import Storage
from rooflax.ops.accelerator import block_size

WIDTHS = {"storage": Storage(), "kv_dtype": "float32"}


def cost(name, batch=1, context=8):
    return decode_cost(model_info(name).config, batch=batch, context=context, **WIDTHS)


@pytest.mark.parametrize("name", ["preset:gpt2-tiny", "preset:qwen2.5-tiny"])
def test_weight_bytes_are_the_arrays_bytes_less_what_is_looked_up(name):
    """All weights are read; of an embedding that is no head, only the rows of this step."""
    model = Bench(Workload(name)).llm.model
    arrays = jax.tree.leaves(model.weights)
    whole = sum(array.nbytes for array in arrays)
    unread = 0
    if "position" in model.weights:
        unread += model.weights["position"].nbytes * (1 - 1 / model.weights["position"].shape[0])
    if "lm_head" in model.weights:
        unread += model.weights["embed"].nbytes * (1 - 1 / model.weights["embed"].shape[0])
    assert cost(name).weight_bytes == pytest.approx(whole - unread, abs=8)


def test_kv_bytes_are_the_caches_bytes_for_the_visible_tokens():
    bench = Bench(Workload("preset:qwen2.5-tiny"))
    pool = bench.engine.runner.cache.k[0]
    per_token = 2 * pool.nbytes // (pool.shape[0] * pool.shape[2])
    layers = bench.llm.info.config.num_layers
    assert cost("preset:qwen2.5-tiny", batch=3, context=20).kv_bytes == 3 * 20 * per_token * layers


def test_windows_and_experts_are_read_in_part():
    config = model_info("preset:gpt-oss-tiny").config
    short, long = cost("preset:gpt-oss-tiny", context=4), cost("preset:gpt-oss-tiny", context=4000)
    windows = [config.groups.windows[g] for g in config.groups.of_layer]
    per_token = 2 * config.num_kv_heads * config.head_dim * 4
    visible = sum(min(4000, window or 4000) - min(4, window or 4) for window in windows)
    assert long.kv_bytes - short.kv_bytes == visible * per_token
    many = cost("preset:gpt-oss-tiny", batch=64)
    assert many.weight_bytes > cost("preset:gpt-oss-tiny").weight_bytes
    assert expected_experts(32, 4, 1) == pytest.approx(4)
    assert expected_experts(32, 4, 10_000) == pytest.approx(32)


def test_layers_that_keep_nothing_read_what_others_keep():
    """Of 35 layers 28 have windows of 512 and heads of 256, 7 see all with heads of 512; the first
    15 keep K and V, 12 and 3 of them."""
    config = model_info("preset:gemma-4-e2b").config
    found = decode_cost(config, batch=1, context=1000, **WIDTHS)
    assert found.kv_bytes == 2 * 4 * (28 * 512 * 256 + 7 * 1000 * 512)
    need = estimate(config, **WIDTHS, rows=1, tokens=1000, num_blocks=(64, 34))
    assert need.kv_cache == 2 * 4 * block_size() * (12 * 34 * 256 + 3 * 64 * 512)


def test_operations_of_gpt2_by_hand():
    """Two per weight of every matmul, and four per head dimension and visible pair."""
    config = model_info("preset:gpt2").config
    hidden, mlp, layers, vocab = 768, 3072, 12, 50257
    products = layers * (3 * hidden * hidden + hidden * hidden + 2 * hidden * mlp) + vocab * hidden
    assert cost("preset:gpt2", context=10).operations == 2 * products + layers * 4 * hidden * 10
    prompt = prefill_cost(config, batch=2, prompt=5, **WIDTHS)
    blocks = products - vocab * hidden
    assert prompt.operations == (
        2 * (blocks * 10 + vocab * hidden * 2) + layers * 4 * hidden * 2 * (1 + 2 + 3 + 4 + 5)
    )


def test_visible_pairs():
    assert visible_pairs(4, None) == 10
    assert visible_pairs(4, 2) == 1 + 2 + 2 + 2
    assert visible_pairs(2, 5) == 3
