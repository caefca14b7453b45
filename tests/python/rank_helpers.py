"""What test bodies use on their ranks. Imported there, too: keep it free of pytest's state."""

from __future__ import annotations

import contextlib
import itertools
import time

import pytest
import torch

import fusewire as fw

ranks = pytest.mark.ranks

_numbers = itertools.count()


def everyone(value) -> list:
    """The values of all ranks, by rank. All ranks must call it."""
    number = next(_numbers)
    return [fw.broadcast_object(value, root_rank=r, name=f"everyone.{number}.{r}") for r in range(fw.size())]


def engine():
    return fw._core.get_default_engine()


def units() -> int:
    """Units of negotiation (a tensor, or an explicit group) this rank has completed."""
    return engine().stats()["units"]


@contextlib.contextmanager
def counted_units(expected):
    """Exactly `expected` units are completed inside."""
    before = units()
    yield
    done = units() - before
    assert done == expected, f"{done} reductions instead of {expected}"


def shard(batch: torch.Tensor) -> torch.Tensor:
    """This rank's equal part of a batch that all ranks hold."""
    assert len(batch) % fw.size() == 0
    return batch.chunk(fw.size())[fw.rank()]


def close(actual, expected, tolerance=1e-9) -> None:
    """Equal up to the rounding of a different order of additions."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def gradients(model) -> dict:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def weights(model) -> dict:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def data(rows: int, columns: int, seed: int = 1, dtype=torch.float64) -> torch.Tensor:
    """The same numbers on every rank."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def error_of(call, *arguments, **keywords) -> Exception:
    """The exception that the call raises; a handle it returns is waited for."""
    try:
        result = call(*arguments, **keywords)
        if isinstance(result, fw.Handle):
            result.wait()
    except Exception as error:
        return error
    raise AssertionError(f"{call} raised nothing")


def wait_until(condition, seconds=10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
