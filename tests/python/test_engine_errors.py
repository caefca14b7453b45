"""Ranks that disagree: one error, the same on every rank, saying who has what; and the engine goes on."""

import re

import pytest
import torch
from rank_helpers import error_of, everyone, ranks

import fusewire as fw

F32 = torch.ones(3)

# What all ranks call, what the odd one calls instead, and the two values that the error must show.
DISAGREEMENTS = {
    "length": (lambda n: fw.allreduce(F32, name=n), lambda n: fw.allreduce(torch.ones(4), name=n), r"\[3\]", r"\[4\]"),
    "number of dimensions": (
        lambda n: fw.allreduce_(torch.ones(2, 3), name=n),
        lambda n: fw.allreduce_(torch.ones(6), name=n),
        r"\[2, 3\]",
        r"\[6\]",
    ),
    "dtype": (
        lambda n: fw.allreduce(F32, name=n),
        lambda n: fw.allreduce(F32.double(), name=n),
        "float32",
        "float64",
    ),
    "dtype of equal width": (
        lambda n: fw.allreduce(F32, name=n),
        lambda n: fw.allreduce(F32.int(), name=n),
        "float32",
        "int32",
    ),
    "op": (
        lambda n: fw.allreduce(F32, op=fw.Sum, name=n),
        lambda n: fw.allreduce(F32, op=fw.Average, name=n),
        "Sum",
        "Average",
    ),
    "prescale": (
        lambda n: fw.allreduce(F32, prescale_factor=0.5, name=n),
        lambda n: fw.allreduce(F32, prescale_factor=0.25, name=n),
        r"0\.5",
        r"0\.25",
    ),
    "postscale": (
        lambda n: fw.allreduce(F32, postscale_factor=3.0, name=n),
        lambda n: fw.allreduce(F32, name=n),
        r"\b3\b",
        r"\b1\b",
    ),
    "compression": (
        lambda n: fw.allreduce(F32, name=n),
        lambda n: fw.allreduce(F32, name=n, compression=fw.Compression.fp16),
        "float32",
        "float16",
    ),
    "root": (
        lambda n: fw.broadcast(F32, root_rank=0, name=n),
        lambda n: fw.broadcast(F32, root_rank=1, name=n),
        r"\b0\b",
        r"\b1\b",
    ),
    "shape of a broadcast": (
        lambda n: fw.broadcast_(torch.ones(2), root_rank=0, name=n),
        lambda n: fw.broadcast_(torch.ones(5), root_rank=0, name=n),
        r"\[2\]",
        r"\[5\]",
    ),
    "operation": (
        lambda n: fw.allreduce(F32, name=n),
        lambda n: fw.broadcast(F32, root_rank=0, name=n),
        "allreduce",
        "broadcast",
    ),
    "tensors of a group": (
        lambda n: fw.grouped_allreduce([F32, F32], name=n),
        lambda n: fw.grouped_allreduce([F32, F32, F32], name=n),
        r"\b2\b",
        r"\b3\b",
    ),
    "shape inside a group": (
        lambda n: fw.grouped_allreduce([F32, torch.ones(7)], name=n),
        lambda n: fw.grouped_allreduce([F32, torch.ones(8)], name=n),
        r"\[7\]",
        r"\[8\]",
    ),
}


@ranks(3)
@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_a_disagreement_is_the_same_mismatch_error_on_every_rank(what):
    usual, unusual, *values = DISAGREEMENTS[what]
    texts = []
    for odd in range(3):  # rank 0, who leads the negotiation, may be the odd one as well
        name = f"layer.{what}.weight"
        error = error_of(unusual if fw.rank() == odd else usual, name)
        assert type(error) is fw.TensorMismatchError, repr(error)
        assert isinstance(error, fw.FusewireError)
        text = str(error)
        assert name in text, text
        assert set(re.findall(r"\d", " ".join(re.findall(r"ranks? ([\d, and-]+)", text)))) >= {"0", "1", "2"} or (
            f"rank {odd}" in text
        ), text
        for value in values:
            assert re.search(value, text), (value, text)
        texts.append(text)
        usual(name)  # the same name works again
    return texts


@ranks(3)
def test_after_a_mismatch_the_next_result_under_that_name_is_exact():
    for turn in range(5):
        size = 3 if fw.rank() != turn % 3 else 4
        assert type(error_of(fw.allreduce, torch.ones(size), name="again")) is fw.TensorMismatchError
        result = fw.allreduce(torch.full((5,), float(fw.rank() + turn)), op=fw.Sum, name="again")
        assert torch.equal(result, torch.full((5,), 3.0 + 3 * turn))


@ranks(3)
def test_a_mismatch_leaves_its_neighbours_alone_and_its_own_tensor_untouched():
    good = [fw.allreduce_async(torch.full((4,), float(i + fw.rank())), op=fw.Sum, name=f"good.{i}") for i in range(10)]
    bad = torch.full((3 + fw.rank() % 2,), 7.0)
    assert type(error_of(fw.allreduce_async_, bad, name="bad")) is fw.TensorMismatchError
    assert torch.equal(bad, torch.full_like(bad, 7.0))
    for i, handle in enumerate(good):
        assert torch.equal(handle.wait(), torch.full((4,), 3.0 * i + 3))


@ranks(2)
def test_a_tensor_on_a_device_that_this_build_cannot_move():
    """Refused at once on the rank that has it; the name is free, and the others' call completes when it comes."""
    if fw.rank() == 1:
        with pytest.raises(ValueError, match="meta"):
            fw.allreduce(torch.ones(3, device="meta"), name="device")
    return fw.allreduce(torch.ones(3), name="device")


@ranks(3)
def test_the_same_name_twice_in_flight():
    """The second submission raises, the first completes, the name can be used again."""
    for turn in range(3):
        late = turn  # the rank whose absence keeps the first one in flight
        if fw.rank() == late:
            fw.barrier()
            first = fw.allreduce_async(torch.ones(2), op=fw.Sum, name="twin")
        else:
            first = fw.allreduce_async(torch.ones(2), op=fw.Sum, name="twin")
            for again in (fw.allreduce_async, fw.allreduce_async_):
                error = error_of(again, torch.full((2,), 9.0), op=fw.Sum, name="twin")
                assert type(error) is fw.DuplicateNameError, repr(error)
                assert "twin" in str(error)
            fw.barrier()
        assert torch.equal(first.wait(), torch.full((2,), 3.0))
        assert torch.equal(fw.allreduce(torch.full((2,), 2.0), op=fw.Sum, name="twin"), torch.full((2,), 6.0))


@ranks(2)
def test_a_duplicate_on_one_rank_only_or_of_another_kind():
    if fw.rank() == 0:
        fw.barrier()
    group = fw.grouped_allreduce_async([torch.ones(1), torch.ones(2)], op=fw.Sum, name="kin")
    if fw.rank() == 1:
        assert type(error_of(fw.broadcast_async, torch.ones(1), root_rank=0, name="kin")) is fw.DuplicateNameError
        assert type(error_of(fw.grouped_allreduce_async, [torch.ones(1)], name="kin")) is fw.DuplicateNameError
        fw.barrier()
    assert [t.tolist() for t in group.wait()] == [[2.0], [2.0, 2.0]]
    assert fw.allreduce(torch.ones(1), op=fw.Sum, name="kin").item() == 2.0


@ranks(3, fresh=True, init={"stall_check_time": 0.5, "stall_abort_time": 1.5})
def test_unnamed_calls_whose_counts_differ_are_explained_by_the_stall_report():
    fw.allreduce(torch.ones(2))
    if fw.rank() == 1:
        error = error_of(fw.allreduce, torch.ones(3))  # once more than the others
    else:
        error = error_of(fw.allreduce, torch.ones(5), name="what the others do")
    assert type(error) is fw.StalledError
    text = str(error)
    assert "unnamed" in text, text
    assert "count" in text, text
    assert "rank 0" in text or "ranks 0" in text, text
    return text


@ranks(2)
def test_arguments_that_make_no_sense_are_refused_at_once_and_harm_nothing():
    ones = torch.ones(3)
    with pytest.raises(ValueError, match="root_rank=7"):
        fw.broadcast(ones, root_rank=7, name="nonsense")
    with pytest.raises(ValueError, match="root_rank=4294967296"):  # not 0
        fw.broadcast(ones, root_rank=2**32, name="nonsense")
    with pytest.raises(ValueError, match="not both"):
        fw.allreduce(ones, average=True, op=fw.Sum, name="nonsense")
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        fw.allreduce([1.0, 2.0], name="nonsense")
    with pytest.raises(TypeError, match="sparse"):
        fw.allreduce_(torch.eye(3).to_sparse(), name="nonsense")
    with pytest.raises(ValueError, match="at least one"):
        fw.grouped_allreduce([], name="nonsense")
    assert everyone(fw.rank()) == [0, 1]
    return fw.allreduce(ones, name="nonsense")
