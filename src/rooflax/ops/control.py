"""Branches and loops that stay what they are when nothing is jitted.

lax.cond, lax.fori_loop and lax.scan compile their bodies even outside of jit, anew for every new
closure. With concrete arguments these run the Python code instead, one operation after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer


def is_traced(*values: Any) -> bool:
    """Whether a value is known only when a program runs."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(values))


def cond(predicate: Any, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
    """lax.cond of functions without arguments."""
    if is_traced(predicate):
        return jax.lax.cond(predicate, if_true, if_false)
    return if_true() if predicate else if_false()


def fori_loop(start: int, stop: Any, body: Callable[[Any, Any], Any], init: Any) -> Any:
    """lax.fori_loop."""
    if is_traced(stop, init):
        return jax.lax.fori_loop(start, stop, body, init)
    for index in range(start, int(stop)):
        init = body(jnp.int32(index), init)
    return init


def while_loop(goes_on: Callable[[Any], Any], body: Callable[[Any], Any], init: Any) -> Any:
    """lax.while_loop."""
    if is_traced(init):
        return jax.lax.while_loop(goes_on, body, init)
    while goes_on(init):
        init = body(init)
    return init


def scan(body: Callable[[Any, Any], tuple[Any, None]], init: Any, xs: Any) -> tuple[Any, None]:
    """lax.scan of a body that only carries."""
    if is_traced(init, xs):
        return jax.lax.scan(body, init, xs)
    for index in range(jax.tree.leaves(xs)[0].shape[0]):
        init, _ = body(init, jax.tree.map(lambda leaf, i=index: leaf[i], xs))
    return init, None
