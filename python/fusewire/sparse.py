"""Reduction of sparse tensors: what each rank has, by allgather, and added up where indices meet."""

from __future__ import annotations

from typing import Any

import torch

from . import _core
from .errors import TensorMismatchError
from .gather import grouped_allgather_async
from .ops import AnySet, Average, ReduceOp, Sum
from .process_sets import global_process_set, id_of

# Sums of the values of equal indices are made in a wider type, as those of a dense allreduce are.
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None,
    op: ReduceOp = Average,
    process_set: AnySet = global_process_set,
    *,
    engine: _core.Engine | None = None,
) -> SparseHandle:
    """Sum or average of sparse tensors over the ranks of `process_set`.

    Args:
        tensor: layout torch.sparse_coo, of the same size, dtype and number of sparse dimensions on every rank; with as
            many entries as it likes, none included. Indices that occur twice count twice.
        name: the same on every rank; None counts the unnamed calls.
        op: Average (divided by the number of ranks in the set, whoever has an entry) or Sum.

    Returns a handle; `synchronize(handle)`, `handle.wait()` or, as in Horovod, `handle()` gives a coalesced sparse
    tensor, bitwise the same on every rank. A rank that has joined contributes nothing.

    Raises TypeError for a tensor that is not sparse_coo, ValueError for another op, and when waited for,
    TensorMismatchError where sizes differ.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.sparse_coo:
        raise TypeError(f"sparse_allreduce_async takes a tensor of layout torch.sparse_coo, got {_kind(tensor)}")
    if op not in (Average, Sum):
        raise ValueError(f"sparse tensors can be combined by Average and Sum, not by {op!r}")
    own = tensor.detach().coalesce()
    shape = torch.tensor([[*own.shape, own.sparse_dim()]], device="cpu")
    parts = [own.indices().t(), own.values(), shape]
    handle = grouped_allgather_async(parts, name, process_set, engine=engine)
    running = engine if engine is not None else _core.get_default_engine()
    assert running is not None
    divisor = len(running.members(id_of(process_set, engine))) if op == Average else 1
    return SparseHandle(handle, own, divisor, name)


class SparseHandle:
    """A sparse allreduce in flight."""

    def __init__(self, handle: _core.Handle, own: torch.Tensor, divisor: int, name: str | None) -> None:
        self._handle = handle
        self._size, self._dtype = own.shape, own.dtype
        self._sparse_dim = own.sparse_dim()
        self._divisor = divisor
        self._name = name
        self._result: torch.Tensor | None = None

    def done(self) -> bool:
        """Whether it has finished or failed. Never blocks."""
        return self._handle.done()

    def wait(self) -> torch.Tensor:
        """Blocks until it is done and returns the coalesced sparse result. May be called again."""
        if self._result is None:
            self._result = self._combine(*self._handle.wait())
        return self._result

    __call__ = wait

    def _combine(self, indices: torch.Tensor, values: torch.Tensor, shapes: torch.Tensor) -> torch.Tensor:
        mine = [*self._size, self._sparse_dim]
        if any(shape != mine for shape in shapes.tolist()):
            *theirs, _ = next(shape for shape in shapes.tolist() if shape != mine)
            raise TensorMismatchError(
                f"sparse allreduce '{self._name}': the ranks' tensors have different sizes, such as {list(self._size)} "
                f"and {theirs}, or other numbers of sparse dimensions"
            )
        wide = values.to(_WIDE.get(self._dtype, self._dtype))
        total = torch.sparse_coo_tensor(indices.t(), wide, self._size, check_invariants=False).coalesce()
        sums = total.values()
        if self._divisor != 1:
            exact = self._dtype.is_floating_point or self._dtype.is_complex
            sums = sums / self._divisor if exact else torch.div(sums, self._divisor, rounding_mode="trunc")
        return torch.sparse_coo_tensor(
            total.indices(), sums.to(self._dtype), self._size, is_coalesced=True, check_invariants=False
        )


def _kind(tensor: Any) -> str:
    return f"one of layout {tensor.layout}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
