"""From what a user names to a model and its tokenizer.

A name is a checkpoint folder, a GGUF file, a hub id, "preset:NAME", or nothing: the embedded
default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from rooflax.errors import CheckpointError, RequestError
from rooflax.loading.checkpoint import Checkpoint
from rooflax.loading.generation_config import GenerationDefaults, read_generation_defaults
from rooflax.loading.gguf import GGUFFile
from rooflax.loading.gguf_config import gguf_generation_defaults, read_gguf_config
from rooflax.loading.gguf_weights import GGUFWeights
from rooflax.loading.hub import resolve
from rooflax.loading.mxfp4 import Mxfp4Weights
from rooflax.loading.packed import PackedWeights, is_packed
from rooflax.loading.source import ArraySource, Source
from rooflax.loading.tokenizer import Tokenizer
from rooflax.loading.weights import WeightReader
from rooflax.models.initialize import random_weights
from rooflax.models.memory import ONE_DEVICE, check_fits, estimate, rope_bytes
from rooflax.models.model import Model, build, resolve_max_model_len
from rooflax.models.presets import EMBEDDED, EMBEDDED_NAME, PREFIX, SEED, preset_config
from rooflax.models.registry import read_config, read_config_json
from rooflax.models.streaming import (
    AHEAD,
    LayerStream,
    StreamedModel,
    StreamPlan,
    plan_streaming,
)
from rooflax.nn.decoder import Decoder
from rooflax.nn.device_memory import free_bytes
from rooflax.nn.placement import Placer
from rooflax.nn.shards import Shards
from rooflax.nn.storage import Storage
from rooflax.nn.weights import assemble
from rooflax.ops.formats import resolve_format
from rooflax.ops.host_arrays import Arena


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a model before its weights are read.

    Attributes:
        name: as the user gave it; the embedded default's own name otherwise.
        folder: of the checkpoint, or the GGUF file; None for a preset.
        family, config: the architecture.
        raw_config: config.json, or what a GGUF file's metadata says in its words.
        gguf: the GGUF file, opened.
    """

    name: str
    folder: Path | None
    family: str
    config: Decoder
    raw_config: Mapping[str, Any]
    gguf: GGUFFile | None = None

    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; the embedded one for a preset.

        Raises:
            CheckpointError: it has more ids than the model's embedding has rows.
        """
        tokenizer = Tokenizer(self.gguf or self.folder or embedded_folder())
        rows = self.config.vocab_size
        if tokenizer.vocab_size > rows:
            raise CheckpointError(
                f"The tokenizer of {self.name} has ids up to {tokenizer.vocab_size - 1}, but the "
                f"embedding has {rows} rows; they do not belong together."
            )
        return tokenizer

    def storage(
        self, dtype: str, quantize: str | None, *, narrow: bool, keep: bool = False
    ) -> Storage:
        """At which width the weights will be kept.

        config.json says whether they are bfloat16, or the tensors where it says nothing; each
        tensor's own type decides as it is read.

        Args:
            keep: products' weights that the checkpoint holds quantised stay so.

        Raises:
            RequestError: there is no such format.
        """
        declared = {str(self.raw_config.get(key)) for key in ("torch_dtype", "dtype")}
        chosen = None if quantize is None else resolve_format(quantize)
        kept = {}
        if is_packed(self.raw_config) and chosen is not None:
            raise RequestError(
                f"{self.name} is quantised already; leave `quantize` out.", param="quantize"
            )
        if (keep or is_packed(self.raw_config)) and chosen is None and self.folder is not None:
            kept = self.kept().formats
        if narrow and declared == {"None"} and self.folder is not None and self.gguf is None:
            source = self.weights()
            narrow = any(source.info(name).dtype == "BF16" for name in source.names())
        else:
            narrow = narrow and "bfloat16" in declared
        return Storage(dtype, chosen, narrow, kept)

    def weights(self) -> Source:
        """The tensors of the checkpoint, memory-mapped; not for a preset."""
        if self.gguf is not None:
            return GGUFWeights(self.gguf, self.family, self.config)
        return Checkpoint(self.folder or "")

    def kept(self) -> GGUFWeights | Mxfp4Weights | PackedWeights:
        """Which weights the checkpoint holds quantised, and these packed."""
        source = self.weights()
        if isinstance(source, GGUFWeights):
            return source
        if is_packed(self.raw_config):
            return PackedWeights(source, self.family, self.config, self.raw_config)
        return Mxfp4Weights(source, self.family, self.config)

    def generation_defaults(self) -> GenerationDefaults:
        if self.folder is None:
            return GenerationDefaults()
        if self.gguf is not None:
            return gguf_generation_defaults(self.gguf)
        return read_generation_defaults(self.folder)


def embedded_folder(name: str = EMBEDDED_NAME) -> Path:
    """Where an embedded model lies."""
    folder = Path(__file__).resolve().parents[1] / "assets" / name
    if not folder.is_dir():
        raise CheckpointError(
            f"This installation has no embedded model ({folder} is missing); name a MODEL."
        )
    return folder


def model_info(
    model: str | Path | None = None,
    *,
    revision: str | None = None,
    offline: bool = False,
    ignore_config_keys: Sequence[str] = (),
) -> ModelInfo:
    """Finds a model (downloading it if need be) and reads its config.

    Raises:
        CheckpointError, UnsupportedModelError, RequestError: with the reason.
    """
    if model is not None and str(model).startswith(PREFIX):
        raw = preset_config(str(model))
        name, config = read_config(raw)
        return ModelInfo(str(model), None, name, config, raw)
    model = EMBEDDED_NAME if model is None else str(model)
    if model in EMBEDDED and not Path(model).exists():
        folder, shown = embedded_folder(model), model
    else:
        folder, shown = resolve(model, revision=revision, offline=offline), model
    if folder.is_file():
        gguf = GGUFFile(folder)
        name, config, raw = read_gguf_config(gguf, ignore=ignore_config_keys)
        return ModelInfo(shown, folder, name, config, raw, gguf)
    raw = read_config_json(folder)
    name, config = read_config(raw, ignore=ignore_config_keys)
    return ModelInfo(shown, folder, name, config, raw)


def load(
    model: str | Path | ModelInfo | None = None,
    *,
    dtype: str = "float32",
    quantize: str | None = None,
    narrow: bool = False,
    keep: bool = False,
    max_model_len: int | None = None,
    check: bool = False,
    progress: Callable[[int], None] | None = None,
    place: Placer | None = None,
    stacked: bool = False,
    **find: Any,
) -> Model:
    """A model with its weights on the device.

    Args:
        model: folder, GGUF file, hub id, "preset:NAME", None for the embedded default, or a
            ModelInfo.
        dtype: of activations and weights, "float32" or "bfloat16".
        quantize: format of the products' weights ("int8", "int4", see ops.weights.formats).
        narrow: keep the products' weights in bfloat16 where the checkpoint has them so.
        keep: keep the products' weights quantised where the checkpoint has them so.
        max_model_len: longest context; default what the model was made for.
        check: refuse NaN and infinite weights.
        progress: called with the bytes of each weight loaded.
        place: for the devices of a mesh; the model is then still to be `Model.placed`.
        stacked: for `layers="scan"`.
        find: `revision`, `offline`, `ignore_config_keys`, as for `model_info`.
    """
    info = model if isinstance(model, ModelInfo) else model_info(model, **find)
    storage = info.storage(dtype, quantize, narrow=narrow, keep=keep)
    shards = place.shards if place else ONE_DEVICE
    _check_fits(info, storage, resolve_max_model_len(info.config, max_model_len), shards)
    if info.folder is None:
        weights = random_weights(
            info.family,
            info.config,
            seed=SEED,
            storage=storage,
            place=place,
            stacked=stacked,
            progress=progress,
        )
    else:
        weights = _reader(info, storage, check, place).weights(progress, stacked=stacked)
    return build(info.family, info.config, weights, max_model_len, storage.dtype)


def _reader(
    info: ModelInfo, storage: Storage, check: bool = False, place: Placer | None = None
) -> WeightReader:
    kept = info.kept() if storage.kept else None
    own = kept.tensors if isinstance(kept, PackedWeights) else {}
    how = {"storage": storage, "check": check, "place": place, "kept": kept, "own": own}
    return WeightReader(info.weights(), info.family, info.config, **how)


def plan_of(
    info: ModelInfo, storage: Storage, max_model_len: int | None, budget: int
) -> StreamPlan:
    """Which layers stay and which are streamed; only the headers of the files are read.

    Args:
        budget: the most bytes that weights may take.

    Raises:
        RequestError: there is no file to read from, or the budget is too small.
    """
    if info.folder is None:
        raise RequestError(
            f"{info.name} has random weights and no file to read them from; leave the weights "
            f"budget out, or save it as a checkpoint first."
        )
    return _plan(info, _reader(info, storage), max_model_len, budget)


def _plan(
    info: ModelInfo, reader: WeightReader, max_model_len: int | None, budget: int
) -> StreamPlan:
    config = info.config
    fixed, layers = rope_bytes(config, max_model_len), [0] * config.num_layers
    for slot in reader.slots:
        if slot.layer is None:
            fixed += reader.num_bytes(slot)
        else:
            layers[slot.layer] += reader.num_bytes(slot)
    return plan_streaming(budget, fixed, layers, info.name)


def load_streamed(
    info: ModelInfo,
    plan: StreamPlan,
    storage: Storage,
    *,
    max_model_len: int | None = None,
    check: bool = False,
    progress: Callable[[int], None] | None = None,
) -> StreamedModel:
    """A model of which the plan's layers are read at every step; the arguments of `load`.

    With `check` these too are looked at once.
    """
    length = resolve_max_model_len(info.config, max_model_len)
    _check_fits(info, storage, length, ONE_DEVICE, weights=plan.memory_bytes)
    reader, streamed = _reader(info, storage, check), set(plan.streamed)
    passing = [slot for slot in reader.slots if slot.layer in streamed]
    staying = [slot for slot in reader.slots if slot.layer not in streamed]
    for _ in reader.leaves(passing) if check else ():
        pass
    weights = assemble(info.config.num_layers, reader.leaves(staying, progress))
    layers = weights.pop("layers")
    ends = build(info.family, info.config, weights | {"layers": ()}, length, storage.dtype)
    size = max(reader.arena_bytes(index) for index in plan.streamed)
    on_host = jax.default_backend() == "cpu"
    places = [Arena(size) if on_host else None for _ in range(AHEAD)]
    stream = LayerStream(reader.layer, plan.streamed, places)
    return StreamedModel(ends, layers, stream, plan)


def _check_fits(
    info: ModelInfo,
    storage: Storage,
    max_model_len: int,
    shards: Shards,
    weights: int | None = None,
) -> None:
    """The weights with a small cache must fit; a request's own cache is checked when it comes."""
    need = estimate(
        info.family,
        info.config,
        storage=storage,
        kv_dtype=storage.dtype,
        rows=1,
        tokens=min(256, max_model_len),
        max_model_len=max_model_len,
        shards=shards,
    )
    if weights is not None:
        need = replace(need, weights=weights)
    what = info.name if shards == ONE_DEVICE else f"{info.name} on each device of {shards}"
    check_fits(need, free_bytes(shards.num_devices), what)


def from_state_dict(
    config: Mapping[str, Any],
    mapping: Mapping[str, Any],
    *,
    dtype: str = "float32",
    max_model_len: int | None = None,
    ignore_config_keys: Sequence[str] = (),
) -> Model:
    """A model from tensors already in memory.

    Args:
        config: the object of a config.json (for a transformers model, `model.config.to_dict()`).
        mapping: checkpoint names to NumPy arrays or arrays with __dlpack__ (a torch model's
            `state_dict()` on the CPU).
        ignore_config_keys: keys of the config to pass over.
    """
    name, parsed = read_config(config, ignore=ignore_config_keys)
    reader = WeightReader(ArraySource(mapping), name, parsed, storage=Storage(dtype))
    return build(name, parsed, reader.weights(), max_model_len, dtype)
