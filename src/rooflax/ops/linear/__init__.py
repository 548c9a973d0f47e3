"""y = x @ w for every weight format."""

from rooflax.ops.linear.api import linear, lookup, unembed
from rooflax.ops.linear.heads import linear_by_head
from rooflax.ops.linear.prologue import Activation, ClampedSwiglu, Norm

__all__ = ["Activation", "ClampedSwiglu", "Norm", "linear", "linear_by_head", "lookup", "unembed"]
