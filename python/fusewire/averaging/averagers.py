"""When parameters are averaged, with the names and rules of torch.distributed's averagers.

Unlike those, an averager here takes every parameter it is given, whether or not it has a gradient: ranks could
otherwise average different ones with each other. And it works in place: parameters keep their memory, strides and
dtype, so that views, optimizer state and hooks stay valid.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch

from .. import _core, ops
from ..functions import _wait_for_all
from ..process_sets import ProcessSet, global_process_set

Parameters = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]


class ModelAverager(ABC):
    """Base of all averagers.

    Args:
        process_group: the ranks that average with each other: None (all), a ProcessSet, or a torch ProcessGroup whose
            ranks have been registered as a ProcessSet.

    `step` counts the calls of `average_parameters`.
    """

    def __init__(self, process_group: ProcessSet | Any | None = None, *, engine: _core.Engine | None = None) -> None:
        self.process_group = process_group
        self._process_set = _process_set(process_group)
        self._engine = engine
        self.step = 0

    @abstractmethod
    def average_parameters(self, params: Parameters) -> None:
        """Averages the parameters if it is time to; counts one step."""


class PeriodicModelAverager(ModelAverager):
    """Averages every `period` steps once `warmup_steps` are over: when step >= warmup_steps and (step - warmup_steps)
    is a multiple of `period`.

    Args:
        period: steps from one averaging to the next, at least 1.
        warmup_steps: steps at the start without averaging, at least 0.
        process_group: see ModelAverager.

    Raises ValueError for a period below 1 or negative warmup_steps. A period of 1 warns: averaging gradients costs the
    same and converges better.
    """

    def __init__(
        self,
        period: int,
        warmup_steps: int = 0,
        process_group: ProcessSet | Any | None = None,
        *,
        engine: _core.Engine | None = None,
    ) -> None:
        super().__init__(process_group, engine=engine)
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps must be 0 or more, got {warmup_steps}")
        if period < 1:
            raise ValueError(f"period must be 1 or more, got {period}")
        if period == 1:
            warnings.warn(
                "period=1 averages all parameters in every step, which costs as much as averaging the gradients with "
                "DistributedOptimizer; use that, or a longer period",
                stacklevel=2,
            )
        self.period = period
        self.warmup_steps = warmup_steps

    def average_parameters(self, params: Parameters) -> None:
        """Averages the parameters in place if it is time to; counts one step.

        Args:
            params: parameters, (name, parameter) pairs, or an optimizer's param_groups; the same on every rank.

        Raises TensorMismatchError naming the parameter when shapes or dtypes differ between ranks, and the other errors
        of an allreduce.
        """
        if self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0:
            average_in_place(params, self._process_set, self._engine)
        self.step += 1


def average_in_place(params: Parameters, process_set: ProcessSet, engine: _core.Engine | None = None) -> None:
    """Replaces every parameter by its mean over the ranks of the set. Ranks outside it do nothing."""
    named = _named(params)
    running = engine if engine is not None else _core.get_default_engine()
    if running is not None and running.rank not in running.members(process_set.registered_id()):
        return
    _wait_for_all(
        ops.allreduce_async_(tensor, name=f"average_parameters.{name}", process_set=process_set, engine=engine)
        for name, tensor in named
    )


def _named(params: Parameters) -> list[tuple[str, torch.Tensor]]:
    """Every parameter once, in order, with a name that is the same on every rank."""
    named: dict[int, tuple[str, torch.Tensor]] = {}

    def add(name: str, tensor: torch.Tensor) -> None:
        named.setdefault(id(tensor), (name, tensor))

    for number, item in enumerate(params):
        if isinstance(item, torch.Tensor):
            add(str(number), item)
        elif isinstance(item, dict):
            listed = item.get("param_names")
            for index, tensor in enumerate(item["params"]):
                add(listed[index] if listed else f"{number}.{index}", tensor)
        elif isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], torch.Tensor):
            add(str(item[0]), item[1])
        else:
            raise NotImplementedError(f"cannot average an item of type {type(item).__name__}; give parameters")
    return list(named.values())


def _process_set(process_group: ProcessSet | Any | None) -> ProcessSet:
    if process_group is None:
        return global_process_set
    if isinstance(process_group, ProcessSet):
        return process_group
    import torch.distributed as dist

    from ..process_sets import registered_with

    if dist.is_available() and isinstance(process_group, dist.ProcessGroup):
        return registered_with(dist.get_process_group_ranks(process_group))
    raise TypeError(
        f"process_group must be None, a ProcessSet or a torch ProcessGroup, got {type(process_group).__name__}"
    )
