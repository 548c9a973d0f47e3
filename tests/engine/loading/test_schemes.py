"""What compressed-tensors, bitsandbytes, MLX and torchao quantized is the numbers they make of it.

tests/make_scheme_fixtures.py wrote the cases.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.loading.checkpoint import Checkpoint
from rooflax.loading.safetensors import (
    SafetensorsFile,
    TensorToWrite,
    dtype_name,
    write_safetensors,
)
from rooflax.loading.schemes import CodedWeights, read_scheme
from rooflax.ops import accelerator
from rooflax.ops.weights import class_of, pack

pytestmark = pytest.mark.oldest_jax

CASES = Path(__file__).parents[2] / "data" / "schemes"
FORMATS = {
    "bitsandbytes_fp4": None,
    "bitsandbytes_nf4": "nf4-a16",
    "bitsandbytes_nf4_double": "nf4-a16",
    "compressed_fp8_block": "fp8-a16-g32",
    "compressed_fp8_channel": "fp8-a16",
    "compressed_fp8_tensor": "fp8-a16",
    "compressed_int3": "w8a16-g32",
    "compressed_int4": None,
    "compressed_int4_channel": "w4a16",
    "compressed_int4_zeros": "w4a16-z64",
    "compressed_int8": "w8a16",
    "compressed_nvfp4": "nvfp4-a16",
    "compressed_w8a8": "w8a16",
    "compressed_w8a8_zeros": None,
    "mlx_2_bits": "q4_1-a16",
    "mlx_3_bits": "q4_1-a16",
    "mlx_4_bits": "q4_1-a16",
    "mlx_5_bits": "q5_1-a16",
    "mlx_6_bits": None,
    "mlx_8_bits": None,
    "mlx_mxfp4": "mxfp4-a16",
    "mlx_mxfp8": "fp8-a16-g32",
    "mlx_nvfp4": "nvfp4-a16",
    "torchao_fp8": "fp8-a16",
    "torchao_fp8_tensor": "fp8-a16",
    "torchao_int4": "w4a16",
    "torchao_int4_zeros": "w4a16-z64",
    "torchao_int8": "w8a16",
    "torchao_int8_dynamic": "w8a16",
    "torchao_int8_groups": None,
}
"""What keeps the codes: float16 holds no float32 scales, and int8 no zero points."""


ELSEWHERE = dict.fromkeys(
    ("bitsandbytes_nf4", "bitsandbytes_nf4_double", "compressed_fp8_block", "compressed_nvfp4")
)
ELSEWHERE |= {name: None for name in FORMATS if name.startswith("mlx")}
ELSEWHERE |= {"compressed_int4_zeros": "w8a16-g32", "mlx_mxfp4": "mxfp4-a16"}
ELSEWHERE |= {"torchao_int4_zeros": "w8a16-g32"}
"""On GPU and TPU, where it is another."""


def opened(case, folder):
    """A case as its only weight, and the numbers that its library makes of it."""
    file = SafetensorsFile(CASES / f"{case}.safetensors")
    stored = {n.removeprefix("stored/"): file.read(n) for n in file.names() if n[0] == "s"}
    arrays = [
        TensorToWrite(name, dtype_name(array.dtype), array.shape, lambda array=array: array)
        for name, array in stored.items()
    ]
    metadata = json.loads(file.metadata.get("metadata", "{}"))
    write_safetensors(folder / "model.safetensors", arrays, metadata)
    raw = {"quantization_config": json.loads(file.metadata["config"])}
    scheme = read_scheme(raw, folder)
    assert scheme is not None
    source = CodedWeights(Checkpoint(folder), scheme)
    (name,) = source.names()
    wanted = file.read(f"numbers/{name}")
    np.testing.assert_array_equal(source.read(name), wanted)
    return source.weights[name], wanted


@pytest.mark.parametrize("case", FORMATS)
def test_a_weight_is_what_its_library_makes_of_it(case, tmp_path):
    coded, wanted = opened(case, tmp_path)
    assert coded.format == FORMATS[case]
    if coded.format is not None:
        outer, inner = coded.shape
        kept = pack(coded.format, *coded.codes(), (inner,), (outer,))
        np.testing.assert_array_equal(kept.numbers(), wanted.T)
        np.testing.assert_array_equal(kept.take(jnp.array([0, outer - 1])), wanted[[0, -1]])


@pytest.mark.parametrize("case", FORMATS)
def test_formats_elsewhere_are_those_of_gpus(case, tmp_path, monkeypatch):
    monkeypatch.setattr(accelerator, "platform", lambda: "gpu")
    coded, wanted = opened(case, tmp_path)
    assert coded.format == ELSEWHERE.get(case, FORMATS[case])
    if coded.format == "w8a16-g32":
        codes, scales = coded.codes()
        numbers = class_of(coded.format).scaled(codes.reshape(*scales.shape, -1), scales)
        np.testing.assert_array_equal(numbers.reshape(wanted.shape), wanted)


def test_every_case_is_tested():
    assert {path.stem for path in CASES.iterdir()} == set(FORMATS)
