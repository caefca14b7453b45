"""Explicit groups are all or nothing, also when some of their members have no gradient somewhere."""

import pytest
import torch
from rank_helpers import close, data, ranks, weights

import fusewire as fw


class TwoBranches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a = torch.nn.Linear(4, 2)
        self.b = torch.nn.Linear(4, 2)
        self.double()

    def loss(self, batch, use):
        return sum(getattr(self, name)(batch).pow(2).mean() for name in use)


GROUPS = {
    "one": lambda m: 1,
    "two": lambda m: 2,
    "all listed": lambda m: [list(m.parameters())],
    "across": lambda m: [[m.a.weight, m.b.weight], [m.a.bias, m.b.bias]],
    "partly listed": lambda m: [[m.a.bias, m.b.weight]],
}


def train(kind, uses_of_turn, passes=1):
    """Steps in which rank r uses the layers uses_of_turn(turn)[r]; gradients against the mean over ranks."""
    model = TwoBranches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = fw.DistributedOptimizer(
        optimizer, model.named_parameters(), groups=GROUPS[kind](model), backward_passes_per_step=passes
    )
    for turn in range(4):
        uses = uses_of_turn(turn)
        total = dict.fromkeys(model.parameters())
        for r in range(fw.size()):
            for k in range(passes):
                loss = model.loss(data(6, 4, seed=100 * turn + 10 * k + r), uses[r])
                found = torch.autograd.grad(loss, list(total), allow_unused=True)
                for p, g in zip(list(total), found, strict=True):
                    if g is not None:
                        total[p] = g / fw.size() if total[p] is None else total[p] + g / fw.size()
        optimizer.zero_grad()
        for k in range(passes):
            model.loss(data(6, 4, seed=100 * turn + 10 * k + fw.rank()), uses[fw.rank()]).backward()
        for name, p in model.named_parameters():
            if total[p] is None:
                assert p.grad is None, f"{name} had no gradient anywhere, and has one now"
            else:
                close(p.grad, total[p], 1e-12)
        before = weights(model)
        optimizer.step()
        for name, p in model.named_parameters():
            if total[p] is None:
                assert torch.equal(p, before[name]), f"{name} moved without a gradient"
    return weights(model)


@ranks(2, 3)
@pytest.mark.parametrize("kind", GROUPS)
def test_a_member_without_a_gradient_on_rank_1(kind):
    return train(kind, lambda turn: ["a" if r == 1 else "ab" for r in range(fw.size())])


@ranks(2, 3)
@pytest.mark.parametrize("kind", GROUPS)
def test_a_member_without_a_gradient_on_any_rank(kind):
    return train(kind, lambda turn: ["a"] * fw.size())


@ranks(2, 3)
@pytest.mark.parametrize("kind", GROUPS)
def test_members_come_and_go(kind):
    """First missing on rank 1, then on all, then on none, then everything on another rank."""

    def uses(turn):
        n = fw.size()
        return [
            ["a" if r == 1 else "ab" for r in range(n)],
            ["b"] * n,
            ["ab"] * n,
            ["a" if r % 2 else "b" for r in range(n)],
        ][turn]

    return train(kind, uses)


@ranks(2)
@pytest.mark.parametrize("kind", ["one", "across"])
def test_groups_with_several_passes(kind):
    return train(kind, lambda turn: ["a", "ab"] if turn % 2 else ["ab", "b"], passes=2)


@ranks(2)
def test_a_group_of_which_only_a_member_on_one_rank_has_anything():
    model = TwoBranches()
    optimizer = fw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), groups=1)
    for _ in range(2):
        optimizer.zero_grad()
        if fw.rank() == 1:
            (model.a.bias * 2).sum().backward()
        optimizer.step()
        assert model.a.bias.grad.tolist() == [1.0, 1.0]
        assert model.a.weight.grad is None
        assert model.b.bias.grad is None
    return weights(model)


@ranks(2)
def test_a_group_of_several_dtypes():
    parameters = [torch.nn.Parameter(torch.zeros(3, dtype=d)) for d in (torch.float32, torch.float64, torch.bfloat16)]
    _optimizer = fw.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), groups=[parameters])
    sum((p.double() * (i + 2 * fw.rank())).sum() for i, p in enumerate(parameters)).backward()
    for i, p in enumerate(parameters):
        assert p.grad.tolist() == [i + 1.0] * 3
        assert p.grad.dtype == p.dtype


@ranks(2, 3)
def test_sparse_gradients_as_dense_ones():
    """An embedding that one rank never uses, or uses only at padding_idx; duplicates; as the dense reference."""
    torch.manual_seed(1)
    table = torch.nn.Embedding(10, 3, padding_idx=0, sparse=True)
    dense = torch.nn.Embedding(10, 3, padding_idx=0)
    dense.load_state_dict(table.state_dict())
    rest = torch.nn.Parameter(torch.ones(3))
    optimizer = fw.DistributedOptimizer(torch.optim.SGD([table.weight, rest], lr=0.1), sparse_as_dense=True)
    plain = torch.optim.SGD(dense.parameters(), lr=0.1)
    rows = {0: [1, 2, 2, 9], 1: [0, 0], 2: [2]}
    for turn in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        unused = turn == 1
        if fw.rank() == 1 and unused:
            rest.sum().backward()
        else:
            ((table(torch.tensor(rows[fw.rank()])) * rest).sum() * (fw.rank() + 1)).backward()
        for r in range(fw.size()):
            if not (r == 1 and unused):
                (dense(torch.tensor(rows[r])).sum() * (r + 1) / fw.size()).backward()
        assert not table.weight.grad.is_sparse
        close(table.weight.grad, dense.weight.grad, 1e-6)
        optimizer.step()
        plain.step()
        rest.data.fill_(1.0)
        close(table.weight, dense.weight, 1e-6)
    return table.weight
