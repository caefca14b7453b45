"""Windows of several backward passes: whole, partial, empty, and too long."""

import pytest
import torch
from rank_helpers import close, counted_units, data, gradients, ranks, shard, weights

import fusewire as fw


def make_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def make(**options):
    model = make_model()
    return model, fw.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **options)


def loss(model, seed, whole):
    batch = data(8, 4, seed=seed)
    return model(batch if whole else shard(batch)).pow(2).mean()


@ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_ten_micro_batches_in_windows_of_four(set_to_none):
    """Steps after 4, 8 and 10, then another epoch: each is the sum over its passes of the mean over ranks."""
    model, optimizer = make(backward_passes_per_step=4)
    alone = make_model()
    plain = sgd(alone.parameters())
    for epoch in range(3):
        for micro in range(1, 11):
            loss(model, 100 * epoch + micro, whole=False).backward()
            loss(alone, 100 * epoch + micro, whole=True).backward()
            if micro in (4, 8, 10):
                optimizer.step()
                plain.step()
                for p, right in zip(model.parameters(), alone.parameters(), strict=True):
                    close(p.grad, right.grad, 1e-12)
                    close(p, right, 1e-12)
                optimizer.zero_grad(set_to_none=set_to_none)
                plain.zero_grad(set_to_none=set_to_none)
    return weights(model)


@ranks(2)
def test_nothing_is_reduced_before_the_last_pass_of_a_window():
    model, optimizer = make(backward_passes_per_step=3)
    for turn in range(2):
        with counted_units(0):
            loss(model, 3 * turn, whole=False).backward()
            loss(model, 3 * turn + 1, whole=False).backward()
        with counted_units(4):
            loss(model, 3 * turn + 2, whole=False).backward()
        with counted_units(0):
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


@ranks(2)
def test_ranks_with_partial_windows_of_different_length():
    """Rank 1 has run out of data after the first of three passes."""
    model, optimizer = make(backward_passes_per_step=3)
    passes = (2, 1)
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for r in range(2):
        alone = make_model()
        for k in range(passes[r]):
            alone(data(8, 4, seed=10 * r + k)).pow(2).mean().backward()
        for name, grad in gradients(alone).items():
            expected[name] += grad / 2
    for k in range(passes[fw.rank()]):
        model(data(8, 4, seed=10 * fw.rank() + k)).pow(2).mean().backward()
    optimizer.step()
    for name, grad in gradients(model).items():
        close(grad, expected[name], 1e-12)
    return weights(model)


@ranks(2)
@pytest.mark.parametrize("passes", [1, 4])
def test_step_without_any_backward(passes):
    """No assertion, no movement, also with weight decay; training goes on afterwards."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    optimizer = fw.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=passes)
    before = weights(model)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    for name, weight in weights(model).items():
        assert torch.equal(weight, before[name])
    for k in range(passes):
        loss(model, k, whole=False).backward()
    optimizer.step()
    alone = make_model()
    for k in range(passes):
        loss(alone, k, whole=True).backward()
    for p, right in zip(model.parameters(), alone.parameters(), strict=True):
        close(p.grad, right.grad, 1e-12)
    return weights(model)


@ranks(2, 3)
def test_one_backward_too_many_with_average_is_exact():
    """mean(g1) + mean(g2), and a third one."""
    model, optimizer = make()
    alone = make_model()
    for k in range(3):
        model(data(6, 4, seed=10 * k + fw.rank())).pow(2).mean().backward()
        for r in range(fw.size()):
            (alone(data(6, 4, seed=10 * k + r)).pow(2).mean() / fw.size()).backward()
        for p, right in zip(model.parameters(), alone.parameters(), strict=True):
            close(p.grad, right.grad, 1e-12)
    optimizer.step()
    return weights(model)


@ranks(2)
def test_one_backward_too_many_with_predivide_is_exact():
    model, optimizer = make(gradient_predivide_factor=3.0)
    alone = make_model()
    for k in range(2):
        loss(model, k, whole=False).backward()
        loss(alone, k, whole=True).backward()
    for p, right in zip(model.parameters(), alone.parameters(), strict=True):
        close(p.grad, right.grad, 1e-12)
    optimizer.step()
    return weights(model)


@ranks(2)
@pytest.mark.parametrize("options", [{"op": "Sum"}, {"op": "Average", "backward_passes_per_step": 2}], ids=str)
def test_one_backward_too_many_elsewhere_is_one_clear_error(options):
    """Reducing what is already reduced would be wrong with Sum and inside a longer window; the error says so."""
    options = options | {"op": getattr(fw, options["op"])}
    model, _optimizer = make(**options)
    for k in range(options.get("backward_passes_per_step", 1)):
        loss(model, k, whole=False).backward()
    with pytest.raises((RuntimeError, ValueError, fw.FusewireError)) as caught:
        loss(model, 9, whole=False).backward()
    text = str(caught.value)
    assert any(name in text for name, _ in model.named_parameters()), text
    assert "backward_passes_per_step" in text or "step()" in text or "zero_grad" in text, text
    return fw.allreduce(torch.ones(2), name="the engine still works")


@ranks(2)
def test_sum_over_several_steps():
    """With one backward per step Sum never complains."""
    model, optimizer = make(op=fw.Sum)
    for _ in range(3):
        loss(model, 1, whole=False).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss(model, 2, whole=False).backward()
    expected = [make_model() for _ in range(2)]
    for r, one in enumerate(expected):
        one.load_state_dict(model.state_dict())
        one(data(8, 4, seed=2).chunk(2)[r]).pow(2).mean().backward()
    for p, a, b in zip(model.parameters(), *(one.parameters() for one in expected), strict=True):
        close(p.grad, a.grad + b.grad, 1e-12)
    return gradients(model)


@ranks(2)
@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_sum_and_average_of_gradients(op):
    p = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    _optimizer = fw.DistributedOptimizer(torch.optim.SGD([p], lr=0.1), op=getattr(fw, op))
    rows = [torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64) * (r + 1) for r in range(2)]
    (p * rows[fw.rank()]).sum().backward()
    assert torch.equal(p.grad, sum(rows) if op == "Sum" else sum(rows) / 2)
    return p.grad
