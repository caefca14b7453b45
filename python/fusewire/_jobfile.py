"""Rendezvous through a file, for launchers on one host that name no address: which file, and is it safe?

Note [Whose file]
Ranks of one job must find the same file, other jobs must not, and leftovers of dead jobs must harm nobody. What all
ranks of a job on one host share, and no other job does, is the process that launched them: its pid and start time are
unique until the next boot, and say at any time whether the job still lives. The name therefore is

    <user's folder>/<boot>-<pid namespace>-<launcher pid>-<its start time>-<launcher's job id>-<generation>

A file whose launcher process is gone belongs to a dead job, and the next rank that comes by removes it.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

from ._launch import Environment, Place, job_id


def path(place: Place, generation: int, env: Environment | None = None) -> Path:
    """The rendezvous file of this job, created empty with mode 0600; leftovers of dead jobs are removed."""
    folder = _private_folder()
    _remove_dead(folder)
    job = hashlib.sha256(job_id(place, env).encode()).hexdigest()[:12]
    pid = _launcher_pid(place)
    file = folder / "-".join([*_here(), str(pid), str(_start_time(pid)), job, str(generation)])
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _check_owner(file, os.fstat(descriptor), 0o600)
    finally:
        os.close(descriptor)
    return file


def _private_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"fusewire-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{folder} must be a folder of yours, but is something else: remove it")
    _check_owner(folder, status, 0o700)
    return folder


def _check_owner(file: Path, status: os.stat_result, mode: int) -> None:
    if status.st_uid != os.getuid():
        raise PermissionError(f"{file} must be yours, but belongs to uid {status.st_uid}: remove it, or set TMPDIR")
    if stat.S_IMODE(status.st_mode) != mode:
        raise PermissionError(f"{file} must have mode {mode:o}, but has {stat.S_IMODE(status.st_mode):o}: remove it")


def _here() -> tuple[str, str]:
    """Which boot of which machine, and which pid namespace: only there do pids and start times mean anything."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return boot[:16], os.readlink("/proc/self/ns/pid").strip("pid:[]")


def _launcher_pid(place: Place) -> int:
    """The nearest ancestor that is not part of this rank: mpirun, hydra's proxy, slurmstepd.

    Between it and us may be shells and wrappers; they carry the rank's own variables, the launcher does not.
    """
    assert place.launcher is not None
    own = _facts(Path("/proc/self/environ"), place)
    pid = os.getppid()
    while pid > 1 and own and _facts(Path(f"/proc/{pid}/environ"), place) == own:
        pid = int(_stat_fields(pid)[1])
    return pid


def _facts(environ: Path, place: Place) -> dict[bytes, bytes]:
    """The rank's variables in a process's initial environment; none where we may not look (then it is not ours)."""
    assert place.launcher is not None
    names = {name.encode() for name in place.launcher.variables()}
    try:
        entries = [entry.partition(b"=") for entry in environ.read_bytes().split(b"\0")]
    except OSError:
        return {}
    return {name: value for name, _, value in entries if name in names}


def _stat_fields(pid: int) -> list[str]:
    # The command in field 2 may contain anything, a parenthesis too; what follows the last one is plain.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _start_time(pid: int) -> int:
    """When process `pid` started, in clock ticks since boot; 0 when there is none (or none that we can see)."""
    try:
        return int(_stat_fields(pid)[19])
    except (OSError, IndexError):
        return 0


def _remove_dead(folder: Path) -> None:
    for file in folder.iterdir():
        parts = file.name.split("-")
        judged = len(parts) == 6 and tuple(parts[:2]) == _here() and parts[2].isdigit() and parts[2] != "0"
        if judged and str(_start_time(int(parts[2]))) != parts[3]:
            file.unlink(missing_ok=True)
