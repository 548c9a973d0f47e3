"""Tensors of a checkpoint that each weight is made of, by the family's table.

Every tensor is used, waived by name, or an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from rooflax.errors import CheckpointError
from rooflax.loading import mxfp4
from rooflax.loading.safetensors import DTYPES
from rooflax.loading.source import Source
from rooflax.models.registry import family
from rooflax.nn.decoder import Decoder
from rooflax.nn.storage import WeightPlan
from rooflax.nn.tensor_layouts import Where
from rooflax.nn.weights import Param
from rooflax.ops.host_arrays import aligned_empty

WAIVED_BUFFERS = re.compile(r"(.*\.)?(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)")
"""Buffers that old checkpoints carry: causal masks and RoPE frequencies; we compute both."""

NUMBERED = re.compile(r"(?:.*\.)?layers\.(\d{1,5})\..*")
"""Tensors of a layer."""
OLD_NORMS = {"weight": "gamma", "bias": "beta"}
"""Names of a LayerNorm's parts in checkpoints that were converted from TensorFlow."""
NAMED_IN_ERRORS = 10


class TensorPlan:
    """Tensors of each parameter, checked before the first one is read."""

    def __init__(
        self, source: Source, name: str, config: Decoder, packed: Mapping[str, tuple[str, ...]]
    ):
        self.source, self.sizes, self.packed = source, config.axis_sizes, packed
        self.names = NameMap(set(source.names()), family(name))
        self.params = [self._placed(param) for param in config.params()]
        self._check(config)

    def _placed(self, param: Param) -> Param:
        """The parameter with the tensors that the checkpoint has of it, or most of."""
        if param.line.other is None or param.name in self.packed:
            return param

        def share(param: Param) -> float:
            return sum(self.names.find(hf) is not None for hf in param.hf_names) / len(
                param.hf_names
            )

        return max((replace(param, line=line) for line in param.line.places), key=share)

    def read(
        self,
        plan: WeightPlan,
        where: Where | None = None,
        empty: Callable[..., np.ndarray] | None = None,
    ) -> np.ndarray:
        """A weight's tensors in our layout: a copy, or the file's own pages where that will do.

        Args:
            where: of each axis what is wanted, and alone read; None is everything.
            empty: makes what a copy is written to; None makes it anew.
        """
        param, shape, whole = plan.param, plan.shape, where is None
        names = self._hf_names(param)
        first = where[0] if where and any(map(self.names.is_mxfp4, names)) else slice(None)
        parts = [self._read(hf, first) for hf in names]
        if where is not None:
            sizes = [len(range(*w.indices(n))) for w, n in zip(where, shape, strict=True)]
            if first != slice(None):  # these experts alone were made
                shape, where = (sizes[0], *shape[1:]), (slice(None), *where[1:])
            parts, shape = param.line.layout.slice_parts(parts, shape, where), tuple(sizes)
        if plan.takes_views:
            return parts[0].reshape(shape)
        out = (empty or aligned_empty)(shape, jnp.dtype(plan.dtype))
        param.line.layout.join(parts, out)
        if whole:  # else there may be more of it to read
            self.release(param)
        return out

    def release(self, param: Param) -> None:
        """Lets go of the file's pages behind a parameter."""
        for name in self._tensors(param):
            self.source.release(name)

    def prefetch(self, param: Param) -> None:
        """Has the system read the file's pages behind a parameter."""
        for name in self._tensors(param):
            self.source.prefetch(name)

    def _tensors(self, param: Param) -> list[str]:
        stored_names = [stored for hf in self._hf_names(param) for stored in self.names.stored(hf)]
        return [*self.packed.get(param.name, ()), *stored_names]

    def is_mxfp4(self, param: Param) -> bool:
        """Whether a parameter's tensors are MXFP4 halves in the checkpoint."""
        return any(self.names.is_mxfp4(hf) for hf in self._hf_names(param))

    def is_bfloat16(self, param: Param) -> bool:
        """Whether a parameter's tensors are bfloat16 in the checkpoint, as are other layers'."""
        return self._bfloat16[param.key]

    @cached_property
    def _bfloat16(self) -> dict[str, bool]:
        keeps_bfloat16 = {param.key: True for param in self.params}
        for param in self.params:
            stored = (name for hf in self._hf_names(param) for name in self.names.stored(hf))
            keeps_bfloat16[param.key] &= all(
                self.source.info(name).dtype == "BF16" for name in stored
            )
        return keeps_bfloat16

    def _hf_names(self, param: Param) -> list[str]:
        names = [self.names.find(hf) for hf in param.hf_names]
        return [name for name in names if name is not None]

    def _read(self, name: str, experts: slice) -> np.ndarray:
        if self.names.is_mxfp4(name):
            blocks, scales = (self.source.read(n)[experts] for n in self.names.stored(name))
            return mxfp4.dequantize(blocks, scales)
        return self.source.read(name)

    def _shape(self, name: str) -> tuple[int, ...]:
        if self.names.is_mxfp4(name):
            blocks, scales = (self.source.info(n).shape for n in self.names.stored(name))
            return mxfp4.dequantized_shape(name, blocks, scales)
        return self.source.info(name).shape

    def _wrong_types(self, name: str) -> list[str]:
        """The stored tensors of a weight whose type cannot be one's, as text."""
        halves = self.names.is_mxfp4(name)
        wanted = "U8" if halves else "floating point"
        types = {stored: self.source.info(stored).dtype for stored in self.names.stored(name)}
        return [
            f"{stored} is {dtype}, wanted {wanted}"
            for stored, dtype in types.items()
            if (dtype != "U8" if halves else not _is_floating(dtype))
        ]

    def _check(self, config: Decoder) -> None:
        missing, mistyped, misshapen = [], [], []
        used = {name for names in self.packed.values() for name in names}
        for param in self.params:
            if param.name in self.packed:
                continue
            for hf, wanted in zip(param.hf_names, param.line.hf_shapes(self.sizes), strict=True):
                stored_name = self.names.find(hf)
                if stored_name is None:
                    missing.append(f"{hf} {list(wanted)}")
                    continue
                used.update(self.names.stored(stored_name))
                if wrong := self._wrong_types(stored_name):
                    mistyped += wrong
                    continue
                shape = self._shape(stored_name)
                if shape != wanted:
                    misshapen.append(f"{hf} is {list(shape)}, wanted {list(wanted)}")
        left = sorted(self.names.present - used)
        superfluous = [
            f"{n} {list(self.source.info(n).shape)}"
            for n in left
            if not self._waived(n, config) and not self._adds_nothing(n, used)
        ]
        _reject("lacks", missing)
        _reject("has weights of a type that is not read here:", mistyped)
        _reject("has tensors of another shape than config.json says:", misshapen)
        _reject("has tensors that this architecture does not use:", superfluous)

    def _waived(self, name: str, config: Decoder) -> bool:
        if WAIVED_BUFFERS.fullmatch(name) or self.names.skipped.fullmatch(name):
            return True
        count, numbered = config.num_layers, NUMBERED.fullmatch(name)
        if numbered and int(numbered[1]) in range(count, count + config.names.further):
            return True
        if name != self.names.find("lm_head.weight") or not config.tied_embeddings:
            return False
        embed = self.names.find(self.params[0].hf_names[0])
        if embed is None:
            return False
        same = self.source.info(name).shape == self.source.info(embed).shape and np.array_equal(
            self.source.read(name), self.source.read(embed)
        )
        if not same:
            raise CheckpointError(
                "The checkpoint's lm_head.weight differs from its embedding, but config.json says "
                "tie_word_embeddings; set that to false to use both."
            )
        self.source.release(name)
        return True

    def _adds_nothing(self, name: str, used: set[str]) -> bool:
        """Whether it is a bias of zeros beside a weight: AutoGPTQ wrote one for every matmul."""
        if not name.endswith(".bias") or f"{name.removesuffix('bias')}weight" not in used:
            return False
        adds = bool(np.any(self.source.read(name).astype(np.float32)))
        self.source.release(name)
        return not adds


class NameMap:
    """Names in the checkpoint: as in the table, under another prefix, or as MXFP4 halves."""

    def __init__(self, present: set[str], module: Any):
        self.present = present
        self.prefixes: tuple[str, ...] = getattr(module, "HF_PREFIXES", ("model.", ""))
        self.skipped = re.compile(getattr(module, "SKIPPED", "(?!)"))

    def find(self, name: str) -> str | None:
        """The name under which a tensor lies in the checkpoint, None if it does not."""
        body, _, end = name.rpartition(".")
        if body.endswith("LayerNorm") and end in OLD_NORMS:
            return self._find(name) or self._find(f"{body}.{OLD_NORMS[end]}")
        return self._find(name)

    def _find(self, name: str) -> str | None:
        bare = name.removeprefix(self.prefixes[0])
        for prefix in self.prefixes:
            outer = prefix.removesuffix("model.")  # the head is beside the model
            candidate = outer + name if name == bare else prefix + bare
            if candidate in self.present or self.is_mxfp4(candidate):
                return candidate
        return None

    def is_mxfp4(self, name: str) -> bool:
        return name not in self.present and all(n in self.present for n in mxfp4.names(name))

    def stored(self, name: str | None) -> tuple[str, ...]:
        """The tensors in the checkpoint that make up `name`."""
        if name is None:
            return ()
        return mxfp4.names(name) if self.is_mxfp4(name) else (name,)


def _is_floating(dtype: str) -> bool:
    return dtype in DTYPES and jnp.issubdtype(DTYPES[dtype], jnp.floating)


def _reject(what: str, items: list[str]) -> None:
    if items:
        rest = len(items) - NAMED_IN_ERRORS
        more = f" and {rest} more" if rest > 0 else ""
        raise CheckpointError(f"The checkpoint {what} {'; '.join(items[:NAMED_IN_ERRORS])}{more}.")
