"""Compressors that remember what they have left out. `fusewire.Compression` names them."""

from .base import GatheringCompressor, StatefulCompressor, Wire
from .int8 import Int8Compressor
from .powersgd import PowerSGDCompressor
from .topk import TopKCompressor

__all__ = [
    "GatheringCompressor",
    "Int8Compressor",
    "PowerSGDCompressor",
    "StatefulCompressor",
    "TopKCompressor",
    "Wire",
]
