"""Objects, parameters and optimizer state from one rank, or from every rank, to all."""

import pytest
import torch
from rank_helpers import ranks, weights

import fusewire as fw


@ranks(1, 2, 3, 4)
def test_allgather_object():
    mine = {"rank": fw.rank(), "text": "x" * (1000 * fw.rank()), "tensor": torch.full((fw.rank(),), 1.0)}
    gathered = fw.allgather_object(mine, name="objects")
    assert [item["rank"] for item in gathered] == list(range(fw.size()))
    assert [len(item["text"]) for item in gathered] == [1000 * r for r in range(fw.size())]
    assert [item["tensor"].numel() for item in gathered] == list(range(fw.size()))
    assert fw.allgather_object(None) == [None] * fw.size()
    mine = fw.rank()
    assert [add(2) for add in fw.allgather_object(lambda x: x + mine)] == [2 + r for r in range(fw.size())]


@ranks(3)
def test_objects_in_a_process_set():
    pair = fw.add_process_set([0, 2])
    if pair.included():
        assert fw.allgather_object(fw.rank(), process_set=pair) == [0, 2]
        assert fw.broadcast_object(fw.rank(), root_rank=2, process_set=pair) == 2
    fw.remove_process_set(pair)


@ranks(2, 3)
@pytest.mark.parametrize("form", ["state_dict", "named_parameters", "parameters", "list", "named list"])
def test_broadcast_parameters(form):
    torch.manual_seed(fw.rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2).double())
    model[1].running_mean += fw.rank()
    model[1].num_batches_tracked += 10 * fw.rank()
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    forms = {
        "state_dict": model.state_dict(),
        "named_parameters": model.named_parameters(),
        "parameters": model.parameters(),
        "list": list(model.parameters()),
        "named list": list(model.named_parameters()),
    }
    fw.broadcast_parameters(forms[form], root_rank=fw.size() - 1)
    buffers = (model[1].running_mean.mean().item(), model[1].num_batches_tracked.item())
    source = fw.size() - 1 if form == "state_dict" else fw.rank()
    assert buffers == (source, 10 * source)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    return weights(model)


@ranks(2)
def test_broadcast_parameters_leaves_what_is_no_tensor():
    state = {"weight": torch.full((2,), float(fw.rank())), "epoch": 5 + fw.rank(), "nothing": None}
    fw.broadcast_parameters(state, root_rank=1)
    assert state["weight"].tolist() == [1.0, 1.0]
    assert (state["epoch"], state["nothing"]) == (5 + fw.rank(), None)
    fw.broadcast_parameters({}, root_rank=0)
    fw.broadcast_parameters([], root_rank=0)
    with pytest.raises(ValueError, match="state_dict"):
        fw.broadcast_parameters([1, 2], root_rank=0)


@ranks(2)
def test_tied_weights_are_broadcast_once_and_twice():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    torch.nn.init.constant_(model["a"].weight, float(fw.rank()))
    fw.broadcast_parameters(model.state_dict(), root_rank=1)
    assert torch.equal(model["b"].weight, torch.ones(3, 3))
    assert model["b"].weight is model["a"].weight


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=3),
}


@ranks(2)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_of_every_optimizer(kind):
    """Trained on rank 0 alone; afterwards both ranks go on alike. No step is taken for it."""
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    optimizer = OPTIMIZERS[kind](model.parameters())

    def step(inputs):
        def closure():
            optimizer.zero_grad()
            loss = model(inputs).pow(2).sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    fw.broadcast_optimizer_state(optimizer, root_rank=0)  # before any step as well
    assert fw.rank() == 1 or not optimizer.state or kind == "Adagrad"
    if fw.rank() == 0:
        for i in range(3):
            step(torch.full((2, 3), 0.5 + i))
    before = weights(model)
    fw.broadcast_optimizer_state(optimizer, root_rank=0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(model).items())
    fw.broadcast_parameters(model.state_dict(), root_rank=0)
    for i in range(2):
        step(torch.full((2, 3), 1.5 + i))
    return weights(model)
