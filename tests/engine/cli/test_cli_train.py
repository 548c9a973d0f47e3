"""`rooflax train`: from a config, from a checkpoint, interrupted, resumed, rejected."""

import datetime
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rooflax import LLM
from rooflax.cli.main import main
from rooflax.cli.train_data import digest_of
from rooflax.errors import CheckpointError, RequestError
from rooflax.loading.load import load
from rooflax.loading.model_info import embedded_folder
from rooflax.loading.save import save_model
from rooflax.models.initialize import random_weights
from rooflax.models.presets import CHAT_NAME
from rooflax.models.registry import read_config
from rooflax.train import loop
from rooflax.train.config import TrainConfig
from rooflax.train.corpus import Prompt
from rooflax.train.log import read_log
from tests.flags import replaced
from tests.marks import cases

pytestmark = pytest.mark.oldest_jax

CONFIG = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip
QUICK = ("--steps", 4, "--batch", 2, "--seq-len", 16, "--warmup-steps", 1)


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A folder with texts and a config; it is the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / f"texts/{number}.txt").write_text(f"line {number} of this text\n" * 5)
    return tmp_path


def train(rooflax, *flags, data="texts", out="run"):
    """Without the picture of the curves, which takes longer than such a run: test_loop draws it."""
    base = ["--data", data, "--out", out, *QUICK]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "plot_curves", lambda lines, path: False)
        return rooflax("train", *replaced("train", base, flags))


NEW = ("--config", "config.json", "--vocab-size", 300)


def test_from_scratch_interrupted_resumed_and_continued(rooflax, data, monkeypatch):
    whole = train(rooflax, *NEW, "--json", out="whole")
    assert whole.code == 0, whole.err
    wanted = json.loads(whole.out)
    assert wanted["steps"] == 4
    assert wanted["held_out_loss"] > 0

    advance = loop._Run.advance

    def interrupted(self, bar):
        advance(self, bar)
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "advance", interrupted)
        ran = train(rooflax, *NEW)
    assert (ran.code, ran.out) == (130, "")
    assert "curves: run/report.html" in ran.err
    assert "step 0: held-out loss " in ran.err
    assert "interrupted after step 2; the same command resumes it" in ran.err
    resumed = json.loads(train(rooflax, *NEW, "--json").out)
    assert {**resumed, "model": 0} == {**wanted, "model": 0}

    made = sorted(path.name for path in (data / "run/model").iterdir())
    assert made == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    assert load(data / "run/model").num_parameters == load(data / "whole/model").num_parameters
    log = (data / "run/log.jsonl").read_text()
    again = train(rooflax, *NEW)
    assert "the run in run was complete after 4 steps; nothing was trained" in again.err
    assert (again.code, (data / "run/log.jsonl").read_text()) == (0, log)
    shorter = train(rooflax, *NEW, "--steps", 3)
    assert shorter.code == 2 and "a run can be made longer, not shorter" in shorter.err
    longer = train(rooflax, *NEW, "--steps", 6)
    assert longer.code == 0, longer.err
    assert "resumes from step 4 of 6" in longer.err
    assert "by the schedule of 6 steps" in longer.err
    ran = train(rooflax, "run/model", "--lr", "1e-4", out="tuned")
    assert ran.code == 0, ran.err
    assert "4 steps, 128 tokens, loss " in ran.out
    assert "the model is in tuned/model" in ran.out


def test_files_of_no_run_stay(rooflax, data):
    (data / "own").mkdir()
    (data / "own/log.jsonl").write_text("mine")
    for out, said in (("own", "--out own holds log.jsonl, which is of no run"), ("", "is empty")):
        ran = train(rooflax, *NEW, out=out)
        assert ran.code == 2 and said in ran.err
    assert (data / "own/log.jsonl").read_text() == "mine"
    assert sorted(path.name for path in data.iterdir()) == ["config.json", "own", "texts"]


@pytest.mark.parametrize(
    ("name", "make", "said"),
    [
        ("adapter", Path.touch, "run/adapter is no folder"),
        ("tensorboard", Path.touch, "run/tensorboard is no folder"),
        ("report.html", Path.mkdir, "run/report.html is no regular file"),
        ("training.bin.flags", Path.mkdir, "run/training.bin.flags is no regular file"),
        ("log.jsonl", os.mkfifo, "run/log.jsonl is no regular file"),
        ("curves.png", os.mkfifo, "run/curves.png is no regular file"),
        ("held_out.bin", os.mkfifo, "run/held_out.bin is no regular file"),
    ],
)
def test_what_is_in_the_place_of_a_runs_files_is_said_first(rooflax, data, name, make, said):
    (data / "run").mkdir()
    (data / "run/data.json").write_text("{}")
    make(data / "run" / name)
    ran = train(rooflax, *NEW)
    assert (ran.code, ran.out, len(ran.err.splitlines())) == (2, "", 1)
    assert f"{said}, and a run has one there" in ran.err
    assert sorted(path.name for path in (data / "run").iterdir()) == sorted([name, "data.json"])


def test_a_log_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(CheckpointError, match=r"log.jsonl: it is not a regular file"):
        read_log(tmp_path / "log.jsonl", 0)


def test_an_adapters_folder_keeps_what_others_put_there(rooflax, data):
    assert train(rooflax, *NEW, "--steps", 1, out="base").code == 0
    lora = ("base/model", "--fine-tune-type", "lora")
    assert train(rooflax, *lora).code == 0
    (data / "run/adapter/README.md").write_text("mine")
    ran = train(rooflax, *lora, "--steps", 5)
    assert ran.code == 0, ran.err
    assert (data / "run/adapter/README.md").read_text() == "mine"


@pytest.mark.parametrize("damage", ["a line", "its keys", "its length"])
def test_a_resume_that_is_refused_leaves_the_log(rooflax, data, damage):
    assert train(rooflax, *NEW).code == 0
    log = data / "run/log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    if damage == "a line":
        lines[1] = lines[1][:5] + lines[1][6:]
        lines.append(b" ")
    elif damage == "its keys":
        lines[1] = lines[1].replace(b'"step"', b'"stop"')
    else:
        lines = lines[:2]
    log.write_bytes(b"".join(lines))
    ran = train(rooflax, *NEW, "--steps", 6)
    assert ran.code == 2 and "log.jsonl" in ran.err and "back" in ran.err
    assert log.read_bytes() == b"".join(lines)


LORA = ("--fine-tune-type", "lora")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((*LORA, "--target-modules", "q_proj,nope"), "--target-modules names 'nope'"),
        ((*LORA, "--modules-to-save", "nope"), "--modules-to-save names 'nope'"),
        ((*LORA, "--target-parameters", "nope"), "--target-parameters names 'nope'"),
        (("--mesh", "data=64", "--batch", 64), "needs 64 devices"),
        ((*NEW, "--mesh", "tensor=2"), "1 kv_heads do not divide over 2 devices"),
        (
            ("--config", "odd.json", "--vocab-size", 300, "--mesh", "fsdp=2", "--layers", "scan"),
            "no axis of embed [321, 17] divides over fsdp=2 devices",
        ),
    ],
)
def test_what_the_model_cannot_be_trained_as_leaves_no_folder(rooflax, data, flags, said):
    odd = CONFIG | {"vocab_size": 321, "hidden_size": 17, "head_dim": 8}
    (data / "odd.json").write_text(json.dumps(odd))
    ran = train(rooflax, *flags)
    assert (ran.code, ran.out, len(ran.err.splitlines())) == (2, "", 1)
    assert said in ran.err
    assert not (data / "run").exists()


@pytest.mark.parametrize(
    ("flag", "value"), [("--batch", 10**20), ("--lr", "1e39"), ("--micro-batches", 2**40)]
)
def test_numbers_that_nothing_can_hold(rooflax, data, flag, value):
    ran = train(rooflax, *NEW, flag, value)
    assert ran.code == 2 and "must be" in ran.err
    assert not (data / "run").exists()


def test_a_checkpoint_is_trained_gently_unless_told_otherwise(rooflax, data):
    """At 1e-3, right for new weights, the embedded model's held-out loss rose in 20 steps."""

    def run(*flags, out):
        ran = rooflax("train", "--data", "texts", "--out", out, "--steps", 10, "--batch", 2,
                      "--seq-len", 16, "--verbose", *flags)  # fmt: skip
        assert ran.code == 0, ran.err
        (line,) = [line for line in ran.err.splitlines() if line.startswith("settings: ")]
        settings = json.loads(line.removeprefix("settings: "))
        lines = [json.loads(line) for line in (data / out / "log.jsonl").read_text().splitlines()]
        return settings, [line["lr"] for line in lines if "lr" in line]

    settings, rates = run(*NEW, out="run")
    assert (settings["learning_rate"], settings["warmup_steps"]) == (1e-3, 1)
    assert settings["weight_decay"] == 0.1
    assert rates[0] == max(rates) == pytest.approx(1e-3) and rates[-1] == pytest.approx(1e-4)
    settings, rates = run("run/model", out="tuned")
    assert (settings["learning_rate"], settings["warmup_steps"]) == (2e-5, 1)
    assert settings["weight_decay"] == 0
    assert rates[0] == max(rates) == pytest.approx(2e-5) and rates[-1] == pytest.approx(2e-6)
    settings, _ = run("run/model", "--lr", 1e-3, "--warmup-steps", 3, out="told")
    assert (settings["learning_rate"], settings["warmup_steps"]) == (1e-3, 3)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A checkpoint of one small layer with the embedded chat model's tokenizer and template."""
    source = embedded_folder(CHAT_NAME)
    raw = json.loads((source / "config.json").read_text()) | {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    name, config = read_config(raw)
    files = {file: source / file for file in ("tokenizer.json", "tokenizer_config.json")}
    folder = tmp_path_factory.mktemp("chat") / "m"
    weights = random_weights(name, config, seed=3)
    save_model(folder, name, config, weights, eos_token_ids=raw["eos_token_id"], files=files)
    return str(folder)


def chats(path, count, **more):
    with open(path, "w") as file:
        for number in range(count):
            texts = (("user", f"Say {number}."), ("assistant", f"It is {number}."))
            messages = [{"role": role, "content": text} for role, text in texts]
            file.write(json.dumps({"messages": messages, **more}) + "\n")


def test_a_dry_run_states_the_memory_and_trains_nothing(rooflax, data):
    ran = train(rooflax, CHAT_NAME, "--dry-run", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["total"] == sum(found["bytes"].values())
    parts = found["bytes"]
    assert parts["optimizer moments"] == pytest.approx(
        2 * parts["trained weights, float32"], rel=1e-3
    )
    assert parts["gradients, activations and logits"] > parts["trained weights, float32"]
    assert not (data / "run/log.jsonl").exists() and not (data / "run/model").exists()
    assert "in all" in train(rooflax, CHAT_NAME, "--dry-run").out


def test_epochs_the_best_weights_and_a_type_to_save(rooflax, data, chat):
    chats(data / "chats.jsonl", 20)
    ran = rooflax(
        "train", chat, "--data", "chats.jsonl", "--out", "run", "--epochs", 2, "--batch", 2,
        "--seq-len", 64, "--eval-every", 2, "--save-best", "--save-dtype", "float32", "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["best_step"] <= found["steps"] and "held-out loss" in ran.err
    (best,) = (data / "run/best").iterdir()
    assert best.name == f"step-{found['best_step']:08d}"
    assert json.loads((data / "run/model/config.json").read_text())["dtype"] == "float32"


def log_of(run):
    return [json.loads(line) for line in Path(run, "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", cases(["full", "lora"], nightly=["full"]))
def test_samples_of_prompts_and_a_tracker(rooflax, data, chat, kind, monkeypatch):
    """With each held-out loss and at the end; no loss is another one for them."""
    sent = []
    module = SimpleNamespace(
        init=lambda **_: None, finish=lambda: None, log=lambda values, step: sent.append(values)
    )
    monkeypatch.setitem(sys.modules, "trackio", module)
    monkeypatch.setenv("WANDB_DIR", "")
    chats(data / "chats.jsonl", 20)
    flags = (chat, "--fine-tune-type", kind, "--eval-every", 2, "--lr", 1e-3, "--seq-len", 64)
    flags += ("--save-dtype", "float32")
    prompts = ["Say 7.", "What does len do? " * 9]
    asked = [word for prompt in prompts for word in ("--sample", prompt)]
    ran = train(rooflax, *flags, *asked, "--report-to", "trackio", data="chats.jsonl")
    assert ran.code == 0, ran.err
    lines = log_of("run")
    samples = {line["step"]: line["samples"] for line in lines if "samples" in line}
    assert list(samples) == [0, 2, 4]
    assert all([each["prompt"] for each in one] == prompts for one in samples.values())
    trained = LLM(data / "run/model") if kind == "full" else LLM(chat, lora=data / "run/adapter")
    for each in samples[4]:
        ids = trained.encode_chat([{"role": "user", "content": each["prompt"]}])
        assert trained.generate(ids, temperature=0.0, max_tokens=64)[0].text == each["text"]
    said = [line for line in ran.err.splitlines() if re.match(r'step \d+, "', line)]
    assert len(said) == 6 and max(map(len, said)) <= 79
    assert said[0].startswith('step 0, "Say 7.": "') and said[-1].startswith('step 4, "What does l')
    page = (data / "run/report.html").read_text()
    assert page.count("<td>Say 7.</td>") == 3 and "<h2>Samples</h2>" in page
    ran = train(rooflax, *flags, data="chats.jsonl", out="plain")
    assert ran.code == 0, ran.err
    losses = [
        [line["loss"] for line in each if "loss" in line] for each in (lines, log_of("plain"))
    ]
    assert losses[0] == losses[1] == [one["train/loss"] for one in sent if "train/loss" in one]
    assert len([one for one in sent if "eval/loss" in one]) == 3


def test_samples_that_cannot_be(rooflax, data):
    adapter = ("--fine-tune-type", "lora")
    whole = (*adapter, "--modules-to-save", "lm_head")
    experts = (*adapter, "--target-parameters", "experts.down_proj")
    for flags, named in (
        (NEW, "--config"), (("--tokenizer", "x"), "--tokenizer"), (whole, "--modules-to-save"),
        (experts, "--target-parameters"),
        (("--mesh", "data=2"), "--mesh"), (("--fine-tune-type", "dora"), "--fine-tune-type dora"),
    ):  # fmt: skip
        ran = train(rooflax, *flags, "--sample", "x")
        assert ran.code == 2 and f"--sample does not go with {named}; drop one" in ran.err
    ran = train(rooflax, "--sample", "")
    assert ran.code == 2 and "the sample '' has 0 tokens" in ran.err.splitlines()[-1]
    assert not (data / "run/log.jsonl").exists()


def test_jsonl_and_a_given_tokenizer(rooflax, data):
    lines = [json.dumps({"body": f"text number {i} " * 20}) for i in range(20)]
    (data / "texts.jsonl").write_text("\n".join(lines))
    assert train(rooflax, *NEW, "--held-out-fraction", 0).code == 0
    flags = ("--config", "config.json", "--tokenizer", "run/tokenizer", "--text-field", "body")
    ran = train(rooflax, *flags, "--quiet", data="texts.jsonl", out="second")
    assert (ran.code, ran.err) == (0, "")


def test_a_dataset_of_the_hub(rooflax, data, monkeypatch):
    rows = [{"body": f"text number {i} " * 20} for i in range(20)]
    splits = {"train": rows, "validation": rows[:3], "test": rows[3:5]}
    module = SimpleNamespace(load_dataset=lambda name, config, split: splits)
    monkeypatch.setitem(sys.modules, "datasets", module)
    ran = train(rooflax, *NEW, "--text-field", "body", data="hub:a/b")
    assert ran.code == 0, ran.err
    assert "20 documents to train on, 3 held out, 2 to test" in ran.err
    ran = train(rooflax, *NEW, data="hub:a/b", out="other")
    assert ran.code == 2 and "row 0 of hub:a/b:train is not a JSON object with messages" in ran.err


def test_rows_of_the_hub_may_hold_what_json_has_no_word_for():
    """Dates, bytes and images, which rewards get as they are."""

    def digest():
        columns = {"when": datetime.date(2026, 11, 29), "raw": b"x", "image": object()}
        return digest_of({"train": [Prompt("hub:a/b:0", "row 0 of hub:a/b", "x", columns)]})

    assert digest() == digest() and len(digest()) == 64


def test_folders_of_chats_with_masks(rooflax, data, chat):
    (data / "chats").mkdir()
    for name, count in (("train", 40), ("valid", 6), ("test", 5)):
        chats(data / f"chats/{name}.jsonl", count)
    flags = (chat, "--assistant-only-loss", "--lr", 1e-3, "--seq-len", 64, "--json")
    flags += ("--save-dtype", "float32")
    ran = train(rooflax, *flags, data="chats")
    assert ran.code == 0, ran.err
    assert "40 documents to train on, 6 held out, 5 to test" in ran.err
    info = json.loads((data / "run/training.bin.json").read_text())
    assert 0 < info["num_trained"] < info["num_tokens"] / 2
    assert f"{info['num_trained']:,} of {info['num_tokens']:,} tokens are trained" in ran.err
    found = json.loads(ran.out)
    assert found["held_out_loss"] > 0 and found["test_loss"] > 0
    assert json.loads(train(rooflax, *flags, data="chats").out) == found
    counted = ("--data", "chats/test.jsonl", "--assistant-only-loss", "--json")
    (scored,) = json.loads(rooflax("eval", "run/model", *counted).out)["results"]
    assert scored["loss"] == pytest.approx(found["test_loss"], abs=1e-5)
    (data / "chats/valid.jsonl").unlink()
    ran = train(rooflax, *flags, data="chats", out="split")
    assert ran.code == 0, ran.err
    assert "held out, 5 to test" in ran.err and "40 documents" not in ran.err
    ran = train(rooflax, chat, "--seq-len", 64, data="chats/test.jsonl", out="whole")
    assert ran.code == 0 and "are trained" not in ran.err


@pytest.fixture
def tiny(data, folder):
    """A tiny checkpoint, whose tokenizer has an end of texts."""
    shutil.copytree(folder, data / "tiny")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (data / "tiny/tokenizer_config.json").write_text(json.dumps(config))
    return "tiny"


def test_preferences_end_to_end(rooflax, data, tiny):
    with open(data / "pairs.jsonl", "w") as file:
        for number in range(20):
            row = {"prompt": f"f{number}", "chosen": "(a", "rejected": ") b"}
            file.write(json.dumps(row) + "\n")
    flags = (tiny, "--train-mode", "dpo", "--fine-tune-type", "lora", "--lr", 1e-2, "--json")
    ran = train(rooflax, *flags, "--micro-batches", 2, data="pairs.jsonl")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["held_out_loss"] < 0.6931 and found["rewards/margins"] > 0
    assert found["tokens"] == 4 * 2 * 2 * 16 and (data / "run/adapter").is_dir()
    assert "step 0: held-out loss 0.6931 (before training)" in ran.err
    assert re.search(r"^1\d pairs to train on, \d held out$", ran.err, re.MULTILINE)
    assert "<h2>rewards/accuracies</h2>" in (data / "run/report.html").read_text()
    ran = train(rooflax, tiny, "--train-mode", "dpo", "--dry-run", data="pairs.jsonl", out="dry")
    assert ran.code == 0 and "in all" in ran.out
    ran = train(rooflax, tiny, data="pairs.jsonl", out="sft")
    assert ran.code == 2 and "line 1 of pairs.jsonl: it has a chosen and a rejected" in ran.err
    ran = train(rooflax, tiny, "--train-mode", "orpo", data="texts", out="texts-run")
    assert ran.code == 2 and "txt has no chosen and rejected answer" in ran.err


def test_rewards_end_to_end(rooflax, data, tiny):
    with open(data / "prompts.jsonl", "w") as file:
        file.writelines(json.dumps({"prompt": f"f{number}"}) + "\n" for number in range(20))
    (data / "rewards.py").write_text(
        "def short(completions):\n    return [-len(one) for one in completions]\n"
        "def late(completions, calls=[]):\n    calls.append(1)\n"
        "    return [1 / (len(calls) < 3) for _ in completions]\n"
    )
    flags = (
        tiny, "--train-mode", "grpo", "--reward", "rewards.py:short", "--num-generations", 2,
        "--max-completion-length", 5, "--lr", 1e-3,
        "--held-out-fraction", 0.3,
    )  # fmt: skip
    ran = train(rooflax, *flags, "--json", "--sample", "f0", data="prompts.jsonl")
    assert ran.code == 0, ran.err
    assert [line["step"] for line in log_of("run") if "samples" in line] == [0, 4]
    found = json.loads(ran.out)
    assert found["held_out_loss"] == -found["reward"] > 0
    (said,) = [line for line in ran.err.splitlines() if "sampler and trainer differed" in line]
    assert 0 < float(said.rpartition(" ")[2]) < 1e-4 and "e-" in said
    assert "<h2>reward</h2>" in (data / "run/report.html").read_text()
    again = train(rooflax, *flags, data="prompts.jsonl")
    assert said in again.err.splitlines() and "nothing was trained" in again.err
    assert "there is no held-out" not in again.err
    few = ("--dry-run", "--held-out-fraction", 0.01)
    ran = train(rooflax, *replaced("train", list(flags), few), data="prompts.jsonl", out="dry")
    assert ran.code == 0 and "the sampler's KV cache" in ran.out
    assert "20 prompts to train on, 0 held out\nno prompt is among the held-out share of 0.01" in (
        ran.err
    )
    assert "there is no held-out reward; raise --held-out-fraction" in ran.err
    failing = replaced("train", list(flags), ("--reward", "rewards.py:late"))
    ran = train(rooflax, *failing, "--eval-every", 0, data="prompts.jsonl", out="failing")
    assert ran.code == 1 and "rewards.py, line 5, raised ZeroDivisionError" in ran.err
    assert not (data / "failing/model").exists()
    for more, said in (
        (("--truncation", "cut"), "--truncation is not for --train-mode grpo"),
        (("--glob", "*.py"), "--glob is for --train-mode sft; grpo has its own rows"),
    ):
        ran = train(rooflax, *flags, *more, data="prompts.jsonl", out="other")
        assert ran.code == 2 and said in ran.err
    ran = train(rooflax, *flags, data="texts", out="other")
    assert ran.code == 2 and "texts has no train.jsonl, whose lines are the prompts" in ran.err


@pytest.mark.parametrize(
    ("flags", "line", "said"),
    [
        ((), {"messages": "x"}, "line 4 of rows.jsonl has messages that are not a list"),
        ((), {"body": "x"}, "line 4 of rows.jsonl is not a JSON object with messages, a prompt"),
        (("--mask-prompt",), {"messages": [{"role": "user", "content": "x"}]},
         "line 4 of rows.jsonl has nothing to train on"),
        ((), {"prompt": "a " * 80, "completion": "b"}, "line 4 of rows.jsonl has "),
        (("--mask-prompt", "--assistant-only-loss"), {"text": "x"},
         "both --mask-prompt and --assistant-only-loss are given"),
        (("--truncation", "some"), {"text": "x"}, "truncation is 'some'"),
    ],
)  # fmt: skip
def test_bad_rows_are_said_with_file_and_line(rooflax, data, chat, flags, line, said):
    chats(data / "rows.jsonl", 3)
    with open(data / "rows.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    base = (chat, "--seq-len", 64, "--held-out-fraction", 0)
    ran = train(rooflax, *base, *flags, data="rows.jsonl")
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err.splitlines()[-1]
    assert not list((data / "run").glob("*.bin*"))
    if "prompt" in line:
        ran = train(rooflax, *base, "--truncation", "cut", "--mask-prompt", data="rows.jsonl")
        assert ran.code == 0, ran.err
        assert "1 row cut to 65 tokens; 1 of them train nothing and are left out" in ran.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((*NEW, "somewhere"), "give one of them"),
        (("--config", "config.json"), "needs a tokenizer"),
        (("--vocab-size", 300), "is for new weights"),
        (("--config", "config.json", "--vocab-size", 20), "at least 257"),
        (("--config", "config.json", "--vocab-size", 400), "config.json has 320 rows"),
        (("--config", "nowhere.json", "--vocab-size", 300), "cannot read nowhere.json"),
        (("--config", "texts/1.txt", "--vocab-size", 300), "is not JSON"),
        ((*NEW, "--steps", "0"), "steps is 0"),
        ((*NEW, "--tokens", "5"), "both --steps and --tokens are given"),
        ((*NEW, "--lr", "nan"), "--learning-rate is nan"),
        ((*NEW, "--remat", "some"), "remat is 'some'"),
        ((*NEW, "--glob", "*.rst"), "holds no text to train on"),
        ((*NEW, "--held-out-fraction", "1"), "at least 0 and below 1"),
        ((*NEW, "--held-out-fraction", "0.9999999"), "documents are held out"),
        ((*NEW, "--seq-len", "64"), "the model takes 32 tokens"),
        ((*NEW, "--text-field", "body"), "is for .jsonl files"),
        ((*NEW, "--check"), "are for MODEL"),
        ((*NEW, "--threads", 10**6), "--threads is 1,000,000; on this machine it is at most "),
        ((*NEW, "--out", "config.json"), "is a file"),
    ],
)
def test_what_does_not_go_together_is_rejected(rooflax, data, flags, said):
    ran = train(rooflax, *flags)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err.splitlines()[-1]
    assert not (data / "run/model").exists()
    assert "--seq-len" not in flags or not (data / "run").exists()  # before the text is encoded


def test_other_data_in_the_same_folder_is_rejected(rooflax, data):
    assert train(rooflax, *NEW).code == 0
    ran = train(rooflax, *NEW, "--held-out-fraction", 0.5)
    assert ran.code == 2
    assert "a run on other data" in ran.err
    (data / "config.json").write_text(json.dumps(CONFIG | {"rms_norm_eps": 0.1}))
    ran = train(rooflax, *NEW)
    assert (ran.code, ran.out) == (2, "")
    assert "or another config" in ran.err
    assert not list((data / "run").glob("data.json?*"))
    (data / "run/data.json").write_text('{"data": [')
    ran = train(rooflax, *NEW)
    assert (ran.code, len(ran.err.splitlines())) == (2, 1)
    assert "data.json is damaged" in ran.err


def test_text_that_changed_is_said_once_a_run_has_begun(rooflax, data):
    """A run that never began reads it anew; one that did goes on where the text is gone."""
    (data / "short").mkdir()
    (data / "short/1.txt").write_text("a b")
    ran = train(rooflax, *NEW, "--held-out-fraction", 0, data="short")
    assert ran.code == 2 and "give more text" in ran.err
    for path in (data / "texts").iterdir():
        (data / "short" / path.name).write_bytes(path.read_bytes())
    assert train(rooflax, *NEW, "--held-out-fraction", 0, data="short").code == 0
    with open(data / "short/1.txt", "a") as file:
        file.write("more")
    ran = train(rooflax, *NEW, "--held-out-fraction", 0, data="short")
    assert (ran.code, len(ran.err.splitlines())) == (2, 1)
    assert "what short held before it changed; give another --out" in ran.err
    for path in (data / "short").iterdir():
        path.unlink()
    (data / "short").rmdir()
    ran = train(rooflax, *NEW, "--held-out-fraction", 0, data="short")
    assert ran.code == 0 and "was complete" in ran.err


@pytest.mark.parametrize("format", ["int8", "int4", "mxfp4"])
def test_quantized_weights_are_rejected_before_anything_is_read(rooflax, tmp_path, format):
    folder, out = tmp_path / "quantized", tmp_path / "run"
    assert rooflax("quantize", "preset:qwen2.5-tiny", "-q", format, "-o", folder).code == 0
    ran = rooflax("train", folder, "--data", tmp_path, "--out", out, "--steps", 1)
    assert ran.code == 2 and "quantized weights, which cannot be trained" in ran.err
    model = load(folder)
    with pytest.raises(RequestError, match="quantized weights, which cannot be trained"):
        loop.run_training(model, TrainConfig(steps=1), None, None, out)


def test_generation_defaults_go_along(rooflax, data):
    ran = rooflax(
        "train", "--data", "texts", "--out", "run", "--steps", 1, "--batch", 2, "--seq-len", 16
    )
    assert ran.code == 0, ran.err
    found = json.loads((data / "run/model/generation_config.json").read_text())
    wanted = json.loads((embedded_folder() / "generation_config.json").read_text())
    assert {name: found.get(name) for name in wanted} == wanted


def test_an_adapter_is_trained_and_run(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 40, encoding="utf-8")
    out = tmp_path / "run"
    command = ["train", "--data", str(text), "--held-out-fraction", "0", "--out", str(out)]
    command += ["--fine-tune-type", "lora", "--steps", "2", "--batch", "2", "--seq-len", "32"]
    assert main([*command, "--target-modules", "q_proj,up_proj", "--num-layers", "1"]) == 0
    assert f"the adapter is in {out / 'adapter'}" in capsys.readouterr().out
    said = json.loads((out / "adapter/adapter_config.json").read_text())
    assert said["target_modules"] == ["q_proj", "up_proj"]
    assert said["layers_to_transform"] == [5]
    assert not (out / "model").exists()
    command = ["generate", "--lora", str(out / "adapter"), "-p", "def", "-n", "2", "--quiet"]
    assert main([*command, "--temperature", "0"]) == 0
