"""llama.cpp's LoRA files: what they change in a model's file, and PEFT's numbers back from them."""

import gguf
import numpy as np
import pytest

from rooflax import LLM
from rooflax.cli.main import main
from rooflax.errors import CheckpointError, RequestError, UnsupportedModelError
from rooflax.loading.adapters import fused, open_adapter
from rooflax.loading.gguf import GGUFFile
from rooflax.loading.gguf_adapter import adaptable
from rooflax.loading.gguf_adapter_save import save_gguf_adapter
from rooflax.loading.gguf_save import save_gguf
from rooflax.loading.model_info import model_info
from rooflax.models.adapters import targets
from tests import adapter_cases, gguf_cases, goldens
from tests.marks import cases
from tests.support.loading.adapters import RANK, write_adapter

pytestmark = pytest.mark.oldest_jax

Q = "model.layers.0.self_attn.q_proj"
SOME = ["llama", "gpt2", "phi3", "gemma3", "qwen3_5", "qwen3_next", "mistral", "granite4"]


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for module, part in wanted.items():
        np.testing.assert_array_equal(found[module].a, part.a, err_msg=module)
        np.testing.assert_array_equal(found[module].b, part.b, err_msg=module)
        assert found[module].scale == part.scale


@pytest.mark.parametrize("name", cases(gguf_cases.FAMILIES, default=SOME))
def test_pairs_change_the_stored_tensors_and_come_back(name, tmp_path):
    """As llama.cpp adds them: alpha / rank times B A to the tensor of that name."""
    info = model_info(gguf_cases.write_family(tmp_path / "model", name))
    known = targets(info.family, info.config)
    modules = [m for m in adaptable(info, known) if known[m].is_usual]
    left = {m.rpartition(".")[2] for m in known if known[m].is_usual} - {
        m.rpartition(".")[2] for m in modules
    }
    assert left <= {"lm_head", "shared_expert_gate"}
    adapter = open_adapter(write_adapter(tmp_path / "adapter", info, modules), info)
    path, base, merged = (tmp_path / f"{one}.gguf" for one in ("adapter", "base", "merged"))
    save_gguf_adapter(info, adapter, path, "F32")
    save_gguf(info, base, "F32")
    save_gguf(fused(info, adapter), merged, "F32")
    file, before, after = map(GGUFFile, (path, base, merged))
    assert file.metadata["general.architecture"] == before.metadata["general.architecture"]
    scale, changed = file.metadata["adapter.lora.alpha"] / RANK, 0
    for tensor in before.names():
        w = np.asarray(before.read(tensor), np.float32)
        if f"{tensor}.lora_a" in file.names():
            w = w + scale * file.read(f"{tensor}.lora_b") @ file.read(f"{tensor}.lora_a")
            changed += 1
        np.testing.assert_allclose(after.read(tensor), w, rtol=0, atol=1e-5, err_msg=tensor)
    assert 2 * changed == len(file.names()) > 2
    same(open_adapter(path, info).read(info), adapter.read(info))
    other = model_info(base)
    again = open_adapter(path, other)
    if other.family == info.family:
        same(again.read(other), adapter.read(info))
    save_gguf_adapter(other, again, tmp_path / "again.gguf", "F32")
    second = GGUFFile(tmp_path / "again.gguf")
    assert set(second.names()) == set(file.names())
    for tensor in file.names():
        np.testing.assert_array_equal(second.read(tensor), file.read(tensor), err_msg=tensor)


@pytest.mark.parametrize("name", ["rslora", "patterns"])
def test_scales_that_one_alpha_cannot_say(case, tmp_path, name):
    """rsLoRA has one alpha over the rank; differing ones are in B."""
    info = model_info(case("llama_gqa").folder)
    adapter = open_adapter(
        adapter_cases.write_adapter(tmp_path / "a", name, case("llama_gqa").folder), info
    )
    save_gguf_adapter(info, adapter, tmp_path / "a.gguf", "F32")
    again = open_adapter(tmp_path / "a.gguf", info)
    assert again.rank == adapter.rank
    alpha = GGUFFile(tmp_path / "a.gguf").metadata["adapter.lora.alpha"]
    assert (alpha > 0) == (name == "rslora")
    found = again.read(info)
    for module, part in adapter.read(info).items():
        np.testing.assert_array_equal(found[module].a, part.a)
        wanted = part.scale * part.b.astype(np.float64)
        np.testing.assert_allclose(found[module].scale * found[module].b, wanted, rtol=1e-6)


def test_bfloat16_and_other_types(case, tmp_path):
    info = model_info(case("llama_gqa").folder)
    adapter = open_adapter(write_adapter(tmp_path / "a", info), info)
    save_gguf_adapter(info, adapter, tmp_path / "a.gguf", "BF16")
    found = open_adapter(tmp_path / "a.gguf", info).read(info)
    for module, part in adapter.read(info).items():
        np.testing.assert_allclose(found[module].b, part.b, rtol=2**-8)
    with pytest.raises(RequestError, match="an adapter is written as F32 or BF16"):
        save_gguf_adapter(info, adapter, tmp_path / "b.gguf", "Q8_0")
    assert not (tmp_path / "b.gguf").exists()


def test_what_a_file_cannot_say(case, tmp_path):
    info = model_info(case("llama_gqa").folder)
    dora = adapter_cases.write_adapter(tmp_path / "dora", "dora", case("llama_gqa").folder)
    with pytest.raises(UnsupportedModelError, match="is a DoRA, which llama.cpp does not compute"):
        save_gguf_adapter(info, open_adapter(dora, info), tmp_path / "a.gguf", "F32")
    info = model_info(case("smollm3").folder)
    head = open_adapter(write_adapter(tmp_path / "head", info, ["lm_head"]), info)
    with pytest.raises(UnsupportedModelError, match="changes lm_head, of which a GGUF file"):
        save_gguf_adapter(info, head, tmp_path / "a.gguf", "F32")
    info = model_info(case("gpt_neox").folder)
    other = open_adapter(write_adapter(tmp_path / "other", info), info)
    with pytest.raises(UnsupportedModelError, match="writes no GGUF files of gpt_neox, only of"):
        save_gguf_adapter(info, other, tmp_path / "a.gguf", "F32")
    with pytest.raises(UnsupportedModelError, match="writes no GGUF files of gpt_neox, only of"):
        open_adapter(write(tmp_path / "b.gguf", {A: np.zeros((4, 54))}), info)


def write(path, tensors, architecture="llama", **metadata):
    """A file by gguf-py; None leaves a key out."""
    writer = gguf.GGUFWriter(path, architecture)
    keys = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 6.0}
    for key, value in (keys | metadata).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_float32(key, value)
    for name, array in tensors.items():
        if isinstance(array, tuple):
            writer.add_tensor(name, array[0], raw_dtype=array[1])
        else:
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


A, B = "blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"


@pytest.fixture
def pair(case):
    info = model_info(case("llama_gqa").folder)
    target = targets(info.family, info.config)[Q]
    random = np.random.default_rng(0)
    a, b = random.normal(size=(4, target.inputs)), random.normal(size=(target.outputs, 4))
    return info, {A: a, B: b}


def test_without_an_alpha_nothing_is_multiplied(pair, tmp_path):
    info, tensors = pair
    path = write(tmp_path / "a.gguf", tensors, **{"adapter.lora.alpha": None})
    adapter = open_adapter(path, info)
    assert adapter.read(info)[Q].scale == 1
    stated = open_adapter(write(tmp_path / "b.gguf", tensors), info)
    assert stated.read(info)[Q].scale == 1.5


def test_blocks_become_numbers(pair, tmp_path):
    """llama.cpp's converter writes Q8_0 where it is asked to."""
    info, tensors = pair
    wide = {A: np.tile(tensors[A], (8, 1)), B: np.tile(tensors[B], (1, 8))}
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = gguf.quants.quantize(wide[B].astype(np.float32), kind)
    path = write(tmp_path / "a.gguf", {A: wide[A], B: (blocks, kind)})
    found = open_adapter(path, info).read(info)[Q]
    assert found.a.shape[0] == found.b.shape[1] == 32
    exact = open_adapter(write(tmp_path / "b.gguf", wide), info).read(info)[Q]
    assert 0 < np.abs(found.b - exact.b).max() < 0.05


BAD = {
    "another architecture": ({"architecture": "qwen2"}, {}, "general.architecture = 'qwen2'"),
    "a model": ({"general.type": "model"}, {}, "general.type = 'model'; an adapter of"),
    "another kind": ({"adapter.type": "control_vector"}, {}, "adapter.type = 'control_vector'"),
    "a list for a kind": ({"adapter.type": ["lora"]}, {}, r"adapter.type = \['lora'\]"),
    "an activated one": (
        {"adapter.alora.invocation_tokens": [1, 2]}, {}, "tokens after which it begins",
    ),
    "an infinite alpha": ({"adapter.lora.alpha": float("inf")}, {}, "alpha = inf; it must be"),
    "a text as alpha": ({"adapter.lora.alpha": "6"}, {}, "alpha = '6'; it must be"),
    "no pair": ({}, {B: None}, f"lacks {B}"),
    "another shape": ({}, {A: np.zeros((4, 3))}, r"are \[4, 3\] and .*, wanted \[rank, 54\]"),
    "another rank": ({}, {A: np.zeros((3, 54))}, r"wanted \[rank, 54\] and \[120, rank\]"),
    "one axis": ({}, {B: np.zeros(120)}, r"and \[120\], wanted"),
    "NaN": ({}, {A: np.full((4, 54), np.nan)}, "holds NaN or infinity"),
    "an embedding": (
        {}, {"token_embd.weight.lora_a": np.zeros((2, 9))}, "has token_embd.weight.lora_a, which",
    ),
    "a norm": ({}, {"blk.0.attn_norm.weight": np.zeros(54)}, "has blk.0.attn_norm.weight, which"),
    "another layer": (
        {}, {A.replace("0", "99"): np.zeros((4, 54))}, "has blk.99.attn_q.weight.lora_a, which",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_one_sentence(pair, tmp_path, what):
    metadata, changes, message = BAD[what]
    info, tensors = pair
    kept = {name: array for name, array in (tensors | changes).items() if array is not None}
    path = write(tmp_path / "a.gguf", kept, **metadata)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message) as caught:
        open_adapter(path, info).read(info)
    assert "\n" not in str(caught.value)


def test_a_file_without_pairs(pair, tmp_path):
    with pytest.raises(CheckpointError, match="holds no adapter"):
        open_adapter(write(tmp_path / "a.gguf", {}), pair[0])
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="it was cut off"):
        open_adapter(tmp_path / "b.gguf", pair[0])


def test_the_command_line_writes_one_and_opens_it(case, tmp_path, capsys):
    folder = str(case("llama_gqa").folder)
    own = write_adapter(tmp_path / "adapter", model_info(folder))
    path = tmp_path / "adapter.gguf"
    command = ["fuse", folder, "--lora", str(own), "-o", str(path), "--adapter-only"]
    assert main(command) == 2
    assert "--adapter-only writes a GGUF file; say its type" in capsys.readouterr().err
    assert main([*command, "--gguf", "Q4_0"]) == 2
    assert "an adapter is written as F32 or BF16" in capsys.readouterr().err
    assert main([*command, "--gguf", "F32", "--quiet"]) == 0
    assert "adapter.gguf: F32, " in capsys.readouterr().out
    prompt = goldens.prompts()[1]
    wanted, found = (LLM(folder, lora=lora).logits(prompt) for lora in (own, path))
    np.testing.assert_array_equal(found, wanted)
    assert main(["generate", str(path), "-p", "x"]) == 2
    assert "name its base model, and give the file as --lora" in capsys.readouterr().err
    assert main(["generate", folder, "--lora", str(path) + "x.gguf", "-p", "x"]) == 2
    assert "is no folder; an adapter is one with" in capsys.readouterr().err
