"""Process sets: adding, removing, overlapping, torch's ProcessGroups in their place, and what init() accepts."""

import random

import pytest
import torch
from rank_helpers import error_of, everyone, ranks

import fusewire as fw


@ranks(3)
def test_what_a_set_says():
    made = fw.add_process_set([2, 0])
    assert made.ranks == [0, 2]
    assert made.size() == 2
    assert made.included() == (fw.rank() in (0, 2))
    assert made.rank() == {0: 0, 1: -1, 2: 1}[fw.rank()]
    assert made.process_set_id > 0
    assert everyone(made.process_set_id) == [made.process_set_id] * 3
    assert fw.global_process_set.ranks == [0, 1, 2]
    assert fw.global_process_set.process_set_id == 0
    assert (fw.global_process_set.size(), fw.global_process_set.rank()) == (3, fw.rank())
    assert fw.remove_process_set(made) is True


def test_what_is_no_set():
    class Communicator:
        """As mpi4py's: it has Get_rank() and is not iterable."""

        def Get_rank(self):
            return 0

    with pytest.raises(TypeError, match="MPI communicators are not supported"):
        fw.ProcessSet(Communicator())
    with pytest.raises(TypeError, match="global ranks"):
        fw.ProcessSet("01")
    for wrong in ([], [0, 0], [-1, 2]):
        with pytest.raises(ValueError, match="distinct ranks"):
            fw.ProcessSet(wrong)
    with pytest.raises(TypeError, match="takes a ProcessSet"):
        fw.remove_process_set([0, 1])
    with pytest.raises(fw.NotInitializedError):
        fw.add_process_set([0])
    with pytest.raises(fw.NotInitializedError):
        fw.remove_process_set(fw.ProcessSet([0]))


@ranks(3)
def test_after_removal():
    made = fw.add_process_set([0, 1])
    if made.included():
        assert fw.allreduce(torch.ones(2), op=fw.Sum, process_set=made).tolist() == [2, 2]
    assert fw.remove_process_set(made) is True
    assert made.process_set_id is None
    assert fw.remove_process_set(made) is False
    calls = {
        "allreduce": lambda: fw.allreduce(torch.ones(2), process_set=made),
        "broadcast": lambda: fw.broadcast(torch.ones(2), 0, process_set=made),
        "allgather": lambda: fw.allgather(torch.ones(2), process_set=made),
        "alltoall": lambda: fw.alltoall(torch.ones(2), process_set=made),
        "reducescatter": lambda: fw.reducescatter(torch.ones(2), process_set=made),
        "barrier": lambda: fw.barrier(process_set=made),
        "sparse": lambda: fw.sparse_allreduce_async(torch.eye(2).to_sparse(), "s", process_set=made),
        "object": lambda: fw.allgather_object(1, process_set=made),
    }
    for name, call in calls.items():
        error = error_of(call)
        assert isinstance(error, ValueError), (name, error)
        assert "removed" in str(error), (name, error)
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="removed"):
        fw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1), process_set=made)
    again = fw.add_process_set(made)  # it may come back
    assert again is made
    if made.included():
        assert fw.allreduce(torch.ones(2), op=fw.Sum, process_set=made).tolist() == [2, 2]
    fw.remove_process_set(made)


@ranks(1, 2)
def test_the_global_set_stays():
    assert fw.remove_process_set(fw.global_process_set) is False
    assert fw.allreduce(torch.ones(1), op=fw.Sum).item() == fw.size()


@ranks(3)
def test_removal_while_operations_are_in_flight():
    """What all members have submitted runs; what waits for a member fails; nothing hangs."""
    made = fw.add_process_set([0, 1])
    handles, alone = [], None
    if made.included():
        handles = [fw.allreduce_async(torch.ones(1000), op=fw.Sum, process_set=made) for _ in range(20)]
    if fw.rank() == 0:
        alone = fw.allreduce_async(torch.ones(3), process_set=made, name="nobody else submits this")
    assert fw.remove_process_set(made) is True
    for handle in handles:
        assert torch.equal(handle.wait(), torch.full((1000,), 2.0))
    if alone is not None:
        with pytest.raises(ValueError, match="removed"):
            alone.wait()
    fw.barrier()


@ranks(4)
def test_many_sets_come_and_go():
    for turn in range(10):
        members = sorted(random.Random(turn).sample(range(4), 2 + turn % 2))
        made = fw.add_process_set(members)
        if made.included():
            total = fw.allreduce(torch.full((4,), float(fw.rank())), op=fw.Sum, process_set=made)
            assert total.tolist() == [float(sum(members))] * 4
        assert fw.remove_process_set(made)


@ranks(4, timeout=60)
def test_overlapping_sets_in_any_order_do_not_deadlock():
    """Every kind of operation, on every set, all in flight together and in an order of each rank's own."""
    members = [[0, 1], [1, 2], [2, 3], [0, 3], [0, 1, 2], [1, 3]]
    sets = [fw.add_process_set(m) for m in members]
    own = [s for s in sets if s.included()] + [fw.global_process_set]
    for turn in range(15):
        jobs = [(kind, s) for kind in ("reduce", "gather", "swap", "scatter", "broadcast") for s in own]
        random.Random(100 * turn + fw.rank()).shuffle(jobs)
        handles = [(kind, s, submit(kind, s, f"{kind}.{turn}")) for kind, s in jobs]
        random.Random(100 * turn + fw.rank() + 50).shuffle(handles)
        for kind, s, handle in handles:
            assert torch.equal(handle.wait(), outcome(kind, s)), (turn, kind, s)
    for s in sets:
        fw.remove_process_set(s)


def submit(kind, s, name):
    n, r = s.size(), fw.rank()
    if kind == "reduce":
        return fw.allreduce_async(torch.full((300,), r), op=fw.Sum, name=name, process_set=s)
    if kind == "gather":
        return fw.allgather_async(torch.full((r + 1,), r), name=name, process_set=s)
    if kind == "swap":
        return fw.alltoall_async(torch.full((n,), r), name=name, process_set=s)
    if kind == "scatter":
        return fw.reducescatter_async(torch.full((10,), r), op=fw.Sum, name=name, process_set=s)
    return fw.broadcast_async(torch.full((7,), r), s.ranks[-1], name=name, process_set=s)


def outcome(kind, s):
    n, place = s.size(), s.rank()
    if kind == "reduce":
        return torch.full((300,), sum(s.ranks))
    if kind == "gather":
        return torch.cat([torch.full((r + 1,), r) for r in s.ranks])
    if kind == "swap":
        return torch.tensor(s.ranks)
    if kind == "scatter":
        return torch.full((10 // n + (place < 10 % n),), sum(s.ranks))
    return torch.full((7,), s.ranks[-1])


@ranks(2, init={"process_sets": [[0], fw.ProcessSet([1])]})
def test_init_registers_sets():
    alone = fw.process_sets.registered_with([fw.rank()])
    assert alone.process_set_id == fw.rank() + 1
    assert fw.allreduce(torch.ones(1), op=fw.Sum, process_set=alone).item() == 1
    fw.barrier()


@ranks(2, init={"process_sets": "dynamic", "comm": [0, 1]})
def test_init_accepts_what_horovod_does():
    assert fw.size() == 2


def test_init_refuses_the_rest():
    with pytest.raises(ValueError, match="dynamic"):
        fw.init(process_sets="static")
    with pytest.raises(TypeError, match="MPI communicators"):
        fw.init(comm=object())
    with pytest.raises(ValueError, match=r"comm=\[0, 1\]"):
        fw.init(comm=[0, 1])
    assert not fw.is_initialized()
