"""Averagers where torch.distributed is: its groups, its DDP hooks, its PostLocalSGDOptimizer, and starting from it."""

import copy
import os
from collections import OrderedDict

import pytest
import torch
from averaging_helpers import Replay, chunks, start, torch_world, update
from rank_helpers import close, data, ranks, weights

import fusewire as fw
from fusewire.averaging import HierarchicalModelAverager, PeriodicModelAverager, PostLocalSGDOptimizer, utils


def follow(averager, groups_at, steps=9):
    replay = Replay(fw.size())
    mine = torch.nn.Parameter(start(fw.size())[fw.rank()].clone())
    for turn in range(steps):
        with torch.no_grad():
            mine.copy_(update(mine, fw.rank(), turn))
        averager.average_parameters([mine])
        replay.step(groups_at(turn))
        close(mine.detach(), replay.weights[fw.rank()], 1e-12)


@ranks(2)
def test_the_default_group():
    """None stands for torch's default group where it has the same ranks, as code that asks torch about it expects."""
    assert PeriodicModelAverager(2).process_group is fw.global_process_set
    with torch_world() as dist:
        for given in (None, dist.group.WORLD):
            averager = PeriodicModelAverager(2, process_group=given)
            assert dist.get_world_size(averager.process_group) == 2
            follow(averager, lambda t: [[0, 1]] if t % 2 == 0 else [])
        assert PeriodicModelAverager(2, process_group=fw.global_process_set).process_group is fw.global_process_set


@ranks(4)
def test_groups_of_torch():
    """Nobody registers anything. On ranks outside of a group torch has a stand-in, and the averager only counts."""
    with torch_world() as dist:
        pair = dist.new_group([1, 3])
        averager = PeriodicModelAverager(3, 1, process_group=pair)
        assert averager.process_group is pair
        follow(averager, lambda t: [[1, 3]] if t in (1, 4, 7) else [])
        assert averager.step == 9
        w = torch.nn.Parameter(torch.full((2,), float(fw.rank())))
        utils.average_parameters([w], pair)
        assert w[0].item() == (2.0 if fw.rank() in (1, 3) else fw.rank())
        half, _ = dist.new_subgroups(2)
        w.data.fill_(float(fw.rank()))
        utils.average_parameters_or_parameter_groups([{"params": [w]}], half)
        assert w[0].item() == (0.5 if fw.rank() < 2 else 2.5)
        follow(PeriodicModelAverager(2, process_group=half), lambda t: chunks(4, 2) if t % 2 == 0 else [])


@ranks(4)
def test_a_hierarchy_of_torch_groups():
    with torch_world() as dist:
        averager = HierarchicalModelAverager(OrderedDict([(1, 1), (2, 2), (4, 4)]), 2)
        groups = averager.period_process_group_dict
        assert all(isinstance(group, dist.ProcessGroup) for group in groups.values())
        pair = [fw.rank() // 2 * 2, fw.rank() // 2 * 2 + 1]
        found = [dist.get_process_group_ranks(group) for group in groups.values()]
        assert found == [[fw.rank()], pair, [0, 1, 2, 3]]
        assert groups[4] is averager.process_group

        def groups_at(turn):
            return [] if turn < 2 else chunks(4, 4 if turn % 4 == 0 else 2 if turn % 2 == 0 else 1)

        follow(averager, groups_at)
        with pytest.raises(ValueError, match="divided"):
            HierarchicalModelAverager(OrderedDict([(2, 3), (4, 4)]))


def make_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()


def train(model, optimizer, turns):
    for turn in turns:
        optimizer.zero_grad()
        model(data(4, 4, seed=10 * turn + fw.rank())).pow(2).mean().backward()
        optimizer.step()


@ranks(2)
@pytest.mark.parametrize("wrapper", ["torch", "fusewire"])
@pytest.mark.parametrize("kind", ["periodic", "hierarchical"])
def test_under_ddp_with_torch_s_hook(wrapper, kind):
    """Post-local SGD as torch's documentation has it, with our averager in torch's wrapper, torch's averager in ours,
    and both ours: as with torch's own classes throughout, but for the last bits."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
    from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager
    from torch.distributed.optim import PostLocalSGDOptimizer as Torchs

    with torch_world() as dist:

        def make_averager(ours):
            if kind == "periodic":
                return (fw.PeriodicModelAverager if ours else averagers.PeriodicModelAverager)(3, 4)
            module = fw if ours else hierarchical_model_averager
            return module.HierarchicalModelAverager(OrderedDict([(2, 1), (4, 2)]), 4)

        def run(optimizer_class, averager):
            model = torch.nn.parallel.DistributedDataParallel(make_model())
            alone, _ = dist.new_subgroups(1)
            state = post_local.PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=4)
            model.register_comm_hook(state, post_local.post_localSGD_hook)
            local = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            optimizer = optimizer_class(optim=local, averager=averager)
            train(model, optimizer, range(11))
            assert averager.step == 11
            return weights(model.module), optimizer.state_dict()

        right, right_state = run(Torchs, make_averager(ours=False))
        for averager in [make_averager(ours=True)] + ([make_averager(ours=False)] if wrapper == "fusewire" else []):
            found, state = run(Torchs if wrapper == "torch" else PostLocalSGDOptimizer, averager)
            assert state.keys() == right_state.keys()
            assert state["step"] == right_state["step"]
            for name, weight in found.items():
                close(weight, right[name], 1e-12)


@ranks(2)
def test_states_go_from_torch_s_classes_to_ours_and_back():
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager as TorchsAverager
    from torch.distributed.optim import PostLocalSGDOptimizer as Torchs

    with torch_world():
        model = make_model()
        pairs = [(Torchs, TorchsAverager), (PostLocalSGDOptimizer, PeriodicModelAverager)]
        made = [kind(torch.optim.Adam(model.parameters()), averager(2)) for kind, averager in pairs]
        for source, target in (made, reversed(made)):
            train(model, source, range(3))
            target.load_state_dict(copy.deepcopy(source.state_dict()))
            assert target.averager.step == source.averager.step
            assert target.state_dict().keys() == source.state_dict().keys()


@ranks(2, fresh=True)
def test_a_group_of_other_ranks_is_refused():
    """torch's default group is not that of Fusewire: None means the latter, a torch group has no meaning."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        averager = PeriodicModelAverager(2)
        assert averager.process_group is fw.global_process_set
        with pytest.raises(ValueError, match="ProcessGroup"):
            PeriodicModelAverager(2, process_group=dist.group.WORLD)
        follow(averager, lambda t: [[0, 1]] if t % 2 == 0 else [])
    finally:
        dist.destroy_process_group()


@ranks(2)
@pytest.mark.parametrize("first", ["averager", "hierarchy", "function", "local sgd"])
def test_starting_from_the_default_group(first):
    """No fusewire.init() in sight. Without a default group there is nothing to start from."""
    rank, size = fw.rank(), fw.size()
    fw.shutdown()
    w = torch.nn.Parameter(torch.full((2,), float(rank)))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    kept = {name: os.environ.pop(name) for name in names}
    makers = {
        "averager": lambda: PeriodicModelAverager(2).average_parameters([w]),
        "hierarchy": lambda: HierarchicalModelAverager({2: 1, 4: 2}).average_parameters([w]),
        "function": lambda: utils.average_parameters([w]),
        "local sgd": lambda: fw.LocalSGD(torch.optim.SGD([w], lr=1.0), 2).step(),
    }
    try:
        for call in makers.values():
            with pytest.raises(fw.NotInitializedError, match="init_process_group"):
                call()
        assert not fw.is_initialized()
        assert w[0].item() == rank
        with world_of(rank, size):
            makers[first]()
            assert fw.is_initialized()
            assert (fw.rank(), fw.size()) == (rank, size)
            assert w[0].item() == (size - 1) / 2
            fw.shutdown()
    finally:
        os.environ.update(kept)
        fw.init()


def world_of(rank, size):
    """torch_world() where fusewire does not run."""
    import contextlib

    import torch.distributed as dist

    @contextlib.contextmanager
    def world():
        client = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        number = client.add("averaging/started", 1)
        store = dist.PrefixStore(f"averaging/started/{(number - 1) // size}", client)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        try:
            yield
            dist.barrier()
        finally:
            dist.destroy_process_group()

    return world()


@ranks(4)
def test_after_shutdown_and_a_new_init():
    """Averagers work on, with process sets of the new engine; in between there is nothing to average with."""
    averagers = [PeriodicModelAverager(2), HierarchicalModelAverager({1: 2, 2: 4}), HierarchicalModelAverager({2: 4})]
    fw.add_process_set([1, 2])  # the ids of the new engine will be others
    w = torch.nn.Parameter(torch.full((2,), float(fw.rank())))
    fw.shutdown()
    try:
        for averager in averagers:
            with pytest.raises(fw.NotInitializedError, match="init"):
                averager.average_parameters([w])
    finally:
        fw.init()
    averagers[1].step = 1
    averagers[1].average_parameters([w])
    assert w[0].item() == (0.5 if fw.rank() < 2 else 2.5)
    averagers[0].average_parameters([w])
    assert w[0].item() == 1.5


@ranks(4)
def test_a_hierarchy_within_a_group_of_torch():
    """Ranks outside of the group may make the averager as well: it only counts."""
    with torch_world() as dist:
        if fw.rank() != 3:
            dist.new_group([0, 1, 2], use_local_synchronization=True)  # ranks have made different numbers of groups
        four, two = dist.new_group([0, 1, 2, 3]), dist.new_group([1, 3])
        whole = HierarchicalModelAverager({1: 2, 4: 4}, process_group=four)
        assert whole.period_process_group_dict[1].ranks == chunks(4, 2)[fw.rank() // 2]
        follow(whole, lambda t: chunks(4, 4 if t % 4 == 0 else 2))
        averager = HierarchicalModelAverager({1: 1, 2: 2}, process_group=two)
        if fw.rank() not in (1, 3):
            assert list(averager.period_process_group_dict.values()) == [None, None]
        else:
            assert averager.period_process_group_dict[2] is two
        follow(averager, lambda t: [] if t % 2 else [[1, 3]])
        assert averager.step == 9


@ranks(4, fresh=True)
def test_a_set_that_somebody_else_removes():
    """An averager takes the set that there is for its ranks, and makes another when that is removed."""
    theirs = [fw.add_process_set(pair) for pair in chunks(4, 2)]
    averager = HierarchicalModelAverager({1: 2, 4: 4}, process_group=fw.global_process_set)
    used = averager.period_process_group_dict[1].process_set_id
    assert used == theirs[fw.rank() // 2].process_set_id
    for one in theirs:
        fw.remove_process_set(one)
    averager.step = 1
    w = torch.nn.Parameter(torch.full((2,), float(fw.rank())))
    averager.average_parameters([w])
    assert w[0].item() == (0.5 if fw.rank() < 2 else 2.5)


@ranks(3)
def test_local_sgd_in_a_group_of_torch_goes_on_after_a_new_init():
    """Both phases find the sets of their groups in the engine that runs then."""
    with torch_world() as dist:
        pair = dist.new_group([0, 1])
        w = torch.nn.Parameter(torch.zeros(1))
        optimizer = fw.LocalSGD(torch.optim.SGD([w], lr=1.0), 1000, 1, pair, process_group=pair)

        def step():
            optimizer.zero_grad()
            (w * float(fw.rank())).sum().backward()
            optimizer.step()

        step()
        assert not optimizer.warming_up
        step()
        assert w.item() == (-4.0 if fw.rank() == 2 else -1.0)
        fw.shutdown()
        fw.init()
        fw.add_process_set([0])
        optimizer.load_state_dict({**optimizer.state_dict(), "step": 0})  # back to the warm-up
        step()
        step()
        assert w.item() == (-8.0 if fw.rank() == 2 else -2.0)
