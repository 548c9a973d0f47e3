"""Every family equals transformers: logits, greedy tokens, prefill and decode."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax import ExecutionOptions, SamplingParams, decode_step, new_cache, prefill
from rooflax.nn.batch import Batch
from tests import goldens
from tests.marks import cases
from tests.support.models.programs import full_logits

VARIANTS = [v for v in goldens.VARIANTS if v not in goldens.NOT_COMPARED]
EACH = goldens.each(VARIANTS)
ONE_EACH = [
    v if v == goldens.VARIANTS[v]["model_type"] else p for v, p in zip(VARIANTS, EACH, strict=True)
]
TOLERANCE = 1e-4


@pytest.mark.parametrize("variant", ONE_EACH)
def test_logits_and_greedy_tokens_equal_transformers(case, references, variant):
    this, reference = case(variant), references(variant)
    logits = np.asarray(full_logits(this.model, goldens.tokens()))
    np.testing.assert_allclose(
        logits[:, list(reference.positions)], reference.logits, rtol=0, atol=TOLERANCE
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=goldens.NEW_TOKENS, ignore_eos=True)
    batch = this.llm().generate(goldens.prompts(), greedy)
    assert [list(c.tokens) for c in batch] == reference.greedy.tolist()
    assert {c.finish_reason for c in batch} == {"length"}


KINDS = ("gpt2", "llama_gqa", "qwen2_window", "smollm3_window", "gpt_oss")
"""By default: learned positions, groups of heads, windows, layers without RoPE, sinks, experts."""


@pytest.mark.parametrize("variant", cases(VARIANTS, default=KINDS))
def test_prefill_and_decode_equal_one_full_forward(case, variant):
    """The prompt ends inside a block; rows are of unequal length; the reference is at hand."""
    model, tokens = case(variant).model, goldens.tokens()
    whole = np.asarray(full_logits(model, tokens))
    lengths = np.array([17, 12], np.int32)
    prompts = np.where(np.arange(17)[None] < lengths[:, None], tokens[:, :17], 0)
    cache = new_cache(model, rows=2, max_tokens=goldens.SEQ)
    logits, cache = jax.jit(prefill)(model, cache, jnp.asarray(prompts), jnp.asarray(lengths))
    rows = np.arange(2)
    np.testing.assert_allclose(logits, whole[rows, lengths - 1], rtol=0, atol=TOLERANCE)
    step = jax.jit(decode_step, donate_argnums=1)
    for offset in range(goldens.SEQ - 17):
        at = lengths + offset
        logits, cache = step(model, cache, jnp.asarray(tokens[rows, at]), jnp.asarray(at))
        np.testing.assert_allclose(logits, whole[rows, at], rtol=0, atol=TOLERANCE)


@pytest.mark.skipif(not goldens.HAVE_TORCH, reason="asks transformers, which is not installed")
@pytest.mark.parametrize("variant", cases(VARIANTS, default=("llama_gqa", "gpt_oss")))
def test_committed_references_are_what_transformers_says(live_references, variant):
    committed, now = goldens.committed(variant), live_references(variant)
    assert committed.shapes == now.shapes
    np.testing.assert_allclose(
        committed.logits, now.logits[:, list(committed.positions)], rtol=0, atol=TOLERANCE
    )
    np.testing.assert_array_equal(committed.greedy, now.greedy)


@pytest.mark.skipif(not goldens.HAVE_TORCH, reason="asks transformers, which is not installed")
@pytest.mark.parametrize("variant", cases(VARIANTS, default=()))
def test_greedy_tokens_are_not_a_matter_of_rounding(references, variant):
    """The best logit leads by more than two may differ, and the text does not stand still."""
    import torch

    model, reference = goldens.reference_model(variant), references(variant)
    for prompt, generated in zip(goldens.prompts(), reference.greedy, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *generated.tolist()]])).logits[0].numpy()
        best = np.sort(logits[len(prompt) - 1 : -1], axis=-1)[:, -2:]
        assert (best[:, 1] - best[:, 0]).min() > 2 * TOLERANCE
        assert len(set(generated.tolist())) > 4


def test_both_spellings_of_rope_give_the_same_config():
    from rooflax.models.registry import read_config

    for variant, raw in goldens.VARIANTS.items():
        if variant == "gpt2" or variant.startswith(
            ("gemma", "olmo3", "ministral3", "hunyuan")
        ):  # these have a RoPE per kind
            continue
        modern = {k: v for k, v in raw.items() if k not in ("rope_theta", "rope_scaling")}
        scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        theta = scaling.get("rope_theta", raw.get("rope_theta"))
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        modern["rope_parameters"] = {**scaling, "rope_type": kind, "rope_theta": theta}
        legacy = {k: v for k, v in raw.items() if k != "rope_parameters"}
        without_theta = {k: v for k, v in scaling.items() if k != "rope_theta"}
        legacy |= {"rope_theta": theta, "rope_scaling": without_theta or None}
        assert read_config(modern) == read_config(legacy) == read_config(raw)


EXPERTS = [v for v in VARIANTS if any("expert" in key for key in goldens.VARIANTS[v])]


@pytest.mark.skipif(not goldens.HAVE_TORCH, reason="asks transformers, which is not installed")
@pytest.mark.parametrize("variant", goldens.one_each(VARIANTS))
def test_a_folder_that_transformers_wrote_opens(variant, tmp_path, references):
    """transformers writes `rope_parameters`, `layer_types` and all its defaults."""
    check_written(variant, tmp_path, references)


@pytest.mark.skipif(not goldens.HAVE_TORCH, reason="asks transformers, which is not installed")
@pytest.mark.parametrize("variant", goldens.one_each(EXPERTS))
def test_experts_as_transformers_has_them_in_memory_open(variant, tmp_path, references):
    """Not one by one, which is what it writes otherwise."""
    check_written(variant, tmp_path, references, save_original_format=False)


def check_written(variant, tmp_path, references, **how):
    from rooflax import load

    goldens.reference_model(variant).save_pretrained(tmp_path, **how)
    written = json.loads((tmp_path / "config.json").read_text())
    assert variant == "gpt2" or "rope_parameters" in written
    model = load(tmp_path, max_model_len=goldens.MAX_MODEL_LEN.get(variant))
    logits, reference = np.asarray(full_logits(model, goldens.tokens())), references(variant)
    np.testing.assert_allclose(
        logits[:, list(reference.positions)], reference.logits, rtol=0, atol=TOLERANCE
    )


def test_reference_kernels_equal_transformers_too(case):
    this = case("gpt_oss")
    logits = logits_by("reference", this.model, goldens.tokens())
    np.testing.assert_allclose(
        logits[:, list(this.reference.positions)], this.reference.logits, rtol=0, atol=TOLERANCE
    )


LONG = 126
"""Tokens: beyond windows (7), a chunk of a recurrent layer (64) and original contexts (4 to 16)."""


@pytest.mark.skipif(not goldens.HAVE_TORCH, reason="asks transformers, which is not installed")
@pytest.mark.parametrize("variant", cases(VARIANTS, default=("gpt_oss", "qwen3_next")))
def test_long_prompts_equal_transformers_by_both_kernels(case, variant):
    import torch

    tokens = np.random.RandomState(3).randint(0, goldens.VOCAB, (2, LONG)).astype(np.int32)
    with torch.no_grad():
        wanted = goldens.reference_model(variant)(torch.tensor(tokens).long()).logits.numpy()
    for kernels in ("native", "xla"):
        logits = logits_by(kernels, case(variant).model, tokens)
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=TOLERANCE, err_msg=kernels)


def logits_by(kernels, model, tokens):
    """Of one full forward."""
    options = ExecutionOptions(kernels=kernels)

    def forward(model, tokens):
        hidden, _ = model.forward(Batch.dense(tokens), None, options=options)
        return model.logits(hidden, options=options)

    return np.asarray(jax.jit(forward)(model, tokens))
