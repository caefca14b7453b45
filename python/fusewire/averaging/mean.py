"""The mean of tensors over ranks, in place.

Tensors keep their memory, strides and dtype, so that views, optimizer state and hooks stay valid. There is no flat
copy: all tensors form one group, which the data plane reads and writes where they lie. Nothing is written before all
ranks have agreed on the list, its shapes and its dtypes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .. import _core, ops
from ..errors import TensorMismatchError
from .peers import Peers, running_engine

Parameters = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]
Buffers = torch.nn.Module | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
Weights = float | Iterable[float]
Labelled = list[tuple[str, torch.Tensor]]

NAME = "average_parameters"
_PIECES = 32  # a weighted mean needs temporaries; they are at most this part of the model
_SMALLEST_PIECE = 1 << 20  # bytes


def average(
    params: Parameters,
    peers: Peers,
    engine: _core.Engine | None = None,
    buffers: Buffers | None = None,
    weights: Weights | None = None,
) -> None:
    """Replaces every parameter and floating buffer by its mean over `peers`. Ranks outside of them do nothing.

    Args:
        params: parameters, (name, parameter) pairs, or an optimizer's param_groups; the same on every rank. Read once.
        buffers: a module, whose buffers are meant, or buffers. Those that are not floating (or complex) are left alone.
        weights: this rank's share of the data, in any unit, or one number for each of the whole group of the peers.
            None: all alike.

    Raises ValueError when there is nothing to average, or for weights without a meaning (on every rank);
    TensorMismatchError naming the first parameter whose shape or dtype differs between ranks.
    """
    if not peers.included:
        return
    named = labelled(params)
    if not named:
        raise ValueError(
            "there are no parameters to average: the list is empty, or it is a generator that was read before. Call "
            "model.parameters() anew each time, or pass list(model.parameters())"
        )
    running = running_engine(engine)
    named = _distinct(named + _labelled_buffers(buffers))
    options = {"process_set": peers.process_set, "engine": engine}
    try:
        if weights is None:
            size = len(running.members(peers.process_set.registered_id()))
            _plain([tensor for _, tensor in named], size, options)
        else:
            _weighted([tensor for _, tensor in named], weights, peers, options)
    except TensorMismatchError as error:
        raise _naming(error, [label for label, _ in named]) from None


def labelled(params: Parameters) -> Labelled:
    """All parameters in the order given, each with the words that an error uses for it.

    Raises NotImplementedError for what is neither a parameter nor a group or a named pair of them.
    """
    if isinstance(params, torch.Tensor):
        raise NotImplementedError("cannot average a tensor's rows; give a list of parameters")
    found: Labelled = []
    for number, item in enumerate(params):
        if isinstance(item, torch.Tensor):
            found.append((f"parameter {number}", item))
        elif isinstance(item, dict) and "params" in item:
            inside = item["params"]
            names = item.get("param_names")
            for index, (label, tensor) in enumerate(labelled([inside] if isinstance(inside, torch.Tensor) else inside)):
                own = repr(names[index]) if names else f"{index} of group {number}"
                found.append((label if label.endswith("'") else f"parameter {own}", tensor))
        elif isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], torch.Tensor):
            found.append((f"parameter {str(item[0])!r}", item[1]))
        else:
            raise NotImplementedError(f"cannot average an item of type {type(item).__name__}; give parameters")
    return found


def _labelled_buffers(buffers: Buffers | None) -> Labelled:
    if buffers is None:
        return []
    pairs = buffers.named_buffers() if isinstance(buffers, torch.nn.Module) else buffers
    found: Labelled = []
    for number, item in enumerate(pairs):
        name, tensor = item if isinstance(item, tuple) else (number, item)
        if not isinstance(tensor, torch.Tensor):
            raise NotImplementedError(f"buffers must be tensors, got one of type {type(tensor).__name__}")
        if tensor.is_floating_point() or tensor.is_complex():
            found.append((f"buffer {name!r}", tensor))
    return found


def _distinct(named: Labelled) -> Labelled:
    """Each once. Two tensors that are the same view of the same memory, as tied weights can be, are one."""
    seen: set[Any] = set()
    kept: Labelled = []
    for label, tensor in named:
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else id(tensor)
        if place not in seen:
            seen.add(place)
            kept.append((label, tensor))
    return kept


def _naming(error: TensorMismatchError, labels: list[str]) -> TensorMismatchError:
    """The error with the name of the parameter that it speaks of by number, and without our own tensor in counts."""
    text = str(error)
    found = re.search(r" \(tensor (\d+) of \d+\)", text)
    if found is not None:
        return TensorMismatchError(f"{labels[int(found[1])]}: {text[: found.start()]}{text[found.end() :]}")
    if "number of tensors differs" in text:
        text = re.sub(r"\b(has|have) (\d+)", lambda match: f"{match[1]} {int(match[2]) - 1}", text)
    return TensorMismatchError(text)


def _plain(tensors: list[torch.Tensor], size: int, options: dict[str, Any]) -> None:
    """The mean over those of `size` ranks that are there.

    A rank that has joined (`fusewire.join`) brings zeros, and a sum that is divided by the number of all ranks would
    be too small: the mean of a 1 from everybody tells.
    """
    there = torch.ones((), device="cpu")
    ops.grouped_allreduce_([*tensors, there], name=NAME, **options)
    count = round(float(there) * size)
    if count < size:
        with torch.no_grad():
            for tensor in tensors:
                if tensor.is_floating_point() or tensor.is_complex():
                    tensor.mul_(size / count)


# Note [Weighted means]
# The engine scales all ranks' values alike, so a rank must apply its own weight itself, and a product written into the
# parameter would be rounded to its dtype and could not be taken back if the exchange failed. Hence temporaries in
# double precision, small ones, one after the other. Before any of them, one group of empty tensors with the
# parameters' shapes and dtypes lets the engine compare the lists without moving a byte; the weights are summed in the
# same group.


def _weighted(tensors: list[torch.Tensor], weights: Weights, peers: Peers, options: dict[str, Any]) -> None:
    own, problem = _own_weight(weights, peers)
    shared = torch.tensor([math.nan if problem else own], dtype=torch.float64, device="cpu")
    shapes = [torch.empty((0, *tensor.shape), dtype=tensor.dtype, device=tensor.device) for tensor in tensors]
    try:
        ops.grouped_allreduce_([*shapes, shared], op=ops.Sum, name=NAME, **options)
    except TensorMismatchError as error:
        raise TensorMismatchError(re.sub(r"\[0(, )?", "[", str(error))) from None  # the shapes as they really are
    total = float(shared)
    if problem or not 0 < total < math.inf:
        raise ValueError(problem or "the weights of all ranks must be numbers, 0 or greater, and not all of them 0")
    exponent = math.frexp(total)[1]  # a power of two is exact, and keeps the products below the largest parameter
    own, total = math.ldexp(own, -exponent), math.ldexp(total, -exponent)
    with torch.no_grad():
        scratch: dict[torch.device, torch.Tensor] = {}
        rounds = list(_pieces(tensors))
        longest = max(sum(map(_doubles, pieces)) for pieces in rounds)
        for number, pieces in enumerate(rounds):
            products = []
            begin = 0
            for piece in pieces:
                if piece.device not in scratch:
                    scratch[piece.device] = torch.empty(longest, dtype=torch.float64, device=piece.device)
                product = scratch[piece.device][begin : begin + _doubles(piece)].view(_wide(piece))[: piece.numel()]
                begin += _doubles(piece)
                products.append(product.view(piece.shape).copy_(piece))
                product.mul_(own) if own else product.zero_()  # 0 times infinity would be everybody's NaN
            ops.grouped_allreduce_(products, op=ops.Sum, name=f"{NAME}.weighted.{number}", **options)
            for piece, product in zip(pieces, products, strict=True):
                piece.copy_(product.div_(total))


def _doubles(tensor: torch.Tensor) -> int:
    """Room for the tensor's numbers in double precision, in doubles; even, so that complex ones are aligned."""
    return 2 * tensor.numel() if tensor.is_complex() else tensor.numel() + tensor.numel() % 2


def _own_weight(weights: Weights, peers: Peers) -> tuple[float, str]:
    """This rank's weight, and what is wrong with it: all ranks must hear of that."""
    try:
        own = float(weights)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # the last: torch, of a tensor with several elements
        try:
            every = [float(weight) for weight in weights]  # type: ignore[union-attr]
        except (TypeError, ValueError):
            return 0.0, f"weights must be a number, or one number for each rank; got {weights!r}"
        if len(every) != peers.whole.size:
            return 0.0, f"weights must hold one number for each of {peers.whole.size} ranks, got {len(every)}"
        own = every[peers.whole.index]
    return own, "" if 0 <= own < math.inf else f"weights must be 0 or greater and finite, got {own}"


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _pieces(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Views that together cover all tensors, in lists whose temporaries stay small."""
    limit = max(_SMALLEST_PIECE, sum(tensor.nbytes for tensor in tensors) // _PIECES) // 8  # doubles
    pieces: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        longest = max(range(tensor.dim()), key=tensor.size, default=None)
        rows = 1 if longest is None else max(1, tensor.size(longest) * limit // max(1, _doubles(tensor)))
        for piece in (tensor,) if longest is None else tensor.split(rows, longest):
            if pieces and size + _doubles(piece) > limit:
                yield pieces
                pieces, size = [], 0
            pieces.append(piece)
            size += _doubles(piece)
    if pieces:
        yield pieces
