"""What an engine's config becomes when its size is known."""

import pytest

from rooflax.nn.engine_config import EngineConfig
from rooflax.nn.execution import ExecutionOptions


@pytest.mark.parametrize(
    ("sequences", "length", "chunk", "tokens"),
    [
        pytest.param(8, 128, 128, 512, id="short prompts share a step"),
        pytest.param(1, 128, 128, 128, id="no more than a sequence holds"),
        pytest.param(1, 4096, 512, 512, id="long prompts are cut"),
        pytest.param(600, 16, 16, 600, id="a token for each sequence"),
    ],
)
def test_tokens_of_a_step_do_not_depend_on_the_longest_prompt(sequences, length, chunk, tokens):
    plan = EngineConfig(
        options=ExecutionOptions(), max_num_seqs=16, max_model_len=4096, max_tokens_per_step=512
    )
    fitted = plan.sized(sequences, length, None).fitted(
        is_causal=True, prefill_chunk=512, num_draft_tokens=0
    )
    assert (fitted.prefill_chunk, fitted.max_tokens_per_step) == (chunk, tokens)
