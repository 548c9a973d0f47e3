"""The way of one matmul: few modules, and none imported on the way."""

import ast
import sys
from functools import partial
from itertools import groupby
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import rooflax
from rooflax import ExecutionOptions, new_cache, prefill
from rooflax.ops import native

MOST_HOPS = 6
LOOPS = "rooflax.ops.control"
"""Whose functions stand for jax's own."""


def modules():
    """Of the frames of this project that are running, the outermost first; a run of one is one."""
    frame, names = sys._getframe(1), []
    while frame is not None:
        names.append(frame.f_globals["__name__"])
        frame = frame.f_back
    ours = [name for name in reversed(names) if name.startswith("rooflax.") and name != LOOPS]
    return [name for name, _ in groupby(ours)]


@pytest.mark.skipif(not native.is_ready(), reason="follows a call of the native kernel")
@pytest.mark.parametrize("layers", ["unrolled", "scan"])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_from_the_model_to_the_kernel(monkeypatch, layers, quantize):
    paths, call = set(), jax.ffi.ffi_call

    def spied(target, *args, **kwargs):
        if target == "rooflax_matmul":
            paths.add(tuple(modules()))
        return call(target, *args, **kwargs)

    monkeypatch.setattr(jax.ffi, "ffi_call", spied)
    options = ExecutionOptions(layers=layers)
    model = rooflax.load(
        "preset:qwen2.5-tiny", quantize=quantize, max_model_len=32, stacked=layers == "scan"
    )
    cache = new_cache(model, 1, 16, options=options)
    tokens = jnp.zeros((1, 3), jnp.int32)
    jax.jit(partial(prefill, options=options)).trace(model, cache, tokens)
    first = "rooflax.models.model"
    ways = [path[path.index(first) :] for path in paths]
    assert len(ways) > 1 and {way[-1] for way in ways} == {"rooflax.ops.linear.cpu"}
    for way in ways:
        assert len(way) - 1 <= MOST_HOPS, " > ".join(way)
        assert len(set(way)) == len(way), f"back to a module already left: {' > '.join(way)}"


def test_functions_import_nothing_but_what_a_platform_lacks():
    package = Path(rooflax.__file__).parent
    for path in sorted([*package.glob("ops/**/*.py"), *package.glob("nn/*.py")]):
        functions = (
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef)
        )
        for function in functions:
            for node in ast.walk(function):
                if isinstance(node, ast.ImportFrom) and node.module.startswith("rooflax"):
                    names = {f"{node.module}.{alias.name}" for alias in node.names}
                    gpus = node.module.startswith("rooflax.ops.mosaic")
                    assert gpus or names == {"rooflax.ops.moe.gpu_route"}, f"{path}: {names}"
