"""Who keeps what alive, for how long, and who needs the GIL."""

import ctypes
import gc
import os
import time
import weakref

import torch
from rank_helpers import engine, everyone, ranks, wait_until

import fusewire as fw


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@ranks(2)
def test_temporaries_are_kept_until_their_operation_is_done():
    handles = []
    for i in range(300):
        handles.append(fw.allreduce_async(torch.full((1000,), float(i)) * 2, op=fw.Sum, name=f"temporary.{i}"))
        torch.full((1000,), -1.0)  # takes the block of memory that a dropped temporary would have freed
    for i, handle in enumerate(handles):
        assert torch.equal(handle.wait(), torch.full((1000,), 4.0 * i)), i


@ranks(2)
def test_views_of_temporaries():
    handles = [
        fw.allreduce_async_(torch.full((50, 40), float(i))[:, 3:7], op=fw.Sum, name=f"view.{i}") for i in range(200)
    ]
    for i, handle in enumerate(handles):
        assert torch.equal(handle.wait(), torch.full((50, 4), 2.0 * i)), i


@ranks(2)
def test_handles_dropped_without_waiting():
    kept = torch.zeros(300)
    parts = kept.split(1)
    for i in range(300):
        parts[i].fill_(i + fw.rank())
        fw.allreduce_async_(parts[i], op=fw.Sum, name=f"dropped.{i}")  # the handle is dropped
        fw.allreduce_async(torch.full((500,), 1.0), name=f"all dropped.{i}")  # tensor, result and handle are
    gc.collect()
    wait_until(lambda: engine().pending == 0)
    assert torch.equal(kept, torch.arange(300) * 2.0 + 1)


@ranks(2)
def test_two_thousand_tight_waits():
    x = torch.zeros(16)
    for i in range(2000):
        x.fill_(i + fw.rank())
        assert fw.allreduce_(x, op=fw.Sum, name="tight")[7] == 2 * i + 1
        if i % 3 == fw.rank():
            fw.allreduce_async_(x, name="tight async").wait()
        else:
            fw.synchronize(fw.allreduce_async_(x, name="tight async"))


@ranks(2, timeout=60)
def test_memory_is_flat_after_ten_thousand_calls():
    x = torch.ones(256)

    def calls(count):
        for i in range(count // 4):
            fw.allreduce(x, name=f"flat.{i % 10}")
            fw.allreduce_async_(x)  # unnamed, and dropped
            fw.grouped_allreduce([x, x], name="flat group")
            fw.broadcast_(x, root_rank=0, name="flat broadcast")
        wait_until(lambda: engine().pending == 0)
        gc.collect()

    calls(6000)
    before = resident_bytes()
    calls(10_000)
    grown = resident_bytes() - before
    assert grown < 4 << 20, f"{grown} bytes more than before"


@ranks(2)
def test_nothing_keeps_a_tensor_after_its_operation():
    tensor = torch.ones(10)
    inner = weakref.ref(tensor)
    handle = fw.allreduce_async_(tensor, name="let go")
    handle.wait()
    del tensor, handle
    fw.allreduce(torch.ones(1), name="the next call")
    gc.collect()
    assert inner() is None


@ranks(2)
def test_the_engine_never_needs_the_gil_of_a_process_that_holds_it():
    """Rank 0 holds its GIL for two seconds; meanwhile rank 1's operations, which need rank 0's, complete."""
    holds_the_gil = ctypes.PyDLL(None).usleep
    fw.barrier()
    handles = [fw.allreduce_async_(torch.full((20_000,), float(i)), op=fw.Sum, name=f"gil.{i}") for i in range(50)]
    del handles[::2]  # the last references to some tensors are the engine's own
    if fw.rank() == 0:
        holds_the_gil(2_000_000)
        assert all(handle.done() for handle in handles)
    for k, handle in enumerate(handles):
        assert torch.equal(handle.wait(), torch.full((20_000,), 2.0 * (2 * k + 1)))
    finished = time.monotonic()
    times = everyone(finished)
    assert times[1] < times[0], f"rank 1 had to wait until rank 0 released its GIL: {times}"


@ranks(2)
def test_other_python_threads_run_while_one_waits():
    import threading

    ticks = 0
    stop = threading.Event()

    def tick():
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    fw.barrier()
    thread.start()
    if fw.rank() == 1:
        time.sleep(0.5)
    before = ticks
    fw.allreduce(torch.ones(2), name="while others run")
    during = ticks - before
    stop.set()
    thread.join()
    if fw.rank() == 0:
        assert during > 20, "no other thread ran while this one waited"


@ranks(2)
def test_several_threads_submit_and_wait_at_once():
    from concurrent.futures import ThreadPoolExecutor

    def work(thread):
        for i in range(100):
            result = fw.allreduce(torch.full((64,), float(thread * 1000 + i + fw.rank())), name=f"thread.{thread}")
            assert torch.equal(result, torch.full((64,), thread * 1000 + i + 0.5)), (thread, i)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
