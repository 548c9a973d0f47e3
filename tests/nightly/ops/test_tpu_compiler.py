"""The TPU's kernels through its own compiler: for a v5e, without one, where libtpu is installed."""

import functools
import importlib.util
import os
from pathlib import Path

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from rooflax.ops import accelerator, native
from rooflax.ops.attention import AttentionArgs, Paging, paged_attention
from rooflax.ops.format_names import FORMATS
from rooflax.ops.kv_pool import QuantizedPool
from rooflax.ops.linear import ClampedSwiglu, unembed
from rooflax.ops.moe import experts
from tests.engine.ops.test_tpu import MODELS, like, matrix_like

LIBTPU = importlib.util.find_spec("libtpu")
pytestmark = [
    pytest.mark.skipif(LIBTPU is None, reason="libtpu is not installed"),
]
WITHOUT_A_TPU = {
    "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}  # fmt: skip


@pytest.fixture(scope="module")
def temporary_bytes():
    """Compiles a function of shapes; what it needs in memory beside its arguments and results."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_LIBRARY_PATH", str(Path(LIBTPU.origin).parent / "libtpu.so"))
        for name, value in WITHOUT_A_TPU.items():
            patch.setenv(name, os.environ.get(name, value))
        patch.setattr(accelerator, "platform", lambda: "tpu")
        patch.setattr(native, "status", lambda: native.Status(False, "this is a TPU"))
        topology = topologies.get_topology_desc("v5e:2x2", platform="tpu")
        device = SingleDeviceSharding(topology.devices[0])

        def compiled(function, *args):
            jitted = jax.jit(function, in_shardings=device, out_shardings=device)
            return jitted.lower(*args).compile().memory_analysis().temp_size_in_bytes

        cached = jax.config.jax_enable_compilation_cache  # what it keeps of these cannot be read
        jax.config.update("jax_enable_compilation_cache", False)
        yield compiled
        jax.config.update("jax_enable_compilation_cache", cached)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pool", ["bfloat16", "int8"])
def test_attention(temporary_bytes, model, pool):
    heads, kv_heads, head_dim, window, sinks = MODELS[model]
    size, width, length = accelerator.block_size(), accelerator.cache_width(head_dim), 32
    step = functools.partial(paged_attention, implementation="pallas")
    args = AttentionArgs(0.1, window, like((heads,), "float32") if sinks else None)
    for rows, queries in ((8, 1), (1, 512)):
        blocks = like((rows * length, kv_heads, size, width), pool)
        if pool == "int8":
            blocks = QuantizedPool(blocks, like(blocks.shape[:3], "float32"))
        row = like((rows,), "int32")
        needed = temporary_bytes(
            step,
            like((rows, queries, heads, head_dim), "bfloat16"),
            blocks,
            blocks,
            Paging(like((rows, length), "int32"), row, like((rows, queries), "int32"), row),
            args,
        )
        assert needed < 8 << 20  # nothing of the pools


@pytest.mark.parametrize("format", FORMATS)
def test_products(temporary_bytes, format):
    for rows, inner, outer in ((1, 4096, 6144), (512, 14336, 4096), (8, 2880, 5120)):
        weight, x = matrix_like(format, inner, outer), like((rows, inner), "bfloat16")
        step = functools.partial(unembed, implementation="pallas")
        assert temporary_bytes(step, x, weight) < 1 << 20


@pytest.mark.parametrize("format", ["w8a16", "w4a16", "mxfp4-a16"])
def test_xla_widens_four_bits_in_memory_and_int8_inside_its_product(temporary_bytes, format):
    weight, x = matrix_like(format, 14336, 8192), like((8, 14336), "bfloat16")
    needed = temporary_bytes(functools.partial(unembed, implementation="xla"), x, weight)
    assert (needed > 14336 * 8192) == (format != "w8a16")
    assert temporary_bytes(functools.partial(unembed, implementation="pallas"), x, weight) < 1 << 20


@pytest.mark.parametrize("format", ["mxfp4-a16", "mxfp4-a8", "w8a8"])
def test_experts(temporary_bytes, format):
    step = functools.partial(experts, activation=ClampedSwiglu(), implementation="pallas")
    for tokens, most in ((1, 1 << 20), (512, 192 << 20)):  # 4096 rows; the experts are 1 GB
        chosen = like((tokens, 4), "int32"), like((tokens, 4), "float32")
        gate_up = matrix_like(format, 2880, 5760, (32,), (2, 2880)), like((32, 2, 2880), "bfloat16")
        down = matrix_like(format, 2880, 2880, (32,)), like((32, 2880), "bfloat16")
        x = like((tokens, 2880), "bfloat16")
        assert temporary_bytes(step, x, *chosen, *gate_up, *down) < most
