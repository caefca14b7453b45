"""Averaging at the end of an optimizer's step, and what a torch.amp.GradScaler has to do with it.

Note [Scalers]
A GradScaler that finds an infinity does not call `step` at all, and ranks that average models look for infinities each
in their own gradients. If averaging is part of `step`, that rank stays away and the others wait for it. So whoever
averages in a step of ours says `_step_supports_amp_scaling`: the scaler then always calls `step` and leaves its
findings in two attributes, `grad_scale` and `found_inf`. Only the local update is left out. Where somebody else's step
calls an averager this cannot be promised, and the averager refuses to run below a scaler's conditional call.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from .._scaling import SUPPORTS, unscale

if TYPE_CHECKING:
    from .averagers import ModelAverager


def scaled_update(
    holder: torch.optim.Optimizer, optimizer: torch.optim.Optimizer, native: bool, update: Callable[[], Any]
) -> Any:
    """Runs `update`, the local step of `optimizer`, as a scaler's findings in `holder` say; see Note [Scalers].

    Args:
        holder: the optimizer that the scaler was given.
        optimizer: the one that is stepped; may be the same.
        native: whether `update` understands the two attributes itself, as fused optimizers do.

    Returns what `update` returns, None when it is left out.
    """
    if "found_inf" not in holder.__dict__:
        return update()
    scale, found = holder.__dict__.pop("grad_scale", None), holder.__dict__.pop("found_inf")
    try:
        if native:
            optimizer.grad_scale, optimizer.found_inf = scale, found  # type: ignore[attr-defined]
        elif float(found):
            return None
        elif scale is not None:
            groups = optimizer.param_groups
            unscale((p for group in groups for p in group["params"] if p.grad is not None), scale)
        return update()
    finally:
        for name in ("grad_scale", "found_inf"):
            optimizer.__dict__.pop(name, None)
        holder.grad_scale, holder.found_inf = scale, found  # type: ignore[attr-defined]  # the scaler deletes them


def refuse_skipping_scaler() -> None:
    """RuntimeError when the caller was called by a GradScaler that skips the call where it finds an infinity."""
    skips = getattr(getattr(torch.amp.GradScaler, "_maybe_opt_step", None), "__code__", None)
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is skips:
            raise RuntimeError(
                "an averager was called in the step of an optimizer that torch.amp.GradScaler skips where it finds "
                "an infinity, and the other ranks would wait for that rank. Use fusewire's PostLocalSGDOptimizer or "
                "averager.attach(optimizer), or call average_parameters() after scaler.step() on every rank"
            )
        frame = frame.f_back  # type: ignore[assignment]


class Attachment:
    """An averager at the end of an optimizer's step. A handle: see ModelAverager.attach.

    It takes the place of `optimizer.step`, as learning rate schedulers do, because a hook is not called when a scaler
    skips the step. The optimizer is referred to weakly, so that dropping it ends everything.
    """

    def __init__(self, averager: ModelAverager, optimizer: torch.optim.Optimizer) -> None:
        current = getattr(averager, "_attachment", None)
        if current is not None and current.active:
            raise ValueError("this averager counts the steps of another optimizer already; make one for each")
        self._averager: ModelAverager | None = averager
        self._optimizer = weakref.ref(optimizer)
        self._before = {name: optimizer.__dict__[name] for name in ("step", SUPPORTS) if name in optimizer.__dict__}
        self._native = bool(getattr(optimizer, SUPPORTS, False))
        averager._attachment = self
        self._step = self._make_step(optimizer)
        optimizer.step = self._step  # type: ignore[method-assign]
        setattr(optimizer, SUPPORTS, True)

    @property
    def active(self) -> bool:
        """Whether steps still end with averaging."""
        return self._averager is not None and self._optimizer() is not None

    def remove(self) -> None:
        """Steps do not average any more. Idempotent."""
        optimizer = self._optimizer()
        if optimizer is not None and optimizer.__dict__.get("step") is self._step:
            for name in ("step", SUPPORTS):
                del optimizer.__dict__[name]
            optimizer.__dict__.update(self._before)
        # Else somebody has wrapped our step: it stays in the chain and does the local part only.
        self._averager = None

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _make_step(self, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        before: Callable[..., Any] | None = self._before.get("step")
        owner = self._optimizer

        def step_of(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            call = functools.partial(type(optimizer).step, optimizer) if before is None else before
            result = scaled_update(optimizer, optimizer, self._native, lambda: call(*args, **kwargs))
            if self._averager is not None:
                self._averager.average_parameters(params=optimizer.param_groups)
            return result

        @functools.wraps(before or type(optimizer).step)
        def step(*args: Any, **kwargs: Any) -> Any:
            return step_of(owner(), *args, **kwargs)  # type: ignore[arg-type]

        step.__func__ = step_of  # type: ignore[attr-defined]  # schedulers take a method's function and bind it anew
        return step
