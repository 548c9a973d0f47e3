"""Weights that a GGUF file holds quantised stay so: the codes and scales are the file's."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from rooflax import LLM, ExecutionOptions, SamplingParams, load
from rooflax.errors import CheckpointError
from rooflax.loading.gguf import GGUFFile
from rooflax.loading.gguf_blocks import codes_and_scales, dequantize, rounded_codes
from rooflax.loading.load import load_plan
from rooflax.loading.plan import make_plan
from rooflax.ops import accelerator
from rooflax.ops.weights import Pairs, packed_format
from tests import gguf_cases, goldens
from tests.marks import cases
from tests.support.models.programs import numbers

pytestmark = pytest.mark.oldest_jax

QUANTISED = [(n, k) for n, kinds in gguf_cases.FILES.items() for k in kinds if k[0] == "q"]
QUANTISED.append(("gpt_oss_mxfp4", "bf16"))  # the experts
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def is_packed(leaf):
    return packed_format(leaf) is not None


def leaves(model):
    """Weights, those of `Pairs` as arrays."""
    found = jax.tree.leaves(
        model.weights, is_leaf=lambda leaf: is_packed(leaf) or isinstance(leaf, Pairs)
    )
    return [w.matrix().reshape(w.shape) if isinstance(w, Pairs) else w for w in found]


@pytest.mark.parametrize(
    ("name", "kind"),
    cases(QUANTISED, nightly=[("gpt2", "q8_0"), ("llama3", "q8_0"), ("llama_k", "q4_k_m")]),
)
def test_kept_weights_are_the_files_own_numbers(name, kind):
    path = gguf_cases.gguf(name, kind)
    plain, prequantized = load(path), load(path, dtype=None)
    formats = set()
    for floats, leaf in zip(leaves(plain), leaves(prequantized), strict=True):
        if not is_packed(leaf):
            np.testing.assert_array_equal(leaf, floats)
            continue
        formats.add(leaf.format)
        matrix = np.asarray(numbers(leaf))
        found = matrix.T if floats.shape == leaf.shape[::-1] else matrix
        wanted = np.asarray(floats)
        if name != "llama_k" or leaf.format != accelerator.rounded_format():
            np.testing.assert_array_equal(found.reshape(wanted.shape), wanted)
        else:  # half a step of int8, of the group's largest
            assert np.abs(found.reshape(wanted.shape) - wanted).max() <= np.abs(wanted).max() / 220
    assert formats
    assert prequantized.weights_bytes < 0.75 * plain.weights_bytes


@pytest.mark.parametrize(("name", "kind"), QUANTISED)
def test_the_estimate_counts_what_is_kept(name, kind):
    plan = make_plan(gguf_cases.gguf(name, kind))
    plan = replace(plan, storage=replace(plan.storage, keeps_bfloat16=False))
    loaded = sum(a.nbytes for a in jax.tree.leaves(load_plan(plan)))
    assert plan.estimate().weights == loaded


@pytest.mark.every_jax
def test_the_order_of_outputs_is_the_layouts():
    """Fused and permuted matmuls: with distinct rows a swap of any two would show."""
    file = GGUFFile(gguf_cases.gguf("llama3", "q8_0"))
    prequantized = load(file.path, dtype=None).weights["layers"][1]["attn.qkv"]
    v = dequantize("Q8_0", file.read("blk.1.attn_v.weight"))
    ours = np.asarray(prequantized.numbers()).reshape(32, 2, 4, 24)
    np.testing.assert_array_equal(ours[:, 1, 3], v[24:].T)


def test_a_model_keeps_them_unless_a_width_is_asked_for():
    path = gguf_cases.gguf("llama3", "q8_0")
    assert LLM(path).format == "w8a8-g32"
    assert LLM(path, dtype="float32").format == "float32"
    assert LLM(path, quantize="int4").format == "iq4_nl"
    assert LLM(gguf_cases.gguf("llama3", "f32")).format == "float32"
    plain, with_mesh = LLM(path), LLM(path, mesh=jax.make_mesh((2,), ("data",)))
    assert with_mesh.format == "w8a8-g32"
    tokens = [llm.generate([[1, 2, 3]], GREEDY)[0].tokens for llm in (with_mesh, plain)]
    assert tokens[0] == tokens[1]


OPTIONS_CASES = [
    ("llama3", "q8_0"), ("gpt2", "q8_0"), ("qwen2", "q4_0"), ("gpt_oss_mxfp4", "bf16"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"), cases(OPTIONS_CASES, default=[("gpt_oss_mxfp4", "bf16")])
)
def test_no_option_changes_a_token(name, kind):
    path = gguf_cases.gguf(name, kind)
    wanted = [c.tokens for c in LLM(path).generate(goldens.prompts(), GREEDY)]
    for options in (ExecutionOptions(layers="scan"), ExecutionOptions(decode_steps=1)):
        found = LLM(path, options=options).generate(goldens.prompts(), GREEDY)
        assert [c.tokens for c in found] == wanted


@pytest.mark.every_jax
def test_experts_compute_what_the_checkpoints_do(tmp_path):
    """Both keep MXFP4, from nibbles in different orders."""
    folder = gguf_cases.write_original(tmp_path, "gpt_oss_mxfp4")
    ours, theirs = (
        [c.tokens for c in LLM(where).generate(goldens.prompts(), GREEDY)]
        for where in (gguf_cases.gguf("gpt_oss_mxfp4", "bf16"), folder)
    )
    assert ours == theirs


@pytest.mark.every_jax
def test_infinite_scales_are_rejected_when_asked_to_check(tmp_path):
    source = gguf_cases.gguf("llama3", "q8_0")
    file = GGUFFile(source)
    content = bytearray(source.read_bytes())
    begin = len(content) - file.info("blk.1.ffn_up.weight").nbytes
    assert content[begin:] == file.read("blk.1.ffn_up.weight").tobytes()
    content[begin : begin + 2] = np.float16(np.inf).tobytes()
    path = tmp_path / "inf.gguf"
    path.write_bytes(content)
    for dtype in (None, "float32"):
        with pytest.raises(CheckpointError, match="NaN or infinity"):
            load(path, dtype=dtype, check=True)


def test_blocks_and_codes_say_the_same():
    state = np.random.RandomState(5)
    known = (
        ("Q8_0", 34, "w8a8-g32"), ("Q5_0", 22, "w8a8-g32"), ("Q4_0", 18, "w4a8"),
        ("MXFP4", 17, "mxfp4-a16"),
    )  # fmt: skip
    for kind, nbytes, format in known:
        blocks = state.randint(0, 256, (6, 3, nbytes)).astype(np.uint8)
        if kind == "MXFP4":
            blocks[..., 0] = state.randint(100, 140, (6, 3))
        else:
            blocks[..., :2] = state.standard_normal((6, 3, 1)).astype("<f2").view(np.uint8)
        codes, scales = codes_and_scales(kind, blocks, format)
        assert codes.shape == (6, 96) and scales.shape == (6, 3)
        assert codes.min() >= {"Q8_0": -128, "Q5_0": -16}.get(kind, 0)
        rows, steps = rounded_codes(kind, blocks)
        numbers = rows.reshape(6, 3, 32) * steps.astype(np.float32)[..., None]
        wanted = dequantize(kind, blocks).reshape(6, 3, 32)
        np.testing.assert_allclose(numbers, wanted, atol=np.abs(wanted).max() / 220)
