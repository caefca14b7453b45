"""What each CUDA kernel takes of a multiprocessor, from the log of a build with -Xptxas=-v. Exits with 1 on spills.

python cmake/ptxas_report.py LOG
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(.*)")
SHARED = re.compile(r"(\d+) bytes smem")
REGISTERS_PER_SM, WARPS_PER_SM, THREADS = 65536, 64, 256


@dataclass
class Use:
    kernel: str
    architecture: str
    registers: int = 0
    shared: int = 0
    stack: int = 0
    spilled: int = 0  # bytes stored and loaded

    def warps(self) -> int:
        """How many warps of it a multiprocessor holds, as far as registers go (given out by 8 per thread)."""
        per_block = -(-self.registers // 8) * 8 * THREADS
        return min(WARPS_PER_SM, REGISTERS_PER_SM // per_block * THREADS // 32)


def parse(log: str) -> list[Use]:
    uses: list[Use] = []
    for line in log.splitlines():
        if entry := ENTRY.search(line):
            uses.append(Use(*entry.groups()))
        elif frame := FRAME.search(line):
            stack, stores, loads = map(int, frame.groups())
            if uses and not uses[-1].registers:
                uses[-1].stack, uses[-1].spilled = stack, stores + loads
        elif (used := USED.search(line)) and uses:
            uses[-1].registers = int(used[1])
            shared = SHARED.search(used[2])
            uses[-1].shared = int(shared[1]) if shared else 0
    return uses


def readable(names: list[str]) -> dict[str, str]:
    """The kernels' C++ names, short."""
    try:
        done = subprocess.run(["c++filt", *names], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return dict(zip(names, names, strict=True))
    clean = [
        re.sub(r"fusewire::|cuda::|element::|device::|\(anonymous namespace\)::|^void |\(.*\)$", "", text)
        for text in done.stdout.splitlines()
    ]
    return dict(zip(names, clean, strict=True))


def main(path: str) -> int:
    from rich.console import Console
    from rich.table import Table

    uses = parse(Path(path).read_text())
    if not uses:
        print(f"error: {path} is not the log of a build with -Xptxas=-v: it names no kernel.", file=sys.stderr)
        return 1
    names = readable(sorted({use.kernel for use in uses}))
    table = Table(title="CUDA kernels", title_justify="left")
    table.add_column("kernel", overflow="fold")
    for column in ("for", "registers", "shared", "stack", "spilled", "warps"):
        table.add_column(column, justify="right")
    for use in sorted(uses, key=lambda use: (names[use.kernel], use.architecture)):
        numbers = (use.registers, use.shared, use.stack, use.spilled, use.warps())
        style = "red" if use.spilled else ""
        table.add_row(names[use.kernel], use.architecture, *map(str, numbers), style=style)
    Console(width=150).print(table)
    spilling = [f"{names[use.kernel]} for {use.architecture}" for use in uses if use.spilled]
    print(f"{len(uses)} kernels, {len(spilling)} of them with spilled registers")
    if spilling:
        print("error: registers are spilled to memory by", "; ".join(spilling), file=sys.stderr)
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
