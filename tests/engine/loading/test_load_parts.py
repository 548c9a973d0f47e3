"""Loading onto a mesh: of each device's part no more is read and made than that."""

import jax
import numpy as np
import pytest

from rooflax import LLM
from rooflax.loading import tensor_plan
from rooflax.loading.checkpoint import Checkpoint
from rooflax.models.registry import read_config
from rooflax.nn.shard_sizes import whole_shape
from rooflax.nn.shards import Shards, split_axes
from rooflax.nn.tensor_layouts import TensorLayout
from tests import goldens
from tests.sharding import CONFIGS, write_checkpoint


@pytest.mark.parametrize(("model", "axis"), [("llama", "tensor"), ("gpt_oss", "expert")])
def test_each_byte_is_read_once_and_no_host_array_is_larger_than_a_part(
    tmp_path, monkeypatch, model, axis
):
    folder = write_checkpoint(tmp_path, model)
    made, read = [], []
    empty = tensor_plan.aligned_empty

    def counted(shape, dtype):
        array = empty(shape, dtype)
        made.append(array.nbytes)
        return array

    monkeypatch.setattr(tensor_plan, "aligned_empty", counted)
    for layout in {TensorLayout, *TensorLayout.__subclasses__()}:
        if "join" in vars(layout):
            join = layout.join

            def counting(self, parts, out, join=join):
                read.append(sum(part.nbytes for part in parts))
                join(self, parts, out)

            monkeypatch.setattr(layout, "join", counting)
    llm = LLM(folder, mesh=jax.make_mesh((2,), (axis,)), dtype="float32")
    checkpoint = Checkpoint(folder)
    assert sum(read) == sum(checkpoint.info(name).nbytes for name in checkpoint.names())

    _, config = read_config(CONFIGS[model])
    largest = 0
    for slot in config.params():
        split = axis in split_axes(slot.line, Shards(**{axis: 2}))
        size = 4 * int(np.prod(whole_shape(slot.line, config, Shards(tensor=2))))
        largest = max(largest, size // (2 if split else 1))
    assert max(made) <= largest
    assert llm.model.weights["embed"].dtype == np.float32


@pytest.mark.parametrize("variant", list(goldens.VARIANTS))
def test_every_layouts_parts_are_parts_of_the_whole(variant):
    """For each weight and each of its axes that a mesh splits: join of narrow is a part of join."""
    reference = goldens.committed(variant)
    _, config = read_config(goldens.VARIANTS[variant])
    state = np.random.RandomState(0)
    stored = goldens.stored_shapes(variant, reference)
    for slot in config.params():
        weight, shape = slot.line, slot.line.shape(config.axis_sizes)
        sizes = weight.hf_shapes(config.axis_sizes)
        assert all(stored[n] == s for n, s in zip(slot.hf_names, sizes, strict=True))
        parts = [state.standard_normal(s).astype(np.float32) for s in sizes]
        whole = np.empty(shape, np.float32)
        weight.layout.join(parts, whole)
        axes = split_axes(weight, Shards(2, 2, 2, 2, 2))
        for index, axis in enumerate(axes):
            if axis is None or shape[index] == 1:
                continue
            where = [slice(0, n) for n in shape]
            where[index] = slice(1, shape[index])
            own = np.empty(whole[tuple(where)].shape, np.float32)
            weight.layout.join(weight.layout.slice_parts(parts, shape, tuple(where)), own)
            np.testing.assert_array_equal(own, whole[tuple(where)], err_msg=slot.name)
