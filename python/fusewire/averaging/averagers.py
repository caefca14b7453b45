"""When parameters are averaged, with the names and rules of torch.distributed's averagers.

Unlike those, an averager here takes every parameter it is given, whether or not it has a gradient: ranks could
otherwise average different ones with each other. How it is done: mean.py.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch

from .. import _core
from .attachment import Attachment, refuse_skipping_scaler
from .mean import Buffers, Parameters, Weights, average
from .peers import Peers

__all__ = ["ModelAverager", "PeriodicModelAverager"]

_HERE = os.path.dirname(__file__)


class ModelAverager(ABC):
    """Base of all averagers; one is made on every rank, in the same order.

    Args:
        process_group: the ranks that average with each other: a ProcessSet, a torch ProcessGroup, or None for all.
        buffers: buffers to average beside the parameters, such as the running statistics of BatchNorm: a module (all of
            its floating buffers, looked up each time), or a list of buffers.
        weights: this rank's share of the data, such as its number of samples, in any unit; or a list with one number
            for each rank of the group. None: all ranks count alike.

    `step` counts the calls of `average_parameters`; `process_group` is what was given or, for None, torch's default
    group where it has the same ranks, else `fusewire.global_process_set`.

    An averager made before `fusewire.init()` calls it if torch.distributed has a default group, and raises
    NotInitializedError if not.
    """

    def __init__(
        self,
        process_group: Any = None,
        *,
        buffers: Buffers | None = None,
        weights: Weights | None = None,
        engine: _core.Engine | None = None,
    ) -> None:
        self._peers = Peers(process_group, engine)
        self._engine = engine
        self.process_group = self._peers.group
        self.buffers = buffers if buffers is None or isinstance(buffers, torch.nn.Module) else list(buffers)
        self.weights = list(weights) if isinstance(weights, Iterator) else weights
        self.step = 0

    @abstractmethod
    def average_parameters(self, params: Parameters) -> None:
        """Averages the parameters if it is time to; counts one step."""

    @contextlib.contextmanager
    def averaging(self, params: Parameters) -> Iterator[None]:
        """A context for one training step: `average_parameters(params)` is called at its end, unless it raised."""
        yield
        self.average_parameters(params)

    def attach(self, optimizer: torch.optim.Optimizer) -> Attachment:
        """From now on every `optimizer.step()` ends with `average_parameters(optimizer.param_groups)`.

        Returns a handle: `remove()` ends it, and so does leaving it when it is used as a context. With a
        torch.amp.GradScaler that finds an infinity on this rank the update is left out and averaging still takes place,
        as on the other ranks.

        Raises ValueError when this averager is attached to an optimizer already.
        """
        return Attachment(self, optimizer)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on at the same step."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken. Without a counter in it, warns and starts at step 0."""
        self.step = step_in(state_dict)

    def _average(
        self, params: Parameters, peers: Peers, buffers: Buffers | None = None, weights: Weights | None = None
    ) -> None:
        average(
            params,
            peers,
            self._engine,
            self.buffers if buffers is None else buffers,
            self.weights if weights is None else weights,
        )


class PeriodicModelAverager(ModelAverager):
    """Averages every `period` steps once `warmup_steps` are over: when step >= warmup_steps and (step - warmup_steps)
    is a multiple of `period`. With gradients averaged during the warm-up this is post-local SGD (Lin et al., "Don't use
    large mini-batches, use local SGD", 2018).

    Args:
        period: steps from one averaging to the next, at least 1.
        warmup_steps: steps at the start without averaging, at least 0.
        process_group, buffers, weights: see ModelAverager.

    Raises ValueError for a period below 1 or negative warmup_steps. A period of 1 warns: averaging gradients costs the
    same and converges better.
    """

    def __init__(
        self,
        period: int,
        warmup_steps: int = 0,
        process_group: Any = None,
        *,
        buffers: Buffers | None = None,
        weights: Weights | None = None,
        engine: _core.Engine | None = None,
    ) -> None:
        super().__init__(process_group, buffers=buffers, weights=weights, engine=engine)
        check_warmup(warmup_steps)
        if period < 1:
            raise ValueError(f"period must be 1 or more, got {period}")
        if period == 1:
            warn_of_period_one()
        self.period = period
        self.warmup_steps = warmup_steps

    def average_parameters(
        self, params: Parameters, *, buffers: Buffers | None = None, weights: Weights | None = None
    ) -> None:
        """Averages the parameters in place if it is time to; counts one step.

        Args:
            params: parameters, (name, parameter) pairs, or an optimizer's param_groups; the same on every rank. It is
                read only when it is time to average, and then once.
            buffers, weights: for this call, instead of those of the averager.

        Raises TensorMismatchError naming the parameter when shapes or dtypes differ between ranks, ValueError when
        there are no parameters (such as a generator that was read before), RuntimeError inside the `step` of a
        GradScaler that would skip the call on a rank that finds an infinity, and the other errors of an allreduce.
        """
        refuse_skipping_scaler()
        if self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0:
            self._average(params, self._peers, buffers, weights)
        self.step += 1


def check_warmup(warmup_steps: int) -> None:
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps must be 0 or more, got {warmup_steps}")


def warn_of_period_one() -> None:
    _warn_user(
        "period=1 averages all parameters in every step, which costs as much as averaging the gradients with "
        "DistributedOptimizer; use that, or a longer period"
    )


def step_in(state_dict: dict[str, Any]) -> int:
    """The counter in a state. A state without one warns, in words that others look for."""
    if "step" in state_dict:
        return int(state_dict["step"])
    _warn_user("Loaded state dict does not contain a step counter for an averager. Setting step counter to 0.")
    return 0


def _warn_user(text: str) -> None:
    """A warning at the line outside of this package that led here."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
        level += 1
    warnings.warn(text, stacklevel=level)
