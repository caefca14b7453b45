"""sparse_allreduce_async: the same as dense, whatever each rank has."""

import pytest
import torch
from rank_helpers import ranks

import fusewire as fw


def sparse(rank: int, shape, entries: int, sparse_dim: int, dtype=torch.float32) -> torch.Tensor:
    """Random entries, duplicates among them."""
    generator = torch.Generator().manual_seed(rank)
    indices = torch.stack([torch.randint(0, shape[d], (entries,), generator=generator) for d in range(sparse_dim)])
    values = torch.randn(entries, *shape[sparse_dim:], generator=generator).mul(10).to(dtype)
    return torch.sparse_coo_tensor(indices, values, shape)


SHAPES = [((10, 4), 1), ((6, 5), 2), ((7,), 1), ((3, 4, 2), 2)]


@ranks(1, 2, 3)
@pytest.mark.parametrize("op", [fw.Average, fw.Sum], ids=["average", "sum"])
@pytest.mark.parametrize(("shape", "sparse_dim"), SHAPES, ids=str)
def test_equal_to_dense(shape, sparse_dim, op):
    """Integers in floats, so that no order of additions can make a difference."""
    tensors = [sparse(r, shape, 9 * r, sparse_dim, torch.float64).round() for r in range(fw.size())]
    mine = tensors[fw.rank()]
    handle = fw.sparse_allreduce_async(mine, "sparse", op)
    result = fw.synchronize(handle)
    assert (result.is_sparse, result.is_coalesced()) == (True, True)
    assert torch.equal(result.to_dense(), fw.allreduce(mine.to_dense(), op=op))
    assert (handle.done(), fw.poll(handle)) == (True, True)
    assert torch.equal(handle().to_dense(), result.to_dense())  # as in Horovod
    return result.indices(), result.values()


@ranks(2, 3)
def test_nobody_has_anything():
    empty = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 3), (5, 3))
    result = fw.synchronize(fw.sparse_allreduce_async(empty, "nothing", fw.Sum))
    assert result.shape == (5, 3)
    assert result._nnz() == 0


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_rounded_once_like_dense(dtype):
    mine = sparse(fw.rank(), (5, 2), 4, 1, dtype).coalesce()
    result = fw.sparse_allreduce_async(mine, "rounding", fw.Average).wait()
    assert result.dtype == dtype
    assert torch.equal(result.to_dense(), fw.allreduce(mine.to_dense()))
    return result.to_dense()


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.complex64], ids=str)
def test_other_types(dtype):
    mine = sparse(fw.rank(), (5, 2), 6, 1, dtype)
    for op in (fw.Sum, fw.Average):
        result = fw.sparse_allreduce_async(mine, "types", op).wait()
        torch.testing.assert_close(result.to_dense(), fw.allreduce(mine.to_dense(), op=op))


@ranks(2)
def test_many_in_flight_and_the_input_is_left_alone():
    tensors = [sparse(10 * i + fw.rank(), (20, 3), i, 1) for i in range(8)]
    before = [tensor.to_dense() for tensor in tensors]
    handles = [fw.sparse_allreduce_async(tensor, f"many.{i}", fw.Sum) for i, tensor in enumerate(tensors)]
    for handle, dense in reversed(list(zip(handles, before, strict=True))):
        torch.testing.assert_close(handle.wait().to_dense(), fw.allreduce(dense, op=fw.Sum))
    assert all(torch.equal(tensor.to_dense(), dense) for tensor, dense in zip(tensors, before, strict=True))


@ranks(2)
def test_an_embeddings_gradient():
    table = torch.nn.Embedding(6, 2, sparse=True, padding_idx=0)
    if fw.rank() == 0:
        table(torch.tensor([1, 1, 4])).sum().backward()
    else:
        table(torch.tensor([0, 0])).sum().backward()
    result = fw.sparse_allreduce_async(table.weight.grad, "embedding", fw.Average).wait().to_dense()
    expected = torch.zeros(6, 2)
    expected[1], expected[4] = 1.0, 0.5
    assert torch.equal(result, expected)


@ranks(2)
def test_errors():
    with pytest.raises(TypeError, match="sparse_coo"):
        fw.sparse_allreduce_async(torch.ones(2), "dense", fw.Sum)
    with pytest.raises(TypeError, match="sparse_coo"):
        fw.sparse_allreduce_async([1], "list", fw.Sum)
    with pytest.raises(ValueError, match="Average and Sum"):
        fw.sparse_allreduce_async(torch.eye(2).to_sparse(), "op", fw.Max)
    rows = 3 + fw.rank()
    handle = fw.sparse_allreduce_async(torch.ones(rows, 2).to_sparse(1), "sizes", fw.Sum)
    with pytest.raises(fw.TensorMismatchError, match="sizes"):
        handle.wait()
