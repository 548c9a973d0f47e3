"""Keyword arguments of `LLM` and `AsyncLLM`: the table that their docs, flags and checks read.

Imports no jax. Without `from __future__ import annotations`: declarations are read from here.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

from rooflax.fields.declaration import Declaration
from rooflax.fields.kinds import AnyValue, Choice, Flag, Number, Several, Text, Whole
from rooflax.nn.execution import DEFAULT_DRAFT_TOKENS, MOST_DRAFT_TOKENS, ExecutionOptions

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from rooflax.nn.shards import Shards

_field = partial(Declaration, "")
_memory = partial(_field, group="memory and precision")
_finding = partial(_field, group="finding the model")
_drafts = partial(_field, group="speed, never tokens")
DEFAULT_NUM_SEQS, DEFAULT_MAX_WAITING = 16, 256


# fmt: off
class EngineSettings(TypedDict, total=False):
    """Arguments of `LLM`; an absent one, or None, is the default."""

    quantize: Annotated[str | None, _memory(
        Text(), "format of weights: int8, int6, int4, mxfp4, fp8, w8a16 ..., or int6+gate=int4",
        shown_default="as the file has them", flags=("-q", "--quantize"), metavar="FORMAT")]
    dtype: Annotated[str | None, _memory(
        Text(), "float32 or bfloat16, of weights and activations",
        shown_default="bfloat16, on CPU float32 activations with the file's weights",
        metavar="TYPE")]
    kv_dtype: Annotated[str | None, _memory(
        Text(), "of the KV cache: float32, float16, bfloat16, int8 or fp8",
        shown_default="as dtype, but float16 on CPU with quantize", metavar="TYPE")]
    max_model_len: Annotated[int | None, _memory(
        Whole(1), "longest context in tokens, prompt included", shown_default="the model's",
        flags=("-c", "--max-model-len", "--ctx-size"), metavar="N")]
    weights_budget: Annotated[int | str | None, _memory(
        AnyValue(),
        "memory for weights, as in 8GB; layers beyond it are read from disk at every step",
        metavar="SIZE")]
    max_num_seqs: Annotated[int | None, _field(
        Whole(1), "sequences that run at once", unset=DEFAULT_NUM_SEQS, group="limits",
        metavar="N")]
    prefix_caching: Annotated[bool, _field(
        Flag(), "cache the KV blocks of prompts and reuse them for equal prefixes",
        default=True)]
    speculate: Annotated[str | Path | None, _drafts(
        AnyValue(), "speculative decoding: ngram, or a smaller draft model with the "
        "same tokenizer", metavar="HOW")]
    num_draft_tokens: Annotated[int | None, _drafts(
        Whole(1, MOST_DRAFT_TOKENS), "most drafts in a step", unset=DEFAULT_DRAFT_TOKENS,
        metavar="N")]
    options: Annotated[ExecutionOptions | None, _field(
        AnyValue(),
        "what may change speed but never a token, as long as the KV cache is as wide as "
        "the activations")]
    mesh: Annotated["Mesh | Shards | str | None", _field(
        AnyValue(),
        "split over devices, as in tensor=4,data=2; of data, expert, sequence, stage, tensor",
        shown_default="one device", group="where to run", metavar="AXIS=N")]
    revision: Annotated[str | None, _finding(
        Text(), "branch, tag or commit of a hub id", metavar="REF")]
    lora: Annotated[str | Path | None, _finding(
        AnyValue(), "a LoRA adapter for the model: PEFT's folder, or llama.cpp's .gguf file",
        metavar="DIR")]
    offline: Annotated[bool, _finding(
        Flag(), "use downloaded models only", default=False, flags=("--offline",))]
    ignore_config_keys: Annotated[Sequence[str], _finding(
        Several(Text()), "ignore an unknown key of config.json", default=(),
        flags=("--ignore-config-key",), metavar="KEY")]

    generation_config: Annotated[str, _field(
        Choice(("auto", "none")), "use the checkpoint's sampling defaults or not",
        default="auto", group="choosing tokens", flags=("--generation-config",), metavar="HOW")]


class ServingSettings(EngineSettings, total=False):
    """Further arguments of `AsyncLLM`."""

    max_waiting: Annotated[int, _field(
        Whole(1), "sequences that may wait beyond those; more are rejected with QueueFull",
        default=DEFAULT_MAX_WAITING)]
    max_tokens_per_step: Annotated[int | None, _field(
        Whole(1), "prompt tokens and decoding sequences of one step", group="limits",
        shown_default="what takes at most 0.3 s, up to 512, on a GPU up to 2,048",
        flags=("--max-num-batched-tokens",), metavar="N")]
    kv_blocks: Annotated[tuple[int, ...] | None, _field(
        AnyValue(), "blocks of the KV cache per layer group",
        shown_default="enough for all, or what half of the free memory holds")]
    loras: Annotated[Sequence[str], _finding(
        Several(Text()), "a LoRA adapter that requests choose by NAME as their model: PEFT's "
        "folder or a .gguf file", default=(), flags=("--lora",), metavar="NAME=DIR")]
    max_loras: Annotated[int | None, _finding(
        Whole(1, 64), "most adapters; without --lora, of all linear layers",
        shown_default="as many as are given", metavar="N")]
    max_lora_rank: Annotated[int | None, _finding(
        Whole(1, 512), "the largest rank of an adapter",
        shown_default="that of those that are given", metavar="N")]
    max_pieces_per_s: Annotated[float | None, _field(
        Number(0, above=True), "of all streams together; what comes faster is merged",
        shown_default="no limit")]
    # fmt: on
