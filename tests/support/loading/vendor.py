"""Tiny checkpoints as other libraries quantize them, and what is asked of all of them."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from rooflax import load
from rooflax.loading.safetensors import TensorToWrite, dtype_name, write_safetensors
from rooflax.models.registry import read_config
from rooflax.nn.storage import is_matmul
from rooflax.ops.weights import Fused, packed_format, quantized_parts
from tests import goldens
from tests.support.models.programs import full_logits, numbers

LLAMA = {
    "model_type": "llama", "vocab_size": goldens.VOCAB, "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
EXPERTS = LLAMA | {
    "model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip


def tensors(raw, seed=0):
    """Random bfloat16 tensors under the names of a checkpoint."""
    state, found = np.random.RandomState(seed), {}
    config = read_config(raw)[1]
    for slot in config.params():
        shapes = slot.line.hf_shapes(config.axis_sizes)
        for name, shape in zip(slot.hf_names, shapes, strict=True):
            values = state.standard_normal(shape).astype(np.float32)
            values = 1 + values / 50 if "norm" in name else values / shape[-1] ** 0.5
            found[name] = values.astype(ml_dtypes.bfloat16)
    return found


def linears(found):
    """Names of the modules that libraries quantize."""
    return [name.removesuffix(".weight") for name in found if name.endswith("_proj.weight")]


def write(folder, raw, found, metadata=None, **declared):
    """A checkpoint folder.

    Args:
        metadata: of the file.
        declared: its quantization_config; without one its weights are plain.
    """
    folder.mkdir(parents=True)
    config = raw | ({"quantization_config": declared} if declared else {})
    (folder / "config.json").write_text(json.dumps(config))
    arrays = [
        TensorToWrite(name, dtype_name(array.dtype), array.shape, lambda array=array: array)
        for name, array in found.items()
    ]
    write_safetensors(folder / "model.safetensors", arrays, metadata)
    goldens.write_tokenizer(folder)
    return folder


def leaves(model):
    """The weights of matmuls, by slot."""
    return {
        slot: (model.weights if slot.layer is None else model.weights["layers"][slot.layer])[
            slot.key
        ]
        for slot in model.config.params()
        if is_matmul(slot, model.config)
    }


def check(coded, plain, formats, *, runs=False):
    """A quantized folder has the numbers of the plain one, bit for bit: dequantized, and where its
    codes are kept.

    Args:
        formats: those of the weights of layers, by the last part of their keys.
        runs: logits of kept codes are within 1e-4 of those of the numbers.
    """
    ours, theirs, kept = load(coded), load(plain), load(coded, dtype=None)
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), ours.weights, theirs.weights)
    assert all(jax.tree.leaves(same))
    seen, wanted = {}, leaves(theirs)
    for slot, leaf in leaves(kept).items():
        if slot.layer is not None:
            seen[slot.key.rpartition(".")[2]] = packed_format(leaf)
            found = numbers_of(leaf).reshape(wanted[slot].shape)
            np.testing.assert_array_equal(found, wanted[slot], slot.name)
    assert seen == formats
    if runs:
        found, wanted = (full_logits(model, jnp.arange(9)[None]) for model in (kept, theirs))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


def numbers_of(leaf):
    """Of a plain array, or a weight of one format or several side by side."""
    if not isinstance(leaf, Fused):
        return np.asarray(numbers(leaf) if hasattr(leaf, "numbers") else leaf, np.float32)
    each = quantized_parts(leaf)
    parts = [numbers(part).reshape(part.in_shape + part.out_shape) for part in each]
    return np.concatenate(parts, axis=len(leaf.in_shape) + leaf.axis)
