"""What the default run leaves to `make test-all`: further cases of what it tests at least once.

Nearly all of a test's time goes into compiling, and programs of the same code at other sizes
seldom break alone. On JAX 0.11 and later it leaves out more: of what follows from our own code
alone the oldest version's word is enough.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
import pytest

NEWER_JAX = jax.__version_info__ >= (0, 11)

LEFT_OUT = {
    "bench/test_gpu_figures.py": ("does[w8a16",),
    "bench/test_rows.py": (
        "ablation_rows_really", "deterministic_rows", "quick_check_passes", "memory_is_the_models",
        "a_process_says", "row_in_its_own",
    ),
    "bench/test_statistics.py": ("of_twenty_comparisons",),
    "cli/test_cli_flags.py": ("[generate]",),
    "cli/test_cli_generate.py": ("are_no_numbers",),
    "models/test_isolate.py": ("implementations1",),
    "engine/test_beams.py": ("in_a_crowd",),
    "engine/test_exhaustion.py": ("a_server_says_why_if_that_fails_too_and_goes_on",),
    "engine/test_pinned.py": ("[gpt2", "[llama_gqa"),
    "engine/test_same_tokens.py": ("[gpt2-131", "keys_and_values_are"),
    "engine/test_speculation.py": (
        "frequency_penalty", "more_blocks_than", "drafts_of_a_server", "its_own_draft",
        "knows_nothing", "{'temperature': 0.9",
    ),
    "loading/test_gguf.py": (
        "checkpoint_computes[qwen2", "checkpoint_computes[llama3", "tokens[gpt2", "tokens[llama2",
        "tokens[qwen2", "checkpoint_computes[llama2", "tokens[llama3",
    ),
    "loading/test_gguf_kept.py": (
        "changes_a_token[gpt2", "changes_a_token[qwen2", "own_numbers[gpt2",
        "own_numbers[llama3-q8_0", "own_numbers[llama_k", "changes_a_token[llama3",
    ),
    "loading/test_weights.py": ("model[float32-gpt2",),
    "models/test_beam_parity.py": ("[qwen2_window", "[gpt2", "[gpt_oss"),
    "models/test_config.py": ("length[llama", "length[qwen2", "length[gpt_oss"),
    "models/test_options.py": (
        "unchanged[layers=scan, gqa=repeat, decode_steps=5]",
        "unchanged[layers=scan, moe=dense, kernels=xla]",
        "unchanged[layers=unrolled, moe=dense, decode_steps=1]",
        "unchanged[layers=unrolled, moe=dense, kernels=reference]",
        "unchanged[layers=unrolled, kernels=xla, decode_steps=1]", "unchanged[layers=unrolled]",
        "unchanged[use_cache=False, layers=unrolled, gqa=repeat, moe=per_token",
        "unchanged[use_cache=False, layers=unrolled, moe=per_token", "same[gpt2-False",
        "cache[preset:gpt-oss-tiny-None", "cache[preset:gpt2-tiny-int8", "batch[gpt_oss-None",
        "batch[gpt2-int4", "bits[gpt_oss-None", "bits[gpt2-int4", "batch[llama_gqa",
        "devices_tokens[no cache", "bits[llama_gqa",
        "unchanged[layers=unrolled, moe=per_token, kernels=xla, decode_steps=5", "more_shards",
    ),
    "nn/test_stacking.py": ("layers[False-preset:gpt2", "layers[True-preset:gpt-oss"),
    "ops/test_attention.py": (
        "[window-tokens_as_int8", "[window-tokens_as_fp8", "multi-head-tokens_as_int8",
        "multi-head-tokens_as_fp8", "multi-query-tokens_as_int8", "multi-query-tokens_as_fp8",
        "grouped-tokens_as_int8", "grouped-tokens_as_fp8", "window of one-tokens_as_int8",
        "window of one-tokens_as_fp8", "sinks-tokens_as_int8", "sinks-tokens_as_fp8",
        "window beyond the context-tokens_as_int8", "window beyond the context-tokens_as_fp8",
        "whole sequences-tokens_as_int8", "whole sequences-tokens_as_fp8",
        "one head-tokens_as_int8", "one head-tokens_as_fp8", "decode-tokens_as_fp8",
        "padding-tokens_as_fp8", "chunk of queries-tokens_as", "and window-tokens_as_fp8",
        "[window of one-None", "test_attention[multi", "[one head",
    ),
    "ops/test_moe.py": (
        "experts[1-w8a8-g32", "experts[3-w8a8", "quantised_experts[3-", "tokens[5-3", "tokens[8-4",
        "test_experts[all tokens", "test_experts[ties", "test_experts[experts without",
        "test_experts[more experts", "experts[1-w8a16", "tokens[32-4", "experts[40-",
    ),
    "ops/test_native.py": (
        "-64-48-", "behind[avx2-64", "behind[avx512-64", "behind[generic-64",
        "products[generic-float32-64-48", "products[generic-bfloat16-64-48",
        "products[generic-96-37-w8a8-g32", "160-130-w8", "160-130-mx", "160-130-fp8", "avx2-20-",
        "behind[generic-37-s", "160-130-w4a8",
    ),
    "ops/test_tpu.py": (
        "visits_follow_the_pattern[1-window]", "visits_follow_the_pattern[1-all",
        "their_mask[1-None-all", "their_mask[1-None-window]", "attention[multi-",
        "attention[window of", "attention[sinks]", "attention[window]",
        "attention[whole sequences]", "attention[decode", "contexts[decode", "experts[many",
        "experts[all tokens", "experts[w8a8-g32", "experts[w8a16", "experts[w4a8", "experts[one",
        "experts[few", "products[bfloat16-w", "products[bfloat16-mxfp4-a8", "their_mask[70-300",
        "visits_follow_the_pattern[64", "tiles_of_any_size[", "experts[fp8", "experts[mxfp4",
        "experts[w8a8-150", "products[float32-mxfp4-a8", "products[float32-w4a8", "lies[w8a8]",
        "paged_attention[grouped", "paged_attention[longer", "paged_attention[window beyond",
        "paged_attention[whole", "experts[w4a16-3", "experts[experts without", "experts[ties",
        "experts[more experts", "a_patterns_block", "contexts[tiles of",
        "their_mask[1-None-strided", "visits_follow_the_pattern[1-strided", "bfloat16_attention",
        "not_read[70",
    ),
    "product/test_compile_cache.py": ("another_jaxlib_or_flag",),
    "train/test_checkpoint.py": ("from_an_older", "finished_run_adds"),
    "train/test_export.py": (
        "exactly[gpt2", "exactly[qwen2", "once[gpt2", "once[qwen2", "exactly[gpt_oss",
    ),
    "train/test_loop.py": ("in_place_of_steps", "without_held_out"),
    "train/test_step.py": (
        "gradients[gpt2", "gradient[llama", "gradient[gpt2", "gradient[qwen2", "float32[gpt2",
        "decay[scan", "bfloat16_gradients", "every_weight_has", "decay[unrolled",
        "micro_batches_give", "gpt_oss_learns", "loss[gpt_oss", "of_few_rows_at_a_time",
        "same_gradients[gpt_oss", "every_expert_and_head",
    ),
    "test_async_llm.py": ("many_callers",),
    "test_llm.py": (
        "an_fp8_cache", "n_samples_are_adjacent", "more_requests_than", "score_of_prompts_of",
    ),
    "test_processes.py": (
        "two_processes_give_the_single_devices_tokens[gpt_oss", "only_the_first_process",
    ),
    "test_sharding.py": (
        "stays_so[qwen2", "stays_so[packed", "part[llama", "no_more[int8", "text_of_a_mesh",
        "tokens[data=2", "tokens[stage=2", "stays_so[mxfp4-expert",
    ),
    "test_streaming.py": (
        "says_the_same[gpt2", "says_the_same[qwen2", "llama-how4", "half_the_weights",
        "every_setting", "with_the_depth", "with_memory_of_its_own", "says_the_same[gpt_oss",
    ),
    "test_structured.py": ("a_crowded_engine", "many_callers", "sentencepiece_vocabulary"),
}  # fmt: skip
"""By module, parts of the names of tests that only `make test-all` runs."""

KEPT_ON_NEWER = {
    "cli/test_cli_serving.py": ("rate",),
    "engine/test_pinned.py": ("[gpt_oss",),
    "bench/test_founding.py": (),
    "bench/test_gpu_figures.py": (),
    "bench/test_html.py": (),
    "bench/test_rows.py": (),
    "bench/test_statistics.py": (),
    "bench/test_tuning.py": (),
    "cli/test_cli_chat.py": ("base_model",),
    "cli/test_cli_flags.py": ("[doctor]", "[inspect]", "short_and_other", "versus"),
    "cli/test_cli_generate.py": ("beams",),
    "cli/test_cli_main.py": (),
    "cli/test_cli_perplexity.py": (),
    "cli/test_cli_streaming.py": (),
    "cli/test_cli_train.py": (),
    "cli/test_cli_verify.py": ("what_differs",),
    "engine/test_beams.py": ("[llama_gqa",),
    "engine/test_exhaustion.py": ("llm_survives",),
    "engine/test_same_tokens.py": ("every_switch",),
    "engine/test_speculation.py": ("not_finite", "refused"),
    "loading/test_chat_template.py": (),
    "loading/test_gguf.py": ("same_greedy_tokens",),
    "loading/test_gguf_hostile.py": (),
    "loading/test_gguf_kept.py": ("refused", "experts", "order_of"),
    "loading/test_template_pool.py": (),
    "loading/test_weights.py": (),
    "models/test_beam_parity.py": (),
    "models/test_config.py": (),
    "models/test_embedding_fusion.py": ("1-1",),
    "models/test_options.py": (
        "batch[gpt_oss-mxfp4", "copy_neither", "lowered", "refused", "tokens[plain", "tokens[scan",
        "compiles_nothing", "leave_the_tokens_unchanged[gpt2",
    ),
    "nn/test_stacking.py": ("widens", "int4]", "only_copied"),
    "ops/test_attention.py": ("refused", "sinks and window"),
    "ops/test_gpu.py": (
        "refused", "most_rows_lower_for_cuda[w4a16", "few_tokens[few tokens-float32",
        "many_tokens[many tokens-bfloat16", "many_queries[a chunk", "few_queries[sinks and",
        "few_queries[decode", "few_rows[w8a16", "stack",
    ),
    "ops/test_moe.py": ("test_experts[many", "test_experts[one", "bit_for_bit"),
    "ops/test_native.py": ("avx512-96", "attention", "largest", "generic-float32"),
    "ops/test_quantization.py": ("int4",),
    "ops/test_sampling.py": ("noise",),
    "ops/test_tpu.py": ("refused",),
    "product/test_compile_cache.py": (),
    "product/test_api_docs.py": (),
    "product/test_docs.py": (),
    "product/test_embedded_chat.py": ("answers",),
    "product/test_embedded.py": ("first_run",),
    "train/test_checkpoint.py": (),
    "train/test_export.py": (),
    "train/test_loop.py": ("a_line",),
    "train/test_step.py": (),
    "test_async_llm.py": ("refused",),
    "test_beams.py": ("refused",),
    "test_llm.py": ("not_finite", "refused", "same_beginning"),
    "test_processes.py": ("memory", "refused"),
    "test_sharding.py": ("[tensor=4]", "[expert=2]", "refused"),
    "test_streaming.py": ("every_family_says_the_same[llama", "refused"),
    "test_structured.py": ("refused",),
}  # fmt: skip
"""By module, parts of the names of the tests that stay there; other modules stay whole."""


FIRST = ("product/test_embedded.py", "engine/test_same_tokens.py", "test_sharding.py")
"""Modules of few tests that take long: begun last, they would keep one process after the other."""

TESTS = Path(__file__).parent


def arrange(items: list[pytest.Item]) -> None:
    """Begins with `FIRST`, and marks as slow what the default run does not have.

    Raises:
        pytest.UsageError: everything was collected, and a part here is in no name.
    """
    items.sort(key=lambda item: not item.nodeid.removeprefix("tests/").startswith(FIRST))
    names = defaultdict(list)
    for item in items:
        module, _, name = item.nodeid.removeprefix("tests/").partition("::")
        names[module].append(name)
        left = _has(name, LEFT_OUT.get(module, ()))
        if NEWER_JAX and module in KEPT_ON_NEWER:
            left |= not _has(name, KEPT_ON_NEWER[module])
        if left:
            item.add_marker(pytest.mark.slow)
    if len(names) == len(list(TESTS.rglob("test_*.py"))):
        _check(names)


def _check(names: Mapping[str, list[str]]) -> None:
    stale = [
        f"{module}: {part}"
        for table in (LEFT_OUT, KEPT_ON_NEWER)
        for module, parts in table.items()
        for part in parts
        if not any(part in name for name in names[module])
    ]
    if stale:
        raise pytest.UsageError(f"tests/default_run.py names no test: {'; '.join(stale)}.")


def _has(name: str, parts: Iterable[str]) -> bool:
    return any(part in name for part in parts)
