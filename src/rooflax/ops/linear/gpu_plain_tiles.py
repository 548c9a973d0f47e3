"""The GPU's kernel of several rows of plain bfloat16 weights: tensor cores multiply what is read.

The result is computed transposed, as in gpu_tiles.py: 64 outputs of a program are the left operand,
read from shared memory across its rows, and the rows the right one, of eight columns or more. TMA
copies both, some stages ahead. Where panels of outputs are too few for the card, programs share the
inputs; XLA adds their sums in float32, with bias and residual.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops import block_sizes
from rooflax.ops.block_sizes import powers_of_two, rounded_up
from rooflax.ops.weights import StoredOperand

MOST_ROWS = 16
PANEL = 64
"""Outputs of a program: what a warpgroup multiplies at a time."""
DEPTH = 64
"""Inputs of a stage."""
STAGES = 6
"""Stages of weights and rows on their way to shared memory, by rule."""
ENOUGH_PROGRAMS = 264
"""Two for each of an H200's multiprocessors: below it programs share the inputs."""
LEAST_STEPS = 8
"""Stages of a program that shares them."""


def unsupported(x: Any, w: StoredOperand) -> str | None:
    """Reason why the kernel does not multiply these; None if it does."""
    if w.code != "matrix" or not x.dtype == w.dtype == jnp.bfloat16:
        return "linear's tensor cores take plain weights and rows in bfloat16"
    if not 1 < len(x) <= MOST_ROWS:
        return f"linear's tensor cores take 2 to {MOST_ROWS} rows of plain weights, not {len(x)}"
    if w.inner % DEPTH or w.outer % PANEL:
        sizes = f"{w.inner} and {w.outer}"
        return f"linear's tensor cores take plain weights' sizes by {DEPTH}, not {sizes}"
    return None


def matmul(
    x: Float[Array, "rows in"], w: StoredOperand, member: Int[Array, " one"]
) -> Float[Array, "rows out"]:
    """x @ w[member] in float32."""
    from rooflax.ops.mosaic import accumulator, launch, pl, plgpu, store, swizzled

    rows, tile = len(x), -(-len(x) // 8) * 8
    array = w.arrays[0].reshape(-1, w.inner, w.outer)
    splits, stages = block_sizes.of(
        "linear.gpu plain tiles",
        (rounded_up(rows), w.inner, w.outer),
        (_splits(w), STAGES),
        [(n, s) for n in _all_splits(w) for s in (4, STAGES, 8)],
    )
    steps = w.inner // DEPTH // splits
    late = int(steps > 1)

    def matmul_plain_tiles(x_ref: Any, w_ref: Any, member_ref: Any, out_ref: Any) -> None:
        panel, split = jax.lax.axis_index("panel"), jax.lax.axis_index("split")

        def multiplied(sums: Any) -> Any:
            def step(_: Any, weights: Any, rows: Any) -> None:
                plgpu.wgmma(sums, weights.transpose((1, 0)), rows.transpose((1, 0)))
                plgpu.wgmma_wait(late)  # a stage is refilled once its products are done

            first = split * steps
            how: dict[str, Any] = {"transforms": swizzled(jnp.bfloat16), "delay_release": late}
            plgpu.emit_pipeline(
                step,
                grid=(steps,),
                in_specs=[
                    plgpu.BlockSpec((DEPTH, PANEL), lambda k: (first + k, panel), **how),
                    plgpu.BlockSpec((tile, DEPTH), lambda k: (0, first + k), **how),
                ],
                max_concurrent_steps=min(stages, steps),
            )(w_ref.at[member_ref[0]], x_ref)
            return sums[...]

        found = pl.run_scoped(multiplied, accumulator(PANEL, tile))
        store(out_ref.at[split, pl.ds(panel * PANEL, PANEL)], found)

    out = jax.ShapeDtypeStruct((splits, w.outer, tile), jnp.float32)
    grid = {"panel": w.outer // PANEL, "split": splits}
    x = jnp.pad(x, ((0, tile - rows), (0, 0)))
    sums = launch(matmul_plain_tiles, out, grid)(x, array, member)
    return sums.sum(axis=0).T[:rows]


def _all_splits(w: StoredOperand) -> list[int]:
    steps = w.inner // DEPTH
    return [n for n in powers_of_two(max(1, steps // LEAST_STEPS)) if steps % n == 0]


def _splits(w: StoredOperand) -> int:
    panels = w.outer // PANEL
    enough = [n for n in _all_splits(w) if n == 1 or panels * n < 2 * ENOUGH_PROGRAMS]
    return max(enough)
