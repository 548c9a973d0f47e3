"""Mixture of experts: routing and expert matmuls."""

from rooflax.ops.moe.api import experts, route

__all__ = ["experts", "route"]
