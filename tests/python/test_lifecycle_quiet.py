"""An engine with nothing to do does nothing; one that waits in vain says so, on time and not too often."""

import itertools
import re
import time

import pytest
import torch
from jobs import note
from rank_helpers import ranks

import fusewire as fw


@ranks(2)
def test_an_idle_engine_uses_no_cpu():
    """Under 0.5 % of a core, measured as CPU time of the whole process, right after work of every kind."""
    for i in range(20):
        fw.allreduce(torch.ones(10 ** (i % 6)), name=f"work.{i % 6}")
        fw.grouped_allreduce([torch.ones(5)] * 3, name="work group")
    fw.barrier()
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(5)
    used = time.process_time() - before
    assert used < 5 * 0.005, f"{used / 5:.2%} of a core"


@ranks(2)
def test_a_long_wait_uses_no_cpu():
    """Waiting for a late rank, in the caller and in the coordinator."""
    fw.barrier()
    if fw.rank() == 0:
        time.sleep(3)
        fw.allreduce(torch.ones(2), name="late")
    else:
        before = time.process_time()
        fw.allreduce(torch.ones(2), name="late")
        used = time.process_time() - before
        assert used < 0.06, f"{used:.3f} s of CPU while waiting for 3 s"


@ranks(2, fresh=True)
def test_a_matrix_product_is_as_fast_after_init_as_before():
    """Compared by the CPU time of the best of many."""

    def best():
        a = torch.ones(300, 300)
        times = []
        for _ in range(60):
            start = time.thread_time()
            a @ a
            times.append(time.thread_time() - start)
        return min(times)

    threads = torch.get_num_threads()
    fw.shutdown()
    best()
    before = best()
    fw.init()
    fw.allreduce(torch.ones(10))
    after = best()
    assert torch.get_num_threads() == threads
    assert after < 1.5 * before, f"{before * 1e3:.2f} ms before, {after * 1e3:.2f} ms after init"


INTERVAL = 1.0


def one_rank_sleeps(interval, sleeps):
    fw.init(stall_check_time=interval)
    for i in range(3):
        fw.allreduce(torch.ones(4), name=f"layer{i}.weight")
    fw.barrier()
    if fw.rank() == 2:
        fw.allreduce_async(torch.ones(4), name="layer0.bias")
        time.sleep(sleeps)
    first = fw.allreduce_async(torch.ones(4), op=fw.Sum, name="layer1.bias")
    second = fw.allreduce_async(torch.ones(4), op=fw.Sum, name="layer2.bias")
    if fw.rank() != 2:
        fw.allreduce_async(torch.ones(4), name="layer0.bias")
    note(results=[first.wait().tolist(), second.wait().tolist()])
    for i in range(3):  # training goes on
        fw.allreduce(torch.ones(4), name=f"layer{i}.weight")
    fw.shutdown()


def test_a_stall_is_reported_on_time_once_per_interval_and_then_training_goes_on(launcher):
    """The report names the late rank, the tensors, and what that rank last did."""
    ended = launcher.run(one_rank_sleeps, 3, INTERVAL, 3.6)
    for end in ended:
        assert end.code == 0, end.errors
        assert end.note("results") == [[3.0] * 4] * 2
    reports = [line for end in ended for line in end.errors.splitlines() if "layer1.bias" in line]
    assert 2 <= len(reports) <= 4, "one per second for 3.6 seconds, on one rank\n" + "".join(e.errors for e in ended)
    for report in reports:
        assert re.search(r"rank 2\b", report), report
        assert "layer2.bias" in report, report
        assert "layer0.bias" in report, f"what rank 2 last submitted is not told: {report}"
        assert "warning" in report.lower(), report
    waited = [float(re.search(r"waited for ([\d.]+) s", report).group(1)) for report in reports]
    assert INTERVAL <= waited[0] < INTERVAL + 0.9, "the first report was not on time"
    assert all(0.7 < b - a < 1.9 for a, b in itertools.pairwise(waited)), waited


@pytest.mark.parametrize("way", ["keyword", "HOROVOD_STALL_CHECK_DISABLE"])
def test_stall_reports_can_be_turned_off(launcher, way):
    if way == "keyword":
        ended = launcher.run(one_rank_sleeps, 3, 0, 2.0)
    else:
        ended = launcher.run(sleep_by_environment, 2, env={way: "1"})
    for end in ended:
        assert (end.code, end.errors) == (0, "")


def sleep_by_environment():
    fw.init()
    if fw.rank() == 1:
        time.sleep(1)
    fw.allreduce(torch.ones(2), name="x")
    fw.shutdown()


def unnamed_calls():
    fw.init(stall_check_time=0.5, stall_abort_time=2)
    fw.allreduce(torch.ones(2))
    if fw.rank() == 0:
        fw.allreduce(torch.ones(2))
    time.sleep(0.1 if fw.rank() == 0 else 3)


def test_the_stall_report_explains_unnamed_calls_whose_counts_differ(launcher):
    ended = launcher.run(unnamed_calls, 2)
    reports = [line for end in ended for line in end.errors.splitlines() if "warning" in line.lower()]
    assert reports
    assert all("unnamed" in report and "count" in report for report in reports), reports
    assert all("rank 1" in report for report in reports), reports
