"""A wrapped optimizer outlives what its gradients went through: the engine, and the accumulators of its parameters."""

import gc
import weakref

import pytest
import torch
from rank_helpers import close, counted_units, data, error_of, gradients, ranks, shard, weights

import fusewire as fw


def make_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch.to(next(model.parameters()).dtype)).pow(2).mean().backward()
    optimizer.step()


@ranks(2, fresh=True)
def test_optimizers_go_on_after_shutdown_and_init():
    models, alone = [make_model() for _ in range(2)], make_model()
    optimizers = [fw.DistributedOptimizer(sgd(m), m.named_parameters()) for m in models]
    plain = sgd(alone)
    for turn in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer, shard(data(8, 4, seed=turn)))
        step(alone, plain, data(8, 4, seed=turn))
        for model in models:
            for p, right in zip(model.parameters(), alone.parameters(), strict=True):
                close(p, right, 1e-9)
        fw.shutdown()
        optimizers[0].zero_grad()
        error = error_of(models[0](shard_of_nobody()).sum().backward)
        assert type(error) is fw.ShutdownError, repr(error)
        fw.init()
        newer = make_model()  # one that is wrapped by the new engine first takes no older one's name
        step(newer, fw.DistributedOptimizer(sgd(newer), newer.named_parameters()), data(2, 4))
    return [weights(m) for m in models]


def shard_of_nobody():
    return torch.ones(1, 4, dtype=torch.float64)


@ranks(3, fresh=True)
@pytest.mark.parametrize("again", ["in init", "later", "never"])
def test_an_optimizer_on_a_process_set_goes_on_when_the_set_is_registered_again(again):
    pair = fw.add_process_set([0, 2])
    model = make_model()
    optimizer = fw.DistributedOptimizer(sgd(model), model.named_parameters(), process_set=pair)
    step(model, optimizer, data(4, 4, seed=fw.rank()))
    fw.shutdown()
    fw.init(process_sets=[pair] if again == "in init" else None)
    if again == "later":
        fw.add_process_set(pair)
    model.zero_grad()
    backward = model(data(4, 4, seed=fw.rank())).pow(2).mean().backward
    if again == "never":
        if fw.rank() != 1:
            assert type(error_of(backward)) is fw.ShutdownError
        return
    backward()
    optimizer.step()
    total = fw.allreduce(model[0].weight.detach(), op=fw.Sum, process_set=pair) if fw.rank() != 1 else None
    if total is not None:
        close(model[0].weight.detach(), total / 2, 0)
    return


@ranks(2)
@pytest.mark.parametrize("hooked", [False, True])
def test_the_first_gradients_after_a_conversion_are_final_in_backward(hooked):
    """module.double() puts new accumulators on the parameters, which no hook of ours has seen."""
    model, alone = make_model().float(), make_model().float()
    optimizer, plain = fw.DistributedOptimizer(sgd(model), model.named_parameters()), sgd(alone)
    if hooked:  # the first Python hook of a parameter removes what C++ has put there
        model[0].weight.register_hook(lambda grad: grad)
        step(model, optimizer, shard(data(8, 4)))
        step(alone, plain, data(8, 4))
    model.double()
    alone.double()
    optimizer.zero_grad()
    alone.zero_grad()
    with counted_units(4):
        model(shard(data(8, 4, seed=2))).pow(2).mean().backward()
    alone(data(8, 4, seed=2)).pow(2).mean().backward()
    for p, right in zip(model.parameters(), alone.parameters(), strict=True):
        close(p.grad, right.grad, 1e-6 if hooked else 1e-12)
    return gradients(model)


@ranks(2)
def test_the_first_gradients_of_unfrozen_parameters_are_final_in_backward():
    model = make_model()
    model.requires_grad_(False)
    _optimizer = fw.DistributedOptimizer(sgd(model), model.named_parameters())
    model.requires_grad_(True)
    with counted_units(4):
        model(data(4, 4, seed=fw.rank())).pow(2).mean().backward()
    return gradients(model)


@ranks(2, fresh=True)
@pytest.mark.parametrize("op", [fw.Average, fw.Adasum])
def test_names_after_a_new_init_do_not_depend_on_the_garbage_collector(op):
    """An optimizer that was dropped, in a reference cycle, is freed on one rank and not yet on the other."""

    def wrapped():
        model = make_model()
        return model, fw.DistributedOptimizer(sgd(model), model.named_parameters(), op=op)

    gc.disable()
    try:
        _, dropped = wrapped()
        dropped.myself = dropped
        alive = weakref.ref(dropped)
        del dropped, _
        model, optimizer = wrapped()
        if fw.rank() == 0:
            gc.collect()
        assert (alive() is None) == (fw.rank() == 0)
        fw.shutdown()
        fw.init()
        newer = wrapped()
        for one, its in ((model, optimizer), newer):
            step(one, its, data(4, 4, seed=fw.rank()))
        return [weights(model), weights(newer[0])]
    finally:
        gc.enable()


@ranks(2, fresh=True)
def test_an_optimizer_of_a_set_that_is_gone_is_in_nobodys_way():
    """Its process set has kept a number of an engine that is gone."""
    for number in (1, 7):
        mine = [fw.add_process_set([rank]) for rank in range(2)]
        stale = mine[fw.rank()]
        model = make_model()
        optimizer = fw.DistributedOptimizer(sgd(model), model.named_parameters(), process_set=stale)
        step(model, optimizer, data(4, 4))
        fw.barrier()  # rank 0, which leads, does not leave before the other has made its step
        fw.shutdown()
        stale.process_set_id = number  # of nothing in the next engine
        fw.init()
        other = make_model()
        fresh = fw.DistributedOptimizer(sgd(other), other.named_parameters())
        step(other, fresh, shard(data(8, 4)))
