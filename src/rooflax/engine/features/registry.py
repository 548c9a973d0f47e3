"""The features of every engine. A line here and its file are all that a feature is made of."""

from rooflax.engine.features.beams import Beams
from rooflax.engine.features.feature import Feature
from rooflax.engine.features.grammar import Grammar
from rooflax.engine.features.pooling import Pooling

FEATURES: tuple[type[Feature], ...] = (
    Beams,
    Grammar,
    Pooling,
)
"""In the order of their hooks. Speculation comes before them, where there is a drafter."""
