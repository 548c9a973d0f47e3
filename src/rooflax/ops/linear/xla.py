"""Linear as one dot_general, left to XLA; codes become numbers first."""

from __future__ import annotations

from jaxtyping import Array, Float

from rooflax.ops.dispatch import Backend
from rooflax.ops.linear.args import LinearArgs


def matmul(args: LinearArgs) -> Float[Array, "rows out"]:
    return args.unfused(args.matrix.dot)


BACKEND = Backend(matmul)
