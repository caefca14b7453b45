"""Process sets: operations among some of the ranks, also where the sets overlap."""

import random
import time

import pytest
import torch
from rank_helpers import everyone, ranks

import fusewire as fw


def make_sets(*members):
    return [fw.add_process_set(fw.ProcessSet(list(ranks_))) for ranks_ in members]


@ranks(3, timeout=60)
@pytest.mark.parametrize("delayed", [0, 1, 2])
def test_overlapping_sets_with_one_rank_delayed_are_exact(delayed):
    """Nobody overwrites a slot that a slower member of the other set still reads."""
    left, right = make_sets([0, 1], [1, 2])
    for turn in range(60):
        if fw.rank() == delayed and turn % 10 == 0:
            time.sleep(0.02)
        sizes = [5, 70_000, 300, 20_000]
        for kind, members in ((left, [0, 1]), (right, [1, 2])):
            if fw.rank() not in members:
                continue
            tensors = [torch.full((size,), float(1000 * fw.rank() + turn + i)) for i, size in enumerate(sizes)]
            handles = [
                fw.allreduce_async_(t, op=fw.Sum, name=f"overlap.{i}", process_set=kind)  # one name, two sets
                for i, t in enumerate(tensors)
            ]
            for i, handle in enumerate(handles):
                value = float(sum(1000 * m + turn + i for m in members))
                assert torch.equal(handle.wait(), torch.full((sizes[i],), value)), (turn, members, i)
    fw.barrier()


@ranks(3)
def test_overlapping_sets_submitted_at_once_and_in_any_order():
    """All operations of both sets in flight together, in an order of each rank's own: no deadlock."""
    left, right = make_sets([0, 1], [1, 2])
    for turn in range(30):
        jobs = [(which, i) for which in (left, right, fw.global_process_set) for i in range(8)]
        jobs = [job for job in jobs if job[0].included()]
        random.Random(10 * turn + fw.rank()).shuffle(jobs)
        handles = [
            (
                which,
                fw.allreduce_async(torch.full((100,), float(fw.rank() + i)), name=f"deadlock.{i}", process_set=which),
                i,
            )
            for which, i in jobs
        ]
        for which, handle, i in handles:
            mean = sum(which.ranks) / len(which.ranks) + i
            assert torch.equal(handle.wait(), torch.full((100,), mean)), (turn, which.ranks, i)


@ranks(4)
def test_a_set_has_ranks_and_sizes_of_its_own():
    evens, odds = make_sets([0, 2], [1, 3])
    mine, other = (evens, odds) if fw.rank() % 2 == 0 else (odds, evens)
    assert mine.included()
    assert not other.included()
    assert (mine.size(), mine.rank()) == (2, fw.rank() // 2)
    assert fw.global_process_set.size() == 4
    group = fw.grouped_allreduce([torch.ones(2) * fw.rank(), torch.ones(3)], op=fw.Sum, process_set=mine, name="own")
    assert group[0].tolist() == [2.0 * (fw.rank() % 2) + 2] * 2
    root = mine.ranks[1]
    assert fw.broadcast(torch.tensor([fw.rank()]), root_rank=root, process_set=mine, name="own").item() == root
    fw.barrier(process_set=mine)
    with pytest.raises(ValueError, match="member"):
        fw.allreduce(torch.ones(1), process_set=other, name="foreign")
    with pytest.raises(ValueError, match="root_rank"):
        fw.broadcast(torch.ones(1), root_rank=other.ranks[0], process_set=mine, name="foreign root")
    assert everyone(fw.rank()) == [0, 1, 2, 3]


@ranks(3)
def test_a_set_that_nobody_added_is_refused():
    with pytest.raises(ValueError, match="add_process_set"):
        fw.allreduce(torch.ones(1), process_set=fw.ProcessSet([0, 1]))
    with pytest.raises(ValueError, match=r"5|rank"):
        fw.add_process_set(fw.ProcessSet([0, 5]))
    fw.barrier()


@ranks(3)
def test_a_set_of_one_and_a_set_of_all():
    alone = make_sets([0], [1], [2])[fw.rank()]
    result = fw.allreduce(torch.full((3,), float(fw.rank())), prescale_factor=2.0, process_set=alone, name="alone")
    assert result.tolist() == [2.0 * fw.rank()] * 3
    (everybody,) = make_sets([0, 1, 2])
    return fw.allreduce(torch.full((3,), float(fw.rank())), process_set=everybody, name="all")


@ranks(3)
def test_a_mismatch_inside_a_set_names_the_set_members_and_spares_the_others():
    left, right = make_sets([0, 1], [1, 2])
    if left.included():
        with pytest.raises(fw.TensorMismatchError, match="set mismatch"):
            fw.allreduce(torch.ones(1 + fw.rank()), process_set=left, name="set mismatch")
    if right.included():
        assert fw.allreduce(torch.ones(2), op=fw.Sum, process_set=right, name="set mismatch").tolist() == [2.0, 2.0]
    fw.barrier()
