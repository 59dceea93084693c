"""Arrays that stand where tuples of numbers stood: they behave as these, and as nothing larger."""

import pickle

import numpy as np
import pytest
import ray.cloudpickle as cloudpickle
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.shared.number_arrays import Logprobs, LossMask, TokenIds

ids = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(tuple)


@given(one=ids, other=ids, begin=st.integers(-25, 25), end=st.integers(-25, 25))
def test_what_a_tuple_answers(one, other, begin, end):
    kept = TokenIds(one)
    assert kept == one and one == kept and tuple(kept) == one and hash(kept) == hash(one)
    assert (kept == TokenIds(other)) is (one == other) and (kept == other) is (one == other)
    assert kept[begin:end] == one[begin:end] and len(kept) == len(one) and bool(kept) == bool(one)
    for joined in (kept + other, one + TokenIds(other), kept + TokenIds(other)):
        assert isinstance(joined, TokenIds) and joined == one + other
    assert pickle.loads(pickle.dumps(kept)) == one
    assert all(type(entry) is int for entry in kept)
    if one:
        assert kept[-1] == one[-1] and type(kept[0]) is int
        assert kept in {one} and kept != (*one[:-1], one[-1] ^ 1)


def test_logprobs_keep_the_bits_of_float32():
    values = np.random.default_rng(0).normal(size=100).astype(np.float32)
    kept = Logprobs(values.tolist())
    assert kept == tuple(values.tolist()) and pickle.loads(pickle.dumps(kept)).array.tobytes() == values.tobytes()
    assert kept != Logprobs(values[::-1]) and kept != LossMask(())
    assert Logprobs([-1e300]).array[0] == -np.inf


def test_nothing_is_changed_on_the_way_or_afterwards():
    with pytest.raises(ValueError, match="TokenIds cannot hold 2147483648"):
        TokenIds((2**31,))
    with pytest.raises(ValueError, match="of float64"):
        TokenIds((1.0,))
    with pytest.raises(ValueError, match="2 axes"):
        TokenIds(np.zeros((1, 1), np.int32))
    given = np.arange(3, dtype=np.int32)
    kept = TokenIds(given)
    given[0] = 7
    assert kept == (0, 1, 2)
    with pytest.raises(ValueError, match="read-only"):
        kept.array[0] = 7


def test_a_million_entries_take_their_bytes():
    assert len(pickle.dumps(TokenIds.filled(5, 2**20))) < 2**22 + 200
    assert len(pickle.dumps(LossMask.filled(1, 2**20)[:1024])) < 1300


@pytest.mark.parametrize("kept", [TokenIds((1, 2)), Logprobs((-0.5,)), LossMask((1, 0, 1))])
def test_ray_writes_numbers_and_no_code(kept):
    written = cloudpickle.dumps(kept)
    assert pickle.loads(written) == kept and len(written) < len(pickle.dumps(kept)) + 50


def test_ones_of_a_mask_are_counted():
    mask = LossMask((1, 0, 1, 1))
    assert [one.ones for one in (mask, mask[1:2], mask[::2], LossMask())] == [3, 0, 2, 0]
