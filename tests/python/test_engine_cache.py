"""A tensor seen before is announced by a number. What is cached must never decide what is right."""

import random

import pytest
import torch
from rank_helpers import error_of, ranks

import fusewire as fw


def total(shape, dtype=torch.float32, op=fw.Sum, name="x", **scales):
    """The result for "rank + 1 everywhere", as a set of its values."""
    result = fw.allreduce(torch.full(shape, fw.rank() + 1, dtype=dtype), op=op, name=name, **scales)
    assert result.shape == shape
    assert result.dtype == dtype
    return set(result.flatten().tolist())


@ranks(4)
def test_a_warm_name_changes_its_description_on_all_ranks():
    for _ in range(3):
        assert total((3,)) == {10.0}
        assert total((2, 5)) == {10.0}
        assert total((3,), dtype=torch.int64) == {10}
        assert total((3,), op=fw.Average) == {2.5}
        assert total((3,), op=fw.Product) == {24.0}
        assert total((3,), prescale_factor=2.0) == {20.0}
        assert total((3,), postscale_factor=0.5) == {5.0}


@ranks(4)
@pytest.mark.parametrize("odd", [0, 2])
def test_a_warm_name_changes_its_description_on_one_rank_only(odd):
    """Hit on some ranks, miss on another: an error everywhere, and the old description works at once again."""
    changes = [{"shape": (4,)}, {"dtype": torch.float64}, {"op": fw.Average}, {"prescale_factor": 2.0}]
    for change in changes:
        for _ in range(3):
            assert total((3,)) == {10.0}
        arguments = {"shape": (3,)} | (change if fw.rank() == odd else {})
        assert type(error_of(total, **arguments)) is fw.TensorMismatchError
        for _ in range(2):
            assert total((3,)) == {10.0}


@ranks(4)
def test_the_ranks_change_a_warm_description_at_different_moments_of_the_same_call():
    """All move to the new shape, but one still holds other operations in front of it."""
    for turn in range(20):
        shape = (3 + turn % 2,)
        handles = []
        if fw.rank() == turn % 4:
            handles = [fw.allreduce_async(torch.ones(100), name=f"ahead.{i}") for i in range(10)]
        assert total(shape, name="moving") == {10.0}
        if not handles:
            handles = [fw.allreduce_async(torch.ones(100), name=f"ahead.{i}") for i in range(10)]
        for handle in handles:
            handle.wait()


@ranks(4, init={"cache_capacity": 2})
def test_five_names_in_a_cache_of_two():
    for turn in range(30):
        order = random.Random(turn if turn % 2 else 10 * turn + fw.rank()).sample(range(5), 5)
        handles = {
            i: fw.allreduce_async(torch.full((i + 1,), float(fw.rank() + turn)), op=fw.Sum, name=f"evict.{i}")
            for i in order
        }
        for i in range(5):
            assert torch.equal(handles[i].wait(), torch.full((i + 1,), 6.0 + 4 * turn)), (turn, i)


@ranks(3, init={"cache_capacity": 0})
def test_without_a_cache():
    for turn in range(10):
        assert total((2,), name="uncached") == {6.0}
        assert total((turn + 1,), name="uncached") == {6.0}


@ranks(3, init={"cache_capacity": 3})
def test_evictions_while_other_tensors_of_the_cache_are_in_flight():
    for turn in range(20):
        names = [f"churn.{(turn + k) % 7}" for k in range(6)]
        if fw.rank() == turn % 3:
            names.reverse()
        handles = {name: fw.allreduce_async(torch.full((4,), fw.rank() + 1.0), op=fw.Sum, name=name) for name in names}
        for name in names:
            assert set(handles[name].wait().tolist()) == {6.0}


@ranks(2)
def test_more_names_than_any_cache_holds():
    for i in range(6000):
        handle = fw.allreduce_async_(torch.full((2,), float(i)), name=f"fresh.{i}")
        if i % 500 == 499:
            assert handle.wait().tolist() == [float(i)] * 2
