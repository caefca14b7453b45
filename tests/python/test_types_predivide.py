"""gradient_predivide_factor f means 1/f before the sum and f/size after it, on every path alike."""

import pytest
import torch
from rank_helpers import data, gradients, ranks, shard

import fusewire as fw

FORMS = {
    "alone": {},
    "one group": {"groups": 1},
    "two groups": {"groups": 2},
    "listed groups": {"groups": lambda m: [[m[0].weight, m[2].bias], [m[0].bias, m[2].weight]]},
    "partly listed": {"groups": lambda m: [[m[0].weight, m[2].bias]]},
    "sparse_as_dense": {"sparse_as_dense": True},
    "Compression.none": {"compression": fw.Compression.none},
}


def reduced_gradients(factor, exact, dtype=torch.float32, **options):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)).to(dtype)
    if exact:  # small whole numbers, so that no path rounds anywhere
        for p in model.parameters():
            p.data.copy_(torch.arange(p.numel()).remainder(3).view_as(p) - 1)
    options = {key: value(model) if key == "groups" and callable(value) else value for key, value in options.items()}
    optimizer = fw.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        gradient_predivide_factor=factor,
        **options,
    )
    x = data(12, 6, seed=2, dtype=dtype)
    if exact:
        x = x.round()
    model(shard(x)).sum().backward()
    result = gradients(model)
    optimizer.step()
    return result


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@ranks(2, 3)
def test_predivide_is_the_same_in_every_form():
    for factor in (1.0, 2.0, 0.5, 3.0):
        plain = reduced_gradients(factor, exact=False)
        for options in FORMS.values():
            assert_same(reduced_gradients(factor, exact=False, **options), plain)
    return plain


@ranks(2, 4)
def test_predivide_by_powers_of_two_changes_nothing_in_any_form():
    right = reduced_gradients(1.0, exact=True)
    for factor in (2.0, 0.25, 8.0):
        for options in [
            *FORMS.values(),
            {"compression": fw.Compression.fp16},
            {"compression": fw.Compression.bf16},
            {"compression": fw.Compression.fp16, "groups": 1},
        ]:
            assert_same(reduced_gradients(factor, exact=True, **options), right)
    return right


@ranks(2)
def test_predivide_keeps_half_precision_sums_finite():
    p = torch.nn.Parameter(torch.zeros(10, dtype=torch.float16))
    _optimizer = fw.DistributedOptimizer(
        torch.optim.SGD([p], lr=0.1), gradient_predivide_factor=2.0, compression=fw.Compression.fp16
    )
    (p * torch.finfo(torch.float16).max).sum().backward()
    assert torch.isfinite(p.grad).all(), p.grad
    return p.grad


@ranks(2)
def test_predivide_needs_the_average():
    for op in (fw.Sum, fw.Min):
        p = torch.nn.Parameter(torch.zeros(3))
        with pytest.raises(ValueError, match=r"gradient_predivide_factor|op="):
            fw.DistributedOptimizer(torch.optim.SGD([p], lr=0.1), gradient_predivide_factor=2.0, op=op)
