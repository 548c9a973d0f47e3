"""Beams in a crowd, on an engine that is too small for it, against each request alone."""

import pytest

from rooflax import load
from rooflax.engine.engine import Engine
from rooflax.engine.features.beams import Beam, BeamGroup
from rooflax.engine.features.speculation import Drafter, Speculation
from rooflax.engine.sampling_params import SamplingParams
from rooflax.nn.engine_config import EngineConfig
from rooflax.nn.execution import ExecutionOptions
from rooflax.nn.layout import ceil_div
from tests import goldens
from tests.support.engine.load import Request


class Beams(Request):
    """A request whose sequence stands for a group of beams."""

    def sequence(self, request_id):
        members = [super(Beams, self).sequence(request_id) for _ in range(self.params.num_beams)]
        return BeamGroup(members).members[0]


def given(sequence):
    """Tokens and score of every beam."""
    return [(m.output_tokens, Beam.of(m).score) for m in sequence.schedule.siblings]


@pytest.mark.parametrize("family", ["llama_gqa", "qwen3_5_text"])
def test_beams_share_no_block_that_drafts_may_be_written_into(tmp_path, family):
    """Room for drafts is reserved ahead, and every beam writes into its own."""
    model = load(goldens.write_checkpoint(tmp_path / "m", family, goldens.committed(family)))
    params = SamplingParams(num_beams=3, max_tokens=24, temperature=0).with_defaults({})
    found, ahead = [], 0
    for longest in (0, 8):
        engine = Engine(
            model,
            EngineConfig(
                options=ExecutionOptions(),
                max_num_seqs=3,
                max_model_len=64,
                prefill_chunk=32,
            ),
            Speculation(Drafter(), longest),
        )
        blocks, full = engine.scheduler.blocks, model.config.groups.windows.index(None)
        for length in (7, 15):
            first = Beams(list(range(5, 5 + length)), params, 0).sequence(0)
            engine.warm_up_prefill([first])
            engine.add([first])
            while engine.has_unfinished:
                engine.step()
                assert first.error is None
                for beam in engine.scheduler.running:
                    written = ceil_div(beam.num_computed_tokens, blocks.block_size)
                    rest = beam.kv.block_tables[full][written:]
                    assert all(blocks.pools[full].ref_count[block] == 1 for block in rest)
                    ahead += len(rest)
            found.append(given(first))
        assert not any(blocks.num_used)
    assert found[:2] == found[2:]
    assert ahead > 0, "no room was reserved ahead"
