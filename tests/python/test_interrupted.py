"""Signals that come while a rank waits inside of a data plane for a peer that has stopped in the middle of a bucket."""

import ctypes
import mmap
import os
import signal
import threading
import time

import pytest
import torch
from jobs import note

import fusewire as fw

BYTES = 64 << 20
ELEMENTS = BYTES // 4
SOON = 20.0  # seconds: long before the stall abort time; normally half a one, what a bucket is given to end by itself


def stuck_in_the_middle(release):
    """A tensor of ones whose second half cannot be read before the file `release` exists: whoever tries is stuck."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    memory = mmap.mmap(-1, BYTES)
    tensor = torch.frombuffer(memory, dtype=torch.float32).fill_(1)
    half = tensor.data_ptr() + BYTES // 2
    # The handler is usleep(SIGSEGV): 11 microseconds later the thread tries again.
    libc.signal(signal.SIGSEGV, ctypes.cast(libc.usleep, ctypes.c_void_p))
    assert libc.mprotect(half, BYTES // 2, 0) == 0

    def let_it_go():
        while not os.path.exists(release):
            time.sleep(0.01)
        libc.mprotect(half, BYTES // 2, mmap.PROT_READ | mmap.PROT_WRITE)

    threading.Thread(target=let_it_go, daemon=True).start()
    return tensor


def tell_when_inside(tensor):
    """The first part of the result is there."""

    def watch():
        while tensor[0] != 2:
            time.sleep(0.005)
        note(inside=True)

    threading.Thread(target=watch, daemon=True).start()


def one_bucket(stuck, release):
    fw.init()
    signal.signal(signal.SIGUSR1, lambda *_: note(handled=True))
    me = fw.rank()
    tensor = stuck_in_the_middle(release) if me == stuck else torch.ones(ELEMENTS)
    tell_when_inside(tensor)
    fw.allreduce(torch.ones(10), name="warm up")
    fw.barrier()
    time.sleep(0.1)  # no engine's thread is awake: the calling thread will run the bucket
    try:
        fw.allreduce_(tensor, op=fw.Sum, name="bucket")
    except (KeyboardInterrupt, fw.FusewireError) as error:
        note(raised=type(error).__name__, at=time.monotonic(), rank=getattr(error, "rank", None), text=str(error))
        try:
            again = fw.allreduce(torch.ones(1), op=fw.Sum, name="again")
        except fw.FusewireError as later:
            note(later=type(later).__name__, rank=later.rank, text=str(later))
            return
        # On a busy machine another thread may have been quicker to take the bucket up: then it is not the one that was
        # interrupted, and goes on.
        note(elsewhere=again.item())
        fw.barrier()
        return
    note(result=tensor.unique().tolist())
    note(again=fw.allreduce(torch.ones(1), op=fw.Sum, name="again").item())
    fw.barrier()


@pytest.mark.parametrize("stuck", [0, 1], ids=["the root", "another"])
def test_ctrl_c_ends_the_wait_for_a_peer_that_stopped_inside_of_the_bucket(launcher, tmp_path, stuck):
    """Soon, and not at the stall abort time. All ranks are told who was interrupted."""
    waiting = 1 - stuck
    for attempt in range(10):
        release = tmp_path / f"release-{attempt}"
        with launcher.start(one_bucket, 2, stuck, str(release)) as job:
            job.until_noted(waiting, "inside")
            os.kill(job.pids[stuck], signal.SIGSTOP)
            time.sleep(0.3)
            sent = time.monotonic()
            os.kill(job.pids[waiting], signal.SIGINT)
            assert job.until_noted(waiting, "raised") == "KeyboardInterrupt"
            assert job.until_noted(waiting, "at") - sent < SOON
            release.touch()
            os.kill(job.pids[stuck], signal.SIGCONT)
            ended = job.wait(30)
        if not any("elsewhere" in noted for end in ended for noted in end.notes):
            break
    assert ended[stuck].note("raised") == "PeerLostError"
    for end in ended:
        assert end.code == 0, end.errors
        assert end.note("later") == "PeerLostError", "the failure stays until shutdown()"
        assert end.note("rank") == waiting
        assert f"rank {waiting} was interrupted by a signal" in end.note("text")


@pytest.mark.parametrize("stuck", [0, 1], ids=["the root", "another"])
def test_a_handler_that_returns_disturbs_nothing(launcher, tmp_path, stuck):
    """It runs while the bucket waits, and the bucket goes on."""
    release = tmp_path / "release"
    with launcher.start(one_bucket, 2, stuck, str(release)) as job:
        job.until_noted(1 - stuck, "inside")
        time.sleep(0.3)
        os.kill(job.pids[1 - stuck], signal.SIGUSR1)
        job.until_noted(1 - stuck, "handled")
        release.touch()
        for end in job.wait(30):
            assert end.code == 0, end.errors
            assert end.note("result") == [2.0]
            assert end.note("again") == 2.0
