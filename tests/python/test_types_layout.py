"""Logical values are reduced, whatever the strides; memory stays where it is."""

import pytest
import torch
from rank_helpers import close, data, ranks, shard

import fusewire as fw

LAYOUTS = {
    "contiguous": lambda: torch.zeros(2, 3, 4, 5),
    "transposed": lambda: torch.zeros(5, 4, 3, 2).permute(3, 2, 1, 0),
    "channels_last": lambda: torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "sliced": lambda: torch.zeros(4, 3, 9, 11)[::2, :, 1:9:2, 2:7],
    "shifted": lambda: torch.zeros(121)[1:].view(2, 3, 4, 5),
}
VALUES = torch.arange(120, dtype=torch.float32).view(2, 3, 4, 5)


def filled(layout, values):
    tensor = LAYOUTS[layout]()
    tensor.copy_(values)
    return tensor


@ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_place_results_keep_strides_and_storage(layout):
    tensor = filled(layout, VALUES * (fw.rank() + 1))
    before = (tensor.stride(), tensor.data_ptr(), tensor.storage_offset())
    assert fw.allreduce_(tensor, op=fw.Sum, name=layout) is tensor
    assert torch.equal(tensor, VALUES * 3)
    assert (tensor.stride(), tensor.data_ptr(), tensor.storage_offset()) == before
    fw.broadcast_(tensor.mul_(fw.rank()), root_rank=1, name=f"{layout}.broadcast")
    assert torch.equal(tensor, VALUES * 3)


@ranks(2)
def test_the_gaps_of_a_slice_are_not_touched():
    whole = torch.full((10, 10), 5.0)
    fw.allreduce_(whole[2:8:2, 1:9:3], op=fw.Sum, name="gaps")
    right = torch.full((10, 10), 5.0)
    right[2:8:2, 1:9:3] = 10.0
    assert torch.equal(whole, right)


@ranks(3, 5)
def test_every_rank_may_have_a_layout_of_its_own():
    names = list(LAYOUTS)
    for turn in range(len(names)):
        layout = names[(fw.rank() + turn) % len(names)]
        tensor = filled(layout, VALUES * (fw.rank() + 1))
        out = fw.allreduce(tensor, op=fw.Sum, name="own layout")
        factor = sum(range(1, fw.size() + 1))
        assert torch.equal(out, VALUES * factor), layout
        assert torch.equal(tensor, VALUES * (fw.rank() + 1))
        fw.allreduce_(tensor, op=fw.Sum, name="own layout in place")
        assert torch.equal(tensor, VALUES * factor), layout


@ranks(2)
def test_an_in_place_call_on_a_tensor_that_overlaps_itself_is_an_error():
    for tensor in (torch.ones(1).expand(5), torch.ones(10).as_strided((3, 3), (2, 1))):
        for call in (fw.allreduce_, fw.allreduce_async_):
            with pytest.raises(ValueError, match=r"memory|overlap"):
                call(tensor, name="overlap")
        with pytest.raises(ValueError, match=r"memory|overlap"):
            fw.broadcast_(tensor, root_rank=0, name="overlap")
        with pytest.raises(ValueError, match=r"memory|overlap"):
            fw.grouped_allreduce_([torch.ones(2), tensor], name="overlap")
        out = fw.allreduce(tensor, op=fw.Sum, name="overlap")  # out of place it is an ordinary tensor
        assert torch.equal(out, torch.full(tensor.shape, 2.0))


def train_with_layouts(layouts, shape):
    """One backward into a `.grad` of a given layout; the reduced gradient and what must not have changed."""
    parameter = torch.nn.Parameter(torch.ones(shape, dtype=torch.float64))
    grad = layouts[fw.rank()]()
    assert grad.shape == shape
    parameter.grad = grad
    before = (grad.stride(), grad.data_ptr())
    optimizer = fw.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1))
    x = data(4, parameter.numel(), seed=3)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        (shard(x) @ parameter.reshape(-1)).pow(2).mean().backward()
        assert parameter.grad is grad
        assert (grad.stride(), grad.data_ptr()) == before
        alone = parameter.detach().clone().requires_grad_()
        (x @ alone.reshape(-1)).pow(2).mean().backward()
        close(grad, alone.grad)
        optimizer.step()
    return parameter.detach()


@ranks(2)
def test_gradients_of_any_layout_are_reduced_where_they_lie():
    d = torch.float64
    matrix = [
        lambda: torch.zeros(6, 4, dtype=d),
        lambda: torch.zeros(4, 6, dtype=d).t(),
        lambda: torch.zeros(6, 8, dtype=d)[:, ::2],
        lambda: torch.zeros(12, 5, dtype=d)[::2, 1:],
    ]
    results = [train_with_layouts([one, one], (6, 4)) for one in matrix]
    results += [train_with_layouts([a, b], (6, 4)) for a in matrix for b in matrix if a is not b]
    for other in results[1:]:
        close(other, results[0])
    return results


@ranks(2)
def test_channels_last_gradients_of_a_convolution():
    torch.manual_seed(1)
    models = [torch.nn.Conv2d(3, 4, 3).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    model = models[0].to(memory_format=torch.channels_last)
    optimizer = fw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    mine = shard(images)
    if fw.rank() == 0:
        mine = mine.contiguous(memory_format=torch.channels_last)
    pointers = None
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        model(mine).pow(2).mean().backward()
        models[1].zero_grad()
        models[1](images).pow(2).mean().backward()
        close(model.weight.grad, models[1].weight.grad)
        assert model.weight.grad.stride() == model.weight.stride()
        pointers = pointers or [p.grad.data_ptr() for p in model.parameters()]
        assert pointers == [p.grad.data_ptr() for p in model.parameters()]
    return model.weight.grad


@ranks(2)
def test_a_gradient_that_overlaps_itself_becomes_dense():
    """Rank 0's stale, expanded gradient counts with its value and is replaced by a dense one."""
    parameter = torch.nn.Parameter(torch.zeros(4, 3))
    optimizer = fw.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    if fw.rank() == 0:
        parameter.grad = torch.full((1, 1), 6.0).expand(4, 3)
    else:
        (parameter.sum() * 2).backward()
    optimizer.step()
    assert parameter.grad.is_contiguous()
    assert parameter.grad.tolist() == [[4.0] * 3] * 4
    assert parameter.tolist() == [[-4.0] * 3] * 4
    return parameter.grad
