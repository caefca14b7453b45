"""Names and groups of parameters: what is accepted, what is refused, and how the refusal reads."""

import re

import pytest
import torch
from rank_helpers import counted_units, data, gradients, ranks, shard, weights

import fusewire as fw


def make_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def train(model, optimizer, expected_units=4):
    """One step; the gradients must be those of one process on the whole batch."""
    batch = data(6 * fw.size(), 4)
    alone = make_model()
    alone.load_state_dict(model.state_dict())
    alone(batch).pow(2).mean().backward()
    optimizer.zero_grad()
    with counted_units(expected_units):
        model(shard(batch)).pow(2).mean().backward()
    for p, right in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, right.grad, rtol=1e-12, atol=1e-12)
    optimizer.step()
    return weights(model)


@ranks(2)
def test_two_param_groups_without_names():
    model = make_model()
    optimizer = sgd([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}])
    return train(model, fw.DistributedOptimizer(optimizer))


@ranks(2)
def test_one_param_group_without_names():
    model = make_model()
    return train(model, fw.DistributedOptimizer(sgd(model.parameters())))


@ranks(2)
@pytest.mark.parametrize("form", [list, iter, tuple])
def test_names_as_a_list_or_a_generator(form):
    model = make_model()
    return train(model, fw.DistributedOptimizer(sgd(model.parameters()), form(list(model.named_parameters()))))


@ranks(2)
def test_names_for_more_parameters_than_the_optimizer_holds():
    model = make_model()
    optimizer = fw.DistributedOptimizer(sgd(model[2].parameters()), model.named_parameters())
    with counted_units(2):
        model(data(4, 4, seed=fw.rank())).sum().backward()
    optimizer.step()
    return gradients(model[2])


@ranks(1, 2)
def test_a_parameter_without_a_name_is_reported_by_shape_and_position():
    model = make_model()
    optimizer = sgd([{"params": model[0].parameters()}, {"params": model[2].parameters()}])
    named = [(name, p) for name, p in model.named_parameters() if name != "2.weight"]
    with pytest.raises(ValueError, match="named_parameters") as caught:
        fw.DistributedOptimizer(optimizer, named)
    text = str(caught.value)
    assert re.search(r"2, 3\b", text), text  # the shape
    assert re.search(r"group\D*1\b", text), text  # the position
    return train(model, fw.DistributedOptimizer(optimizer, model.named_parameters()))  # nothing was left half done


@ranks(1)
def test_duplicate_names_are_listed():
    model = make_model()
    named = [("same", model[0].weight), ("same", model[0].bias), ("other", model[2].weight), ("fine", model[2].bias)]
    with pytest.raises(ValueError, match="same"):
        fw.DistributedOptimizer(sgd(model.parameters()), named)


@ranks(1)
def test_named_parameters_that_are_no_pairs_are_a_value_error():
    model = make_model()
    for wrong in (model.parameters(), [("a", 1.0)], [(1, model[0].weight)]):
        with pytest.raises((ValueError, TypeError), match="named_parameters"):
            fw.DistributedOptimizer(sgd(model.parameters()), wrong)


@ranks(2)
def test_num_groups_warns_and_acts_as_groups():
    model = make_model()
    with pytest.warns(DeprecationWarning, match="groups"):
        optimizer = fw.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), num_groups=2)
    return train(model, optimizer, expected_units=2)


@ranks(2)
def test_groups_by_number_and_by_list():
    for groups, expected in (
        (1, 1),
        (2, 2),
        (3, 3),
        (100, 4),
        (lambda m: [[m[0].weight, m[2].weight]], 3),
        (lambda m: [[m[0].weight, m[2].weight], [m[2].bias, m[0].bias]], 2),
    ):
        model = make_model()
        if callable(groups):
            groups = groups(model)
        optimizer = fw.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), groups=groups)
        for _ in range(2):
            result = train(model, optimizer, expected)
    return result


@ranks(1)
def test_wrong_groups_are_value_errors():
    model = make_model()
    for wrong in (-1, [[model[0].weight], [model[0].weight]], "two"):
        with pytest.raises((ValueError, TypeError), match="group"):
            fw.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), groups=wrong)


@ranks(1)
def test_arguments_without_a_meaning_are_refused():
    model = make_model()
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        fw.DistributedOptimizer(sgd(model.parameters()), backward_passes_per_step=0)
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        fw.DistributedOptimizer(sgd(model.parameters()), gradient_predivide_factor=0.0)
    with pytest.raises(TypeError, match=r"Optimizer"):
        fw.DistributedOptimizer(model)


@ranks(3)
def test_an_optimizer_on_a_process_set_reduces_among_its_members_only():
    members = fw.add_process_set(fw.ProcessSet([0, 2]))
    model = make_model()
    if members.included():
        optimizer = fw.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), process_set=members)
        model(data(6, 4, seed=fw.rank())).pow(2).mean().backward()
        expected = [make_model(), make_model()]
        for r, one in zip((0, 2), expected, strict=True):
            one(data(6, 4, seed=r)).pow(2).mean().backward()
        for p, a, b in zip(model.parameters(), *(one.parameters() for one in expected), strict=True):
            torch.testing.assert_close(p.grad, (a.grad + b.grad) / 2, rtol=1e-12, atol=1e-12)
        optimizer.step()
    # Rank 1 has wrapped nothing so far; all ranks still mean the same by the next optimizer.
    model = make_model()
    return train(model, fw.DistributedOptimizer(sgd(model.parameters()), model.named_parameters()))


@ranks(2)
def test_a_parameter_without_elements():
    p, empty = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(0, 4))
    for groups in (None, 1):
        p.grad = empty.grad = None
        optimizer = fw.DistributedOptimizer(sgd([p, empty]), groups=groups)
        (p.sum() * (fw.rank() + 1) + empty.sum()).backward()
        assert p.grad.tolist() == [1.5] * 3
        assert empty.grad.shape == (0, 4)
        optimizer.step()
        del optimizer
    return p
