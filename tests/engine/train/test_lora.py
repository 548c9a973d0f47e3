"""Training LoRA: gradients through a base of any format, PEFT's losses, resuming, what is saved."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax import LLM
from rooflax.errors import CheckpointError, RequestError, UnsupportedModelError
from rooflax.loading.adapters import fused, open_adapter, save_adapter
from rooflax.loading.load import load
from rooflax.loading.model_info import model_info
from rooflax.models.adapters import reordered
from rooflax.models.initialize import random_weights
from rooflax.models.model import build
from rooflax.models.registry import read_config
from rooflax.nn.storage import Storage
from rooflax.ops import native
from rooflax.ops.activation import ACTIVATIONS, gated
from rooflax.ops.linear.frozen import Frozen, adapted, lengths, product
from rooflax.ops.weights import Dense, Pairs, as_operand, pack_pairs, quantize
from rooflax.ops.weights.rotation import rotate
from rooflax.train.adapters import LoraTraining, resolved
from rooflax.train.data import PackedBatch
from rooflax.train.log import read_log
from rooflax.train.loop import run_training
from rooflax.train.step import (
    init_state,
    make_eval_step,
    make_loss_sum,
    make_optimizer,
    make_train_step,
)
from tests import adapter_cases, gguf_cases, goldens
from tests.marks import cases
from tests.support.train import tiny

pytestmark = pytest.mark.oldest_jax

LORA = {"fine_tune_type": "lora", "lora_rank": 3, "learning_rate": 1e-2}
CONFIG = tiny.settings(
    steps=30, batch_size=8, seq_len=24, eval_every=0, checkpoint_every=10, **LORA
)


def packed(tokens):
    """Rows of one document each."""
    rows, count = tokens.shape[0], tokens.shape[1] - 1
    positions = np.tile(np.arange(count, dtype=np.int32), (rows, 1))
    ones, zeros = np.ones((rows, count), np.float32), np.zeros((rows, count), np.int32)
    return PackedBatch(tokens[:, :-1], tokens[:, 1:], ones, positions, zeros)


def stepping(model, config):
    """(state, the jitted step, what trains) of a run's beginning."""
    lora = LoraTraining(model, config)
    optimizer = make_optimizer(model.table, model.weights, config)
    state = init_state(lora.start(), optimizer)
    return state, make_train_step(model, optimizer, config, lora), lora


STORED = ["iq4_nl", "mxfp4-a8", "w8a8", "w8a8-h64", "pairs", "float32", "bfloat16"]
WIDTHS = [48, 1024]
"""Outputs of a matrix whose rows do not share, and share, the sets of a first cache."""


def stored_as(format, w):
    inner, outer = ((n,) for n in w.shape)
    if format == "pairs":
        stored = pack_pairs(w.astype(jnp.bfloat16), inner, outer)
        assert isinstance(stored, Pairs)
        return stored
    if format in ("float32", "bfloat16"):
        return as_operand(jnp.asarray(w, format))
    return quantize(w, format, inner, outer)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("format", STORED)
def test_gradients_of_a_frozen_product(format, width):
    random = np.random.default_rng(0)
    w = random.normal(size=(256, width)).astype(np.float32)
    stored = stored_as(format, w)
    x, dy = (jnp.asarray(random.normal(size=(5, n)), jnp.float32) for n in (256, width))
    found, back = jax.vjp(lambda x: product(x, stored), x)
    numbers = stored.numbers()
    np.testing.assert_allclose(found, x @ numbers, rtol=0, atol=1e-4)
    np.testing.assert_allclose(back(dy)[0], dy @ numbers.T, rtol=0, atol=3e-4)
    sizes = (256, 3), (3, width)
    a, b = (jnp.asarray(random.normal(size=size), jnp.float32) for size in sizes)
    found = lengths(Frozen(stored, (256,), (width,)), a, b)
    own = rotate(numbers.T).T if stored.rotates_inputs else numbers
    np.testing.assert_allclose(found, np.linalg.norm(own + a @ b, axis=0), rtol=1e-5)


@pytest.mark.skipif(not native.is_ready(), reason=native.status().reason)
def test_gradients_of_an_adapted_product_of_a_stack_in_bfloat16():
    random = np.random.default_rng(0)
    sizes = (7, 64), (3, 64, 48), (64, 4), (4, 48), (7, 48)
    x, stack, a, b, dy = (jnp.asarray(random.normal(size=s), jnp.float32) for s in sizes)
    x, index = x.astype(jnp.bfloat16), jnp.asarray(1)
    whole = Dense(stack, (64,), (48,))
    y, back = jax.vjp(lambda x, a, b: adapted(x, None, whole, index, a, b), x, a, b)
    wanted, wanted_back = jax.vjp(
        lambda x, a, b: x.astype(jnp.float32) @ (stack[1] + a @ b), x, a, b
    )
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-3)
    found = back(dy)
    assert [one.dtype for one in found] == [jnp.bfloat16, jnp.float32, jnp.float32]
    for one, other, near in zip(found, wanted_back(dy), (0.5, 1e-3, 1e-3), strict=True):
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), atol=near)


@pytest.mark.skipif(not native.is_ready(), reason=native.status().reason)
@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("format", ["iq4_nl", "w8a8-h64", "float32", "bfloat16"])
def test_gradients_of_an_adapted_product(format, width, is_apart):
    random = np.random.default_rng(0)
    sizes = (7, 256), (7, 256), (256, width), (256, 3), (3, width), (7, width)
    x, rows, w, a, b, dy = (jnp.asarray(random.normal(size=s), jnp.float32) for s in sizes)
    stored = stored_as(format, np.asarray(w))
    numbers = stored.numbers()

    def of(x, rows, a, b):
        return adapted(x, rows if is_apart else None, stored, None, a, b)

    def plain(x, rows, a, b):
        return x @ numbers + (rows if is_apart else x) @ a @ b

    (found, back), (wanted, wanted_back) = (jax.vjp(f, x, rows, a, b) for f in (of, plain))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-3)
    for one, other in zip(back(dy), wanted_back(dy), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "layers"),
    cases(
        [
            (kind, how)
            for kind in adapter_cases.KINDS
            for how in ("unrolled", "scan")
            if (kind, how) not in (("quantized", "scan"), ("experts", "scan"))
        ],
        default=[
            ("lora", "scan"),
            ("dora", "unrolled"),
            ("quantized", "unrolled"),
            ("whole", "scan"),
            ("experts", "unrolled"),
        ],
    ),
)
def test_losses_equal_pefts(kind, layers):
    model, _ = adapter_cases.started(kind)
    config = dataclasses.replace(adapter_cases.train_config(kind), layers=layers)
    model = model.stacked() if layers == "scan" else model
    state, step, _ = stepping(model, config)
    losses = []
    for tokens in adapter_cases.batches():
        state, metrics = step(state, model, packed(tokens))
        losses.append(float(metrics.loss))
    np.testing.assert_allclose(losses, adapter_cases.committed_losses(kind), rtol=0, atol=1e-4)


def test_gradients_beside_codes_are_those_beside_their_numbers():
    path = gguf_cases.gguf("llama_k", "q4_k_m")
    config = tiny.settings(steps=3, batch_size=2, seq_len=16, **LORA)
    coded = load(model_info(path), dtype=None)
    plain = load(model_info(path), dtype="float32")
    assert coded.weights_bytes < plain.weights_bytes / 2
    tokens = np.random.RandomState(3).randint(0, coded.config.vocab_size, (2, 17)).astype(np.int32)
    found = []
    for model in (coded, plain):
        state, step, _ = stepping(model, config)
        for _ in range(3):
            state, metrics = step(state, model, packed(tokens))
        found.append((jax.tree.map(np.asarray, state.weights), float(metrics.grad_norm)))
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-4)
    for one, other in zip(*(jax.tree.leaves(w) for w, _ in found), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, corpora):
    folder = tmp_path_factory.mktemp("lora") / "run"
    model = tiny.make_model()
    return model, folder, run_training(model, CONFIG, *corpora, folder)


def test_the_loss_falls_and_the_base_stays(finished):
    model, folder, result = finished
    losses = [line["loss"] for line in read_log(folder / "log.jsonl") if "loss" in line]
    assert np.mean(losses[-5:]) < losses[0] - 0.02
    for before, after in zip(
        jax.tree.leaves(model.weights), jax.tree.leaves(result.model.weights), strict=True
    ):
        np.testing.assert_array_equal(before, after)


def test_only_a_and_b_are_trained_and_kept(finished):
    _, folder, result = finished
    size = (folder / "checkpoints/step-00000030/state.safetensors").stat().st_size
    numbers = sum(part.a.size + part.b.size for part in result.adapter.matrices.values())
    assert 3 * 4 * numbers <= size < 3 * 4 * numbers + 20_000
    assert {m.rpartition(".")[2] for m in result.adapter.matrices} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip


@pytest.mark.parametrize("kind", cases(["lora", "dora"], nightly=["lora"]))
def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path, corpora, kind):
    changes = {"lora_dropout": 0.2, "steps": 12} | adapter_cases.KINDS[kind][0]
    config = dataclasses.replace(CONFIG, **changes)
    model = tiny.make_model()
    whole = run_training(model, config, *corpora, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for path in (tmp_path / "cut/checkpoints").glob("step-00000012/*"):
        path.unlink()
    (tmp_path / "cut/checkpoints/step-00000012").rmdir()
    again = run_training(model, config, *corpora, tmp_path / "cut")
    assert again.loss == whole.loss
    for module, part in again.adapter.matrices.items():
        np.testing.assert_array_equal(part.a, whole.adapter.matrices[module].a)
        np.testing.assert_array_equal(part.b, whole.adapter.matrices[module].b)
        np.testing.assert_array_equal(part.magnitude, whole.adapter.matrices[module].magnitude)


def test_dropout_is_by_row_and_seed_whatever_the_micro_batches():
    model = tiny.make_model()
    tokens = np.random.RandomState(1).randint(0, tiny.VOCAB, (8, 25)).astype(np.int32)
    start = jax.tree.map(lambda w: np.asarray(w) + 0.05, stepping(model, CONFIG)[0].weights)
    losses = {}
    for parts, rate, seed in ((1, 0.5, 0), (4, 0.5, 0), (1, 0.0, 0), (1, 0.5, 2**70)):
        config = dataclasses.replace(CONFIG, micro_batches=parts, lora_dropout=rate, seed=seed)
        state, step, _ = stepping(model, config)
        state = dataclasses.replace(state, weights=jax.tree.map(jnp.array, start))
        _, metrics = step(state, model, packed(tokens))
        losses[parts, rate, seed] = float(metrics.loss)
    assert losses[4, 0.5, 0] == pytest.approx(losses[1, 0.5, 0], abs=1e-5)
    assert abs(losses[1, 0.5, 0] - losses[1, 0.0, 0]) > 1e-3
    assert abs(losses[1, 0.5, 0] - losses[1, 0.5, 2**70]) > 1e-4


def trained_and_saved(model, config, info, folder):
    """What trains after five steps, and its `LoraTraining`; the folder is PEFT's."""
    state, step, lora = stepping(model, config)
    for tokens in adapter_cases.batches()[:5]:
        state, _ = step(state, model, packed(tokens))
    matrices = lora.adapters(state.weights)
    save_adapter(
        folder, matrices, lora.config, name=info.family, model=info.config, base="base",
        whole=lora.whole(state.weights),
    )  # fmt: skip
    return state.weights, lora


@pytest.mark.filterwarnings("ignore")  # PEFT's and transformers'
@pytest.mark.parametrize("kind", adapter_cases.KINDS)
def test_peft_opens_what_was_trained(tmp_path, kind):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    variant = adapter_cases.VARIANTS[kind]
    if variant == adapter_cases.QUANTIZED:
        info = model_info(gguf_cases.gguf(variant, "q4_k_m"))
    else:
        committed = goldens.committed(variant)
        info = model_info(goldens.write_checkpoint(tmp_path / "base", variant, committed))
    config = dataclasses.replace(adapter_cases.train_config(kind), use_rslora=True)
    trained_and_saved(load(info, dtype=None), config, info, tmp_path / "a")
    model = peft.PeftModel.from_pretrained(adapter_cases.reference_model(variant), tmp_path / "a")
    rows = adapter_cases.batches()[-1]
    with torch.no_grad():
        wanted = model.eval()(torch.tensor(rows).long()).logits.numpy()
        base = model.get_base_model()
        with model.disable_adapter():
            before = base(torch.tensor(rows).long()).logits.numpy()
    assert np.abs(wanted - before).max() > 0.01
    llm = LLM(fused(info, open_adapter(tmp_path / "a", info, merges=True)), dtype="float32")
    found = np.stack([llm.logits(row.tolist()) for row in rows])
    # of the largest logit, as far as the bases themselves are from each other
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param("lora", {}, marks=pytest.mark.nightly),
        ("dora", {"layers": "scan", "num_layers": 2}),
        pytest.param(
            "dora", {"target_modules": "v_proj,down_proj,lm_head"}, marks=pytest.mark.nightly
        ),
        ("whole", {}),
        ("experts", {}),
    ],
)
def test_what_was_trained_is_what_is_saved_and_run(case, tmp_path, kind, settings):
    """The loss of the trained model, by the adapter's folder beside the same base, and merged."""
    base = case(adapter_cases.VARIANTS[kind])
    config = dataclasses.replace(adapter_cases.train_config(kind), use_rslora=True, **settings)
    model = base.model.stacked() if config.layers == "scan" else base.model
    weights, lora = trained_and_saved(model, config, model_info(base.folder), tmp_path / "a")
    info = model_info(base.folder)
    last = adapter_cases.batches()[-1]
    evaluate = make_eval_step(model, config, lora)
    total, count, _ = evaluate(weights, model, packed(last))
    ways = [{"model": fused(info, open_adapter(tmp_path / "a", info, merges=True))}]
    if kind in ("whole", "experts"):
        key = {"whole": "modules_to_save", "experts": "target_parameters"}[kind]
        with pytest.raises(UnsupportedModelError, match=f"{key} = .*; merge the adapter"):
            LLM(base.folder, lora=tmp_path / "a")
    else:
        ways.append({"model": base.folder, "lora": tmp_path / "a"})
    for way in ways:
        scores = LLM(**way).score([row.tolist() for row in last])
        mean = -np.concatenate(scores).mean()
        assert mean == pytest.approx(float(total) / float(count), abs=1e-5)
    said = json.loads((tmp_path / "a/adapter_config.json").read_text())
    assert said["use_rslora"] and said["r"] == 4 and said["use_dora"] == (kind == "dora")


@pytest.mark.parametrize(
    "variant", cases(["qwen3_moe", "mixtral", "gpt_oss_mxfp4"], nightly=["mixtral"])
)
def test_experts_that_the_checkpoint_has_otherwise_are_merged(case, tmp_path, variant):
    """Each apart, or in codes; an adapter has them as one parameter, as transformers has."""
    base = case(variant)
    names = "mlp.experts.gate_up_proj,mlp.experts.down_proj"
    config = dataclasses.replace(CONFIG, target_modules="q_proj", target_parameters=names)
    lora, info = LoraTraining(base.model, config), model_info(base.folder)
    random = np.random.default_rng(0)
    matrices = {
        module: {k: jnp.asarray(random.normal(0, 0.05, w.shape), w.dtype) for k, w in each.items()}
        for module, each in lora.start().items()
    }
    save_adapter(
        tmp_path / "a", lora.adapters(matrices), lora.config, name=info.family, model=info.config,
        base="base",
    )  # fmt: skip
    rows = adapter_cases.batches()[0]
    total, count, _ = make_eval_step(base.model, config, lora)(matrices, base.model, packed(rows))
    adapter = open_adapter(tmp_path / "a", info, merges=True)
    assert len(adapter.experts) == 2 * info.config.num_layers
    for how in ({"dtype": "float32"}, {}):
        scores = LLM(fused(info, adapter), **how).score([row.tolist() for row in rows])
        mean = -np.concatenate(scores).mean()
        assert mean == pytest.approx(float(total) / float(count), abs=1e-5)


def test_outputs_without_weights_run_as_they_were_trained(tmp_path):
    """DoRA has no length to bring them to: only A and B are trained, and what is saved says so."""

    def blank(tensors):
        tensors["model.layers.0.self_attn.q_proj.weight"][3:5] = 0

    variant = "llama_gqa"
    reference = goldens.committed(variant)
    base = goldens.write_checkpoint(tmp_path / "base", variant, reference, change=blank)
    info, model = model_info(base), load(base)
    config = dataclasses.replace(adapter_cases.train_config("dora"), target_modules="q_proj")
    state, step, lora = stepping(model, config)
    for tokens in adapter_cases.batches()[:3]:
        state, _ = step(state, model, packed(tokens))
    matrices = lora.adapters(state.weights)
    names = {"name": info.family, "base": "base"}
    save_adapter(tmp_path / "a", matrices, lora.config, model=info.config, **names)
    part = matrices["model.layers.0.self_attn.q_proj"]
    assert np.abs(part.b[3:5]).max() > 0 and not np.any(part.magnitude[3:5])
    found = open_adapter(tmp_path / "a", info).read(info)["model.layers.0.self_attn.q_proj"]
    np.testing.assert_allclose(found.columns[3:5], 1, rtol=1e-5)
    untrained = lora.adapters(lora.start())  # whose B is zero
    save_adapter(tmp_path / "b", untrained, lora.config, model=info.config, **names)
    found = open_adapter(tmp_path / "b", info).read(info)["model.layers.0.self_attn.q_proj"]
    assert found.columns[3:5].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("variant", "settings", "count"),
    [
        ("llama_gqa", {"target_modules": "q_proj,v_proj"}, 6),
        ("llama_gqa", {"target_modules": "q_proj,down_proj", "num_layers": 1}, 2),
        ("gpt2", {}, 12),
        ("qwen3_moe", {}, None),
    ],
)
def test_what_peft_is_told_names_what_was_trained(case, tmp_path, variant, settings, count):
    base = case(variant)
    config = dataclasses.replace(CONFIG, **settings)
    stated, chosen = resolved(base.model, config)
    assert count is None or len(chosen) == count
    lora = LoraTraining(base.model, config)
    info = model_info(base.folder)
    folder = tmp_path / "adapter"
    matrices = lora.adapters(lora.start())
    names = {"name": info.family, "base": variant}
    save_adapter(folder, matrices, stated, model=info.config, **names)
    assert set(open_adapter(folder, info).targets) == set(chosen)


def test_the_last_layers_alone_are_those_of_experts_and_heads_too(case):
    config = dataclasses.replace(
        CONFIG, num_layers=1, target_modules="q_proj,lm_head", target_parameters="experts.down_proj"
    )
    stated, chosen = resolved(case("gpt_oss").model, config)
    assert list(chosen) == ["model.layers.3.self_attn.q_proj", "lm_head"]
    assert stated.target_parameters == ("model.layers.3.mlp.experts.down_proj",)
    experts = LoraTraining(case("gpt_oss").model, config).experts
    assert list(experts) == list(stated.target_parameters)
    model = case("glm4_moe").model  # whose first layers have none
    name = {"num_layers": model.config.num_layers, "target_parameters": "experts.down_proj"}
    stated, _ = resolved(model, dataclasses.replace(CONFIG, **name))
    assert 0 < len(stated.target_parameters) < model.config.num_layers


def test_targets_that_are_not_there_are_named(case):
    config = dataclasses.replace(CONFIG, target_modules="q_proj,wq")
    with pytest.raises(RequestError, match="target_modules names 'wq', and llama has .*q_proj"):
        resolved(case("llama_gqa").model, config)


@pytest.mark.parametrize(
    ("variant", "settings", "said"),
    [
        ("llama_gqa", {"modules_to_save": "score"}, "names 'score', and llama has lm_head and mod"),
        ("llama3_tied", {"modules_to_save": "lm_head"}, "has its head tied to its embedding"),
        (
            "llama_gqa",
            {"modules_to_save": "lm_head", "target_modules": "q_proj,lm_head"},
            "target_modules and modules_to_save both name lm_head",
        ),
        (
            "gpt_oss",
            {"target_parameters": "mlp.experts.up"},
            "'mlp.experts.up', and gpt_oss has no",
        ),
    ],
)
def test_weights_that_are_not_there_are_named(case, variant, settings, said):
    with pytest.raises(RequestError, match=said):
        resolved(case(variant).model, dataclasses.replace(CONFIG, **settings))


def test_a_run_on_another_kind_of_training_is_not_resumed(finished, corpora):
    model, folder, _ = finished
    config = dataclasses.replace(CONFIG, lora_rank=4)
    with pytest.raises((RequestError, CheckpointError), match="lora_rank is 4, but the checkpoint"):
        run_training(model, config, *corpora, folder)


def test_quantized_weights_still_have_no_gradients_of_their_own(corpora, tmp_path):
    model = load(model_info(gguf_cases.gguf("llama_k", "q4_k_m")), dtype=None)
    config = tiny.settings(steps=1, batch_size=2, seq_len=16)
    with pytest.raises(RequestError, match="or train an adapter"):
        run_training(model, config, *corpora, tmp_path)


def test_quantized_layers_in_a_scan_are_rejected_in_one_sentence():
    model, _ = adapter_cases.started("quantized")
    config = dataclasses.replace(adapter_cases.train_config("quantized"), layers="scan")
    with pytest.raises(RequestError, match="Beside quantized weights .* `layers` unrolled"):
        LoraTraining(model.stacked(), config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_of_gated_activations(name, dtype):
    gates = jnp.linspace(-12, 12, 97)
    gate_up = jnp.stack([gates, jnp.cos(gates)]).astype(dtype)
    found = jax.grad(lambda x: gated(name, x).astype(jnp.float32).sum())(gate_up)
    assert found.dtype == gate_up.dtype
    wide = gate_up.astype(jnp.float32)
    wanted = jax.grad(lambda x: (ACTIVATIONS[name](x[0]) * x[1]).sum())(wide)
    near = {"rtol": 1e-5, "atol": 2e-6} if dtype == "float32" else {"rtol": 1e-2, "atol": 1e-4}
    np.testing.assert_allclose(found.astype(jnp.float32), wanted, **near)


def test_no_more_than_a_matrix_is_dequantized_at_a_time():
    """What a step takes beside its arguments grows by far less than a layer in float32."""
    config = tiny.settings(steps=1, batch_size=1, seq_len=8, **LORA)
    batch = jax.tree.map(jnp.asarray, packed(np.ones((1, 9), np.int32)))
    temporary, numbers = [], []
    for layers in (1, 3):
        name, decoder = read_config(
            tiny.HF_CONFIGS["llama"]
            | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": layers}
        )
        weights = random_weights(name, decoder, seed=0, storage=Storage("float32", "w8a8"))
        model = build(name, decoder, weights, None, "float32")
        lora = LoraTraining(model, config)
        loss = make_loss_sum(model, config, lora)
        grad = jax.jit(jax.grad(lambda w, base, loss=loss: loss(w, base, batch)))
        compiled = grad.lower(lora.start(), model).compile()
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)
        numbers.append(4 * model.num_parameters)
    assert temporary[1] - temporary[0] < (numbers[1] - numbers[0]) / 4


@pytest.mark.parametrize("order", [[2, 0, 3, 1], [0, 1, 2, 3], [1, 1, 0, 3]])
def test_an_order_of_outputs_and_its_gradient(order):
    """Not scattered where it is a permutation, which XLA does number by number."""
    order = np.array(order)
    columns, factors = (jnp.arange(12.0).reshape(3, 4) ** power for power in (1, 2))

    def total(columns, reorder):
        return jnp.sum(reorder(columns, order) * factors)

    np.testing.assert_array_equal(reordered(columns, order), columns[:, order])
    gradients = [jax.grad(total)(columns, reorder) for reorder in (reordered, lambda c, o: c[:, o])]
    np.testing.assert_array_equal(*gradients)
    program = str(jax.make_jaxpr(jax.grad(total), static_argnums=1)(columns, reordered))
    assert ("scatter" in program) == (len(set(order)) < len(order))
