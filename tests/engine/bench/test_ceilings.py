"""The ceilings of multiplying: each format's own, in the best instructions that it allows."""

import jax
import jax.numpy as jnp
import pytest

from rooflax.bench import ceilings
from rooflax.bench.counting import StepCost
from rooflax.bench.measure import bound_of, multiplied_as, share_of_roofline
from rooflax.nn.storage import Storage
from rooflax.ops.format_names import KNOWN
from tests.support.bench.samples import CEILING, trial

pytestmark = pytest.mark.oldest_jax


@pytest.mark.parametrize(
    ("storage", "multiplied"),
    [
        (Storage("float32"), "float32"),
        (Storage("bfloat16"), "bfloat16"),
        (Storage("float32", keeps_bfloat16=True), ceilings.TERMS),
        (Storage("bfloat16", "w4a16"), "bfloat16"),
        (Storage("float32", "w4a16"), "float32"),
        (Storage("bfloat16", "fp8-a16"), "bfloat16"),
        *(
            (Storage("bfloat16", name), code)
            for name, code in {
                "w8a8": "int8", "w8a8-h64": "int8-h64", "w8a8-g32": "int8-g32", "w4a8": "int4",
                "mxfp4-a8": "mxfp4", "iq4_nl": "iq4_nl", "w6a8": "int6", "q4_k": "q4_k",
                "w4a8+head=w8a8": "int4",
            }.items()
        ),
    ],
)  # fmt: skip
def test_a_format_has_the_ceiling_of_what_it_multiplies(storage, multiplied):
    assert multiplied_as(storage) == multiplied


@pytest.mark.parametrize(
    ("multiplied", "loop"),
    {
        **{name: name for name in ("float32", ceilings.TERMS, "bfloat16", "mxfp4", "int8")},
        **dict.fromkeys(("int4", "q2_k", "q3_k", "q4_1", "q4_k", "int4-z64"), "int4"),
        **dict.fromkeys(("int8-g32", "q5_0", "q6_k", "int6", "iq4_nl", "iq4_xs"), "int8-g32"),
        "int8-h64": "int8",
    }.items(),
)
def test_a_ceiling_is_the_loop_that_multiplies_the_same(multiplied, loop):
    asked = []

    class Library:
        def rooflax_multiply_rate(self, what, *_):
            asked.append(what.decode())
            return 1.0

    ceilings.multiply_rate(Library(), multiplied, 1)  # type: ignore[arg-type]
    assert asked == [loop]


def test_a_code_that_rounds_has_a_ceiling():
    assert {f.code for f in KNOWN.values() if f.quantizes_activations} == ceilings.CODES


@pytest.mark.parametrize(("operations", "bound"), [(10**9, "memory"), (10**10, "multiply")])
def test_the_bound_is_the_ceiling_that_takes_longer(operations, bound):
    """Half a gigabyte takes 5 ms at 100 GB/s, as five billion operations do at 10^12 a second."""
    cost = StepCost(400_000_000, 100_000_000, operations)
    assert bound_of([trial(), trial()], cost) == bound
    least = max(0.005, operations / 1e12)
    assert share_of_roofline(cost, CEILING, CEILING, 2 * least) == pytest.approx(0.5)
    assert share_of_roofline(cost, CEILING, CEILING, 0.01, "memory") == pytest.approx(0.5)
    multiplied = share_of_roofline(cost, CEILING, CEILING, 0.01, "multiply")
    assert multiplied == pytest.approx(operations / 1e10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_devices_ceilings_say_what_they_were_read_over(dtype):
    found = ceilings.device_reader(1 << 20, 64, dtype)()
    assert found.source == "device" and found.buffer_bytes == 1 << 20
    assert found.read_gb_per_s > 0 and found.flops_per_s > 0


def test_a_device_copies_in_place_and_multiplies_rows_by_rows():
    copies = ceilings._copies.lower(jax.ShapeDtypeStruct((8, 512), "i4")).compile()
    memory = copies.memory_analysis()
    assert memory is not None and memory.alias_size_in_bytes == 8 * 512 * 4
    assert memory.temp_size_in_bytes < 8 * 512 * 4
    values = jax.random.normal(jax.random.key(0), (32, 32))
    wanted = jnp.matmul(values, values.T, precision="highest")
    assert jnp.allclose(ceilings._products(values, values), wanted, rtol=1e-5, atol=1e-5)
