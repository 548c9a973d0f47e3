"""The features of every engine. A line here and its file are all that a feature is made of."""

from rooflax.engine.features.beams import Beams
from rooflax.engine.features.feature import Feature
from rooflax.engine.features.grammar import GrammarFeature
from rooflax.engine.features.pooling import PoolingFeature

FEATURES: tuple[type[Feature], ...] = (
    Beams,
    GrammarFeature,
    PoolingFeature,
)
"""Features in the order of their hooks. Speculation comes before them, where there is a drafter."""
