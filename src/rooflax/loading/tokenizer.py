"""Text to token ids and back: a checkpoint's tokenizer, and decoding while tokens arrive.

Reads `tokenizer.json`, `vocab.json` with `merges.txt` (GPT-2's byte-level BPE) or `vocab.txt`
(BERT's), and what `tokenizer_config.json` and its neighbours add: special tokens, BOS and EOS, chat
templates.
Or takes the tokenizer out of a GGUF file. It does not render chat templates and knows no model: ids
go out, ids come in.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import secrets
import threading
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from rooflax.errors import CheckpointError, RequestError
from rooflax.files import reject_stand_in
from rooflax.loading.gguf import GGUFFile, open_gguf
from rooflax.loading.gguf_tokenizer import read_gguf_tokenizer
from rooflax.loading.incremental import IncrementalDecoder
from rooflax.loading.json_files import read_file, read_json_object

__all__ = ["IncrementalDecoder", "PlainTokenizer", "Tokenizer", "lone_surrogate"]

MAX_STEPS = 64
"""Steps of a normalizer, pre-tokenizer, post-processor or decoder."""
MAX_GROWTH = 64
"""Times that such steps may make a text longer, Unicode's normal forms not counted."""
MAX_SURROUNDING = 1024
"""Tokens that a post-processor may put around a text."""
MAX_TOKEN_ID = 2**31 - 1
MAX_TOKENIZER_BYTES = 1 << 29
"""Of tokenizer.json; Gemma's, with 262,144 tokens, has 33 MB."""
LONG_TEXT = 16_384
"""Characters that take about 10 ms to encode."""

SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """The tokenizer of a checkpoint; gives the ids that transformers' AutoTokenizer gives.

    Attributes:
        special_tokens: the named ones as text, such as `{"bos_token": "<s>"}`.
        chat_templates: template by name; a lone one is called `"default"`.
        response_template: how answers are written, as transformers describes it; None if unstated.
        vocab_size: the highest id plus one, added tokens included.

    Args:
        folder: holds `tokenizer.json`, or `vocab.json` and `merges.txt`, or `vocab.txt`; or a
            GGUF file.

    Raises:
        CheckpointError: files are missing or malformed.
        UnsupportedModelError: a GGUF file has a tokenizer of another kind.
    """

    def __init__(self, folder: str | os.PathLike[str] | GGUFFile):
        if not isinstance(folder, GGUFFile) and Path(folder).is_file():
            folder = open_gguf(folder)
        if isinstance(folder, GGUFFile):
            self.folder = folder.path
            contents = read_gguf_tokenizer(folder)
        else:
            self.folder = Path(folder)
            contents = _read_folder(self.folder)
        self.response_template: Any = None
        if self.folder.is_dir():
            config = read_json_object(self.folder / "tokenizer_config.json")
            self.response_template = config.get("response_template")
        self._tokenizer, self.special_tokens, self.chat_templates = contents
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {id_: token.content for id_, token in added.items() if token.special}
        self._plain: PlainTokenizer | None = None
        self._plain_lock = threading.Lock()

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The `tokenizers.Tokenizer` underneath; not to be changed."""
        return self._tokenizer

    @property
    def special_token_ids(self) -> frozenset[int]:
        """The ids that `decode` leaves out."""
        return frozenset(self._special_ids)

    @property
    def special_token_strings(self) -> frozenset[str]:
        """The texts that `encode` turns into one special id."""
        return frozenset(self._special_ids.values())

    @property
    def bos_id(self) -> int | None:
        """The id of the beginning of a sequence, None where the tokenizer has none."""
        return self.token_to_id(self.special_tokens.get("bos_token", ""))

    @property
    def eos_id(self) -> int | None:
        """The id that ends a sequence, None where the tokenizer has none."""
        return self.token_to_id(self.special_tokens.get("eos_token", ""))

    @property
    def chat_template(self) -> str | None:
        """The default chat template, None for a model without one."""
        return self.chat_templates.get("default")

    def files(self) -> dict[str, bytes]:
        """The files of a folder from which this tokenizer would be read."""
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self.special_tokens,
            "chat_template": [
                {"name": name, "template": text} for name, text in self.chat_templates.items()
            ],
        }
        if set(self.chat_templates) <= {"default"}:
            config["chat_template"] = self.chat_template
        if self.response_template is not None:
            config["response_template"] = self.response_template
        return {
            "tokenizer.json": self._tokenizer.to_str(pretty=True).encode(),
            "tokenizer_config.json": json.dumps(config, indent=2).encode(),
        }

    def token_to_id(self, token: str) -> int | None:
        """The id of one token's text, None if it is no token."""
        return self._tokenizer.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """One token as the vocabulary spells it, None for an id without a token."""
        return self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text in which special tokens' strings stand for these tokens.

        Args:
            text: any text.
            add_special_tokens: also what the tokenizer puts around a text, such as BOS.

        Raises:
            RequestError: the text holds a lone surrogate.
            CheckpointError: the tokenizer fails on it, for example by a regular expression that
                gives up.
        """
        return _encode(self._tokenizer, text, add_special_tokens)

    def encode_cut(
        self, text: str, pair: str | None = None, max_tokens: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Ids and token types of a text, or of a pair as the tokenizer puts it together.

        Args:
            max_tokens: what is longer loses its last tokens, of a pair the longer text's first;
                what the tokenizer puts around them stays. None cuts nothing.

        Raises:
            RequestError, CheckpointError: as `encode`.
        """
        texts = [text] if pair is None else [text, pair]
        parts = [_encoding(self._tokenizer, each, False) for each in texts]
        with _library("the tokenizer cannot encode this text"):
            if max_tokens is not None:
                num_special = self._tokenizer.num_special_tokens_to_add(pair is not None)
                lengths = _cut([len(part.ids) for part in parts], max(0, max_tokens - num_special))
                for part, length in zip(parts, lengths, strict=True):
                    part.truncate(length)
            first, *second = parts
            whole = self._tokenizer.post_process(first, second[0] if second else None)
            return whole.ids, whole.type_ids

    def encode_offsets(
        self, text: str, *, add_special_tokens: bool = False
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids as `encode` gives them, and from where to where each one's characters are."""
        encoding = _encoding(self._tokenizer, text, add_special_tokens)
        return encoding.ids, encoding.offsets

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text in which nothing is special: `"<s>"` is three characters."""
        return self.plain.encode(text)

    @cached_property
    def longest_token(self) -> int | None:
        """Characters that one token can stand for, at most; None where there is no limit."""
        model = self._tokenizer.model
        if getattr(model, "unk_token", None) is not None and not getattr(
            model, "byte_fallback", False
        ):
            return None
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=0)

    @property
    def plain(self) -> PlainTokenizer:
        """The same vocabulary with special tokens' strings taken as text, built when asked for."""
        with self._plain_lock:
            if self._plain is None:
                self._plain = PlainTokenizer(self._tokenizer, self._special_ids)
            return self._plain

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; an id without a token becomes `<id>`, such as `<70000>`.

        Args:
            ids: token ids.
            skip_special_tokens: leave special tokens out.
        """
        pieces: list[str] = []
        run: list[int] = []
        for token_id in ids:
            if self.id_to_token(token_id) is not None:
                run.append(token_id)
                continue
            pieces += [self._decode_run(run, skip_special_tokens), f"<{token_id}>"]
            run = []
        return "".join([*pieces, self._decode_run(run, skip_special_tokens)])

    def _decode_run(self, ids: list[int], skip_special_tokens: bool) -> str:
        if not ids:
            return ""
        with _library("the tokenizer cannot decode these tokens"):
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


class PlainTokenizer:
    """A twin of a tokenizer for text in which special tokens' strings are just text.

    Where a special token is really meant, the text carries `mark[string]` instead: a random string
    that no one can guess, so no input can forge a special token.

    Args:
        backend: the tokenizer to copy.
        special: id to text of its special tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: Mapping[int, str]):
        self._tokenizer = tokenizers.Tokenizer.from_str(backend.to_str())
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = backend.get_added_tokens_decoder()
        nonce = secrets.token_hex(8)
        self.mark = {text: f"\U0010fffd{nonce}:{id_}\U0010fffd" for id_, text in special.items()}
        self._tokenizer.add_tokens([_renamed(added[i], self.mark[special[i]]) for i in special])
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self._real_id = {ids[self.mark[text]]: id_ for id_, text in special.items()}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without BOS; `mark`ed strings become their special tokens."""
        return self._real(_encode(self._tokenizer, text, False))

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids as `encode` gives them, and from where to where each one's characters are."""
        encoding = _encoding(self._tokenizer, text, False)
        return self._real(encoding.ids), encoding.offsets

    def _real(self, ids: list[int]) -> list[int]:
        return [self._real_id.get(token_id, token_id) for token_id in ids]


def lone_surrogate(text: str) -> int | None:
    """Position of a lone UTF-16 surrogate in a text; None if there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


@contextmanager
def _library(failure: str) -> Iterator[None]:
    """Errors of the tokenizers library, its panics too, as CheckpointErrors."""
    try:
        yield
    except BaseException as error:
        # A panic of Rust code is no Exception, and its class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if isinstance(error, (CheckpointError, RequestError)):
            raise
        reason = " ".join(str(error).encode("utf-8", "replace").decode().split())[:300]
        raise CheckpointError(f"{failure}: {reason}") from None


def _cut(lengths: list[int], most: int) -> list[int]:
    """Cuts texts to fit: the longer one loses tokens first, then the last one."""
    if len(lengths) == 1:
        return [min(lengths[0], most)]
    short = min(*lengths, most // 2)
    long = min(max(lengths), most - short)
    return [long, short] if lengths[0] > lengths[1] else [short, long]


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    return _encoding(backend, text, add_special_tokens).ids


def _encoding(
    backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool
) -> tokenizers.Encoding:
    with _library("the tokenizer cannot encode this text"):
        try:
            if len(text) > LONG_TEXT:  # a batch lets Python's other threads run
                return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
            return backend.encode(text, add_special_tokens=add_special_tokens)
        except Exception:
            at = lone_surrogate(text)
            if at is None:
                raise
    raise RequestError(
        f"the text holds a lone surrogate, U+{ord(text[at]):04X} at character {at}; it must be "
        "Unicode text"
    )


def _renamed(token: AddedToken, content: str) -> AddedToken:
    # special=False: the twin does not look for special tokens at all.
    return AddedToken(
        content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=False,
    )


def _read_folder(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[str, str]]:
    """The tokenizer, its special tokens, and its chat templates by name."""
    config = read_json_object(folder / "tokenizer_config.json")
    backend = _load_backend(folder)
    with _library(f"the tokenizer of {folder} does not hold together"):
        # transformers reads the older file only where the newer one declares no tokens.
        is_new = config.get("added_tokens_decoder") is not None
        legacy = {} if is_new else read_json_object(folder / "special_tokens_map.json")
        special = _special_tokens(config, legacy, backend)
        every = [*special.values(), *_further_special_tokens(config, legacy)]
        _add_missing_tokens(backend, _declared(folder, config, {*map(_text_of, every)}), every)
        if not (folder / "tokenizer.json").is_file():
            _surround(backend, config, special)
        # A file may ask for cutting or padding, which made sense for its training batches only.
        backend.no_truncation()
        backend.no_padding()
        if getattr(backend.model, "dropout", None) is not None:
            backend.model.dropout = None  # of its training too: the same text gives the same ids
    return backend, special, _chat_templates(folder, config)


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    path, vocab, merges = (folder / n for n in ("tokenizer.json", "vocab.json", "merges.txt"))
    words = folder / "vocab.txt"
    if not path.is_file() and vocab.is_file() and merges.is_file():
        path = vocab
    if not path.is_file() and words.is_file():
        path = words
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no tokenizer: it needs tokenizer.json, or vocab.json and merges.txt, or "
            f"vocab.txt"
        )
    with _library(f"{path} is not a tokenizer that can be read"):
        if path == vocab:
            return _gpt2_backend(vocab, merges)
        if path == words:
            return _bert_backend(words, read_json_object(folder / "tokenizer_config.json"))
        data = read_file(path, MAX_TOKENIZER_BYTES) or b""
        reject_stand_in(path, data)
        # Added tokens pass through the normalizer while the file is read.
        _check_growth(path, "normalizer", _normalizers(data))
        backend = tokenizers.Tokenizer.from_buffer(data)
        for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            part = getattr(backend, name)
            if part is not None:
                _check_growth(path, name, [json.loads(part.__getstate__())])
        return backend


_ESCAPED_LETTER = re.compile(rb"\\u00[2-7]")


def _normalizers(data: bytes) -> list[Any]:
    """Normalizers in a tokenizer.json, read without its vocabulary."""
    normalizers, decoder = [], json.JSONDecoder()
    matches = list(re.finditer(rb'"normalizer"\s*:\s*(?=\{)', data))
    # Letters may be escaped, so that the key looks otherwise; then everything is read.
    if len(matches) > MAX_STEPS or _ESCAPED_LETTER.search(data):
        return _values_of(data, "normalizer")
    for match in matches:
        text = data[match.end() : match.end() + 2**20].decode("utf-8", "replace")
        try:
            normalizers.append(decoder.raw_decode(text)[0])
        except ValueError:
            return _values_of(data, "normalizer")
    return normalizers


def _values_of(data: bytes, name: str) -> list[Any]:
    values = []

    def look(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values.extend(value for key, value in pairs if key == name)
        return dict(pairs)

    json.loads(data, object_pairs_hook=look)
    return values


def _check_growth(path: Path, name: str, parts: list[Any]) -> None:
    """CheckpointError if a part's steps make texts longer without bounds."""
    num_steps, growth, tokens = 0, 1.0, 0
    while parts:
        part = parts.pop()
        if not isinstance(part, dict):
            continue
        inner = [part.get(key) for key in _INNER]
        parts += [step for steps in inner if isinstance(steps, list) for step in steps]
        num_steps += 1
        growth *= _growth(part)
        tokens += _surrounding(part)
        if num_steps > MAX_STEPS or growth > MAX_GROWTH or tokens > MAX_SURROUNDING:
            raise CheckpointError(
                f"{path}: its {name} can make a text too long: it may have {MAX_STEPS} steps, "
                f"make a text {MAX_GROWTH} times as long and add {MAX_SURROUNDING} tokens"
            )


_INNER = ("normalizers", "pretokenizers", "processors", "decoders")


def _growth(step: dict[str, Any]) -> float:
    """Lower bound of how many times longer a step can make a text."""
    if step.get("type") == "ByteLevel":
        return 2.0  # a byte beyond ASCII becomes a character of two
    if step.get("type") == "Prepend":
        return 1.0 + len(str(step.get("prepend")))
    if step.get("type") != "Replace":
        return 1.0
    pattern, content = step.get("pattern"), step.get("content")
    string = pattern.get("String") if isinstance(pattern, dict) else None
    if not isinstance(content, str):
        return math.inf
    # A regular expression may match nothing, before each character.
    return max(1.0, len(content) / len(string)) if string else 1.0 + len(content)


def _surrounding(step: dict[str, Any]) -> int:
    """The most tokens that a post-processor puts around one text."""
    pieces, tokens = step.get("single"), step.get("special_tokens")
    if not isinstance(pieces, list) or not isinstance(tokens, dict):
        return 0
    longest = max((len(token.get("ids", ())) for token in tokens.values()), default=0)
    return len(pieces) * max(1, longest)


def _gpt2_backend(vocab: Path, merges: Path) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    # GPT-2's only special token; its vocabulary file has it, files of its kin may not.
    if backend.token_to_id("<|endoftext|>") is not None:
        backend.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    return backend


BERT_TOKENS = {
    "unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}  # fmt: skip


def _bert_backend(vocab: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """BERT's WordPiece of a vocab.txt, a token a line, as transformers' BertTokenizer."""
    lines = (read_file(vocab, MAX_TOKENIZER_BYTES) or b"").decode("utf-8").split("\n")
    ids = {line.rstrip("\r"): i for i, line in enumerate(lines) if line or i + 1 < len(lines)}
    names = {role: _text_of(config.get(role)) or text for role, text in BERT_TOKENS.items()}
    missing = [names[role] for role in ("unk_token", "sep_token", "cls_token")
               if names[role] not in ids]  # fmt: skip
    if missing:
        raise CheckpointError(f"{vocab} lacks the token {missing[0]!r:.80}.")
    backend = tokenizers.Tokenizer(models.WordPiece(ids, unk_token=names["unk_token"]))
    backend.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=config.get("tokenize_chinese_chars", True) is not False,
        strip_accents=config.get("strip_accents"),
        lowercase=config.get("do_lower_case", True) is not False,
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    first, last = names["cls_token"], names["sep_token"]
    backend.post_processor = processors.TemplateProcessing(
        single=[f"{first}:0", "$A:0", f"{last}:0"],
        pair=[f"{first}:0", "$A:0", f"{last}:0", "$B:1", f"{last}:1"],
        special_tokens=[(text, ids[text]) for text in (first, last)],
    )
    special = [AddedToken(text, special=True, normalized=False)
               for text in names.values() if text in ids]  # fmt: skip
    backend.add_special_tokens(special)
    return backend


def _text_of(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(
    config: dict[str, Any], legacy: dict[str, Any], backend: tokenizers.Tokenizer
) -> dict[str, str]:
    by_name = {}
    for name in SPECIAL_TOKEN_NAMES:
        text = _text_of(legacy[name] if name in legacy else config.get(name))
        if text is not None:
            by_name[name] = text
    return by_name or _customary_special_tokens(backend)


def _further_special_tokens(config: dict[str, Any], legacy: dict[str, Any]) -> list[Any]:
    """Special tokens without a role here: text, or an object with flags, in transformers' order."""
    tokens_listed = [
        value
        for key, value in config.items()
        if key.endswith("_token") and key not in SPECIAL_TOKEN_NAMES and isinstance(value, str)
    ]
    additional, extra = "additional_special_tokens", "extra_special_tokens"
    stated = config.get(extra) or config.get(additional) or []
    more = legacy.get(extra) or []
    for tokens in (stated, more):
        tokens_listed += tokens.values() if isinstance(tokens, dict) else []
    lists = [tokens for tokens in (stated, more) if not isinstance(tokens, dict)]
    lists += [] if stated or more else [legacy.get(additional) or []]
    for tokens in lists:
        tokens_listed += tokens if isinstance(tokens, list) else [tokens]
    if any(_text_of(token) is None for token in tokens_listed):
        raise CheckpointError(
            "tokenizer_config.json or special_tokens_map.json has extra_special_tokens that are "
            "no tokens; they must be a list of texts or an object of them"
        )
    return tokens_listed


def _customary_special_tokens(backend: tokenizers.Tokenizer) -> dict[str, str]:
    # Old folders name none: transformers takes them from the tokenizer's class, we from what the
    # vocabulary holds.
    for texts in (("<|endoftext|>",) * 3, ("<s>", "</s>", "<unk>")):
        if all(backend.token_to_id(text) is not None for text in texts):
            return dict(zip(("bos_token", "eos_token", "unk_token"), texts, strict=True))
    return {}


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, declared: list[dict[str, Any]], special: list[Any]
) -> None:
    """Adds what tokenizer.json lacks, as transformers: declared tokens by id, then special ones."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for entry in declared:
        text = _text_of(entry)
        if text and text not in known:
            backend.add_tokens([AddedToken(text, **_flags(entry))])
            known.add(text)
    for entry in special:
        text = _text_of(entry)
        if text and text not in known:
            flags = {"normalized": False, "special": True} | _flags(entry)
            backend.add_special_tokens([AddedToken(text, **flags)])
            known.add(text)


def _flags(entry: Any) -> dict[str, bool]:
    """Flags for matching a token in a text, as far as its entry has them."""
    names = ("lstrip", "rstrip", "single_word", "normalized", "special")
    stated = entry if isinstance(entry, dict) else {}
    return {name: stated[name] for name in names if isinstance(stated.get(name), bool)}


def _declared(
    folder: Path, config: dict[str, Any], special: Container[str]
) -> list[dict[str, Any]]:
    """Tokens with ids, in their order: of `added_tokens_decoder`, else of added_tokens.json."""
    declared = config.get("added_tokens_decoder")
    if declared is None:
        added = read_json_object(folder / "added_tokens.json")
        if not all(type(id_) is int and 0 <= id_ <= MAX_TOKEN_ID for id_ in added.values()):
            raise CheckpointError(
                f"{folder / 'added_tokens.json'} must map tokens to ids from 0 to {MAX_TOKEN_ID}"
            )
        return [
            {"content": text, "special": text in special, "normalized": text not in special}
            for text in sorted(added, key=added.__getitem__)
        ]
    if not isinstance(declared, dict):
        raise CheckpointError("tokenizer_config.json: added_tokens_decoder does not map ids")
    for key, entry in declared.items():
        is_id = key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) <= MAX_TOKEN_ID
        if not is_id or not isinstance(entry, dict):
            raise CheckpointError(
                f"tokenizer_config.json: added_tokens_decoder has the entry {key[:20]!r}; it must "
                f"map ids from 0 to {MAX_TOKEN_ID} to tokens"
            )
    return [declared[key] for key in sorted(declared, key=int)]


def _surround(
    backend: tokenizers.Tokenizer, config: dict[str, Any], special: dict[str, str]
) -> None:
    # Only where there is no tokenizer.json, whose own post-processor counts: transformers, too,
    # ignores add_bos_token and add_eos_token next to one.
    bos = special.get("bos_token") if config.get("add_bos_token") else None
    eos = special.get("eos_token") if config.get("add_eos_token") else None
    template = [t for t in (bos and f"{bos}:0", "$A:0", eos and f"{eos}:0") if t]
    if len(template) == 1:
        return
    backend.post_processor = processors.TemplateProcessing(
        single=template,
        pair=[*template, "$B:1"],
        special_tokens=[(text, backend.token_to_id(text)) for text in {bos, eos} if text],
    )


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    path = folder / "chat_template.jinja"
    data = read_file(path)
    if data is not None:
        try:
            return {"default": io.TextIOWrapper(io.BytesIO(data), "utf-8").read()}
        except UnicodeDecodeError as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
    templates = config.get("chat_template")
    if templates is None:
        return {}
    if isinstance(templates, str):
        return {"default": templates}
    named: dict[str, str] = {}
    keys = ("name", "template")
    for entry in templates if isinstance(templates, list) else [None]:
        name, text = (entry.get(k) if isinstance(entry, dict) else None for k in keys)
        if not isinstance(name, str) or not isinstance(text, str):
            raise CheckpointError(
                f"{folder / 'tokenizer_config.json'}: chat_template is neither a string nor a list "
                "of {name, template}"
            )
        named[name] = text
    return named
