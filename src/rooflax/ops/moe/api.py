"""The mixture-of-experts operation: checks and dispatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rooflax.ops import accelerator, parts
from rooflax.ops.dispatch import Operation
from rooflax.ops.linear.prologue import Norm, taken_prologue
from rooflax.ops.moe.args import MoeArgs
from rooflax.ops.weights import Branch, Operand, StackMember, taken

EXPERTS = Operation(
    "experts",
    {
        "reference": "rooflax.ops.moe.reference",
        "xla": "rooflax.ops.moe.xla",
        "native": "rooflax.ops.moe.cpu",
        "pallas": "rooflax.ops.moe.{platform}",
    },
)
WHOLE_ROWS = 64
"""However few numbers a row has, this many rows leave none to the end of XLA's vector loops."""


@parts.experts
def route(
    router_logits: Float[Array, "tokens experts"],
    experts_per_token: int,
    *,
    renormalise: bool = True,
    bias: Float[Array, " experts"] | None = None,
    scale: float = 1.0,
    groups: tuple[int, int] = (1, 1),
    implementation: str | None = None,
) -> tuple[Int[Array, "tokens chosen"], Float[Array, "tokens chosen"]]:
    """Each token's experts, those of the top logits, and their routing weights.

    Args:
        renormalise: routing weights are softmax over the chosen logits alone; else over all.
        bias: weights are sigmoids instead, and the experts those of the top of them and the bias;
            renormalised, their sum is 1.
        scale: of the weights.
        groups: experts are in so many groups of neighbours, and a token's are of so many of them:
            those with the largest logit, or with the largest sum of two shares and their biases.
        implementation: as of `experts`; there is a kernel on GPUs, XLA is everywhere.

    A token's weights are the same bits among any number of tokens: XLA on CPU computes exp of an
    array's last few numbers otherwise than of the rest, so the rows are filled up.

    Source: openai/gpt-oss, gpt_oss/torch/model.py (MLPBlock).
    """
    if bias is not None:
        return _route_biased(router_logits, experts_per_token, renormalise, bias, scale, groups)
    has_groups = groups[1] < groups[0]
    here = accelerator.platform() == "gpu" and accelerator.missing() is None
    if here and not has_groups and implementation in (None, "pallas"):
        from rooflax.ops.moe import gpu_route

        if gpu_route.unsupported(router_logits, experts_per_token) is None:
            options = {"renormalise": renormalise, "scale": scale}
            return gpu_route.routes(router_logits, experts_per_token, **options)
    of_groups = _of_groups(router_logits.astype(jnp.float32), groups, 1)
    top, ids = jax.lax.top_k(of_groups, experts_per_token)
    among = top if renormalise else router_logits.astype(jnp.float32)
    full = jnp.pad(among, ((0, -top.shape[0] % WHOLE_ROWS), (0, 0)))
    weights = jax.nn.softmax(full, axis=-1)[: top.shape[0]]
    weights = weights if renormalise else jnp.take_along_axis(weights, ids, axis=-1)
    return ids, weights if scale == 1.0 else weights * scale


def _route_biased(
    router_logits: Float[Array, "tokens experts"],
    experts_per_token: int,
    renormalise: bool,
    bias: Float[Array, " experts"],
    scale: float,
    groups: tuple[int, int],
) -> tuple[Int[Array, "tokens chosen"], Float[Array, "tokens chosen"]]:
    """Source: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024."""
    tokens = router_logits.shape[0]
    full = jnp.pad(router_logits.astype(jnp.float32), ((0, -tokens % WHOLE_ROWS), (0, 0)))
    shares = jax.nn.sigmoid(full)
    scores = _of_groups(shares + bias.astype(jnp.float32)[None], groups, 2)
    _, ids = jax.lax.top_k(scores, experts_per_token)
    weights = jnp.take_along_axis(shares, ids, axis=-1)
    if renormalise:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return ids[:tokens], (weights * scale)[:tokens]


def _of_groups(
    scores: Float[Array, "tokens experts"], groups: tuple[int, int], best: int
) -> Float[Array, "tokens experts"]:
    """Scores with -inf in all but the chosen groups, those of the largest sum of `best` scores.

    Source: DeepSeek-AI, DeepSeek-V2, 2024, 2.2.2: routing to a limited number of devices.
    """
    count, chosen = groups
    if chosen == count:
        return scores
    each = scores.reshape(scores.shape[0], count, -1)
    _, kept = jax.lax.top_k(jnp.sum(jax.lax.top_k(each, best)[0], axis=-1), chosen)
    is_kept = jnp.any(kept[:, :, None] == jnp.arange(count)[None, None], axis=1)
    return jnp.where(is_kept[:, :, None], each, -jnp.inf).reshape(scores.shape)


@parts.experts
def experts(
    x: Float[Array, "tokens hidden"],
    expert_ids: Int[Array, "tokens chosen"],
    expert_weights: Float[Array, "tokens chosen"],
    gate_up: Float[Array, "experts hidden 2 mlp"] | Operand,
    gate_up_bias: Float[Array, "experts 2 mlp"] | StackMember | None,
    down: Float[Array, "experts mlp hidden"] | Operand,
    down_bias: Float[Array, "experts hidden"] | StackMember | None,
    *,
    activation: Callable[[jax.Array], jax.Array],
    norm: Norm | None = None,
    method: str = "grouped",
    residual: Float[Array, "tokens hidden"] | None = None,
    num_tokens: Int[Array, ""] | None = None,
    implementation: str | None = None,
) -> Float[Array, "tokens hidden"]:
    """The chosen experts' outputs, summed with their shares, and the residual.

        out[t] = sum over j of expert_weights[t, j] * mlp[expert_ids[t, j]](x[t]) + residual[t]
        mlp[e](x) = activation(norm(x) @ gate_up[e] + gate_up_bias[e]) @ down[e] + down_bias[e]

    Matmuls accumulate in float32, the sum over experts is float32, and rounded to x's dtype, which
    is returned, before the residual is added.

    Args:
        gate_up, down: quantised ones are stacks over the experts and round their rows.
        gate_up_bias, down_bias: None is none.
        activation: [..., 2, mlp] to [..., mlp].
        norm: of the tokens, before everything.
        method: "grouped" sorts tokens by expert and reads each needed expert once per tile of
            tokens; "per_token" runs one (token, expert) pair after the other; "dense" runs all
            experts on all tokens. They differ in speed only.
        residual: of x's dtype; None is none.
        num_tokens: how many leading tokens are real; None is all. The results of the others mean
            nothing, and the native kernel does not compute them.
        implementation: "reference" (always dense), "xla", "native" and "pallas" (grouped only), or
            None for the platform's best.

    Raises:
        RequestError: the named implementation is not here, or does not take these arguments.
    """
    options: dict[str, Any] = {"activation": activation, "method": method, "num_tokens": num_tokens}
    options |= {"residual": residual, "norm": norm}
    branch = next((leaf for leaf in (gate_up, down) if isinstance(leaf, Branch)), None)
    if branch is not None:  # its stacks have some layers, and those of vectors have all
        options |= {"norm": taken_prologue(norm), "implementation": implementation}

        def run(one: Operand) -> Array:
            up, out = (one if leaf is branch else leaf for leaf in (gate_up, down))
            biases = taken(gate_up_bias), taken(down_bias)
            return experts(x, expert_ids, expert_weights, up, biases[0], out, biases[1], **options)

        return branch.branch(run)
    leaves = (gate_up, gate_up_bias, down, down_bias)
    return EXPERTS(implementation, MoeArgs.of(x, expert_ids, expert_weights, *leaves, **options))
