"""The process's default engine: init(), shutdown(), who am I, and what peers are told when this process ends."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from . import _core, _stacks
from .errors import NotInitializedError

if TYPE_CHECKING:
    from ._rendezvous import Rendezvous
    from .process_sets import ProcessSet

_lock = threading.RLock()
_engine: _core.Engine | None = None
_place: Rendezvous | None = None
_pid = 0  # the process that called init(); a forked child inherits the engine but must not use it
_failure: str | None = None  # the text of an uncaught exception of the main thread
_thread_failure: str | None = None


def init(
    comm: Sequence[int] | None = None,
    process_sets: Iterable[ProcessSet | list[int]] | str | None = None,
    **knobs: Any,
) -> None:
    """Joins this process to its job and starts the engine. Does nothing while the engine is running.

    The launcher's variables (torchrun, mpirun, srun) or an initialised default group of torch.distributed say which
    rank this is; without any of them the process is alone: rank 0 of 1.

    Args:
        comm: accepted for Horovod's sake where it means all ranks of the job.
        process_sets: sets to register at once; the same list on every rank. Sets may be added and removed at any time,
            so Horovod's "dynamic" is accepted and means none.
        knobs: the fields that FUSEWIRE_* variables set too, in lower case: `fusion_threshold` (bytes),
            `cache_capacity` (tensors), `stall_check_time`, `stall_abort_time`, `start_timeout` (seconds), `spin_us`,
            `inline_limit`, `shm_chunk` (bytes), `backend`, `gpu_backend`, `mpi_module` (path), `log_level`,
            `timeline` (path), `timeline_mark_cycles`, `timeline_limit` (bytes).

    Raises ValueError for a bad variable, knob or `comm`, TypeError for an MPI communicator, PeerLostError naming the
    ranks that did not come.
    """
    global _engine, _place, _pid, _failure, _thread_failure
    from . import _rendezvous, optimizer
    from . import process_sets as sets

    with _lock:
        if is_initialized():
            return
        chosen = _chosen_ranks(comm)
        if isinstance(process_sets, str):
            if process_sets.lower() != "dynamic":
                raise ValueError(f'process_sets must be a list of sets or "dynamic", got {process_sets!r}')
            process_sets = None
        sets._forget_all()  # a forked child inherited its parent's
        to_register = [sets.unregistered(process_set) for process_set in process_sets or ()]
        timeout = knobs.pop("start_timeout", None)
        texts = {name: _text(value) for name, value in knobs.items()}
        _core.check_config(texts)
        place = _rendezvous.rendezvous(None if timeout is None else float(timeout))
        if chosen is not None and chosen != list(range(place.size)):
            raise ValueError(
                f"init(comm={chosen}): all {place.size} ranks of the job take part; for some of them make a ProcessSet"
            )
        for process_set in to_register:
            sets.check_ranks(process_set, place.size)
        engine = place.connect(_core, texts)
        place.complete()
        _watch_exit()
        _stacks.start()
        _failure = _thread_failure = None
        _engine, _place, _pid = engine, place, os.getpid()
        _core.set_default_engine(engine)
        try:
            for process_set in to_register:
                sets.add_process_set(process_set)
        except BaseException as error:  # such as ranks that disagree; a later init() starts anew
            _leave(clean=False, reason=f"init() could not register its process sets: {error}")
            raise
        optimizer.rebind_living(engine)


def _chosen_ranks(comm: Any) -> list[int] | None:
    if comm is None:
        return None
    try:
        return sorted(int(rank) for rank in comm)
    except (TypeError, ValueError):
        raise TypeError(
            f"init(comm=) takes a list of ranks, got {type(comm).__name__}; MPI communicators are not supported"
        ) from None


def shutdown() -> None:
    """Leaves the job. Pending operations raise ShutdownError; peers go on. init() may be called again. Idempotent."""
    _leave(clean=True, reason="shutdown() was called")


def is_initialized() -> bool:
    """Whether the engine runs in this process."""
    return _engine is not None and _pid == os.getpid()


def rank() -> int:
    """This process's number among all ranks. This and the next five raise NotInitializedError before init()."""
    return _here().rank


def size() -> int:
    """How many ranks the job has."""
    return _here().size


def local_rank() -> int:
    """This process's number among the ranks of its host."""
    return _here().local_rank


def local_size() -> int:
    """How many ranks its host has."""
    return _here().local_size


def cross_rank() -> int:
    """The number of this process's host."""
    return _here().cross_rank


def cross_size() -> int:
    """How many hosts the job has."""
    return _here().cross_size


def engine() -> _core.Engine:
    """The process's engine. NotInitializedError when it does not run."""
    _here()
    assert _engine is not None
    return _engine


def data_plane() -> str | None:
    """What moves CPU tensors between the ranks ("shm", "mpi"); None before init()."""
    return _engine.data_plane if is_initialized() and _engine is not None else None


def _here() -> Rendezvous:
    if _place is None or _pid != os.getpid():
        forked = _place is not None
        raise NotInitializedError(
            "this process was forked from one that runs Fusewire and is not a rank itself; call fusewire.init() in it, "
            "or use the start method 'spawn'"
            if forked
            else "Fusewire is not running in this process; call fusewire.init() first"
        )
    return _place


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _leave(clean: bool, reason: str) -> None:
    global _engine, _place
    from . import process_sets

    with _lock:
        if not is_initialized():
            return
        engine, _engine, _place = _engine, None, None
        _core.set_default_engine(None)
        process_sets._forget_all()
    assert engine is not None
    engine.shutdown(clean, reason)
    _stacks.stop()


# Note [Telling peers why]
# A process that ends says goodbye with a reason, so that waiting peers raise it within milliseconds. The hooks below
# only remember what went wrong: an exception hook is also called by programs that go on (a GUI, an interactive
# session). The interpreter's exit is what makes it final, and it comes in two steps: before it joins the remaining
# threads, where one of them may wait for a peer that waits for us, we leave if an exception ends the script; and at
# atexit, if none did. A process that dies without either (SIGKILL, os._exit) is seen by its closed sockets.

_watching = False
# MPI_Finalize waits for the other ranks. One that does not come has failed, and its launcher ends the job anyway.
_MPI_PATIENCE = 30.0


def _watch_exit() -> None:
    global _watching
    if _watching:
        return
    _watching = True
    _chain_hooks()
    atexit.register(_at_exit)
    register = getattr(threading, "_register_atexit", None)  # what concurrent.futures uses; absent in no known CPython
    if register is not None:
        register(_before_joining_threads)


def _chain_hooks() -> None:
    previous, previous_thread = sys.excepthook, threading.excepthook

    def remember(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        global _failure
        _failure = _last_line(kind, value)
        previous(kind, value, trace)

    def remember_thread(args: Any) -> None:
        global _thread_failure
        _thread_failure = f"its thread failed: {_last_line(args.exc_type, args.exc_value)}"
        previous_thread(args)

    sys.excepthook, threading.excepthook = remember, remember_thread


def _last_line(kind: type[BaseException], value: BaseException | None) -> str:
    text = "".join(traceback.format_exception_only(kind, value)).strip()
    return text if len(text) <= 2000 else text[:2000] + "..."


def _before_joining_threads() -> None:
    if _failure is not None:
        _leave(clean=False, reason=_failure)


def _at_exit() -> None:
    if _failure is not None:
        _leave(clean=False, reason=_failure)
    else:
        _leave(clean=True, reason=_thread_failure or "its script ended")
        if _pid == os.getpid():
            _core.finish_mpi(_MPI_PATIENCE)
