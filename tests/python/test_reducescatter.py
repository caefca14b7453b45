"""reducescatter and grouped_reducescatter: each rank's share of an allreduce, bit for bit; gradients."""

import pytest
import torch
from collective_cases import DTYPES, LAYOUTS, numbers, weight
from rank_helpers import close, data, error_of, ranks

import fusewire as fw


def share(rows: int, size: int, me: int) -> slice:
    """The rows of rank `me`: the first ranks get one more than the others."""
    each, more = divmod(rows, size)
    start = me * each + min(me, more)
    return slice(start, start + each + (me < more))


def mine(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[share(len(tensor), fw.size(), fw.rank())]


OPS = [fw.Sum, fw.Average, fw.Min, fw.Max, fw.Product]


@ranks(1, 2, 3, 4, 5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_operator_is_a_part_of_the_allreduce(dtype):
    done = 0
    for op in OPS:
        for rows in (1, 4, 7, 1000):
            tensor = numbers(fw.rank(), rows, 3, dtype=dtype)
            kind = f"{op}.{rows}"
            whole = error_or_result(fw.allreduce, tensor, op=op, name=f"all.{kind}")
            part = error_or_result(fw.reducescatter, tensor, op=op, name=f"part.{kind}")
            if isinstance(whole, TypeError):
                assert isinstance(part, TypeError), part
                assert "allowed" in str(part)
                continue
            assert part.tolist() == mine(whole).tolist()
            assert part.dtype == dtype
            assert part.is_contiguous()
            done += 1
    assert done


def error_or_result(call, *arguments, **keywords):
    try:
        return call(*arguments, **keywords)
    except TypeError as error:
        return error


@ranks(1, 2, 3)
def test_average_is_the_default_and_scales_apply():
    tensor = numbers(fw.rank(), 5, 4)
    average = fw.allreduce(tensor)
    assert torch.equal(fw.reducescatter(tensor), mine(average))
    scaled = fw.allreduce(tensor, op=fw.Sum, prescale_factor=0.5, postscale_factor=3.0)
    part = fw.reducescatter(tensor, op=fw.Sum, prescale_factor=0.5, postscale_factor=3.0)
    assert torch.equal(part, mine(scaled))


@ranks(2, 3)
@pytest.mark.parametrize("compression", [fw.Compression.fp16, fw.Compression.bf16])
def test_compression_is_that_of_allreduce(compression):
    tensor = numbers(fw.rank(), 50, 3) / 7
    whole = fw.allreduce(tensor, compression=compression)
    assert torch.equal(fw.reducescatter(tensor, compression=compression), mine(whole))
    (part,) = fw.grouped_reducescatter([tensor], compression=compression)
    assert torch.equal(part, mine(whole))


@ranks(2)
def test_a_compressor_of_ones_own():
    class Halving:
        @staticmethod
        def compress(tensor):
            return tensor / 2, 2

        @staticmethod
        def decompress(tensor, ctx):
            return tensor * ctx

    tensor = numbers(fw.rank(), 4)
    assert torch.equal(fw.reducescatter(tensor, compression=Halving), mine(fw.allreduce(tensor)))
    assert torch.equal(fw.grouped_reducescatter([tensor], compression=Halving)[0], mine(fw.allreduce(tensor)))


@ranks(2, 3, 5)
@pytest.mark.parametrize("rows", [0, 1, 2, 100_001])
def test_any_number_of_rows(rows):
    tensor = numbers(fw.rank(), rows, 2)
    part = fw.reducescatter(tensor, op=fw.Sum)
    assert torch.equal(part, mine(fw.allreduce(tensor, op=fw.Sum)))


@ranks(2, 3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout):
    tensor = LAYOUTS[layout](numbers(fw.rank(), 41, 7))
    before = tensor.clone()
    part = fw.reducescatter(tensor, op=fw.Sum)
    assert torch.equal(part, mine(fw.allreduce(tensor, op=fw.Sum)))
    assert torch.equal(tensor, before)


@ranks(1, 2, 3)
def test_grouped_and_asynchronous():
    tensors = [numbers(fw.rank(), 5, 2), numbers(fw.rank(), 8, dtype=torch.int64), numbers(fw.rank(), 1, 3)]
    wholes = fw.grouped_allreduce(tensors, op=fw.Sum)
    together = fw.grouped_reducescatter(tensors, op=fw.Sum)
    handle = fw.grouped_reducescatter_async(tensors, op=fw.Sum)
    handles = [fw.reducescatter_async(tensor, op=fw.Sum) for tensor in tensors]
    for i, whole in enumerate(wholes):
        assert torch.equal(together[i], mine(whole))
        assert torch.equal(handle.wait()[i], mine(whole))
        assert torch.equal(handles[i].wait(), mine(whole))


@ranks(2)
def test_errors():
    with pytest.raises(ValueError, match=r"Adasum.*allowed: Average, Sum, Min, Max, Product"):
        fw.reducescatter(torch.ones(4), op=fw.Adasum)
    with pytest.raises(ValueError, match="first dimension"):
        fw.reducescatter(torch.tensor(1.0))
    with pytest.raises(TypeError, match="allowed"):
        fw.reducescatter(torch.ones(4, dtype=torch.bool))
    error = error_of(fw.reducescatter, torch.ones(4 + fw.rank()), name="mismatch")
    assert isinstance(error, fw.TensorMismatchError), error
    error = error_of(fw.reducescatter, torch.ones(4), op=[fw.Sum, fw.Max][fw.rank()], name="mismatch")
    assert isinstance(error, fw.TensorMismatchError), error
    assert fw.reducescatter(torch.ones(4), name="mismatch").tolist() == [1, 1]


@ranks(4)
def test_in_a_process_set():
    trio = fw.add_process_set([0, 1, 3])
    if trio.included():
        part = fw.reducescatter(torch.arange(10.0) * (fw.rank() + 1), op=fw.Sum, process_set=trio)
        assert torch.equal(part, (torch.arange(10.0) * 7)[share(10, 3, trio.rank())])
    fw.remove_process_set(trio)


@ranks(1, 2, 3)
@pytest.mark.parametrize("op", [fw.Average, fw.Sum], ids=["average", "sum"])
@pytest.mark.parametrize("grouped", [False, True], ids=["single", "grouped"])
def test_gradients_are_those_of_one_process(op, grouped):
    size = fw.size()
    scales = {"prescale_factor": 0.5, "postscale_factor": 3.0}

    def leaves():
        return [data(7, 2, seed=r).requires_grad_() for r in range(size)]

    reference = leaves()
    total = sum(reference) * 1.5 / (size if op == fw.Average else 1)
    loss = torch.zeros((), dtype=torch.float64)
    for me in range(size):
        part = total[share(7, size, me)]
        loss = loss + (part**2 * weight(part, me)).sum()
    loss.backward()
    leaf = leaves()[fw.rank()]
    if grouped:
        (part,) = fw.grouped_reducescatter([leaf], op=op, name="forward", **scales)
    else:
        part = fw.reducescatter(leaf, op=op, name="forward", **scales)
    (part**2 * weight(part, fw.rank())).sum().backward()
    close(leaf.grad, reference[fw.rank()].grad)


@ranks(2, 3)
@pytest.mark.parametrize("op", [fw.Average, fw.Sum], ids=["average", "sum"])
def test_gradients_of_allreduce_are_those_of_one_process(op):
    size = fw.size()
    scales = {"prescale_factor": 0.5, "postscale_factor": 3.0}

    def leaves():
        return [data(5, 2, seed=r).requires_grad_() for r in range(size)]

    reference = leaves()
    total = sum(reference) * 1.5 / (size if op == fw.Average else 1)
    sum((total**2 * weight(total, r)).sum() for r in range(size)).backward()
    for form in ("single", "grouped"):
        leaf = leaves()[fw.rank()]
        if form == "single":
            result = fw.allreduce(leaf, op=op, **scales)
        else:
            (result,) = fw.grouped_allreduce([leaf], op=op, **scales)
        (result**2 * weight(result, fw.rank())).sum().backward()
        close(leaf.grad, reference[fw.rank()].grad)


@ranks(2)
def test_no_gradients_for_other_operators():
    leaf = torch.ones(4, requires_grad=True)
    for op in (fw.Min, fw.Max, fw.Product):
        with pytest.raises(NotImplementedError, match="differentiable for Average and Sum"):
            fw.reducescatter(leaf, op=op).sum().backward()


@ranks(2, 3)
@pytest.mark.parametrize("form", ["allreduce", "grouped_allreduce", "broadcast", "reducescatter", "alltoall"])
def test_gradients_have_gradients(form):
    """The cube's second derivative, by way of the same operation in one process."""
    size, rows = fw.size(), 2 * fw.size()

    def everybody():
        return [data(rows, 2, seed=r).requires_grad_() for r in range(size)]

    def together(tensors, me):
        part = slice(2 * me, 2 * me + 2)
        return {
            "allreduce": lambda: sum(tensors) / size,
            "grouped_allreduce": lambda: sum(tensors) / size,
            "broadcast": lambda: tensors[1],
            "reducescatter": lambda: (sum(tensors) / size)[part],
            "alltoall": lambda: torch.cat([tensor[part] for tensor in tensors]),
        }[form]()

    def apart(tensor):
        return {
            "allreduce": lambda: fw.allreduce(tensor, name="second"),
            "grouped_allreduce": lambda: fw.grouped_allreduce([tensor], name="second")[0],
            "broadcast": lambda: fw.broadcast(tensor, 1, name="second"),
            "reducescatter": lambda: fw.reducescatter(tensor, name="second"),
            "alltoall": lambda: fw.alltoall(tensor, name="second"),
        }[form]()

    tensors = everybody()
    loss = sum((together(tensors, r) ** 3).sum() for r in range(size))
    slopes = torch.autograd.grad(loss, tensors, create_graph=True, allow_unused=True)
    total = sum((slope**2).sum() for slope in slopes if slope is not None)
    expected = torch.autograd.grad(total, tensors, allow_unused=True)[fw.rank()]
    mine = everybody()[fw.rank()]
    (slope,) = torch.autograd.grad((apart(mine) ** 3).sum(), mine, create_graph=True)
    (curve,) = torch.autograd.grad((slope**2).sum(), mine)
    close(curve, torch.zeros_like(mine) if expected is None else expected)
