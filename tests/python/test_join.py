"""join(): ranks that run out of data early take part in everything as if they had nothing to add."""

import pytest
import torch
from rank_helpers import error_of, everyone, ranks

import fusewire as fw


def batches() -> int:
    """How many this rank has: the last rank has most."""
    return 2 + 3 * fw.rank()


def reference(losses_of, model, optimizer, steps):
    """The same steps in one process: gradients of all ranks that still have a batch, divided by all ranks."""
    for step in range(steps):
        optimizer.zero_grad()
        (sum(losses_of(model, step)) / fw.size()).backward()
        optimizer.step()


@ranks(1, 2, 3, 4)
def test_optimizer_with_uneven_numbers_of_batches():
    """Two epochs: after join() everybody is back."""

    def batch(rank, step):
        generator = torch.Generator().manual_seed(100 * rank + step)
        return torch.randn(4, 3, generator=generator, dtype=torch.float64)

    def losses(model, step):
        return [model(batch(r, step)).pow(2).mean() for r in range(fw.size()) if step < 2 + 3 * r]

    def build():
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = build()
    optimizer = fw.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    alone, plain = build()
    for _ in range(2):
        for step in range(batches()):
            optimizer.zero_grad()
            model(batch(fw.rank(), step)).pow(2).mean().backward()
            optimizer.step()
        last = fw.join()
        assert last == fw.size() - 1
        reference(losses, alone, plain, 2 + 3 * (fw.size() - 1))
        fw.broadcast_parameters(model.state_dict(), root_rank=last)
        for a, b in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    return [p.detach() for p in model.parameters()]


@ranks(2, 3, 4)
def test_every_reduction_gets_the_identity():
    """Ranks leave one after the other; the last one goes on alone."""
    value = float(fw.rank() + 2)
    size = fw.size()
    for step in range(fw.rank() + 1):
        present = [r for r in range(size) if r >= step]
        values = [float(r + 2) for r in present]
        product = torch.tensor(values).prod().item()
        expected = {
            fw.Sum: sum(values),
            fw.Average: sum(values) / size,
            fw.Min: min(values),
            fw.Max: max(values),
            fw.Product: product,
        }
        for op, result in expected.items():
            tensor = torch.full((10,), value)
            assert torch.equal(fw.allreduce(tensor, op=op, name=f"all.{op}.{step}"), torch.full((10,), result)), op
            whole = fw.grouped_allreduce([tensor, tensor.double()], op=op, name=f"group.{op}.{step}")
            assert torch.equal(whole[1], torch.full((10,), result, dtype=torch.float64))
        ints = fw.allreduce(torch.full((3,), 2**40 + fw.rank()), op=fw.Sum, name=f"int.{step}")
        assert ints.tolist() == [sum(2**40 + r for r in present)] * 3
        together = fw.allreduce(torch.tensor([fw.rank() == step]), op=fw.Max, name=f"or.{step}")
        assert together.item()
    assert fw.join() == size - 1
    assert fw.allreduce(torch.ones(1), op=fw.Sum).item() == size


@ranks(2, 3, 4)
def test_adasum_gets_zeros():
    if fw.rank() == 0:
        vector = torch.tensor([1.0, 2.0])
        assert torch.equal(fw.allreduce(vector, op=fw.Adasum, name="adasum"), vector)
    fw.join()


@ranks(2, 3, 4)
def test_gathers_leave_the_joined_out():
    size = fw.size()
    if fw.rank() != 1:
        present = [r for r in range(size) if r != 1]
        mine = torch.full((fw.rank() + 1, 2), fw.rank())
        expected = torch.cat([torch.full((r + 1, 2), r) for r in present])
        assert torch.equal(fw.allgather(mine, name="rows"), expected)
        pair = fw.grouped_allgather([mine, mine.float()], name="group")
        assert torch.equal(pair[1], expected.float())
        # What is sent to a joined rank is dropped, and it sends nothing.
        output, received = fw.alltoall(torch.full((size,), fw.rank()), [1] * size, name="a2a")
        assert output.tolist() == present
        assert received.tolist() == [int(r != 1) for r in range(size)]
        rows = 2 * size + 1
        part = fw.reducescatter(torch.arange(float(rows)), op=fw.Sum, name="rs")
        start = [2 * r + min(r, 1) for r in range(size)][fw.rank()]
        assert torch.equal(part, torch.arange(float(rows))[start : start + 2 + (fw.rank() == 0)] * len(present))
        assert fw.allgather_object("here", name="objects") == ["here"] * len(present)
    fw.join()


@ranks(2, 3)
def test_broadcast_from_one_who_is_there_and_from_one_who_has_joined():
    if fw.rank() == 0:
        assert fw.broadcast(torch.full((4,), 7.0), 0, name="from 0").tolist() == [7.0] * 4
        error = error_of(fw.broadcast, torch.ones(4), 1, name="from 1")
        assert isinstance(error, (fw.FusewireError, ValueError)), error
        assert "joined" in str(error), error
        assert fw.allreduce(torch.ones(1), op=fw.Sum, name="still works").item() == 1
    assert fw.join() == 0


@ranks(2, 3)
def test_barriers_and_new_sets_do_not_wait_for_the_joined():
    if fw.rank() == 0:
        fw.barrier()
        alone = fw.add_process_set([0])
        assert fw.allreduce(torch.ones(1), process_set=alone).item() == 1
    assert fw.join() == 0
    fw.barrier()
    later = fw.add_process_set([0, 1])
    assert len(set(everyone(later.process_set_id))) == 1
    fw.remove_process_set(later)


@ranks(2, 3)
def test_unnamed_calls_are_counted_anew():
    """A joined rank has missed some of the others' calls."""
    for _ in range(fw.rank()):
        fw.allreduce(torch.ones(1))
        fw.grouped_allreduce([torch.ones(1)])
    fw.join()
    for _ in range(3):
        assert fw.allreduce(torch.ones(1), op=fw.Sum).item() == fw.size()
        assert fw.grouped_allreduce([torch.ones(1)], op=fw.Sum)[0].item() == fw.size()
        assert fw.allgather(torch.ones(1)).numel() == fw.size()


@ranks(2, 3)
def test_pending_operations_when_a_rank_joins():
    """What a rank has submitted counts, also if the others come to it later."""
    if fw.rank() == 1:
        handles = [fw.allreduce_async(torch.full((100,), 1.0), op=fw.Sum, name=f"p.{i}") for i in range(10)]
        fw.join()
        assert all(torch.equal(h.wait(), torch.full((100,), float(fw.size()))) for h in handles)
    else:
        for i in reversed(range(10)):
            total = fw.allreduce(torch.full((100,), 1.0), op=fw.Sum, name=f"p.{i}")
            assert torch.equal(total, torch.full((100,), float(fw.size())))
        fw.join()


@ranks(3, 4)
def test_in_a_process_set():
    """A joined rank is missing in its sets only; Average divides by the set's size."""
    pair = fw.add_process_set([0, 1])
    if fw.rank() == 0:
        for _ in range(3):
            result = fw.allreduce(torch.ones(5), process_set=pair, name="pair")
            assert torch.equal(result, torch.full((5,), 0.5))
        assert fw.allgather(torch.ones(2), process_set=pair, name="rows").shape == (2,)
    if fw.rank() != 1:
        assert fw.allreduce(torch.ones(1), op=fw.Sum, name="everybody").item() == fw.size() - 1
    fw.join()
    fw.remove_process_set(pair)


@ranks(2, 3)
def test_sparse_gradients():
    if fw.rank() == 0:
        tensor = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,))
        handle = fw.sparse_allreduce_async(tensor, "sparse", fw.Average)
        assert torch.equal(fw.synchronize(handle).to_dense(), torch.tensor([0, 5.0, 0, 0]) / fw.size())
    fw.join()


@ranks(1, 2, 4)
def test_what_it_returns():
    """The last rank to join, whoever that is, again and again."""
    order = [(7 * i) % fw.size() for i in range(fw.size() + 1)]
    for turn, last in enumerate(order):
        if fw.rank() == last:
            for i in range(5):  # nobody else submits this: it is answered when all others have joined
                fw.allreduce(torch.ones(1), name=f"{turn}.{i}")
        assert fw.join(device=-1) == last
    return everyone(1)


@ranks(1)
def test_alone():
    assert fw.join() == 0
    assert fw.join() == 0


def test_not_initialized():
    with pytest.raises(fw.NotInitializedError):
        fw.join()


@ranks(2, 3)
def test_sets_that_come_and_go_while_a_rank_has_joined():
    """Afterwards all ranks can register again what some have removed, and what some have added."""
    gone = fw.add_process_set([0, 1])
    if fw.rank() == 0:
        fw.remove_process_set(gone)
        fw.add_process_set([0, 1])
    fw.join()
    assert gone.process_set_id is None
    assert fw.remove_process_set(gone) is False
    for one in (fw.add_process_set(gone), fw.add_process_set([0, 1])):
        assert len(set(everyone(one.process_set_id))) == 1
        if one.included():
            assert fw.allreduce(torch.ones(1), op=fw.Sum, process_set=one).item() == 2
        fw.remove_process_set(one)
