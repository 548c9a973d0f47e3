"""`LayerMemory`: what a layer reads of earlier tokens, and the pools with what it adds.

Values in, values out: `attend` and `recall` give their result and the layer's new pools.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rooflax.nn import mesh
from rooflax.nn.batch import Batch
from rooflax.nn.execution import ExecutionOptions
from rooflax.nn.kv_cache import LayerGroups, States, write
from rooflax.ops.accelerator import block_size, cache_width
from rooflax.ops.attention import (
    AttentionArgs,
    Dense,
    Projected,
    attention,
    attention_step,
    ragged_attention,
)
from rooflax.ops.weights import StackMember, taken

Slots = tuple[jax.Array | None, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerPools:
    """One layer's pools and, among stacked layers, the number of its first block."""

    k: Any
    v: Any
    first_block: Any
    block_size: int = field(metadata={"static": True})


@dataclass(frozen=True)
class StepMemory:
    """The memory of a step that its layers share.

    Attributes:
        slots: per layer group, where new K and V are written; empty without a cache.
    """

    batch: Batch
    slots: Slots
    groups: LayerGroups
    options: ExecutionOptions


@dataclass(frozen=True)
class LayerMemory:
    """The memory of one layer.

    Attributes:
        pools: of the layer, or of the one whose K and V it reuses; None without a cache.
        group: its layer group.
        lent: without a cache, other layers attend to this one's K and V.
    """

    step: StepMemory
    pools: LayerPools | None
    group: int
    lent: bool

    def recall(
        self, run: Callable[..., tuple[Array, States]], shapes: Sequence[tuple[int, ...]]
    ) -> tuple[Float[Array, "T ..."], LayerPools | None]:
        """Runs a recurrent layer on from its sequences' states.

        Args:
            run: (runs, states) -> its output and the pools with the new states.
            shapes: of one sequence's states on this device.
        """
        batch, pools = self.step.batch, self.pools
        if pools is None:
            assert batch.segment_ids is None, "no layers with state are trained"
            rows = batch.tokens.shape[0]
            zeros = tuple(jnp.zeros((rows, *shape), jnp.float32) for shape in shapes)
            return run(batch.runs(None), zeros)[0], None
        out, states = run(batch.runs(self.group, pools.first_block), pools.k)
        return out, replace(pools, k=states, v=())

    def attend(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"] | None,
        v: Float[Array, "B T K H"] | None,
        *,
        scale: float,
        sinks: Float[Array, " N"] | StackMember | None = None,
        causal: bool = True,
        bias: Float[Array, "N distances"] | None = None,
        new: Projected | None = None,
        cap: float | None = None,
        values_in_keys: int | None = None,
    ) -> tuple[Float[Array, "B T N H"], LayerPools | None]:
        """Writes the new K and V, then attends to what each query sees.

        Args:
            k: of the new tokens; None attends to another layer's.
            v: None beside keys means that values are in the keys, `values_in_keys` of them.
            new: the projection that q, k and v come from, if `Projected` covers all steps between.
        """
        batch, options = self.step.batch, self.step.options
        window, kernels = self.step.groups.windows[self.group], options.kernels
        repeats = options.gqa == "repeat"
        args = AttentionArgs(
            scale, window, taken(sinks), repeats, causal=causal, bias=bias, cap=cap,
            values_in_keys=values_in_keys,
        )  # fmt: skip
        if not self.step.slots:
            pools = self._dense(k, v)
            keys = mesh.gather_tokens(batch.positions, batch, (mesh.SEQUENCE,))
            in_order = mesh.SEQUENCE not in batch.split
            dense = Dense(batch.positions, keys, batch.context_lens, batch.segment_ids, in_order)
            choice = {"implementation": kernels, "trains": options.trains}
            out = attention(q, pools.k, pools.v, dense, args, **choice)
            return out, pools if self.lent else None
        pools = self.pools or self._of_step(k)
        sequences = batch.sequences(self.group, pools.first_block)
        if new is not None and not batch.split:
            fused = attention_step(new, pools.k, pools.v, sequences, args, implementation=kernels)
            if fused is not None:
                out, k_pool, v_pool = fused
                return out[None], replace(pools, k=k_pool, v=v_pool)
        if k is not None:
            slots = self.step.slots[self.group]
            assert slots is not None
            slots = slots + pools.first_block * pools.block_size
            k_pool, v_pool = (
                pool
                if tokens is None
                else write(pool, mesh.gather_tokens(tokens, batch), slots, implementation=kernels)
                for pool, tokens in ((pools.k, k), (pools.v, v))
            )
            pools = replace(pools, k=k_pool, v=v_pool)
        k_pool, v_pool = pools.k, pools.v if jax.tree.leaves(pools.v) else pools.k
        out = ragged_attention(q[0], k_pool, v_pool, sequences, args, implementation=kernels)
        return out[None], pools

    def _of_step(self, k: jax.Array | None) -> LayerPools:
        """Pools of the step's own K and V, where no cache keeps any."""
        assert k is not None
        size = block_size()
        shape = (self.step.batch.step_blocks, k.shape[2], size, cache_width(k.shape[3]))
        return LayerPools(jnp.zeros(shape, k.dtype), jnp.zeros(shape, k.dtype), 0, size)

    def _dense(self, k: jax.Array | None, v: jax.Array | None) -> LayerPools:
        """K and V of whole sequences, [B, K, S, H]: the layer's own, or another's."""
        if k is None:
            assert self.pools is not None
            return self.pools
        whole = (
            mesh.gather_tokens(tokens, self.step.batch, (mesh.SEQUENCE,))
            for tokens in (k, k if v is None else v)
        )
        keys, values = (tokens.swapaxes(1, 2) for tokens in whole)
        return LayerPools(keys, values, 0, 0)
