"""The devices of a run: where its arrays lie, and what devices exchange.

Rows are split over the mesh's axes data and fsdp. Over fsdp weights and moments are split too: each
device gathers a weight for the forward pass, and of a gradient it keeps the sum of its own part.
Over tensor the compiler splits heads, MLPs and the vocabulary, by the rules of `nn.shards`.

Source: Rajbhandari et al., ZeRO, 2020; Zhao et al., PyTorch FSDP, 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from rooflax.errors import RequestError
from rooflax.models.model import Model
from rooflax.nn.mesh import make_mesh
from rooflax.nn.shards import DATA, FSDP, TENSOR, TRAINING_AXES, Shards, check_split, split_axes
from rooflax.nn.weights import LAYER_PREFIX
from rooflax.ops.weights import Operand
from rooflax.train import job

ROW_AXES = (DATA, FSDP)
WHOLE = PartitionSpec()
SMALL = 256
"""Numbers of an array that is whole on every device."""


class OneDevice:
    """The device of a run without a mesh: every array is whole."""

    def shardings(self, tree: Any) -> Any:
        """Shardings of the arrays of a state or a part of one; None leaves them where they are."""
        del tree

    def placed(self, state: Any) -> Any:
        """A state, or a part of one, where it belongs."""
        return state

    def placed_fixed(self, fixed: Any) -> Any:
        """Arrays that are not trained, where they belong."""
        return fixed

    def kept(self, state: Any) -> Any:
        """Inside a program, a state that stays where it belongs."""
        return state

    def mapped(self, function: Callable, outputs: Any) -> Callable:
        """The function (weights, fixed, rows, further numbers), by each device of its own rows.

        Args:
            outputs: `TOTAL`, `ROWS` or `GRADIENTS` of each output.
        """
        del outputs
        return function

    def whole(self, weights: Any, fixed: Any) -> tuple[Any, Any]:
        """Inside `mapped`, the arrays of which a device has parts."""
        return weights, fixed

    def summed(self, numbers: Any) -> Any:
        """Inside `mapped`, sums over all devices' rows."""
        return numbers

    def summed_gradients(self, grads: Any) -> Any:
        """The same of gradients with respect to the weights, of which a device has its parts."""
        return grads


ONE_DEVICE = OneDevice()


class DeviceMesh(OneDevice):
    """The devices of a mesh.

    Args:
        text: as `TrainConfig.mesh`.
        model: whose weights are trained, or what an adapter is beside.
        trained: arrays, or their shapes.
        fixed: what is not trained.

    Raises:
        RequestError: there are not so many devices, or the model does not divide among them.
    """

    def __init__(self, text: str, model: Model, trained: Any, fixed: Any):
        self.mesh = make_mesh(text, TRAINING_AXES)
        self._tensor, self._fsdp = self.mesh.shape[TENSOR], self.mesh.shape[FSDP]
        self._rows = tuple(axis for axis in ROW_AXES if self.mesh.shape[axis] > 1)
        check_split(model.config.axis_sizes, Shards(tensor=self._tensor))
        self._table = model.table
        is_base = isinstance(fixed, Model)
        self.weights = self._of_adapter(trained) if is_base else self._of_weights(trained)
        self.fixed = jax.tree.map(lambda _: WHOLE, fixed)
        if is_base:
            self.fixed = replace(self.fixed, weights=self._of_weights(fixed.weights))
        self._by_path = dict(jax.tree_util.tree_leaves_with_path(self.weights))
        if self._fsdp > 1:
            self._check_parts(trained)

    def _of_adapter(self, matrices: Any) -> Any:
        return jax.tree.map(lambda leaf: self._spec(leaf.shape), matrices)

    def _of_weights(self, weights: Any) -> Any:
        shards = Shards(tensor=self._tensor)

        def of(path: tuple[Any, ...], leaf: Any) -> Any:
            if isinstance(leaf, Operand):
                return jax.tree.map(lambda part: self._spec(part.shape), leaf)
            key = path[-1].key
            line = self._table[key if len(path) == 1 else LAYER_PREFIX + key]
            lead = (None,) if path[0].key == "stacked_layers" else ()
            return self._spec(leaf.shape, (*lead, *split_axes(line, shards)))

        return jax.tree_util.tree_map_with_path(
            of, weights, is_leaf=lambda leaf: isinstance(leaf, Operand)
        )

    def _spec(self, shape: tuple[int, ...], axes: tuple[str | None, ...] = ()) -> PartitionSpec:
        """Partition of an array: over tensor as its line says, over fsdp its longest other axis,
        both where they divide."""
        named: list[str | None] = [None] * len(shape)
        for axis, name in enumerate(axes):
            named[axis] = name if name and shape[axis] % self._tensor == 0 else None
        free = [i for i, n in enumerate(shape) if named[i] is None and n % self._fsdp == 0]
        if self._fsdp > 1 and free and math.prod(shape) >= SMALL:
            named[max(free, key=lambda axis: shape[axis])] = FSDP
        return PartitionSpec(*named)

    def _check_parts(self, trained: Any) -> None:
        """
        Raises:
            RequestError: an array is on every device in whole.
        """
        for path, leaf in jax.tree_util.tree_leaves_with_path(trained):
            if leaf.size >= SMALL and FSDP not in self._by_path[path]:
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                raise RequestError(
                    f"no axis of {name} {list(leaf.shape)} divides over fsdp={self._fsdp} devices; "
                    f"choose another number.",
                    param="mesh",
                )

    def shardings(self, tree: Any) -> Any:
        def of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
            del leaf  # moments have the path of their weight behind their own
            ends = (self._by_path.get(path[first:]) for first in range(len(path)))
            spec = next((spec for spec in ends if spec is not None), WHOLE)
            return NamedSharding(self.mesh, spec)

        return jax.tree_util.tree_map_with_path(of, tree)

    def placed(self, state: Any) -> Any:
        return jax.tree.map(job.placed, state, self.shardings(state))

    def kept(self, state: Any) -> Any:
        return jax.lax.with_sharding_constraint(state, self.shardings(state))

    def placed_fixed(self, fixed: Any) -> Any:
        return jax.tree.map(
            lambda leaf, spec: job.placed(leaf, NamedSharding(self.mesh, spec)),
            fixed,
            self.fixed,
        )

    def mapped(self, function: Callable, outputs: Any) -> Callable:
        if not self._rows:
            return function
        specs = {TOTAL: WHOLE, ROWS: PartitionSpec(self._rows), GRADIENTS: _manual(self.weights)}
        weights, fixed, rows = specs[GRADIENTS], _manual(self.fixed), specs[ROWS]

        def run(*arguments: Any) -> Any:
            return jax.shard_map(
                function,
                mesh=self.mesh,
                in_specs=(weights, fixed, rows, *[WHOLE] * (len(arguments) - 3)),
                out_specs=jax.tree.map(specs.__getitem__, outputs),
                axis_names=set(self._rows),
                check_vma=False,
            )(*arguments)

        return run

    def whole(self, weights: Any, fixed: Any) -> tuple[Any, Any]:
        def gathered(leaf: Array, spec: PartitionSpec) -> Array:
            if FSDP not in spec:
                return leaf
            return jax.lax.all_gather(leaf, FSDP, axis=spec.index(FSDP), tiled=True)

        both = (weights, self.weights), (fixed, self.fixed)
        return tuple(jax.tree.map(gathered, tree, specs) for tree, specs in both)

    def summed(self, numbers: Any) -> Any:
        return jax.lax.psum(numbers, self._rows)

    def summed_gradients(self, grads: Any) -> Any:
        def total(leaf: Array, spec: PartitionSpec) -> Array:
            # What was gathered has gradients that are summed over fsdp already.
            axes = tuple(axis for axis in self._rows if axis not in spec)
            return jax.lax.psum(leaf, axes)

        return jax.tree.map(total, grads, self.weights)


TOTAL, ROWS, GRADIENTS = "total", "rows", "gradients"
"""Outputs of `mapped` functions: sums over all rows, an array of the rows, arrays like weights."""


def _manual(specs: Any) -> Any:
    """The same over the axes that functions know; tensor is the compiler's."""

    def of(spec: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(*(None if name == TENSOR else name for name in spec))

    return jax.tree.map(of, specs)
