"""What this rank's engine has counted: fusewire.stats()."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import _state


@dataclass(frozen=True)
class Histogram:
    """How often values of which size were seen. `bins`: pairs (largest value of the bin, count), ascending."""

    bins: tuple[tuple[float, int], ...] = ()

    @property
    def count(self) -> int:
        return sum(count for _, count in self.bins)

    def quantile(self, part: float) -> float:
        """The value that the fraction `part` (0 to 1) of all values does not exceed; 0.0 without values.

        As exact as bins are: at most a quarter too large for latencies, at most twice as large for sizes.
        """
        wanted = math.ceil(part * self.count)
        total = 0
        for most, count in self.bins:
            total += count
            if total >= wanted:
                return most
        return 0.0

    @property
    def p50(self) -> float:
        return self.quantile(0.5)

    @property
    def p95(self) -> float:
        return self.quantile(0.95)


@dataclass(frozen=True)
class OperationCounts:
    """One kind of operation (allreduce, broadcast, ...)."""

    units: int = 0  # tensors, or explicit groups, that ended well
    buckets: int = 0  # how many runs of the data plane they were fused into; 0 where nothing moves, as for barriers
    bytes: int = 0  # in those buckets on this rank, in the type that is communicated


@dataclass(frozen=True)
class Stats:
    """Counts of one rank since init(), or since the last `stats(reset=True)`."""

    operations: Mapping[str, OperationCounts] = field(default_factory=dict)  # kinds that were used
    failed: int = 0  # units that raised
    skipped: int = 0  # units that were done without moving data, because no rank had a value
    inline_buckets: int = 0  # run by a thread that waited for a result, or by the coordinator thread
    executor_buckets: int = 0  # handed to the executor thread, so that negotiation went on meanwhile
    gpu_buckets: int = 0  # with CUDA tensors in them; the time they take on the GPU is not in data_plane_seconds
    data_plane_seconds: float = 0.0  # inside buckets, waits for other ranks included
    cache_hits: int = 0  # units announced by a number
    cache_misses: int = 0  # units announced with their full description: new, changed, or without a name
    cache_evictions: int = 0
    negotiation_seconds: Histogram = Histogram()  # from submission until all ranks were ready and the answer was here
    bucket_units: Histogram = Histogram()
    bucket_bytes: Histogram = Histogram()

    @property
    def units(self) -> int:
        return sum(counts.units for counts in self.operations.values())

    @property
    def buckets(self) -> int:
        return sum(counts.buckets for counts in self.operations.values())

    @property
    def bytes(self) -> int:
        return sum(counts.bytes for counts in self.operations.values())

    def table(self) -> str:
        """As text for people, with rich where it is installed."""
        per_kind = [("operation", "units", "buckets", "bytes", "units/bucket")]
        for kind, c in self.operations.items():
            fill = f"{c.units / c.buckets:.1f}" if c.buckets else "-"
            per_kind.append((kind, str(c.units), str(c.buckets), _size(c.bytes) if c.buckets else "-", fill))
        latency = self.negotiation_seconds
        asked = self.cache_hits + self.cache_misses
        rest = [
            ("", ""),
            ("negotiation p50 / p95", f"{_time(latency.p50)} / {_time(latency.p95)}"),
            ("bucket p50 / p95", f"{_size(self.bucket_bytes.p50)} / {_size(self.bucket_bytes.p95)}"),
            ("in data planes", _time(self.data_plane_seconds)),
            ("buckets inline / executor", f"{self.inline_buckets} / {self.executor_buckets}"),
            *([("buckets on the GPU", str(self.gpu_buckets))] if self.gpu_buckets else []),
            ("cache hits", f"{self.cache_hits} of {asked} ({self.cache_hits / asked:.0%})" if asked else "-"),
            ("cache evictions", str(self.cache_evictions)),
            ("failed / skipped", f"{self.failed} / {self.skipped}"),
        ]
        return _render(per_kind) + _render(rest)


def stats(reset: bool = False) -> Stats:
    """What this rank's engine has counted since init(), or since the last call with `reset=True`.

    Counting is always on. It is local: ranks differ in what they wait for, and rank 0 sees no other rank's numbers.
    Raises NotInitializedError before init().
    """
    global _base
    engine = _state.engine()
    raw = engine.stats()
    base = _base[1] if _base is not None and _base[0] is engine else {}
    if reset:
        _base = (engine, raw)
    return _from_raw(raw, base)


_base: tuple[Any, dict[str, Any]] | None = None  # an engine and its counts at the last reset


def _from_raw(raw: dict[str, Any], base: dict[str, Any]) -> Stats:
    def count(key: str) -> Any:
        return raw[key] - base.get(key, 0)

    def histogram(key: str, unit: float = 1) -> Histogram:
        before = dict(base.get(key, ()))
        bins = ((most * unit, n - before.get(most, 0)) for most, n in raw[key])
        return Histogram(tuple((most, n) for most, n in bins if n))

    operations = {}
    for kind, values in raw["operations"].items():
        before = base["operations"][kind] if base else (0, 0, 0)
        counts = OperationCounts(*(a - b for a, b in zip(values, before, strict=True)))
        if counts.units or counts.buckets:
            operations[kind] = counts
    return Stats(
        operations=operations,
        failed=count("failed"),
        skipped=count("skipped"),
        inline_buckets=count("inline_buckets"),
        executor_buckets=count("executor_buckets"),
        gpu_buckets=count("gpu_buckets"),
        data_plane_seconds=count("plane_seconds"),
        cache_hits=count("cache_hits"),
        cache_misses=count("cache_misses"),
        cache_evictions=count("cache_evictions"),
        negotiation_seconds=histogram("negotiation_ns", 1e-9),
        bucket_units=histogram("bucket_units"),
        bucket_bytes=histogram("bucket_bytes"),
    )


def _size(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _render(rows: list[tuple[str, ...]]) -> str:
    head, *body = rows
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)
        return "\n".join(line for line in lines if line.strip()) + "\n"
    table = Table(show_header=any(head))
    for index, title in enumerate(head):
        table.add_column(title, justify="right" if index else "left")
    for row in body:
        table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=100).print(table)
    return text.getvalue()
