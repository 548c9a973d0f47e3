"""A folder's tokenizer, as transformers' AutoTokenizer makes it.

Reads `tokenizer.json`, `vocab.json` with `merges.txt` (GPT-2's byte-level BPE) or `vocab.txt`
(BERT's), and what `tokenizer_config.json` and its neighbours add: special tokens, BOS and EOS, chat
templates.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from rooflax.errors import CheckpointError, RequestError
from rooflax.files import reject_stand_in
from rooflax.loading.json_files import read_file, read_json_object

MAX_STEPS = 64
"""Steps of a normalizer, pre-tokenizer, post-processor or decoder."""
MAX_GROWTH = 64
"""Times that such steps may make a text longer, Unicode's normal forms not counted."""
MAX_SURROUNDING = 1024
"""Tokens that a post-processor may put around a text."""
MAX_TOKEN_ID = 2**31 - 1
MAX_TOKENIZER_BYTES = 1 << 29
"""Bytes of tokenizer.json; Gemma's, with 262,144 tokens, has 33 MB."""
SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@contextmanager
def library_errors(failure: str) -> Iterator[None]:
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


def read_folder(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[str, str]]:
    """The tokenizer, its special tokens, and its chat templates by name."""
    config = read_json_object(folder / "tokenizer_config.json")
    backend = _load_backend(folder)
    with library_errors(f"the tokenizer of {folder} does not hold together"):
        # transformers reads the older file only where the newer one declares no tokens.
        is_new = config.get("added_tokens_decoder") is not None
        legacy = {} if is_new else read_json_object(folder / "special_tokens_map.json")
        special = _special_tokens(config, legacy, backend)
        every = [*special.values(), *_further_special_tokens(config, legacy)]
        _add_missing_tokens(backend, _declared(folder, config, {*map(_text_of, every)}), every)
        if not (folder / "tokenizer.json").is_file():
            # Beside a tokenizer.json its own post-processor counts, as in transformers.
            wanted = {n: config.get(f"add_{n}") for n in ("bos_token", "eos_token")}
            surround(backend, special, wanted)
        # A file may ask for cutting or padding, which made sense for its training batches only.
        backend.no_truncation()
        backend.no_padding()
        if getattr(backend.model, "dropout", None) is not None:
            backend.model.dropout = None  # of its training too: the same text gives the same ids
    return backend, special, _chat_templates(folder, config)


def lowers_case(folder: Path) -> bool:
    """Whether a folder's tokenizer makes a text lower-case before it looks at it."""
    with library_errors(f"the tokenizer of {folder} does not hold together"):
        normalizer = _load_backend(folder).normalizer
        steps = [] if normalizer is None else [json.loads(normalizer.__getstate__())]
    for step in steps:  # which grows
        steps += step.get("normalizers") or []
        if step["type"] == "Lowercase" or step.get("lowercase"):  # of its own, or BERT's
            return True
    return False


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
    with library_errors(f"{path} is not a tokenizer that can be read"):
        if path == vocab:
            return _gpt2_backend(vocab, merges)
        if path == words:
            return _bert_backend(words, read_json_object(folder / "tokenizer_config.json"))
        data = read_file(path, MAX_TOKENIZER_BYTES) or b""
        reject_stand_in(path, data)
        # Added tokens pass through the normalizer while the file is read.
        _check_growth(path, "normalizer", _normalizers(data))
        _check_prefix(path, data)
        backend = tokenizers.Tokenizer.from_buffer(data)
        for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            part = getattr(backend, name)
            if part is not None:
                _check_growth(path, name, [json.loads(part.__getstate__())])
        return backend


_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')
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


def _check_prefix(path: Path, data: bytes) -> None:
    """CheckpointError where a merge's second part has not the prefix of continued words: the
    library cuts that many bytes off, and ends the process where it cannot."""
    if not (_PREFIX.search(data) or _ESCAPED_LETTER.search(data)):
        return
    model = json.loads(data).get("model")
    prefix = model.get("continuing_subword_prefix") if isinstance(model, dict) else None
    if not prefix or "merges" not in model:
        return
    for merge in model["merges"]:
        second = (merge.split(" ") if isinstance(merge, str) else merge)[-1]
        if not (prefix.isascii() and second.startswith(prefix)):
            raise CheckpointError(
                f"{path} has the continuing_subword_prefix {prefix[:40]!r}, and the merge "
                f"{merge!r:.80} does not fit it; get the file again."
            )


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


def surround(
    backend: tokenizers.Tokenizer, special: Mapping[str, str], wanted: Mapping[str, Any]
) -> None:
    """Puts those of the special tokens that are `wanted` around a text.

    Args:
        wanted: by "bos_token" and "eos_token".
    """
    bos, eos = (special.get(n) if wanted[n] else None for n in ("bos_token", "eos_token"))
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
