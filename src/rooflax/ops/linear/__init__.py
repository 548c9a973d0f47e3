"""y = x @ w for every weight format."""

from rooflax.ops.linear.api import linear, unembed

__all__ = ["linear", "unembed"]
