"""Finds the family of a config.json and reads its config. A family is a file of this folder."""

from __future__ import annotations

import fnmatch
import importlib.util
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol, runtime_checkable

from rooflax import models
from rooflax.errors import MAX_MEANT, CheckpointError, RequestError, UnsupportedModelError
from rooflax.models.config_reader import ConfigReader
from rooflax.models.gguf import GGUFSpec
from rooflax.models.repositories import instead
from rooflax.nn.decoder import Decoder

PAGE = 'the page "Models that rooflax runs", docs/models.md'
"""The page of the families, made of what this module knows; its title can be looked for."""
READ_QUANTIZATION = (
    "rooflax", "mxfp4", "fp8", "awq", "gptq", "compressed-tensors", "fbgemm_fp8", "modelopt",
    "bitsandbytes", "mlx", "auto-round", "intel/auto-round",
    "torchao",
)  # fmt: skip

CHANGED_BY_MLX = ("qwen3_next", "qwen3_5", "lfm2")
"""Begin the names of families whose norms or kernels mlx-lm writes otherwise."""


@runtime_checkable
class Family(Protocol):
    """Interface of a family module. Optional: its tensors' prefixes, HF_PREFIXES; a pattern of
    tensors that it does not use, SKIPPED; a MODEL_TYPE other than its file's name; its GGUF files,
    GGUF; and its tiny test checkpoint, TINY."""

    def config_from_hf(self, reader: ConfigReader) -> Decoder:
        """The architecture that a config.json describes."""
        ...

    def config_to_hf(self, decoder: Decoder) -> dict[str, Any]:
        """The config.json that transformers reads as this architecture."""
        ...


@cache
def family(name: str) -> Family:
    """The module of a family, imported when first asked for."""
    if (module := _module(name)) is None:
        raise UnsupportedModelError(
            f"model_type {name!r:.80} is not one of the {len(families())} that rooflax computes"
            f"{nearest(name, families())}."
        )
    return module


def _module(name: str) -> Any:
    """The file of that name in this folder, if it is a family's."""
    path = f"{__package__}.{name.replace('-', '_')}"
    if not name.replace("-", "_").isidentifier() or importlib.util.find_spec(path) is None:
        return None
    module = importlib.import_module(path)
    return module if _model_type(module) == name else None


def _model_type(module: Any) -> str | None:
    stem = module.__name__.rpartition(".")[2]
    return getattr(module, "MODEL_TYPE", stem) if hasattr(module, "config_from_hf") else None


@cache
def families() -> tuple[str, ...]:
    """Every family's name; imports all files of this folder."""
    stems = (info.name for info in pkgutil.iter_modules(models.__path__))
    named = (_model_type(importlib.import_module(f"{__package__}.{stem}")) for stem in stems)
    return tuple(name for name in named if name)


@cache
def gguf_families() -> dict[str, GGUFSpec]:
    """Declarations of GGUF files, by the family that has some; imports every family."""
    specs = ((name, getattr(family(name), "GGUF", None)) for name in families())
    return {name: spec for name, spec in specs if spec}


def nearest(name: object, known: Iterable[str]) -> str:
    """ "; the nearest are X, Y" where some names are close, and nothing where none is."""
    import difflib  # most commands end without it

    close = difflib.get_close_matches(str(name)[:MAX_MEANT], list(known), n=3, cutoff=0.65)
    if not close:
        return ""
    return f"; the nearest {'is' if len(close) == 1 else 'are'} {', '.join(close)}"


def check_waived(ignore: Sequence[str], keys: Mapping[str, Any], where: str) -> None:
    """
    Raises:
        RequestError: one of the keys (or patterns) is not there, nor in an object within.
    """
    paths, parts = set[str](), [("", keys)]
    while parts:
        path, part = parts.pop()
        paths.update(part, (f"{path}{key}" for key in part))
        parts += [(f"{path}{k}.", v) for k, v in part.items() if isinstance(v, Mapping)]
    for pattern in ignore:
        if not any(fnmatch.fnmatchcase(key, pattern) for key in paths):
            raise RequestError(
                f"ignore_config_keys names {pattern!r:.80}, which {where} does not have."
            )


def read_config(raw: Mapping[str, Any], *, ignore: Sequence[str] = ()) -> tuple[str, Decoder]:
    """The family's name and its architecture, from the object in config.json.

    Args:
        ignore: further keys (or patterns) to waive, those of an object within also with their
            path.

    Raises:
        UnsupportedModelError: unknown model_type, an unread key, a value we do not compute.
        CheckpointError: a key is missing or has an impossible value.
        RequestError: a key to waive is not there.
    """
    check_waived(ignore, raw, "config.json")
    name = raw.get("model_type")
    if not isinstance(name, str):
        raise CheckpointError("config.json has no model_type; it must name the architecture.")
    try:
        module = family(name)
        reader = ConfigReader(raw, ignore=ignore)
        check_quantization(reader.get("quantization_config", None))
        check_quantization(reader.get("compression_config", None))
        check_quantization(reader.get("quantization", None))  # MLX's older key
        _check_mlx(raw, name)
        config = module.config_from_hf(reader)
        reader.finish()
        _check_layers(config)
    except UnsupportedModelError as error:
        raise with_advice(error, raw) from None
    return name, config


def with_advice(error: UnsupportedModelError, raw: Mapping[str, Any]) -> UnsupportedModelError:
    """The error with repositories to take in place of this one, and the page of all."""
    advice = instead(raw, families())
    return UnsupportedModelError(f"{error}{advice} What is computed: {PAGE}.")


def _check_layers(config: Decoder) -> None:
    if not config.attentions:
        raise UnsupportedModelError("config.json has no layer with attention; rooflax needs one.")
    if "mlp" not in config.axis_sizes:
        raise UnsupportedModelError(
            "config.json has dense layers alone where experts are expected; rooflax needs one "
            "layer with them."
        )


def _check_mlx(raw: Mapping[str, Any], name: str) -> None:
    """Rejects what MLX converts otherwise than by quantizing."""
    if "quantization" in raw and name.startswith(CHANGED_BY_MLX):
        raise UnsupportedModelError(
            f"config.json says that MLX converted the checkpoint, which of {name} changes more "
            f"than it quantizes; take the checkpoint that it was made from."
        )


def check_quantization(value: Any) -> None:
    """Rejects by name a quantised checkpoint of a kind that we do not read."""
    if value is None:
        return
    method = value
    if isinstance(value, dict):
        method = value.get("quant_method", "mlx" if "group_size" in value else None)
    if method not in READ_QUANTIZATION or not isinstance(value, dict):
        raise UnsupportedModelError(
            f"config.json says the checkpoint is quantised by {method!r:.80}, which rooflax does "
            f"not read (only {', '.join(READ_QUANTIZATION)}); take the unquantised checkpoint."
        )
