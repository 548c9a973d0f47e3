"""The gated delta rule: a matrix per head that decays, and is corrected towards each value."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rooflax.ops.control import fori_loop, is_traced, while_loop
from rooflax.ops.dispatch import Backend, Operation
from rooflax.ops.recurrent.runs import Runs

GRID = 64
"""Tokens; a piece of a sequence that is computed at once ends at a multiple of it."""


class DeltaInputs(NamedTuple):
    """Inputs of each token, float32; `heads` are those of keys, `group` the values of each.

    Attributes:
        q, k: of any length.
        v: what the matrix should give for k.
        g: logarithm of what the matrix keeps, at most 0.
        beta: how much of the correction is made, from 0 to 1.
    """

    q: Float[Array, "T heads dk"]
    k: Float[Array, "T heads dk"]
    v: Float[Array, "T heads group dv"]
    g: Float[Array, "T heads group"]
    beta: Float[Array, "T heads group"]


def delta_rule(
    inputs: DeltaInputs,
    pool: Float[Array, "rows heads group dk dv"],
    runs: Runs,
    *,
    eps: float = 1e-6,
    implementation: str | None = None,
) -> tuple[Float[Array, "T heads group dv"], Float[Array, "rows heads group dk dv"]]:
    """o[t] = S[t]^T q[t] / sqrt(dk), from a sequence's first token on, with

        S = exp(g[t]) S[t - 1]
        S[t] = S + k[t] (beta[t] (v[t] - S^T k[t]))^T

    where q and k are first divided by sqrt(|x|^2 + eps).

    Numerics: float32.

    Returns:
        o, and the pool with the states that `runs` names.

    Source: Yang et al., Gated Delta Networks, 2024; transformers, models/qwen3_next.
    """
    return DELTA_RULE(implementation, inputs, pool, runs, eps)


def _unit(inputs: DeltaInputs, eps: float) -> DeltaInputs:
    """Normalizes q and k to length one, and scales q."""
    q, k = (
        x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)
        for x in (inputs.q, inputs.k)
    )
    return inputs._replace(q=q * q.shape[-1] ** -0.5, k=k)


def _update(state: Array, token: DeltaInputs) -> tuple[Array, Array]:
    """o and the state after one token of each leading axis."""
    q, k = (x[..., :, None, :, None] for x in (token.q, token.k))
    state = state * jnp.exp(token.g)[..., None, None]
    error = token.v - jnp.sum(state * k, axis=-2)
    state = state + k * (token.beta[..., None] * error)[..., None, :]
    return jnp.sum(state * q, axis=-2), state


def by_token(inputs: DeltaInputs, pool: Array, runs: Runs, eps: float) -> tuple[Array, Array]:
    """One token after the other, each state in its row of the pool."""
    inputs = _unit(inputs, eps)

    def one(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out, pool = carry
        owner, offset = runs.owners[index], runs.offsets[index]
        row = runs.rows[owner]
        state = jnp.where(runs.is_new[owner] & (offset == 0), 0.0, pool[row])
        o, new = _update(state, DeltaInputs(*(x[index] for x in inputs)))
        is_real = (offset >= 0) & (offset < runs.lens[owner])
        state = jnp.where(is_real, new, pool[row])
        pool = _kept(pool, state, row, runs, owner, jnp.where(is_real, offset + 1, 0))
        return out.at[index].set(o), pool

    out = jnp.zeros_like(inputs.v)
    return fori_loop(0, _num_tokens(runs), one, (out, pool))


def _num_tokens(runs: Runs) -> Int[Array, ""]:
    return jnp.max(jnp.where(runs.lens > 0, runs.starts + runs.lens, 0))


def _kept(pool: Array, state: Array, row: Array, runs: Runs, owner: Array, reached: Array) -> Array:
    """The pool with a sequence's state in its row, and in the target that it reaches.

    Writes that change nothing stand for those that are not made: a branch would copy the pool.
    """
    pool = pool.at[row].set(state)
    if runs.targets.shape[1] == 1:
        return pool
    targets, at = runs.targets[owner, 1:], runs.reached[owner, 1:]
    is_here = (at == reached) & (targets < pool.shape[0])
    target = jnp.max(jnp.where(is_here, targets, 0))
    return pool.at[jnp.where(jnp.any(is_here), target, row)].set(state)


def by_piece(inputs: DeltaInputs, pool: Array, runs: Runs, eps: float) -> tuple[Array, Array]:
    """The tokens of a piece of a sequence together, by matmuls; pieces end at multiples of GRID.

    With c the sum of g from the piece's first token on, D[i, j] = exp(c[i] - c[j]) for j <= i, and
    A = beta[i] (k[i] k[j]) D[i, j] for j < i, the corrections X of all tokens solve
    (1 + A) X = beta (v - exp(c) S^T k), so that

        o = exp(c) S^T q + ((q k^T) D) X,    S' = exp(c[-1]) S + (exp(c[-1] - c) k)^T X

    Source: Yang et al., Gated Delta Networks, 2024, section 3.3.
    """
    if runs.longest == 1:
        return _one_each(_unit(inputs, eps), pool, runs)
    if not is_traced(inputs, pool) or (runs.targets.shape[1] > 1 and runs.grid % GRID):
        return by_token(inputs, pool, runs, eps)
    inputs = _unit(inputs, eps)
    width, (begins, total) = min(GRID, runs.longest), _pieces(runs)
    padded = DeltaInputs(*(jnp.pad(x, ((0, width), *[(0, 0)] * (x.ndim - 1))) for x in inputs))

    def one(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        number, out, pool = carry
        owner = jnp.argmax(jnp.where(begins <= number, begins, -1)).astype(jnp.int32)
        first = runs.positions[owner]
        begin = jnp.maximum(first, (first // GRID + number - begins[owner]) * GRID)
        end = jnp.minimum(first + runs.lens[owner], (begin // GRID + 1) * GRID)
        at, row = runs.starts[owner] + begin - first, runs.rows[owner]
        piece = (jax.lax.dynamic_slice_in_dim(x, at, width) for x in padded)
        state = jnp.where(runs.is_new[owner] & (begin == first), 0.0, pool[row])
        o, state = _piece(DeltaInputs(*piece), state, end - begin)
        is_own = (jnp.arange(width, dtype=jnp.int32) < end - begin)[:, None, None, None]
        o = jnp.where(is_own, o, jax.lax.dynamic_slice_in_dim(out, at, width))
        out = jax.lax.dynamic_update_slice_in_dim(out, o, at, 0)
        return number + 1, out, _kept(pool, state, row, runs, owner, end - first)

    out = jnp.zeros_like(padded.v)
    carry = (jnp.int32(0), out, pool)
    _, out, pool = while_loop(lambda carry: carry[0] < total, one, carry)
    return out[: len(inputs.v)], pool


def _pieces(runs: Runs) -> tuple[Int[Array, " R"], Int[Array, ""]]:
    """First piece of each sequence, beyond all if it has none, and their number."""
    last = runs.positions + runs.lens - 1
    counts = jnp.where(runs.lens > 0, last // GRID - runs.positions // GRID + 1, 0)
    ends = jnp.cumsum(counts)
    return jnp.where(counts > 0, ends - counts, ends[-1]), ends[-1]


def _piece(x: DeltaInputs, state: Array, count: Array) -> tuple[Array, Array]:
    """o and the state after the first `count` tokens; what follows them is unspecified."""
    is_own = jnp.arange(len(x.g), dtype=jnp.int32) < count
    beta, g = (jnp.where(is_own[:, None, None], a, 0.0) for a in (x.beta, x.g))
    k = jnp.where(is_own[:, None, None], x.k, 0.0)
    dot = jax.lax.Precision.HIGHEST
    c = jnp.cumsum(g, axis=0)  # [W, heads, group]
    width = len(c)
    order = jnp.tril(jnp.ones((width, width), bool))[None, None]
    c_heads = jnp.moveaxis(c, 0, -1)  # [heads, group, W]
    between = c_heads[..., :, None] - c_heads[..., None, :]
    decay = jnp.where(order, jnp.exp(jnp.where(order, between, 0.0)), 0.0)
    products = jnp.einsum("ihd,jhd->hij", k, k, precision=dot)[:, None]
    system = jnp.tril(jnp.moveaxis(beta, 0, -1)[..., None] * products * decay, -1)
    seen = jnp.einsum("ihd,hgdv->hgiv", k, state, precision=dot)
    wanted = jnp.moveaxis(x.v, 0, 2) - jnp.exp(c_heads)[..., None] * seen
    right = jnp.moveaxis(beta, 0, -1)[..., None] * wanted
    unit = system + jnp.eye(width, dtype=jnp.float32)[None, None]
    correction = jax.scipy.linalg.solve_triangular(unit, right, lower=True, unit_diagonal=True)
    weights = jnp.einsum("ihd,jhd->hij", x.q, k, precision=dot)[:, None] * decay
    o = jnp.exp(c_heads)[..., None] * jnp.einsum("ihd,hgdv->hgiv", x.q, state, precision=dot)
    o = o + jnp.einsum("hgij,hgjv->hgiv", weights, correction, precision=dot)
    last = c_heads[..., -1:]
    left = jnp.exp(last - c_heads)[..., None] * correction
    state = jnp.exp(last)[..., None] * state
    state = state + jnp.einsum("ihd,hgiv->hgdv", k, left, precision=dot)
    return jnp.moveaxis(o, 2, 0), state


def _one_each(inputs: DeltaInputs, pool: Array, runs: Runs) -> tuple[Array, Array]:
    """Decode steps: one token of every sequence, all at once."""
    at = jnp.minimum(runs.starts, len(inputs.v) - 1)
    o, states = _update(runs.states(pool), DeltaInputs(*(x[at] for x in inputs)))
    is_real = (runs.lens > 0)[:, None, None, None]
    out = jnp.zeros_like(inputs.v).at[at].add(jnp.where(is_real, o, 0.0))
    is_kept = runs.reached == 1
    targets = jnp.where(is_kept, runs.targets, pool.shape[0])
    each = jnp.repeat(states, targets.shape[1], axis=0)
    return out, pool.at[targets.reshape(-1)].set(each, mode="drop")


def _native(inputs: DeltaInputs, pool: Array, runs: Runs, eps: float) -> tuple[Array, Array]:
    """As `by_token`, in place; a token's sums are in one order, whatever the list."""
    out = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (inputs.v, pool)]
    call = jax.ffi.ffi_call("rooflax_delta_rule", out, input_output_aliases={5: 1})
    o, pool = call(*inputs, pool, *runs.numbers(), eps=np.float32(eps))
    return o, pool


DELTA_RULE = Operation(
    "delta_rule",
    {"reference": Backend(by_token), "xla": Backend(by_piece), "native": Backend(_native)},
)
