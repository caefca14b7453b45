"""CUDA tensors through all collectives: values, streams, memory. On a real GPU all ranks share one."""

import pytest
import torch
from collective_cases import LAYOUTS, numbers
from gpu_helpers import REAL, SCALE
from rank_helpers import error_of, ranks

import fusewire as fw

sizes = ranks(1, 2, 4, cuda=True)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8]


def of(rank, *shape, dtype=torch.float32):
    """What `rank` contributes, on the GPU."""
    return numbers(rank, *shape, dtype=dtype).to("cuda")


def all_of(*shape, dtype=torch.float32):
    return torch.stack([of(r, *shape, dtype=dtype) for r in range(fw.size())])


@sizes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_allreduce(dtype):
    mine, everybodys = of(fw.rank(), 1000, dtype=dtype), all_of(1000, dtype=dtype)
    before = mine.clone()
    total = fw.allreduce(mine, op=fw.Sum)
    assert total.device == mine.device
    assert torch.equal(total, everybodys.sum(0, dtype=torch.float64).to(dtype))
    assert torch.equal(mine, before)
    assert torch.equal(fw.allreduce(mine, op=fw.Max), everybodys.amax(0))
    assert fw.allreduce_(mine, op=fw.Min) is mine
    assert torch.equal(mine, everybodys.amin(0))
    return total


@sizes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    mine = LAYOUTS[layout](of(fw.rank(), 20, 30))
    total = fw.allreduce(mine, op=fw.Sum)
    torch.testing.assert_close(total, sum(LAYOUTS[layout](t) for t in all_of(20, 30)))
    return total


@sizes
def test_large_tensors_and_many_small_ones():
    shapes = [(20_000_000 // SCALE,), *((n,) for n in range(1, 200)), (3_000_001 // SCALE,), (0,), ()]
    mine = [of(fw.rank(), *shape) for shape in shapes]
    handles = [fw.allreduce_async_(tensor, op=fw.Sum, name=f"many.{i}") for i, tensor in enumerate(mine)]
    for handle, shape in zip(handles, shapes, strict=True):
        assert torch.equal(fw.synchronize(handle), all_of(*shape).sum(0))
    group = fw.grouped_allreduce([of(fw.rank(), *shape) for shape in shapes[1:50]], op=fw.Average)
    for tensor, shape in zip(group, shapes[1:50], strict=True):
        torch.testing.assert_close(tensor, all_of(*shape).mean(0))
    return [*mine, *group]


@sizes
@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_narrow_on_the_wire(compression):
    mean = fw.allreduce(of(fw.rank(), 5000), compression=getattr(fw.Compression, compression))
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean, all_of(5000).mean(0), rtol=0.01, atol=0.01)
    return mean


@sizes
def test_broadcast():
    root = fw.size() - 1
    tensor = of(fw.rank(), 7, 1000)
    assert torch.equal(fw.broadcast(tensor, root), of(root, 7, 1000))
    fw.broadcast_(tensor, root)
    assert torch.equal(tensor, of(root, 7, 1000))
    return tensor


@sizes
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
def test_allgather(dtype):
    rows = [3 + 2 * r for r in range(fw.size())]
    result = fw.allgather(of(fw.rank(), rows[fw.rank()], 5, dtype=dtype))
    assert result.is_cuda
    assert torch.equal(result, torch.cat([of(r, n, 5, dtype=dtype) for r, n in enumerate(rows)]))
    return result


@sizes
def test_alltoall():
    splits = [[(r + s) % 3 for s in range(fw.size())] for r in range(fw.size())]
    inputs = [of(r, sum(splits[r]), 4) for r in range(fw.size())]
    result, received = fw.alltoall(inputs[fw.rank()], splits[fw.rank()])
    assert torch.equal(result, torch.cat([t.split(s)[fw.rank()] for t, s in zip(inputs, splits, strict=True)]))
    assert received.tolist() == [s[fw.rank()] for s in splits]


@sizes
def test_reducescatter():
    rows = 2 * fw.size() + 1
    result = fw.reducescatter(of(fw.rank(), rows, 3), op=fw.Sum)
    assert torch.equal(result, all_of(rows, 3).sum(0).tensor_split(fw.size())[fw.rank()])


@sizes
def test_adasum():
    mine, everybodys = of(fw.rank(), 2000), all_of(2000)
    result = fw.allreduce(mine, op=fw.Adasum)
    on_cpu = fw.allreduce(mine.cpu(), op=fw.Adasum)
    torch.testing.assert_close(result.cpu(), on_cpu, rtol=1e-5, atol=1e-4)
    same = everybodys[0].clone()
    torch.testing.assert_close(fw.allreduce(same, op=fw.Adasum), same)  # of equal vectors it is the vector
    return result


@sizes
def test_gradients_pass_through():
    x = of(fw.rank(), 10).requires_grad_()
    fw.allreduce(x, op=fw.Sum).sum().backward()
    assert x.grad.eq(fw.size()).all()
    y = of(fw.rank(), 4, 3).requires_grad_()
    fw.allgather(y).square().sum().backward()
    torch.testing.assert_close(y.grad, 2 * fw.size() * y.detach())


@sizes
def test_cpu_and_cuda_tensors_together():
    handles = []
    for i in range(20):
        tensor = numbers(fw.rank(), 100 + i)
        handles.append(fw.allreduce_async(tensor.to("cuda" if i % 3 else "cpu"), op=fw.Sum, name=f"mixed.{i}"))
    for i, handle in enumerate(handles):
        result = handle.wait()
        assert result.is_cuda == bool(i % 3)
        assert torch.equal(result.cpu(), sum(numbers(r, 100 + i) for r in range(fw.size())))


@ranks(2, cuda=True)
def test_ranks_that_differ_in_device_are_told():
    tensor = torch.ones(4, device="cuda" if fw.rank() else "cpu")
    error = error_of(fw.allreduce, tensor, name="where")
    assert isinstance(error, fw.TensorMismatchError)
    assert "cuda" in str(error)


@ranks(2, 4, cuda=True)
def test_a_process_set():
    members = fw.ProcessSet([0, fw.size() - 1])
    fw.add_process_set(members)
    if members.included():
        result = fw.allreduce(of(fw.rank(), 500), op=fw.Sum, process_set=members)
        assert torch.equal(result, of(0, 500) + of(fw.size() - 1, 500))
    fw.remove_process_set(members)


# ---- streams and memory ----


@sizes
def test_side_streams():
    """Made on one stream, reduced, used on another: whoever waits for the handle waits on its own stream."""
    makers, users = [torch.cuda.Stream() for _ in range(2)], [torch.cuda.Stream() for _ in range(2)]
    results = []
    for turn in range(6):
        maker, user = makers[turn % 2], users[turn % 2]
        with torch.cuda.stream(maker):
            tensor = torch.full((100_000 // SCALE,), float(fw.rank() + turn), device="cuda")
            for _ in range(20):
                tensor = tensor + 1
            handle = fw.allreduce_async(tensor, op=fw.Sum, name=f"side.{turn}")
            del tensor
        with torch.cuda.stream(user):
            result = handle.wait()
            results.append(result * 2)
            result.record_stream(user)  # it was allocated on the maker's
    for stream in users:
        torch.cuda.current_stream().wait_stream(stream)
    for turn, result in enumerate(results):
        assert result.eq(2 * sum(r + turn + 20 for r in range(fw.size()))).all()
        result.record_stream(torch.cuda.current_stream())


@sizes
def test_memory_is_kept_while_it_is_in_use():
    """The input goes, and its memory is given to others, while the collective has not begun."""
    handles = []
    for turn in range(10):
        tensor = torch.full((200_000 // SCALE,), float(turn), device="cuda")
        handles.append(fw.allreduce_async(tensor, op=fw.Sum, name=f"kept.{turn}"))
        del tensor
        torch.full((200_000 // SCALE,), -1.0, device="cuda")  # takes freed memory, if there is any
    for turn, handle in enumerate(handles):
        assert handle.wait().eq(turn * fw.size()).all()


@sizes
def test_a_handle_that_nobody_waits_for():
    tensor = of(fw.rank(), 1000)
    for turn in range(5):
        fw.allreduce_async_(tensor, op=fw.Average, name=f"forgotten.{turn}")
    fw.barrier()
    torch.cuda.synchronize()


@sizes
def test_poll():
    handle = fw.allreduce_async(of(fw.rank(), 1000), op=fw.Sum)
    result = fw.synchronize(handle)
    assert fw.poll(handle)
    assert torch.equal(result, all_of(1000).sum(0))


@sizes
def test_while_a_graph_is_captured_it_is_refused():
    tensor = torch.ones(10, device="cuda")
    fw.allreduce(tensor)  # whatever is made on first use is there
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        error = error_of(fw.allreduce_, tensor)
    assert isinstance(error, ValueError)
    assert "graph" in str(error)
    assert fw.allreduce(tensor, op=fw.Sum).eq(fw.size()).all()  # and all is well after it


@ranks(2, cuda=True, fresh=True)
@pytest.mark.skipif(REAL and torch.cuda.device_count() < 2, reason="one GPU")
def test_another_gpu_is_refused():
    fw.allreduce(torch.ones(3, device="cuda:0"))
    error = error_of(fw.allreduce, torch.ones(3, device="cuda:1"))
    assert isinstance(error, ValueError)
    assert "0" in str(error)
    assert "1" in str(error)
    fw.barrier()
