"""`rooflax inspect`, `models` and `doctor`: what is said before anything is loaded."""

import asyncio
import json
import os
import re
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from rooflax import AsyncLLM
from rooflax.engine.engine import Engine
from rooflax.loading import hub, load, weights
from rooflax.loading.model_info import embedded_folder
from rooflax.loading.safetensors import TensorToWrite, write_safetensors
from rooflax.loading.save import save_model
from rooflax.models.initialize import random_weights
from rooflax.models.presets import PRESETS
from rooflax.models.registry import read_config
from rooflax.ops import accelerator, native


@pytest.fixture
def nothing_loads(monkeypatch):
    def reject(*args, **kwargs):
        raise AssertionError("weights were made or read")

    monkeypatch.setattr(load, "random_weights", reject)
    monkeypatch.setattr(weights.WeightReader, "weights", reject)


def test_a_huge_preset_is_known_without_loading(rooflax, nothing_loads):
    ran = rooflax("inspect", "preset:llama-3.1-70b", "--batch", 2, "-c", 4096, "--json")
    found = json.loads(ran.out)
    assert found["weights"]["parameters"] == 70_553_706_496
    memory = found["memory"]
    assert 1 <= memory["weights_bytes"] / (2 * 70_553_706_496) < 1.001  # and RoPE's table
    assert found["weights"]["published_bytes"] == 2 * 70_553_706_496
    parts = ("weights_bytes", "kv_cache_bytes", "workspace_bytes")
    assert memory["total_bytes"] == sum(memory[part] for part in parts)
    assert memory["fits"] == (memory["total_bytes"] <= memory["free_bytes"])
    text = rooflax("inspect", "preset:llama-3.1-70b").out
    assert "70.55 B" in text and "141.1 GB" in text
    assert max(map(len, text.splitlines())) <= 80


def test_widths_of_dense_layers_of_experts_and_of_shared_ones_are_told_apart(rooflax):
    found = json.loads(rooflax("inspect", "preset:deepseek-v3", "--json").out)["architecture"]
    widths = {key: value for key, value in found.items() if "intermediate" in key}
    assert widths == {
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "shared_expert_intermediate_size": 2048,
    }
    assert found["num_dense_layers"] == 3


def test_batch_length_and_width_change_the_estimate(rooflax):
    def memory(*flags):
        return json.loads(rooflax("inspect", "preset:gpt2-tiny", *flags, "--json").out)["memory"]

    plain = memory()
    assert memory("--dtype", "bfloat16")["weights_bytes"] * 2 == plain["weights_bytes"]
    assert memory("--kv-dtype", "bfloat16")["kv_cache_bytes"] * 2 == plain["kv_cache_bytes"]
    assert memory("--batch", 3)["kv_cache_bytes"] > 2 * plain["kv_cache_bytes"]
    assert memory("-c", 64)["kv_cache_bytes"] < plain["kv_cache_bytes"]
    assert rooflax("inspect", "preset:gpt2-tiny", "-c", 9999).code == 2
    assert rooflax("inspect", "preset:gpt2-tiny", "--batch", 0).code == 2


@pytest.mark.parametrize(
    ("model", "flags", "how"),
    [
        ("preset:gpt-oss-tiny", ("-q", "int8", "-c", 300), {"quantize": "int8"}),
        ("preset:qwen2.5-tiny", ("--kv-dtype", "int8", "-c", 300), {"kv_dtype": "int8"}),
        (None, ("-c", 300), {}),
    ],
)
def test_what_is_announced_is_what_is_allocated(rooflax, monkeypatch, model, flags, how):
    """The arrays of a loaded model, of its cache for one sequence, and of a server's cache."""
    monkeypatch.setattr(Engine, "warm_up_all", lambda self, report: [])  # not what is asked here
    found = json.loads(rooflax("inspect", *filter(None, [model]), *flags, "--json").out)["memory"]
    server = AsyncLLM(model, max_model_len=300, **how)
    asyncio.run(server.shutdown(drain=False))
    llm, runner = server.llm, server._thread.engine.runner
    assert found["weights_bytes"] == sum(a.nbytes for a in jax.tree.leaves(llm.model))
    assert found["kv_cache_bytes"] == llm.new_engine(1, 300).kv_cache_bytes
    assert found["server"]["kv_blocks"] == list(runner.num_blocks)
    pools = jax.tree.leaves(runner.cache)
    assert found["server"]["kv_cache_bytes"] == sum(pool.nbytes for pool in pools)
    assert (
        found["server"]["sequences"]
        == found["server"]["of_full_length"]
        == runner.config.max_num_seqs
    )


def test_formats_of_a_folder_come_from_its_headers(rooflax, tmp_path, nothing_loads):
    name, config = read_config(PRESETS["gpt2-tiny"])
    save_model(tmp_path / "m", name, config, random_weights(name, config), dtype="bfloat16")
    found = json.loads(rooflax("inspect", tmp_path / "m", "--json").out)
    (entry,) = found["weights"]["formats"]
    assert entry["format"] == "BF16"
    assert entry["bytes"] == 2 * found["weights"]["parameters"]


def test_a_latent_cache_is_counted_as_one_key_for_all_heads(rooflax):
    """DeepSeek-V2-Lite: 512 + 64 numbers a token and layer, where 16 heads would have 5,120."""
    flags = ("inspect", "preset:deepseek-v2-lite", "--kv-dtype", "bfloat16", "-c", 16, "--json")
    found = json.loads(rooflax(*flags).out)
    assert found["weights"]["parameters"] == 15_706_484_224
    assert found["memory"]["kv_cache_bytes"] == 27 * 2 * 16 * 576 * 2  # a block, and block 0
    sizes = {"rank": 512, "query_rank": None, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
    architecture = found["architecture"]
    assert {k: v for k, v in architecture.items() if k.startswith("latent")} == {
        f"latent_{key}": value for key, value in sizes.items()
    } | {"latent_bias": False}
    assert "layer_kv_heads" not in architecture


def test_mxfp4_is_called_so(rooflax, tmp_path):
    raw = PRESETS["gpt-oss-tiny"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    blocks, scales = np.zeros((2, 64, 4, 16), np.uint8), np.zeros((2, 64, 4), np.uint8)
    tensors = [
        TensorToWrite("mlp.experts.gate_up_proj_blocks", "U8", blocks.shape, lambda: blocks),
        TensorToWrite("mlp.experts.gate_up_proj_scales", "U8", scales.shape, lambda: scales),
    ]
    write_safetensors(tmp_path / "model.safetensors", tensors)
    found = json.loads(rooflax("inspect", tmp_path, "--json").out)
    assert found["weights"]["formats"] == [
        {"format": "MXFP4", "tensors": 2, "bytes": blocks.nbytes + scales.nbytes}
    ]
    assert found["architecture"]["layer_windows"] == {"window 128": 2, "full": 2}
    assert "in the file: MXFP4" in rooflax("inspect", tmp_path).out


def test_bytes_per_device_of_a_mesh_that_is_not_here(rooflax):
    flags = ("inspect", "preset:gpt-oss-20b", "--dtype", "bfloat16", "-c", 8192)
    ran = rooflax(*flags, "--mesh", "tensor=2,expert=4", "--json")
    found = json.loads(ran.out)["memory"]
    assert (found["mesh"]["devices"], found["fits"], found["server"]) == (8, None, None)
    assert found["mesh"]["axes"] == {"expert": 4, "tensor": 2}
    assert found["weights_bytes"] / found["mesh"]["weights_bytes_per_device"] > 6
    assert found["kv_cache_bytes"] == 2 * found["mesh"]["kv_cache_bytes_per_device"]
    shown = rooflax(*flags, "--mesh", "tensor=8").out
    size = "4.98" if native.prefers_pairs() else "4.88"  # 360 inputs are filled up to 384
    assert re.search(rf"on each of 8 devices \(tensor=8\)\n  weights +{size} GiB\n", shown)
    assert "only these devices could say" in shown
    ran = rooflax(*flags, "--mesh", "tensor=8", "-q", "mxfp4")
    assert ran.code == 2 and "(360 = 11 x 32 + 8)" in ran.err
    assert rooflax(*flags, "--mesh", "stage=5").code == 2


def padding_of(rooflax, *flags):
    return json.loads(rooflax("inspect", *flags, "--json").out)["memory"]["padding_bytes"]


def test_padding_is_counted(rooflax, monkeypatch):
    """Rows of the vocabulary on a mesh; ends of blocks; and a TPU's lanes behind every head."""
    gpt2 = ("preset:gpt2", "-c", "1024")
    assert padding_of(rooflax, *gpt2) == {"head_dim": 0, "block_size": 0, "vocab": 0}
    assert "padding" not in rooflax("inspect", *gpt2).out
    row = 768 * 4
    assert padding_of(rooflax, *gpt2, "--mesh", "tensor=4")["vocab"] == 3 * row  # of 50,257
    shown = rooflax("inspect", *gpt2, "--mesh", "tensor=4").out
    assert f"rows of the vocabulary  {3 * row:,} bytes" in shown
    token = 2 * 12 * row  # K and V of 12 layers
    short = padding_of(rooflax, "preset:gpt2", "-c", "1001", "--batch", "3")
    assert short == {"head_dim": 0, "block_size": 3 * 7 * token, "vocab": 0}

    monkeypatch.setattr(accelerator, "platform", lambda: "tpu")
    wide = ("preset:gpt2", "-c", "1000", "--dtype", "float32")
    found = json.loads(rooflax("inspect", *wide, "--json").out)["memory"]
    assert found["padding_bytes"]["head_dim"] == (1000 + 128) * token  # block 0 too; 64 to 128
    assert found["padding_bytes"]["block_size"] == 24 * 2 * token
    assert found["kv_cache_bytes"] == (1024 + 128) * 2 * token
    codes = padding_of(rooflax, *wide, "--kv-dtype", "fp8")
    assert codes["head_dim"] == (1000 + 128) * token // 4
    assert "heads in the KV cache" in rooflax("inspect", *wide).out


@pytest.mark.parametrize("broken", ["nowhere/at/all", "preset:nope"])
def test_what_is_not_there_is_one_sentence(rooflax, broken):
    ran = rooflax("inspect", broken)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize(
    "name", ["with spaces", "\u00fc\u4f60 \U0001f600", "two\nlines", "-p", "a'b\"c"]
)
def test_folders_of_any_name_are_opened(rooflax, tmp_path, name):
    folder = tmp_path / name
    shutil.copytree(embedded_folder(), folder, copy_function=shutil.copyfile)
    assert rooflax("inspect", folder).code == 0
    os.truncate(folder / "model.safetensors", 5000)
    ran = rooflax("inspect", folder)
    assert ran.code == 2 and ran.err.count("\n") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read(rooflax, tmp_path):
    (tmp_path / "m").mkdir(mode=0)
    ran = rooflax("inspect", tmp_path / "m")
    assert ran.code == 2 and ran.err.count("\n") == 1


def test_files_that_are_no_model_are_one_sentence(rooflax, tmp_path):
    np.savez(tmp_path / "model.npz", weight=np.zeros(3))
    (tmp_path / "model.onnx").write_bytes(b"\x08\x07")
    for path in (tmp_path / "model.npz", tmp_path / "model.onnx"):
        ran = rooflax("inspect", path)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert path.name in ran.err


def test_models_lists_downloads_and_presets(rooflax, monkeypatch):
    held = SimpleNamespace(repo_id="owner/name", size_on_disk=3 << 30, revisions=(1, 2))
    monkeypatch.setattr(hub, "cached_models", lambda: [held])
    ran = rooflax("models")
    assert "  owner/name  3.00 GiB\n" in ran.out
    assert all(f"preset:{name} " in ran.out for name in PRESETS)
    found = json.loads(rooflax("models", "--json").out)
    assert found["downloaded"] == [{"model": "owner/name", "bytes": 3 << 30, "revisions": 2}]
    assert {entry["model"]: entry["parameters"] for entry in found["presets"]}[
        "preset:gpt2"
    ] == 124_439_808


def test_models_removes(rooflax, monkeypatch):
    ran = rooflax("models", "--remove", "nobody/nothing")
    assert (ran.code, ran.out) == (2, "")
    said = "unknown: rm a/b (did you mean --remove?); see rooflax models --help"
    assert said in rooflax("models", "rm", "a/b").err
    monkeypatch.setattr(hub, "remove", lambda name: 5 << 20)
    assert rooflax("models", "--remove", "a/b").out == "removed a/b, 5.0 MiB free again\n"


def test_doctor_says_what_is_here(rooflax, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # of any length; all else fits a wide terminal
    rooflax("doctor")
    found = json.loads(rooflax("doctor", "--json", "-t", 3).out)
    assert list(found) == [
        "versions",
        "devices",
        "host",
        "kernels",
        "variants",
        "defaults",
        "compile_cache",
        "hub",
    ]
    assert found["host"]["threads"] == 3
    assert found["compile_cache"]["tiny_program"] == "hit"
    assert list(found["kernels"]) == ["linear", "attention", "moe"]
    for kernels in found["kernels"].values():
        assert kernels["native"].startswith(("used (", "cannot run: "))
        used = kernels["native"].startswith("used")
        assert kernels["xla"] == ("available" if used else "used")
    assert found["defaults"]["layers"].startswith("scan where kernels read")
    assert found["defaults"]["float32_products"] == "highest"
    assert {device["platform"] for device in found["devices"]} == {"cpu"}
    assert max(map(len, rooflax("doctor").out.splitlines())) <= 100
