"""Throw-away jobs, for tests in which ranks die: every rank is a process of its own that ends as a user's script would.

A launcher process imports torch and fusewire once and forks the ranks of each job from there, so that a job starts in
milliseconds. A forked rank leaves the launcher's loop and runs the body at the top of the interpreter: exceptions,
sys.exit() and exit handlers end it exactly as they end a script.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import cloudpickle
from rank_pool import SCALE, launcher_variables


@dataclass
class Ended:
    """How one rank ended. `code` is negative for a signal; `notes` is what its body noted, in order."""

    code: int | None
    output: str
    errors: str
    notes: list[dict] = field(default_factory=list)

    def note(self, key):
        """The value noted under `key`; the rank's stderr is in the failure when there is none."""
        found = [note[key] for note in self.notes if key in note]
        assert found, f"nothing noted as {key!r}; the rank ended with {self.code} and wrote:\n{self.errors}"
        return found[-1]


class Launcher:
    """The process that the ranks of throw-away jobs are forked from."""

    def __init__(self) -> None:
        here, there = socket.socketpair()
        self._pipe = here.makefile("rwb")
        paths = [str(Path(__file__).parent)] + [p for p in sys.path if p]
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import jobs; jobs._launch({there.fileno()})"],
            pass_fds=[there.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        there.close()

    def close(self) -> None:
        self._pipe.close()
        self._process.wait(10)

    def start(self, body, size, *arguments, only=None, env=None) -> Job:
        """Runs body(*arguments) in `size` ranks (or only in the ranks `only`)."""
        return Job(self, body, size, arguments, range(size) if only is None else only, env or {})

    def run(self, body, size, *arguments, timeout=30.0, **options) -> list[Ended]:
        """Starts a job and waits for all of its ranks."""
        with self.start(body, size, *arguments, **options) as job:
            return job.wait(timeout)

    def request(self, **message) -> dict:
        pickle.dump(message, self._pipe)
        self._pipe.flush()
        return pickle.load(self._pipe)


class Job:
    """The ranks of one job. Used as a context: none of them, nor any child of theirs, outlives it."""

    def __init__(self, launcher, body, size, arguments, only, env) -> None:
        self._launcher = launcher
        self._folder = tempfile.TemporaryDirectory(prefix="fusewire-job-")
        payload = Path(self._folder.name) / "body"
        payload.write_bytes(cloudpickle.dumps((body, arguments)))
        port = _free_port()
        variables = {rank: launcher_variables(rank, size, port) | env for rank in only}
        self.pids = launcher.request(start=str(payload), variables=variables)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_) -> None:
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._launcher.request(reap=list(self.pids.values()))
        self._folder.cleanup()

    def wait(self, timeout) -> list[Ended]:
        """Until every rank has ended. AssertionError, with what they wrote, when they have not after `timeout` s."""
        codes = self._launcher.request(wait=self.pids, timeout=timeout * SCALE)
        ended = [self._ended(rank, codes[rank]) for rank in self.pids]
        late = [rank for rank, code in codes.items() if code is None]
        texts = "".join(f"\n--- rank {r}: {end.notes}\n{end.errors}" for r, end in zip(self.pids, ended, strict=True))
        assert not late, f"ranks {late} had not ended after {timeout:g} s{texts}"
        return ended

    def notes(self, rank) -> list[dict]:
        path = self._file(rank, "notes")
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until_noted(self, rank, key, timeout=20.0):
        """The value the rank notes under `key`, as soon as it has."""
        deadline = time.monotonic() + timeout * SCALE
        while True:
            for note in self.notes(rank):
                if key in note:
                    return note[key]
            error = self._file(rank, "err")
            assert time.monotonic() < deadline, f"rank {rank} did not note {key!r} in time\n{error.read_text()}"
            time.sleep(0.01)

    def family(self) -> list[int]:
        """Pids of all processes of the job that live: every rank leads a session, and its children are in it."""
        living = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                except OSError:
                    continue
                if int(session) in self.pids.values() and state != "Z":
                    living.append(int(folder.name))
        return living

    def _file(self, rank, kind) -> Path:
        return Path(self._folder.name) / f"{rank}.{kind}"

    def _ended(self, rank, code) -> Ended:
        texts = [self._file(rank, kind).read_text(errors="replace") for kind in ("out", "err")]
        return Ended(code, *texts, self.notes(rank))


def note(**values) -> None:
    """In a rank: tells the test something, at once."""
    with open(os.environ["FUSEWIRE_TEST_NOTES"], "a") as file:
        file.write(json.dumps(values) + "\n")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---- in the launcher's process ----


def _launch(descriptor) -> None:
    """Serves requests. Returns only in a forked rank, whose body has then been run, or when the tests are over."""
    import torch

    import fusewire  # noqa: F401

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipe = socket.socket(fileno=descriptor).makefile("rwb")
    while True:
        try:
            message = pickle.load(pipe)
        except EOFError:
            return
        if "start" in message:
            pids = {}
            for rank, variables in message["variables"].items():
                pids[rank] = os.fork()
                if pids[rank] == 0:
                    _become_rank(message["start"], rank, variables)
                    return
            answer = pids
        elif "wait" in message:
            answer = _wait(message["wait"], time.monotonic() + message["timeout"])
        else:
            answer = {pid: _reap(pid) for pid in message["reap"]}
        pickle.dump(answer, pipe)
        pipe.flush()


def _become_rank(payload, rank, variables) -> None:
    os.setsid()
    # A shell has the jobs that it runs in the background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = Path(payload).parent
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.environ.update(variables, FUSEWIRE_TEST_NOTES=str(folder / f"{rank}.notes"))
    body, arguments = pickle.loads(Path(payload).read_bytes())
    body(*arguments)


_codes: dict[int, int] = {}


def _reap(pid) -> int:
    if pid not in _codes:
        _codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return _codes[pid]


def _wait(pids, deadline) -> dict[int, int | None]:
    codes: dict[int, int | None] = {}
    for rank, pid in pids.items():
        if pid not in _codes:
            handle = os.pidfd_open(pid)
            ready, _, _ = select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
            os.close(handle)
            if not ready:
                codes[rank] = None
                continue
        codes[rank] = _reap(pid)
    return codes
