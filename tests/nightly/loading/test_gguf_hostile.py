"""More draws beside those of tests/unit/loading/test_gguf_hostile.py."""

from hypothesis import given, settings

from tests.unit.loading import test_gguf_hostile as beside
from tests.unit.loading.test_gguf_hostile import first_flips, flips

flipped = beside.flipped


@settings(max_examples=400, deadline=None)
@given(flips=flips)
def test_flipped_bytes_give_a_rejection_or_a_model(flips, flipped):
    flipped(flips)


@settings(max_examples=800, deadline=None)
@given(flips=first_flips)
def test_flipped_bytes_of_the_first_metadata(flips, flipped):
    flipped(flips)
