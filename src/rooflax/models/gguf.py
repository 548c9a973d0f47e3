"""Declaration of a family's GGUF files, and the reader of their metadata.

Each family's file has one declaration, `GGUF`: metadata keys, tensor names, what llama.cpp computes
of it. The metadata is a closed world as config.json is: an unread key of the architecture
is an error that names it. llama3's RoPE scaling, which such files keep as a tensor of divisors, is
recovered as the numbers that it was made from.

Source: https://github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py, conversion/ and src/models/.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.models.common import MOST_LAYERS, layer_types
from rooflax.models.gguf_names import COMMON, NameTable
from rooflax.nn.decoder import Decoder
from rooflax.nn.rope import LEAST, MOST, Rope, inverse_frequencies

REQUIRED = ("context_length", "_epsilon")
"""Ends of keys without which llama.cpp opens no file (llama-model.cpp, src/models/)."""
ROPE_FACTORS = "rope_freqs.weight"
LONGROPE_FACTORS = {
    "short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight",
}  # fmt: skip
YARN = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
GGUF_POOLING = {1: "mean", 2: "first", 3: "last"}
"""Values of llama.cpp's `pooling_type`; 0 is none, 4 a score by a head."""
GGUF_HEAD = ("cls", "cls.norm", "cls.output")
"""Layers of a head that scores pairs of texts."""
GGUF_DENSE = ("dense_2", "dense_3")
"""Matrices of layers behind the pooling, in their order."""
MAX_FACTOR_ERROR = 1e-5
STILL = 1e30
"""Divisor of a frequency that is 0."""

Raw = dict[str, Any]
"""Keys of config.json."""
Metadata = dict[str, Any]
"""By key: bool, int, float, str, a list of one of them, or an array."""


@runtime_checkable
class Info(Protocol):
    """A tensor's type and shape, as the header has them."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@runtime_checkable
class Header(Protocol):
    """Metadata and tensors of a file, or of one that is not written yet."""

    path: Path
    metadata: dict[str, Any]

    def names(self) -> list[str]: ...
    def info(self, name: str) -> Info: ...
    def read(self, name: str) -> np.ndarray: ...


class ToldBy(NamedTuple):
    """The key whose value tells a family's files from others of the same architecture."""

    architecture: str
    key: str
    is_ours: Callable[[Any], bool]


@dataclass(frozen=True)
class GGUFSpec:
    """Declaration of a family's GGUF files, and of which of its models llama.cpp computes.

    Attributes:
        architecture: `general.architecture` of files that are written.
        both_ways: the same of models whose tokens attend both ways.
        told_by: where files of an architecture are another family's, too; None is the family that
            they are of otherwise.
        keys: metadata keys, without the architecture, to keys of config.json.
        required: ends of keys without which llama.cpp opens no file, beside those of every family.
        biases: flags of config.json for biases, and the tensor of a layer that has one then.
        stated: what files cannot say, and llama.cpp computes.
        absent: values of config.json's keys where the file has none.
        waived: patterns of keys that change nothing.
        partial: RoPE may rotate a part of a head's dimensions.
        scales_queries: YaRN has an attention temperature by position (llama_4_scaling_beta).
        layers: reads keys with a value for each layer, before all others; None reads K/V heads.
        read: reads what depends on other keys; config.json as far as it is known is its argument.
        write: adds metadata beside the keys; its second argument is config.json.
        tensors: those that `gguf_names.TENSORS` does not have or has otherwise; or what gives them
            of a model and the names of the file's tensors, none of a file that is written.
        adds_one: the converter adds one to norms.
        permuted: the converter permutes rows of q and k, in layers without RoPE too.
        square: llama.cpp requires heads as wide as the hidden states together.
        tied: whether llama.cpp takes the embedding for the head (False: not without a head's own
            tensor); None is both.
        output_bias, mlp_bias: llama.cpp adds such biases.
        ignores_window: llama.cpp reads the window, which is of all layers, and does not apply it.
        lists_merges: llama.cpp requires SentencePiece tokenizers with a list of merges.
        is_written: files are written as well as read.
        lacks: what else llama.cpp does not compute of a model ("whose ..."), None where it does.
    """

    architecture: str
    both_ways: str | None = None
    told_by: ToldBy | None = None
    keys: Mapping[str, str] = field(default_factory=lambda: COMMON)
    required: tuple[str, ...] = ()
    biases: Mapping[str, str] = field(default_factory=lambda: {"attention_bias": "attn_q"})
    stated: Mapping[str, Any] = field(default_factory=dict)
    absent: Mapping[str, Any] = field(default_factory=dict)
    waived: tuple[str, ...] = ()
    partial: bool = False
    scales_queries: bool = False
    layers: Callable[[MetadataReader], Raw] | None = None
    read: Callable[[MetadataReader, Raw], Raw] = lambda reader, raw: reader.attention(raw)
    write: Callable[[Decoder, Raw], Metadata] = lambda decoder, raw: {}
    tensors: NameTable | Callable[[Decoder, Collection[str]], NameTable] = field(
        default_factory=dict
    )
    adds_one: bool = False
    permuted: bool = False
    square: bool = False
    tied: bool | None = None
    output_bias: bool = False
    mlp_bias: bool = False
    ignores_window: bool = False
    lists_merges: bool = False
    is_written: bool = True
    lacks: Callable[[Decoder], str | None] = lambda decoder: None

    @property
    def architectures(self) -> list[str]:
        """Architectures of the family's files that are read."""
        name = self.told_by.architecture if self.told_by else self.architecture
        return [name, self.both_ways] if self.both_ways else [name]


def full_rope(decoder: Decoder) -> Rope:
    """RoPE of layers without a window, where there are some."""
    ropes = {layer.attention.window is None: layer.attention.rope for layer in decoder.layers[::-1]
             if layer.attention.rope is not None}  # fmt: skip
    return ropes.get(True) or decoder.ropes[0]


def write_local_theta(decoder: Decoder, raw: Raw) -> Metadata:
    """Theta of layers with a window."""
    local = next((x.rope for x in decoder.attentions if x.window and x.rope), None)
    return {"rope.freq_base_swa": local.theta} if local else {}


class MetadataReader:
    """The metadata of one file, read key by key; `finish` rejects unread keys.

    Args:
        architecture: as the file names it.
        families: those that have files of this architecture, by model_type.
    """

    def __init__(self, file: Header, architecture: str, families: Mapping[str, GGUFSpec]):
        self.file, self._prefix, self._read = file, f"{architecture}.", set[str]()
        told = {name: spec.told_by for name, spec in families.items()}
        ours = [name for name, by in told.items() if by and by.is_ours(self.get(by.key))]
        self.model_type = [*ours, *(name for name, by in told.items() if by is None)][0]
        self.spec = families[self.model_type]
        self.both_ways = architecture == self.spec.both_ways

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(self._prefix + key)
        value = self.file.metadata.get(self._prefix + key, default)
        if isinstance(value, list | np.ndarray):
            raise UnsupportedModelError(
                f"{self.file.path} gives {self._prefix + key} layer by layer, which rooflax does "
                f"not compute."
            )
        return value

    def per_layer(self, key: str) -> list[Any] | None:
        """A value of each layer; None where the file has none, or one for all."""
        value = self.file.metadata.get(self._prefix + key)
        if not isinstance(value, list | np.ndarray):
            return None
        self._read.add(self._prefix + key)
        return value if isinstance(value, list) else value.tolist()

    def expect(self, key: str, *wanted: Any) -> None:
        """The key is absent or has one of these values."""
        value = self.get(key)
        if value is not None and value not in wanted:
            raise UnsupportedModelError(
                f"{self.file.path} has {self._prefix + key} = {value!r:.80}, which rooflax does "
                f"not compute (only {' or '.join(f'{x!r:.80}' for x in wanted)})."
            )

    def waive(self, *patterns: str) -> None:
        """Keys that change nothing here."""
        for key in self.file.metadata:
            if any(fnmatchcase(key, self._prefix + pattern) for pattern in patterns):
                self._read.add(key)

    def config(self) -> Raw:
        """The config.json that the metadata stands for."""
        spec = self.spec
        self._check_count("block_count", 1)
        self._check_count("nextn_predict_layers", 0)
        per_layer = spec.layers(self) if spec.layers else self.kv_heads()
        keys = ((key, hf) for key, hf in spec.keys.items() if hf not in per_layer)
        stated = {hf: self.get(key) for key, hf in keys} | per_layer
        raw = {key: value for key, value in stated.items() if value is not None}
        names = set(self.file.names())
        raw["model_type"] = self.model_type
        raw["tie_word_embeddings"] = "output.weight" not in names
        if "token_embd.weight" in names:
            raw.setdefault("vocab_size", self.file.info("token_embd.weight").shape[0])
        biased = {name.split(".")[2] for name in names if re.fullmatch(r"blk\.\d+\..*\.bias", name)}
        raw |= {key: tensor in biased for key, tensor in spec.biases.items()}
        raw = {**spec.absent, **raw, **spec.stated}
        if self.both_ways:
            raw |= {"use_bidirectional_attention": True}
        self.waive(*spec.waived)
        if "attention.sliding_window" in spec.keys:
            raw |= self._window_layers()
        raw |= spec.read(self, raw)
        if any(self.file.info(n).dtype == "BF16" for n in names):
            raw["torch_dtype"] = "bfloat16"
        return raw

    def _check_count(self, key: str, least: int) -> None:
        """Lists are made of so many layers."""
        count = self.file.metadata.get(self._prefix + key)
        is_list = isinstance(count, list | np.ndarray)  # which `get` rejects
        whole = type(count) is int and least <= count <= MOST_LAYERS
        if not (count is None or is_list or whole):
            raise CheckpointError(
                f"{self.file.path} has {self._prefix + key} = {count!r:.80}; it must be a whole "
                f"number from {least} to {MOST_LAYERS}."
            )

    def kv_heads(self, *, or_none: bool = False) -> Raw:
        """K/V heads that a file gives layer by layer, one number.

        Args:
            or_none: some layers have none.
        """
        heads = self.per_layer("attention.head_count_kv")
        if heads is None:
            return {}
        counts = sorted(set(heads) - ({0} if or_none else set()))
        if len(counts) != 1:
            shown = " and with ".join(f"{count!s:.20}" for count in counts[:4]) or "no"
            shown += " and with others" if len(counts) > 4 else ""
            raise UnsupportedModelError(
                f"{self.file.path} has layers with {shown} K/V heads, which rooflax does not "
                f"compute."
            )
        return {"num_key_value_heads": counts[0]}

    def count_without(self, further: Any, raw: Raw) -> Raw:
        """The number of layers without those that predict further tokens, which files count too."""
        layers = raw.get("num_hidden_layers")
        if type(layers) is int and type(further) is int:
            layers -= further
        return {"num_hidden_layers": layers}

    def check_dense(self) -> None:
        """Layers behind the pooling have the sizes that the metadata states."""
        for name in {f"{dense}.weight" for dense in GGUF_DENSE} & set(self.file.names()):
            shape, dense = self.file.info(name).shape, name.partition(".")[0]
            if len(shape) != 2:
                raise CheckpointError(f"{self.file.path}: {name} {list(shape)} is no matrix.")
            self.expect(f"{dense}_feat_out", shape[0])
            self.expect(f"{dense}_feat_in", shape[1])

    def encoder(self, raw: Raw) -> Raw:
        """Fields that a file of an encoder leaves out: its heads are as wide as its hidden states
        together, and it attends both ways."""
        heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
        if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
            for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
                self.expect(key, hidden // heads)
        self.expect("attention.causal", False)
        self.expect("attention.head_count_kv", heads)
        self.expect("rope.scaling.type", "none")
        self.expect("pooling_type", 0, 4, *GGUF_POOLING)
        self.waive("classifier.*")
        types = "token_types.weight"
        if types not in self.file.names():
            return {}
        shape = self.file.info(types).shape
        return {"type_vocab_size": shape[0] if len(shape) > 1 else 1}

    def check_layers(self, key: str, values: list[Any], wanted: list[Any]) -> None:
        """
        Raises:
            UnsupportedModelError: a key's values by layer are not as wanted.
        """
        if values != wanted:
            raise UnsupportedModelError(
                f"{self.file.path} has {self._prefix + key} = {values!r:.80}, which differs within "
                f"a kind of layers."
            )

    def _window_layers(self) -> Raw:
        """`layer_types`, which files have as a flag of each layer."""
        flags = self.per_layer("attention.sliding_window_pattern")
        if flags is None:
            return {}
        return {"layer_types": layer_types(tuple(1 if flag else None for flag in flags))}

    def attention(self, raw: Raw) -> Raw:
        """Sizes of heads, which are the same in all layers, and RoPE."""
        heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
        head_dim = raw.get("head_dim")
        if head_dim is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
            head_dim = hidden // heads
        self.expect("attention.value_length", head_dim)
        partial = {}
        if self.spec.partial and isinstance(head_dim, int) and head_dim > 0:
            dim = self.get("rope.dimension_count", head_dim)
            partial = {"partial_rotary_factor": dim / head_dim if type(dim) is int else dim}
        else:
            self.expect("rope.dimension_count", head_dim)
        self.expect("attention.causal", not self.both_ways)
        self.expect("pooling_type", 0, *GGUF_POOLING)
        if "expert_count" not in self.spec.keys:
            self.expect("expert_count", 0)
            self.expect("expert_used_count", 0)
        scale = self.get("attention.scale") if "attention.scale" in self.spec.keys else 1
        if not scale and type(head_dim) is int and head_dim > 0:  # llama.cpp's where it is absent
            partial["attention_multiplier"] = head_dim**-0.5
        theta = raw.get("rope_theta", 10_000.0)
        if "rope.freq_base_swa" not in self.spec.keys:
            self.expect("rope.freq_base_swa", theta)
        return {"rope_theta": theta, "rope_scaling": self.rope_scaling(head_dim, theta)} | partial

    def rope_scaling(self, head_dim: Any, theta: Any) -> Raw:
        kind = self.get("rope.scaling.type", "linear")
        factor = self.get("rope.scaling.factor", self.get("rope.scale_linear"))
        if all(name in self.file.names() for name in LONGROPE_FACTORS.values()):
            return self._longrope()
        for harmless in ("finetuned", "yarn_ext_factor"):
            self.expect(f"rope.scaling.{harmless}", True, False, 1.0)
        is_latent = "attention.kv_lora_rank" in self.spec.keys
        if kind != "yarn" or is_latent:
            self.expect("rope.scaling.attn_factor", 1.0)
        if ROPE_FACTORS in self.file.names():
            if factor not in (None, 0.0, 1.0):
                raise UnsupportedModelError(
                    f"{self.file.path} scales RoPE both by {ROPE_FACTORS} and by its metadata."
                )
            return self.recovered(head_dim, theta, "llama3")
        if kind == "none" or (kind == "linear" and factor in (None, 0.0, 1.0)):
            return {"rope_type": "default"}
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        scaling = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            times = self.get("rope.scaling.attn_factor", 1.0)
            if times != 1.0 and is_positive(times) and is_positive(factor):  # beside llama.cpp's
                scaling["attention_factor"] = times * (1 + 0.1 * math.log(factor))
            values = {hf: self.get(f"rope.scaling.{key}") for key, hf in YARN.items()}
            scaling |= {hf: value for hf, value in values.items() if value is not None}
        if self.spec.scales_queries:
            scaling["llama_4_scaling_beta"] = self.get("attention.temperature_scale")
            scaling |= {"mscale_all_dim": self.get("rope.scaling.yarn_log_multiplier")}
            scaling |= {"mscale": 1.0} if scaling["mscale_all_dim"] else {}
        times = self.get("rope.scaling.yarn_log_multiplier") if is_latent else None
        if isinstance(times, float) and times:  # of these files alone, a tenth
            scaling |= dict.fromkeys(
                ("mscale", "mscale_all_dim"), float(str(np.float32(times * 10)))
            )
        return {key: value for key, value in scaling.items() if value is not None}

    def _longrope(self) -> Raw:
        """Its two sets of factors, which are tensors; numbers as config.json had them."""
        scaling: Raw = {"rope_type": "longrope"}
        for hf, name in LONGROPE_FACTORS.items():
            if self.file.info(name).dtype != "F32":
                raise CheckpointError(f"{self.file.path}: {name} is not F32.")
            scaling[hf] = [float(str(x)) for x in np.ravel(self.file.read(name))]
        factor = self.get("rope.scaling.attn_factor")
        return scaling | ({"attention_factor": factor} if factor is not None else {})

    def recovered(self, head_dim: Any, theta: Any, kind: str) -> Raw:
        """The `rope_scaling` ("llama3" or "proportional") that the tensor of divisors is made from.

        Raises:
            CheckpointError: there is no such tensor, or of another shape.
            UnsupportedModelError: its divisors are of no such scaling.
        """
        if ROPE_FACTORS not in self.file.names():
            raise CheckpointError(f"{self.file.path} has no tensor {ROPE_FACTORS!r}.")
        info = self.file.info(ROPE_FACTORS)
        if not is_positive(theta) or not LEAST <= theta <= MOST:
            raise CheckpointError(
                f"{self.file.path} has rope.freq_base = {theta!r:.80}; RoPE takes {LEAST:g} to "
                f"{MOST:g}."
            )
        if not isinstance(head_dim, int) or info.dtype != "F32" or info.shape != (head_dim // 2,):
            raise CheckpointError(
                f"{self.file.path}: {ROPE_FACTORS} is {info.dtype} {list(info.shape)}; wanted F32 "
                f"and one factor for each of half the head's {head_dim} dimensions."
            )
        divisors = np.array(self.file.read(ROPE_FACTORS), np.float64)
        recover = llama3_scaling if kind == "llama3" else proportional_scaling
        scaling = recover(divisors, inverse_frequencies(head_dim, float(theta), None))
        if scaling is None:
            raise UnsupportedModelError(
                f"{self.file.path}: {ROPE_FACTORS} does not hold the factors of {kind} scaling."
            )
        return scaling

    def check_required(self) -> None:
        """Keys that llama.cpp requires in every file, where families have a default."""
        for suffix in (*REQUIRED, *self.spec.required):
            keys = [key for key in self.spec.keys if key.endswith(suffix)]
            if keys and all(self.get(key) is None for key in keys):
                raise CheckpointError(
                    f"{self.file.path} has no {self._prefix}{keys[0]}, which every such file has."
                )

    def finish(self, ignore: Sequence[str]) -> None:
        """Rejects the architecture's keys that were not read."""
        for key in self.file.metadata:
            known = not key.startswith(self._prefix) or key in self._read
            if not known and not any(fnmatchcase(key, pattern) for pattern in ignore):
                shown = key[:200]  # as long as the file likes
                raise UnsupportedModelError(
                    f"{self.file.path} has the metadata {shown!r}, which rooflax does not read; "
                    f"if that changes no logit, pass ignore_config_keys {shown}."
                )


def is_positive(value: Any) -> bool:
    """Whether it is a number above zero."""
    return type(value) in (int, float) and value > 0


def llama3_scaling(divisors: np.ndarray, frequencies: np.ndarray) -> dict[str, Any] | None:
    """The `rope_scaling` from which llama3's divisors were made; None if there is none.

        1 / divisor = keep + (1 - keep) / factor,  keep = clip((turns - low) / (high - low), 0, 1)

    with turns = original / wavelength, linear in the frequency. So two divisors inside the band
    give original / (high - low) and low / (high - low); `low` is 1, as in every checkpoint.
    """
    if not np.isfinite(divisors).all() or (divisors < 1 - MAX_FACTOR_ERROR).any():
        return None
    factor = float(str(np.float32(divisors.max())))
    if factor <= 1 + MAX_FACTOR_ERROR:
        return {"rope_type": "default"}
    keep = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    inside = np.flatnonzero((keep > 1e-4) & (keep < 1 - 1e-4))
    if len(inside) < 2:
        return None
    slope, start = np.polyfit(frequencies[inside].astype(np.float64), keep[inside], 1)
    if not slope > 0 > start:
        return None
    high = float(f"{1 - 1 / start:.4g}")
    original = round(slope * 2 * math.pi * (high - 1))
    turns = original * frequencies / (2 * math.pi)
    kept = np.clip((turns - 1) / (high - 1), 0, 1)
    wanted = 1 / (kept + (1 - kept) / factor)
    if original < 1 or not np.allclose(divisors, wanted, rtol=MAX_FACTOR_ERROR, atol=0):
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def proportional_scaling(divisors: np.ndarray, frequencies: np.ndarray) -> dict[str, Any] | None:
    """The `rope_scaling` of which the first frequencies turn and the others are still; None if the
    divisors are others."""
    half = len(frequencies)
    count = int((divisors < STILL / 2).sum())
    factor, share = float(str(np.float32(divisors[0]))), count / half
    wanted = np.where(np.arange(half) < count, factor, STILL)
    same = np.allclose(divisors, wanted, rtol=MAX_FACTOR_ERROR, atol=0)
    if not same or int(share * 2 * half // 2) != count:
        return None
    return {"rope_type": "proportional", "factor": factor, "partial_rotary_factor": share}
