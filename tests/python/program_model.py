"""Random programs of collectives, and what they must give: a sequential model that knows nothing of ranks as threads.

A program runs epochs on `size` ranks. In an epoch every rank runs a number of rounds and then joins; in a round it
submits the round's operations in an order of its own, then waits for them in another one. Between epochs process sets
come and go. Names are reused from round to round for whatever comes, so the response cache is asked about changed
descriptions all the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

import fusewire as fw

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool]
REDUCTIONS = [fw.Sum, fw.Average, fw.Min, fw.Max, fw.Product]
KINDS = ["allreduce", "broadcast", "allgather", "alltoall", "reducescatter", "barrier"]
GROUPABLE = ["allreduce", "allgather", "reducescatter"]


@dataclass(frozen=True)
class Operation:
    """One collective, as all members agree on it; `rows` and `splits` are what each rank brings."""

    kind: str
    name: str
    members: tuple[int, ...]  # of its process set
    dtype: torch.dtype = torch.float32
    op: fw.ReduceOp = fw.Sum
    in_place: bool = False
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    tensors: int = 0  # 0: not grouped
    tail: tuple[int, ...] = ()  # the dimensions behind the first one
    rows: tuple[int, ...] = ()  # by rank; equal but in an allgather
    splits: tuple[tuple[int, ...], ...] = ()  # alltoall: by rank, for every member
    seed: int = 0

    def inputs(self, rank: int) -> list[torch.Tensor]:
        """Small whole numbers: sums are exact in every type and order."""
        rows = sum(self.splits[rank]) if self.kind == "alltoall" else self.rows[rank]
        result = []
        for index in range(max(1, self.tensors)):
            generator = torch.Generator().manual_seed(self.seed * 64 + rank * 8 + index)
            low = 0 if self.dtype in (torch.uint8, torch.bool) else -2
            shape = (rows + index, *self.tail) if self.kind in GROUPABLE else (rows, *self.tail)
            result.append(torch.randint(low, 3, shape, generator=generator).to(self.dtype))
        return result


@dataclass(frozen=True)
class Round:
    operations: tuple[Operation, ...]
    orders: tuple[tuple[int, ...], ...]  # by rank: in which it submits; it waits in the opposite one
    # By operation: the rank that means something else and what it changes, or None.
    dissent: tuple[tuple[int, str] | None, ...]


@dataclass(frozen=True)
class Epoch:
    add: tuple[tuple[int, ...], ...]  # sets that come before it
    remove: tuple[tuple[int, ...], ...]  # and that go after it
    rounds: tuple[Round, ...]
    batches: tuple[int, ...]  # by rank: how many of the rounds it takes part in; one rank at least in all
    hasty: tuple[bool, ...]  # by rank: joins before it has waited for its last round


@dataclass(frozen=True)
class Program:
    size: int
    knobs: dict[str, str] = field(hash=False)
    epochs: tuple[Epoch, ...] = ()


class Mismatch:
    """What an operation gives where ranks disagree."""


def dissenting(operation: Operation, what: str) -> Operation:
    """The same name with another meaning."""
    changes = {
        "shape": {"tail": (*operation.tail, 2)},
        "dtype": {"dtype": torch.int16, "prescale": 1.0, "postscale": 1.0},
        "kind": {"kind": "broadcast" if operation.kind == "allreduce" else "allreduce", "op": fw.Max, "tensors": 0},
    }
    if what == "kind":
        changes["kind"] |= {"root": operation.members[0], "rows": tuple(1 for _ in operation.rows)}
    return Operation(**{**operation.__dict__, **changes[what]})


def expected(operation: Operation, rank: int, present: set[int], dissenter: int | None):
    """What `rank` gets: a list of tensors, received splits too for an alltoall, a Mismatch, or an exception's type."""
    members = operation.members
    callers = [m for m in members if m in present]
    if dissenter in callers and len(callers) > 1:
        return Mismatch
    if operation.kind == "broadcast" and operation.root not in present:
        return ValueError
    brought = {m: operation.inputs(m) for m in callers}
    if operation.kind == "barrier":
        return []
    if operation.kind == "broadcast":
        return brought[operation.root]
    place = members.index(rank)
    if operation.kind == "alltoall":
        blocks = [brought[m][0].split(operation.splits[m])[place] for m in callers]
        received = [operation.splits[m][place] if m in callers else 0 for m in members]
        return [torch.cat(blocks), torch.tensor(received)]
    columns = list(zip(*brought.values(), strict=True))
    if operation.kind == "allgather":
        return [torch.cat(column) for column in columns]
    reduced = [reduce(operation, column, len(members)) for column in columns]
    if operation.kind == "reducescatter":
        return [torch.tensor_split(whole, len(members))[place] for whole in reduced]
    return reduced


def reduce(operation: Operation, tensors: tuple[torch.Tensor, ...], size: int) -> torch.Tensor:
    dtype, op = operation.dtype, operation.op
    if dtype == torch.bool:
        stacked = torch.stack(tensors)
        return stacked.any(0) if op in (fw.Sum, fw.Max) else stacked.all(0)
    wide = torch.stack(tensors).to(torch.float64 if dtype.is_floating_point else torch.int64)
    wide = wide * operation.prescale if dtype.is_floating_point else wide
    # Whoever is absent brings the identity as its tensor, and that is scaled like any other.
    absences = operation.prescale ** (size - len(tensors)) if op == fw.Product else 1
    if op in (fw.Sum, fw.Average):
        result = wide.sum(0)
    elif op == fw.Product:
        result = wide.prod(0) * absences
    else:
        result = wide.amin(0) if op == fw.Min else wide.amax(0)
    if op == fw.Average:
        result = result / size if dtype.is_floating_point else torch.div(result, size, rounding_mode="trunc")
    return (result * operation.postscale if dtype.is_floating_point else result).to(dtype)


# ----------------------------------------------------------------------------------------------------------------------


@st.composite
def operations(draw, name: str, size: int, sets: list[tuple[int, ...]]) -> Operation:
    kind = draw(st.sampled_from(KINDS))
    members = draw(st.sampled_from(sets))
    dtype = draw(st.sampled_from(DTYPES))
    allowed = [op for op in REDUCTIONS if dtype != torch.bool or op != fw.Average]
    reduces = kind in ("allreduce", "reducescatter")
    scale = st.sampled_from([1.0, 1.0, 0.5, 4.0]) if reduces and dtype.is_floating_point else st.just(1.0)
    count = st.integers(0, 5)
    rows = draw(st.tuples(*[count] * size)) if kind == "allgather" else (draw(count),) * size
    splits = draw(st.tuples(*[st.tuples(*[st.integers(0, 2)] * len(members))] * size)) if kind == "alltoall" else ()
    return Operation(
        kind=kind,
        name=name,
        members=members,
        dtype=dtype,
        op=draw(st.sampled_from(allowed)) if reduces else fw.Sum,
        in_place=kind in ("allreduce", "broadcast") and draw(st.booleans()),
        prescale=draw(scale),
        postscale=draw(scale),
        root=draw(st.sampled_from(members)),
        tensors=draw(st.sampled_from([0, 0, 1, 3])) if kind in GROUPABLE else 0,
        tail=draw(st.sampled_from([(), (3,), (2, 2), (0,), (70,)])),
        rows=rows,
        splits=splits,
        seed=draw(st.integers(0, 1000)),
    )


@st.composite
def rounds(draw, size: int, sets: list[tuple[int, ...]]) -> Round:
    ops = tuple(draw(operations(f"t{i}", size, sets)) for i in range(draw(st.integers(1, 4))))
    orders = tuple(tuple(draw(st.permutations(range(len(ops))))) for _ in range(size))
    dissent = tuple(draw(st.none() | st.none() | st.none() | disagreement(op)) for op in ops)
    return Round(ops, orders, dissent)


def disagreement(operation: Operation) -> st.SearchStrategy:
    if operation.kind == "barrier":  # has no name to disagree about
        return st.none()
    whats = ["kind"] if operation.kind == "alltoall" else ["shape", "dtype", "kind"]
    return st.tuples(st.sampled_from(operation.members), st.sampled_from(whats))


@st.composite
def programs(draw) -> Program:
    size = draw(st.integers(1, 5))
    everyone = tuple(range(size))
    knobs = {
        "cache_capacity": str(draw(st.sampled_from([0, 1, 2, 4096]))),
        "fusion_threshold": str(draw(st.sampled_from([0, 100, 1 << 20]))),
        "shm_chunk": str(draw(st.sampled_from([0, 1024]))),
        "stall_abort_time": "60",
    }
    subsets = st.lists(st.sampled_from(everyone), min_size=1, max_size=size, unique=True).map(
        lambda r: tuple(sorted(r))
    )
    sets: list[tuple[int, ...]] = []
    epochs = []
    for _ in range(draw(st.integers(1, 2))):
        fresh = [s for s in draw(st.lists(subsets, max_size=3, unique=True)) if s not in sets and s != everyone]
        sets = sets + fresh
        batch = draw(st.integers(1, 3))
        epoch_rounds = tuple(draw(rounds(size, [everyone, *sets])) for _ in range(batch))
        batches = [draw(st.integers(0, batch)) if draw(st.booleans()) else batch for _ in range(size)]
        batches[draw(st.sampled_from(everyone))] = batch
        gone = [s for s in sets if draw(st.booleans())]
        sets = [s for s in sets if s not in gone]
        hasty = tuple(draw(st.booleans()) for _ in range(size))
        epochs.append(Epoch(tuple(fresh), tuple(gone), epoch_rounds, tuple(batches), hasty))
    return Program(size, knobs, tuple(epochs))
