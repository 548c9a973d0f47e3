"""Host arrays to the devices of a mesh: each device gets its part and no more than that is made.

Where the parts are is said by `nn.shards` and `nn.mesh`; this module knows no files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rooflax.nn.layers import stack_layers, unstack_layers
from rooflax.nn.mesh import shards_of, weights_specs
from rooflax.nn.shard_sizes import config_on, kv_copies, whole_shape
from rooflax.nn.shards import STAGE
from rooflax.nn.storage import WeightPlan
from rooflax.nn.tensor_layouts import GROUP_ENDS, Where
from rooflax.nn.weights import WeightLine
from rooflax.ops.weights import split_leaf

if TYPE_CHECKING:
    from rooflax.nn.decoder import Decoder

Read = Callable[[Where], np.ndarray]
"""Gives a part of a weight as the checkpoint has it, in our layout."""
Keep = Callable[[np.ndarray, Where], Any]
"""Makes of a part, and where it lies, what its devices hold: the same array, or a quantised one."""


def put(array: Any, mesh: Mesh | None, spec: PartitionSpec) -> jax.Array:
    """A host array on the devices of a mesh, split as `spec` says; every process has it whole."""
    if mesh is None:
        return jax.device_put(array)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, NamedSharding(mesh, spec), lambda i: host[i])


@dataclass(frozen=True)
class Parts:
    """One array's parts on this process's devices: of a whole weight, or of one stage's layer."""

    spec: PartitionSpec
    arrays: tuple[jax.Array, ...]

    def joined(self, mesh: Mesh) -> jax.Array:
        sizes = [1 if axis is None else mesh.shape[axis] for axis in self.spec]
        shape = self.arrays[0].shape
        sizes += [1] * (len(shape) - len(sizes))
        whole = tuple(n * parts for n, parts in zip(shape, sizes, strict=True))
        sharding = NamedSharding(mesh, self.spec)
        return jax.make_array_from_single_device_arrays(whole, sharding, list(self.arrays))


class Placer:
    """Puts each weight of a model where a mesh splits it.

    The vocabulary is padded to the split; K/V heads are copied where there are more tensor shards.

    Attributes:
        config: the model's, with as many K/V heads as the split needs.
        shards: of the mesh.

    Raises:
        RequestError: a split that leaves a remainder.
    """

    def __init__(self, config: Decoder, mesh: Mesh):
        self._mesh, self.shards = mesh, shards_of(mesh)
        self._copies = {
            kind.axis("kv_heads"): kv_copies(kind, self.shards) for kind in config.attentions
        }
        self.config = config_on(config, self.shards)

    def __call__(self, plan: WeightPlan, read: Read, keep: Keep | None = None) -> Any:
        """A weight on its devices; with stages a layer's is a tree of `Parts` until `finish`.

        Args:
            read: called for what this process's devices hold, once for each different part.
            keep: makes of a part what they hold; None does as the plan says.

        Returns:
            None where another process has all of it.
        """
        param, staged = plan.param, plan.param.layer is not None and self.shards.stage > 1
        lead = (STAGE,) if staged else ()
        leaves, read = [], _remembering(read)
        for where, devices in self._held(plan, staged):
            part = self._part(param.line, where, read)
            part = keep(part, where) if keep else plan.keep(part, np.ascontiguousarray)
            if staged:
                part = jax.tree.map(lambda array: array[None], part)
            leaves += [jax.device_put(part, device) for device in devices]
        if not leaves:
            return None
        specs = split_leaf(leaves[0], plan.axes, param.line.num_stacked, lead)
        parts = jax.tree.map(lambda spec, *arrays: Parts(spec, arrays), specs, *leaves)
        return parts if staged else _joined(parts, self._mesh)

    def _held(self, plan: WeightPlan, staged: bool) -> Iterator[tuple[Where, list[Any]]]:
        """Each different part that this process's devices hold, and which do."""
        param, mesh = plan.param, self._mesh
        if staged:
            assert param.layer is not None
            stage = param.layer // (self.config.num_layers // self.shards.stage)
            axis = mesh.axis_names.index(STAGE)
            names = tuple(name for name in mesh.axis_names if name != STAGE)
            mesh = Mesh(mesh.devices.take(stage, axis), names)
        shape = whole_shape(param.line, self.config, self.shards)
        sharding = NamedSharding(mesh, PartitionSpec(*plan.axes))
        by_part: dict[tuple, list[Any]] = {}
        for device, where in sharding.addressable_devices_indices_map(shape).items():
            ends = tuple(w.indices(n)[:2] for w, n in zip(where or (), shape, strict=True))
            by_part.setdefault(ends, []).append(device)
        for ends in sorted(by_part):
            yield tuple(slice(*pair) for pair in ends), by_part[ends]

    def _part(self, line: WeightLine, where: Where, read: Read) -> np.ndarray:
        names = line.axis_names
        if names[0] == "vocab":
            return self._vocab_part(where, read)
        for axis, name in enumerate(names):
            if self._copies.get(name, 1) > 1:
                num_kv = GROUP_ENDS[names[axis + 1].rpartition(".")[2]]
                return self._copied_part(axis, self._copies[name], num_kv, where, read)
        return read(where)

    def _vocab_part(self, where: Where, read: Read) -> np.ndarray:
        """Rows of a vocabulary that is padded with zeros."""
        rows, real = where[0], self.config.vocab_size
        rows_read = read((slice(min(rows.start, real), min(rows.stop, real)), *where[1:]))
        missing = rows.stop - rows.start - rows_read.shape[0]
        return np.pad(rows_read, ((0, missing), (0, 0))) if missing else rows_read

    @staticmethod
    def _copied_part(axis: int, copies: int, num_kv: int, where: Where, read: Read) -> np.ndarray:
        """One K/V head, and this shard's part of its query heads in their order."""
        head, which = divmod(where[axis].start, copies)
        whole = read((*where[:axis], slice(head, head + 1), slice(None), slice(None)))
        queries = whole.shape[-2] - num_kv
        num_queries = queries // copies
        q = whole[..., which * num_queries : (which + 1) * num_queries, :]
        return np.concatenate((q, whole[..., queries:, :]), axis=-2)

    def finish(
        self, weights: dict[str, Any], table: Mapping[str, WeightLine], *, scan: bool
    ) -> dict[str, Any]:
        """The weights as the steps take them.

        With stages, row s of entry j of "stacked_layers" is the j-th layer of stage s; with `scan`
        each stage has its layers stacked by the period.
        """
        period, stages = self.config.groups.period, self.shards.stage
        if stages == 1:
            return _stack(weights, period=period) if scan else weights
        layers, each = weights["layers"], self.config.num_layers // stages
        joined = tuple(
            {key: self._of_all_stages([w[key] for w in layers[index::each]]) for key in layer}
            for index, layer in enumerate(layers[:each])
        )
        rest = {key: leaf for key, leaf in weights.items() if key != "layers"}
        weights = rest | {"stacked_layers": joined}
        return self._restacked(weights, table) if scan else weights

    def _of_all_stages(self, leaves: list[Any]) -> Any:
        present = [leaf for leaf in leaves if leaf is not None]
        together = jax.tree.map(
            lambda *parts: Parts(parts[0].spec, sum((p.arrays for p in parts), ())), *present
        )
        return _joined(together, self._mesh)

    def _restacked(
        self, weights: dict[str, Any], table: Mapping[str, WeightLine]
    ) -> dict[str, Any]:
        layers, period = {"stacked_layers": weights["stacked_layers"]}, self.config.groups.period
        specs = weights_specs(table, layers, self.shards)
        restack = jax.shard_map(
            lambda layers: stack_layers(unstack_layers(layers), period),
            mesh=self._mesh,
            in_specs=(specs,),
            out_specs={name: layers[:period] for name, layers in specs.items()},
            check_vma=False,
        )
        return weights | jax.jit(restack)(layers)


_stack = jax.jit(stack_layers, static_argnames="period")


def _joined(parts: Any, mesh: Mesh) -> Any:
    return jax.tree.map(lambda part: part.joined(mesh), parts)


def _remembering(read: Read) -> Read:
    """The same reader, which does not read again what it just read."""
    last: list[tuple[Any, np.ndarray]] = []

    def again(where: Where) -> np.ndarray:
        key = tuple((w.start, w.stop) for w in where)
        if not last or last[0][0] != key:
            last[:] = [(key, read(where))]
        return last[0][1]

    return again
