"""What int8 and int4 do to every family's logits, at sizes where all matmuls are of four bits.

Random weights are far from a trained model's: an error here says that a family is quantized as it
was, not how a real checkpoint answers.
"""

from __future__ import annotations

import numpy as np
import pytest

from rooflax import load
from rooflax.nn.storage import Storage, is_matmul
from rooflax.ops.format_names import formats_of, resolve_format
from tests import gguf_cases, goldens
from tests.marks import cases
from tests.support.models.programs import full_logits

pytestmark = pytest.mark.oldest_jax

# name: (int8, int4)
BOUNDS = {
    "gpt2": (0.07, 0.52), "llama": (0.10, 0.82), "llama_bias": (0.09, 0.65),
    "llama_linear": (0.09, 0.70), "mistral": (0.11, 0.81), "mixtral": (0.14, 0.99),
    "qwen2": (0.13, 0.88), "qwen3": (0.07, 0.54), "qwen3_moe": (0.07, 0.56),
    "qwen2_moe": (0.12, 0.90), "smollm3": (0.14, 1.03), "seed_oss": (0.09, 0.70),
    "gpt_oss": (0.18, 0.98), "gemma3": (0.05, 0.49), "gemma4": (0.11, 0.81),
    "gemma4_moe": (0.08, 0.68), "gemma4_shared": (0.12, 0.88), "granite": (0.13, 0.86),
    "granite4": (0.11, 0.81), "granite4_nope": (0.12, 0.82), "olmo2": (0.04, 0.35),
    "olmo3": (0.05, 0.44), "phi3": (0.09, 0.68), "phi3_long": (0.10, 0.84), "glm4": (0.09, 0.69),
    "glm4_moe": (0.06, 0.58), "ernie4_5": (0.13, 0.86), "exaone4": (0.04, 0.44),
    "cohere2": (0.07, 0.57), "ministral3": (0.12, 0.81), "hunyuan": (0.06, 0.47),
    "lfm2": (0.10, 0.76), "qwen3_next": (0.09, 0.71), "qwen3_5": (0.08, 0.49),
    "qwen3_5_moe": (0.10, 0.64), "deepseek_v2": (0.12, 0.83), "deepseek_v3": (0.10, 0.76),
}  # fmt: skip
"""Of the error of a token's logits as a share of their spread, the median over tokens; logits of
another model have 1.4. A quarter above what was measured."""
LOOSEST = tuple(map(max, zip(*BOUNDS.values(), strict=True)))
"""Of families without bounds of their own."""


@pytest.mark.parametrize(
    "name", cases(gguf_cases.FAMILIES, default=["llama", "gpt_oss", "qwen3_5_moe", "deepseek_v3"])
)
def test_logits_err_no_more_than_stated(name, tmp_path):
    folder = gguf_cases.write_family(tmp_path / name, name)
    exact = load(folder, dtype="float32")
    storage = Storage("float32", resolve_format("int4"))
    matmuls = [slot for slot in exact.config.params() if is_matmul(slot, exact.config)]
    kept = {str(storage.of(slot, exact.config).format) for slot in matmuls}
    formats = {one for format in kept for one in formats_of(format)}
    assert formats <= {"iq4_nl", "w6a8", "w8a8-h64", "w8a8"}
    logits = np.asarray(full_logits(exact, goldens.tokens()))
    found = []
    for format in ("int8", "int4"):
        model = load(folder, dtype="float32", quantize=format)
        changed = np.asarray(full_logits(model, goldens.tokens()))
        errors = np.mean((changed - logits) ** 2, -1) / np.var(logits, -1)
        found.append(float(np.median(np.sqrt(errors))))
    most = BOUNDS.get(name, LOOSEST)
    assert 0 < found[0] <= most[0] and 0 < found[1] <= most[1], found
    assert found[0] < found[1] / 3
