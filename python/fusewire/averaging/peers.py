"""Who averages with whom: the `process_group` of an averager, as users give it and as the engine wants it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import _core, _state
from ..errors import NotInitializedError
from ..process_sets import ProcessSet, add_process_set, global_process_set, registered_with


class Peers:
    """The ranks that average with each other.

    Args:
        process_group: a ProcessSet, a ProcessGroup of torch.distributed, what torch gives to a rank outside of a group
            (`GroupMember.NON_GROUP_MEMBER`), or None for all ranks.
        engine: None is the process's default engine, which is started from torch.distributed's default group if need
            be.

    `group` is what users see: what they gave, or for None torch's default group where the ranks of Fusewire have one,
    else the global process set. `process_set` is None on a rank outside of a torch group. `ranks` are global and
    sorted.

    Raises NotInitializedError when there is no engine and nothing to start it from, ValueError for a set that is not
    registered or a group that belongs to another job, TypeError for anything else.
    """

    def __init__(
        self, process_group: Any = None, engine: _core.Engine | None = None, whole: Peers | None = None
    ) -> None:
        running = engine if engine is not None else _started()
        self.group: Any = process_group
        self.process_set: ProcessSet | None
        self.is_torch_group = False
        self._engine = engine
        if process_group is None:
            self.process_set = global_process_set
            self.group = global_process_set
            if engine is None and (world := _world_of(running)) is not None:
                self.group, self.is_torch_group = world, True
        elif isinstance(process_group, ProcessSet):
            self.process_set = process_group
        else:
            self.is_torch_group = True
            self.process_set = _process_set_of(process_group, running)
        self.ranks: list[int] = [] if self.process_set is None else running.members(self.process_set.registered_id())
        self.included = running.rank in self.ranks
        self.index = self.ranks.index(running.rank) if self.included else -1  # this rank's place among them
        self.whole = whole or self  # what they were split from

    @property
    def size(self) -> int:
        """How many they are; -1 outside of a torch group, where torch itself does not say."""
        return len(self.ranks) if self.process_set is not None else -1

    def split(self, size: int) -> Peers | None:
        """This rank's share of the ranks when they are divided into groups of `size`, in order; None where it has none.

        All ranks of the job call it. The new group is of the same kind as the whole one.

        Raises ValueError when the ranks cannot be divided like that.
        """
        if not 1 <= size <= self.size or self.size % size:
            raise ValueError(
                f"{self.size} ranks cannot be divided into groups of {size}: a group size must be at least 1 and "
                f"divide {self.size}"
            )
        if size == self.size:
            return self
        parts = [self.ranks[begin : begin + size] for begin in range(0, self.size, size)]
        registered = [_registered(part, self._engine) for part in parts]
        if self.is_torch_group:
            import torch.distributed as dist

            return Peers(dist.new_subgroups(group_size=size, group=self.group)[0], self._engine, self)
        if not self.included:
            return None
        return Peers(registered[self.index // size], self._engine, self)


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
    running = _core.get_default_engine()
    assert running is not None
    return running


def _world_of(running: _core.Engine) -> Any:
    """torch.distributed's default group where its ranks are those of the engine."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.group.WORLD if (dist.get_rank(), dist.get_world_size()) == (running.rank, running.size) else None


def _process_set_of(group: Any, running: _core.Engine) -> ProcessSet | None:
    import torch.distributed as dist

    if dist.is_available():
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            return None
        if isinstance(group, dist.ProcessGroup):
            if _world_of(running) is None:
                raise ValueError(
                    "this torch ProcessGroup belongs to other ranks than those of Fusewire (rank "
                    f"{running.rank} of {running.size})"
                )
            return registered_with(dist.get_process_group_ranks(group))
    raise TypeError(f"process_group must be None, a ProcessSet or a torch ProcessGroup, got {type(group).__name__}")


def _registered(ranks: Sequence[int], engine: _core.Engine | None) -> ProcessSet:
    try:
        return registered_with(ranks)
    except ValueError:
        return add_process_set(ProcessSet(ranks), engine=engine)
