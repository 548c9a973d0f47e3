"""What a server's speed is a share of."""

from rooflax import LLM
from rooflax.bench.ceilings import ceiling_reader
from rooflax.bench.roofline import CONTEXT_STEP, Roofline


def test_a_step_takes_at_least_what_it_reads_and_multiplies():
    llm = LLM("preset:qwen2.5-tiny", max_model_len=2048)
    ideal = Roofline(llm).decode_s
    read = ceiling_reader(llm.model.weights_bytes, "float32")()
    assert 0.2 < ideal(1, 1) / (llm.model.weights_bytes / (1e9 * read.read_gb_per_s)) < 5
    assert ideal(1, 2000) > ideal(1, 1)  # keys and values are read
    assert ideal(4, 2000) > ideal(1, 2000)
    assert ideal(1, CONTEXT_STEP - 0.5) == ideal(1, CONTEXT_STEP) < ideal(1, CONTEXT_STEP + 0.5)
