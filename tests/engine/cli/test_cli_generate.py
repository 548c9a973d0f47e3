"""`rooflax generate`: text, streams, JSON, statistics."""

import json

import numpy as np
import pytest

from rooflax import LLM, SamplingParams
from rooflax.cli import statistics, terminal
from rooflax.models.presets import CHAT_NAME, EMBEDDED_NAME
from rooflax.ops import native
from tests import goldens

pytestmark = pytest.mark.oldest_jax

TINY = "preset:qwen2.5-tiny"
PROMPT = "def f(x):"


@pytest.fixture(scope="module")
def llm():
    return LLM(TINY)


def test_stdout_is_the_continuation_and_nothing_else(rooflax, llm):
    (wanted,) = llm.generate(PROMPT, SamplingParams(max_tokens=9, temperature=0))
    given = rooflax("generate", TINY, "-p", PROMPT, "-n", 9, "--temp", 0)
    piped = rooflax("generate", TINY, "-n", 9, "--temp", 0, stdin=f"{PROMPT}\n".encode())
    assert (given.code, given.out) == (piped.code, piped.out) == (0, f"{wanted.text}\n")


def test_json_has_exactly_the_contracts_keys(rooflax, llm):
    ran = rooflax("generate", TINY, "-p", PROMPT, "-n", 5, "--json")
    found = json.loads(ran.out)
    assert list(found) == [
        "model", "prompt_tokens", "tokens", "text", "finish_reason", "timings", "memory", "devices",
    ]  # fmt: skip
    assert list(found["timings"]) == [
        "load_s", "compile_s", "compilations", "ttft_s", "prefill_tok_per_s", "decode_tok_per_s",
    ]  # fmt: skip
    assert (found["model"], found["devices"], found["finish_reason"]) == (TINY, 1, "length")
    assert found["prompt_tokens"] == llm.encode(PROMPT)
    assert len(found["tokens"]) == 5
    weights = llm.model.weights_bytes
    memory = found["memory"]
    assert memory.pop("peak_rss_bytes") > weights
    assert memory.pop("kv_cache_bytes") > 0
    assert memory == {"weights_bytes": weights, "weights_bytes_per_device": weights}
    assert ran.err == ""


@pytest.mark.parametrize("model", [EMBEDDED_NAME, CHAT_NAME])
def test_a_text_that_ends_at_once_is_said(rooflax, model):
    ends = LLM(model).tokenizer.eos_id
    flags = ("generate", model, "-p", PROMPT, "-n", 4, "--temp", 0)
    ran = rooflax(*flags, "--logit-bias", f"{ends}=100")
    assert (ran.code, ran.out) == (0, "\n")
    assert ran.err.count("the text ended before its first character") == 1
    assert ("`rooflax chat` has the chat template" in ran.err) == (model == CHAT_NAME)
    assert "first character" not in rooflax(*flags).err
    said = LLM(model).generate([PROMPT], SamplingParams(max_tokens=1, temperature=0.0))[0].text
    assert said and "first character" not in rooflax(*flags, "--stop", said).err
    assert rooflax(*flags, "--logit-bias", f"{ends}=100", "--quiet").err == ""


def test_why_native_kernels_do_not_run_is_said_once(rooflax, monkeypatch):
    monkeypatch.setattr(native, "status", lambda: native.Status(False, "it was not built"))
    command = ("generate", TINY, "-p", PROMPT, "-n", 1)
    assert rooflax(*command).err.count("Slower than with native kernels: it was not built.\n") == 1
    assert "native kernels" not in rooflax(*command, "--quiet").err
    assert "native kernels" not in rooflax(*command, "--kernels", "xla").err


def test_a_mesh_splits_the_weights_and_keeps_the_tokens(rooflax):
    flags = ("generate", TINY, "-p", PROMPT, "-n", 4, "--temp", 0, "--json")
    one, two = (json.loads(rooflax(*flags, *m).out) for m in ((), ("--mesh", "tensor=2")))
    assert two["tokens"] == one["tokens"]
    assert two["devices"] == 2
    share = two["memory"]["weights_bytes_per_device"] / one["memory"]["weights_bytes"]
    assert 0.45 < share < 0.6


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ("4", "it must be AXIS=N"),
        ("tensor=x", "it must be AXIS=N"),
        ("rows=2", "of data, expert, sequence, stage, tensor"),
        ("tensor=0", "tensor must be at least 1"),
        ("tensor=2,tensor=2", "twice"),
        ("tensor=64", "needs 64 devices, here: 2"),
        ("data=4,tensor=2", "needs 8 = 4 x 2 devices, here: 2"),
        ("expert=2", "no experts"),
    ],
)
def test_wrong_meshes_are_rejected(rooflax, mesh, said):
    ran = rooflax("generate", TINY, "-p", "x", "--mesh", mesh)
    assert ran.code == 2
    assert said in ran.err


@pytest.mark.every_jax
def test_defaults_that_cannot_be_computed_are_rejected_before_weights_are_read(rooflax, tmp_path):
    folder = goldens.write_checkpoint(tmp_path / "m", "llama_gqa", goldens.committed("llama_gqa"))
    (folder / "generation_config.json").write_text('{"no_repeat_ngram_size": 3}')
    ran = rooflax("generate", folder, "-p", "x", "-n", 1)
    assert ran.code == 2 and "loading" not in ran.err
    assert "'no_repeat_ngram_size' = 3" in ran.err and "--generation-config none" in ran.err
    assert rooflax("generate", folder, "-p", "x", "-n", 1, "--generation-config", "none").code == 0


def test_beams_come_best_first_with_their_scores(rooflax, llm):
    flags = ("--num-beams", 3, "--length-penalty", 0.5, "--early-stopping", "true", "--samples", 2)
    ran = rooflax("generate", TINY, "-p", PROMPT, "-n", 6, *flags, "--json")
    given = SamplingParams(max_tokens=6, num_beams=3, n=2, length_penalty=0.5, early_stopping=True)
    wanted = llm.generate(PROMPT, given)
    samples = json.loads(ran.out)["samples"]
    assert [tuple(sample["tokens"]) for sample in samples] == [c.tokens for c in wanted]
    np.testing.assert_allclose([s["score"] for s in samples], [c.score for c in wanted], atol=1e-4)
    assert samples[0]["score"] > samples[1]["score"]
    rejected = rooflax("generate", TINY, "-p", PROMPT, *flags, "--temp", 0.5)
    assert rejected.code == 2 and "--temperature is 0.5 and --num-beams 3" in rejected.err


def test_samples_are_told_apart(rooflax):
    flags = ("generate", TINY, "-p", PROMPT, "-n", 4, "--samples", 3, "--seed", 1)
    ran = rooflax(*flags)
    assert [line for line in ran.out.splitlines() if line.startswith("--- ")] == [
        f"--- sample {i} of 3" for i in (1, 2, 3)
    ]
    samples = json.loads(rooflax(*flags, "--json").out)["samples"]
    assert len({tuple(sample["tokens"]) for sample in samples}) == 3
    assert "decode   12 tokens in 3 samples" in ran.err


SCHEMA = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'


def test_a_form_is_given_as_text_or_as_a_file(rooflax, tmp_path):
    base = ("generate", TINY, "-p", PROMPT, "-n", 40, "--quiet")
    (tmp_path / "schema.json").write_text(SCHEMA)
    (tmp_path / "rules.lark").write_text('start: "yes" | "no"')
    closed = SCHEMA[:-1] + ', "additionalProperties": false}'
    assert json.loads(rooflax(*base, "--json-schema", closed).out)["a"] in (1, 2)
    ran = rooflax(*base, "--json-schema", tmp_path / "schema.json", "--temp", 0)
    assert ran.code == 0 and ran.out == rooflax(*base, "--json-schema", SCHEMA, "--temp", 0).out
    for rules in (tmp_path / "rules.lark", 'start: "yes" | "no"'):
        assert rooflax(*base, "--grammar", rules).out in ("yes\n", "no\n")
    assert set(rooflax(*base, "--regex", "[ab]{5}").out) <= set("ab\n")


def test_logprobs_are_a_table_on_stderr(rooflax):
    ran = rooflax("generate", TINY, "-p", PROMPT, "-n", 3, "--temp", 0, "--logprobs", 2, "--quiet")
    head, *rows = ran.err.splitlines()
    assert head.split() == ["id", "token", "logprob", "likeliest"]
    assert len(rows) == 3


@pytest.mark.parametrize(
    ("stdin", "said"),
    [
        (b"", "The prompt is empty"),
        (b"\n", "The prompt is empty"),
        (b"def \xff", "stdin is not UTF-8 (byte 4: invalid start byte)"),
    ],
)
def test_what_cannot_be_a_prompt_is_rejected(rooflax, stdin, said):
    ran = rooflax("generate", TINY, stdin=stdin)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--temp", "nan"), "temperature is nan"),
        (("--top-p", "0"), "--top-p is 0.0"),
        (("--logit-bias", "5=1", "--logit-bias", "5=2"), "names a token id twice"),
        (("--logit-bias", "99999=1"), "99999"),
        (("--no-cache", "--decode-steps", "2"), "--decode-steps needs the cache"),
        (("-c", "3"), "context holds 3"),
        (("-c", "0"), "--max-model-len is 0"),
        (("--kernels", "pallas"), "linear has only reference, xla"),
        (("--layers", "folded"), "layers is 'folded'"),
        (("--dtype", "int4"), "dtype is 'int4'"),
        (("--platform", "abacus"), "--platform is 'abacus'"),
        (("-t", "0"), "0 is below 1"),
        (("-t", "999999"), "--threads is 999,999; on this machine it is at most "),
        (("--regex", "(a"), "regex cannot be used: unclosed group"),
        (("--json-schema", "none.json"), "--json-schema none.json cannot be read: No such file"),
        (("--json-schema", '{"a"'), "--json-schema is not JSON"),
        (("--grammar", "none.lark"), "--grammar none.lark cannot be read: No such file"),
        (("--grammar", "start: foo"), "unknown name"),
        (("--grammar", 'start: "a"', "--regex", "a"), "regex and grammar are given"),
    ],
)
def test_wrong_values_are_one_sentence(rooflax, flags, said):
    ran = rooflax("generate", TINY, "-p", PROMPT, "-n", "2", *flags)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert said in ran.err


def test_more_new_tokens_than_the_context_holds_are_rejected(rooflax):
    ran = rooflax("generate", TINY, "-p", PROMPT, "-n", 100_000, "-c", 64)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "--max-tokens is 100000 and the context of 64 has room for" in ran.err


def test_statistics_of_a_few_tokens_name_no_zero(rooflax):
    for tokens in (1, 3):
        ran = rooflax("generate", TINY, "-p", PROMPT, "-n", tokens, "--temp", 0)
        assert ran.code == 0, ran.err
    ran = rooflax("generate", TINY, "-p", PROMPT, "-n", 3, "--temp", 0)
    assert "decode   3 tokens, " in ran.err
    assert " 0.0 tok/s" not in ran.err and "(0 compilations)" not in ran.err


def test_statistics_fit_eighty_columns(llm):
    (completion,) = llm.generate(PROMPT, SamplingParams(max_tokens=2))
    used = {
        "peak_rss_bytes": 123 << 30,
        "weights_bytes_per_device": 110 << 30,
        "kv_cache_bytes": 10 << 30,
    }
    lines = statistics.lines([completion], used, 1)
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines] == ["load", "compile", "prefill", "decode", "memory"]


def test_u8_a_terminal_gets_no_control_characters():
    assert terminal.harmless("a\x1b[2Jb\tc\nd\r\x07\x9b") == "a?[2Jb\tc\nd???"


@pytest.mark.parametrize("flags", [(), ("--quiet",)])
@pytest.mark.parametrize("text", ["pass", "pass\n"])
def test_output_ends_with_a_line_break(rooflax, flags, text):
    base = ("generate", TINY, "-p", PROMPT, "-n", 9, "--temp", 0)
    ran = rooflax(*base, "--grammar", f"start: {json.dumps(text)}", *flags)
    assert (ran.code, ran.out) == (0, "pass\n")


def test_verbose_says_what_to_expect(rooflax, monkeypatch):
    monkeypatch.setattr("rooflax.bench.prediction.summary", lambda plan: f"{plan.info.name}: 7")
    for flags, said in ((["--verbose"], True), ([], False)):
        ran = rooflax("generate", "preset:gpt2-tiny", "-p", "a", "--max-tokens", 1, *flags)
        assert ("preset:gpt2-tiny: 7" in ran.err) is said
