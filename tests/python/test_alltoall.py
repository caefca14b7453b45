"""alltoall: splits of every kind, every dtype and layout, gradients."""

import pytest
import torch
from collective_cases import DTYPES, LAYOUTS, numbers, weight
from rank_helpers import close, data, error_of, ranks

import fusewire as fw


def splits_of(rank: int, size: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 6, (size,), generator=torch.Generator().manual_seed(1000 * seed + rank)).tolist()


def expected(inputs, splits, me):
    """What rank `me` gets, and how much from whom."""
    parts = [tensor[: sum(s)].split(s)[me] for tensor, s in zip(inputs, splits, strict=True)]
    return torch.cat(parts), torch.tensor([len(part) for part in parts], dtype=torch.int32)


@ranks(1, 2, 3, 4, 5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_with_splits(dtype):
    splits = [splits_of(r, fw.size()) for r in range(fw.size())]
    inputs = [numbers(r, sum(splits[r]), 3, dtype=dtype) for r in range(fw.size())]
    output, received = fw.alltoall(inputs[fw.rank()], splits[fw.rank()])
    wanted = [tensor.split(s)[fw.rank()] for tensor, s in zip(inputs, splits, strict=True)]
    assert (output.dtype, received.dtype) == (dtype, torch.int32)
    assert output.tolist() == [row for part in wanted for row in part.tolist()]
    assert received.tolist() == [len(part) for part in wanted]


@ranks(1, 2, 3, 5)
def test_without_splits_everybody_gets_the_same_number():
    inputs = [numbers(r, 4 * fw.size(), 2) for r in range(fw.size())]
    output = fw.alltoall(inputs[fw.rank()], name="even")
    assert isinstance(output, torch.Tensor)
    assert torch.equal(output, torch.cat([tensor[4 * fw.rank() : 4 * fw.rank() + 4] for tensor in inputs]))
    assert isinstance(fw.synchronize(fw.alltoall_async(inputs[fw.rank()])), torch.Tensor)


@ranks(2, 3, 4)
def test_random_splits_in_flight_together():
    def inputs(i, r):
        splits = splits_of(r, fw.size(), i + 1)
        return numbers(r + i, sum(splits), i % 4 + 1), splits

    handles = []
    for i in range(20):
        tensor, splits = inputs(i, fw.rank())
        given = torch.tensor(splits, dtype=torch.int32 if i % 2 else torch.int64)
        handles.append(fw.alltoall_async(tensor, given, name=f"a2a.{i}"))
    for i, handle in enumerate(handles):
        pairs = [inputs(i, r) for r in range(fw.size())]
        output, received = fw.synchronize(handle)
        wanted, rows = expected([p[0] for p in pairs], [p[1] for p in pairs], fw.rank())
        assert torch.equal(output, wanted)
        assert torch.equal(received, rows)


@ranks(2, 3)
def test_large_and_very_uneven():
    size = fw.size()
    splits = [[200_000 if to == (r + 1) % size else r for to in range(size)] for r in range(size)]
    inputs = [numbers(r, sum(splits[r])) for r in range(size)]
    output, received = fw.alltoall(inputs[fw.rank()], splits[fw.rank()])
    wanted, rows = expected(inputs, splits, fw.rank())
    assert torch.equal(output, wanted)
    assert torch.equal(received, rows)


@ranks(2, 3)
def test_rows_beyond_the_splits_stay_at_home():
    inputs = [numbers(r, 10, 2) for r in range(fw.size())]
    splits = [[1] * fw.size()] * fw.size()
    output, received = fw.alltoall(inputs[fw.rank()], splits[0])
    wanted, rows = expected(inputs, splits, fw.rank())
    assert torch.equal(output, wanted)
    assert torch.equal(received, rows)


@ranks(2, 3)
def test_nothing_at_all():
    output, received = fw.alltoall(torch.empty(0, 3), [0] * fw.size())
    assert output.shape == (0, 3)
    assert received.tolist() == [0] * fw.size()


@ranks(2, 3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout):
    size = fw.size()
    inputs = [LAYOUTS[layout](numbers(r, 6 * size, 7)) for r in range(size)]
    output = fw.alltoall(inputs[fw.rank()])
    wanted = torch.cat([t.resolve_conj().resolve_neg()[6 * fw.rank() : 6 * fw.rank() + 6] for t in inputs])
    assert torch.equal(output, wanted)


@ranks(2, 3)
def test_errors():
    size = fw.size()
    with pytest.raises(ValueError, match="divide evenly"):
        fw.alltoall(torch.ones(size + 1))
    with pytest.raises(ValueError, match="one number for each"):
        fw.alltoall(torch.ones(4), [1] * (size + 1))
    with pytest.raises(ValueError, match="negative"):
        fw.alltoall(torch.ones(4), [-1] * size)
    with pytest.raises(ValueError, match="more rows than the tensor has"):
        fw.alltoall(torch.ones(size - 1), [1] * size)
    for wrong in ([0.5] * size, torch.ones(size), torch.ones(size, 1, dtype=torch.int64), "ab", 3):
        with pytest.raises(TypeError, match="splits must be"):
            fw.alltoall(torch.ones(4), wrong)
    with pytest.raises(ValueError, match="first dimension"):
        fw.alltoall(torch.tensor(1.0))
    error = error_of(fw.alltoall, torch.ones(size, 2 + (fw.rank() == 1)), name="mismatch")
    assert isinstance(error, fw.TensorMismatchError), error
    assert fw.alltoall(torch.ones(size, 2), name="mismatch").shape == (size, 2)


@ranks(4)
def test_in_a_process_set():
    trio = fw.add_process_set([0, 2, 3])
    if trio.included():
        place = trio.rank()
        inputs = {r: numbers(r, 6, 2) for r in trio.ranks}
        output, received = fw.alltoall(inputs[fw.rank()], [1, 2, 3], process_set=trio)
        start = [0, 1, 3][place]
        assert torch.equal(output, torch.cat([t[start : start + place + 1] for t in inputs.values()]))
        assert received.tolist() == [place + 1] * 3
    fw.remove_process_set(trio)


@ranks(1, 2, 3)
@pytest.mark.parametrize("kind", ["even", "uneven", "some stay"])
def test_gradients_are_those_of_one_process(kind):
    size = fw.size()
    splits = None if kind == "even" else [splits_of(r, size, 7) for r in range(size)]
    rows = [3 * size if splits is None else sum(splits[r]) + 2 * (kind == "some stay") for r in range(size)]

    def leaves():
        return [data(rows[r], 2, seed=r).requires_grad_() for r in range(size)]

    reference = leaves()
    loss = torch.zeros((), dtype=torch.float64)
    for me in range(size):
        output = expected(reference, splits or [[3] * size] * size, me)[0]
        loss = loss + (output**2 * weight(output, me)).sum()
    loss.backward()
    mine = leaves()[fw.rank()]
    output = fw.alltoall(mine, splits and splits[fw.rank()], name="forward")
    if splits is not None:
        output, received = output
        assert not received.requires_grad
    (output**2 * weight(output, fw.rank())).sum().backward()
    close(mine.grad, reference[fw.rank()].grad)
