"""y = x @ w for every weight format."""

from rooflax.ops.linear.api import linear, lookup, unembed

__all__ = ["linear", "lookup", "unembed"]
