"""What runs where no option says otherwise."""

import pytest

from rooflax import LLM, ExecutionOptions
from rooflax.cli import flags
from rooflax.cli.main import parse
from rooflax.errors import RequestError
from rooflax.ops import kernels


def test_flags_that_are_not_said_are_the_defaults():
    assert flags.execution_options(parse(["generate"])[1]) == ExecutionOptions()
    said = ["generate", "--layers", "scan", "--no-cache"]
    wanted = ExecutionOptions(layers="scan", use_cache=False)
    assert flags.execution_options(parse(said)[1]) == wanted
    native = kernels.chosen(None)["linear"] == "native"
    wanted = ExecutionOptions().with_layers(kernels_read_stacks=native)
    assert LLM("preset:gpt2-tiny").options == wanted


@pytest.mark.parametrize(
    ("said", "layers"),
    [
        ({}, "scan"),
        ({"layers": "unrolled"}, "unrolled"),
        ({"moe": "dense"}, "unrolled"),
        ({"jit": False}, "unrolled"),
        ({"kernels": "xla"}, "unrolled"),
        ({"kernels": "xla", "layers": "scan"}, "scan"),
    ],
)
def test_layers_are_scanned_where_that_copies_nothing(said, layers):
    if kernels.chosen(None)["linear"] != "native":
        pytest.skip("no native kernels here")
    llm = LLM("preset:gpt-oss-tiny", options=ExecutionOptions(**said))
    assert llm.options.layers == layers
    assert ("stacked_layers" in llm.model.weights) == (layers == "scan")


def test_a_wrong_value_is_rejected():
    with pytest.raises(RequestError, match="layers is 'sideways'"):
        ExecutionOptions.of(layers="sideways", gqa=None)
