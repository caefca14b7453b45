"""How values travel: as they are, or narrowed to 16 bits.

The built-in compressors are casts inside the engine: values are narrowed while they are packed, accumulated in a wide
type, and widened while they are unpacked. A compressor of your own is any class with the two static methods of
`Compressor`; it runs in Python.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _core


class Compressor:
    """Interface of a compressor: a pair of static methods."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to communicate (same shape on every rank), and a context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The communicated tensor in the shape and dtype of the original."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Values travel as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _Cast(Compressor):
    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        narrows = tensor.dtype in (torch.float32, torch.float64)
        return (tensor.to(cls.dtype) if narrows else tensor), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class FP16Compressor(_Cast):
    """float32 and float64 travel as float16; everything else as it is."""

    dtype = torch.float16


class BF16Compressor(_Cast):
    """float32 and float64 travel as bfloat16; everything else as it is."""

    dtype = torch.bfloat16


class Compression:
    """The compressors that come with Fusewire."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


_WIRES = {NoneCompressor: None, FP16Compressor: _core.FLOAT16, BF16Compressor: _core.BFLOAT16}


def wire_of(compression: Any) -> tuple[bool, int | None]:
    """(whether the engine does it itself, code of the wire type or None)."""
    if compression in _WIRES:
        return True, _WIRES[compression]
    if not (callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))):
        raise TypeError(
            "compression must be Compression.none, .fp16, .bf16, or have compress() and decompress(), "
            f"got {compression!r}"
        )
    return False, None
