"""Ranks submit in any order; what comes back is exact per name, whatever was fused with what."""

import random

import torch
from rank_helpers import counted_units, everyone, ranks, wait_until

import fusewire as fw


@ranks(4, timeout=60)
def test_a_hundred_equal_tensors_in_another_order_on_every_rank():
    for turn in range(50):
        order = random.Random(100 * turn + fw.rank()).sample(range(100), 100)
        handles = {}
        for i in order:
            tensor = torch.full((16,), float(1000 * i + 10 * turn + fw.rank()))
            handles[i] = fw.allreduce_async(tensor, op=fw.Sum, name=f"order.{i}")
        for i in random.Random(turn + 7 * fw.rank()).sample(range(100), 100):
            expected = 4 * (1000 * i + 10 * turn) + 6
            assert torch.equal(handles[i].wait(), torch.full((16,), float(expected))), (turn, i)


@ranks(3, 5, timeout=60)
def test_all_kinds_of_operations_mixed_in_another_order_on_every_rank():
    n, me = fw.size(), fw.rank()

    def submit(kind, i, turn):
        name = f"mixed.{kind}.{i}"
        if kind == "in place":
            return fw.allreduce_async_(torch.full((i + 1,), me + turn), op=fw.Max, name=name)
        if kind == "group":
            tensors = [torch.full((k,), float(me + k)) for k in range(1, i + 2)]
            return fw.grouped_allreduce_async(tensors, op=fw.Sum, name=name)
        return fw.broadcast_async(torch.full((3,), 100.0 * me + i), root_rank=i % n, name=name)

    def expected(kind, i, turn):
        if kind == "in place":
            return [torch.full((i + 1,), n - 1 + turn)]
        if kind == "group":
            return [torch.full((k,), float(sum(range(n)) + n * k)) for k in range(1, i + 2)]
        return [torch.full((3,), 100.0 * (i % n) + i)]

    jobs = [(kind, i) for kind in ("in place", "group", "broadcast") for i in range(10)]
    for turn in range(10):
        order = random.Random(turn * n + me).sample(jobs, len(jobs))
        handles = {job: submit(*job, turn) for job in order}
        for job in jobs:
            result = handles[job].wait()
            for tensor, right in zip(result if job[0] == "group" else [result], expected(*job, turn), strict=True):
                assert torch.equal(tensor, right), (turn, job)


@ranks(2, 3)
def test_the_same_inputs_give_the_same_bits_however_they_are_fused_or_ordered():
    """Each element is reduced in rank order: alone, in one bucket, in a group, early or late."""
    tensors = [torch.randn(50 + i, generator=torch.Generator().manual_seed(10 * i + fw.rank())) for i in range(20)]
    alone = [fw.allreduce(t, name=f"bits.alone.{i}") for i, t in enumerate(tensors)]
    grouped = fw.grouped_allreduce(tensors, name="bits.group")
    results = [alone, grouped]
    for attempt in range(5):
        handles = {}
        for i in random.Random(10 * attempt + fw.rank()).sample(range(20), 20):
            handles[i] = fw.allreduce_async(tensors[i], name=f"bits.{i}")
        results.append([fw.synchronize(handles[i]) for i in range(20)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(alone, other, strict=True))
    return alone


@ranks(2)
def test_ten_thousand_small_tensors_at_once():
    handles = [fw.allreduce_async_(torch.full((8,), float(i + fw.rank())), name=f"many.{i}") for i in range(10_000)]
    for i, handle in enumerate(handles):
        assert torch.equal(handle.wait(), torch.full((8,), i + 0.5)), i


@ranks(2)
def test_ten_thousand_small_tensors_in_one_group():
    with counted_units(1):
        results = fw.grouped_allreduce([torch.full((8,), float(i + fw.rank())) for i in range(10_000)], name="grand")
    assert torch.equal(torch.stack(results), torch.arange(10_000).unsqueeze(1).expand(-1, 8) + 0.5)


@ranks(2)
def test_handles_poll_wait_and_synchronize():
    if fw.rank() == 0:
        handle = fw.allreduce_async(torch.ones(3), op=fw.Sum, name="poll")
        assert not fw.poll(handle)
        assert not handle.done()
        fw.barrier()  # rank 1 submits after it
    else:
        fw.barrier()
        handle = fw.allreduce_async(torch.ones(3), op=fw.Sum, name="poll")
    wait_until(lambda: fw.poll(handle))
    assert handle.done()
    first, second = fw.synchronize(handle), handle.wait()
    assert torch.equal(first, torch.full((3,), 2.0))
    assert torch.equal(second, first)


@ranks(3)
def test_barrier_lets_nobody_pass_before_the_last_has_come():
    import time

    if fw.rank() == 1:
        time.sleep(0.5)
    arrived = time.monotonic()
    fw.barrier()
    passed = time.monotonic()
    assert passed >= max(everyone(arrived)), "a rank left the barrier before the last one arrived"
