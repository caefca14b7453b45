"""What every kind of wrapped optimizer needs: methods on the object itself, names for parameters, checks."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from . import _core
from .errors import FusewireError
from .process_sets import ProcessSet

Groups = int | Sequence[Sequence[torch.Tensor]] | None


class Attachment:
    """What a wrapped optimizer carries. It refers to the optimizer weakly, so that dropping that ends everything.

    A subclass gives the methods that users call: synchronize, skip_synchronize and set_backward_passes_per_step.
    """

    METHODS = ("synchronize", "skip_synchronize", "set_backward_passes_per_step")

    def __init__(self, optimizer: torch.optim.Optimizer, process_set: ProcessSet, names: dict[int, str]) -> None:
        self.process_set = process_set
        self.names = names  # id(parameter) -> name
        self.rebound = False  # by a later init(); scripts wrap again then
        self._optimizer = weakref.ref(optimizer)
        self._engine: _core.Engine | None = None

    def bind(self, engine: _core.Engine) -> None:
        """Works on this engine from now on, if this rank is a member of the process set there."""
        raise NotImplementedError

    def added(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has got a parameter group."""
        self.name_new(optimizer)

    def name_new(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
        """Gives names to the parameters that have come since, and returns these."""
        found = []
        taken = set(self.names.values())
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if id(parameter) in self.names:
                    continue
                listed = group.get("param_names")
                name = listed[index] if listed else f"added.{number}.{index}"
                while name in taken:
                    name += "'"
                taken.add(name)
                self.names[id(parameter)] = name
                found.append((name, parameter))
        return found

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        for name in self.METHODS:
            optimizer.__dict__[name] = getattr(self, name)
        optimizer.__dict__["add_param_group"] = self._add_param_group
        optimizer.__dict__["__getstate__"] = self._getstate
        optimizer.__dict__["_fusewire"] = self

    def unhook(self, optimizer: torch.optim.Optimizer) -> None:
        for name in (*self.METHODS, "add_param_group", "__getstate__", "_fusewire"):
            optimizer.__dict__.pop(name, None)

    def is_dead(self) -> bool:
        """Whether its engine has been shut down or has failed."""
        assert self._engine is not None
        try:
            self._engine.raise_failure()
        except FusewireError:
            return True
        return False

    def is_replaceable(self) -> bool:
        """Whether the optimizer may be wrapped again: its wrapping is dead, or was until a later init()."""
        return self.rebound or self.is_dead()

    def _add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's own; the new parameters are taken care of, too. Call it on every rank."""
        owner = self._owner()
        type(owner).add_param_group(owner, param_group)
        self.added(owner)

    def _getstate(self) -> Any:
        """A copy is a plain local optimizer; its `synchronize()` says so."""
        owner = self._owner()
        state = type(owner).__getstate__(owner)
        if isinstance(state, dict):
            ours = (*self.METHODS, "add_param_group", "__getstate__", "_fusewire")
            state = {key: value for key, value in state.items() if key not in ours}
            state |= {name: NotWrapped(name) for name in self.METHODS}
        return state

    def _owner(self) -> torch.optim.Optimizer:
        owner = self._optimizer()
        if owner is None:
            raise ReferenceError("the optimizer that this method belongs to is gone")
        return owner


class NotWrapped:
    """Stands for a method of a wrapped optimizer in its copies."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{self._name}() belongs to a distributed optimizer, and this one is a local copy of it (by pickle or "
            "deepcopy): wrap it again with fusewire.DistributedOptimizer"
        )


def identities(optimizer: torch.optim.Optimizer) -> list[int]:
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def check_passes(passes: int) -> None:
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step must be an integer >= 1, got {passes!r}")


def check_groups(groups: Groups, num_groups: int) -> Groups:
    if num_groups:
        warnings.warn("num_groups is deprecated, use groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None or isinstance(groups, int):
        if isinstance(groups, bool) or (groups is not None and groups < 0):
            raise ValueError(f"groups must be an integer >= 0 or lists of parameters, got {groups}")
        return groups or None
    try:
        lists = [list(group) for group in groups]
    except TypeError:
        raise ValueError(f"groups must be an integer >= 0 or lists of parameters, got {groups!r}") from None
    if not all(isinstance(tensor, torch.Tensor) for group in lists for tensor in group):
        raise ValueError("groups must hold lists of parameters, and something else is in one of them")
    if any(count > 1 for count in Counter(id(tensor) for group in lists for tensor in group).values()):
        raise ValueError("a parameter can be in one group only, and one is in several")
    return lists


def names_of(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[int, str]:
    """id(parameter) -> name, for every parameter of the optimizer."""
    if named_parameters is None:
        return _default_names(optimizer)
    pairs = list(named_parameters)
    for pair in pairs:
        ok = (
            isinstance(pair, tuple)
            and len(pair) == 2
            and isinstance(pair[0], str)
            and isinstance(pair[1], torch.Tensor)
        )
        if not ok:
            raise ValueError(
                "named_parameters must be (name, parameter) pairs, such as model.named_parameters(), and one item is "
                f"{type(pair).__name__}"
            )
    duplicates = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if duplicates:
        raise ValueError(f"names in named_parameters must be unique, and these are not: {', '.join(duplicates)}")
    given: dict[int, str] = {}
    for name, parameter in pairs:
        given.setdefault(id(parameter), name)  # tied parameters have several names
    missing = [
        f"parameter {index} of group {number}, shape {tuple(parameter.shape)}"
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if id(parameter) not in given
    ]
    if missing:
        raise ValueError(f"named_parameters has no name for: {'; '.join(missing)}")
    return {identity: given[identity] for identity in identities(optimizer)}


def _default_names(optimizer: torch.optim.Optimizer) -> dict[int, str]:
    names: dict[int, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        listed = group.get("param_names")
        for index, parameter in enumerate(group["params"]):
            names.setdefault(id(parameter), listed[index] if listed else f"{number}.{index}")
    return names


def units(optimizer: torch.optim.Optimizer, groups: Groups) -> Iterator[list[torch.Tensor]]:
    """The parameters in the units that travel together; a unit has one dtype and device."""
    parameters = list({id(p): p for group in optimizer.param_groups for p in group["params"]}.values())
    own = {id(parameter) for parameter in parameters}
    if isinstance(groups, int) and parameters:
        count = min(groups, len(parameters))
        size, extra = divmod(len(parameters), count)
        ends = [number * size + min(number, extra) for number in range(count + 1)]
        groups = [parameters[begin:end] for begin, end in pairwise(ends)]
    for group in groups if isinstance(groups, list) else ():
        kinds: dict[Any, list[torch.Tensor]] = {}
        for parameter in group:
            if id(parameter) in own:  # names and groups may cover more than this optimizer
                own.remove(id(parameter))
                kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        yield from kinds.values()
    yield from ([parameter] for parameter in parameters if id(parameter) in own)
