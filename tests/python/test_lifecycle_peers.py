"""Ranks that leave, crash, or stop: the others raise soon, say who it was, and nothing is left behind."""

import os
import signal
import sys
import time

import pytest
import torch
from jobs import note

import fusewire as fw

NOTICE = 5.0  # seconds; two are promised, the rest is for a busy machine
STALL_ABORT = 2.0


def shared_memory():
    return {name for name in os.listdir("/dev/shm") if "fusewire" in name or name.startswith("fw")}


@pytest.fixture(autouse=True)
def _nothing_left_in_dev_shm():
    before = shared_memory()
    yield
    assert not shared_memory() - before


def leave(how):
    """Ends this process in one of the ways in which processes end."""
    note(left=time.monotonic())
    if how == "raise":
        raise ValueError("the data file is broken")
    if how == "sys.exit(0)":
        sys.exit(0)
    if how == "os._exit(3)":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_the_others(victim, how, pending):
    fw.init()
    fw.allreduce(torch.ones(10), name="warm up")
    fw.barrier()
    if fw.rank() == victim:
        if pending:
            time.sleep(0.3)  # let the others wait
        leave(how)
    try:
        if not pending:
            time.sleep(1)  # let it go first
        fw.allreduce(torch.ones(10), name="never")
    except BaseException as error:
        note(raised=time.monotonic(), type=type(error).__name__, text=str(error), rank=getattr(error, "rank", None))
        raise
    note(type="nothing was raised")


def check_that_they_raised(ended, victim, how, started=None):
    left = ended[victim].note("left")
    for rank, end in enumerate(ended):
        if rank == victim:
            continue
        assert end.note("type") == "PeerLostError", end.notes
        assert end.note("rank") == victim, end.notes
        assert f"rank {victim}" in end.note("text"), end.notes
        if how == "raise":
            assert "the data file is broken" in end.note("text"), end.notes
        assert end.note("raised") - max(left, started or left) < NOTICE, end.notes
        assert end.code == 1, "an uncaught PeerLostError ends a process with exit code 1"
        assert "PeerLostError" in end.errors


EXITS = {"raise": 1, "sys.exit(0)": 0, "os._exit(3)": 3, "SIGKILL": -signal.SIGKILL}


@pytest.mark.parametrize("how", EXITS)
@pytest.mark.parametrize("victim", [0, 1], ids=["the root", "another"])
def test_a_rank_ends_while_the_others_wait(launcher, how, victim):
    with launcher.start(wait_for_the_others, 3, victim, how, True) as job:
        ended = job.wait(30)
        assert not job.family(), "processes of the job live on"
    check_that_they_raised(ended, victim, how)
    assert ended[victim].code == EXITS[how], ended[victim].errors


@pytest.mark.parametrize("how", ["sys.exit(0)", "SIGKILL"])
def test_a_rank_has_ended_before_the_others_call(launcher, how):
    """The call that needs it raises at once, instead of waiting for a stall."""
    ended = launcher.run(wait_for_the_others, 3, 1, how, False)
    check_that_they_raised(ended, 1, how, started=ended[1].note("left") + 1)


def wait_for_a_gradient(victim):
    """The same in the middle of a training step, where autograd carries the error."""
    fw.init()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = fw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for turn in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).sum()
        if turn == 2 and fw.rank() == victim:
            time.sleep(0.3)
            leave("raise")
        try:
            loss.backward()
        except BaseException as error:
            note(raised=time.monotonic(), type=type(error).__name__, text=str(error), rank=getattr(error, "rank", None))
            raise
        optimizer.step()


def test_a_rank_raises_in_training_while_the_others_are_in_backward(launcher):
    check_that_they_raised(launcher.run(wait_for_a_gradient, 3, 1), 1, "raise")


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.ones(3)


def wait_beside_data_loaders(victim):
    fw.init()
    loader = torch.utils.data.DataLoader(Rows(), num_workers=2, multiprocessing_context="fork")
    rows = iter(loader)
    next(rows)
    wait_for_the_others(victim, "SIGKILL", True)


@pytest.mark.parametrize("victim", [0, 1], ids=["the root", "another"])
def test_a_rank_with_live_data_loader_workers_is_killed(launcher, victim):
    """The forked workers hold no descriptor that would hide its death, and go away themselves."""
    with launcher.start(wait_beside_data_loaders, 3, victim) as job:
        ended = job.wait(30)
        check_that_they_raised(ended, victim, "SIGKILL")
        deadline = time.monotonic() + 20  # torch's workers look for their parent every five seconds
        while job.family():
            assert time.monotonic() < deadline, "workers of a dead rank live on"
            time.sleep(0.1)


def wait_for_a_stopped_rank(victim):
    fw.init(stall_check_time=1, stall_abort_time=STALL_ABORT)
    fw.allreduce(torch.ones(10), name="warm up")
    fw.barrier()
    if fw.rank() == victim:
        note(stopping=time.monotonic())
        os.kill(os.getpid(), signal.SIGSTOP)
    start = time.monotonic()
    try:
        fw.allreduce(torch.ones(10), name="never")
    except fw.FusewireError as error:
        note(after=time.monotonic() - start, type=type(error).__name__, text=str(error))
        try:
            fw.allreduce(torch.ones(10), name="after that")
        except fw.FusewireError as again:
            note(again=type(again).__name__)
        fw.shutdown()
        raise
    note(type="nothing was raised")


@pytest.mark.parametrize("victim", [0, 1], ids=["the root", "another"])
def test_a_rank_is_stopped_for_longer_than_the_stall_abort_time(launcher, victim):
    """The others raise at that time and name it; when it goes on it raises as well."""
    with launcher.start(wait_for_a_stopped_rank, 3, victim) as job:
        job.until_noted(victim, "stopping")
        for rank in {0, 1, 2} - {victim}:
            job.until_noted(rank, "again")
        os.kill(job.pids[victim], signal.SIGCONT)
        ended = job.wait(30)
    for rank, end in enumerate(ended):
        assert end.note("type") in ("StalledError", "PeerLostError"), end.notes
        assert end.note("again") in ("StalledError", "PeerLostError"), "the failure stays until shutdown()"
        assert end.code == 1
        if rank != victim:
            assert end.note("type") == "StalledError"
            assert f"rank {victim}" in end.note("text"), end.notes
            assert STALL_ABORT - 0.5 < end.note("after") < STALL_ABORT + NOTICE, end.notes


def leave_early(victim):
    fw.init()
    if fw.rank() == victim:
        fw.allreduce(torch.ones(3), name="together")
        note(left=time.monotonic())
        return
    fw.allreduce(torch.ones(3), name="together")
    time.sleep(1)
    fw.shutdown()


@pytest.mark.parametrize("victim", [0, 2], ids=["the root", "another"])
def test_a_rank_that_leaves_while_the_others_are_idle_disturbs_nobody(launcher, victim):
    for end in launcher.run(leave_early, 3, victim):
        assert end.code == 0, end.errors
        assert end.errors == ""


def leave_a_set():
    fw.init()
    pair = fw.add_process_set(fw.ProcessSet([0, 1]))
    if fw.rank() == 2:
        note(left=time.monotonic())
        return
    time.sleep(1)
    for turn in range(20):
        assert fw.allreduce(torch.ones(3), op=fw.Sum, process_set=pair, name="pair").tolist() == [2.0] * 3, turn
    fw.barrier(process_set=pair)  # the error below ends the other one's operations, too
    try:
        fw.allreduce(torch.ones(3), name="all three")
    except fw.PeerLostError as error:
        note(rank=error.rank)


def test_a_set_without_the_rank_that_left_goes_on(launcher):
    ended = launcher.run(leave_a_set, 3)
    for end in ended:
        assert end.code == 0, end.errors
    assert [end.note("rank") for end in ended[:2]] == [2, 2]


def engine_files():
    """What only the engine opens: Unix sockets and memory that has no name."""
    with open("/proc/net/unix") as table:
        unix = {f"socket:[{line.split()[6]}]" for line in table.readlines()[1:]}
    names = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            names.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # the folder that was just listed
            pass
    return {name for name in names if name in unix or name.startswith("/memfd:")}


def fork_children():
    before = engine_files()
    fw.init()
    assert engine_files() > before
    fw.allreduce(torch.ones(3), name="before")
    for how in ("return", "_exit"):
        pid = os.fork()
        if pid == 0:
            try:
                fw.allreduce(torch.ones(3), name="in a child")
            except fw.FusewireError as error:
                note(child=type(error).__name__)
            note(kept=sorted(engine_files() - before))
            if how == "_exit":
                os._exit(0)
            return  # an ordinary end: exit handlers run
        note(status=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        for _ in range(20):
            assert fw.allreduce(torch.ones(3), op=fw.Sum, name="after").tolist() == [3.0] * 3


def test_forked_children_own_nothing_of_the_engine_and_harm_nobody(launcher):
    for end in launcher.run(fork_children, 3):
        assert end.code == 0, end.errors
        assert [n["status"] for n in end.notes if "status" in n] == [0, 0]
        assert len([n for n in end.notes if "child" in n]) == 2, "an operation in a child must be an error"
        assert [n["kept"] for n in end.notes if "kept" in n] == [[], []]


def interrupt():
    fw.init()
    if fw.rank() == 0:
        note(ready=True)
        try:
            fw.allreduce(torch.ones(3), name="lonely")
        except KeyboardInterrupt:
            note(interrupted=time.monotonic())
            raise
    time.sleep(20 if fw.rank() else 0)


def test_ctrl_c_ends_a_wait(launcher):
    with launcher.start(interrupt, 2) as job:
        job.until_noted(0, "ready")
        time.sleep(0.3)
        sent = time.monotonic()
        os.kill(job.pids[0], signal.SIGINT)
        assert job.until_noted(0, "interrupted") - sent < NOTICE
        (only,) = [pid for rank, pid in job.pids.items() if rank == 0]
        deadline = time.monotonic() + 10
        while only in job.family():
            assert time.monotonic() < deadline, "rank 0 did not end after Ctrl-C"
            time.sleep(0.05)
