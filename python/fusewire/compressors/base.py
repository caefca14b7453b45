"""The interface of compressors that are objects: they know which parameter a value belongs to, and have a state.

Note [Error feedback]
What compression leaves out of a gradient is not lost: the compressor keeps it as the parameter's *error*, and adds it
to the next gradient (arXiv 1809.07599, 1901.09847). A gradient with an infinity or a NaN leaves the error as it was:
whoever looks at the result (a GradScaler) drops that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import _core
from ..process_sets import ProcessSet


class Wire:
    """How a compressor reaches the other ranks, for one exchange. Every rank makes the same calls.

    Args:
        op: how the values of the ranks are combined, Average or Sum.
        prescale, postscale: factors before and after, as in `allreduce`.
        name: distinguishes exchanges that are in flight at the same time.
    """

    def __init__(
        self,
        op: int,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        engine: _core.Engine | None,
        name: str,
    ) -> None:
        running = engine if engine is not None else _core.get_default_engine()
        assert running is not None
        members = running.members(process_set.registered_id())
        self.size = len(members)
        self.rank = members.index(running.rank)
        self.factor = prescale * postscale / (self.size if op == _core.AVERAGE else 1)
        self._scaled = (op, prescale, postscale)
        self._process_set, self._engine, self._name, self._calls = process_set, engine, name, 0

    def reduce(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values combined over the ranks, scaled, as one grouped operation; shapes agree between the ranks."""
        return self._allreduce(tensors, *self._scaled)

    def sum(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The plain sum over the ranks. `factor` times that is what `reduce` gives."""
        return self._allreduce(tensors, _core.SUM, 1.0, 1.0)

    def gather(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each tensor with those of all ranks, in the order of the ranks, joined along the first dimension.

        First dimensions may differ between the ranks. One grouped operation.
        """
        from .. import gather

        if not tensors:
            return []
        return gather.grouped_allgather(
            list(tensors), name=self._next(), process_set=self._process_set, engine=self._engine
        )

    def _allreduce(self, tensors: Sequence[torch.Tensor], op: int, pre: float, post: float) -> list[torch.Tensor]:
        if not tensors:
            return []
        set_id = self._process_set.process_set_id
        return _core.allreduce(
            self._engine, list(tensors), False, None, op, pre, post, set_id, self._next(), None, True
        )

    def _next(self) -> str:
        self._calls += 1
        return f"{self._name}/{self._calls}"


class StatefulCompressor:
    """Interface of a compressor that is an object. One object serves one model: its state is kept by parameter name.

    A subclass says in `compress` and `decompress` what is summed instead of a gradient, or overrides `exchange`, which
    does all of an optimizer's gradients at once. It calls nothing on its own account: all ranks must do the same.
    """

    def __init__(self) -> None:
        self.state: dict[str, dict[str, Any]] = {}

    def compress(self, tensor: torch.Tensor, name: str | None) -> tuple[torch.Tensor, Any]:
        """The tensor to combine over the ranks (same shape on every rank), and a context for `decompress`.

        `name` is the parameter's, the key of its state; None for an unnamed `allreduce`, which has none.
        """
        raise NotImplementedError

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The combined tensor in the shape and dtype of the original."""
        raise NotImplementedError

    def exchange(self, wire: Wire, names: Sequence[str | None], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The combined values of `tensors`, bitwise the same on every rank; the inputs are not written."""
        pairs = [self.compress(tensor, name) for tensor, name in zip(tensors, names, strict=True)]
        reduced = wire.reduce([small for small, _ in pairs])
        return [self.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, pairs, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """The state, by parameter name. It is this rank's own: save it on every rank to resume exactly."""
        return {"state": {name: dict(entry) for name, entry in self.state.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a `state_dict()`; tensors are copied."""
        self.state = {
            name: {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in entry.items()}
            for name, entry in state_dict["state"].items()
        }

    # For subclasses: see Note [Error feedback].

    def _with_error(self, tensor: torch.Tensor, name: str | None) -> torch.Tensor:
        """A new flat tensor: the values plus what has been left out before, in float32 or wider."""
        value = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)).reshape(-1)
        error = self.state.get(name, {}).get("error") if name is not None else None
        if error is None or error.numel() != value.numel():
            return value.clone()
        return value + error.to(value)

    def _keep_error(self, name: str | None, error: torch.Tensor) -> None:
        if name is not None:
            self._keep_if(torch.isfinite(error).all(), name, "error", error, 0)

    def _keep_if(self, good: torch.Tensor, name: str, key: str, value: torch.Tensor, instead: Any) -> None:
        """Puts `value` into the state where the 0-dim `good` holds. On a GPU, which alone knows that, what was there
        before (or else `instead`) takes its place where not: nobody waits for the GPU."""
        entry = self.state.setdefault(name, {})
        if not good.is_cpu:
            before = entry.get(key)
            fits = before is not None and before.shape == value.shape
            entry[key] = torch.where(good, value, before.to(value) if fits else instead)
        elif good:
            entry[key] = value


class GatheringCompressor(StatefulCompressor):
    """A compressor whose payloads cannot be added: each rank gets all of them and adds what they stand for.

    `compress` returns a list of flat tensors, whose sizes are the same on every rank, and `decompress` is
    given such a list. Tensors that `compresses` declines travel as they are.
    """

    def compresses(self, tensor: torch.Tensor) -> bool:
        """Whether this tensor is worth it. Depends on nothing but its shape and dtype."""
        raise NotImplementedError

    def compress(self, tensor: torch.Tensor, name: str | None) -> tuple[list[torch.Tensor], Any]:  # type: ignore[override]
        raise NotImplementedError

    def add_to(self, total: torch.Tensor, payload: list[torch.Tensor]) -> None:
        """Adds what one rank's payload stands for to a flat tensor."""
        raise NotImplementedError

    def exchange(self, wire: Wire, names: Sequence[str | None], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        chosen = [self.compresses(tensor) for tensor in tensors]
        plain = iter(wire.reduce([tensor for tensor, yes in zip(tensors, chosen, strict=True) if not yes]))
        packed = [self.compress(t, n)[0] for t, n, yes in zip(tensors, names, chosen, strict=True) if yes]
        gathered = iter(self._gather(wire, packed))
        results = []
        for tensor, yes in zip(tensors, chosen, strict=True):
            if not yes:
                results.append(next(plain))
                continue
            wide = torch.promote_types(tensor.dtype, torch.float32)
            total = torch.zeros(tensor.numel(), dtype=wide, device=tensor.device)
            for payload in next(gathered):
                self.add_to(total, payload)
            results.append(total.mul_(wire.factor).to(tensor.dtype).view(tensor.shape))
        return results

    def _gather(self, wire: Wire, packed: list[list[torch.Tensor]]) -> list[list[list[torch.Tensor]]]:
        """All ranks' payloads of each tensor: the parts of one dtype and device travel joined together."""
        parts: dict[Any, list[torch.Tensor]] = {}
        for payload in packed:
            for part in payload:
                parts.setdefault((part.device, part.dtype), []).append(part)
        joined = wire.gather([torch.cat(same) for same in parts.values()])
        cut = {}
        for (kind, same), everybody in zip(parts.items(), joined, strict=True):
            sizes = [part.numel() for part in same]
            # A rank that has joined brings nothing; all others bring as much as this one.
            cut[kind] = iter(zip(*(one.split(sizes) for one in everybody.split(sum(sizes))), strict=True))
        gathered = []
        for payload in packed:
            columns = [next(cut[part.device, part.dtype]) for part in payload]
            gathered.append([list(row) for row in zip(*columns, strict=True)])
        return gathered
