"""The data plane over MPI as users start it: by mpirun, beside mpi4py, with ranks that die."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import mpi_ranks
import pytest
from rank_helpers import ranks

import fusewire as fw
from fusewire import _launch

ROOT = Path(__file__).parent.parent.parent
FACTS = fw._core.mpi_facts()
OPEN_MPI = shutil.which("mpirun.openmpi") or shutil.which("mpirun")
OPTIONS = ["--allow-run-as-root", "--oversubscribe"]

needs_mpi = pytest.mark.skipif(
    bool(FACTS["problem"]) or "Open MPI" not in FACTS["library"] or OPEN_MPI is None,
    reason="Fusewire was built without Open MPI, or there is no mpirun",
)
over_mpi = pytest.mark.skipif(not mpi_ranks.COMMAND, reason="only where mpirun starts the ranks (./dev test --mpi)")


def start(tmp_path, script, size=2, options=(), **environment):
    file = tmp_path / "script.py"
    file.write_text(script)
    env = _launch.without_launcher(os.environ) | {"FUSEWIRE_BACKEND": "mpi", "FUSEWIRE_LOG_LEVEL": "warning"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [OPEN_MPI, *OPTIONS, *options, "-n", str(size), sys.executable, str(file)]
    return subprocess.Popen(
        command,
        env=env | environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(tmp_path, script, size=2, **keywords):
    process = start(tmp_path, script, size, **keywords)
    try:
        output, errors = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, output, errors


SUM = """
import torch
import fusewire as fw
fw.init()
assert fw.mpi_enabled() and fw.mpi_built() and fw.mpi_threads_supported()
x = fw.allreduce(torch.full((100_000,), float(fw.rank() + 1)), op=fw.Sum, name="x")
assert x.unique().tolist() == [fw.size() * (fw.size() + 1) / 2]
"""


@needs_mpi
def test_a_plain_job_ends_cleanly(tmp_path):
    """MPI_Finalize is called, or mpirun would complain and fail the job."""
    code, _, errors = run(tmp_path, SUM, 3)
    assert (code, errors) == (0, "")


@needs_mpi
def test_init_again(tmp_path):
    script = SUM + "fw.shutdown()\nassert not fw.mpi_enabled()\n" + SUM
    code, _, errors = run(tmp_path, script)
    assert (code, errors) == (0, "")


@needs_mpi
@pytest.mark.parametrize("order", ["before", "after"])
def test_mpi4py_and_fusewire_share_mpi(tmp_path, order):
    pytest.importorskip("mpi4py")
    theirs = "from mpi4py import MPI\nassert MPI.COMM_WORLD.allreduce(1) == 2\n"
    script = theirs + SUM if order == "before" else SUM + theirs
    script += "fw.shutdown()\nassert not MPI.Is_finalized()\nassert MPI.COMM_WORLD.allreduce(2) == 4\n"
    code, _, errors = run(tmp_path, script)
    assert (code, errors) == (0, "")


@needs_mpi
def test_an_mpi_for_its_main_thread_alone_is_refused(tmp_path):
    pytest.importorskip("mpi4py")
    script = """
import mpi4py
mpi4py.rc.thread_level = "funneled"
from mpi4py import MPI
if MPI.Query_thread() != MPI.THREAD_FUNNELED:
    raise SystemExit("this MPI gives more than it was asked for")
import fusewire as fw
try:
    fw.init()
except ValueError as error:
    assert "MPI_THREAD_FUNNELED" in str(error), error
else:
    raise AssertionError("init() worked")
"""
    code, _, errors = run(tmp_path, script)
    if "gives more" in errors:
        pytest.skip("this MPI gives a higher thread level than it was asked for")
    assert code == 0, errors


@needs_mpi
def test_a_killed_rank_is_a_lost_peer(tmp_path):
    """In the middle of a large allreduce. mpirun is told to let the others live."""
    script = """
import os, signal, sys, threading, time
import torch
import fusewire as fw
fw.init()
x = torch.ones(4_000_000)
fw.allreduce_(x, name="warm")
if fw.rank() == 1:
    print(os.getpid(), flush=True)
    signal.pause()
begin = time.monotonic()
try:
    while True:
        fw.allreduce_(x, name="x")
except fw.PeerLostError as error:
    took = time.monotonic() - begin
    open(f"lost-{fw.rank()}", "w").write(f"{error.rank} {error}")
os._exit(0)
"""
    process = start(tmp_path, script, 3, options=["--enable-recovery"])
    try:
        pid = int(process.stdout.readline())
        os.kill(pid, signal.SIGKILL)
        found = [tmp_path / "lost-0", tmp_path / "lost-2"]
        deadline = time.monotonic() + 60
        while not all(f.exists() and f.read_text() for f in found):
            assert time.monotonic() < deadline, "the others did not raise"
            time.sleep(0.05)
        for file in found:
            assert file.read_text().startswith("1 "), file.read_text()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@needs_mpi
def test_ranks_that_mpirun_did_not_start_are_told_so(tmp_path):
    file = tmp_path / "script.py"
    file.write_text("import fusewire as fw\nfw.init()\n")
    env = _launch.without_launcher(os.environ) | {"FUSEWIRE_BACKEND": "mpi", "PYTHONPATH": str(ROOT / "python")}
    command = [sys.executable, "-m", "fusewire", "run", "-n", "2", str(file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "MPI sees 1 rank(s), Fusewire 2" in done.stderr, done.stderr


@needs_mpi
def test_a_job_of_one_rank_needs_no_mpi(tmp_path):
    script = (
        "import fusewire as fw\nfw.init()\nassert not fw.mpi_enabled()\nassert not fw._core.mpi_facts()['started']\n"
    )
    file = tmp_path / "script.py"
    file.write_text(script)
    env = _launch.without_launcher(os.environ) | {"FUSEWIRE_BACKEND": "mpi", "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run([sys.executable, str(file)], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_missing_module_is_an_error_that_says_so(tmp_path):
    script = """
import fusewire as fw
assert fw.mpi_built() is False and "no-module.so" in fw._core.mpi_facts()["problem"]
"""
    env = os.environ | {"FUSEWIRE_MPI_MODULE": str(tmp_path / "no-module.so"), "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    shown = subprocess.run([sys.executable, "-m", "fusewire", "info"], env=env, capture_output=True, text=True)
    assert "no-module.so" in shown.stdout.replace("\n", "")


@over_mpi
@ranks(2)
def test_the_suite_really_runs_over_mpi():
    assert fw.mpi_enabled()
    assert fw._core.get_default_engine().data_plane == "mpi"
    assert fw.mpi_threads_supported()


@needs_mpi
def test_the_benchmark_measures_both(tmp_path):
    pytest.importorskip("mpi4py")
    results = tmp_path / "results.json"
    env = _launch.without_launcher(os.environ) | {"PYTHONPATH": str(ROOT / "python")}
    script = ROOT / "benchmarks" / "mpi_backend.py"
    command = [OPEN_MPI, *OPTIONS, "-n", "2", sys.executable, str(script), "--sizes=1", "--rounds=3"]
    done = subprocess.run([*command, f"--output={results}"], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = json.loads(results.read_text())["rows"]
    assert {row["case"] for row in rows} == {"allreduce", "broadcast", "allgather"}
    assert all(row["fusewire_ms"] > 0 and row["mpi4py_ms"] > 0 for row in rows)
