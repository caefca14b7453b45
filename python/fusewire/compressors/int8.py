"""Eight bits per value, with one scale for each block of values."""

from __future__ import annotations

from typing import Any

import torch

from .. import _core
from .base import GatheringCompressor

_LEVELS = 127.0


class Int8Compressor(GatheringCompressor):
    """Values travel as int8 multiples of their block's largest magnitude / 127; what rounding lost is sent next time.

    A rank sends 1 byte per value and 4 per block: 1/4 of float32. It receives that from every other rank, so with more
    than about 8 ranks the sum of the uncompressed values is cheaper. Floating tensors of fewer than `min_numel`
    elements, and all integers, travel as they are.

    Args:
        block: how many values share a scale.
        min_numel: the smallest tensor that is compressed.
        error_feedback: whether rounding errors are kept and added to the next gradient; see Note [Error feedback].
    """

    def __init__(self, block: int = 256, min_numel: int = 1024, error_feedback: bool = True) -> None:
        super().__init__()
        if block < 1 or min_numel < 1:
            raise ValueError(f"block and min_numel must be >= 1, got {block} and {min_numel}")
        self.block, self.min_numel, self.error_feedback = block, min_numel, error_feedback

    def compresses(self, tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point() and tensor.numel() >= self.min_numel

    def compress(self, tensor: torch.Tensor, name: str | None) -> tuple[list[torch.Tensor], Any]:
        value = self._with_error(tensor, name)
        if _has_kernel(value):
            return self._by_kernel(value, name), None
        blocks = torch.nn.functional.pad(value, (0, -value.numel() % self.block)).view(-1, self.block)
        scales = blocks.abs().amax(1) / _LEVELS
        divisors = torch.where(scales == 0, 1, scales)[:, None]
        quantised = (blocks / divisors).round_().clamp_(-_LEVELS, _LEVELS).nan_to_num_(0.0).to(torch.int8)
        payload = [quantised.view(-1), scales]
        if self.error_feedback:
            left = blocks - quantised * scales[:, None]
            self._keep_error(name, left.view(-1)[: value.numel()].clone())
        return payload, None

    def add_to(self, total: torch.Tensor, payload: list[torch.Tensor]) -> None:
        quantised, scales = payload
        if _has_kernel(total):
            _core.add_quantised(total, quantised, scales, self.block)
            return
        # A scale that is no finite number must show, also where the value is 0: 0 * infinity is NaN.
        values = quantised.view(-1, self.block) * scales.to(total.dtype)[:, None]
        total += values.view(-1)[: total.numel()]

    def _by_kernel(self, value: torch.Tensor, name: str | None) -> list[torch.Tensor]:
        """The same numbers, in one pass over the values instead of ten."""
        blocks = -(-value.numel() // self.block)
        quantised = value.new_empty(blocks * self.block, dtype=torch.int8)
        scales = value.new_empty(blocks)
        left = torch.empty_like(value) if self.error_feedback else None
        _core.quantise(value, quantised, scales, left, self.block)
        if left is not None:
            self._keep_error(name, left)
        return [quantised, scales]


def _has_kernel(values: torch.Tensor) -> bool:
    return values.is_cuda and values.dtype == torch.float32
