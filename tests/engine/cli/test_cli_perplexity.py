"""`rooflax perplexity`: every token once, the numbers by hand."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from rooflax import LLM, RequestError
from rooflax.cli.perplexity import result, score_windows
from rooflax.cli.windows import windows

pytestmark = pytest.mark.oldest_jax

TINY = "preset:qwen2.5-tiny"
TEXT = "import os\n\n\ndef main(path):\n    return os.path.join(path, 'naïve')\n" * 4


@pytest.mark.parametrize(
    ("num_tokens", "length", "stride", "wanted"),
    [
        (10, 4, 2, [(0, 4, 1), (2, 6, 4), (4, 8, 6), (6, 10, 8)]),
        (10, 4, 3, [(0, 4, 1), (3, 7, 4), (6, 10, 7)]),
        (9, 4, 3, [(0, 4, 1), (3, 7, 4), (6, 9, 7)]),
        (3, 8, 4, [(0, 3, 1)]),
        (2, 2, 1, [(0, 2, 1)]),
        (1, 4, 2, []),
        (0, 4, 2, []),
    ],
)
def test_windows_by_hand(num_tokens, length, stride, wanted):
    assert windows(num_tokens, length, stride) == wanted


def test_every_token_but_the_first_is_scored_once_with_context():
    for num_tokens in range(2, 30):
        for length in range(2, 12):
            for stride in range(1, length):
                cut = windows(num_tokens, length, stride)
                scored = [t for w in cut for t in range(w.first, w.end)]
                assert scored == list(range(1, num_tokens))
                assert all(w.end - w.start <= length for w in cut)
                assert all(w.first - w.start >= length - stride for w in cut[1:])


@pytest.mark.parametrize(("length", "stride"), [(1, 1), (8, 0), (8, 8), (8, -1)])
def test_windows_that_cannot_be_are_rejected(length, stride):
    with pytest.raises(RequestError):
        windows(10, length, stride)


def test_the_sum_takes_each_log_probability_once():
    """A model whose log p of token t after any context is -t."""

    def score(prompts, continuations):
        for prompt, continuation in zip(prompts, continuations, strict=True):
            assert [*prompt, *continuation] == list(range(prompt[0], continuation[-1] + 1))
        return [-np.array(ids, np.float32) for ids in continuations]

    ids = list(range(50))
    for length, stride in ((50, 25), (7, 3), (4, 1)):
        done: list[int] = []
        cut = windows(50, length, stride)
        scores = score_windows(SimpleNamespace(score=score), ids, cut, done.append)
        assert -scores.sum() == sum(range(1, 50)) and sum(done) == len(cut)


def test_result_by_hand():
    found = result(8 * math.log(2), 4, 16)
    assert found["perplexity"] == pytest.approx(4.0)
    assert found["bits_per_byte"] == pytest.approx(0.5)
    with pytest.raises(RequestError, match="--check"):
        result(math.nan, 4, 16)


def test_one_window_equals_score(rooflax, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    found = json.loads(rooflax("perplexity", TINY, "-f", tmp_path / "text.txt", "--json").out)
    (scores,) = LLM(TINY).score(TEXT)
    assert found["tokens"] == len(scores)
    assert found["perplexity"] == pytest.approx(math.exp(-scores.mean()), rel=1e-5)
    bits = -scores.sum() / math.log(2) / len(TEXT.encode())
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    piped = rooflax("perplexity", TINY, stdin=TEXT.encode()).out
    assert f"perplexity     {found['perplexity']:.4f}\n" in piped


@pytest.mark.parametrize(
    ("stdin", "flags", "said"),
    [
        (b"", (), "stdin is empty"),
        (b"x", (), "scoring needs at least 2"),
        (b"ab\xff", (), "stdin is not UTF-8"),
        (b"", ("-f", "nowhere.txt"), "cannot read nowhere.txt: No such file"),
        (b"a b c d", ("-c", "8", "--stride", "8"), "must be 1 to 7"),
        (b"a b c d", ("--no-cache",), "unknown: --no-cache"),
    ],
)
def test_wrong_texts_and_flags_are_rejected(rooflax, stdin, flags, said):
    ran = rooflax("perplexity", TINY, *flags, stdin=stdin)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert said in ran.err
