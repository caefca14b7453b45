"""The build of the CUDA kernels: what is recorded, what the extension holds, and the report on registers."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusewire import _build, _core, _info

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "cmake" / "ptxas_report.py"

LOG = """
[1/2] Building CUDA object CMakeFiles/fusewire_kernels_cuda.dir/csrc/kernels/cuda/x.cu.o
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5firstPf' for 'sm_80'
ptxas info    : Function properties for _Z5firstPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 192 bytes smem, 360 bytes cmem[0]
ptxas info    : Compile time = 1.000 ms
ptxas info    : Compiling entry function '_Z6secondPf' for 'sm_90'
ptxas info    : Function properties for _Z6secondPf
    {frame} bytes stack frame, {stores} bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
"""


def report():
    spec = importlib.util.spec_from_file_location("ptxas_report", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run_report(path):
    return subprocess.run([sys.executable, SCRIPT, path], capture_output=True, text=True, check=False)


def test_the_report_counts_registers_and_spills():
    first, second = report().parse(LOG.format(frame=8, stores=8))
    assert (first.kernel, first.architecture) == ("_Z5firstPf", "sm_80")
    assert (first.registers, first.shared, first.stack, first.spilled) == (40, 192, 0, 0)
    assert (second.registers, second.stack, second.spilled) == (255, 8, 28)
    assert (first.warps(), second.warps()) == (48, 8)


def test_spills_fail_the_report_and_are_named(tmp_path):
    log = tmp_path / "log"
    log.write_text(LOG.format(frame=8, stores=8))
    done = run_report(log)
    assert done.returncode == 1
    assert "2 kernels, 1 of them with spilled registers" in done.stdout
    assert "spilled to memory by second" in done.stderr
    log.write_text(LOG.format(frame=0, stores=0).replace("20 bytes", "0 bytes"))
    assert run_report(log).returncode == 0


def test_a_log_without_kernels_is_no_success(tmp_path):
    log = tmp_path / "log"
    log.write_text("ninja: no work to do.\n")
    done = run_report(log)
    assert done.returncode == 1
    assert "names no kernel" in done.stderr


def test_the_record_says_what_the_extension_holds():
    built = _build.info()
    assert _core.has_cuda_kernels() == bool(built.cuda)
    assert bool(built.cuda) != bool(built.cuda_reason)


def test_info_says_which_architectures_or_why_not(monkeypatch):
    state, details = _info._cuda_kernels()
    built = _build.info()
    if built.cuda:
        assert state == _info.GOOD
        assert all(one in details for one in built.cuda.split(";"))
    else:
        assert state == _info.OFF
        assert built.cuda_reason in details
    monkeypatch.setattr(built, "cuda", "")
    monkeypatch.setattr(built, "cuda_reason", "no nvcc at all")
    assert _info._cuda_kernels() == (_info.OFF, "not compiled in: no nvcc at all")


@pytest.mark.skipif(not _core.has_cuda_kernels(), reason="built without nvcc")
def test_the_extension_needs_no_cuda_library():
    """It must load where there is no driver: neither libcuda nor a shared runtime among what it links."""
    direct = subprocess.run(["readelf", "-d", _core.__file__], capture_output=True, text=True, check=True).stdout
    assert not [line for line in direct.splitlines() if "NEEDED" in line and "cud" in line]


def test_the_extension_needs_no_symbol_of_torchs_cuda():
    """It must load beside a CPU-only torch: torch's streams and devices are reached through c10's own interfaces."""
    undefined = subprocess.run(
        ["nm", "-DC", "--undefined-only", _core.__file__], capture_output=True, text=True, check=True
    ).stdout
    assert "c10::" in undefined
    assert not [line for line in undefined.splitlines() if re.search(r"c10::cuda|at::cuda|\bcu[A-Z]|\bnccl", line)]


def test_why_cuda_tensors_cannot_be_served_is_known():
    obstacle = _core.cuda_obstacle()
    if not _core.has_cuda_kernels():
        assert "no CUDA kernels" in obstacle
    elif torch.version.cuda is None:
        assert "this torch has no CUDA" in obstacle
    else:
        assert obstacle == ""


def test_only_the_right_capsule_replaces_cuda():
    with pytest.raises(TypeError, match="a capsule named"):
        _core._set_cuda_api(importlib.import_module("datetime").datetime_CAPI)
