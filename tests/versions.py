"""What the default run has on JAX 0.11 and later: less, because the oldest JAX's run has the rest.

Programs take long to compile, and of what follows from our own code alone one version's word is
enough. `make test-all` runs everything on each.
"""

import jax
import pytest

NEWER_JAX = jax.__version_info__ >= (0, 11)

KEPT = {
    "bench/test_choices.py": (),
    "bench/test_founding.py": (),
    "bench/test_html.py": (),
    "bench/test_rows.py": ("quick",),
    "cli/test_cli_flags.py": ("[doctor]", "[inspect]", "short_and_other", "versus"),
    "cli/test_cli_generate.py": ("beams",),
    "cli/test_cli_chat.py": ("base_model",),
    "cli/test_cli_perplexity.py": (),
    "cli/test_cli_streaming.py": (),
    "cli/test_cli_train.py": (),
    "cli/test_cli_verify.py": ("isolate_finds_no", "what_differs"),
    "engine/test_beams.py": ("[llama_gqa",),
    "engine/test_exhaustion.py": ("llm_survives",),
    "engine/test_same_tokens.py": ("[gpt2-131", "every_switch"),
    "engine/test_speculation.py": ("test_ngrams_change_no_token[{}]", "not_finite", "refused"),
    "loading/test_gguf.py": ("same_greedy_tokens",),
    "loading/test_gguf_hostile.py": (),
    "loading/test_gguf_kept.py": ("refused", "experts", "order_of"),
    "models/test_beam_parity.py": ("[gpt_oss]",),
    "models/test_config.py": (),
    "models/test_options.py": (
        "[gpt2-int4]", "[gpt_oss-None]", "copy_neither", "lowered", "refused",
        "two_devices", "compiles_nothing", "leave_the_tokens_unchanged[g",
    ),
    "nn/test_stacking.py": ("widens", "int4]", "only_copied"),
    "ops/test_moe.py": ("test_experts[", "bit_for_bit"),
    "ops/test_native.py": ("avx512-96", "attention", "largest", "generic-float32"),
    "ops/test_sampling.py": ("draw", "noise"),
    "ops/test_tpu.py": ("refused",),
    "product/test_embedded.py": ("first_run", "transformers"),
    "test_async_llm.py": ("stop_string", "shutdown", "refused", "numbers"),
    "test_beams.py": ("not_finite", "refused", "more_beams"),
    "test_llm.py": ("every_sampling_field", "not_finite", "logprobs", "refused", "same_beginning"),
    "test_processes.py": ("memory", "refused"),
    "test_structured.py": ("refused",),
    "test_sharding.py": ("[tensor=4]", "[expert=2]", "[data=2]", "refused", "stages_of"),
    "test_streaming.py": ("every_family", "refused", "packed"),
    "train/test_checkpoint.py": (),
    "train/test_step.py": (),
}  # fmt: skip
"""By module, parts of the names of the tests that stay; modules that are not here stay whole."""


def leave_out(items: list[pytest.Item]) -> None:
    """Marks as slow what is not KEPT."""
    for item in items if NEWER_JAX else ():
        module, _, name = item.nodeid.removeprefix("tests/").partition("::")
        if module in KEPT and not any(part in name for part in KEPT[module]):
            item.add_marker(pytest.mark.slow)
