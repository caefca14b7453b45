"""Timelines: what every rank's tensors and buckets did when, for chrome://tracing and https://ui.perfetto.dev.

docs/timeline.md says how to read one.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import _state


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Records from now on what happens to this rank's tensors, in Chrome's trace event format.

    Each rank that calls this writes a file of its own: `{rank}` in `file_path` is its number; without it, and with
    several ranks, the number is put before the extension (`trace.json` becomes `trace.0.json`, `trace.1.json`). The
    file is valid JSON at every moment, also when the process is killed. `fusewire timeline merge` joins the ranks'.

    Args:
        file_path: where; a file that exists is replaced.
        mark_cycles: also mark when negotiation did something.

    Raises ValueError when a timeline is being recorded or the file cannot be made, NotInitializedError before init().
    """
    _state.engine().start_timeline(os.fspath(file_path), mark_cycles)


def stop_timeline() -> None:
    """Ends what start_timeline(), or the variable FUSEWIRE_TIMELINE, began; returns when the file is complete.

    Does nothing when no timeline is recorded. shutdown() does this as well.
    """
    _state.engine().stop_timeline()


def merge(output: str | os.PathLike[str], inputs: Iterable[str | os.PathLike[str]]) -> int:
    """Joins timelines of several ranks into one file, each rank as a process of its own; returns how many there were.

    Ranks of one host share a clock. An input may be a file, a directory (all `*.json` in it) or a glob pattern; the
    output is never one of them. Raises ValueError naming an input that is no timeline, or when there are none.
    """
    target = Path(output)
    files = [path for path in _expand(inputs) if path.resolve() != target.resolve()]
    if not files:
        raise ValueError("no timelines found; give the files, a directory or a pattern")
    events: list[dict[str, Any]] = []
    taken: set[int] = set()
    for path in files:
        for process, own in _by_process(path).items():
            number = process if process not in taken else max(taken) + 1
            taken.add(number)
            events += (event | {"pid": number} for event in own)
    events.sort(key=lambda event: event.get("ts", -1.0))  # metadata first; stable for the rest
    temporary = target.with_name(target.name + ".part")
    with open(temporary, "w") as file:
        file.write('{"displayTimeUnit":"ns","traceEvents":[\n')
        file.write(",\n".join(json.dumps(event, separators=(",", ":")) for event in events))
        file.write("\n]}\n")
    temporary.replace(target)
    return len(files)


def _expand(inputs: Iterable[str | os.PathLike[str]]) -> list[Path]:
    found: dict[Path, None] = {}  # each once, in order
    for entry in inputs:
        path = Path(entry)
        if path.is_dir():
            matches = sorted(path.glob("*.json"))
        elif path.exists():
            matches = [path]
        else:
            matches = sorted(Path(name) for name in glob.glob(os.fspath(entry)))
            if not matches:
                raise ValueError(f"there is no timeline '{entry}'")
        found.update(dict.fromkeys(matches))
    return list(found)


def _by_process(path: Path) -> dict[int, list[dict[str, Any]]]:
    try:
        content = json.loads(path.read_bytes())
        events = content["traceEvents"] if isinstance(content, dict) else content
        processes: dict[int, list[dict[str, Any]]] = {}
        for event in events:
            processes.setdefault(event["pid"], []).append(event)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"'{path}' is not a timeline: {error!r}") from error
    return processes
