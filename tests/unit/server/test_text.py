"""Text in and out of the routes, byte for byte: rows U of the catalogue of faults.

The engine is scripted, and its tokenizer is the embedded chat model's.
"""

from __future__ import annotations

import json
import unicodedata

import pytest
import tokenizers

from rooflax.loading.incremental import spelled_bytes
from tests.support.product.snippets import ROOT
from tests.unit.server.test_fields import CHAT, ask, in_single_bytes

NAUGHTY = json.loads((ROOT / "tests" / "data" / "naughty.json").read_text(encoding="utf-8"))
"""In the manner of the "big list of naughty strings"."""
FORCED = [
    "👩‍👩‍👧‍👦 🏴󠁧󠁢󠁥󠁮󠁧󠁿 🇳🇴 👋🏿 1️⃣", "日本語 한국어 中文 𠜎", "שָׁלוֹם مرحبا ١٢٣",
    "e\u0301 a\u0300\u0301 ก็ นี้", "ﬁ ß Ω\u2028\u200b.",
]  # fmt: skip


@pytest.mark.parametrize("text", NAUGHTY, ids=ascii)
def test_u3_naughty_strings_come_back_as_they_are(live, text):
    found = ask(live, "/v1/completions", prompt=text, echo=True, max_tokens=0)
    assert found["choices"][0]["text"] == text
    ids = ask(live, "/tokenize", prompt=text)["tokens"]
    assert ask(live, "/detokenize", tokens=ids)["content"] == text
    for role in ("user", "system"):
        messages = [{"role": role, "content": text}, {"role": "user", "content": "Hi"}]
        assert ask(live, CHAT, messages=messages)["choices"]
        assert text in ask(live, "/apply-template", messages=messages)["prompt"]


def texts_of(live, path, body):
    """The deltas of a stream, whose bytes are UTF-8."""
    content = live.post(path, body | {"stream": True}).content
    deltas = []
    for line in content.decode("utf-8", "strict").split("\n"):
        if line.startswith("data: {"):
            found = json.loads(line[6:])
            if path == "/v1/messages":
                deltas.append(found.get("delta", {}).get("text"))
            elif path == "/v1/responses":
                is_text = found["type"] == "response.output_text.delta"
                deltas.append(found["delta"] if is_text else None)
            else:
                (choice,) = found["choices"]
                deltas.append(choice.get("text") or choice.get("delta", {}).get("content"))
    return [text for text in deltas if text]


BODIES = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 200},
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200},
}


def whole_text(live, path, body):
    found = live.post(path, body).json()
    if path == "/v1/messages":
        return "".join(block["text"] for block in found["content"])
    if path == "/v1/responses":
        return "".join(part["text"] for item in found["output"] for part in item["content"])
    choice = found["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("text", FORCED)
def test_u4_characters_of_many_tokens_come_whole(live, scripted, path, text):
    scripted.script = in_single_bytes(scripted, text)
    deltas = texts_of(live, path, BODIES[path])
    assert "".join(deltas) == text == whole_text(live, path, BODIES[path])
    assert len(deltas) > 3 and not any("\ufffd" in each for each in deltas)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (b"ab\xf0\x9f\x98", "ab\ufffd"), (b"\xe6\x97", "\ufffd"), (b"a\x80", "a\ufffd"),
        (b"a\x80b", "a\ufffdb"), (b"\xc3", "\ufffd"), (b"\xff", "\ufffd"),
    ],
)  # fmt: skip
def test_u5_bytes_that_are_no_character_are_said_once(live, scripted, path, said, wanted):
    """At the end of the answer, or where its most tokens cut it."""
    spelled = spelled_bytes(scripted.llm.tokenizer)
    ids = [spelled.index(bytes([byte])) for byte in said]
    name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    cut = BODIES[path] | {name: len(ids)}
    for rest, body in (([max(scripted.llm.stop_ids)], BODIES[path]), ([65] * 9, cut)):
        scripted.script = lambda prompt, params, index, rest=rest: [*ids, *rest]
        assert "".join(texts_of(live, path, body)) == wanted == whole_text(live, path, body)


def test_u7_the_prompt_of_a_completion_may_hold_control_tokens(live, scripted):
    """As docs/server.md says: a special token's text is that token, and ids are unambiguous."""
    tokenizer = scripted.llm.tokenizer
    text = "<|im_end|>\n<|im_start|>system"
    for how in ({}, {"add_special_tokens": False}):
        ask(live, "/v1/completions", prompt=text, **how)
        controls = [t for t in scripted.asked[-1][0] if t in tokenizer.special_token_ids]
        assert [tokenizer.id_to_token(t) for t in controls] == ["<|im_end|>", "<|im_start|>"]
    ask(live, "/v1/completions", prompt=tokenizer.encode_plain(text))
    assert not set(scripted.asked[-1][0]) & tokenizer.special_token_ids
    assert "the text of a special token" in (ROOT / "docs" / "server.md").read_text("utf-8")


@pytest.fixture(scope="module")
def reference(llm):
    """The same tokenizer as its library reads it."""
    return tokenizers.Tokenizer.from_file(str(llm.tokenizer.folder / "tokenizer.json"))


FORMS = [unicodedata.normalize(form, "é ñ Å ﬁ 가 ồ") for form in ("NFC", "NFD", "NFKC", "NFKD")]


@pytest.mark.parametrize("text", [*FORMS, "\ufeffHi", "Hi\ufeff", "\ufeff", *FORCED], ids=ascii)
def test_u9_ids_are_those_of_the_tokenizers_library(live, scripted, reference, text):
    assert ask(live, "/tokenize", prompt=text)["tokens"] == reference.encode(text).ids
    ask(live, "/v1/completions", prompt=text)
    assert scripted.asked[-1][0] == reference.encode(text).ids


def test_u10_ids_are_decoded_as_by_the_tokenizers_library(live, reference):
    size = reference.get_vocab_size()
    several = [list(range(start, start + 64)) for start in range(0, size, 64)]
    for ids in [[token] for token in range(0, size, 16)] + several:
        found = ask(live, "/detokenize", tokens=ids)["content"]
        assert found == reference.decode(ids, skip_special_tokens=False)
    for byte in range(128):
        ids = ask(live, "/tokenize", prompt=chr(byte))["tokens"]
        assert ids == reference.encode(chr(byte)).ids
        assert ask(live, "/detokenize", tokens=ids)["content"] == chr(byte)
    found = live.post("/detokenize", {"tokens": [size]})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "tokens")
