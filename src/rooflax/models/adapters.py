"""Low-rank adapters (LoRA) over a model's weights: which layers they may change, and how.

An adapter names linear layers as transformers does. Ours may hold several of these side by side (q,
k, v; gate, up): their adapters lie side by side too, A beside A and each B over its own outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rooflax.errors import CheckpointError
from rooflax.models.model import Model
from rooflax.models.registry import family
from rooflax.nn.decoder import Decoder
from rooflax.nn.storage import is_head
from rooflax.nn.tensor_layouts import (
    QKV,
    Conv1D,
    HeadRows,
    Linear,
    Parallel,
    PerExpert,
    Rows,
    Shape,
    StackedExperts,
    Swapped,
    TensorLayout,
)
from rooflax.nn.weights import Param, WeightLine
from rooflax.ops.host_arrays import Together
from rooflax.ops.linear.adapted import Adapted
from rooflax.ops.linear.adapter_slots import LANES, AdapterSlots, Spans, places
from rooflax.ops.weights import as_operand
from rooflax.ops.weights.quantized import namespace

HEAD = "lm_head"
Place = tuple[int | None, str]
"""Place of a weight: its layer and its key."""
Matrices = tuple[Any, Any, np.ndarray | None, Any]
"""A, B, the factors of the outputs, and in training their magnitudes."""


@dataclass(frozen=True)
class LowRank:
    """An adapter of one linear layer: W + scale B A, W being [out, in].

    Attributes:
        a: float32 [rank, in].
        b: float32 [out, rank].
        scale: of their product.
        columns: DoRA's factor of each output, [out]; None without.
        magnitude: in training in its place, DoRA's length of each output's weights, [out].
    """

    a: Any
    b: Any
    scale: float
    columns: np.ndarray | None = None
    magnitude: Any = None


@dataclass(frozen=True)
class Target:
    """A linear layer that an adapter may change.

    Attributes:
        param: the weight that holds it; its line has the tensor that the layer's is.
        index: which of the line's tensors it is.
        inputs, outputs: features.
        names: its module's paths in transformers' models; the first is that of the causal language
            model.
        is_usual: checkpoints of the family have it so; some have it fused, or in parts.
    """

    param: Param
    index: int
    inputs: int
    outputs: int
    names: tuple[str, ...]
    is_usual: bool = True

    @property
    def module(self) -> str:
        return self.names[0]

    @property
    def weight(self) -> str:
        """The tensor's name in checkpoints; of a tied head one that they do not have."""
        if self.param.key == HEAD:  # which some families' checkpoints name otherwise
            return self.param.hf_names[0]
        return f"{self.module}.weight"

    @property
    def is_head(self) -> bool:
        return self.param.layer is None and HEAD in self.names

    @property
    def is_transposed(self) -> bool:
        """Whether the checkpoint has it as [in, out], as GPT-2's Conv1D."""
        return not self.is_head and isinstance(self.param.line.layout, Conv1D | Swapped)


FREE = {"columns": 1.0, "magnitude": 0.0}
"""Values of an output that has none of its own."""
Adapters = Mapping[str, LowRank]
"""By `Target.module`."""


def targets(name: str, config: Decoder) -> dict[str, Target]:
    """The linear layers of a model that adapters may change, by their modules' paths; the head
    comes last.

    Args:
        name: the family.
    """
    by_name: dict[str, Target] = {}
    prefixes: tuple[str, ...] = getattr(family(name), "HF_PREFIXES", ("model.", ""))
    sizes = config.axis_sizes

    def add(param: Param, lines: list[WeightLine], *, is_usual: bool) -> None:
        """The tensors of a line, with their names in further ones."""
        placed = replace(param, line=lines[0])
        inputs = math.prod(lines[0].in_out_shape(sizes)[0])
        shapes = lines[0].hf_shapes(sizes)
        each = zip(*(replace(param, line=line).hf_names for line in lines), strict=True)
        for index, (tensors, shape) in enumerate(zip(each, shapes, strict=True)):
            bare = (t.removesuffix(".weight").removeprefix(prefixes[0]) for t in tensors)
            names = tuple(prefix + module for module in bare for prefix in prefixes)
            outputs = math.prod(shape) // inputs
            by_name[names[0]] = Target(placed, index, inputs, outputs, names, is_usual)

    for param in config.params():
        lines = [line for line in param.line.places if _is_adaptable(line)]
        alike = [line for line in lines if len(line.names) == len(lines[0].names)]
        if param.layer is not None and alike:
            add(param, alike, is_usual=True)
        for line in [line for line in lines if param.layer is not None and line not in alike]:
            add(param, [line], is_usual=False)
    head = next((param for param in config.params() if is_head(param, config)), None)
    if head is not None and config.has_head:
        outer = dict.fromkeys(prefix.removesuffix("model.") for prefix in prefixes if prefix)
        names = HEAD, *(prefix + HEAD for prefix in outer if prefix)
        by_name[HEAD] = Target(head, 0, config.hidden_size, config.vocab_size, names)
    return by_name


def tables(name: str, config: Decoder) -> dict[str, Target]:
    """Embedding and head by their modules' paths, of which a full copy may be trained beside an
    adapter (PEFT's modules_to_save); none where they are one matrix."""
    head = targets(name, config).get(HEAD)
    if head is None or head.param.key != HEAD:
        return {}
    prefixes: tuple[str, ...] = getattr(family(name), "HF_PREFIXES", ("model.", ""))
    param = next(param for param in config.params() if param.key == "embed")
    bare = param.hf_names[0].removesuffix(".weight").removeprefix(prefixes[0])
    names = tuple(prefix + bare for prefix in prefixes)
    return {HEAD: head, names[0]: replace(head, param=param, names=names)}


@dataclass(frozen=True)
class ExpertTarget:
    """Experts of a layer whose weights are one parameter in transformers, which an adapter may
    change by PEFT's target_parameters: A and B of each lie in one A and one B.

    Attributes:
        param: the weight that holds them; its line has the tensor that the parameter is.
        count: of the experts.
        inputs, outputs: features of each.
        parameter: its path.
        apart: the weight with a line of which each expert has tensors of its own, as some
            checkpoints have it; None where none does.
    """

    param: Param
    count: int
    inputs: int
    outputs: int
    parameter: str
    apart: Param | None = None

    @property
    def module(self) -> str:
        return self.parameter.rpartition(".")[0]

    @property
    def has_outputs_first(self) -> bool:
        """Whether the parameter is [experts, out, in]."""
        return isinstance(self.param.line.layout, StackedExperts)

    def factors(self, part: LowRank) -> tuple[Any, Any]:
        """scale A [experts, in, rank] and B [experts, rank, out], from A [experts * rank, in] and B
        [out, rank * experts], where neighbours are of one rank."""
        a = part.a.reshape(self.count, -1, self.inputs).swapaxes(1, 2)
        b = part.b.reshape(self.outputs, -1, self.count).transpose(2, 1, 0)
        return a * np.float32(part.scale), b

    def merged(self, tensor: np.ndarray, part: LowRank) -> np.ndarray:
        """The checkpoint's tensor with an adapter in it, in float32."""
        a, b = self.factors(part)
        change = a @ b
        if self.has_outputs_first:
            change = change.swapaxes(1, 2)
        return tensor.astype(np.float32) + change

    def merged_apart(
        self, tensor: np.ndarray, part: LowRank, index: int, sizes: Mapping[str, int]
    ) -> np.ndarray:
        """A tensor of one expert with an adapter in it, in float32.

        Args:
            index: of the tensor among `apart`'s.
        """
        assert self.apart is not None
        layout = self.apart.line.layout
        assert isinstance(layout, PerExpert)
        shape, out_shape = self.apart.line.in_out_shape(sizes)
        expert, index = divmod(index, len(layout.each.hf_shapes(shape[1:], out_shape)))
        a, b = (factor[expert] for factor in self.factors(part))
        order = _expert_order(self.param.line.layout, out_shape)
        change = (a @ b[:, order]).reshape(*shape[1:], *out_shape)
        return tensor.astype(np.float32) + layout.each.split(change, shape[1:])[index]

    def adapted(self, leaf: Any, part: LowRank, sizes: Mapping[str, int]) -> Any:
        """Our weight with an adapter in it, in float32; it has no gradient itself."""
        shape, out_shape = self.param.line.in_out_shape(sizes)
        w = as_operand(leaf, contract=len(shape) - 1, stack=1).in_stack()[0].numbers()
        a, b = self.factors(part)
        order = _expert_order(self.param.line.layout, out_shape)
        return (jax.lax.stop_gradient(w) + a @ reordered(b, order)).reshape(*shape, *out_shape)


@cache
def _expert_order(layout: TensorLayout, out_shape: Shape) -> np.ndarray:
    """`output_order` of an expert."""
    (shape,) = layout.hf_shapes((1, 1), out_shape)
    out = np.empty((1, 1, *out_shape), np.int32)
    layout.join([np.arange(math.prod(shape), dtype=np.int32).reshape(shape)], out)
    return out.reshape(-1)


def expert_targets(name: str, config: Decoder) -> dict[str, ExpertTarget]:
    """The parameters of experts that adapters may change, by their paths; of each layer in the
    order in which PEFT wraps them, the innermost first."""
    prefixes: tuple[str, ...] = getattr(family(name), "HF_PREFIXES", ("model.", ""))
    sizes, experts = config.axis_sizes, dict[str, ExpertTarget]()
    for param in config.params():
        places = param.line.places if param.layer is not None else ()
        apart = next((replace(param, line=line) for line in places if _is_apart(line)), None)
        for line in places:
            if line.num_stacked != 1 or "->" not in line.axes or len(line.names) != 1:
                continue
            placed = replace(param, line=line)
            path = prefixes[0] + placed.hf_names[0].removeprefix(prefixes[0])
            (count, *inner), outer = line.in_out_shape(sizes)
            sides = math.prod(inner), math.prod(outer)
            target = ExpertTarget(placed, count, *sides, path, apart)
            experts.setdefault(path, target)  # the family's own layout comes first
    return experts


def _is_apart(line: WeightLine) -> bool:
    return isinstance(line.layout, PerExpert) and not isinstance(line.layout, StackedExperts)


def _is_adaptable(line: WeightLine) -> bool:
    """Whether a weight multiplies as one matrix whose inputs lie as in the checkpoint."""
    return "->" in line.axes and not line.num_stacked and _keeps_inputs(line.layout)


def _keeps_inputs(layout: TensorLayout) -> bool:
    if isinstance(layout, Rows):
        return _keeps_inputs(layout.each)
    is_kernel = isinstance(layout, HeadRows) and layout.is_kernel
    return isinstance(layout, Linear | QKV | Parallel | Conv1D | Swapped | HeadRows) and (
        not is_kernel
    )


@cache
def output_order(layout: TensorLayout, out_shape: Shape) -> tuple[np.ndarray, tuple[int, ...]]:
    """Order of a weight's outputs: for each its number among those of the checkpoint's tensors, one
    tensor after the other; and the size of each tensor."""
    shapes = layout.hf_shapes((1,), out_shape)
    sizes = tuple(math.prod(shape) for shape in shapes)
    ends = np.cumsum(sizes)
    parts = [
        np.arange(end - size, end, dtype=np.int32).reshape(shape)
        for end, size, shape in zip(ends, sizes, shapes, strict=True)
    ]
    out = np.empty((1, *out_shape), np.int32)
    layout.join(parts, out)
    return out.reshape(-1), sizes


def reordered(columns: Any, order: np.ndarray) -> Any:
    """columns[..., order], of NumPy's arrays or jax's.

    The gradient of a permutation is gathered: that of indexing is added up number by number.
    """
    every = np.arange(columns.shape[-1])
    if np.array_equal(order, every):
        return columns
    if isinstance(columns, np.ndarray) or not np.array_equal(np.sort(order), every):
        return columns[..., order]
    return _permuted(columns, order, np.argsort(order))


@jax.custom_vjp
def _permuted(columns: Array, order: Any, inverse: Any) -> Array:
    del inverse
    return columns[..., order]


def _permuted_forward(columns: Array, order: Any, inverse: Any) -> tuple[Array, Any]:
    return columns[..., order], inverse


def _permuted_backward(inverse: Any, gradient: Array) -> tuple[Array, None, None]:
    return gradient[..., inverse], None, None


_permuted.defvjp(_permuted_forward, _permuted_backward)


def side_by_side(
    line: WeightLine, sizes: Mapping[str, int], parts: Mapping[int, LowRank], *, is_head: bool
) -> Matrices:
    """A [in, rank], B [rank, out] with the scales, and the factors or magnitudes of the outputs, of
    a weight whose tensors have these adapters; the rank is the sum of theirs.

    Args:
        line: of the weight, with the tensors that the parts are numbered by.
        parts: of NumPy's arrays, or of jax's, which have gradients.
    """
    if is_head:
        (part,) = parts.values()
        return part.a.T, part.b.T * np.float32(part.scale), part.columns, part.magnitude
    order, rows = output_order(line.layout, line.in_out_shape(sizes)[1])
    begins = np.cumsum((0, *rows))
    xp = namespace(next(iter(parts.values())).a)
    a = xp.concatenate([part.a.T for part in parts.values()], axis=1)
    wide = [
        xp.pad(
            part.b.T * np.float32(part.scale),
            ((0, 0), (int(begins[index]), int(begins[-1] - begins[index + 1]))),
        )
        for index, part in parts.items()
    ]

    def outputs(name: str) -> Any:
        known = {index: getattr(part, name) for index, part in parts.items()}
        if all(vector is None for vector in known.values()):
            return None
        each = (known.get(index) for index in range(len(rows)))
        free = (np.full(size, FREE[name], np.float32) for size in rows)
        filled = [one if vector is None else vector for vector, one in zip(each, free, strict=True)]
        return namespace(filled[next(iter(known))]).concatenate(filled)[order]

    b = reordered(xp.concatenate(wide, axis=0), order)
    return a, b, outputs("columns"), outputs("magnitude")


def by_param(
    name: str, config: Decoder, adapters: Adapters
) -> dict[Place, tuple[Target, dict[int, LowRank]]]:
    """The adapters of each weight by its layer and key, with one of its targets.

    Raises:
        CheckpointError: they name a fused layer and parts of it.
    """
    known = targets(name, config)
    pieces: dict[Place, tuple[Target, dict[int, LowRank]]] = {}
    for module, part in adapters.items():
        target = known[module]
        one, parts = pieces.setdefault((target.param.layer, target.param.key), (target, {}))
        if one.param.line != target.param.line:
            raise CheckpointError(
                f"The adapter changes {one.module} and {module}, which name the same weights."
            )
        parts[target.index] = part
    return {key: (one, dict(sorted(parts.items()))) for key, (one, parts) in pieces.items()}


def adapted(model: Model, adapters: Adapters) -> Model:
    """The model with adapters beside its weights, which stay as they are, stacked or not."""
    weights = adapted_weights(model.family, model.config, model.weights, adapters)
    return replace(model, weights=jax.tree.map(_on_device, weights))


def adapted_weights(
    name: str, config: Decoder, weights: dict[str, Any], adapters: Adapters
) -> dict[str, Any]:
    """`adapted` of the tree of weights."""
    changed = by_param(name, config, adapters)
    sizes = config.axis_sizes
    made = {
        at: side_by_side(target.param.line, sizes, parts, is_head=target.is_head)
        for at, (target, parts) in changed.items()
    }
    by_key = {key: target for (_, key), (target, _) in changed.items()}

    def beside(base: Any, each: list[Matrices | None], key: str, *, stacked: bool) -> Adapted:
        target = by_key[key]
        shape = target.param.line.in_out_shape(sizes)
        return _adapted(base, each, shape, target.is_head, config, stacked=stacked)

    return _placed(config, weights, made, beside)


@dataclass(frozen=True)
class SlotLayout:
    """Layout of a weight's adapters in slots, alike in all layers.

    Attributes:
        shape: of the weight, its inputs' axes and its outputs'.
        parts: of each output, which part of A it has; -1 is none.
        rank: of a part.
    """

    shape: tuple[Shape, Shape]
    parts: np.ndarray
    rank: int

    @cached_property
    def spans(self) -> Spans:
        begins = np.flatnonzero(np.diff(self.parts, prepend=-2))
        ends = (*begins[1:], len(self.parts))
        each = ((int(i), int(j - i), int(self.parts[i])) for i, j in zip(begins, ends, strict=True))
        return tuple(span for span in each if span[2] >= 0)

    @cached_property
    def columns(self) -> np.ndarray:
        return places(self.spans, len(self.parts))

    @property
    def shapes(self) -> tuple[Shape, Shape]:
        """Shapes of A and B in a slot, [in, width] and [panels, rank, LANES]."""
        width = -(-self.rank * (int(self.parts.max()) + 1) // LANES) * LANES
        panels = sum(-(-count // LANES) for _, count, _ in self.spans)
        return (math.prod(self.shape[0]), width), (panels, self.rank, LANES)

    def filled(self, target: Target, parts: Mapping[int, LowRank]) -> tuple[np.ndarray, np.ndarray]:
        """A and B of an adapter whose tensors are numbered as the target's line has them."""
        a, b = (np.zeros(shape, np.float32) for shape in self.shapes)
        order, sizes = output_order(target.param.line.layout, self.shape[1])
        tensors = np.repeat(np.arange(len(sizes)), sizes)[order]
        within = order - (np.cumsum(sizes) - sizes)[tensors]
        wide = np.zeros((self.rank, b.shape[0] * LANES), np.float32)
        for number, part in parts.items():
            rank = part.a.shape[0]
            is_own = (tensors == number) & (self.parts >= 0)
            outputs = part.b.T * np.float32(part.scale)
            wide[:rank, self.columns[is_own]] = outputs[:, within[is_own]]
            for part_index in np.unique(self.parts[is_own]):
                a[:, part_index * self.rank : part_index * self.rank + rank] = part.a.T
        b[:] = wide.reshape(self.rank, -1, LANES).swapaxes(0, 1)
        return a, b


def _slot_layouts(
    name: str, config: Decoder, modules: Collection[str], rank: int
) -> dict[Place, SlotLayout]:
    """Layouts of slots beside each weight that has them: weights of one key and shape are alike.

    Raises:
        CheckpointError: the modules name a fused layer and parts of it.
    """
    known = targets(name, config)
    groups: dict[Any, list[Target]] = {}
    for module in modules:
        param = known[module].param
        shape = param.line.in_out_shape(config.axis_sizes)
        groups.setdefault((param.key, shape), []).append(known[module])
    layouts: dict[Place, SlotLayout] = {}
    for (key, shape), group in groups.items():
        order, sizes = output_order(group[0].param.line.layout, shape[1])
        for target in group:
            if output_order(target.param.line.layout, shape[1])[1] != sizes:
                raise CheckpointError(
                    f"The adapters change {group[0].module} and {target.module}, which name the "
                    f"same weights."
                )
        parts = np.full(len(sizes), -1)
        indices = sorted({target.index for target in group})
        parts[indices] = np.arange(len(indices))
        layout = SlotLayout(shape, parts[np.repeat(np.arange(len(sizes)), sizes)[order]], rank)
        layouts |= {(target.param.layer, key): layout for target in group}
    return layouts


def slot_bytes(name: str, config: Decoder, modules: Collection[str], rank: int, dtype: str) -> int:
    """Bytes of the matrices of one slot of `banked`."""
    layouts = _slot_layouts(name, config, modules, rank).values()
    numbers = sum(math.prod(shape) for layout in layouts for shape in layout.shapes)
    return numbers * jnp.dtype(dtype).itemsize


def banked(
    model: Model,
    banks: Sequence[Adapters | None],
    modules: Collection[str],
    rank: int,
    dtype: str = "float32",
) -> Model:
    """The model with several adapters in slots beside its weights, one of which each row has.

    The shapes depend on nothing but the arguments below: with other adapters nothing compiles.

    Args:
        model: with slots already, where one of them stays.
        banks: of each slot; an empty one has no layers, None leaves a slot as it is.
        modules: the layers that have slots, by `Target.module`.
        rank: the most of an adapter.
        dtype: of A and B, "float32" or "bfloat16".
    """
    name, config = model.family, model.config
    layouts = _slot_layouts(name, config, modules, rank)
    each = [None if one is None else by_param(name, config, one) for one in banks]
    memory, width = Together(), jnp.dtype(dtype)

    def beside(base: Any, layers: list[Place | None], _: str, *, stacked: bool) -> AdapterSlots:
        layout = next(layouts[place] for place in layers if place is not None)
        lead = len(layers), len(banks)
        a, b = (memory.empty((*lead, *shape), width) for shape in layout.shapes)
        for index in np.ndindex(lead):
            place, bank = layers[index[0]], each[index[1]]
            if place is not None and bank is None:
                a[index], b[index] = _slot_of(model.weights, place, index[1])
            elif place is not None and bank is not None and place in bank:
                a[index], b[index] = layout.filled(*bank[place])
            else:
                a[index], b[index] = 0, 0
        if isinstance(base, AdapterSlots):  # others take their place
            base = base.base
        a, b = (_on_device(each if stacked else each[0]) for each in (a, b))
        return AdapterSlots(base, a, b, *layout.shape, layout.spans)

    weights = _placed(config, model.weights, {place: place for place in layouts}, beside)
    return replace(model, weights=weights)


def _slot_of(weights: dict[str, Any], at: Place, slot: int) -> tuple[np.ndarray, np.ndarray]:
    """A and B of one slot beside a layer's weight."""
    layer, key = at
    assert layer is not None
    is_stacked = "stacked_layers" in weights
    layers = weights["stacked_layers" if is_stacked else "layers"]
    row, index = divmod(layer, len(layers))
    leaf = layers[index][key]
    at_slot = (row, slot) if is_stacked else slot
    return np.asarray(leaf.a)[at_slot], np.asarray(leaf.b)[at_slot]


def _on_device(leaf: Any) -> Any:
    return jax.device_put(leaf) if isinstance(leaf, np.ndarray) else leaf


def _placed(
    config: Decoder, weights: dict[str, Any], made: Mapping[Place, Any], beside: Callable[..., Any]
) -> dict[str, Any]:
    """The weights with these matrices beside them.

    Args:
        beside: (a leaf, the matrices of its layers, its key, stacked=) -> the leaf with those; a
            layer without has None.
    """
    placed = dict(weights)
    for (layer, key), matrices in made.items():
        if layer is None:
            placed[key] = beside(weights[key], [matrices], key, stacked=False)
    stacked = "stacked_layers" in weights
    layers = weights["stacked_layers" if stacked else "layers"]
    period = len(layers)
    new_layers = []
    for index, layer in enumerate(layers):
        rows = range(index, config.num_layers, period)
        new = dict(layer)
        for key in layer:
            each = [made.get((row, key)) for row in rows]
            if any(matrices is not None for matrices in each):
                new[key] = beside(layer[key], each, key, stacked=stacked)
        new_layers.append(new)
    placed["stacked_layers" if stacked else "layers"] = tuple(new_layers)
    return placed


def _adapted(
    base: Any,
    each: list[Matrices | None],
    shape: tuple[Shape, Shape],
    is_head: bool,
    config: Decoder,
    *,
    stacked: bool,
) -> Adapted:
    """A leaf with its adapter, or a stack of layers with theirs; a layer without has zeros, and
    smaller ranks are filled up with them."""
    if is_head:
        shape = (config.hidden_size,), (config.vocab_size,)
    known = [pair for pair in each if pair is not None]
    xp = namespace(known[0][0])
    rank = max(a.shape[1] for a, *_ in known)
    inner, outer = math.prod(shape[0]), math.prod(shape[1])

    def filled() -> Iterator[tuple[Any, Any]]:
        for pair in each:
            if pair is None:
                yield xp.zeros((inner, rank), np.float32), xp.zeros((rank, outer), np.float32)
                continue
            a, b, *_ = pair
            short = rank - a.shape[1]
            yield xp.pad(a, ((0, 0), (0, short))), xp.pad(b, ((0, short), (0, 0)))

    def outputs(part: int, name: str) -> Any:
        vectors = [None if pair is None else pair[part] for pair in each]
        if all(vector is None for vector in vectors):
            return None
        free = np.full(outer, FREE[name], np.float32)
        return xp.stack([free if vector is None else vector for vector in vectors])

    a, b = (xp.stack(matrices) for matrices in zip(*filled(), strict=True))
    columns, magnitude = outputs(2, "columns"), outputs(3, "magnitude")
    if not stacked:
        a, b = a[0], b[0]
        columns, magnitude = (each if each is None else each[0] for each in (columns, magnitude))
    return Adapted(base, a, b, columns, *shape, is_table=is_head, magnitude=magnitude)
