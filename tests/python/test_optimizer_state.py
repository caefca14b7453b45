"""Wrapping leaves the optimizer what it was: object, class, state, hooks, pickles, schedulers."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from rank_helpers import counted_units, data, ranks, shard, weights

import fusewire as fw

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}


def make_model(seed=1):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()


def step(model, optimizer, turn):
    optimizer.zero_grad()
    model(data(6, 4, seed=turn)).pow(2).mean().backward()
    optimizer.step()


@ranks(1)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_wrapping_in_the_middle_of_training_changes_nothing(kind):
    """Two steps, wrap, one more step: bitwise equal to the unwrapped run, and the optimizer is still what it was."""
    plain_model, model = make_model(), make_model()
    plain, optimizer = (OPTIMIZERS[kind](m.parameters()) for m in (plain_model, model))
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    for turn in range(2):
        step(plain_model, plain, turn)
        step(model, optimizer, turn)
    defaults, state, groups, cls = optimizer.defaults, optimizer.state, optimizer.param_groups, type(optimizer)
    wrapped = fw.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    assert wrapped is optimizer
    assert isinstance(wrapped, cls)
    assert isinstance(wrapped, getattr(torch.optim, kind))
    assert wrapped.defaults == defaults
    assert wrapped.state is state
    assert wrapped.param_groups is groups
    calls.clear()
    for turn in range(2, 4):
        step(plain_model, plain, turn)
        step(model, optimizer, turn)
    assert calls == ["pre", "post"] * 2
    for name, weight in weights(model).items():
        assert torch.equal(weight, weights(plain_model)[name]), name
    for mine, theirs in zip(optimizer.state.values(), plain.state.values(), strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(theirs[key])), key


@ranks(2)
def test_broadcast_optimizer_state_of_a_fresh_optimizer_is_no_step():
    """Weights, step counters and gradients stay; a non-root rank ends with the root's options and (empty) state."""
    model = make_model(seed=fw.rank())
    model(data(4, 4)).sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    before = weights(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + fw.rank(), weight_decay=0.1 * (1 + fw.rank()))
    fw.broadcast_optimizer_state(optimizer, root_rank=0)
    assert len(optimizer.state) == 0
    for name, weight in weights(model).items():
        assert torch.equal(weight, before[name]), name
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert torch.equal(p.grad, grad)
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.1)
    return group


@ranks(2, 3)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_broadcast_optimizer_state_gives_every_rank_the_roots_state(kind, wrapped):
    """Ranks that have made no step, or other steps, end with the root's state, options and step counters."""
    root = fw.size() - 1
    model = make_model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    for turn in range({root: 3, 0: 0}.get(fw.rank(), 1)):
        step(model, optimizer, turn)
    optimizer.param_groups[0]["lr"] = 0.01 * (1 + fw.rank())
    if wrapped:
        optimizer = fw.DistributedOptimizer(optimizer, model.named_parameters())
    state_before = copy.deepcopy(optimizer.state_dict()) if fw.rank() == root else None
    before = weights(model)
    fw.broadcast_optimizer_state(optimizer, root_rank=root)
    for name, weight in weights(model).items():
        assert torch.equal(weight, before[name]), "the weights are broadcast_parameters' business"
    assert optimizer.param_groups[0]["lr"] == 0.01 * (1 + root)
    if fw.rank() == root:
        for index, entries in state_before["state"].items():
            for key, value in entries.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizer.state_dict()["state"][index][key]))
    fw.broadcast_parameters(model.state_dict(), root_rank=root)
    if not wrapped:
        optimizer = fw.DistributedOptimizer(optimizer, model.named_parameters())
    step(model, optimizer, 9)
    return [optimizer.state_dict(), weights(model)]


@ranks(2)
def test_broadcast_optimizer_state_of_a_root_that_has_none():
    """Rank 1 has stepped, the root has not: the root's empty state wins."""
    model = make_model()
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    if fw.rank() == 1:
        step(model, optimizer, 0)
    fw.broadcast_optimizer_state(optimizer, root_rank=0)
    assert len(optimizer.state_dict()["state"]) == 0
    return optimizer.state_dict()


@ranks(2, 3)
def test_broadcast_parameters_and_objects():
    model = make_model(seed=fw.rank())
    model.register_buffer("counter", torch.tensor(fw.rank()))
    pointers = [p.data_ptr() for p in model.parameters()]
    fw.broadcast_parameters(model.state_dict(), root_rank=1)
    assert pointers == [p.data_ptr() for p in model.parameters()]
    assert model.counter.item() == 1
    expected = make_model(seed=1)
    for (name, mine), right in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, right), name
    fw.broadcast_parameters(model.named_parameters(), root_rank=0)
    thing = {"rank": fw.rank(), "list": [1, "two", None, 3.0], "tensor": torch.ones(2) * fw.rank()}
    received = fw.broadcast_object(thing, root_rank=1, name="thing")
    assert received["rank"] == 1
    assert fw.broadcast_object(None, root_rank=0) is None
    assert fw.broadcast_object("x" * (1000 if fw.rank() == 0 else 3), root_rank=0) == "x" * 1000
    return [weights(model), received]


@ranks(1, 2)
def test_a_pickled_or_copied_optimizer_is_a_plain_local_one():
    model = make_model()
    calls = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = fw.DistributedOptimizer(optimizer, model.named_parameters())
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    step(model, optimizer, 0)
    before = weights(model)
    calls.clear()
    for other in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert isinstance(other, torch.optim.SGD)
        assert other.param_groups[0]["momentum"] == 0.9
        assert len(other.state) == len(optimizer.state)
        with counted_units(0):
            for p in other.param_groups[0]["params"]:
                p.grad = None
            sum((p * (fw.rank() + 1)).sum() for p in other.param_groups[0]["params"]).backward()
            assert all((p.grad == fw.rank() + 1).all() for p in other.param_groups[0]["params"])
            other.step()
        assert not calls
        for name, weight in weights(model).items():
            assert torch.equal(weight, before[name]), name
        with pytest.raises(Exception, match=r"(?i)wrap"):
            other.synchronize()
    with counted_units(4):
        step(model, optimizer, 1)  # the original still is the distributed one
    assert calls == [1]
    return weights(model)


@ranks(1)
def test_optimizers_and_schedulers_go_through_torch_save():
    model = make_model()
    optimizer = fw.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters())
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizer, 1),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
    ]
    step(model, optimizer, 0)
    for scheduler in schedulers:
        scheduler.step()
        file = io.BytesIO()
        torch.save(scheduler.state_dict(), file)
        file.seek(0)
        assert torch.load(file, weights_only=False)["last_epoch"] == 1
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    fresh_model = make_model(seed=2)
    fresh = fw.DistributedOptimizer(torch.optim.Adam(fresh_model.parameters(), lr=7.0), fresh_model.named_parameters())
    fresh.load_state_dict(torch.load(file))
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    torch.save(optimizer, io.BytesIO())


@ranks(1)
@pytest.mark.parametrize("early", [True, False])
def test_a_scheduler_built_before_or_after_wrapping(early):
    """No false warning about the order of calls, and the scheduler's rate is the one used."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        p = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([p], lr=1.0)
        if early:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        optimizer = fw.DistributedOptimizer(optimizer)
        if not early:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        positions = []
        for _ in range(4):
            optimizer.zero_grad()
            p.sum().backward()
            optimizer.step()
            scheduler.step()
            positions.append(p.item())
    assert positions == [-1.0, -1.5, -1.75, -1.875]


@ranks(1)
def test_a_scheduler_called_before_the_first_step_still_warns():
    optimizer = fw.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match="before"):
        scheduler.step()


@ranks(1, 2)
def test_param_groups_after_load_state_dict_are_the_ones_that_step_uses():
    model = make_model()
    optimizer = fw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    step(model, optimizer, 0)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = weights(model)
    optimizer.param_groups[0]["lr"] = 0.0
    step(model, optimizer, 1)
    for name, weight in weights(model).items():
        assert torch.equal(weight, before[name]), name
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.zero_grad()
    model(shard(data(6, 4))).mean().backward()
    optimizer.step()
    assert any(not torch.equal(weight, before[name]) for name, weight in weights(model).items())
    return weights(model)


@ranks(2)
@pytest.mark.parametrize("form", ["default", "to none", "to zero"])
def test_zero_grad_and_gradients_that_are_none_act_as_in_plain_torch(form):
    models = make_model(), make_model()
    plain = torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9)
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9)
    optimizer = fw.DistributedOptimizer(optimizer, models[1].named_parameters())

    def zero(one):
        one.zero_grad(*{"default": [], "to none": [True], "to zero": [False]}[form])

    for turn in range(4):
        for model, one in zip(models, (plain, optimizer), strict=True):
            zero(one)
            layers = model[:1] if turn % 2 else model  # in every other turn the last layer is not used
            layers(data(6, 4, seed=turn)).pow(2).mean().backward()
            one.step()
        for mine, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            assert mine.grad is None or torch.equal(mine.grad, theirs.grad)
            assert torch.equal(mine, theirs)
        if turn == 2:
            for one in (plain, optimizer):
                zero(one)
                one.step()
    return weights(models[1])
