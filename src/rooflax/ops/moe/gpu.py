"""Experts on a GPU: pairs of token and expert sorted into tiles of one expert, each read in place.

Few pairs per expert (decoding): the tiles' matmuls are those of `ops.linear.gpu`, which reads the
experts' numbers in the kernel and no weight of any other, at its width. Many (prefill): tiles of
128 rows on the tensor cores, their expert's weights by TMA; quantised ones are upcast in registers
(`ops.linear.gpu_tiles`).

Interpret mode shows that the kernels mean what the reference says; lowering and assembling for
sm_90a show that they compile; docs/gpu.md has what a card showed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops import block_sizes
from rooflax.ops.block_sizes import rounded_up
from rooflax.ops.dispatch import Backend
from rooflax.ops.linear import gpu as linear
from rooflax.ops.linear import gpu_rows, gpu_tiles
from rooflax.ops.linear.prologue import Activation, ClampedSwiglu
from rooflax.ops.moe.args import Experts, MoeArgs
from rooflax.ops.moe.xla import plan
from rooflax.ops.weights import Quantized, StoredOperand

WIDE_TILE = 128
"""Rows of a tile on the tensor cores."""
DEPTH = 64
"""Inputs multiplied at a time there: 128 bytes, as far as a swizzle goes."""
STAGES = 4
"""Tiles of rows and of weights on their way to shared memory, by rule."""
SHARED_BYTES = 192 << 10
"""Bytes of those and of the results, of the 227 KiB that a warpgroup can have."""


def experts(args: MoeArgs) -> Float[Array, "tokens hidden"]:
    x, expert_ids = args.x, args.expert_ids
    tokens, chosen = expert_ids.shape
    num_experts, pairs = args.num_experts, tokens * chosen
    few = _is_few(args) and not _shares_tiles(args)
    expected = 1 << ((pairs - 1) // num_experts).bit_length()
    if few:
        multiply, tile = _few, min(gpu_rows.ROWS_AT_ONCE, expected)
    else:
        narrow = args.up.w.code != "matrix"
        multiply, tile = _many, max(8, min(WIDE_TILE, expected)) if narrow else WIDE_TILE
    pair_expert = expert_ids.reshape(-1)
    token_of_pair = jnp.arange(pairs, dtype=jnp.int32) // chosen
    if tile == 1:  # nothing to sort: that would take longer than the matmuls
        return _by_pairs(args, pair_expert)
    tile_expert, pair_place, num_tiles = plan(pair_expert, num_experts, tile)
    places = jnp.zeros(tile_expert.shape[0] * tile, jnp.int32)
    token_of_place = places.at[pair_place].set(token_of_pair)

    def through(rows: jax.Array, e: Experts) -> Float[Array, "tiles tile outer"]:
        w, members = _members(e, tile_expert)
        tiles = rows.reshape(-1, tile, rows.shape[-1])
        y = multiply(tiles, w, members, num_tiles.reshape(1), x.dtype)
        if e.biases is None:
            return y
        return y + e.biases.astype(jnp.float32)[tile_expert][:, None, :]

    h = through(args.rows[token_of_place], args.up)
    h = args.activation(h.reshape(len(token_of_place), 2, -1))
    y = through(h, args.down).reshape(len(token_of_place), -1)
    per_pair = y[pair_place].reshape(tokens, chosen, -1)
    return args.onto(jnp.sum(per_pair * args.expert_weights[:, :, None], axis=1).astype(x.dtype))


def _members(
    e: Experts, expert: Int[Array, " tiles"]
) -> tuple[StoredOperand, Int[Array, " tiles"]]:
    """All matrices in one stack, and which of them these experts are."""
    if e.index is None:
        return e.w, expert
    return e.w.joined(), expert + e.index * e.w.stack[-1]


def _by_pairs(args: MoeArgs, pair_expert: Int[Array, " pairs"]) -> Float[Array, "tokens hidden"]:
    """Experts, one pair of token and expert after the other, in two kernels: norm and first matmul;
    activation, second matmul and, of quantised ones, the sum over a token's experts: a program has
    all of its pairs, a warpgroup each, or XLA adds what programs of one warpgroup give."""
    tokens, chosen = args.expert_ids.shape
    dtype, sizes = args.x.dtype, jnp.full(1, tokens * chosen, jnp.int32)
    up, members = _members(args.up, pair_expert)
    rows = gpu_rows.Rows(args.x[:, None], dtype, args.norm, chosen, args.up.biases)
    h = linear.few_matmuls(rows, up, members, sizes)
    down, members = _members(args.down, pair_expert)
    activation, shares = args.activation, args.expert_weights
    if not isinstance(activation, Activation | ClampedSwiglu):
        h, activation = activation(h.reshape(len(h), 1, 2, -1)), None
    rows = gpu_rows.Rows(h, dtype, activation, bias=args.down.biases)
    together = down.code != "matrix" and 2 <= chosen <= gpu_rows.MOST_WARPGROUPS
    if together:
        shape = rounded_up(tokens), chosen, down.inner, down.outer, down.code
        together = block_sizes.of("experts.gpu pairs", shape, (1,), [(1,), (0,)]) == (1,)
    if not together:
        y = linear.few_matmuls(rows, down, members, sizes)
        y = y.reshape(tokens, chosen, -1) * shares[:, :, None]
        return args.onto(jnp.sum(y, axis=1).astype(dtype))
    residual = None if args.residual is None else args.residual[:, None]
    rows = replace(rows, shares=shares, result=dtype, residual=residual)
    return linear.few_matmuls(rows, down, members, sizes)[:, 0]


def _shares_tiles(args: MoeArgs) -> bool:
    """Whether few rows of an expert go to the tensor cores: more than one is to be expected, of
    weights that these upcast in registers."""
    if args.expert_ids.size <= args.num_experts or args.x.dtype != jnp.bfloat16:
        return False
    weights = args.up.w, args.down.w
    return all(w.code != "matrix" and _many_unsupported(w) is None for w in weights)


def _is_few(args: MoeArgs) -> bool:
    """Whether the rows of an expert share one reading of its weights."""
    return args.expert_ids.size <= gpu_rows.ROWS_AT_ONCE * args.num_experts


def unsupported(args: MoeArgs) -> str | None:
    if args.method != "grouped":
        return f"the experts' GPU kernels always group (moe={args.method})"
    reject = linear.unreadable if _is_few(args) else _many_unsupported
    if not _is_few(args) and args.x.dtype != jnp.bfloat16:
        return f"the experts' tensor cores take bfloat16, not {args.x.dtype}"
    return reject(args.up.w) or reject(args.down.w)


def _many_unsupported(w: StoredOperand) -> str | None:
    if w.code != "matrix":
        if w.quantizes_activations:
            return f"the experts' tensor cores would lose digits of {cast(Quantized, w).format}"
        return linear.unreadable(w) or gpu_tiles.unsupported(cast(Quantized, w))
    if w.dtype != jnp.bfloat16:
        return f"the experts' tensor cores take bfloat16, not {w.dtype}"
    if w.inner % DEPTH or w.outer % 64:
        return f"the experts' tensor cores take sizes by {DEPTH}, not {w.inner} and {w.outer}"
    return None


def _few(
    x: Float[Array, "tiles tile inner"],
    w: StoredOperand,
    members: Int[Array, " tiles"],
    num_tiles: Int[Array, " one"],
    dtype: Any,
) -> Float[Array, "tiles tile outer"]:
    """Matmuls of tiles of few rows, by reading the weights once at their width."""
    return linear.few_matmuls(gpu_rows.Rows(x, dtype), w, members, num_tiles)


def _many(
    x: Float[Array, "tiles tile inner"],
    w: StoredOperand,
    members: Int[Array, " tiles"],
    num_tiles: Int[Array, " one"],
    dtype: Any,
) -> Float[Array, "tiles tile outer"]:
    """Matmuls of whole tiles, on the tensor cores."""
    del dtype  # bfloat16
    if w.code != "matrix":
        return gpu_tiles.tile_matmuls(x, cast(Quantized, w), members, num_tiles)
    wide = w.arrays[0].reshape(-1, *w.arrays[0].shape[-2:])
    return _tile_matmuls(x.astype(jnp.bfloat16), wide, members, num_tiles)


def _tile_matmuls(
    x: Float[Array, "tiles tile inner"],
    w: Float[Array, "members inner outer"],
    members: Int[Array, " tiles"],
    num_tiles: Int[Array, " one"],
) -> Float[Array, "tiles tile outer"]:
    """x[t] @ w[members[t]] in bfloat16 with float32 sums: a warpgroup has a tile of the result."""
    from rooflax.ops.mosaic import accumulator, launch, pl, plgpu, swizzled

    (count, tile, inner), outer = x.shape, w.shape[2]
    steps = inner // DEPTH
    late = int(steps > 1)
    width, stages = block_sizes.of(
        "experts.gpu tiles",
        (rounded_up(count), tile, inner, outer),
        (128 if outer % 128 == 0 else 64, min(STAGES, steps)),
        _tile_candidates(tile, outer, steps),
    )

    def body(x_ref, w_ref, members_ref, num_tiles_ref, out_ref, out_smem) -> None:
        index, panel = jax.lax.axis_index("tile"), jax.lax.axis_index("panel")

        @pl.when(index < num_tiles_ref[0])
        def _() -> None:
            member = members_ref[index]

            def multiplied(sums):
                def step(_, rows, weights):
                    plgpu.wgmma(sums, rows, weights)
                    plgpu.wgmma_wait(late)  # a stage is refilled once its products are done

                plgpu.emit_pipeline(
                    step,
                    grid=(steps,),
                    in_specs=[
                        plgpu.BlockSpec(
                            (tile, DEPTH),
                            lambda k: (0, k),
                            delay_release=late,
                            transforms=swizzled(jnp.bfloat16),
                        ),
                        plgpu.BlockSpec(
                            (DEPTH, width),
                            lambda k: (k, panel),
                            delay_release=late,
                            transforms=swizzled(jnp.bfloat16),
                        ),
                    ],
                    max_concurrent_steps=stages,
                )(x_ref.at[index], w_ref.at[member])
                return sums[...]

            out_smem[...] = pl.run_scoped(multiplied, accumulator(tile, width))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem, out_ref.at[index, :, pl.ds(panel * width, width)])
            plgpu.wait_smem_to_gmem(0)

    out = jax.ShapeDtypeStruct((count, tile, outer), jnp.float32)
    grid = {"panel": outer // width, "tile": count}
    scratch = [plgpu.SMEM((tile, width), jnp.float32, transforms=swizzled(jnp.float32))]
    return launch(body, out, grid, scratch_types=scratch)(x, w, members, num_tiles)


def _tile_candidates(tile: int, outer: int, steps: int) -> list[tuple[int, int]]:
    """Outputs of a tile, and stages: what shared memory holds."""
    return [
        (width, stages)
        for width in (64, 128)
        for stages in (2, 3, STAGES, 6)
        if outer % width == 0 and stages <= steps
        if stages * 2 * DEPTH * (tile + width) + 4 * tile * width <= SHARED_BYTES
    ]


BACKEND = Backend(experts, unsupported)
