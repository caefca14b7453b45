"""DistributedOptimizer(op=Adasum): what a step has changed is combined, not the gradients.

Two ranks' gradients may point the same way, and then their sum is a step twice as long, or not, and then it is not.
Adasum tells by the angle between them (Maleki et al., arXiv 2006.02924), and it does so for what the optimizer made of
the gradients: delta = parameters after the local step - parameters before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import _core
from ._scaling import SUPPORTS, tell_scaler, unscale
from ._wrapping import Attachment, check_passes
from .process_sets import ProcessSet


class DeltaAttachment(Attachment):
    """Takes the place of `step`, in the object only."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, process_set: ProcessSet, names: dict[int, str], wire: int | None
    ) -> None:
        super().__init__(optimizer, process_set, names)
        self._wire = wire
        self._set_id = 0
        self._member = False
        self._prefix = ""
        self._inner: Callable[..., Any] | None = None  # a `step` that somebody (a scheduler) has put into the object
        self._unhooked = False
        # Whether the optimizer's own step unscales and skips, as fused ones do.
        self._knows_scaling = bool(getattr(optimizer, SUPPORTS, False))

    def bind(self, engine: _core.Engine) -> None:
        self._engine = engine
        self._set_id = self.process_set.registered_id()
        members = engine.members(self._set_id)
        self._member = engine.rank in members and len(members) > 1
        if engine.rank in members:
            self._prefix = engine.next_optimizer(self._set_id)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        super().attach(optimizer)
        self._inner = optimizer.__dict__.get("step")
        optimizer.__dict__["step"] = _Step(self, hasattr(self._inner, "_wrapped_by_lr_sched"))
        optimizer.__dict__[SUPPORTS] = True

    def unhook(self, optimizer: torch.optim.Optimizer) -> None:
        super().unhook(optimizer)
        self._unhooked = True  # a scheduler may have wrapped our step: it stays there, and does nothing more
        if isinstance(optimizer.__dict__.get("step"), _Step):
            del optimizer.__dict__["step"]
            if self._inner is not None:
                optimizer.__dict__["step"] = self._inner
        if not self._knows_scaling:
            optimizer.__dict__.pop(SUPPORTS, None)

    # What users call.

    def synchronize(self) -> None:
        """Does nothing: gradients stay local, and `step()` combines what it has changed."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Has no meaning here."""
        raise RuntimeError("with op=Adasum it is step() that communicates, so there is nothing to skip")
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes nothing: gradients add up over all backward passes before a step."""
        check_passes(passes)

    def step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> Any:
        """One local step, whose changes are combined."""

        def local() -> Any:
            with contextlib.nullcontext() if self._knows_scaling else _hidden(optimizer):
                if self._inner is not None:
                    return self._inner(*args, **kwargs)
                return type(optimizer).step(optimizer, *args, **kwargs)

        if self._unhooked:
            return local()
        assert self._engine is not None
        self._engine.raise_failure()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        closure = args[0] if args else kwargs.get("closure")
        moved = [p.grad is not None or (closure is not None and p.requires_grad) for p in parameters]
        found = getattr(optimizer, "found_inf", None)
        bad = found is not None and bool(found)
        if self._member:
            agreed = self._agree([bad, *moved])
            if agreed[0] and not bad and found is not None:
                tell_scaler()
            bad, moved = agreed[0], agreed[1:]
        if bad:
            return None
        used = [p for p, yes in zip(parameters, moved, strict=True) if yes]
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None and not self._knows_scaling:
            unscale(used, scale)
        if not self._member:
            return local()
        chosen = [p.detach() for p in used]
        other = [p.clone() for p in chosen]
        result = local()
        with torch.no_grad():
            # What is under way lies in memory of its own: an interrupt (Ctrl-C) may leave it there at any time.
            for index, (p, start) in enumerate(zip(chosen, other, strict=True)):
                delta = p - start
                p.copy_(start)
                other[index] = delta
            self._combine(other)
            torch._foreach_add_(chosen, other)
        return result

    def _agree(self, flags: list[bool]) -> list[bool]:
        """Each flag: whether it is set on some rank."""
        tensor = torch.tensor(flags, dtype=torch.uint8, device="cpu")
        name = f"{self._prefix}/moved"
        _core.allreduce(self._engine, tensor, True, None, _core.MAX, 1.0, 1.0, self._set_id, name, None, True)
        return [bool(flag) for flag in tensor.tolist()]

    def _combine(self, deltas: list[torch.Tensor]) -> None:
        if deltas:
            name, op = f"{self._prefix}/delta", _core.ADASUM
            _core.allreduce(self._engine, deltas, True, None, op, 1.0, 1.0, self._set_id, name, self._wire, True)


class _Step:
    """What stands for `step` in the object. Schedulers take its `__func__` for a method's and wrap that."""

    def __init__(self, attachment: DeltaAttachment, scheduled: bool) -> None:
        def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return attachment.step(optimizer, args, kwargs)

        self.__func__ = step
        self._attachment = attachment
        if scheduled:
            self._wrapped_by_lr_sched = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._attachment.step(self._attachment._owner(), args, kwargs)


@contextlib.contextmanager
def _hidden(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Without what a GradScaler has put into the object: plain optimizers assert that it is not there."""
    kept = {key: optimizer.__dict__.pop(key) for key in ("grad_scale", "found_inf") if key in optimizer.__dict__}
    try:
        yield
    finally:
        optimizer.__dict__.update(kept)
