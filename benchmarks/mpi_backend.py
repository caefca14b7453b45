"""Fusewire over MPI beside mpi4py doing the same bytes in one call, interleaved in one run.

    mpirun -n 2 python benchmarks/mpi_backend.py [--sizes 1,4,16,64] [--rounds 31] [--output results.json]

Times are those of the slowest rank; the median of all rounds is shown. A ratio below 1 means that Fusewire is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("FUSEWIRE_BACKEND", "mpi")

import torch
from mpi4py import MPI

import fusewire as fw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,4,16,64", help="megabytes (2^20 bytes) per tensor")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--output", help="where rank 0 writes what it measured, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    fw.init()
    world = MPI.COMM_WORLD
    rows = []
    for megabytes in map(float, options.sizes.split(",")):
        rows += _measure(world, int(megabytes * 2**20), options.rounds)
    if world.rank == 0:
        _print(rows)
        if options.output:
            with open(options.output, "w") as file:
                json.dump({"library": MPI.Get_library_version().strip(), "ranks": world.size, "rows": rows}, file)
    fw.shutdown()


def _measure(world: MPI.Comm, size: int, rounds: int) -> list[dict]:
    tensor = torch.zeros(size // 4)
    array = tensor.numpy()

    def allgather() -> None:  # both make their result anew
        world.Allgather(array, torch.empty(world.size * len(tensor)).numpy())

    cases: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "allreduce": (
            lambda: fw.allreduce_(tensor, op=fw.Sum, name=f"r{size}"),
            lambda: world.Allreduce(MPI.IN_PLACE, array),
        ),
        "broadcast": (
            lambda: fw.broadcast_(tensor, 0, name=f"b{size}"),
            lambda: world.Bcast(array, 0),
        ),
        "allgather": (
            lambda: fw.allgather(tensor, name=f"g{size}"),
            allgather,
        ),
    }
    rows = []
    for name, calls in cases.items():
        times: tuple[list[float], list[float]] = ([], [])
        for round_ in range(rounds + 2):
            for which in (0, 1) if round_ % 2 else (1, 0):
                world.Barrier()
                start = time.perf_counter()
                calls[which]()
                took = world.allreduce(time.perf_counter() - start, MPI.MAX)
                if round_ >= 2:  # the first ones warm caches up
                    times[which].append(took)
        ours, theirs = (statistics.median(t) * 1e3 for t in times)
        rows.append({"case": name, "bytes": size, "fusewire_ms": ours, "mpi4py_ms": theirs, "ratio": ours / theirs})
    return rows


def _print(rows: list[dict]) -> None:
    print(f"{'':10} {'MB':>6} {'fusewire':>10} {'mpi4py':>10} {'ratio':>6}")
    for row in rows:
        megabytes = row["bytes"] / 2**20
        times = f"{row['fusewire_ms']:7.2f} ms {row['mpi4py_ms']:7.2f} ms"
        print(f"{row['case']:10} {megabytes:6g} {times} {row['ratio']:6.2f}")


if __name__ == "__main__":
    main()
