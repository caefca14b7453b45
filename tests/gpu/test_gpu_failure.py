"""A rank that dies while the others wait for it on a GPU."""

import os
import signal
import sys
import time

import pytest
import torch
from jobs import note

import fusewire as fw


def lose_a_rank(victim, where):
    if not torch.cuda.is_available():
        import fake_cuda

        fake_cuda.install()
        fw._core._set_cuda_api(fake_cuda.api_maker())
    fw.init()
    tensor = torch.ones(1000, device="cuda")
    fw.allreduce(tensor, op=fw.Sum)
    torch.cuda.synchronize()
    fw.barrier()
    if fw.rank() == victim:
        note(left=time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for turn in range(100 if where == "in flight" else 1):
            fw.allreduce_(tensor, op=fw.Average, name=f"lost.{turn}")
            torch.cuda.synchronize()
    except fw.PeerLostError as error:
        note(lost=error.rank, at=time.monotonic())
        fw.shutdown()
        sys.exit(0)


@pytest.mark.parametrize("where", ["before it comes", "in flight"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_an_error_on_the_others(launcher, victim, where):
    if not torch.cuda.is_available():
        import fake_cuda

        fake_cuda.build()
    ended = launcher.run(lose_a_rank, 3, victim, where, timeout=60)
    for rank, end in enumerate(ended):
        if rank != victim:
            assert end.note("lost") == victim
            assert end.code == 0, end.errors
