"""A backward that fails on some ranks only: everybody hears of it, nobody hangs, nobody diverges."""

import pytest
import torch
from rank_helpers import close, data, gradients, ranks, shard, weights

import fusewire as fw


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("broken on purpose")


def make_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss(model, batch, broken):
    hidden = model[0](batch)
    return model[2](Broken.apply(hidden) if broken else hidden).pow(2).mean()


@ranks(2, 3)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("between", ["nothing", "a collective", "a step"])
def test_a_backward_that_raises_on_one_rank_raises_on_all(passes, between):
    """The ranks catch it and go on: as one process that has not seen that batch."""
    model, alone = make_model(), make_model()
    optimizer = fw.DistributedOptimizer(sgd(model), model.named_parameters(), backward_passes_per_step=passes)
    plain = sgd(alone)
    for turn in range(8):
        guilty = turn % fw.size() if turn in (0, 3, 4) else None  # with and without gradients that leave early
        before = weights(model)
        optimizer.zero_grad()
        plain.zero_grad()
        caught = None
        try:
            for k in range(passes):
                batch = data(2 * fw.size(), 4, seed=10 * turn + k)
                loss(model, shard(batch), k == passes - 1 and guilty == fw.rank()).backward()
                loss(alone, batch, False).backward()
        except (ArithmeticError, fw.FusewireError) as error:
            caught = error
        if guilty is None:
            assert caught is None, caught
        elif guilty == fw.rank():
            assert type(caught) is ArithmeticError
        else:
            assert f"backward() of rank {guilty}" in str(caught)
        if between == "a collective":
            fw.allreduce(torch.ones(2), name="loss")
        if guilty is None:
            optimizer.step()
            plain.step()
        else:
            assert all(p.grad is None for p in model.parameters())
            if between == "a step":
                optimizer.step()
                for name, weight in weights(model).items():
                    assert torch.equal(weight, before[name])
        for p, right in zip(model.parameters(), alone.parameters(), strict=True):
            close(p, right, 1e-9)
    return [weights(model), gradients(model)]


@ranks(2)
def test_a_failure_in_an_early_pass_of_a_window_is_as_if_the_pass_had_not_been():
    p = torch.nn.Parameter(torch.zeros(2))
    _optimizer = fw.DistributedOptimizer(torch.optim.SGD([p], lr=0.1), backward_passes_per_step=2)
    if fw.rank() == 0:
        with pytest.raises(ArithmeticError):
            Broken.apply(p * 1.0).sum().backward()
    for _ in range(2):
        p.sum().backward()
    assert p.grad.tolist() == [2.0, 2.0]
    return p.grad
