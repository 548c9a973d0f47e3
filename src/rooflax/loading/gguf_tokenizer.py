"""The tokenizer inside a GGUF file, rebuilt as the one that its checkpoint came with.

Five kinds: "gpt2", byte-level BPE with merges and a pre-tokenizer known by name; "llama",
SentencePiece's BPE, whose merges follow from the pieces' scores; "gemma4", the same with a list of
merges; and of encoders "bert", WordPiece, and "t5", SentencePiece's Unigram. Other kinds and
pre-tokenizers are rejected by name, because text that is cut elsewhere gives other ids without a
word.

Source: the tokenizer.json files of the models named beside the patterns; llama.cpp,
src/llama-vocab.cpp (names); transformers, convert_slow_tokenizer.py (merges from scores).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.loading.tokenizer_folder import surround

if TYPE_CHECKING:  # the families import jax, which a template's process must not
    from rooflax.models.gguf import Header

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
MAX_PIECE = 1000
"""Characters of a SentencePiece piece: finding its merges takes time as its square."""

DIGIT = r"\p{N}"
"""The pattern that single digits are cut by behind others."""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(end: str) -> str:
    """Words cut where a small letter is followed by a capital."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}[{_UPPER}]*[{_LOWER}]+{end}|{start}[{_UPPER}]+[{_LOWER}]*{end}"


_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = (
    rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = rf"{_cased('')}|\p{{N}}|{_CASED_REST}"
_GPT4O = rf"{_cased(_CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_CASED_REST}"
_NOT_HAN = r"&&[^\p{Han}]"
_KIMI = (
    r"[\p{Han}]+|"
    + _cased(_CONTRACTIONS + "?")
    .replace(_UPPER, _UPPER + _NOT_HAN)
    .replace(_LOWER, _LOWER + _NOT_HAN)
    + rf"|\p{{N}}{{1,3}}|{_REST}"
)
_DEEPSEEK3_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED_LETTERS = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 "
    "388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA "
    "1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 "
    "1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB "
    "1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D "
    "212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 "
    "A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A "
    "FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF "
    "1E900-1E943 "
)
"""Letters of DeepSeek-LLM, by code point: those that Unicode had when it was made."""


def _characters(ranges: str) -> str:
    return "".join(
        "-".join(chr(int(end, 16)) for end in part.split("-")) for part in ranges.split()
    )


_DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{_characters(_CASED_LETTERS)}]+",
    rf"\s?[{_characters('21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002')}]+",
    r"\s+$",
    f"[{_characters('4E00-9FA5 800-4E00 AC00-D7FF')}]+",
    DIGIT,
)
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (r"\p{N}{1,3}", _CJK, _DEEPSEEK3_WORDS)


@dataclass(frozen=True)
class Cut:
    """Pre-tokenization: how text is split before the merges.

    Attributes:
        patterns: of the pieces, one after the other; GPT-2's own where there is none.
        digits: single digits are pieces, before anything else.
        nfc: text is composed first.
        whole: a piece that is a token is taken without merging.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    nfc: bool = False
    whole: bool = False


_WHOLE_LLAMA3 = Cut((_LLAMA3,), whole=True)
PRE_TOKENIZERS: Mapping[str, Cut] = {
    "gpt-2": Cut(),
    "llama-bpe": _WHOLE_LLAMA3,  # LLaMA 3
    "dbrx": Cut((_LLAMA3,)),  # OLMo 2 and 3, Granite 4, Phi-4
    "smaug-bpe": Cut((_LLAMA3,)),  # SmolLM3
    "llama3": _WHOLE_LLAMA3,
    "llama-v3": _WHOLE_LLAMA3,
    "lfm2": _WHOLE_LLAMA3,
    "falcon3": _WHOLE_LLAMA3,
    "pixtral": _WHOLE_LLAMA3,
    "midm-2.0": _WHOLE_LLAMA3,
    "glm4": _WHOLE_LLAMA3,  # GLM-4 and 4.5, without BOS
    "chatglm-bpe": Cut((_LLAMA3,)),
    "qwen2": Cut((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": Cut((_QWEN2,)),
    "hunyuan": Cut((_QWEN2,)),
    "stablelm2": Cut((_QWEN2,)),
    "megrez": Cut((_QWEN2,)),
    "qwen35": Cut((_QWEN35,), nfc=True),
    "gpt-4o": Cut((_GPT4O,)),  # GPT-OSS, Phi-4-mini
    "llama4": Cut((_GPT4O,)),
    "smollm": Cut(digits=True),
    "refact": Cut(digits=True),  # Granite 3
    "exaone": Cut(digits=True),
    "starcoder": Cut(digits=True),
    "command-r": Cut(digits=True, nfc=True),  # Cohere
    "exaone4": Cut(),
    "olmo": Cut(),
    "phi-2": Cut(),
    "tekken": Cut((_TEKKEN,), whole=True),  # Mistral Nemo and later
    "seed-coder": Cut((_SEED,)),  # Seed-OSS
    "hunyuan-dense": Cut(_DEEPSEEK3),
    "deepseek-v3": Cut(_DEEPSEEK3),
    "kimi-k2": Cut((_KIMI,)),  # also Moonlight
    "deepseek-llm": Cut(_DEEPSEEK_LLM),  # DeepSeek-V2
}
"""Patterns that llama.cpp computes by these names; of equal ones the first is written."""
BEGINS = ("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon3", "pixtral", "midm-2.0", "tekken")
"""Names of which a file that says nothing of BOS has one."""

LISTED = "gemma4"
"""The kind of tokenizer whose pieces are SentencePiece's and whose merges are listed."""
SHOWN = (
    "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
    "<tool_response|>", '<|"|>',
)  # fmt: skip
"""Its special tokens that files have as plain ones, so that llama.cpp shows them."""
SPECIAL_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # as the format spells it
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
WORDPIECE, UNIGRAM = "bert", "t5"
"""Kinds of encoders' tokenizers."""
SPACE = "▁"
_CUSTOMARY_IDS = {
    "llama": {"unk_token": 0, "bos_token": 1, "eos_token": 2},
    WORDPIECE: {
        "pad_token": 0, "unk_token": 100, "bos_token": 101, "sep_token": 102, "mask_token": 103,
    },
}  # fmt: skip
"""Defaults by kind, where a file is silent."""


def read_gguf_tokenizer(
    file: Header,
) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[str, str]]:
    """The tokenizer, its special tokens by name ("bos_token"), and its chat templates by name.

    Raises:
        UnsupportedModelError: a kind or a pre-tokenizer that is not read here.
        CheckpointError: what the tokenizer needs is missing or malformed.
    """
    vocabulary = _Vocabulary(file)
    kind = vocabulary.get("model", str, None)
    if kind == "gpt2":
        backend = _byte_level(vocabulary)
    elif kind in ("llama", LISTED):
        backend = _sentencepiece(vocabulary, is_listed=kind == LISTED)
    elif kind == WORDPIECE:
        backend = _wordpiece(vocabulary)
    elif kind == UNIGRAM:
        backend = _unigram(vocabulary)
    else:
        raise UnsupportedModelError(
            f"{file.path} has a tokenizer of the kind {kind!r:.80}; only 'gpt2', 'llama', "
            f"{LISTED!r}, {WORDPIECE!r} and {UNIGRAM!r} are read."
        )
    _add_tokens(backend, vocabulary)
    special = vocabulary.special_tokens()
    if kind in (WORDPIECE, UNIGRAM) or vocabulary.get("add_sep_token", bool, False):
        _surround_pairs(backend, vocabulary, special)
    else:
        _surround(backend, vocabulary, special)
    return backend, special, _chat_templates(file)


class _Vocabulary:
    """The tokens with their types and scores, checked against one another."""

    def __init__(self, file: Header):
        self.file = file
        self.tokens = self.array("tokens", list, None)
        count = len(self.tokens)
        self.types = self.array("token_type", np.ndarray, np.full(count, NORMAL)).tolist()
        self.scores = self.array("scores", np.ndarray, np.zeros(count)).tolist()
        shown = SHOWN if self.get("model", str, "") == LISTED else ()
        for i in (self.tokens.index(text) for text in shown if text in self.tokens):
            self.types[i : i + 1] = [CONTROL]
        if not len(self.types) == len(self.scores) == count:
            raise self.bad("has tokens, types and scores in different numbers")
        flags = ("normalizer.lowercase", "normalizer.strip_accents")
        for flag in () if self.get("model", str, "") == WORDPIECE else flags:
            if self.get(flag, bool, False):
                raise UnsupportedModelError(
                    f"{file.path} asks for tokenizer.ggml.{flag}, which rooflax does not do."
                )
        self.ids = {t: i for i, t in enumerate(self.tokens) if t and self.types[i] != UNUSED}
        used = sum(
            1 for t, kind in zip(self.tokens, self.types, strict=True) if t and kind != UNUSED
        )
        if len(self.ids) != used:
            raise self.bad("has a token twice")

    def bad(self, reason: str) -> CheckpointError:
        return CheckpointError(f"the tokenizer of {self.file.path} {reason}")

    def get(self, key: str, kind: type, default: Any) -> Any:
        value = self.file.metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return default
        if type(value) is not kind:
            raise self.bad(f"has a {key} of the wrong type")
        return value

    def array(self, key: str, kind: type, default: Any) -> Any:
        value = self.get(key, kind, default)
        strings = isinstance(value, list)
        if value is None or (not strings and value.dtype.kind not in "if"):
            raise self.bad(f"has no {key}")
        return value

    def of(self, *kinds: int) -> list[int]:
        """The ids of these types."""
        return [i for i in self.ids.values() if self.types[i] in kinds]

    def model_vocabulary(self) -> dict[str, int]:
        """Tokens that text becomes by merging; added ones as well if they do not follow at the end.

        A token that is only added cannot be met by merging, but takes the next id.
        """
        added = self.of(CONTROL, USER_DEFINED)
        merged = {t: i for t, i in self.ids.items() if self.types[i] not in (CONTROL, USER_DEFINED)}
        in_order = [*merged.values(), *added] == list(range(len(self.ids)))
        return merged if in_order else dict(self.ids)

    def special_tokens(self) -> dict[str, str]:
        by_name = {}
        customary = _CUSTOMARY_IDS.get(self.get("model", str, ""), {})
        for name, key in SPECIAL_IDS.items():
            default = self.get("cls_token_id", int, None) if name == "bos_token" else None
            default = customary.get(name) if default is None else default
            token_id = self.get(key, int, default)
            if token_id is None:
                continue
            if not 0 <= token_id < len(self.tokens):
                raise self.bad(f"has {key} = {token_id}, but {len(self.tokens)} tokens")
            if self.tokens[token_id] in self.ids:
                by_name[name] = self.tokens[token_id]
        return by_name


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    name = vocabulary.get("pre", str, "default")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{vocabulary.file.path} cuts its text by the pre-tokenizer {name!r:.80}; only "
            f"{', '.join(PRE_TOKENIZERS)} are read."
        )
    cut = PRE_TOKENIZERS[name]
    model = _build(vocabulary, merges=_listed_merges(vocabulary), ignore_merges=cut.whole)
    backend = tokenizers.Tokenizer(model)
    if cut.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cut.digits else []
    steps += [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in cut.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not cut.patterns))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _listed_merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    return [_pair(vocabulary, merge) for merge in vocabulary.array("merges", list, None)]


def _pair(vocabulary: _Vocabulary, merge: str) -> tuple[str, str]:
    left, space, right = merge[1:].partition(" ")
    if not space or not right:
        raise vocabulary.bad(f"has the merge {merge[:40]!r}, which is not two pieces")
    return merge[0] + left, right


def _build(vocabulary: _Vocabulary, merges: Sequence[tuple[str, str]], **options: Any) -> Any:
    try:
        return models.BPE(vocab=vocabulary.model_vocabulary(), merges=list(merges), **options)
    except Exception as error:  # the Rust side raises bare Exception
        reason = " ".join(str(error).split())  # a token of a newline may be in it
        raise vocabulary.bad(f"does not hold together: {reason[:200]}") from None


def _sentencepiece(vocabulary: _Vocabulary, *, is_listed: bool) -> tokenizers.Tokenizer:
    if vocabulary.file.metadata.get("tokenizer.ggml.precompiled_charsmap") is not None:
        raise UnsupportedModelError(
            f"{vocabulary.file.path} rewrites characters by a table (precompiled_charsmap), which "
            f"rooflax does not do."
        )
    unknown = vocabulary.of(UNKNOWN)
    model = _build(
        vocabulary,
        merges=(_listed_merges if is_listed else _merges_from_scores)(vocabulary),
        byte_fallback=True,
        fuse_unk=True,
        unk_token=vocabulary.tokens[unknown[0]] if unknown else None,
    )
    backend = tokenizers.Tokenizer(model)
    prefix = vocabulary.get("add_space_prefix", bool, not is_listed)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    back: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*back, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return backend


def _wordpiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """BERT's, whose pieces have a "##" within words, and in files a "▁" at their beginning."""
    if "token_type" not in _stated(vocabulary):  # files of 2023
        vocabulary.types = [
            CONTROL if text.startswith("[") and text.endswith("]") else kind
            for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        ]
    pieces: dict[str, int] = {}
    for text, token_id in vocabulary.ids.items():
        if vocabulary.types[token_id] not in (CONTROL, UNKNOWN):
            text = text.removeprefix(SPACE) if text.startswith(SPACE) else f"##{text}"
        if pieces.setdefault(text, token_id) != token_id:
            raise vocabulary.bad(f"has the piece {text[:40]!r} twice")
    unknown = vocabulary.special_tokens().get("unk_token", "[UNK]")
    if unknown not in pieces:
        raise vocabulary.bad("has no token for unknown words")
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=pieces, unk_token=unknown))
    lowers = vocabulary.get("normalizer.lowercase", bool, True)
    strips = vocabulary.get("normalizer.strip_accents", bool, lowers)
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowers, strip_accents=strips)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def _stated(vocabulary: _Vocabulary) -> set[str]:
    prefix = "tokenizer.ggml."
    return {key.removeprefix(prefix) for key in vocabulary.file.metadata if key.startswith(prefix)}


def _unigram(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """XLM-RoBERTa's: the pieces of the best sum of scores, of text that a table rewrites."""
    unknown = vocabulary.of(UNKNOWN) or [vocabulary.get("unknown_token_id", int, 2)]
    scored = list(zip(vocabulary.tokens, map(float, vocabulary.scores), strict=True))
    if not np.isfinite(vocabulary.scores).all():
        raise vocabulary.bad("has scores that are not finite")
    if len(vocabulary.tokens) != len(set(vocabulary.tokens)):
        raise vocabulary.bad("has a token twice")
    if not 0 <= unknown[0] < len(scored):
        raise vocabulary.bad("has no token for unknown pieces")
    backend = tokenizers.Tokenizer(models.Unigram(scored, unk_id=unknown[0]))
    steps: list[Any] = []
    table = vocabulary.get("precompiled_charsmap", np.ndarray, None)
    if table is not None:
        try:
            steps.append(normalizers.Precompiled(table.astype(np.uint8).tobytes()))
        except Exception:  # the Rust side raises bare Exception
            raise vocabulary.bad("has a damaged precompiled_charsmap") from None
    if vocabulary.get("remove_extra_whitespaces", bool, True):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(steps)
    prepends = vocabulary.get("add_space_prefix", bool, True)
    scheme = "always" if prepends else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return backend


def _surround_pairs(
    backend: tokenizers.Tokenizer, vocabulary: _Vocabulary, special: Mapping[str, str]
) -> None:
    """The first and the last token of a text, and those between two."""
    begin = special.get("bos_token")
    end = special.get("sep_token") or special.get("eos_token")
    if begin is None or end is None or None in map(backend.token_to_id, (begin, end)):
        raise vocabulary.bad("names no first and last token of a text")
    between = [end, end] if vocabulary.get("model", str, "") == UNIGRAM else [end]
    kind = "" if len(between) > 1 else ":1"  # XLM-RoBERTa has one type of tokens
    backend.post_processor = processors.TemplateProcessing(
        single=[begin, "$A", end],
        pair=[begin, "$A", *between, f"$B{kind}", f"{end}{kind}"],
        special_tokens=[(text, backend.token_to_id(text)) for text in {begin, end}],
    )


def _merges_from_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to make a piece of two pieces, the best piece first; equal scores by id."""
    ids, scores = vocabulary.ids, vocabulary.scores
    pieces = [i for i in vocabulary.of(NORMAL) if len(vocabulary.tokens[i]) > 1]
    if any(len(vocabulary.tokens[i]) > MAX_PIECE for i in pieces):
        raise vocabulary.bad(f"has a piece of more than {MAX_PIECE} characters")
    if not np.isfinite(scores).all():
        raise vocabulary.bad("has scores that are not finite")
    merges = []
    for i in sorted(pieces, key=lambda i: (-scores[i], i)):
        piece = vocabulary.tokens[i]
        ways = [
            (left, right)
            for at in range(1, len(piece))
            if (left := piece[:at]) in ids and (right := piece[at:]) in ids
        ]
        merges += sorted(ways, key=lambda way: (ids[way[0]], ids[way[1]])) if ways[1:] else ways
    return merges


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    control = set(vocabulary.of(CONTROL, UNKNOWN))
    texts = {i: vocabulary.tokens[i] for i in sorted(control | set(vocabulary.of(USER_DEFINED)))}
    # All at once: each call builds the search for added tokens anew.
    backend.add_tokens(
        [AddedToken(text, special=i in control, normalized=False) for i, text in texts.items()]
    )
    for i, text in texts.items():
        if backend.token_to_id(text) != i:
            raise vocabulary.bad(f"cannot give the token {text[:40]!r} its id, {i}")


def _surround(
    backend: tokenizers.Tokenizer, vocabulary: _Vocabulary, special: Mapping[str, str]
) -> None:
    """BOS and EOS around a text; where the file is silent, as llama.cpp has it."""
    sentencepiece = vocabulary.get("model", str, "") in ("llama", LISTED)
    begins = sentencepiece or vocabulary.get("pre", str, "") in BEGINS
    wanted = {
        "bos_token": vocabulary.get("add_bos_token", bool, begins),
        "eos_token": vocabulary.get("add_eos_token", bool, False),
    }
    surround(backend, special, wanted)


def _chat_templates(file: Header) -> dict[str, str]:
    every = {"default": file.metadata.get("tokenizer.chat_template")}
    prefix = "tokenizer.chat_template."
    every |= {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    for name, template in every.items():
        if template is not None and not isinstance(template, str):
            raise CheckpointError(f"{file.path}: the chat template {name!r} is not a string.")
    return {name: template for name, template in every.items() if template is not None}
