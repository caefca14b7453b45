"""Launchers' variables, `fusewire run` and `fusewire.run`."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from fusewire import _launch
from fusewire._run import RemoteTraceback, run
from fusewire.errors import PeerLostError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "3735617537",
    "OMPI_MCA_ess_base_jobid": "3735617537",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "6", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_NODES": "4",
}


@pytest.mark.parametrize(
    ("env", "launcher", "facts", "job"),
    [
        (TORCHRUN, "torchrun", (3, 8, 1, 2, 1, 4), "job"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "RANK/WORLD_SIZE", (1, 2, 1, 2, 0, 1), ""),
        (OPEN_MPI, "Open MPI", (2, 4, 2, 4, 0, 1), "3735617537-3735617537"),
        (MPICH, "MPICH", (1, 2, 1, 2, 0, 1), ""),
        (SRUN, "srun", (5, 7, 1, 2, 2, 4), "77-0"),
        (TORCHRUN | SRUN, "torchrun", (3, 8, 1, 2, 1, 4), "job"),  # srun torchrun ...
        (OPEN_MPI | SRUN | {"SLURM_STEP_ID": "4294967291"}, "Open MPI", (2, 4, 2, 4, 0, 1), "3735617537-3735617537"),
        (SRUN | {"PMI_RANK": "5", "PMI_SIZE": "7"}, "srun", (5, 7, 1, 2, 2, 4), "77-0"),  # srun --mpi=pmi2
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            "Open MPI",
            (2, 4, 0, 2, 1, 2),
            None,
        ),
    ],
)
def test_launchers(env, launcher, facts, job):
    place = _launch.detect(env)
    assert place.launcher.name == launcher
    if job is not None:
        assert _launch.job_id(place, env) == job
    place = place.completed()
    got = (place.rank, place.size, place.local_rank, place.local_size, place.cross_rank, place.cross_size)
    assert got == facts


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
        {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"},  # a batch script
        SRUN | {"SLURM_STEP_ID": "4294967291"},  # a batch step, by its reserved number
        SRUN | {"SLURM_STEP_ID": "4294967290"},  # an salloc shell
        {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77"},
        {"PMI_RANK": "0", "PMI_SIZE": "2"},  # left by something that is not hydra
    ],
)
def test_no_launcher_means_a_single_process(env):
    assert _launch.detect(env) == _launch.Place(rank=0, size=1)
    place = _launch.detect(env).completed()
    assert (place.local_rank, place.local_size, place.cross_rank, place.cross_size) == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0"}, "RANK=0 is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set but RANK is not"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 must be an integer from 0 to 3"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK=-1 must be an integer from 0 to 3"),
        ({"RANK": "x", "WORLD_SIZE": "4"}, "RANK='x' must be an integer from 0 to 3"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0 must be an integer, at least 1"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2 must be an integer from 0 to 1"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "5"}, "OMPI_COMM_WORLD_LOCAL_SIZE=5 must be an integer from 1 to 4"),
    ],
)
def test_variables_that_make_no_sense(env, message):
    with pytest.raises(ValueError, match=message):
        _launch.detect(env)


def test_children_do_not_inherit_a_launcher():
    env = TORCHRUN | OPEN_MPI | MPICH | SRUN | {"MASTER_ADDR": "a", "MASTER_PORT": "1", "HOME": "here"}
    assert _launch.detect(_launch.without_launcher(env)).launcher is None
    assert _launch.without_launcher(env)["HOME"] == "here"


# fusewire run


def command(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "fusewire", *arguments], capture_output=True, text=True, timeout=120, **options
    )


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "train_it.py"
    file.write_text(
        textwrap.dedent("""
        import os, sys
        print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {sys.argv[1:]}", flush=True)
        if "fail" in sys.argv:
            sys.exit(7)
        """)
    )
    return file


@pytest.mark.parametrize("form", ["script", "dashes", "module"])
def test_fusewire_run_starts_the_script_on_every_rank(script, form):
    arguments = {"script": [str(script)], "dashes": ["--", str(script)], "module": ["-m", script.stem]}[form]
    done = command("run", "-n", "2", *arguments, "-n", "5", "--lr=1", cwd=script.parent)
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert lines == [f"rank {rank} of 2: ['-n', '5', '--lr=1']" for rank in range(2)]
    assert "OMP_NUM_THREADS=" in done.stderr


def test_fusewire_run_fails_when_a_rank_fails(script):
    assert command("run", "-n", "2", str(script), "fail").returncode != 0


def test_the_command_line_says_what_is_wrong():
    assert "must be at least 1" in command("run", "-n", "0", "x.py").stderr
    assert command("run", "x.py").returncode == 2
    assert "run" in command("--help").stdout
    assert command("--version").stdout.startswith("fusewire 0.")


# fusewire.run


def test_results_come_in_rank_order_and_functions_travel_by_value():
    factor = 10
    assert run(lambda base: base + factor * int(os.environ["RANK"]), n=3, args=(5,)) == [5, 15, 25]
    assert run(lambda *, word: word, n=1, kwargs={"word": "x"}) == ["x"]


def test_ranks_get_the_variables_of_a_launcher_and_of_the_caller():
    names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "FLAVOUR")
    got = run(lambda: [os.environ[name] for name in names], n=2, env={"FLAVOUR": "plum"})
    assert got == [["2", "0", "2", "plum"], ["2", "1", "2", "plum"]]


def test_large_results_and_tensors():
    import torch

    got = run(lambda: torch.full((3_000_000,), float(os.environ["RANK"])), n=2)
    assert [tensor.numel() for tensor in got] == [3_000_000] * 2
    assert torch.equal(got[1], torch.ones(3_000_000))


def test_the_users_own_process_group_works_below_run():
    def work():
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        dist.destroy_process_group()
        return total.item()

    assert run(work, n=2) == [3.0, 3.0]


def fail_on(rank, action):
    """A function for `run`: `rank` does `action`, the others wait for ever."""

    def work():
        if int(os.environ["RANK"]) == rank:
            action()
        time.sleep(600)

    return work


def test_a_ranks_exception_is_raised_with_rank_and_traceback():
    def action():
        raise LookupError("no such animal")

    start = time.monotonic()
    with pytest.raises(LookupError, match="no such animal") as caught:
        run(fail_on(1, action), n=2)
    assert time.monotonic() - start < 60
    assert caught.value.fusewire_rank == 1
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "on rank 1 of 2" in str(caught.value.__cause__)
    assert "in action" in str(caught.value.__cause__)


def test_the_failure_that_caused_the_others_is_the_one_raised():
    def work():
        if int(os.environ["RANK"]) == 0:
            raise PeerLostError("rank 1 has left")  # first in time, but only a consequence
        time.sleep(1)
        raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause") as caught:
        run(work, n=2)
    assert caught.value.fusewire_rank == 1


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(one)


def test_an_exception_that_cannot_travel_becomes_its_text():
    def action():
        raise Unpicklable("so sorry", 2)

    with pytest.raises(RuntimeError, match=r"rank 0 of 2 raised .*Unpicklable: so sorry"):
        run(fail_on(0, action), n=2)


@pytest.mark.parametrize(
    ("action", "kind", "message"),
    [
        (lambda: os._exit(3), PeerLostError, "rank 1 of 2 ended with exit code 3 before"),
        (lambda: os._exit(0), PeerLostError, "rank 1 of 2 ended with exit code 0 before"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), PeerLostError, "rank 1 of 2 was killed by SIGKILL"),
        (lambda: sys.exit(0), RuntimeError, "rank 1 of 2 raised SystemExit: 0"),
    ],
)
def test_a_rank_that_dies_is_an_error(action, kind, message):
    with pytest.raises(kind, match=message):
        run(fail_on(1, action), n=2)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids, seconds=10):
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


def test_timeout_names_the_late_ranks_and_leaves_no_process(tmp_path):
    def work():
        rank = int(os.environ["RANK"])
        if rank == 1:
            worker = os.fork()  # as a DataLoader does
            (tmp_path / f"{os.getpid()}").touch()
            if worker:
                (tmp_path / f"{worker}").touch()
            time.sleep(600)

    with pytest.raises(TimeoutError, match="rank 1 of 2 had not finished after 12 s"):
        run(work, n=2, timeout=12)
    pids = [int(file.name) for file in tmp_path.iterdir()]
    assert len(pids) == 2
    assert gone(pids)


def test_ranks_do_not_outlive_a_killed_caller(tmp_path):
    caller = textwrap.dedent(f"""
        import os, pathlib, time
        from fusewire._run import run
        def work():
            pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()
            time.sleep(600)
        run(work, n=2)
        """)
    process = subprocess.Popen([sys.executable, "-c", caller])
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    pids = [int(file.name) for file in tmp_path.iterdir()]
    assert len(pids) == 2
    assert gone(pids)


PROGRAM = """
import json, os
from fusewire._run import run
class Own:
    pass
def work(own):
    return own, int(os.environ["RANK"])
print("begin", flush=True)
answers = run(work, n=2, args=(Own(),))
assert all(type(own) is Own for own, _ in answers)
print(json.dumps([rank for _, rank in answers]))
"""


@pytest.mark.parametrize("form", ["stdin", "-c", "script without a guard"])
def test_any_kind_of_main_works(tmp_path, form):
    file = tmp_path / "unguarded.py"
    file.write_text(PROGRAM)
    arguments = {"stdin": ["-"], "-c": ["-c", PROGRAM], "script without a guard": [str(file)]}[form]
    done = subprocess.run([sys.executable, *arguments], input=PROGRAM, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.split()[0], done.stdout.splitlines()[-1]
    assert (first, json.loads(last)) == ("begin", [0, 1])
    assert done.stdout.count("begin") == 1


def test_bad_arguments():
    with pytest.raises(ValueError, match="n=0 must be at least 1"):
        run(print, n=0)
