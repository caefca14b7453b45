"""Collectives whose results have other rows than their inputs: allgather, alltoall, reducescatter.

All work along the first dimension. The other dimensions and the dtype are the same on every rank (TensorMismatchError
otherwise); every dtype and any strides are taken, and results are contiguous. The plain forms are differentiable, the
`_async` forms, which return a Handle at once, are not: do not write to their tensors before they are done. See ops.py
for the errors that every operation may raise.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from . import _core
from .compression import Compression, wire_of
from .ops import AnySet, Average, Handle, ReduceOp, Sum, Tensors, allreduce, grouped_allreduce
from .process_sets import global_process_set, id_of

Splits = torch.Tensor | Sequence[int] | None


def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: AnySet = global_process_set,
    *,
    engine: _core.Engine | None = None,
) -> torch.Tensor:
    """The tensors of all ranks of `process_set`, one below the other in the order of the ranks.

    Args:
        tensor: shape [rows, ...]; the number of rows may differ between ranks, and be 0. A 0-dim tensor is one row.
        name: the same on every rank; None counts the unnamed calls.

    Returns a tensor of shape [sum of rows, ...]. The gradient of an input is the sum over the ranks of the gradients of
    its rows. A rank that has joined contributes no rows.
    """
    if _wants_graph((tensor,)):
        return _Allgather.apply((name, process_set, engine, False), tensor)[0]
    return _core.allgather(engine, tensor, id_of(process_set, engine), name, True)


def allgather_async(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: AnySet = global_process_set,
    *,
    engine: _core.Engine | None = None,
) -> Handle:
    """As `allgather`, but returns a Handle at once."""
    return _core.allgather(engine, tensor, id_of(process_set, engine), name, False)


def grouped_allgather(
    tensors: Tensors,
    name: str | None = None,
    process_set: AnySet = global_process_set,
    *,
    engine: _core.Engine | None = None,
) -> list[torch.Tensor]:
    """`allgather` of several tensors as one operation, all or nothing; returns a list. Rows and dtypes may differ."""
    tensors = list(tensors)
    if _wants_graph(tensors):
        return list(_Allgather.apply((name, process_set, engine, True), *tensors))
    return _core.allgather(engine, tensors, id_of(process_set, engine), name, True)


def grouped_allgather_async(
    tensors: Tensors,
    name: str | None = None,
    process_set: AnySet = global_process_set,
    *,
    engine: _core.Engine | None = None,
) -> Handle:
    """As `grouped_allgather`, but returns a Handle at once."""
    return _core.allgather(engine, list(tensors), id_of(process_set, engine), name, False)


def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: AnySet = global_process_set,
    *,
    engine: _core.Engine | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends some rows of `tensor` to each rank of `process_set`, and returns what came from all of them.

    Args:
        tensor: shape [rows, ...], at least one dimension.
        splits: how many rows each member gets, the first ones going to the first member: a list, or a tensor of shape
            [members] of an integer dtype. They may sum up to less than `rows`; the rest is not sent. None: the same
            number to each.
        name: the same on every rank; None counts the unnamed calls.

    Returns a tensor of shape [rows received, ...] in the order of the senders; when `splits` are given, a tuple of it
    and of the rows received from each member (int32, shape [members]).

    Raises ValueError for splits that are negative, too large or not one per member, and for rows that the number of
    members does not divide where there are none; TypeError for splits that are no integers.
    """
    sent = _splits(splits)
    if _wants_graph((tensor,)):
        output, received = _Alltoall.apply((sent, name, process_set, engine), tensor)
        return output if splits is None else (output, received)
    return _core.alltoall(engine, tensor, sent, id_of(process_set, engine), name, True)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: AnySet = global_process_set,
    *,
    engine: _core.Engine | None = None,
) -> Handle:
    """As `alltoall`, but returns a Handle at once, whose result is the same."""
    return _core.alltoall(engine, tensor, _splits(splits), id_of(process_set, engine), name, False)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: AnySet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    engine: _core.Engine | None = None,
) -> torch.Tensor:
    """Combines `tensor` over the ranks of `process_set` and gives each rank its share of the rows.

    Args:
        tensor: shape [rows, ...], at least one dimension, the same on every rank. Where the number of members does not
            divide the rows, the first members get one row more than the last.
        name: the same on every rank; None counts the unnamed calls.
        compression: Compression.none, .fp16, .bf16, or a class with compress() and decompress().
        op: Average (default), Sum, Min, Max or Product; Adasum, which has no meaning here, is a ValueError.
        prescale_factor: multiplies the values before they are combined.
        postscale_factor: multiplies the result.

    Returns a tensor of shape [own rows, ...]. Differentiable for Average and Sum.
    """
    native, wire = wire_of(compression)
    if not native:
        small, ctx = compression.compress(tensor)
        options = (name, Compression.none, op, process_set, prescale_factor, postscale_factor)
        return compression.decompress(reducescatter(small, *options, engine=engine), ctx)
    if _wants_graph((tensor,)):
        options = (name, op, process_set, prescale_factor, postscale_factor, wire, engine, False)
        return _Reducescatter.apply(options, tensor)[0]
    set_id = id_of(process_set, engine)
    return _core.reducescatter(engine, tensor, op, prescale_factor, postscale_factor, set_id, name, wire, True)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: AnySet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    engine: _core.Engine | None = None,
) -> Handle:
    """As `reducescatter`, but returns a Handle at once."""
    set_id = id_of(process_set, engine)
    return _core.reducescatter(engine, tensor, op, prescale_factor, postscale_factor, set_id, name, None, False)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: AnySet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    engine: _core.Engine | None = None,
) -> list[torch.Tensor]:
    """`reducescatter` of several tensors as one operation, all or nothing; returns a list. Dtypes may differ."""
    tensors = list(tensors)
    native, wire = wire_of(compression)
    if not native:
        pairs = [compression.compress(tensor) for tensor in tensors]
        options = (name, Compression.none, op, process_set, prescale_factor, postscale_factor)
        reduced = grouped_reducescatter([small for small, _ in pairs], *options, engine=engine)
        return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)]
    if _wants_graph(tensors):
        options = (name, op, process_set, prescale_factor, postscale_factor, wire, engine, True)
        return list(_Reducescatter.apply(options, *tensors))
    set_id = id_of(process_set, engine)
    return _core.reducescatter(engine, tensors, op, prescale_factor, postscale_factor, set_id, name, wire, True)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: AnySet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    engine: _core.Engine | None = None,
) -> Handle:
    """As `grouped_reducescatter`, but returns a Handle at once."""
    set_id = id_of(process_set, engine)
    return _core.reducescatter(engine, list(tensors), op, prescale_factor, postscale_factor, set_id, name, None, False)


def _wants_graph(tensors: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors)


def _splits(splits: Splits) -> list[int] | None:
    if splits is None:
        return None
    try:
        parts = splits.tolist() if isinstance(splits, torch.Tensor) else splits
        return [operator.index(part) for part in parts]
    except TypeError:
        raise TypeError(
            "splits must be a list or a one-dimensional tensor of integers, one for each rank of the process set, got "
            f"{splits!r}"
        ) from None


def _grad(name: str | None) -> str | None:
    return None if name is None else f"{name}.grad"


def _shares(rows: int, members: int) -> list[int]:
    """The rows that a reducescatter gives to each member."""
    return [rows // members + (member < rows % members) for member in range(members)]


def _members(process_set: Any, engine: _core.Engine | None) -> tuple[int, int]:
    """(number of members, which of them this rank is)."""
    running = engine if engine is not None else _core.get_default_engine()
    members = running.members(id_of(process_set, engine))
    return len(members), members.index(running.rank)


# The backward of each function is made of the public, differentiable operations: gradients have gradients.


class _Allgather(torch.autograd.Function):
    """Every rank's result has a copy of every input, whose gradient is therefore a sum over the ranks."""

    @staticmethod
    def forward(ctx, options, *tensors):
        name, process_set, engine, grouped = ctx.options = options
        set_id = id_of(process_set, engine)
        handle = _core.allgather(engine, list(tensors) if grouped else tensors[0], set_id, name, False)
        results = handle.wait()
        extents = handle._extents()
        count = len(extents) // len(tensors)
        ctx.rows = [extents[i * count : (i + 1) * count] for i in range(len(tensors))]
        ctx.shapes = [tensor.shape for tensor in tensors]
        return tuple(results) if grouped else (results,)

    @staticmethod
    def backward(ctx, *gradients):
        name, process_set, engine, grouped = ctx.options
        size, mine = _members(process_set, engine)
        keywords = {"op": Sum, "process_set": process_set, "name": _grad(name), "engine": engine}
        # Equal parts come by reducescatter, any other ones are cut out of an allreduce.
        if all(rows == _shares(sum(rows), size) for rows in ctx.rows):
            reduce, parts = (grouped_reducescatter if grouped else reducescatter), None
        else:
            reduce, parts = (grouped_allreduce if grouped else allreduce), ctx.rows
        sums = reduce(gradients, **keywords) if grouped else [reduce(gradients[0], **keywords)]
        if parts is not None:
            starts = [list(accumulate(rows, initial=0))[mine] for rows in parts]
            sums = [total.narrow(0, start, rows[mine]) for total, start, rows in zip(sums, starts, parts, strict=True)]
        return None, *(total.reshape(shape) for total, shape in zip(sums, ctx.shapes, strict=True))


class _Alltoall(torch.autograd.Function):
    """The gradients go back the way the rows came."""

    @staticmethod
    def forward(ctx, options, tensor):
        splits, name, process_set, engine = ctx.options = options
        handle = _core.alltoall(engine, tensor, splits, id_of(process_set, engine), name, False)
        result = handle.wait()
        ctx.received = handle._extents()
        ctx.rows = tensor.shape[0]
        output, received = (result, torch.tensor(ctx.received, device="cpu")) if splits is None else result
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx, gradient, _):
        _, name, process_set, engine = ctx.options
        returned, _ = alltoall(gradient, ctx.received, _grad(name), process_set, engine=engine)
        kept = ctx.rows - returned.shape[0]
        if kept:  # rows that were not sent
            returned = torch.cat([returned, returned.new_zeros((kept, *returned.shape[1:]))])
        return None, returned


class _Reducescatter(torch.autograd.Function):
    """A row's gradient, scaled as its value was, is the gradient of that row on every rank."""

    @staticmethod
    def forward(ctx, options, *tensors):
        name, op, process_set, prescale, postscale, wire, engine, grouped = ctx.options = options
        given = list(tensors) if grouped else tensors[0]
        set_id = id_of(process_set, engine)
        results = _core.reducescatter(engine, given, op, prescale, postscale, set_id, name, wire, True)
        return tuple(results) if grouped else (results,)

    @staticmethod
    def backward(ctx, *gradients):
        name, op, process_set, prescale, postscale, _, engine, grouped = ctx.options
        if op not in (Average, Sum):
            raise NotImplementedError(f"reducescatter is differentiable for Average and Sum only, not for {op!r}")
        factor = prescale * postscale
        size, _ = _members(process_set, engine)
        scaled = [gradient * factor if factor != 1.0 else gradient for gradient in gradients]
        if op == Average:
            scaled = [gradient / size for gradient in scaled]
        keywords = {"name": _grad(name), "process_set": process_set, "engine": engine}
        if grouped:
            return None, *grouped_allgather(scaled, **keywords)
        return None, allgather(scaled[0], **keywords)
