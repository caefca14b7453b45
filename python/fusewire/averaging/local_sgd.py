"""LocalSGD: gradients while it warms up, models afterwards."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from .. import _core
from ..optimizer import DistributedOptimizer, unwrap
from ..process_sets import ProcessSet
from .averagers import PeriodicModelAverager
from .mean import Buffers, Weights
from .peers import Peers
from .post_local_sgd import PostLocalSGDOptimizer

__all__ = ["LocalSGD"]


class LocalSGD(PostLocalSGDOptimizer):
    """Post-local SGD in one object. For `warmup_steps` steps gradients are averaged over all ranks; after that only
    over the ranks of `inner` (such as those of one host), and every `period` steps the model over all of them. Both
    phases go by one counter, `averager.step`, so that they cannot fall out of step with each other.

    Args:
        optimizer: a local torch optimizer, not yet wrapped; LocalSGD wraps it with DistributedOptimizer itself.
        period: steps from one averaging of the model to the next, at least 1.
        warmup_steps: steps at the start in which gradients are averaged over all ranks instead of the model.
        inner: whose gradients are averaged with each other after the warm-up: a ProcessSet or torch ProcessGroup that
            this rank is in, or None for nobody's.
        process_group: all ranks that take part; see ModelAverager.
        buffers, weights: see ModelAverager. They concern the averaging of the model.
        options: keywords of DistributedOptimizer, such as `named_parameters` and `compression`, for both phases.

    It is an optimizer: step it, save its state_dict(), give it to a scheduler or a torch.amp.GradScaler. `averager` is
    its PeriodicModelAverager, `inner` the process set of the inner phase or None. Where they were given as torch
    ProcessGroups, gradients go by their process sets in the engine that runs when a step ends.

    Raises ValueError for an optimizer that is wrapped already, and for what PeriodicModelAverager and
    DistributedOptimizer raise it for; NotInitializedError when neither Fusewire nor torch.distributed is running.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        period: int,
        warmup_steps: int = 0,
        inner: Any = None,
        *,
        process_group: Any = None,
        buffers: Buffers | None = None,
        weights: Weights | None = None,
        engine: _core.Engine | None = None,
        **options: Any,
    ) -> None:
        if "process_set" in options:
            raise ValueError(
                "process_set= is decided by the phase: give process_group= for the warm-up, inner= for later"
            )
        wrapped = getattr(optimizer, "_fusewire", None)
        if wrapped is not None and not wrapped.is_replaceable():
            raise ValueError(
                "LocalSGD wraps the optimizer itself: pass the local one; DistributedOptimizer's options are keywords"
            )
        if wrapped is not None:
            unwrap(optimizer)
        averager = PeriodicModelAverager(
            period, warmup_steps, process_group, buffers=buffers, weights=weights, engine=engine
        )
        super().__init__(optimizer, averager)
        self._options = {**options, "engine": engine}
        if options.get("named_parameters") is not None:  # a generator can be read once, and there are two phases
            self._options["named_parameters"] = list(options["named_parameters"])
        self._inner = None if inner is None else Peers(inner, engine)
        self._current: ProcessSet | None = None
        self._enter_phase()

    @property
    def inner(self) -> ProcessSet | None:
        """The process set of the inner phase in the engine that runs now. None where there is none for this rank."""
        return _gradient_set(self._inner)

    @property
    def warming_up(self) -> bool:
        """Whether the next step is one of the warm-up."""
        return self.averager.step < self.averager.warmup_steps

    def synchronize(self) -> None:
        """As DistributedOptimizer's: makes gradients final after a partial window."""
        if self._current is not None:
            self.optim.synchronize()

    def skip_synchronize(self) -> contextlib.AbstractContextManager[None]:
        """As DistributedOptimizer's."""
        return self.optim.skip_synchronize() if self._current is not None else contextlib.nullcontext()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """As DistributedOptimizer's; holds for both phases."""
        if self._current is not None:
            self.optim.set_backward_passes_per_step(passes)
        self._options["backward_passes_per_step"] = passes

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        super().load_state_dict(state_dict)
        self._enter_phase()

    def _after_averaging(self) -> None:
        self._enter_phase()

    def _enter_phase(self) -> None:
        """Wraps the local optimizer for the ranks that average gradients in the step to come."""
        wanted = _gradient_set(self.averager._peers) if self.warming_up else self.inner
        if wanted is self._current:
            return
        if self._current is not None:
            self._options["named_parameters"] = unwrap(self.optim)
        if wanted is not None:
            DistributedOptimizer(self.optim, process_set=wanted, **self._options)
        self._current = wanted


def _gradient_set(peers: Peers | None) -> ProcessSet | None:
    return None if peers is None or not peers.included else peers.process_set
