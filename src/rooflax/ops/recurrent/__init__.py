"""Operations that carry a state from token to token, each sequence its own."""

from rooflax.ops.recurrent.conv import causal_conv
from rooflax.ops.recurrent.delta import DeltaInputs, delta_rule
from rooflax.ops.recurrent.runs import NO_ROW, Runs

__all__ = ["NO_ROW", "DeltaInputs", "Runs", "causal_conv", "delta_rule"]
