"""The stand-in for torch's CUDA device (fake_cuda): ordinary training code runs on it, with the CPU's numbers."""

import copy
import io

import pytest
import torch
from rank_helpers import ranks
from torch import nn

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a real GPU")

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "Adam": torch.optim.Adam,
    "Adam, one by one": lambda p: torch.optim.Adam(p, foreach=False),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
}


def train(device, optimizer, steps=4):
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Linear(16, 3)
    ).to(device)
    optimizer = optimizer(model.parameters())
    inputs, labels = torch.randn(32, 8).to(device), torch.randint(0, 3, (32,)).to(device)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


@ranks(1, cuda=True)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_trains_to_the_same_bits(name):
    on_cpu, on_cuda = train("cpu", OPTIMIZERS[name]), train("cuda", OPTIMIZERS[name])
    assert all(p.is_cuda and p.grad.is_cuda for p in on_cuda.parameters())
    assert all(torch.equal(a, b.cpu()) for a, b in zip(on_cpu.parameters(), on_cuda.parameters(), strict=True))


@ranks(1, cuda=True)
def test_mixed_precision():
    model = nn.Linear(3, 3).to("cuda")
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cuda", init_scale=1024)
    with torch.autocast("cuda"):
        output = model(torch.ones(2, 3, device="cuda"))
    assert output.dtype == torch.float16
    scaler.scale(output.float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scaler.scale(model(torch.full((2, 3), torch.inf, device="cuda")).sum()).backward()
    before = model.weight.clone()
    scaler.step(optimizer)
    scaler.update()
    assert model.weight.equal(before)  # skipped
    assert scaler.get_scale() == 512


@ranks(1, cuda=True)
def test_sparse_gradients():
    embedding = nn.Embedding(10, 4, sparse=True, device="cuda")
    embedding(torch.tensor([1, 2, 2], device="cuda")).sum().backward()
    gradient = embedding.weight.grad
    assert gradient.is_sparse
    assert gradient.is_cuda
    assert gradient._nnz() == 3
    assert gradient.coalesce().values()[:, 0].tolist() == [1, 2]
    before = embedding.weight.detach().clone()
    torch.optim.SGD(embedding.parameters(), 1.0).step()
    assert torch.equal(embedding.weight[2], before[2] - 2)


@ranks(1, cuda=True)
def test_memory_and_views():
    base = torch.arange(12.0, device="cuda").reshape(3, 4)
    row, turned = base[1], base.t()
    base += 1
    assert row.tolist() == [5, 6, 7, 8]
    assert turned.data_ptr() == base.data_ptr()
    out = torch.empty(0, device="cuda")
    assert torch.add(row, 1, out=out) is out
    assert out.tolist() == [6, 7, 8, 9]
    out.data = row
    out.zero_()
    assert base.sum().item() == 78 - 26
    saved = io.BytesIO()
    torch.save(base, saved)
    saved.seek(0)
    assert torch.load(saved).equal(base)
    assert copy.deepcopy(base).equal(base)
    assert torch.ones(2, pin_memory=True).is_pinned()
    other = base.to("cuda:1")
    assert other.device.index == 1
    assert other.to("cuda:0").equal(base)


@ranks(1, cuda=True)
def test_a_missing_wait_is_found():
    import fake_cuda

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        made = torch.ones(3, device="cuda")
    right = torch.empty(3, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
    right.copy_(made)
    assert not fake_cuda.new_mistakes()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made += 1
    right.copy_(made)  # without a wait: the copy reads what side may not have written yet
    assert "aten::copy_ reads what aten::add_ writes" in fake_cuda.new_mistakes()[0]
    torch.cuda.synchronize()


@ranks(1, cuda=True)
def test_memory_that_is_freed_while_in_use_is_found():
    import fake_cuda

    side = torch.cuda.Stream()
    for told in (True, False):
        kept, result = torch.ones(3, device="cuda"), torch.empty(3, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            result.copy_(kept)
        if told:
            kept.record_stream(side)
        del kept
        torch.cuda.current_stream().wait_stream(side)
        found = fake_cuda.new_mistakes()
        assert bool(found) is not told, found


@ranks(1, cuda=True)
def test_a_stream_says_that_a_graph_is_captured():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
    assert not torch.cuda.is_current_stream_capturing()
