"""Model info before weights are read: folder, config, tokenizer.

A name is a checkpoint folder, a GGUF file, a hub id, "package:NAME" (an installed package that
ships a GGUF file), "preset:NAME", or nothing: the embedded default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.loading.checkpoint import Checkpoint
from rooflax.loading.generation_config import GenerationDefaults, read_generation_defaults
from rooflax.loading.gguf import GGUFFile, gguf_in, open_gguf
from rooflax.loading.gguf_config import gguf_generation_defaults, read_gguf_config
from rooflax.loading.gguf_weights import GGUFWeights
from rooflax.loading.hub import resolve
from rooflax.loading.json_files import read_config_json
from rooflax.loading.mxfp4 import Mxfp4Weights
from rooflax.loading.packed import PackedWeights, is_packed
from rooflax.loading.pooling import Pooling, gguf_pooling
from rooflax.loading.schemes import (
    CodedWeights,
    KeptCodes,
    Scheme,
    declared_in,
    not_applied,
    read_scheme,
)
from rooflax.loading.score_head import folder_pooling
from rooflax.loading.source import Source
from rooflax.loading.tokenizer import Tokenizer
from rooflax.loading.weights import WeightReader
from rooflax.models.presets import EMBEDDED, EMBEDDED_NAME, PREFIX, preset_config
from rooflax.models.registry import read_config, with_advice
from rooflax.nn.decoder import Decoder
from rooflax.nn.placement import Placer
from rooflax.nn.storage import Storage

TOWERS = ("vision", "audio")


@dataclass(frozen=True)
class ModelInfo:
    """Model info before the weights are read.

    Attributes:
        name: as the user gave it; the embedded default's own name otherwise.
        folder: of the checkpoint, or the GGUF file; None for a preset.
        family, config: the architecture.
        raw_config: config.json, or what a GGUF file's metadata says in its words.
        gguf: the GGUF file, opened.
        pooling: how it embeds or scores texts; None where the checkpoint says nothing of it.
        scheme: how another library quantized its weights.
        change: what is read in place of the checkpoint's tensors, as with an adapter merged.
        changed: keys of the parameters that it changes, none of which keeps its codes.
    """

    name: str
    folder: Path | None
    family: str
    config: Decoder
    raw_config: Mapping[str, Any]
    gguf: GGUFFile | None = None
    pooling: Pooling | None = None
    scheme: Scheme | None = None
    change: Callable[[Source], Source] | None = None
    changed: Set[str] = frozenset()

    @property
    def left_out(self) -> tuple[str, ...]:
        """Parts of the checkpoint that the text model does without: "vision", "audio"."""
        return tuple(part for part in TOWERS if self.raw_config.get(f"{part}_config"))

    @property
    def not_applied(self) -> tuple[str, ...]:
        """Settings of the checkpoint's quantization scheme that are not applied, with the scales
        that the files have for them."""
        if self.scheme is None or self.folder is None:
            return ()
        declared = declared_in(self.raw_config, self.folder) or {}
        return not_applied(declared, Checkpoint(self.folder).names())

    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; the embedded one for a preset.

        It may have ids beyond the rows of the model's embedding, as published ones do (of images);
        these are never sampled, and a prompt that holds one is rejected.
        """
        return Tokenizer(self.gguf or self.folder or embedded_folder())

    def weights(self) -> Source:
        """The tensors of the checkpoint, memory-mapped, with their change; not for a preset."""
        source = self._stored()
        return source if self.change is None else self.change(source)

    def _stored(self) -> Source:
        if self.gguf is not None:
            return GGUFWeights(self.gguf, self.family, self.config)
        checkpoint = Checkpoint(self.folder or "")
        return CodedWeights(checkpoint, self.scheme) if self.scheme else checkpoint

    def prequantized(self) -> GGUFWeights | KeptCodes | Mxfp4Weights | PackedWeights:
        """Source of pre-quantized weights, which packs them."""
        source = self._stored()
        if isinstance(source, GGUFWeights):
            return source
        if isinstance(source, CodedWeights):
            return KeptCodes(source, self.family, self.config)
        if is_packed(self.raw_config):
            return PackedWeights(source, self.family, self.config, self.raw_config)
        return Mxfp4Weights(source, self.family, self.config)

    def reader(
        self, storage: Storage, *, check: bool = False, place: Placer | None = None
    ) -> WeightReader:
        """Reads the weights of the checkpoint; the arguments of `WeightReader`."""
        prequantized = self.prequantized() if storage.prequantized else None
        packed = prequantized.tensors if isinstance(prequantized, PackedWeights) else {}
        return WeightReader(
            self.weights(), self.family, self.config, storage=storage, check=check, place=place,
            prequantized=prequantized, packed=packed,
        )  # fmt: skip

    def generation_defaults(self, tokenizer: Tokenizer | None = None) -> GenerationDefaults:
        """Generation defaults of the checkpoint, and the ids that end a sequence.

        Args:
            tokenizer: the checkpoint's own, whose end of sequence is one of them.

        Raises:
            CheckpointError: a value has the wrong type or range.
        """
        if self.folder is None:
            return GenerationDefaults()
        if self.gguf is not None:
            return gguf_generation_defaults(self.gguf)
        end = None if tokenizer is None else tokenizer.eos_id
        return read_generation_defaults(self.folder, tokenizer_eos_id=end)


def embedded_folder(name: str = EMBEDDED_NAME) -> Path:
    """Folder of an embedded model."""
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
    if not any(folder.glob("*.safetensors")):
        folder = gguf_in(folder) or folder
    if folder.is_file():
        gguf = open_gguf(folder)
        name, config, raw = read_gguf_config(gguf, ignore=ignore_config_keys)
        return ModelInfo(shown, folder, name, config, raw, gguf, gguf_pooling(gguf))
    raw = _with_one_tie(read_config_json(folder), folder)
    name, config = read_config(raw, ignore=ignore_config_keys)
    pooling = folder_pooling(folder, name, config, raw)
    may_lack = config.has_head and not config.tied_embeddings
    if pooling is not None and not pooling.scores and may_lack:
        has_head = any(name.startswith("lm_head.") for name in Checkpoint(folder).names())
        config = replace(config, has_head=has_head)
    try:
        scheme = read_scheme(raw, folder, ignore_config_keys)
    except UnsupportedModelError as error:
        raise with_advice(error, raw) from None
    return ModelInfo(shown, folder, name, config, raw, pooling=pooling, scheme=scheme)


def _with_one_tie(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """config.json whose text part agrees with the whole on `tie_word_embeddings`.

    As in transformers, which fills the whole's with its default: that one counts, but for a head
    that the checkpoint has.
    """
    key, text = "tie_word_embeddings", raw.get("text_config")
    tied = raw.get(key)
    if not isinstance(text, dict) or not isinstance(tied, bool) or text.get(key) is tied:
        return raw
    has_head = tied and any(n.endswith("lm_head.weight") for n in Checkpoint(folder).names())
    one = {key: tied and not has_head}
    return raw | one | {"text_config": text | one}
