"""Only the largest values travel."""

from __future__ import annotations

import math
from typing import Any

import torch

from .base import GatheringCompressor


class TopKCompressor(GatheringCompressor):
    """Each rank sends the `ratio` of a tensor's values that are largest in magnitude, with their indices.

    The rest is kept and added to the next gradient (Note [Error feedback]); without that nothing would converge. A rank
    sends 8 bytes per chosen float32 value and receives that from every other rank. Floating tensors of fewer than
    `min_numel` elements, and all integers, travel as they are.

    Args:
        ratio: how much of a tensor is sent, 0 < ratio <= 1; at least one value.
        min_numel: the smallest tensor that is compressed.
    """

    def __init__(self, ratio: float = 0.01, min_numel: int = 1024) -> None:
        super().__init__()
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio must be greater than 0 and at most 1, got {ratio}")
        if min_numel < 1:
            raise ValueError(f"min_numel must be >= 1, got {min_numel}")
        self.ratio, self.min_numel = ratio, min_numel

    def compresses(self, tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point() and tensor.numel() >= self.min_numel

    def compress(self, tensor: torch.Tensor, name: str | None) -> tuple[list[torch.Tensor], Any]:
        value = self._with_error(tensor, name)
        count = max(1, math.ceil(self.ratio * value.numel()))
        indices = torch.topk(value.abs(), count, sorted=False).indices
        chosen = value[indices].to(tensor.dtype)
        value[indices] -= chosen.to(value.dtype)
        self._keep_error(name, value)
        small = tensor.numel() <= torch.iinfo(torch.int32).max
        return [indices.to(torch.int32) if small else indices, chosen], None

    def add_to(self, total: torch.Tensor, payload: list[torch.Tensor]) -> None:
        indices, values = payload
        total[indices.long()] += values.to(total.dtype)  # no index twice
