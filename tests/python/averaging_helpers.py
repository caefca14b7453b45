"""What the tests of fusewire.averaging use on their ranks: a single-process reference, and torch's default group."""

from __future__ import annotations

import contextlib
import itertools
import os

import torch

import fusewire as fw

_numbers = itertools.count()


class Replay:
    """All ranks of a job in one process, in float64: one row of weights for each rank, stepped and averaged by hand."""

    def __init__(self, size: int, elements: int = 5) -> None:
        self.weights = start(size, elements)
        self.turn = 0

    def step(self, groups=None) -> None:
        """A local update of every rank; then the mean within each of the groups (lists of ranks)."""
        self.weights = torch.stack([update(row, rank, self.turn) for rank, row in enumerate(self.weights)])
        for group in groups or ():
            self.weights[group] = self.weights[group].mean(0)
        self.turn += 1


def start(size: int, elements: int = 5) -> torch.Tensor:
    return torch.randn(size, elements, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def update(weights: torch.Tensor, rank: int, turn: int) -> torch.Tensor:
    """A step that depends on the weights, the rank and the time, so that a wrong or missing mean shows from then on."""
    return 0.9 * weights + torch.sin(weights + rank) / (turn + 1)


def chunks(size: int, group: int) -> list[list[int]]:
    return [list(range(begin, begin + group)) for begin in range(0, size, group)]


@contextlib.contextmanager
def torch_world():
    """torch.distributed's default group (Gloo) of the ranks of the pool."""
    import torch.distributed as dist

    client = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"averaging/{next(_numbers)}", client)  # a group leaves its addresses behind
    dist.init_process_group("gloo", store=store, rank=fw.rank(), world_size=fw.size())
    try:
        yield dist
        fw.barrier()  # nobody tears down what another rank still uses
    finally:
        dist.destroy_process_group()


def registered(*every) -> list:
    """Process sets of these ranks, registered if they are not yet: the pool outlives a test."""
    return [_registered(list(ranks)) for ranks in every]


def _registered(ranks):
    try:
        return fw.process_sets.registered_with(ranks)
    except ValueError:
        return fw.add_process_set(ranks)
