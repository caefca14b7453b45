"""Process sets: adding, removing, overlapping, torch's ProcessGroups in their place, and what init() accepts."""

import copy
import pickle
import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
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
    assert (alone.ranks, alone.process_set_id) == ([fw.rank()], fw.rank() + 1)
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


# torch.distributed's groups


def torch_groups():
    """A default group of torch.distributed beside Fusewire, made once per pool of ranks."""
    if not dist.is_initialized():
        port = int(fw.broadcast_object(free_port()))
        store = dist.TCPStore("127.0.0.1", port, fw.size(), fw.rank() == 0, timeout=timedelta(seconds=20))
        dist.init_process_group("gloo", store=store, rank=fw.rank(), world_size=fw.size())


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@ranks(3, timeout=60)
def test_a_torch_group_wherever_a_set_is_taken():
    torch_groups()
    group = dist.new_group([0, 2])
    if fw.rank() == 1:
        with pytest.raises(ValueError, match="not a member"):
            fw.allreduce(torch.ones(1), process_set=group)
    else:
        value = torch.full((4,), float(fw.rank() + 1))
        assert fw.allreduce(value, op=fw.Sum, process_set=group).tolist() == [4.0] * 4
        assert fw.allreduce_(value.clone(), process_set=group).tolist() == [2.0] * 4
        assert fw.grouped_allreduce([value], op=fw.Max, process_set=group)[0].tolist() == [3.0] * 4
        assert fw.broadcast(value, 2, process_set=group).tolist() == [3.0] * 4
        assert fw.allgather(value, process_set=group).shape == (8,)
        assert fw.alltoall(value, process_set=group).tolist() == [1.0, 1.0, 3.0, 3.0]
        assert fw.reducescatter(value, op=fw.Sum, process_set=group).tolist() == [4.0, 4.0]
        assert fw.allgather_object(fw.rank(), process_set=group) == [0, 2]
        assert fw.broadcast_object(fw.rank(), 2, process_set=group) == 2
        fw.barrier(process_set=group)
        model = torch.nn.Linear(2, 1)
        torch.nn.init.constant_(model.weight, fw.rank())
        fw.broadcast_parameters(model.state_dict(), root_rank=2, process_set=group)
        assert model.weight.tolist() == [[2.0, 2.0]]
        optimizer = fw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), process_set=group)
        fw.broadcast_optimizer_state(optimizer, root_rank=2, process_set=group)
        model(torch.full((1, 2), float(fw.rank()))).sum().backward()
        assert model.weight.grad.tolist() == [[1.0, 1.0]]
    fw.barrier()


@ranks(3, timeout=60, fresh=True)  # so nobody has left a set of ranks 0 and 1
def test_torch_groups_share_sets_and_numbers():
    """Numbers stay the same on every rank, also those of sets that only their members know."""
    torch_groups()
    before = fw.add_process_set([0, 1])
    first, second, other = dist.new_group([0, 1]), dist.new_group([0, 1]), dist.new_group([1, 2])
    if before.included():
        assert fw.allreduce(torch.ones(1), op=fw.Sum, process_set=first).item() == 2
        assert fw.process_sets.resolve(first).process_set_id == before.process_set_id
        assert fw.process_sets.resolve(second).process_set_id == before.process_set_id
    if fw.rank() > 0:
        assert fw.allreduce(torch.ones(1), op=fw.Sum, process_set=other).item() == 2
    after = fw.add_process_set([0, 2])
    assert len(set(everyone(after.process_set_id))) == 1
    if after.included():
        assert fw.allreduce(torch.ones(1), op=fw.Sum, process_set=after).item() == 2
    fw.remove_process_set(before)
    if fw.rank() < 2:  # the members' groups make a new set
        assert fw.allreduce(torch.ones(1), op=fw.Sum, process_set=first).item() == 2
        assert fw.allreduce(torch.ones(1), op=fw.Sum, process_set=second).item() == 2
    fw.remove_process_set(after)


@ranks(2)
def test_the_default_group_is_the_global_set():
    torch_groups()
    assert fw.process_sets.resolve(dist.group.WORLD) is fw.global_process_set
    assert fw.process_sets.resolve(dist.new_group([0, 1])) is fw.global_process_set
    assert fw.allreduce(torch.ones(1), op=fw.Sum, process_set=dist.group.WORLD).item() == 2
    with pytest.raises(TypeError, match="ProcessSet or a torch"):
        fw.allreduce(torch.ones(1), process_set=[0, 1])


@ranks(2, fresh=True)
def test_a_group_is_forgotten_with_its_engine():
    torch_groups()
    alone = [dist.new_group([0]), dist.new_group([1])][fw.rank()]
    assert fw.allreduce(torch.ones(1), op=fw.Sum, process_set=alone).item() == 1
    fw.barrier()
    fw.shutdown()
    fw.init()
    fw.add_process_set([0, 1])  # takes the number that the group's set had
    assert fw.allreduce(torch.ones(1), op=fw.Sum, process_set=alone).item() == 1
    fw.barrier()


@ranks(2)
def test_copies_mean_the_same_set_and_pickles_an_unregistered_one():
    made = fw.add_process_set([0, 1])
    norm = fw.SyncBatchNorm(2, process_set=made)
    assert copy.deepcopy(norm).process_set is copy.copy(made) is made
    loaded = pickle.loads(pickle.dumps(made))
    assert loaded == made
    assert loaded.process_set_id is None
    fw.remove_process_set(made)
    everybody = fw.global_process_set
    assert copy.deepcopy(everybody) is copy.copy(everybody) is pickle.loads(pickle.dumps(everybody)) is everybody
