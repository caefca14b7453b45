"""Closures: every evaluation ends like a backward, and the loss it returns is everybody's."""

import pytest
import torch
from rank_helpers import close, counted_units, data, ranks, shard, weights

import fusewire as fw


def make_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()


def closure_of(model, optimizer, batch, losses):
    def closure():
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    return closure


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=5),
    "LBFGS with a line search": lambda p: torch.optim.LBFGS(p, max_iter=5, line_search_fn="strong_wolfe"),
}


@ranks(2)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("keyword", [False, True])
def test_every_evaluation_of_a_closure_is_reduced(kind, keyword):
    """Gradients and the returned loss: as one process on the whole batch, with equal weights everywhere."""
    model, alone = make_model(), make_model()
    optimizer = fw.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()), model.named_parameters())
    plain = OPTIMIZERS[kind](alone.parameters())
    for turn in range(3):
        batch = data(8, 4, seed=turn)
        evaluations, right = [], []
        mine = closure_of(model, optimizer, shard(batch), evaluations)
        loss = optimizer.step(closure=mine) if keyword else optimizer.step(mine)
        expected = plain.step(closure_of(alone, plain, batch, right))
        assert len(evaluations) == len(right)
        assert kind == "SGD" or kind == "Adam" or len(right) > 1
        close(torch.as_tensor(loss), torch.as_tensor(expected), 1e-9)
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            close(p, q, 1e-9)
    return [weights(model), float(loss)]


@ranks(2)
def test_a_closure_on_one_rank_that_uses_fewer_layers():
    model = make_model()
    optimizer = fw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

    def closure():
        optimizer.zero_grad()
        out = model[0](data(6, 4)) if fw.rank() else model(data(6, 4))
        loss = out.pow(2).mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return weights(model)


@ranks(2)
def test_a_closure_that_runs_no_backward_on_one_rank():
    model = make_model()
    optimizer = fw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    before = weights(model)

    def closure():
        optimizer.zero_grad()
        loss = model(data(6, 4)).pow(2).mean()
        if fw.rank() == 0:
            loss.backward()
        return loss

    optimizer.step(closure)
    assert not torch.equal(model[0].weight, before["0.weight"])
    return weights(model)


@ranks(2)
def test_a_closure_after_a_backward_of_its_own_reduces_each_gradient_once():
    model = make_model()
    optimizer = fw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    losses = []
    with counted_units(5):  # four gradients and the loss
        optimizer.step(closure_of(model, optimizer, shard(data(8, 4)), losses))
    assert len(losses) == 1
    return weights(model)


@ranks(2)
def test_an_error_in_a_closure_comes_through_and_leaves_everything_usable():
    model = make_model()
    optimizer = fw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

    def broken():
        raise KeyError("no data")

    with pytest.raises(KeyError, match="no data"):
        optimizer.step(broken)
    optimizer.step(closure_of(model, optimizer, shard(data(8, 4)), []))
    return weights(model)
