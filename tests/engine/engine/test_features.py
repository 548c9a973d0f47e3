"""Features of the engine: the hooks of one, and an engine without one."""

import subprocess
import sys
from dataclasses import dataclass, replace

import pytest

from rooflax import LLM, EngineError, ExecutionOptions, RequestError, SamplingParams, load
from rooflax.engine.engine import Engine
from rooflax.engine.features import registry
from rooflax.engine.features.feature import Feature
from rooflax.engine.features.grammar import GrammarFeature
from rooflax.engine.sequence import FeatureState, Sequence
from rooflax.nn.engine_config import EngineConfig
from rooflax.nn.pooler import Pooler

GREEDY = SamplingParams(temperature=0.0).with_defaults({})
CONFIG = EngineConfig(options=ExecutionOptions(), max_num_seqs=2, max_model_len=64)


@pytest.fixture(scope="module")
def model():
    return load("preset:gpt2-tiny", max_model_len=64)


def sequence(params=GREEDY, max_tokens=8):
    return Sequence(0, [5, 6, 7], params, max_tokens, frozenset())


def run(engine, *sequences):
    engine.warm_up(sequences)
    engine.add(sequences)
    while engine.has_unfinished:
        engine.step()
    return [s.output_tokens for s in sequences]


@dataclass
class Allowance(FeatureState):
    feature = "an allowance"

    left: int


class Allowances(Feature):
    """Ends a sequence after some tokens, and notes its hooks."""

    state = Allowance

    def __init__(self):
        self.called = []

    def before_step(self, plan):
        self.called.append("before_step")
        return plan

    def after_call(self, call, result, times):
        assert times.scheduled_s <= times.begun_s <= times.ended_s
        self.called.append("after_call")

    def after_token(self, sequence, result):
        self.called.append("after_token")
        state = Allowance.of(sequence)
        state.left -= 1
        if state.left == 0:
            sequence.finish("stop")
        return True

    def after_step(self, plan):
        self.called.append("after_step")
        return []


def test_a_feature_keeps_state_of_a_sequence_and_acts_on_it(model):
    config = replace(CONFIG, options=ExecutionOptions(decode_steps=1))
    engine, limited, free = Engine(model, config, features=[Allowances]), sequence(), sequence()
    limited.features[Allowance] = Allowance(3)
    tokens = run(engine, limited, free)
    assert tokens[0] == tokens[1][:3] and len(tokens[1]) == 8
    (feature,) = engine.features
    step = ["before_step", "after_call", "after_token", "after_step"]
    assert feature.called[:4] == step and feature.called.count("after_token") == 3


def test_an_engine_without_features_runs_the_rest(model):
    bare = Engine(model, CONFIG, features=())
    assert run(bare, sequence()) == run(Engine(model, CONFIG), sequence())
    for feature in registry.FEATURES:
        needing = sequence()
        needing.features[feature.state] = None
        with pytest.raises(RequestError, match=f"needs {feature.state.feature}, and the engine"):
            bare.check([needing])
    with pytest.raises(EngineError, match="made without pooling"):
        Engine(model, replace(CONFIG, pooler=Pooler("mean")), features=[GrammarFeature])


WITHOUT = """
import sys, types
from pathlib import Path
sys.modules["rooflax.engine.features.{module}"] = None  # as if the file were not there
import rooflax.engine.features as package
source = Path(package.__file__).with_name("registry.py").read_text()
lines = [line for line in source.splitlines() if "{name}" not in line]
registry = types.ModuleType("rooflax.engine.features.registry")
exec("\\n".join(lines), registry.__dict__)
sys.modules[registry.__name__] = registry
import rooflax, rooflax.server.app
assert len(registry.FEATURES) == {left}
llm = rooflax.LLM("preset:gpt2-tiny", max_model_len=64)
params = dict(temperature=0.0, max_tokens=6)
print(llm.generate("abc", rooflax.SamplingParams(**params))[0].tokens)
try:
    llm.generate("abc", rooflax.SamplingParams(**params, num_beams=2))
except rooflax.RequestError as error:
    print(error)
"""


def test_without_the_file_of_beams_and_its_line_everything_else_works():
    code = WITHOUT.format(module="beams", name="Beams", left=len(registry.FEATURES) - 1)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tokens, error = done.stdout.splitlines()
    llm = LLM("preset:gpt2-tiny", max_model_len=64)
    params = SamplingParams(temperature=0.0, max_tokens=6)
    assert tokens == str(llm.generate("abc", params)[0].tokens)
    assert error == "num_beams is 2 and there is no beam search."
