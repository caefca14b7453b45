"""Ranks of a pool that mpirun starts, for the data plane over MPI.

FUSEWIRE_TEST_MPIRUN is the command without its `-n`; `./dev test --mpi` sets it.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

COMMAND = shlex.split(os.environ.get("FUSEWIRE_TEST_MPIRUN", ""))
_START_SECONDS = 120.0


class MpiRank:
    """What the pool needs to know of a rank, in the words of multiprocessing.Process."""

    def __init__(self, mpirun: subprocess.Popen, pid: int, log: Path) -> None:
        self._mpirun, self.pid, self._log = mpirun, pid, log

    def is_alive(self) -> bool:
        return self._mpirun.poll() is None

    def join(self, timeout: float | None = None) -> None:
        try:
            self._mpirun.wait(timeout)
        except subprocess.TimeoutExpired:
            pass

    def kill(self) -> None:
        """Ends the whole job: mpirun takes its ranks along, and what it leaves is in its process group."""
        self._mpirun.terminate()
        self.join(2)
        if self.is_alive():
            os.killpg(self._mpirun.pid, signal.SIGKILL)

    @property
    def exitcode(self) -> str:
        return f"(of mpirun) {self._mpirun.poll()}; the end of its output:\n{self._log.read_text()[-3000:]}"


def start(size: int, port: int, folder: str, cuda: bool) -> tuple[list[MpiRank], list[Connection]]:
    """`size` ranks and a connection to each."""
    log = Path(folder) / "mpirun.log"
    address = str(Path(folder) / "pool")  # nobody else can look into that folder
    paths = [str(Path(__file__).parent)] + [p for p in sys.path if p]
    environment = {"FUSEWIRE_BACKEND": "mpi"} | os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    code = f"import mpi_ranks; mpi_ranks.main({address!r}, {size}, {port}, {folder!r}, {cuda!r})"
    with socket.socket(socket.AF_UNIX) as listener, log.open("w") as output:
        listener.bind(address)
        listener.listen(size)
        listener.settimeout(1)
        mpirun = subprocess.Popen(
            [*COMMAND, "-n", str(size), sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
        pipes: dict[int, Connection] = {}
        pids: dict[int, int] = {}
        deadline = time.monotonic() + _START_SECONDS
        while len(pipes) < size:
            try:
                there, _ = listener.accept()
            except TimeoutError:
                if mpirun.poll() is None and time.monotonic() < deadline:
                    continue
                MpiRank(mpirun, 0, log).kill()
                raise AssertionError(f"{' '.join(COMMAND)} did not start {size} ranks:\n{log.read_text()}") from None
            pipe = Connection(there.detach())
            rank, pid = pipe.recv()
            pipes[rank], pids[rank] = pipe, pid
    return [MpiRank(mpirun, pids[r], log) for r in range(size)], [pipes[r] for r in range(size)]


# ---- in the rank processes ----


def main(address: str, size: int, port: int, folder: str, cuda: bool) -> None:
    import rank_pool

    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
    there = socket.socket(socket.AF_UNIX)
    there.connect(address)
    pipe = Connection(there.detach())
    pipe.send((rank, os.getpid()))
    rank_pool.rank_main(rank, size, port, pipe, folder, cuda)
