"""Rank processes that live across tests and run test bodies on every rank.

Starting torch costs seconds, so the processes of a world size are started once, on first use, and kept. A body arrives
as a cloudpickled function, runs on all ranks at once, and its results (or its error, or where it hangs) come back. A
pool in which anything went wrong is killed and replaced, so that one failure never spoils the next test.

The ranks are children of the test process, or, with FUSEWIRE_TEST_MPIRUN, of an mpirun (mpi_ranks.py).
"""

from __future__ import annotations

import faulthandler
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path

import cloudpickle
import mpi_ranks

SECONDS = 30.0  # a body that takes longer hangs
GRACE = 3.0  # after one rank has failed, the others get this long to end too; usually they wait for it in vain
START_SECONDS = 120.0
SCALE = float(os.environ.get("FUSEWIRE_TEST_TIMEOUT_SCALE", "1"))  # for sanitizers and very busy machines


class RankFailure(AssertionError):
    """A body failed or hung on some rank; the text says where, with that rank's own traceback."""


class RankPool:
    """`size` processes with an initialised fusewire each.

    `cuda`: all use device 0 of a GPU, or of the stand-in (fake_cuda) where torch finds none.
    """

    def __init__(self, size: int, cuda: bool = False) -> None:
        from torch.distributed import TCPStore

        self.size = size
        self._source = "?"
        # As torchrun does: the launcher serves the store, and the ranks are its clients.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        self._folder = tempfile.TemporaryDirectory(prefix="fusewire-pool-")
        start = mpi_ranks.start if mpi_ranks.COMMAND else _spawn
        self._processes, self._connections = start(size, self._store.port, self._folder.name, cuda)
        try:
            self._collect("the start of the ranks", START_SECONDS * SCALE)
        except BaseException:
            self.close()
            raise

    def run(self, body, arguments=(), keywords=None, *, timeout=SECONDS, fresh=False, init=None):
        """`body(*arguments, **keywords)` on every rank; returns the list of its results by rank.

        `fresh`: shutdown() and init() before it and after it; `init` are the keywords of that init(). RankFailure when
        a rank raises or the body takes longer than `timeout` seconds; the pool is then closed.
        """
        if not (fresh or init):
            return self._call(body, arguments, keywords, timeout)
        # Three calls, because nobody may shut down before the body has ended on all ranks: the ranks that it ends
        # later on may still need those where it has ended, rank 0 above all.
        self._call(_restart, (), init or {}, SECONDS)
        results = self._call(body, arguments, keywords, timeout)
        self._call(_restart, (), {}, SECONDS)
        return results

    def _call(self, body, arguments, keywords, timeout):
        self._source = inspect.getsourcefile(body) or "?"
        message = cloudpickle.dumps((body, tuple(arguments), keywords or {}, self._source))
        try:
            for pipe in self._connections:
                try:
                    pipe.send_bytes(message)
                except OSError:
                    pass  # it died between two tests: reading says so
            return self._collect(getattr(body, "__name__", "the body"), timeout * SCALE)
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        return not self._processes

    def close(self) -> None:
        for pipe in self._connections:
            pipe.close()  # a rank that idles sees it and leaves
        deadline = time.monotonic() + 2
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._connections = [], []
        self._folder.cleanup()

    def _collect(self, what, timeout):
        """One answer of every rank, or RankFailure."""
        answers = {}
        waiting = dict(zip(self._connections, range(self.size), strict=True))
        deadline = time.monotonic() + timeout
        failed = False
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                answers[rank] = self._answer(pipe, rank)
                if answers[rank][0] != "result" and not failed:
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE * SCALE)
        if not waiting and not failed:
            return [answers[rank][1] for rank in range(self.size)]
        stacks = self._stacks(sorted(waiting.values()))
        texts = [
            f"rank {rank} of {self.size} failed:\n{text}" for rank, (kind, text) in answers.items() if kind != "result"
        ]
        if stacks:
            late = f"{GRACE * SCALE:g} s after that" if failed else f"after {timeout:g} s"
            texts.append(f"{what}: {late} rank(s) {', '.join(map(str, stacks))} of {self.size} had not ended:")
            texts += [f"--- Python stacks of rank {rank}:\n{text}" for rank, text in stacks.items()]
        raise RankFailure("\n".join(texts))

    def _answer(self, pipe, rank):
        try:
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            process = self._processes[rank]
            process.join(5)
            return "died", f"its process ended with exit code {process.exitcode}"

    def _stacks(self, ranks) -> dict[int, str]:
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        if ranks:
            time.sleep(0.5)
        texts = {rank: _stack_file(self._folder.name, rank).read_text() for rank in ranks}
        return {rank: text.replace(_PICKLED, self._source) for rank, text in texts.items()}


def _spawn(size, port, folder, cuda):
    """The rank processes and a pipe to each."""
    spawn = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    for rank in range(size):
        here, there = spawn.Pipe()
        arguments = (rank, size, port, there, folder, cuda)
        process = spawn.Process(target=rank_main, args=arguments, name=f"rank-{rank}-of-{size}", daemon=True)
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
    return processes, pipes


def _stack_file(folder, rank) -> Path:
    return Path(folder) / f"stacks-{rank}"


class Pools:
    """The pools of a test session, one per world size and kind, made on first use. Only one is busy at a time."""

    ROOM = 3 << 30  # bytes of memory below which the other pools are closed before a new one is started

    def __init__(self) -> None:
        self._pools: dict[tuple[int, bool], RankPool] = {}

    def get(self, size: int, cuda: bool = False) -> RankPool:
        pool = self._pools.get((size, cuda))
        if pool is None or pool.closed:
            if _available_memory() < self.ROOM:
                self.close()
            if cuda:
                _prepare_cuda()
            pool = self._pools[size, cuda] = RankPool(size, cuda)
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def _prepare_cuda() -> None:
    """Compiles the stand-in, which ranks would have to do while somebody waits for them."""
    import torch

    if not torch.cuda.is_available():
        import fake_cuda

        fake_cuda.build()


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def difference(a, b, where="") -> str | None:
    """Where two results first differ; None when they are bitwise equal. Understands tensors and containers of them."""
    import torch

    if type(a) is not type(b):
        return f"{where}: {type(a).__name__} and {type(b).__name__}"
    if isinstance(a, torch.Tensor):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"{where}: {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
        x, y = (t.detach().resolve_conj().contiguous().flatten().view(torch.uint8) for t in (a, b))
        if not torch.equal(x, y):
            return f"{where}: tensors differ:\n{a}\n{b}"
        return None
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return f"{where}: keys {list(a)} and {list(b)}"
        pairs = [(a[key], b[key], f"{where}[{key!r}]") for key in a]
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"{where}: {len(a)} and {len(b)} entries"
        pairs = [(x, y, f"{where}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True))]
    else:
        same = pickle.dumps(a) == pickle.dumps(b) if isinstance(a, float) else a == b
        return None if same else f"{where}: {a!r} and {b!r}"
    return next((text for pair in pairs if (text := difference(*pair))), None)


def run_equal(pool: RankPool, body, arguments=(), keywords=None, **options) -> None:
    """Runs a body whose result must be bitwise equal on every rank."""
    results = pool.run(body, arguments, keywords, **options)
    for rank, result in enumerate(results[1:], 1):
        if text := difference(results[0], result, "result"):
            raise RankFailure(f"what the test returned on rank 0 and on rank {rank} is not bitwise equal: {text}")


# ---- in the rank processes ----


def rank_main(rank, size, port, pipe, folder, cuda=False):
    """Serves the pool at the other end of `pipe` until that is closed."""
    with open(_stack_file(folder, rank), "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's: it closes the pools
        os.environ.update(launcher_variables(rank, size, port), TORCHELASTIC_USE_AGENT_STORE="True")
        try:
            import torch

            import fusewire

            torch.set_num_threads(1)
            if cuda and not torch.cuda.is_available():
                import fake_cuda

                fake_cuda.install()
                fusewire._core._set_cuda_api(fake_cuda.api_maker())
            if cuda == "default":
                torch.set_default_device("cuda")
            fusewire.init()
        except BaseException:
            pipe.send_bytes(pickle.dumps(("error", traceback.format_exc())))
            return
        pipe.send_bytes(pickle.dumps(("result", None)))
        while True:
            try:
                message = pipe.recv_bytes()
            except (EOFError, OSError):
                break
            pipe.send_bytes(_run_body(torch, message))
        os._exit(0)  # the pool is over, perhaps in the middle of a failure: no goodbyes


def _restart(**knobs) -> None:
    """The body that gives every rank a new engine."""
    import fusewire

    fusewire.shutdown()
    fusewire.init(**knobs)


def _run_body(torch, message) -> bytes:
    source = "?"
    try:
        body, arguments, keywords, source = pickle.loads(message)
        torch.manual_seed(0)  # the same on every rank
        result = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, body(*arguments, **keywords))
        if "fake_cuda" in sys.modules:
            mistakes = sys.modules["fake_cuda"].new_mistakes()
            assert not mistakes, "streams were not waited for:\n" + "\n".join(mistakes)
        return cloudpickle.dumps(("result", result))
    except BaseException as error:
        frames = error.__traceback__.tb_next or error.__traceback__  # without this function's own
        report = traceback.TracebackException(type(error), error, frames)
        _point_at(source, report)
        return pickle.dumps(("error", "".join(report.format())))


_PICKLED = "<dynamic-code>"  # cloudpickle's name for the file of what it carries


def _point_at(source, report) -> None:
    """Puts the test's file, and so its lines, into a traceback."""
    report.stack = traceback.StackSummary.from_list(
        [
            traceback.FrameSummary(source if f.filename == _PICKLED else f.filename, f.lineno, f.name)
            for f in report.stack
        ]
    )
    for inner in (report.__cause__, report.__context__):
        if inner is not None:
            _point_at(source, inner)


def launcher_variables(rank, size, port) -> dict[str, str]:
    """What torchrun would set for this rank of a job on this host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
