"""Results as rich tables and as JSON. The JSON's fields are described in benchmarks/README.md."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from .cases import (
    ADASUM,
    BUCKETS,
    NO_COMMUNICATION,
    ONE_BY_ONE,
    PACKED,
    PEER_TITLES,
    SECTIONS,
    STATS,
    SUM,
    TIMELINE,
    UNWATCHED,
    Contender,
)
from .runner import Measurement, Result
from .targets import bars

SCHEMA = 1
DASH = "-"

_COMPARISON = ["fusewire", "Gloo", "MPI", "memcpy", "x Gloo", "x MPI", "memcpy"]
COLUMNS = {
    "allreduce": ["tensor", *_COMPARISON],
    "list": ["tensors", *_COMPARISON],
    "collective": ["operation", "fusewire", "Gloo", "MPI", "x Gloo", "x MPI"],
    "adasum": ["tensor", "Adasum", "Sum", "ratio"],
    "training": ["model", "alone", "DDP adds", "fusewire adds", "ratio"],
    "watched": ["CPU of the busiest rank", "unwatched", "timeline adds", "stats() adds"],
    "idle": ["while nothing is asked", "fusewire", "Gloo"],
}
NO_ROW = frozenset({SUM, TIMELINE, STATS})  # they are in the row of what they are compared with
_RATIOS = "x Gloo, x MPI: how many times faster than they. Last column: per cent of memcpy's speed, the limit."
CAPTIONS = {
    "allreduce": _RATIOS,
    "list": f"Gloo: {BUCKETS} as in DDP, with their copies. MPI: tensors {ONE_BY_ONE}, or {PACKED} where faster.",
    "collective": "Size: each rank's input. x Gloo, x MPI: how many times faster than they.",
    "training": "Medians of paired differences of interleaved blocks, and 95 % intervals. Ratio: fusewire / DDP.",
    "watched": "Medians of paired differences of interleaved blocks, and 95 % intervals, in per cent of unwatched.",
}


@dataclass
class Run:
    """Everything a report says about one run besides its results."""

    ranks: int
    quick: bool
    versions: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    started: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])
    load_after: float | None = None


def format_ms(ms: float) -> str:
    """Three digits and a unit a person can compare down a column."""
    if abs(ms) < 0.1:
        return f"{ms * 1000:.3g} µs"
    return f"{ms:.3g} ms" if abs(ms) < 999.5 else f"{ms / 1000:.3g} s"


def make_table(section: str, results: list[Result], run: Run) -> Table:
    """The table of one section: a row per case, and per way of using Fusewire in it."""
    title = f"{SECTIONS[section]}, {run.ranks} rank{'s' if run.ranks > 1 else ''}, one thread each"
    table = _new_table(title, COLUMNS[section])
    table.caption = CAPTIONS.get(section)
    row_of = {
        "training": _training_row,
        "idle": _idle_row,
        "collective": _collective_row,
        "adasum": _adasum_row,
        "watched": _watched_row,
    }.get(section, _comparison_row)
    for result in results:
        for contender in (c for c in result.case.contenders if c.peer == "fusewire" and c.variant not in NO_ROW):
            table.add_row(*row_of(result, contender))
    return table


def make_bars_table(results: list[Result], run: Run) -> Table:
    """What Fusewire sets itself to reach in these cases, and whether it did."""
    table = _new_table("Bars", ["case", "at most", "limit", "reached", ""])
    for result in results:
        for contender in result.case.contenders:
            for bar in bars(result, contender, run.ranks):
                show = format_ms if result.case.section != "idle" else "{:.2f} %".format
                numbers = [DASH if value is None else show(value) for value in (bar.limit, bar.value)]
                colour = {"pass": "green", "FAIL": "red"}.get(bar.verdict, "yellow")
                name = f"{result.case.id} {contender.variant}".strip()
                table.add_row(name, bar.text, *numbers, f"[{colour}]{bar.verdict}[/]")
    return table


def _new_table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", caption_justify="left", box=SIMPLE_HEAD)
    table.padding, table.pad_edge = (0, 1, 0, 0), False  # fits 80 columns
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table


def _time(measurement: Measurement | None) -> str:
    return format_ms(measurement.median) if measurement else DASH


def _comparison_row(result: Result, ours: Contender) -> list[str]:
    name = result.case.title.split(", ")[0]
    title = f"{name}\n  {ours.variant}" if ours.variant else name
    mine = result.find("fusewire", ours.variant)
    gloo, mpi, limit = (result.find(peer) for peer in ("gloo", "mpi", "memcpy"))
    return [title, _time(mine), _time(gloo), _time(mpi), _time(limit)] + [
        _faster(mine, gloo),
        _faster(mine, mpi),
        f"{100 * limit.median / mine.median:.0f} %" if mine and limit else DASH,
    ]


def _collective_row(result: Result, ours: Contender) -> list[str]:
    mine, gloo, mpi = (result.find(peer) for peer in ("fusewire", "gloo", "mpi"))
    return [result.case.title, _time(mine), _time(gloo), _time(mpi), _faster(mine, gloo), _faster(mine, mpi)]


def _adasum_row(result: Result, ours: Contender) -> list[str]:
    adasum, plain = result.find("fusewire", ADASUM), result.find("fusewire", SUM)
    ratio = f"{adasum.median / plain.median:.2f}" if adasum and plain else DASH
    return [result.case.title, _time(adasum), _time(plain), ratio]


def _faster(mine: Measurement | None, theirs: Measurement | None) -> str:
    if mine is None or theirs is None:
        return DASH
    ratio = theirs.median / mine.median
    return f"[{'green' if ratio >= 1 else 'red'}]{ratio:.3g}x[/]"


def _training_row(result: Result, ours: Contender) -> list[str]:
    base, ddp, mine = (result.find(peer) for peer in (NO_COMMUNICATION, "ddp", "fusewire"))
    ratio = DASH
    if ddp and mine and ddp.extra and mine.extra and median(ddp.extra) > 0:
        ratio = f"{median(mine.extra) / median(ddp.extra):.2f}"
    return [result.case.title, _time(base), _extra(ddp), _extra(mine), ratio]


def _extra(measurement: Measurement | None) -> str:
    if measurement is None or not measurement.extra:
        return DASH
    low, high = measurement.extra_interval
    return f"{median(measurement.extra):+.1f} ms\n({low:.1f} to {high:.1f})"


def _watched_row(result: Result, ours: Contender) -> list[str]:
    base, *watched = (result.find("fusewire", variant) for variant in (UNWATCHED, TIMELINE, STATS))
    return [result.case.title, _time(base), *(_share(measurement, base) for measurement in watched)]


def _share(measurement: Measurement | None, base: Measurement | None) -> str:
    if measurement is None or base is None:
        return DASH
    added, low, high = (100 * ms / base.median for ms in (median(measurement.extra), *measurement.extra_interval))
    return f"{added:+.1f} %\n({low:.1f} to {high:.1f})"


def _idle_row(result: Result, ours: Contender) -> list[str]:
    found = (result.find(peer) for peer in ("fusewire", "gloo"))
    return ["CPU of the busiest rank", *(f"{max(m.samples):.2f} % of a core" if m else DASH for m in found)]


def footnotes(run: Run) -> list[str]:
    """What a reader must know to trust the tables: absences and other load."""
    notes = [f"{PEER_TITLES[peer]} was not measured: {reason}" for peer, reason in run.missing.items()]
    cores = len(os.sched_getaffinity(0))
    if run.load_before > 0.25 * cores:
        notes.append(
            f"The machine was busy with other work when this started (load {run.load_before:.1f} on {cores} cores): "
            "compare ratios, not milliseconds."
        )
    return notes


def as_json(run: Run, results: list[Result], with_bars: bool) -> dict[str, Any]:
    """The run as plain data; see benchmarks/README.md."""
    return {
        "schema": SCHEMA,
        "ranks": run.ranks,
        "quick": run.quick,
        "started": run.started,
        "machine": {
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "load_before": run.load_before,
            "load_after": run.load_after,
        },
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__), **run.versions},
        "missing": run.missing,
        "results": [_result_json(result, run, with_bars) for result in results],
    }


def _result_json(result: Result, run: Run, with_bars: bool) -> dict[str, Any]:
    case = result.case
    data: dict[str, Any] = {
        "case": case.id,
        "title": case.title,
        "section": case.section,
        "dtype": case.dtype,
        "bytes": case.bytes,
        "tensors": len(case.shapes),
        "unit": "percent" if case.section == "idle" else "ms",
        "contenders": [_measurement_json(result, m) for m in result.measurements],
        "missing": {contender.label: reason for contender, reason in result.missing.items()},
    }
    if with_bars:
        data["bars"] = [
            {"contender": c.label, "bar": b.text, "value": b.value, "limit": b.limit, "verdict": b.verdict}
            for c in case.contenders
            for b in bars(result, c, run.ranks)
        ]
    return data


def _measurement_json(result: Result, measurement: Measurement) -> dict[str, Any]:
    first, third = measurement.quartiles
    data: dict[str, Any] = {
        "peer": measurement.contender.peer,
        "variant": measurement.contender.variant,
        "median": measurement.median,
        "min": measurement.least,
        "quartiles": [first, third],
        "iterations_per_sample": measurement.iterations,
        "samples": measurement.samples,
    }
    if result.case.bytes:
        data["gigabytes_per_second"] = result.case.bytes / measurement.median / 1e6
    if measurement.extra:
        data["extra_median"] = median(measurement.extra)
        data["extra_interval"] = list(measurement.extra_interval)
    return data


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or sys.platform
