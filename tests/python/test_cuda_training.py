"""Training on CUDA tensors against one process that has everybody's data, on a GPU or on its stand-in (fake_cuda),
which finds every missing wait."""

import re

import pytest
import torch
from rank_helpers import close, counted_units, data, error_of, ranks, shard, weights
from torch import nn

import fusewire as fw


def make(*devices):
    """Layers on these devices, one after the other; the same weights on every rank and in every test."""
    torch.manual_seed(3)
    layers = [nn.Linear(6, 6, dtype=torch.float64) for _ in devices]
    return nn.ModuleList(layer.to(device) for layer, device in zip(layers, devices, strict=True))


def loss_of(model, batch):
    for layer in model:
        batch = torch.tanh(layer(batch.to(layer.weight.device)))
    return batch.square().mean()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer, cut, steps=4):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, cut(data(12, 6, seed=step))).backward()
        optimizer.step()
    return weights(model)


def expected(*devices, **keywords):
    model = make(*("cpu" for _ in devices))
    return train(model, sgd(model), lambda batch: batch, **keywords)


def agrees(found, wanted, tolerance=1e-9):
    for name, value in wanted.items():
        close(found[name].cpu(), value, tolerance)


@ranks(2, 3, cuda=True)
@pytest.mark.parametrize("groups", [None, 1, 2])
@pytest.mark.parametrize("devices", [("cuda", "cuda"), ("cuda", "cpu", "cuda")], ids=["cuda", "mixed"])
def test_a_model_trains_as_one_process_would(devices, groups):
    model = make(*devices)
    optimizer = fw.DistributedOptimizer(sgd(model), model.named_parameters(), groups=groups)
    agrees(train(model, optimizer, shard), expected(*devices))
    return weights(model)


@ranks(2, cuda=True)
def test_an_explicit_group_may_mix_devices():
    model = make("cuda", "cpu")
    optimizer = fw.DistributedOptimizer(sgd(model), groups=[list(model.parameters())])
    agrees(train(model, optimizer, shard), expected("cuda", "cpu"))


@ranks(2, cuda=True)
def test_gradients_are_made_and_used_on_side_streams():
    """backward() on one stream, what follows on another one that waits only for what fusewire makes it wait for."""
    model = make("cuda", "cuda")
    optimizer = fw.DistributedOptimizer(sgd(model), model.named_parameters())
    side = torch.cuda.Stream()
    for step in range(3):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            optimizer.zero_grad()
            loss_of(model, shard(data(12, 6, seed=step))).backward()
            optimizer.step()
        torch.cuda.current_stream().wait_stream(side)
    agrees(weights(model), expected("cuda", "cuda", steps=3))


@ranks(2, cuda=True)
def test_gradients_keep_their_memory_and_leave_from_their_hooks():
    model = make("cuda", "cuda")
    optimizer = fw.DistributedOptimizer(sgd(model), model.named_parameters())
    train(model, optimizer, shard, steps=2)
    optimizer.zero_grad(set_to_none=False)
    places = [p.grad.data_ptr() for p in model.parameters()]
    with counted_units(len(places)):  # nobody has flags
        loss_of(model, shard(data(12, 6))).backward()
    assert [p.grad.data_ptr() for p in model.parameters()] == places


@ranks(2, cuda=True)
def test_a_parameter_that_one_rank_does_not_use():
    used, sometimes = (torch.ones(3, device="cuda", requires_grad=True) for _ in range(2))
    optimizer = fw.DistributedOptimizer(torch.optim.SGD([used, sometimes], 0.1))
    for _ in range(2):
        optimizer.zero_grad()
        loss = used.sum() + (2 * sometimes.sum() if fw.rank() == 0 else 0)
        loss.backward()
        assert sometimes.grad.is_cuda
        assert torch.equal(sometimes.grad.cpu(), torch.full((3,), 2.0 / fw.size()))
        assert torch.equal(used.grad.cpu(), torch.ones(3))
    optimizer.zero_grad()
    used.sum().backward()
    assert sometimes.grad is None


@ranks(2, cuda=True)
def test_several_passes_and_a_partial_window():
    model = make("cuda")
    optimizer = fw.DistributedOptimizer(sgd(model), backward_passes_per_step=2)
    for passes in (2, 2, 1):
        optimizer.zero_grad()
        for number in range(passes):
            loss_of(model, shard(data(12, 6, seed=number))).backward()
        optimizer.step()
    alone = make("cpu")
    plain = sgd(alone)
    for passes in (2, 2, 1):
        plain.zero_grad()
        for number in range(passes):
            loss_of(alone, data(12, 6, seed=number)).backward()
        plain.step()
    agrees(weights(model), weights(alone))


@ranks(2, cuda=True)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_that_is_checkpointed_twice(reentrant):
    from torch.utils.checkpoint import checkpoint

    def run(model, batch):
        for _ in range(2):
            batch = checkpoint(model[0], batch, use_reentrant=reentrant)
        return batch.square().mean()

    model, alone = make("cuda"), make("cpu")
    optimizer = fw.DistributedOptimizer(sgd(model))
    for step in range(3):
        batch = data(12, 6, seed=step)
        optimizer.zero_grad()
        alone.zero_grad()
        run(model, shard(batch).cuda().requires_grad_()).backward()
        run(alone, batch.requires_grad_()).backward()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            close(ours.grad.cpu(), theirs.grad)


@ranks(2, cuda=True)
@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(as_dense):
    torch.manual_seed(1)
    table = nn.Embedding(20, 3, sparse=True, dtype=torch.float64)
    start = table.weight.detach().clone()
    table.cuda()
    optimizer = fw.DistributedOptimizer(torch.optim.SGD(table.parameters(), 0.1), sparse_as_dense=as_dense)
    for _ in range(2):
        optimizer.zero_grad()
        rows = torch.tensor([1, 1, 2 + fw.rank()], device="cuda")
        table(rows).sum().backward()
        assert table.weight.grad.is_sparse is not as_dense
        optimizer.step()
    wanted = start.clone()
    for rank in range(fw.size()):
        wanted.index_add_(
            0, torch.tensor([1, 1, 2 + rank]), torch.full((3, 3), -2 * 0.1 / fw.size(), dtype=torch.float64)
        )
    close(table.weight.detach().cpu(), wanted)


@ranks(2, cuda=True)
@pytest.mark.parametrize("make_compressor", ["fp16", "bf16", "int8", "topk", "powersgd"])
def test_compression_gives_what_it_gives_on_the_cpu(make_compressor):
    found = {}
    for device in ("cpu", "cuda"):
        kind = getattr(fw.Compression, make_compressor)
        compression = kind if make_compressor in ("fp16", "bf16") else kind()
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(48, 40), nn.Tanh(), nn.Linear(40, 30, dtype=torch.float32)).to(device)
        optimizer = fw.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), compression=compression
        )
        for step in range(3):
            optimizer.zero_grad()
            batch = shard(data(8, 48, seed=step, dtype=torch.float32)).to(device)
            model(batch).square().sum().backward()
            optimizer.step()
        found[device] = weights(model)
    agrees(found["cuda"], found["cpu"], 1e-5)
    return found["cuda"]


@ranks(2, cuda=True)
def test_sum_says_when_gradients_were_not_reset():
    parameter = torch.ones(3, device="cuda", requires_grad=True)
    optimizer = fw.DistributedOptimizer(torch.optim.SGD([("weight", parameter)], 0.1), op=fw.Sum)
    for reset in (lambda: optimizer.zero_grad(), lambda: optimizer.zero_grad(False), lambda: parameter.grad.zero_()):
        parameter.sum().backward()
        assert torch.equal(parameter.grad.cpu(), torch.full((3,), float(fw.size())))
        torch.cuda.synchronize()
        reset()

    # The GPU says so, and nobody waits for it: it may take some steps.
    def go_on():
        for _ in range(5):
            parameter.sum().backward()
            torch.cuda.synchronize()

    assert re.search(r"weight.*reduced already", str(error_of(go_on)))
    fw.barrier()


@ranks(2, cuda=True)
def test_adasum_and_a_scaler():
    model = make("cuda")
    optimizer = fw.DistributedOptimizer(sgd(model), op=fw.Adasum)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    before = weights(model)
    for step in range(3):
        optimizer.zero_grad()
        factor = float("inf") if step == 1 and fw.rank() == 1 else 1.0
        scaler.scale(loss_of(model, shard(data(12, 6, seed=step))) * factor).backward()
        kept = weights(model)["0.weight"]
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(kept, weights(model)["0.weight"]) is (step == 1)
    assert scaler.get_scale() == 2.0
    assert not torch.equal(before["0.weight"], weights(model)["0.weight"])
    return weights(model)


@ranks(2, cuda=True)
def test_a_closure():
    model = make("cuda")
    optimizer = fw.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3))
    alone = make("cpu")
    plain = torch.optim.LBFGS(alone.parameters(), lr=0.5, max_iter=3)

    def closure(module, which, batch):
        def evaluate():
            which.zero_grad()
            loss = loss_of(module, batch)
            loss.backward()
            return loss

        return evaluate

    for step in range(2):
        batch = data(12, 6, seed=step)
        ours = optimizer.step(closure(model, optimizer, shard(batch)))
        theirs = plain.step(closure(alone, plain, batch))
        close(ours.detach().cpu(), theirs.detach())
    agrees(weights(model), weights(alone), 1e-7)


@ranks(2, cuda=True)
@pytest.mark.parametrize("kind", ["fused", "capturable", "plain"])
def test_broadcast_of_parameters_and_optimizer_state(kind):
    options = {"fused": {"fused": True}, "capturable": {"capturable": True}, "plain": {}}[kind]
    model = make("cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + fw.rank()), **options)
    if fw.rank() == 0:
        loss_of(model, data(4, 6)).backward()
        optimizer.step()
    fw.broadcast_parameters(model.state_dict())
    fw.broadcast_optimizer_state(optimizer)
    steps = [state["step"] for state in optimizer.state.values()]
    assert len(steps) == 2
    assert {step.device.type for step in steps} == ({"cpu"} if kind == "plain" else {"cuda"})
    assert all(state["exp_avg"].is_cuda for state in optimizer.state.values())
    assert optimizer.param_groups[0]["lr"] == 0.1
    return [dict(state) for state in optimizer.state.values()], weights(model)


@ranks(2, cuda=True)
def test_model_averaging():
    weighted = make("cuda", "cpu")
    model = make("cuda", "cpu")
    with torch.no_grad():
        for parameter in (*model.parameters(), *weighted.parameters()):
            parameter.mul_(1 + fw.rank())
    fw.averaging.average_parameters(model.parameters())
    fw.averaging.average_parameters(weighted.parameters(), weights=3 if fw.rank() == 0 else 1)
    for ours, other, start in zip(
        model.parameters(), weighted.parameters(), make("cpu", "cpu").parameters(), strict=True
    ):
        close(ours.detach().cpu(), start.detach() * 1.5)
        close(other.detach().cpu(), start.detach() * 1.25)


@ranks(2, cuda=True)
def test_local_sgd():
    model = make("cuda")
    optimizer = fw.averaging.LocalSGD(sgd(model), period=2, warmup_steps=1)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, shard(data(12, 6, seed=step))).backward()
        optimizer.step()
    return weights(model)  # step 3 has averaged


@ranks(2, 3, cuda=True)
def test_sync_batch_norm():
    torch.manual_seed(2)
    ours, alone = fw.SyncBatchNorm(4, dtype=torch.float64).cuda(), nn.BatchNorm2d(4, dtype=torch.float64)
    for step in range(2):
        whole = data(12, 36, seed=step).view(12, 4, 3, 3)
        mine = shard(whole).cuda().requires_grad_()
        whole.requires_grad_()
        output, wanted = ours(mine), alone(whole)
        close(output.detach().cpu(), shard(wanted.detach()))
        (output**3).sum().backward()
        (wanted**3).sum().backward()
        close(mine.grad.cpu(), shard(whole.grad))
    close(ours.running_mean.cpu(), alone.running_mean)
    close(ours.running_var.cpu(), alone.running_var)


@ranks(2, cuda=True)
def test_a_captured_backward_is_refused():
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        model = make("cuda")
        optimizer = fw.DistributedOptimizer(sgd(model))
        train(model, optimizer, shard, steps=2)
        batch = shard(data(12, 6)).cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side), pytest.raises(ValueError, match="CUDA graph is being captured"):
        loss_of(model, batch).backward()
    with torch.cuda.stream(side):
        train(model, optimizer, shard, steps=1)
        found = weights(model)
    torch.cuda.synchronize()
    return found
