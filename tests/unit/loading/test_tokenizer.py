"""The tokenizer equals transformers', and decoding piece by piece equals decoding at once."""

import json
import random
import shutil

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as some

from rooflax.errors import CheckpointError, RequestError, UnsupportedModelError
from rooflax.loading.generation_config import read_generation_defaults
from rooflax.loading.gguf_tokenizer import PRE_TOKENIZERS
from rooflax.loading.incremental import IncrementalDecoder, spelled_bytes
from rooflax.loading.model_info import embedded_folder
from rooflax.loading.tokenizer import Tokenizer
from tests import goldens, tokenizer_cases

KINDS = ["gpt2", "gpt_oss", "llama2", "llama3", "qwen"]
TEXTS = [
    "Hello world",
    " two  spaces ",
    "",
    "naïve 日本語 😀 \n\n\t x",
    "a<|im_end|>b <s> c</s><|endoftext|>  d <tool_call>",
    "e\u0301",
    "\ufeffé \ufeffe\u0301 ﬁ 가 \u1112\u1161\u11ab",
]


def auto_tokenizer(folder):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(folder)


def cuts_of_the_vocabulary(size):
    """Every id alone, and random ones together."""
    state = random.Random(0)
    several = [[state.randrange(size) for _ in range(40)] for _ in range(50)]
    return [[token] for token in range(size)] + several


@pytest.mark.parametrize("kind", KINDS)
def test_u10_single_bytes_and_all_ids_go_there_and_back(loaded, kind):
    tokenizer, backend = loaded[kind], loaded[kind].backend
    for text in [*map(chr, range(256)), *TEXTS]:
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text).ids
        assert tokenizer.decode(ids) == backend.decode(ids)
        if kind not in ("llama2", "qwen"):  # a space at the beginning; composed characters
            assert tokenizer.decode(tokenizer.encode_plain(text)) == text
    for ids in cuts_of_the_vocabulary(tokenizer.vocab_size):
        assert tokenizer.decode(ids) == backend.decode(ids)


EVERY_KIND = (*tokenizer_cases.BYTE_LEVEL, *tokenizer_cases.SENTENCEPIECE)
WRITTEN = (
    *TEXTS,
    *tokenizer_cases.TEXTS,
    "0 12 345 6789 01234567 3.14 ١٢٣ Ⅷ ½",
    "漢字かなカナ한국어 中文。「日本語」",
    "😀👩‍👩‍👧🇩🇪👍🏽",
    "e\u0301 n\u0303o \u0915\u094d\u0937\u093f \u1112\u1161\u11ab a\u0308\u0323",
    " a", "a ", "   a   ", " ", "\t", "\n", "\r\n\t x\t\ty \n \n\n  z\n",
    "<|begin|><|endoftext|>", "a <|im_end|> b<|observation|>[gMASK]c <|user|>\n<s></s>",
)  # fmt: skip


def test_every_way_to_cut_text_is_among_the_kinds():
    assert {PRE_TOKENIZERS[name] for name in tokenizer_cases.BYTE_LEVEL} == {
        *PRE_TOKENIZERS.values()
    }


KIMI_TEXTS = {
    "漢字abc中文Def": ["漢字", "abc", "中文", "Def"],
    "Hello's 12345 日本": ["Hello's", " ", "123", "45", " ", "日本"],
    "a中b かな漢": ["a", "中", "b", " かな", "漢"],
    "  x\n\n 汉!?\n": [" ", " x", "\n\n", " ", "汉", "!?\n"],
}
"""Pieces by the pattern of tokenization_kimi.py: Chinese characters are in no word."""


@pytest.mark.parametrize("text", KIMI_TEXTS)
def test_kimis_pieces_are_those_of_its_pattern(text):
    regex = pytest.importorskip("regex")
    pattern = regex.compile(f"(?V1){tokenizer_cases.KIMI}")
    assert [match[0] for match in pattern.finditer(text)] == KIMI_TEXTS[text]
    backend = tokenizer_cases.byte_level("kimi-k2")
    cut = backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in cut] == KIMI_TEXTS[text]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_ids_text_and_ends_of_every_kind_equal_transformers(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer_cases.write(tmp_path, kind)
    ours, theirs = Tokenizer(tmp_path), auto_tokenizer(tmp_path)
    cleaned = {"clean_up_tokenization_spaces": False}
    for text in WRITTEN:
        ids, bare = ours.encode(text), ours.encode(text, add_special_tokens=False)
        assert ids == theirs(text)["input_ids"], text
        assert bare == theirs.encode(text, add_special_tokens=False), text
        for skip in (True, False):
            how = {"skip_special_tokens": skip}
            assert ours.decode(ids, **how) == theirs.decode(ids, **how, **cleaned), text
            assert ours.decode(bare, **how) == theirs.decode(bare, **how, **cleaned), text
        adds_bos = kind in tokenizer_cases.SENTENCEPIECE or tokenizer_cases.BYTE_LEVEL[kind][-1]
        assert ids == [ours.bos_id] * adds_bos + bare, text
        assert bare.count(ours.bos_id) == text.count(theirs.bos_token), text
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    ends = transformers.GenerationConfig.from_pretrained(tmp_path).eos_token_id
    assert [*read_generation_defaults(tmp_path).eos_token_ids] == ends and len(ends) == 2


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("add", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_u9_u10_ids_equal_those_of_transformers(write_folder, tmp_path, kind, add):
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
    for ids in cuts_of_the_vocabulary(ours.vocab_size):
        assert ours.decode(ids) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_tokens == dict(theirs.special_tokens_map)
    assert ours.vocab_size == len(theirs)


WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "cafe",
    "Cafe",
    "un",
    "##able",
    "##s",
    "!",
    "中",
]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "config", [{}, {"do_lower_case": False}, {"do_lower_case": False, "strip_accents": True}]
)
def test_a_vocab_txt_gives_berts_ids(tmp_path, config):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    stated = {"tokenizer_class": "BertTokenizer"} | config
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(stated))
    ours = Tokenizer(tmp_path)
    assert ours.encode("unables!中") == [2, 8, 9, 10, 11, 12, 3]
    assert ours.encode("[CLS] xyz [MASK]", add_special_tokens=False) == [2, 1, 4]
    cafe = 6 if not config else 7 if config.get("strip_accents") else 1
    assert ours.encode("The Café")[2] == cafe
    if goldens.HAVE_TORCH:
        theirs = auto_tokenizer(tmp_path)
        for text in ("The Café unables!", "中the [SEP] x", "\x00 un\tthe"):
            assert ours.encode(text) == theirs(text)["input_ids"], text
    (tmp_path / "vocab.txt").write_text("the\n[UNK]\n[CLS]\n")
    with pytest.raises(CheckpointError, match=r"lacks the token '\[SEP\]'"):
        Tokenizer(tmp_path)


@pytest.mark.filterwarnings("default")
def test_tokens_that_only_the_config_declares_are_added_as_transformers_does(
    write_folder, tmp_path
):
    extra = {"content": "<extra>", "special": True, "normalized": False}
    next_id = Tokenizer(write_folder(tmp_path, "gpt2")).vocab_size
    folder = write_folder(
        tmp_path, "gpt2", added_tokens_decoder={str(next_id): extra}, sep_token="<sep>"
    )
    ours, theirs = Tokenizer(folder), auto_tokenizer(folder)
    assert ours.encode("a<extra><sep>b") == theirs("a<extra><sep>b")["input_ids"]
    assert ours.token_to_id("<extra>") == next_id


NO_ROLE = {"__type": "AddedToken", "content": "<img>", "lstrip": True, "special": True}
DECLARED = {
    "extra": ({"extra_special_tokens": ["<img>", "<dom>"]}, {}, {}),
    "extra by name": ({"extra_special_tokens": {"image_token": "<img>", "x": "<dom>"}}, {}, {}),
    "additional": ({"additional_special_tokens": ["<img>", "<dom>"]}, {}, {}),
    "objects": ({"additional_special_tokens": [NO_ROLE, "<dom>"]}, {}, {}),
    "a role of its own": ({"image_token": "<img>", "pad_token": "<dom>"}, {}, {}),
    "padding": ({"pad_token": "<dom>", "extra_special_tokens": ["<img>"]}, {}, {}),
    "with ids": (
        {"added_tokens_decoder": {"9000": {"content": "<dom>"}, "500": {"content": "<img>"}}},
        {"additional_special_tokens": ["<no>"]}, {"<no>": 1},
    ),
    "with ids and extra": (
        {"added_tokens_decoder": {"9000": {"content": "<dom>"}},
         "extra_special_tokens": ["<img>", "<dom>"]}, {}, {},
    ),
    "map": ({}, {"additional_special_tokens": ["<img>", "<dom>"]}, {}),
    "map with objects": (
        {}, {"eos_token": {"content": "<img>"}, "extra_special_tokens": ["<dom>"]}, {},
    ),
    "both": (
        {"extra_special_tokens": ["<img>"]}, {"extra_special_tokens": ["<dom>", "<img>"]}, {},
    ),
    "added": ({}, {}, {"<img>": 9001, "<dom>": 9000}),
    "added and special": (
        {"extra_special_tokens": ["<img>"]}, {}, {"<dom>": 9000, "<img>": 9001, "word": 9002},
    ),
    "in the vocabulary": ({"extra_special_tokens": ["the", "<dom>"]}, {}, {"is": 9}),
}  # fmt: skip


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["gpt2", "llama2"])
@pytest.mark.parametrize("case", DECLARED)
def test_tokens_declared_beside_tokenizer_json_have_transformers_ids(
    write_folder, tmp_path, kind, case
):
    config, legacy, added = DECLARED[case]
    folder = write_folder(tmp_path, kind, **config)
    for name, found in (("special_tokens_map.json", legacy), ("added_tokens.json", added)):
        if found:
            (folder / name).write_text(json.dumps(found))
    ours, theirs = Tokenizer(folder), auto_tokenizer(folder)
    for text in ("<dom>", "a <img> <dom>b<dom>", "the wordis <img>", "<no><img", "plain"):
        assert ours.encode(text) == theirs(text)["input_ids"], text
        assert ours.decode(ours.encode(text)) == theirs.decode(
            theirs(text)["input_ids"], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    wanted = {"<img>", "<dom>"} & set(theirs.get_vocab())
    assert all(len(ours.encode(text, add_special_tokens=False)) == 1 for text in wanted)
    again = tmp_path / "again"
    again.mkdir()
    for name, data in ours.files().items():
        (again / name).write_bytes(data)
    assert Tokenizer(again).encode("a<img><dom>") == ours.encode("a<img><dom>")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("added_tokens.json", {"<x>": -1}, "must map tokens to ids"),
        ("added_tokens.json", {"<x>": "1"}, "must map tokens to ids"),
        ("added_tokens.json", [], "not a JSON object"),
        ("special_tokens_map.json", {"additional_special_tokens": [5]}, "are no tokens"),
        ("special_tokens_map.json", {"extra_special_tokens": {"a": None}}, "are no tokens"),
        ("special_tokens_map.json", {"additional_special_tokens": 7}, "are no tokens"),
    ],
)
def test_declarations_of_another_form_are_rejected(write_folder, tmp_path, name, value, said):
    folder = write_folder(tmp_path, "gpt2")
    (folder / name).write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match=said):
        Tokenizer(folder)


DOUBLES = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BOMBS = {
    "doubling": {"normalizer": {"type": "Sequence", "normalizers": [DOUBLES] * 20}},
    "doubling while an added token is read": {
        "normalizer": {"type": "Sequence", "normalizers": [DOUBLES] * 60},
        "added_tokens": [
            {"id": 0, "content": "a", "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": True, "special": False},
        ],
    },
    "one long replacement": {"normalizer": DOUBLES | {"content": "a" * 1000}},
    "a replacement of nothing": {
        "normalizer": DOUBLES | {"pattern": {"Regex": ""}, "content": "a" * 99}
    },
    "a long beginning": {"normalizer": {"type": "Prepend", "prepend": "a" * 1000}},
    "nested": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Sequence", "normalizers": [DOUBLES] * 4}] * 5,
        }
    },
    "bytes of bytes": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                 "use_regex": False}
            ] * 20,
        }
    },
    "many steps": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 1000}},
    "decoders": {"decoder": {"type": "Sequence", "decoders": [DOUBLES] * 20}},
    "around a text": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "a", "type_id": 0}}] * 40
            + [{"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
            "special_tokens": {"a": {"id": "a", "ids": [0] * 1000, "tokens": ["a"] * 1000}},
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("escaped", [False, True])
@pytest.mark.parametrize("case", BOMBS)
def test_tokenizers_that_make_much_of_little_are_rejected(write_folder, tmp_path, case, escaped):
    path = write_folder(tmp_path, "gpt2") / "tokenizer.json"
    text = json.dumps(json.loads(path.read_text()) | BOMBS[case])
    path.write_text(text.replace('"normalizer"', '"normalize\\u0072"') if escaped else text)
    with pytest.raises(
        CheckpointError, match=r"too long: it may have 64 steps, make a text 64 times"
    ):
        Tokenizer(tmp_path)


def test_a_normalizer_named_twice_is_found(write_folder, tmp_path):
    path = write_folder(tmp_path, "gpt2") / "tokenizer.json"
    bomb = json.dumps(BOMBS["doubling while an added token is read"]["normalizer"])
    text = path.read_text().replace('"normalizer":', f'"normalizer": {bomb}, "normalizer":', 1)
    path.write_text(text)
    with pytest.raises(CheckpointError, match="too long|duplicate"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("prefix", ["x", "##", "\u00e9"])
def test_merges_without_the_prefix_of_continued_words_are_rejected(write_folder, tmp_path, prefix):
    path = write_folder(tmp_path, "gpt2") / "tokenizer.json"
    state = json.loads(path.read_text())
    state["model"]["continuing_subword_prefix"] = prefix
    path.write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="does not fit it"):  # the library would abort
        Tokenizer(tmp_path)


def test_a_prefix_of_continued_words_is_read(write_folder, tmp_path):
    path = write_folder(tmp_path, "gpt2") / "tokenizer.json"
    state = json.loads(path.read_text())
    vocab = {text: n for n, text in enumerate(["a", "##b", "##c", "ab", "##bc"])}
    merges = [["a", "##b"], ["##b", "##c"]]
    state |= {"added_tokens": [], "post_processor": None, "decoder": None, "pre_tokenizer": None}
    state["model"] |= {"continuing_subword_prefix": "##", "vocab": vocab, "merges": merges}
    path.write_text(json.dumps(state))
    assert tokenizers.Tokenizer.from_file(str(path)).encode("ab").ids == [3]
    assert Tokenizer(tmp_path).encode("ab") == [3]


def test_a_panic_of_the_library_is_an_error(write_folder, tmp_path):
    path = write_folder(tmp_path, "gpt2") / "tokenizer.json"
    state = json.loads(path.read_text())
    state["pre_tokenizer"] = {
        "type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip
    path.write_text(json.dumps(state))
    tokenizer = Tokenizer(tmp_path)
    for encode in (tokenizer.encode, tokenizer.encode_plain):
        with pytest.raises(CheckpointError, match="cannot encode this text: ") as caught:
            encode("x" * 5000)
        assert "\n" not in str(caught.value)
    assert tokenizer.encode("hello")


def test_a_lone_surrogate_is_the_callers_mistake(loaded):
    for encode in (loaded["gpt2"].encode, loaded["gpt2"].encode_plain):
        with pytest.raises(RequestError, match=r"lone surrogate, U\+D800 at character 2; it must"):
            encode("ab\ud800")


@pytest.mark.parametrize(
    "declared",
    [{"9" * 5000: {"content": "x"}}, {"-1": {"content": "x"}}, {"٣": {"content": "x"}},
     {"": {"content": "x"}}, {"99999999999": {"content": "x"}}, {"7": "x"}, [1]],
)  # fmt: skip
def test_added_tokens_with_odd_ids(write_folder, tmp_path, declared):
    with pytest.raises(CheckpointError, match="added_tokens_decoder") as caught:
        Tokenizer(write_folder(tmp_path, "gpt2", added_tokens_decoder=declared))
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["bos_token", "pad_token"])
def test_special_tokens_that_are_no_text(write_folder, tmp_path, name):
    with pytest.raises(CheckpointError, match="does not hold together"):
        Tokenizer(write_folder(tmp_path, "gpt2", **{name: "\ud800"}))


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
    text = "".join(map(decoder.push, [lone] * 50))
    assert text == "\ufffd" * 49
    assert decoder.flush() == "\ufffd"


@pytest.mark.parametrize("kind", KINDS)
def test_text_after_a_prompt_keeps_its_leading_space(loaded, kind):
    tokenizer = loaded[kind]
    ids = tokenizer.encode("Hello world there")
    for cut in range(1, len(ids)):
        decoder = IncrementalDecoder(tokenizer, ids[:cut])
        text = "".join(map(decoder.push, ids[cut:])) + decoder.flush()
        assert tokenizer.decode(ids[:cut]) + text == "Hello world there"


def test_a_character_begun_in_the_prompt_is_finished(loaded):
    tokenizer = loaded["gpt2"]
    ids = tokenizer.encode("🦊")
    assert len(ids) > 1
    decoder = IncrementalDecoder(tokenizer, ids[:1])
    assert "".join(map(decoder.push, ids[1:])) == "🦊"


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
    "".join(map(IncrementalDecoder(tokenizer).push, ids))
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


def test_tokens_whose_bytes_are_not_known_are_rejected(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}))
    for decoder, named in ((tokenizers.decoders.WordPiece(), "WordPiece"), (None, "nothing")):
        backend.decoder = decoder
        backend.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(UnsupportedModelError, match=f"made of {named}"):
            spelled_bytes(Tokenizer(tmp_path))


def test_dropout_of_training_is_off(tmp_path):
    source = embedded_folder()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, tmp_path)
    path = tmp_path / "tokenizer.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document["model"]["dropout"] = 0.5
    path.write_text(json.dumps(document), encoding="utf-8")
    tokenizer = Tokenizer(tmp_path)
    text = "def fibonacci(n):\n    return n\n"
    wanted = Tokenizer(source).encode(text)
    assert [tokenizer.encode(text) for _ in range(5)] == [wanted] * 5
