"""GRPO: one set of log-probabilities, a reward that rises, resuming, what a reward may not do."""

import json

import numpy as np
import pytest

from rooflax.errors import RequestError, RewardError
from rooflax.llm import LLM
from rooflax.nn.execution import ExecutionOptions
from rooflax.rl.grpo import SMALLEST, advantages
from rooflax.rl.rewards import Reward
from rooflax.rl.rollouts import Rollouts
from rooflax.train.config import TrainConfig
from rooflax.train.corpus import file_prompts
from rooflax.train.log import read_log
from rooflax.train.loop import run_training
from rooflax.train.memory import training_memory
from tests.support.train import tiny

pytestmark = pytest.mark.oldest_jax

SETTINGS = {
    "train_mode": "grpo", "batch_size": 16, "num_generations": 8, "max_completion_length": 6,
    "seq_len": 16, "steps": 6, "learning_rate": 1e-2, "min_lr_ratio": 1.0, "warmup_steps": 0,
    "eval_every": 4, "checkpoint_every": 3, "weight_decay": 0.0,
}  # fmt: skip
REWARDS = '''
def small(prompts, completions, number):
    """The share of characters below each row's number."""
    assert len(prompts) == len(completions) == len(number)
    return [sum(map(str(chr(n)).__gt__, t)) / 6 for t, n in zip(completions, number)]


def fails(completions, **columns):
    raise KeyError(sorted(columns)[0])


def nothing(completions):
    return None


def too_few(completions):
    return [0.0]


def nan(completions):
    return [float("nan")] * len(completions)


def large(completions):
    return [1e39] * len(completions)


def digits(completions):
    return "1" * len(completions)


def by_number(completions):
    return dict.fromkeys(range(len(completions)))


def beyond_floats(completions):
    return [10**400] * len(completions)


def late(completions):
    yield 1.0
    raise KeyError("late")


def leaves(completions):
    raise SystemExit(0)


def truths(prompts, completions, nested):
    print("a line")
    for row in nested:
        row.append("changed")
    completions.clear()
    prompts[0][0]["content"] = "changed"
    return (True for _ in nested)


class Own(BaseException):
    def __str__(self):
        raise RuntimeError


def own(completions):
    raise Own
'''


@pytest.fixture
def files(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"def f{n}(", "number": 96} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def rollouts(llm, files, config):
    rows = list(file_prompts([files / "rows.jsonl"]))
    return Rollouts(llm, rows[:4], rows[4:], rows[4:5], Reward(config.reward), config)


def settings(files, function="small", **changes):
    return TrainConfig(**SETTINGS | {"reward": f"{files / 'rewards.py'}:{function}"} | changes)


def sampler(folder, config):
    return LLM(
        folder, dtype="float32", generation_config="none", prefix_caching=False,
        max_num_seqs=config.batch_size, max_model_len=config.seq_len + 1,
        options=ExecutionOptions(layers="unrolled"),
    )  # fmt: skip


def run(folder, files, config, out, **more):
    llm = sampler(folder, config)
    made = rollouts(llm, files, config)
    result = run_training(llm.model, config, None, None, out, rollouts=made, **more)
    return result, made, read_log(out / "log.jsonl")


def test_a_run_and_the_same_one_killed(folder, files):
    config, said = settings(files, fine_tune_type="lora", save_best=True), []
    whole, _, lines = run(folder, files, config, files / "whole", say=said.append)
    steps = [line for line in lines if "loss" in line]
    assert max(line["sampling_difference"] for line in steps) < 2e-5
    assert {"reward", "reward_std", "completion_length", "clip_ratio"} <= steps[0].keys()
    assert max(line["reward"] for line in steps[-3:]) > steps[0]["reward"]
    assert steps[-1]["clip_ratio"] == 0
    held_out = [line for line in lines if "held_out_loss" in line]
    assert [line["step"] for line in held_out][:2] == [0, 4]
    assert all(line["held_out_loss"] == -line["reward"] for line in held_out)
    assert whole.held_out["reward"] == -whole.held_out_loss and whole.test_loss is not None

    class Killed(BaseException):
        pass

    def killed(line):
        if line.startswith("step 4"):
            raise Killed

    with pytest.raises(Killed):
        run(folder, files, config, files / "cut", say=killed)
    again, _, resumed = run(folder, files, config, files / "cut")
    assert tiny.comparable(resumed) == tiny.comparable(lines)
    assert again.best_step == whole.best_step


def test_a_run_whose_reward_fails_goes_on_where_it_was(folder, files):
    config, said = settings(files, steps=4, eval_every=0, checkpoint_every=0), []
    _, _, lines = run(folder, files, config, files / "whole")
    counted = "    calls.append(1)\n    assert len(calls) < 3\n    assert len(prompts)"
    failing = "calls = []\n" + REWARDS.replace("    assert len(prompts)", counted)
    (files / "rewards.py").write_text(failing)
    with pytest.raises(RewardError, match="line 6, raised AssertionError"):
        run(folder, files, config, files / "cut", say=said.append)
    assert said == ["the run is saved after step 2"]
    (files / "rewards.py").write_text(REWARDS)
    run(folder, files, config, files / "cut", say=said.append)
    assert said[1] == "resumes from step 2 of 4"
    assert tiny.comparable(read_log(files / "cut/log.jsonl")) == tiny.comparable(lines)


def test_a_run_whose_reward_fails_on_held_out_prompts_goes_on_there(folder, files):
    config, said = settings(files, steps=4, eval_every=2, checkpoint_every=0), []
    _, _, lines = run(folder, files, config, files / "whole")
    counted = "    calls.append(1)\n    assert len(calls) < 4\n    assert len(prompts)"
    failing = "calls = []\n" + REWARDS.replace("    assert len(prompts)", counted)
    (files / "rewards.py").write_text(failing)
    with pytest.raises(RewardError, match="line 6, raised AssertionError"):
        run(folder, files, config, files / "cut", say=said.append)
    assert said[-1] == "the run is saved after step 2"
    (files / "rewards.py").write_text(REWARDS)
    run(folder, files, config, files / "cut")
    resumed = read_log(files / "cut/log.jsonl")
    assert [line["step"] for line in resumed if "held_out_loss" in line] == [0, 2, 4]
    assert tiny.comparable(resumed) == tiny.comparable(lines)


def test_updates_by_the_same_answers_are_clipped(folder, files):
    config = settings(files, num_iterations=3, beta=0.04, steps=3, eval_every=0)
    result, _, lines = run(folder, files, config, files / "run")
    steps = [line for line in lines if "loss" in line]
    assert [line["lr"] for line in steps] == [float(np.float32(1e-2))] * 3
    assert steps[0]["kl"] > 0 and max(line["clip_ratio"] for line in steps) > 0
    assert result.step == 3


def test_log_probabilities_of_sampler_and_trainer_are_equal(files):
    """Of the embedded model in float32, to rounding."""
    config = settings(files, max_completion_length=16, seq_len=32)
    llm = sampler(None, config)
    made = rollouts(llm, files, config)
    made.start(llm.model, llm.model.rope, None)
    batch, said = made.batch(0, llm.model.weights)
    assert 0 < said["sampling_difference"] <= 1e-5
    assert batch.mask.sum() == 16 * said["completion_length"]
    print(f"the largest difference is {said['sampling_difference']:.1e}")


def test_prompts_leave_room_in_a_context_of_seq_len(folder, files):
    config = settings(files)
    made = rollouts(sampler(folder, config), files, config)
    (length,) = {len(ids) for ids in made._ids.values()}
    config = settings(files, max_completion_length=config.seq_len + 1 - length)
    rollouts(sampler(folder, config), files, config)
    with pytest.raises(RequestError, match=f"have room for 1 to {length - 1} before"):
        rollouts(LLM(folder, max_model_len=config.seq_len), files, config)


def test_memory_has_the_samplers_cache(folder, files):
    config = settings(files)
    llm = sampler(folder, config)
    parts = training_memory(llm.model, config, rollouts(llm, files, config))
    assert parts["the sampler's KV cache"] > 0


def test_advantages_and_clipping_by_hand():
    rewards = np.array([[0.0, 1.0, 1.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    found = advantages(rewards)
    wanted = 0.5 / (rewards[0].std(ddof=1) + SMALLEST)
    np.testing.assert_allclose(found[0], [-wanted, wanted, wanted, -wanted])
    np.testing.assert_array_equal(found[1], 0)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("fails", r"rewards\.py, line 9, raised KeyError: 'number'\.$"),
        ("nothing", r"rewards\.py, line 12, gave None; it must give a list of numbers\.$"),
        ("too_few", r"rewards\.py, line 16, gave 1 numbers for 16 completions\.$"),
        ("nan", r"rewards\.py, line 20, gave nan for line \d of .*; it must be finite in"),
        ("large", r"line 24, gave 1e\+39 for line \d of .*; it must be finite in float32\.$"),
        ("digits", r"line 28, gave '1{12}\.*1+'; it must give a list of numbers\.$"),
        ("by_number", r"line 32, gave {0: None, .*}; it must give a list of numbers\.$"),
        ("beyond_floats", r"line 36, gave \[10+\.*.*\]; it must give a list of numbers\.$"),
        ("late", r"rewards\.py, line 42, raised KeyError: 'late'\.$"),
        ("leaves", r"rewards\.py, line 46, raised SystemExit: 0\.$"),
        ("own", r"rewards\.py, line 64, raised Own\.$"),
    ],
)
def test_rewards_that_fail_are_said_with_file_and_line(files, function, said):
    rows = list(file_prompts([files / "rows.jsonl"]))[:4] * 4
    with pytest.raises(RewardError, match=said) as caught:
        Reward(f"{files / 'rewards.py'}:{function}")(rows, ["x"] * 16)
    assert "\n" not in str(caught.value)


def test_rewards_that_cannot_be_loaded(files, monkeypatch):
    monkeypatch.chdir(files)
    (files / "broken.py").write_text("def f(:\n")
    (files / "raises.py").write_text("\nimport not_a_module_at_all\n")
    for spec, said in (
        ("rewards", "reward is 'rewards'; give FILE.py:function"),
        ("rewards:small", "give FILE.py:function"),
        ("gone.py:f", "gone.py, which is no file"),
        ("rewards.py:gone", "rewards.py has no function gone"),
        ("broken.py:f", "broken.py, line 1, raised SyntaxError"),
        ("raises.py:f", "raises.py, line 2, raised ModuleNotFoundError"),
    ):
        with pytest.raises(RequestError, match=said):
            Reward(spec)


def test_messages_and_columns_come_as_trl_gives_them(files):
    prompt = [{"role": "user", "content": "hi"}]
    (files / "chat.jsonl").write_text(json.dumps({"prompt": prompt, "answer": 4, "tools": []}))
    (files / "given.py").write_text(
        "given = []\ndef f(**all):\n    given.append(all)\n    return [1]"
    )
    (row,) = file_prompts([files / "chat.jsonl"])
    reward = Reward(f"{files / 'given.py'}:f")
    assert reward([row], ["hello"]) == [1.0]
    (given,) = reward.function.__globals__["given"]
    assert given == {
        "prompts": [prompt], "answer": [4],
        "completions": [[{"role": "assistant", "content": "hello"}]],
    }  # fmt: skip


def test_a_reward_changes_no_row_and_prints_to_stderr(files, capsys):
    prompt = [{"role": "user", "content": "hi"}]
    (files / "chat.jsonl").write_text(json.dumps({"prompt": prompt, "nested": []}))
    (row,) = file_prompts([files / "chat.jsonl"])
    assert Reward(f"{files / 'rewards.py'}:truths")([row] * 2, ["a", "b"]) == [1.0, 1.0]
    assert row.columns == {"nested": []} and row.prompt[0]["content"] == "hi"
    said = capsys.readouterr()
    assert said.out == "" and said.err == "a line\n"


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
def test_a_child_that_a_reward_forks_trains_nothing(files):
    code = (
        "import os\n"
        "def f(completions):\n"
        "    if pid := os.fork():\n"
        "        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]\n"
        "    return [0.0]\n"
    )
    (files / "forks.py").write_text(code)
    (row, *_) = file_prompts([files / "rows.jsonl"])
    assert Reward(f"{files / 'forks.py'}:f")([row], ["a"]) == [1.0]


def test_prompts_and_settings_that_are_rejected(folder, files):
    config = settings(files, max_completion_length=15)
    with pytest.raises(RequestError, match=r"line 1 of .* has a prompt of \d+ tokens"):
        rollouts(sampler(folder, config), files, config)
    for given, said in (
        ({"reward": None}, "grpo needs `reward`"),
        ({"num_generations": 5}, "batch_size is 16, which does not divide by 5"),
        ({"max_completion_length": 16}, "prompts have the tokens of `seq_len` that"),
        ({"train_mode": "sft"}, "`reward` is of rewards; set `train_mode` to grpo"),
        ({"loss_type": "ipo"}, "`loss_type` is of dpo, and `train_mode` is grpo"),
    ):
        with pytest.raises(RequestError, match=said):
            settings(files, **given)
    for line, said in (
        ("[1]", "is not a JSON object with a prompt"),
        ('{"prompt": 3}', "prompt"),
        ('{"prompt": "x", "completions": []}', "has completions, which is an argument of rewards"),
    ):
        (files / "bad.jsonl").write_text(line)
        with pytest.raises(RequestError, match=f"line 1 of .*{said}"):
            list(file_prompts([files / "bad.jsonl"]))
