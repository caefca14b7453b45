"""What the CUDA kernels and a wrapped training step cost on one GPU, beside what the hardware can do, with the bars.

python benchmarks/gpu.py [--json FILE] [--only PART ...]

Times are CUDA events', or the clock's for whole steps: medians, warm. "of the limit" for a kernel is its bytes per
second over those of a device-to-device copy of as many bytes (Adasum's dot products only read: the faster of torch's
sum and that copy). With FUSEWIRE_FAKE_CUDA=1 the code runs on the tests' stand-in, in small, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
FAKE = os.environ.get("FUSEWIRE_FAKE_CUDA") == "1" and not torch.cuda.is_available()
MB = 1 << 20


@dataclass
class Row:
    """A measurement: `share` of what it is compared with has to be at least, or at most, `bar`."""

    what: str
    value: str
    compared: str
    share: float
    bar: float | None = None
    at_most: bool = False

    @property
    def verdict(self) -> str:
        if self.bar is None or FAKE:
            return ""
        return "pass" if (self.share <= self.bar if self.at_most else self.share >= self.bar) else "FAIL"


# ---- clocks ----


def seconds_of(launch: Callable[[int], None], target: float = 0.005, rounds: int = 7) -> float:
    """Of one launch on the GPU: `launch(n)` puts n of them on the current stream; what all calls share cancels out."""

    def timed(count: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        launch(count)
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    if FAKE:
        launch(2)
        return 1e-3
    timed(3)
    many = max(10, min(1000, round(target / max(timed(10) / 10, 1e-7))))
    return median((timed(many + 1) - timed(1)) / many for _ in range(rounds))


def copy_seconds(nbytes: int) -> float:
    """A device-to-device copy that reads and writes so many bytes together."""
    source = torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy(count: int) -> None:
        for _ in range(count):
            target.copy_(source)

    return seconds_of(copy)


def rate(nbytes: float, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:,.0f} GB/s"


def micro(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us"


# ---- kernels ----


def parameter_lists() -> dict[str, list[tuple[int, ...]]]:
    from fusewire.bench.cases import gpt2_small_shapes, resnet50_shapes

    lists = {"ResNet-50": list(resnet50_shapes()), "GPT-2 small": list(gpt2_small_shapes())}
    if FAKE:
        lists = {name: [tuple(min(n, 8) for n in shape) for shape in shapes] for name, shapes in lists.items()}
    return lists


def transfers(kernels) -> list[Row]:
    """Pack and unpack of a model's gradients, as one bucket."""
    rows = []
    for name, shapes in parameter_lists().items():
        tensors = [torch.randn(shape, device="cuda") for shape in shapes]
        for wire, bar in ((torch.float32, 0.85), (torch.bfloat16, 0.80)):
            offsets, at = [], 0
            for tensor in tensors:
                offsets.append(at)
                at += math.ceil(tensor.numel() * wire.itemsize / 16) * 16
            buffer = torch.empty(at // wire.itemsize, dtype=wire, device="cuda")
            nbytes = sum(t.numel() * (t.itemsize + wire.itemsize) for t in tensors)
            limit = copy_seconds(nbytes)
            for kind in ("pack", "unpack"):
                call = partial(getattr(kernels, kind), tensors, buffer, offsets)
                taken = seconds_of(lambda n, call=call: call(times=n))
                cast = "" if wire == torch.float32 else ", cast to bfloat16"
                rows.append(
                    Row(
                        f"{kind} {name}, {len(tensors)} tensors{cast}",
                        f"{micro(taken)}, {rate(nbytes, taken)}",
                        f"copy {rate(nbytes, limit)}",
                        limit / taken,
                        bar if name == "ResNet-50" else None,
                    )
                )
    return rows


def adasum(kernels) -> list[Row]:
    """Dot products and norms of two buffers of 64 MB, and the sum that they are for."""
    size = MB if FAKE else 64 * MB
    a, b = (torch.randn(size // 4 // (64 if FAKE else 1), device="cuda") for _ in range(2))
    counts = [a.numel() // 4] * 4
    nbytes = 2 * a.nbytes
    both = torch.cat([a, b])

    def add(count: int) -> None:
        for _ in range(count):
            both.sum()

    limit = min(seconds_of(add), copy_seconds(nbytes))
    taken = seconds_of(lambda n: kernels.dot([a, b], counts, times=n))
    rows = [
        Row(
            "Adasum's dot products, 2 x 64 MB",
            f"{micro(taken)}, {rate(nbytes, taken)}",
            f"reading {rate(nbytes, limit)}",
            limit / taken,
            0.80,
        )
    ]
    dots, result = kernels.dot([a, b], counts), torch.empty_like(a)
    nbytes = 3 * a.nbytes
    limit = copy_seconds(nbytes)
    taken = seconds_of(lambda n: kernels.combine([a, b], counts, dots, result, times=n))
    rows.append(
        Row(
            "Adasum's sum, 2 x 64 MB",
            f"{micro(taken)}, {rate(nbytes, taken)}",
            f"copy {rate(nbytes, limit)}",
            limit / taken,
        )
    )
    return rows


def int8(kernels) -> list[Row]:
    values = torch.randn(16 * MB // (4096 if FAKE else 1), device="cuda")
    quantised, scales = kernels.quantise(values)
    total = torch.empty_like(values)
    rows = []
    for name, launch in (
        ("quantise", lambda n: kernels.quantise(values, times=n)),
        ("dequantise", lambda n: kernels.dequantise(quantised, scales, total, times=n)),
    ):
        nbytes = values.nbytes + quantised.nbytes + scales.nbytes
        taken, limit = seconds_of(launch), copy_seconds(nbytes)
        rows.append(
            Row(
                f"{name}, 64 MB", f"{micro(taken)}, {rate(nbytes, taken)}", f"copy {rate(nbytes, limit)}", limit / taken
            )
        )
    return rows


# ---- training ----


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.body = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, min(64, part.shape[-1]))).transpose(1, 2)
            for part in self.mix(self.first(x)).chunk(3, -1)
        )
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        return x + self.body(self.second(x))


def transformer() -> nn.Module:
    width, depth = (16, 2) if FAKE else (768, 8)
    return nn.Sequential(*(Block(width) for _ in range(depth)), nn.LayerNorm(width)).cuda()


class Trainee:
    """A model with its optimizer and a batch; `wrap` makes it distributed."""

    def __init__(self, build: Callable[[], nn.Module], batch: tuple[int, ...], wrap: bool) -> None:
        import fusewire as fw

        torch.manual_seed(0)
        self.model = build()
        self.inputs = torch.randn(*batch, device="cuda")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        if wrap:
            self.optimizer = fw.DistributedOptimizer(self.optimizer, self.model.named_parameters())

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model(self.inputs).float().square().mean()
        loss.backward()
        self.optimizer.step()

    def seconds(self, steps: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / steps


def interleaved(trainees: list[Trainee], rounds: int, steps: int) -> list[float]:
    """Medians of seconds per step; and of the paired differences of the last two."""
    for trainee in trainees:
        trainee.seconds(3)
    samples = [[trainee.seconds(steps) for trainee in trainees] for _ in range(rounds)]
    return [*(median(column) for column in zip(*samples, strict=True)), median(s[-1] - s[-2] for s in samples)]


def step_cost() -> list[Row]:
    """A step of a small transformer, alone and wrapped, at one rank."""
    batch = 2
    while not FAKE and batch < 256:
        trainee = Trainee(transformer, (batch, 256, 768), wrap=False)
        trainee.seconds(3)
        if trainee.seconds(3) > 0.008:
            break
        batch *= 2
    shape = (2, 4, 16) if FAKE else (batch, 256, 768)
    alone, wrapped, more = interleaved(
        [Trainee(transformer, shape, wrap=False), Trainee(transformer, shape, wrap=True)],
        *((1, 1) if FAKE else (15, 10)),
    )
    return [
        Row(
            "training step of a transformer, wrapped, 1 rank",
            f"{wrapped * 1e3:.2f} ms, {more * 1e6:+,.0f} us",
            f"alone {alone * 1e3:.2f} ms",
            more / alone,
            0.02,
            at_most=True,
        )
    ]


class Many(nn.Module):
    """So many parameters that have next to nothing to do."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.all = nn.ParameterList(torch.ones(16) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([p * x for p in self.all])


def hook_cost() -> list[Row]:
    count = 20 if FAKE else 1000
    trainees = [Trainee(lambda: Many(count).cuda(), (16,), wrap) for wrap in (False, True)]
    alone, _, more = interleaved(trainees, *((1, 1) if FAKE else (15, 2)))
    return [
        Row(
            f"hook, per parameter of {count:,}",
            f"{more / count * 1e6:+.2f} us",
            f"step alone {alone / count * 1e6:.1f} us",
            more / alone,
        )
    ]


def launches() -> list[Row]:
    """Our kernels per bucket, as torch's profiler sees them."""
    import fusewire as fw

    trainee = Trainee(transformer, (2, 4, 16) if FAKE else (8, 256, 768), wrap=True)
    for _ in range(3):
        trainee.step()
    torch.cuda.synchronize()
    before = fw._core.get_default_engine().stats()["buckets"]
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        trainee.step()
        torch.cuda.synchronize()
    buckets = fw._core.get_default_engine().stats()["buckets"] - before
    ours = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA and "fusewire" in e.name]
    if not ours and not FAKE:
        raise RuntimeError("the profiler has seen no kernel of Fusewire's")
    return [
        Row(
            "kernel launches per bucket, beside the collective",
            f"{len(ours) / max(buckets, 1):.2f}",
            f"{buckets} buckets",
            len(ours) / max(buckets, 1),
            3,
            at_most=True,
        )
    ]


# ---- all of it ----


def show(rows: list[Row]) -> None:
    head = ("", "measured", "compared with", "share", "bar", "")
    lines = []
    for row in rows:
        number = f"{row.share:.2f}" if row.bar and row.bar > 1 else f"{row.share:.1%}"
        bar = "" if row.bar is None else f"{'<=' if row.at_most else '>='} {row.bar:g}"
        lines.append((row.what, row.value, row.compared, number, bar, row.verdict))
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(line[c]) for line in [head, *lines]) for c in range(len(head))]
        for line in [head, *lines]:
            print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
        return
    table = Table(*head)
    for line in lines:
        table.add_row(*line, style="red" if line[-1] == "FAIL" else None)
    Console(width=150).print(table)


PARTS: dict[str, Callable] = {
    "transfers": transfers,
    "adasum": adasum,
    "int8": int8,
    "launches": launches,
    "hook": hook_cost,
    "step": step_cost,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also writes the rows there")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not FAKE:
        print("Torch sees no GPU here, so there is nothing to measure.")
        return 2

    import fusewire as fw

    if FAKE:
        sys.path.insert(0, str(ROOT / "tests" / "python"))
        import fake_cuda

        fake_cuda.install()
        fw._core._set_cuda_api(fake_cuda.api_maker())
        torch.set_num_threads(1)
        print("On the stand-in for a GPU: no number below means anything.")
    else:
        torch.cuda.init()
        print(torch.cuda.get_device_name())
    warnings.filterwarnings("ignore")
    fw.init()
    stream = torch.cuda.Stream(stream_id=fw._core.kernels.stream_id(0), device_index=0, device_type=1)
    rows: list[Row] = []
    failed = False
    for name in arguments.only:
        try:
            if name in ("transfers", "adasum", "int8"):
                with torch.cuda.stream(stream):  # the engines' own, so that no event lies between the kernels
                    rows += PARTS[name](fw._core.kernels)
            else:
                rows += PARTS[name]()
        except Exception as error:
            failed = True
            print(f"{name}: {type(error).__name__}: {error}")
    fw.shutdown()
    show(rows)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([asdict(row) | {"verdict": row.verdict} for row in rows], indent=1))
    return int(failed or (not FAKE and any(row.verdict == "FAIL" for row in rows)))


if __name__ == "__main__":
    sys.exit(main())
