"""PEFT's adapter folders: adapter_config.json and adapter_model.safetensors, read and written.
llama.cpp's adapter files are read into the same (loading/gguf_adapter.py).

Pickled adapter_model.bin is never read. A folder is checked against the model before anything of
it is used: every tensor belongs to a linear layer that the config names, in the shape that it must
have.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rooflax.errors import CheckpointError, RequestError, UnsupportedModelError
from rooflax.loading import mxfp4
from rooflax.loading.adapter_config import (
    EXPERTS_SINCE,
    AdapterConfig,
    is_all_linear,
    named,
    numbers_of,
    read_adapter_config,
)
from rooflax.loading.gguf_adapter import read_gguf_adapter
from rooflax.loading.json_files import ADAPTER
from rooflax.loading.model_info import ModelInfo
from rooflax.loading.packed import is_packed
from rooflax.loading.safetensors import (
    SafetensorsFile,
    TensorInfo,
    TensorToWrite,
    conversion_command,
    write_safetensors,
)
from rooflax.loading.source import ArraySource, DerivedSource, Source
from rooflax.loading.tensor_plan import NameMap
from rooflax.models.adapters import (
    HEAD,
    ExpertTarget,
    LowRank,
    Target,
    expert_targets,
    tables,
    targets,
)
from rooflax.models.registry import family
from rooflax.nn.decoder import Decoder

WEIGHTS, PICKLED = "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
_TENSOR = re.compile(
    r"base_model\.model\.(.+)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.default)?(?:\.weight)?"
)
FLOATING = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that fits a model, opened.

    Attributes:
        folder: where it lies, or llama.cpp's file.
        config: what it says of itself.
        targets: the linear layers that it changes, by their modules' paths.
        file: its tensors.
        stored: by module, the names of A, B, and with DoRA the magnitudes.
        replaced: tensors of the base by their names, and those that take their place.
        experts: by parameter, what it changes, and the names of A and B.
        paths: by module, its path as the file spells it, which the config's patterns are of; one
            that is missing is the module's.
    """

    folder: Path
    config: AdapterConfig
    targets: Mapping[str, Target]
    file: Source
    stored: Mapping[str, Mapping[str, str]]
    replaced: Mapping[str, str]
    experts: Mapping[str, tuple[ExpertTarget, str, str]] = field(default_factory=dict)
    paths: Mapping[str, str] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The largest of its layers'."""
        return max(map(self.rank_of, self.targets))

    def rank_of(self, module: str) -> int:
        return self.config.rank_of(self.paths.get(module, module))

    def scale_of(self, module: str) -> float:
        return self.config.scale_of(self.paths.get(module, module))

    @property
    def nbytes(self) -> int:
        """Bytes of A and B in float32."""
        return sum(
            4 * self.rank_of(module) * (target.inputs + target.outputs)
            for module, target in self.targets.items()
        )

    def read(self, info: ModelInfo) -> dict[str, LowRank]:
        """Its matrices in float32, by module.

        Args:
            info: the model, of whose tensors DoRA needs the norms.

        Raises:
            CheckpointError: a number is NaN or infinite, or B is with its scale, or a factor.
        """
        by_module = {}
        for module in self.targets:
            parts = {kind: self.tensor(names) for kind, names in self.stored[module].items()}
            a, b, scale = parts["lora_A"], parts["lora_B"], self.scale_of(module)
            with np.errstate(over="ignore"):
                largest = np.abs(b).max(initial=0.0) * np.float32(scale)
            if not np.isfinite(largest):  # beside others 0 times it would be NaN
                raise CheckpointError(
                    f"B of {module} in {self.folder} times its scale {scale:g} is beyond "
                    f"float32; train it again."
                )
            columns = None
            if self.config.use_dora:
                w = base_weight(info.weights(), info.family, self.targets[module])
                columns = _factors(parts[MAGNITUDE].reshape(-1), merged(w, a, b, scale))
                if not np.isfinite(columns).all():
                    raise CheckpointError(
                        f"{MAGNITUDE} of {module} in {self.folder} over the length of its weights "
                        f"is beyond float32; train it again."
                    )
            by_module[module] = LowRank(a, b, scale, columns)
        return by_module

    def tensor(self, name: str) -> np.ndarray:
        """One of the file's, in float32.

        Raises:
            CheckpointError: a number is NaN or infinite.
        """
        array = np.array(self.file.read(name), np.float32)
        if not np.isfinite(array).all():
            raise CheckpointError(f"{name} in {self.folder} holds NaN or infinity.")
        return array


def merged(w: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    """W + scale B A in float32, [out, in]."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = w.astype(np.float32) + np.float32(scale) * (b @ a)
    if not np.isfinite(total).all():
        raise CheckpointError("Weights with the adapter are beyond float32; train it again.")
    return total


def _factors(magnitude: np.ndarray, w: np.ndarray) -> np.ndarray:
    """DoRA's factors of the outputs, magnitude / |w|; 1 of one whose weights are zeros."""
    norm = np.linalg.norm(w, axis=1)
    with np.errstate(over="ignore"):
        return np.divide(magnitude, norm, out=np.ones_like(norm), where=norm > 0)


def _magnitude(part: LowRank) -> np.ndarray:
    """DoRA's lengths to save. Training leaves an output of length 0 as it is, so that the length
    is then that of its adapter."""
    magnitude = np.array(part.magnitude, np.float32)
    free = magnitude == 0
    added = np.float32(part.scale) * (np.asarray(part.b)[free] @ np.asarray(part.a))
    magnitude[free] = np.linalg.norm(added, axis=1)
    return magnitude


def base_weight(base: Source, name: str, target: Target) -> np.ndarray:
    """A linear layer's weight as [out, in] in float32.

    Args:
        base: the checkpoint.
        name: the family.
    """
    stored = NameMap(set(base.names()), family(name)).find(target.weight)
    if stored is None:
        raise CheckpointError(
            f"The base model has no {target.module}.weight of its own, which DoRA needs."
        )
    w = np.asarray(base.read(stored), np.float32)
    return w.T if target.is_transposed else w


class Merged(DerivedSource):
    """A checkpoint's tensors with an adapter merged into them, in float32: W + scale B A.

    With DoRA each output of that has the length that the adapter says. What the adapter has whole
    takes the base's place.
    """

    def __init__(self, source: Source, info: ModelInfo, adapter: Adapter):
        super().__init__(source)
        self._parts, self._adapter = adapter.read(info), adapter
        names = NameMap(set(source.names()), family(info.family))
        self._targets: dict[str, Target] = {}
        for module, target in adapter.targets.items():
            stored = names.find(target.weight)
            if stored is None:
                raise UnsupportedModelError(
                    f"{adapter.folder} changes {module}, which {info.name} has tied to its "
                    f"embedding, so that it cannot be merged; run it beside the model with `lora`."
                )
            self._targets[stored] = target
        by_tensor = {names.find(name): w for name, w in adapter.replaced.items()}
        self._replaced = {
            stored: weight for stored, weight in by_tensor.items() if stored is not None
        }
        self._experts: dict[str, Callable[[np.ndarray], np.ndarray]] = {}
        self._halves: dict[str, tuple[str, str]] = {}  # of MXFP4, in whose place numbers come
        sizes = info.config.axis_sizes
        for parameter, (target, a, b) in adapter.experts.items():
            scale = adapter.config.scale_of(parameter)
            part = LowRank(adapter.tensor(a), adapter.tensor(b), scale)
            whole = names.find(target.param.hf_names[0])
            apart = [] if target.apart is None else list(map(names.find, target.apart.hf_names))
            if whole is not None:
                self._experts[whole] = partial(target.merged, part=part)
                if names.is_mxfp4(whole):
                    self._halves[whole] = mxfp4.names(whole)
            elif apart and None not in apart:
                for index, name in enumerate(filter(None, apart)):
                    how = partial(target.merged_apart, part=part, index=index, sizes=sizes)
                    self._experts[name] = how
            else:
                raise UnsupportedModelError(
                    f"{adapter.folder} changes {parameter}, which is no tensor of {info.name}, so "
                    f"that it cannot be merged; take a checkpoint that has it in floating point."
                )

    def names(self) -> list[str]:
        halves = {half for both in self._halves.values() for half in both}
        return [name for name in self._source.names() if name not in halves] + [*self._halves]

    def stored(self, name: str) -> tuple[str, ...]:
        return self._halves.get(name, (name,))

    def info(self, name: str) -> TensorInfo:
        infos = [self._source.info(stored) for stored in self.stored(name)]
        if not any(name in each for each in (self._targets, self._replaced, self._experts)):
            return infos[0]
        shape = infos[0].shape
        if name in self._halves:
            shape = mxfp4.dequantized_shape(name, *(info.shape for info in infos))
        return TensorInfo("F32", shape, 4 * math.prod(shape))

    def read(self, name: str) -> np.ndarray:
        if name in self._replaced:
            return self._adapter.tensor(self._replaced[name])
        arrays = [self._source.read(stored) for stored in self.stored(name)]
        array = mxfp4.dequantize(*arrays) if name in self._halves else arrays[0]
        if name in self._experts:
            return self._experts[name](np.asarray(array))
        target = self._targets.get(name)
        if target is None:
            return array
        part, w = self._parts[target.module], np.asarray(array, np.float32)
        w = merged(w.T if target.is_transposed else w, part.a, part.b, part.scale)
        w = w if part.columns is None else w * part.columns[:, None]
        return np.ascontiguousarray(w.T if target.is_transposed else w)


def fused(info: ModelInfo, adapter: Adapter) -> ModelInfo:
    """The model with an adapter merged into its weights, which are float32 where it is.

    Raises:
        RequestError: rooflax quantized the model.
    """
    if is_packed(info.raw_config):
        raise RequestError(
            f"{info.name} is quantized by rooflax; merge the adapter into the checkpoint that it "
            f"was made from, and quantize the result."
        )
    keys = {target.param.key for target in adapter.targets.values()}
    keys |= {target.param.key for target, _, _ in adapter.experts.values()}
    tensors = set(adapter.replaced)
    keys |= {param.key for param in info.config.params() if tensors & set(param.hf_names)}
    return replace(
        info, change=lambda source: Merged(source, info, adapter), changed=frozenset(keys)
    )


def open_adapter(
    folder: str | os.PathLike[str], info: ModelInfo, *, merges: bool = False
) -> Adapter:
    """An adapter's folder or .gguf file, checked against the model that it is for.

    Args:
        merges: it will be merged, so that it may hold whole weights, and adapters of experts.

    Raises:
        CheckpointError: a file is missing or malformed, or the tensors are not those that the
            config and the model ask for.
        UnsupportedModelError: it asks for what is not computed.
    """
    folder, known = Path(folder), targets(info.family, info.config)
    if folder.suffix == ".gguf" and folder.is_file():
        config, pairs = read_gguf_adapter(folder, info, known)
        file = ArraySource({f"{m}.{kind}": pairs[m][kind] for m in pairs for kind in pairs[m]})
        names = {m: {kind: f"{m}.{kind}" for kind in pair} for m, pair in pairs.items()}
        return Adapter(folder, config, {m: known[m] for m in known if m in pairs}, file, names, {})
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is no folder; an adapter is one with {ADAPTER} and {WEIGHTS}, or a .gguf "
            f"file."
        )
    config = read_adapter_config(folder, info.family)
    for key in ("modules_to_save", "target_parameters"):
        if not merges and (names := getattr(config, key)):
            raise UnsupportedModelError(
                f"{folder / ADAPTER} has {key} = {list(names)!r:.80}, which rooflax does not apply "
                f"beside a base model; merge the adapter with rooflax fuse, and name the result."
            )
    path = folder / WEIGHTS
    if not path.exists():
        if (folder / PICKLED).exists():
            command = conversion_command([folder / PICKLED], path)
            raise CheckpointError(
                f"{folder} has only {PICKLED}, a pickle, which can run code when opened and is "
                f"never read here, so convert it where torch is installed, with: {command}"
            )
        raise CheckpointError(f"{folder} has no {WEIGHTS}.")
    file = SafetensorsFile(path, is_mapped=False)
    by_name = {name: module for module, target in known.items() for name in target.names}
    stored: dict[str, dict[str, str]] = {}
    paths: dict[str, str] = {}
    copies, unknown = _copies_of_base(file, info, known), []
    replaced = _replaced(file, config, info)
    experts = _experts(file, config, info)
    copies |= {*replaced.values(), *(name for _, *both in experts.values() for name in both)}
    for name in file.names():
        match = _TENSOR.fullmatch(name)
        module = by_name.get(match[1]) if match else None
        if match is None or module is None:
            unknown += [] if name in copies else [name]
            continue
        if match[2] in stored.setdefault(module, {}):
            raise CheckpointError(f"{path} has {match[2]} of {module} twice.")
        paths.setdefault(module, match[1])
        stored[module][match[2]] = name
    if unknown:
        raise UnsupportedModelError(
            f"{path} has {named(unknown)}, which is not A or B of a linear layer of {info.name} "
            f"that rooflax adapts."
        )
    if not stored and not experts:
        raise CheckpointError(f"{path} holds no adapter.")
    wanted = set[str]()
    if stored:  # paths of a file begin alike, which its config's patterns count on
        first = min(stored)
        at = known[first].names.index(paths[first])
        wanted = {m for m, t in known.items() if config.changes(t.names[min(at, len(t.names) - 1)])}
    if beyond := stored.keys() - wanted:
        raise CheckpointError(f"{path} has {named(beyond)}, which its {ADAPTER} does not name.")
    other = {known[m].param.name for m in stored if not known[m].is_usual}
    usual = {m for m in wanted if known[m].is_usual and known[m].param.name not in other}
    if not is_all_linear(config.target_modules) and (missing := usual - stored.keys()):
        raise CheckpointError(f"{path} lacks {named(missing)}, which its {ADAPTER} names.")
    changed = {module: known[module] for module in known if module in stored}
    adapter = Adapter(folder, config, changed, file, stored, replaced, experts, paths)
    _check_tensors(adapter, path)
    return adapter


def _copies_of_base(
    file: SafetensorsFile, info: ModelInfo, known: Mapping[str, Target]
) -> set[str]:
    """Names of the base model's own head, which PEFT saves beside its adapter."""
    head = known.get(HEAD)
    copies = {f"{PREFIX}{name}.base_layer.weight" for name in head.names} if head else set()
    names = copies & set(file.names())
    if not names or head is None or info.folder is None:
        return set()
    w = base_weight(info.weights(), info.family, head)
    return {name for name in names if np.array_equal(np.asarray(file.read(name), np.float32), w)}


def _replaced(file: SafetensorsFile, config: AdapterConfig, info: ModelInfo) -> dict[str, str]:
    """`Adapter.replaced`.

    Raises:
        UnsupportedModelError: a module has none that rooflax replaces.
        CheckpointError: a tensor is missing, or has another shape or type.
    """
    known = tables(info.family, info.config)
    for name in config.modules_to_save:
        if not any(replace(config, modules_to_save=(name,)).replaces(module) for module in known):
            raise UnsupportedModelError(
                f"{file.path} has modules_to_save = {name!r:.80}, and of {info.name} rooflax "
                f"replaces {' and '.join(known) or 'nothing: its head is its embedding'}."
            )
    replaced, names = {}, set(file.names())
    for module, target in known.items():
        if not config.replaces(module):
            continue
        spelled = [f"{PREFIX}{name}.weight" for name in target.names]
        stored = next((name for name in spelled if name in names), None)
        if stored is None:
            raise CheckpointError(f"{file.path} lacks {spelled[0]}, which its {ADAPTER} names.")
        has, shape = file.info(stored), (target.outputs, target.inputs)
        if has.shape != shape or has.dtype not in FLOATING:
            raise CheckpointError(
                f"{stored} in {file.path} is {has.dtype} {list(has.shape)}, wanted {list(shape)}."
            )
        replaced[target.weight] = stored
    return replaced


def _experts(
    file: SafetensorsFile, config: AdapterConfig, info: ModelInfo
) -> dict[str, tuple[ExpertTarget, str, str]]:
    """`Adapter.experts`.

    Raises:
        CheckpointError: the model has none of that name, or a tensor is missing or has another
            shape or type.
        UnsupportedModelError: PEFT had inputs and outputs the other way round when it wrote them.
    """
    known = expert_targets(info.family, info.config)
    for name in config.target_parameters:
        if not any(replace(config, target_parameters=(name,)).changes_experts(p) for p in known):
            raise CheckpointError(
                f"{file.path} has target_parameters = {name!r:.80}, and {info.name} no experts in "
                f"one parameter of that name."
            )
    experts, present = {}, set(file.names())
    for parameter, names in expert_names(known, config).items():
        target, rank = known[parameter], config.rank_of(parameter)
        fits = names[0] in present and file.info(names[0]).shape == (
            target.count * rank,
            target.inputs,
        )
        may_be_turned = target.inputs == target.outputs or not fits
        is_older = target.has_outputs_first and config.version < numbers_of(EXPERTS_SINCE)
        if is_older and may_be_turned:
            version = ".".join(map(str, config.version)) or "that states no peft_version"
            raise UnsupportedModelError(
                f"{file.path} has target_parameters of a PEFT {version}; before {EXPERTS_SINCE} it "
                f"had A and B of {info.name}'s experts the other way round, so merge the adapter "
                f"with that PEFT, and name the result."
            )
        shapes = (target.count * rank, target.inputs), (target.outputs, rank * target.count)
        for name, shape in zip(names, shapes, strict=True):
            if name not in present:
                raise CheckpointError(f"{file.path} lacks {name}, which its {ADAPTER} names.")
            has = file.info(name)
            if has.shape != shape or has.dtype not in FLOATING:
                raise CheckpointError(
                    f"{name} in {file.path} is {has.dtype} {list(has.shape)}, wanted {list(shape)}."
                )
        experts[parameter] = target, *names
    return experts


def expert_names(
    known: Mapping[str, ExpertTarget], config: AdapterConfig
) -> dict[str, tuple[str, str]]:
    """Names of A and B of experts by their parameters: PEFT wraps a module once for each."""
    chosen = [target for target in known.values() if config.changes_experts(target.parameter)]
    names = {}
    for target in chosen:
        beside = [other.parameter for other in chosen if other.module == target.module]
        depth = len(beside) - 1 - beside.index(target.parameter)
        path = f"{PREFIX}{target.module}{'.base_layer' * depth}"
        names[target.parameter] = f"{path}.{A}", f"{path}.{B}"
    return names


def _check_tensors(adapter: Adapter, path: Path) -> None:
    """
    Raises:
        CheckpointError: a pair is not whole, or a tensor has another shape or type.
    """
    config = adapter.config
    for module, target in adapter.targets.items():
        rank = adapter.rank_of(module)
        wanted: dict[str, tuple[int, ...]] = {
            "lora_A": (rank, target.inputs),
            "lora_B": (target.outputs, rank),
        }
        if config.use_dora:
            wanted[MAGNITUDE] = (target.outputs,)
        stored = adapter.stored[module]
        if missing := wanted.keys() - stored.keys():
            raise CheckpointError(f"{path} lacks {min(missing)} of {module}.")
        for kind, name in stored.items():
            if kind not in wanted:
                raise CheckpointError(f"{path} has {name}, but {ADAPTER} says no use_dora.")
            info = adapter.file.info(name)
            if info.shape != wanted[kind]:
                raise CheckpointError(
                    f"{name} in {path} is {list(info.shape)}, wanted {list(wanted[kind])}: rank "
                    f"{rank}, {target.inputs} inputs and {target.outputs} outputs."
                )
            if info.dtype not in FLOATING:
                raise CheckpointError(f"{name} in {path} is {info.dtype}, no floating point type.")


def save_adapter(
    folder: Path,
    adapters: Mapping[str, LowRank],
    config: AdapterConfig,
    *,
    name: str,
    model: Decoder,
    base: str,
    whole: Mapping[str, Any] | None = None,
) -> None:
    """Writes a folder that PEFT opens; its parent exists, and it is filled file by file.

    Args:
        adapters: by module, as `Target.module`.
        name: the family.
        model: the architecture.
        base: the model's name, for people.
        whole: weights [out, in] of the modules that `config.modules_to_save` names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []

    def add(stored: str, array: Any) -> None:
        factor = np.asarray(array, np.float32)
        written.append(TensorToWrite(stored, "F32", factor.shape, lambda: factor))

    for module, weight in (whole or {}).items():
        add(f"{PREFIX}{module}.weight", weight)
    experts = expert_names(expert_targets(name, model), config)
    for module, part in adapters.items():
        if module in experts:
            for stored, array in zip(experts[module], (part.a, part.b), strict=True):
                add(stored, array)
            continue
        path = f"{PREFIX}{module}"
        arrays = {A: part.a, B: part.b}
        if part.magnitude is not None:
            arrays[MAGNITUDE] = _magnitude(part)
        for kind, array in arrays.items():
            add(f"{path}.{kind}", array)
    write_safetensors(folder / WEIGHTS, written, {"format": "pt"})
    known = targets(name, model)
    transposed = any(known[module].is_transposed for module in adapters if module in known)
    stated = config.to_json(base) | {"fan_in_fan_out": transposed}
    (folder / ADAPTER).write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
