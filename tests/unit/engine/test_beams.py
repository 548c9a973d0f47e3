"""Beams on a scheduler, with a model of ten tokens: no device."""

from hypothesis import settings

from rooflax.engine.features.beams import Beam, BeamGroup, advance
from rooflax.engine.sampling_params import SamplingParams
from rooflax.engine.sequence import Sequence
from tests.unit.engine import test_scheduling as scheduling
from tests.unit.engine.test_scheduling import LOADS, StubModel, make, run_all, run_random


def beams(count, prompt=3, max_tokens=5, request=0, tokens=None, **given):
    """The first beam of a group, which stands for all."""
    ids = list(range(prompt)) if tokens is None else tokens
    params = SamplingParams(num_beams=count, **given).with_defaults({})
    members = [Sequence(request, ids, params, max_tokens, frozenset({7})) for _ in range(count)]
    return BeamGroup(members).members[0]


class BeamModel(StubModel):
    def after_step(self):
        advance(self.scheduler, 0.0)


@LOADS
@settings(max_examples=150, deadline=None)
def test_random_beams_are_those_alone(**load):
    for seq in run_random(**load, model=BeamModel, siblings=beams):
        if Beam.of(seq) is not None and seq.finish_reason != "abort":
            assert [(m.tokens, Beam.of(m).score) for m in seq.schedule.siblings] == beams_alone(seq)


def beams_alone(seq):
    """What the group gives with nobody beside it and room for all."""
    scheduler = make((None,), chunk=40, longest=40)
    count, tokens = len(seq.schedule.siblings), list(seq.prompt_tokens)
    alone = beams(count, max_tokens=seq.max_tokens, tokens=tokens)
    for member in alone.schedule.siblings:
        scheduler.add(member)
    run_all(scheduler, BeamModel(scheduler))
    assert scheduler.num_preemptions == 0
    return [(m.tokens, Beam.of(m).score) for m in alone.schedule.siblings]


def test_beams_share_the_prompt_and_copy_only_the_block_they_write():
    scheduler = make((None,), slots=4, chunk=40, longest=40)
    stub = BeamModel(scheduler)
    first = beams(3, prompt=10, max_tokens=9)
    for member in first.schedule.siblings:
        scheduler.add(member)
    step = scheduler.plan()
    assert (step.sequences, len(scheduler.running)) == ([first], 3)
    stub.run(step)
    prompt = list(first.kv.block_tables[0])
    assert [m.kv.block_tables for m in first.schedule.siblings] == [[prompt]] * 3
    assert scheduler.blocks.num_used == [3]
    assert len({tuple(m.tokens) for m in first.schedule.siblings}) == 3
    step = scheduler.plan()
    assert step.decodes == first.schedule.siblings
    tables = [m.kv.block_tables[0] for m in first.schedule.siblings]
    assert [(c.source, c.destination) for c in step.copies] == [
        (prompt[2], t[2]) for t in tables[:2]
    ]
    assert scheduler.blocks.num_used == [2 + 3]  # the last owner of the third block keeps it
    assert [t[:2] for t in tables] == [prompt[:2]] * 3 and len({t[2] for t in tables}) == 3
    stub.run(step)
    run_all(scheduler, stub)
    assert all(m.is_finished for m in first.schedule.siblings) and scheduler.blocks.num_used == [0]


def test_beams_choose_as_the_rules_say():
    """Worked by hand: two beams, 7 ends a text, the score is the sum over the length."""

    def group(**given):
        found = beams(2, prompt=2, max_tokens=4, **given).features[Beam].group
        found.members[0].sampler.candidates = ((5, -1.0), (7, -1.5), (6, -2.0))
        going = found.choose()
        assert going == {0: (-1.0, 0, 5), 1: (-2.0, 0, 6)}
        assert found.finished == [(-1.5, (7,))]
        found.go_on(going, 0.0)
        assert found.members[0].tokens == [0, 1, 5] and found.members[1].tokens == [0, 1, 6]
        return found

    def second_step(found):
        found.members[0].sampler.candidates = ((7, -0.5), (1, -0.75), (2, -9.0))
        found.members[1].sampler.candidates = ((3, -5.0), (4, -6.0), (7, -7.0))
        return found.choose()

    found = group()
    going = second_step(found)  # -1.75 / 2 could still beat -1.5
    assert going == {0: (-1.75, 0, 1), 1: (-7.0, 1, 3)}
    assert found.finished == [(-0.75, (5, 7)), (-1.5, (7,))]
    assert second_step(group(early_stopping=True)) == {}
    assert second_step(group(length_penalty=0.0)) == {}  # -1.75 is worse than -1.5 already
    assert second_step(group(length_penalty=0.0, early_stopping="never")) == {}
    found = group(early_stopping=True)
    second_step(found)
    found.end(1.0)
    assert [(m.tokens, Beam.of(m).score, m.finish_reason) for m in found.members] == [
        ([0, 1, 5, 7], -0.75, "stop"),
        ([0, 1, 7], -1.5, "stop"),
    ]
    assert [len(m.times.tokens_s) for m in found.members] == [2, 1]


def test_beams_that_cannot_run_together_are_known_before():
    assert make((None,), slots=3, longest=20).can_ever_run(beams(3, 10, 10))
    assert not make((None,), slots=2, longest=20).can_ever_run(beams(3, 10, 10))
    assert not make((None,), slots=3, longest=20, share=0.7).can_ever_run(beams(3, 10, 10))


def test_beams_need_no_jax():
    scheduling.test_planning_needs_no_jax("features.beams")
