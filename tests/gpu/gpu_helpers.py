"""What tests on a GPU share. Imported on the ranks, too."""

from __future__ import annotations

import math

import torch

import fusewire as fw

REAL = torch.cuda.is_available()
# The stand-in runs each CUDA thread as a fiber of one CPU's: smaller there.
SCALE = 1 if REAL else 64


def offsets(tensors, wire: torch.dtype, align: int = 16) -> tuple[list[int], int]:
    """Where each tensor begins in a buffer of `wire`, and the buffer's elements."""
    places, at = [], 0
    for tensor in tensors:
        places.append(at)
        at += math.ceil(tensor.numel() * wire.itemsize / align) * align
    return places, at // wire.itemsize


def run_of(buffer: torch.Tensor, offset: int, tensor: torch.Tensor) -> torch.Tensor:
    """The part of a packed buffer that is `tensor`'s, in its shape."""
    begin = offset // buffer.itemsize
    return buffer[begin : begin + tensor.numel()].view(tensor.shape)


def kernels():
    return fw._core.kernels
