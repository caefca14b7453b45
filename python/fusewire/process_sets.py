"""Subsets of the ranks that communicate among themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from . import _core, _state
from .errors import NotInitializedError


class ProcessSet:
    """Global ranks that run operations together.

    Make one, then hand it to `init(process_sets=[...])` or `add_process_set` on every rank, in the same order.

    Args:
        ranks: global ranks, distinct; their order does not matter.
    """

    process_set_id: int | None

    def __init__(self, ranks: Iterable[int]) -> None:
        chosen = [int(rank) for rank in ranks]
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
            raise ValueError(f"{self} is not registered; pass it to init() or add_process_set() first")
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

    def __repr__(self) -> str:
        ranks = "all" if self._ranks is None else self._ranks
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={ranks})"


def _global() -> ProcessSet:
    every = ProcessSet([0])
    every._ranks = None
    every.process_set_id = 0
    return every


global_process_set = _global()

_registered: list[ProcessSet] = []


def add_process_set(process_set: ProcessSet | Sequence[int], *, engine: _core.Engine | None = None) -> ProcessSet:
    """Registers a process set. Every rank calls it, members or not, with the same ranks and in the same order.

    Returns the ProcessSet, from now on usable as `process_set=`.

    Raises ValueError for ranks that do not exist or a set that is registered already, NotInitializedError before
    init(), TensorMismatchError when ranks disagree about the members.
    """
    chosen = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    running = engine if engine is not None else _core.get_default_engine()
    if running is None:
        raise NotInitializedError("Fusewire is not running in this process; call fusewire.init() first")
    if chosen.process_set_id is not None:
        raise ValueError(f"{chosen} is registered already")
    ranks = chosen.ranks
    if ranks[-1] >= running.size:
        raise ValueError(f"{chosen}: there are only ranks 0 to {running.size - 1}")
    chosen.process_set_id = _core.add_process_set(running, ranks)
    if engine is None:
        _registered.append(chosen)
    return chosen


def _forget_all() -> None:
    """After shutdown(): ids belong to an engine that is gone."""
    for process_set in _registered:
        process_set.process_set_id = None
    _registered.clear()


def registered_with(ranks: Iterable[int]) -> ProcessSet:
    """The registered set of exactly these ranks. ValueError when there is none."""
    wanted = sorted(ranks)
    for process_set in [global_process_set, *_registered]:
        if process_set.ranks == wanted:
            return process_set
    raise ValueError(
        f"ranks {wanted} are no registered process set; call add_process_set({wanted}) on every rank first"
    )
