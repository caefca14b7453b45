"""How ranks meet: real processes under every kind of launcher, and the protocol itself on threads."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from fusewire import _jobfile, _launch, _rendezvous
from fusewire.errors import PeerLostError

RANK = textwrap.dedent("""
    import json, os, sys
    from fusewire._rendezvous import rendezvous

    def meet():
        met = rendezvous()
        if met.rank == 0:
            met.publish("address", os.environ.get("SECRET", "secret"))
        address, secret = met.lookup()
        met.complete()
        return {"rank": met.rank, "size": met.size, "local": [met.local_rank, met.local_size],
                "launcher": met.launcher, "generation": met.generation, "secret": secret}
    """)
MEET_TWICE = RANK + "print(json.dumps([meet(), meet()]), flush=True)\n"


def launch(program, environments, wrapper=(), timeout=120):
    """Starts one process per environment; what each printed as JSON, or its error text."""
    base = _launch.without_launcher(os.environ) | {"FUSEWIRE_START_TIMEOUT": "60"}
    processes = [
        subprocess.Popen(
            [*wrapper, sys.executable, "-c", program],
            env=base | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for env in environments
    ]
    answers = []
    for process in processes:
        out, err = process.communicate(timeout=timeout)
        answers.append(json.loads(out.splitlines()[-1]) if process.returncode == 0 else err)
    return answers


def open_mpi(rank, size, folder):
    facts = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    env = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in facts.items()}
    return env | {"PMIX_NAMESPACE": "1234", "TMPDIR": str(folder)}


def hydra(rank, size, folder):
    env = {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": size, "PMI_FD": 6 + rank}
    return {name: str(value) for name, value in env.items()} | {"TMPDIR": str(folder)}


def srun(rank, size, folder):
    env = {"JOB_ID": 7, "STEP_ID": 0, "PROCID": rank, "NTASKS": size, "LOCALID": rank, "STEP_TASKS_PER_NODE": size}
    return {f"SLURM_{name}": str(value) for name, value in env.items()} | {"TMPDIR": str(folder)}


def free_port():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port


def rank_and_size(rank, size, port):
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


# Real processes


@pytest.mark.parametrize(("variables", "size"), [(open_mpi, 3), (hydra, 2), (srun, 2)])
def test_a_launcher_without_an_address(variables, size, tmp_path):
    wrapper = ("sh", "-c", '"$@"; exit $?', "wrapper")  # a shell between the launcher (this process) and the rank
    answers = launch(MEET_TWICE, [variables(rank, size, tmp_path) for rank in range(size)], wrapper)
    for rank, answer in enumerate(answers):
        assert isinstance(answer, list), answer
        for generation, met in enumerate(answer, 1):
            assert (met["rank"], met["size"], met["local"]) == (rank, size, [rank, size])
            assert (met["generation"], met["secret"]) == (generation, "secret")
    folder = tmp_path / f"fusewire-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.iterdir()) == []  # removed once all were in


def test_jobs_of_two_launchers_do_not_meet(tmp_path):
    """The same launcher's variables, job id included, from two launcher processes."""
    launcher = textwrap.dedent(f"""
        import subprocess, sys
        ranks = [subprocess.Popen([sys.executable, "-c", {MEET_TWICE!r}], env=env) for env in eval(sys.argv[1])]
        sys.exit(any([rank.wait() for rank in ranks]))
        """)
    base = _launch.without_launcher(os.environ)
    jobs = []
    for secret in ("red", "blue"):
        environments = [base | open_mpi(rank, 2, tmp_path) | {"SECRET": secret} for rank in range(2)]
        command = [sys.executable, "-c", launcher, repr(environments)]
        jobs.append((secret, subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
    for secret, job in jobs:
        out, _ = job.communicate(timeout=120)
        assert job.returncode == 0
        met = [entry for line in out.splitlines() for entry in json.loads(line)]
        assert [entry["secret"] for entry in met] == [secret] * 4


def test_variables_set_by_hand_meet_at_the_address():
    port = free_port()
    answers = launch(MEET_TWICE, [rank_and_size(rank, 2, port) for rank in range(2)])
    assert [[met["generation"] for met in answer] for answer in answers] == [[1, 2], [1, 2]]


USERS_GROUP = """
import torch, torch.distributed as dist

def users_group():
    dist.init_process_group("gloo", init_method="env://")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    return total.item()

before = sys.argv[1] == "before" if len(sys.argv) > 1 else bool(os.environ["BEFORE"])
answer = [users_group(), meet()] if before else [meet(), users_group()][::-1]
dist.destroy_process_group()
answer.append(meet())
print(json.dumps(answer), flush=True)
"""


@pytest.mark.parametrize("before", ["before", ""])
@pytest.mark.parametrize("launcher", ["torchrun", "by hand"])
def test_the_users_own_process_group(before, launcher, tmp_path):
    """init_process_group("env://") before or after us, where the agent serves the store and where rank 0 does."""
    if launcher == "by hand":
        port = free_port()
        env = [rank_and_size(rank, 2, port) | {"BEFORE": before} for rank in range(2)]
        answers = launch(RANK + USERS_GROUP, env)
    else:
        answers = torchrun(RANK + USERS_GROUP, tmp_path, env={"BEFORE": before})
    for total, met, again in answers:
        assert total == 3.0
        assert met["size"] == 2
        assert [met["generation"], again["generation"]] == [1, 2]


def torchrun(program, folder, *options, env=()):
    """Two ranks under the real torchrun; what they printed as JSON, one line each."""
    script = folder / "script.py"
    script.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options, script]
    base = _launch.without_launcher(os.environ) | {"OMP_NUM_THREADS": "1", "FUSEWIRE_START_TIMEOUT": "60"}
    done = subprocess.run(command, env=base | dict(env), capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("[", "{"))]


def test_a_restarted_job_meets_on_fresh_keys(tmp_path):
    program = RANK + textwrap.dedent("""
        met = meet()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            sys.exit(1)
        print(json.dumps(met), flush=True)
        """)
    answers = torchrun(program, tmp_path, "--max-restarts=1")
    assert sorted(met["rank"] for met in answers) == [0, 1]
    assert [met["launcher"] for met in answers] == ["torchrun"] * 2


def test_an_initialised_default_group_is_the_job(tmp_path):
    """It wins over variables that say something else, and needs none."""
    program = RANK + textwrap.dedent("""
        import torch.distributed as dist
        rank = int(os.environ["MY_RANK"])
        dist.init_process_group("gloo", init_method="file://" + os.environ["FILE"], rank=rank, world_size=2)
        print(json.dumps(meet()), flush=True)
        """)
    common = {"FILE": str(tmp_path / "store"), "WORLD_SIZE": "5"}
    environments = [common | {"MY_RANK": str(rank), "RANK": str(3 + rank)} for rank in range(2)]
    answers = launch(program, environments)
    assert [(met["rank"], met["size"], met["local"]) for met in answers] == [(0, 2, [0, 2]), (1, 2, [1, 2])]


@pytest.mark.parametrize(
    ("rank", "missing"), [(0, "rank 1 of 2 did not call"), (1, "rank 0, which opens that address")]
)
def test_a_launcher_whose_ranks_do_not_come(rank, missing):
    env = rank_and_size(rank, 2, free_port()) | {"FUSEWIRE_START_TIMEOUT": "1.5"}
    (error,) = launch(MEET_TWICE, [env])
    assert missing in error
    assert "within 1.5 s" in error
    assert "frame #" not in error  # no C++ stack of somebody else's


def test_no_launcher_needs_no_store():
    (answer,) = launch(RANK + "met = rendezvous(); print(json.dumps([met.rank, met.size, met.store]))", [{}])
    assert answer == [0, 1, None]


def mpirun_command():
    found = shutil.which("mpirun")
    return [found, "--allow-run-as-root", "--oversubscribe", "-n", "2"] if found else None


@pytest.mark.skipif(mpirun_command() is None, reason="no mpirun here; its variables are tested above")
def test_the_real_open_mpi(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(MEET_TWICE)
    done = subprocess.run([*mpirun_command(), sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    met = [entry for line in done.stdout.splitlines() for entry in json.loads(line)]
    assert sorted((entry["rank"], entry["generation"]) for entry in met) == [(0, 1), (0, 2), (1, 1), (1, 2)]


# The protocol, on threads


def meet_on_threads(present, size, limit, hosts=None, monkeypatch=None):
    """What each present rank's _meet did: None, or the error it raised."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    outcomes = {}
    if hosts is not None:
        monkeypatch.setattr(_rendezvous, "_host", lambda: hosts[int(threading.current_thread().name)])

    def rank_main(rank):
        met = _rendezvous.Rendezvous(
            rank, size, rank, size, 0, 1, "torchrun", 1, store=store, deadline=time.monotonic() + limit
        )
        try:
            _rendezvous._meet(met, limit)
            outcomes[rank] = None
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,), name=str(rank)) for rank in present]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    return outcomes


def test_all_present():
    assert meet_on_threads(range(5), 5, 20) == dict.fromkeys(range(5))


@pytest.mark.parametrize(
    ("present", "size", "names"),
    [
        ([0, 2], 4, "ranks 1, 3 of 4"),
        ([0, 1, 2], 4, "rank 3 of 4"),
        ([0], 5, "ranks 1-4 of 5"),
        ([0, 4], 6, "ranks 1-3, 5"),
    ],
)
def test_every_present_rank_names_the_missing_ones(present, size, names):
    outcomes = meet_on_threads(present, size, 0.3)
    texts = {str(error) for error in outcomes.values()}
    assert len(outcomes) == len(present)
    assert len(texts) == 1
    assert names in texts.pop()
    assert all(isinstance(error, PeerLostError) for error in outcomes.values())
    absent = [rank for rank in range(size) if rank not in present]
    assert all(error.ranks == absent for error in outcomes.values())
    assert all(error.rank == (absent[0] if len(absent) == 1 else None) for error in outcomes.values())


def test_without_the_root_the_others_look_for_themselves(monkeypatch):
    monkeypatch.setattr(_rendezvous, "_LINGER", 0.3)
    outcomes = meet_on_threads([1, 2], 4, 0.2)
    assert all("ranks 0, 3 of 4 did not call" in str(error) for error in outcomes.values())
    assert len(outcomes) == 2


def host(name="a", **changes):
    return {"name": name, "boot": "1", "network": "n", "ipc": "i"} | changes


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ([host("a"), host("a"), host("b")], "on 2: a: ranks 0-1; b: rank 2"),
        ([host("a"), host("a", network="m")], "another container or namespace"),
        ([host("a"), host("a", boot="2")], "on 2"),
    ],
)
def test_ranks_on_several_hosts_are_told_so(hosts, names, monkeypatch):
    outcomes = meet_on_threads(range(len(hosts)), len(hosts), 20, hosts, monkeypatch)
    assert len(outcomes) == len(hosts)
    assert all(names in str(error) for error in outcomes.values())


def test_a_root_that_cannot_listen_tells_the_others():
    class Core:
        @staticmethod
        def listen_unix(size, secret):
            raise OSError("no sockets left")

    store = dist.HashStore()
    ranks = [
        _rendezvous.Rendezvous(r, 2, r, 2, 0, 1, "x", 1, store=store, deadline=time.monotonic() + 5) for r in (0, 1)
    ]
    with pytest.raises(OSError, match="no sockets left"):
        ranks[0].connect(Core, {})
    with pytest.raises(RuntimeError, match="rank 0 could not start: no sockets left"):
        ranks[1].connect(Core, {})


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan", ""])
def test_a_bad_start_timeout(text, monkeypatch):
    monkeypatch.setenv("FUSEWIRE_START_TIMEOUT", text)
    with pytest.raises(ValueError, match=f"FUSEWIRE_START_TIMEOUT={text!r} must be a number of seconds greater than 0"):
        _rendezvous.start_timeout()
    assert _rendezvous.start_timeout(3) == 3


@pytest.mark.parametrize(("here", "missing"), [("MASTER_ADDR", "MASTER_PORT"), ("MASTER_PORT", "MASTER_ADDR")])
def test_half_an_address(here, missing):
    (error,) = launch(MEET_TWICE, [{"RANK": "0", "WORLD_SIZE": "2", here: "1"}])
    assert f"ValueError: {here}=1 is set but {missing} is not" in error


# The file


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"fusewire-{os.getuid()}"


def place():
    return _launch.detect(open_mpi(0, 2, "unused"))


def test_the_file_is_private_and_each_generation_has_its_own(folder):
    first, again, second = (_jobfile.path(place(), generation, {}) for generation in (1, 1, 2))
    assert first == again != second
    assert first.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_files_of_dead_jobs_are_removed_and_others_stay(folder):
    ours = _jobfile.path(place(), 1, {})
    parts = ours.name.split("-")
    dead = ours.with_name("-".join(parts[:3] + [str(int(parts[3]) + 1)] + parts[4:]))  # the pid lives, started later
    no_process = ours.with_name("-".join(parts[:2] + ["4194999"] + parts[3:]))
    elsewhere = ours.with_name("-".join(["0" * 16] + parts[1:2] + ["4194999"] + parts[3:]))  # another machine's
    foreign = folder / "notes.txt"
    for file in (dead, no_process, elsewhere, foreign):
        file.touch()
    _jobfile.path(place(), 2, {})
    assert {file.name for file in folder.iterdir()} >= {ours.name, elsewhere.name, "notes.txt"}
    assert not dead.exists()
    assert not no_process.exists()


def test_a_folder_that_is_a_link_is_refused(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="must be a folder of yours"):
        _jobfile.path(place(), 1, {})


def test_a_folder_open_to_others_is_refused(folder):
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="must have mode 700, but has 755"):
        _jobfile.path(place(), 1, {})


def test_a_file_that_is_a_link_is_refused(folder, tmp_path):
    file = _jobfile.path(place(), 1, {})
    file.unlink()
    file.symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic link"):
        _jobfile.path(place(), 1, {})
    assert not (tmp_path / "target").exists()


def test_a_file_of_somebody_else_is_refused(folder, monkeypatch):
    _jobfile.path(place(), 1, {})
    real = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: real + 1)
    folder.rename(folder.with_name(f"fusewire-{real + 1}"))
    with pytest.raises(PermissionError, match=f"must be yours, but belongs to uid {real}"):
        _jobfile.path(place(), 1, {})
