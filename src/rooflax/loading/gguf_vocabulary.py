"""Writes a tokenizer's GGUF metadata, the inverse of `gguf_tokenizer`.

Byte-level BPE keeps its merges and the name of its pre-tokenizer; SentencePiece's BPE becomes
scores, by the order of its merges. What is written is read back, and must cut and merge as the
tokenizer does; one that llama.cpp has no name for is rejected.

Source: llama.cpp, conversion/base.py (types of tokens) and src/llama-vocab.cpp (what they do).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rooflax.errors import UnsupportedModelError
from rooflax.loading.gguf_config import end_texts
from rooflax.loading.gguf_metadata import HeaderOnly
from rooflax.loading.gguf_tokenizer import (
    BYTE,
    CONTROL,
    DIGIT,
    LISTED,
    NORMAL,
    PRE_TOKENIZERS,
    SHOWN,
    SPECIAL_IDS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Cut,
    read_gguf_tokenizer,
)
from rooflax.loading.tokenizer import Tokenizer
from rooflax.models.gguf import Metadata

SPACE = "▁"
PREFIX = "tokenizer.ggml."


def vocabulary_metadata(
    tokenizer: Tokenizer, rows: int, end_ids: Sequence[int], *, lists_merges: bool = False
) -> tuple[Metadata, list[str]]:
    """The tokenizer's keys, and a sentence for each thing that llama.cpp does otherwise.

    Args:
        rows: of the embedding; ids without a token are filled up.
        end_ids: that end a sequence.
        lists_merges: the model's SentencePiece has a list of merges in place of scores.

    Raises:
        UnsupportedModelError: llama.cpp has no such tokenizer.
    """
    parts: dict[str, Any] = json.loads(tokenizer.backend.to_str())
    model = parts["model"]
    if model.get("type") != "BPE" or model.get("end_of_word_suffix") or model.get("dropout"):
        raise _unsupported(f"its model is {model.get('type')!r}; only BPE is written.")
    if not model["merges"]:
        raise _unsupported("its model has no merges.")
    metadata, notes = _sentencepiece(parts) if model.get("byte_fallback") else _byte_level(parts)
    tokens, types = _tokens(parts, rows)
    if tokenizer.vocab_size > rows:
        notes.append(f"the file has no tokens from {rows} on, for which the embedding has no rows")
    metadata |= {"tokens": tokens, "token_type": types}
    if lists_merges and metadata.get("add_space_prefix") is False:
        _check_newlines(model["merges"])
        shown = {i: USER_DEFINED for i, text in enumerate(tokens) if text in SHOWN}
        kinds = [shown.get(i, kind) for i, kind in enumerate(types)]
        metadata |= {"model": LISTED, "pre": LISTED, "token_type": kinds}
    if metadata["model"] == "llama":
        metadata["scores"] = _scores(model["merges"], tokens)
    else:
        metadata["merges"] = [" ".join(pair) for pair in model["merges"]]
    metadata |= _special_ids(tokenizer, end_ids, tokens, types)
    metadata = {PREFIX + key: value for key, value in metadata.items()}
    for name, template in tokenizer.chat_templates.items():
        key = "tokenizer.chat_template"
        metadata[key if name == "default" else f"{key}.{name}"] = template
    if metadata[f"{PREFIX}model"] == LISTED and not metadata[f"{PREFIX}add_bos_token"]:
        notes.append("llama.cpp puts BOS before every text, and the tokenizer does not")
    named = [name for name in tokenizer.chat_templates if name != "default"]
    metadata |= {"tokenizer.chat_templates": named} if named else {}
    _check(metadata, parts)
    return metadata, notes + _strip_notes(parts)


def _unsupported(reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"no GGUF file can hold the tokenizer: {reason}")


def _byte_level(parts: Mapping[str, Any]) -> tuple[Metadata, list[str]]:
    cut = _cut(parts)
    name = next((name for name, other in PRE_TOKENIZERS.items() if other == cut), None)
    if cut is None or name is None:
        raise _unnamed(parts)
    composes = "llama.cpp does not compose characters (NFC), which the tokenizer does first"
    return {"model": "gpt2", "pre": name}, [composes] if cut.nfc else []


def _unnamed(parts: Mapping[str, Any]) -> UnsupportedModelError:
    steps = [
        f"{step['type']} at {str(*pattern.values()):.60}"
        if (pattern := step.get("pattern"))
        else step["type"]
        for part, key in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers"))
        for step in _steps(parts[part], key)
    ]
    return _unsupported(
        f"llama.cpp has no name for how it cuts text ({', then '.join(steps) or 'not at all'})."
    )


def _steps(part: Any, key: str) -> list[dict[str, Any]]:
    """A normalizer's or pre-tokenizer's steps; none where there is none."""
    if part is None:
        return []
    return part[key] if part["type"] == "Sequence" else [part]


def _cut(parts: Mapping[str, Any]) -> Cut | None:
    """Name of a byte-level tokenizer's pre-tokenization; None if it has none here."""
    normal = _steps(parts["normalizer"], "normalizers")
    *steps, last = _steps(parts["pre_tokenizer"], "pretokenizers") or [{"type": None}]
    single = {"type": "Digits", "individual_digits": True}
    digits = bool(steps) and steps[0] == single
    patterns = []
    for step in steps[digits:]:
        if step == single:
            patterns.append(DIGIT)
            continue
        # What is not matched is a piece as well, or there is nothing that is not.
        behavior = (step.get("behavior"), step.get("invert"))
        regex = step.get("pattern", {}).get("Regex")
        if behavior not in (("Isolated", False), ("Removed", True)) or regex is None:
            return None
        patterns.append(regex)
    is_level = last["type"] == "ByteLevel" and not last["add_prefix_space"]
    composes = [step["type"] for step in normal]
    if not is_level or last["use_regex"] == bool(patterns) or composes not in ([], ["NFC"]):
        return None
    whole = bool(parts["model"].get("ignore_merges"))
    return Cut(tuple(patterns), digits, bool(composes), whole)


def _sentencepiece(parts: Mapping[str, Any]) -> tuple[Metadata, list[str]]:
    """SentencePiece's, whose spaces are letters; with one before the text, or without."""
    steps = _steps(parts["normalizer"], "normalizers")
    before = _steps(parts["pre_tokenizer"], "pretokenizers")
    prepends = {"type": "Prepend", "prepend": SPACE}
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    notes, has_prefix = [], bool(steps) and steps[0] == prepends
    if not steps and [step["type"] for step in before] == ["Metaspace"] and not before[0]["split"]:
        scheme = before[0]["prepend_scheme"]
        has_prefix = scheme != "never"
        if has_prefix:
            notes.append(
                "llama.cpp puts a space before the text after each special token, and the "
                f"tokenizer {'at the start alone' if scheme == 'first' else 'where none is'}"
            )
    elif steps[has_prefix:] != [replaces] or any(not _finds_no_space(step) for step in before):
        raise _unnamed(parts)
    return {"model": "llama", "pre": "default", "add_space_prefix": has_prefix}, notes


def _check_newlines(merges: Sequence[Sequence[str]]) -> None:
    pieces = ("".join(pair) for pair in merges)
    mixed = next((piece for piece in pieces if "\n" in piece and piece.strip("\n")), None)
    if mixed is not None:
        raise _unsupported(f"llama.cpp cuts text at newlines, and it merges {mixed!r:.40}.")


def _finds_no_space(step: Mapping[str, Any]) -> bool:
    """Whether a pre-tokenizer cuts at spaces, of which the normalizer has left none."""
    return step["type"] == "Split" and step["pattern"] == {"String": " "}


def _tokens(parts: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    model = parts["model"]
    pieces = {i: token for token, i in model["vocab"].items()}
    merged = {"".join(pair) for pair in model["merges"]}
    added = {token["id"]: token for token in parts["added_tokens"]}
    tokens, types = [f"[PAD{i}]" for i in range(rows)], [UNUSED] * rows
    for i in range(rows):
        if i in added:
            text, is_special = added[i]["content"], added[i]["special"]
            kind = CONTROL if is_special else USER_DEFINED
            if model.get("byte_fallback"):
                # Runs of spaces come by merging, from spaces that are letters by then.
                kind = NORMAL if SPACE in text and text in merged and not is_special else kind
                kind = UNKNOWN if text == model["unk_token"] else kind
        elif i in pieces:
            text, kind = pieces[i], NORMAL
            if model.get("byte_fallback") and len(text) == 6 and text.startswith("<0x"):
                kind = BYTE
            kind = UNKNOWN if text == model["unk_token"] else kind
        else:
            continue
        tokens[i], types[i] = text, kind
    return tokens, types


def _scores(merges: Sequence[Sequence[str]], tokens: Sequence[str]) -> list[float]:
    """The better the sooner a piece is merged, as SentencePiece's are."""
    order = dict.fromkeys("".join(pair) for pair in merges)
    ranks = {piece: rank for rank, piece in enumerate(order)}
    return [-float(ranks.get(token, len(ranks))) for token in tokens]


def _special_ids(
    tokenizer: Tokenizer, end_ids: Sequence[int], tokens: Sequence[str], types: Sequence[int]
) -> Metadata:
    """Ids of special tokens, and which stand around a text."""
    metadata: Metadata = {}
    for name, key in SPECIAL_IDS.items():
        token_id = tokenizer.token_to_id(tokenizer.special_tokens.get(name, ""))
        if token_id is not None and token_id < len(tokens):
            metadata[key] = token_id
    before, after = _around(tokenizer)
    for ids, key in ((before, "bos_token_id"), (after, "eos_token_id")):
        if len(ids) > 1 or (ids and metadata.setdefault(key, ids[0]) != ids[0]):
            shown = " ".join(tokenizer.id_to_token(i) or str(i) for i in (*before, *after))
            raise _unsupported(
                f"it puts {shown} around a text, and llama.cpp puts BOS before it and EOS after it."
            )
    metadata |= {"add_bos_token": bool(before), "add_eos_token": bool(after)}
    end_ids = [i for i in end_ids if i < len(tokens)]
    if end_ids and metadata.get("eos_token_id") not in end_ids and not after:
        metadata["eos_token_id"] = end_ids[0]
    control = [text for text, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    known = {metadata.get("eos_token_id"), *(tokens.index(text) for text in end_texts(control))}
    others = [i for i in end_ids if i not in known]
    for key, token_id in zip(("eot_token_id", "eom_token_id"), others, strict=False):
        metadata[key] = token_id
    if len(others) > 2:
        raise _unsupported(f"{len(end_ids)} ids end a sequence, of which it can name three.")
    return metadata


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens that the tokenizer adds before and after a text."""
    with_all, plain = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    extra = len(with_all) - len(plain)
    start = next(i for i in range(extra + 1) if with_all[i : i + len(plain)] == plain)
    return with_all[:start], with_all[start + len(plain) :]


def _strip_notes(parts: Mapping[str, Any]) -> list[str]:
    flags = ("lstrip", "rstrip", "single_word")
    stripped = [t["content"] for t in parts["added_tokens"] if any(t.get(flag) for flag in flags)]
    if not stripped:
        return []
    shown = f"{', '.join(stripped[:3])}{' ...' if stripped[3:] else ''}"
    return [f"llama.cpp keeps spaces beside {shown}, where the tokenizer drops them"]


def _check(metadata: Metadata, parts: Mapping[str, Any]) -> None:
    """Reads what would be written: it must merge as the tokenizer does."""
    backend, _, _ = read_gguf_tokenizer(HeaderOnly(Path("tokenizer.json"), metadata, {}, {}))
    again = json.loads(backend.to_str())["model"]
    wanted = parts["model"]["merges"]
    if _pieces(again["merges"]) != _pieces(wanted):
        raise _unsupported("its merges are not in the order of scores that its pieces could have.")


def _pieces(merges: Sequence[Sequence[str]]) -> tuple[list[str], set[tuple[str, ...]]]:
    return list(dict.fromkeys("".join(pair) for pair in merges)), {tuple(pair) for pair in merges}
