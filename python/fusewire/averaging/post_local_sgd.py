"""PostLocalSGDOptimizer: a local optimizer and an averager as one optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .attachment import SUPPORTS, scaled_update
from .averagers import ModelAverager, step_in

__all__ = ["PostLocalSGDOptimizer"]


class PostLocalSGDOptimizer(torch.optim.Optimizer):
    """Steps the local optimizer, then averages its parameters when the averager says so (post-local SGD, Lin et al.,
    "Don't use large mini-batches, use local SGD", 2018).

    Args:
        optim: the local optimizer; one that `fusewire.DistributedOptimizer` has wrapped averages its gradients as well.
        averager: a ModelAverager, of Fusewire's or of torch's classes.

    `state`, `param_groups`, `defaults` and what is not here are those of `optim`. Hooks registered here run around the
    whole step, averaging included; those of `optim` around the local update; hooks of states go to `optim`. A
    torch.amp.GradScaler that finds an infinity on this rank leaves out the local update only: averaging takes place on
    all ranks. A pickled or deep-copied one is a copy of its local optimizer.

    Raises TypeError when `optim` is no optimizer.
    """

    _step_supports_amp_scaling = True

    def __init__(self, optim: torch.optim.Optimizer, averager: ModelAverager) -> None:
        if not isinstance(optim, torch.optim.Optimizer):
            raise TypeError(f"optim must be a torch.optim.Optimizer, got {type(optim).__name__}")
        self.optim = optim
        self.averager = averager
        # There is no second list of parameters, so torch's __init__ is not for us. What it does for hooks is also done
        # after unpickling, together with a default that `optim` need not have.
        added = {"differentiable"} - optim.defaults.keys()
        super().__setstate__({})
        for name in added:
            optim.defaults.pop(name, None)

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optim.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optim.param_groups

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The local step, then `averager.average_parameters(param_groups)`. Returns what the local step returns."""
        native = bool(getattr(self.optim, SUPPORTS, False))
        arguments = () if closure is None else (closure,)
        result = scaled_update(self, self.optim, native, lambda: self.optim.step(*arguments))
        self.averager.average_parameters(params=self.param_groups)
        self._after_averaging()
        return result

    def _after_averaging(self) -> None:
        """For derived classes: the counter stands at the next step."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """That of `optim`, and under "step" the averager's counter."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Goes on where `state_dict` was taken, in the middle of a warm-up too. A state without a counter warns, and
        the averager starts at step 0."""
        self.optim.load_state_dict(state_dict)
        self.averager.step = step_in(state_dict)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optim.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optim.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optim.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.optim.register_load_state_dict_post_hook(hook, prepend)

    def __repr__(self) -> str:
        return repr(self.optim)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "optim" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.optim, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _itself, (self.optim,)


def _itself(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer
