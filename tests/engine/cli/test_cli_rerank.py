"""`rooflax rerank`: the best first, and what it rejects."""

import json

import pytest

from rooflax import LLM
from tests import encoder_cases as encoders
from tests.encoder_cases import TEXTS

pytestmark = pytest.mark.oldest_jax


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return encoders.write(tmp_path_factory.mktemp("rerank") / "model", "bert", scores=True)


def test_the_best_come_first(rooflax, folder, tmp_path):
    wanted = sorted(zip(LLM(folder).rerank("what", TEXTS), TEXTS, strict=True), reverse=True)
    documents = [flag for text in TEXTS for flag in ("-d", text)]
    ran = rooflax("rerank", folder, "--query", "what", *documents, "--quiet")
    lines = [json.loads(line) for line in ran.out.splitlines()]
    assert (ran.code, ran.err) == (0, "") and [line["text"] for line in lines] == [
        text for _, text in wanted
    ]
    assert [line["score"] for line in lines] == pytest.approx([s for s, _ in wanted], abs=1e-6)
    for name in ("k", "\ud800"):  # the second is no Unicode text
        (tmp_path / "in.jsonl").write_text(json.dumps({"id": name, "text": TEXTS[0]}))
        ran = rooflax("rerank", folder, "--query", "what", "--input", tmp_path / "in.jsonl")
        assert json.loads(ran.out)["id"] == name
    ran = rooflax("rerank", folder, "--query", "what", *documents, "--top-n", "1")
    assert len(ran.out.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "either as --document or as --input"),
        (("-d", "x", "--input", "-"), "either as --document or as --input"),
        (("-d", "x", "--instruction", "strict"), "without an --instruction"),
        (("-d", "x" * 500), "the model takes"),
    ],
)
def test_what_cannot_be_scored_is_rejected(rooflax, folder, flags, said):
    ran = rooflax("rerank", folder, "--query", "what", *flags)
    assert (ran.code, ran.out) == (2, "") and said in ran.err


def test_longer_texts_are_cut_on_demand(rooflax, folder):
    ran = rooflax("rerank", folder, "--query", "what", "-d", "x" * 500, "--truncate")
    assert ran.code == 0 and len(json.loads(ran.out)["text"]) == 500
