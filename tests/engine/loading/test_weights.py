"""From a checkpoint's tensors to weights and back: names, waivers, rejections, memory."""

import contextlib
import itertools
import json
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rooflax import from_state_dict, load, save
from rooflax.errors import CheckpointError, RequestError, UnsupportedModelError
from rooflax.loading import mxfp4
from rooflax.loading.checkpoint import Checkpoint
from rooflax.loading.safetensors import TensorToWrite, dtype_name, write_safetensors
from rooflax.models.presets import PRESETS
from rooflax.ops import native
from tests import goldens
from tests.support.disk import FULL, Disk, Killed, touches

pytestmark = pytest.mark.oldest_jax

FAMILIES = ["gpt2", "llama_bias", "llama3_tied", "qwen2_window", "gpt_oss"]


@pytest.fixture
def write(tmp_path):
    """Writes a tiny checkpoint and gives its folder; `change` edits its tensors."""

    def make(variant, change=None, name="m", **config):
        reference = goldens.committed(variant)
        return goldens.write_checkpoint(
            tmp_path / name, variant, reference, change=change, config=config
        )

    return make


def same(a, b):
    leaves, others = jax.tree.leaves(a.weights), jax.tree.leaves(b.weights)
    return len(leaves) == len(others) and all(
        np.array_equal(x, y) for x, y in zip(leaves, others, strict=True)
    )


def rename(pairs):
    def change(tensors):
        for name in list(tensors):
            for old, new in pairs:
                if name.startswith(old):
                    tensors[new + name.removeprefix(old)] = tensors.pop(name)

    return change


def test_gpt2_with_and_without_its_prefix(write):
    """The hub's gpt2 says `h.0.attn...`, transformers writes `transformer.h.0.attn...`."""
    bare = write("gpt2", rename([("transformer.", "")]), "bare")
    assert "wte.weight" in Checkpoint(bare).names()
    assert same(load(bare), load(write("gpt2")))


@pytest.mark.parametrize(
    ("variant", "name", "shape"),
    [
        ("gpt2", "transformer.h.0.attn.bias", (1, 1, 131, 131)),
        ("gpt2", "transformer.h.2.attn.masked_bias", ()),
        ("gpt2", "h.1.attn.bias", (1, 1, 131, 131)),
        ("llama_gqa", "model.layers.0.self_attn.rotary_emb.inv_freq", (10,)),
        ("llama_gqa", "model.rotary_emb.inv_freq", (10,)),
    ],
)
def test_buffers_that_we_compute_are_waived(write, variant, name, shape):
    with_buffer = write(variant, lambda t: t.update({name: np.ones(shape, np.float32)}))
    assert same(load(with_buffer), load(write(variant, name="plain")))


@pytest.mark.parametrize(("variant", "embed"), [
    ("gpt2", "transformer.wte.weight"), ("llama3_tied", "model.embed_tokens.weight"),
])  # fmt: skip
def test_a_tied_head_is_waived_if_it_is_the_embedding(write, variant, embed):
    equal = write(variant, lambda t: t.update({"lm_head.weight": t[embed].copy()}))
    assert same(load(equal), load(write(variant, name="plain")))
    other = write(variant, lambda t: t.update({"lm_head.weight": t[embed] + 1}), "other")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs.*tie_word_embeddings"):
        load(other)
    cut = write(variant, lambda t: t.update({"lm_head.weight": t[embed][:-1].copy()}), "cut")
    with pytest.raises(CheckpointError, match="lm_head"):
        load(cut)


def test_an_untied_head_is_not_waived(write):
    untied = write(
        "llama3_tied",
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] * 2}),
        tie_word_embeddings=False,
    )
    model = load(untied)
    np.testing.assert_array_equal(model.weights["lm_head"], model.weights["embed"] * 2)
    with pytest.raises(CheckpointError, match="lacks lm_head.weight"):
        load(write("llama3_tied", name="none", tie_word_embeddings=False))


def test_missing_tensors_are_named_with_their_shapes(write):
    def change(tensors):
        for name in [n for n in tensors if ".mlp." in n or ".self_attn.q" in n]:
            del tensors[name]

    with pytest.raises(CheckpointError) as error:
        load(write("llama_bias", change))
    message = str(error.value)
    assert "lacks model.layers.0.self_attn.q_proj.weight [120, 54]" in message
    # Of three layers each q's two, gate's, up's and down's six: 24 in all.
    assert message.count("model.layers.") == 10 and "and 14 more" in message


def test_superfluous_tensors_are_named_with_their_shapes(write):
    def change(tensors):
        for index in range(12):
            tensors[f"extra.{index}"] = np.zeros((2, index + 1), np.float32)

    with pytest.raises(CheckpointError, match=r"does not use: extra\.0 \[2, 1\];.*and 2 more"):
        load(write("qwen2", change))


def test_a_bias_that_config_json_denies_is_superfluous(write):
    with pytest.raises(CheckpointError, match=r"does not use:.*q_proj\.bias \[120\]"):
        load(write("llama_bias", attention_bias=False))


@pytest.mark.parametrize(
    ("name", "array", "shapes"),
    [
        ("model.norm.weight", np.zeros(53), r"\[53\], wanted \[54\]"),
        ("model.norm.weight", np.zeros((54, 1)), r"\[54, 1\], wanted \[54\]"),
        ("model.embed_tokens.weight", np.zeros((54, 263)), r"\[54, 263\], wanted \[263, 54\]"),
        (
            "model.layers.1.self_attn.k_proj.weight",
            np.zeros((120, 54)),
            r"\[120, 54\], wanted \[40, 54\]",
        ),
    ],
)
def test_misshapen_tensors_are_named_with_both_shapes(write, name, array, shapes):
    with pytest.raises(CheckpointError, match=shapes):
        load(write("llama_gqa", lambda t: t.update({name: array.astype(np.float32)})))


@pytest.mark.parametrize(
    ("variant", "name", "dtype", "said"),
    [
        *(
            ("llama_gqa", "model.norm.weight", dtype, f"{said}, wanted floating point")
            for dtype, said in ((bool, "BOOL"), (np.int8, "I8"), ("<c8", "C64"))
        ),
        ("gpt_oss_mxfp4", "model.layers.0.mlp.experts.down_proj_blocks", np.int8, "I8, wanted U8"),
        ("gpt_oss_mxfp4", "model.layers.0.mlp.experts.down_proj_scales", "<f4", "F32, wanted U8"),
    ],
)
def test_weights_of_a_type_that_is_no_weights_are_named(write, variant, name, dtype, said):
    with pytest.raises(CheckpointError, match=rf"{name} is {said}"):
        load(write(variant, lambda t: t.update({name: t[name].astype(dtype)})))


def test_packed_fp4_is_rejected_by_name(write):
    path = write("llama_gqa") / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    entry = header["model.norm.weight"]
    begin, stop = entry["data_offsets"]
    entry |= {"dtype": "F4", "shape": [2 * (stop - begin)]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is F4"):
        load(path.parent)


def with_value(write, value, **where):
    """A checkpoint with one weight set, which quantised shares its scale with 31 others."""

    def change(tensors):
        tensors["lm_head.weight"] = tensors["lm_head.weight"].copy()
        tensors["lm_head.weight"][3, 40] = value

    return write("gpt_oss", change, **where)


@pytest.mark.parametrize(("quantize", "most"), [("w4a8", 524032), ("w8a16-g32", 8319008)])
def test_check_rejects_a_finite_weight_that_the_format_cannot_hold(write, quantize, most):
    folder = with_value(write, 2.0**23)
    found = np.asarray(load(folder, quantize=quantize).weights["lm_head"].numbers())
    assert np.isfinite(found).all() and found[40, 3] == most  # the largest that there is
    with pytest.raises(CheckpointError, match=r"lm_head\.weight holds 8\.38861e.06, and int.*most"):
        load(folder, quantize=quantize, check=True)
    load(with_value(write, 2.0**16, name="good"), quantize=quantize, check=True)
    load(folder, quantize="int8", check=True)


@pytest.mark.parametrize("quantize", ["int4", "mxfp4", "int8", "fp8"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_quantised_nan_and_infinity_are_nan_or_rejected(write, quantize, value):
    folder = with_value(write, value)
    found = np.asarray(load(folder, quantize=quantize).weights["lm_head"].numbers())
    assert np.isnan(found[40, 3]) and np.isfinite(np.delete(found, 3, axis=1)).all()
    with pytest.raises(CheckpointError, match=r"lm_head\.weight holds NaN or infinity"):
        load(folder, quantize=quantize, check=True)


def test_a_scale_of_nan_in_an_mxfp4_checkpoint_stays_nan(write):
    name = "model.layers.1.mlp.experts.down_proj_scales"

    def change(tensors):
        tensors[name] = tensors[name].copy()
        tensors[name][2, 5, 0] = 255

    folder = write("gpt_oss_mxfp4", change)
    down = np.asarray(load(folder).weights["layers"][1]["mlp.down"])  # widened to float32
    broken = np.zeros(down.shape, bool)
    broken[2, :32, 5] = True
    np.testing.assert_array_equal(np.isnan(down), broken)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down_proj holds NaN"):
        load(folder, check=True)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("variant", ["llama_gqa", "gpt_oss"])
def test_check_rejects_weights_that_are_not_finite(write, variant, value):
    name = "model.layers.1.self_attn.v_proj.weight"

    def change(tensors):
        tensors[name][3, 4] = value

    folder = write(variant, change)
    load(folder)
    # Fused with q and k, so the slot is named by its first tensor.
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn.*NaN or infinity"):
        load(folder, check=True)
    load(write(variant, name="good"), check=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_have_the_dtype_asked_for(write, dtype):
    for variant in ("llama_gqa", "gpt_oss_mxfp4"):
        model = load(write(variant, name=variant), dtype=dtype)
        assert {leaf.dtype for leaf in jax.tree.leaves(model.weights)} == {jnp.dtype(dtype)}
        wanted = model.num_parameters * jnp.dtype(dtype).itemsize
        if native.prefers_pairs() and dtype == "bfloat16":  # filled up to whole tiles
            assert wanted < model.weights_bytes < 3 * wanted
        else:
            assert model.weights_bytes == wanted


def test_mxfp4_is_exact_number_by_number():
    blocks, scales = goldens.pack(np.random.RandomState(0), (3, 64, 5))
    np.testing.assert_array_equal(mxfp4.dequantize(blocks, scales), goldens.unpack(blocks, scales))


def test_every_mxfp4_nibble_and_extreme_scales():
    """2^-127 times 0.5 is a denormal that float32 still holds exactly."""
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 16, 1, 16)
    for scale in (0, 1, 127, 252):
        scales = np.full((1, 16, 1), scale, np.uint8)
        got = mxfp4.dequantize(blocks, scales)
        np.testing.assert_array_equal(got, goldens.unpack(blocks, scales))
        assert np.isfinite(got).all()


@pytest.mark.parametrize(
    ("blocks", "scales"),
    [((5, 8, 2, 8), (5, 8, 2)), ((5, 8, 16), (5, 8)), ((5, 8, 2, 16), (5, 8, 3))],
)
def test_mxfp4_halves_that_do_not_fit_each_other(write, blocks, scales):
    name = "model.layers.0.mlp.experts.down_proj"

    def change(tensors):
        tensors[f"{name}_blocks"] = np.zeros(blocks, np.uint8)
        tensors[f"{name}_scales"] = np.zeros(scales, np.uint8)

    with pytest.raises(CheckpointError, match=r"down_proj is stored as MXFP4.*wanted"):
        load(write("gpt_oss_mxfp4", change))


def test_mxfp4_blocks_without_scales_are_a_missing_tensor(write):
    name = "model.layers.0.mlp.experts.down_proj"
    with pytest.raises(CheckpointError, match=r"lacks .*experts\.down_proj \[5, 32, 64\]"):
        load(write("gpt_oss_mxfp4", lambda t: t.pop(f"{name}_scales")))


def test_progress_adds_up_to_the_weights(write):
    seen = []
    model = load(write("llama_gqa"), progress=seen.append)
    assert sum(seen) == model.weights_bytes and len(seen) == len(jax.tree.leaves(model.weights))


def test_state_dict_of_numpy_arrays(write):
    variant = "llama_bias"
    reference = goldens.committed(variant)
    tensors = goldens.tensors(variant, reference)
    model = from_state_dict(reference.config, tensors)
    assert same(model, load(write(variant)))
    with pytest.raises(CheckpointError, match="lacks model.norm.weight"):
        from_state_dict(
            reference.config, {n: t for n, t in tensors.items() if n != "model.norm.weight"}
        )
    with pytest.raises(CheckpointError, match="model.norm.weight is a list"):
        from_state_dict(reference.config, tensors | {"model.norm.weight": [1.0] * 54})
    with pytest.raises(CheckpointError, match="model.norm.weight: .*complex128"):
        from_state_dict(reference.config, tensors | {"model.norm.weight": np.ones(54) * 1j})
    with pytest.raises(UnsupportedModelError, match="'extra'"):
        from_state_dict(reference.config | {"extra": 1}, tensors)


def test_state_dict_of_jax_arrays_and_bfloat16(write):
    reference = goldens.committed("gpt_oss")
    tensors = goldens.tensors("gpt_oss", reference)
    assert tensors["lm_head.weight"].dtype == ml_dtypes.bfloat16
    plain = load(write("gpt_oss"))
    assert same(from_state_dict(reference.config, tensors), plain)
    on_device = {name: jnp.asarray(array) for name, array in tensors.items()}
    assert same(from_state_dict(reference.config, on_device), plain)


@pytest.mark.skipif(not goldens.HAVE_TORCH, reason="takes torch tensors")
@pytest.mark.parametrize("variant", ["gpt2", "llama_bias", "gpt_oss"])
@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bfloat16"])
def test_state_dict_of_a_torch_model(variant, narrow):
    import torch

    reference = goldens.committed(variant)
    model = goldens.reference_model(variant)
    config = model.config.to_dict()
    model = model.to(torch.bfloat16) if narrow else model
    got = from_state_dict(config, model.state_dict())
    tensors = {
        name: goldens.values(variant, name, shape) for name, shape in reference.shapes.items()
    }
    if narrow:
        tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()}
    assert same(got, from_state_dict(reference.config, tensors))


@pytest.mark.parametrize("variant", FAMILIES)
def test_save_and_load_round_trip(write, variant, tmp_path):
    model = load(write(variant))
    save(model, tmp_path / "saved", dtype="float32")
    again = load(tmp_path / "saved")
    assert same(again, model) and again.config == model.config
    names = set(Checkpoint(tmp_path / "saved").names())
    assert names == set(goldens.committed(variant).shapes)
    save(model, tmp_path / "saved")  # replaces the folder; bfloat16 unless told otherwise
    assert {Checkpoint(tmp_path / "saved").info(n).dtype for n in names} == {"BF16"}
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("variant", "quantize"), [("deepseek_v3", None), ("deepseek_v2_groups", "int8")]
)
def test_a_tensor_that_two_weights_share_is_saved_whole(write, variant, quantize, tmp_path):
    """kv_b_proj, whose rows are of keys and of values; quantised, both have arrays of their own."""
    folder = write(variant)
    model = load(folder, quantize=quantize)
    save(model, tmp_path / "saved", dtype="float32")
    again = load(tmp_path / "saved")
    assert same(again, model) and again.config == model.config
    if quantize is None:
        read, wrote = Checkpoint(folder), Checkpoint(tmp_path / "saved")
        for name in (n for n in read.names() if "experts" not in n):
            np.testing.assert_array_equal(wrote.read(name), read.read(name))


@pytest.mark.skipif(not goldens.HAVE_TORCH, reason="asks transformers, which is not installed")
@pytest.mark.parametrize("variant", [*FAMILIES, "deepseek_v2", "deepseek_v3"])
def test_transformers_opens_what_we_save_and_says_the_same(write, variant, tmp_path):
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    save(load(write(variant)), tmp_path / "saved", dtype="float32")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=torch.float32, output_loading_info=True,
        attn_implementation="eager",
    )  # fmt: skip
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    reference = goldens.committed(variant)
    for prompt, wanted in zip(goldens.prompts(), reference.greedy, strict=True):
        assert goldens.greedy(theirs.eval(), prompt) == wanted.tolist()
    with torch.no_grad():
        logits = theirs(torch.tensor(goldens.tokens()).long()).logits.numpy()
    np.testing.assert_allclose(
        logits[:, list(reference.positions)], reference.logits, rtol=0, atol=1e-4
    )


def test_what_cannot_be_saved_is_rejected_and_leaves_the_old_folder(write, tmp_path, monkeypatch):
    model = load(write("llama_gqa"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(RequestError, match="is a file"):
        save(model, tmp_path / "file")
    with pytest.raises(RequestError, match="int4"):
        save(model, tmp_path / "new", dtype="int4")
    save(model, tmp_path / "saved", dtype="float32")

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rooflax.loading.save.write_safetensors", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save(model, tmp_path / "saved")
    assert same(load(tmp_path / "saved"), model)
    assert not (tmp_path / "new").exists()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_kill_or_a_full_disk_at_every_step_of_saving(write, tmp_path):
    """Afterwards there is the old model or the new one, or, between two renames, none until the
    next one is saved; nothing else stays."""
    model = load(write("llama_gqa"))
    old, new = (load(tmp_path / "m", quantize=quantize) for quantize in ("int8", "int4"))
    (tmp_path / "all").mkdir()
    save(old, tmp_path / "all" / "saved")
    all_calls = touches(tmp_path / "all", lambda: save(new, tmp_path / "all" / "saved"))
    points = [at for at, name in enumerate(all_calls, 1) if name != "write" or at % 5 == 0]
    assert {"mkdir", "open", "write", "fsync", "replace", "rename", "rmtree"} <= {*all_calls}
    for error, fail_at in itertools.product((FULL, Killed()), points):
        root = tmp_path / f"{type(error).__name__}{fail_at}"
        root.mkdir()
        save(old, root / "saved", dtype="float32")
        with Disk(root, fail_at, error).watched() as disk, contextlib.suppress(OSError, Killed):
            save(new, root / "saved", dtype="float32")
        assert disk.has_failed
        if error is FULL or (root / "saved").exists():
            saved = load(root / "saved")
            assert same(saved, old) or same(saved, new), disk.calls
        removes = all_calls[fail_at - 1] in ("rmtree", "rmdir", "unlink")  # it needs no room
        if error is FULL and not removes:
            assert [path.name for path in root.iterdir()] == ["saved"], disk.calls
        save(model, root / "saved")
        assert [path.name for path in root.iterdir()] == ["saved"], disk.calls


def test_what_a_kill_left_between_two_renames_is_put_back(write, tmp_path):
    old, new = load(write("llama_gqa"), quantize="int8"), load(write("llama_gqa", name="n"))
    root = tmp_path / "root"
    save(old, root / "saved", dtype="float32")
    calls = touches(root, lambda: save(new, root / "saved"))
    second = [at for at, name in enumerate(calls, 1) if name == "rename"][1]
    save(old, root / "saved", dtype="float32")
    with Disk(root, second, Killed()).watched(), pytest.raises(Killed):
        save(new, root / "saved")
    assert not (root / "saved").exists()
    with Disk(root, 5).watched(), pytest.raises(OSError, match="No space left"):
        save(new, root / "saved")
    assert same(load(root / "saved"), old)


def test_a_sharded_checkpoint_is_the_same_model(write, tmp_path):
    whole = write("qwen2")
    tensors = goldens.tensors("qwen2", goldens.committed("qwen2"))
    names, weight_map = list(tensors), {}
    (whole / "model.safetensors").rename(tmp_path / "kept.safetensors")
    for part in range(3):
        file = f"model-0000{part + 1}-of-00003.safetensors"
        mine = names[part::3]
        weight_map |= dict.fromkeys(mine, file)
        write_safetensors(
            whole / file,
            [
                TensorToWrite(
                    n, dtype_name(tensors[n].dtype), tensors[n].shape, lambda n=n: tensors[n]
                )
                for n in mine
            ],
        )
    (whole / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert same(load(whole), load(write("qwen2", name="one")))


MEASURE = """
import sys
import jax, jax.numpy as jnp
jax.jit(lambda x: x + 1)(jnp.zeros(3)).block_until_ready()
from rooflax import load
from rooflax.nn.host_memory import AnonymousPeak, anonymous_bytes
folder, dtype = sys.argv[1:]
baseline = anonymous_bytes()
with AnonymousPeak() as peak:
    model = load(folder, dtype=dtype)
    jax.block_until_ready(model.weights)
print((peak.peak - baseline) / model.weights_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is Linux's to tell")
def test_memory_while_loading_stays_within_1_3_of_the_weights(tmp_path):
    """Of preset:gpt2, 498 MB in float32; each dtype in its own process."""
    reference = goldens.tensors_of(PRESETS["gpt2"])
    (tmp_path / "config.json").write_text(json.dumps(reference.config))
    zeros = [
        TensorToWrite(name, "F32", shape, partial(np.zeros, shape, np.float32))
        for name, shape in reference.shapes.items()
    ]
    write_safetensors(tmp_path / "model.safetensors", zeros)
    for dtype in ("float32", "bfloat16"):
        command = [sys.executable, "-c", MEASURE, str(tmp_path), dtype]
        ran = subprocess.run(command, check=True, capture_output=True, text=True)
        assert 0.9 < float(ran.stdout) <= 1.3, (dtype, ran.stdout)


def test_mxfp4_saved_as_bfloat16_is_the_same_model(write, tmp_path):
    """Its values are exact in bfloat16."""
    model = load(write("gpt_oss_mxfp4"))
    save(model, tmp_path / "saved")
    assert same(load(tmp_path / "saved"), model)
