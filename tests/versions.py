"""What the default run leaves out on one of the JAX versions, because the other one runs it."""

import jax
import pytest

NEWER_JAX = jax.__version_info__ >= (0, 11)

ON_ONE_JAX = pytest.mark.slow if NEWER_JAX else ()
"""For parameters whose many programs take long to compile and hardly depend on the version."""


def on_one_jax(test):
    """`ON_ONE_JAX`, for a whole test."""
    return pytest.mark.slow(test) if NEWER_JAX else test
