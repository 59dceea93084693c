"""Elements that a rank holds of a parameter, as boxes of the tensor that is saved."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from actor.optimizer_content import _shards, boxes, elements_below
from rlpipe.shared.errors import CheckpointError

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_boxes_hold_each_element_of_a_range_once_and_are_few(shape, data):
    count = torch.Size(shape).numel()
    first, last = sorted(data.draw(st.tuples(st.integers(0, count), st.integers(0, count))))
    seen = torch.zeros(shape, dtype=torch.int64)
    found = boxes(shape, first, last)
    for begins, sizes in found:
        seen[tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))] += 1
    assert seen.flatten().tolist() == [int(first <= at < last) for at in range(count)]
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(SHAPES, st.data())
def test_elements_of_a_part_are_counted_where_they_lie(shape, data):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    part = whole
    for dimension, size in enumerate(shape):
        start = data.draw(st.integers(0, size - 1))
        part = part.narrow(dimension, start, data.draw(st.integers(1, size - start)))
    bound = data.draw(st.integers(-2, whole.numel() + 2))
    assert elements_below(part.shape, part.stride(), bound - part.storage_offset()) == int((part < bound).sum())


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("ends", [(0, 7, 24), (0, 24), (0, 1, 2, 13, 24)])
def test_ranks_save_a_tensor_that_is_cut_in_two_along_either_dimension(dimension, ends):
    """As Megatron cuts gate and up of a feed-forward. Together the ranks have every element at its place."""
    parameter, values = torch.empty(4, 6), torch.arange(24.0)

    def build(key, tensor, replica_id, flattened_range):
        return {
            number: ShardedTensor.from_rank_offsets(
                f"{key}.half", part, (0, number, 2), prepend_axis_num=1, replica_id=replica_id
            )
            for number, part in enumerate(tensor.chunk(2, dimension))
        }

    place = ShardedTensorFactory("gate_and_up", parameter, build, lambda loaded: loaded, (0, 0, 1))
    found = torch.full((2, *parameter.chunk(2, dimension)[0].shape), -1.0)
    for start, end in zip(ends, ends[1:], strict=False):
        for shard in _shards(place, "moments.", values[start:end], start):
            assert shard.key == "moments.gate_and_up.half" and shard.replica_id == (0, 0, 0)
            assert (found[shard.global_slice()] == -1.0).all()
            found[shard.global_slice()] = shard.data
            assert values[start:end].untyped_storage().data_ptr() == shard.data.untyped_storage().data_ptr()
    for part, expected in zip(found, values.view(4, 6).chunk(2, dimension), strict=True):
        assert part.equal(expected)


def test_a_part_in_another_order_is_refused():
    def build(key, tensor, replica_id, flattened_range):
        return [ShardedTensor.from_rank_offsets(key, tensor.t(), replica_id=replica_id)]

    place = ShardedTensorFactory("turned", torch.empty(2, 3), build, lambda loaded: loaded, (0, 0, 0))
    with pytest.raises(CheckpointError, match="moments.turned is no part of its parameter in the same order"):
        list(_shards(place, "moments.", torch.zeros(6), 0))
