"""Who averages with whom: the `process_group` of an averager, as users give it and as the engine wants it."""

from __future__ import annotations

import weakref
from typing import Any

from .. import _core, _state
from ..errors import NotInitializedError
from ..process_sets import ProcessSet, global_process_set, knows, resolve


class Peers:
    """The ranks that average with each other.

    Args:
        process_group: a ProcessSet, a ProcessGroup of torch.distributed, what torch gives to a rank outside of a group
            (`GroupMember.NON_GROUP_MEMBER`), or None for all ranks. The first use of a torch group waits for all its
            members.
        engine: None is the process's default engine, which is started from torch.distributed's default group if need
            be.

    `group` is what users see: what they gave, or for None torch's default group where the ranks of Fusewire have one,
    else the global process set. `ranks` are global and sorted; `index` is this rank's place among them, -1 outside.
    `whole` is what these peers were split from.

    Raises NotInitializedError when there is no engine and nothing to start it from, ValueError for a set that is not
    registered or a group that belongs to another job, TypeError for anything else.
    """

    def __init__(
        self,
        process_group: Any = None,
        engine: _core.Engine | None = None,
        whole: Peers | None = None,
    ) -> None:
        running = engine if engine is not None else _started()
        self._engine = engine
        self.whole = whole or self
        self.group: Any = process_group
        if process_group is None:
            world = _world_of(running) if engine is None else None
            self.group = global_process_set if world is None else world
        self._outside = not isinstance(self.group, ProcessSet) and _stands_for_outside(self.group)
        self._adopted: tuple[weakref.ref[_core.Engine], ProcessSet] | None = None
        self.ranks: list[int] = [] if self._outside else running.members(self.process_set.registered_id())
        self.included = running.rank in self.ranks
        self.index = self.ranks.index(running.rank) if self.included else -1

    @property
    def size(self) -> int:
        """How many they are; -1 outside of a torch group, where torch itself does not say."""
        return -1 if self._outside else len(self.ranks)

    @property
    def process_set(self) -> ProcessSet:
        """Their set in the engine that runs now. After a shutdown() and a new init() that may be another one."""
        if self._adopted is None:
            return resolve(self.group, self._engine)
        running = running_engine(self._engine)
        if self._adopted[0]() is not running or not knows(running, self._adopted[1].process_set_id):
            self._adopt(running)  # the set may have been somebody else's as well, who has removed it
        return self._adopted[1]

    def split(self, size: int) -> Peers | None:
        """This rank's share of the ranks when they are divided into groups of `size`, in order; None outside of them.

        All members call it; other ranks may. The new group is a process set, but for torch's default group, whose ranks
        are there to make groups as torch wants it, all of them together: of that it is a torch group.

        Raises ValueError on members when the ranks cannot be divided like that.
        """
        if not self.included:
            return None
        if not 1 <= size <= self.size or self.size % size:
            raise ValueError(
                f"{self.size} ranks cannot be divided into groups of {size}: a group size must be at least 1 and "
                f"divide {self.size}"
            )
        if size == self.size:
            return self
        if not isinstance(self.group, ProcessSet):
            import torch.distributed as dist

            if self.group is dist.group.WORLD:
                return Peers(dist.new_subgroups(group_size=size)[0], self._engine, self)
        begin = self.index // size * size
        part = Peers(self.group, self._engine, self)
        part.ranks, part.index = self.ranks[begin : begin + size], self.index - begin
        part._adopt(running_engine(self._engine))
        return part

    def _adopt(self, running: _core.Engine) -> None:
        """Makes a set of `ranks`, or takes the one that there is. Its members call this, and nobody else needs to."""
        chosen = ProcessSet(self.ranks)
        chosen.process_set_id = _core.adopt_process_set(running, self.ranks)
        self.group, self._adopted = chosen, (weakref.ref(running), chosen)


def running_engine(engine: _core.Engine | None) -> _core.Engine:
    """`engine`, or the default one. NotInitializedError when it does not run any more."""
    running = engine if engine is not None else _core.get_default_engine()
    if running is None:
        raise NotInitializedError("Fusewire is not running any more in this process; call fusewire.init()")
    return running


def _started() -> _core.Engine:
    """The default engine. It may be that nobody called init(), but torch.distributed knows the job."""
    if not _state.is_initialized():
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise NotInitializedError(
                "an averager needs to know its ranks: call fusewire.init() first, or "
                "torch.distributed.init_process_group()"
            )
        _state.init()
    return running_engine(None)


def _world_of(running: _core.Engine) -> Any:
    """torch.distributed's default group where its ranks are those of the engine."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.group.WORLD if (dist.get_rank(), dist.get_world_size()) == (running.rank, running.size) else None


def _stands_for_outside(group: Any) -> bool:
    """Whether this is torch's stand-in for a group that this rank is not in. TypeError for what is no group at all."""
    import torch.distributed as dist

    if dist.is_available():
        if isinstance(group, dist.ProcessGroup):
            return False
        if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
            return True
    raise TypeError(f"process_group must be None, a ProcessSet or a torch ProcessGroup, got {type(group).__name__}")
