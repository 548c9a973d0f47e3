"""Matmuls of many rows by the GPU's tensor cores, whose left operand is upcast in registers.

In interpret mode against the reference, and lowered for CUDA. Interpretation takes the operand from
shared memory; that registers hold the same is shown by following every element through the lowered
operations.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.ops.format_names import FORMATS
from rooflax.ops.linear import gpu as linear_gpu
from rooflax.ops.linear import gpu_tiles, linear
from rooflax.ops.linear.args import LinearArgs
from rooflax.ops.linear.prologue import applied
from rooflax.ops.weights import StackMember, as_operand, pack, taken
from tests.engine.ops.test_gpu import CODES, PROLOGUES, codes_of, weights
from tests.marks import cases
from tests.support.ops.cases import WITH_GPU_KERNELS, close, lowered, normal

pytestmark = [pytest.mark.oldest_jax, WITH_GPU_KERNELS]

SIZES = {
    "one warpgroup": (37, 1120, 53),
    "panels and tiles and a part": (137, 160, 200),
    "few rows": (9, 544, 157),
    "less than a stage": (9, 96, 200),
}
"""Rows, inputs and outputs: 35, 5, 17 and 3 groups are no whole stages."""


def multiplied(x, w, dtype=jnp.float32, **how):
    """Linear by the tensor cores, whatever platform this is."""
    args = LinearArgs(x, *as_operand(w).in_stack(), dtype=dtype, **how)
    assert linear_gpu.unsupported(args) is None
    assert "multiply_tiles" in str(jax.make_jaxpr(lambda: linear_gpu.matmul(args))())
    return linear_gpu.matmul(args)


def reference(x, w, bias=None):
    """Linear of the numbers that bfloat16 rows are. A kernel of several warpgroups then has the
    threads of XLA's client, which a large matmul wants as well, for itself."""
    return np.asarray(linear(x.astype(jnp.float32), w, bias, implementation="reference"))


def rows_of(count, inner, **how):
    return jnp.asarray(normal(count, inner, **how), jnp.bfloat16)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("format", cases(CODES, every_jax=["w4a16", "mxfp4-a16"]))
def test_products(format, size, interpreted):
    rows, inner, outer = SIZES[size]
    w, x = weights(format, inner, outer), rows_of(rows, inner)
    wanted, found = reference(x, w), multiplied(x, w)
    assert found.dtype == jnp.float32
    close(found, wanted)


QUICK = {"xla_backend_optimization_level": 0}
"""XLA optimises the interpretation of eight rows for minutes."""


ON_TENSOR_CORES = ["w8a16", "w8a16-g32", "w4a16", "mxfp4-a16", "fp8-a16"]


@pytest.mark.parametrize("format", cases(ON_TENSOR_CORES, every_jax=["w8a16", "w4a16", "fp8-a16"]))
def test_from_two_rows_on_tensor_cores_multiply(format, interpreted):
    """And either kernel gives what the reference does. One row is rounded to 16 bits."""
    w = weights(format, 160, 200)
    for rows in (1, 2):
        x = rows_of(rows, 160)
        args = LinearArgs(x, *as_operand(w).in_stack(), dtype=jnp.float32)
        taken = str(jax.make_jaxpr(lambda args=args: linear_gpu.matmul(args))())
        assert ("multiply_tiles" in taken) == (rows > 1)
        found = jax.jit(lambda args=args: linear_gpu.matmul(args), compiler_options=QUICK)()
        close(found, reference(x, w), 2e-6 if rows > 1 else 2**-15)


@pytest.mark.parametrize("format", cases(["w4a16", "w8a16"], every_jax=["w8a16"]))
def test_programs_that_share_the_inputs(format, interpreted, monkeypatch):
    """19 stages: ten or five a program, of the last fewer."""
    w, x = weights(format, 2432, 64), rows_of(24, 2432)
    bias = jnp.asarray(normal(64, seed=2))
    wanted, shared = reference(x, w, bias), []
    for enough in (1, 2):
        monkeypatch.setattr(gpu_tiles, "ENOUGH_PROGRAMS", enough)
        shared.append(gpu_tiles._sizes(gpu_tiles.CODES[w.code], 24, 76, 1)[1])
        close(multiplied(x, w, bias=bias), wanted)
    assert shared == [2, 4]


@pytest.mark.parametrize("name", PROLOGUES)
def test_all_that_a_matmul_takes(name, interpreted):
    w, prologue = weights("w4a16", 1120, 53), PROLOGUES[name]
    bias, residual = (jnp.asarray(normal(*n, seed=3), jnp.bfloat16) for n in ((53,), (19, 53)))
    x = rows_of(19, 1120 * (2 if getattr(prologue, "gated", False) else 1))
    wanted = reference(applied(prologue, x), w, bias.astype(jnp.float32))
    wanted = wanted + np.asarray(residual, np.float32)
    how = {"bias": bias, "prologue": prologue, "residual": residual}
    found = multiplied(x, w, jnp.bfloat16, **how)
    assert found.dtype == jnp.bfloat16
    close(found.astype(jnp.float32), wanted, 2**-7)


@pytest.mark.parametrize("format", cases(["w4a16", "mxfp4-a16", "w8a16"], every_jax=["w4a16"]))
def test_what_is_not_read(format, interpreted):
    """Other members of a stack are NaN, and so are outputs that only fill a panel."""
    w, x = weights(format, 160, 53, members=3), rows_of(17, 160)
    wanted = reference(x, taken(StackMember(w, jnp.int32(1))))
    fills, grouped = np.arange(64).reshape(4, 16) >= 53, w.scales.ndim > 2
    fills = fills[None, :, None] if grouped else fills.reshape(1, 64)
    others = (np.arange(3) != 1).reshape(3, *(1,) * (w.scales.ndim - 1))
    lost = jnp.asarray(255 if format == "mxfp4-a16" else np.nan, w.scales.dtype)
    spoilt = replace(w, scales=jnp.where(jnp.asarray(fills | others), lost, w.scales))
    close(multiplied(x, StackMember(spoilt, jnp.int32(1))), wanted)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("format", ["w4a16", "mxfp4-a16", "w8a16"])
def test_a_row_that_is_not_finite_spoils_itself_alone(format, interpreted):
    w, x = weights(format, 288, 53), rows_of(17, 288)
    wanted = reference(x, w)
    found = multiplied(x.at[3, 5].set(jnp.nan).at[16, 287].set(jnp.inf), w)
    found, lost = np.asarray(found), np.isin(np.arange(17), (3, 16))
    assert not np.isfinite(found[lost]).any()
    close(found[~lost], wanted[~lost])


def of_codes(name, codes):
    """A weight of codes [outputs, inputs], each worth itself."""
    format = next(format for format in CODES if FORMATS[format].code == name)
    outputs, inputs = codes.shape
    scales = np.full((outputs, inputs // 32), 127, np.uint8)
    if name != "mxfp4":
        scales = np.ones((outputs, inputs // 32), np.float16)
    if name in ("int8", "fp8"):
        scales = np.ones(outputs, np.float32)
    return pack(format, codes, scales, (inputs,), (outputs,))


@pytest.mark.every_jax
@pytest.mark.parametrize("name", gpu_tiles.CODES)
def test_every_code_becomes_an_operand_exactly(name):
    """Each code at each place of a group, beside others."""
    codes, code = codes_of(name), gpu_tiles.CODES[name]
    rows = np.arange(64).reshape(4, 8, 2).swapaxes(1, 2).reshape(64)
    for shift in range(0, len(codes), 64):
        places = np.arange(64)[:, None] + 5 * np.arange(32)[None] + shift
        w = of_codes(name, codes[places % len(codes)])
        words = jax.lax.bitcast_convert_type(w.values, jnp.int32).reshape(4, code.words, 64)
        found = code.unpack([words[:, at] for at in range(code.words)])
        assert found.dtype == jnp.bfloat16
        wanted = np.asarray(w.numbers()).T[rows][:, gpu_tiles.ORDER]
        np.testing.assert_array_equal(np.asarray(found, np.float32) * code.factor, wanted)


def test_powers_of_two_of_every_size(interpreted):
    codes = np.tile(np.arange(16, dtype=np.uint8), (64, 16))
    scales = (1 + np.arange(512) % 252).astype(np.uint8).reshape(64, 8)
    w, x = pack("mxfp4-a16", codes, scales, (256,), (64,)), np.zeros((16, 256))
    x[np.arange(16), 17 * np.arange(16)] = 1
    x = jnp.asarray(x, jnp.bfloat16)
    wanted = reference(x, w)
    assert wanted.max() == 6 * 2.0**125
    np.testing.assert_array_equal(multiplied(x, w), wanted)


def test_what_the_tensor_cores_do_not_take():
    for why, rows, format, inner, outer in (
        ("for 16 rows of w4a8", rows_of(17, 288), "w4a8", 288, 53),
        ("bfloat16 rows, not float32", jnp.zeros((17, 288)), "w4a16", 288, 53),
        ("inputs by 32 from 64, not 32", rows_of(17, 32), "w4a16", 32, 800),
        ("inputs by 32 from 64, not 144", rows_of(17, 144), "w8a16", 144, 200),
        ("more than 48 outputs, not 48", rows_of(17, 1120), "w4a16", 1120, 48),
    ):
        args = LinearArgs(rows, weights(format, inner, outer))
        assert why in linear_gpu.unsupported(args)
        few = replace(args, x=args.x[:16])
        assert linear_gpu.unsupported(few) is None


@pytest.mark.parametrize("format", CODES)
def test_they_lower_for_cuda_without_a_wide_weight(format):
    text = lowered(multiplied, rows_of(137, 1120), weights(format, 1120, 200))
    assert "1120x200x" not in text and "200x1120x" not in text


# Registers


def elements(layout, shape):
    """Of each element of an array its thread, register and place there; of copies, the first."""
    layout, found = layout.to_mgpu(), {}
    for index in np.ndindex(*shape):
        own, thread = list(layout.tiling.tile_indices(index)), []
        for dims in (layout.warp_dims, layout.lane_dims):
            number = 0
            for dim in dims:
                if isinstance(dim, int):
                    number = number * layout.tiled_tiling_shape[dim] + own[dim]
                    own[dim] = 0
                else:
                    number *= dim.times
            thread.append(number)
        place, own[layout.vector_dim] = own[layout.vector_dim], 0
        found[index] = (*thread, tuple(own), place)
    return found


def source(value, place):
    """What one place of a register is moved from: a number of an argument, and places in it."""
    from jaxlib.mlir import ir

    if isinstance(value, ir.BlockArgument):
        return value.arg_number, place
    op = value.owner.opview
    operands = list(op.operands)
    if op.name == "vector.bitcast":
        return *source(operands[0], 0), place
    if op.name == "vector.broadcast":
        return source(operands[0], 0)
    if op.name == "vector.from_elements":
        return source(operands[place], 0)
    assert op.name == "vector.extract", op.name
    return source(operands[0], next(iter(op.static_position)))


def moves(in_kernel, layout, shape, count, integers):
    """Of each register and place of what a kernel makes of `count` arrays, where it comes from:
    which of them, register, place, and half if there are halves."""
    from jax._src.interpreters import mlir
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import func

    layout = layout.to_mgpu()
    registers = layout.registers_shape(shape)
    each = int(np.prod(registers))
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        kind = ir.IntegerType.get_signless(32) if integers else ir.F32Type.get()
        types = [layout.registers_element_type(kind)] * (each * count)
        with ir.InsertionPoint(module.body):
            made = func.FuncOp("moves", (types, []))
        with ir.InsertionPoint(made.add_entry_block()):
            parts = np.array([*made.arguments, None], object)[:-1].reshape(count, *registers)
            signed = True if integers else None
            given = [
                mgpu.FragmentedArray(_registers=part, _layout=layout, _is_signed=signed)
                for part in parts
            ]
            made = in_kernel(*given)
        found = {}
        for register, value in np.ndenumerate(made.registers):
            for place in range(made.layout.vector_length):
                number, *places = source(value, place)
                own = tuple(map(int, np.unravel_index(number % each, registers)))
                found[register, place] = (number // each, own, *places)
    return found


def one_by_one(name):
    """Layout and shape of what goes in and comes out, how many arrays, and if they are halved."""
    from rooflax.ops import mosaic_fragments as fragments

    wgmma = fragments.plgpu.Layout.WGMMA
    return {
        "operand": (fragments.words_layout(), (4, 64), wgmma, (64, 32), 4),
        "rows_of": (fragments.scales_layout(), (4, 16), wgmma.reduce(1), (64,), 1),
        "transposed": (wgmma, (64, 24), fragments.transposed_layout(), (24, 4, 16), 1),
    }[name]


@pytest.mark.every_jax
@pytest.mark.parametrize("name", ["operand", "rows_of", "transposed"])
def test_registers_hold_what_interpretation_says(name):
    """Every element comes from the one that JAX's operations take, and from the same thread."""
    from rooflax.ops import mosaic_fragments as fragments

    layout, shape, made_layout, made_shape, count = one_by_one(name)
    size, halved = int(np.prod(shape)), name == "operand"
    given = np.arange(count * size * (1 + halved))
    if halved:
        given = given.astype(np.uint16).view(np.int32)
    given = given.reshape(count, *shape)
    meant = getattr(fragments, f"_{name}")(*map(jnp.asarray, given))
    meant = np.asarray(meant).view(np.uint16) if halved else np.asarray(meant)
    assert meant.shape == made_shape
    found = moves(getattr(fragments, f"_{name}_in_kernel"), layout, shape, count, halved)
    sources = elements(layout, shape)
    for index, (warp, lane, register, place) in elements(made_layout, made_shape).items():
        number, half = divmod(int(meant[index]), 1 + halved)
        which, at = divmod(number, size)
        own = sources[tuple(map(int, np.unravel_index(at, shape)))]
        assert own[:2] == (warp, lane)
        assert found[register, place] == (which, *own[2:], *(half,) * halved)
