"""adapter_config.json of PEFT: which linear layers an adapter changes, with which rank and scale.

Every key is honoured, says nothing about numbers, or is rejected by its name.

Source: huggingface/peft, src/peft/tuners/lora/config.py and tuners/tuners_utils.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.fields.kinds import is_number, is_whole
from rooflax.loading.json_files import ADAPTER, read_json_object
from rooflax.loading.patterns import MOST_PATTERNS, compiled, module_pattern

MAX_RANK, MAX_ALPHA = 4096, 1_000_000
MOST_NAMES = 10_000
ALL_LINEAR = "all-linear"
ELSEWHERE = frozenset({
    "auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core",
    "qalora_group_size", "revision", "runtime_config", "task_type", "ensure_weight_tying",
    "lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
})  # fmt: skip
"""Keys that say nothing about the numbers of a trained adapter; the last four how it was begun."""
DEFAULT_TARGETS = {"gpt2": ("c_attn",), "phi3": ("qkv_proj",)} | dict.fromkeys(
    ("bert", "roberta", "xlm-roberta"), ("query", "value")
)
EXPERTS_SINCE = "0.19.1"
"""PEFT that has A and B of experts as they are read here."""
CHANGED_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Ways to begin that change the base model's weights."""


@dataclass(frozen=True)
class AdapterConfig:
    """Contents of adapter_config.json.

    Attributes:
        rank, alpha: of layers that no pattern names.
        target_modules, exclude_modules: names or ends of modules' paths, or a pattern of whole
            paths; "all-linear" is every linear layer but the head.
        layers, layers_patterns: numbers of the layers to change, and the names before the number;
            None is all layers, no names is any. A module whose whole path is named is changed in
            any layer, and without one.
        rank_pattern, alpha_pattern: by patterns that paths end with.
        modules_to_save: names or ends of paths of modules whose whole weight is in the file.
        target_parameters: ends of paths of experts' parameters to change.
        dropout: of what A multiplies, in training.
        version: numbers of the PEFT that wrote it; none where it does not say.
        warning: what is to be said of it.
    """

    rank: int = 8
    alpha: float = 8.0
    target_modules: tuple[str, ...] | str = ("q_proj", "v_proj")
    exclude_modules: tuple[str, ...] | str = ()
    layers: tuple[int, ...] | None = None
    layers_patterns: tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: tuple[str, ...] = ()
    target_parameters: tuple[str, ...] = ()
    dropout: float = 0.0
    version: tuple[int, ...] = ()
    warning: str | None = None

    def changes(self, module: str) -> bool:
        """Whether a linear layer has an adapter, by its module's path."""
        if _names(self.exclude_modules, module) or self.replaces(module):
            return False
        if is_all_linear(self.target_modules):
            is_target = module.rpartition(".")[2] != "lm_head"
        elif not isinstance(self.target_modules, str) and module in self.target_modules:
            return True
        else:
            is_target = _names(self.target_modules, module)
        return is_target and (self.layers is None or self._layer(module) in self.layers)

    def replaces(self, module: str) -> bool:
        """Whether the file has a module's whole weight, by its path."""
        return _names(self.modules_to_save, module)

    def changes_experts(self, parameter: str) -> bool:
        """Whether experts have an adapter, by their parameter's path."""
        return _names(self.target_parameters, parameter)

    def _layer(self, module: str) -> int | None:
        """The first number in a path, or the one behind one of the patterns."""
        for pattern in self.layers_patterns:
            if number := compiled(_numbered(pattern)).match(module):
                return int(number["number"])
        number = None if self.layers_patterns else re.match(r".*?\.[^.]*\.(\d+)\.", module)
        return int(number[1]) if number else None

    def rank_of(self, module: str) -> int:
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Scale of B A: alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
        rank, alpha = self.rank_of(module), _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def to_json(self, base: str | None) -> dict[str, Any]:
        """The keys that PEFT needs to read the adapter.

        Args:
            base: the model's name.
        """
        targets = self.target_modules
        version = {"peft_version": EXPERTS_SINCE} if self.target_parameters else {}
        return version | {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "inference_mode": True,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "use_rslora": self.use_rslora,
            "use_dora": self.use_dora,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "target_modules": targets if isinstance(targets, str) else list(targets),
            "layers_to_transform": None if self.layers is None else list(self.layers),
            "modules_to_save": list(self.modules_to_save) or None,
            "target_parameters": list(self.target_parameters) or None,
        }


def numbers_of(version: str) -> tuple[int, ...]:
    """Numbers of a version, which ends of developers' ones may follow; none of another text."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})", version)
    return tuple(map(int, match.groups())) if match else ()


def is_all_linear(names: object) -> bool:
    return isinstance(names, str) and names.lower() == ALL_LINEAR


def _names(names: tuple[str, ...] | str, module: str) -> bool:
    if isinstance(names, str):
        return compiled(names).fullmatch(module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _at_end(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def _numbered(pattern: str) -> str:
    return rf".*\.(?:{pattern})\.(?P<number>\d+)\."


def _by_pattern(values: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    matching = (v for key, v in values.items() if compiled(_at_end(key)).match(module))
    return next(matching, otherwise)


def read_adapter_config(folder: Path, family: str) -> AdapterConfig:
    """
    Args:
        family: of the base model, for an adapter that does not say what it changes.

    Raises:
        CheckpointError: there is no adapter_config.json, or a key has an impossible value.
        UnsupportedModelError: it is no LoRA adapter, or a key asks for what is not computed.
    """
    path = folder / ADAPTER
    raw = read_json_object(path)
    if not raw:
        raise CheckpointError(
            f"{folder} has no {ADAPTER}; an adapter is a folder with that and "
            f"adapter_model.safetensors, as PEFT saves it."
        )
    return _Reader(path, raw).config(family)


class _Reader:
    """The keys of a file, each asked for once."""

    def __init__(self, path: Path, raw: Mapping[str, Any]):
        self._path, self._left = path, dict(raw)

    def config(self, family: str) -> AdapterConfig:
        kind = self._take("peft_type", "LORA")
        if kind != "LORA":
            raise UnsupportedModelError(
                f"{self._path} says peft_type = {kind!r:.80}; rooflax reads LORA adapters only."
            )
        biases = self._take("bias", "none")
        if biases != "none":
            self._reject("bias", biases)
        for key in ("use_rslora", "use_dora", "fan_in_fan_out"):
            if not isinstance(self._left.get(key) or False, bool):
                raise self._bad(key, self._left[key], "true or false")
        self._take("fan_in_fan_out", False)  # how the base lies, which its own table says
        begun = str(self._take("init_lora_weights", True))
        warning = None
        if begun.lower().startswith(CHANGED_BASE):
            warning = (
                f"{self._path.parent} was begun with {begun}, which changed its base model; it "
                f"fits that changed model only."
            )
        config = AdapterConfig(
            rank=self._rank("r", self._take("r", 8)),
            alpha=self._alpha("lora_alpha", self._take("lora_alpha", 8)),
            target_modules=self._modules("target_modules")
            or DEFAULT_TARGETS.get(family, ("q_proj", "v_proj")),
            exclude_modules=self._modules("exclude_modules") or (),
            layers=self._layers(),
            layers_patterns=tuple(
                self._pattern("layers_pattern", one, _numbered)
                for one in self._texts("layers_pattern", one_too=True)
            ),
            rank_pattern=self._patterns("rank_pattern", self._rank),
            alpha_pattern=self._patterns("alpha_pattern", self._alpha),
            use_rslora=bool(self._take("use_rslora", False)),
            use_dora=bool(self._take("use_dora", False)),
            modules_to_save=self._texts("modules_to_save"),
            target_parameters=self._texts("target_parameters"),
            version=numbers_of(str(self._take("peft_version", ""))),
            warning=warning,
        )
        for key, value in self._left.items():
            if key not in ELSEWHERE and value not in (None, False, "", [], {}):
                self._reject(key, value)
        return config

    def _take(self, key: str, otherwise: Any) -> Any:
        value = self._left.pop(key, None)
        return otherwise if value is None else value

    def _bad(self, key: str, value: Any, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self._path} has {key} = {value!r:.80}; it must be {wanted}.")

    def _reject(self, key: str, value: Any) -> None:
        raise UnsupportedModelError(
            f"{self._path} has {key:.80} = {value!r:.80}, which rooflax does not apply beside a "
            f"base model; merge the adapter with PEFT, and name the result."
        )

    def _rank(self, key: str, value: Any) -> int:
        if not is_whole(value, int) or not 1 <= value <= MAX_RANK:
            raise self._bad(key, value, f"a whole number from 1 to {MAX_RANK}")
        return value

    def _alpha(self, key: str, value: Any) -> float:
        if not is_number(value) or abs(value) > MAX_ALPHA:
            raise self._bad(key, value, f"a number of at most {MAX_ALPHA:,}")
        return float(value)

    def _layers(self) -> tuple[int, ...] | None:
        value = self._left.pop("layers_to_transform", None)
        if value is None:
            return None
        numbers = value if isinstance(value, list) else [value]
        if len(numbers) > MOST_NAMES or not all(is_whole(n, int) and n >= 0 for n in numbers):
            raise self._bad("layers_to_transform", value, "numbers of layers")
        return tuple(numbers) or None

    def _modules(self, key: str) -> tuple[str, ...] | str | None:
        value = self._left.get(key)
        if isinstance(value, str):
            del self._left[key]
            return value if is_all_linear(value) else self._pattern(key, value)
        return self._texts(key) or None

    def _texts(self, key: str, *, one_too: bool = False) -> tuple[str, ...]:
        value = self._left.pop(key, None)
        if value is None:
            return ()
        texts = [value] if one_too and isinstance(value, str) else value
        is_list = isinstance(texts, list) and len(texts) <= MOST_NAMES
        if not is_list or not all(isinstance(one, str) for one in texts):
            raise self._bad(key, value, "a list of names")
        return tuple(texts)

    def _patterns(self, key: str, read: Any) -> dict[str, Any]:
        value = self._take(key, {})
        if not isinstance(value, dict) or len(value) > MOST_PATTERNS:
            raise self._bad(key, value, f"an object of at most {MOST_PATTERNS} patterns")
        return {self._pattern(key, name, _at_end): read(key, item) for name, item in value.items()}

    def _pattern(self, key: str, pattern: str, inside: Callable[[str], str] = str) -> str:
        for one in (pattern, inside(pattern)):
            module_pattern(one, f"{self._path}: {key}")
        return pattern


def named(modules: Iterable[str]) -> str:
    """Some modules' paths, for an error."""
    names = sorted(modules)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(one[:120] for one in names[:3])}{more}"
