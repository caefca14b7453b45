"""The runner's end of a set of rank processes."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from types import TracebackType
from typing import Any

START_SECONDS = 120.0
ANSWER_SECONDS = 300.0
GRACE_SECONDS = 10.0


class BenchError(Exception):
    """Something that ends the benchmark, in one sentence."""


class Group:
    """``size`` ranks that wait for commands. A context manager: leaving it ends the processes it started."""

    def __init__(self, size: int, under_mpirun: bool = False) -> None:
        self.size = size
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._directory = tempfile.TemporaryDirectory(prefix="fusewire-bench-")
        self._log = Path(self._directory.name, "stderr")
        try:
            self._start(under_mpirun)
        except BaseException:
            self._end()
            raise

    def _start(self, under_mpirun: bool) -> None:
        address = str(Path(self._directory.name, "socket"))
        key = secrets.token_bytes(16)
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "FUSEWIRE_BENCH_SIZE": str(self.size),
            "FUSEWIRE_BENCH_ADDRESS": address,
            "FUSEWIRE_BENCH_KEY": key.hex(),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        command = [sys.executable, "-m", "fusewire.bench.worker"]
        with Listener(address, "AF_UNIX", backlog=self.size, authkey=key) as listener:
            if under_mpirun:
                self._launch(["mpirun", "-n", str(self.size), *command], environment | mpi_environment(self.size))
            else:
                rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
                for rank in range(self.size):
                    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.size, "LOCAL_WORLD_SIZE": self.size}
                    self._launch(command, environment | rendezvous | {name: str(n) for name, n in ranks.items()})
            self._accept(listener)

    def _launch(self, command: list[str], environment: dict[str, str]) -> None:
        with self._log.open("ab") as log:
            self._processes.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def _accept(self, listener: Listener) -> None:
        """Wait until every rank has called. A rank that dies first ends the wait: it never will."""
        arrived: dict[int, Connection] = {}

        def accept() -> None:
            with contextlib.suppress(OSError, EOFError):
                while len(arrived) < self.size:
                    connection = listener.accept()
                    arrived[connection.recv()] = connection

        thread = threading.Thread(target=accept, name="fusewire-bench-accept", daemon=True)
        thread.start()
        waited = 0.0
        while thread.is_alive():
            thread.join(0.1)
            waited += 0.1
            if waited > START_SECONDS or any(process.poll() is not None for process in self._processes):
                raise BenchError(f"{self.size - len(arrived)} of {self.size} ranks did not start: {self._last_words()}")
        self._connections = [arrived[rank] for rank in range(self.size)]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Run the worker's ``method`` on every rank at once; the results in rank order.

        Raises BenchError with the first rank's error, or when a rank is gone or does not answer.
        """
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):  # the read below tells which rank is gone, and why
                connection.send((method, arguments))
        results: dict[int, Any] = {}
        errors: list[tuple[int, str, str]] = []
        waiting: dict[Any, int] = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + ANSWER_SECONDS
        while waiting and time.monotonic() < deadline:
            for ready in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                rank = waiting.pop(ready)
                try:
                    ok, result = self._connections[rank].recv()
                except (EOFError, ConnectionError):
                    ok, result = False, (f"the process ended: {self._last_words()}", "")
                if ok:
                    results[rank] = result
                else:
                    errors.append((rank, *result))
                    # The others may wait for this rank inside a collective: let them notice, but not for ever.
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if errors:
            rank, sentence, detail = errors[0]
            raise BenchError(f"{method} on rank {rank}: {sentence}") from (RuntimeError(detail) if detail else None)
        if waiting:
            late = ", ".join(str(rank) for rank in waiting.values())
            raise BenchError(f"rank {late} did not answer {method!r} for {ANSWER_SECONDS:.0f} s")
        return [results[rank] for rank in range(self.size)]

    def _last_words(self) -> str:
        text = self._log.read_text(errors="replace").strip() if self._log.exists() else ""
        lines = [line for line in text.splitlines() if line.strip(" -\t")]
        return " | ".join(lines[-3:]) or "it wrote no error"

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            with contextlib.suppress(BenchError):
                self.call("close")
        self._end()

    def _end(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(timeout=10 if self._connections else 0)
            except subprocess.TimeoutExpired:
                process.terminate()
                try:
                    process.wait(timeout=5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self._directory.cleanup()


def mpi_environment(size: int) -> dict[str, str]:
    """What Open MPI needs to start in a container and on fewer cores than ranks. Other MPIs ignore these."""
    # Like every other peer's ranks: the scheduler places them.
    environment = {"OMPI_MCA_hwloc_base_binding_policy": "none"}
    if size > len(os.sched_getaffinity(0)):  # not otherwise: it makes waiting ranks yield their core
        environment["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return environment


def mpi_missing() -> str:
    """'' if the MPI peer can be tried, else what is missing and how to get it."""
    if find_spec("mpi4py") is None:
        return "mpi4py is not installed (pip install mpi4py)"
    if shutil.which("mpirun") is None:
        return "mpirun is not on PATH (apt install openmpi-bin, or pip install mpich)"
    return ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
