"""The tokenizer equals transformers', and decoding piece by piece equals decoding at once."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as some

from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.loading.incremental import spelled_bytes
from rooflax.loading.tokenizer import IncrementalDecoder, Tokenizer

KINDS = ["gpt2", "gpt_oss", "llama2", "llama3", "qwen"]
TEXTS = [
    "Hello world",
    " two  spaces ",
    "",
    "naïve 日本語 😀 \n\n\t x",
    "a<|im_end|>b <s> c</s><|endoftext|>  d <tool_call>",
    "e\u0301",
]


def auto_tokenizer(folder):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("add", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_ids_equal_those_of_transformers(write_folder, tmp_path, kind, add):
    if kind == "qwen" and add.get("add_bos_token"):
        add = {"add_bos_token": True, "bos_token": "<|endoftext|>"}
    folder = write_folder(tmp_path, kind, **add)
    ours, theirs = Tokenizer(folder), auto_tokenizer(folder)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(
            text, add_special_tokens=False
        )
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_tokens == dict(theirs.special_tokens_map)
    assert ours.vocab_size == len(theirs)


@pytest.mark.filterwarnings("default")
def test_tokens_that_only_the_config_declares_are_added_as_transformers_does(
    write_folder, tmp_path
):
    extra = {"content": "<extra>", "special": True, "normalized": False}
    next_id = Tokenizer(write_folder(tmp_path, "gpt2")).vocab_size
    folder = write_folder(
        tmp_path, "gpt2", added_tokens_decoder={str(next_id): extra}, pad_token="<pad>"
    )
    ours, theirs = Tokenizer(folder), auto_tokenizer(folder)
    assert ours.encode("a<extra><pad>b") == theirs("a<extra><pad>b")["input_ids"]
    assert ours.token_to_id("<extra>") == next_id


@pytest.mark.parametrize("kind", KINDS)
def test_plain_encoding_holds_no_special_token(loaded, kind):
    tokenizer = loaded[kind]
    for special in tokenizer.special_token_strings - {"<s>", "</s>", "<unk>"}:
        text = f"a {special} b"
        assert tokenizer.token_to_id(special) in tokenizer.encode(text)
        ids = tokenizer.encode_plain(text)
        assert not set(ids) & tokenizer.special_token_ids
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", KINDS)
def test_plain_encoding_is_the_usual_one_without_special_strings(loaded, kind):
    for text in TEXTS[:4]:
        plain = loaded[kind].encode_plain(text)
        assert plain == loaded[kind].encode(text, add_special_tokens=False)


def test_ids_beyond_the_vocabulary_are_shown(loaded):
    tokenizer = loaded["gpt2"]
    ids = tokenizer.encode("hello")
    assert tokenizer.decode([*ids, 70000, *ids]) == "hello<70000>hello"
    assert tokenizer.decode([-1]) == "<-1>"
    assert tokenizer.decode([]) == ""


def ids_of(tokenizer):
    return some.lists(some.integers(0, tokenizer.vocab_size + 2), max_size=24)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_incremental_decoding_equals_full_decoding(loaded, kind, skip):
    tokenizer = loaded[kind]

    @settings(max_examples=150, deadline=None)
    @given(ids_of(tokenizer))
    def check(ids):
        decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
        pieces = [decoder.push(i) for i in ids]
        text = "".join(pieces) + decoder.flush()
        assert text == tokenizer.decode(ids, skip_special_tokens=skip)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_incremental_decoding_of_text_never_emits_half_a_character(loaded, kind):
    tokenizer = loaded[kind]
    text = "naïve 日本語 😀👩‍👩‍👧 \n  fox jumps  日"
    ids = tokenizer.encode(text)
    decoder = IncrementalDecoder(tokenizer)
    pieces = [decoder.push(i) for i in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + decoder.flush() == text


def test_invalid_bytes_come_out_before_the_end(loaded):
    tokenizer = loaded["gpt2"]
    lone = tokenizer.encode("é")[0]
    if tokenizer.decode([lone]) == "é":
        lone = tokenizer.token_to_id("Ã")
    decoder = IncrementalDecoder(tokenizer)
    text = decoder.push_many([lone] * 50)
    assert text == "\ufffd" * 49
    assert decoder.flush() == "\ufffd"


@pytest.mark.parametrize("kind", KINDS)
def test_text_after_a_prompt_keeps_its_leading_space(loaded, kind):
    tokenizer = loaded[kind]
    ids = tokenizer.encode("Hello world there")
    for cut in range(1, len(ids)):
        decoder = IncrementalDecoder(tokenizer, ids[:cut])
        text = decoder.push_many(ids[cut:]) + decoder.flush()
        assert tokenizer.decode(ids[:cut]) + text == "Hello world there"


def test_a_character_begun_in_the_prompt_is_finished(loaded):
    tokenizer = loaded["gpt2"]
    ids = tokenizer.encode("🦊")
    assert len(ids) > 1
    decoder = IncrementalDecoder(tokenizer, ids[:1])
    assert decoder.push_many(ids[1:]) == "🦊"


@pytest.mark.parametrize("kind", ["gpt2", "llama2"])
def test_incremental_decoding_costs_the_same_per_token(loaded, kind, monkeypatch):
    tokenizer = loaded[kind]
    seen = []
    decode = tokenizer.decode

    def watched(ids, **kwargs):
        seen.append(len(ids))
        return decode(ids, **kwargs)

    monkeypatch.setattr(tokenizer, "decode", watched)
    ids = tokenizer.encode("the quick brown fox jumps over the lazy dog " * 50)
    IncrementalDecoder(tokenizer).push_many(ids)
    assert max(seen, default=0) < 12


def test_vocab_and_merges_files(make_backend, tmp_path):
    tokenizer = make_backend("gpt2")
    tokenizer.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 1024}))
    ours = Tokenizer(tmp_path)
    for text in TEXTS[:4]:
        assert ours.encode(text) == tokenizer.encode(text).ids
        assert ours.decode(ours.encode(text)) == text


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("add_bos", [True, False])
def test_vocab_and_merges_files_equal_transformers(make_backend, tmp_path, add_bos):
    transformers = pytest.importorskip("transformers")
    make_backend("gpt2").model.save(str(tmp_path))
    vocab = json.loads((tmp_path / "vocab.json").read_text())
    vocab["<|endoftext|>"] = len(vocab)
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    config = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": add_bos}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer(tmp_path), transformers.GPT2Tokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)


def test_missing_and_malformed_files(write_folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"needs tokenizer.json, or vocab.json and merges"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        Tokenizer(tmp_path)
    write_folder(tmp_path, "gpt2")
    for text, reason in [("{", "not JSON"), ("[]", "not a JSON object")]:
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(CheckpointError, match=reason):
            Tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 3}')
    with pytest.raises(CheckpointError, match="chat_template"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"x": 1}}')
    with pytest.raises(CheckpointError, match="added_tokens_decoder"):
        Tokenizer(tmp_path)


def test_chat_templates_and_special_tokens_from_each_place(write_folder, tmp_path):
    folder = write_folder(tmp_path, "gpt2", chat_template="one")
    assert Tokenizer(folder).chat_template == "one"
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    write_folder(tmp_path, "gpt2", chat_template=named)
    assert Tokenizer(folder).chat_templates == {"default": "d", "tool_use": "t"}
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer(folder).chat_template == "file"
    (folder / "tokenizer_config.json").write_text("{}")
    legacy = {"eos_token": {"content": "<|endoftext|>"}}
    (folder / "special_tokens_map.json").write_text(json.dumps(legacy))
    assert Tokenizer(folder).special_tokens == {"eos_token": "<|endoftext|>"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_the_tokens_are_the_text(loaded, kind):
    spelled = spelled_bytes(loaded[kind])
    assert len(spelled) == loaded[kind].vocab_size
    before = b" " if kind == "llama2" else b""  # sentencepiece begins a text with a space
    for text in ("Hello world", "two  spaces ", "naïve 日本語 😀 \n\n\t x", "{}[]"):
        ids = loaded[kind].encode_plain(text)
        assert b"".join([spelled[i] for i in ids]) == before + text.encode()


def test_tokens_whose_bytes_are_not_known_are_refused(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}))
    for decoder, named in ((tokenizers.decoders.WordPiece(), "WordPiece"), (None, "nothing")):
        backend.decoder = decoder
        backend.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(UnsupportedModelError, match=f"made of {named}"):
            spelled_bytes(Tokenizer(tmp_path))
