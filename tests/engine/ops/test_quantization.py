"""Formats: what packing means, and that it loses no more than rounding does."""

import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import rooflax
from rooflax.errors import CheckpointError, RequestError
from rooflax.loading.model_info import model_info
from rooflax.ops import accelerator
from rooflax.ops.format_names import FORMATS, GROUP, format_of, format_on, resolve_format
from rooflax.ops.host_arrays import ALIGNMENT
from rooflax.ops.linear import linear, lookup
from rooflax.ops.weights import class_of, pack, packed_bytes, quantize
from tests.marks import cases
from tests.support.models.programs import numbers
from tests.support.ops.calls import by_each, dot

pytestmark = pytest.mark.oldest_jax

looked_up = jax.jit(lookup)
SHAPES = [(64, 48), (96, 37), (160, 16), (32, 5)]


def weight(inner, outer, seed=0):
    return np.random.default_rng(seed).standard_normal((inner, outer)).astype(np.float32)


@pytest.mark.parametrize(("inner", "outer"), [*SHAPES, (35, 20)])
def test_int8_is_within_half_a_step(inner, outer):
    w = weight(inner, outer)
    packed = quantize(w, "w8a8", (inner,), (outer,))
    step = np.abs(w).max(axis=0) / 127
    assert (np.abs(np.asarray(numbers(packed)) - w) <= step / 2 * 1.0001).all()
    assert packed.nbytes == packed_bytes("w8a8", inner, outer)
    q = np.asarray(numbers(packed)) / np.asarray(packed.scales)[:outer]
    assert np.array_equal(np.rint(q).sum(axis=0), np.asarray(packed.sums)[:outer])


@pytest.mark.every_jax
@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_int4_equals_ggml_q4_0(inner, outer):
    """Against quantize_row_q4_0_ref of ggml-quants.c, written out here value by value."""
    w = weight(inner, outer)
    found = np.asarray(numbers(quantize(w, "w4a8", (inner,), (outer,))))
    for n in range(outer):
        for start in range(0, inner, GROUP):
            block = w[start : start + GROUP, n]
            largest = block[np.abs(block).argmax()]
            d = np.float32(largest) / np.float32(-8)
            inverse = np.float32(1) / d if d else np.float32(0)
            q = np.minimum(15, (block * inverse + np.float32(8.5)).astype(np.int8))
            want = (q - 8).astype(np.float32) * np.float32(np.float16(d))
            np.testing.assert_array_equal(found[start : start + GROUP, n], want)


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_int8_in_groups_equals_ggml_q8_0(inner, outer):
    """Against quantize_row_q8_0_ref of ggml-quants.c, written out here value by value."""
    w = np.round(weight(inner, outer) * 8) / 8  # halves do occur
    found = np.asarray(numbers(quantize(w, "w8a16-g32", (inner,), (outer,))))
    for n in range(outer):
        for start in range(0, inner, GROUP):
            block = w[start : start + GROUP, n]
            d = np.abs(block).max() / np.float32(127)
            scaled = block * (np.float32(1) / d if d else np.float32(0))
            q = np.array([math.floor(abs(v) + 0.5) * math.copysign(1, v) for v in scaled.tolist()])
            want = q.astype(np.float32) * np.float32(np.float16(d))
            np.testing.assert_array_equal(found[start : start + GROUP, n], want)


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_mxfp4_equals_ggml(inner, outer):
    """Against quantize_row_mxfp4_ref of ggml-quants.c: the nearest of sixteen, the first of two."""
    w = np.round(weight(inner, outer) * 16) / 16
    w[:GROUP, 0] = 0
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    found = np.asarray(numbers(quantize(w, "mxfp4-a16", (inner,), (outer,))))
    for n in range(outer):
        for start in range(0, inner, GROUP):
            block = w[start : start + GROUP, n]
            largest = float(np.abs(block).max())
            e = math.floor(math.log2(largest)) - 2 if largest else -127
            want = [min((abs(v * 2.0**e - x), i) for i, v in enumerate(values)) for x in block]
            want = [values[i] * 2.0**e for _, i in want]
            np.testing.assert_array_equal(found[start : start + GROUP, n], np.array(want))


def test_fp8_is_the_nearest_e4m3():
    w = weight(67, 20)
    packed = quantize(w, "fp8-a16", (67,), (20,))
    scales = np.abs(w).max(axis=0) / np.float32(448)
    wanted = (w / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales
    np.testing.assert_allclose(np.asarray(numbers(packed)), wanted, rtol=1e-6)


@pytest.mark.parametrize("format", FORMATS)
def test_codes_that_exist_are_packed_as_they_are(format):
    w = weight(96, 37)
    codes, scales = class_of(format).encode(np.ascontiguousarray(w.T))
    made, packed = quantize(w, format, (96,), (37,)), pack(format, codes, scales, (96,), (37,))
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(packed), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert made.nbytes == packed_bytes(format, 96, 37)


@pytest.mark.parametrize("format", FORMATS)
def test_a_stack_is_its_members(format):
    w = np.stack([weight(64, 37, seed) for seed in range(3)])
    packed = quantize(w, format, (64,), (37,))
    assert packed.shape == (3, 64, 37)
    for member in range(3):
        alone = numbers(quantize(w[member], format, (64,), (37,)))
        np.testing.assert_array_equal(np.asarray(numbers(packed))[member], np.asarray(alone))


@pytest.mark.parametrize("format", FORMATS)
def test_packed_arrays_begin_where_a_cpu_takes_them_over(format):
    begins = []

    def put(array):
        if array.size:
            begins.append(array.ctypes.data % ALIGNMENT)
        return array

    quantize(weight(64, 48), format, (64,), (48,), put=put)
    assert len(begins) >= 2
    assert not any(begins)


@pytest.mark.parametrize("format", FORMATS)
def test_zero_weights_stay_zero(format):
    w = np.zeros((64, 20), np.float32)
    packed = quantize(w, format, (64,), (20,))
    assert not np.asarray(numbers(packed)).any()
    assert not np.asarray(dot(packed, jnp.ones((2, 64)))).any()


@pytest.mark.parametrize("format", FORMATS)
def test_a_table_from_its_other_side_and_its_rows(format):
    w = weight(64, 37)
    packed = quantize(w, format, (64,), (37,))
    turned = quantize(np.ascontiguousarray(w.T), format, (64,), (37,), transposed=True)
    assert np.array_equal(np.asarray(packed.values), np.asarray(turned.values))
    index = jnp.asarray([[0, 36], [17, 5]])
    whole = np.asarray(numbers(packed)).T
    np.testing.assert_array_equal(np.asarray(looked_up(packed, index)), whole[np.asarray(index)])


def test_axes_of_several_sizes_and_chunks(monkeypatch):
    monkeypatch.setattr("rooflax.ops.weights.packing.CHUNK", 32)
    w = np.random.default_rng(1).standard_normal((64, 3, 5, 6)).astype(np.float32)
    packed = quantize(w, "w4a8", (64,), (3, 5, 6))
    assert packed.shape == w.shape
    whole = quantize(w.reshape(64, 90), "w4a8", (64,), (90,))
    assert np.array_equal(np.asarray(packed.values)[:5], np.asarray(whole.values)[:5])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_products_are_close_to_the_exact_ones(format, tokens):
    w, x = weight(256, 48), np.random.default_rng(2).standard_normal((tokens, 256))
    exact = x.astype(np.float32) @ w
    found = dot(quantize(w, format, (256,), (48,)), jnp.asarray(x, jnp.float32))
    error = np.linalg.norm(np.asarray(found) - exact) / np.linalg.norm(exact)
    limits = {"int8": 0.02, "int8-g32": 0.02, "int4": 0.12, "mxfp4": 0.16, "fp8": 0.04}
    assert error < limits[FORMATS[format].code]


@pytest.mark.parametrize("preset", ["gpt2-tiny", "qwen2.5-tiny", "gpt-oss-tiny"])
@pytest.mark.parametrize(
    "format", cases(["int8", "int4+head=int8", "mxfp4", "fp8"], every_jax=["int4+head=int8"])
)
def test_a_quantised_model_is_saved_as_it_is(tmp_path, preset, format):
    model = rooflax.load(f"preset:{preset}", quantize=format)
    rooflax.save(model, tmp_path / "m", dtype="float32")
    again = rooflax.load(tmp_path / "m")
    assert jax.tree.structure(again.weights) == jax.tree.structure(model.weights)
    for one, other in zip(jax.tree.leaves(model), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    with pytest.raises(RequestError, match="is quantized already"):
        rooflax.load(tmp_path / "m", quantize="int4")


def test_a_quantised_folder_of_a_cpu_has_no_rotation_elsewhere(tmp_path, monkeypatch):
    rooflax.save(rooflax.load("preset:gpt-oss-tiny", quantize="int8"), tmp_path / "m")
    info = model_info(tmp_path / "m")
    here = info.prequantized()
    monkeypatch.setattr(accelerator, "platform", lambda: "gpu")
    there = info.prequantized()
    assert "w8a8-h64" in here.formats.values() and here.formats.keys() == there.formats.keys()
    for param in info.config.params():
        format = there.formats.get(param.name)
        if format is None:
            continue
        assert format in FORMATS
        one, other = here.packed(param), there.packed(param, np.asarray)
        assert other.format == format
        wanted = np.asarray(numbers(one))
        step = np.abs(wanted).max() / 60
        np.testing.assert_allclose(np.asarray(numbers(other)), wanted, rtol=0, atol=step)
        ((codes, scales),) = there.codes(param)
        for array, packed in zip((codes, scales), other.unpacked(), strict=True):
            np.testing.assert_array_equal(array, packed)


def test_a_damaged_quantised_folder_is_rejected(tmp_path):
    rooflax.save(rooflax.load("preset:qwen2.5-tiny", quantize="int8"), tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    formats = config["quantization_config"]["formats"]
    for broken, reason in (
        ({**formats, "layers.{i}.attn.qkv": "int9"}, "the format 'int9'"),
        ({**formats, "nonsense": "w8a8"}, "the weight 'nonsense'"),
        ({**formats, "layers.{i}.attn.qkv": "w4a8"}, "wanted U8"),
        ({**formats, "layers.{i}.attn.norm": "w8a8"}, "lacks layers.0.attn.norm.values"),
        ({k: v for k, v in formats.items() if "qkv" not in k}, "lacks model.layers.0"),
        (None, "no formats"),
    ):
        config["quantization_config"]["formats"] = broken
        (tmp_path / "m/config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=reason):
            rooflax.load(tmp_path / "m")


def test_names():
    assert resolve_format("int8") == "w8a8-h64" and resolve_format("w8a8") == "w8a8"
    mixed = resolve_format("int4+head=int8")
    assert mixed == "iq4_nl+head=w8a8-h64" == resolve_format(mixed)
    assert format_of(mixed, "head") == "w8a8-h64" and format_of(mixed) == "iq4_nl"
    assert format_on("cpu", mixed) == mixed and format_on("gpu", mixed) == "w4a8+head=w8a8"
    with pytest.raises(RequestError, match="int4.head=int8"):
        resolve_format("int4+tail=int8")
    assert not class_of("w4a8").fits(33)
    with pytest.raises(RequestError, match="int8, int6, int4"):
        resolve_format("int3")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", FORMATS)
def test_what_shares_a_scale_with_nan_or_infinity_is_nan_and_so_are_its_products(format, value):
    w = weight(96, 37)
    whole = np.asarray(numbers(quantize(w, format, (96,), (37,))))
    w[40, 5] = value
    packed = quantize(w, format, (96,), (37,))
    found = np.asarray(numbers(packed))
    broken = np.zeros((96, 37), bool)
    broken[slice(32, 64) if class_of(format).grouped else slice(None), 5] = True
    np.testing.assert_array_equal(np.isnan(found), broken)
    np.testing.assert_array_equal(found[~broken], whole[~broken])
    x = jnp.ones((3, 96), jnp.float32)
    for product in map(np.asarray, by_each(linear, ("reference", None))(x, packed)):
        assert np.isnan(product[:, 5]).all()
        assert np.isfinite(np.delete(product, 5, axis=1)).all()


@pytest.mark.parametrize("value", [1e6, -1e6, 1e8, -3e38])
@pytest.mark.parametrize("format", FORMATS)
def test_finite_weights_stay_finite_and_what_no_scale_reaches_becomes_the_largest(format, value):
    w = weight(64, 20)
    w[3, 4], w[7, 4] = value, -value
    found = np.asarray(numbers(quantize(w, format, (64,), (20,))))
    assert np.isfinite(found).all()
    most = class_of(format).most
    want = math.copysign(min(abs(value), most), value)
    np.testing.assert_allclose(found[3, 4], want, rtol=0.3 if "mxfp4" in format else 0.01)
    np.testing.assert_allclose(found[7, 4], -want, rtol=0.3)  # int4 has one code less there
    assert np.abs(found[:, :4] - w[:, :4]).max() < 1


@pytest.mark.parametrize("format", FORMATS)
def test_weights_next_to_nothing_are_nothing(format):
    w = np.full((64, 20), 1e-42, np.float32)
    found = np.asarray(numbers(quantize(w, format, (64,), (20,))))
    assert np.abs(found).max() <= 2e-38
