"""The linear operation: checks and dispatch."""

from __future__ import annotations

from jaxtyping import Array, Float

from rooflax.ops import parts
from rooflax.ops.dispatch import choose
from rooflax.ops.linear import reference, xla

IMPLEMENTATIONS = {"reference": reference.matmul, "xla": xla.matmul}


@parts.matmuls
def linear(
    x: Float[Array, "*batch"],
    w: Float[Array, "*weight"],
    bias: Float[Array, "*out"] | None = None,
    *,
    contract: int = 1,
    implementation: str | None = None,
) -> Float[Array, "*result"]:
    """Contracts x's last `contract` axes with w's first, and adds the bias.

        y[..., out] = sum over in of x[..., in] * w[in, out] + bias[out]

    Accumulates in float32; returns x's dtype. Several in or out axes are taken as one: w's
    remaining axes become y's last axes.

    Args:
        x: [..., *in].
        w: [*in, *out].
        bias: [*out] or None.
        contract: number of axes in `*in`.
        implementation: "reference", "xla", or None for the platform's best.

    Raises:
        ValueError: the contracted axes differ.
        NotImplementedError: the named implementation does not exist here.
    """
    split = x.ndim - contract
    in_shape, out_shape = w.shape[:contract], w.shape[contract:]
    if x.shape[split:] != in_shape:
        raise ValueError(f"x ends in {x.shape[split:]}, but w begins with {in_shape}")
    matmul = choose("linear", IMPLEMENTATIONS, implementation)
    rows = x.reshape(-1, _size(in_shape))
    flat_bias = None if bias is None else bias.reshape(-1)
    y = matmul(rows, w.reshape(_size(in_shape), _size(out_shape)), flat_bias)
    return y.reshape(*x.shape[:split], *out_shape)


@parts.matmuls
def unembed(
    x: Float[Array, "*batch hidden"],
    table: Float[Array, "vocab hidden"],
    *,
    implementation: str | None = None,
) -> Float[Array, "*batch vocab"]:
    """Logits: x times the transposed embedding, accumulated and returned in float32."""
    product = choose("unembed", UNEMBED_IMPLEMENTATIONS, implementation)
    return product(x.reshape(-1, x.shape[-1]), table).reshape(*x.shape[:-1], table.shape[0])


UNEMBED_IMPLEMENTATIONS = {"reference": reference.unembed, "xla": xla.unembed}


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
