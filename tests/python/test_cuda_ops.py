"""Collectives on CUDA tensors, on a GPU or on its stand-in (fake_cuda), which finds every missing wait."""

import pytest
import torch
from rank_helpers import ranks

import fusewire as fw

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def values(*shape, dtype=torch.float32, rank=None):
    """The same numbers on the CPU wherever it is asked for, different ones per rank."""
    generator = torch.Generator().manual_seed(17 + (fw.rank() if rank is None else rank))
    return torch.randint(0, 9, shape, generator=generator).to(dtype)


def of_all(*shape, dtype=torch.float32):
    return [values(*shape, dtype=dtype, rank=rank) for rank in range(fw.size())]


@ranks(2, 3, cuda=True)
@pytest.mark.parametrize("dtype", DTYPES)
def test_allreduce_has_the_bits_of_the_cpu(dtype):
    mine = values(5, 7, dtype=dtype)
    result = fw.allreduce(mine.cuda(), op=fw.Sum)
    assert result.is_cuda
    assert torch.equal(result.cpu(), fw.allreduce(mine, op=fw.Sum))
    return result


@ranks(2, cuda=True)
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_allreduce_scales_and_compresses(compression):
    mine = values(1000) / 7
    options = {"compression": getattr(fw.Compression, compression), "prescale_factor": 0.5, "postscale_factor": 3.0}
    result = fw.allreduce(mine.cuda(), **options)
    assert torch.equal(result.cpu(), fw.allreduce(mine, **options))
    return result


@ranks(2, cuda=True)
def test_results_are_waited_for_by_the_current_stream_of_the_caller():
    """What comes before is on one stream, what comes after on another: the stand-in sees a wait that is missing."""
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(producer):
        mine = values(4096).cuda() * 2
        handle = fw.allreduce_async(mine, op=fw.Sum)
        in_place = values(33).cuda() + 1
        other = fw.allreduce_async_(in_place, op=fw.Sum)
    with torch.cuda.stream(consumer):
        result = fw.synchronize(handle) + 1
        assert fw.synchronize(other) is in_place
        plus = in_place - 1
    torch.cuda.synchronize()
    assert torch.equal(result.cpu(), 2 * sum(of_all(4096)) + 1)
    assert torch.equal(plus.cpu(), sum(of_all(33)) + fw.size() - 1)
    assert fw.poll(handle)


@ranks(2, cuda=True)
def test_a_handle_is_done_when_the_gpu_is():
    handle = fw.allreduce_async(torch.ones(8, device="cuda"))
    fw.synchronize(handle)
    torch.cuda.synchronize()
    assert fw.poll(handle)
    assert handle.done()


@ranks(2, cuda=True)
def test_a_group_may_mix_devices():
    pair = [values(10).cuda(), values(3, 2), values(4, dtype=torch.int32).cuda()]
    results = fw.grouped_allreduce(pair, op=fw.Sum)
    assert [tensor.device.type for tensor in results] == ["cuda", "cpu", "cuda"]
    expected = fw.grouped_allreduce([tensor.cpu() for tensor in pair], op=fw.Sum)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(results, expected, strict=True))


@ranks(2, 3, cuda=True)
def test_broadcast():
    mine = values(6, 5).cuda()
    result = fw.broadcast(mine, root_rank=1)
    assert torch.equal(result.cpu(), values(6, 5, rank=1))
    assert torch.equal(mine.cpu(), values(6, 5))
    assert fw.broadcast_(mine, root_rank=0) is mine
    assert torch.equal(mine.cpu(), values(6, 5, rank=0))


@ranks(2, 3, cuda=True)
def test_allgather_of_different_rows_on_a_side_stream():
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        rows, flags = fw.grouped_allgather([values(fw.rank() + 1, 3).cuda(), values(2, dtype=torch.bool).cuda()])
        twice = rows * 2
    torch.cuda.synchronize()
    assert rows.is_cuda
    assert flags.is_cuda
    assert torch.equal(twice.cpu(), 2 * torch.cat([values(rank + 1, 3, rank=rank) for rank in range(fw.size())]))
    assert torch.equal(flags.cpu(), torch.cat(of_all(2, dtype=torch.bool)))
    return rows


@ranks(2, cuda=True)
def test_memory_of_gathered_results_is_used_again_only_in_order():
    """Results are allocated on the engine's stream and used on the caller's: freeing them must wait for both."""
    for _ in range(5):
        gathered = fw.allgather(values(300).cuda())
        used = gathered * 3
        del gathered
        torch.cuda.current_stream().synchronize()
        assert torch.equal(used.cpu(), 3 * torch.cat(of_all(300)))


@ranks(2, 3, cuda=True)
def test_alltoall_with_splits():
    size, rank = fw.size(), fw.rank()
    splits = [(rank + member) % 3 for member in range(size)]
    mine = values(sum(splits), 2).cuda()
    output, received = fw.alltoall(mine, splits=torch.tensor(splits))
    assert output.is_cuda
    assert received.device.type == "cpu"
    expected, counts = fw.alltoall(mine.cpu(), splits=splits)
    assert torch.equal(output.cpu(), expected)
    assert torch.equal(received, counts)


@ranks(2, 3, cuda=True)
def test_reducescatter():
    mine = values(7, 3)
    result = fw.reducescatter(mine.cuda(), op=fw.Sum)
    assert result.is_cuda
    assert torch.equal(result.cpu(), fw.reducescatter(mine, op=fw.Sum))


@ranks(2, 3, cuda=True)
def test_adasum():
    mine = values(129) + 0.5
    assert torch.equal(fw.allreduce(mine.cuda(), op=fw.Adasum).cpu(), fw.allreduce(mine, op=fw.Adasum))


@ranks(2, cuda=True)
@pytest.mark.parametrize("strided", [lambda t: t.t(), lambda t: t[::2], lambda t: t[:, 1:3]], ids=["t", "rows", "cut"])
def test_strided_tensors_keep_their_layout_in_place(strided):
    whole = values(6, 4).cuda()
    view = strided(whole)
    expected = fw.allreduce(view.cpu().contiguous(), op=fw.Sum)
    strides, pointer = view.stride(), view.data_ptr()
    fw.allreduce_(view, op=fw.Sum)
    assert (view.stride(), view.data_ptr()) == (strides, pointer)
    assert torch.equal(view.cpu(), expected)


@ranks(2, cuda=True)
def test_conjugated_views():
    mine = torch.complex(values(5), values(5) + 1).cuda().conj()
    expected = fw.allreduce(mine.cpu().resolve_conj(), op=fw.Sum)
    assert torch.equal(fw.allreduce(mine, op=fw.Sum).cpu(), expected)
    fw.allreduce_(mine, op=fw.Sum)
    assert torch.equal(mine.cpu().resolve_conj(), expected)


@ranks(2, cuda=True)
def test_gradients_go_through_collectives():
    mine = values(4).cuda().requires_grad_()
    (fw.allreduce(mine, op=fw.Sum).sum() + fw.allgather(mine).sum() + fw.broadcast(mine, 0).sum()).backward()
    expected = 2.0 * fw.size() + (fw.size() if fw.rank() == 0 else 0)
    assert torch.equal(mine.grad.cpu(), torch.full((4,), expected))


@ranks(2, cuda=True)
def test_sparse_tensors():
    indices = torch.tensor([[0, 2, 2]]) + fw.rank()
    mine = torch.sparse_coo_tensor(indices, values(3, 2), (5, 2))
    result = fw.synchronize(fw.sparse_allreduce_async(mine.cuda(), None, fw.Sum))
    expected = fw.synchronize(fw.sparse_allreduce_async(mine, None, fw.Sum))
    assert result.is_cuda
    assert torch.equal(result.to_dense().cpu(), expected.to_dense())


@ranks(2, cuda=True, fresh=True)
def test_a_rank_that_joins_without_a_gpu_in_use_takes_part():
    if fw.rank() == 0:
        assert torch.equal(fw.allreduce(torch.ones(3, device="cuda"), op=fw.Sum).cpu(), torch.ones(3))
        assert torch.equal(fw.allgather(torch.ones(2, device="cuda")).cpu(), torch.ones(2))
    assert fw.join() == 0 or fw.rank() >= 0
    fw.barrier()


@ranks(2, cuda=True)
def test_objects_stay_on_the_cpu_whatever_the_default_device():
    torch.set_default_device("cuda")
    try:
        assert fw.allgather_object({"rank": fw.rank()}) == [{"rank": rank} for rank in range(fw.size())]
        assert fw.broadcast_object(fw.rank(), root_rank=1) == 1
    finally:
        torch.set_default_device(None)


@ranks(2, cuda=True)
def test_a_captured_stream_is_refused_with_a_reason():
    tensor = torch.ones(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(ValueError, match="CUDA graph is being captured"):
        fw.allreduce_(tensor)
    assert torch.equal(fw.allreduce(tensor, op=fw.Sum).cpu(), torch.full((3,), float(fw.size())))


@ranks(2, cuda=True, fresh=True)
def test_a_rank_uses_one_gpu():
    if torch.cuda.device_count() < 2:
        return
    fw.allreduce(torch.ones(3, device="cuda:0"))
    with pytest.raises(ValueError, match=r"cuda:1.*cuda:0"):
        fw.allreduce(torch.ones(3, device="cuda:1"))
    with pytest.raises(ValueError, match=r"cuda:1.*cuda:0"):
        fw.DistributedOptimizer(torch.optim.SGD([torch.ones(3, device="cuda:1", requires_grad=True)], 0.1))
    fw.barrier()


@ranks(2, cuda=True)
def test_devices_that_differ_are_named():
    tensor = torch.ones(3, device="cuda" if fw.rank() == 0 else "cpu")
    with pytest.raises(fw.TensorMismatchError, match="device"):
        fw.allreduce(tensor, name="mixed")
