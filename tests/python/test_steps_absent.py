"""Parameters that are used on some ranks only, in some passes only, or not at all."""

import pytest
import torch
from rank_helpers import close, data, gradients, ranks, weights

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


def local_gradients(model, batch, use):
    """What this loss contributes on its own, zeros where it contributes nothing."""
    named = dict(model.named_parameters())
    if not use:
        return {name: torch.zeros_like(p) for name, p in named.items()}
    found = torch.autograd.grad(model.loss(batch, use), named.values(), allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(named.items(), found, strict=True)}


def mean_gradients(model, uses, seed=0):
    """The mean over ranks; uses[r] is what rank r uses, its batch is of seed + r."""
    all_of = [local_gradients(model, data(6, 4, seed=seed + r), use) for r, use in enumerate(uses)]
    return {name: sum(g[name] for g in all_of) / len(uses) for name in all_of[0]}


def make(**options):
    model = TwoBranches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    return model, fw.DistributedOptimizer(optimizer, model.named_parameters(), **options)


@ranks(2, 3)
@pytest.mark.parametrize("preset", ["none", "zeros"])
def test_a_layer_that_one_rank_skips(preset):
    """No stall; the gradient of the skipped layer is the mean that counts zero for that rank, on all ranks."""
    model, optimizer = make()
    for turn in range(4):
        skipper = turn % fw.size()
        uses = ["a" if r == skipper else "ab" for r in range(fw.size())]
        expected = mean_gradients(model, uses, seed=10 * turn)
        optimizer.zero_grad(set_to_none=preset == "none")
        model.loss(data(6, 4, seed=10 * turn + fw.rank()), uses[fw.rank()]).backward()
        for name, grad in gradients(model).items():
            close(grad, expected[name], 1e-12)
        assert model.b.weight.grad.stride() == model.b.weight.stride()
        optimizer.step()
    return [weights(model), gradients(model)]


@ranks(3)
def test_every_rank_skips_another_layer():
    model, optimizer = make()
    uses = ["a", "b", "ab"]
    expected = mean_gradients(model, uses)
    model.loss(data(6, 4, seed=fw.rank()), uses[fw.rank()]).backward()
    for name, grad in gradients(model).items():
        close(grad, expected[name], 1e-12)
    optimizer.step()
    return weights(model)


@ranks(2)
@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_an_absent_rank_contributes_the_identity_of_the_operator(op):
    p, q = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))
    _optimizer = fw.DistributedOptimizer(torch.optim.SGD([p, q], lr=0.1), op=getattr(fw, op))
    values = torch.tensor([-2.0, 5.0, 0.5])
    ((p * values).sum() if fw.rank() == 0 else (q * values * 3).sum()).backward()
    share = 1.0 if op == "Sum" else 0.5
    assert torch.equal(p.grad, values * share)
    assert torch.equal(q.grad, values * 3 * share)


@ranks(2)
def test_a_layer_that_nobody_uses_keeps_no_gradient_and_does_not_move():
    """Weight decay and momentum included."""
    model, optimizer = make()
    before = weights(model)
    for turn in range(3):
        optimizer.zero_grad()
        model.loss(data(6, 4, seed=turn + 5 * fw.rank()), "a").backward()
        assert model.b.weight.grad is None
        assert model.b.bias.grad is None
        optimizer.step()
    for name in ("b.weight", "b.bias"):
        assert torch.equal(weights(model)[name], before[name]), name
    assert not torch.equal(model.a.weight, before["a.weight"])
    return weights(model)


@ranks(2)
def test_a_layer_that_nobody_uses_any_more():
    """Used once, then never: with gradients set to None it rests, as in plain torch; stale ones are not touched."""
    model, optimizer = make()
    model.loss(data(6, 4, seed=fw.rank()), "ab").backward()
    optimizer.step()
    before = weights(model)
    optimizer.zero_grad()
    model.loss(data(6, 4, seed=fw.rank()), "a").backward()
    optimizer.step()
    assert model.b.weight.grad is None
    assert torch.equal(model.b.weight, before["b.weight"])
    model.loss(data(6, 4, seed=fw.rank()), "b").backward()
    optimizer.zero_grad(set_to_none=False)
    model.b.weight.grad.fill_(1.0 + fw.rank())  # stale here and there: nothing is touched
    model.loss(data(6, 4, seed=fw.rank()), "a").backward()
    assert set(model.b.weight.grad.flatten().tolist()) == {1.0 + fw.rank()}
    assert not model.b.bias.grad.any()
    return weights(model)


@ranks(2)
def test_a_stale_gradient_counts_as_the_value_of_a_rank_that_skips_the_layer():
    p, q = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    _optimizer = fw.DistributedOptimizer(torch.optim.SGD([p, q], lr=0.1))
    (p.sum() * 4 + q.sum() * 2).backward()  # 4 and 2 on both
    q.grad = q.grad if fw.rank() else None
    (p.sum() if fw.rank() else q.sum()).backward()
    # p: rank 0 holds a stale 4, rank 1 has 4 + 1.
    assert p.grad.tolist() == [4.5] * 2
    # q: rank 0 has a new 1, rank 1 holds a stale 2.
    assert q.grad.tolist() == [1.5] * 2
    return [p.grad, q.grad]


@ranks(2)
@pytest.mark.parametrize("crossed", [False, True])
def test_layers_used_in_different_passes_of_one_step_are_reduced_in_full(crossed):
    """a only in the first pass, b only in the second; crossed: the other way round on rank 1."""
    model, optimizer = make(backward_passes_per_step=2)
    for turn in range(3):
        orders = ["ab", "ba" if crossed else "ab"]
        expected = mean_gradients(model, ["ab", "ab"], seed=10 * turn)
        optimizer.zero_grad()
        for use in orders[fw.rank()]:
            model.loss(data(6, 4, seed=10 * turn + fw.rank()), use).backward()
        for name, grad in gradients(model).items():
            close(grad, expected[name], 1e-12)
        optimizer.step()
    return weights(model)


@ranks(2)
def test_a_layer_used_in_one_pass_on_one_rank_only():
    model, optimizer = make(backward_passes_per_step=3)
    expected = mean_gradients(model, ["ab", "a"])
    batch = data(6, 4, seed=fw.rank())
    for turn in range(3):
        # a in every pass, a third each; b on rank 0 in the second pass.
        loss = model.loss(batch, "a") / 3
        if turn == 1 and fw.rank() == 0:
            loss = loss + model.loss(batch, "b")
        loss.backward()
    for name, grad in gradients(model).items():
        close(grad, expected[name], 1e-12)
    optimizer.step()
    return weights(model)


@ranks(2, 3)
def test_a_rank_that_runs_no_backward_at_all():
    """An empty batch on one rank: its step takes part, with nothing to add."""
    model, optimizer = make()
    for turn in range(3):
        idle = turn % fw.size()
        expected = mean_gradients(model, ["" if r == idle else "ab" for r in range(fw.size())], seed=10 * turn)
        optimizer.zero_grad()
        if fw.rank() != idle:
            model.loss(data(6, 4, seed=10 * turn + fw.rank()), "ab").backward()
        optimizer.step()
        for name, grad in gradients(model).items():
            close(grad, expected[name], 1e-12)
    return weights(model)
