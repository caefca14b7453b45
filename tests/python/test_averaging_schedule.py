"""When averagers fire and what they leave, against all ranks replayed in one process in float64 (BEHAVIOUR M3)."""

import itertools
import sys
import warnings
from collections import OrderedDict

import pytest
import torch
from averaging_helpers import Replay, chunks, registered, start, update
from rank_helpers import close, ranks, units

import fusewire as fw
from fusewire.averaging import HierarchicalModelAverager, ModelAverager, PeriodicModelAverager

STEPS = 13


def follow(averager, groups_at, members=None):
    """Steps this rank and the replay side by side; after every step the weights agree, and others were not touched."""
    replay = Replay(fw.size())
    mine = torch.nn.Parameter(start(fw.size())[fw.rank()].clone())
    for turn in range(STEPS):
        assert averager.step == turn
        with torch.no_grad():
            mine.copy_(update(mine, fw.rank(), turn))
        before = units()
        averager.average_parameters([mine])
        groups = groups_at(turn)
        replay.step(groups)
        here = any(fw.rank() in group for group in groups)
        assert units() - before == here, (turn, groups)
        close(mine.detach(), replay.weights[fw.rank()], 1e-12)


@ranks(1, 2, 3, 4)
def test_periodic_on_all_ranks():
    everyone = [list(range(fw.size()))]
    for period, warmup in itertools.product([1, 2, 3, 5], [0, 1, 2, 4, 7, 20]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            averager = PeriodicModelAverager(period, warmup)
        follow(averager, lambda t: everyone if t >= warmup and (t - warmup) % period == 0 else [])  # noqa: B023


@ranks(3, 4)
def test_periodic_in_overlapping_groups():
    """Members of both sets average in both; the others keep their own weights and count on."""
    first, second = registered([0, 1], [1, 2])
    for period, warmup in itertools.product([2, 3], [0, 4]):
        for chosen in (first, second):
            averager = PeriodicModelAverager(period, warmup, process_group=chosen)
            assert averager.process_group is chosen

            def groups_at(turn, period=period, warmup=warmup, chosen=chosen):
                return [chosen.ranks] if turn >= warmup and (turn - warmup) % period == 0 else []

            follow(averager, groups_at)


HIERARCHIES = {
    1: [{1: 1}, {2: 1, 4: 1}],
    2: [{3: 2}, {1: 1, 2: 2}, {2: 1, 4: 2}],
    3: [{2: 3}, {2: 1, 3: 3}],
    4: [{2: 2, 4: 4}, {2: 2, 4: 4, 8: 4}, {1: 2, 3: 4}, {2: 1, 3: 2, 6: 4}, {3: 2, 2: 4}],
}


@ranks(1, 2, 3, 4)
def test_hierarchical():
    """The last period in the dict that divides the step decides, and steps count from the start of training."""
    size = fw.size()
    for levels, warmup in itertools.product(HIERARCHIES[size], [0, 1, 5, 6]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            averager = HierarchicalModelAverager(OrderedDict(levels), warmup)

        def groups_at(turn, levels=levels, warmup=warmup):
            due = [group for period, group in levels.items() if turn % period == 0]
            return chunks(size, due[-1]) if turn >= warmup and due else []

        follow(averager, groups_at)


@ranks(4)
def test_the_groups_of_a_hierarchy():
    """Contiguous ranks; the whole group is not registered again, and neither is one that exists."""
    averager = HierarchicalModelAverager(OrderedDict([(2, 1), (4, 2), (8, 4)]))
    again = HierarchicalModelAverager(OrderedDict([(2, 2), (4, 4)]))
    pair = [fw.rank() // 2 * 2, fw.rank() // 2 * 2 + 1]
    assert list(averager.period_process_group_dict) == [2, 4, 8]
    assert [group.ranks for group in averager.period_process_group_dict.values()] == [[fw.rank()], pair, [0, 1, 2, 3]]
    assert averager.period_process_group_dict[8] is averager.process_group
    assert again.period_process_group_dict[2] == averager.period_process_group_dict[4]


@ranks(4)
def test_a_hierarchy_inside_of_a_process_set():
    """Its chunks are of the set's own ranks, which need not be neighbours; ranks outside of it are left alone."""
    (chosen,) = registered([0, 1, 3])
    if fw.rank() in chosen.ranks:  # the others need not even make the averager
        averager = HierarchicalModelAverager(OrderedDict([(2, 1), (3, 3)]), process_group=chosen)
        follow(averager, lambda t: [[0, 1, 3]] if t % 3 == 0 else [[0], [1], [3]] if t % 2 == 0 else [])
    averager = HierarchicalModelAverager(OrderedDict([(4, 3)]), process_group=chosen)
    follow(averager, lambda t: [[0, 1, 3]] if t % 4 == 0 else [])


class Mine(ModelAverager):
    """A user's own: averages at the steps of a list."""

    def __init__(self, steps, **options):
        super().__init__(**options)
        self.steps = steps

    def average_parameters(self, params):
        if self.step in self.steps:
            fw.averaging.average_parameters(params, self.process_group, buffers=self.buffers, weights=self.weights)
        self.step += 1


@ranks(2)
def test_a_derived_averager():
    follow(Mine([0, 1, 7]), lambda t: [[0, 1]] if t in (0, 1, 7) else [])
    both = torch.full((2,), float(fw.rank())), torch.full((3,), float(fw.rank()))
    averager = Mine([0, 1], buffers=iter(both[1:]), weights=iter([1, 3]))
    for _ in range(2):  # what was read once is kept
        averager.average_parameters(both[:1])
        for tensor in both:
            assert tensor.tolist() == [0.75] * len(tensor)
            tensor.fill_(float(fw.rank()))


def test_the_base_class_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        ModelAverager()


@ranks(4)
def test_bad_arguments():
    for arguments in [(0,), (-1,), (2, -1)]:
        with pytest.raises(ValueError, match=r"period|warmup_steps"):
            PeriodicModelAverager(*arguments)
    whole = ("whole group", OrderedDict([(2, 2)]))
    for words, levels, *warmup in [
        ("period_group_size_dict", None),
        ("period_group_size_dict", {}),
        ("periods", OrderedDict([(0, 2), (4, 4)])),
        ("periods", OrderedDict([(2, 2), (-4, 4)])),
        whole,
        ("whole group", OrderedDict([(2, 4), (4, 2)])),
        ("divided", OrderedDict([(2, 3), (4, 4)])),
        ("divided", OrderedDict([(2, 0), (4, 4)])),
        ("divided", OrderedDict([(2, 8), (4, 4)])),
        ("warmup_steps", OrderedDict([(2, 2), (4, 4)]), -1),
    ]:
        with pytest.raises(ValueError, match=words):
            HierarchicalModelAverager(levels, *warmup)
    for wrong in ("gloo", [0, 1], 3):
        with pytest.raises(TypeError, match="process_group"):
            PeriodicModelAverager(2, process_group=wrong)
    with pytest.raises(ValueError, match="not registered"):
        PeriodicModelAverager(2, process_group=fw.ProcessSet([0, 2]))


@ranks(2)
def test_a_period_of_one_warns_where_the_averager_is_made():
    def local_sgd():
        return fw.LocalSGD(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0), 1)

    for make in (lambda: PeriodicModelAverager(1), lambda: HierarchicalModelAverager({1: fw.size()}), local_sgd):
        with pytest.warns(UserWarning, match="period=1") as caught:
            make()
        assert [warning.filename for warning in caught] == [sys._getframe().f_code.co_filename]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HierarchicalModelAverager(OrderedDict([(1, 1), (2, 2)]))
