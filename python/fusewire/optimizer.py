"""DistributedOptimizer: a torch optimizer whose gradients are combined over all ranks.

The work is done in C++ (csrc/torch/grad_reducer.h): hooks on the parameters submit gradients, and when `backward()`
returns, every `.grad` is final. Python only attaches the reducer to the optimizer, and takes care of what no backward
could: a partial window, a rank that ran no backward, closures, parameters that came later.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from . import _core
from .compression import Compression, wire_of
from .errors import FusewireError, NotInitializedError
from .ops import Adasum, AnySet, Average, ReduceOp, Sum
from .process_sets import ProcessSet, global_process_set, resolve

Groups = int | Sequence[Sequence[torch.Tensor]] | None

_ATTACHED = ("synchronize", "skip_synchronize", "set_backward_passes_per_step", "add_param_group", "__getstate__")
_OURS = (*_ATTACHED, "_fusewire")


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: AnySet = global_process_set,
    *,
    engine: _core.Engine | None = None,
) -> torch.optim.Optimizer:
    """Makes `optimizer` combine its gradients over the ranks; returns the same object.

    From now on `.grad` is final when `backward()` returns, as with DistributedDataParallel: clip it, unscale it, read
    it, then call `step()`. A parameter that this rank did not use counts as zero; one that nobody used is left alone.
    The optimizer also gets `synchronize()` (makes gradients final after a partial window; does nothing when they are),
    `skip_synchronize()` (a context in which `step()` does not call it) and `set_backward_passes_per_step(n)`.

    Args:
        optimizer: any torch.optim.Optimizer, a user-written one too. Its class, state, defaults and hooks stay.
        named_parameters: names for the parameters, such as `model.named_parameters()`; the same on every rank.
        compression: Compression.none, .fp16, .bf16, or a class with compress() and decompress(), which then runs in
            Python at the end of backward.
        backward_passes_per_step: how many backward passes add up locally before gradients are combined. Not divided by.
        op: Average (default) or Sum.
        gradient_predivide_factor: with Average, gradients are multiplied by 1/f before the sum and by f/size after it.
        num_groups: deprecated, use `groups`.
        groups: how many fused groups to form, or lists of parameters that are reduced all or nothing.
        sparse_as_dense: turn sparse gradients into dense ones.
        process_set: the ranks that take part; on all others the optimizer stays local.

    Raises ValueError for an optimizer that is wrapped already, for names that are missing, duplicated or malformed, and
    for bad numbers; NotImplementedError for op=Adasum; NotInitializedError before init(). Afterwards `backward()` and
    `step()` raise the errors of an allreduce.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"DistributedOptimizer wraps a torch.optim.Optimizer, got {type(optimizer).__name__}")
    current = getattr(optimizer, "_fusewire", None)
    if current is not None and not current.is_dead():
        raise ValueError(
            "this optimizer is wrapped already; wrap an optimizer once, or make a new one over the same parameters"
        )
    _check_arguments(op, gradient_predivide_factor, backward_passes_per_step)
    native, wire = wire_of(compression)
    groups = _check_groups(groups, num_groups)
    names = _names(optimizer, named_parameters)
    if current is not None:
        current.unhook(optimizer)
    running = _running(engine)
    process_set = resolve(process_set, engine)
    set_id = process_set.registered_id()
    reducer = None
    if running.rank in running.members(set_id):
        reducer = _core.GradReducer(
            engine=running,
            op=int(op),
            prescale=1.0 / gradient_predivide_factor,
            postscale=float(gradient_predivide_factor),
            process_set=set_id,
            wire=wire,
            passes=backward_passes_per_step,
            sparse_as_dense=sparse_as_dense,
            compressor=None if native else compression,
        )
        for members in _units(optimizer, groups):
            reducer.add([names[id(parameter)] for parameter in members], members, missed=False)
    _Attachment(optimizer, reducer, names, op, process_set, running).attach(optimizer)
    return optimizer


class _Attachment:
    """What a wrapped optimizer carries. It refers to the optimizer weakly, so that dropping that ends everything."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        reducer: _core.GradReducer | None,
        names: dict[int, str],
        op: ReduceOp,
        process_set: ProcessSet,
        engine: _core.Engine,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._reducer = reducer
        self._names = names
        self._known = _identities(optimizer)
        self._op = op
        self._process_set = process_set
        self._engine = engine
        self._skipping = False
        self._handles: list[Any] = []

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        for name in _ATTACHED:
            optimizer.__dict__[name] = getattr(self, "_getstate" if name == "__getstate__" else name)
        optimizer.__dict__["_fusewire"] = self
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def unhook(self, optimizer: torch.optim.Optimizer) -> None:
        for handle in self._handles:
            handle.remove()
        for name in _OURS:
            optimizer.__dict__.pop(name, None)
        if self._reducer is not None:
            self._reducer.close()

    def is_dead(self) -> bool:
        """Whether its engine has been shut down or has failed."""
        try:
            self._engine.raise_failure()
        except FusewireError:
            return True
        return False

    # What users call.

    def synchronize(self) -> None:
        """Makes all gradients final. Does nothing when they are, as after a backward() that ended a window."""
        if self._reducer is not None:
            self._adopt(self._owner())
            self._reducer.synchronize()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which `step()` uses the gradients as they are. Call `synchronize()` before."""
        before, self._skipping = self._skipping, True
        try:
            yield
        finally:
            self._skipping = before

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes make a window, from the current window on. The same on every rank."""
        _check_passes(passes)
        if self._reducer is not None:
            self._reducer.set_passes(passes)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer's own; the new parameters' gradients are combined too. Call it on every rank."""
        owner = self._owner()
        type(owner).add_param_group(owner, param_group)
        self._adopt(owner, missed=False)

    # What torch calls.

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if self._reducer is None:
            return None
        self._adopt(optimizer)
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._evaluation(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, kwargs | {"closure": self._evaluation(kwargs["closure"])}
        if not self._skipping:
            self._reducer.synchronize()
        return None

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if self._reducer is not None:
            self._reducer.expire()

    def _evaluation(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        return closure if isinstance(closure, _Evaluation) else _Evaluation(self, closure)

    def _getstate(self) -> Any:
        """A copy is a plain local optimizer; its `synchronize()` says so."""
        owner = self._owner()
        state = type(owner).__getstate__(owner)
        if isinstance(state, dict):
            state = {key: value for key, value in state.items() if key not in _OURS}
            state |= {name: _NotWrapped(name) for name in _ATTACHED[:3]}
        return state

    def reduce_loss(self, loss: Any) -> Any:
        """The loss that a closure returned, combined over the ranks as the gradients are."""
        if isinstance(loss, torch.Tensor) and (loss.is_floating_point() or loss.is_complex()):
            return self._allreduce(loss.detach())
        if isinstance(loss, float):
            return self._allreduce(torch.tensor(loss, dtype=torch.float64)).item()
        return loss

    def _allreduce(self, tensor: torch.Tensor) -> torch.Tensor:
        set_id = self._process_set.process_set_id
        return _core.allreduce(self._engine, tensor, False, None, self._op, 1.0, 1.0, set_id, None, None, True)

    def _adopt(self, optimizer: torch.optim.Optimizer, missed: bool = True) -> None:
        """Takes in parameters that have come since; `missed`: behind our back, maybe with gradients already."""
        now = _identities(optimizer)
        if now == self._known:
            return
        self._known = now
        taken = set(self._names.values())
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if id(parameter) in self._names:
                    continue
                listed = group.get("param_names")
                name = listed[index] if listed else f"added.{number}.{index}"
                while name in taken:
                    name += "'"
                taken.add(name)
                self._names[id(parameter)] = name
                if self._reducer is not None:
                    self._reducer.add([name], [parameter], missed=missed)

    def _owner(self) -> torch.optim.Optimizer:
        owner = self._optimizer()
        if owner is None:
            raise ReferenceError("the optimizer that this method belongs to is gone")
        return owner


class _Evaluation:
    """A closure each of whose evaluations ends like a backward."""

    def __init__(self, attachment: _Attachment, closure: Callable[[], Any]) -> None:
        self._attachment = attachment
        self._closure = closure

    def __call__(self) -> Any:
        reducer = self._attachment._reducer
        assert reducer is not None
        reducer.expire()
        loss = self._closure()
        if not self._attachment._skipping:
            reducer.synchronize()
        return self._attachment.reduce_loss(loss)


class _NotWrapped:
    """Stands for a method of a wrapped optimizer in its copies."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{self._name}() belongs to a distributed optimizer, and this one is a local copy of it (by pickle or "
            "deepcopy): wrap it again with fusewire.DistributedOptimizer"
        )


def unwrap(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """Makes a wrapped optimizer a plain local one. Call it on every rank, between a step and the next backward.

    Returns the parameters with the names they had. ValueError when it is not wrapped.
    """
    attached = getattr(optimizer, "_fusewire", None)
    if attached is None:
        raise ValueError("this optimizer is not wrapped")
    attached.unhook(optimizer)
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [(attached._names[id(parameter)], parameter) for parameter in parameters]


def _running(engine: _core.Engine | None) -> _core.Engine:
    running = engine if engine is not None else _core.get_default_engine()
    if running is None:
        raise NotInitializedError("Fusewire is not running in this process; call fusewire.init() first")
    return running


def _identities(optimizer: torch.optim.Optimizer) -> list[int]:
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def _check_arguments(op: ReduceOp, predivide: float, passes: int) -> None:
    if op == Adasum:
        raise NotImplementedError("op=Adasum is not available yet; use Average or Sum")
    if op not in (Average, Sum):
        raise ValueError(f"DistributedOptimizer supports op=Average and op=Sum, got {op!r}")
    if not predivide > 0:
        raise ValueError(f"gradient_predivide_factor must be greater than 0, got {predivide}")
    if predivide != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor has a meaning with op=Average only")
    _check_passes(passes)


def _check_passes(passes: int) -> None:
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step must be an integer >= 1, got {passes!r}")


def _check_groups(groups: Groups, num_groups: int) -> Groups:
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


def _names(
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
    return {identity: given[identity] for identity in _identities(optimizer)}


def _default_names(optimizer: torch.optim.Optimizer) -> dict[int, str]:
    names: dict[int, str] = {}
    for number, group in enumerate(optimizer.param_groups):
        listed = group.get("param_names")
        for index, parameter in enumerate(group["params"]):
            names.setdefault(id(parameter), listed[index] if listed else f"{number}.{index}")
    return names


def _units(optimizer: torch.optim.Optimizer, groups: Groups) -> Iterator[list[torch.Tensor]]:
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
