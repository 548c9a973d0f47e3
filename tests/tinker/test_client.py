"""Tinker's own client against `rooflax serve --train`: a recipe of its cookbook as it is, and a
loop that learns from rewards. Runs in an environment of its own (`make tinker`)."""

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "src" / "rooflax" / "assets" / "rooflax-chat-5m"
KEY = "tml-a-key-of-this-machine"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The URL of a server, and the folder of its runs."""
    folder = tmp_path_factory.mktemp("server")
    command = [sys.executable, "-m", "rooflax", "serve", str(MODEL), "--port", "0"]
    command += ["--train", str(folder / "runs"), "--api-key", KEY]
    said = folder / "log"
    with open(said, "w") as log:
        process = subprocess.Popen(command, stderr=log)
    try:
        while "is ready" not in said.read_text():
            assert process.poll() is None, said.read_text()
            time.sleep(0.1)
        found = re.search(r"Tinker's clients is (\S+)", said.read_text())
        assert found
        yield found[1], folder / "runs"
    finally:
        process.terminate()
        process.wait(60)
        print(said.read_text())
    assert process.returncode == 0


@pytest.fixture
def client(server, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with tinker.ServiceClient(base_url=server[0], api_key=KEY) as service:
        yield service


def test_a_recipe_of_the_cookbook_runs_as_it_is(server, tmp_path):
    """Chats whose answers repeat the question: their loss falls, and the run is saved."""
    words, draw = ["red", "green", "blue", "black", "white"], random.Random(0)
    chats = []
    for _ in range(64):
        text = " ".join(draw.choices(words, k=3))
        chats.append([{"role": "user", "content": text}, {"role": "assistant", "content": text}])
    data, log = tmp_path / "chats.jsonl", tmp_path / "log"
    data.write_text("".join(json.dumps({"messages": each}) + "\n" for each in chats))
    command = [
        sys.executable, "-m", "tinker_cookbook.recipes.chat_sl.train", f"base_url={server[0]}",
        f"model_name={MODEL}", "renderer_name=role_colon", f"dataset={data}", f"log_path={log}",
        "batch_size=16", "num_epochs=4", "lora_rank=8", "learning_rate=3e-3", "save_every=8",
        "eval_every=0", "infrequent_eval_every=0", "behavior_if_log_dir_exists=delete",
    ]  # fmt: skip
    environment = os.environ | {"TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train_mean_nll"] for row in rows if "train_mean_nll" in row]
    print("train_mean_nll", [round(loss, 3) for loss in losses])
    assert len(losses) == 16
    assert losses[-1] < losses[0] / 2
    saved = [json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines()]
    assert saved[-1]["sampler_path"].startswith("tinker://")


def test_rewards_raise_what_they_reward(client, server):
    """Importance sampling on answers with few distinct tokens, by groups, as rl_loop does."""
    training = client.create_lora_training_client(str(MODEL), rank=8, seed=1).result()
    tokenizer = training.get_tokenizer()
    prompt = tokenizer.encode("def ")
    params = types.SamplingParams(max_tokens=8, temperature=1.0, stop=[])
    rewards = []
    for _ in range(6):
        sampler = training.save_weights_and_get_sampling_client().result()
        futures = [sampler.sample(types.ModelInput.from_ints(prompt), 8, params) for _ in range(4)]
        data, means = [], []
        for future in futures:
            sequences = future.result().sequences
            scores = np.array([np.mean(np.array(one.tokens) % 2) for one in sequences])
            means.append(scores.mean())
            for one, gain in zip(sequences, scores - scores.mean(), strict=True):
                ids = [*prompt, *one.tokens]
                before = [0.0] * (len(prompt) - 1)
                data.append(
                    types.Datum(
                        model_input=types.ModelInput.from_ints(ids[:-1]),
                        loss_fn_inputs={
                            "target_tokens": np.array(ids[1:]),
                            "logprobs": np.array([*before, *one.logprobs], np.float32),
                            "advantages": np.array(
                                [*before, *[gain] * len(one.tokens)], np.float32
                            ),
                        },
                    )
                )
        rewards.append(float(np.mean(means)))
        forward = training.forward_backward(data, "importance_sampling")
        step = training.optim_step(types.AdamParams(learning_rate=3e-3))
        assert len(forward.result().loss_fn_outputs) == 32
        assert step.result().metrics["step"] == len(rewards)
    print("rewards", [round(each, 3) for each in rewards])
    assert rewards[-1] > rewards[0] + 0.2
    path = training.save_weights_for_sampler("last").result().path
    again = client.create_sampling_client(path)
    assert again.compute_logprobs(types.ModelInput.from_ints(prompt)).result()[1] < 0
    folder = server[1] / training.model_id.replace(":", "-") / "sampler_weights" / "last"
    assert (folder / "adapter_model.safetensors").exists()
    command = [sys.executable, "-m", "rooflax", "generate", str(MODEL), "--lora", str(folder)]
    done = subprocess.run(
        [*command, "--prompt", "def ", "--max-tokens", "4"], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_saved_run_goes_on(client):
    training = client.create_lora_training_client(str(MODEL), rank=4, seed=2).result()
    ids = training.get_tokenizer().encode("return x + 1")
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(ids[1:]), "weights": np.ones(len(ids) - 1, np.float32),
        },
    )  # fmt: skip

    def loss(run):
        return run.forward([datum], "cross_entropy").result().metrics["loss:sum"]

    def step(run):
        run.forward_backward([datum], "cross_entropy").result()
        run.optim_step(types.AdamParams(learning_rate=1e-2)).result()

    step(training)
    path = training.save_state("one").result().path
    again = client.create_training_client_from_state_with_optimizer(path).result()
    assert loss(again) == loss(training)
    step(training)
    step(again)
    assert loss(again) == loss(training)
    bad = types.Datum(
        model_input=types.ModelInput.from_ints([10**6]),
        loss_fn_inputs={"target_tokens": np.array([1]), "weights": np.ones(1, np.float32)},
    )
    failing = training.forward([bad], "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match="no token id"):
        failing.result()
