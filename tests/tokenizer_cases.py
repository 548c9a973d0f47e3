"""Tiny tokenizers of the kinds that families have, as their tokenizer.json files are built.

Patterns are those of the published files named beside them, as llama.cpp's src/llama-vocab.cpp
quotes them.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.support.loading.fixtures import TEXT

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+"
    r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = GPT4O.replace(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace(r"\p{N}{1,3}", r"\p{N}")
KIMI = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_HUNYUAN_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
_HUNYUAN = (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _HUNYUAN_WORDS)

_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-"
    "ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-"  # noqa: RUF001
    "ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"  # noqa: RUF001
)
DIGITS = "single digits"
_DEEPSEEK_LLM = (
    "[\r\n]", rf"\s?[{_CASED_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",  # noqa: RUF001
    r"\s+$", "[一-龥ࠀ-一가-퟿]+", DIGITS,
)  # fmt: skip

# llama.cpp's name: (patterns, digits apart, composed, pieces that are tokens whole, adds BOS)
BYTE_LEVEL = {
    "gpt-2": ((), False, False, False, False),
    "llama-bpe": ((LLAMA3,), False, False, True, True),
    "dbrx": ((LLAMA3,), False, False, False, False),  # OLMo 2, Granite 4, SmolLM3
    "qwen2": ((QWEN2,), False, True, False, False),
    "deepseek-r1-qwen": ((QWEN2,), False, False, False, False),
    "qwen35": ((_QWEN35,), False, True, False, False),
    "gpt-4o": ((GPT4O,), False, False, False, False),
    "smollm": ((), True, False, False, False),
    "command-r": ((), True, True, False, True),
    "tekken": ((_TEKKEN,), False, False, True, True),
    "seed-coder": ((_SEED,), False, False, False, True),
    "hunyuan-dense": (_HUNYUAN, False, False, False, True),
    "kimi-k2": ((KIMI,), False, False, False, True),
    "deepseek-llm": (_DEEPSEEK_LLM, False, False, False, True),
}
SENTENCEPIECE = ("llama2", "gemma", "gemma4")
FAMILIES = {"gemma4": "gemma4"}
"""Families of tokenizers that are not LLaMA's (gguf_cases.FAMILIES)."""
SPECIAL = (
    "<|begin|>", "<|endoftext|>", "<|im_end|>", "<|observation|>", "[gMASK]", "<|user|>",
)  # fmt: skip
CALLS = ("<|tool_call>", "<tool_call|>", "<|tool_response>")
"""Special tokens of Gemma 4 that llama.cpp shows."""
VOCAB = 384
ROWS = 392
"""Of an embedding: more than there are tokens."""
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
TEXTS = (
    *TEXT[:3],
    "it's WE'LL I'VE don't\r\n\r\n  x = 12345678\n\n\n\tif (a||b) {}  ",
    "HelloWorld camelCaseXMLHttp ÀÉîõü ﬁ 漢字かな العربية हिन्दी \u00a0\u2003 🚀",
    "<|endoftext|>a<|im_end|> b <|user|>\n<|begin|>",
    " leading and trailing ",
    "  two spaces   three\n\n\n    four",
    "\n\n<|tool_call>call:f{}<tool_call|><|tool_response>\n",
    "",
)


@cache
def byte_level(name: str) -> tokenizers.Tokenizer:
    """BPE of bytes, cut as the models are whose files have this name."""
    patterns, digits, composes, whole, adds_bos = BYTE_LEVEL[name]
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=whole))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    single = pre_tokenizers.Digits(individual_digits=True)
    for each in patterns:
        split = single if each == DIGITS else pre_tokenizers.Split(Regex(each), behavior="isolated")
        steps.append(split)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, level])
    if composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL), initial_alphabet=level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    special = [AddedToken(t, special=True, normalized=False) for t in SPECIAL[:-1]]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(SPECIAL[-1], special=False, normalized=False)])
    if adds_bos:
        _begins_with(tokenizer, SPECIAL[0])
    return tokenizer


@cache
def sentencepiece(name: str) -> tokenizers.Tokenizer:
    """SentencePiece's BPE with byte fall-back, as transformers converts it."""
    trained = tokenizers.Tokenizer(models.BPE())
    words = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    lines = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    is_listed = name in FAMILIES
    trained.pre_tokenizer = pre_tokenizers.Sequence([words, lines]) if is_listed else words
    trainer = trainers.BpeTrainer(vocab_size=VOCAB - 270, show_progress=False)
    texts = [text for text in TEXT if text.isascii()]
    trained.train_from_iterator([*texts, *(["\n\n"] * 50 if is_listed else [])], trainer)
    head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().get)
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys([*head, *pieces]))}
    merges = []
    for piece in pieces:  # all ways, the best piece first
        ways = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        ways = [way for way in ways if way[0] in vocab and way[1] in vocab]
        merges += sorted(ways, key=lambda way: (vocab[way[0]], vocab[way[1]]))
    if is_listed:  # one way to make a piece
        merges = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    model = models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if name != "llama2":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        prepend = normalizers.Prepend("▁")
        tokenizer.normalizer = normalizers.Sequence([prepend, normalizers.Replace(" ", "▁")])
        back.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(back)
    names = (*head[:3], *SPECIAL[:-1], *(CALLS if is_listed else ()))
    special = [AddedToken(text, special=True, normalized=False) for text in names]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(SPECIAL[-1], special=False, normalized=False)])
    _begins_with(tokenizer, "<s>")
    return tokenizer


def _begins_with(tokenizer: tokenizers.Tokenizer, bos: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )


def write(folder: Path, name: str) -> None:
    """The tokenizer's files."""
    is_bytes = name in BYTE_LEVEL
    tokenizer = byte_level(name) if is_bytes else sentencepiece(name)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE,
        "bos_token": SPECIAL[0] if is_bytes else "<s>",
        "eos_token": SPECIAL[1] if is_bytes else "</s>",
    } | ({} if is_bytes else {"unk_token": "<unk>"})  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    eos = [tokenizer.token_to_id(text) for text in (config["eos_token"], SPECIAL[2])]
    generation = {"eos_token_id": eos, "do_sample": True, "temperature": 0.7, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(generation))
