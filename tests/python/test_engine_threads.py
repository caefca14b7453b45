"""Several engines in one process, ranks as threads: jobs that hypothesis makes up, in orders that it makes up."""

from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fusewire as fw

DTYPES = [torch.float32, torch.int64, torch.float64, torch.uint8]


@st.composite
def operations(draw):
    kind = draw(st.sampled_from(["sum", "max", "in place", "group", "broadcast"]))
    tensors = draw(st.integers(1, 4)) if kind == "group" else 1
    sizes = draw(st.lists(st.sampled_from([0, 1, 3, 17, 400]), min_size=tensors, max_size=tensors))
    return kind, sizes, draw(st.sampled_from(DTYPES))


@st.composite
def jobs(draw):
    """(number of ranks, knobs, operations by name, the order of each rank in each round)"""
    size = draw(st.integers(1, 4))
    names = draw(st.lists(operations(), min_size=1, max_size=8))
    knobs = {
        "cache_capacity": str(draw(st.sampled_from([0, 1, 2, 4096]))),
        "fusion_threshold": str(draw(st.sampled_from([0, 100, 1 << 20]))),
    }
    rounds = [[draw(st.permutations(range(len(names)))) for _ in range(size)] for _ in range(draw(st.integers(1, 3)))]
    return size, knobs, names, rounds


def values(rank, turn, index, sizes, dtype):
    return [torch.arange(size).add(rank * (index + 1) + turn).to(dtype) for size in sizes]


def expected(size, turn, index, kind, sizes, dtype):
    all_of = [values(rank, turn, index, sizes, dtype) for rank in range(size)]
    if kind == "broadcast":
        return all_of[index % size]
    combine = torch.amax if kind == "max" else torch.sum
    return [combine(torch.stack(tensors), 0).to(dtype) for tensors in zip(*all_of, strict=True)]


def submit(engine, index, operation, tensors):
    kind, _, _ = operation
    name = f"{kind}.{index}"
    if kind == "group":
        return fw.grouped_allreduce_async(tensors, op=fw.Sum, name=name, engine=engine)
    if kind == "broadcast":
        return fw.broadcast_async(tensors[0], index % engine.size, name=name, engine=engine)
    call = fw.allreduce_async_ if kind == "in place" else fw.allreduce_async
    return call(tensors[0], op=fw.Max if kind == "max" else fw.Sum, name=name, engine=engine)


def run_rank(engine, names, rounds):
    for turn, orders in enumerate(rounds):
        handles = {}
        for index in orders[engine.rank]:
            _, sizes, dtype = names[index]
            handles[index] = submit(engine, index, names[index], values(engine.rank, turn, index, sizes, dtype))
        for index in reversed(orders[engine.rank]):
            kind, sizes, dtype = names[index]
            result = handles[index].wait()
            right = expected(engine.size, turn, index, kind, sizes, dtype)
            for mine, tensor in zip(result if kind == "group" else [result], right, strict=True):
                assert torch.equal(mine, tensor), (turn, names[index])


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_any_job_in_any_order(job):
    size, knobs, names, rounds = job
    engines = fw._core.make_in_process_engines(size, knobs)
    with ThreadPoolExecutor(size) as threads:
        runs = [threads.submit(run_rank, engine, names, rounds) for engine in engines]
        for run in runs:
            run.result(60)
        for end in [threads.submit(engine.shutdown) for engine in engines]:
            end.result(60)


def test_eight_engines_in_one_process_do_not_disturb_each_other():
    jobs_ = [fw._core.make_in_process_engines(2) for _ in range(4)]
    with ThreadPoolExecutor(8) as threads:
        runs = [
            threads.submit(fw.allreduce, torch.full((5,), float(100 * k + engine.rank)), name="same", engine=engine)
            for k, engines in enumerate(jobs_)
            for engine in engines
        ]
        for index, run in enumerate(runs):
            assert run.result(60).tolist() == [100.0 * (index // 2) + 0.5] * 5
        for end in [threads.submit(engine.shutdown) for engines in jobs_ for engine in engines]:
            end.result(60)


def test_an_engine_that_fails_says_so_on_every_thread_and_spares_other_engines():
    broken, sound = fw._core.make_in_process_engines(3), fw._core.make_in_process_engines(1)
    with ThreadPoolExecutor(4) as threads:
        waits = [threads.submit(fw.allreduce, torch.ones(2), name="x", engine=engine) for engine in broken[:2]]
        broken[2].shutdown(False, "it was tired")
        for wait in waits:
            error = wait.exception(60)
            assert type(error) is fw.PeerLostError, repr(error)
            assert error.rank == 2
            assert "it was tired" in str(error)
        assert fw.allreduce(torch.ones(2), name="x", engine=sound[0]).tolist() == [1.0, 1.0]
    for engine in broken + sound:
        engine.shutdown()
