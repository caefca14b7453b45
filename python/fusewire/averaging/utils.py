"""The functions of torch.distributed.algorithms.model_averaging.utils, in place and without their flat copy."""

from __future__ import annotations

from typing import Any

import torch

from .attachment import refuse_skipping_scaler
from .mean import Buffers, Parameters, Weights, average, labelled
from .peers import Peers

__all__ = ["average_parameters", "average_parameters_or_parameter_groups", "get_params_to_average"]


def average_parameters(
    params: Parameters,
    process_group: Any = None,
    *,
    buffers: Buffers | None = None,
    weights: Weights | None = None,
) -> None:
    """Replaces every parameter by its mean over the ranks of `process_group`, in place; other ranks do nothing.

    Args:
        params: parameters, (name, parameter) pairs, or an optimizer's param_groups; the same on every rank. A generator
            is read once.
        process_group: a ProcessSet, a torch ProcessGroup, or None for all ranks.
        buffers, weights: see ModelAverager.

    Raises ValueError when there are no parameters (such as a generator that was read before), TensorMismatchError
    naming the parameter whose shape or dtype differs between ranks, NotImplementedError for what is no parameter, and
    NotInitializedError when neither Fusewire nor torch.distributed is running.
    """
    refuse_skipping_scaler()
    average(params, Peers(process_group), buffers=buffers, weights=weights)


def get_params_to_average(params: Parameters) -> list[torch.Tensor]:
    """The parameters in `params`, whether or not they have a gradient: gradients may differ between ranks."""
    return [tensor for _, tensor in labelled(params)]


def average_parameters_or_parameter_groups(params: Parameters, process_group: Any) -> None:
    """`average_parameters` under the other name that torch has for it: all forms of `params` are accepted by both."""
    average_parameters(params, process_group)
