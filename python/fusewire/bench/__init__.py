"""``fusewire bench``: allreduce, training steps and idle cost beside torch's Gloo, DDP, mpi4py and memcpy.

How a run is put together, one module per idea:

* ``cases``: what is measured, by whom (the table of cases, the tensor lists).
* ``peers``, ``training``: one iteration of each contender.
* ``worker``, ``group``: the rank processes, and the coordinator's end of them.
* ``runner``: interleaved rounds, checks, statistics. See Note [How a batch is timed] in ``runner``.
* ``report``, ``plot``, ``targets``: what a person gets to see.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (without the program's name) and return the exit status.

    0: measured; 1: something failed, in one sentence on stderr; 2: the command line is wrong (raises SystemExit).
    """
    from .cli import run

    return run(argv)
