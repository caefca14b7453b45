"""The command line of ``fusewire bench``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from .cases import NOT_QUICK, PEER_TITLES, SECTIONS, Case, all_cases, select
from .group import BenchError
from .runner import FULL, QUICK, Result, Runner

if TYPE_CHECKING:
    from rich.console import Console

    from .report import Run


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fusewire bench",
        description="Time Fusewire on this machine beside torch's Gloo, DDP, MPI (mpi4py) and memcpy, interleaved.",
    )
    parser.add_argument("-n", type=int, default=2, metavar="RANKS", help="ranks to start (default: 2)")
    parser.add_argument("--quick", action="store_true", help="under a minute: fewer rounds, the largest cases left out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture (.png, .svg or .pdf)")
    parser.add_argument(
        "--only",
        type=_comma_list,
        default=[],
        metavar="CASES",
        help=f"comma-separated sections ({', '.join(SECTIONS)}) or case ids, with * as in a shell; see --list",
    )
    parser.add_argument(
        "--peers",
        type=_comma_list,
        default=list(PEER_TITLES),
        metavar="PEERS",
        help=f"comma-separated, of {', '.join(PEER_TITLES)} (default: all)",
    )
    parser.add_argument("--bars", action="store_true", help="show what Fusewire sets itself to reach, pass or FAIL")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    return parser


def _comma_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def run(argv: Sequence[str] | None) -> int:
    """What ``fusewire.bench.main`` does."""
    parser = make_parser()
    options = parser.parse_args(argv)
    cases = all_cases()
    if options.list:
        for case in cases:
            print(f"{case.id:26} {case.title}")
        return 0
    if options.n < 1:
        parser.error(f"-n {options.n}: at least 1 rank")
    if unknown := set(options.peers) - set(PEER_TITLES):
        parser.error(f"--peers: no peer named {', '.join(sorted(unknown))}; there are {', '.join(PEER_TITLES)}")
    try:
        if options.only:
            cases = select(cases, options.only)
        elif options.quick:
            cases = [case for case in cases if case.id not in NOT_QUICK]
    except ValueError as error:
        parser.error(f"--only: {error}")
    wanted = {"rich": True, "matplotlib": options.plot is not None}
    for package in (name for name, needed in wanted.items() if needed and find_spec(name) is None):
        reason = "--plot draws" if package == "matplotlib" else "fusewire bench prints"
        print(f"fusewire bench: {reason} with {package}, which is missing: pip install {package}", file=sys.stderr)
        return 1
    for path in filter(None, (options.json, options.plot)):
        if not path.resolve().parent.is_dir():
            parser.error(f"{path}: there is no directory {path.resolve().parent}")
    return _measure(options, cases)


def _measure(options: argparse.Namespace, cases: list[Case]) -> int:
    from rich.console import Console

    from .report import Run, as_json, footnotes

    console = Console()
    about = Run(ranks=options.n, quick=options.quick)
    results: list[Result] = []
    try:
        with Screen(console, about, cases, options.bars) as screen:
            with Runner(options.n, set(options.peers), QUICK if options.quick else FULL) as runner:
                about.versions, about.missing = runner.versions, runner.missing
                results = runner.measure(cases, screen)
    except BenchError as error:
        print(f"fusewire bench: {error}", file=sys.stderr)
        if error.__cause__ is not None:
            print(error.__cause__, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fusewire bench: interrupted", file=sys.stderr)
        return 1
    about.load_after = os.getloadavg()[0]
    for note in footnotes(about):
        console.print(f"[yellow]{note}[/]")
    console.print("[dim]" + ", ".join(dict.fromkeys(about.versions.values())) + "[/]")
    if options.json:
        options.json.write_text(json.dumps(as_json(about, results, options.bars), indent=1) + "\n")
        console.print(f"Samples are in {options.json}")
    if options.plot:
        from .plot import draw

        draw(as_json(about, results, False), options.plot)
        console.print(f"The picture is {options.plot}")
    return 0


class Screen:
    """Prints each section's table once it is measured, above a line that shows what goes on.

    The line is redrawn only when the runner says something, between batches: a refreshing thread would take a core
    from the ranks.
    """

    def __init__(self, console: Console, run: Run, cases: list[Case], with_bars: bool) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self.console, self.about, self.with_bars = console, run, with_bars
        self.progress_bar = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            auto_refresh=False,
            transient=True,
        )
        self.task = self.progress_bar.add_task("starting ranks", total=len(cases))
        self.remaining = [case.section for case in cases]
        self.finished_cases = 0
        self.results: list[Result] = []

    def __enter__(self) -> Screen:
        self.progress_bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress_bar.stop()

    def starting(self, case: Case) -> None:
        self.progress(case, 0, "starting")

    def progress(self, case: Case, fraction: float, what: str) -> None:
        completed = self.finished_cases + min(1.0, fraction)
        self.progress_bar.update(self.task, completed=completed, description=f"{case.id}: {what}")
        self.progress_bar.refresh()

    def finished(self, result: Result) -> None:
        from .report import make_bars_table, make_table

        self.finished_cases += 1
        section = self.remaining.pop(0)
        self.results.append(result)
        if section not in self.remaining:
            done = [r for r in self.results if r.case.section == section]
            self.progress_bar.console.print(make_table(section, done, self.about))
            if self.with_bars and (bars := make_bars_table(done, self.about)).row_count:
                self.progress_bar.console.print(bars)
