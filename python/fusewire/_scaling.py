"""What a torch.amp.GradScaler leaves to an optimizer that says it knows about scaling.

Such an optimizer's `step` is called in any case, with two attributes in the object: `grad_scale`, by which its
gradients are to be divided yet (or None), and `found_inf`.
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

SUPPORTS = "_step_supports_amp_scaling"


def unscale(parameters: Iterable[torch.Tensor], scale: torch.Tensor) -> None:
    """What GradScaler.unscale_ does to the gradients, without looking for infinities again.

    Raises ValueError when one of the parameters is in float16, whether or not it has a gradient on this rank: then all
    ranks that give the same parameters do.
    """
    alike: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.dtype == torch.float16:
            raise ValueError(
                "a GradScaler cannot unscale float16 gradients: keep the parameters in float32 and use autocast"
            )
        if parameter.grad is not None:
            gradient = parameter.grad.detach()
            gradient = gradient._values() if gradient.layout == torch.sparse_coo else gradient
            alike[gradient.device, gradient.dtype].append(gradient)
    inverse = torch.as_tensor(scale).double().reciprocal().float()
    with torch.no_grad():
        for (device, _), gradients in alike.items():
            torch._foreach_mul_(gradients, inverse.to(device))


def tell_scaler() -> None:
    """Another rank has found an infinity: the GradScaler that is calling us must back off here, too.

    It hands over what it has found, but nothing by which to answer, so it is looked for among our callers. The
    optimizer that it was given may be one around ours. Warns when there is nothing to answer by.
    """
    frame = sys._getframe()
    while frame is not None and frame.f_code is not torch.amp.GradScaler.step.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    told = {}
    if frame is not None:
        scaler, optimizer = frame.f_locals["self"], frame.f_locals["optimizer"]
        told = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for found in told.values():
            found.fill_(1.0)
    if not told:
        warnings.warn(
            "another rank has found an infinity, and the GradScaler of this rank cannot be told: its scale may differ "
            "from the other ranks' from now on",
            stacklevel=2,
        )
