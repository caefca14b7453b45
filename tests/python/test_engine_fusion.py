"""Buckets: sizes around the threshold, mixed dtypes, huge and empty tensors, and who owns the memory."""

import pytest
import torch
from rank_helpers import engine, everyone, ranks

import fusewire as fw

THRESHOLD = 4096


def expected_sum(tensors):
    return [t.double() * sum(r + 1 for r in range(fw.size())) for t in tensors]


def run_in_place_and_out_of_place(bases, prefix):
    """Sums (rank + 1) * base both ways, and checks the results and that an out-of-place input is left alone."""
    mine = [(base * (fw.rank() + 1)).to(base.dtype) for base in bases]
    inputs = [t.clone() for t in mine]
    out = [fw.allreduce_async(t, op=fw.Sum, name=f"{prefix}.out.{i}") for i, t in enumerate(inputs)]
    inside = [t.clone() for t in mine]
    pointers = [t.data_ptr() for t in inside]
    into = [fw.allreduce_async_(t, op=fw.Sum, name=f"{prefix}.in.{i}") for i, t in enumerate(inside)]
    for i, right in enumerate(expected_sum(bases)):
        result = out[i].wait()
        assert torch.equal(result.double(), right), (prefix, i)
        assert result.dtype == bases[i].dtype
        assert result.data_ptr() != inputs[i].data_ptr() or result.numel() == 0
        assert torch.equal(inputs[i], mine[i]), "the input of an out-of-place operation has changed"
        assert into[i].wait() is inside[i]
        assert torch.equal(inside[i].double(), right), (prefix, i)
        assert inside[i].data_ptr() == pointers[i]


@ranks(2, init={"fusion_threshold": THRESHOLD})
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_sizes_around_the_fusion_threshold(dtype):
    width = torch.empty(0, dtype=dtype).element_size()
    at = THRESHOLD // width
    for count in (at - 1, at, at + 1, 1, 2 * at, 0, 2 * at + 1):
        bases = [torch.arange(count).remainder(50).to(dtype) for _ in range(3)]
        run_in_place_and_out_of_place(bases, f"around.{dtype}.{count}")


@ranks(2, init={"fusion_threshold": 0})
def test_without_fusion():
    before = engine().stats()
    run_in_place_and_out_of_place([torch.full((10,), float(i)) for i in range(20)], "unfused")
    after = engine().stats()
    assert after["buckets"] - before["buckets"] == after["units"] - before["units"] == 40


@ranks(2)
def test_a_huge_tensor_between_small_ones():
    huge = torch.arange(4_000_000, dtype=torch.float32).remainder(1000)
    small = [torch.full((7,), float(i)) for i in range(20)]
    run_in_place_and_out_of_place([*small[:10], huge, *small[10:]], "huge")


@ranks(2, 3)
def test_dtypes_interleaved():
    dtypes = [torch.float32, torch.int64, torch.float16, torch.uint8, torch.float64, torch.bfloat16, torch.int16]
    run_in_place_and_out_of_place([torch.arange(i % 30).to(dtypes[i % 7]) for i in range(70)], "interleaved")


@ranks(2, 3)
def test_empty_and_zero_dimensional_tensors():
    for shape in [(0,), (3, 0, 2), ()]:
        base = torch.full(shape, 3.0)
        run_in_place_and_out_of_place([base], f"alone.{shape}")
        run_in_place_and_out_of_place([torch.ones(5), base, torch.ones(2), base], f"bucket.{shape}")
        group = fw.grouped_allreduce([torch.ones(5), base, torch.ones(2)], op=fw.Sum, name=f"group.{shape}")
        assert [t.shape for t in group] == [(5,), shape, (2,)]
        assert torch.equal(group[1], base * fw.size())
        assert torch.equal(group[2], torch.full((2,), float(fw.size())))
        assert fw.broadcast(base + fw.rank(), root_rank=1, name=f"broadcast.{shape}").shape == shape
    assert fw.grouped_allreduce([torch.ones(0)], name="nothing but nothing")[0].numel() == 0
    assert fw.broadcast(torch.tensor(float(fw.rank())), root_rank=1, name="scalar").item() == 1.0


@ranks(2, 3)
def test_a_group_is_one_reduction_and_keeps_its_order():
    tensors = [torch.full((i + 1,), float(i * 10 + fw.rank())) for i in range(30)]
    originals = [t.clone() for t in tensors]
    mean = (fw.size() - 1) / 2
    for results in (
        fw.grouped_allreduce(tensors, name="group.out"),
        fw.grouped_allreduce_async(tensors, name="group.async").wait(),
    ):
        assert [r.tolist() for r in results] == [[i * 10 + mean] * (i + 1) for i in range(30)]
    assert all(torch.equal(a, b) for a, b in zip(tensors, originals, strict=True))
    results = fw.grouped_allreduce_(tensors, name="group.in")
    assert all(a is b for a, b in zip(results, tensors, strict=True))
    assert [r.tolist() for r in tensors] == [[i * 10 + mean] * (i + 1) for i in range(30)]


@ranks(2, 3, 5)
def test_broadcast_from_every_root():
    for root in range(fw.size()):
        for dtype in (torch.float32, torch.bool, torch.int8, torch.complex64):
            mine = torch.full((5, 3), fw.rank() % 2, dtype=dtype).t()
            right = torch.full((3, 5), root % 2, dtype=dtype)
            result = fw.broadcast(mine, root_rank=root, name=f"root.{dtype}")
            assert torch.equal(result, right)
            assert torch.equal(mine, torch.full((3, 5), fw.rank() % 2, dtype=dtype))
            assert fw.broadcast_(mine, root_rank=root, name=f"root.{dtype}.in") is mine
            assert torch.equal(mine, right)


@ranks(2, 3)
def test_large_broadcast():
    tensor = torch.arange(3_000_000, dtype=torch.float32) * (fw.rank() + 1)
    fw.broadcast_(tensor, root_rank=1, name="large")
    assert torch.equal(tensor, torch.arange(3_000_000, dtype=torch.float32) * 2)


@ranks(2)
def test_allreduce_is_differentiable():
    """The gradient of an allreduce is the allreduce of the gradients."""
    x = torch.full((3,), 1.0 + fw.rank(), dtype=torch.float64, requires_grad=True)
    y = fw.allreduce(x, op=fw.Sum, name="differentiable")
    (y * (fw.rank() + 1)).sum().backward()
    assert x.grad.tolist() == [3.0] * 3
    assert everyone(x.grad.tolist()) == [[3.0] * 3] * 2
