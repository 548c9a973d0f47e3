"""Calls of native kernels and of their references, compiled a few programs at a time."""

from functools import cache, partial

import jax
import numpy as np


@cache
def native_call(operation):
    """Compiled once for all instruction sets, which the library chooses among when it runs."""
    return jax.jit(partial(operation, implementation="native"))


@cache
def calls_of(operation, counts):
    """The operation of as many first rows as each count says, all in one program: to compile one
    for each takes longer than what they compute."""

    def call(x, *arrays, residual=None, **how):
        rest = [{} if residual is None else {"residual": residual[:count]} for count in counts]
        return [
            operation(x[:count], *arrays, **how, **more, implementation="native")
            for count, more in zip(counts, rest, strict=True)
        ]

    return jax.jit(call)


@cache
def by_each(operation, implementations, **fixed):
    """A list of the operation's results by these implementations, all in one program."""

    def call(*arrays, **more):
        return [
            operation(*arrays, **fixed, **more, implementation=name) for name in implementations
        ]

    return jax.jit(call)


@cache
def plain(operation):
    """By the reference."""
    return jax.jit(partial(operation, implementation="reference"))


@jax.jit
def dot(packed, x):
    return packed.dot(x)


def same_alone(operation, counts, x, *arrays):
    """Rows beside others and each alone."""
    call, each = native_call(operation), np.split(np.asarray(x), len(x))
    alone = np.concatenate([np.asarray(call(row, *arrays)) for row in each])
    for found in calls_of(operation, counts)(x, *arrays):
        np.testing.assert_array_equal(np.asarray(found), alone[: len(found)])
