"""Averaging at several levels: small groups of ranks often, all ranks rarely."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from .. import _core
from .attachment import refuse_skipping_scaler
from .averagers import ModelAverager, check_warmup, warn_of_period_one
from .mean import Buffers, Parameters, Weights

__all__ = ["HierarchicalModelAverager"]


class HierarchicalModelAverager(ModelAverager):
    """Averages within groups of different sizes at different periods (Wang et al., "Demystifying why local aggregation
    helps: convergence analysis of hierarchical SGD", 2020).

    After the warm-up, the last period in the dict that divides `step` says which groups average at this step, so that a
    larger group takes the place of the smaller ones inside it. Steps are counted from the start, not from the end of
    the warm-up. A group of size g holds g ranks that follow each other in the whole group.

    Args:
        period_group_size_dict: ordered, period -> group size, from the innermost to the outermost level, such as
            OrderedDict([(2, 4), (8, 16)]): every 2 steps among 4 ranks, every 8 steps among all 16. The last size is
            that of the whole group.
        warmup_steps: steps at the start without averaging, at least 0.
        process_group: the whole group; see ModelAverager.
        buffers, weights: see ModelAverager. A list of weights has one number for each rank of the whole group.

    `period_process_group_dict` maps each period to the group that this rank averages with: the whole group as it was
    given; for a smaller one a torch ProcessGroup where the whole is torch's default group, else a ProcessSet. They are
    made here, so all members make the averager. On other ranks, which may make it too, they are None.

    Raises ValueError for an empty dict, a period below 1, negative warmup_steps, and, on members, a last size that is
    not that of the whole group or a size that does not divide it. A longest period of 1 warns: averaging gradients
    costs the same.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: Any = None,
        *,
        buffers: Buffers | None = None,
        weights: Weights | None = None,
        engine: _core.Engine | None = None,
    ) -> None:
        super().__init__(process_group, buffers=buffers, weights=weights, engine=engine)
        if not period_group_size_dict:
            raise ValueError("period_group_size_dict must hold at least one period and its group size")
        periods, sizes = list(period_group_size_dict), list(period_group_size_dict.values())
        if min(periods) < 1:
            raise ValueError(f"the periods in period_group_size_dict must be 1 or more, got {min(periods)}")
        if self._peers.included and sizes[-1] != self._peers.size:
            raise ValueError(
                f"the last group size in period_group_size_dict must be that of the whole group, {self._peers.size}, "
                f"got {sizes[-1]}"
            )
        check_warmup(warmup_steps)
        if periods[-1] == 1:
            warn_of_period_one()
        self.warmup_steps = warmup_steps
        self._levels = {period: self._peers.split(size) for period, size in period_group_size_dict.items()}
        self.period_process_group_dict: OrderedDict[int, Any] = OrderedDict(
            (period, None if peers is None else peers.group) for period, peers in self._levels.items()
        )

    def average_parameters(
        self, params: Parameters, *, buffers: Buffers | None = None, weights: Weights | None = None
    ) -> None:
        """Averages the parameters in place within the group whose turn it is, if any; counts one step.

        Arguments and errors: see PeriodicModelAverager.average_parameters.
        """
        refuse_skipping_scaler()
        if self.step >= self.warmup_steps:
            due = [peers for period, peers in self._levels.items() if self.step % period == 0]
            if due and due[-1] is not None:
                self._average(params, due[-1], buffers, weights)
        self.step += 1
