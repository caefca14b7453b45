"""Averaging a ResNet-50's parameters: Fusewire's PeriodicModelAverager beside PyTorch's over Gloo, time and memory.

python benchmarks/averaging.py [-n 2] [--rounds 15] [--json out.json]

Both average 161 float32 parameters (102 MB). Rounds are interleaved, each starting with the other one; a sample is the
time of the slowest rank, and the table shows medians. Peak memory is what a rank's resident memory rises above what it
was before the very first call, all buffers and shared memory included.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

import fusewire
from fusewire.bench.cases import resnet50_shapes

TIME_BAR = 1 / 6  # of PyTorch's time
MEMORY_BAR = 0.05  # of the parameters' size
OURS, THEIRS = "fusewire", "torch, gloo"


def measure(rounds: int, store_file: str) -> dict[str, Any]:
    """One rank's work: seconds per call (the slowest rank's), and peak extra bytes of the first call, by contender."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager as TorchAverager

    torch.set_num_threads(1)
    fusewire.init()
    rank, size = fusewire.rank(), fusewire.size()
    dist.init_process_group("gloo", store=dist.FileStore(store_file, size), rank=rank, world_size=size)
    averagers = {OURS: fusewire.PeriodicModelAverager(2), THEIRS: TorchAverager(2)}
    models = {name: [torch.nn.Parameter(torch.empty(shape)) for shape in resnet50_shapes()] for name in averagers}
    for parameters in models.values():
        for parameter in parameters:
            parameter.grad = torch.zeros(1).expand_as(parameter)  # PyTorch's averages only what has a gradient

    def call(name: str) -> float:
        averagers[name].step = 0  # it is time to average
        fusewire.barrier()
        begin = time.perf_counter()
        averagers[name].average_parameters(models[name])
        return time.perf_counter() - begin

    seconds: dict[str, list[float]] = {name: [] for name in averagers}
    peaks = {}
    for name in averagers:  # the first call of each: untimed, its memory and its result are looked at
        fill(models[name], rank)
        before = resident()
        reset_peak()
        call(name)
        peaks[name] = peak() - before
        mean = (size - 1) / 2
        if not all(bool((p.detach() == mean + index).all()) for index, p in enumerate(models[name])):
            raise SystemExit(f"{name} left something else than the mean")
    for number in range(rounds):
        for name in list(averagers)[:: 1 if number % 2 else -1]:
            fill(models[name], rank)
            slowest = fusewire.allreduce(torch.tensor(call(name)), op=fusewire.Max, name="slowest")
            seconds[name].append(float(slowest))
    total = sum(parameter.nbytes for parameter in models[OURS])
    dist.destroy_process_group()
    fusewire.shutdown()
    return {"seconds": seconds, "peaks": peaks, "bytes": total}


def fill(parameters: list[Any], rank: int) -> None:
    for index, parameter in enumerate(parameters):
        parameter.data.fill_(float(rank + index))


def resident() -> int:
    return _status("VmRSS")


def peak() -> int:
    return _status("VmHWM")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def report(results: list[dict[str, Any]], ranks: int) -> dict[str, Any]:
    """Prints the table; returns what --json writes."""
    total = results[0]["bytes"]
    seconds = {name: median(results[0]["seconds"][name]) for name in (OURS, THEIRS)}
    peaks = {name: max(result["peaks"][name] for result in results) / total for name in (OURS, THEIRS)}
    ratio = seconds[OURS] / seconds[THEIRS]
    table = Table(title=f"average_parameters of ResNet-50 ({total / 1e6:.0f} MB), {ranks} ranks, one thread each")
    for column in ("", "time", "peak extra memory"):
        table.add_column(column, justify="left" if not column else "right")
    for name in (OURS, THEIRS):
        table.add_row(name, f"{1000 * seconds[name]:.1f} ms", f"{100 * peaks[name]:.1f} % of the model")
    table.add_section()
    bars = {
        "time": {"value": ratio, "limit": TIME_BAR, "verdict": "pass" if ratio <= TIME_BAR else "FAIL"},
        "memory": {
            "value": peaks[OURS],
            "limit": MEMORY_BAR,
            "verdict": "pass" if peaks[OURS] < MEMORY_BAR else "FAIL",
        },
    }
    table.add_row("ratio", f"1/{1 / ratio:.1f}", f"{peaks[OURS]:.3f}")
    table.add_row("bar", f"1/6: {bars['time']['verdict']}", f"0.05: {bars['memory']['verdict']}")
    Console().print(table)
    return {"ranks": ranks, "bytes": total, "load": os.getloadavg()[0], "results": results, "bars": bars}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the samples and the verdicts to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fusewire-averaging-") as folder:
        arguments = (options.rounds, str(Path(folder, "store")))
        results = fusewire.run(measure, n=options.ranks, args=arguments, env={"OMP_NUM_THREADS": "1"})
    written = report(results, options.ranks)
    if options.json:
        options.json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
