"""The collectives, with Horovod's names and signatures.

All ranks of a process set call an operation with the same name (given, or counted per kind) and the same shape, dtype
and options, in any order. Forms ending in `_` work in place; `_async` forms return a Handle at once. Out-of-place
`allreduce`, `grouped_allreduce` and `broadcast` are differentiable.

Every operation may raise NotInitializedError, TensorMismatchError, DuplicateNameError, PeerLostError, StalledError,
CollectiveError and ShutdownError (see fusewire.errors), TypeError for a dtype that the operator has no meaning for,
and ValueError for bad arguments. `engine=` runs it on another engine than the process's default one.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch

from . import _core
from .compression import Compression, compressor_of
from .compressors import StatefulCompressor, Wire
from .process_sets import ProcessSet, forget_removed, global_process_set, id_of, resolve

Handle = _core.Handle


class ReduceOp(enum.IntEnum):
    """How values of the ranks are combined."""

    SUM = _core.SUM
    AVERAGE = _core.AVERAGE
    MIN = _core.MIN
    MAX = _core.MAX
    PRODUCT = _core.PRODUCT
    ADASUM = _core.ADASUM


Sum = ReduceOp.SUM
Average = ReduceOp.AVERAGE
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
Adasum = ReduceOp.ADASUM

Tensors = Sequence[torch.Tensor]
AnySet = ProcessSet | Any  # or a torch.distributed ProcessGroup, see process_sets.py


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnySet = global_process_set,
    *,
    engine: _core.Engine | None = None,
) -> torch.Tensor:
    """Combines `tensor` over the ranks of `process_set`; returns a new tensor of the same shape and dtype.

    Args:
        tensor: any shape and strides; the same shape and dtype on every rank.
        average: Horovod's older form of `op`: True is Average, False is Sum.
        name: the same on every rank; None counts the unnamed calls.
        compression: one of `Compression`, or a compressor of your own (fusewire.compression). What an object such as
            Compression.int8() leaves out it keeps under `name`, and adds to the next call of that name.
        op: Average (default), Sum, Min, Max, Product, or Adasum (floating-point tensors; arXiv 2006.02924).
        prescale_factor: multiplies the values before they are combined.
        postscale_factor: multiplies the result.
    """
    if compression is not Compression.none or (getattr(tensor, "requires_grad", False) and torch.is_grad_enabled()):
        return _rich_allreduce(
            tensor, average, name, compression, op, prescale_factor, postscale_factor, process_set, engine
        )
    set_id = id_of(process_set, engine)
    return _core.allreduce(
        engine, tensor, False, average, op, prescale_factor, postscale_factor, set_id, name, None, True
    )


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnySet = global_process_set,
    *,
    engine: _core.Engine | None = None,
) -> Handle:
    """As `allreduce`, but returns a Handle at once. Not differentiable. Do not write to `tensor` before it is done."""
    set_id = id_of(process_set, engine)
    return _core.allreduce(
        engine, tensor, False, average, op, prescale_factor, postscale_factor, set_id, name, None, False
    )


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnySet = global_process_set,
    *,
    engine: _core.Engine | None = None,
) -> torch.Tensor:
    """As `allreduce`, in place: `tensor` keeps its memory and strides. ValueError if its elements share memory."""
    set_id = id_of(process_set, engine)
    return _core.allreduce(
        engine, tensor, True, average, op, prescale_factor, postscale_factor, set_id, name, None, True
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnySet = global_process_set,
    *,
    engine: _core.Engine | None = None,
) -> Handle:
    """As `allreduce_`, but returns a Handle at once. Do not touch `tensor` before it is done."""
    set_id = id_of(process_set, engine)
    return _core.allreduce(
        engine, tensor, True, average, op, prescale_factor, postscale_factor, set_id, name, None, False
    )


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnySet = global_process_set,
    *,
    engine: _core.Engine | None = None,
) -> list[torch.Tensor]:
    """`allreduce` of several tensors as one operation, all or nothing; returns a list. Dtypes may differ."""
    tensors = list(tensors)
    if compression is not Compression.none or (
        torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors)
    ):
        return _rich_grouped_allreduce(
            tensors, average, name, compression, op, prescale_factor, postscale_factor, process_set, engine
        )
    set_id = id_of(process_set, engine)
    return _core.allreduce(
        engine, tensors, False, average, op, prescale_factor, postscale_factor, set_id, name, None, True
    )


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnySet = global_process_set,
    *,
    engine: _core.Engine | None = None,
) -> Handle:
    """As `grouped_allreduce`, but returns a Handle at once. Not differentiable."""
    set_id = id_of(process_set, engine)
    return _core.allreduce(
        engine, list(tensors), False, average, op, prescale_factor, postscale_factor, set_id, name, None, False
    )


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnySet = global_process_set,
    *,
    engine: _core.Engine | None = None,
) -> list[torch.Tensor]:
    """As `grouped_allreduce`, in place."""
    set_id = id_of(process_set, engine)
    return _core.allreduce(
        engine, list(tensors), True, average, op, prescale_factor, postscale_factor, set_id, name, None, True
    )


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: AnySet = global_process_set,
    *,
    engine: _core.Engine | None = None,
) -> Handle:
    """As `grouped_allreduce_`, but returns a Handle at once."""
    set_id = id_of(process_set, engine)
    return _core.allreduce(
        engine, list(tensors), True, average, op, prescale_factor, postscale_factor, set_id, name, None, False
    )


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: AnySet = global_process_set,
    *,
    engine: _core.Engine | None = None,
) -> torch.Tensor:
    """A new tensor with the values of `tensor` on rank `root_rank` (a global rank), on every rank."""
    if getattr(tensor, "requires_grad", False) and torch.is_grad_enabled():
        return _Broadcast.apply(tensor, root_rank, name, process_set, engine)
    return _core.broadcast(engine, tensor, False, root_rank, id_of(process_set, engine), name, True)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: AnySet = global_process_set,
    *,
    engine: _core.Engine | None = None,
) -> Handle:
    """As `broadcast`, but returns a Handle at once. Not differentiable."""
    return _core.broadcast(engine, tensor, False, root_rank, id_of(process_set, engine), name, False)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: AnySet = global_process_set,
    *,
    engine: _core.Engine | None = None,
) -> torch.Tensor:
    """Overwrites `tensor` with its values on rank `root_rank`; returns `tensor`."""
    return _core.broadcast(engine, tensor, True, root_rank, id_of(process_set, engine), name, True)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: AnySet = global_process_set,
    *,
    engine: _core.Engine | None = None,
) -> Handle:
    """As `broadcast_`, but returns a Handle at once."""
    return _core.broadcast(engine, tensor, True, root_rank, id_of(process_set, engine), name, False)


def barrier(process_set: AnySet = global_process_set, *, engine: _core.Engine | None = None) -> None:
    """Returns when every rank of the set has called it."""
    _core.barrier(engine, id_of(process_set, engine), True)


def join(device: int = -1, *, engine: _core.Engine | None = None) -> int:
    """Tells the other ranks that this one has run out of data, and waits until all ranks have joined.

    Meanwhile the others go on, and this rank takes part in their operations as if it had nothing to add: zeros to a
    Sum, an Average or Adasum (the identity to Min, Max and Product), no rows to an allgather; it sends nothing in an
    alltoall and drops what it is sent. A reducescatter gives its share to nobody, and a barrier does not wait for it.
    Average always divides by the size of the process set, joined ranks included. A broadcast from a rank that has
    joined is a ValueError on the others. What this rank has submitted before counts; until the call returns, its other
    threads can submit nothing. Afterwards everybody is back, and unnamed calls are counted from the beginning.

    A process set that others have removed meanwhile is not registered here any more, either. One that they have added
    exists here as well, but no ProcessSet stands for it: to use it on this rank, all ranks add the same ranks again.

    Args:
        device: the GPU for what is communicated meanwhile from the others' GPUs, if this rank has used none so far;
            -1: the current one.

    Returns the last rank that joined, the same number on every rank. With it the others can take over the weights of
    the rank that has seen most data: `broadcast_parameters(model.state_dict(), root_rank=join())`.
    """
    last = _core.join(engine, device)
    running = engine if engine is not None else _core.get_default_engine()
    if running is not None:
        forget_removed(running)
    return last


def synchronize(handle: Handle) -> Any:
    """Waits for an asynchronous operation and returns its result, as `handle.wait()` does.

    For CUDA tensors the caller waits until the operation is launched, and the current stream for its results.
    """
    return handle.wait()


def poll(handle: Handle) -> bool:
    """Whether the result is there, on the GPU as well, as `handle.done()` says. Never blocks."""
    return handle.done()


def _rich_allreduce(tensor, average, name, compression, op, prescale, postscale, process_set, engine):
    """allreduce that keeps a graph or compresses."""
    wire, compressor = compressor_of(compression)
    if compressor is not None:
        options = (average, op, prescale, postscale, process_set, name, None, engine)
        return _compressed(compressor, options, [tensor])[0]
    options = (average, op, prescale, postscale, process_set, name, wire, engine)
    return _Allreduce.apply(options, tensor)


def _rich_grouped_allreduce(tensors, average, name, compression, op, prescale, postscale, process_set, engine):
    wire, compressor = compressor_of(compression)
    if compressor is not None:
        return _compressed(compressor, (average, op, prescale, postscale, process_set, name, None, engine), tensors)
    options = (average, op, prescale, postscale, process_set, name, wire, engine)
    return list(_GroupedAllreduce.apply(options, *tensors))


def _compressed(compressor: StatefulCompressor, options: tuple[Any, ...], tensors: Tensors) -> list[torch.Tensor]:
    """By a compressor that runs in Python. Unnamed calls leave no state behind; not differentiable."""
    average, op, prescale, postscale, process_set, name, _, engine = options
    if average is not None:
        op = Average if average else Sum
    op = Average if op is None else op
    if op not in (Average, Sum):
        raise ValueError(f"this compression has a meaning with op=Average and op=Sum only, not with {op!r}")
    wire = Wire(op, prescale, postscale, resolve(process_set, engine), engine, name or "compressed")
    keys = [name if name is None or len(tensors) == 1 else f"{name}.{index}" for index in range(len(tensors))]
    with torch.no_grad():
        return compressor.exchange(wire, keys, tensors)


def _run(options: tuple[Any, ...], tensors: Any) -> Any:
    average, op, prescale, postscale, process_set, name, wire, engine = options
    return _core.allreduce(
        engine, tensors, False, average, op, prescale, postscale, id_of(process_set, engine), name, wire, True
    )


def _of_gradient(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """The options of the allreduce that is a gradient of one with these."""
    if options[1] not in (None, Average, Sum):
        raise NotImplementedError(f"allreduce is differentiable for Average and Sum only, not for {options[1]!r}")
    name = options[5]
    return (*options[:5], None if name is None else f"{name}.grad", *options[6:])


# Backwards go through the functions themselves, so that gradients have gradients.


class _Allreduce(torch.autograd.Function):
    """The sum over ranks of each rank's gradient is the gradient: the operation is its own adjoint."""

    @staticmethod
    def forward(ctx, options, tensor):
        ctx.options = options
        return _run(options, tensor)

    @staticmethod
    def backward(ctx, gradient):
        return None, _Allreduce.apply(_of_gradient(ctx.options), gradient)


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options, *tensors):
        ctx.options = options
        return tuple(_run(options, tensors))

    @staticmethod
    def backward(ctx, *gradients):
        return None, *_GroupedAllreduce.apply(_of_gradient(ctx.options), *gradients)


class _Broadcast(torch.autograd.Function):
    """Every rank's result is a copy of the root's value: the root's gradient is the sum, all others are zero."""

    @staticmethod
    def forward(ctx, tensor, root_rank, name, process_set, engine):
        ctx.root_rank, ctx.name, ctx.process_set, ctx.engine = root_rank, name, process_set, engine
        return _core.broadcast(engine, tensor, False, root_rank, id_of(process_set, engine), name, True)

    @staticmethod
    def backward(ctx, gradient):
        options = (None, Sum, 1.0, 1.0, ctx.process_set, ctx.name, None, ctx.engine)
        total = _Allreduce.apply(_of_gradient(options), gradient)
        engine = ctx.engine if ctx.engine is not None else _core.get_default_engine()
        if engine.rank != ctx.root_rank:
            everything = torch.ones((), dtype=torch.bool, device=total.device)
            total = total.masked_fill(everything, 0)  # part of the graph all the same
        return total, None, None, None, None
