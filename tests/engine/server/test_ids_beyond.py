"""A tokenizer with more ids than the embedding has rows, as Gemma 3's and Code Llama's have."""

import json
import math

import pytest
import tokenizers

from rooflax import LLM, SamplingParams
from rooflax.cli.main import main
from rooflax.errors import RequestError
from tests import goldens
from tests.support.server.live import ScriptedLLM, serving

pytestmark = pytest.mark.oldest_jax

ROWS = goldens.VOCAB
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("beyond") / "m"
    folder = goldens.write_checkpoint(root, "llama_gqa", goldens.committed("llama_gqa"))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image>", "<audio>"])
    tokenizer.add_tokens(["word"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|end|>"})
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [ROWS, 10**6]}))
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder)


@pytest.fixture(scope="module")
def server(llm):
    with serving(lambda _: ScriptedLLM(llm, lambda *_: [65, 66])) as server:
        yield server


@pytest.mark.parametrize("prompt", ["a <image> b", [1, ROWS], "word", [ROWS + 2], [1, 10**6]])
def test_a_prompt_with_such_an_id_is_rejected(llm, prompt):
    assert llm.tokenizer.vocab_size == ROWS + 3
    said = rf"holds the token id \d+; this model knows 0 to {ROWS - 1}\."
    with pytest.raises(RequestError, match=said):
        llm.generate([prompt], max_tokens=1)
    ids = llm.encode(prompt) if isinstance(prompt, str) else prompt
    with pytest.raises(RequestError, match=said):
        llm.logits(ids)


def test_such_ids_are_never_sampled_and_end_nothing(llm):
    assert llm.stop_ids == {llm.tokenizer.token_to_id("<|end|>")}
    params = SamplingParams(max_tokens=40, temperature=1e5, logprobs=20, seed=3, ignore_eos=True)
    found = llm.generate(["ab", "the"], params)
    for one in found:
        assert len(one.tokens) == 40 and max(one.tokens) < ROWS
        assert all(token < ROWS for step in one.logprobs for token, _ in step.top)
    for named in ({"logit_bias": {ROWS: 90.0}}, {"allowed_token_ids": [ROWS + 1]}):
        with pytest.raises(RequestError, match=f"knows 0 to {ROWS - 1}"):
            llm.generate("ab", max_tokens=1, **named)
    form = llm.generate("ab", max_tokens=9, regex="(word|<image>)!")[0]
    assert form.text in ("word!", "<image>!") and max(form.tokens) < ROWS


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a <image>"}),
        ("/v1/completions", {"prompt": [1, ROWS + 1]}),
        ("/v1/completions", {"prompt": [[1], [ROWS + 1]]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one word"}]}),
        ("/v1/responses", {"input": "one word"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a word"}], "max_tokens": 3}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_server_rejects_such_prompts(server, path, body, stream):
    answer = server.post(path, body | {"stream": stream})
    assert answer.status_code == 400
    assert f"this model knows 0 to {ROWS - 1}" in answer.json()["error"]["message"]


def test_the_server_names_such_tokens_and_a_users_text_is_no_special_one(server):
    found = server.post("/tokenize", {"prompt": "<audio>"}).json()
    assert found["tokens"] == [ROWS + 1]
    assert server.post("/detokenize", {"tokens": [ROWS + 1]}).json()["prompt"] == "<audio>"
    spelt = [{"role": "user", "content": "<image>"}]  # a special token cannot be forged
    assert server.post("/v1/chat/completions", {"messages": spelt}).status_code == 200


def test_every_verb_opens_it(folder, tmp_path, capsys):
    assert main(["inspect", str(folder)]) == 0
    assert main(["generate", str(folder), "-p", "the", "-n", "2"]) == 0
    capsys.readouterr()
    assert main(["generate", str(folder), "-p", "a <image>", "-n", "2"]) == 2
    assert f"knows 0 to {ROWS - 1}" in capsys.readouterr().err
    (tmp_path / "DOCS").mkdir()
    for name in "ab":
        (tmp_path / "DOCS" / f"{name}.txt").write_text("the one and the other " * 20)
    train = ["train", str(folder), "--steps", "1", "--batch", "2", "--seq-len", "16"]
    assert main([*train, "--out", str(tmp_path / "run"), "--data", str(tmp_path / "DOCS")]) == 0
    again = LLM(tmp_path / "run" / "model")
    assert again.tokenizer.vocab_size == ROWS + 3
    assert math.isfinite(again.logits([1, 2]).sum())
