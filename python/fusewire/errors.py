"""What can go wrong. Every class derives from FusewireError.

TensorMismatchError and DuplicateNameError concern one tensor (and its group) and leave the engine usable. The other
ones stay until `fusewire.shutdown()`: every later operation raises the same error again. A caller's plain mistakes
(an unknown keyword, a dtype that an operator has no meaning for) are ValueError and TypeError as everywhere in Python.
"""

from __future__ import annotations


class FusewireError(RuntimeError):
    """Base of all errors of Fusewire.

    `rank` is the global rank at fault, or None where there is no single one.
    """

    rank: int | None = None


class NotInitializedError(FusewireError):
    """An operation was called before `fusewire.init()` or after `fusewire.shutdown()`."""


class TensorMismatchError(FusewireError):
    """Ranks submitted one name with different shapes, dtypes, operators, roots, scales or devices.

    The message gives the name, the rank numbers and both values. All ranks raise the same error.
    """


class DuplicateNameError(FusewireError):
    """A name was submitted again while the first operation of that name was still in flight."""


class PeerLostError(FusewireError):
    """A rank died or left while its contribution was needed; `rank` says which, the message why, if it could tell."""


class StalledError(FusewireError):
    """Some ranks did not submit a tensor within the stall abort time; the message names ranks and tensors."""


class CollectiveError(FusewireError):
    """The data plane failed; the message has its own text."""


class ShutdownError(FusewireError):
    """The engine was shut down while the operation was in flight, or belongs to a forked parent process."""


HorovodInternalError = FusewireError

__all__ = [
    "CollectiveError",
    "DuplicateNameError",
    "FusewireError",
    "HorovodInternalError",
    "NotInitializedError",
    "PeerLostError",
    "ShutdownError",
    "StalledError",
    "TensorMismatchError",
]
