"""Checkpoints: whole or absent, whatever goes wrong and whenever."""

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooflax.errors import CheckpointError, RequestError
from rooflax.train import loop
from rooflax.train.checkpoint import (
    crc32_of,
    list_checkpoints,
    load_state,
    read_about,
    save_checkpoint,
)
from rooflax.train.log import read_log
from rooflax.train.loop import run_training
from rooflax.train.step import TrainState
from tests.support.disk import FULL, Disk, Killed, touches
from tests.support.train import tiny

pytestmark = pytest.mark.oldest_jax


def state_of(step, *, size=7):
    """A state whose every number depends on the step."""
    rng = np.random.default_rng(step)
    weights = {
        "embed": jnp.asarray(rng.standard_normal((size, 3)), jnp.float32),
        "layers": ({"norm": jnp.asarray(rng.standard_normal(3), jnp.float32)},),
    }
    moments = jax.tree.map(lambda w: w * 2, weights)
    return TrainState(weights, (moments, jnp.int32(step)), jnp.int32(step))


def info(step):
    return {"config": {"steps": 40}, "loss": 1.5, "log_position": 10 * step}


def save(folder, step, *, keep=2):
    return save_checkpoint(folder, state_of(step), info(step), keep=keep)


def is_whole(folder, step):
    """Whether the newest checkpoint is that of a step, bit for bit."""
    newest = list_checkpoints(folder)[-1]
    found = load_state(newest, state_of(0))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state_of(step)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype
    about = read_about(newest)
    assert about.pop("crc32") == {"state.safetensors": crc32_of(newest / "state.safetensors")}
    assert about == {"step": step, **info(step)}
    return newest.name == f"step-{step:08d}"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.every_jax
def test_what_is_saved_comes_back(tmp_path):
    path = save(tmp_path / "a" / "b", 5)
    assert path == tmp_path / "a" / "b" / "step-00000005"
    assert names(path) == ["state.json", "state.safetensors"]
    assert is_whole(path.parent, 5)


def test_values_that_are_hard_to_keep(tmp_path):
    hard = np.array([-0.0, np.nan, np.inf, 1e-45, np.float32(0.1)], np.float32)
    state = TrainState({"w": jnp.asarray(hard)}, (), jnp.int32(1))
    found = load_state(save_checkpoint(tmp_path, state, info(1), keep=1), state)
    assert np.asarray(found.weights["w"]).tobytes() == hard.tobytes()


def test_old_checkpoints_go(tmp_path):
    for step in (5, 10, 15, 200):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-00000015", "step-00000200"]
    save(tmp_path, 300, keep=1)
    assert names(tmp_path) == ["step-00000300"]


def test_a_step_saved_again_is_replaced(tmp_path):
    path = save(tmp_path, 5)
    (path / "state.safetensors").write_bytes(b"")
    save(tmp_path, 5)
    assert is_whole(tmp_path, 5)
    assert names(tmp_path) == ["step-00000005"]


def test_only_finished_checkpoints_are_listed(tmp_path):
    assert list_checkpoints(tmp_path / "nowhere") == []
    for name in (
        ".unfinished-00000009",
        ".unfinished-step-00000004",
        "step-9",
        "step-00000003.tmp",
    ):
        (tmp_path / name).mkdir()
    assert list_checkpoints(tmp_path) == []
    save(tmp_path, 2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002"]
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_the_steps_of_saving(tmp_path):
    """So that the next two tests fail at what really happens."""
    save(tmp_path, 1)
    calls = touches(tmp_path, lambda: save(tmp_path, 2))
    assert {*calls} == {"mkdir", "open", "write", "fsync", "replace", "rename"}
    assert calls.index("rename") > calls.index("replace") > calls.index("write")
    assert len(calls) > 12


def test_a_full_disk_at_every_step_of_saving(tmp_path):
    outcomes = set()
    for fail_at in range(1, 100):
        folder = tmp_path / str(fail_at)
        save(folder, 1)
        with Disk(folder, fail_at).watched() as disk:
            raised = True
            with contextlib.suppress(OSError):
                save(folder, 2)
                raised = False
        if not disk.has_failed:
            break
        if raised:  # the old one is the newest, and nothing else is left
            assert is_whole(folder, 1), fail_at
            assert names(folder) == ["step-00000001"], disk.calls
        else:  # flushing a folder is not offered by every file system
            assert disk.calls[fail_at - 1] == "fsync"
            assert is_whole(folder, 2), fail_at
        outcomes.add((disk.calls[fail_at - 1], raised))
        save(folder, 3)  # room again
        assert is_whole(folder, 3)
    assert {(name, True) for name in ("mkdir", "open", "write", "fsync", "replace", "rename")} <= (
        outcomes
    )


def test_a_kill_at_every_step_of_saving(tmp_path):
    """As a killed process leaves the folder: no clean-up runs to its end."""
    for fail_at in range(1, 100):
        folder = tmp_path / str(fail_at)
        for step in (1, 2):
            save(folder, step)
        with Disk(folder, fail_at, Killed()).watched() as disk, contextlib.suppress(Killed):
            save(folder, 2 if fail_at % 2 else 3)
        if not disk.has_failed:
            break
        assert len(list_checkpoints(folder)) >= 1, disk.calls
        for path in list_checkpoints(folder):
            read(path)
        save(folder, 4, keep=1)
        assert is_whole(folder, 4)
        assert names(folder) == ["step-00000004"]
    assert fail_at > 12


def test_a_file_that_may_not_grow(tmp_path):
    """The system's own rejection, in the middle of the arrays."""
    save(tmp_path, 1)
    large = state_of(2, size=100_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_checkpoint(tmp_path, large, info(2), keep=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert is_whole(tmp_path, 1)
    assert names(tmp_path) == ["step-00000001"]


def read(path):
    return read_about(path), load_state(path, state_of(0))


class TestDamage:
    """A checkpoint that is not what was saved is rejected in one sentence."""

    @pytest.fixture
    def path(self, tmp_path):
        return save(tmp_path, 5)

    def rejected(self, path, match):
        with pytest.raises(CheckpointError, match=match) as caught:
            read(path)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("kept", [0, 1, 7, 8, 9, 100, -1])
    def test_truncated_arrays(self, path, kept):
        data = (path / "state.safetensors").read_bytes()
        (path / "state.safetensors").write_bytes(data[:kept])
        self.rejected(path, r"state\.safetensors")

    @pytest.mark.parametrize("at", [-1, -40, 200])
    def test_a_flipped_bit_in_the_arrays(self, path, at):
        data = bytearray((path / "state.safetensors").read_bytes())
        data[at] ^= 4
        (path / "state.safetensors").write_bytes(data)
        self.rejected(path, r"state\.safetensors (is not what was saved|is not a valid)")

    def test_one_of_an_older_version_has_no_checksum(self, path):
        about = read_about(path)
        del about["crc32"]
        (path / "state.json").write_text(json.dumps(about))
        assert read(path)[0] == about

    def test_missing_arrays(self, path):
        (path / "state.safetensors").unlink()
        self.rejected(path, r"cannot read .*state\.safetensors")

    def test_missing_state(self, path):
        (path / "state.json").unlink()
        self.rejected(path, r"state\.json cannot be read")

    @pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "{}", "[" * 100_000, "\udcff"])
    def test_state_that_is_none(self, path, text):
        (path / "state.json").write_text(text, errors="surrogateescape")
        self.rejected(path, r"state\.json (cannot be read|does not state)")

    @pytest.mark.parametrize(
        ("key", "value"),
        [("step", "5"), ("step", -1), ("step", True), ("step", 5.0), ("config", []),
         ("config", None), ("log_position", "0"), ("log_position", -1), ("log_position", None),
         ("loss", "1"), ("loss", [])],
    )  # fmt: skip
    def test_entries_of_another_kind(self, path, key, value):
        entries = json.loads((path / "state.json").read_text())
        (path / "state.json").write_text(json.dumps(entries | {key: value}))
        self.rejected(path, r"state\.json does not state")

    @pytest.mark.parametrize("key", ["step", "config", "loss", "log_position"])
    def test_missing_entries(self, path, key):
        entries = json.loads((path / "state.json").read_text())
        del entries[key]
        (path / "state.json").write_text(json.dumps(entries))
        self.rejected(path, r"state\.json does not state")

    def test_a_loss_may_be_missing_before_the_first_step(self, path):
        entries = json.loads((path / "state.json").read_text())
        (path / "state.json").write_text(json.dumps(entries | {"loss": None}))
        assert read_about(path)["loss"] is None

    def test_another_model(self, path):
        other = state_of(0)
        weights = other.weights | {"extra": jnp.zeros(2)}
        with pytest.raises(CheckpointError, match=r"belongs to another model .*weights\.extra"):
            load_state(path, TrainState(weights, other.opt_state, other.step))
        with pytest.raises(
            CheckpointError, match=r"embed .* is float32\[7, 3\], .* \[?float32\[8, 3"
        ):
            load_state(path, state_of(0, size=8))

    def test_another_type(self, path):
        other = state_of(0)
        narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16), other.weights)
        with pytest.raises(CheckpointError, match=r"but this model needs bfloat16"):
            load_state(path, TrainState(narrow, other.opt_state, other.step))


CONFIG = tiny.settings(steps=9, checkpoint_every=3, eval_every=4, eval_batches=1)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, corpora):
    folder = tmp_path_factory.mktemp("uninterrupted")
    result = run_training(tiny.make_model(), CONFIG, *corpora, folder)
    return folder, result


def run(folder, corpora, config=CONFIG, **model):
    return run_training(tiny.make_model(**model), config, *corpora, folder)


def assert_same_run(folder, other):
    assert tiny.comparable(read_log(folder / "log.jsonl")) == tiny.comparable(
        read_log(other / "log.jsonl")
    )
    last, wanted = (list_checkpoints(f / "checkpoints")[-1] for f in (folder, other))
    assert last.name == wanted.name
    arrays = [(path / "state.safetensors").read_bytes() for path in (last, wanted)]
    assert arrays[0] == arrays[1]


def interrupt_at(monkeypatch, step, times=1):
    """SIGINT while the rows of a step (from 0) are read."""
    real = loop.Rows.batch

    def batch(self, number, size):
        if number == step:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return real(self, number, size)

    monkeypatch.setattr(loop.Rows, "batch", batch)


@pytest.mark.every_jax
def test_sigint_ends_the_step_saves_and_returns(uninterrupted, corpora, tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 4)
        result = run(tmp_path, corpora)
    assert signal.getsignal(signal.SIGINT) is before
    assert (result.interrupted, result.step, result.tokens) == (True, 5, 5 * 4 * 16)
    assert (result.held_out_loss, result.bits_per_byte) == (None, None)
    assert names(tmp_path / "checkpoints") == ["step-00000003", "step-00000005"]
    result = run(tmp_path, corpora)
    assert not result.interrupted
    assert_same_run(tmp_path, uninterrupted[0])


def test_a_second_sigint_stops_at_once(uninterrupted, corpora, tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 4, times=2)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, corpora)
    assert signal.getsignal(signal.SIGINT) is before
    assert names(tmp_path / "checkpoints") == ["step-00000003"]
    run(tmp_path, corpora)
    assert_same_run(tmp_path, uninterrupted[0])


def test_a_full_disk_ends_the_run_and_the_next_one_goes_on(uninterrupted, corpora, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        real = loop.save_checkpoint

        def save(folder, state, *args, **kwargs):
            if int(state.step) == 6:
                raise FULL
            return real(folder, state, *args, **kwargs)

        patch.setattr(loop, "save_checkpoint", save)
        with pytest.raises(OSError, match="No space left"):
            run(tmp_path, corpora)
    assert names(tmp_path / "checkpoints") == ["step-00000003"]
    run(tmp_path, corpora)
    assert_same_run(tmp_path, uninterrupted[0])


class TestResuming:
    @pytest.fixture
    def folder(self, uninterrupted, tmp_path):
        shutil.copytree(uninterrupted[0], tmp_path / "run")
        return tmp_path / "run"

    def rejected(self, folder, corpora, error, match, config=CONFIG, **model):
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        with pytest.raises(error, match=match) as caught:
            run(folder, corpora, config, **model)
        assert "\n" not in str(caught.value)
        after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        assert before == after

    def test_with_other_settings(self, folder, corpora):
        for name, value in (("learning_rate", 0.5), ("steps", 8), ("seed", 3), ("layers", "scan")):
            changed = tiny.settings(**CONFIG.to_json() | {name: value})
            self.rejected(folder, corpora, RequestError, rf"^{name} is .*was trained with", changed)

    def test_with_another_model(self, folder, corpora):
        self.rejected(folder, corpora, RequestError, "num_hidden_layers is 3", num_hidden_layers=3)
        self.rejected(
            folder, corpora, RequestError, "intermediate_size is 60", intermediate_size=60
        )

    @pytest.mark.parametrize("damage", ["cut", "flipped", "without arrays", "without state"])
    def test_from_the_one_before_a_damaged_checkpoint(self, folder, uninterrupted, corpora, damage):
        newest = folder / "checkpoints" / "step-00000009"
        arrays, said = newest / "state.safetensors", []
        data = arrays.read_bytes()
        match damage:
            case "cut":
                arrays.write_bytes(data[:-100])
            case "flipped":
                arrays.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
            case "without arrays":
                arrays.unlink()
            case "without state":
                (newest / "state.json").unlink()
        run_training(tiny.make_model(), CONFIG, *corpora, folder, say=said.append)
        assert said[0].startswith("step-00000009 is passed over: ") and "\n" not in said[0]
        assert said[1] == "resumes from step 6 of 9"
        assert_same_run(folder, uninterrupted[0])

    def test_where_all_are_damaged(self, folder, corpora):
        for arrays in folder.glob("checkpoints/*/state.safetensors"):
            arrays.write_bytes(arrays.read_bytes()[:-100])
        match = r"step-00000009/state\.safetensors is not"
        self.rejected(folder, corpora, CheckpointError, match)

    def test_with_a_log_that_was_cut(self, folder, corpora):
        log = folder / "log.jsonl"
        log.write_bytes(log.read_bytes()[:100])
        self.rejected(
            folder, corpora, CheckpointError, r"log\.jsonl has 100 bytes, but the checkpoint"
        )

    def test_may_keep_other_checkpoints(self, folder, corpora):
        changed = tiny.settings(**CONFIG.to_json() | {"keep": 5, "checkpoint_every": 2})
        assert run(folder, corpora, changed).step == 9


SCRIPT = """
import sys
from pathlib import Path
from rooflax.engine.compilation import enable_persistent_cache
from rooflax.train.data import open_corpus
from rooflax.train.loop import run_training
from tests.support.train import tiny

enable_persistent_cache()
folder, training, held_out = map(Path, sys.argv[1:])
config = tiny.settings(steps=40, checkpoint_every=5, eval_every=7, eval_batches=1)
result = run_training(
    tiny.make_model(), config, open_corpus(training), open_corpus(held_out), folder
)
assert result.step == 40 and not result.interrupted
"""
ROOT = Path(__file__).parents[3]


def start(folder, corpora):
    files = [str(corpus.tokens.filename) for corpus in corpora]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), *files], env=environment, cwd=folder.parent
    )


def lines_of(log):
    return log.read_bytes().count(b"\n") if log.exists() else 0


def test_sigkill_at_random_moments(tmp_path, corpora):
    """Killed twice on its way and started again, a run is the one that was left alone."""
    alone, folder = tmp_path / "alone", tmp_path / "killed"
    process = start(alone, corpora)
    assert process.wait(timeout=300) == 0
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng, log = random.Random(seed), folder / "log.jsonl"
    for _ in range(2):
        kept = lines_of(log)  # some of them are cut off when it resumes
        target = kept + rng.randrange(1, 8)
        process = start(folder, corpora)
        while process.poll() is None and not kept <= target <= lines_of(log):
            time.sleep(0.0005)
        time.sleep(rng.random() * 0.02)
        process.kill()
        assert process.wait(timeout=60) == -signal.SIGKILL
    process = start(folder, corpora)
    assert process.wait(timeout=300) == 0
    assert_same_run(folder, alone)
    steps = [line["step"] for line in read_log(log) if "loss" in line]
    assert steps == list(range(1, 41))
