"""`rooflax embed`: JSON lines in and out, and every flag's effect."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest

from rooflax import LLM
from rooflax.cli.main import parser_of
from tests import goldens
from tests.engine.test_embedding import TEXTS, add_modules
from tests.pooling_cases import NORMALIZE, pooling

pytestmark = pytest.mark.oldest_jax


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("embed")
    made = goldens.write_checkpoint(root / "model", "qwen3", goldens.committed("qwen3"))
    return add_modules(made, pooling("lasttoken"), NORMALIZE)


def vectors(text):
    lines = [json.loads(line) for line in text.splitlines()]
    return [line["id"] for line in lines], np.array([line["embedding"] for line in lines])


def test_one_text_and_many(rooflax, folder, tmp_path):
    wanted = LLM(folder).embed(TEXTS)
    ran = rooflax("embed", folder, "-p", TEXTS[0], "--quiet")
    assert (ran.code, ran.err) == (0, "")
    np.testing.assert_allclose(vectors(ran.out)[1], wanted[:1], atol=1e-6)
    lines = [json.dumps(TEXTS[0]), "", json.dumps({"id": "k", "text": TEXTS[1]})]
    lines += [json.dumps({"text": text}) for text in TEXTS[2:]]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    files = ("--input", tmp_path / "texts.jsonl", "--output", tmp_path / "vectors.jsonl")
    ran = rooflax("embed", folder, *files)
    assert (ran.code, ran.out) == (0, "") and "4 of 4 embedded" in ran.err
    ids, found = vectors((tmp_path / "vectors.jsonl").read_text())
    assert ids == [1, "k", 4, 5]
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    again = rooflax("embed", folder, *files)
    assert again.code == 0 and "4 of 4 are embedded already" in again.err
    piped = rooflax("embed", folder, "--input", "-", stdin="\n".join(lines).encode())
    np.testing.assert_allclose(vectors(piped.out)[1], wanted, atol=1e-6)
    ends = "\r\n".join(TEXTS).encode()
    plain = rooflax("embed", folder, "--input", "-", stdin=ends)
    assert vectors(plain.out)[0] == [1, 2, 3, 4]
    np.testing.assert_allclose(vectors(plain.out)[1], wanted, atol=1e-6)


FLAGS = {
    "--prompt-name": ["query"], "--dimensions": ["5"], "--quantize": ["int8"],
    "--dtype": ["bfloat16"], "--kv-dtype": ["bfloat16"], "--help": [],
    "--max-model-len": (["2"], "the model takes 2"), "--prompt": (["a"], "is given twice"),
    "--revision": (["main"], "is for hub ids"), "--platform": (["gpu"], "is not here"),
    "--input": (["-"], "either as --prompt or as --input"),
    "--output": (["nowhere/x"], "nowhere/x cannot be written"),
    "--force": ([], "--force is for an --output"),
    "--weights-budget": (["1B"], "give a larger one"),
    "--decode-steps": (["0"], "--decode-steps is 0"),
    "--mesh": (["tensor=5"], "tensor"), "--kernels": (["best"], "best"), "--gqa": (["x"], "gqa"),
    "--moe": (["x"], "moe"), "--layers": (["x"], "layers"), "--threads": (["0"], "below 1"),
}  # fmt: skip
SAME = ("--truncate", "--offline", "--check", "--no-cache", "--no-jit", "--quiet", "--verbose")
"""Flags that change no vector; `--ignore-config-key` is for a key that is not there."""


def test_every_flag_has_its_effect_or_is_rejected(rooflax, folder):
    flags = {name for a in parser_of("embed")._actions for name in a.option_strings[-1:]}
    plain = rooflax("embed", folder, "-p", "def f")
    assert plain.code == 0
    named = {
        max(a.option_strings, key=len) for a in parser_of("embed")._actions if a.option_strings
    }
    known = {*FLAGS, *SAME, "--ignore-config-key"}
    assert {name.replace("--ctx-size", "--max-model-len") for name in named} == known, flags
    for flag, wanted in FLAGS.items():
        values, said = wanted if isinstance(wanted, tuple) else (wanted, None)
        ran = rooflax("embed", folder, "-p", "def f", flag, *values)
        if said is None:
            assert ran.code == 0 and ran.out != plain.out, flag
        else:
            assert (ran.code, ran.out) == (2, "") and said in ran.err, (flag, ran.err)
    for flag in SAME:
        ran = rooflax("embed", folder, "-p", "def f", flag)
        assert ran.code == 0, (flag, ran.err)
        np.testing.assert_allclose(vectors(ran.out)[1], vectors(plain.out)[1], atol=1e-5)


@pytest.mark.parametrize(
    "line", ['""', '{"text": ""}', "{", "5", '{"text": 5}', '{"text": "x", "more": 1}', '{"id": 1}']
)
def test_a_line_that_is_no_text_is_named(rooflax, folder, line):
    ran = rooflax("embed", folder, "--input", "-", stdin=f'"x"\n{line}\n'.encode())
    assert (ran.code, ran.out) == (2, "") and "Line 2 of -" in ran.err


def test_the_output_is_stdout_or_a_file_that_is_not_the_input(rooflax, folder, tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("a\n\nb\n")
    (tmp_path / "link").symlink_to(texts)
    for output in (texts, tmp_path / "link"):
        ran = rooflax("embed", folder, "--input", texts, "--output", output, "--force")
        assert (ran.code, ran.out) == (2, "") and "is the input; choose another" in ran.err
    assert texts.read_text() == "a\n\nb\n"
    shown = rooflax("embed", folder, "--input", texts, "--output", "-")
    assert shown.code == 0 and vectors(shown.out)[0] == [1, 3]
    ran = rooflax("embed", folder, "--input", texts, "--output", tmp_path / "rows.npy")
    assert ran.code == 2 and "Line 2 of" in ran.err and "is empty, and a .npy file" in ran.err


def test_ids_are_any_json(rooflax, folder, tmp_path):
    """Also with a lone surrogate, which is no Unicode text; what it names resumes."""
    line, ids = '{"id": ["é", "\\ud800"], "text": "x"}\n', ["é", "\ud800"]
    (tmp_path / "in.jsonl").write_text(line * 2, encoding="utf-8")
    files = ("--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")
    assert rooflax("embed", folder, *files).code == 0
    written = (tmp_path / "out.jsonl").read_text(encoding="utf-8")
    assert written.startswith('{"id": ["é", "\\ud800"], ') and vectors(written)[0] == [ids, ids]
    again = rooflax("embed", folder, *files)
    assert again.code == 0 and "2 of 2 are embedded already" in again.err
    assert rooflax("embed", folder, *files[:2]).out == written


def test_a_model_that_does_not_embed(rooflax):
    ran = rooflax("embed", "preset:qwen2.5-tiny", "-p", "x")
    assert (ran.code, ran.out) == (2, "") and "has no modules.json" in ran.err


def killed(process, output, at_least):
    """Kills a run once its output has so many bytes; whether it was still running."""
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if output.exists() and output.stat().st_size >= at_least:
            process.kill()
            process.wait()
            return True
        time.sleep(0.001)
    process.wait()
    return False


@pytest.mark.parametrize("name", ["vectors.jsonl", "vectors.npy"])
def test_a_killed_run_goes_on_where_it_ended(rooflax, folder, tmp_path, name):
    texts = [f"text number {index} " * (index % 5 + 1) for index in range(600)]
    (tmp_path / "in.txt").write_text("\n".join(texts))
    output, whole = tmp_path / name, tmp_path / f"whole-{name}"
    command = ["embed", str(folder), "--input", str(tmp_path / "in.txt"), "--output"]
    run = [sys.executable, "-m", "rooflax", *command, str(output)]
    assert killed(subprocess.Popen(run, stderr=subprocess.DEVNULL), output, 150 * 54 * 4)
    with output.open("r+b") as file:  # also inside a line, or a row
        file.truncate(output.stat().st_size - 7)
    began = output.read_bytes()
    ran = rooflax(*command, output)
    assert ran.code == 0 and "are embedded already" in ran.err
    assert rooflax(*command, whole).code == 0
    assert len(began) < output.stat().st_size and output.read_bytes().startswith(began[:-1500])
    if name.endswith(".npy"):
        found, wanted = np.load(output), np.load(whole)
    else:
        (ids, found), (_, wanted) = (vectors(path.read_text()) for path in (output, whole))
        assert ids == list(range(1, 601))
    assert found.shape == (600, 54)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)  # of a process with other flags


@pytest.mark.parametrize("name", ["vectors.jsonl", "vectors.npy"])
def test_other_vectors_are_kept_but_for_force(rooflax, folder, tmp_path, name):
    (tmp_path / "in.txt").write_text("a\nb")
    (tmp_path / "other.txt").write_text('{"id": "k", "text": "a"}\n"b"\n"c"')
    files = ("--output", tmp_path / name)
    assert rooflax("embed", folder, "--input", tmp_path / "in.txt", *files).code == 0
    before = (tmp_path / name).read_bytes()
    ran = rooflax("embed", folder, "--input", tmp_path / "other.txt", *files)
    assert ran.code == 2 and "replace it with --force" in ran.err
    assert (tmp_path / name).read_bytes() == before
    for cut in ("7", "53"):  # of the same texts, another size
        shorter = ("--input", tmp_path / "in.txt", *files, "--dimensions", cut)
        ran = rooflax("embed", folder, *shorter)
        assert ran.code == 2 and "replace it with --force" in ran.err and cut in ran.err
        assert (tmp_path / name).read_bytes() == before
    ran = rooflax("embed", folder, "--input", tmp_path / "other.txt", *files, "--force")
    assert ran.code == 0 and (tmp_path / name).read_bytes() != before
