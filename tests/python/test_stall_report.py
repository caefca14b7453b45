"""The stall report says why: the late rank's own Python stack, whatever that rank is doing."""

import os
import re
import signal
import time

import pytest
import torch
from jobs import note

import fusewire as fw


def read_the_data(how, seconds):
    if how == "sleeps":
        time.sleep(seconds)
    elif how == "computes":
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pass
    elif how == "holds the GIL in C":
        import ctypes

        ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def one_rank_is_late(late, how, seconds):
    fw.init(stall_check_time=2)  # so late ranks have half a second to answer
    fw.allreduce(torch.ones(4), name="together")
    if fw.rank() == late:
        read_the_data(how, seconds)
    fw.allreduce(torch.ones(4), name="layer1.weight")
    fw.shutdown()


@pytest.mark.parametrize("late", [0, 1], ids=["the root", "another"])
@pytest.mark.parametrize("how", ["sleeps", "computes", "holds the GIL in C"])
def test_it_has_the_python_stack_of_the_late_rank(launcher, how, late):
    for _ in range(4):  # a rank has half a second to answer, and a busy machine may not let it
        ended = launcher.run(one_rank_is_late, 3, late, how, 2.8)
        for end in ended:
            assert end.code == 0, end.errors
        report = ended[0].errors
        if f"what rank {late} does:" in report:
            break
    assert f"rank {late} has not submitted 'layer1.weight'" in report
    assert f"rank {late} last submitted 'together'" in report
    assert f"what rank {late} does:" in report
    assert "in read_the_data" in report
    assert "fusewire-stacks" not in report, "our own thread is left out"
    assert ("a C extension holds the GIL" in report) == (how == "holds the GIL in C")
    assert all(end.errors == "" for end in ended[1:]), "the report is rank 0's"


def test_the_error_at_the_abort_time_has_it_on_all_ranks(launcher):
    def body():
        fw.init(stall_check_time=0, stall_abort_time=1)
        fw.allreduce(torch.ones(4), name="together")
        if fw.rank() == 2:
            read_the_data("sleeps", 3)
        with pytest.raises(fw.StalledError) as error:
            fw.allreduce(torch.ones(4), name="layer1.weight")
        note(text=str(error.value), rank=error.value.rank)

    texts = [end.note("text") for end in launcher.run(body, 3)]
    for text in texts:
        assert "rank 2 has not submitted 'layer1.weight'" in text
        assert "in read_the_data" in text


def wait_with_reports(late):
    fw.init(stall_check_time=1)
    fw.allreduce(torch.ones(4), name="together")
    if fw.rank() == late:
        note(here=True)
        time.sleep(0.3)
    fw.allreduce(torch.ones(4), name="layer1.weight")
    note(done=True)


def text_until(job, rank, pattern, timeout=15):
    deadline = time.monotonic() + timeout
    while True:
        text = job._file(rank, "err").read_text()
        if re.search(pattern, text):
            return text
        assert time.monotonic() < deadline, text
        time.sleep(0.02)


def test_a_stopped_rank_cannot_answer_and_the_report_says_so_on_time(launcher):
    with launcher.start(wait_with_reports, 2, 1) as job:
        job.until_noted(1, "here")
        os.kill(job.pids[1], signal.SIGSTOP)
        report = text_until(job, 0, "did not answer")
        waited = float(re.search(r"has waited for ([\d.]+) s", report).group(1))
        assert 1 <= waited < 1.4, report
        os.kill(job.pids[1], signal.SIGCONT)
        for end in job.wait(20):
            assert end.code == 0, end.errors


def one_large_bucket():
    fw.init(stall_check_time=1)
    tensor = torch.ones(150_000_000)
    fw.barrier()
    if fw.rank() == 1:
        note(here=True)
    fw.allreduce_(tensor, name="large")
    note(done=True)


def test_rank_0_reports_although_it_is_inside_of_the_bucket_that_stalls(launcher):
    with launcher.start(one_large_bucket, 2) as job:
        job.until_noted(1, "here")
        time.sleep(0.05)
        os.kill(job.pids[1], signal.SIGSTOP)
        report = text_until(job, 0, "did not answer")
        assert "bucket" in report
        assert "'large'" in report
        assert "rank 1 did not answer" in report
        assert "what rank 0 does:" in report
        os.kill(job.pids[1], signal.SIGCONT)
        for end in job.wait(30):
            assert end.code == 0, end.errors
            assert end.note("done")
