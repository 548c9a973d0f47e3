"""Longer tests beside those of tests/engine/bench/test_ceilings.py."""

import pytest

from rooflax.bench import ceilings
from rooflax.ops import native

NATIVE = pytest.mark.skipif(native.load() is None, reason="the native library was not built")


@pytest.fixture(scope="module")
def rates():
    """Of one thread, the best of some readings: other processes only lower them."""
    found = native.load()
    assert found is not None
    library = ceilings._declare(found)
    names = ("float32", ceilings.TERMS, "bfloat16", *sorted(ceilings.CODES))
    return {name: max(ceilings.multiply_rate(library, name, 1) for _ in range(5)) for name in names}


@NATIVE
# rates mean something on a quiet machine only
def test_whatever_can_be_multiplied_as_float32_is_no_slower_than_that(rates):
    for name, rate in rates.items():
        assert rate > 0.9 * rates["float32"], name


@NATIVE
def test_bytes_are_multiplied_faster_than_floats(rates):
    """With AVX2 1.4 to 2.7 times as fast: what sums of 16 bits hold of a format tells how much."""
    has_avx2 = native.force_instruction_set("avx2")
    native.force_instruction_set("")
    if not has_avx2:
        pytest.skip("asks about AVX2")
    for code in ceilings.CODES:
        assert rates[code] > 1.2 * rates["float32"], code
    assert rates["int4"] > 2 * rates["float32"]


@NATIVE
def test_no_loop_is_left_out_by_the_compiler(rates):
    """Sums that are scaled in groups, and numbers of three terms, take longer than without; and no
    processor has more than two units for 64 bytes, but for tiles."""
    assert rates["int8-g32"] < 1.05 * rates["int8"]
    assert rates[ceilings.TERMS] < 1.05 * max(rates["bfloat16"], rates["float32"])
    vectors = rates["float32"] * 8
    if native.instruction_set() == "amx":
        vectors *= 8
    assert max(rates.values()) < vectors
