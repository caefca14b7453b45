"""`fusewire.run`: calls a function on n ranks of this host and brings the results back.

Note [Children of run]
Each rank is a fresh interpreter that is handed the function by value (cloudpickle). Python's own spawn would import the
caller's __main__ again, which fails in notebooks, on stdin and in scripts without a `__name__` guard. The child writes
one report, its result or its exception, into a pipe, its length first: a forked DataLoader worker may keep the pipe
open, so its end means nothing. A pidfd tells when a rank has died without a report. Each child leads a process group,
so that its own children go with it, and asks the kernel to be killed when the caller dies.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import select
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ._launch import without_launcher

_GRACE = 3.0  # seconds that the other ranks get to report after one has failed: one of them may know the cause
_BOOTSTRAP = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from fusewire._run import _child; _child()"


class RemoteTraceback(Exception):
    """Shown as the cause of an exception that `run` raises again: where it happened, on which rank."""

    def __init__(self, rank: int, size: int, text: str) -> None:
        super().__init__(f"on rank {rank} of {size}:\n\n{text}")


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    pipe: int
    pidfd: int
    data: bytearray = field(default_factory=bytearray)
    report: dict[str, Any] | None = None  # also made up for a rank that died without one

    def failed(self) -> bool:
        return self.report is not None and "value" not in self.report


def run(
    fn: Callable[..., Any],
    n: int = 2,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> list[Any]:
    """Calls `fn(*args, **kwargs)` in `n` new processes of this host, one per rank; returns their results in rank order.

    `fn` may be a lambda or come from a notebook; it, its arguments and its results travel by cloudpickle. It calls
    `fusewire.init()` itself. `env` adds environment variables. OMP_NUM_THREADS is set to each rank's share of the cores
    unless it is set already. Standard output and error are this process's; standard input is empty.

    When a rank fails, the others are ended and the exception that failed first by itself (not the PeerLostError that it
    caused elsewhere) is raised here, with its own type, the rank as `.fusewire_rank`, and the remote traceback as its
    cause. A rank that died without an exception is a PeerLostError naming it. TimeoutError, naming the ranks that are
    not done, after `timeout` seconds. No process outlives the call.
    """
    import cloudpickle
    from torch.distributed import TCPStore

    if n < 1:
        raise ValueError(f"n={n} must be at least 1")
    deadline = None if timeout is None else time.monotonic() + timeout
    work = cloudpickle.dumps((fn, tuple(args), dict(kwargs or {})))
    # This process serves the store that the ranks meet in, on a port that the system picks: nothing to race for.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = without_launcher(os.environ) | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads_per_rank(n))),
    }
    environment.update(env or {})
    sys.stdout.flush()
    sys.stderr.flush()
    ranks: list[_Rank] = []
    try:
        for number in range(n):
            ranks.append(_start(number, environment, work))
        _collect(ranks, deadline, timeout)
    finally:
        _end(ranks)
    _raise_first_failure(ranks)
    return [pickle.loads(rank.report["value"]) for rank in ranks]


def threads_per_rank(n: int) -> int:
    """Each rank's share of the cores this process may use, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // n)


def _start(number: int, environment: Mapping[str, str], work: bytes) -> _Rank:
    reader, writer = os.pipe()
    work_reader = _memory_file(work)
    process = subprocess.Popen(
        [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), str(writer), str(work_reader), str(os.getpid())],
        env=dict(environment) | {"RANK": str(number), "LOCAL_RANK": str(number)},
        stdin=subprocess.DEVNULL,
        pass_fds=(writer, work_reader),
        start_new_session=True,  # a group of its own; Ctrl-C reaches the caller, which ends the group
    )
    os.close(writer)
    os.close(work_reader)
    os.set_blocking(reader, False)
    return _Rank(number, process, reader, os.pidfd_open(process.pid))


def _memory_file(content: bytes) -> int:
    descriptor = os.memfd_create("fusewire-work")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _collect(ranks: list[_Rank], deadline: float | None, timeout: float | None) -> None:
    """Until every rank has reported, or one has failed and the others have had their grace."""
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.pipe, selectors.EVENT_READ, rank)
            selector.register(rank.pidfd, selectors.EVENT_READ, rank)
        grace: float | None = None
        while any(rank.report is None for rank in ranks):
            limits = [limit for limit in (deadline, grace) if limit is not None]
            events = selector.select(max(0.0, min(limits) - time.monotonic()) if limits else None)
            for key, _ in events:
                _read(key.data, ended=key.fd == key.data.pidfd)
                if key.data.report is not None and key.data.pipe in selector.get_map():
                    selector.unregister(key.data.pipe)
                    selector.unregister(key.data.pidfd)
            now = time.monotonic()
            if grace is None and any(rank.failed() for rank in ranks):
                grace = now + _GRACE
            if grace is not None and now >= grace:
                return
            if deadline is not None and now >= deadline and grace is None:
                late = ", ".join(str(rank.number) for rank in ranks if rank.report is None)
                if late:
                    raise TimeoutError(
                        f"fusewire.run: rank {late} of {len(ranks)} had not finished after {timeout:g} s"
                    )


def _read(rank: _Rank, ended: bool) -> None:
    """Takes what is in the pipe; `rank.report` is set once it is complete, or will never be."""
    while rank.report is None:
        try:
            chunk = os.read(rank.pipe, 1 << 20)
        except BlockingIOError:
            chunk = b""
        rank.data += chunk
        if len(rank.data) >= 8 and len(rank.data) == 8 + int.from_bytes(rank.data[:8], "little"):
            rank.report = pickle.loads(rank.data[8:])
            rank.data.clear()
        elif not chunk:
            if ended:
                rank.report = {"died": True, "time": time.monotonic()}
            return


def _end(ranks: list[_Rank]) -> None:
    """Ends every process group and collects every process. Ranks that have reported get a moment to leave cleanly."""
    deadline = time.monotonic() + (_GRACE if all(rank.report is not None for rank in ranks) else 0.0)
    try:
        for rank in ranks:
            select.select([rank.pidfd], [], [], max(0.0, deadline - time.monotonic()))
    finally:
        for rank in ranks:
            # Before the leader is collected, so that its number cannot be another's yet.
            os.killpg(rank.process.pid, signal.SIGKILL)
            rank.process.wait()
            os.close(rank.pidfd)
            os.close(rank.pipe)


def _raise_first_failure(ranks: list[_Rank]) -> None:
    failures = [rank for rank in ranks if rank.failed()]
    if not failures:
        return
    first = min(failures, key=lambda rank: (rank.report.get("consequence", False), rank.report["time"]))
    report, size = first.report, len(ranks)
    if "died" in report:
        raise _death(first, size)
    error = None
    try:
        error = pickle.loads(report["exception"])
    except Exception:  # an exception class that does not survive pickling
        pass
    if not isinstance(error, BaseException) or isinstance(error, (SystemExit, KeyboardInterrupt)):
        error = RuntimeError(f"rank {first.number} of {size} raised {report['text']}")
    error.fusewire_rank = first.number
    raise error from RemoteTraceback(first.number, size, report["traceback"])


def _death(rank: _Rank, size: int) -> Exception:
    from .errors import PeerLostError

    code = rank.process.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    error = PeerLostError(f"rank {rank.number} of {size} {how} before it returned a result")
    error.rank = error.fusewire_rank = rank.number
    return error


def _child() -> None:
    """The rank's side: `python -c _BOOTSTRAP sys.path report-fd work-fd parent-pid`."""
    report_fd, work_fd, parent = map(int, sys.argv[2:5])
    sys.argv[1:] = []
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    for descriptor in (report_fd, work_fd):
        os.set_inheritable(descriptor, False)

    import cloudpickle

    try:
        with open(work_fd, "rb") as file:
            fn, args, kwargs = pickle.load(file)
        report = {"value": cloudpickle.dumps(fn(*args, **kwargs))}
        code = 0
    except BaseException as error:
        report = _describe(error)
        code = 1
    message = pickle.dumps(report)
    with open(report_fd, "wb") as file:
        file.write(len(message).to_bytes(8, "little") + message)
    if code:
        _leave(report["text"])
    sys.exit(code)


def _describe(error: BaseException) -> dict[str, Any]:
    import cloudpickle

    from . import errors

    text = "".join(traceback.format_exception_only(error)).strip()
    try:
        pickled = cloudpickle.dumps(error)
    except Exception:
        pickled = b""
    return {
        "exception": pickled,
        "text": text,
        "traceback": "".join(traceback.format_exception(error)),
        "consequence": isinstance(error, (errors.PeerLostError, errors.ShutdownError)),
        "time": time.monotonic(),
    }


def _leave(reason: str) -> None:
    """Tells the peers why this rank leaves, so that their errors can say it."""
    from . import _state

    _state._leave(clean=False, reason=reason)
