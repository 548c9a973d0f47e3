"""What is chosen per platform: the script that measures it, and the outcome."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from benchmarks import choices
from rooflax import LLM, ExecutionOptions
from rooflax.cli import flags
from rooflax.cli.main import parse
from rooflax.errors import RequestError
from rooflax.nn.execution import CHOICES, PLATFORMS
from rooflax.ops import kernels
from rooflax.ops.attention import xla
from tests.product.snippets import ROOT


def test_scanned_programs_are_as_large_for_any_depth_and_unrolled_ones_grow():
    sizes = {
        how: [
            sum(
                choices.num_instructions(lower().compile())
                for lower in choices.programs(choices.tiny(depth), how).values()
            )
            for depth in (2, 4, 6)
        ]
        for how in ("scan", "unrolled")
    }
    assert len(set(sizes["scan"])) == 1, sizes
    two, four, six = sizes["unrolled"]
    assert four - two == six - four > 100, sizes
    assert sizes["scan"][0] < two


@pytest.mark.slow
def test_the_script_measures_every_choice():
    shown = subprocess.run(
        [sys.executable, "benchmarks/choices.py", "--quick"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in (*choices.CASES, *choices.PRECISIONS, "none", *choices.QUICK_OPTIONS[1:]):
        assert f"| {name} |" in shown or f"| `{name}` |" in shown, name
    for depth in choices.QUICK_DEPTHS:
        assert f"| {depth} |" in shown


@pytest.mark.parametrize("seq", [1, xla.FEW_QUERIES, xla.FEW_QUERIES + 1])
def test_the_first_way_is_the_one_that_runs(seq):
    variants, (q, k) = choices.scores(2, seq, 2, 3, 16, 8)
    ran, first = (
        str(jax.make_jaxpr(f)(q, k)) for f in (xla._scores, next(iter(variants.values())))
    )
    assert ran == first
    np.testing.assert_allclose(xla._scores(q, k), variants["einsum"](q, k), rtol=1e-5, atol=1e-5)


def test_what_is_not_said_is_the_platforms():
    assert set(CHOICES) == set(PLATFORMS)
    for platform in PLATFORMS:
        chosen = ExecutionOptions.for_platform(platform)
        assert flags.execution_options(parse(["generate"])[1], platform) == chosen
        said = ["generate", "--layers", "scan", "--no-cache"]
        assert flags.execution_options(parse(said)[1], platform) == ExecutionOptions.for_platform(
            platform, layers="scan", use_cache=False, gqa=None
        )
    native = kernels.chosen(None)["linear"] == "native"
    here = ExecutionOptions.for_platform(jax.default_backend())
    wanted = here.with_layers(kernels_read_stacks=native)
    assert LLM("preset:gpt2-tiny").options == wanted


def test_a_platforms_choice_reaches_python_and_the_command_line(monkeypatch):
    monkeypatch.setitem(CHOICES, jax.default_backend(), {"gqa": "repeat", "layers": "scan"})
    wanted = ExecutionOptions(gqa="repeat", layers="scan")
    assert LLM("preset:gpt2-tiny").options == wanted
    found = flags.execution_options(parse(["generate"])[1], jax.default_backend())
    assert found == wanted
    assert LLM("preset:gpt2-tiny", options=ExecutionOptions()).options.gqa == "grouped"


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


def test_no_such_platform():
    with pytest.raises(RequestError, match="platform is 'npu'"):
        ExecutionOptions.for_platform("npu")
    with pytest.raises(RequestError, match="layers is 'sideways'"):
        ExecutionOptions.for_platform("cpu", layers="sideways")
