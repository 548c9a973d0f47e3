"""Memory of a model, counted from its table before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from rooflax.errors import RequestError
from rooflax.nn.decoder import Decoder
from rooflax.nn.execution import gib
from rooflax.nn.kv_cache import bytes_per_token, padding_per_token
from rooflax.nn.layout import SCORED_AT_ONCE, blocks_needed, num_snapshots
from rooflax.nn.shard_sizes import config_on, part_sizes
from rooflax.nn.shards import Shards
from rooflax.nn.storage import Storage
from rooflax.ops import accelerator
from rooflax.ops.attention.api import PAGED

ONE_DEVICE = Shards()


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes, by what they are for.

    Attributes:
        weights: all parameters, and the RoPE table.
        kv_cache: all blocks of the KV cache.
        workspace: the largest intermediates of one step, an upper estimate.
    """

    weights: int
    kv_cache: int
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.workspace


def estimate(
    config: Decoder,
    *,
    storage: Storage,
    kv_dtype: str,
    rows: int,
    tokens: int,
    max_model_len: int | None = None,
    prefill_chunk: int | None = None,
    step_tokens: int | None = None,
    num_blocks: tuple[int, ...] | None = None,
    shards: Shards = ONE_DEVICE,
    draft_tokens: int = 0,
) -> MemoryEstimate:
    """Counts weights, cache and workspace of one device.

    Args:
        storage: at which width each weight will be kept.
        rows: sequences that run at once.
        tokens: longest context of each.
        prefill_chunk: the most tokens of one prompt in a step; None is the platform's.
        step_tokens: the most of a step; None is a chunk, or one for every row.
        max_model_len: rows of the RoPE table; the model's own by default.
        num_blocks: of the KV cache per layer group; None is enough for all rows.
        shards: of a mesh, which need not be here.

    Raises:
        RequestError: a split that leaves a remainder.
    """
    block_size = accelerator.block_size()
    config = config_on(config, shards)
    sizes, layers = part_sizes(config, shards), config.num_layers // shards.stage
    weights = sum(
        storage.of(param, config, shards=shards).num_bytes(param.line.shape(sizes))
        for param in config.first(layers).params()
    )
    chunk = min(prefill_chunk or accelerator.prefill_chunk(), tokens)
    step_tokens = step_tokens or max(rows, chunk)
    if num_blocks is None:
        num_blocks = plan_blocks(
            config,
            kv_dtype=kv_dtype,
            num_slots=rows,
            max_tokens=tokens,
            new_tokens=chunk,
            block_size=block_size,
            draft_tokens=draft_tokens,
        )
    groups = config.groups
    kept = groups.kept_heads(layers, shards.tensor) if num_blocks else ()
    kv_cache = block_size * sum(
        num_blocks[groups.of_layer[layer]] * bytes_per_token(heads, kv_dtype)
        for layer, heads in kept
    )
    if groups.state is not None:
        kv_cache += num_blocks[groups.state] * groups.row_bytes(layers) // shards.tensor
    return MemoryEstimate(
        weights=weights + rope_bytes(config, max_model_len),
        kv_cache=kv_cache,
        workspace=workspace_bytes(config, rows, tokens, chunk, step_tokens, shards),
    )


def plan_blocks(
    config: Decoder,
    *,
    kv_dtype: str,
    num_slots: int,
    max_tokens: int,
    new_tokens: int,
    block_size: int,
    draft_tokens: int = 0,
    limit_bytes: int | None = None,
) -> tuple[int, ...]:
    """Blocks of the KV cache per layer group, block 0 included.

    Window groups get what their windows need; a full group shares what is left. The group with
    state has a row for every sequence and each of its drafts, and rows for snapshots.

    Args:
        new_tokens: the most tokens that a step writes for one sequence.
        draft_tokens: how many of them may be drafts.
        limit_bytes: for the whole cache; None is no limit.

    Raises:
        RequestError: not even one sequence of `max_tokens` fits, with the arithmetic.
    """
    groups = config.groups
    if not config.cached_windows:
        return ()
    lengths = (max_tokens, new_tokens, block_size, 1 + draft_tokens)
    longest = [blocks_needed(window, *lengths) for window in groups.windows]

    def kept(slots: int) -> int:
        return num_snapshots(groups.row_bytes(), slots, max_tokens, block_size)

    def needed(slots: int) -> int:
        blocks = block_size * sum(
            (1 + slots * longest[groups.of_layer[layer]]) * bytes_per_token(heads, kv_dtype)
            for layer, heads in groups.kept_heads()
        )
        return blocks + groups.row_bytes() * (1 + slots * (1 + draft_tokens) + kept(slots))

    slots = num_slots
    while slots > 1 and limit_bytes is not None and needed(slots) > limit_bytes:
        slots -= 1
    if limit_bytes is not None and needed(slots) > limit_bytes:
        raise RequestError(
            f"The KV cache of one sequence of {max_tokens:,} tokens takes {gib(needed(slots))} "
            f"({needed(slots):,} bytes) and {_left(limit_bytes)}; lower max_model_len.",
            param="max_model_len",
        )
    return tuple(
        1 + slots * n + (kept(slots) if group == groups.state else 0)
        for group, n in enumerate(longest)
    )


def _left(limit_bytes: int) -> str:
    if limit_bytes <= 0:
        return "the weights leave nothing for it"
    return f"{gib(limit_bytes)} ({limit_bytes:,} bytes) is left for it"


def rope_bytes(config: Decoder, max_model_len: int | None) -> int:
    """Bytes of the RoPE tables."""
    pairs = zip(config.ropes, config.rope_dims, strict=True)
    rows = sum(dim + bool(rope.query_beta) for rope, dim in pairs)
    return rows * (max_model_len or config.max_position) * 4


def padding(
    config: Decoder,
    *,
    storage: Storage,
    kv_dtype: str,
    rows: int,
    tokens: int,
    prefill_chunk: int | None = None,
    shards: Shards = ONE_DEVICE,
) -> dict[str, int]:
    """Bytes in `estimate` that only pad sizes to tiles and parts (ops.tiles).

    Returns:
        By the size that is padded: "head_dim" of every token in the cache; "block_size", what
        follows the last token in its block; "vocab", on the device that has most of it.

    Raises:
        RequestError: a split that leaves a remainder.
    """
    block_size = accelerator.block_size()
    chunk = min(prefill_chunk or accelerator.prefill_chunk(), tokens)
    config = config_on(config, shards)
    sizes, layers = part_sizes(config, shards), config.num_layers // shards.stage
    in_heads = in_blocks = 0
    kept_heads = config.groups.kept_heads(layers, shards.tensor) if config.cached_windows else ()
    for layer, heads in kept_heads:
        window = config.groups.windows[config.groups.of_layer[layer]]
        kept = blocks_needed(window, tokens, chunk, 1)
        slots = blocks_needed(window, tokens, chunk, block_size) * block_size
        in_heads += (rows * kept + block_size) * padding_per_token(heads, kv_dtype)
        in_blocks += rows * (slots - kept) * bytes_per_token(heads, kv_dtype)
    real = sizes | {"vocab": max(0, config.vocab_size - sizes["vocab"] * (shards.tensor - 1))}

    def rows_of_vocab(sizes: dict[str, int]) -> int:
        return sum(
            storage.of(param, config, shards=shards).num_bytes(param.line.shape(sizes))
            for param in config.first(layers).params()
            if "vocab" in param.line.axis_names
        )

    return {
        "head_dim": in_heads,
        "block_size": in_blocks,
        "vocab": rows_of_vocab(sizes) - rows_of_vocab(real),
    }


def workspace_bytes(
    config: Decoder,
    rows: int,
    tokens: int,
    chunk: int,
    step_tokens: int,
    shards: Shards = ONE_DEVICE,
) -> int:
    """The largest intermediates of a step of `step_tokens` tokens, of each of `rows` sequences up
    to `chunk`; an upper estimate."""
    rows = rows // shards.data if rows % shards.data == 0 else rows
    if chunk % shards.sequence == 0 and step_tokens % shards.sequence == 0:
        chunk, step_tokens = chunk // shards.sequence, step_tokens // shards.sequence
    scores_stay = PAGED.preferred(None).reads_blocks  # in the kernel
    scores = 0 if scores_stay else config.num_heads // shards.tensor * chunk * tokens * 4
    widths = {axis: size for axis, size in config.axis_sizes.items() if axis.endswith("mlp")}
    if config.moe:  # a token has a row for each expert that it chooses
        widths["mlp"] *= config.moe.experts_per_token
    heads = config.num_heads * config.head_dim  # latent attention's are wide
    mlp = max(heads, *widths.values()) // shards.tensor
    per_layers = config.per_layer.width * config.num_layers if config.per_layer else 0  # not split
    hidden = step_tokens * (4 * config.hidden_size + 3 * mlp + 3 * per_layers) * 4
    logits = max(3 * rows, 2 * min(SCORED_AT_ONCE, chunk)) * config.vocab_size * 4
    if not config.is_causal:  # no token is chosen, and a layer's keys and values are the step's
        kept = (bytes_per_token(heads, "float32") for _, heads in config.groups.kept_heads())
        logits = (step_tokens + rows * accelerator.block_size()) * max(kept)
    return rows * 2 * scores + hidden + logits


def check_fits(need: MemoryEstimate, available: int | None, what: str) -> None:
    """Rejects what does not fit, with the arithmetic; where nothing is known, nothing is rejected.

    Raises:
        RequestError: more is needed than available.
    """
    if available is None or need.total <= available:
        return
    smaller = "a smaller model or max_model_len, fewer bits for a weight (`quantize`)"
    if need.weights > available:
        smaller = "a smaller model, fewer bits for a weight (`quantize`)"
    raise RequestError(
        f"{what} needs {gib(need.weights)} for weights + {gib(need.kv_cache)} for the KV cache "
        f"+ {gib(need.workspace)} of workspace = {gib(need.total)}, and {gib(available)} is free; "
        f"choose {smaller}, or a weights_budget such as 8GB, which reads the other layers from the "
        f"file."
    )
