"""What is averaged, and that it happens in place: BEHAVIOUR M1 and M2, buffers, weights, errors."""

import math
import tracemalloc

import pytest
import torch
from averaging_helpers import registered
from rank_helpers import close, counted_units, error_of, everyone, ranks

import fusewire as fw
from fusewire.averaging import PeriodicModelAverager, mean, utils


def make_model(dtype=torch.float32):
    torch.manual_seed(fw.rank())
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(7, 5)).to(dtype)


def values(tensors) -> list:
    return [tensor.detach().clone() for tensor in tensors]


def mean_of_all(tensors) -> list:
    """The mean over the ranks, in float64, of each tensor as it is now."""
    return [torch.stack(theirs).double().mean(0) for theirs in zip(*everyone(values(tensors)), strict=True)]


@ranks(2, 3)
def test_gradients_do_not_decide():
    """M1: a parameter without a gradient on one rank, on all, or frozen is averaged like any other."""
    model = make_model()
    parameters = list(model.parameters())
    parameters[0].grad = torch.ones_like(parameters[0])
    if fw.rank() == 1:
        parameters[1].grad = torch.ones_like(parameters[1])
        parameters[3].requires_grad_(False)
    expected = mean_of_all(parameters)
    gradients = [None if p.grad is None else p.grad.clone() for p in parameters]
    with counted_units(1):  # one group, however many parameters
        PeriodicModelAverager(2).average_parameters(model.parameters())
    for parameter, right, gradient in zip(parameters, expected, gradients, strict=True):
        close(parameter.detach().double(), right, 1e-7)
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)
    assert utils.get_params_to_average(model.parameters()) == parameters
    return values(parameters)


@ranks(2)
def test_one_parameter_given_twice_counts_once():
    """By identity, and tied weights that are the same view of the same memory too."""
    a, b = (torch.nn.Parameter(torch.full((3,), float(fw.rank() + i))) for i in range(2))
    tied = torch.nn.Parameter(a.data)
    utils.average_parameters([a, b, a, tied])
    assert torch.equal(a.detach(), torch.full((3,), 0.5))
    assert torch.equal(tied.detach(), a.detach())
    assert torch.equal(b.detach(), torch.full((3,), 1.5))


@ranks(2, 3)
@pytest.mark.parametrize("weights", [None, 2.0])
def test_in_place(weights):
    """M2: memory, strides, dtype, views, hooks and optimizer state stay; any mix of dtypes and layouts."""
    torch.manual_seed(fw.rank())
    shared = torch.randn(40, dtype=torch.float64)
    made = {
        "bf16": torch.randn(33).bfloat16(),
        "fp64": torch.randn(5, 7, dtype=torch.float64),
        "fp16": torch.randn(9).half(),
        "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "transposed": torch.randn(6, 4).t(),
        "sliced": torch.randn(10, 10)[1:9:2, ::3],
        "view": shared[10:30].view(4, 5),
        "complex": torch.randn(3, dtype=torch.complex64),
        "scalar": torch.randn(()),
        "empty": torch.randn(0, 3),
    }
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in made.items()}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    fired = []
    parameters["fp64"].register_post_accumulate_grad_hook(lambda p: fired.append(p))
    before = {n: (p.data_ptr(), p.stride(), p.dtype, p.untyped_storage().nbytes()) for n, p in parameters.items()}
    outside = shared.clone()
    aliases = {name: parameter.data for name, parameter in parameters.items()}
    expected = {
        n: torch.stack(v) for n, v in zip(made, zip(*everyone(values(made.values())), strict=True), strict=True)
    }
    PeriodicModelAverager(2, weights=weights).average_parameters(parameters.items())
    for name, parameter in parameters.items():
        after = (parameter.data_ptr(), parameter.stride(), parameter.dtype, parameter.untyped_storage().nbytes())
        assert after == before[name], name
        wide = torch.complex128 if parameter.is_complex() else torch.float64
        exact = expected[name].to(wide).mean(0)
        eps = torch.finfo(parameter.dtype).eps
        assert ((parameter.detach().to(wide) - exact).abs() <= eps * exact.abs()).all(), name  # rounded once
        assert torch.equal(aliases[name], parameter.detach())
        assert parameter in optimizer.state
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], torch.zeros_like(parameter))
    assert torch.equal(shared[10:30].view(4, 5), parameters["view"].detach())
    assert torch.equal(shared[:10], outside[:10])
    assert torch.equal(shared[30:], outside[30:])
    (parameters["fp64"] * 2).sum().backward()
    assert len(fired) == 1
    return values(parameters.values())


@ranks(2)
def test_a_graph_made_before_the_averaging_notices():
    """As after any in-place update: backward through the old values is an error, never a silent mixture."""
    w = torch.nn.Parameter(torch.full((2,), 1.0 + fw.rank()))
    loss = (w * w).sum()
    utils.average_parameters([w])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@ranks(3)
def test_all_forms_of_params():
    def fresh():
        return [torch.nn.Parameter(torch.full((2,), float(fw.rank() * (i + 1)))) for i in range(4)]

    def groups(p):
        return torch.optim.SGD([{"params": p[:3]}, {"params": p[3:]}], lr=1.0).param_groups

    def named(p):
        return torch.optim.SGD([(f"p{i}", t) for i, t in enumerate(p)], lr=1.0).param_groups

    def raw(p):
        return [{"params": p[0]}, {"params": p[1:3]}, {"params": iter([("last", p[3])])}]

    for form in (list, tuple, iter, groups, named, raw, lambda p: (t for t in p), lambda p: enumerate_names(p)):
        parameters = fresh()
        utils.average_parameters_or_parameter_groups(form(parameters), fw.global_process_set)
        for number, parameter in enumerate(parameters):
            assert torch.equal(parameter.detach(), torch.full((2,), float(number + 1))), form
        assert utils.get_params_to_average(form(parameters)) == parameters


def enumerate_names(parameters):
    return ((f"layer{i}", p) for i, p in enumerate(parameters))


@ranks(1, 2)
def test_a_generator_is_read_when_it_is_time_and_a_spent_one_is_an_error():
    model = make_model()
    reads = []

    def parameters():
        reads.append(averager.step)
        yield from model.parameters()

    averager = PeriodicModelAverager(2, 1)
    for _ in range(6):
        averager.average_parameters(parameters())
    assert reads == [1, 3, 5]
    spent = model.parameters()
    averager.average_parameters(spent)  # not now
    averager.average_parameters(spent)
    averager.average_parameters(spent)  # not now: nobody looks
    assert averager.step == 9
    for _ in range(2):
        with pytest.raises(ValueError, match="generator"):
            averager.average_parameters(spent)
        assert averager.step == 9  # nothing happened
    for nothing in ([], [{"params": []}], iter(())):
        with pytest.raises(ValueError, match="no parameters"):
            utils.average_parameters(nothing)
    averager = PeriodicModelAverager(2, buffers=model)
    with pytest.raises(ValueError, match="generator"):
        averager.average_parameters(spent)


def test_what_is_no_parameter_is_refused():
    for wrong in (
        ["weight"],
        [3],
        [None],
        [{"lr": 0.1}],
        [(1, 2, 3)],
        {"params": []},
        torch.ones(3),
        [[torch.ones(2)]],
    ):
        with pytest.raises(NotImplementedError):
            utils.get_params_to_average(wrong)


@ranks(2, 3)
@pytest.mark.parametrize("weights", [None, 1.0])
def test_sizes_that_disagree_name_the_parameter(weights):
    """The same error on every rank, nothing has changed, and the averager works on."""
    late = fw.rank() == fw.size() - 1

    def attempt(parameters):
        before = values(utils.get_params_to_average(parameters))
        averager = PeriodicModelAverager(2, weights=weights)
        error = error_of(averager.average_parameters, parameters)
        after = utils.get_params_to_average(parameters)
        assert all(torch.equal(b, a.detach()) for b, a in zip(before, after, strict=True))
        assert averager.step == 0
        assert type(error) is fw.TensorMismatchError
        return str(error)

    a, b = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(5 if late else 4, 2))
    half = torch.nn.Parameter(torch.ones(3).to(torch.bfloat16 if late else torch.float32))
    optimizer = torch.optim.SGD([("first.weight", a), ("second.weight", b)], lr=1.0)
    texts = [
        attempt(optimizer.param_groups),
        attempt([a, b]),
        attempt([{"params": [a]}, {"params": [a, b]}]),
        attempt([("alone", b)]),
        attempt([("x", a), ("y", half)]),
        attempt([a] if late else [a, torch.nn.Parameter(torch.ones(1))]),
    ]
    for text, words in zip(
        texts,
        ["'second.weight'", "parameter 1:", "parameter 1 of group 1", "'alone'", "'y'", "number of tensors"],
        strict=True,
    ):
        assert words in text
        assert f"rank {fw.size() - 1} has" in text
    assert " 2, " in texts[5]  # as the user counts
    assert "[4, 2]" in texts[0]
    assert "[5, 2]" in texts[0]
    utils.average_parameters([a])
    return texts


@ranks(2)
def test_buffers():
    """Floating buffers join the same group; integer ones are left alone; a module's are looked up each time."""
    model = make_model()
    model[1].running_mean.fill_(float(fw.rank()))
    model[1].num_batches_tracked.fill_(10 + fw.rank())
    averager = PeriodicModelAverager(2, buffers=model)
    with counted_units(1):
        averager.average_parameters(model.parameters())
    assert torch.equal(model[1].running_mean, torch.full((4,), 0.5))
    assert model[1].num_batches_tracked == 10 + fw.rank()
    model.double()  # replaces buffers, and keeps parameters
    model[1].running_mean.fill_(float(fw.rank()))
    averager.average_parameters(model.parameters())  # not now
    averager.average_parameters(model.parameters())
    assert torch.equal(model[1].running_mean, torch.full((4,), 0.5, dtype=torch.float64))

    for form in (model.buffers, model.named_buffers):
        model[1].running_var.fill_(float(fw.rank()))
        averager = PeriodicModelAverager(2, buffers=form())  # a generator, read once and kept
        for _ in range(3):
            averager.average_parameters(model.parameters())
        assert torch.equal(model[1].running_var, torch.full((4,), 0.5, dtype=torch.float64))
        model[1].running_var.fill_(float(fw.rank()))
        averager = PeriodicModelAverager(2)
        averager.average_parameters(model.parameters(), buffers=form())
        assert torch.equal(model[1].running_var, torch.full((4,), 0.5, dtype=torch.float64))
    model[1].running_var = torch.ones(4 + fw.rank())
    error = error_of(PeriodicModelAverager(2, buffers=model).average_parameters, model.parameters())
    assert "buffer '1.running_var'" in str(error)
    return str(error)


@ranks(1, 2, 3)
def test_weights():
    """A share of the data in any unit, given by each rank for itself or as one list by all."""
    size = fw.size()
    for shares in ([3.0, 1.0, 4.0], [1e-3, 1e3, 5], [7, 0, 1], [1e300, 1e300, 1e300]):
        shares = shares[:size]
        for weights in (shares[fw.rank()], shares, torch.tensor(shares, dtype=torch.float64)):
            model = make_model(torch.float64)
            every = [torch.stack(v) for v in zip(*everyone(values(model.parameters())), strict=True)]
            total = math.fsum(share / max(shares) for share in shares)
            PeriodicModelAverager(2).average_parameters(model.parameters(), weights=weights)
            for parameter, rows in zip(model.parameters(), every, strict=True):
                right = sum(row * (share / max(shares) / total) for row, share in zip(rows, shares, strict=True))
                close(parameter.detach(), right, 1e-14)
    return values(model.parameters())


@ranks(3)
def test_weights_of_a_rank_that_has_no_data():
    """It gets the mean of the others, whatever it holds."""
    w = torch.nn.Parameter(torch.full((4,), math.nan if fw.rank() == 1 else float(fw.rank())))
    utils_weights = PeriodicModelAverager(2, weights=0 if fw.rank() == 1 else 10)
    utils_weights.average_parameters([w])
    assert torch.equal(w.detach(), torch.ones(4))


@ranks(3)
def test_weights_of_equal_values_and_integers_are_exact():
    third, count = torch.nn.Parameter(torch.full((1000,), 1 / 3)), torch.tensor([3, -7, 1 << 40])
    kept = third.detach().clone()
    PeriodicModelAverager(2, weights=[3, 5, 11]).average_parameters([("third", third), ("count", count)])
    assert torch.equal(third.detach(), kept)
    assert count.tolist() == [3, -7, 1 << 40]


@ranks(2)
def test_weights_without_a_meaning_are_everybodys_error():
    """Also when only one rank gives them: the others would wait."""
    w = torch.nn.Parameter(torch.full((4,), float(fw.rank())))
    last = fw.rank() == 1
    for bad in (-1.0, math.nan, math.inf, "much", [1.0], [1.0, "x"]):
        error = error_of(PeriodicModelAverager(2, weights=bad if last else 1.0).average_parameters, [w])
        assert type(error) is ValueError, bad
        assert "weights" in str(error)
    with pytest.raises(fw.TensorMismatchError, match="op differs"):  # one weighs, one does not
        PeriodicModelAverager(2, weights=1.0 if last else None).average_parameters([w])
    with pytest.raises(ValueError, match="not all of them 0"):
        PeriodicModelAverager(2, weights=[0, 0]).average_parameters([w])
    assert torch.equal(w.detach(), torch.full((4,), float(fw.rank())))
    PeriodicModelAverager(2, weights=[1, 3]).average_parameters([w])
    assert torch.equal(w.detach(), torch.full((4,), 0.75))


@ranks(4)
def test_weights_inside_a_hierarchy():
    """A list has a number for every rank of the whole group; each level uses those of its own ranks."""
    shares = [1.0, 3.0, 0.0, 5.0]
    averager = fw.HierarchicalModelAverager({1: 2, 2: 4}, weights=shares)
    for turn in range(4):
        w = torch.nn.Parameter(torch.full((2,), float(fw.rank()), dtype=torch.float64))
        averager.average_parameters([w])
        inside = 0.75 if fw.rank() < 2 else 3.0
        close(w.detach(), torch.full((2,), 18 / 9 if turn % 2 == 0 else inside, dtype=torch.float64), 1e-15)


@ranks(2)
def test_a_weighted_mean_comes_in_pieces():
    """Its temporaries are a small part of the model; every element is covered once, in any shape."""
    torch.manual_seed(fw.rank())
    shapes = [(2, 700_000), (700_000, 2), (3_000_001,), (100, 200, 70), (50, 0), ()]
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    expected = mean_of_all(parameters)
    pieces = [sum(8 * piece.numel() for piece in pieces) for pieces in mean._pieces(parameters)]
    PeriodicModelAverager(2, weights=1.0).average_parameters(parameters)
    total = sum(parameter.nbytes for parameter in parameters)
    assert max(pieces) < 0.05 * total
    assert sum(pieces) == 2 * total
    for parameter, right in zip(parameters, expected, strict=True):
        close(parameter.detach().double(), right, 1e-7)


@ranks(2)
def test_peak_memory():
    """No flat copy: what comes on top of 96 MB of parameters is under 5 % of them."""
    parameters = [torch.nn.Parameter(torch.full((4, 1 << 20), float(fw.rank()))) for _ in range(6)]
    total = sum(parameter.nbytes for parameter in parameters)
    for weights in (None, 1.0):
        averager = PeriodicModelAverager(2, weights=weights)
        averager.average_parameters(parameters[:1])  # the data plane's own staging is there from now on
        averager.step = 0
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts anew
        before = peak_memory()
        averager.average_parameters(parameters)
        assert peak_memory() - before < 0.05 * total
        assert torch.equal(parameters[5].detach()[0, :9], torch.full((9,), 0.5))


def peak_memory() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


@ranks(2)
def test_no_python_memory_grows_with_calls():
    model = make_model()
    averager = PeriodicModelAverager(2)

    def calls(count):
        for _ in range(count):
            averager.average_parameters(model.parameters())

    calls(50)
    tracemalloc.start()
    try:
        calls(20)
        before = tracemalloc.get_traced_memory()[0]
        calls(200)
        assert tracemalloc.get_traced_memory()[0] - before < 20_000
    finally:
        tracemalloc.stop()


@ranks(3)
def test_ranks_outside_the_set_do_nothing():
    (pair,) = registered([0, 2])
    w = torch.nn.Parameter(torch.full((2,), float(fw.rank())))
    averager = PeriodicModelAverager(2, process_group=pair)
    averager.average_parameters([w])
    utils.average_parameters([w], pair)
    assert averager.step == 1
    assert torch.equal(w.detach(), torch.full((2,), 1.0))


@ranks(3)
@pytest.mark.parametrize("weights", [None, 2.0])
def test_a_rank_that_has_joined_is_not_counted(weights):
    """It brings nothing, and the mean is that of the others: divided by three the model would shrink."""
    if fw.rank() == 1:
        fw.join()
        return
    w = torch.nn.Parameter(torch.tensor([1.0, -3.0]) * (fw.rank() + 1))
    half = torch.nn.Parameter(torch.full((2,), float(fw.rank())).bfloat16())
    PeriodicModelAverager(2, weights=weights).average_parameters([w, half])
    assert w.tolist() == [2.0, -6.0]
    assert half.tolist() == [1.0, 1.0]
    fw.join()


@ranks(2)
def test_two_models_by_turns():
    models = [make_model(), torch.nn.Linear(2, 3)]
    averagers = [PeriodicModelAverager(2), PeriodicModelAverager(3)]
    for _ in range(7):
        for model, averager in zip(models, averagers, strict=True):
            averager.average_parameters(model.parameters())
    return [values(model.parameters()) for model in models]


@ranks(2)
def test_a_parameter_that_overlaps_itself_is_refused():
    w = torch.nn.Parameter(torch.ones(1).expand(4))
    with pytest.raises(ValueError, match="share memory"):
        utils.average_parameters([w])
