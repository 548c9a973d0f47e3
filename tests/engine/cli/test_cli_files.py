"""Every verb that writes: one at a time, through links; every one that reads: regular files."""

import json
import os
import subprocess
import sys
import time

import pytest

from rooflax.files import only_writer
from tests.flags import replaced

pytestmark = pytest.mark.oldest_jax

TINY = "preset:qwen2.5-tiny"
CONFIG = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip
ASKED = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
PROMPTS = "".join(json.dumps({"prompt": [5, 6, 7], "id": name}) + "\n" for name in "ab")
BATCH = ("batch", "-i", "asked", "--url", "http://127.0.0.1:9", "-o", "out")
GENERATE = ("generate", TINY, "--input", "prompts", "-n", 2, "--temp", 0, "--output", "out")
TRAIN = (
    "train", "--config", "config.json", "--vocab-size", 300, "--data", "texts", "--steps", 4,
    "--batch", 2, "--seq-len", 16, "--warmup-steps", 1, "--out", "out",
)  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working folder, with what the verbs read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "asked").write_text(json.dumps(ASKED) + "\n")
    (tmp_path / "prompts").write_text(PROMPTS)
    (tmp_path / "lines").write_text('"a"\n')
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / f"texts/{number}.txt").write_text(f"line {number} of this text\n" * 5)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        BATCH,
        GENERATE,
        ("quantize", TINY, "-q", "int8", "-o", "out"),
        ("quantize", TINY, "--gguf", "F32", "-o", "out"),
        ("bench", TINY, "--html", "out"),
        ("bench", TINY, "--profile", "out"),
    ],
)
def test_what_is_being_written_is_rejected_at_once(rooflax, here, words):
    (here / "link").symlink_to("out")
    for name in ("out", "link"):
        with only_writer(here / "out"):
            ran = rooflax(*words[:-1], name)
        said = f"rooflax: {name} is being written by another process; wait for its end, or name"
        assert (ran.code, ran.out, ran.err) == (2, "", f"{said} another.\n")
    assert not (here / "out").exists()


def test_two_runs_of_training_in_one_folder(rooflax, here):
    """The second neither ends the first nor changes what it leaves, nor does one after kill -9."""
    assert rooflax(*TRAIN[:-1], "alone").code == 0
    wanted = (here / "alone/model/model.safetensors").read_bytes()
    words = [*map(str, TRAIN), "--checkpoint-every", "1"]
    stops = """
import sys
from rooflax.train import loop
step = loop._Run.advance
def advance(self, bar):
    step(self, bar)
    if self.step >= 3:
        print("there", flush=True)
        sys.stdin.read()
loop._Run.advance = advance
from rooflax.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", stops, *words]
    for is_killed in (True, False):
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
            assert first.stdout is not None and first.stdout.readline() == b"there\n"
            for flags in ((), ("--data", "config.json"), ("--steps", 9)):  # others, too
                ran = rooflax("train", *replaced("train", TRAIN[1:], flags))
                assert ran.code == 2 and ran.err.startswith("rooflax: out is being written by")
            if is_killed:
                first.kill()
    assert first.returncode == 0
    assert (here / "out/model/model.safetensors").read_bytes() == wanted
    lines = [json.loads(line) for line in (here / "out/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert not list(here.glob("**/*.lock"))


def test_training_through_links(rooflax, here):
    (here / "disk").mkdir()
    (here / "out").symlink_to("disk")
    assert rooflax(*TRAIN).code == 0
    assert (here / "out").is_symlink() and (here / "disk/model/model.safetensors").exists()
    with only_writer("disk/model"):
        ran = rooflax(*TRAIN)
    assert ran.code == 2 and "out/model is being written by another process" in ran.err


def test_answers_are_mended_where_a_link_leads(rooflax, here):
    """Of `batch` and of `generate`: the last line was cut."""
    answer = {"id": "1", "custom_id": "a", "error": None, "response": {"status_code": 200}}
    whole = json.dumps(answer) + "\n"
    assert rooflax(*GENERATE).code == 0
    lines = (here / "out").read_text()
    for words, begun, ended in (
        (BATCH, whole + whole[:20], whole),
        (GENERATE, lines[:-9], lines),
    ):
        (here / "target").write_text(begun)
        (here / "link").unlink(missing_ok=True)
        (here / "link").symlink_to("target")
        ran = rooflax(*words[:-1], "link")
        assert ran.code == 0, ran.err
        assert (here / "link").is_symlink() and (here / "target").read_text() == ended


@pytest.mark.parametrize("given", ["pipe", "-"])
@pytest.mark.parametrize(
    ("words", "text", "code", "answered"),
    [
        (("generate", TINY, "-n", 2, "--output", "answers", "--input"), PROMPTS, 0, 2),
        (("generate", TINY, "-n", 2, "--output", "answers", "--input"), "one\ntwo\nthree\n", 0, 3),
        (("batch", "--url", "http://127.0.0.1:9", "-o", "answers", "-i"), json.dumps(ASKED), 1, 1),
        (("perplexity", TINY, "--json", "--file"), "a text " * 50, 0, None),
        (("generate", TINY, "-n", 2, "-p", "x", "--json-schema"), '{"type": "integer"}', 0, None),
    ],
)
def test_texts_come_from_pipes_too(rooflax, here, words, text, code, answered, given):
    source, sink = os.pipe()
    with open(sink, "wb") as file:
        file.write(text.encode())
    name = f"/dev/fd/{source}" if given == "pipe" else "-"
    ran = rooflax(*words, name, stdin=text.encode())
    os.close(source)
    assert ran.code == code, ran.err
    assert "cannot be read" not in ran.err
    if answered is not None:
        assert (here / "answers").read_text().count("\n") == answered


def test_answers_to_stdout_are_those_of_a_file(rooflax, here):
    (here / "prompts").write_text(PROMPTS)
    assert rooflax(*GENERATE).code == 0
    ran = rooflax(*GENERATE[:-1], "-")
    assert ran.code == 0 and ran.out == (here / "out").read_text()
    assert not list(here.glob("-*"))


def test_a_batch_to_stdout_is_rejected_and_leaves_nothing(rooflax, here):
    (here / "asked").write_text(json.dumps(ASKED) + "\n")
    ran = rooflax(*BATCH[:-1], "-")
    assert ran.code == 2 and "name one" in ran.err and not ran.out
    assert not list(here.glob("-*"))


@pytest.mark.parametrize(
    "words",
    [
        ("batch", "--url", "http://127.0.0.1:9", "-o", "answers", "-i", "bad"),
        ("generate", TINY, "--output", "answers", "--input", "bad"),
        ("generate", TINY, "-p", "x", "--json-schema", "bad"),
        ("perplexity", TINY, "--file", "bad"),
        ("train", *replaced("train", TRAIN[1:], ("--config", "bad"))),
        ("train", *replaced("train", TRAIN[1:], ("--data", "bad.txt"))),
        ("serve", "--chat-template", "bad"),
        ("serve", "--api-key-file", "bad"),
        ("bench", "--compare", "bad", "bad"),
        ("inspect", "bad.gguf"),
        ("inspect", "folder"),
    ],
)
@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_what_is_no_regular_file_is_named_and_not_waited_for(rooflax, here, words, kind):
    (here / "folder").mkdir()
    (here / "folder/config.json").write_text(json.dumps(CONFIG))
    for name in ("bad", "bad.gguf", "bad.txt", "folder/model.safetensors"):
        if kind == "pipe":
            os.mkfifo(here / name)
        else:
            (here / name).symlink_to("/dev/zero")
    started = time.monotonic()
    ran = rooflax(*words)
    assert ran.code == 2 and ran.err.count("\n") == 1, ran.err
    reasons = ("not a regular", "nor a regular", "not a file", "nothing was written into the pipe")
    assert any(reason in ran.err for reason in reasons), ran.err
    assert time.monotonic() - started < 20
    assert not (here / "answers").exists()
