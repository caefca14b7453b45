"""Making ranks start alike: parameters, optimizer state and Python objects from one rank to all."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from . import _core, gather, ops
from .errors import FusewireError
from .ops import AnySet
from .process_sets import global_process_set

NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[torch.Tensor]


def broadcast_parameters(
    params: NamedTensors,
    root_rank: int = 0,
    process_set: AnySet = global_process_set,
    *,
    engine: _core.Engine | None = None,
) -> None:
    """Overwrites tensors with their values on rank `root_rank`, in place.

    Args:
        params: `model.state_dict()` (buffers included), (name, tensor) pairs such as `model.named_parameters()`, or
            tensors alone such as `model.parameters()`, in the same order on every rank. Entries of a state_dict that
            are no tensors are left alone.
        root_rank: the global rank whose values all get.

    Raises ValueError for anything else than named tensors, TensorMismatchError when shapes or dtypes differ.
    """
    pairs = list(params.items() if isinstance(params, Mapping) else params)
    if pairs and all(isinstance(item, torch.Tensor) for item in pairs):
        pairs = [(str(index), item) for index, item in enumerate(pairs)]
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise ValueError(
            "params must be a state_dict, (name, tensor) pairs such as model.named_parameters(), or a list of tensors"
        )
    _wait_for_all(
        ops.broadcast_async_(tensor, root_rank, f"broadcast_parameters.{name}", process_set, engine=engine)
        for name, tensor in pairs
        if isinstance(tensor, torch.Tensor)
    )


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: AnySet = global_process_set,
    *,
    engine: _core.Engine | None = None,
) -> Any:
    """Returns rank `root_rank`'s `obj` on every rank, by pickling it (lambdas and local classes too).

    `name` distinguishes calls that are in flight at the same time. Only unpickle from ranks you trust.
    """
    mine = _is_root(root_rank, engine)
    payload = _bytes_of(obj) if mine else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = torch.tensor([payload.numel()], dtype=torch.int64, device="cpu")
    prefix = name or "broadcast_object"
    ops.broadcast_(length, root_rank, f"{prefix}.length", process_set, engine=engine)
    if not mine:
        payload = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    ops.broadcast_(payload, root_rank, f"{prefix}.payload", process_set, engine=engine)
    return obj if mine else pickle.loads(payload.numpy().tobytes())


def allgather_object(
    obj: Any, name: str | None = None, process_set: AnySet = global_process_set, *, engine: _core.Engine | None = None
) -> list[Any]:
    """Returns the `obj` of every rank of the set, in the order of the ranks, by pickling them.

    `name` distinguishes calls that are in flight at the same time. Only unpickle from ranks you trust. A rank that has
    joined is left out.
    """
    payload = _bytes_of(obj)
    lengths, payloads = gather.grouped_allgather(
        [torch.tensor([payload.numel()], device="cpu"), payload],
        name or "allgather_object",
        process_set,
        engine=engine,
    )
    return [pickle.loads(part.numpy().tobytes()) for part in payloads.split(lengths.tolist())]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: Any = None,
    process_set: AnySet = global_process_set,
    *,
    engine: _core.Engine | None = None,
) -> None:
    """Gives every rank the options and the state that rank `root_rank`'s optimizer has.

    Works before the first step as well: no step is taken, weights and gradients are untouched. State that only the root
    has is created, state that only another rank has is dropped there. `model` is accepted for Horovod's sake and not
    needed.

    Raises ValueError when the optimizers hold different numbers of parameters.
    """
    mine = _is_root(root_rank, engine)
    tensors: list[torch.Tensor] = []
    described = _describe(optimizer.state_dict() if mine else None, tensors)
    described, defaults = broadcast_object(
        (described, optimizer.defaults if mine else None),
        root_rank,
        "broadcast_optimizer_state",
        process_set,
        engine=engine,
    )
    theirs = [len(group["params"]) for group in described["param_groups"]]
    ours = [len(group["params"]) for group in optimizer.param_groups]
    agree = torch.tensor([int(ours == theirs)], device="cpu")
    ops.allreduce_(agree, op=ops.Min, name="broadcast_optimizer_state.agree", process_set=process_set, engine=engine)
    if not int(agree):
        raise ValueError(
            f"the optimizers differ: rank {root_rank}'s parameter groups have {theirs} parameters, this rank's {ours}"
        )
    state = optimizer.state_dict() if mine else _create(described, tensors, _gpu_of(optimizer))
    _wait_for_all(
        ops.broadcast_async_(tensor, root_rank, f"broadcast_optimizer_state.{index}", process_set, engine=engine)
        for index, tensor in enumerate(tensors)
    )
    if not mine:
        _load(optimizer, state, defaults)


def _is_root(root_rank: int, engine: _core.Engine | None) -> bool:
    running = engine if engine is not None else _core.get_default_engine()
    return running is not None and running.rank == root_rank  # without an engine the operation itself says so


def _bytes_of(obj: Any) -> torch.Tensor:
    """The pickled object. In host memory, whatever torch's default device is."""
    return torch.frombuffer(bytearray(_dumps(obj)), dtype=torch.uint8)


def _dumps(obj: Any) -> bytes:
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError:
        return pickle.dumps(obj)
    return cloudpickle.dumps(obj)


def _wait_for_all(handles: Iterable[ops.Handle]) -> None:
    """Waits for every one, then raises the first error."""
    first: FusewireError | None = None
    for handle in list(handles):
        try:
            handle.wait()
        except FusewireError as error:
            first = first or error
    if first is not None:
        raise first


class _Shape:
    """Stands for tensor number `index` in a described state."""

    def __init__(self, index: int, tensor: torch.Tensor) -> None:
        self.index = index
        self.size, self.stride = tuple(tensor.shape), tensor.stride()
        self.dtype, self.device = tensor.dtype, tensor.device.type

    def create(self, gpu: torch.device) -> torch.Tensor:
        device = gpu if self.device == gpu.type else self.device
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)


def _describe(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with each tensor replaced by its _Shape; the tensors are appended to the list."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Shape(len(tensors) - 1, value)
    if isinstance(value, dict):
        return {key: _describe(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_describe(item, tensors) for item in value)
    return value


def _create(value: Any, tensors: list[torch.Tensor], gpu: torch.device) -> Any:
    """The way back, with new tensors, in the same order; those of a GPU on this one."""
    if isinstance(value, _Shape):
        tensors.append(value.create(gpu))
        assert len(tensors) == value.index + 1
        return tensors[-1]
    if isinstance(value, dict):
        return {key: _create(item, tensors, gpu) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_create(item, tensors, gpu) for item in value)
    return value


def _gpu_of(optimizer: torch.optim.Optimizer) -> torch.device:
    """Where its parameters on a GPU lie: need not be torch's current one."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return next((parameter.device for parameter in parameters if parameter.is_cuda), torch.device("cuda"))


def _load(optimizer: torch.optim.Optimizer, state: dict[str, Any], defaults: dict[str, Any]) -> None:
    kind = type(optimizer)
    hooked = optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks
    if kind.load_state_dict is not torch.optim.Optimizer.load_state_dict or hooked:
        optimizer.load_state_dict(state)  # the user's own idea of what loading means
        return
    # torch's own would cast state to its parameter's dtype, and the root's may have another one.
    parameters: dict[Any, torch.Tensor] = {}
    for theirs, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        parameters |= dict(zip(theirs["params"], group["params"], strict=True))
        for key, value in theirs.items():
            if key != "params":
                group[key] = _renewed(group.get(key), value)
    optimizer.state.clear()
    for key, value in state["state"].items():
        optimizer.state[parameters.get(key, key)] = value
    optimizer.defaults.update(defaults)


def _renewed(old: Any, new: Any) -> Any:
    """`new`, in the tensor that holds the option already where there is one: others may refer to it."""
    same = isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and old.shape == new.shape
    return old.copy_(new) if same and old.dtype == new.dtype else new
