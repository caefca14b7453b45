"""allgather and grouped_allgather: rows that differ between ranks, every dtype and layout, gradients."""

import pytest
import torch
from collective_cases import DTYPES, LAYOUTS, numbers, weight
from rank_helpers import close, data, error_of, ranks

import fusewire as fw


@ranks(1, 2, 3, 4, 5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_with_rows_that_differ(dtype):
    rows = [3 * r + 1 for r in range(fw.size())]
    parts = [numbers(r, rows[r], 2, 3, dtype=dtype) for r in range(fw.size())]
    mine = parts[fw.rank()].clone()
    gathered = fw.allgather(mine)
    assert gathered.dtype == dtype
    assert gathered.tolist() == torch.cat([part.cpu() for part in parts]).tolist()
    assert mine.tolist() == parts[fw.rank()].tolist()
    return gathered.tolist()


@ranks(1, 2, 3, 5)
@pytest.mark.parametrize("rows", [[0, 0, 0, 0, 0], [0, 5, 0, 2, 0], [1, 1, 1, 1, 1], [70_000, 1, 3, 0, 40_001]])
def test_any_number_of_rows(rows):
    parts = [numbers(r, rows[r], 5) for r in range(fw.size())]
    gathered = fw.allgather(parts[fw.rank()], name="rows")
    assert torch.equal(gathered, torch.cat(parts))
    return gathered


@ranks(1, 2, 3)
def test_a_scalar_is_one_row():
    gathered = fw.allgather(torch.tensor(float(fw.rank())))
    assert torch.equal(gathered, torch.arange(float(fw.size())))


@ranks(2, 3)
def test_no_elements_in_the_other_dimensions():
    assert fw.allgather(torch.empty(fw.rank() + 1, 0)).shape == (sum(range(fw.size() + 1)), 0)


@ranks(2, 3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout):
    parts = [LAYOUTS[layout](numbers(r, 40 + r, 7)) for r in range(fw.size())]
    gathered = fw.allgather(parts[fw.rank()])
    assert gathered.is_contiguous()
    assert torch.equal(gathered, torch.cat([part.resolve_conj().resolve_neg() for part in parts]))
    return gathered


@ranks(3)
def test_layouts_may_differ_between_ranks():
    parts = [list(LAYOUTS.values())[r](numbers(r, 9, 4)) for r in range(3)]
    assert torch.equal(fw.allgather(parts[fw.rank()]), torch.cat(parts))


@ranks(2, 3)
def test_many_at_once_in_any_order():
    order = torch.randperm(50, generator=torch.Generator().manual_seed(fw.rank())).tolist()
    handles = {i: fw.allgather_async(numbers(fw.rank() + i, (i * (fw.rank() + 1)) % 7, i + 1), f"g.{i}") for i in order}
    for i, handle in handles.items():
        expected = torch.cat([numbers(r + i, (i * (r + 1)) % 7, i + 1) for r in range(fw.size())])
        assert torch.equal(fw.synchronize(handle), expected), i
        assert fw.poll(handle)
        assert torch.equal(handle.wait(), expected)


@ranks(2)
def test_a_handle_that_nobody_waits_for():
    for i in range(200):
        fw.allgather_async(torch.ones(1000 + fw.rank()), f"dropped.{i}")
    assert fw.allgather(torch.ones(1)).sum() == 2


@ranks(1, 2, 3)
def test_grouped_with_mixed_dtypes_and_shapes():
    def of(r):
        return [numbers(r, r, 4), numbers(r, 2, dtype=torch.int64), numbers(r, 5 - r, 2, 2, dtype=torch.bfloat16)]

    results = fw.grouped_allgather(of(fw.rank()), name="group")
    later = fw.grouped_allgather_async(of(fw.rank()), name="group.later")
    for i, result in enumerate(results):
        assert torch.equal(result, torch.cat([of(r)[i] for r in range(fw.size())]))
    assert all(torch.equal(a, b) for a, b in zip(results, later.wait(), strict=True))
    return results


@ranks(3)
def test_errors():
    mine = torch.ones(2, 3 if fw.rank() == 1 else 4)
    error = error_of(fw.allgather, mine, name="width")
    assert isinstance(error, fw.TensorMismatchError), error
    assert all(part in str(error) for part in ("width", "3", "4"))
    error = error_of(fw.allgather, torch.ones(2, dtype=torch.float64 if fw.rank() else torch.float32), name="width")
    assert isinstance(error, fw.TensorMismatchError), error
    with pytest.raises(TypeError, match=r"expected a torch\.Tensor"):
        fw.allgather([1.0])
    with pytest.raises(ValueError, match="at least one tensor"):
        fw.grouped_allgather([])
    with pytest.raises(TypeError, match="dense"):
        fw.allgather(torch.eye(2).to_sparse())
    assert fw.allgather(torch.ones(2, 4), name="width").shape == (6, 4)


@ranks(4)
def test_in_a_process_set():
    pair = fw.add_process_set([1, 3])
    if pair.included():
        gathered = fw.allgather(numbers(fw.rank(), fw.rank(), 2), process_set=pair)
        assert torch.equal(gathered, torch.cat([numbers(1, 1, 2), numbers(3, 3, 2)]))
    else:
        with pytest.raises(ValueError, match="not a member"):
            fw.allgather(torch.ones(1), process_set=pair)
    fw.remove_process_set(pair)


@ranks(1, 2, 3)
@pytest.mark.parametrize("rows", [[3, 1, 4], [2, 2, 2], [3, 2, 2], [0, 3, 1]], ids=str)
def test_gradients_are_those_of_one_process(rows):
    """The loss is the sum of what all ranks compute from the result."""
    rows = rows[: fw.size()]

    def leaves():
        return [data(rows[r], 3, seed=r).requires_grad_() for r in range(fw.size())]

    reference = leaves()
    whole = torch.cat(reference)
    sum((whole**2 * weight(whole, r)).sum() for r in range(fw.size())).backward()
    mine = leaves()[fw.rank()]
    gathered = fw.allgather(mine, name="forward")
    assert torch.equal(gathered, whole)
    (gathered**2 * weight(gathered, fw.rank())).sum().backward()
    close(mine.grad, reference[fw.rank()].grad)


@ranks(2, 3)
def test_gradients_of_a_group_and_of_a_scalar():
    def leaves(r):
        return [data(r + 1, 2, seed=r).requires_grad_(), torch.tensor(float(r)).requires_grad_()]

    everybody = [leaves(r) for r in range(fw.size())]
    wholes = [torch.cat([e[0] for e in everybody]), torch.stack([e[1] for e in everybody])]
    sum((whole**2 * weight(whole, r)).sum() for r in range(fw.size()) for whole in wholes).backward()
    mine = leaves(fw.rank())
    gathered = fw.grouped_allgather(mine)
    sum((g**2 * weight(g, fw.rank())).sum() for g in gathered).backward()
    for own, reference in zip(mine, everybody[fw.rank()], strict=True):
        assert own.grad.shape == own.shape
        close(own.grad, reference.grad)


@ranks(2)
def test_gradients_have_gradients():
    mine = torch.tensor([2.0 + fw.rank()], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad((fw.allgather(mine) ** 3).sum(), mine, create_graph=True)
    close(slope, 2 * 3 * mine**2)  # two ranks have a copy each
    (curve,) = torch.autograd.grad(slope.sum(), mine)
    close(curve, 2 * 2 * 6 * mine / 2)


def test_not_initialized():
    with pytest.raises(fw.NotInitializedError):
        fw.allgather(torch.ones(1))
