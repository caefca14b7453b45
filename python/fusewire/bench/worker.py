"""One rank: opens peers and runs batches when the runner says so. Between commands it sleeps in a read.

Started as ``python -m fusewire.bench.worker`` with the launcher's variables RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
(or those of mpirun), FUSEWIRE_BENCH_SIZE, FUSEWIRE_BENCH_ADDRESS and FUSEWIRE_BENCH_KEY.
"""

from __future__ import annotations

import gc
import os
import time
import traceback
from multiprocessing.connection import Client, Connection
from typing import Any

import torch

from .cases import Case, Contender
from .peers import PEERS, Peer
from .workloads import CheckResult, Workload, make_workload

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "RANK")


class Worker:
    """Every public method is a command; its result, or the text of its exception, goes back to the runner."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.peers: dict[str, Peer] = {}
        self.workload: Workload | None = None

    def open(self, peer: str) -> str:
        opened = PEERS[peer]()
        version = opened.open()
        self.peers[peer] = opened
        return version

    def load(self, case: Case) -> None:
        self._unload()
        gc.collect()
        self.workload = make_workload(case, self.peers, self.rank, self.size)

    def check(self, contender: Contender) -> CheckResult:
        return self._loaded().check(contender)

    def prepare(self, contender: Contender) -> None:
        self._loaded().prepare(contender)

    def batch(self, contender: Contender, start_ns: int, warm_ups: int, iterations: int) -> tuple[int, int, int]:
        """From ``start_ns`` on: untimed, then timed iterations, back to back; when the timed ones began and ended, and
        the CPU time that all threads of this process took meanwhile."""
        step = self._loaded().step(contender)
        sleep_until(start_ns)
        for _ in range(warm_ups):
            step()
        begin, cpu = time.perf_counter_ns(), time.process_time_ns()
        for _ in range(iterations):
            step()
        return begin, time.perf_counter_ns(), time.process_time_ns() - cpu

    def idle(self, seconds: float) -> float:
        """Percent of one core that all threads of this process use while nothing is asked of it."""
        begin, cpu = time.perf_counter(), time.process_time()
        time.sleep(seconds)
        return 100 * (time.process_time() - cpu) / (time.perf_counter() - begin)

    def close(self) -> None:
        self._unload()
        for peer in self.peers.values():
            peer.close()

    def _unload(self) -> None:
        if self.workload is not None:
            self.workload.close()
        self.workload = None

    def _loaded(self) -> Workload:
        if self.workload is None:
            raise RuntimeError("no case is loaded")
        return self.workload


def sleep_until(start_ns: int) -> None:
    """Return at ``start_ns`` of the monotonic clock, which the processes of a host share; spins for the last 100 us."""
    ahead = start_ns - time.perf_counter_ns() - 100_000
    if ahead > 0:
        time.sleep(ahead / 1e9)
    while time.perf_counter_ns() < start_ns:
        pass


def serve(connection: Connection, worker: Worker) -> None:
    """Answer commands (method name, arguments) with (True, result) or (False, text), until told to close."""
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:  # the runner is gone
            os._exit(1)
        answer: tuple[bool, Any]
        try:
            answer = True, getattr(worker, method)(*arguments)
        except Exception as error:
            detail = "".join(traceback.format_exception(error))
            answer = False, (f"{type(error).__name__}: {error}", detail)
        connection.send(answer)
        if method == "close":
            return


def main() -> None:
    torch.set_num_threads(1)
    rank = int(next(os.environ[name] for name in RANK_VARIABLES if name in os.environ))
    size = int(os.environ["FUSEWIRE_BENCH_SIZE"])
    key = bytes.fromhex(os.environ["FUSEWIRE_BENCH_KEY"])
    with Client(os.environ["FUSEWIRE_BENCH_ADDRESS"], "AF_UNIX", authkey=key) as connection:
        connection.send(rank)
        serve(connection, Worker(rank, size))


if __name__ == "__main__":
    main()
