"""Subsets of the ranks that communicate among themselves.

Wherever a `process_set=` is taken, a torch.distributed ProcessGroup is taken too. The first operation that uses a group
makes a process set of its members, for which it waits for all of them; later ones find it. The default group is the
global set.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from . import _core, _state
from .errors import NotInitializedError


def _ranks(ranks: Any) -> list[int]:
    try:
        if isinstance(ranks, (str, bytes)):
            raise TypeError
        return [int(rank) for rank in ranks]
    except (TypeError, ValueError):
        raise TypeError(
            f"a process set is made of global ranks, such as ProcessSet([0, 2]), and got {type(ranks).__name__}; MPI "
            "communicators are not supported: pass the list of their ranks in the whole job"
        ) from None


class ProcessSet:
    """Global ranks that run operations together.

    Make one, then hand it to `init(process_sets=[...])` or `add_process_set` on every rank, in the same order.

    Args:
        ranks: global ranks, distinct; their order does not matter. TypeError for anything else, such as an MPI
            communicator.
    """

    process_set_id: int | None

    def __init__(self, ranks: Iterable[int]) -> None:
        chosen = _ranks(ranks)
        if not chosen or len(set(chosen)) != len(chosen) or min(chosen) < 0:
            raise ValueError(f"a process set needs distinct ranks, all >= 0, at least one; got {chosen}")
        self._ranks: list[int] | None = sorted(chosen)
        self.process_set_id = None

    @property
    def ranks(self) -> list[int]:
        """The members' global ranks, sorted."""
        return list(range(_state.size())) if self._ranks is None else list(self._ranks)

    def registered_id(self) -> int:
        """`process_set_id`; ValueError while it has none."""
        if self.process_set_id is None:
            raise ValueError(
                f"{self} is not registered, or was removed; pass it to init() or add_process_set() before using it"
            )
        return self.process_set_id

    def size(self) -> int:
        """How many members there are."""
        return _state.size() if self._ranks is None else len(self._ranks)

    def rank(self) -> int:
        """This process's place among the members, -1 when it is none of them. NotInitializedError before init()."""
        mine = _state.rank()
        if self._ranks is None:
            return mine
        return self._ranks.index(mine) if mine in self._ranks else -1

    def included(self) -> bool:
        """Whether this process is a member. NotInitializedError before init()."""
        mine = _state.rank()
        return self._ranks is None or mine in self._ranks

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessSet) and self._ranks == other._ranks

    def __hash__(self) -> int:
        return hash(tuple(self._ranks or ()))

    # A copy (a module that holds a set may be copied) means the same set; what was pickled is registered nowhere.

    def __copy__(self) -> ProcessSet:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessSet:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (_the_global, ()) if self._ranks is None else (type(self), (self._ranks,))

    def __repr__(self) -> str:
        ranks = "all" if self._ranks is None else self._ranks
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={ranks})"


def _global() -> ProcessSet:
    every = ProcessSet([0])
    every._ranks = None
    every.process_set_id = 0
    return every


def _the_global() -> ProcessSet:
    return global_process_set


global_process_set = _global()

_registered: list[ProcessSet] = []
# torch group -> engine -> the set of its members. Weak: neither a group nor an engine lives longer for being known.
_adopted: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[_core.Engine, ProcessSet]]
_adopted = weakref.WeakKeyDictionary()


def add_process_set(process_set: ProcessSet | Sequence[int], *, engine: _core.Engine | None = None) -> ProcessSet:
    """Registers a process set. Every rank calls it, members or not, with the same ranks and in the same order.

    Returns the ProcessSet, from now on usable as `process_set=`. Sets may overlap, and two may have the same members.

    Raises ValueError for ranks that do not exist or a ProcessSet that is registered already, TypeError for what is no
    list of ranks, NotInitializedError before init(), TensorMismatchError when ranks disagree about the members.
    """
    from . import optimizer

    chosen = unregistered(process_set)
    running = _running(engine)
    check_ranks(chosen, running.size)
    chosen.process_set_id = _core.add_process_set(running, chosen.ranks)
    if engine is None:
        _registered.append(chosen)
        optimizer.rebind_living(running)
    return chosen


def unregistered(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """What `add_process_set` is to register. Raises its TypeError and ValueError, but for ranks that do not exist."""
    chosen = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if chosen.process_set_id is not None:
        raise ValueError(f"{chosen} is registered already")
    return chosen


def check_ranks(process_set: ProcessSet, size: int) -> None:
    """ValueError when some of the ranks do not exist in a job of `size`."""
    if process_set.ranks[-1] >= size:
        raise ValueError(f"{process_set}: there are only ranks 0 to {size - 1}")


def remove_process_set(process_set: ProcessSet, *, engine: _core.Engine | None = None) -> bool:
    """Takes a process set back. Every rank calls it, members or not. Returns whether there was something to remove:
    False for the global set, and for one that is not registered (any more).

    What all members have submitted before still runs; an operation that waits for a member raises ValueError, as every
    later use of the set does. The ProcessSet may be registered again.

    Raises TypeError for what is no ProcessSet, NotInitializedError before init().
    """
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"remove_process_set takes a ProcessSet, got {type(process_set).__name__}")
    running = _running(engine)
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    _core.remove_process_set(running, number)
    process_set.process_set_id = None
    if engine is None:
        _registered[:] = [other for other in _registered if other is not process_set]
    for engines in _adopted.values():
        adopted = engines.get(running)
        if adopted is not None and adopted.process_set_id == number:
            del engines[running]  # the group's next use makes a new set
    return True


def resolve(process_set: Any, engine: _core.Engine | None = None) -> ProcessSet:
    """The ProcessSet that a `process_set=` argument means: itself, or the one of a torch ProcessGroup's members.

    None is the global set, as it is torch's default group. The first use of a group waits for all its members; groups
    with the members of a registered set share that set.

    Raises TypeError for anything else, ValueError where this rank is no member of the group.
    """
    if isinstance(process_set, ProcessSet):
        return process_set
    if process_set is None:
        return global_process_set
    import torch.distributed as dist

    if isinstance(process_set, int) and process_set == _not_a_member():
        raise ValueError("this rank is not a member of the torch ProcessGroup that it wants to communicate in")
    if not (dist.is_available() and isinstance(process_set, dist.ProcessGroup)):
        raise TypeError(
            f"process_set must be a ProcessSet or a torch.distributed ProcessGroup, got {type(process_set).__name__}"
        )
    running = _running(engine)
    engines = _adopted.setdefault(process_set, weakref.WeakKeyDictionary())
    known = engines.get(running)
    if known is None:
        known = engines[running] = _adopt(sorted(dist.get_process_group_ranks(process_set)), running)
    return known


def id_of(process_set: Any, engine: _core.Engine | None = None) -> int | None:
    """The number of the set that a `process_set=` argument means; None while that is not registered."""
    if type(process_set) is ProcessSet:
        return process_set.process_set_id
    return resolve(process_set, engine).process_set_id


def registered_with(ranks: Iterable[int]) -> ProcessSet:
    """The registered set of exactly these ranks. ValueError when there is none."""
    wanted = sorted(ranks)
    for process_set in [global_process_set, *_registered]:
        if process_set.ranks == wanted:
            return process_set
    raise ValueError(
        f"ranks {wanted} are no registered process set; call add_process_set({wanted}) on every rank first"
    )


def _adopt(ranks: list[int], running: _core.Engine) -> ProcessSet:
    import torch.distributed as dist

    if (dist.get_rank(), dist.get_world_size()) != (running.rank, running.size):
        raise ValueError(
            f"torch.distributed calls this process rank {dist.get_rank()} of {dist.get_world_size()}, and Fusewire "
            f"rank {running.rank} of {running.size}: a ProcessGroup cannot be used as a process set here"
        )
    if len(ranks) == running.size:
        return global_process_set
    chosen = ProcessSet(ranks)
    chosen.process_set_id = _core.adopt_process_set(running, ranks)
    return chosen


def _running(engine: _core.Engine | None) -> _core.Engine:
    running = engine if engine is not None else _core.get_default_engine()
    if running is None:
        raise NotInitializedError("Fusewire is not running in this process; call fusewire.init() first")
    return running


def _not_a_member() -> Any:
    """What torch.distributed.new_group returns on ranks outside of the group."""
    import torch.distributed as dist

    return getattr(getattr(dist, "GroupMember", None), "NON_GROUP_MEMBER", None)


def knows(running: _core.Engine, number: int | None) -> bool:
    """Whether there is a set of this number in the engine."""
    try:
        return number is not None and bool(running.members(number))
    except ValueError:
        return False


def forget_removed(running: _core.Engine) -> None:
    """After join(): others may have removed sets meanwhile."""
    if running is _core.get_default_engine():
        for process_set in _registered:
            if not knows(running, process_set.process_set_id):
                process_set.process_set_id = None
        _registered[:] = [process_set for process_set in _registered if process_set.process_set_id is not None]
    for engines in _adopted.values():
        adopted = engines.get(running)
        if adopted is not None and not knows(running, adopted.process_set_id):
            del engines[running]


def _forget_all() -> None:
    """After shutdown(): ids belong to an engine that is gone."""
    for process_set in _registered:
        process_set.process_set_id = None
    for engines in _adopted.values():
        for process_set in engines.values():
            if process_set is not global_process_set:
                process_set.process_set_id = None
    _registered.clear()
    _adopted.clear()
