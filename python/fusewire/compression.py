"""How values travel: as they are, narrowed to 16 bits, or compressed for good.

`Compression.fp16` and `.bf16` are casts inside the engine: values are narrowed while they are packed, accumulated in a
wide type, and widened while they are unpacked. All other compressors run in Python, at the end of backward, over all of
an optimizer's gradients at once. `Compression.int8`, `.powersgd` and `.topk` remember what they have left out of a
gradient and send it with the next one: make one object per model, `Compression.powersgd(rank=4)`, and save its
`state_dict()`. A compressor of your own is any class with the two static methods of `Compressor`, or a subclass of
`StatefulCompressor`.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _core
from .compressors import Int8Compressor, PowerSGDCompressor, StatefulCompressor, TopKCompressor


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
    """The compressors that come with Fusewire. The last three make objects: `Compression.topk(ratio=0.05)`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor
    powersgd = PowerSGDCompressor
    topk = TopKCompressor


_WIRES = {NoneCompressor: None, FP16Compressor: _core.FLOAT16, BF16Compressor: _core.BFLOAT16}


class _Static(StatefulCompressor):
    """A compressor with two methods and no state, which get no name."""

    def __init__(self, methods: Any) -> None:
        super().__init__()
        self._methods = methods

    def compress(self, tensor: torch.Tensor, name: str | None) -> tuple[torch.Tensor, Any]:
        return self._methods.compress(tensor)

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return self._methods.decompress(tensor, ctx)


def compressor_of(compression: Any) -> tuple[int | None, StatefulCompressor | None]:
    """(code of the wire type or None, the compressor that runs in Python or None)."""
    if isinstance(compression, type) and compression in _WIRES:
        return _WIRES[compression], None
    if isinstance(compression, StatefulCompressor):
        return None, compression
    if isinstance(compression, type) and issubclass(compression, StatefulCompressor):
        return None, compression()
    if not (callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))):
        raise TypeError(
            f"compression must be one of fusewire.Compression, or have compress() and decompress(), got {compression!r}"
        )
    return None, _Static(compression)


def wire_of(compression: Any) -> tuple[bool, int | None]:
    """For operations that a compressor with a memory has no meaning for, which is a ValueError then.

    (whether the engine does it itself, code of the wire type or None).
    """
    wire, compressor = compressor_of(compression)
    if compressor is not None and not isinstance(compressor, _Static):
        raise ValueError(f"{type(compressor).__name__} compresses sums and averages that every rank gets in full")
    return compressor is None, wire
