"""Which launcher started this process, and what it says about the process's place in the job.

Everything a launcher differs in is one row of LAUNCHERS; the code below the table knows none of them by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Launcher:
    """The variables of one launcher. A fact may be carried by several of them: the first that is set counts."""

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    cross_rank: tuple[str, ...] = ()
    cross_size: tuple[str, ...] = ()
    job: tuple[str, ...] = ()  # together they tell this job from others of the same user
    private: tuple[str, ...] = ()  # differ between ranks; a process without the same values is not part of this rank
    needs: tuple[str, ...] = ()  # set whenever this launcher really started the process
    launched: Callable[[Environment], bool] = lambda env: True

    def variables(self) -> tuple[str, ...]:
        """Every variable that says something about this process."""
        facts = (self.rank, self.size, self.local_rank, self.local_size, self.cross_rank, self.cross_size)
        return sum(facts, ()) + self.private


def _is_srun_step(env: Environment) -> bool:
    # Batch scripts, `salloc` shells and extern steps carry SLURM_PROCID=0 too, with step numbers from the reserved
    # range at the top of 32 bits: they are one process, whatever SLURM_NTASKS promises for the steps to come.
    step = env["SLURM_STEP_ID"]
    return step.isdigit() and int(step) < 0xFFFFFFF0


# The first row that matches wins: torchrun may run below srun or mpirun, and mpirun below srun.
LAUNCHERS = (
    Launcher(
        name="torchrun",
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        cross_rank=("GROUP_RANK",),
        cross_size=("GROUP_WORLD_SIZE",),
        job=("TORCHELASTIC_RUN_ID",),
        needs=("TORCHELASTIC_RUN_ID",),
    ),
    Launcher(  # a script that starts the ranks itself and speaks torch.distributed's env://
        name="RANK/WORLD_SIZE",
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
    ),
    Launcher(
        name="Open MPI",
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        private=("PMIX_RANK",),
    ),
    Launcher(
        name="MPICH",
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_size=("MPI_LOCALNRANKS",),
        job=("PMI_JOBID",),
        private=("PMI_FD", "PMI_ID"),
        needs=("MPI_LOCALRANKID",),
    ),
    Launcher(
        name="srun",
        rank=("SLURM_PROCID",),
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        local_rank=("SLURM_LOCALID",),
        local_size=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        cross_rank=("SLURM_NODEID",),
        cross_size=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        private=("SLURM_TASK_PID",),
        needs=("SLURM_STEP_ID",),
        launched=_is_srun_step,
    ),
)


@dataclass(frozen=True)
class Place:
    """Where this process stands in its job. A fact the launcher does not tell is None."""

    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None
    cross_rank: int | None = None
    cross_size: int | None = None
    launcher: Launcher | None = None

    def completed(self) -> Place:
        """With the facts filled in that the launcher did not tell, for a job whose ranks all share one host."""
        local_rank = self.rank if self.local_rank is None else self.local_rank
        local_size = self.size if self.local_size is None else self.local_size
        cross_size = -(-self.size // local_size) if self.cross_size is None else self.cross_size
        cross_rank = (self.rank // local_size if self.cross_rank is None else self.cross_rank) if cross_size > 1 else 0
        return replace(self, local_rank=local_rank, local_size=local_size, cross_rank=cross_rank, cross_size=cross_size)


def detect(env: Environment | None = None) -> Place:
    """Reads the place of this process from the variables of the launcher that started it.

    Without a launcher the process is alone: rank 0 of 1. ValueError, naming the variable, its value and what is
    allowed, when a launcher's variables are incomplete or make no sense together.
    """
    env = os.environ if env is None else env
    for launcher in LAUNCHERS:
        if all(name in env for name in launcher.needs) and launcher.launched(env):
            place = _place(launcher, env)
            if place is not None:
                return place
    return Place()


def _place(launcher: Launcher, env: Environment) -> Place | None:
    size_name, size_text = _first(env, launcher.size)
    rank_name, rank_text = _first(env, launcher.rank)
    if rank_text is None and size_text is None:
        return None
    if rank_text is None or size_text is None:
        here, missing = (size_name, launcher.rank[0]) if rank_text is None else (rank_name, launcher.size[0])
        raise ValueError(
            f"{here}={env[here]} is set but {missing} is not: {launcher.name} sets both; "
            f"unset {here} to run as a single process"
        )
    size = _number(size_name, size_text, 1)
    rank = _number(rank_name, rank_text, 0, size - 1)
    cross_size = _optional(env, launcher.cross_size, 1, size)
    cross_rank = _optional(env, launcher.cross_rank, 0, (cross_size or size) - 1)
    local_size = None
    name, text = _first(env, launcher.local_size)
    if text is not None:
        local_size = _number(name, _of_node(text, cross_rank or 0), 1, size)
    local_rank = _optional(env, launcher.local_rank, 0, (local_size or size) - 1)
    return Place(rank, size, local_rank, local_size, cross_rank, cross_size, launcher)


def _of_node(text: str, node: int) -> str:
    """Entry `node` of a per-node list such as "2(x3),1", as srun writes it. A plain number is itself."""
    counts: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)\(x(\d+)\)", part.strip())
        counts += [match[1]] * int(match[2]) if match else [part.strip()]
    return counts[node] if node < len(counts) else counts[-1]


def _first(env: Environment, names: tuple[str, ...]) -> tuple[str, str | None]:
    return next(((name, env[name]) for name in names if env.get(name)), ("", None))


def _optional(env: Environment, names: tuple[str, ...], low: int, high: int) -> int | None:
    name, text = _first(env, names)
    return None if text is None else _number(name, text, low, high)


def _number(name: str, text: str, low: int, high: int | None = None) -> int:
    allowed = f"an integer from {low} to {high}" if high is not None else f"an integer, at least {low}"
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} must be {allowed}") from None
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}={text} must be {allowed}")
    return value


def restart_count(env: Environment | None = None) -> int:
    """How often an elastic launcher has restarted the job's processes."""
    env = os.environ if env is None else env
    return _optional(env, ("TORCHELASTIC_RESTART_COUNT",), 0, 2**31) or 0


def job_id(place: Place, env: Environment | None = None) -> str:
    """What the launcher calls this job; empty where it has no name for it."""
    env = os.environ if env is None else env
    names = place.launcher.job if place.launcher else ()
    return "-".join(env[name] for name in names if env.get(name))


def without_launcher(env: Environment) -> dict[str, str]:
    """`env` less everything a launcher said about this process, for children that form a job of their own."""
    ours = {name for launcher in LAUNCHERS for name in launcher.variables() + launcher.job + launcher.needs}
    ours |= {"MASTER_ADDR", "MASTER_PORT"}
    return {name: value for name, value in env.items() if name not in ours and not name.startswith("TORCHELASTIC_")}
