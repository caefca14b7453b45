"""DistributedOptimizer: a torch optimizer whose gradients are combined over all ranks.

The work is done in C++ (csrc/torch/grad_reducer.h): hooks on the parameters submit gradients, and when `backward()`
returns, every `.grad` is final. Python only attaches the reducer to the optimizer, and takes care of what no backward
could: a partial window, a rank that ran no backward, closures, parameters that came later.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from . import _core
from ._adasum import DeltaAttachment
from ._exchange import Exchange
from ._wrapping import Attachment, Groups, check_groups, check_passes, identities, names_of, units
from .compression import Compression, compressor_of
from .compressors import StatefulCompressor
from .errors import NotInitializedError
from .ops import Adasum, AnySet, Average, ReduceOp, Sum
from .process_sets import ProcessSet, global_process_set, knows, resolve


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
        compression: one of `Compression`, such as Compression.fp16 or Compression.powersgd(rank=4), or a compressor of
            your own (fusewire.compression). All but none, fp16 and bf16 run in Python at the end of backward.
        backward_passes_per_step: how many backward passes add up locally before gradients are combined. Not divided by.
        op: Average (default), Sum, or Adasum. With Adasum (arXiv 2006.02924) gradients stay local; each rank's
            `step()` is taken on its own gradients, and the ranks' changes of the parameters are combined in one grouped
            operation. That needs memory for one more copy of the parameters during `step()`. Gradients add up
            over as many backward passes as there are between two steps. With a GradScaler, all ranks skip or none.
            The optimizer's state (momentum and the like) is each rank's own.
        gradient_predivide_factor: with Average, gradients are multiplied by 1/f before the sum and by f/size after it.
        num_groups: deprecated, use `groups`.
        groups: how many fused groups to form, or lists of parameters that are reduced all or nothing.
        sparse_as_dense: turn sparse gradients into dense ones. Else they stay sparse: their rows are gathered, or,
            where the ranks together have more rows than half of the parameter's, summed densely.
        process_set: the ranks that take part; on all others the optimizer stays local.

    Raises ValueError for an optimizer that is wrapped already, for names that are missing, duplicated or malformed, and
    for bad numbers; NotInitializedError before init(). Afterwards `backward()` and
    `step()` raise the errors of an allreduce.

    The wrapping survives `shutdown()` and a later `init()`; with a process set, as soon as that is registered again.
    When backward() ends with an exception on some ranks only, it raises FusewireError on the others, and the window's
    gradients are None everywhere.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"DistributedOptimizer wraps a torch.optim.Optimizer, got {type(optimizer).__name__}")
    current = getattr(optimizer, "_fusewire", None)
    if current is not None and not current.is_replaceable():
        raise ValueError(
            "this optimizer is wrapped already; wrap an optimizer once, or make a new one over the same parameters"
        )
    _check_arguments(op, gradient_predivide_factor, backward_passes_per_step)
    wire, compressor = compressor_of(compression)
    if op == Adasum and compressor is not None:
        raise ValueError(
            "op=Adasum combines updates, not gradients: use it with Compression.none, .fp16 or .bf16, not with "
            f"{compression!r}"
        )
    groups = check_groups(groups, num_groups)
    names = names_of(optimizer, named_parameters)
    if current is not None:
        _forget(current, optimizer)
    running = _running(engine)
    process_set = resolve(process_set, engine)
    process_set.registered_id()
    attachment: Attachment
    if op == Adasum:
        attachment = DeltaAttachment(optimizer, process_set, names, wire)
    else:
        settings = {
            "op": int(op),
            "prescale": 1.0 / gradient_predivide_factor,
            "postscale": float(gradient_predivide_factor),
            "wire": wire,
            "passes": backward_passes_per_step,
            "sparse_as_dense": sparse_as_dense,
        }
        attachment = GradientAttachment(optimizer, process_set, settings, compressor, names, groups)
    attachment.bind(running)
    attachment.attach(optimizer)
    if engine is None:
        _places.append(_Place(attachment, running))
    return optimizer


# Note [Places]
# An engine numbers the optimizers of a process set in the order in which they take a number, and by these numbers ranks
# know each other's gradients. So after an init() all ranks must take them in the same order: that of wrapping. When an
# optimizer is freed is no business of the ranks' (one that is part of a reference cycle goes whenever the garbage
# collector runs), so its place stays: nobody stands there any more, and the number is taken all the same. Only
# unwrapping, which all ranks do together, gives up a place.


class _Place:
    """Where a wrapped optimizer stands in the order of wrapping; see Note [Places]."""

    def __init__(self, attachment: Attachment, engine: _core.Engine) -> None:
        self.attachment = weakref.ref(attachment)
        self._process_set = attachment.process_set
        self._engine = weakref.ref(engine)

    def move(self, engine: _core.Engine) -> None:
        """Takes a number of `engine`, unless it has one of it or its process set is not registered there (yet)."""
        if self._engine() is engine or not self._registered(engine):
            return
        set_id = self._process_set.registered_id()
        self._engine = weakref.ref(engine)
        attachment = self.attachment()
        if attachment is not None:
            attachment.bind(engine)
            attachment.rebound = True
        elif engine.rank in engine.members(set_id):
            engine.next_optimizer(set_id)

    def _registered(self, engine: _core.Engine) -> bool:
        """Whether `engine` has the process set. One that was adopted for a torch group keeps the id that it had in an
        engine that is gone, which may mean other ranks here, or nothing."""
        set_id = self._process_set.process_set_id
        return knows(engine, set_id) and list(engine.members(set_id)) == self._process_set.ranks


_places: list[_Place] = []


def rebind_living(engine: _core.Engine) -> None:
    """After shutdown() and init(): optimizers go on with the new engine, as soon as their process set is registered."""
    for place in _places:
        place.move(engine)


def _forget(attachment: Attachment, optimizer: torch.optim.Optimizer) -> None:
    """Ends a wrapping, on every rank."""
    attachment.unhook(optimizer)
    _places[:] = [place for place in _places if place.attachment() is not attachment]


class GradientAttachment(Attachment):
    """Gradients are combined in backward."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        process_set: ProcessSet,
        settings: dict[str, Any],
        compressor: StatefulCompressor | None,
        names: dict[int, str],
        groups: Groups,
    ) -> None:
        super().__init__(optimizer, process_set, names)
        self._settings = settings
        self._exchange = Exchange(compressor, settings["op"], settings["prescale"], settings["postscale"], process_set)
        self._compressed = compressor is not None
        self._reducer: _core.GradReducer | None = None
        self._groups = groups
        self._known = identities(optimizer)
        self._skipping = False
        self._handles: list[Any] = []

    def bind(self, engine: _core.Engine) -> None:
        self._engine = self._exchange.engine = engine
        set_id = self.process_set.registered_id()
        if engine.rank not in engine.members(set_id):
            if self._reducer is not None:
                self._reducer.close()
            self._reducer = None
        elif self._reducer is not None:
            self._reducer.rebind(engine, set_id)
        else:
            self._reducer = _core.GradReducer(
                engine=engine,
                process_set=set_id,
                exchange=self._exchange,
                compressed=self._compressed,
                **self._settings,
            )
            for members in units(self._owner(), self._groups):
                self._reducer.add([self.names[id(parameter)] for parameter in members], members, missed=False)

    def added(self, optimizer: torch.optim.Optimizer) -> None:
        self._adopt(optimizer, missed=False)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        super().attach(optimizer)
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def unhook(self, optimizer: torch.optim.Optimizer) -> None:
        super().unhook(optimizer)
        for handle in self._handles:
            handle.remove()
        if self._reducer is not None:
            self._reducer.close()

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
        check_passes(passes)
        self._settings["passes"] = passes
        if self._reducer is not None:
            self._reducer.set_passes(passes)

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

    def reduce_loss(self, loss: Any) -> Any:
        """The loss that a closure returned, combined over the ranks as the gradients are."""
        if isinstance(loss, torch.Tensor) and (loss.is_floating_point() or loss.is_complex()):
            return self._allreduce(loss.detach())
        if isinstance(loss, float):
            return self._allreduce(torch.tensor(loss, dtype=torch.float64, device="cpu")).item()
        return loss

    def _allreduce(self, tensor: torch.Tensor) -> torch.Tensor:
        set_id = self.process_set.process_set_id
        return _core.allreduce(
            self._engine, tensor, False, None, self._settings["op"], 1.0, 1.0, set_id, None, None, True
        )

    def _adopt(self, optimizer: torch.optim.Optimizer, missed: bool = True) -> None:
        """Takes in parameters that have come since; `missed`: behind our back, maybe with gradients already."""
        now = identities(optimizer)
        if now == self._known:
            return
        self._known = now
        for name, parameter in self.name_new(optimizer):
            if self._reducer is not None:
                self._reducer.add([name], [parameter], missed=missed)


class _Evaluation:
    """A closure each of whose evaluations ends like a backward."""

    def __init__(self, attachment: GradientAttachment, closure: Callable[[], Any]) -> None:
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


def unwrap(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """Makes a wrapped optimizer a plain local one. Call it on every rank, between a step and the next backward.

    Returns the parameters with the names they had. ValueError when it is not wrapped.
    """
    attached = getattr(optimizer, "_fusewire", None)
    if attached is None:
        raise ValueError("this optimizer is not wrapped")
    attached.name_new(optimizer)
    _forget(attached, optimizer)
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [(attached.names[id(parameter)], parameter) for parameter in parameters]


def _running(engine: _core.Engine | None) -> _core.Engine:
    running = engine if engine is not None else _core.get_default_engine()
    if running is None:
        raise NotInitializedError("Fusewire is not running in this process; call fusewire.init() first")
    return running


def _check_arguments(op: ReduceOp, predivide: float, passes: int) -> None:
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"DistributedOptimizer supports op=Average, Sum and Adasum, got {op!r}")
    if not predivide > 0:
        raise ValueError(f"gradient_predivide_factor must be greater than 0, got {predivide}")
    if predivide != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor has a meaning with op=Average only")
    check_passes(passes)
