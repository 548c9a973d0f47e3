"""IQ4_NL and six bits as they are made here: searched scales, the same by threads and NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.ops import native
from rooflax.ops.format_names import GROUP
from rooflax.ops.linear import linear, unembed
from rooflax.ops.weights import class_of, int6, iq4, quantize
from tests.support.models.programs import numbers
from tests.support.ops.calls import calls_of, dot, native_call, same_alone

FORMAT = "iq4_nl"
SEARCHED = {"iq4_nl": iq4, "w6a8": int6}
NATIVE = pytest.mark.skipif(not native.is_ready(), reason=native.status().reason)
every_format = pytest.mark.parametrize("format", SEARCHED)
pytestmark = pytest.mark.oldest_jax


def groups(count=1003):
    """Of many sizes, some of which are all zero, tiny, huge, or not finite."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((count, GROUP)) * np.exp(3 * draw.standard_normal((count, 1)))
    x = x.astype(np.float32)
    x[1], x[2], x[3], x[4], x[5, 7] = 0, -3, 1e-44, 1e9, 1e-30
    x[6, 3], x[7, 31], x[8, 0] = np.nan, np.inf, -np.inf
    return x


@NATIVE
@every_format
def test_the_library_gives_numpys_bits(format):
    x = groups()
    by_library = native.encoder(SEARCHED[format].__name__.rpartition(".")[2])
    assert by_library is not None
    with np.errstate(all="ignore"):
        codes, scales, largest = SEARCHED[format].encoded(x)
    found = by_library(x)
    is_finite = np.isfinite(largest)
    assert not is_finite[6:9].any() and is_finite[9:].all()
    np.testing.assert_array_equal(np.isfinite(found[2]), is_finite)
    for one, other in zip(found, (codes, scales, largest), strict=True):
        np.testing.assert_array_equal(one[is_finite], other[is_finite])


def test_a_code_is_the_nearest_value():
    scaled = np.linspace(-140, 130, 541, dtype=np.float32)
    codes = iq4.codes_of(scaled, np)
    distance = np.abs(scaled[:, None] - iq4.VALUES)
    np.testing.assert_array_equal(distance[np.arange(541), codes], distance.min(axis=1))
    np.testing.assert_array_equal(iq4.nearest(scaled, np), iq4.VALUES[codes])


def test_the_error_of_normal_numbers_is_three_quarters_of_evenly_spaced_codes():
    w = np.random.default_rng(1).standard_normal((512, 64)).astype(np.float32)
    errors = [
        np.square(np.asarray(numbers(quantize(w, format, (512,), (64,)))) - w).mean()
        for format in (FORMAT, "w4a8")
    ]
    assert errors[0] < 0.78 * errors[1]


def test_the_error_of_six_bits_is_a_thirteenth_of_that_of_four():
    w = np.random.default_rng(1).standard_normal((512, 64)).astype(np.float32)
    errors = [
        np.square(np.asarray(numbers(quantize(w, format, (512,), (64,)))) - w).mean()
        for format in ("w6a8", FORMAT)
    ]
    assert errors[0] < errors[1] / 13


ROWS = (1, 3, 8, 9, 12, 16, 33, 40)


@NATIVE
@pytest.mark.parametrize("format", ["w6a8", "w6a16"])
def test_kernels_of_six_bits_are_the_reference(instruction_set, format):
    """Also of a row beside others and alone, and of rows that are looked up."""
    draw = np.random.default_rng(3)
    x = draw.standard_normal((40, 192)).astype(np.float32)
    w = quantize(draw.standard_normal((192, 53)).astype(np.float32), format, (192,), (53,))
    wanted = np.asarray(dot(w, x))
    for found in calls_of(linear, ROWS)(x, w, None):
        error = np.abs(np.asarray(found) - wanted[: len(found)]).max()
        assert error <= 2e-6 * np.abs(wanted).max() * np.sqrt(192)
    same_alone(linear, ROWS, x, w, None)
    table = quantize(np.asarray(w.numbers()), format, (192,), (53,))
    found = native_call(unembed)(x, table)
    np.testing.assert_allclose(found, dot(table, x), atol=1e-4)
    rows = np.asarray(w.take(jnp.array([0, 52, 17])))
    np.testing.assert_array_equal(rows, np.asarray(w.numbers()).T[[0, 52, 17]])


def test_no_scale_that_is_tried_is_better():
    x = groups(60)[9:]
    scale = iq4.searched_scales(x, np)
    size = np.sqrt(np.square(x).mean(axis=1, keepdims=True))
    weight = np.abs(x) + size

    def error(scale):
        return (weight * np.square(iq4.nearest(x / scale, np) * scale - x)).sum(axis=1)

    most = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    tried = [error(most / (iq4.VALUES[0] * (1 - i / iq4.STEPS))) for i in range(-4, 5)]
    assert (error(scale) <= np.min(tried, axis=0) * 1.0001).all()


def test_an_importance_moves_the_error_to_what_matters_less():
    x = groups(60)[9:]
    importance = np.where(np.arange(GROUP) < 8, 100, 1).astype(np.float32)
    plain, weighted = (iq4.searched_scales(x, np, by) for by in (np.float32(1), importance))

    def error(scale):
        return np.square(iq4.nearest(x / scale, np) * scale - x)[:, :8].sum()

    assert error(weighted) < error(plain)


@every_format
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_shares_a_scale_with_nan_or_infinity_is_nan(format, value):
    w = np.random.default_rng(2).standard_normal((96, 37)).astype(np.float32)
    whole = np.asarray(numbers(quantize(w, format, (96,), (37,))))
    w[40, 5] = value
    found = np.array(numbers(quantize(w, format, (96,), (37,))))
    assert np.isnan(found[32:64, 5]).all()
    found[32:64, 5] = whole[32:64, 5]
    np.testing.assert_array_equal(found, whole)


@pytest.mark.parametrize(("format", "code"), [("iq4_nl", 127), ("w6a8", 32)])
def test_weights_without_a_size_stay_so_and_huge_ones_become_the_largest(format, code):
    w = np.zeros((64, 20), np.float32)
    assert not np.asarray(numbers(quantize(w, format, (64,), (20,)))).any()
    w[3, 4] = 1e9
    found = np.asarray(numbers(quantize(w, format, (64,), (20,))))
    np.testing.assert_allclose(np.abs(found[3, 4]), code * iq4.MOST_SCALE, rtol=1e-3)
    assert np.isfinite(found).all() and class_of(format).most < abs(found[3, 4])
