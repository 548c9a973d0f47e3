"""Targets of training that take minutes: defaults on five seeds, the memory of an adapter."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.models.initialize import random_weights
from rooflax.models.model import build
from rooflax.models.registry import read_config
from rooflax.train.adapters import LoraTraining
from rooflax.train.config import TrainConfig
from rooflax.train.data import PackedBatch
from rooflax.train.loop import tokens_at_once
from rooflax.train.step import init_state, make_optimizer, make_train_step

SMOLLM2 = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "max_position_embeddings": 8192, "rope_theta": 100000.0, "tie_word_embeddings": True,
}  # fmt: skip


def write_texts(folder):
    for number in range(200):
        name, other = f"shelf_{number * 7 % 100}", f"crate_{number * 3 % 100}"
        text = f"def move_{name}({other}):\n    return {other}.take({name!r})\n\n\n"
        (folder / f"{number}.py").write_text(text * 8)


PEAK = """
import sys
from rooflax.cli.main import main
from rooflax.nn.host_memory import peak_rss_bytes
assert main(sys.argv[1:]) == 0
print(peak_rss_bytes())
"""


@pytest.mark.parametrize("seed", range(5))
def test_the_defaults_lower_the_embedded_models_held_out_loss(rooflax, tmp_path, seed):
    """On texts that it has not seen, by no flag but the number of steps."""
    write_texts(tmp_path)
    out = tmp_path / "run"
    ran = rooflax("train", "--data", tmp_path, "--glob", "*.py", "--out", out, "--steps", 20,
                  "--batch", 4, "--seq-len", 128, "--seed", seed)  # fmt: skip
    assert ran.code == 0, ran.err
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    losses = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
    assert len(losses) > 1 and losses[-1] < losses[0]


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
@pytest.mark.parametrize("flags", [(), ("--fine-tune-type", "lora")], ids=["full", "lora"])
def test_a_dry_run_states_what_a_run_then_takes(tmp_path, flags):
    write_texts(tmp_path)
    arguments = ["train", "--data", tmp_path, "--glob", "*.py", "--out", tmp_path / "run",
                 "--steps", "3", "--json", *flags]  # fmt: skip
    ran = subprocess.check_output([sys.executable, "-m", "rooflax", *arguments, "--dry-run"])
    peak = subprocess.check_output([sys.executable, "-c", PEAK, *arguments]).splitlines()[-1]
    assert json.loads(ran)["total"] == pytest.approx(int(peak), rel=0.1)


def test_an_adapters_state_and_temporaries_are_small():
    """Of SmolLM2's shape, rank 8, 4 rows of 256 tokens; compiled, not run."""
    name, decoder = read_config(SMOLLM2)
    weights = jax.tree.map(lambda w: w.astype(jnp.float32), random_weights(name, decoder, seed=0))
    model = build(name, decoder, weights, 256)
    shape = (4, 256)
    index = np.tile(np.arange(256, dtype=np.int32), (4, 1))
    batch = PackedBatch(index, index, np.ones(shape, np.float32), index, np.zeros(shape, np.int32))

    def sizes(**settings):
        config = TrainConfig(steps=10, batch_size=4, seq_len=256, **settings)
        config = config.resolved(0, tokens_at_once(config.trains_adapter))
        lora = LoraTraining(model, config) if config.trains_adapter else None
        optimizer = make_optimizer(model.table, model.weights, config)
        step = make_train_step(model, optimizer, config, lora)
        state = init_state(model.weights if lora is None else lora.start(), optimizer)
        fixed = model.rope if lora is None else model
        memory = step.lower(state, fixed, batch).compile().memory_analysis()
        moments = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state))
        return moments, memory.temp_size_in_bytes

    moments, temporaries = sizes()
    own_moments, own_temporaries = sizes(fine_tune_type="lora", lora_rank=8)
    print(f"moments {own_moments / moments:.2%}, temporaries {own_temporaries / temporaries:.0%}")
    assert own_moments < 0.02 * moments
    assert own_temporaries < 0.6 * temporaries
