"""Operands of the tensor cores in registers, put together from packed words, for Mosaic GPU's
kernels.

`wgmma` takes its left operand from registers: of 64 rows and 16 columns a warp has 16 rows, and a
thread four neighbours of two of them. A panel of packed words is the same: 16 outputs, and a word
has four inputs of one. So words become operands without moving between threads, where columns are
counted as words have them, and the 16 rows of panel p so that row 8 e + g is output 2 g + e. What
is multiplied with them has its inputs in the same order. Outputs of the result are put in order
within a thread, too.

Each is a primitive with two meanings, as in `mosaic_bytes`: in a kernel on a GPU the same registers
in another layout, and JAX's operations everywhere else, which is what interpretation runs. Imported
inside functions only, as `ops.mosaic` is.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as _mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector
from jaxtyping import Array, BFloat16, Int, Shaped

from rooflax.ops.mosaic_bytes import element, primitive

mgpu: Any = _mgpu
ROWS, PANELS = 64, 4
"""Rows and panels of an operand: a warp has a panel of 16."""
WORDS = (PANELS, 64)
"""Words of four panels: 16 outputs of four words each."""


def words_layout() -> Any:
    """Layout of [4, 64] words: a warp has a panel, a thread two neighbouring outputs of a word."""
    return plgpu.Layout.TILED(
        plgpu.Tiling((WORDS, (16,), (2,))), warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1
    )


def scales_layout() -> Any:
    """Layout of [4, 16] values of outputs: those of a thread's own words."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((PANELS, 16), (2,))),
        warp_dims=(-3,),
        lane_dims=(-2, plgpu.Replicated(4)),
        vector_dim=-1,
    )


def transposed_layout() -> Any:
    """Layout of [rows, 4, 16] sums: a thread has two neighbouring outputs of two rows in eight."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((8, PANELS, 16), (8, 1, 16), (2, 1, 2))),
        warp_dims=(-8,),
        lane_dims=(-4, -6),
        vector_dim=-1,
    )


def operand(pairs: list[Int[Array, "4 64"]]) -> BFloat16[Array, "64 columns"]:
    """64 rows of eight columns for each of the arrays, which have two neighbouring columns in an
    element: the first in the lower half."""
    return _OPERAND.bind(*pairs)


def rows_of(values: Shaped[Array, "4 16"]) -> Shaped[Array, " 64"]:
    """Values of outputs as those of an operand's rows."""
    return _ROWS_OF.bind(values)


def transposed(sums: Shaped[Array, "64 rows"]) -> Shaped[Array, "rows 4 16"]:
    """Transposes an operand's product to panels and outputs."""
    return _TRANSPOSED.bind(sums)


def _operand(*pairs: jax.Array) -> jax.Array:
    blocks = jnp.stack(pairs).reshape(len(pairs), PANELS, 4, 8, 2)
    halves = jax.lax.bitcast_convert_type(blocks, jnp.bfloat16)
    return halves.transpose(1, 4, 3, 0, 2, 5).reshape(ROWS, 8 * len(pairs))


def _rows_of(values: jax.Array) -> jax.Array:
    return values.reshape(PANELS, 8, 2).swapaxes(1, 2).reshape(ROWS)


def _transposed(sums: jax.Array) -> jax.Array:
    return sums.reshape(PANELS, 2, 8, -1).transpose(3, 0, 2, 1).reshape(-1, PANELS, 16)


def _fragmented(registers: np.ndarray, layout: Any, like: Any) -> Any:
    """An array of these registers.

    Args:
        like: whose sign it has.
    """
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=like)


def _operand_in_kernel(*pairs: Any) -> Any:
    layout, i32 = plgpu.Layout.WGMMA.to_mgpu(), ir.IntegerType.get_signless(32)
    one, two = ir.VectorType.get((1,), i32), ir.VectorType.get((2,), ir.BF16Type.get())
    registers = np.empty(layout.registers_shape((ROWS, 8 * len(pairs))), object)
    for block, words in enumerate(pairs):
        (register,) = words.registers.flat
        for e in range(2):
            word = vector.broadcast(one, element(register, e))
            registers[0, block, 0, 0, e] = vector.bitcast(two, word)
    return _fragmented(registers, layout, None)


def _rows_of_in_kernel(values: Any) -> Any:
    layout = plgpu.Layout.WGMMA.reduce(1).to_mgpu()
    registers = np.empty(layout.registers_shape((ROWS,)), object)
    (register,) = values.registers.flat
    one = ir.VectorType.get((1,), values.mlir_dtype)
    for e in range(2):
        registers[0, 0, e] = vector.broadcast(one, element(register, e))
    return _fragmented(registers, layout, values.is_signed)


def _transposed_in_kernel(sums: Any) -> Any:
    layout, blocks = transposed_layout().to_mgpu(), sums.registers.shape[1]
    registers = np.empty(layout.registers_shape((8 * blocks, PANELS, 16)), object)
    two, flat = ir.VectorType.get((2,), sums.mlir_dtype), registers.reshape(blocks, 2)
    for block in range(blocks):
        both = [sums.registers[0, block, 0, 0, e].item() for e in range(2)]
        for row in range(2):
            flat[block, row] = vector.from_elements(two, [element(each, row) for each in both])
    return _fragmented(registers, layout, sums.is_signed)


_OPERAND = primitive(
    "operand",
    _operand,
    _operand_in_kernel,
    lambda *pairs: pairs[0].update(shape=(ROWS, 8 * len(pairs)), dtype=jnp.dtype(jnp.bfloat16)),
)
_ROWS_OF = primitive(
    "rows_of", _rows_of, _rows_of_in_kernel, lambda values: values.update(shape=(ROWS,))
)
_TRANSPOSED = primitive(
    "transposed",
    _transposed,
    _transposed_in_kernel,
    lambda sums: sums.update(shape=(sums.shape[1], PANELS, 16)),
)
