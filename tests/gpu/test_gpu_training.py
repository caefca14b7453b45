"""Models on a GPU, trained by several ranks: what one process with the whole batch would have."""

import pytest
import torch
from rank_helpers import close, data, ranks, shard, weights
from torch import nn

import fusewire as fw

several = ranks(1, 2, cuda=True)
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
}
COMPRESSORS = {
    "int8": lambda: fw.Compression.int8(min_numel=8),
    "powersgd": lambda: fw.Compression.powersgd(rank=2),
    "topk": lambda: fw.Compression.topk(0.25, min_numel=8),
}


def model(dtype=torch.float64):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)).to("cuda", dtype)


def batch(turn, dtype=torch.float64):
    return data(8, 8, seed=turn, dtype=dtype).to("cuda"), data(8, 2, seed=100 + turn, dtype=dtype).to("cuda")


def train(net, optimizer, turns=4, mine=lambda t: t, dtype=torch.float64, batches=100):
    for turn in range(turns):
        inputs, targets = batch(turn % batches, dtype)
        optimizer.zero_grad()
        (net(mine(inputs)) - mine(targets)).square().mean().backward()
        optimizer.step()
    return weights(net)


@several
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_distributed_optimizer(name):
    alone = model()
    expected = train(alone, OPTIMIZERS[name](alone.parameters()))
    net = model()
    optimizer = fw.DistributedOptimizer(OPTIMIZERS[name](net.parameters()), net.named_parameters())
    result = train(net, optimizer, mine=shard)
    for key in expected:
        assert result[key].is_cuda
        close(result[key], expected[key])
    return result


@several
def test_gradients_are_final_after_backward():
    """Clipping reads them on the host and on the device."""
    net = model()
    optimizer = fw.DistributedOptimizer(OPTIMIZERS["SGD"](net.parameters()), net.named_parameters())
    inputs, targets = batch(0)
    (net(shard(inputs)) - shard(targets)).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    alone = model()
    (alone(inputs) - targets).square().mean().backward()
    close(norm, nn.utils.clip_grad_norm_(alone.parameters(), 0.01))
    optimizer.step()
    return weights(net)


@several
def test_several_passes_per_step():
    net = model()
    optimizer = fw.DistributedOptimizer(
        OPTIMIZERS["SGD"](net.parameters()), net.named_parameters(), backward_passes_per_step=2
    )
    for turn in range(4):
        inputs, targets = batch(turn)
        (net(shard(inputs)) - shard(targets)).square().mean().backward()
        if turn % 2:
            optimizer.step()
            optimizer.zero_grad()
    return weights(net)


@several
def test_mixed_precision():
    net = model(torch.float32)
    optimizer = fw.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    scaler = torch.amp.GradScaler("cuda", init_scale=256)
    for turn in range(4):
        inputs, targets = batch(turn, torch.float32)
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = (net(shard(inputs)).float() - shard(targets)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return weights(net)


@several
@pytest.mark.parametrize("kind", COMPRESSORS)
def test_compressed_gradients(kind):
    net = model(torch.float32)
    optimizer = fw.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.05), net.named_parameters(), compression=COMPRESSORS[kind]()
    )
    before = loss_of(net)
    result = train(net, optimizer, turns=20, mine=shard, dtype=torch.float32, batches=1)
    assert loss_of(net) < before
    return result


def loss_of(net):
    inputs, targets = batch(0, torch.float32)
    with torch.no_grad():
        return (net(inputs) - targets).square().mean().item()


@several
def test_adasum_optimizer():
    net = model(torch.float32)
    optimizer = fw.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.05), net.named_parameters(), op=fw.Adasum
    )
    before = loss_of(net)
    result = train(net, optimizer, turns=10, mine=shard, dtype=torch.float32, batches=1)
    assert loss_of(net) < before
    return result


@several
def test_a_model_on_two_devices():
    """Some layers on the CPU, others on the GPU."""

    def build():
        net = model()
        net[4].to("cpu")
        return net

    def forward(net, inputs):
        return net[4](net[:4](inputs).cpu()).to("cuda")

    results = []
    for distributed in (False, True):
        net = build()
        optimizer = OPTIMIZERS["SGD"](net.parameters())
        if distributed:
            optimizer = fw.DistributedOptimizer(optimizer, net.named_parameters())
        part = shard if distributed else (lambda t: t)
        for turn in range(3):
            inputs, targets = batch(turn)
            optimizer.zero_grad()
            (forward(net, part(inputs)) - part(targets)).square().mean().backward()
            optimizer.step()
        results.append(weights(net))
    for key, value in results[0].items():
        close(results[1][key], value)
    return results[1]


@several
def test_sparse_embeddings():
    torch.manual_seed(2)
    table = nn.Embedding(20, 4, sparse=True, device="cuda")
    optimizer = fw.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters())
    before = table.weight.detach().clone()
    rows = torch.tensor([[1, 2], [2, 3]], device="cuda")[fw.rank() % 2]
    table(rows).sum().backward()
    optimizer.step()
    change = (before - table.weight.detach())[:, 0].tolist()
    expected = [0.0] * 20
    for r in range(fw.size()):
        for row in ((1, 2), (2, 3))[r % 2]:
            expected[row] += 1 / fw.size()
    close(torch.tensor(change), torch.tensor(expected), 1e-6)
    return weights(table)


@several
def test_gradients_from_side_streams():
    """A part of the backward runs on another stream, as its forward did."""
    net, side = model(), torch.cuda.Stream()
    optimizer = fw.DistributedOptimizer(OPTIMIZERS["SGD"](net.parameters()), net.named_parameters())
    for turn in range(3):
        inputs, targets = batch(turn)
        optimizer.zero_grad()
        hidden = net[:2](shard(inputs))
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            output = net[2:](hidden)
        hidden.record_stream(side)
        torch.cuda.current_stream().wait_stream(side)
        output.record_stream(torch.cuda.current_stream())
        (output - shard(targets)).square().mean().backward()
        optimizer.step()
    return weights(net)


@several
def test_states_are_broadcast():
    torch.manual_seed(fw.rank())
    net = nn.Linear(5, 5, device="cuda")
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 5, device="cuda")).sum().backward()
    optimizer.step()
    fw.broadcast_parameters(net.state_dict(), root_rank=0)
    fw.broadcast_optimizer_state(optimizer, root_rank=0)
    return [weights(net), {str(k): v["exp_avg"] for k, v in optimizer.state_dict()["state"].items()}]


@several
def test_averagers():
    averager = fw.PeriodicModelAverager(period=1)
    net = model()
    for turn in range(3):
        with torch.no_grad():
            for p in net.parameters():
                p.add_(fw.rank() + turn)
        averager.average_parameters(net.parameters())
    return weights(net)


@several
def test_local_sgd():
    net = model()
    optimizer = fw.LocalSGD(OPTIMIZERS["SGD"](net.parameters()), model=net, period=1)
    train(net, optimizer, turns=4, mine=shard)
    return weights(net)


@several
def test_sync_batch_norm():
    torch.manual_seed(1)
    ordinary, synced = nn.BatchNorm2d(3).to("cuda", torch.float64), fw.SyncBatchNorm(3).to("cuda", torch.float64)
    x = data(8, 3 * 16).view(8, 3, 4, 4).to("cuda")
    slope = data(8, 3 * 16, seed=9).view(8, 3, 4, 4).to("cuda")
    mine, whole = shard(x).clone().requires_grad_(), x.clone().requires_grad_()
    out, right = synced(mine), ordinary(whole)
    close(out, shard(right))
    out.backward(shard(slope))
    right.backward(slope)
    close(mine.grad, shard(whole.grad))
    close(synced.running_var, ordinary.running_var)
