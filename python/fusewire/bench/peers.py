"""One iteration of an allreduce by each library, over the same tensors.

A ``Peer`` is opened once per process and turns (variant, buffers) into a callable that does one iteration in place.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable
from datetime import timedelta
from math import ceil, log2
from typing import Any, Protocol

import torch

from .cases import ADASUM, ASYNC, BUCKETS, GROUPED, PACKED, Case

Step = Callable[[], Any]

BUCKET_BYTES = 25 << 20  # DDP's default bucket_cap_mb
# First value and how often it may double before it leaves the type's normal numbers: no library is timed on infinities.
GROWTH = {"float32": (2.0**-120, 240), "bfloat16": (2.0**-120, 240), "float16": (2.0**-14, 29)}


class Buffers:
    """The tensors of a case, and a flat area of the same size that bucketing and memcpy use."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.tensors = [torch.empty(shape, dtype=self.dtype) for shape in case.shapes]
        self.single = len(case.shapes) == 1 and case.section != "list"
        self._flat: torch.Tensor | None = None
        self._source: torch.Tensor | None = None
        self._ramps: torch.Tensor | None = None

    @property
    def flat(self) -> torch.Tensor:
        """Scratch of the whole case's size, touched (so its pages are there)."""
        if self._flat is None:
            self._flat = torch.zeros(sum(t.numel() for t in self.tensors), dtype=self.dtype)
            self._flat.fill_(0)
        return self._flat

    @property
    def source(self) -> torch.Tensor:
        """One contiguous tensor of the whole case's size."""
        if self._source is None:
            self._source = self.tensors[0] if self.single else torch.zeros_like(self.flat).fill_(1)
        return self._source

    def reset(self) -> None:
        """Fill with values that stay finite and normal for ``growth_limit`` repeated in-place sums."""
        for tensor in self.tensors:
            tensor.fill_(GROWTH[self.case.dtype][0])

    def fill_pattern(self, rank: int) -> None:
        for tensor in self.tensors:
            tensor.view(-1).copy_(self._ramp(tensor.numel())).add_(rank)

    def check_pattern(self, size: int) -> str:
        """'' if every tensor holds the sum of all ranks' patterns, else a sentence."""
        shift = size * (size - 1) // 2
        for index, tensor in enumerate(self.tensors):
            values, expected = tensor.view(-1), self._ramp(tensor.numel()).mul(size).add_(shift)
            if not torch.equal(values, expected):
                wrong = (values != expected).nonzero()
                at = int(wrong[0])
                return (
                    f"tensor {index} differs in {len(wrong)} of {tensor.numel()} elements; first at {at}: "
                    f"{float(values[at])} instead of {float(expected[at])}"
                )
        return ""

    def _ramp(self, count: int) -> torch.Tensor:
        """0 to 15 over and over; ``size`` ranks' sums of it are exact in every dtype."""
        if self._ramps is None:
            longest = max(t.numel() for t in self.tensors)
            self._ramps = torch.arange(16).to(self.dtype).repeat(-(-longest // 16))
        return self._ramps[:count]


def growth_limit(dtype: str, size: int) -> int:
    """How many in-place sums over ``size`` ranks the values of ``Buffers.reset`` survive."""
    return 1 << 30 if size == 1 else GROWTH[dtype][1] // ceil(log2(size))


class Peer(Protocol):
    def open(self) -> str:
        """Take part as this process's rank; return the version shown. Raises whatever the library raises."""

    def step(self, variant: str, buffers: Buffers) -> Step: ...

    def collective(self, operation: str, tensor: torch.Tensor, size: int) -> Step:
        """A callable that does one of COLLECTIVES and returns its result; broadcast is in place, from rank 0."""

    def close(self) -> None: ...


class GlooPeer:
    """torch.distributed's Gloo. Lists go through flat buckets of 25 MB with a copy in and out, as in DDP."""

    def open(self) -> str:
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        return f"torch {torch.__version__}"

    def step(self, variant: str, buffers: Buffers) -> Step:
        import torch.distributed as dist

        if variant == BUCKETS:
            return self._bucketed(buffers)
        tensor = buffers.tensors[0]
        return lambda: dist.all_reduce(tensor)

    def collective(self, operation: str, tensor: torch.Tensor, size: int) -> Step:
        import torch.distributed as dist

        call, make = {
            "allgather": (dist.all_gather_into_tensor, lambda: tensor.new_empty(size * tensor.numel())),
            "alltoall": (dist.all_to_all_single, lambda: torch.empty_like(tensor)),
            "reducescatter": (dist.reduce_scatter_tensor, lambda: tensor.new_empty(tensor.numel() // size)),
            "broadcast": (lambda _, data: dist.broadcast(data, 0), lambda: tensor),
        }[operation]
        return returning(call, make, tensor)

    def _bucketed(self, buffers: Buffers) -> Step:
        import torch.distributed as dist

        buckets: list[tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]] = []
        for members in split_into_buckets(buffers.tensors, BUCKET_BYTES):
            used = sum(bucket[0].numel() for bucket in buckets)
            flat = buffers.flat[used : used + sum(t.numel() for t in members)]
            parts = views_into(flat, members)
            buckets.append((flat, parts, members))

        def step() -> None:
            works = []
            for flat, parts, members in buckets:
                torch._foreach_copy_(parts, members)
                works.append(dist.all_reduce(flat, async_op=True))
            for work, (_, parts, members) in zip(works, buckets, strict=True):
                work.wait()
                torch._foreach_copy_(members, parts)

        return step

    def close(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def returning(call: Callable[..., Any], make: Callable[[], torch.Tensor], tensor: torch.Tensor) -> Step:
    """One iteration of a collective that writes to an output of the caller's."""

    def step() -> torch.Tensor:
        output = make()
        call(output, tensor)
        return output

    return step


def views_into(flat: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Consecutive pieces of ``flat``, shaped like the tensors."""
    pieces = torch.split(flat, [t.numel() for t in tensors])
    return [piece.view_as(t) for piece, t in zip(pieces, tensors, strict=True)]


def split_into_buckets(tensors: list[torch.Tensor], limit: int) -> list[list[torch.Tensor]]:
    """Consecutive tensors together up to ``limit`` bytes; a larger tensor is alone."""
    buckets: list[list[torch.Tensor]] = []
    room = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if not buckets or nbytes > room:
            buckets.append([])
            room = limit
        buckets[-1].append(tensor)
        room -= nbytes
    return buckets


class MpiPeer:
    """mpi4py's buffer interface: Allreduce in place, one call per tensor or one for all after packing."""

    def open(self) -> str:
        from mpi4py import MPI

        self.mpi = MPI
        size = MPI.COMM_WORLD.Get_size()
        if size != int(os.environ["FUSEWIRE_BENCH_SIZE"]):
            raise RuntimeError(f"mpirun made a world of {size} ranks: is mpi4py built for this MPI?")
        return str(MPI.Get_library_version()).split(",")[0].strip()

    def step(self, variant: str, buffers: Buffers) -> Step:
        allreduce, in_place, op = self.mpi.COMM_WORLD.Allreduce, self.mpi.IN_PLACE, self.mpi.SUM
        if variant != PACKED:
            specs = [self._spec(tensor) for tensor in buffers.tensors]

            def one_by_one() -> None:
                for spec in specs:
                    allreduce(in_place, spec, op)

            return one_by_one
        flat, members = buffers.flat, buffers.tensors
        parts = views_into(flat, members)
        spec = self._spec(flat)

        def packed() -> None:
            torch._foreach_copy_(parts, members)
            allreduce(in_place, spec, op)
            torch._foreach_copy_(members, parts)

        return packed

    def collective(self, operation: str, tensor: torch.Tensor, size: int) -> Step:
        world, spec = self.mpi.COMM_WORLD, self._spec
        call, make = {
            "allgather": (world.Allgather, lambda: tensor.new_empty(size * tensor.numel())),
            "alltoall": (world.Alltoall, lambda: torch.empty_like(tensor)),
            "reducescatter": (world.Reduce_scatter_block, lambda: tensor.new_empty(tensor.numel() // size)),
            "broadcast": (lambda data, _: world.Bcast(data, 0), lambda: tensor),
        }[operation]
        return returning(lambda output, data: call(spec(data), spec(output)), make, tensor)

    def _spec(self, tensor: torch.Tensor) -> list[Any]:
        nbytes = tensor.numel() * tensor.element_size()
        return [self.mpi.memory.fromaddress(tensor.data_ptr(), nbytes), self.mpi.FLOAT]

    def close(self) -> None:
        pass  # mpi4py finalizes MPI at exit


class MemcpyPeer:
    """The limit: the C library's memcpy of as many bytes, by all ranks at the same time, into touched memory."""

    def open(self) -> str:
        self.memcpy = ctypes.CDLL(None).memcpy
        self.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self.memcpy.restype = ctypes.c_void_p
        return os.confstr("CS_GNU_LIBC_VERSION") or "libc"

    def step(self, variant: str, buffers: Buffers) -> Step:
        memcpy, to, source, nbytes = self.memcpy, buffers.flat.data_ptr(), buffers.source.data_ptr(), buffers.case.bytes
        return lambda: memcpy(to, source, nbytes)

    def collective(self, operation: str, tensor: torch.Tensor, size: int) -> Step:
        raise NotImplementedError(f"memcpy does not stand beside {operation}")

    def close(self) -> None:
        pass


class FusewirePeer:
    """This library, through the calls a user makes."""

    def open(self) -> str:
        # Through importlib: this module also serves MPI ranks, which must not need the extension.
        self.fusewire = importlib.import_module("fusewire")
        self.fusewire.init()
        return f"fusewire {self.fusewire.__version__}"

    def step(self, variant: str, buffers: Buffers) -> Step:
        fw, tensors, case = self.fusewire, buffers.tensors, buffers.case.id
        total = fw.Adasum if variant == ADASUM else fw.Sum
        if variant == ASYNC:
            named = [(tensor, f"{case}.{index}") for index, tensor in enumerate(tensors)]
            submit, wait = fw.allreduce_async_, fw.synchronize

            def async_each() -> None:
                handles = [submit(tensor, op=total, name=name) for tensor, name in named]
                for handle in handles:
                    wait(handle)

            return async_each
        if variant == GROUPED:
            grouped, group_name = fw.grouped_allreduce_, f"{case}.group"
            return lambda: grouped(tensors, op=total, name=group_name)
        allreduce, tensor, name = fw.allreduce_, tensors[0], f"{case}.{variant}"
        return lambda: allreduce(tensor, op=total, name=name)

    def collective(self, operation: str, tensor: torch.Tensor, size: int) -> Step:
        fw, name = self.fusewire, f"bench.{operation}.{tensor.numel()}"
        return {
            "allgather": lambda: fw.allgather(tensor, name),
            "alltoall": lambda: fw.alltoall(tensor, name=name),
            "reducescatter": lambda: fw.reducescatter(tensor, name, op=fw.Sum),
            "broadcast": lambda: fw.broadcast_(tensor, 0, name),
        }[operation]

    def close(self) -> None:
        self.fusewire.shutdown()


PEERS: dict[str, Callable[[], Peer]] = {
    "fusewire": FusewirePeer,
    "gloo": GlooPeer,
    "ddp": GlooPeer,
    "mpi": MpiPeer,
    "memcpy": MemcpyPeer,
}
