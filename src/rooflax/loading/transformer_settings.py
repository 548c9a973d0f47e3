"""Reads the settings of sentence-transformers' first module, sentence_bert_config.json.

A closed world: a key is honoured, says what is done anyway, changes no vector or score, or is
rejected by name.

Source: sentence-transformers, base/modules/transformer.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.loading.json_files import read_json_object
from rooflax.loading.tokenizer_folder import lowers_case

TRANSFORMERS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Settings of the first module; the first of these files that has any counts."""
TRANSFORMER = TRANSFORMERS[0]
TOKENIZER = "tokenizer_config.json"
NO_LIMIT = 2**31
"""From here on a tokenizer's length is none: transformers writes 1e30."""


@dataclass(frozen=True)
class Task:
    """Task of the first module.

    Attributes:
        name: in the file.
        reads: its result among those of the transformer.
        gives: the name of its own result.
        modality: of what it is given: texts, or messages for the chat template.
    """

    name: str
    reads: str
    gives: str
    modality: str = "text"


EMBED = Task("feature-extraction", "last_hidden_state", "token_embeddings")
CLASSIFY = Task("sequence-classification", "logits", "scores")
GENERATE = Task("text-generation", "logits", "causal_logits", "message")


@dataclass(frozen=True)
class TransformerSettings:
    """Settings of a checkpoint's first module.

    Attributes:
        max_tokens: of a text, or a pair; None is the context.
        generation_prompt: the chat template writes what begins an answer.
    """

    max_tokens: int | None = None
    generation_prompt: bool = True


FORMS = ("flat", "auto")
"""Ways in which a chat template is given a message's content: a text."""
NO_SETTINGS = TransformerSettings()
ANY = object()
"""A value of any kind: honoured elsewhere, or without effect on vectors and scores."""
OLDER = {
    "model_args": "model_kwargs", "tokenizer_args": "processor_kwargs",
    "config_args": "config_kwargs",
}  # fmt: skip
"""Older names of keys."""
OF_HUB = dict.fromkeys(("trust_remote_code", "revision", "cache_dir", "local_files_only"), ANY)
ACCEPTED: dict[str, Any] = {
    "max_seq_length": ANY,
    "do_lower_case": ANY,
    "unpad_inputs": ANY,
    "query_length": None,
    "document_length": None,
    "query_expansion": None,
    "tokenizer_name_or_path": None,
    "model_kwargs": OF_HUB | dict.fromkeys(
        ("attn_implementation", "torch_dtype", "dtype", "device_map", "add_pooling_layer"), ANY
    ),
    "config_kwargs": OF_HUB | {"use_cache": ANY},
    "processor_kwargs": OF_HUB | dict.fromkeys(
        ("model_max_length", "padding_side", "use_fast"), ANY
    ),
    "processing_kwargs": {
        "common": {"padding": ANY}, "text": {"padding": ANY},
        "chat_template": {"add_generation_prompt": ANY, "restore_suffix": ANY},
    },
}  # fmt: skip
"""Values that are honoured, or that rooflax computes without being told, by key."""


def read_transformer(folder: Path, task: Task) -> TransformerSettings:
    """Reads the settings that go with a task. The longest text is, as in sentence-transformers, of
    the first module's maximum length, else the tokenizer's.

    Raises:
        UnsupportedModelError: a setting that is not computed, by name.
        CheckpointError: an impossible value.
    """
    names = TRANSFORMERS if (folder / "modules.json").is_file() else ()
    stated = ((name, read_json_object(folder / name)) for name in names)
    name, raw = next((each for each in stated if each[1]), (TRANSFORMER, {}))
    raw = {OLDER.get(key, key): value for key, value in raw.items()}
    modalities = raw.get("modality_config")
    for key, value in _not_computed(raw, ACCEPTED | _accepted_of(task, modalities), ""):
        raise UnsupportedModelError(
            f"{name} of {folder} has {key} = {value!r:.80}, which rooflax does not do."
        )
    if raw.get("do_lower_case") and not lowers_case(folder):
        raise UnsupportedModelError(
            f"{name} of {folder} has do_lower_case, which its tokenizer does not do, nor "
            f"rooflax before it."
        )
    key, most = "max_seq_length", raw.get("max_seq_length")
    processor = raw.get("processor_kwargs") or {}
    if processor.get("model_max_length") is not None:
        key, most = "model_max_length", processor["model_max_length"]
    if most is None:
        name, tokenizer = TOKENIZER, read_json_object(folder / TOKENIZER)
        key = "model_max_length" if "model_max_length" in tokenizer else "max_len"
        most = tokenizer.get(key)
        if isinstance(most, int | float) and most >= NO_LIMIT:
            most = None
        elif isinstance(most, float) and most.is_integer():
            most = int(most)
    if most is not None and not (type(most) is int and most > 0):
        raise CheckpointError(
            f"{name} of {folder} has {key} = {most!r:.80}; it must be a whole number above 0."
        )
    template = (raw.get("processing_kwargs") or {}).get("chat_template") or {}
    begins = template.get("add_generation_prompt", modalities is None)
    return TransformerSettings(most, bool(begins))


def transformer_file(task: Task, settings: TransformerSettings) -> dict[str, Any]:
    """The object that `read_transformer` reads; sentence-transformers embeds texts without it."""
    written: dict[str, Any] = {"max_seq_length": settings.max_tokens}
    if task != EMBED:
        written["transformer_task"] = task.name
    if task.modality == "message":
        how = {"method": "forward", "method_output_name": task.reads}
        written["modality_config"] = {"text": how, "message": how | {"format": "flat"}}
        written["module_output_name"] = task.gives
        template = {"add_generation_prompt": settings.generation_prompt}
        written["processing_kwargs"] = {"chat_template": template}
    return written


def _accepted_of(task: Task, modalities: Any) -> dict[str, Any]:
    """Values of the keys that say what the model is for.

    Args:
        modalities: as they are stated. Where there are messages, texts are made to such.
    """
    how = {"method": "forward", "method_output_name": task.reads}
    accepted: Any = {"text": how}
    if isinstance(modalities, dict):
        accepted |= {key: ANY for key in modalities if key not in ("text", "message")}
        if task.modality == "message":
            message = modalities.get("message")
            form = message.get("format") if isinstance(message, dict) else None
            accepted |= {"message": how | {"format": form if form in FORMS else FORMS[0]}}
            accepted = accepted if "message" in modalities else None
    return {
        "transformer_task": task.name, "module_output_name": task.gives,
        "modality_config": accepted,
    }  # fmt: skip


def _not_computed(stated: Any, accepted: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Keys, with the objects they are in, whose values are others than the accepted ones."""
    if accepted is ANY or stated is None or stated == accepted:
        return
    if not isinstance(stated, dict) or not isinstance(accepted, dict):
        yield path, stated
        return
    for key, value in stated.items():
        inner = f"{path}.{key}" if path else key
        if key in accepted:
            yield from _not_computed(value, accepted[key], inner)
        elif value is not None:
            yield inner, value
