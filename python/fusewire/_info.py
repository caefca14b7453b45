"""`fusewire info`: what is built, what was found on this machine, and why a thing is off."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from . import _build, _launch
from ._version import __version__

GOOD, OFF, BAD = "[green]on[/]", "[yellow]off[/]", "[red]problem[/]"
Row = tuple[str, str, str]  # what, state ("" for a plain fact), details


def print_info() -> int:
    """Prints the table; 1 when something is in a state that Fusewire cannot work with."""
    from rich.console import Console
    from rich.table import Table

    rows = [*_versions(), *_data_planes(), *_machine(), *_job()]
    table = Table(title=f"Fusewire {__version__}", title_justify="left")
    table.add_column("")
    table.add_column("state")
    table.add_column("details", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    return 1 if any(state == BAD for _, state, _ in rows) else 0


def _versions() -> Iterator[Row]:
    import torch

    built = _build.info()
    problem = _build.mismatch(built, torch.__version__, torch.compiled_with_cxx11_abi())
    yield "Python", "", f"{sys.version.split()[0]} at {sys.executable}"
    yield "torch", BAD if problem else "", f"built for {built.torch if built else '-'}, found {torch.__version__}"
    if problem:
        yield "extension", BAD, problem
    elif built:
        abi = int(built.cxx11_abi)
        yield "extension", GOOD, f"{built.compiler}, {built.build_type}, _GLIBCXX_USE_CXX11_ABI={abi}"


def _data_planes() -> Iterator[Row]:

    yield "CPU kernels", GOOD, f"instruction set: {_isa()}"
    yield "CUDA kernels", *_cuda_kernels()
    yield "shm", GOOD, "CPU tensors between the ranks of one host"
    yield _gpus()
    yield _nccl()
    yield _mpi()
    yield "Gloo", OFF, "not in this version; one host only"


def _gpus() -> Row:
    import torch

    try:
        from . import _core

        obstacle = _core.cuda_obstacle()
    except ImportError as error:
        obstacle = f"unknown ({error})"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        found = f"{count} GPU(s): {', '.join(dict.fromkeys(map(torch.cuda.get_device_name, range(count))))}"
    elif torch.version.cuda is None:
        found = "this torch is built without CUDA"
    else:
        found = f"torch for CUDA {torch.version.cuda} sees no GPU"
    if obstacle or not count:
        return "CUDA tensors", OFF, "; ".join(dict.fromkeys(part for part in (obstacle, found) if part))
    # Which of them serves a process set is agreed on by its members, when they first need it.
    plane = "host staging (through pinned memory and the plane for CPU tensors)"
    if not _core.nccl_facts()["problem"]:
        plane = f"NCCL where every rank has a GPU of its own, else {plane}"
    return "CUDA tensors", GOOD, f"{found}; moved by {plane}"


def _mpi() -> Row:
    try:
        from . import _core

        facts = _core.mpi_facts()
    except (ImportError, ValueError) as error:
        return "MPI", OFF, f"unknown ({error})"
    if facts["problem"]:
        return "MPI", OFF, facts["problem"]
    level = f"running with {facts['threads']}" if facts["started"] else "its thread level is known once it runs"
    chosen = os.environ.get("FUSEWIRE_BACKEND") == "mpi"
    use = "chosen by FUSEWIRE_BACKEND" if chosen else "used with FUSEWIRE_BACKEND=mpi under mpirun or srun"
    return "MPI", GOOD, f"{facts['library']}; {level}; {use}"


def _nccl() -> Row:
    try:
        from . import _core

        facts = _core.nccl_facts()
    except ImportError as error:
        return "NCCL", OFF, f"unknown ({error})"
    if facts["problem"]:
        return "NCCL", OFF, facts["problem"]
    features = "; ".join(f"{name}: {why or 'yes'}" for name, why in facts["features"].items())
    return "NCCL", GOOD, f"{facts['text']} at {facts['path']}; {features}"


def _isa() -> str:
    try:
        from . import _core
    except ImportError as error:
        return f"unknown ({error})"
    return _core.isa() if hasattr(_core, "isa") else "picked at run time"


def _cuda_kernels() -> tuple[str, str]:
    built = _build.info()
    architectures = getattr(built, "cuda", "")
    if not architectures:
        return OFF, f"not compiled in: {getattr(built, 'cuda_reason', '') or 'this build has no record of why'}"
    return GOOD, f"compiled for {', '.join(architectures.split(';'))}"


def _machine() -> Iterator[Row]:
    cores = len(os.sched_getaffinity(0))
    spin = os.environ.get("FUSEWIRE_SPIN_US")
    default = f"20 us with up to {cores} local ranks, or as many as their launcher has cores; none with more"
    yield (
        "cores",
        "",
        f"{cores} usable of {os.cpu_count()}; spinning: {f'FUSEWIRE_SPIN_US={spin}' if spin else default}",
    )
    yield _shared_memory()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield "open files", BAD if soft < 64 else "", f"at most {soft} (rank 0 needs about 2 per local rank)"


def _shared_memory() -> Row:
    """Shared memory is an anonymous memfd: what counts is the memory and its limits, not the size of /dev/shm."""
    try:
        descriptor = os.memfd_create("fusewire-info")
        try:
            os.ftruncate(descriptor, 1 << 20)
            os.pwrite(descriptor, b"x", (1 << 20) - 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        return "shared memory", BAD, f"memfd_create does not work here: {error}"
    limit = _cgroup_limit()
    return "shared memory", GOOD, f"memfd; memory limit of this container: {limit or 'none'}"


def _cgroup_limit() -> str | None:
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return f"{int(text) / 2**30:.1f} GiB" if text.isdigit() else None


def _job() -> Iterator[Row]:
    try:
        place = _launch.detect()
    except ValueError as error:
        yield "launcher", BAD, str(error)
        return
    if place.launcher is None:
        yield "launcher", "", "none: init() makes a single process; use `fusewire run -n N script.py`"
        return
    yield "launcher", "", f"{place.launcher.name}: rank {place.rank} of {place.size}"
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address and port:
        yield "rendezvous", "", f"TCP store at {address}:{port}"
    else:
        yield (
            "rendezvous",
            "",
            f"file in {tempfile.gettempdir()}/fusewire-{os.getuid()} (no MASTER_ADDR and MASTER_PORT)",
        )
