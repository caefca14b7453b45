"""torch.amp.GradScaler: an infinity on one rank is everybody's."""

import pytest
import torch
from rank_helpers import close, data, ranks, shard, weights

import fusewire as fw


def make_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))


def make_scaler():
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)


def iterate(model, optimizer, scaler, batch, clip, bad=False, passes=1):
    optimizer.zero_grad()
    for part in batch.chunk(passes):
        loss = model(part).pow(2).mean() / passes
        if bad:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
    if clip:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    scaler.step(optimizer)
    scaler.update()


@ranks(2)
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_an_infinite_loss_on_one_rank_is_skipped_by_all(clip, fused):
    """Scales stay equal, weights too, and the next iteration trains; as one process on the whole batch."""
    model, alone = make_model(), make_model()

    def sgd(m):
        return torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=fused)

    optimizer, plain = fw.DistributedOptimizer(sgd(model), model.named_parameters()), sgd(alone)
    scaler, plain_scaler = make_scaler(), make_scaler()
    scales = []
    for turn in range(6):
        batch = data(8, 4, seed=turn, dtype=torch.float32)
        bad = turn in (1, 4)
        before = weights(model)
        iterate(model, optimizer, scaler, shard(batch), clip, bad=bad and fw.rank() == 1)
        iterate(alone, plain, plain_scaler, batch, clip, bad=bad)
        moved = any(not torch.equal(weight, before[name]) for name, weight in weights(model).items())
        assert moved is not bad, turn
        scales.append(scaler.get_scale())
        for p, right in zip(model.parameters(), alone.parameters(), strict=True):
            close(p, right, 1e-5)
    assert scaler.get_scale() == plain_scaler.get_scale()
    return [weights(model), scales]


@ranks(2)
def test_nan_and_overflow_on_one_rank_under_compression():
    """The value overflows only in the 16 bits of the wire; all ranks see it."""
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = fw.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), compression=fw.Compression.fp16)
    scaler = make_scaler()
    scaler.scale((p * (1e4 if fw.rank() else 1.0)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not p.any()
    assert scaler.get_scale() == 512.0
    return [p, scaler.get_scale()]


@ranks(2)
@pytest.mark.parametrize("clip", [False, True])
def test_a_scaler_with_several_passes_per_step(clip):
    model, alone = make_model(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fw.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=2)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    scaler, plain_scaler = make_scaler(), make_scaler()
    for turn in range(3):
        batches = data(8, 4, seed=turn, dtype=torch.float32), data(8, 4, seed=turn + 50, dtype=torch.float32)
        iterate(model, optimizer, scaler, torch.cat([shard(b) for b in batches]), clip, turn == 1 and fw.rank() == 0, 2)
        iterate(alone, plain, plain_scaler, torch.cat(batches), clip, turn == 1, 2)
        for p, right in zip(model.parameters(), alone.parameters(), strict=True):
            close(p, right, 1e-5)
    return [weights(model), scaler.get_scale()]


@ranks(2)
def test_a_partial_window_with_synchronize_before_the_scaler():
    """The documented form: opt.synchronize() first, because GradScaler looks at the gradients before step."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fw.DistributedOptimizer(optimizer, model.named_parameters(), backward_passes_per_step=4)
    scaler = make_scaler()
    for turn in range(3):
        before = weights(model)
        optimizer.zero_grad()
        bad = turn == 1 and fw.rank() == 1
        loss = model(data(4, 4, seed=turn + 10 * fw.rank(), dtype=torch.float32)).pow(2).mean()
        scaler.scale(loss * float("inf") if bad else loss).backward()
        optimizer.synchronize()
        scaler.step(optimizer)
        scaler.update()
        moved = not torch.equal(model[0].weight, before["0.weight"])
        assert moved is (turn != 1)
    return [weights(model), scaler.get_scale()]


@ranks(2)
def test_autocast():
    model = make_model()
    optimizer = fw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    scaler = make_scaler()
    for turn in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(data(4, 4, seed=turn + 10 * fw.rank(), dtype=torch.float32)).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert torch.isfinite(model[0].weight).all()
    return weights(model)
