"""What is measured: sizes, dtypes, tensor lists, training models, and which contenders take part in each."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

Shapes = tuple[tuple[int, ...], ...]

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

# Every peer that --peers accepts, in the order of the columns, and what it is called in a table.
PEER_TITLES = {
    "fusewire": "fusewire",
    "gloo": "Gloo",
    "ddp": "DDP (Gloo)",
    "mpi": "MPI",
    "memcpy": "memcpy",
}
# Peers that live in ranks started by mpirun; all others share one set of processes.
MPI_PEERS = frozenset({"mpi"})


@dataclass(frozen=True)
class Contender:
    """One library doing one case in one way."""

    peer: str
    variant: str = ""

    @property
    def label(self) -> str:
        return f"{self.peer} {self.variant}".strip()


@dataclass(frozen=True)
class Case:
    """One comparison. ``shapes`` are each rank's input tensors; ``operation`` and ``model`` say what is done with them
    in the sections that have several of either."""

    id: str
    title: str
    section: str  # a key of SECTIONS
    contenders: tuple[Contender, ...]
    dtype: str = "float32"
    shapes: Shapes = ()
    model: str = ""
    operation: str = "allreduce"

    @property
    def bytes(self) -> int:
        return sum(prod(shape) for shape in self.shapes) * DTYPE_BYTES[self.dtype]


SECTIONS = {
    "allreduce": "Allreduce of one tensor",
    "list": "Allreduce of a list of tensors",
    "collective": "Other collectives of one tensor",
    "adasum": "Adasum beside Sum",
    "training": "Training step",
    "watched": "What it costs to be watched",
    "idle": "Idle engine",
}

FUSED_SIZES = {
    "4 B": 4,
    "1 KB": 1 << 10,
    "64 KB": 64 << 10,
    "1 MB": 1 << 20,
    "16 MB": 16 << 20,
    "64 MB": 64 << 20,
    "256 MB": 256 << 20,
}
ASYNC, GROUPED = "async each", "grouped"
BUCKETS, ONE_BY_ONE, PACKED = "25 MB buckets", "one by one", "packed"
NO_COMMUNICATION = "none"
ADASUM, SUM = "Adasum", "Sum"
UNWATCHED, TIMELINE, STATS = "unwatched", "timeline", "stats()"

COLLECTIVES = ("allgather", "alltoall", "reducescatter", "broadcast")
COLLECTIVE_SIZES = ("64 KB", "1 MB", "16 MB", "64 MB")


def resnet50_shapes() -> Shapes:
    """The 161 parameters of ResNet-50 with 1,000 classes, in the order a forward pass meets them."""
    shapes: list[tuple[int, ...]] = []

    def conv_and_norm(out_channels: int, in_channels: int, kernel: int) -> None:
        shapes.extend([(out_channels, in_channels, kernel, kernel), (out_channels,), (out_channels,)])

    conv_and_norm(64, 3, 7)
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            conv_and_norm(width, channels, 1)
            conv_and_norm(width, width, 3)
            conv_and_norm(4 * width, width, 1)
            if block == 0:  # the projection beside the stage's first bottleneck
                conv_and_norm(4 * width, channels, 1)
            channels = 4 * width
    shapes.extend([(1000, channels), (1000,)])
    return tuple(shapes)


def gpt2_small_shapes() -> Shapes:
    """The 148 parameters of GPT-2 small (12 layers, width 768); the output layer shares the token embedding."""
    width = 768
    shapes: list[tuple[int, ...]] = [(50257, width), (1024, width)]
    for _ in range(12):
        shapes.extend([(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)])
        shapes.extend([(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)])
    shapes.extend([(width,), (width,)])
    return tuple(shapes)


def _fused(id: str, title: str, dtype: str, nbytes: int) -> Case:
    peers = ["fusewire", "gloo", "memcpy"] if dtype != "float32" else ["fusewire", "gloo", "mpi", "memcpy"]
    return Case(
        id=f"allreduce-{id}",
        title=title,
        section="allreduce",
        contenders=tuple(Contender(peer) for peer in peers),
        dtype=dtype,
        shapes=((nbytes // DTYPE_BYTES[dtype],),),
    )


def _list(id: str, title: str, shapes: Shapes, extra: tuple[Contender, ...] = ()) -> Case:
    contenders = (
        Contender("fusewire", ASYNC),
        Contender("fusewire", GROUPED),
        Contender("gloo", BUCKETS),
        Contender("mpi", ONE_BY_ONE),
        *extra,
        Contender("memcpy"),
    )
    return Case(id=f"list-{id}", title=title, section="list", contenders=contenders, shapes=shapes)


def _collective(operation: str, size: str) -> Case:
    return Case(
        id=f"{operation}-{size.replace(' ', '')}",
        title=f"{operation} {size}",
        section="collective",
        contenders=tuple(Contender(peer) for peer in ("fusewire", "gloo", "mpi")),
        shapes=((FUSED_SIZES[size] // 4,),),
        operation=operation,
    )


def _adasum(size: str) -> Case:
    return Case(
        id=f"adasum-{size.replace(' ', '')}",
        title=size,
        section="adasum",
        contenders=(Contender("fusewire", ADASUM), Contender("fusewire", SUM)),
        shapes=((FUSED_SIZES[size] // 4,),),
        operation="adasum",
    )


def _training(model: str, title: str) -> Case:
    contenders = tuple(Contender(peer) for peer in (NO_COMMUNICATION, "ddp", "fusewire"))
    return Case(id=f"training-{model}", title=title, section="training", contenders=contenders, model=model)


def _watched(id: str, title: str, model: str = "", shapes: Shapes = ()) -> Case:
    contenders = tuple(Contender("fusewire", variant) for variant in (UNWATCHED, TIMELINE, STATS))
    return Case(id=f"watched-{id}", title=title, section="watched", contenders=contenders, shapes=shapes, model=model)


def all_cases() -> list[Case]:
    """Every case, in the order of the report. Idle comes first of all: nothing else has run by then."""
    cases = [Case("idle", "one rank, 5 s", "idle", (Contender("fusewire"), Contender("gloo")))]
    for name, nbytes in FUSED_SIZES.items():
        cases.append(_fused(f"float32-{name.replace(' ', '')}", f"float32 {name}", "float32", nbytes))
    for dtype in ("float16", "bfloat16"):
        cases.append(_fused(f"{dtype}-16MB", f"{dtype} 16 MB", dtype, 16 << 20))
    cases.append(_list("resnet50", "ResNet-50, 161 tensors, 102 MB", resnet50_shapes()))
    cases.append(_list("gpt2", "GPT-2 small, 148 tensors, 498 MB", gpt2_small_shapes()))
    cases.append(_list("1000x1000", "1,000 x 1,000, 4 MB", ((1000,),) * 1000, (Contender("mpi", PACKED),)))
    cases.extend(_collective(operation, size) for operation in COLLECTIVES for size in COLLECTIVE_SIZES)
    cases.extend(_adasum(size) for size in COLLECTIVE_SIZES)
    cases.append(_training("linear200", "200 linear 64x64"))
    cases.append(_training("transformer", "4-layer transformer"))
    cases.append(_training("resnet18", "ResNet-18, 32x32"))
    cases.append(_watched("linear200", "200 linear 64x64", "linear200"))
    cases.append(_watched("transformer", "4-layer transformer", "transformer"))
    cases.append(_watched("4B", "allreduce 4 B", shapes=((1,),)))
    return cases


# What --quick leaves out: the cases that need minutes or gigabytes.
NOT_QUICK = frozenset(
    {"allreduce-float32-256MB", "list-gpt2", "training-resnet18", "watched-linear200", "watched-4B"}
    | {f"{operation}-{size}" for operation in (*COLLECTIVES, "adasum") for size in ("16MB", "64MB")}
)


def select(cases: Sequence[Case], patterns: Sequence[str]) -> list[Case]:
    """The cases whose id or section matches a shell pattern. Raises ValueError for a pattern that fits none."""
    chosen: set[str] = set()
    for pattern in patterns:
        hits = {c.id for c in cases if fnmatch.fnmatch(c.id, pattern) or c.section == pattern.rstrip("s")}
        if not hits:
            sections = ", ".join(SECTIONS)
            raise ValueError(
                f"no case matches {pattern!r}; sections: {sections}; ids: {', '.join(c.id for c in cases)}"
            )
        chosen |= hits
    return [case for case in cases if case.id in chosen]
