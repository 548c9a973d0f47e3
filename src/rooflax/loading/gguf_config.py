"""Reads a GGUF file's metadata as config.json and generation defaults.

The families declare their keys (`GGUFSpec`). What comes out goes through their own config readers,
which know what can be computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rooflax.errors import RooflaxError, UnsupportedModelError
from rooflax.fields.sampling import SAMPLING
from rooflax.loading.generation_config import GenerationDefaults, generation_defaults
from rooflax.models.gguf import Header, MetadataReader, is_positive
from rooflax.models.registry import PAGE, check_waived, gguf_families, nearest, read_config

NOT_MODELS = {
    "adapter": "an adapter, which is no model; name its base model, and give the file as `lora`",
    "mmproj": "the image or audio part of a model (mmproj); name the model's own file",
    "imatrix": "an importance matrix and no model",
    "vocab": "a vocabulary without weights",
}
"""Values of `general.type`, and what such a file is."""
END_TEXTS = (
    "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|return|>",
    "<|call|>", "<end_of_turn>", "<|end|>", "<eos>", "</s>", "[EOS]", "[EOT]", "<EOT>",
    "<turn|>", "<|tool_response>",
)  # fmt: skip
"""Control tokens that end an answer, as llama.cpp has them; a file names three of them at most."""
ENDS_A_MESSAGE = "<|end|>"
"""The id in GPT-OSS's vocabulary, which has <|return|> for an answer."""
SAMPLING_KEYS = {one.gguf: name for name, one in SAMPLING.items() if one.gguf}


def read_gguf_config(
    file: Header, *, ignore: Sequence[str] = ()
) -> tuple[str, Any, dict[str, Any]]:
    """The family's name, its config, and the config.json that the metadata stands for.

    Args:
        ignore: further keys (or patterns) to pass over.

    Raises:
        UnsupportedModelError: an architecture or value that we do not compute, an unread key.
        CheckpointError: a key is missing or has an impossible value.
    """
    reader = _reader(file)
    raw = reader.config() | _end_tokens(file)
    check_waived(ignore, file.metadata, str(file.path))
    reader.finish(ignore)
    try:
        name, config = read_config(raw)
    except RooflaxError as error:
        reason = str(error).replace("config.json", "the config.json that its metadata stands for")
        raise type(error)(f"{file.path}: {reason}") from None
    reader.check_required()
    return name, config, raw


def _reader(file: Header) -> MetadataReader:
    architecture = file.metadata.get("general.architecture")
    kind = file.metadata.get("general.type")
    if isinstance(kind, str) and kind in NOT_MODELS:
        raise UnsupportedModelError(f"{file.path} is {NOT_MODELS[kind]}.")
    known = {one for spec in gguf_families().values() for one in spec.architectures}
    if not isinstance(architecture, str) or architecture not in known:
        raise UnsupportedModelError(
            f"{file.path} holds the architecture {architecture!r:.60}, which is not one of "
            f"the {len(known)} that rooflax computes{nearest(architecture, known)}. What is "
            f"computed: {PAGE}."
        )
    specs = gguf_families().items()
    of_it = {name: spec for name, spec in specs if architecture in spec.architectures}
    return MetadataReader(file, architecture, of_it)


def end_texts(control: Sequence[str]) -> list[str]:
    """Control tokens of a vocabulary that end an answer, whatever else the file names."""
    left_out = {ENDS_A_MESSAGE} if "<|return|>" in control else set()
    return [text for text in END_TEXTS if text in control and text not in left_out]


def _end_tokens(file: Header) -> dict[str, Any]:
    """`eos_token_id` and `bos_token_id`: what the file names, and control tokens known to end."""
    metadata = dict(file.metadata)
    ends = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, np.ndarray) and len(types) == len(tokens):
        control = [tokens[i] for i in np.flatnonzero((types == 3) | (types == 4))]
        ends += [tokens.index(text) for text in end_texts(control)]
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    ids = list(dict.fromkeys(i for i in ends if type(i) is int))
    return {"eos_token_id": ids, "bos_token_id": bos if type(bos) is int else None}


def gguf_generation_defaults(file: Header) -> GenerationDefaults:
    """Generation defaults of a file, and the ids that end a sequence.

    Raises:
        CheckpointError: a value has the wrong type or range.
    """
    values = {hf: file.metadata.get(f"general.sampling.{key}") for key, hf in SAMPLING_KEYS.items()}
    values["do_sample"] = True if is_positive(values["temperature"]) else None
    values["pad_token_id"] = file.metadata.get("tokenizer.ggml.padding_token_id")
    return generation_defaults(values | _end_tokens(file), file.path)
