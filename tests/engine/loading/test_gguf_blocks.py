"""A GGUF file of every block type, mixed between layers and within a weight, as CPU keeps it."""

import json
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from rooflax import LLM, ExecutionOptions, SamplingParams, load, new_cache, prefill, save
from rooflax.cli.main import main
from rooflax.errors import CheckpointError, RequestError
from rooflax.loading.gguf import GGUFFile
from rooflax.loading.gguf_save import save_gguf
from rooflax.loading.load import load_plan
from rooflax.loading.model_info import model_info
from rooflax.loading.plan import make_plan
from rooflax.nn.layers import unstack_layers
from rooflax.ops.weights import Fused, MixedStack, packed_format, quantized_parts
from tests import gguf_cases, goldens
from tests.marks import cases

pytestmark = pytest.mark.oldest_jax

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
LAYERS = [
    {"attn.qkv": "q4_k", "attn.o": "q5_0", "mlp.gate_up": "q5_k", "mlp.down": "q4_1-a8x2"},
    {"attn.qkv": "q4_k", "attn.o": "q5_1", "mlp.gate_up": "q5_k", "mlp.down": "iq4_nl"},
    {
        "attn.qkv": "q4_k|q4_k|q6_k",
        "attn.o": "q5_0",
        "mlp.gate_up": "q3_k|q5_1",
        "mlp.down": "w8a8-g32",
    },
    {"attn.qkv": "iq4_xs", "attn.o": "q5_0", "mlp.gate_up": "q2_k", "mlp.down": "w4a8x2"},
]
HEAD = "q6_k-a8x2"
"""What becomes of `MIXED_LAYERS` and the head; the parts of a fused weight may differ."""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return gguf_cases.write_mixed(tmp_path_factory.mktemp("gguf") / "mixed.gguf")


@pytest.fixture(scope="module")
def plain(path):
    """The model of the file's numbers, in float32."""
    return load(path)


@pytest.fixture(scope="module")
def kept(path):
    return load(path, dtype=None)


@pytest.fixture(scope="module")
def wanted(path):
    """Tokens of the unrolled model in memory."""
    return tokens(LLM(path, options=ExecutionOptions(layers="unrolled")))


def tokens(llm):
    return [c.tokens for c in llm.generate(goldens.prompts(), GREEDY)]


def is_packed(leaf):
    return packed_format(leaf) is not None


def leaves(model):
    return jax.tree.leaves(model.weights, is_leaf=is_packed)


def formats_of(weights):
    return [
        {key: packed_format(leaf) for key, leaf in layer.items() if is_packed(leaf)}
        for layer in weights["layers"]
    ]


def test_every_layer_keeps_the_types_of_its_own(kept, plain):
    assert formats_of(kept.weights) == LAYERS
    assert packed_format(kept.weights["embed"]) == HEAD
    assert kept.weights_bytes < 0.3 * plain.weights_bytes


def test_numbers_are_the_files_own(path, kept, plain):
    """Down to the last bit; those of `plain` are gguf-py's."""
    file = GGUFFile(path)
    for name in ("blk.0.ffn_down.weight", "blk.3.ffn_down.weight", "token_embd.weight"):
        kind = GGMLQuantizationType[file.info(name).dtype]
        blocks = file.read(name)
        found = quants.dequantize(blocks.reshape(len(blocks), -1), kind)
        own = plain.weights["embed"]
        if name != "token_embd.weight":
            own = plain.weights["layers"][int(name[4])]["mlp.down"].T
        np.testing.assert_array_equal(own, found)
    for floats, leaf in zip(leaves(plain), leaves(kept), strict=True):
        if not is_packed(leaf):
            np.testing.assert_array_equal(leaf, floats)
            continue
        np.testing.assert_array_equal(numbers_like(leaf, floats), floats)


def numbers_like(leaf, floats):
    """A packed weight's, in the layout of the plain one."""
    parts = quantized_parts(leaf)
    if len(parts) > 1:
        axis = len(leaf.in_shape) + leaf.axis
        ends = np.cumsum([part.out_shape[leaf.axis] for part in parts])[:-1]
        each = zip(parts, np.split(np.asarray(floats), ends, axis), strict=True)
        return np.concatenate([numbers_like(*pair) for pair in each], axis)
    codes, scales = leaf.unpacked()
    matrix = leaf.scaled(codes.reshape(*scales.shape, 32), scales).reshape(codes.shape).T
    matrix = matrix.T if floats.shape == leaf.shape[::-1] else matrix
    return matrix.reshape(floats.shape)


@pytest.mark.parametrize("layers", ["unrolled", "scan"])
def test_with_activations_kept_logits_are_those_of_the_numbers(kept, plain, layers):
    """Matmuls of a model whose weights are dequantized, and of the blocks."""
    names = {"w8a8-g32": "w8a16-g32", "w4a8": "w4a16"}

    def exact(leaf):
        if not is_packed(leaf):
            return leaf
        if isinstance(leaf, Fused):
            return replace(leaf, parts=tuple(map(exact, leaf.parts)))
        once = leaf.format.replace("-a8x2", "").replace("a8x2", "a8")
        return replace(leaf, format=names.get(once, f"{once}-a16"))

    def dequantized(floats, leaf):
        return jnp.asarray(numbers_like(leaf, floats)) if is_packed(leaf) else leaf

    ours = replace(kept, weights=jax.tree.map(exact, kept.weights, is_leaf=is_packed))
    pairs = zip(leaves(plain), leaves(kept), strict=True)
    tree = jax.tree.structure(plain.weights)
    theirs = replace(plain, weights=jax.tree.unflatten(tree, [dequantized(*p) for p in pairs]))
    options, found = ExecutionOptions(layers=layers), []
    prompt = jnp.arange(3, 20, dtype=jnp.int32)[None]
    for model in (ours, theirs):
        model = model.stacked() if layers == "scan" else model
        cache = new_cache(model, 1, 32, options=options)
        logits = jax.jit(lambda m, c: prefill(m, c, prompt, options=options)[0])(model, cache)
        found.append(np.asarray(logits))
    np.testing.assert_allclose(*found, rtol=0, atol=1e-4 * np.abs(found[1]).max())


def test_a_scan_over_mixed_layers_changes_no_token(path, wanted, kept):
    llm = LLM(path, options=ExecutionOptions(layers="scan"))
    (stacked,) = llm.model.weights["stacked_layers"]
    assert all(isinstance(stacked[key], MixedStack) for key in LAYERS[0])
    assert llm.model.weights_bytes == kept.weights_bytes
    assert tokens(llm) == wanted
    for model in (llm.model, kept.stacked()):  # as it is read, and of layers in memory
        back = unstack_layers(model.weights)
        assert jax.tree.structure(back) == jax.tree.structure(kept.weights)
        for one, other in zip(jax.tree.leaves(back), jax.tree.leaves(kept.weights), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("layers", cases(["unrolled", "scan"], default=["scan"]))
def test_a_mesh_splits_the_blocks(path, wanted, layers):
    mesh, options = jax.make_mesh((2,), ("tensor",)), ExecutionOptions(layers=layers)
    llm = LLM(path, mesh=mesh, options=options)
    assert tokens(llm) == wanted
    by_device = Counter()
    for array in jax.tree.leaves(llm.model.weights):
        for shard in array.addressable_shards:
            by_device[shard.device] += shard.data.nbytes
    assert max(by_device.values()) < 0.65 * load(path, dtype=None).weights_bytes


def test_stages_have_layers_that_are_alike(path, tmp_path):
    with pytest.raises(
        RequestError, match=r"attn.qkv in iq4_xs and q4_k and q4_k\|q4_k\|q6_k, and stages"
    ):
        make_plan(path, mesh="stage=2")
    assert make_plan(path, mesh="stage=2", dtype="float32").shards.stage == 2
    same = gguf_cases.write_mixed(tmp_path / "same.gguf", gguf_cases.MIXED_LAYERS[:1] * 2)
    assert make_plan(same, mesh="stage=2").storage.prequantized["layers.1.attn.qkv"] == "q4_k"


def test_the_estimate_counts_what_is_kept(path):
    plan = make_plan(path)
    plan = replace(plan, storage=replace(plan.storage, keeps_bfloat16=False))
    loaded = sum(a.nbytes for a in jax.tree.leaves(load_plan(plan)))
    assert plan.estimate().weights == loaded


def test_layers_that_are_read_at_every_step_change_no_token(path, wanted):
    plan = make_plan(path, weights_budget=1 << 40).offloading
    llm = LLM(path, weights_budget=plan.fixed_bytes + 3 * max(plan.layer_bytes))
    assert llm.offload_plan.offloaded == (1, 2, 3)
    assert tokens(llm) == wanted


def test_a_draft_model_of_blocks_changes_no_token(path, wanted):
    llm = LLM(path, speculate=str(path), num_draft_tokens=2, max_num_seqs=1)
    (found,) = llm.generate(goldens.prompts()[:1], GREEDY)
    assert found.tokens == wanted[0]
    assert found.num_accepted_tokens == found.num_draft_tokens > 0


def test_a_prompt_that_is_cached_gives_the_same(path):
    llm, prompt = LLM(path), [[1 + i % 200 for i in range(70)]]
    first, again = (llm.generate(prompt, GREEDY)[0] for _ in range(2))
    assert again.num_cached_tokens > 0 == first.num_cached_tokens
    assert again.tokens == first.tokens


@pytest.mark.parametrize("layers", ["unrolled", "scan"])
def test_it_is_saved_as_it_is(path, kept, wanted, tmp_path, layers):
    """Lines of the table whose layers are alike by their names, others layer by layer."""
    save(kept.stacked() if layers == "scan" else kept, tmp_path / "m", files_from=path)
    config = json.loads((tmp_path / "m/config.json").read_text())
    found = config["quantization_config"]["formats"]
    assert found == {"embed": HEAD} | {
        f"layers.{i}.{key}": format
        for i, layer in enumerate(LAYERS)
        for key, format in layer.items()
    }
    again = load(tmp_path / "m")
    assert jax.tree.structure(again.weights) == jax.tree.structure(kept.weights)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(kept), strict=True):
        np.testing.assert_array_equal(one, other)
    if layers == "scan":
        return
    llm = LLM(tmp_path / "m", options=ExecutionOptions(layers="scan"))
    assert tokens(llm) == wanted
    found["layers.2.attn.qkv"] = "q4_k|q6_k"  # for three tensors
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"layers.2.attn.qkv cannot be q4_k\|q6_k"):
        load(tmp_path / "m")
    found["layers.7.attn.qkv"] = "q4_k"
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="the weight 'layers.7.attn.qkv', which is unknown"):
        load(tmp_path / "m")


def test_equal_layers_are_one_line(tmp_path):
    same = gguf_cases.write_mixed(tmp_path / "same.gguf", gguf_cases.MIXED_LAYERS[:1] * 2)
    save(load(same, dtype=None), tmp_path / "m", files_from=same)
    config = json.loads((tmp_path / "m/config.json").read_text())
    lines = {f"layers.{{i}}.{key}": format for key, format in LAYERS[0].items()}
    assert config["quantization_config"]["formats"] == {"embed": HEAD} | lines


def test_quantize_writes_the_blocks_of_a_file(path, tmp_path, capsys):
    assert main(["quantize", str(path), "-o", str(tmp_path / "m"), "--quiet"]) == 0
    assert formats_of(load(tmp_path / "m").weights) == LAYERS
    del capsys


@pytest.mark.parametrize(
    "name", ["token_embd.weight", "blk.1.attn_q.weight", "blk.0.ffn_down.weight"]
)
def test_infinite_scales_are_rejected_when_asked_to_check(path, tmp_path, name):
    file, content = GGUFFile(path), bytearray(path.read_bytes())
    begin = content.find(file.read(name).tobytes())
    begin += gguf_cases.HALVES[file.info(name).dtype][-1]
    content[begin : begin + 2] = np.float16(np.inf).tobytes()
    (tmp_path / "inf.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        load(tmp_path / "inf.gguf", dtype=None, check=True)


def test_elsewhere_the_types_are_rounded(path, kept, monkeypatch):
    """On what has kernels for few formats: layers are alike there."""
    monkeypatch.setattr("rooflax.ops.accelerator.platform", lambda: "gpu")
    found = make_plan(path).storage.prequantized
    assert set(found.values()) == {"w8a16-g32"}
    assert set(found) == {*(f"layers.{i}.{key}" for i in range(4) for key in LAYERS[0]), "embed"}


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """A file of experts whose layers differ in gate and up, and in down."""
    folder = tmp_path_factory.mktemp("experts")
    checkpoint = gguf_cases.write_family(folder / "m", "qwen3_moe")
    save_gguf(model_info(checkpoint), folder / "f32.gguf", "F32")
    by_layer = (
        {"gate": "Q5_0", "up": "Q5_0", "down": "Q4_1"}, {"gate": "Q5_1", "up": "Q5_1"}, {},
    )  # fmt: skip
    kinds = {
        f"blk.{layer}.ffn_{part}_exps.weight": own.get(part, "Q8_0")
        for layer, own in enumerate(by_layer)
        for part in ("gate", "up", "down")
    }
    return gguf_cases.requantized(folder / "mixed.gguf", folder / "f32.gguf", kinds)


def test_layers_of_experts_differ(experts):
    kept, plain = load(experts, dtype=None), load(experts)
    found = [(own["mlp.gate_up"], own["mlp.down"]) for own in formats_of(kept.weights)]
    assert found == [("q5_0", "q4_1"), ("q5_1", "w8a8-g32"), ("w8a8-g32", "w8a8-g32")]
    for floats, leaf in zip(leaves(plain), leaves(kept), strict=True):
        if is_packed(leaf):
            own = np.asarray(leaf.numbers()).reshape(floats.shape)
            np.testing.assert_array_equal(own, floats)
    wanted = tokens(LLM(experts, options=ExecutionOptions(layers="unrolled")))
    assert tokens(LLM(experts, options=ExecutionOptions(layers="scan"))) == wanted
    split = LLM(experts, mesh=jax.make_mesh((2,), ("tensor",)))
    assert tokens(split) == wanted
